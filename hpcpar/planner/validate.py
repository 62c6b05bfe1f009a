"""Measured steps beside predicted ones: `hpcpar plan --validate FILE`.

A file of rows is CSV with a header. Columns, in any order; those in brackets may be missing:

    model                          a name or file as for `hpcpar plan`; or instead hidden_size, heads, layers
                                   [, vocab_size = 51200]: a GPT of the papers
    devices, global_batch, microbatch, sequence, tp, dp, pp
    step_ms (or step_s)            measured seconds of an optimizer step
    [cp, ep, etp = 1; zero_stage = 0; dp_shard; schedule = 1f1b; stages_per_rank; recompute = none;
     precision = bfloat16; sequence_parallel = false; cp_method; offload]        as in `Strategy`
    [memory_gib]                   measured peak of a device
    [machine, software]            names; without these columns, those given to `read_rows`

Headers of vTrain's files are understood as they are: those runs recompute fully, in float16.

Constants are fitted on some rows, spread evenly over the file in the order of model and layout; errors are
those of the others. Regret: of rows with the same model, devices and batch, how much slower the layout that
the prediction prefers was measured to be than the fastest one.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from hpcpar.errors import ConfigError, HpcparError
from hpcpar.pipeline_schedules.schedule_registry import find
from hpcpar.planner.cluster import Cluster
from hpcpar.planner.constants import Constants, constants_of, fit, with_constants
from hpcpar.planner.estimate import Estimate, estimate
from hpcpar.planner.layout import DEGREES, Layout
from hpcpar.planner.model_shapes import ModelShape
from hpcpar.planner.read_input import finite_number, whole_number
from hpcpar.planner.rules import layout_refusal
from hpcpar.planner.search import PlanRequest
from hpcpar.planner.shapes import Recompute
from hpcpar.planner.software import SOFTWARE, Software
from hpcpar.planner.stages import stages_of
from hpcpar.planner.step_time import step_time
from hpcpar.planner.strategy import Strategy
from hpcpar.units import GiB

VTRAIN = {
    "# GPUs": "devices",
    "global batch": "global_batch",
    "micro batch": "microbatch",
    "hidden size": "hidden_size",
    "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "sequence",
    "tensor parallelism": "tp",
    "data parallelism": "dp",
    "pipeline parallelism": "pp",
    "iteration time (ms)": "step_ms",
}
"""Columns of vTrain's files, in our words."""

OF_VTRAIN = {
    "recompute": "full",
    "precision": "float16",
    "machine": "a100-dgx",
    "software": "megatron-deepspeed",
}


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step. `line` of the file; memory_nbytes None: not measured."""

    line: int
    model: ModelShape
    cluster: Cluster
    software: Software
    strategy: Strategy
    step_s: float
    memory_nbytes: float | None = None

    def predicted(self, constants: Constants) -> float:
        """Return the predicted seconds of the step."""
        cluster, software = with_constants(self.cluster, self.software, constants)
        return step_time(self.model, cluster, self.strategy, software)[0].total_s

    def estimate(self, constants: Constants) -> Estimate:
        """Return the whole prediction."""
        cluster, software = with_constants(self.cluster, self.software, constants)
        return estimate(self.model, cluster, self.strategy, software)

    @property
    def contest(self) -> tuple[object, ...]:
        """Rows with the same of these are choices of one user: model, devices and batch."""
        return self.model, self.strategy.layout.size, self.strategy.global_batch, self.strategy.sequence


@dataclass(frozen=True)
class Judged:
    """A row with its prediction. `tight`: the prediction leaves little memory; such rows are not fitted."""

    row: MeasuredStep
    predicted_s: float
    tight: bool

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_s / self.row.step_s - 1


@dataclass(frozen=True)
class Validation:
    """Result of a comparison.

    constants   with which the rows were predicted
    fitted      number of rows that these were fitted on
    judged      the others; all rows, where none was fitted on
    at_best     the same rows, predicted with constants that were fitted on all rows: what the formulas can
                reach; empty where none was fitted on
    """

    constants: Constants
    fitted: int
    judged: tuple[Judged, ...]
    at_best: tuple[Judged, ...] = ()

    @property
    def mean_error(self) -> float:
        """Mean of the errors' sizes."""
        return _mean_error(self.judged)

    @property
    def median_error(self) -> float:
        """Median of the errors' sizes."""
        return median(abs(one.error) for one in self.judged)

    @property
    def largest_error(self) -> float:
        """Largest size of an error."""
        return max(abs(one.error) for one in self.judged)

    @property
    def regrets(self) -> list[float]:
        """Regret of each choice among two or more judged rows."""
        choices: dict[tuple[object, ...], list[Judged]] = {}
        for one in self.judged:
            choices.setdefault(one.row.contest, []).append(one)
        return [
            min(rows, key=lambda one: one.predicted_s).row.step_s / min(one.row.step_s for one in rows) - 1
            for rows in choices.values()
            if len(rows) > 1
        ]

    def summary(self) -> str:
        """Format errors and regret in a line or two."""
        regrets = self.regrets
        told = (
            f"{len(self.judged)} rows judged, constants fitted on {self.fitted} others: error median "
            f"{self.median_error:.1%}, mean {self.mean_error:.1%}, largest {self.largest_error:.1%}"
        )
        if regrets:
            told += f"; regret of {len(regrets)} choices mean {mean(regrets):.1%}, largest {max(regrets):.1%}"
        if self.at_best:
            told += f"; fitted on all rows, these among them: mean {_mean_error(self.at_best):.1%}"
        tight = sum(one.tight for one in self.judged)
        return told + (f"; {tight} rows are tight in memory" if tight else "")


