from __future__ import annotations

import torch

from hpcpar import uncompiled as module
from hpcpar.uncompiled import uncompiled


def test_compiled_code_runs_it_as_it_is_written_as_often_as_it_is_called() -> None:
    compilers = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        compilers.append(module._compiles())
        return x + len(compilers)

    @uncompiled
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x)

    @torch.compile(backend="eager")
    def doubled_and_more(x: torch.Tensor) -> torch.Tensor:
        return outer(x * 2) + 1

    found = [doubled_and_more(torch.ones(())).item() for _ in range(10)]
    assert found == [4.0 + number for number in range(10)]
    if hasattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback"):
        assert compilers == [None] * 10


def test_without_a_compiler_it_is_the_function_itself() -> None:
    @uncompiled
    def total(a: int, *, b: int = 2) -> int:
        """Both."""
        return a + b

    assert (total(1), total(1, b=3), total.__doc__) == (3, 4, "Both.")
