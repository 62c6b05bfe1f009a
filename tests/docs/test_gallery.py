"""The gallery's list: its commands are commands, its files are there, and no picture of docs/ is missing."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path
from types import ModuleType

import click
import pytest
from PIL import Image

from hpcpar.cli import group
from hpcpar.cli.picture import DPI, WIDTH_INCHES

DOCS = Path(__file__).parents[2] / "docs"
SUFFIXES = (".png", ".gif", ".svg")
LARGEST_NBYTES = 100_000


@pytest.fixture
def gallery(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("gallery")


def parse(words: list[str]) -> click.Command:
    """Parse a line as the command line does, without running it; click's errors as they are."""
    name, *words = words
    assert name == "hpcpar"
    command: click.Command = group
    context = command.make_context(name, words)
    while isinstance(command, click.Group):
        name, found, words = command.resolve_command(context, [*context._protected_args, *context.args])
        assert name is not None
        assert found is not None
        command, context = found, found.make_context(name, words, parent=context)
    return command


def test_every_command_is_one_of_the_command_line(gallery: ModuleType, tmp_path: Path) -> None:
    commands = [f"{each.command} --output a.png" for each in gallery.PICTURES]
    commands += gallery.LISTED["figures"].values()
    for line in commands:
        words = [str(tmp_path) if word in ("RUN", "runs/drawn") else word for word in shlex.split(line)]
        if words[0] == "python":
            assert (DOCS.parent / words[1]).is_file()
        else:
            parse(words)
    with pytest.raises(click.UsageError, match="--siez"):
        parse(["hpcpar", "draw", "ring", "--siez", "4"])


def test_every_picture_of_docs_is_in_the_list_and_small(gallery: ModuleType) -> None:
    elsewhere = gallery.LISTED["elsewhere"]
    listed = [each.file for each in gallery.PICTURES] + list(elsewhere)
    there = [path for path in DOCS.rglob("*") if path.suffix in SUFFIXES]
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in there)
    assert [path.name for path in there if path.stat().st_size > LARGEST_NBYTES] == []
    for file, page in elsewhere.items():
        assert f"({file})" in (DOCS / page).read_text("utf-8"), page


def test_pictures_have_the_width_of_a_page(gallery: ModuleType) -> None:
    for each in gallery.PICTURES:
        with Image.open(DOCS / each.file) as picture:
            assert picture.width == WIDTH_INCHES * DPI, each.file
