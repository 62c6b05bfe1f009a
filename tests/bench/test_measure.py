"""Wrong results are counted, and times and bandwidths are those of their definitions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hpcpar.bench import measure
from hpcpar.bench.measure import (
    COPY,
    FEWEST,
    PLACES,
    WINDOW,
    Buffers,
    Candidate,
    Case,
    Timing,
    contribution,
    expected,
    row,
    time_round,
    usable,
    wrong_elements,
)
from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import OperationError


def test_a_case_is_as_large_as_asked_for_or_one_element_for_each_rank() -> None:
    for collective, nbytes in itertools.product([*PLACES, COPY], [0, 4, 1000, 4096]):
        case = Case.of(collective, nbytes, "float32", "torch", 3)
        pieces = 3 if collective in ("reduce_scatter", "allgather", "alltoall") else 1
        assert case.count >= 1
        assert case.count % pieces == 0
        assert nbytes - 4 * pieces < case.nbytes <= max(nbytes, 4 * pieces)


@pytest.mark.parametrize(("dtype", "kind"), [("float31", "torch"), ("bfloat16", "numpy")])
def test_an_element_type_that_cannot_be_is_refused(dtype: str, kind: measure.Kind) -> None:
    with pytest.raises(OperationError, match=f"no {kind} arrays of {dtype}; there are float32"):
        Case.of("allreduce", 8, dtype, kind, 2)


def serial(collective: str, size: int, count: int) -> list[torch.Tensor]:
    """Compute each rank's result from all ranks' contributions."""
    whole = [contribution(rank, 0, count) for rank in range(size)]
    share = count // size
    pieces = [[array[j * share : (j + 1) * share] for j in range(size)] for array in whole]
    total = torch.stack(whole).sum(0)
    match collective:
        case "allreduce" | "reduce":
            return [total] * size
        case "reduce_scatter":
            return [total[rank * share : (rank + 1) * share] for rank in range(size)]
        case "allgather":
            return [torch.cat([pieces[j][j] for j in range(size)])] * size
        case "broadcast":
            return [whole[0]] * size
        case "alltoall":
            return [torch.cat([pieces[j][rank] for j in range(size)]) for rank in range(size)]
        case "send":
            return [whole[size - 1], *[whole[0]] * (size - 1)]
    return [whole[0]] * size


@pytest.mark.parametrize("collective", list(PLACES))
@pytest.mark.parametrize(("size", "share"), [(2, 5), (3, 1), (7, 2)])
def test_what_is_expected_is_what_the_serial_computation_gives(
    collective: str, size: int, share: int
) -> None:
    case = Case(collective, size * share, "float32", "torch", size)
    for rank, truth in enumerate(serial(collective, size, case.count)):
        assert torch.equal(expected(case, rank, 0, truth.numel()), truth)
        assert torch.equal(expected(case, rank, 1, truth.numel()), truth[1:])


def test_what_is_expected_is_made_where_the_result_is() -> None:
    """On a GPU that takes a hundredth of the time."""
    there = torch.device("meta")
    assert contribution(0, 0, 6, there).device == there
    for collective in PLACES:
        assert expected(Case(collective, 6, "float32", "torch", 2), 0, 0, 3, there).device == there


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_every_wrong_element_is_counted(kind: measure.Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "PIECE", 10)

    def count_wrong(comm: Communicator) -> tuple[int, int, int]:
        case = Case("allreduce", 25, "float32", kind, comm.size)
        buffers = Buffers.of(case, comm)

        def right() -> None:
            comm.allreduce(buffers.whole)

        def two_wrong_on_rank_1() -> None:
            comm.allreduce(buffers.whole)
            if comm.rank == 1:
                buffers.whole[3] += 1
                buffers.whole[24] = np.nan

        runs = (right, two_wrong_on_rank_1, lambda: None)
        found = [
            wrong_elements(Candidate("", run, lambda: buffers.whole), case, comm, buffers) for run in runs
        ]
        return found[0], found[1], found[2]

    assert run_loopback(2, count_wrong) == [(0, 2, 50)] * 2


def test_a_result_of_another_length_is_wrong() -> None:
    def count_wrong(comm: Communicator) -> int:
        case = Case("allreduce", 5, "float32", "torch", comm.size)
        buffers = Buffers.of(case, comm)
        short = Candidate("", lambda: comm.allreduce(buffers.whole), lambda: buffers.whole[:3])
        return wrong_elements(short, case, comm, buffers)

    assert run_loopback(2, count_wrong) == [4, 4]


def test_rounding_of_sums_that_16_bits_cannot_hold_is_not_wrong() -> None:
    case_size = 100  # sums up to 505, where bfloat16 has steps of 2
    wanted = expected(Case("allreduce", 6, "bfloat16", "torch", case_size), 0, 0, 6)
    assert measure._unlike(wanted.to(torch.bfloat16), wanted, case_size) == 0
    assert measure._unlike(torch.zeros(6, dtype=torch.bfloat16), wanted, case_size) == 6


def test_a_round_is_timed_by_the_slowest_rank() -> None:
    def timed(comm: Communicator) -> tuple[float, float]:
        import time

        pause_s = 0.02 if comm.rank == 1 else 0.0
        return time_round(lambda: time.sleep(pause_s), 2, comm, singly=True)

    results = run_loopback(2, timed)
    assert results[0] == results[1]
    mean_s, longest_s = results[0]
    assert 0.02 <= mean_s < 1
    assert 0.02 <= longest_s < 1


def test_candidates_run_in_turn_in_every_round() -> None:
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    timings = measure.measure(runs, Communicator.alone(), rounds=3, round_s=0.0)
    in_turn = [name for name, _ in itertools.groupby(order)]
    assert in_turn == ["a", "b"] * 4  # a warm-up, and three rounds
    assert {len(timing.rounds_s) for timing in timings.values()} == {3}
    assert timings["a"].iterations == FEWEST
    assert timings["a"].longest_call_s is None


def test_a_row_has_the_bandwidths_of_its_definitions() -> None:
    timing = Timing((2e-3, 1e-3, 4e-3), 7, 5e-3)
    found = row(Case("allreduce", 1_000_000, "float32", "torch", 4), "ring", "in", timing, 0)
    assert found.median_s == 2e-3
    assert (found.fastest_s, found.slowest_s, found.longest_call_s) == (1e-3, 4e-3, 5e-3)
    assert found.algbw_gb_per_s == pytest.approx(2.0)
    assert found.busbw_gb_per_s == pytest.approx(3.0)
    window = row(Case("send_window", 1_000_000, "float32", "torch", 4), "mpi", "out", timing, 0)
    assert window.busbw_gb_per_s == pytest.approx(2.0 * WINDOW)


def test_what_one_rank_refuses_is_used_by_none() -> None:
    closed: list[int] = []

    def kept(comm: Communicator) -> list[str]:
        def refuse() -> None:
            if comm.rank == 1:
                raise NotImplementedError

        candidates = [
            Candidate("able", lambda: None, lambda: None),
            Candidate("refuses", refuse, lambda: None, lambda: closed.append(comm.rank)),
        ]
        return [candidate.name for candidate in usable(candidates, comm)]

    assert run_loopback(2, kept) == [["able"], ["able"]]
    assert sorted(closed) == [0, 1]


def test_half_a_round_trip_is_half_the_time() -> None:
    assert Timing((2.0, 4.0), 3, 6.0).scaled(0.5) == Timing((1.0, 2.0), 3, 3.0)
    assert Timing((2.0,), 3).scaled(0.5).longest_call_s is None


def test_shared_memory_that_is_not_there_is_an_error() -> None:
    case = Case("allreduce", 4, "float32", "torch", 1)
    with pytest.raises(OperationError, match="share no memory"):
        measure.Buffers.of(case, Communicator.alone(), shared=True)
