"""Negotiation: match requests by name over all ranks, without a coordinator.

Ranks may ask for the same operations in different orders. In a *round* every rank tells what it has newly
asked for, and all ranks keep the same book of it; what all of them have asked for is ready, and is done in
the same order everywhere.

    rank 0   asks a b            round 1: {a b}      nothing ready    round 2: {}    a b c are known, c
    rank 1   asks b, later a c   round 1: {b}        -> b             round 2: {a c} -> a; c waits for rank 0

Mostly all ranks bring the same requests. So a round first compares digests: one all-reduce of 33 bytes.
A bitwise AND of a number and of its complement keeps both exactly when all numbers are equal. Only when they
are not do the ranks send each other the requests themselves.

A rank that has joined (it has no more data) brings neutral bits, and is not waited for.

Pure: no communication happens here, so that all of it can be tested in one process.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

DIGEST_NBYTES = 16
_MASK = (1 << 8 * DIGEST_NBYTES) - 1
_STRIDE = 0x9E3779B97F4A7C15F39CC0605CEDC835
"""Odd constant whose multiples differ in most bits (2^128 divided by the golden ratio)."""
RECORD_NBYTES = 2 * DIGEST_NBYTES + 1

BATCHES_REMEMBERED = 16
"""Different sets of requests that come in turn: a step's gradients, then a loss, now and then a barrier."""

ROWS = ("allgather", "alltoall", "reducescatter")
"""Kinds that work on rows: on tensors with a first dimension."""
UNEVEN = ("allgather", "alltoall")
"""Kinds whose first dimension may differ from rank to rank."""
JOINABLE_OPS = ("sum", "average")
"""Reductions in which a rank without data can take part: with zeros."""


class TensorRequest(NamedTuple):
    """One rank's request, as far as the others must know it.

    name      the key by which ranks find each other: "allreduce.loss"
    shape     of this rank's tensor
    device    "CPU" or "GPU"
    op        of a reduction: sum, average, adasum, min, max, product
    root      of a broadcast, as a rank of the process set; else -1
    group     of grouped operations: the group's name and how many belong to it; they run together
    content   of what is no tensor: what must be the same on all ranks, in words
    serial    of an operation without a name of its own: its number, from 1, which the name ends with
    """

    name: str
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    device: str = "CPU"
    op: str = ""
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    group: tuple[str, int] | None = None
    content: str = ""
    serial: int = 0

    @property
    def digest(self) -> int:
        """Hash that two requests share when they fit each other."""
        if not self.serial:
            return _digest(self)
        # The same but for its number: one hash does for all of them. The number goes in by steps that do not
        # add up, because digests do: 1 and 4 must not look like 2 and 3, nor a 1, b 2 like b 1, a 2.
        plain = self._replace(name=self.name.partition("_")[2], group=None, serial=0)
        mixed = (_digest(plain) ^ self.serial * _STRIDE) & _MASK
        mixed = (mixed ^ mixed >> 61) * _STRIDE & _MASK
        return (mixed ^ mixed >> 67) * _STRIDE & _MASK


@lru_cache(maxsize=4096)
def _digest(request: TensorRequest) -> int:
    fitting = request._replace(shape=request.shape[1:]) if request.kind in UNEVEN else request
    told = repr((len(request.shape), *fitting))
    return int.from_bytes(hashlib.blake2b(told.encode(), digest_size=DIGEST_NBYTES).digest(), "little")


class ReadyRequest(NamedTuple):
    """An operation that all ranks have come to.

    request   as a rank with data asked for it
    error     why it cannot be done, naming the ranks; None: it can
    """

    request: TensorRequest
    error: str | None = None


class _Batch(NamedTuple):
    """Requests of one rank in one round, in its order: mostly the same in every step.

    record   what it brings to the round
    ready    what is ready if all ranks bring the same
    """

    requests: tuple[TensorRequest, ...]
    record: bytes
    ready: list[ReadyRequest]

    @classmethod
    def of(cls, requests: tuple[TensorRequest, ...]) -> _Batch:
        digest = sum(request.digest for request in requests) & _MASK
        both = digest | (_MASK ^ digest) << 8 * DIGEST_NBYTES
        in_order = sorted(requests, key=lambda request: request.name)
        ready = [ReadyRequest(request, shortcoming(request)) for request in in_order]
        return cls(requests, both.to_bytes(2 * DIGEST_NBYTES, "little") + b"\xff", ready)


@dataclass(frozen=True, slots=True)
class Proposal:
    """New requests of one rank, sent to the others when digests differ."""

    requests: tuple[TensorRequest, ...]
    joined: bool


