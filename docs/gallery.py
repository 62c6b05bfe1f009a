"""The gallery: `make gallery` draws the pictures of gallery.toml; `docs/generate.py` makes its page.

python docs/gallery.py             # draws all of them
python docs/gallery.py mesh zero   # those whose file's name has one of these words
"""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
LIST = ROOT / "docs" / "gallery.toml"


class Picture(NamedTuple):
    """A picture of the list.

    file    below docs/
    after   command that must have run before; empty: none
    """

    section: str
    shows: str
    file: str
    command: str
    after: str = ""


LISTED = tomllib.loads(LIST.read_text("utf-8"))
PICTURES = [Picture(**each) for each in LISTED["pictures"]]


def page() -> str:
    """Return gallery.md."""
    lines = [
        "# Gallery",
        "",
        "Each picture is drawn by the command below it and `--output FILE`; with `--dark` light on dark.",
        "`make gallery` draws them, from the list `docs/gallery.toml`; [Pictures](pictures.md) explains",
        "them. RUN is the output directory of a run, MODEL a preset or a file.",
        "",
    ]
    for section, found in itertools.groupby(PICTURES, key=lambda each: each.section):
        lines += [f"## {section}", ""]
        for each in found:
            lines += [f"![{each.shows}]({each.file})", ""]
            lines += [f"{each.shows}: `{each.command}`", ""]
    lines += ["## Figures of courses and papers", "", "| figure | command |", "|---|---|"]
    lines += [f"| {figure} | `{command}` |" for figure, command in LISTED["figures"].items()]
    return "\n".join(lines)


def draw(words: list[str]) -> None:
    """Draw the pictures whose names have one of these words; without words, all."""
    os.chdir(ROOT)
    done = set()
    for each in PICTURES:
        if words and not any(word in each.file for word in words):
            continue
        if each.after and each.after not in done:
            subprocess.run(shlex.split(each.after), check=True)
            done.add(each.after)
        print(f"{each.file}: {each.command}", flush=True)
        drawn = [*shlex.split(each.command), "--output", f"docs/{each.file}"]
        subprocess.run(drawn, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    draw(sys.argv[1:])
