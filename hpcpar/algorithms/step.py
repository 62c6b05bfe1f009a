"""Steps of collective algorithms, each one exchange of chunks.

An algorithm is a generator of `Step`s for one rank. A chunk is named by its index in a *space*:

    data     the one buffer that an in-place collective works on
    input    what an all-to-all reads        output   what it writes
    work     scratch that belongs to the collective

The rules that the executor follows and that `prove` holds every schedule to:

1.  copies are local and happen first;
2.  then all sends and receives of the step are posted at once, and the step ends when all of
    them are complete; a send may block until its receive is posted (nothing is buffered);
3.  a receive with `combine` lands in scratch; after every send of the step is complete, its chunks
    become (held op received[0]) op received[1] …, in the order in which the step lists its receives.
    `own_turn` of the received values come before the held one. Operands are never swapped: a
    complex product, the maximum of 0.0 and -0.0, and the sum of two NaNs depend on their order;
4.  a receive without `combine` lands in place, so its chunks must not be sent in the same step.

The k-th message from a to b meets the k-th receive that b posts from a.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Space = Literal["data", "input", "output", "work"]


@dataclass(frozen=True, slots=True)
class Send:
    """Chunks that leave for rank `to` in one message, in the order given."""

    to: int
    chunks: tuple[int, ...] = ()
    space: Space = "data"


@dataclass(frozen=True, slots=True)
class Receive:
    """Chunks that come from rank `source` in one message: overwritten, or combined by the op."""

    source: int
    chunks: tuple[int, ...] = ()
    space: Space = "data"
    combine: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """A local move: chunk `chunks[i]` of `space` becomes chunk `into[i]` of `into_space`."""

    chunks: tuple[int, ...]
    space: Space
    into: tuple[int, ...]
    into_space: Space


@dataclass(frozen=True, slots=True)
class Step:
    """One exchange of one rank: local copies, then all sends and receives at once.

    own_turn   of the values that are combined into one chunk, how many come before the rank's own
    """

    sends: tuple[Send, ...] = ()
    receives: tuple[Receive, ...] = ()
    copies: tuple[Copy, ...] = ()
    own_turn: int = 0


Steps = Iterator[Step]
Generator = Callable[..., Steps]
"""`(rank, size)`, with `root=` for a rooted collective and `segments=` for a pipelined one."""
