"""The reference pages: keys of a run, environment variables, commands, made of the code; gallery and tables.

python docs/generate.py            # writes docs/reference/*.md, docs/gallery.md, tables of figures
python docs/generate.py --check    # exits with 1 where one differs

A key, a variable or an option without a description is an error that names it.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click
import gallery
import result_tables
from columns import cell

from hpcpar.cli import group
from hpcpar.launch.settings import INTERNAL, VARIABLES
from hpcpar.training.described_keys import NO_DEFAULT, described_keys
from hpcpar.training.usual_names import ELSEWHERE

ROOT = Path(__file__).parents[1]
HERE = ROOT / "docs" / "reference"
WIDTH = 100


def configuration() -> str:
    """Return the page of all keys."""
    lines = [
        "# Keys of a run",
        "",
        "This page is made from `hpcpar/training/config.py`: `python docs/generate.py`.",
        "",
        "A run is a TOML file, and `key=value` on the command line writes into it: `hpcpar train run.toml",
        "train.steps=600`. A key without a default has the one that its meaning says, or that of the preset.",
        "[What can be combined](../composition.md) says which values go together.",
        "",
    ]
    tables = itertools.groupby(described_keys(), key=lambda each: each.table)
    for table, keys in tables:
        lines += [f"## `[{table}]`", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for each in keys:
            if not each.meaning:
                raise SystemExit(f"hpcpar/training/config.py describes no {each.key}")
            meaning = re.sub(r"\bNone\b", "not given", cell(each.meaning))
            default = "" if each.default in NO_DEFAULT else f"`{each.default}`"
            lines.append(f"| `{each.key}` | {cell(each.kind)} | {default} | {meaning} |")
        lines.append("")
    lines += ["## Other trainers' names", "", "Asked for by these, the error names ours:", ""]
    lines += ["| ours | theirs |", "|---|---|"]
    for ours, theirs in ELSEWHERE.items():
        lines.append(f"| {cell(ours)} | {' '.join(f'`{name}`' for name in theirs.split())} |")
    return "\n".join(lines)


def environment() -> str:
    """Return the page of environment variables; SystemExit names those that the code has and no table."""
    text = "".join(path.read_text("utf-8") for path in sorted((ROOT / "hpcpar").rglob("*.py")))
    told = "".join(effect for effect, _ in VARIABLES.values())
    missing = {
        name
        for name in re.findall(r'"(HPCPAR_[A-Z_]*[A-Z])"', text)
        if name not in VARIABLES and name not in INTERNAL and name not in told
    }
    if missing:
        raise SystemExit(f"hpcpar/launch/settings.py describes no {', '.join(sorted(missing))}")
    lines = [
        "# Environment variables",
        "",
        "This page is made from `hpcpar/launch/settings.py`: `python docs/generate.py`. They are read once,",
        "by `hpcpar.init()`. Those by which ranks choose how they exchange must be the same on all of them,",
        "which is compared. A name that is nearly one of these is an error. [Launchers](../launchers.md) has",
        "the launchers' variables; Horovod's, `HOROVOD_…`, are in [From Horovod](../horovod.md).",
        "",
        "| variable | effect | default |",
        "|---|---|---|",
        *(f"| `{name}` | {cell(effect)} | {default} |" for name, (effect, default) in VARIABLES.items()),
        "",
        "`hpcpar` sets for its own processes:",
        "",
        "| variable | effect |",
        "|---|---|",
        *(f"| `{name}` | {cell(effect)} |" for name, effect in INTERNAL.items()),
    ]
    return "\n".join(lines)


def commands_of(
    command: click.Command, context: click.Context
) -> Iterator[tuple[click.Context, click.Command]]:
    """Yield a command, and those in it, each with the context of its name."""
    yield context, command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from commands_of(inner, click.Context(inner, context, name, terminal_width=WIDTH))


def help_of(command: click.Command, context: click.Context) -> str:
    """Return a command's help; SystemExit names an option that has none."""
    for parameter in command.get_params(context):
        if isinstance(parameter, click.Option) and not parameter.help and not parameter.hidden:
            raise SystemExit(f"{context.command_path} describes no {parameter.opts[0]}")
    return re.sub(r"[ \t]+$", "", command.get_help(context), flags=re.MULTILINE)


def commands() -> str:
    """Return the page of all commands."""
    top = group
    lines = ["# Commands", "", "This page is what `--help` says: `python docs/generate.py`.", ""]
    for context, command in commands_of(top, click.Context(top, info_name="hpcpar", terminal_width=WIDTH)):
        depth = "##" if len(context.command_path.split()) < 3 else "###"
        lines += [f"{depth} {context.command_path}", "", "```text", help_of(command, context), "```", ""]
    return "\n".join(lines)


PAGES = {
    "configuration.md": configuration,
    "environment.md": environment,
    "commands.md": commands,
    "../gallery.md": gallery.page,
    **{f"../{page}": partial(result_tables.page, page) for page in ("benchmarks.md", "gpus.md")},
}


if __name__ == "__main__":
    made = {HERE / name: make().rstrip("\n") + "\n" for name, make in PAGES.items()}
    if sys.argv[1:] == ["--check"]:
        old = [path.name for path, text in made.items() if path.read_text("utf-8") != text]
        sys.exit(f"python docs/generate.py would change {', '.join(old)}" if old else 0)
    for path, text in made.items():
        path.write_text(text, "utf-8")
