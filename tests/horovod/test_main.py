"""`python -m hpcpar.horovod`: a program runs as it would without us, but `import horovod` is ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPORT = """
import json, sys
import horovod
print(json.dumps({
    "argv": sys.argv,
    "path": sys.path[0],
    "name": __name__,
    "file": globals().get("__file__"),
    "version": horovod.__version__,
}))
"""


def start(*words: str, cwd: Path, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-m", "hpcpar.horovod", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def report(*words: str, cwd: Path) -> dict[str, object]:
    done = start(*words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(REPORT)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "train.py").write_text(REPORT)
    return tmp_path


def test_a_script_sees_its_arguments_and_its_directory(folder: Path) -> None:
    assert report("scripts/train.py", "--lr", "0.1", "-m", cwd=folder) == {
        "argv": ["scripts/train.py", "--lr", "0.1", "-m"],
        "path": str(folder / "scripts"),
        "name": "__main__",
        "file": "scripts/train.py",
        "version": "0.28.1",
    }


def test_a_module_sees_its_arguments_and_the_working_directory(folder: Path) -> None:
    found = report("-m", "package.train", "-c", "x", cwd=folder)
    assert found["argv"] == [str(folder / "package" / "train.py"), "-c", "x"]
    assert found["path"] == str(folder)
    assert found["name"] == "__main__"


def test_code_sees_its_arguments(folder: Path) -> None:
    found = report("-c", REPORT, "a", "-b", cwd=folder)
    assert found == {
        "argv": ["-c", "a", "-b"],
        "path": "",
        "name": "__main__",
        "file": None,
        "version": "0.28.1",
    }


def test_every_rank_finds_horovods_variables_once_it_is_initialized(folder: Path) -> None:
    code = """
import os
import horovod.torch as hvd
hvd.init()
print(*(os.environ["HOROVOD_" + name] for name in ("RANK", "SIZE", "LOCAL_SIZE", "CROSS_SIZE")))
"""
    done = start("-c", code, cwd=folder)
    assert done.stdout == "0 1 1 1\n", done.stderr


def test_the_programs_status_and_traceback_are_its_own(folder: Path) -> None:
    assert start("-c", "raise SystemExit(7)", cwd=folder).returncode == 7
    (folder / "fails.py").write_text("def fail():\n    1 / 0\n\n\nfail()\n")
    done = start("fails.py", cwd=folder)
    assert done.returncode == 1
    assert 'File "fails.py", line 2, in fail' in done.stderr.replace(str(folder) + os.sep, "")
    assert done.stderr.rstrip().endswith("ZeroDivisionError: division by zero")


def test_what_follows_the_program_is_never_an_option_of_ours(folder: Path) -> None:
    assert report("scripts/train.py", "--help", cwd=folder)["argv"] == ["scripts/train.py", "--help"]


def test_without_a_program_the_usage_is_shown(folder: Path) -> None:
    for words in ((), ("-m",), ("--fast", "x.py")):
        done = start(*words, cwd=folder)
        assert done.returncode == 2
        assert done.stderr.startswith("usage: python -m hpcpar.horovod")
    assert start("--help", cwd=folder).stdout.startswith("usage: python -m hpcpar.horovod")


def test_a_missing_script_is_said_to_be_missing(folder: Path) -> None:
    done = start("nowhere.py", cwd=folder)
    assert done.returncode == 1
    assert "nowhere.py" in done.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="-P came with Python 3.11")
def test_a_safe_path_stays_safe(folder: Path) -> None:
    done = start("scripts/train.py", cwd=folder, options=("-P",))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] not in (str(folder / "scripts"), "", str(folder))


def test_starting_is_quick_and_imports_no_torch(folder: Path) -> None:
    done = start("-c", "import sys; print('torch' in sys.modules, 'mpi4py' in sys.modules)", cwd=folder)
    assert done.stdout == "False False\n", done.stderr
