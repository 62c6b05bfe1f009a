"""Files of the planner's input, and numbers in them: read, or refused by name."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from hpcpar.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_table(path: Path, what: str) -> Any:
    """Return the contents of a file, JSON if its name says so, else TOML.

    what     the file's purpose, for errors: "machine file"
    errors   ConfigError for a file that cannot be read, or is neither UTF-8 nor of its format
    """
    is_json = path.suffix == ".json"
    try:
        text = path.read_text(encoding="utf-8-sig")
        return json.loads(text) if is_json else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{what} {path}: {error.strerror}") from error
    except ValueError as error:  # of decoding UTF-8, JSON or TOML
        raise ConfigError(f"{what} {path} is no {'JSON' if is_json else 'TOML'}: {error}") from error


def whole_number(value: object, name: str, least: int = 1) -> int:
    """Return a value that must be a whole number of at least `least`; ConfigError that names it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} = {value!r} must be a whole number of at least {least}")
    return value


def finite_number(value: object, name: str, *, or_zero: bool = False, at_most: float = math.inf) -> float:
    """Return a value that must be a finite number above 0, or 0 if allowed; ConfigError that names it."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    number: Any = value if is_number else math.nan
    if (0 < number < math.inf and number <= at_most) or (or_zero and number == 0):
        return float(number)
    least = "of at least 0" if or_zero else "above 0"
    most = "" if at_most == math.inf else f", and of at most {at_most:g}"
    raise ConfigError(f"{name} = {value!r} must be a finite number {least}{most}")