class Asked(dict[int, TensorRequest]):
    """Requests of ranks under one name, the first of which was heard of at `since_s`."""

    def __init__(self) -> None:
        super().__init__()
        self.since_s = time.perf_counter()


class Negotiation:
    """One rank's copy of the table of requests, equal on all ranks.

    world_ranks   of each rank, its rank in the whole job, by which texts call it
    joined        ranks that have no more data
    heard         of operations that are not ready: which ranks have asked for what
    """

    def __init__(self, size: int, world_ranks: Sequence[int] | None = None) -> None:
        self._size = size
        self._world = tuple(range(size)) if world_ranks is None else tuple(world_ranks)
        self._new: dict[str, TensorRequest] = {}
        self._told: dict[str, TensorRequest] = {}
        self._last = _Batch.of(())
        self._batches: dict[tuple[TensorRequest, ...], _Batch] = {}
        self._record = b""
        self._is_joined = self._told_joined = False
        self.joined: set[int] = set()
        self.last_joined: int | None = None
        self.heard: dict[str, Asked] = {}

    @property
    def has_news(self) -> bool:
        """True while this rank has requests that no round has sent."""
        return bool(self._new)

    @property
    def unanswered(self) -> list[str]:
        """Operations that this rank has asked for, and has not heard of the others whether they do."""
        return [name for name in (*self._told, *self._new) if name not in self.heard]

    def ask(self, request: TensorRequest) -> None:
        """Add a request; its name must not be that of another that is not ready."""
        self._new[request.name] = request

    def join(self) -> None:
        """Mark this rank as having no more data."""
        self._is_joined = True

    def record(self) -> bytes:
        """Return this rank's part of the round's AND; later requests are for the next round."""
        self._told, self._new = self._new, {}
        self._told_joined = self._is_joined
        if self._is_joined:
            self._record = b"\xff" * (2 * DIGEST_NBYTES) + b"\x00"
            return self._record
        requests = tuple(self._told.values())
        if requests != self._last.requests:
            self._last = self._batches.get(requests) or self._remember(_Batch.of(requests))
        self._record = self._last.record
        return self._record

    def _remember(self, batch: _Batch) -> _Batch:
        """Keep a batch for the next step; the oldest is dropped."""
        if any(request.serial for request in batch.requests):  # a number never comes again
            return batch
        if len(self._batches) >= BATCHES_REMEMBERED:
            del self._batches[next(iter(self._batches))]
        return self._batches.setdefault(batch.requests, batch)

    def conclude(self, common: bytes) -> list[ReadyRequest] | None:
        """Return what is ready by the AND of all records; None if the ranks must tell each other more.

        It is this rank's own only if all are the same, and then it is so on every rank. A rank that asks for
        the same as not long ago is given the same list.
        """
        if common != self._record or self._told_joined:
            return None
        self._told = {}
        return self._last.ready

    def proposal(self) -> Proposal:
        """Return what this rank sends where digests differ."""
        return Proposal(tuple(self._told.values()), self._told_joined)

    def conclude_proposals(self, proposals: Sequence[Proposal]) -> list[ReadyRequest]:
        """Take in all ranks' proposals, in rank order; return what is ready."""
        self._told = {}
        for rank, told in enumerate(proposals):
            for request in told.requests:
                self.heard.setdefault(request.name, Asked())[rank] = request
            if told.joined and rank not in self.joined:
                self.joined.add(rank)
                self.last_joined = rank
        ready = self._contradictions()
        complete = sorted(name for name, asked in self.heard.items() if self._is_complete(asked))
        for name in self._whole_groups(complete):
            asked = self.heard.pop(name)
            request = asked[min(asked)]
            error = objection(asked, self._world) or shortcoming(request) or self._objection_to_join(asked)
            ready.append(ReadyRequest(request, error))
        return ready

    def _contradictions(self) -> list[ReadyRequest]:
        """Operations of one number, or one name, that are other ones or other groups on different ranks."""
        numbered: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for name, asked in self.heard.items():
            for rank, request in asked.items():
                own = request.group[0] if request.group is not None else name
                number = name.partition(".")[2].partition("_")[0] if request.serial else own
                numbered[number][rank].add(name)
        found = []
        for number, names_of in sorted(numbered.items()):
            if set.intersection(*names_of.values()) or not self._is_complete(names_of):
                continue
            names = sorted(set.union(*names_of.values()))
            first = {rank: self.heard[min(own)][rank]._replace(name=number) for rank, own in names_of.items()}
            error = objection(first, self._world)
            found += [ReadyRequest(next(iter(self.heard.pop(name).values())), error) for name in names]
        return found

    def end_join(self) -> int | None:
        """When all ranks have joined: the last one, and all begin anew; else None."""
        if len(self.joined) < self._size:
            return None
        last, self.last_joined = self.last_joined, None
        self.joined.clear()
        self._is_joined = False
        return last

    def missing(self, name: str) -> tuple[int, ...]:
        """Ranks that have not asked for an operation, as far as is known here."""
        asked = self.heard.get(name)
        if asked is None:
            return ()
        return tuple(rank for rank in range(self._size) if rank not in asked and rank not in self.joined)

    def _is_complete(self, asked: Mapping[int, object]) -> bool:
        return all(rank in asked or rank in self.joined for rank in range(self._size))

    def _whole_groups(self, names: Sequence[str]) -> list[str]:
        """Leave out members of groups that are not complete yet."""
        members: dict[tuple[str, int], int] = defaultdict(int)
        groups = {name: self._group_of(name) for name in names}
        for group in groups.values():
            if group is not None:
                members[group] += 1
        return [name for name in names if (group := groups[name]) is None or members[group] == group[1]]

    def _group_of(self, name: str) -> tuple[str, int] | None:
        """Return a request's group; None where ranks disagree, an error that must not wait for the group."""
        groups = {request.group for request in self.heard[name].values()}
        return groups.pop() if len(groups) == 1 else None

    def _objection_to_join(self, asked: Mapping[int, TensorRequest]) -> str | None:
        request = asked[min(asked)]
        gone = sorted(self.joined - asked.keys())
        if not gone or (request.kind == "allreduce" and request.op in JOINABLE_OPS):
            return None
        if request.kind in ("barrier", "schedule"):
            return None
        what = f"{request.kind}{f' with op {request.op}' if request.op else ''}"
        return (
            f"{request.name}: {what} was asked for while {_ranks(gone, self._world)} had joined, and has no "
            f"data to give; only all-reduces with Sum or Average go on after join()"
        )


