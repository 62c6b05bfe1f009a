"""The dissemination barrier: after round k a rank has heard, through others, of 2ᵏ ranks."""

from __future__ import annotations

from hpcpar.algorithms.powers import doublings
from hpcpar.algorithms.step import Receive, Send, Step, Steps


def barrier(rank: int, size: int) -> Steps:
    """Let no rank leave before every rank has entered, by messages without content.

    before   nothing
    after    every rank has heard, directly or through others, of all ranks
    cost     ⌈log₂n⌉α
    source   Hensgen, Finkel, Manber 1988, "Two algorithms for barrier synchronization"
    """
    for distance in doublings(size):
        yield Step((Send((rank + distance) % size),), (Receive((rank - distance) % size),))
