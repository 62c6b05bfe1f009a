"""`hpcpar example [NAME]`: list the examples that come with the package, or write one to start from."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import click

import hpcpar
from hpcpar.errors import did_you_mean

STARTED_BY = {".py": "hpcpar run -n 2", ".toml": "hpcpar train", ".ipynb": "jupyter notebook"}
"""Commands by the suffixes that examples have."""

COURSE = "course"
"""Directory of the notebooks, and the name by which all of them are written."""


@click.command()
@click.argument("name", required=False)
def example(name: str | None) -> None:
    """Write the example NAME into the current directory; without NAME list all of them.

    `course` writes all notebooks. A file that is there already is left as it is.
    """
    files = {path.name: path for path in examples()}
    if not files:
        raise click.ClickException(
            "the examples are not beside this installation of hpcpar; they are in its source distribution"
        )
    if name is None:
        width = max(map(len, files))
        for path in files.values():
            click.echo(f"{path.name:{width}}  {summary(path)}")
        return
    wanted = [path for path in files.values() if name == path.parent.name == COURSE] or [_found(name, files)]
    for path in wanted:
        if Path(path.name).exists():
            raise click.ClickException(
                f"{path.name} is here already; move it away, or go to another directory"
            )
    for path in wanted:
        shutil.copyfile(path, path.name)
        click.echo(f"written: {path.name}; start it by {STARTED_BY[path.suffix]} {path.name}")


def examples() -> list[Path]:
    """Return the examples' files by name: of the installed package, else of the checkout that it is in."""
    package = Path(hpcpar.__file__).parent
    for directory in (package / "examples", package.parent / "examples"):
        if directory.is_dir():
            found = (*directory.iterdir(), *directory.glob(f"{COURSE}/*"))
            return sorted(path for path in found if path.suffix in STARTED_BY)
    return []


def summary(path: Path) -> str:
    """Return a program's docstring's first line, a notebook's title, or a TOML comment's first sentence."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        title: str = json.loads(text)["cells"][0]["source"][0]
        return title.strip("# \n") + "."
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return " ".join(_comment(text)).partition(". ")[0] + "."


def _comment(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if not line.startswith("#"):
            return
        yield line.removeprefix("#").strip()


def _found(name: str, files: dict[str, Path]) -> Path:
    """Return the file of a name with or without its suffix."""
    meant = [path for path in files.values() if name in (path.name, path.stem)]
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise click.UsageError(
            f"{name!r} may be {' or '.join(path.name for path in meant)}; write one of them"
        )
    hint = did_you_mean(name, [*files, *(path.stem for path in files.values())])
    raise click.UsageError(f"no example is called {name!r}; {hint}`hpcpar example` lists them")
