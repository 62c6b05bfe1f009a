"""Extension of griffe: a docstring's columns, `name   meaning`, become a table of Markdown.

Text that is indented by four spaces is code already, by Markdown's own rule.
"""

from __future__ import annotations

import sys
from pathlib import Path

import griffe

sys.path.insert(0, str(Path(__file__).parent))  # griffe loads this file by its path
from columns import cell, paragraphs, split_columns


def escaped(line: str) -> str:
    """Escape a line of prose, which may be an item of a list."""
    return f"*{cell(line[1:])}" if line.startswith("* ") else cell(line)


def as_markdown(docstring: str) -> str:
    """Turn each paragraph's columns into a table; keep code and prose, whose special letters are escaped."""
    made = []
    for lines in paragraphs(docstring):
        if lines[0].startswith("    "):
            made.append("\n".join(lines))
            continue
        prose, rows = split_columns(lines)
        if prose:
            made.append("\n".join(map(escaped, prose)))
        if rows:
            named = ((name if "`" in name else f"`{name}`", cell(meaning)) for name, meaning in rows)
            made.append("\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in named)]))
    return "\n\n".join(made)


class Columns(griffe.Extension):
    """Rewrites each docstring when it is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
