"""What a Python environment consists of, for a copy of it to run elsewhere.

    DIRECTORY/env/       sys.prefix: the virtual (or conda) environment
    DIRECTORY/base/      the interpreter and standard library below it, unless they are the system's (/usr)
    DIRECTORY/path/0/    site-packages that PYTHONPATH names, as environment modules do

Left out is what no rank can need: of the base, CPython's own tests and static library, and packages
that the environment does not see; of conda's root, its other environments and downloads. All else
comes along, compiled `.pyc` files first of all: without them every rank would compile every module.

An editable install (`pip install -e`) becomes an ordinary one: the packages that it stands for are put into
site-packages. What this does not understand stays as it is, and is imported from where it lies.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpcpar.errors import LaunchError

SYSTEM = ("/usr", "/bin", "/lib", "/lib64")
"""What every node has on its own disk."""

PACKED_DIRECTORY = ".hpcpar-packed"
"""Where packed environments are kept, in the environment itself."""

NOT_OF_CONDA = ("pkgs", "envs", "conda-bld")
NOT_OF_THE_BASE = re.compile(r"test|idlelib|turtledemo|ensurepip|config-.*|site-packages|dist-packages")
NOT_OF_A_PROJECT = ("setup.py", "conftest.py", "noxfile.py")

_FINDER = re.compile(r"import (__editable___\w+_finder)\b")


@dataclass(frozen=True, slots=True)
class Tree:
    """A directory that is taken along.

    source   where it lies now
    name     where it will, below the copy's directory
    base     it is the interpreter's, of which much is left out
    """

    source: str
    name: str
    base: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, directory or link of the copy.

    name     below the copy's directory
    source   where its content is
    content  what is in it instead, if it had to be changed
    target   of a symbolic link
    """

    name: str
    source: str
    mode: int
    nbytes: int = 0
    mtime_ns: int = 0
    content: bytes | None = None
    target: str = ""


def trees_of_this_python(environ: Mapping[str, str] = os.environ) -> tuple[Tree, ...]:
    """What this interpreter's environment consists of; LaunchError where it is the system's own."""
    prefix, base = os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)
    if _below(prefix, SYSTEM):
        raise LaunchError(
            f"this Python is the system's own ({sys.prefix}), which every node has on its disk: to take "
            f"packages along, install them into a virtual environment (`python3 -m venv`) and use that"
        )
    trees = [Tree(prefix, "env")]
    if base != prefix and not _below(base, SYSTEM):
        trees.append(Tree(base, "base", base=True))
    for number, path in enumerate(environ.get("PYTHONPATH", "").split(os.pathsep)):
        real = os.path.realpath(path)
        # Other directories there are somebody's sources, with who knows what beside them.
        if _is_site(path) and os.path.isdir(real) and not _below(real, (*SYSTEM, prefix, base)):
            trees.append(Tree(real, f"path/{number}"))
    return tuple(trees)


def _below(path: str, directories: tuple[str, ...]) -> bool:
    return any(path == directory or path.startswith(directory + os.sep) for directory in directories)


def _is_site(path: str) -> bool:
    return os.path.basename(path.rstrip(os.sep)) in ("site-packages", "dist-packages")


def entries(trees: tuple[Tree, ...]) -> Iterator[Entry]:
    """Everything that the copy has, directories before what is in them; sorted, so the same every time."""
    sees_base = _sees_base_packages(trees[0])
    for tree in trees:
        yield _directory(tree.source, tree.name)
        editable = _editable(tree, trees) if not tree.base else Editable()
        yield from _walk(tree, tree.source, trees, editable, sees_base)
        for name, source in sorted(editable.packages.items()):
            yield from _package(name, source, trees)


def _sees_base_packages(environment: Tree) -> bool:
    """Whether a virtual environment was made with --system-site-packages."""
    try:
        text = Path(environment.source, "pyvenv.cfg").read_text("utf-8")
    except OSError:
        return False
    return (
        re.search(r"^include-system-site-packages\s*=\s*true", text, re.MULTILINE | re.IGNORECASE) is not None
    )


def _walk(
    tree: Tree, directory: str, trees: tuple[Tree, ...], editable: Editable, sees_base: bool
) -> Iterator[Entry]:
    relative = os.path.relpath(directory, tree.source)
    for item in sorted(os.scandir(directory), key=lambda item: item.name):
        inside = os.path.normpath(os.path.join(relative, item.name))
        if item.name == PACKED_DIRECTORY or _is_left_out(tree, inside, sees_base):
            continue
        name = os.path.join(tree.name, inside)
        if name in editable.changed:
            yield _changed(item.path, name, editable.changed[name])
        elif item.is_dir(follow_symlinks=False):
            yield _directory(item.path, name)
            yield from _walk(tree, item.path, trees, editable, sees_base)
        else:
            yield from _file_or_link(item.path, name, trees)


def _is_left_out(tree: Tree, inside: str, sees_base: bool) -> bool:
    parts = inside.split(os.sep)
    if not tree.base:
        return tree.name == "env" and inside in NOT_OF_CONDA
    if parts[0] == "bin":
        return len(parts) > 1 and not parts[1].startswith("python")
    if parts[0] in ("lib", "lib64"):
        if len(parts) == 2:
            return not (parts[1].startswith("python3") or ".so" in parts[1])
        if sees_base and len(parts) == 3 and _is_site(parts[2]):
            return False
        return len(parts) == 3 and NOT_OF_THE_BASE.fullmatch(parts[2]) is not None
    return parts[0] != "include"


