"""One file of an environment, made once."""

from __future__ import annotations

import os
import tarfile
import tempfile
import time
from pathlib import Path

import pytest

from hpcpar.launch.environment_trees import PACKED_DIRECTORY, Tree
from hpcpar.launch.packed_environment import pack


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Tree, ...]:
    site = tmp_path / "env/lib/python3.11/site-packages"
    site.mkdir(parents=True)
    (site / "module.py").write_text("x = 1\n")
    os.utime(site / "module.py", ns=(0, 1_234_567_890_987_654_321))
    (site / "link.py").symlink_to("module.py")
    (site / "project.pth").write_text(f"{tmp_path}/project\n")
    (tmp_path / "project/mine").mkdir(parents=True)
    (tmp_path / "project/mine/__init__.py").touch()
    return (Tree(str(tmp_path / "env"), "env"),)


def test_the_file_holds_contents_links_and_times_and_is_private(
    trees: tuple[Tree, ...], tmp_path: Path
) -> None:
    packed = pack(trees, tmp_path)
    assert packed.path.parent == tmp_path / "env" / PACKED_DIRECTORY
    assert packed.path.stat().st_mode & 0o077 == 0
    assert packed.path.parent.stat().st_mode & 0o077 == 0
    site = "env/lib/python3.11/site-packages"
    with tarfile.open(packed.path) as tar:
        members = {member.name: member for member in tar}
        assert len(members) == packed.files
        module = tar.extractfile(f"{site}/module.py")
        assert module is not None
        assert module.read() == b"x = 1\n"
    # In whole seconds, as compiled files note their source's.
    assert members[f"{site}/module.py"].mtime == 1_234_567_890
    assert members[f"{site}/link.py"].linkname == "module.py"
    assert members[f"{site}/project.pth"].size == 0
    assert f"{site}/mine/__init__.py" in members
    assert packed.nbytes >= 4096 * packed.files - 4096


def test_an_unchanged_environment_is_packed_once_and_a_changed_one_anew(
    trees: tuple[Tree, ...], tmp_path: Path
) -> None:
    first = pack(trees, tmp_path)
    again = pack(trees, tmp_path)
    assert (first.reused, again.reused, again.path) == (False, True, first.path)
    (tmp_path / "project/mine/new.py").touch()
    changed = pack(trees, tmp_path)
    assert not changed.reused
    assert list((tmp_path / "env" / PACKED_DIRECTORY).iterdir()) == [changed.path], "the older one is gone"


def test_what_a_job_that_was_killed_while_it_packed_has_left_is_removed(
    trees: tuple[Tree, ...], tmp_path: Path
) -> None:
    first = pack(trees, tmp_path)
    left, written = (first.path.with_name(f".writing-{name}") for name in ("left", "written"))
    for file, age_s in ((left, 4000), (written, 5)):
        file.touch()
        os.utime(file, (time.time() - age_s,) * 2)
    assert pack(trees, tmp_path).reused
    assert not left.exists()
    assert written.exists(), "another job is writing it"


def test_an_environment_of_others_is_packed_for_this_job_alone(
    trees: tuple[Tree, ...], tmp_path: Path
) -> None:
    # A file in the directory's place cannot be written into, not even by root.
    (tmp_path / "env" / PACKED_DIRECTORY).touch()
    (tmp_path / "node").mkdir()
    assert pack(trees, tmp_path / "node").path.parent == tmp_path / "node"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_what_another_user_has_packed_is_packed_for_this_job_alone() -> None:
    with tempfile.TemporaryDirectory() as directory:  # pytest's own is closed to others
        environment, node = Path(directory, "env"), Path(directory, "node")
        for path in (environment, node):
            path.mkdir()
        Path(directory).chmod(0o755)
        node.chmod(0o777)
        trees = (Tree(str(environment), "env"),)
        theirs = pack(trees, node)
        os.seteuid(65534)
        try:
            mine = pack(trees, node)
        finally:
            os.seteuid(0)
    assert mine.path == node / theirs.path.name


def test_packing_that_fails_leaves_no_file(
    trees: tuple[Tree, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(tarfile.TarFile, "addfile", fail)
    (tmp_path / "node").mkdir()
    with pytest.raises(OSError, match="disk full"):
        pack(trees, tmp_path / "node")
    assert list((tmp_path / "env" / PACKED_DIRECTORY).iterdir()) == []
    assert list((tmp_path / "node").iterdir()) == []
