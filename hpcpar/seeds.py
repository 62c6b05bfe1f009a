"""Random seeds derived from names and numbers, equal in every process and every version."""

from __future__ import annotations

import hashlib


def parameter_seed(name: str, seed: int) -> int:
    """Derive the seed of a name: 63 bits of SHA-256."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
