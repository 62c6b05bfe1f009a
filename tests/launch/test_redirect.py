"""Each rank's output in files of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hpcpar.launch.redirect import rank_directory
from tests.command import run

HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "12", "MPI_LOCALNRANKS": "12", "MPI_LOCALRANKID": "1"}


def test_directories_sort_by_rank() -> None:
    names = [str(rank_directory("d", rank, 11)) for rank in range(11)]
    assert names[0] == "d/rank.00"
    assert names == sorted(names)
    assert str(rank_directory("d", 3, 4)) == "d/rank.3"


def redirect(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "hpcpar.launch.redirect", *words, **HYDRA)


def test_a_program_writes_into_its_ranks_files_and_keeps_its_status(tmp_path: Path) -> None:
    program = [sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(5)"]
    done = redirect(tmp_path / "new", *program)
    assert (done.returncode, done.stdout, done.stderr) == (5, "", "")
    assert (tmp_path / "new" / "rank.01" / "stdout").read_text() == "out\n"
    assert (tmp_path / "new" / "rank.01" / "stderr").read_text() == "err\n"


def test_a_rank_that_cannot_write_says_so_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "rank.01").touch()
    done = redirect(tmp_path, "true")
    assert done.returncode == 1
    assert done.stderr.startswith(f"hpcpar run: rank 1: the directory {tmp_path}/rank.01 cannot be made (")
    assert done.stderr.count("\n") == 1


def test_a_program_that_cannot_be_started_is_named_where_the_launchers_own_words_are(tmp_path: Path) -> None:
    done = redirect(tmp_path, "no-such-program")
    said = "hpcpar run: rank 1: no-such-program cannot be started (No such file or directory)\n"
    assert (done.returncode, done.stderr) == (1, said)
