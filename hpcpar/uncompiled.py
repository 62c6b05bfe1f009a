"""Keep torch.compile out of calls that talk to other ranks.

Its compiler would trace into them, and into all that they call: loops that wait for others, counters by which
ranks find each other. Each rank then compiles for seconds while the others wait, and what was a value at that
time stays in the compiled code. A graph ends before such a call, and another begins after it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def _module_of_compiler() -> Any:
    return sys.modules.get("torch._dynamo")


# What compiles frames in this thread; None: nothing does. torch 2.5 does not tell, but whether it may.
_compiles: Callable[[], Any] = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", _module_of_compiler
)


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that is to run as it is written, with all that it calls, also in compiled code.

    Costs a fraction of a microsecond where nothing is compiled; torch's own `compiler.disable` takes seconds
    to import, and several times as long for each call.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling() or _compiles() is not None:
            return _as_written(function, args, kwargs)
        return function(*args, **kwargs)

    return call


def _as_written(function: Callable[..., T], args: Any, kwargs: Any) -> T:
    result: T = torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-untyped-call]
    return result
