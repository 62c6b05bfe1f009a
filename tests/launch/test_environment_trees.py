"""What a Python environment consists of: what comes along, what is left out, what becomes of links."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hpcpar.errors import LaunchError
from hpcpar.launch.environment_trees import Tree, entries, key_of, moved_path, trees_of_this_python


def write(root: Path, *names: str, text: str = "") -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Tree, ...]:
    """A virtual environment and the interpreter that it was made from."""
    write(
        tmp_path / "python",
        "bin/python3.11",
        "bin/pip",
        "lib/libpython3.11.so.1.0",
        "lib/libssl.so",
        "lib/python3.11/os.py",
        "lib/python3.11/__pycache__/os.cpython-311.pyc",
        "lib/python3.11/test/test_os.py",
        "lib/python3.11/config-3.11-x86_64-linux-gnu/libpython3.11.a",
        "lib/python3.11/site-packages/pip/__init__.py",
        "lib/other/data",
        "include/python3.11/Python.h",
        "share/man/python.1",
        "envs/other/bin/python",
    )
    write(
        tmp_path / "env",
        "lib/python3.11/site-packages/numpy/__init__.py",
        "lib/python3.11/site-packages/numpy/__pycache__/__init__.cpython-311.pyc",
        "lib/python3.11/site-packages/numpy/tests/test_array.py",
        ".hpcpar-packed/0123.tar",
        "pkgs/downloaded.conda",
    )
    write(tmp_path / "env", "pyvenv.cfg", text="home = /x\ninclude-system-site-packages = false\n")
    (tmp_path / "env/bin").mkdir()
    (tmp_path / "env/bin/python3").symlink_to(tmp_path / "python/bin/python3.11")
    (tmp_path / "env/bin/python").symlink_to("python3")
    return (Tree(str(tmp_path / "env"), "env"), Tree(str(tmp_path / "python"), "base", base=True))


def files(trees: tuple[Tree, ...]) -> dict[str, str]:
    """Name -> target of all that are no directories."""
    return {entry.name: entry.target for entry in entries(trees) if not entry.mode & 0o040000}


def test_the_environment_comes_whole_and_of_its_base_what_a_rank_can_need(trees: tuple[Tree, ...]) -> None:
    site = "env/lib/python3.11/site-packages"
    assert files(trees) == {
        "env/bin/python": "python3",
        "env/bin/python3": "../../base/bin/python3.11",
        f"{site}/numpy/__init__.py": "",
        f"{site}/numpy/__pycache__/__init__.cpython-311.pyc": "",
        f"{site}/numpy/tests/test_array.py": "",
        "env/pyvenv.cfg": "",
        "base/bin/python3.11": "",
        "base/include/python3.11/Python.h": "",
        "base/lib/libpython3.11.so.1.0": "",
        "base/lib/libssl.so": "",
        "base/lib/python3.11/__pycache__/os.cpython-311.pyc": "",
        "base/lib/python3.11/os.py": "",
    }


def test_packages_of_the_base_come_along_where_the_environment_sees_them(
    trees: tuple[Tree, ...], tmp_path: Path
) -> None:
    write(tmp_path / "env", "pyvenv.cfg", text="include-system-site-packages = true\n")
    assert "base/lib/python3.11/site-packages/pip/__init__.py" in files(trees)


def test_links_lead_to_the_copy_or_to_the_system_or_become_files(
    trees: tuple[Tree, ...], tmp_path: Path
) -> None:
    write(tmp_path, "cache/wheel/module.py", text="content")
    site = tmp_path / "env/lib/python3.11/site-packages"
    (site / "inside.py").symlink_to(site / "numpy/__init__.py")
    (site / "outside.py").symlink_to(tmp_path / "cache/wheel/module.py")
    (site / "outside").symlink_to(tmp_path / "cache/wheel")
    (site / "system").symlink_to("/usr/bin/env")
    (site / "broken").symlink_to("nowhere")
    found = {entry.name.rpartition("/")[2]: entry for entry in entries(trees)}
    assert found["inside.py"].target == "numpy/__init__.py"
    assert (found["outside.py"].target, found["outside.py"].nbytes) == ("", len("content"))
    assert found["outside"].target == str(tmp_path / "cache/wheel")
    assert found["system"].target == "/usr/bin/env"
    assert found["broken"].target == "nowhere"


@pytest.mark.parametrize("way", ["a path", "a finder"])
def test_an_editable_install_becomes_an_ordinary_one(
    trees: tuple[Tree, ...], tmp_path: Path, way: str
) -> None:
    write(
        tmp_path / "project",
        "mine/__init__.py",
        "mine/deep/module.py",
        "single.py",
        "setup.py",
        "runs/huge.bin",
        ".git/HEAD",
    )
    site = tmp_path / "env/lib/python3.11/site-packages"
    if way == "a path":
        write(site, "__editable__.mine.pth", text=f"# a comment\n{tmp_path}/project\nimport sys\n")
    else:
        write(
            site,
            "__editable__.mine.pth",
            text="import __editable___mine_finder; __editable___mine_finder.install()",
        )
        mapping = {"mine": f"{tmp_path}/project/mine", "single": f"{tmp_path}/project/single"}
        write(
            site,
            "__editable___mine_finder.py",
            text=f"MAPPING: dict[str, str] = {mapping!r}\nNAMESPACES = {{}}\n",
        )
    found = {entry.name.partition("site-packages/")[2]: entry for entry in entries(trees)}
    assert found["mine/deep/module.py"].source == f"{tmp_path}/project/mine/deep/module.py"
    assert {"mine", "mine/__init__.py", "single.py"} <= set(found)
    assert not {"setup.py", "runs", "runs/huge.bin", ".git"} & set(found)
    kept = b"# a comment\nimport sys\n" if way == "a path" else b""
    assert found["__editable__.mine.pth"].content == kept


def test_other_environments_packages_and_unknown_hooks_stay_where_they_are(
    trees: tuple[Tree, ...], tmp_path: Path
) -> None:
    write(tmp_path, "other/site-packages/torch/__init__.py")
    site = tmp_path / "env/lib/python3.11/site-packages"
    write(site, "others.pth", text=f"{tmp_path}/other/site-packages\nimport _some_loader\n/nowhere\n")
    found = {entry.name.partition("site-packages/")[2]: entry for entry in entries(trees)}
    assert "torch" not in found
    assert found["others.pth"].content is None


def test_the_key_changes_with_what_is_there_and_with_nothing_else(
    trees: tuple[Tree, ...], tmp_path: Path
) -> None:
    keys = [key_of(list(entries(trees)))]
    assert key_of(list(entries(trees))) == keys[0]
    write(tmp_path / "env", ".hpcpar-packed/4567.tar")
    assert key_of(list(entries(trees))) == keys[0]
    module = tmp_path / "env/lib/python3.11/site-packages/numpy/__init__.py"
    os.utime(module, ns=(0, 1))
    keys.append(key_of(list(entries(trees))))
    module.chmod(0o755)
    keys.append(key_of(list(entries(trees))))
    write(tmp_path / "env", "lib/python3.11/site-packages/new.py")
    keys.append(key_of(list(entries(trees))))
    assert len(set(keys)) == 4


def test_pythonpath_brings_site_packages_but_not_peoples_directories(tmp_path: Path) -> None:
    for name in ("module/site-packages", "project"):
        (tmp_path / name).mkdir(parents=True)
    paths = [str(tmp_path / "project"), str(tmp_path / "module/site-packages"), ""]
    trees = trees_of_this_python({"PYTHONPATH": os.pathsep.join(paths)})
    assert trees[0] == Tree(os.path.realpath(sys.prefix), "env")
    assert trees[-1] == Tree(str(tmp_path / "module/site-packages"), "path/1")
    assert moved_path(f"{tmp_path}/module/site-packages/x.py", trees) == "path/1/x.py"
    assert moved_path(f"{tmp_path}/project/x.py", trees) is None


def test_the_systems_own_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/usr")
    with pytest.raises(LaunchError, match=r"system's own \(/usr\).*-m venv"):
        trees_of_this_python({})
