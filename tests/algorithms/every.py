"""Every algorithm of the registry, for the tests that are of all of them."""

from __future__ import annotations

from hpcpar.algorithms.registry import ALGORITHMS, Algorithm

EVERY = [algorithm for by_name in ALGORITHMS.values() for algorithm in by_name.values()]


def name_of(algorithm: Algorithm) -> str:
    return f"{algorithm.collective}-{algorithm.name}"


def words(picture: str) -> list[list[str]]:
    """A picture without its spaces, which are as many as the widest cell needs."""
    return [line.split() for line in picture.splitlines()]
