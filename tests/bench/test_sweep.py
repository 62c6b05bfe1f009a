"""The table: every candidate measured and right, the lines as they are printed, the JSON file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpcpar.algorithms.registry import ALGORITHMS
from hpcpar.bench import sweep
from hpcpar.bench.measure import COPY, PLACES, ResultRow, Timing, row
from hpcpar.bench.measure import Case as MeasuredCase
from hpcpar.bench.sweep import CHOSEN, SweepOptions, compare, header, read_json, run, show, titles, write_json
from hpcpar.comm import Communicator, run_loopback
from hpcpar.comm.select import BUILT_IN, NATIVES

QUICK = SweepOptions(
    collectives=tuple(PLACES), min_nbytes=4, max_nbytes=1024, factor=256, rounds=1, round_s=0.0
)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_every_algorithm_is_measured_in_every_place_and_right(size: int, kind: sweep.Kind) -> None:
    said: list[str] = []
    rows = run_loopback(size, lambda comm: run(replace(QUICK, kind=kind), comm, say=said.append))[0]
    assert all(row.wrong == 0 for row in rows)
    assert ("# send is left out: it takes two ranks" in said) == (size == 1)
    found = {(row.collective, row.algorithm, row.place) for row in rows}
    for collective, places in PLACES.items():
        if collective.startswith("send"):
            assert size == 1 or (collective, CHOSEN, "out") in found
            continue
        flat = [name for name, algorithm in ALGORITHMS[collective].items() if not algorithm.placed]
        for name in (CHOSEN, *flat):
            assert {place for c, n, place in found if (c, n) == (collective, name)} == set(places)
        assert {row.nbytes for row in rows if row.collective == collective} in (
            {4, 1024},
            {4 * size, 1024 // (4 * size) * 4 * size},
        )
    assert (COPY, "memory_copy", "out") in found


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mpis_own_is_measured_where_mpi_can(world: Communicator, dtype: str) -> None:
    quick = replace(QUICK, collectives=tuple(NATIVES), dtype=dtype, candidates=("ring", "native"))
    rows = run(quick, world)
    assert all(row.wrong == 0 for row in rows)
    moved = {"allgather", "broadcast", "alltoall"}
    able = moved if dtype == "bfloat16" else set(NATIVES)
    assert {row.collective for row in rows if row.algorithm == "native"} == able


def test_algorithms_for_nodes_are_measured_where_ranks_share_some() -> None:
    quick = replace(QUICK, collectives=("allreduce",))
    rows = run_loopback(4, lambda comm: run(quick, comm), nodes=(0, 0, 1, 1))[0]
    assert {row.algorithm for row in rows} >= set(ALGORITHMS["allreduce"])
    assert all(row.wrong == 0 for row in rows)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16", "int32", "uint8"])
def test_every_element_type_is_summed_rightly(dtype: str) -> None:
    quick = replace(QUICK, collectives=("allreduce", "reduce_scatter", "alltoall"), dtype=dtype)
    rows = run_loopback(3, lambda comm: run(quick, comm))[0]
    assert all(row.wrong == 0 for row in rows)


def test_only_the_candidates_asked_for_are_measured() -> None:
    quick = replace(QUICK, collectives=("allreduce",), candidates=("chosen", "ring"))
    rows = run_loopback(2, lambda comm: run(quick, comm))[0]
    assert {row.algorithm for row in rows} == {"chosen", "ring", "memory_copy"}
    assert {row.chose for row in rows if row.algorithm == "chosen"} == {
        BUILT_IN.name("allreduce", nbytes) for nbytes in (4, 1024)
    }


def test_rank_0_alone_speaks_and_says_every_line() -> None:
    said: dict[int, list[str]] = {0: [], 1: []}
    quick = replace(QUICK, collectives=("broadcast",), candidates=("binomial",), max_nbytes=4)
    run_loopback(2, lambda comm: run(quick, comm, say=said[comm.rank].append))
    assert said[1] == []
    assert said[0][:5] == titles("broadcast")
    assert [line.split()[3] for line in said[0][5:]] == ["binomial", "memory_copy"]


def measured(algorithm: str, median_s: float, place: str = "in", nbytes: int = 4096) -> ResultRow:
    case = MeasuredCase("allreduce", nbytes // 4, "float32", "torch", 2)
    timing = Timing((median_s, median_s * 0.9, median_s * 1.3), 10)
    return row(case, algorithm, "in" if place == "in" else "out", timing, 0)


def test_a_line_stands_under_its_titles() -> None:
    both = show((measured("ring", 1e-5, "out"), measured("ring", 2e-5)))
    assert both.split() == [
        *("4096", "1024", "float32", "ring"),
        *("10.0", "20", "0.41", "0.41", "0"),
        *("20.0", "20", "0.20", "0.20", "0"),
    ]
    alone = show((replace(measured(CHOSEN, 2e-5), chose="ring"),))
    assert alone.split()[4:9] == ["-"] * 5
    assert alone.endswith("0  ring")
    heads = titles("allreduce")
    assert heads[3].rindex("#wrong") + len("#wrong") == both.rindex("0") + 1
    assert "longest" in titles("allreduce", singly=True)[3]


def test_the_longest_call_is_shown_where_calls_were_timed_one_by_one() -> None:
    timed = replace(measured("ring", 1e-5), longest_call_s=0.003)
    assert show((timed,)).endswith("0     3000")


def test_the_chosen_path_is_compared_with_each_peer_by_the_geometric_mean() -> None:
    rows = [
        measured(CHOSEN, 1e-6, nbytes=4),
        measured("mpi", 2e-6, nbytes=4),
        measured(CHOSEN, 2e-6, nbytes=4096),
        measured("mpi", 1e-6, nbytes=4096),
        measured("ring", 1e-6, nbytes=4096),
        measured("gloo", 8e-6, nbytes=4096),
    ]
    mpi, gloo = compare(rows)
    assert mpi.startswith("in place, chosen against mpi: 1.00 times as fast (geometric mean of 2 sizes)")
    assert mpi.endswith("least 0.50 at 4.0 KiB")
    assert gloo.startswith("in place, chosen against gloo: 4.00 times as fast")


def test_a_json_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    rows = [measured("ring", 1e-5)]
    facts = run_loopback(2, lambda comm: header(QUICK, comm, "MPICH 5.0.2", {"gloo": "torch"}))[0]
    write_json(path, facts, rows)
    told, lines = read_json(path)
    assert told == facts
    assert (told["ranks"], told["nodes"], told["ranks_per_node"]) == (2, 1, 2)
    assert [ResultRow(**line) for line in lines] == rows
