"""The reference pages: keys of a run, environment variables, commands; made of the code.

python docs/generate.py            # writes docs/reference/*.md
python docs/generate.py --check    # exits with 1 where one differs

A key, a variable or an option without a description is an error that names it.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import click
from columns import cell, meanings
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hpcpar.cli import group
from hpcpar.launch.settings import INTERNAL, VARIABLES
from hpcpar.models import LlamaConfig
from hpcpar.planner.experts import Experts
from hpcpar.training import config
from hpcpar.training.usual_names import ELSEWHERE

ROOT = Path(__file__).parents[1]
HERE = ROOT / "docs" / "reference"
# Where a section says "Fields as in …", keys without a row of their own are described there.
FIELDS_AS_IN = {config.ModelSection: LlamaConfig, config.ExpertsSection: Experts}
WIDTH = 100


def described(section: type[BaseModel]) -> dict[str, str]:
    """Return the meaning of each key of a section; SystemExit names those without."""
    shared = FIELDS_AS_IN.get(section)
    found = (meanings(inspect.getdoc(shared) or "") if shared else {}) | meanings(
        inspect.getdoc(section) or ""
    )
    missing = [name for name in section.model_fields if name not in found and not is_section(section, name)]
    if missing:
        raise SystemExit(f"{section.__name__} of hpcpar/training/config.py describes no {', '.join(missing)}")
    return found


def is_section(section: type[BaseModel], name: str) -> bool:
    annotation = section.model_fields[name].annotation
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def type_of(annotation: object) -> str:
    """Return a type as a user writes the value: `integer`, `"adamw" "sgd"`, `list of paths`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{toml(each)}`" for each in arguments)
    if origin is typing.Annotated:
        return type_of(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_of(each) for each in arguments if each is not type(None))
    if origin is tuple:
        kind = type_of(arguments[0])
        return f"list of {kind}s" if arguments[1:] == (Ellipsis,) else f"list of {len(arguments)} {kind}s"
    names = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path"}
    return names[typing.cast(type, annotation)]


def toml(value: object) -> str:
    """Write a default as the file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, Path)):
        return f'"{value}"'
    return str(list(value)) if isinstance(value, tuple) else str(value)


def limits(field: FieldInfo) -> str:
    """Return the bounds of a number, as `> 0, < 1`."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [(sign, getattr(bound, name)) for bound in field.metadata for name, sign in signs.items()
             if getattr(bound, name, None) is not None]  # fmt: skip
    shown = (f"{sign} {value:.3g}" for sign, value in found if abs(value) < 2**32)
    return "".join(f", {each}" for each in shown)


def table_of(section: type[BaseModel], prefix: str) -> Iterator[str]:
    """Yield the lines of a section, and of those in it."""
    found = described(section)
    yield f"## `[{prefix}]`\n\n{(inspect.getdoc(section) or '').splitlines()[0]}\n"
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    for name, field in section.model_fields.items():
        if not is_section(section, name):
            default = "" if field.default is None else f"`{toml(field.default)}`"
            kind = type_of(field.annotation) + limits(field)
            meaning = re.sub(r"\bNone\b", "not given", cell(found[name]))
            yield f"| `{prefix}.{name}` | {kind} | {default} | {meaning} |"
    yield ""
    for name, field in section.model_fields.items():
        if is_section(section, name):
            yield from table_of(typing.cast("type[BaseModel]", field.annotation), f"{prefix}.{name}")


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
    for name, field in config.Config.model_fields.items():
        lines += table_of(typing.cast("type[BaseModel]", field.annotation), name)
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
        "which is compared. [Launchers](../launchers.md) has the launchers' variables; Horovod's,",
        "`HOROVOD_…`, are in [From Horovod](../horovod.md).",
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


PAGES = {"configuration.md": configuration, "environment.md": environment, "commands.md": commands}


if __name__ == "__main__":
    made = {HERE / name: make().rstrip("\n") + "\n" for name, make in PAGES.items()}
    if sys.argv[1:] == ["--check"]:
        old = [path.name for path, text in made.items() if path.read_text("utf-8") != text]
        sys.exit(f"python docs/generate.py would change {', '.join(old)}" if old else 0)
    for path, text in made.items():
        path.write_text(text, "utf-8")
