"""Seeds of random numbers that follow from names and numbers, the same in every process and every version."""

from __future__ import annotations

import hashlib


def parameter_seed(name: str, seed: int) -> int:
    """A seed for what belongs to one name: 63 bits of SHA-256."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
