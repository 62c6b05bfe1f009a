"""Extension of griffe: a docstring's columns, `name   meaning`, become a table of Markdown.

Text that is indented by four spaces is code already, by Markdown's own rule.
"""

from __future__ import annotations

import sys
from pathlib import Path

import griffe

sys.path.insert(0, str(Path(__file__).parent))  # griffe loads this file by its path
from columns import cell, paragraphs, split_columns


def as_markdown(docstring: str) -> str:
    """Turn each paragraph's columns into a table; keep code and prose, whose special letters are escaped."""
    made = []
    for lines in paragraphs(docstring):
        if lines[0].startswith("    "):
            made.append("\n".join(lines))
            continue
        prose, rows = split_columns(lines)
        if prose:
            made.append("\n".join(map(cell, prose)))
        if rows:
            named = ((name if "`" in name else f"`{name}`", cell(meaning)) for name, meaning in rows)
            made.append("\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in named)]))
    return "\n\n".join(made)


class Columns(griffe.Extension):
    """Rewrites each docstring when it is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
