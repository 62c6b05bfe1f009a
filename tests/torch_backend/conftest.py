"""A default group of hpcpar's over all ranks, and one of gloo's to compare with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed

from hpcpar.comm import Communicator
from hpcpar.torch_backend import register


@pytest.fixture(scope="package")
def ours(world: Communicator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The default group; with a store in a file, so that a group of gloo can be made beside it."""
    register()
    path = world.broadcast_object(
        str(tmp_path_factory.mktemp("store") / "store") if world.rank == 0 else None
    )
    before = dict(os.environ)
    distributed.init_process_group(
        "hpcpar", init_method=f"file://{path}", rank=world.rank, world_size=world.size
    )
    yield distributed.group.WORLD
    distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="package")
def gloo(ours: Any) -> Any:
    return distributed.new_group(backend="gloo")


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
