"""`hpcpar run`, with a real launcher where there is one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcpar.cli import main
from hpcpar.launch import supervise

REPOSITORY = Path(__file__).parents[2]
HAS_MPIEXEC = bool(
    shutil.which(os.path.join(os.path.dirname(sys.executable), "mpiexec")) or shutil.which("mpiexec")
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Sequence[str], str, Sequence[str]]]:
    made: list[tuple[int, Sequence[str], str, Sequence[str]]] = []

    def run(n: int, argv: Sequence[str], *, say: object, launcher: str, options: Sequence[str]) -> int:
        made.append((n, argv, launcher, options))
        return 4

    monkeypatch.setattr(supervise, "run", run)
    return made


@pytest.mark.parametrize(
    ("arguments", "argv"),
    [
        (["train.py", "-n", "9", "--lr", "0.1"], ("train.py", "-n", "9", "--lr", "0.1")),
        (["--", "-m", "hpcpar", "doctor"], ("-m", "hpcpar", "doctor")),
        (["-m", "hpcpar", "doctor"], ("-m", "hpcpar", "doctor")),
    ],
)
def test_what_follows_the_program_belongs_to_it(
    arguments: list[str],
    argv: tuple[str, ...],
    calls: list[tuple[int, Sequence[str], str, Sequence[str]]],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "-n", "2", *arguments])
    assert caught.value.code == 4
    assert calls == [(2, argv, "auto", [])]


def test_the_launcher_and_its_words_are_handed_on(
    calls: list[tuple[int, Sequence[str], str, Sequence[str]]],
) -> None:
    with pytest.raises(SystemExit):
        main(["run", "-n", "2", "--launcher", "mpiexec", "--options", "-ppn 1 -host 'a b'", "x.py"])
    assert calls == [(2, ("x.py",), "mpiexec", ["-ppn", "1", "-host", "a b"])]


def test_an_error_is_one_line_not_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "-n", "2"])
    assert caught.value.code == 1
    assert capsys.readouterr().err == (
        "Error: nothing to run: name a script, as in `hpcpar run -n 4 train.py`\n"
    )


LOSES = """
import os
import hpcpar

world = hpcpar.init(timeout_s=60)
world.barrier()
if world.rank == 1:
    os._exit(0)
world.barrier()
"""


def job(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpcpar", "run", *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@pytest.mark.skipif(not HAS_MPIEXEC, reason="needs mpiexec")
def test_two_ranks_start_and_finish_and_the_command_is_said() -> None:
    done = job("-n", "2", "-c", "import hpcpar; w = hpcpar.init(); print(f'<{w.rank}/{w.size}>')")
    assert done.returncode == 0, done.stderr
    # Not by lines: the launcher may pass two ranks' texts on before their line ends.
    assert sorted(re.findall(r"<\d/\d>", done.stdout)) == ["<0/2>", "<1/2>"]
    assert "hpcpar run: " in done.stderr
    assert "-n 2" in done.stderr or "--ntasks=2" in done.stderr


@pytest.mark.skipif(not HAS_MPIEXEC, reason="needs mpiexec")
def test_a_rank_that_leaves_silently_with_status_0_fails_the_job_every_time(tmp_path: Path) -> None:
    script = tmp_path / "loses.py"
    script.write_text(LOSES)
    ends = [job("-n", "3", str(script)) for _ in range(3)]
    assert all(done.returncode != 0 for done in ends)
    assert all("hpcpar run: rank 1 (pid " in done.stderr for done in ends)


@pytest.mark.skipif(not HAS_MPIEXEC, reason="needs mpiexec")
def test_an_exception_on_one_rank_ends_the_job_with_its_traceback_and_nobody_is_called_lost() -> None:
    code = "import hpcpar; w = hpcpar.init(); w.barrier(); 1 / (w.rank - 1); w.barrier()"
    done = job("-n", "2", "-c", code)
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stderr
    assert "was lost" not in done.stderr
    assert "hpcpar run: rank 1 (on " in done.stderr