def _mean_error(judged: Sequence[Judged]) -> float:
    return mean(abs(one.error) for one in judged)


def validate(
    rows: Sequence[MeasuredStep], *, share: float = 0.2, constants: Constants | None = None
) -> Validation:
    """Fit constants on a share of the rows, and predict the others.

    share       0 = fit nothing: predict all rows with the given constants
    constants   to begin with; None = those of the rows' machine and program
    errors      ConfigError for no rows, rows of several machines, or a share of 1 or more
    """
    if not rows:
        raise ConfigError("no rows to compare with; give a file with at least one")
    if not 0 <= share < 1:
        raise ConfigError(f"a share of {share} of the rows to fit on; give 0 to below 1, as in 0.2")
    pairs = {(row.cluster.name, row.software.name) for row in rows}
    if len(pairs) > 1:
        named = ", ".join(f"{machine} with {software}" for machine, software in sorted(pairs))
        raise ConfigError(
            f"the rows are of {named}: constants are of one; validate each in a file of its own"
        )
    begun = dict(constants_of(rows[0].cluster, rows[0].software)) | dict(constants or {})
    chosen = _spread(rows, share)
    picked = set(map(id, chosen))
    others = [row for row in rows if id(row) not in picked]

    def fitted_on(some: Sequence[MeasuredStep]) -> tuple[Constants, int, tuple[Judged, ...]]:
        kept = [row for row in some if not row.estimate(begun).tight]
        found: Constants = begun
        if kept:
            found = fit(
                lambda tried: [row.predicted(tried) for row in kept], [row.step_s for row in kept], begun
            )
        return (
            found,
            len(kept),
            tuple(Judged(row, row.predicted(found), row.estimate(found).tight) for row in others),
        )

    found, fitted, judged = fitted_on(chosen)
    return Validation(found, fitted, judged, fitted_on(rows)[2] if fitted else ())


def _spread(rows: Sequence[MeasuredStep], share: float) -> list[MeasuredStep]:
    """Choose a share of the rows, evenly in the order of model and layout."""
    count = int(share * len(rows))
    if not count:
        return []
    ordered = sorted(
        rows,
        key=lambda row: (
            row.model.parameters(),
            *(row.strategy.layout.tp, row.strategy.layout.pp, row.strategy.layout.size),
            *(row.strategy.microbatch, row.strategy.global_batch, row.line),
        ),
    )
    return [ordered[int((index + 0.5) * len(ordered) / count)] for index in range(count)]


# --- files ----------------------------------------------------------------------------------------

_OPTIONAL = {
    *("cp", "ep", "etp", "zero_stage", "dp_shard", "schedule", "stages_per_rank", "recompute", "precision"),
    *("sequence_parallel", "cp_method", "offload", "memory_gib", "machine", "software", "vocab_size"),
    *("model", "hidden_size", "heads", "layers", "step_ms", "step_s"),
}
_NEEDED = ("devices", "global_batch", "microbatch", "sequence", "tp", "dp", "pp")
_IGNORED = ("Parameters (billion)",)
_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def read_rows(path: Path, *, machine: str | None = None, software: str | None = None) -> list[MeasuredStep]:
    """Read measured rows; the machine's and program's names given here go before those of the file.

    errors   ConfigError that names file, line and column
    """
    clusters: dict[str, Cluster] = {}
    given = {key: name for key, name in (("machine", machine), ("software", software)) if name is not None}
    rows = []
    for line, table in _lines(path):
        try:
            rows.append(_row({**table, **given}, line, clusters))
        except HpcparError as error:
            raise ConfigError(f"{path}, line {line}: {error}") from error
    return rows


