"""Fixtures of the tests of Horovod's API: one initialization, process sets, jobs of their own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

Checks = list[tuple[str, Any, Any]]
"""(what, found, expected): compared after all ranks have finished, so that none fails alone."""

PRELUDE = """
import json, os, sys, time
from pathlib import Path
from hpcpar.launch.environment import detect

told = {}

def tell(**values):
    told.update(values)
    path = Path(sys.argv[1]) / f"{detect().rank}.json"
    path.with_suffix(".new").write_text(json.dumps(told))
    path.with_suffix(".new").replace(path)

def error_of(call):
    try:
        call()
    except Exception as error:
        return [type(error).__name__, [kind.__name__ for kind in type(error).__mro__], str(error)]
    return None
"""


@pytest.fixture
def hvd() -> ModuleType:
    """`hpcpar.horovod.torch`, with process sets that come and go.

    Initialized anew where a test has shut it down, or has initialized it without them.
    """
    import hpcpar.horovod.torch as module
    from hpcpar.horovod.basics import the_context

    if module.is_initialized() and not the_context().dynamic:
        module.shutdown()
    module.init(process_sets="dynamic")
    return module


@pytest.fixture
def small_buckets(hvd: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make buckets so small that the models of tests have several."""
    from hpcpar.horovod.basics import the_context

    context = the_context()
    monkeypatch.setattr(context, "knobs", replace(context.knobs, fusion_threshold_nbytes=300))


@pytest.fixture
def by_stage(hvd: ModuleType, request: pytest.FixtureRequest) -> None:
    """Have small buckets where a test has a `stage` of ZeRO; `None` averages whole gradients."""
    if "stage" in request.fixturenames and request.node.callspec.params["stage"]:
        request.getfixturevalue("small_buckets")


@pytest.fixture
def halves(hvd: ModuleType) -> Iterator[list[Any]]:
    """Process sets of the ranks with even and with odd numbers; of one rank alone: the global one."""
    if hvd.size() == 1:
        yield [hvd.global_process_set]
        return
    sets = [hvd.add_process_set(list(range(first, hvd.size(), 2))) for first in (0, 1)]
    yield sets
    for process_set in sets:
        hvd.remove_process_set(process_set)


@pytest.fixture
def half(halves: list[Any]) -> Any:
    """The one of `halves` that this rank belongs to."""
    (own,) = [process_set for process_set in halves if process_set.included()]
    return own


@pytest.fixture
def needs_two(hvd: ModuleType) -> None:
    """Skip on one rank: it cannot disagree with itself."""
    if hvd.size() < 2:
        pytest.skip("one rank cannot disagree with itself")


@pytest.fixture
def brought() -> Callable[..., torch.Tensor]:
    """Inputs of a rank: small whole numbers, so that sums and products are exact in every type.

    `brought(rank, shape, dtype=…, salt=…)`: 1, 2 or 3, others for another salt.
    """

    def make(rank: int, shape: Any = (7,), dtype: torch.dtype = torch.float32, salt: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * salt + rank)
        return torch.randint(1, 4, shape, generator=generator).to(dtype)

    return make


@pytest.fixture
def assert_same() -> Callable[[Checks], None]:
    """Compare after the fact: bit by bit, with type and shape."""

    def check(checks: Checks) -> None:
        assert checks, "nothing was compared"
        for what, found, expected in checks:
            if isinstance(expected, torch.Tensor):
                assert found.dtype == expected.dtype, what
                assert found.shape == expected.shape, what
                assert torch.equal(found.detach(), expected), f"{what}: {found} instead of {expected}"
            else:
                assert found == expected, what

    return check


@pytest.fixture
def error_of() -> Callable[[Callable[[], Any]], Exception | None]:
    """The exception of a call; None if it has none."""

    def call(function: Callable[[], Any]) -> Exception | None:
        try:
            function()
        except Exception as error:
            return error
        return None

    return call


@pytest.fixture
def job(
    tmp_path: Path, run_ranks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[dict[str, Any]]]:
    """Run a program on ranks of their own: `job(3, PROGRAM, HOROVOD_TIMELINE="DYNAMIC")`.

    In it `tell(x=1)` puts down what is to be checked, `error_of(call)` is an exception's [type, all its
    types, message]; `sys.argv` has a directory and the number of ranks. Returns what each rank told, by
    rank in the job, and all that was `printed` as errors and warnings.
    """

    def run(n: int, program: str, *, fails: bool = False, **environment: str) -> list[dict[str, Any]]:
        for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        script = tmp_path / "script.py"
        script.write_text(PRELUDE + program)
        done = run_ranks(n, str(script), str(tmp_path), str(n))
        assert fails or done.returncode == 0, done.stdout + done.stderr
        told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(n)]
        for of_rank in told:
            of_rank["printed"] = done.stderr
        return told

    return run
