"""Predicted beside measured: memory of the fullest rank, bytes sent, time of a step.

                     predicted    measured   off by
    parameters        12.3 MiB    12.3 MiB    +0.0%
    …
    bytes sent         4.8 GiB     4.8 GiB    +0.0%
    step              52.1 ms     49.7 ms     +4.8%

The prediction is the planner's, for this configuration on this many ranks; time needs a description of the
machine (`hpcpar bench fit … --machine own`).
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hpcpar.data_parallel import MemoryReport
from hpcpar.errors import ConfigError, HpcparError
from hpcpar.launch.settings import machine_file
from hpcpar.mesh import AXES, Layout, placement
from hpcpar.models import LlamaConfig
from hpcpar.pipeline_parallel.balance import StageSplit
from hpcpar.planner.activations import llama_ends_nbytes
from hpcpar.planner.cluster import Cluster
from hpcpar.planner.estimate import Estimate, estimate
from hpcpar.planner.memory import PARAMETERS, STATE
from hpcpar.planner.model_shapes import ModelShape
from hpcpar.planner.software import HPCPAR
from hpcpar.planner.stage_memory import ACTIVATIONS, WORKING, peak_activations
from hpcpar.planner.stages import stages_of_ranks
from hpcpar.planner.strategy import Strategy
from hpcpar.training.batches import microbatches_of
from hpcpar.training.config import Config, MeshSection
from hpcpar.training.memory_check import state_widths
from hpcpar.training.traffic_report import TrafficLine
from hpcpar.units import format_duration, format_nbytes

if TYPE_CHECKING:
    from hpcpar.training.trainer import Run

MAKE_MACHINE = (
    "hpcpar run -n RANKS -- -m hpcpar bench collectives --collective all --json lines.jsonl, "
    "and hpcpar bench fit lines.jsonl --machine own"
)
"""Commands that describe this machine."""


@dataclass(frozen=True)
class PredictedLine:
    """One figure; None where it is not predicted, or was not measured. `unit` is "bytes" or "seconds"."""

    what: str
    unit: str
    predicted: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1

    def as_record(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        return {**vars(self), "error": self.error}


@dataclass(frozen=True)
class Prediction:
    """All figures; `missing` says why some are not predicted, and what to do."""

    lines: tuple[PredictedLine, ...]
    missing: str | None = None
    machine: str | None = None

    def as_record(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        return {
            "machine": self.machine,
            "missing": self.missing,
            "figures": [line.as_record() for line in self.lines],
        }

    def table(self) -> Table:
        """Return a table, for 80 columns."""
        shown = Table(
            title="Predicted by the planner, and measured", box=None, pad_edge=False, padding=(0, 1, 0, 0)
        )
        shown.add_column("", no_wrap=True)
        for heading in ("predicted", "measured", "off by"):
            shown.add_column(heading, justify="right", no_wrap=True)
        for line in self.lines:
            error = "" if line.error is None else f"{line.error:+.1%}"
            shown.add_row(line.what, _shown(line, line.predicted), _shown(line, line.measured), error)
        return shown


def _shown(line: PredictedLine, value: float | None) -> str:
    if value is None:
        return "-"
    return format_nbytes(value) if line.unit == "bytes" else format_duration(value)


def layers_of(split: StageSplit) -> tuple[int, ...]:
    """Return the layers of each stage of a split, whose first and last items are embedding and head."""
    counts = [stop - start for start, stop in split]
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)


def strategy_of(config: Config) -> Strategy:
    """Return what the planner takes for a run of this configuration.

    errors   ConfigError where mesh.dp is left to the number of ranks
    """
    degrees, train = config.mesh.model_dump(), config.train
    if -1 in [degrees[axis] for axis in AXES]:
        raise ConfigError("a dry run has no ranks to count: give each degree, as in mesh.dp=8")
    layout = Layout.fit(math.prod(degrees[axis] for axis in AXES), **degrees)
    # Microbatches are as many as are needed, and of equal size where that divides a rank's share.
    own = train.global_batch // layout.dp
    count = microbatches_of(train.global_batch, layout.dp, train.microbatch)
    return Strategy(
        layout,
        train.global_batch,
        own // count if own and own % count == 0 else train.microbatch,
        train.sequence,
        zero_stage=config.optimizer.zero_stage,
        schedule=config.pipeline.schedule,
        stages_per_rank=config.pipeline.stages_per_rank,
        recompute=config.recompute,
        precision=train.precision,
        sequence_parallel=config.tensor_parallel.sequence_parallel,
        gather_again=config.tensor_parallel.gather_again,
        cp_method=config.context_parallel.method,
        cp_inner=config.context_parallel.inner,
        cp_keep=config.context_parallel.keep,
        memory_limit=config.pipeline.memory_limit,
        packs=config.data.pack_documents,
        optimizer=config.optimizer.name,
        offload=config.optimizer.offload,
        reshard=config.optimizer.reshard,
        layers_of_stages=None if isinstance(balance := config.pipeline.balance, str) else tuple(balance),
    )


def estimate_of(
    config: Config, shape: ModelShape, cluster: Cluster, *, expert_load: float | None = None
) -> Estimate:
    """Return the planner's estimate of a step, with the configured types of gradients and moments."""
    software = replace(
        HPCPAR,
        moment_dtype=config.optimizer.moments,
        gradient_bytes=state_widths(config, moments=0).gradients,
        expert_load=expert_load or HPCPAR.expert_load,
    )
    return estimate(shape, cluster, strategy_of(config), software)


