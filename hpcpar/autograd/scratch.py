"""Scratch buffers that collectives of activations go through again and again.

A collective on memory that it has met before costs a few microseconds of preparation, on new memory a hundred
or more (two cores, ranks on one node). Activations are new memory each time; what has to be copied anyway is
copied through a scratch buffer, which stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hpcpar.units import MiB

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

LARGEST_NBYTES = 8 * MiB
"""Beyond, preparation does not count beside moving the data, and memory does."""


class ScratchBuffer:
    """Memory for one collective at a time.

    whole   all of it, flat
    own     this rank's part, between its edges; all of it where there are no parts
    """

    def __init__(self, edges: tuple[int, ...], rank: int, dtype: torch.dtype) -> None:
        # Also where it is made under inference_mode, others come to write to it.
        with torch.inference_mode(False):
            self.whole = torch.empty(edges[-1], dtype=dtype)
            self.own = self.whole if len(edges) == 2 else self.whole[edges[rank] : edges[rank + 1]]


Free = dict[tuple[str, tuple[int, ...], torch.dtype], list[ScratchBuffer]]

_FREE: WeakKeyDictionary[Communicator, Free] = WeakKeyDictionary()
"""By communicator, so that all ranks have a buffer each of the same kind for the same call."""


def take(
    comm: Communicator, purpose: str, edges: tuple[int, ...], like: Tensor, *, largest: int = LARGEST_NBYTES
) -> ScratchBuffer | None:
    """Take a free scratch buffer; None where it would not pay.

    edges   0, where each rank's part ends; or, without parts, 0 and the number of elements
    """
    if like.device.type != "cpu" or edges[-1] * like.element_size() > largest:
        return None
    free = _FREE.setdefault(comm, {}).setdefault((purpose, edges, like.dtype), [])
    return free.pop() if free else ScratchBuffer(edges, comm.rank, like.dtype)


def give(comm: Communicator, purpose: str, edges: tuple[int, ...], buffer: ScratchBuffer) -> None:
    """Give a scratch buffer back."""
    _FREE[comm][purpose, edges, buffer.whole.dtype].append(buffer)
