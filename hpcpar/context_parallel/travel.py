"""Keys and values on their way to the ranks whose queries need them, and their gradients on the way home.

Shape letters: B batch, K key-value heads, N tokens of some owner, D head size. Keys and values travel
together, as one tensor [2, B, K, N, D] for each owner; a rank's own stay where they are.

    for owner, theirs in travel.keys((keys, values)):   # this rank's own come first, while the others' travel
        …compute with them…
        travel.send_home(owner, gradients)         # in backward, of each but its own
    travel.add_at_home(own_gradients)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hpcpar.autograd import scratch
from hpcpar.context_parallel.block import KeysValues
from hpcpar.context_parallel.context_plan import ContextPlan, Move, Spans
from hpcpar.context_parallel.mask import Span
from hpcpar.partition import offsets

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

KEYS_TAG, GRADIENTS_TAG = 1, 2


class Travel(Protocol):
    """Movement of keys and of their gradients in one call of attention; every method is collective."""

    def tokens(self, owner: int) -> Spans:
        """Return the numbers of the owner's tokens whose keys come to this rank."""
        ...

    def keys(self, own: tuple[Tensor, Tensor]) -> Iterator[tuple[int, KeysValues]]:
        """Send this rank's keys and values; yield (owner, keys and values), its own first, in fixed order."""
        ...

    def send_home(self, owner: int, gradients: tuple[Tensor, Tensor]) -> None:
        """Send the gradients of what `keys` yielded for another owner, in the same order."""
        ...

    def add_at_home(self, gradients: tuple[Tensor, Tensor]) -> None:
        """Wait, and add all other ranks' gradients of this rank's keys and values to its own, in place."""
        ...


def number_in(spans: Spans, tokens: Span) -> Span:
    """Return where tokens with these numbers are in what `packed` returns; they lie in one of the spans."""
    before = offsets([span.length for span in spans])
    for span, first in zip(spans, before, strict=False):
        if span.start <= tokens.start and tokens.stop <= span.stop:
            return Span(first + tokens.start - span.start, first + tokens.stop - span.start)
    raise AssertionError(f"{tokens} are not all in {spans}")


class MessageBuffers:
    """Scratch memory for messages, on loan until all of it is given back.

    like   keys [B, K, any, D], or gradients of them
    """

    def __init__(self, comm: Communicator, like: Tensor, dtype: torch.dtype | None = None) -> None:
        self._comm, self._like = comm, like if dtype is None else like.new_empty(0, dtype=dtype)
        self._batch, self._heads, _, self._size = like.shape
        self._lent: list[tuple[tuple[int, int], scratch.ScratchBuffer]] = []

    def take(self, tokens: int, *, keep: bool = False) -> Tensor:
        """Return memory for the keys and values, or gradients, of so many tokens: [2, B, K, tokens, D].

        keep   not on loan
        """
        shape = (2, self._batch, self._heads, tokens, self._size)
        count = math.prod(shape)
        edges = (0, 1 << count.bit_length())  # few sizes serve the lengths of all masks
        buffer = None if keep else scratch.take(self._comm, "keys", edges, self._like)
        if buffer is None:
            return self._like.new_empty(shape)
        self._lent.append((edges, buffer))
        return buffer.whole[:count].view(shape)

    def packed(self, keys_values: KeysValues, spans: Spans) -> Tensor:
        """Return the keys and values of the tokens with these numbers, one after the other, on loan."""
        packed = self.take(sum(span.length for span in spans))
        for first, (start, stop) in zip(offsets([span.length for span in spans]), spans, strict=False):
            for into, each in zip(packed, keys_values, strict=True):
                into[..., first : first + stop - start, :] = each[..., start:stop, :]
        return packed

    def give_back(self) -> None:
        for edges, buffer in self._lent:
            scratch.give(self._comm, "keys", edges, buffer)
        self._lent.clear()


