from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcpar.durable import sha256, whole_directory, write_whole


def test_a_directory_appears_whole_when_the_block_ends(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "result"
    with whole_directory(final) as staging:
        (staging / "a").write_text("1")
        assert not final.exists()
    assert [path.name for path in final.parent.iterdir()] == ["result"]
    assert (final / "a").read_text() == "1"


def test_an_error_leaves_what_was_there_untouched(tmp_path: Path) -> None:
    final = tmp_path / "result"
    with whole_directory(final) as staging:
        (staging / "a").write_text("old")

    def fail_half_way() -> None:
        with whole_directory(final) as staging:
            (staging / "a").write_text("new")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail_half_way()
    assert (final / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["result"]


def test_a_second_writing_replaces_the_first_wholly(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with whole_directory(tmp_path / "result") as staging:
            (staging / name).touch()
    assert [path.name for path in (tmp_path / "result").iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["result"]


def test_a_file_that_cannot_be_written_anew_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    write_whole(path, "old")

    def fail_half_way(file: Path, text: str, encoding: str) -> None:
        file.write_bytes(text[:1].encode(encoding))
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", fail_half_way)
        with pytest.raises(OSError, match="disk full"):
            write_whole(path, "new")
    assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])
    write_whole(path, "new")
    assert (path.read_text(), list(tmp_path.iterdir())) == ("new", [path])


def test_a_directory_can_be_read_by_those_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with whole_directory(tmp_path / "result"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "result").stat().st_mode & 0o777 == 0o750


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000
    (tmp_path / "file").write_bytes(content)
    assert sha256(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_a_process_killed_while_it_writes_leaves_a_whole_directory_or_none(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from hpcpar.durable import whole_directory
for number in range(1_000_000):
    with whole_directory(Path(sys.argv[1]) / "result") as staging:
        for name in "abc":
            (staging / name).write_text(str(number) * 1000)
"""
    result = tmp_path / "result"
    for delay_s in (0.0, 0.003, 0.007, 0.012, 0.018):
        process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
        while not (result / "c").exists():
            time.sleep(0.001)
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
        # A replacement that is cut short between its two renames leaves the name free.
        if result.exists():
            assert sorted(path.name for path in result.iterdir()) == ["a", "b", "c"]
            assert len({path.read_text() for path in result.iterdir()}) == 1
            shutil.rmtree(result)
