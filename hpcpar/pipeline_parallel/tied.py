"""Parameters of which several ranks of a pipeline hold a copy: an embedding, and the head that is tied to it.

    rank 0   embed_tokens.weight   gradient a ─┐
    rank 1                                     ├─ a + b on both, before the optimizer sees them
    rank 2   lm_head.weight        gradient b ─┘

Copies that begin with the same values, get the same gradients and are updated in the same way stay the same
to the last bit.
source   Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053; Narayanan et al. 2021, arXiv 2104.04473
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from hpcpar.errors import MismatchError
from hpcpar.parameter_info import note

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


class TiedWeights:
    """What one rank holds of them, and with whom.

    comm         the pipeline's ranks
    parameters   by a name that all ranks use, what this rank has of each tied parameter; None: nothing. A
                 rank that has it in several stages has one parameter, to which autograd adds all of theirs
    holders      by name, the ranks that have a copy, in rising order
    comms        by name, those ranks' communicator, where this rank is one of several
    collective   over `comm`
    errors       MismatchError on every rank when names differ, or copies' shapes or types do
    """

    def __init__(self, comm: Communicator, parameters: Mapping[str, nn.Parameter | None]) -> None:
        self._rank = comm.rank
        self._own = {name: own for name, own in parameters.items() if own is not None}
        forms = {
            name: None if own is None else (tuple(own.shape), str(own.dtype))
            for name, own in parameters.items()
        }
        told = comm.allgather_object(forms)
        _require_alike(told)
        self.holders = {
            name: tuple(rank for rank, forms in enumerate(told) if forms[name] is not None) for name in forms
        }
        self.comms: dict[str, Communicator] = {}
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
                # A DistributedOptimizer that is not told of it would average it too early.
                note(self._own[name], is_copy=True, counts_elsewhere=holders[0] != self._rank)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Leave in every copy's .grad the sum of all of them, in place. Collective over the holders.

        After the last action of a step, and before the optimizer averages over replicas or uses them: a
        DistributedOptimizer waits with those that are named by its `tied`, and refuses others. A copy without
        a gradient counts as zeros; where no copy has one, none gets one.

        cost   2(n - 1)/n·S sent by each of n holders for S bytes: S for two; and a byte, counted as
               agreement, for whether there are gradients
        """
        for name, comm in self.comms.items():
            own = self._own[name]
            found = np.array([own.grad is not None], dtype=np.uint8)
            if not comm.unchecked("agreement").allreduce(found, "or")[0]:
                continue
            if own.grad is None:
                own.grad = torch.zeros_like(own)
            flat = own.grad.contiguous()
            comm.allreduce(flat)
            if flat is not own.grad:
                own.grad.copy_(flat)
            # Transfers are not seen by torch, but an optimizer that was averaging it is to know.
            torch.autograd.graph.increment_version(own.grad)

    def counts_here(self, parameter: nn.Parameter) -> bool:
        """Whether this rank is the one that counts a parameter, in norms and in sums over the pipeline.

        Of copies the first holder's does; any other parameter is its rank's alone.
        """
        for name, own in self._own.items():
            if own is parameter:
                return self.holders[name][0] == self._rank
        return True

    def free(self) -> None:
        """Give the communicators back. Collective over their ranks."""
        for comm in dict.fromkeys(self.comms.values()):
            comm.free()
        self.comms = {}


def _require_alike(told: list[dict[str, tuple[tuple[int, ...], str] | None]]) -> None:
    names = list(told[0])
    for rank, forms in enumerate(told):
        if list(forms) != names:
            raise MismatchError(
                f"tied parameters: rank 0 names {', '.join(names) or 'none'}, rank {rank} "
                f"{', '.join(forms) or 'none'}; name the same on every rank, in the same order, and pass "
                "None for what a rank does not have"
            )
    for name in names:
        copies = {rank: forms[name] for rank, forms in enumerate(told) if forms[name] is not None}
        if len(set(copies.values())) > 1:
            listed = "; ".join(
                f"rank {rank} {' x '.join(map(str, form[0]))} {form[1]}"
                for rank, form in copies.items()
                if form
            )
            raise MismatchError(f"copies of {name} are of different forms: {listed}; build all of them alike")
