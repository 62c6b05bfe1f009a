"""`hpcpar bench fit`: the cost model's parameters from measured lines, and how well the model does then.

Every line of an algorithm whose closed form is exact is one equation,

    seconds = messages·α + S·sent·β + S·combined·γ,

with α and β within nodes and between them told apart where ranks share nodes. The equations are
solved by least squares of the relative errors, with no parameter below zero: with absolute errors,
the largest arrays alone would decide.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from hpcpar.algorithms.cost import Cost, TwoLevelCost
from hpcpar.algorithms.registry import ALGORITHMS
from hpcpar.bench.sweep import CHOSEN, read_json
from hpcpar.comm.select import segments_for
from hpcpar.errors import OperationError
from hpcpar.launch.binding import affinity, thread_count
from hpcpar.units import GB, GiB, format_duration, format_nbytes

NAMES = ("alpha_intra", "beta_intra", "alpha_inter", "beta_inter", "gamma")
"""Seconds, or seconds per byte; spelled as the flags of `hpcpar bench simulate`."""

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Equation:
    """Measured line as an equation; `coefficients` multiply the five parameters."""

    label: str
    nbytes: int
    coefficients: tuple[float, ...]
    measured_s: float


@dataclass(frozen=True)
class Fit:
    """Parameters by name, and of every equation modelled over measured seconds.

    unknown   parameters that no line depends on
    tied      parameters set to zero because the lines cannot tell them from the others
    """

    parameters: Mapping[str, float]
    ratios: tuple[float, ...]
    unknown: tuple[str, ...]
    tied: tuple[str, ...]


def equations(
    header: Mapping[str, Any],
    lines: Iterable[Mapping[str, Any]],
    *,
    min_nbytes: int = 0,
    max_nbytes: int = GiB,
) -> list[Equation]:
    """Return the equations of a file's lines of which the model has a closed form.

    Out of place a copy comes on top, which the model leaves out; so do we, but for the all-to-all.
    """
    found = []
    for line in lines:
        in_place = line["place"] == "in" or line["collective"] in ("alltoall", "send")
        if not in_place or line["ranks"] < 2 or not min_nbytes <= line["nbytes"] <= max_nbytes:
            continue
        if not line["median_s"] > 0:
            raise ValueError(f"a call that took {line['median_s']} s")
        levels = _levels(header, line)
        if levels is not None:
            label = f"{line['collective']} {line['algorithm']}"
            nbytes, (inside, between) = line["nbytes"], levels
            combined = (inside.combined + between.combined) * nbytes
            links = (inside.messages, inside.sent * nbytes, between.messages, between.sent * nbytes)
            found.append(Equation(label, nbytes, (*links, combined), line["median_s"]))
    return found


def _levels(header: Mapping[str, Any], line: Mapping[str, Any]) -> TwoLevelCost | None:
    """Return the line's critical path within and between nodes; None where no exact form is known."""
    nodes, ranks, nothing = header["nodes"], line["ranks"], Cost(0)
    if line["collective"] == "send":
        message = Cost(1, 1)
        known = line["algorithm"] == CHOSEN
        found = TwoLevelCost(message, nothing) if nodes == 1 else TwoLevelCost(nothing, message)
        return found if known else None
    algorithm = ALGORITHMS.get(line["collective"], {}).get(line["algorithm"])
    if algorithm is None or algorithm.estimated or (algorithm.placed and nodes == 1):
        return None
    segments = segments_for(algorithm, line["nbytes"])
    if nodes == 1:
        return TwoLevelCost(algorithm.cost(ranks, segments), nothing)
    if nodes == ranks or algorithm.on_nodes is None:
        return TwoLevelCost(nothing, algorithm.cost(ranks, segments))
    if ranks % nodes or ranks // nodes != header["ranks_per_node"]:
        return None  # the closed forms are of equally full nodes
    return algorithm.cost_on_nodes(nodes, ranks // nodes, segments)


def solve(found: Sequence[Equation]) -> Fit:
    """Solve for the parameters, none below zero, with the least squares of relative errors.

    errors   OperationError for fewer than two lines
    """
    if len(found) < 2:
        raise OperationError(
            f"{len(found)} lines to fit to, of named algorithms in place; measure more, by hpcpar bench "
            "collectives --collective all --json FILE, without --candidates"
        )
    measured = np.array([equation.measured_s for equation in found])
    relative = np.array([equation.coefficients for equation in found]) / measured[:, None]
    used = [i for i in range(len(NAMES)) if relative[:, i].any()]
    free = _independent(relative, used)
    values = np.zeros(len(NAMES))
    values[free] = _non_negative(relative[:, free])
    return Fit(
        parameters=dict(zip(NAMES, map(float, values), strict=True)),
        ratios=tuple(float(ratio) for ratio in relative @ values),
        unknown=tuple(name for i, name in enumerate(NAMES) if i not in used),
        tied=tuple(NAMES[i] for i in used if i not in free),
    )


def _independent(matrix: Array, columns: Sequence[int]) -> list[int]:
    free: list[int] = []
    for column in columns:
        scaled = matrix[:, [*free, column]]
        scaled = scaled / np.linalg.norm(scaled, axis=0)
        if np.linalg.matrix_rank(scaled, tol=1e-6) == len(free) + 1:
            free.append(column)
    return free


def _non_negative(matrix: Array) -> Array:
    """Find x >= 0 with the least |matrix·x - 1|², over all choices of the zeros, as there are few."""
    width = matrix.shape[1]
    scale = np.linalg.norm(matrix, axis=0)
    best, least = np.zeros(width), float(len(matrix))
    for count in range(1, width + 1):
        for columns in combinations(range(width), count):
            part = matrix[:, columns] / scale[list(columns)]
            solution = np.linalg.lstsq(part, np.ones(len(matrix)), rcond=None)[0]
            error = float(np.sum((part @ solution - 1) ** 2))
            if (solution >= 0).all() and error < least:
                least = error
                best = np.zeros(width)
                best[list(columns)] = solution / scale[list(columns)]
    return best


def report(files: Sequence[Path], *, min_nbytes: int = 0, max_nbytes: int = GiB) -> list[str]:
    """Parameters and errors for people; the last line is for `hpcpar bench simulate`.

    errors   OperationError for a file that `bench collectives --json` did not write
    """
    said, found = _read_all(files, min_nbytes, max_nbytes)
    fit = solve(found)
    return [*said, *_parameter_lines(fit), *_error_lines(found, fit), "", _simulate_line(fit)]


def describe_machine(
    files: Sequence[Path], *, name: str, min_nbytes: int = 0, max_nbytes: int = GiB, device: str = "cpu"
) -> str:
    """Return a machine's file: links by the measured lines, and this node's speed, measured now.

    files    the first one's header says how many ranks share a node
    errors   OperationError as of `report`, and where the lines tell no bandwidth
    """
    from hpcpar.bench import device_speed

    header, _ = read_json(files[0])
    fit = solve(_read_all(files, min_nbytes, max_nbytes)[1])
    ranks = max(1, header["ranks_per_node"])
    threads = thread_count(ranks, [affinity()] * ranks)
    speed = (
        device_speed.measure_together(ranks, threads)
        if device == "cpu"
        else device_speed.measure(threads, device)
    )
    known = {key: value for key, value in fit.parameters.items() if key not in fit.unknown}
    return device_speed.machine_toml(
        name, speed, known, nodes=header["nodes"], ranks_per_node=header["ranks_per_node"]
    )


def _read_all(files: Sequence[Path], min_nbytes: int, max_nbytes: int) -> tuple[list[str], list[Equation]]:
    """Return what is said of each file, and the equations of all."""
    said, found = [], []
    for file in files:
        told, mine = _read(file, min_nbytes=min_nbytes, max_nbytes=max_nbytes)
        said.append(told)
        found += mine
    return said, found


def _read(file: Path, *, min_nbytes: int, max_nbytes: int) -> tuple[str, list[Equation]]:
    try:
        header, lines = read_json(file)
        if header["benchmark"] != "collectives" or not lines:
            raise KeyError(header["benchmark"])
        mine = equations(header, lines, min_nbytes=min_nbytes, max_nbytes=max_nbytes)
        told = (
            f"# {file.name}: {len(mine)} lines of {header['ranks']} ranks on {header['nodes']} node(s), "
            f"{header['mpi']}, {header['dtype']}"
        )
    except (LookupError, ValueError, TypeError, AttributeError, OSError) as error:
        raise OperationError(
            f"{file} has no lines of `hpcpar bench collectives --json` ({type(error).__name__}: {error}); "
            f"write it anew"
        ) from error
    return told, mine


def _parameter_lines(fit: Fit) -> list[str]:
    lines = []
    for name, value in fit.parameters.items():
        if name in fit.unknown:
            shown = "no line depends on it"
        elif name in fit.tied:
            shown = "cannot be told from the others by these lines; add other collectives"
        elif name.startswith("alpha"):
            shown = format_duration(value)
        else:
            shown = f"{value * 1e9:.4f} ns/B" + (f" = {1 / value / GB:.1f} GB/s" if value else "")
        lines.append(f"{name:<12} {shown}")
    return lines


def _error_lines(found: Sequence[Equation], fit: Fit) -> list[str]:
    by_label: dict[str, list[tuple[float, int]]] = {}
    for equation, ratio in zip(found, fit.ratios, strict=True):
        by_label.setdefault(equation.label, []).append((ratio, equation.nbytes))
    errors = sorted(abs(ratio - 1) for ratio in fit.ratios)
    lines = [
        "",
        f"the model is off by {statistics.median(errors):.0%} (median of {len(errors)} lines), 90 % of them "
        f"by no more than {errors[int(0.9 * (len(errors) - 1))]:.0%}",
        "",
        f"{'algorithm':<36} {'lines':>5}  {'median off':>10}  modelled / measured, farthest from 1",
    ]
    for label, pairs in by_label.items():
        off = statistics.median(abs(ratio - 1) for ratio, _ in pairs)
        ratio, nbytes = max(pairs, key=lambda pair: abs(pair[0] - 1))
        lines.append(f"{label:<36} {len(pairs):>5}  {off:>10.0%}  {ratio:.2f} at {format_nbytes(nbytes)}")
    return lines


def _simulate_line(fit: Fit) -> str:
    known = {name: value for name, value in fit.parameters.items() if name not in fit.unknown}
    flags = " ".join(f"--{name.replace('_', '-')} {value:.3g}" for name, value in known.items())
    return f"hpcpar bench simulate {flags}"