def _directory(source: str, name: str) -> Entry:
    return Entry(name, source, stat.S_IFDIR | 0o700)


def _changed(source: str, name: str, content: bytes) -> Entry:
    return Entry(name, source, stat.S_IFREG | 0o600, len(content), os.stat(source).st_mtime_ns, content)


def _file_or_link(source: str, name: str, trees: tuple[Tree, ...]) -> Iterator[Entry]:
    """A regular file, or a link: kept where it leads to what comes along or to the system, else followed."""
    status = os.lstat(source)
    if stat.S_ISLNK(status.st_mode):
        target = os.path.join(os.path.dirname(source), os.readlink(source))
        moved = moved_path(os.path.normpath(target), trees)
        if moved is not None:
            yield Entry(name, source, status.st_mode, target=os.path.relpath(moved, os.path.dirname(name)))
            return
        if _below(os.path.realpath(source), SYSTEM) or not os.path.isfile(source):
            yield Entry(name, source, status.st_mode, target=target)
            return
        status = os.stat(source)
    if stat.S_ISREG(status.st_mode):
        yield Entry(name, source, status.st_mode, status.st_size, status.st_mtime_ns)


def moved_path(path: str, trees: tuple[Tree, ...]) -> str | None:
    """Where a path lies below the copy's directory; None for one that does not come along."""
    for tree in trees:
        if _below(path, (tree.source,)):
            return os.path.normpath(os.path.join(tree.name, os.path.relpath(path, tree.source)))
    return None


# --- editable installs


@dataclass(frozen=True)
class Editable:
    """Of one tree: packages to put into its site-packages, and `.pth` files that need not name them then."""

    packages: dict[str, str] = field(default_factory=dict)
    changed: dict[str, bytes] = field(default_factory=dict)


def _editable(tree: Tree, trees: tuple[Tree, ...]) -> Editable:
    found = Editable()
    sites = list(Path(tree.source).glob("lib*/python3*/site-packages"))
    if _is_site(tree.source):
        sites.append(Path(tree.source))
    for site in sites:
        for file in sorted(site.glob("*.pth")):
            try:
                lines = file.read_text("utf-8").splitlines()
            except (OSError, UnicodeDecodeError):
                continue
            kept = []
            for line in lines:
                packages = _named_by(line.strip(), site, trees)
                if not packages:
                    kept.append(line)
                for package, source in packages.items():
                    place = site / package
                    if not place.exists():
                        name = moved_path(str(place), trees)
                        assert name is not None, "site-packages is in a tree"
                        found.packages.setdefault(name, source)
            if kept != lines:
                name = moved_path(str(file), trees)
                assert name is not None, "site-packages is in a tree"
                found.changed[name] = "".join(f"{line}\n" for line in kept).encode()
    return found


def _named_by(line: str, site: Path, trees: tuple[Tree, ...]) -> dict[str, str]:
    """Packages (path below site-packages -> where it lies) that a line of a `.pth` file makes importable."""
    finder = _FINDER.match(line)
    if finder:
        return _mapping(site / f"{finder[1]}.py")
    if not line or line.startswith(("#", "import ", "import\t")):
        return {}
    directory = os.path.join(site, line)
    if _is_site(directory) or not os.path.isdir(directory) or moved_path(os.path.realpath(directory), trees):
        return {}
    return {
        item.name: item.path
        for item in os.scandir(directory)
        if item.name not in NOT_OF_A_PROJECT
        and (item.name.endswith((".py", ".so")) or os.path.isfile(os.path.join(item.path, "__init__.py")))
    }


def _mapping(finder: Path) -> dict[str, str]:
    """What setuptools' finder for an editable install maps names to: its MAPPING."""
    try:
        for statement in ast.parse(finder.read_text("utf-8")).body:
            match statement:
                case ast.AnnAssign(target=ast.Name(id="MAPPING"), value=ast.expr() as value):
                    return _placed(ast.literal_eval(value))
                case ast.Assign(targets=[ast.Name(id="MAPPING")], value=value):
                    return _placed(ast.literal_eval(value))
    except (OSError, SyntaxError, ValueError):
        pass  # of another make than those that we know: it stays as it is
    return {}


def _placed(mapping: Mapping[str, str]) -> dict[str, str]:
    """Module names to paths below site-packages: a package's directory, or a module's file."""
    placed = {}
    for name, source in mapping.items():
        path = name.replace(".", os.sep)
        module = source if os.path.exists(source) else f"{source}.py"
        if os.path.exists(module):
            placed[path if os.path.isdir(module) else f"{path}.py"] = module
    return placed


def _package(name: str, source: str, trees: tuple[Tree, ...]) -> Iterator[Entry]:
    if not os.path.isdir(source):
        yield from _file_or_link(source, name, trees)
        return
    yield _directory(source, name)
    for item in sorted(os.scandir(source), key=lambda item: item.name):
        yield from _package(os.path.join(name, item.name), item.path, trees)


def key_of(found: list[Entry]) -> str:
    """Changes with any name, link, size, mode or time of change; the contents are not read."""
    digest = hashlib.sha256(b"hpcpar environment 1\n")
    for entry in found:
        words = (entry.name, entry.mode, entry.nbytes, entry.mtime_ns, entry.target, entry.content)
        digest.update(repr(words).encode())
    return digest.hexdigest()[:24]
