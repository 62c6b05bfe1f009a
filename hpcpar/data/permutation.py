"""A pseudorandom permutation of 0 … n - 1 that needs no memory: each element is computed by itself.

A shuffled list of a trillion tokens' windows would take gigabytes on every rank. A Feistel network (Luby and
Rackoff 1988) permutes 0 … 4**k - 1 for the smallest 4**k >= n; results outside of 0 … n - 1 go through again
until they fall inside (cycle walking, Black and Rogaway 2002), fewer than four passes on average. No random
numbers of a library are used, so an order is the same across versions and machines.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ROUNDS = 8

Words = npt.NDArray[np.uint64]


def permute(places: npt.ArrayLike, n: int, *, key: int) -> npt.NDArray[np.int64]:
    """Map each of `places` (one-dimensional) by the permutation of 0 … n - 1 that `key` names."""
    words: Words = np.asarray(places).astype(np.uint64)
    if words.size and not int(words.max()) < n:
        raise IndexError(f"place {int(words.max())} is outside of a permutation of {n}")
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    words = _feistel(words, half_bits, key)
    while (outside := words >= n).any():
        words[outside] = _feistel(words[outside], half_bits, key)
    return words.astype(np.int64)


def _feistel(words: Words, half_bits: int, key: int) -> Words:
    """Map the numbers below 4**half_bits one to one."""
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = words >> shift, words & mask
    for number in range(ROUNDS):
        # Without mixing the key first, keys that differ little would give similar orders.
        round_key = _mix(np.array([(key * ROUNDS + number) % (1 << 64)], dtype=np.uint64))
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    joined: Words = (left << shift) | right
    return joined


def _mix(words: Words) -> Words:
    """Apply the finalizer of SplitMix64 (Steele, Lea and Flood 2014): each input bit flips half the bits."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed
