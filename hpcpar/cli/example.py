"""`hpcpar example [NAME]`: list the examples that come with the package, or write one to start from."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

import click

import hpcpar
from hpcpar.errors import did_you_mean

SUFFIXES = (".py", ".toml")


@click.command()
@click.argument("name", required=False)
def example(name: str | None) -> None:
    """Write the example NAME into the current directory; without NAME list all of them.

    A file that is there already is left as it is.
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
    path = _found(name, files)
    target = Path(path.name)
    if target.exists():
        raise click.ClickException(f"{target} is here already; move it away, or go to another directory")
    shutil.copyfile(path, target)
    start = f"hpcpar train {target}" if target.suffix == ".toml" else f"hpcpar run -n 2 {target}"
    click.echo(f"written: {target}; start it by {start}")


def examples() -> list[Path]:
    """Return the examples' files by name: of the installed package, else of the checkout that it is in."""
    package = Path(hpcpar.__file__).parent
    for directory in (package / "examples", package.parent / "examples"):
        if directory.is_dir():
            return sorted(path for path in directory.iterdir() if path.suffix in SUFFIXES)
    return []


def summary(path: Path) -> str:
    """Return the first line of a program's docstring, or the first sentence of a TOML file's comment."""
    text = path.read_text(encoding="utf-8")
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
