"""Agreement of replicas where somebody wrote to parameters between two steps.

A step writes the same on every rank. A forward that writes to its parameters, as torch.nn.Embedding's
max_norm makes it, goes by this rank's part of the batch, and replicas drift apart from there. Torch counts
writes, so a rank knows of its own. They may be harmless: weights are clamped, averages stand in for an
evaluation.

    rank 0   wrote    digest d0 of what it wrote to, and its complement ─┐
    rank 1   wrote    digest d1                      and its complement ─┤ or, with the map of used parameters
    rank 2   nothing  digest of nothing, and its complement              ─┘

A bit that is set both among digests and among complements is one in which two digests differ. Then the ranks
compare the parameters that any of them wrote to: one may have written what it took back.
cost     16 bytes more in a message that leaves anyhow; a pass over parameters that were written to, none else
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hpcpar.errors import OperationError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hpcpar.comm import Communicator

_DIGEST_NBYTES = 8

TOLD_NBYTES = 2 * _DIGEST_NBYTES

_AS_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_INSTEAD = (
    "Build the layer without max_norm, and after each optimizer.step() bring all rows to their norm on every "
    "rank: with torch.no_grad(): weight.copy_(torch.renorm(weight, 2, 0, max_norm))"
)


class Writes:
    """Writes to these parameters since the last step, as far as torch counts them: not those to `p.data`.

    comm        of ranks that all come to `require_same`; None: not all may (they have joined), and a rank
                that wrote nothing is not compared with one that did
    optimizer   whose learning rates and other numbers are compared, too
    """

    optimizer: Callable[[], Optimizer | None] = staticmethod(lambda: None)

    def __init__(
        self, names: Sequence[str], parameters: Sequence[Tensor], comm: Communicator | None = None
    ) -> None:
        self._comm = comm
        self._named = list(zip(names, parameters, strict=True))
        self._versions: list[int] = []
        self.next_step()

    def next_step(self) -> None:
        """Note that all writes so far are the same on all ranks: a step, or the initial values."""
        self._versions = [parameter._version for _, parameter in self._named]

    def digest(self) -> NDArray[np.uint8]:
        """Return this rank's digest and its complement, TOLD_NBYTES."""
        written = self._written()
        if not written and self._comm is None:
            return np.zeros(TOLD_NBYTES, dtype=np.uint8)
        text = "\n".join(
            [*(f"{name} {total}" for name, total in self._sums(written).items()), *self._options()]
        )
        digest = np.frombuffer(
            hashlib.blake2b(text.encode(), digest_size=_DIGEST_NBYTES).digest(), dtype=np.uint8
        )
        return np.concatenate([digest, ~digest])

    def require_same(self, told: NDArray[np.uint8]) -> None:
        """OperationError, on every rank, where two of them have told of different values."""
        digests, complements = told[:_DIGEST_NBYTES], told[_DIGEST_NBYTES:]
        if not (digests & complements).any():
            return
        names = self._written()
        if self._comm is not None:
            self._require_same_options(self._comm)
            writers = self._comm.allgather_object(names)
            anybodys = sorted(set().union(*writers))
            sums = self._comm.allgather_object(self._sums(anybodys))
            if all(theirs == sums[0] for theirs in sums):
                return
            names = [name for name in names if any(theirs[name] != sums[0][name] for theirs in sums)]
        mine = f"to {', '.join(names[:4])}{', …' if len(names) > 4 else ''} here" if names else "not here"
        raise OperationError(
            f"since the last step parameters were written to ({mine}), and ranks now have different values "
            "of them, so that the model is no longer one, as a layer does that writes to its weights in "
            f"forward by what is in the batch (max_norm). {_INSTEAD}. Whatever else writes to parameters "
            "must write the same on every rank, an optimizer too: with one learning rate"
        )

    def _require_same_options(self, comm: Communicator) -> None:
        """OperationError, on every rank, where one of them steps in another way."""
        told = comm.allgather_object(self._options())
        for rank, options in enumerate(told):
            if options != told[0]:
                pairs = zip(options, told[0], strict=False)
                one, other = next((pair for pair in pairs if pair[0] != pair[1]), ("more", "less"))
                raise OperationError(
                    f"rank {rank} of {comm.name!r} was to step with {one}, and rank 0 with {other}, so that "
                    "the model would no longer be one. Give schedulers the same on every rank: a loss that "
                    "ReduceLROnPlateau looks at is to be averaged over them before (comm.allreduce)"
                )

    def _options(self) -> list[str]:
        """Return all numbers in the optimizer's groups."""
        optimizer = self.optimizer()
        return [
            f"{key}={value:.6g}"
            for group in (optimizer.param_groups if optimizer is not None else ())
            for key, value in group.items()
            if isinstance(value, int | float)
        ]

    def _written(self) -> list[str]:
        return [
            name
            for (name, parameter), version in zip(self._named, self._versions, strict=True)
            if parameter._version != version
        ]

    def _sums(self, names: Sequence[str]) -> dict[str, int]:
        parameters = dict(self._named)
        return {name: int(sum_of_bits(parameters[name])) for name in names}


def refuse_renormalized(model: nn.Module) -> None:
    """OperationError for layers that write to their weights in forward by what is in the batch."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise OperationError(
                f"{name or 'the model'} is an {type(module).__name__} with max_norm={module.max_norm:g}, "
                "whose forward writes to the rows of its weight that are in this rank's part of the batch: "
                f"ranks would have different weights. {_INSTEAD}"
            )


def sum_of_bits(parameter: Tensor) -> Tensor:
    """The sum of its elements' bits as integers, modulo 2⁶⁴."""
    plain = parameter.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.contiguous().view(_AS_INTEGERS[plain.element_size()]).sum(dtype=torch.int64)