def own_machine() -> Path | None:
    """Return the place of this machine's description; None for a user without a home."""
    try:
        return machine_file()
    except ConfigError:
        return None


def mfu_of_a_token(config: Config, sizes: LlamaConfig, ranks: int, machine: Path | None) -> float | None:
    """Return the model FLOPs utilisation of one token a second on all ranks together.

    Counted as the planner does (`Estimate.mfu`): recomputation not, scores in full. None where the machine
    has no description, or that has no peak for train.precision.
    """
    try:
        peak = _described(machine).device.peak(config.train.precision)
    except ConfigError:
        return None
    shape = ModelShape.from_llama(sizes, config.model.preset)
    return shape.flops_per_token(config.train.sequence, causal=HPCPAR.causal_mfu) / (ranks * peak)


def machine_of(path: Path | None, layout: Layout) -> Cluster:
    """Read the description of this machine, with as many devices as the layout has ranks.

    errors   ConfigError where there is none, with the commands that make it; or of fewer ranks to a node
    """
    return _described(path).with_devices(layout.size)


def _described(path: Path | None) -> Cluster:
    # os.path's answer is no, and not an error, also in the home of somebody else, which HOME may name.
    if path is None or not os.path.exists(path):
        raise ConfigError(f"there is no description of this machine; make it by {MAKE_MACHINE}")
    return Cluster.read(path)


def predict(
    run: Run,
    *,
    memory: MemoryReport,
    traffic: Sequence[TrafficLine],
    step_s: float | None,
    expert_load: float | None,
) -> Prediction:
    """Return the planner's figures for a run beside the measured ones.

    step_s        median seconds of a step; None: no step was done
    expert_load   of `Run.expert_load`; None: even
    """
    sizes, layout = run.model.config, run.mesh.layout
    config = run.config.model_copy(update={"mesh": MeshSection(**layout.degrees)})
    if run.split is not None:
        section = config.pipeline.model_copy(update={"balance": list(layers_of(run.split))})
        config = config.model_copy(update={"pipeline": section})
    shape = ModelShape.from_llama(sizes, config.model.preset)
    missing: list[str] = []
    found: Estimate | None = None
    is_timed = False
    try:
        cluster = machine_of(own_machine(), layout)
        found, is_timed = estimate_of(config, shape, cluster, expert_load=expert_load), True
    except HpcparError as error:
        missing.append(f"no prediction of the step's time: {error}")
        try:
            # Memory is the same on every machine that computes in this type.
            other = Cluster.named("two-cores" if config.train.precision == "float64" else "h100-dgx")
            found = estimate_of(config, shape, other.with_devices(layout.size), expert_load=expert_load)
        except HpcparError as reason:
            missing = [f"not predicted: {reason}"]
    worst = memory.worst
    pp = layout.coordinates(placement(run.comm.nodes, layout).index(worst.rank)).pp
    stage = None if found is None else found.stages[pp]
    # What is offloaded is not among what a stage holds.
    purposes = {} if stage is None else dict(stage.purposes)
    if config.optimizer.shared_parameters and config.optimizer.zero_stage == 3:
        purposes.pop(PARAMETERS, None)  # those of a node's ranks together, and measured so
    lines = [PredictedLine(what, "bytes", purposes.get(what), worst.state[what].nbytes) for what in STATE]
    kept = None if found is None else _activations(found, sizes, pp)
    lines.append(PredictedLine(ACTIVATIONS, "bytes", kept, worst.peak_activations_nbytes))
    lines.append(PredictedLine(WORKING, "bytes", purposes.get(WORKING), None))
    lines.append(_bytes_sent(traffic))
    lines.append(PredictedLine("step", "seconds", found.step_s if found and is_timed else None, step_s))
    return Prediction(
        tuple(lines), "; ".join(missing) or None, found.cluster.name if found and is_timed else None
    )


def _activations(found: Estimate, sizes: LlamaConfig, rank: int) -> int:
    """Return the bytes saved for backward on pipeline rank `rank`: of layers, rotary tables, both ends."""
    strategy = found.strategy
    held = stages_of_ranks(strategy)[rank]
    places = strategy.own_tokens if strategy.packs else strategy.sequence // strategy.layout.cp
    tables = 2 * places * (sizes.head_width // 2) * max(strategy.itemsize, 4)
    chunks = [
        nbytes + tables + llama_ends_nbytes(sizes, strategy, embeds=number == 0, heads=False)
        for number, nbytes in zip(held, found.stages[rank].chunks, strict=True)
    ]
    ends = llama_ends_nbytes(sizes, strategy, embeds=False, heads=strategy.stages - 1 in held)
    return peak_activations(strategy, rank, chunks, of_last=ends, saved_only=True)


def _bytes_sent(traffic: Iterable[TrafficLine]) -> PredictedLine:
    """Return the bytes of all ranks, of the collectives that have a theory."""
    known = [line for line in traffic if line.nbytes_theory is not None and not line.calls_by_mpi]
    theory = sum(line.nbytes_theory or 0 for line in known)
    return PredictedLine("bytes sent", "bytes", theory, sum(line.nbytes_sent for line in known))


def median_step_s(records: Iterable[Mapping[str, Any]], first_step: int) -> float | None:
    """Return the median seconds of the steps of this run in metrics.jsonl."""
    found = [one["step_s"] for one in records if "step_s" in one and one["step"] >= first_step]
    return statistics.median(found) if found else None
