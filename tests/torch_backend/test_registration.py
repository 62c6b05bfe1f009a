"""torch knows the backend without an import, and does not notice at its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.command import run

IMPORTED = """
import sys, torch
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("hpcpar", "mpi4py")))
print("hpcpar" in torch.distributed.Backend.backend_list)
"""


def test_importing_torch_registers_it_and_loads_nothing_else(tmp_path: Path) -> None:
    said = run(sys.executable, "-c", IMPORTED, directory=tmp_path).stdout.splitlines()
    assert said[0] == str(["hpcpar", "hpcpar.torch_backend", "hpcpar.torch_backend.registration"])
    assert said[1] == "True"


ALONE = """
import os, sys, torch
from torch import distributed
for backend in sys.argv[1:]:
    distributed.init_process_group(backend or None)
    tensor = torch.ones(2)
    distributed.all_reduce(tensor)
    print(tensor.tolist(), distributed.get_backend(), os.environ["RANK"], os.environ["WORLD_SIZE"])
    distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("start", "backends"),
    [([], ["hpcpar"]), (["-m", "hpcpar.torch_backend"], ["gloo", ""])],
    ids=["its name", "another name or none, by our module"],
)
def test_a_program_alone_is_a_job_of_one_rank(tmp_path: Path, start: list[str], backends: list[str]) -> None:
    said = run(sys.executable, *start, "-c", ALONE, *backends, directory=tmp_path)
    assert said.stdout.splitlines() == ["[1.0, 1.0] hpcpar 0 1"] * len(backends), said.stderr


MIXED = """
from torch import distributed
distributed.init_process_group("cpu:hpcpar,cuda:gloo")
"""


def test_a_group_of_several_backends_is_refused(tmp_path: Path) -> None:
    said = run(sys.executable, "-c", MIXED, directory=tmp_path)
    assert said.returncode
    assert "does the calls of all devices: name 'hpcpar' alone" in said.stderr


SECOND = """
from torch import distributed
distributed.init_process_group("hpcpar")
distributed.new_group(backend="gloo")
"""


def test_a_second_backend_that_needs_a_store_is_told_how(run_ranks, tmp_path) -> None:
    script = tmp_path / "second.py"
    script.write_text(SECOND)
    done = run_ranks(2, str(script))
    assert done.returncode
    assert "share no store: set MASTER_ADDR and MASTER_PORT" in done.stderr
