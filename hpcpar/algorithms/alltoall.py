"""All-to-all and all-gather by shifts: in each round everybody speaks to the rank at one distance.

n ranks, S bytes of one rank's whole vector (of an all-to-all: of its input).
"""

from __future__ import annotations

from hpcpar.algorithms.doubling import doublings
from hpcpar.algorithms.step import Copy, Receive, Send, Step, Steps


def pairwise(rank: int, size: int) -> Steps:
    """All-to-all in which round k meets the ranks at distance k, one message in and one out.

    before   every rank: input chunk d is for rank d
    after    every rank: output chunk s came from rank s
    cost     (n-1)α + (n-1)/n·Sβ
    source   Thakur, Rabenseifner, Gropp 2005, section 4 (pairwise exchange)
    """
    yield Step(copies=(Copy((rank,), "input", (rank,), "output"),))
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        yield Step((Send(to, (to,), "input"),), (Receive(source, (source,), "output"),))


def bruck(rank: int, size: int) -> Steps:
    """All-to-all in ⌈log₂n⌉ rounds: a chunk that must travel j ranks hops along the bits of j.

    Work chunk j < n holds what travels j ranks. A round packs the chunks that hop behind them,
    because their places are where those of the rank at the left land.

    before   every rank: input chunk d is for rank d, all chunks equally large
    after    every rank: output chunk s came from rank s
    cost     ⌈log₂n⌉(α + S/2·β), a little less when n is not a power of two
    source   Bruck, Ho, Kipnis, Upfal, Weathersby 1997
    """
    travels = tuple(range(size))
    yield Step(copies=(Copy(tuple((rank + j) % size for j in travels), "input", travels, "work"),))
    for distance in doublings(size):
        hopping = tuple(j for j in travels if j & distance)
        packed = tuple(range(size, size + len(hopping)))
        yield Step(
            (Send((rank + distance) % size, packed, "work"),),
            (Receive((rank - distance) % size, hopping, "work"),),
            (Copy(hopping, "work", packed, "work"),),
        )
    yield Step(copies=(Copy(travels, "work", tuple((rank - j) % size for j in travels), "output"),))


def bruck_allgather(rank: int, size: int) -> Steps:
    """All-gather in ⌈log₂n⌉ rounds, for any size: each doubles the run of chunks that a rank has.

    before   rank r: chunk r
    after    every rank: all `size` chunks
    cost     ⌈log₂n⌉α + (n-1)/n·Sβ
    source   Bruck et al. 1997; chunks are named by their owner here, so nothing is rotated at the end
    """
    for distance in doublings(size):
        run = range(min(distance, size - distance))
        to, source = (rank - distance) % size, (rank + distance) % size
        mine = tuple((rank + j) % size for j in run)
        theirs = tuple((source + j) % size for j in run)
        yield Step((Send(to, mine),), (Receive(source, theirs),))
