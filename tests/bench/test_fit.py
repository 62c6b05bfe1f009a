"""Fitting the cost model: parameters that were put into lines come out of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcpar.algorithms.registry import ALGORITHMS
from hpcpar.algorithms.simulate import analytic
from hpcpar.algorithms.topology import Topology
from hpcpar.bench.fit import NAMES, Equation, equations, report, solve
from hpcpar.bench.measure import Case, Place, ResultRow, Timing, row
from hpcpar.bench.sweep import write_json
from hpcpar.comm.select import segments_for
from hpcpar.errors import OperationError

ALPHA_S, BETA, GAMMA = 3e-6, 2e-10, 5e-11
UNIFORM = Topology.uniform(ALPHA_S, BETA, GAMMA)
SIZES = (8, 4096, 2**20, 2**24)


def header(ranks: int, nodes: int = 1) -> dict[str, Any]:
    return {
        "benchmark": "collectives",
        "ranks": ranks,
        "nodes": nodes,
        "ranks_per_node": ranks // nodes,
        "mpi": "MPICH 5.0.2",
        "dtype": "float32",
    }


def modelled(ranks: int, collectives: tuple[str, ...] = tuple(ALGORITHMS)) -> list[ResultRow]:
    """Lines as they would be if the model were the truth, on one node."""
    rows = []
    for collective in collectives:
        if collective in ("barrier", "gather", "scatter"):
            continue
        for name, algorithm in ALGORITHMS[collective].items():
            for nbytes in SIZES:
                segments = segments_for(algorithm, nbytes)
                seconds = analytic(algorithm, ranks, nbytes, UNIFORM, segments)
                case = Case(collective, nbytes // 4, "float32", "torch", ranks)
                place: Place = "out" if collective == "alltoall" else "in"
                rows.append(row(case, name, place, Timing((seconds,), 1), 0))
    return rows


def as_lines(rows: list[ResultRow]) -> list[dict[str, Any]]:
    return [asdict(one) for one in rows]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_parameters_come_out_as_they_were_put_in(ranks: int) -> None:
    found = solve(equations(header(ranks), as_lines(modelled(ranks))))
    assert found.parameters["alpha_intra"] == pytest.approx(ALPHA_S)
    assert found.parameters["beta_intra"] == pytest.approx(BETA)
    assert found.parameters["gamma"] == pytest.approx(GAMMA)
    assert found.unknown == ("alpha_inter", "beta_inter")
    assert found.tied == ()
    assert found.ratios == pytest.approx([1.0] * len(found.ratios))


def test_lines_of_ranks_on_nodes_of_their_own_are_about_the_links_between_nodes() -> None:
    found = solve(equations(header(4, nodes=4), as_lines(modelled(4))))
    assert found.parameters["alpha_inter"] == pytest.approx(ALPHA_S)
    assert found.parameters["beta_inter"] == pytest.approx(BETA)
    assert found.unknown == ("alpha_intra", "beta_intra")


def test_both_kinds_of_links_are_told_apart_on_nodes_of_several_ranks() -> None:
    truth = np.array([1e-6, 1e-10, 5e-6, 4e-10, 3e-11])
    exact = [
        Equation(one.label, one.nbytes, one.coefficients, float(np.dot(one.coefficients, truth)))
        for one in equations(header(4, nodes=2), as_lines(modelled(4)))
    ]
    assert list(solve(exact).parameters.values()) == pytest.approx(list(truth))


def test_a_line_of_half_a_round_trip_is_one_message() -> None:
    case = Case("send", 1000, "float32", "torch", 2)
    lines = as_lines([row(case, name, "out", Timing((1e-3,), 1), 0) for name in ("chosen", "mpi")])
    (one,) = equations(header(2), lines)
    assert one.coefficients == (1, 4000, 0, 0, 0)
    (between,) = equations(header(2, nodes=2), lines)
    assert between.coefficients == (0, 0, 1, 4000, 0)


def test_peers_copies_and_estimates_are_left_out() -> None:
    case = Case("allreduce", 1000, "float32", "torch", 2)
    timing = Timing((1e-3,), 1)
    names = ("mpi", "gloo", "chosen", "double_binary", "hierarchical")
    rows = [row(case, name, "in", timing, 0) for name in names] + [row(case, "ring", "out", timing, 0)]
    assert equations(header(2), as_lines(rows)) == []


def test_lines_are_chosen_by_size() -> None:
    lines = as_lines(modelled(2, ("allgather",)))
    found = equations(header(2), lines, min_nbytes=4096, max_nbytes=2**20)
    assert {one.nbytes for one in found} == {4096, 2**20}


def test_what_the_lines_cannot_tell_apart_is_said() -> None:
    of_the_ring = [one for one in as_lines(modelled(2, ("allreduce",))) if one["algorithm"] == "ring"]
    found = solve(equations(header(2), of_the_ring))
    assert found.tied == ("gamma",)
    assert found.ratios == pytest.approx([1.0] * len(found.ratios))


def test_no_parameter_is_below_zero() -> None:
    found = solve(
        [
            Equation("", 1, (1, 100.0, 0, 0, 0), 1.0),
            Equation("", 2, (1, 200.0, 0, 0, 0), 0.5),
            Equation("", 3, (1, 300.0, 0, 0, 0), 0.4),
        ]
    )
    assert min(found.parameters.values()) == 0
    assert found.parameters["alpha_intra"] > 0


def test_too_few_lines_are_an_error() -> None:
    with pytest.raises(OperationError, match="0 lines to fit to, of named algorithms in place; measure more"):
        solve([])


def test_the_report_has_parameters_errors_and_the_command_to_go_on_with(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    write_json(path, header(2), modelled(2))
    text = "\n".join(report([path]))
    assert "2 ranks on 1 node(s), MPICH 5.0.2, float32" in text
    assert "alpha_intra  3.0 µs" in text
    assert "beta_intra   0.2000 ns/B = 5.0 GB/s" in text
    assert "alpha_inter  no line depends on it" in text
    assert "the model is off by 0%" in text
    assert text.endswith("hpcpar bench simulate --alpha-intra 3e-06 --beta-intra 2e-10 --gamma 5e-11")


@pytest.mark.parametrize("content", ["", "no JSON", "[]", '{"benchmark": "training"}\n{"step": 1}'])
def test_a_file_of_something_else_is_an_error(content: str, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(content)
    for found in (path, tmp_path):
        with pytest.raises(OperationError, match=r"has no lines of `hpcpar bench collectives --json`"):
            report([found])


@pytest.mark.parametrize(
    ("told", "damaged"),
    [({"nodes": None}, {}), ({}, {"ranks": None}), ({}, {"median_s": 0.0}), ({}, {"collective": []})],
)
def test_a_damaged_file_is_an_error(told: dict[str, Any], damaged: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    first, *others = as_lines(modelled(2))
    lines = [{**header(2), **told}, {**first, **damaged}, *others]
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(OperationError, match=r"has no lines of `hpcpar bench collectives --json`"):
        report([path])


def test_the_parameters_are_spelled_as_the_simulations_flags() -> None:
    from hpcpar.cli.bench_simulate import simulate

    flags = {option.lstrip("-").replace("-", "_") for p in simulate.params for option in p.opts}
    assert set(NAMES) <= flags
