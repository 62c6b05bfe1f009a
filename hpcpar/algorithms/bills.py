"""Closed forms: what each algorithm's docstring multiplies α, Sβ and Sγ by, for n ranks and k segments."""

from __future__ import annotations

from typing import NamedTuple

from hpcpar.algorithms.doubling import fold_chunks
from hpcpar.algorithms.powers import doublings, largest_power


class Bill(NamedTuple):
    """The critical path of a collective on equal chunks; `sent` and `combined` in whole vectors."""

    messages: float
    sent: float = 0.0
    combined: float = 0.0

    def plus(self, other: Bill) -> Bill:
        """Both, one after the other."""
        return Bill(self.messages + other.messages, self.sent + other.sent, self.combined + other.combined)


# One chunk to or from each of the other ranks, one after another.


def every_chunk(n: int, k: int) -> Bill:
    return Bill(n - 1, _others(n))


def every_chunk_combined(n: int, k: int) -> Bill:
    return Bill(n - 1, _others(n), _others(n))


def every_chunk_twice(n: int, k: int) -> Bill:
    return every_chunk_combined(n, k).plus(every_chunk(n, k))


# The whole vector to or from each of the other ranks, one after another.


def every_vector(n: int, k: int) -> Bill:
    return Bill(n - 1, n - 1)


def every_vector_combined(n: int, k: int) -> Bill:
    return Bill(n - 1, n - 1, n - 1)


# In rounds: whole vectors, or ever more or fewer chunks.


def rounds_of_vectors(n: int, k: int) -> Bill:
    return Bill(_rounds(n), _rounds(n))


def rounds_of_vectors_combined(n: int, k: int) -> Bill:
    return Bill(_rounds(n), _rounds(n), _rounds(n))


def rounds_of_vectors_twice(n: int, k: int) -> Bill:
    return rounds_of_vectors_combined(n, k).plus(rounds_of_vectors(n, k))


def rounds_of_chunks(n: int, k: int) -> Bill:
    return Bill(_rounds(n), _others(n))


def rounds_of_half(n: int, k: int) -> Bill:
    """Bruck's all-to-all: a chunk that travels j ranks is sent once for each bit of j."""
    return Bill(_rounds(n), sum(distance.bit_count() for distance in range(n)) / n)


def rounds_of_nothing(n: int, k: int) -> Bill:
    return Bill(_rounds(n))


# Recursive doubling and halving, with the fold.


def recursive_doubling_allreduce(n: int, k: int) -> Bill:
    return rounds_of_vectors_combined(largest_power(n), k).plus(_fold(n, 2, 1))


def rabenseifner(n: int, k: int) -> Bill:
    m = largest_power(n)
    return Bill(2 * _rounds(m), 2 * _others(m), _others(m)).plus(_fold(n, 2, 1))


def recursive_halving(n: int, k: int) -> Bill:
    runs = _member_runs(n)
    return Bill(_rounds(largest_power(n)), runs, runs).plus(_fold(n, 1 + 1 / n, 1))


def recursive_doubling_allgather(n: int, k: int) -> Bill:
    return Bill(_rounds(largest_power(n)), _member_runs(n)).plus(_fold(n, 1, 0))


# Pipelined.


def chain(n: int, k: int) -> Bill:
    slots = n - 2 + k
    return Bill(slots, slots / k)


def chain_combined(n: int, k: int) -> Bill:
    slots = n - 2 + k
    return Bill(slots, slots / k, slots / k)


def double_binary(n: int, k: int) -> Bill:
    """Exact for n = 2, and for k = 1 where n is a power of two; otherwise within a third."""
    height, crossings = _rounds(n), 2 if n == 2 else 4
    messages = 4 * height - 2 + crossings * (k - 1)
    return Bill(messages, messages / (2 * k), messages / (4 * k))


def _rounds(n: int) -> int:
    """⌈log₂n⌉."""
    return len(doublings(n))


def _others(n: int) -> float:
    """The part of a vector that belongs to the other ranks."""
    return (n - 1) / n


def _fold(n: int, sent: float, combined: float) -> Bill:
    """What taking in and handing back adds; nothing for a power of two."""
    return Bill(0) if n == largest_power(n) else Bill(2, sent, combined)


def _member_runs(n: int) -> float:
    """What member 0, which stands for two ranks if any does, exchanges in all rounds, in vectors."""
    first_chunks = fold_chunks(n)
    return sum(first_chunks[distance] for distance in doublings(largest_power(n))) / n
