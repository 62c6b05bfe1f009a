"""An unchanged program runs over hpcpar, whatever backend it names."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.command import run

PROGRAM = """
import os, sys, torch
from torch import distributed
assert os.environ["LOCAL_RANK"] == os.environ["RANK"] and os.environ["LOCAL_WORLD_SIZE"] == "2"
assert os.environ["MASTER_ADDR"] and os.environ["MASTER_PORT"]
for backend in (None, "nccl", "cpu:gloo,cuda:nccl"):
    distributed.init_process_group(backend)
    some = distributed.new_group([0, 1], backend="gloo")
    tensor = torch.full((3,), float(distributed.get_rank() + 1))
    distributed.all_reduce(tensor, group=some)
    print(distributed.get_backend(), distributed.get_backend(some), tensor.tolist(), sys.argv[1:])
    distributed.destroy_process_group()
"""


def test_hpcpar_run_as_torch(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    words = ["run", "-n", "2", "--as-torch", str(script), "--lr", "0.1"]
    done = run(sys.executable, "-m", "hpcpar", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["hpcpar hpcpar [3.0, 3.0, 3.0] ['--lr', '0.1']"] * 6