def objection(asked: Mapping[int, TensorRequest], world_ranks: Sequence[int]) -> str | None:
    """Explain why requests of one name do not fit each other, naming the ranks; None if they do."""
    for what, of, said in _ASPECTS:
        sides: dict[Any, list[int]] = defaultdict(list)
        for rank, request in sorted(asked.items()):
            sides[of(request)].append(rank)
        if len(sides) > 1:
            name = next(iter(asked.values())).name
            words = ", but ".join(
                f"{_ranks(ranks, world_ranks)} {said.format(world_ranks[side] if of is _root else side)}"
                for side, ranks in sides.items()
            )
            return f"{name}: mismatched {what}: {words}. All ranks must ask for the same under one name."
    return None


def shortcoming(request: TensorRequest) -> str | None:
    """Explain why an operation is impossible although all ranks agree on it; None if it is possible."""
    if request.kind in ROWS and not request.shape:
        return (
            f"{request.name}: {request.kind} of a tensor without dimensions was asked for; it works on rows: "
            f"use tensor.reshape(1)"
        )
    return None


def _shape(request: TensorRequest) -> str:
    return "" if request.kind in UNEVEN else str(list(request.shape))


def _dimensions(request: TensorRequest) -> int:
    return len(request.shape) if request.kind in UNEVEN else 0


def _row_shape(request: TensorRequest) -> str:
    return str(list(request.shape[1:])) if request.kind in UNEVEN else ""


def _root(request: TensorRequest) -> int:
    return request.root


_ASPECTS: tuple[tuple[str, Callable[[TensorRequest], object], str], ...] = (
    ("operations", lambda request: request.kind, "asked for {}"),
    ("data types", lambda request: request.dtype, "sent {}"),
    ("tensor shapes", _shape, "sent a tensor of shape {}"),
    ("numbers of dimensions", _dimensions, "sent a tensor of {} dimensions"),
    ("tensor shapes after the first dimension", _row_shape, "sent {}"),
    ("root ranks", _root, "named root {}"),
    ("reduction operations", lambda request: request.op, "asked for {}"),
    ("prescale factors", lambda request: request.prescale, "gave {}"),
    ("postscale factors", lambda request: request.postscale, "gave {}"),
    ("devices", lambda request: request.device, "sent from {}"),
    ("groups", lambda request: f"a group of {request.group[1]}" if request.group else "no group", "named {}"),
    ("contents", lambda request: request.content, "brought {}"),
)


def _ranks(ranks: Sequence[int], world_ranks: Sequence[int]) -> str:
    names = [str(world_ranks[rank]) for rank in ranks]
    shown = ", ".join(names[:8]) + (f", … ({len(names)} in all)" if len(names) > 8 else "")
    return f"rank{'s' if len(names) > 1 else ''} {shown}"
