"""All ranks in one process, each a thread: for tests, and for trying things out without MPI."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hpcpar.errors import MismatchError, StallError
from hpcpar.transport.interface import Exchange, Natives, Octets, PreparedExchange, Transport
from hpcpar.units import as_timeout

T = TypeVar("T")


@dataclass
class _LoopbackMessage:
    """A posted send or receive; `done` once both have met and the bytes have been copied."""

    octets: Octets
    peer: int
    nbytes: int = 0
    done: bool = False


class _LoopbackExchange:
    """The messages of one exchange, posted by each `start`."""

    def __init__(
        self,
        transport: LoopbackTransport,
        sends: Sequence[tuple[Octets, int]],
        receives: Sequence[tuple[Octets, int]],
        tag: int,
    ) -> None:
        self._messages = (transport, sends, receives, tag)
        self.rewind()

    def rewind(self) -> None:
        self._receives: list[_LoopbackMessage] = []
        self._open: list[_LoopbackMessage] = []

    def start(self) -> None:
        transport, sends, receives, tag = self._messages
        posted_sends, self._receives = transport.post(sends, receives, tag)
        self._open = posted_sends + self._receives

    def free(self) -> None:
        """Nothing is held."""

    def test(self) -> bool:
        self._open = [message for message in self._open if not message.done]
        return not self._open

    def waiting_for(self) -> tuple[int, ...]:
        return tuple(sorted({message.peer for message in self._open if not message.done}))

    def received_nbytes(self) -> int:
        return sum(message.nbytes for message in self._receives)


@dataclass
class _Exchanger:
    """State that the ranks of one process share: messages not yet met, splits under way, control mail.

    A send is complete only when its receive has been posted: nothing is buffered, so that a
    schedule that relies on buffering stops here as it would on a real network.
    """

    size: int
    nodes: tuple[int, ...]
    changed: threading.Condition = field(default_factory=threading.Condition)
    sends: dict[tuple[Any, ...], deque[_LoopbackMessage]] = field(default_factory=dict)
    receives: dict[tuple[Any, ...], deque[_LoopbackMessage]] = field(default_factory=dict)
    splits: dict[tuple[Any, ...], dict[int, tuple[int | None, int]]] = field(default_factory=dict)
    control: dict[int, deque[tuple[int, dict[str, Any]]]] = field(default_factory=dict)
    aborted: bool = False

    def post(self, key: tuple[Any, ...], message: _LoopbackMessage, *, sending: bool) -> None:
        mine, theirs = (self.sends, self.receives) if sending else (self.receives, self.sends)
        with self.changed:
            queue = theirs.get(key)
            if not queue:
                mine.setdefault(key, deque()).append(message)
                return
            other = queue.popleft()
            if not queue:
                del theirs[key]
            send, receive = (message, other) if sending else (other, message)
            if send.octets.size > receive.octets.size:
                raise MismatchError(
                    f"rank {key[1]} sent {send.octets.size} bytes to rank {key[2]}, which expects "
                    f"{receive.octets.size} bytes"
                )
            receive.octets[: send.octets.size] = send.octets
            receive.nbytes = send.octets.size
            send.done = receive.done = True
            self.changed.notify_all()


class LoopbackTransport:
    """One thread's place among the ranks of a process."""

    max_tag = 2**31 - 1
    natives: Natives | None = None

    def __init__(
        self, exchanger: _Exchanger, context: tuple[Any, ...], ranks: Sequence[int], rank: int
    ) -> None:
        self._exchanger = exchanger
        self._context = context
        self.world_ranks = tuple(ranks)
        self._splits = 0
        self._groups: Counter[tuple[tuple[int, ...], int]] = Counter()
        self.rank = rank
        self.size = len(self.world_ranks)
        self.nodes = tuple(exchanger.nodes[r] for r in self.world_ranks)

    def start(
        self, sends: Sequence[tuple[Octets, int]], receives: Sequence[tuple[Octets, int]], tag: int
    ) -> Exchange:
        exchange = _LoopbackExchange(self, sends, receives, tag)
        exchange.start()
        return exchange

    def prepare(
        self,
        sends: Sequence[tuple[Octets, int]],
        receives: Sequence[tuple[Octets, int]],
        tag: int,
        *,
        persistent: bool,
        keep_lengths: bool = False,
    ) -> PreparedExchange:
        return _LoopbackExchange(self, sends, receives, tag)

    def post(
        self, sends: Sequence[tuple[Octets, int]], receives: Sequence[tuple[Octets, int]], tag: int
    ) -> tuple[list[_LoopbackMessage], list[_LoopbackMessage]]:
        """Post the messages of an exchange: (sends, receives)."""
        if self._exchanger.aborted:
            raise StallError("another rank of this process ended the job")
        posted_receives = [_LoopbackMessage(octets, source) for octets, source in receives]
        posted_sends = [_LoopbackMessage(octets, to) for octets, to in sends]
        for message in posted_receives:
            self._exchanger.post((self._context, message.peer, self.rank, tag), message, sending=False)
        for message in posted_sends:
            self._exchanger.post((self._context, self.rank, message.peer, tag), message, sending=True)
        return posted_sends, posted_receives

    def probe(self, tag: int, source: int | None = None) -> int | None:
        if self._exchanger.aborted:
            raise StallError("another rank of this process ended the job")
        with self._exchanger.changed:
            sources = range(self.size) if source is None else (source,)
            sends = self._exchanger.sends
            return next((peer for peer in sources if sends.get((self._context, peer, self.rank, tag))), None)

    def memory_fence(self) -> Callable[[], None]:
        """Ranks are threads of one process: a lock orders memory for all who take it."""

        def fence() -> None:
            with self._exchanger.changed:
                pass

        return fence

    def pause(self, attempt: int, *, drives_messages: bool = True) -> None:
        if self._exchanger.aborted:
            raise StallError("another rank of this process ended the job")
        with self._exchanger.changed:
            self._exchanger.changed.wait(min(0.0002 * (attempt + 1), 0.01))

    def split(self, color: int | None, key: int) -> Transport | None:
        shared = self._exchanger
        split_key = (self._context, self._splits)
        self._splits += 1
        with shared.changed:
            entries = shared.splits.setdefault(split_key, {})
            entries[self.rank] = (color, key)
            shared.changed.notify_all()
            while len(entries) < self.size:
                if shared.aborted:
                    raise StallError("another rank of this process ended the job during a split")
                shared.changed.wait(0.05)
        if color is None:
            return None
        members = sorted((k, r) for r, (c, k) in entries.items() if c == color)
        ranks = [r for _, r in members]
        return LoopbackTransport(
            shared, (*split_key, color), [self.world_ranks[r] for r in ranks], ranks.index(self.rank)
        )

    def group(self, members: Sequence[int], tag: int) -> Transport:
        made = tuple(members), tag
        self._groups[made] += 1
        context = (self._context, "group", *made, self._groups[made])
        ranks = [self.world_ranks[r] for r in members]
        return LoopbackTransport(self._exchanger, context, ranks, made[0].index(self.rank))

    def free(self) -> None:
        """Nothing to release: queues vanish with the last reference to them."""

    def control_send(self, world_rank: int, message: dict[str, Any]) -> None:
        with self._exchanger.changed:
            mail = self._exchanger.control.setdefault(world_rank, deque())
            mail.append((self.world_ranks[self.rank], message))
            self._exchanger.changed.notify_all()

    def control_receive(self) -> list[tuple[int, dict[str, Any]]]:
        with self._exchanger.changed:
            return list(self._exchanger.control.pop(self.world_ranks[self.rank], ()))

    def abort(self, status: int) -> None:
        with self._exchanger.changed:
            self._exchanger.aborted = True
            self._exchanger.changed.notify_all()


