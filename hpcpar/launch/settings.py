"""The settings that come from the environment, read once at the door; below it they are values."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from hpcpar.errors import ConfigError

_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off", "")


@dataclass(frozen=True, slots=True)
class Settings:
    """What `HPCPAR_*` variables ask for.

    check           HPCPAR_CHECK          ranks agree on every collective before data moves
    timeout_s       HPCPAR_TIMEOUT_S      a wait that lasts longer is an error that says who waits
    algorithm       HPCPAR_ALGORITHM      name of the algorithm for every collective that has it
    run_directory   HPCPAR_RUN_DIRECTORY  where the sentinel leaves word of a lost rank
    """

    check: bool = False
    timeout_s: float = 600.0
    algorithm: str | None = None
    run_directory: str | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the variables; ConfigError names the one that is not understood."""
        return cls(
            check=_flag(environ, "HPCPAR_CHECK", False),
            timeout_s=_seconds(environ, "HPCPAR_TIMEOUT_S", 600.0),
            algorithm=environ.get("HPCPAR_ALGORITHM") or None,
            run_directory=environ.get("HPCPAR_RUN_DIRECTORY") or None,
        )


def _flag(environ: Mapping[str, str], name: str, default: bool) -> bool:
    text = environ.get(name)
    if text is None:
        return default
    if text.strip().lower() in _YES:
        return True
    if text.strip().lower() in _NO:
        return False
    raise ConfigError(f"{name}={text!r} is neither yes nor no: set it to 1 or 0")


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ConfigError(
            f"{name}={text!r} is not a time: set it to seconds above 0, for example 600 (or inf)"
        )
    return seconds
