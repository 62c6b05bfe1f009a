"""The picture of bus bandwidth: lines, ceiling, panels."""

from __future__ import annotations

from hpcpar.bench.measure import COPY, Case, Place, ResultRow, Timing, row
from hpcpar.cli.bench_picture import draw, lines


def measured(collective: str, algorithm: str, count: int, seconds: float, place: Place = "in") -> ResultRow:
    return row(Case(collective, count, "float32", "torch", 2), algorithm, place, Timing((seconds,), 1), 0)


ROWS = [
    measured("allreduce", "chosen", 1000, 1e-6),
    measured("allreduce", "chosen", 1000, 2e-6, "out"),
    measured("allreduce", "chosen", 100, 1e-6),
    measured("allreduce", "mpi", 1000, 4e-6),
    measured("allreduce", "ring", 1000, 4e-6),
    measured(COPY, "memory_copy", 1000, 1e-7),
    measured("send", "chosen", 1000, 1e-6),
]


def test_a_line_has_the_better_place_of_every_size_in_rising_order() -> None:
    found = lines(ROWS, "allreduce")
    assert list(found) == ["chosen", "mpi", "ring"]
    assert [nbytes for nbytes, _ in found["chosen"]] == [400, 4000]
    assert found["chosen"][1][1] == ROWS[0].busbw_gb_per_s


def test_the_ceiling_is_what_is_copied_per_second() -> None:
    ((nbytes, ceiling),) = lines(ROWS, COPY)["memory_copy"]
    assert nbytes == 4000
    assert round(ceiling, 6) == 40.0


def test_there_is_a_panel_for_each_collective_and_a_line_for_each_candidate() -> None:
    allreduce, send = draw(ROWS, {"ranks": 2, "nodes": 1, "mpi": "MPICH 5.0.2"}).axes
    assert (allreduce.get_title(), send.get_title()) == ("allreduce", "send")
    assert [line.get_label() for line in allreduce.lines] == ["chosen", "mpi", "ring", "memory copy"]
