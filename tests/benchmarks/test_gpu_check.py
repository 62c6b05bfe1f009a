"""gpu_check.sh goes on after a part that fails, says what passed, and names what is missing.

On a real GPU it is its own test; here, stand-ins take the places of Python, its environment and the parts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_check.sh"
PARTS = [
    *("facts", "doctor", "collectives-2", "in-a-row-2", "train-1", "train-2", "train-zero-3", "train-tp"),
    *("same-losses", "tests", "tests-2", "tests-1", "tests-4", "collectives-4", "in-a-row-4", "tests-3"),
    *("tune-2", "nccl-2"),
]
A_CALL_S = 600
"""What a part may take at most, where a machine is lent for so long at a time."""


def executable(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def check(directory: Path, *, driver: str = "echo 13000", ready: str = "exit 0", **variables: str):
    """The script with parts that say their words; hpcpar's fail where they hold $FAILS."""
    executable(directory / "python", driver)
    inside = f'case "$*" in *"import cupy, hpcpar"*) {ready};; esac\necho "python $*"'
    executable(directory / "venv" / "bin" / "python", inside)
    executable(
        directory / "venv" / "bin" / "hpcpar",
        'echo "hpcpar $*"; case "$*" in *"${FAILS:-none of them}"*) echo broken; exit 7;; esac',
    )
    places = {
        "PYTHON": str(directory / "python"),
        "VENV": str(directory / "venv"),
        "RESULTS": str(directory / "results"),
        "LOGS": str(directory / "logs"),
    }
    return subprocess.run(
        ["bash", str(SCRIPT)],
        env={**os.environ, "ONLY": "", **places, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_all_parts_are_run_and_what_passed_is_said_and_kept(tmp_path: Path) -> None:
    done = check(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = (tmp_path / "results" / "gpu-check.txt").read_text()
    assert parts(summary, "passed") == PARTS
    assert summary in done.stdout
    said = (tmp_path / "logs" / "tests-4.log").read_text().split()
    files = said[said.index("mpi") + 1 :]
    assert " ".join(said[: -len(files)]) == "hpcpar run -n 4 -- -m pytest --with-mpi -m gpu and mpi"
    assert "tests/comm/test_device_gpu.py" in files
    assert not [name for name in files if "mark.gpu" not in (ROOT / name).read_text()]
    said = (tmp_path / "logs" / "train-2.log").read_text()
    assert "train.device=cuda train.precision=bfloat16" in said


def parts(summary: str, word: str) -> list[str]:
    """Names of the parts of which the summary says so."""
    return [line.removeprefix(word).split()[0] for line in summary.splitlines() if line.startswith(word)]


def test_calls_for_some_parts_each_make_one_summary_which_is_there_at_any_time(tmp_path: Path) -> None:
    check(tmp_path, ONLY="facts train-1", FAILS="none of them")
    check(tmp_path, ONLY="doctor train-2", FAILS="-m hpcpar doctor")
    done = check(tmp_path, ONLY="nccl-2", FAILS="--peers nccl")
    assert done.returncode == 1, "nothing has passed"
    assert "failed  nccl-2 (status 7), which is an experiment and does not count" in done.stdout
    summary = (tmp_path / "results" / "gpu-check.txt").read_text()
    assert parts(summary, "passed") == ["facts", "train-1", "train-2"]
    assert parts(summary, "FAILED") == ["doctor"]
    run = ("facts", "doctor", "train-1", "train-2", "nccl-2")
    assert parts(summary, "not run") == [name for name in PARTS if name not in run]
    # A call that is ended in the middle has left what it had come to.
    looks = f'case "$*" in *"train "*) cat {tmp_path}/results/gpu-check.txt;; esac'
    executable(tmp_path / "venv" / "bin" / "hpcpar", looks)
    variables = {"VENV": "venv", "LOGS": "logs", "RESULTS": "results", "PYTHON": "python"}
    places = {name: str(tmp_path / place) for name, place in variables.items()}
    subprocess.run(["bash", str(SCRIPT)], env={**os.environ, "ONLY": "", **places}, check=True, timeout=60)
    summary = (tmp_path / "logs" / "train-1.log").read_text()
    assert parts(summary, "passed") == ["facts", "doctor", "collectives-2", "in-a-row-2"], (
        "and of the last call nothing"
    )


def test_each_part_fits_into_a_call_and_each_call_that_is_advised_has_other_parts() -> None:
    text = SCRIPT.read_text()
    limits = [
        int(seconds)
        for seconds in re.findall(r"^ *(?:with_mps )?(?:rank_)?part \S+ (\d+) ", text, re.MULTILINE)
    ]
    limits += [int(seconds) for seconds in re.findall(r"=1 rank_part \S+ (\d+) ", text)]
    assert len(limits) == 10
    assert max(limits) < A_CALL_S
    advised = re.findall(r'^#   ONLY="(.*)"', text, re.MULTILINE)
    assert sorted(" ".join(advised).split()) == sorted(PARTS)


def test_after_a_part_that_fails_the_others_follow_and_the_status_tells(tmp_path: Path) -> None:
    done = check(tmp_path, FAILS="device-collectives-2.jsonl")
    assert done.returncode == 1
    assert "-- collectives-2 failed: status 7; the end of" in done.stdout
    assert "\nbroken\n" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("FAILED  collectives-2 (status 7) at ")
    assert "\npassed  same-losses" in done.stdout


def test_without_a_driver_it_says_so_and_makes_nothing(tmp_path: Path) -> None:
    done = check(tmp_path, driver="exit 1")
    assert done.returncode == 1
    assert "no CUDA driver (libcuda.so.1)" in done.stderr
    assert not (tmp_path / "results").exists()


def test_an_environment_of_somebody_else_that_does_not_do_is_left_alone(tmp_path: Path) -> None:
    done = check(tmp_path, ready='echo "AssertionError: torch 2.13.0+cpu sees no GPU"; exit 1')
    assert done.returncode == 1
    assert "does not do: AssertionError: torch 2.13.0+cpu sees no GPU. VENV=.venv-gpu makes" in done.stderr
    assert "== " not in done.stdout


def test_shellcheck_finds_nothing() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(
        ["shellcheck", str(SCRIPT)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout


def run_of(directory: Path, losses: list[float]) -> Path:
    directory.mkdir()
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses)]
    (directory / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 1, "held_out_loss": 2.0}']))
    summary = {"layout": "dp=2", "held_out_loss": losses[-1], "tokens_per_s": 1000.0}
    (directory / "summary.json").write_text(json.dumps(summary))
    return directory


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        ([10.0, 8.0, 6.0], [10.0, 8.0, 6.05], 0),
        ([10.0, 8.0, 6.0], [10.0, 8.0, 6.3], 1),
        ([10.0, 8.0, 6.0], [10.0, 8.0], 1),
        ([10.0, 8.0, 6.0], [10.0, 8.0, float("nan")], 1),
        ([10.0, 9.99, 9.98], [10.0, 9.99, 9.98], 1),
    ],
    ids=["as rounding makes them", "too far apart", "a step is missing", "not a number", "nothing is learnt"],
)
def test_runs_are_the_same_to_a_tolerance(
    tmp_path: Path, first: list[float], second: list[float], status: int
) -> None:
    path = tmp_path / "found.jsonl"
    runs = [str(run_of(tmp_path / name, losses)) for name, losses in (("1", first), ("2", second))]
    words = [str(ROOT / "benchmarks" / "same_losses.py"), *runs, "--tolerance", "0.02", "--json", str(path)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert (found[0]["benchmark"], len(found)) == ("same losses", 3)
