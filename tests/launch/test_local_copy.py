"""A copy of the environment on one node: private, complete, at home in its place, and removed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcpar.errors import LaunchError
from hpcpar.launch import local_copy
from hpcpar.launch.environment_trees import Tree
from hpcpar.launch.local_copy import NAME, LocalCopy, Unpacker
from hpcpar.launch.packed_environment import pack


def made_copy(tmp_path: Path, trees: tuple[Tree, ...]) -> LocalCopy:
    """As a node makes it."""
    copy = LocalCopy(str(tmp_path / f"{NAME}{os.geteuid()}-0123"), trees)
    local_copy.make_private(copy.directory)
    content = pack(trees, tmp_path).path.read_bytes()
    unpacker = Unpacker(copy.directory)
    for start in range(0, len(content), 1_000_003):
        unpacker.feed(memoryview(content[start : start + 1_000_003]))
    unpacker.close()
    local_copy.settle(copy)
    return copy


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment with a package, whose compiled form is there, and a console script."""
    path = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True, timeout=60)
    site = next(path.glob("lib/python3*/site-packages"))
    (site / "told").mkdir()
    (site / "told" / "__init__.py").write_text(
        "import sys\nprint(sys.prefix, __file__, sys.flags.no_user_site)\n"
    )
    (site / "inside.pth").write_text(f"{site}/told\n")
    (path / "bin" / "tell").write_text(f"#!{path}/bin/python -s\nimport told\n")
    (path / "bin" / "tell").chmod(0o750)
    (path / "bin" / "elsewhere").write_text(f"#!{path}-other/bin/python\n")
    (path / "bin" / "program").write_bytes(b"\x7fELF\0" + str(path).encode())
    subprocess.run([path / "bin/python", "-m", "compileall", "-q", site / "told"], check=True, timeout=60)
    assert list(site.glob("told/__pycache__/*.pyc"))
    return path


