"""Tied weights across stages: an embedding on one rank, and the output head that shares it on another.

    rank 0   embed_tokens.weight   gradient a ─┐
    rank 1                                     ├─ a + b on both, before the optimizer sees them
    rank 2   lm_head.weight        gradient b ─┘

Copies with equal initial values, gradients and updates stay equal to the last bit.
source   Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053; Narayanan et al. 2021, arXiv 2104.04473
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from hpcpar.autograd.checksum import checksum
from hpcpar.comm.agree import is_same_everywhere
from hpcpar.errors import MismatchError, OperationError
from hpcpar.parameter_info import info_of, note

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


class TiedWeights:
    """Copies of tied parameters on this rank, and the communicators of their holders. Collective over `comm`.

    comm         ranks of the pipeline
    parameters   this rank's copy by a name that all ranks use; None: no copy. A rank with several stages
                 passes one parameter, to which autograd adds the gradients of all of them
    holders      ranks with a copy, by name, in rising order
    comms        communicator of those ranks, by name, if this rank is one of several
    errors       MismatchError on every rank if names differ, or shapes or dtypes of copies
    """

    def __init__(self, comm: Communicator, parameters: Mapping[str, nn.Parameter | None]) -> None:
        with comm.together("tying weights"):
            if not isinstance(parameters, Mapping) or not all(
                own is None or isinstance(own, nn.Parameter) for own in parameters.values()
            ):
                raise OperationError(
                    f"tied weights: expected {{name: nn.Parameter, or None}}, found {parameters!r:.80}; give "
                    '{"embedding": embedding.weight} on a rank that has a copy, else {"embedding": None}'
                )
        self._rank = comm.rank
        self._own = {name: own for name, own in parameters.items() if own is not None}
        specs = {
            name: None if own is None else (tuple(own.shape), str(own.dtype))
            for name, own in parameters.items()
        }
        told = comm.allgather_object(specs)
        _require_alike(told)
        self.holders = {
            name: tuple(rank for rank, specs in enumerate(told) if specs[name] is not None) for name in specs
        }
        self.comms: dict[str, Communicator] = {}
        self._compared: set[str] = set()
        made: dict[tuple[int, ...], Communicator | None] = {}
        for name, holders in self.holders.items():
            if len(holders) < 2:
                continue
            if holders not in made:
                number = f".{len(made)}" if made else ""
                joins = 0 if comm.rank in holders else None
                made[holders] = comm.split(joins, name=f"{comm.name}-tied{number}")
            shared = made[holders]
            if shared is not None:
                self.comms[name] = shared
                # Without this note a DistributedOptimizer would average the copy before it is summed.
                note(self._own[name], is_copy=True, counts_elsewhere=holders[0] != self._rank)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sum the gradients of all copies, in place in each .grad. Collective over the holders.

        Call it once, after the last pass whose gradients a step of the optimizer takes, before they are
        clipped or used: a second call adds up sums. The first call compares the copies' values. A
        DistributedOptimizer defers the average of the parameters named by its `tied`, and refuses other
        copies; in stages 2 and 3 this waits for the averages, and sums the shards. A copy without a gradient
        counts as zeros; if no copy has one, none gets one.

        cost     2(n - 1)/n·S sent by each of n holders for S bytes, of the whole or of a shard: S for two;
                 and one byte of agreement, in the first call 32 more
        errors   MismatchError on every holder if some are frozen, and, in the first call, if the copies have
                 different values
        """
        for name, comm in self.comms.items():
            own = self._own[name]
            self._require_equal(name, own, comm)
            found = np.array([(own.grad is not None) | (2 << own.requires_grad)], dtype=np.uint8)
            told = comm.unchecked("agreement").allreduce(found, "or")[0]
            if told & 2 and told & 4:
                raise MismatchError(
                    f"{name} is frozen on some of ranks {', '.join(map(str, self.holders[name]))}, and its "
                    "copies on others would change alone: call requires_grad_() alike on all of them"
                )
            if not told & 1:
                continue
            if own.grad is None:
                own.grad = torch.zeros_like(own)
            # Of a gradient in shards, the part of this rank; the other holders have the same one.
            part = getattr(own.grad, "shard", own.grad)
            if part.is_sparse:
                own.grad = part = part.to_dense()
            flat = part.contiguous()
            comm.allreduce(flat)
            if flat is not part:
                part.copy_(flat)

    def _require_equal(self, name: str, own: nn.Parameter, comm: Communicator) -> None:
        if name in self._compared or info_of(own).sharding is not None:  # its values are not here
            return
        self._compared.add(name)
        if not is_same_everywhere(comm, f"{checksum(own)}"):
            raise MismatchError(
                f"copies of {name} on ranks {', '.join(map(str, self.holders[name]))} have different values, "
                "and would stay different: draw them from one seed, or broadcast one of them to the others "
                "before the first step"
            )

    def counts_here(self, parameter: nn.Parameter) -> bool:
        """True if this rank counts a parameter in norms and sums over the pipeline: of copies, the first."""
        for name, own in self._own.items():
            if own is parameter:
                return self.holders[name][0] == self._rank
        return True

    def free(self) -> None:
        """Free the communicators. Collective over their ranks."""
        for comm in dict.fromkeys(self.comms.values()):
            comm.free()
        self.comms = {}


def _require_alike(told: list[dict[str, tuple[tuple[int, ...], str] | None]]) -> None:
    names = list(told[0])
    for rank, specs in enumerate(told):
        if list(specs) != names:
            raise MismatchError(
                f"tied parameters: rank 0 names {', '.join(names) or 'none'}, rank {rank} "
                f"{', '.join(specs) or 'none'}; name the same on every rank, in the same order, and pass "
                "None for what a rank does not have"
            )
    for name in names:
        copies = {rank: specs[name] for rank, specs in enumerate(told) if specs[name] is not None}
        if len(set(copies.values())) > 1:
            listed = "; ".join(
                f"rank {rank} {' x '.join(map(str, form[0]))} {form[1]}"
                for rank, form in copies.items()
                if form
            )
            raise MismatchError(f"copies of {name} are of different forms: {listed}; build all of them alike")
