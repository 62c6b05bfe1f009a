"""A permutation of 0 … n - 1 that needs no memory: any place of it is worked out by itself.

A shuffled list of a trillion tokens' windows would take gigabytes on every rank. A Feistel network
(Luby and Rackoff 1988) permutes the smallest square 4**k >= n, and what falls outside of 0 … n - 1
is sent through again until it falls inside (cycle walking, Black and Rogaway 2002): fewer than four
passes on average. Nothing depends on a library's random numbers, so an order stays what it is
across versions and machines.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ROUNDS = 8

Words = npt.NDArray[np.uint64]


def permute(places: npt.ArrayLike, n: int, *, key: int) -> npt.NDArray[np.int64]:
    """Where the permutation of 0 … n - 1 that `key` names sends each of `places` (one-dimensional)."""
    words: Words = np.asarray(places).astype(np.uint64)
    if words.size and not int(words.max()) < n:
        raise IndexError(f"place {int(words.max())} is outside of a permutation of {n}")
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    words = _feistel(words, half_bits, key)
    while (outside := words >= n).any():
        words[outside] = _feistel(words[outside], half_bits, key)
    return words.astype(np.int64)


def _feistel(words: Words, half_bits: int, key: int) -> Words:
    """A bijection of the numbers below 4**half_bits."""
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = words >> shift, words & mask
    for number in range(ROUNDS):
        # A round's key is mixed before it meets the half, or keys that differ little would agree.
        round_key = _mix(np.array([(key * ROUNDS + number) % (1 << 64)], dtype=np.uint64))
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    joined: Words = (left << shift) | right
    return joined


def _mix(words: Words) -> Words:
    """The finisher of SplitMix64 (Steele, Lea and Flood 2014): every bit in changes half of those out."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed
