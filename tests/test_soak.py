"""The soak finds wrong results, draws every kind of call, and expects the serial results."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcpar.comm import Communicator, run_loopback
from tests import soak
from tests.soak import (
    ARRAYS,
    COLLECTIVES,
    INTEGER_OPS,
    LARGEST_NBYTES,
    OPS,
    PERIOD,
    Builder,
    Call,
    Memory,
    Options,
    Patterns,
    Report,
    draw,
    run,
    table,
)

CALL = Call("allreduce", 0, "torch", "float32", "sum", 29, 0, 3, True, None, False)


def test_everything_is_drawn() -> None:
    calls = list(itertools.chain.from_iterable(draw(Options(20_000), 3)))
    for name, values in {
        "collective": set(COLLECTIVES),
        "comm": {0, 1, 2},
        "op": {*OPS, *INTEGER_OPS},
        "shift": set(range(PERIOD)),
        "in_place": {True, False},
        "uneven": {True, False},
        "slot": {None, 0, 1},
    }.items():
        assert {getattr(call, name) for call in calls} == values, name
    assert {(call.kind, call.dtype) for call in calls} == set(ARRAYS)
    assert all(call.op in ("and", "or", "xor") or call.dtype == "int64" or call.op in OPS for call in calls)
    assert all(call.dtype == "int64" for call in calls if call.op in ("and", "or", "xor"))
    sizes = Counter(call.count * getattr(torch, call.dtype).itemsize for call in calls if call.slot is None)
    assert min(sizes) == 0
    assert LARGEST_NBYTES / 2 < max(sizes) <= LARGEST_NBYTES
    assert sum(times for nbytes, times in sizes.items() if nbytes < 1024) > sum(sizes.values()) / 2


@pytest.mark.parametrize("dtype", sorted({dtype for _, dtype in ARRAYS}))
@pytest.mark.parametrize("size", [1, 3])
def test_what_is_expected_of_a_reduction_is_what_the_serial_computation_gives(dtype: str, size: int) -> None:
    patterns = Patterns([size])
    serial = {
        "sum": lambda a, b: a + b,
        "average": lambda a, b: a + b,
        "min": torch.minimum,
        "max": torch.maximum,
        "product": lambda a, b: a * b,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
    }
    for op in INTEGER_OPS if dtype == "int64" else OPS:
        call = replace(CALL, dtype=dtype, op=op)
        total = patterns.passed(call, 0, 0, 29, op=op).clone()
        for rank in range(1, size):
            total = serial[op](total, patterns.passed(call, rank, 0, 29, op=op))
        if op == "average":
            total = total / size
        assert torch.equal(patterns.result(call, size, 0, 29), total), op
        assert torch.equal(patterns.result(call, size, 5, 9), total[5:9])
    assert not torch.equal(patterns.passed(call, 0, 0, 29), patterns.passed(call, 1, 0, 29))


@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_soak_finds_every_result_right(size: int) -> None:
    reports = run_loopback(size, lambda comm: run(Options(120, seed=size), comm))
    report = reports[0]
    assert all(other.wrong == 0 and other.samples == report.samples for other in reports)
    assert (report.calls, report.ranks, report.wrong, report.described) == (120, size, 0, [])
    assert len(report.warm_nbytes) == len(report.end_nbytes) == size


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("allreduce", {"in_place": True}),
    ("allreduce", {"in_place": False}),
    ("reduce_scatter", {"in_place": True}),
    ("reduce_scatter", {"in_place": False, "uneven": True}),
    ("allgather", {"in_place": True}),
    ("allgather", {"in_place": False, "uneven": True}),
    ("broadcast", {}),
    ("reduce", {"in_place": False, "root": 1}),
    ("alltoall", {"in_place": False}),
    ("alltoall", {"in_place": True}),
    ("gather", {"root": 1}),
    ("scatter", {"root": 1, "uneven": True}),
    ("send", {"root": 1}),
    ("sendrecv", {"root": 1}),
]


@pytest.mark.parametrize(("collective", "others"), KINDS)
def test_one_wrong_element_is_found(collective: str, others: dict[str, Any]) -> None:
    call = replace(CALL, collective=collective, **others)

    def look(comm: Communicator) -> tuple[int, int]:
        builder = Builder(Patterns([comm.size]), Memory(comm))
        checks = wrong = 0
        for spoilt in (False, True):
            handles = []
            for ready in builder.ready(call, comm):
                handle = getattr(comm, f"start_{ready.method}")(*ready.arguments, **ready.named)
                handles.append((ready, handle))
            for ready, handle in handles:
                result = handle.wait()
                found = ready.expected + (ready.result_is(result) if ready.result_is else [])
                for array, start, stop, _ in found:
                    if not spoilt:
                        assert ready.is_right(result)
                        continue
                    for at in {start, stop - 1} if stop > start else set():
                        kept = array[at].copy() if isinstance(array, np.ndarray) else array[at].clone()
                        array[at] = 77
                        checks += 1
                        wrong += not ready.is_right(result)
                        array[at] = kept
        return checks, wrong

    counted = run_loopback(3, look)
    assert all(checks == wrong for checks, wrong in counted)
    assert sum(checks for checks, _ in counted) > 0


def test_wrong_results_are_counted_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    right = soak.reduced
    monkeypatch.setattr(
        soak, "reduced", lambda op, size, at: right(op, size, at) + (op == "sum" and size > 1)
    )
    report = run_loopback(2, lambda comm: run(Options(200), comm))[0]
    assert report.wrong > 0
    assert "op='sum'" in report.described[0]
    assert any(line.startswith("# wrong: rank ") for line in table(report))


def test_a_call_that_returns_other_memory_than_it_should_is_wrong() -> None:
    comm = Communicator.alone()
    (ready,) = Builder(Patterns([1]), Memory(comm)).ready(CALL, comm)
    result = comm.allreduce(*ready.arguments, **ready.named)
    assert ready.is_right(result)
    assert not ready.is_right(result.clone())


@pytest.mark.mpi
def test_a_soak_over_mpi_finds_every_result_right(any_world: Communicator) -> None:
    report = run(Options(400, seed=1, name_algorithms=True), any_world)
    everyone = any_world.allgather_object(report)
    assert all(other.wrong == 0 for other in everyone), report.described
    assert all(nbytes > 0 for nbytes in report.end_nbytes)


@pytest.mark.long
def test_a_soak_of_processes_ends_well(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    done = run_ranks(3, soak.__file__, "--calls", "1000", "--seed", "3", "--json", str(lines))
    assert done.returncode == 0, done.stdout + done.stderr
    facts, report = (json.loads(line) for line in lines.read_text().splitlines())
    assert (facts["benchmark"], facts["ranks"], facts["calls"], report["wrong"]) == ("soak", 3, 1000, 0)


@pytest.mark.parametrize(("wrong", "end_nbytes", "status"), [(0, 6_000_000, 0), (1, 0, 1), (0, 6_100_000, 1)])
def test_wrong_results_or_too_much_memory_end_with_status_1(
    wrong: int, end_nbytes: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hpcpar

    report = Report(1000, 0, 1, 1.0, wrong, [1_000_000], [end_nbytes], [], [])
    monkeypatch.setattr(hpcpar, "init", Communicator.alone)
    monkeypatch.setattr(soak, "run", lambda options, world, say: report)
    assert soak.main(["--calls", "1000", "--max-drift", "5"]) == status
