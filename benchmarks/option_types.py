"""Types of options, for argparse: what would measure nothing, never end, or lose its results is refused."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def at_least(least: int, parse: Callable[[str], int] = int) -> Callable[[str], int]:
    """Numbers from `least` on."""

    def number(text: str) -> int:
        found = parse(text)
        if found < least:
            raise argparse.ArgumentTypeError(f"{text}: it takes at least {least}")
        return found

    return number


def output_file(text: str) -> Path:
    """A file that can be written when all has been measured."""
    path = Path(text)
    _refuse_what_cannot_be_written(path)
    return path


def picture_file(text: str) -> Path:
    """An output file of a format that can be drawn: PNG, SVG or PDF."""
    path = Path(text)
    _refuse_what_cannot_be_written(picture=path)
    return path


def _refuse_what_cannot_be_written(*paths: Path, picture: Path | None = None) -> None:
    # Here, for a peer's Python may know nothing of hpcpar.
    from hpcpar.cli.bench import require_writable
    from hpcpar.errors import ConfigError

    try:
        require_writable(*paths, picture=picture)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