def test_python_and_scripts_run_from_the_copy_with_the_compiled_files_that_came_along(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(environment))
    # Without the interpreter's own tree, which is large; tests/slurm/test_broadcast_env.py has it.
    copy = made_copy(tmp_path, (Tree(str(environment), "env"),))
    environment.rename(tmp_path / "gone")  # whatever still leads there fails
    moved = Path(copy.directory, "env")
    ask = [moved / "bin/python", "-v", "-B", "-c", "import told"]
    done = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(f"{moved} {moved}/lib/python3")
    cached = next(moved.glob("lib/python3*/site-packages/told/__pycache__/*.pyc"))
    assert f"# {cached} matches " in done.stderr, "the compiled file is valid, as times came along"
    said = subprocess.run([moved / "bin/tell"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.startswith(f"{moved} ")
    assert said.endswith(" 1\n"), "the option of the script's first line is kept"
    assert (moved / "bin/elsewhere").read_text() == f"#!{environment}-other/bin/python\n"
    assert (moved / "bin/program").read_bytes() == b"\x7fELF\0" + str(environment).encode()
    assert next(moved.glob("lib/python3*/site-packages/inside.pth")).read_text().startswith(f"{moved}/lib")
    assert Path(copy.directory).stat().st_mode & 0o777 == 0o700
    local_copy.remove(copy.directory)
    assert not Path(copy.directory).exists()


COPY = LocalCopy("/local/c", (Tree("/shared/env", "env"), Tree("/apps/python", "base", base=True)))


def test_paths_of_the_environment_become_the_copys_and_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/link/to/env")
    assert COPY.localized("/link/to/env/bin/python") == "/local/c/env/bin/python"
    assert COPY.localized("/shared/env/lib/x.so") == "/local/c/env/lib/x.so"
    assert COPY.localized("/apps/python/bin/python3") == "/local/c/base/bin/python3"
    for other in ("/shared/environment/x", "train.py", "--lr", "/home/me/train.py"):
        assert COPY.localized(other) == other


def test_the_ranks_variables_name_the_copy_before_the_original() -> None:
    found = COPY.variables(
        {
            "PATH": "/shared/env/bin:/usr/bin",
            "LD_LIBRARY_PATH": "/shared/env/lib:/opt/ucx/lib",
            "PYTHONPATH": "/shared/env/lib/more:/home/me/code",
            "VIRTUAL_ENV": "/shared/env",
        }
    )
    assert found == {
        "PATH": "/local/c/env/bin:/shared/env/bin:/usr/bin",
        "LD_LIBRARY_PATH": "/local/c/libpython:/local/c/env/lib:/shared/env/lib:/opt/ucx/lib",
        "PYTHONPATH": "/local/c/env/lib/more:/home/me/code",
        "VIRTUAL_ENV": "/local/c/env",
    }
    without_base = LocalCopy("/local/c", COPY.trees[:1])
    assert without_base.variables({"PATH": "/bin"}) == {"PATH": "/local/c/env/bin:/bin"}


def test_copies_go_where_jobs_keep_such_things() -> None:
    places = {"SLURM_TMPDIR": "/scratch/job7", "TMPDIR": "/var/tmp"}
    assert local_copy.place_for_copies("/nvme", places) == "/nvme"
    assert local_copy.place_for_copies("", places) == "/scratch/job7"
    assert local_copy.place_for_copies("", {"TMPDIR": "/var/tmp"}) == "/var/tmp"
    assert local_copy.place_for_copies("", {}) == "/tmp"


def test_a_directory_that_somebody_else_has_made_or_could_exchange_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(LaunchError, match=r"open can be changed by other users.*--broadcast-to"):
        local_copy.make_private(str(tmp_path / "open" / "copy"))
    (tmp_path / "open").chmod(0o1777)
    local_copy.make_private(str(tmp_path / "open" / "copy"))
    with pytest.raises(LaunchError, match=r"is there already.*shared by several nodes"):
        local_copy.make_private(str(tmp_path / "open" / "copy"))
    (tmp_path / "open" / "link").symlink_to(tmp_path)
    with pytest.raises(LaunchError, match="is there already"):
        local_copy.make_private(str(tmp_path / "open" / "link"))


@pytest.mark.parametrize("parent", ["missing", "file"])
def test_a_place_where_no_directory_can_be_made_is_named_with_the_option(parent: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o600)
    with pytest.raises(LaunchError, match=rf"no copy can be made in .*{parent} \(.*with --broadcast-to"):
        local_copy.make_private(str(tmp_path / parent / "copy"))


def test_too_little_room_is_said_before_anything_is_unpacked(tmp_path: Path) -> None:
    room = os.statvfs(tmp_path)
    local_copy.require_room(str(tmp_path), 4096, 1)
    with pytest.raises(LaunchError, match=r"takes .* but .* has .* left: .*--broadcast-to"):
        local_copy.require_room(str(tmp_path), room.f_bavail * room.f_frsize, 1)
    if room.f_files:
        with pytest.raises(LaunchError, match=r"files, but .* has room for"):
            local_copy.require_room(str(tmp_path), 4096, room.f_favail)


def test_a_broken_stream_is_reported_at_the_end_however_much_was_fed(tmp_path: Path) -> None:
    unpacker = Unpacker(str(tmp_path))
    for _ in range(20):
        unpacker.feed(memoryview(b"this is no tar at all" * 50_000))
    with pytest.raises(LaunchError, match=r"tar could not unpack the environment: .*tar"):
        unpacker.close()


def test_only_copies_of_this_users_are_removed(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="does not begin with hpcpar-env-"):
        local_copy.remove(str(tmp_path))
    (tmp_path / f"{NAME}link").symlink_to(tmp_path)
    with pytest.raises(LaunchError, match="left alone"):
        local_copy.remove(str(tmp_path / f"{NAME}link"))
    local_copy.remove(str(tmp_path / f"{NAME}gone"))
    (tmp_path / "file").touch()
    local_copy.remove(str(tmp_path / "file" / f"{NAME}gone"))  # nor could it be made there
    assert tmp_path.exists()


def test_leftovers_are_removed_when_they_are_old_and_nobody_uses_them(tmp_path: Path) -> None:
    names = {name: tmp_path / f"{NAME}{os.geteuid()}-{name}" for name in ("old", "used", "new")}
    for path in (*names.values(), tmp_path / f"{NAME}{os.geteuid() + 1}-other"):
        path.mkdir()
        if path != names["new"]:
            os.utime(path, (time.time() - 7200, time.time() - 7200))
    user = subprocess.Popen([sys.executable, "-c", "input()", names["used"]], stdin=subprocess.PIPE)
    try:
        assert local_copy.remove_leftovers(str(tmp_path)) == [str(names["old"])]
    finally:
        user.communicate(b"\n", timeout=30)
    assert sorted(path.name.rpartition("-")[2] for path in tmp_path.iterdir()) == ["new", "other", "used"]


@pytest.mark.parametrize(
    ("per_node", "node", "ranks"), [("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("1,3", 1, 3), ("1", 0, 1)]
)
def test_the_nodes_last_rank_removes_the_copy(tmp_path: Path, per_node: str, node: int, ranks: int) -> None:
    copy = tmp_path / "copy"
    (copy / "ended").mkdir(parents=True)
    (copy / "after-rank").write_text(local_copy.AFTER_RANK_TEXT)
    for local_rank in range(ranks):
        assert copy.exists(), f"after {local_rank} of {ranks} ranks"
        told = {
            "SLURM_STEP_TASKS_PER_NODE": per_node,
            "SLURM_NODEID": str(node),
            "SLURM_LOCALID": str(local_rank),
            "PATH": os.environ["PATH"],
        }
        subprocess.run(["sh", copy / "after-rank"], env=told, check=True, timeout=30)
    assert not copy.exists()
