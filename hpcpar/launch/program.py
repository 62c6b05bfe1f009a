"""Run a Python program as `python` would, with something put in place before it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def run_program(words: Sequence[str], module: str, help: str | None, prepare: Callable[[], None]) -> None:
    """Run the program that the words name, with the rest as its arguments, after `prepare()`.

    words    script.py, -m module or -c code, and its arguments
    module   whose command line this is, and `help` its text
    """
    usage = f"usage: python -m {module} (script.py | -m module | -c code) [argument ...]"
    kind, rest = (words[0], words[1:]) if words and words[0] in ("-m", "-c") else ("", words)
    if not rest or (not kind and rest[0].startswith("-")):
        wants_help = bool(words) and words[0] in ("-h", "--help")
        print(f"{usage}\n\n{help}" if wants_help else usage, file=sys.stdout if wants_help else sys.stderr)
        sys.exit(0 if wants_help else 2)
    prepare()
    {"-m": run_module, "-c": run_code}.get(kind, run_script)(rest[0], rest[1:])


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a script like `python path …`: `sys.path` starts with its directory."""
    sys.argv = [path, *arguments]
    if not _safe_path() and os.path.isfile(path):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    runpy.run_path(path, run_name="__main__")


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module like `python -m name …`: `sys.path` starts with the working directory."""
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_code(code: str, arguments: Sequence[str]) -> None:
    """Run code like `python -c code …`."""
    sys.argv = ["-c", *arguments]
    if not _safe_path():
        sys.path[0] = ""
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(code, "<string>", "exec"), module.__dict__)


def _safe_path() -> bool:
    """Return True if Python was told (-P) to put no directory in front."""
    return bool(getattr(sys.flags, "safe_path", False))
