"""torchrun's processes are MPI's ranks: found by hpcpar's own PMI server, where the library speaks PMI-1."""

from __future__ import annotations

import sys

import pytest

from hpcpar.launch.bootstrap.pmi_selection import own_library
from tests.command import run

PROGRAM = """
import os, torch
from torch import distributed
distributed.init_process_group("hpcpar")
tensor = torch.full((3,), float(distributed.get_rank() + 1))
distributed.all_reduce(tensor)
store = distributed.distributed_c10d._get_default_store()
store.set(f"from {distributed.get_rank()}", "here")
store.wait([f"from {rank}" for rank in range(2)])
ok = os.environ["LOCAL_RANK"] == str(distributed.get_rank())
print(f"{tensor.tolist()} {ok}\\n", end="", flush=True)  # in one piece: torchrun's ranks do not buffer
distributed.destroy_process_group()
"""


@pytest.mark.skipif(own_library() not in ("mpich", "intel"), reason="needs an MPI that speaks PMI-1: MPICH")
def test_torchrun_starts_ranks_and_its_store_is_used(tmp_path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = run(sys.executable, *words, timeout_s=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[3.0, 3.0, 3.0] True"] * 2
