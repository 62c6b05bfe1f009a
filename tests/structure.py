"""Print the shape of the code: sizes by package, the longest functions, the largest classes and files, names.

    python tests/structure.py [DIRECTORY]          (`make structure`)

Each list has everything beyond the aim that its title states, or at least the first ten. Nothing fails: the
aims are in docs/design.md. Lines are all lines of a file; tests are counted by the directory they mirror.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "hpcpar"
SHOWN = 10
MOST_LINES, MOST_PARAMETERS, MOST_METHODS, MOST_FILE_LINES = 60, 8, 25, 500
OPENINGS = re.compile(r"(What|Whether|Of|The same|Where|As|How|One that)\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Found(NamedTuple):
    """A definition and where it is.

    size   lines of a function or file, methods of a class
    """

    size: int
    place: str
    name: str


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def package_of(path: Path, top: Path) -> str:
    parts = path.relative_to(top).parts
    return parts[0] if len(parts) > 1 else "(top)"


def sizes(top: Path) -> dict[str, tuple[int, int]]:
    """Return (files, lines) by first directory below `top`."""
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for path in sorted(top.rglob("*.py")):
        files, lines = found[package_of(path, top)]
        found[package_of(path, top)] = (files + 1, lines + lines_of(path))
    return dict(found)


def definitions(top: Path) -> Iterator[tuple[str, ast.AST]]:
    """Yield ("file.py:line", node) of every function, class and module."""
    for path in sorted(top.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, (*Function.__args__, ast.ClassDef, ast.Module)):
                yield f"{path.relative_to(top.parent)}:{getattr(node, 'lineno', 1)}", node


def parameters(function: Function) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([each for each in named if each.arg not in ("self", "cls")])


def functions(top: Path) -> list[tuple[Found, int]]:
    """Return every function with its number of parameters, the longest first."""
    found = [
        (Found((node.end_lineno or node.lineno) - node.lineno + 1, place, node.name), parameters(node))
        for place, node in definitions(top)
        if isinstance(node, Function)
    ]
    return sorted(found, reverse=True)


def classes(top: Path) -> list[Found]:
    """Return every class with its number of methods, the largest first."""
    return sorted(
        (
            Found(sum(isinstance(each, Function) for each in node.body), place, node.name)
            for place, node in definitions(top)
            if isinstance(node, ast.ClassDef)
        ),
        reverse=True,
    )


def docstring_openings(top: Path) -> list[Found]:
    """Return the docstrings, of modules, classes and functions, that open with a word of OPENINGS."""
    found = []
    for place, node in definitions(top):
        assert isinstance(node, (*Function.__args__, ast.ClassDef, ast.Module))
        text = ast.get_docstring(node) or ""
        if OPENINGS.match(text):
            found.append(Found(1, place, text.splitlines()[0]))
    return found


def duplicates(found: Sequence[Found]) -> dict[str, list[str]]:
    """Return the places of the names that occur more than once."""
    places: dict[str, list[str]] = defaultdict(list)
    for each in found:
        places[each.name].append(each.place)
    return {name: sorted(where) for name, where in sorted(places.items()) if len(where) > 1}


def report(root: Path) -> Iterator[str]:
    """Yield the lines of the report."""
    top = root / PACKAGE
    tests = sizes(root / "tests")
    packages = sizes(top)
    yield f"{'package':<22}{'files':>7}{'lines':>9}{'tests':>9}"
    for name, (count, lines) in sorted(packages.items(), key=lambda each: -each[1][1]):
        yield f"{name:<22}{count:>7}{lines:>9,}{tests.get(name, (0, 0))[1]:>9,}"
    rest = sum(lines for name, (_, lines) in tests.items() if name not in packages)
    yield f"{'other tests':<22}{'':>7}{'':>9}{rest:>9,}"
    totals = [sum(each[at] for each in packages.values()) for at in (0, 1)]
    yield f"{'all':<22}{totals[0]:>7}{totals[1]:>9,}{sum(lines for _, lines in tests.values()):>9,}"

    every = functions(top)
    yield from listed("functions", "lines", MOST_LINES, [each for each, _ in every])
    many = sorted((each._replace(size=count) for each, count in every), reverse=True)
    yield from listed("functions", "parameters", MOST_PARAMETERS, many)
    all_classes = classes(top)
    yield from listed("classes", "methods", MOST_METHODS, all_classes)
    files = [Found(lines_of(path), str(path.relative_to(root)), path.name) for path in top.rglob("*.py")]
    yield from listed("files", "lines", MOST_FILE_LINES, sorted(files, reverse=True))
    own = [f for f in files if f.name not in ("__init__.py", "__main__.py")]
    for title, names in (("file", duplicates(own)), ("class", duplicates(all_classes))):
        yield f"\n{title} names that occur more than once: {len(names)}"
        yield from (f"  {name:<28}{', '.join(where)}" for name, where in names.items())
    opened = docstring_openings(top)
    yield f"\ndocstrings that open with {OPENINGS.pattern[1:-3].replace('|', ', ')}: {len(opened)}"
    yield from (f"  {each.place}  {each.name}" for each in opened)


def listed(what: str, unit: str, limit: int, found: Sequence[Found]) -> Iterator[str]:
    """Yield a title, and all over the limit or the first SHOWN; `found` has the largest first."""
    over = sum(each.size > limit for each in found)
    yield f"\n{what} over {limit} {unit}: {over}"
    yield from (f"{each.size:>6}  {each.place}  {each.name}" for each in found[: max(over, SHOWN)])


if __name__ == "__main__":
    print("\n".join(report(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)))