def _lines(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield number and cells of each line that is not empty, by our names of the columns.

    errors   ConfigError for a file that is no CSV in UTF-8, a column given twice, and cells without a column
    """
    header: list[str] | None = None
    usual: dict[str, str] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            for line in reader:
                cells = [cell.strip() for cell in line]
                if not any(cells):
                    continue
                if header is None:
                    usual = OF_VTRAIN if "iteration time (ms)" in cells else {}
                    header = [VTRAIN.get(cell, cell) for cell in cells]
                    for name in header:
                        if name and header.count(name) > 1:
                            raise ConfigError(f"rows {path}: there are two columns {name!r}; leave one out")
                    continue
                if any(cells[len(header) :]):
                    told = f"{len(cells)} cells, but the header has {len(header)}"
                    raise ConfigError(f"{path}, line {reader.line_num}: {told}")
                found = {name: cell for name, cell in zip(header, cells, strict=False) if cell}
                yield reader.line_num, {**usual, **found}
    except OSError as error:
        raise ConfigError(f"rows {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"rows {path} are no CSV in UTF-8: {error}") from error


def _row(table: Mapping[str, str], line: int, clusters: dict[str, Cluster]) -> MeasuredStep:
    for key in table:
        if key not in _OPTIONAL and key not in _NEEDED and key not in _IGNORED:
            raise ConfigError(
                f"there is no column {key!r}; there are {', '.join((*_NEEDED, *sorted(_OPTIONAL)))}"
            )
    missing = [key for key in _NEEDED if key not in table]
    if "step_ms" not in table and "step_s" not in table:
        missing.append("step_ms")
    if missing:
        raise ConfigError(f"the row lacks {', '.join(missing)}")
    named, program = table.get("machine", "a100-dgx"), table.get("software", "hpcpar")
    if named not in clusters:
        clusters[named] = Cluster.named(named)
    if program not in SOFTWARE:
        raise ConfigError(f"no software is called {program!r}; there are {', '.join(SOFTWARE)}")
    model, strategy, devices = _model(table), _strategy(table), _whole(table, "devices")
    if strategy.layout.size != devices:
        raise ConfigError(f"tp, dp, pp and cp are {strategy.layout.size} ranks, but devices = {devices}")
    cluster = clusters[named].with_devices(devices)
    _require_possible(model, cluster, strategy)
    seconds = _number(table, "step_s") if "step_s" in table else _number(table, "step_ms") / 1000
    memory = _number(table, "memory_gib") * GiB if "memory_gib" in table else None
    return MeasuredStep(line, model, cluster, SOFTWARE[program], strategy, seconds, memory)


def _require_possible(model: ModelShape, cluster: Cluster, strategy: Strategy) -> None:
    """Raise an error for a row that no search would price, by the search's own rules."""
    batch, sequence = strategy.global_batch, strategy.sequence
    find(strategy.schedule)
    PlanRequest(model, cluster, batch, sequence, strategy.precision, {"offload": (strategy.offload,)})
    refusal = layout_refusal(
        model, cluster, strategy.layout, global_batch=batch, sequence=sequence, across_nodes=True
    )
    if refusal is not None:
        raise ConfigError(refusal.reason)
    stages_of(model, strategy)


def _whole(table: Mapping[str, str], key: str, least: int = 1) -> int:
    return whole_number(int(table[key]) if table[key].isdecimal() else table[key], key, least)


def _number(table: Mapping[str, str], key: str) -> float:
    try:
        return finite_number(float(table[key]), key)
    except ValueError as error:  # ConfigError is one
        raise ConfigError(f"{key} = {table[key]!r} must be a finite number above 0") from error


def _model(table: Mapping[str, str]) -> ModelShape:
    if "model" in table:
        return ModelShape.named(table["model"])
    for key in ("hidden_size", "heads", "layers"):
        if key not in table:
            raise ConfigError(
                f"neither a model nor {key}; give a model's name, or hidden_size, heads, layers"
            )
    sizes = {key: _whole(table, key) for key in ("hidden_size", "heads", "layers", "sequence")}
    return ModelShape.gpt(
        "gpt",
        hidden=sizes["hidden_size"],
        heads=sizes["heads"],
        layers=sizes["layers"],
        vocab=_whole({"vocab_size": "51200", **table}, "vocab_size"),
        positions=sizes["sequence"],
    )


def _strategy(table: Mapping[str, str]) -> Strategy:
    degrees = {axis: _whole(table, axis) for axis in DEGREES if axis in table}
    given: dict[str, Any] = {
        key: _whole(table, key)
        for key in ("global_batch", "microbatch", "sequence", "stages_per_rank")
        if key in table
    }
    given |= {key: table[key] for key in ("schedule", "precision", "cp_method", "offload") if key in table}
    if "zero_stage" in table:
        given["zero_stage"] = _whole(table, "zero_stage", 0)
    if "sequence_parallel" in table:
        told = table["sequence_parallel"].lower()
        if told not in _TRUTHS:
            raise ConfigError(f"sequence_parallel = {told!r} must be one of {', '.join(_TRUTHS)}")
        given["sequence_parallel"] = _TRUTHS[told]
    mode: Any = table.get("recompute", "none")
    return Strategy(Layout(**degrees), recompute=Recompute(mode), **given)
