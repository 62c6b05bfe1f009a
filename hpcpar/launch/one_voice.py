"""What all ranks find wrong is said once: the others end without a word, with the same status."""

from __future__ import annotations

import sys
from types import TracebackType

from hpcpar.errors import LaunchError


def leave_it_to_another_rank(line: str = "") -> None:
    """From now on an uncaught LaunchError ends this process without a traceback; its status is 1 as ever.

    line   what is written instead, to standard error
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, LaunchError):
            before(kind, error, trace)
        elif line:
            sys.stderr.write(f"hpcpar: {line}\n")

    sys.excepthook = hook