def connect(size: int, nodes: Sequence[int] | None = None) -> list[LoopbackTransport]:
    """Transports of `size` ranks; `nodes[r]` is the node that rank r pretends to be on."""
    exchanger = _Exchanger(size, tuple(nodes) if nodes is not None else (0,) * size)
    if len(exchanger.nodes) != size:
        raise ValueError(f"nodes names {len(exchanger.nodes)} ranks, but there are {size}")
    return [LoopbackTransport(exchanger, ("world",), range(size), rank) for rank in range(size)]


def run(
    size: int,
    function: Callable[[LoopbackTransport], T],
    *,
    nodes: Sequence[int] | None = None,
    timeout_s: float = 60.0,
) -> list[T]:
    """Call `function(transport)` on `size` threads, one a rank; its results, by rank.

    errors   the exception of the rank that failed first, after all threads have ended
             StallError when a thread is still busy after timeout_s
    """
    transports = connect(size, nodes)
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def call(rank: int) -> None:
        try:
            results[rank] = function(transports[rank])
        except BaseException as error:
            failures.append(error)
            transports[rank].abort(1)

    threads = [
        threading.Thread(target=call, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(as_timeout(timeout_s))
    if failures:
        raise failures[0]
    late = [thread.name for thread in threads if thread.is_alive()]
    if late:
        transports[0].abort(1)
        raise StallError(f"{', '.join(late)} did not end within {timeout_s:.0f} s (process {os.getpid()})")
    return results
