"""Rank and size without a meeting: the launcher has told every rank, and MPI connects them.

torch's `env://` wants a master's address, and opens a port there for a store. Where MASTER_ADDR is not set
the ranks get a store each of its own, which is enough for a process group of hpcpar's: it needs none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

from torch import distributed

from hpcpar.errors import OperationError
from hpcpar.launch import slurm, torch_variables

_ByTorch: Any = distributed.Store  # type: ignore[attr-defined]


class LocalStore(_ByTorch):  # type: ignore[misc]
    """A store that the ranks do not share: OperationError for what this process has not put there."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = _octets(value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        if self._values.get(key, b"") == _octets(expected):
            self.set(key, desired)
        return self._values.get(key, _octets(expected))

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        missing = [key for key in keys if key not in self._values]
        if missing:
            raise OperationError(
                f"the store was asked for {', '.join(missing)}, which another rank would put there, but "
                f"ranks of init_process_group('hpcpar') share no store: set MASTER_ADDR and MASTER_PORT, or "
                f"pass store=torch.distributed.TCPStore(...), for a second backend such as gloo, "
                f"TORCH_DIST_INIT_BARRIER=1, or a program that talks through the store"
            )

    def deleteKey(self, key: str) -> bool:  # noqa: N802    as C++ calls it
        return self._values.pop(key, None) is not None

    def getNumKeys(self) -> int:  # noqa: N802
        return len(self._values)

    def set_timeout(self, timeout: timedelta) -> None:
        pass


def _octets(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


_kept: list[LocalStore] = []
"""C++ does not keep a Python object that it refers to."""


def rendezvous(
    by_torch: Callable[..., Iterator[Any]], url: str, *arguments: Any, **options: Any
) -> Iterator[tuple[LocalStore, int, int]]:
    """Yield store, rank and size for `env://`; by torch's own way where MASTER_ADDR is set.

    RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are set where they are not, for the program's own use.
    RANK and WORLD_SIZE that are set are believed, as torch does; MPI has the last word when a group is made.
    So are MASTER_ADDR and MASTER_PORT, to values that name no master: Accelerate asks for them on two nodes.
    """
    torch_variables.fill(os.environ)
    if torch_variables.names_a_master(os.environ):
        yield from by_torch(url, *arguments, **options)
        return
    torch_variables.fill_master(os.environ)
    asked = {name: int(values[-1]) for name, values in parse_qs(urlparse(url).query).items()}
    rank, size = (slurm.integer(os.environ, name) for name in ("RANK", "WORLD_SIZE"))
    _kept.append(LocalStore())
    yield _kept[-1], asked.get("rank", rank), asked.get("world_size", size)
    raise OperationError("a process group over hpcpar does not meet again: make a new one")
