"""A rank that fails, leaves, or calls something else is named under DDP and FSDP2, and nobody waits."""

from __future__ import annotations

import pytest

PROGRAM = """
import time, torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

distributed.init_process_group("hpcpar")
rank = distributed.get_rank()
model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
if "{kind}" == "ddp":
    model = DistributedDataParallel(model)
else:
    for layer in model:
        fully_shard(layer)
    fully_shard(model)


def step():
    model(torch.randn(4, 16)).sum().backward()


step()
{then}
distributed.destroy_process_group()
"""

FAILS = """
if rank == 1:
    raise ZeroDivisionError("of rank 1")
step()
"""
LEAVES = """
if rank == 0:
    step()
"""
DIFFERS = """
if rank == 1:
    distributed.all_reduce(torch.ones(7))
step()
"""


@pytest.mark.parametrize(
    ("kind", "then", "says"),
    [
        ("ddp", FAILS, ("hpcpar: rank 1 of 2", "ZeroDivisionError: of rank 1")),
        ("ddp", LEAVES, ("rank 1 came to the end of the program while rank 0 waits in allreduce",)),
        ("fsdp2", LEAVES, ("rank 1 came to the end of the program while rank 0 waits in allgather",)),
        ("ddp", DIFFERS, ("MismatchError: rank ", "does allreduce(float32[7], op=sum)")),
        ("fsdp2", DIFFERS, ("MismatchError: rank ", "does allgather(")),
    ],
)
def test_who_was_it_is_said(run_ranks, tmp_path, kind: str, then: str, says: tuple[str, ...]) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(kind=kind, then=then))
    done = run_ranks(2, str(script), timeout_s=100)
    assert done.returncode
    for words in says:
        assert words in done.stderr
