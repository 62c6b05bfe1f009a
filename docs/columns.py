"""Columns of docstrings: `name   meaning`, where lines further to the right belong to the meaning."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

# A line that begins with `*`, `-` or `1.` is of a list.
ROW = re.compile(r"(?![*-] |\d+\. )(?P<name>\S+(?: \S+){0,6}?) {2,}(?P<meaning>\S.*)")


def rows_of(lines: Sequence[str]) -> list[tuple[str, str]] | None:
    """Return names and meanings if the lines are columns; None if they are prose or code."""
    rows: list[tuple[str, str]] = []
    for line in lines:
        match = ROW.fullmatch(line)
        if match is not None:
            rows.append((match["name"], match["meaning"]))
        elif line.startswith("  ") and rows:
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {line.strip()}")
        else:
            return None
    return rows


def split_columns(lines: Sequence[str]) -> tuple[Sequence[str], list[tuple[str, str]]]:
    """Divide a paragraph into prose and the rows that follow it, to its end."""
    for start in range(len(lines)):
        rows = rows_of(lines[start:])
        if rows:
            return lines[:start], rows
    return lines, []


def paragraphs(docstring: str) -> Iterator[list[str]]:
    """Yield the lines of each paragraph of a docstring without its indentation."""
    for paragraph in re.split(r"\n[ \t]*\n", docstring.strip("\n")):
        yield paragraph.split("\n")


def cell(text: str) -> str:
    """Escape what has a meaning to Markdown in a cell of a table, but in `code`."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part.replace("|", r"\|") if n % 2 else re.sub(r"(?<!\\)([*<|])", r"\\\1", part)
        for n, part in enumerate(parts)
    )
