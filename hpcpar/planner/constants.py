"""Constants of a machine and a program that measurements tell: named, fitted, kept in a file.

A constant is one number of a `Cluster` or a `Software`, by its path: "device.efficiency.matrix",
"node.alpha_s", "software.kernels". `fit` moves them, by factors, to where predictions meet measured steps.

    minimize   Σ_rows ρ(log(predicted / measured)) / σ²  +  Σ_constants (log(factor) / width)²
    ρ          Cauchy's, c² log(1 + (error/c)²): rows that no model explains lose their weight
    width      how far a constant may be from its published value: links and peaks little, software more
    by         Gauss-Newton steps with Levenberg's damping on the factors' logarithms
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcpar.errors import ConfigError
from hpcpar.planner.cluster import Cluster
from hpcpar.planner.read_input import finite_number, read_table
from hpcpar.planner.software import Software

SETS = Path(__file__).with_name("fitted")
"""Directory of the fitted sets that come with hpcpar."""

WIDTHS: dict[str, float] = {
    "device.efficiency.matrix": 0.2,
    "device.efficiency.memory": 0.3,
    "device.efficiency.depth": 0.7,
    "node.alpha_s": 0.4,
    "node.beta_s_per_byte": 0.2,
    "fabric.alpha_s": 0.5,
    "fabric.beta_s_per_byte": 0.3,
    "software.whole": 0.5,
    "software.split": 0.5,
    "software.scores": 0.5,
    "software.unfused_softmax": 0.5,
    "software.softmax_kernels": 0.5,
    "software.backward_kernels": 0.5,
    "software.launch_s": 0.7,
    "software.head_rate": 0.5,
    "software.logits": 0.5,
    "software.step_s": 0.7,
}
"""Constants that are fitted, and the standard deviation of the logarithm of their factor beforehand."""

MAY_BE_ZERO = {name for name in WIDTHS if name.endswith((".alpha_s", ".launch_s", ".step_s", ".depth"))}
"""Times that a machine or program may not have, and the depth at which products reach half their rate."""

CAUCHY = 0.03
SIGMA = 0.03
"""Relative errors: c, at which a row has half its weight; of one measurement and the model, together."""

Constants = Mapping[str, float]


def constants_of(cluster: Cluster, software: Software) -> dict[str, float]:
    """Return the values of the constants that can be fitted."""
    return {path: float(_get(path, cluster, software)) for path in WIDTHS}


def with_constants(cluster: Cluster, software: Software, constants: Constants) -> tuple[Cluster, Software]:
    """Return both with these values.

    errors   ConfigError for a constant that there is none of
    """
    for path in constants:
        if path not in WIDTHS:
            raise ConfigError(f"there is no constant {path!r}; there are {', '.join(WIDTHS)}")
    for path, value in constants.items():
        head, _, rest = path.partition(".")
        if head == "software":
            software = _set(software, rest, value)
        else:
            cluster = _set(cluster, path, value)
    return cluster, software


def _get(path: str, cluster: Cluster, software: Software) -> Any:
    head, _, rest = path.partition(".")
    found: Any = software if head == "software" else cluster
    for name in (rest if head == "software" else path).split("."):
        found = getattr(found, name)
    return found


def _set(owner: Any, path: str, value: float) -> Any:
    name, _, rest = path.partition(".")
    if rest:
        return replace(owner, **{name: _set(getattr(owner, name), rest, value)})
    return replace(owner, **{name: value})


# --- files ----------------------------------------------------------------------------------------


def write_constants(path: Path, constants: Constants) -> None:
    """Write a set as JSON."""
    rounded = {name: float(f"{value:.5g}") for name, value in constants.items()}
    path.write_text(json.dumps(rounded, indent=2) + "\n", encoding="utf-8")


def read_constants(name: str) -> dict[str, float]:
    """Read a set that comes with hpcpar by its name, or a .json file; ConfigError with the list of sets."""
    path = Path(name) if name.endswith(".json") else SETS / f"{name}.json"
    known = sorted(each.stem for each in SETS.glob("*.json"))
    if not path.is_file():
        raise ConfigError(
            f"no set of constants {name!r}; there are {', '.join(known)}, or the path of a .json file"
        )
    table = read_table(path, "constants")
    if not isinstance(table, Mapping):
        raise ConfigError(f"constants {path} must be one object of numbers, as written by --save-constants")
    return {
        key: finite_number(value, f"constants {path}: {key}", or_zero=key in MAY_BE_ZERO)
        for key, value in table.items()
    }


# --- fit ------------------------------------------------------------------------------------------

Predict = Callable[[Constants], Sequence[float]]
"""Predicted seconds of all rows with such constants."""


def fit(
    predict: Predict, measured: Sequence[float], start: Constants, *, rounds: int = 12
) -> dict[str, float]:
    """Return the constants that bring predictions nearest to measurements, beginning at `start`.

    Constants that are 0 at the start stay 0.
    """
    names = [name for name in start if start[name] > 0]
    logs = [math.log(seconds) for seconds in measured]

    def errors(factors: Sequence[float]) -> list[float]:
        values = {
            **start,
            **{name: start[name] * math.exp(f) for name, f in zip(names, factors, strict=True)},
        }
        return [math.log(seconds) - log for seconds, log in zip(predict(values), logs, strict=True)]

    def cost(found: Sequence[float], factors: Sequence[float]) -> float:
        total = sum(math.log1p((error / CAUCHY) ** 2) for error in found) * (CAUCHY / SIGMA) ** 2
        return total + sum((f / WIDTHS[name]) ** 2 for name, f in zip(names, factors, strict=True))

    factors = [0.0] * len(names)
    found = errors(factors)
    best, damping = cost(found, factors), 1.0
    for _ in range(rounds):
        matrix, vector = _normal_equations(errors, found, factors, [WIDTHS[name] for name in names])
        for _ in range(5):
            step = _solve(matrix, vector, damping)
            moved = [f + max(-0.7, min(0.7, s)) for f, s in zip(factors, step, strict=True)]
            tried = errors(moved)
            now = cost(tried, moved)
            if now < best:
                break
            damping *= 4
        else:
            break
        gained, best = best - now, now
        factors, found, damping = moved, tried, damping / 4
        if gained < 1e-3 * best:
            break
    return {**start, **{name: start[name] * math.exp(f) for name, f in zip(names, factors, strict=True)}}


def _normal_equations(
    errors: Callable[[Sequence[float]], list[float]],
    found: Sequence[float],
    factors: Sequence[float],
    widths: Sequence[float],
) -> tuple[list[list[float]], list[float]]:
    """Return JᵀWJ + priors, and -Jᵀ W errors - priors; J by differences."""
    step = 0.02
    columns = []
    for index in range(len(factors)):
        moved = list(factors)
        moved[index] += step
        columns.append([(new - old) / step for new, old in zip(errors(moved), found, strict=True)])
    weights = [1 / (1 + (error / CAUCHY) ** 2) / SIGMA**2 for error in found]
    matrix = [
        [sum(w * a * b for w, a, b in zip(weights, one, other, strict=True)) for other in columns]
        for one in columns
    ]
    vector = [-sum(w * a * e for w, a, e in zip(weights, one, found, strict=True)) for one in columns]
    for index, (factor, width) in enumerate(zip(factors, widths, strict=True)):
        matrix[index][index] += 1 / width**2
        vector[index] -= factor / width**2
    return matrix, vector


def _solve(matrix: Sequence[Sequence[float]], vector: Sequence[float], damping: float) -> list[float]:
    """Solve (matrix + damping · its diagonal) x = vector, symmetric positive definite, by elimination."""
    size = len(vector)
    rows = [[*row, value] for row, value in zip(matrix, vector, strict=True)]
    for index in range(size):
        rows[index][index] *= 1 + damping
    for pivot in range(size):
        for below in range(pivot + 1, size):
            factor = rows[below][pivot] / rows[pivot][pivot]
            if factor:
                for column in range(pivot, size + 1):
                    rows[below][column] -= factor * rows[pivot][column]
    found = [0.0] * size
    for index in reversed(range(size)):
        known = sum(rows[index][other] * found[other] for other in range(index + 1, size))
        found[index] = (rows[index][size] - known) / rows[index][index]
    return found