class MessageTravel:
    """Travel by the messages of a plan: ring, or exchange of what is needed.

    moves, returns   of all ranks, of keys and of gradients
    dtype            in which gradients travel
    keep             the keys that come are kept for backward
    """

    def __init__(
        self,
        comm: Communicator,
        plan: ContextPlan,
        moves: Sequence[Move],
        returns: Sequence[Move],
        dtype: torch.dtype,
        *,
        keep: bool,
    ) -> None:
        self._comm, self._dtype, self._keep = comm, dtype, keep
        self._own = (Span(0, plan.counts[comm.rank]),)
        rank = comm.rank
        self._incoming = [move for move in moves if move.receiver == rank]
        self._outgoing = [move for move in moves if move.sender == rank]
        self._onward = {move.owner: move for move in returns if move.sender == rank}
        self._back = [move for move in returns if move.receiver == rank]
        self._leaving: list[tuple[Any, MessageBuffers]] = []

    def tokens(self, owner: int) -> Spans:
        if owner == self._comm.rank:
            return self._own
        return next((move.tokens for move in self._incoming if move.owner == owner), ())

    def keys(self, own: tuple[Tensor, Tensor]) -> Iterator[tuple[int, KeysValues]]:
        steps = 1 + max((move.step for move in self._incoming), default=-1)
        buffers = MessageBuffers(self._comm, own[0])
        coming = self._post(0, buffers)
        leaving = self._pass_on(self._comm.rank, own, buffers)
        yield self._comm.rank, own
        for step in range(steps):
            following = self._post(step + 1, buffers)
            sent, leaving = leaving, []
            for move, handle, tensor in coming:
                handle.wait()
                leaving += self._pass_on(move.owner, tensor, buffers)
                yield move.owner, tensor
            for handle in sent:
                handle.wait()
            coming = following
        for handle in leaving:
            handle.wait()
        buffers.give_back()

    def send_home(self, owner: int, gradients: tuple[Tensor, Tensor]) -> None:
        for move in self._back:
            if move.owner == owner:
                self._receive(move, gradients, (Span(0, move.length),))
        buffers = MessageBuffers(self._comm, gradients[0], self._dtype)
        leaving = buffers.packed(gradients, (Span(0, gradients[0].shape[-2]),))
        handle = self._comm.start_send(leaving, self._onward[owner].receiver, GRADIENTS_TAG)
        self._leaving.append((handle, buffers))

    def add_at_home(self, gradients: tuple[Tensor, Tensor]) -> None:
        for move in self._back:
            if move.owner == self._comm.rank:
                self._receive(move, gradients, move.tokens)
        for handle, buffers in self._leaving:
            handle.wait()
            buffers.give_back()
        self._leaving.clear()

    def _post(self, step: int, buffers: MessageBuffers) -> list[tuple[Move, Any, Tensor]]:
        posted = []
        for move in self._incoming:
            if move.step == step:
                tensor = buffers.take(move.length, keep=self._keep)
                posted.append((move, self._comm.start_recv(tensor, move.sender, KEYS_TAG), tensor))
        return posted

    def _pass_on(self, owner: int, held: KeysValues, buffers: MessageBuffers) -> list[Any]:
        """Start to send what this rank holds of an owner to whom it is to have it next."""
        started, cut = [], {}
        for move in self._outgoing:
            if move.owner == owner:
                if move.tokens not in cut:
                    is_ready = isinstance(held, Tensor) and move.length == held.shape[-2]
                    cut[move.tokens] = held if is_ready else buffers.packed(held, move.tokens)
                started.append(self._comm.start_send(cut[move.tokens], move.receiver, KEYS_TAG))
        return started

    def _receive(self, move: Move, gradients: tuple[Tensor, Tensor], spans: Spans) -> None:
        """Receive gradients and add them to those that this rank has of the same tokens, in these spans."""
        buffers, first = MessageBuffers(self._comm, gradients[0], self._dtype), 0
        others = self._comm.recv(buffers.take(move.length), move.sender, GRADIENTS_TAG)
        for start, stop in spans:
            for own, theirs in zip(gradients, others, strict=True):
                own[..., start:stop, :] += theirs[..., first : first + stop - start, :]
            first += stop - start
        buffers.give_back()


class GatherTravel:
    """Travel by an all-gather of all keys, and a reduce-scatter of their gradients.

    source   Llama Team 2024, The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.2
    """

    def __init__(self, comm: Communicator, plan: ContextPlan, dtype: torch.dtype) -> None:
        self._comm, self._plan, self._dtype = comm, plan, dtype
        self._gradients: Tensor | None = None

    def tokens(self, owner: int) -> Spans:
        return (Span(0, self._plan.counts[owner]),)

    def keys(self, own: tuple[Tensor, Tensor]) -> Iterator[tuple[int, KeysValues]]:
        sizes = self._sizes(own[0])
        gathered = own[0].new_empty(sum(sizes))
        parts = self._parts(gathered, own[0])
        mine = torch.stack(own, out=parts[self._comm.rank])
        handle = self._comm.start_allgather(mine, counts=sizes, out=gathered)
        yield self._comm.rank, mine
        handle.wait()
        for owner, part in enumerate(parts):
            if owner != self._comm.rank:
                yield owner, part

    def send_home(self, owner: int, gradients: tuple[Tensor, Tensor]) -> None:
        for part, each in zip(self._all(gradients[0])[owner], gradients, strict=True):
            part.copy_(each)

    def add_at_home(self, gradients: tuple[Tensor, Tensor]) -> None:
        mine = self._all(gradients[0])[self._comm.rank]
        self.send_home(self._comm.rank, gradients)
        assert self._gradients is not None, "_all has made them"
        summed = self._comm.reduce_scatter(self._gradients, counts=self._sizes(gradients[0]))
        for own, part in zip(gradients, summed.view(mine.shape), strict=True):
            own.copy_(part)
        self._gradients = None

    def _all(self, like: Tensor) -> list[Tensor]:
        """Return room for the gradients of all owners' keys, zero where no query of this rank goes."""
        if self._gradients is None:
            self._gradients = like.new_zeros(sum(self._sizes(like)), dtype=self._dtype)
        return self._parts(self._gradients, like)

    def _sizes(self, like: Tensor) -> list[int]:
        rest = 2 * like.shape[0] * like.shape[1] * like.shape[3]
        return [count * rest for count in self._plan.counts]

    def _parts(self, flat: Tensor, like: Tensor) -> list[Tensor]:
        shapes = [(2, *like.shape[:2], count, like.shape[3]) for count in self._plan.counts]
        parts = torch.split(flat, self._sizes(like))
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
