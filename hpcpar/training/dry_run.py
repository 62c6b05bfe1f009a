"""Memory, traffic and time of a run by the planner, without starting it: `hpcpar train … --dry-run`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hpcpar.comm import Communicator
from hpcpar.planner.cluster import Cluster
from hpcpar.planner.estimate import Estimate
from hpcpar.planner.model_shapes import ModelShape
from hpcpar.training.config import Config
from hpcpar.training.hugging_face_start import with_hugging_face
from hpcpar.training.prediction import estimate_of
from hpcpar.training.recipes import SCALED_RANKS, Recipe
from hpcpar.units import format_duration, format_nbytes


def describe(configs: Sequence[Config], machine: str | None, about: Recipe | None = None) -> str:
    """Return, for each stage, layout, batch, memory of the fullest rank, bytes by axis, and time.

    machine   a name of `hpcpar.planner.cluster`, or the path of a file; None: as `cluster_of`
    about     the recipe that the configurations are of
    errors    ConfigError and LayoutError where a run of these would be refused, or mesh.dp is left open
    """
    cluster = cluster_of(machine)
    configs = [with_hugging_face(config, Communicator.alone()) for config in configs]
    lines = [] if about is None else list(_about(about, configs[0]))
    own = _own_shape(configs[0])
    shapes = {"": own}
    if about is not None and about.shape is not None and about.is_full:
        shapes = {"published model, ": ModelShape.named(about.shape), "model as trained here, ": own}
    for number, config in enumerate(configs, 1):
        for which, shape in shapes.items():
            found = estimate_of(config, shape, cluster)
            stage = f"stage {number} of {len(configs)}, " if len(configs) > 1 else ""
            lines += ["", *_of_stage(config, found, f"{stage}{which}")]
            # Ranks of a scaled form share cores, which no prediction of time takes into account.
            lines += [] if machine is None else [_speed(found)]
    return "\n".join(lines)


def cluster_of(machine: str | None) -> Cluster:
    """Return the planner's machine; None: two cores that all ranks of a scaled form share."""
    if machine is None:
        return replace(Cluster.named("two-cores"), devices_per_node=SCALED_RANKS)
    return Cluster.named(machine)


def _own_shape(config: Config) -> ModelShape:
    vocabulary = config.model.vocab_size or 256
    return ModelShape.from_llama(config.model_config_for(vocabulary), config.model.preset)


def _about(about: Recipe, config: Config) -> Iterator[str]:
    yield f"{about.name}: {about.summary}"
    yield f"source: {about.source}"
    yield from (f"  {note}" for note in about.notes)
    shape = _own_shape(config)
    total, active = shape.parameters(), shape.parameters(active=True)
    met = "" if active == total else f", of which a token meets {active:,}"
    published = about.parameters if about.is_full else None
    yield f"parameters: {total:,}{met}" + (f"; published: {published:,.0f}" if published else "")


def _speed(found: Estimate) -> str:
    return (
        f"  predicted: {format_duration(found.step_s)} a step, "
        f"{found.flops_per_device / 1e12:,.0f} TFLOP/s a device, MFU {found.mfu:.0%} ({found.mfu_convention})"
    )


def _of_stage(config: Config, found: Estimate, which: str) -> Iterator[str]:
    strategy, worst, cluster = found.strategy, found.worst, found.cluster
    until = f"until step {config.train.last_step:,}: " if config.train.until else ""
    size = strategy.layout.size
    nodes = -(-size // cluster.devices_per_node)
    on_nodes = f" on {nodes:,} nodes" if nodes > 1 else ""
    yield f"{which}{until}{size:,} {'ranks' if size > 1 else 'rank'}{on_nodes}: {strategy}"
    yield (
        f"  a step: {strategy.global_batch:,} sequences of {strategy.sequence:,} tokens, "
        f"{strategy.tokens:,} in all; microbatches on each rank: {strategy.microbatches:,}"
    )
    where = f"pipeline rank {worst.rank}" if strategy.layout.pp > 1 else "each rank"
    yield (
        f"  memory of {where}: {format_nbytes(worst.nbytes)}, and {cluster.device.name} has "
        f"{format_nbytes(cluster.device.memory_nbytes)}"
    )
    yield from (f"    {purpose:18}{format_nbytes(nbytes):>12}" for purpose, nbytes in worst.purposes.items())
    yield "  bytes that a rank sends in a step, by axis"
    yield from (f"    {axis.axis:18}{format_nbytes(axis.nbytes):>12}  {axis.link}" for axis in found.traffic)
