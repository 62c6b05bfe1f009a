"""`python -m hpcpar.horovod script.py …`: run a program written for Horovod, as it is, over hpcpar.

    mpiexec -n 2 python -m hpcpar.horovod train.py --lr 0.1     (also -m module …, -c code …)
    hpcpar run -np 2 --as-horovod train.py --lr 0.1             the same

`import horovod` means ours. Beyond that the program sees what it would see without us.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from types import ModuleType

from hpcpar.horovod import alias

USAGE = "usage: python -m hpcpar.horovod (script.py | -m module | -c code) [argument ...]"


def main(words: Sequence[str]) -> None:
    """Run the program that the words name, with the rest as its arguments."""
    kind, rest = (words[0], words[1:]) if words and words[0] in ("-m", "-c") else ("", words)
    if not rest or (not kind and rest[0].startswith("-")):
        wants_help = bool(words) and words[0] in ("-h", "--help")
        print(f"{USAGE}\n\n{__doc__}" if wants_help else USAGE, file=sys.stdout if wants_help else sys.stderr)
        sys.exit(0 if wants_help else 2)
    alias.install()
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


if __name__ == "__main__":
    main(sys.argv[1:])
