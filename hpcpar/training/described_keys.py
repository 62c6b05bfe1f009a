"""Keys of the configuration with type, default and meaning: `hpcpar train --keys`, and documentation.

    [train]  Length of training, and sizes of its batches.

      steps = 500   int > 0: of the optimizer, which the schedule of the learning rate spans

Types and defaults are those of the models in `training.config`; meanings are the lines of their docstrings,
or of those of the classes whose fields a table changes.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python
from rich.console import Group
from rich.table import Table
from rich.text import Text

from hpcpar.errors import ConfigError
from hpcpar.models import Experts, LlamaConfig
from hpcpar.planner.run_file import toml_value
from hpcpar.training.config import Config, ExpertsSection, ModelSection, is_table

CHANGED_BY: dict[type[BaseModel], type] = {ModelSection: LlamaConfig, ExpertsSection: Experts}
"""Tables that change a preset, and the classes that say what their keys mean."""

PLAIN_NAMES = {bool: "true | false", int: "int", float: "float", str: "text", Path: "path"}

NO_DEFAULT = ("not set", "the preset's")

LIMITS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


@dataclass(frozen=True)
class DescribedKey:
    """One key of the file.

    table     "train", "model.experts", …
    kind      in words of TOML: int > 0, "adamw" | "muon"
    default   as TOML; "not set" or "the preset's" where it has none
    meaning   a sentence or two, without a line break
    """

    table: str
    name: str
    kind: str
    default: str
    meaning: str

    @property
    def key(self) -> str:
        return f"{self.table}.{self.name}"


def described_keys() -> tuple[DescribedKey, ...]:
    """Return all keys in the order of the file, tables within a table after its own keys."""
    return tuple(each for table, section in _tables() for each in _keys_of(table, section))


def keys_table(table: str = "") -> Group:
    """Return the keys as text for people, grouped by table; `table` restricts them to one, and those in it.

    errors   ConfigError for a table that is not there
    """
    shown: list[Text | Table] = [
        Text("A key that is left out has the value shown, or the preset's, or is None.")
    ]
    chosen = [
        (name, section) for name, section in _tables() if f"{name}.".startswith(f"{table}." if table else "")
    ]
    if not chosen:
        names = [name for name, _ in _tables()]
        close = difflib.get_close_matches(table, names, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(f"there is no table {table!r}; {hint}there are {', '.join(names)}")
    for name, section in chosen:
        title = _docstring(section).partition("\n")[0].partition(" Fields as in ")[0]
        shown.append(Text(f"\n[{name}]  {title}\n"))
        rows = Table.grid(padding=(0, 2, 0, 0))
        for each in _keys_of(name, section):
            default = "" if each.default in NO_DEFAULT else f" = {each.default}"
            rows.add_row(Text(f"  {each.name}{default}"), Text(f"{each.kind}: {each.meaning}"))
        shown.append(rows)
    return Group(*shown)


def _tables(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in section.model_fields.items():
        if is_table(field.annotation):
            assert isinstance(field.annotation, type)
            yield prefix + name, field.annotation
            yield from _tables(field.annotation, f"{prefix}{name}.")


def _keys_of(table: str, section: type[BaseModel]) -> Iterator[DescribedKey]:
    own = meanings(section)
    changed = meanings(CHANGED_BY[section]) if section in CHANGED_BY else {}
    for name, field in section.model_fields.items():
        if not is_table(field.annotation):
            meaning = own.get(name) or changed.get(name, "")
            yield DescribedKey(table, name, _kind(field), _default(field, name not in own), meaning)


def meanings(described: type) -> dict[str, str]:
    """Return the text of each field that the class's docstring has a line for.

    seed           of the initial values          becomes {"seed": "of the initial values"}
    low, high      both share one
    """
    found: dict[str, str] = {}
    names: list[str] = []
    for line in _docstring(described).splitlines():
        entry = re.match(r"(\w+(?:, \w+)*) {2,}(\S.*)", line)
        if entry is not None:
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        elif line.startswith(" ") and names:
            found |= dict.fromkeys(names, f"{found[names[0]]} {line.strip()}")
        else:
            names = []
    return found


def _docstring(described: type) -> str:
    return inspect.cleandoc(described.__doc__ or "")


def _default(field: FieldInfo, is_of_preset: bool) -> str:
    if field.default is None:
        return NO_DEFAULT[is_of_preset]
    return toml_value(to_jsonable_python(field.default))


def _kind(field: FieldInfo) -> str:
    limits = [
        f" {sign} {getattr(each, name):g}"
        for each in field.metadata
        for name, sign in LIMITS.items()
        if hasattr(each, name) and getattr(each, name) in (0, 1)  # others keep it within what can be stored
    ]
    return _type_name(field.annotation) + ",".join(limits)


def _type_name(kind: Any) -> str:
    """Name a type as people write its values in the file."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(_type_name(each) for each in arguments if each is not NoneType)
    if origin is Literal:
        return " | ".join(map(toml_value, arguments))
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"[{_type_name(arguments[0])}, …]"
    if origin is tuple:
        return f"[{', '.join(map(_type_name, arguments))}]"
    return PLAIN_NAMES[kind]
