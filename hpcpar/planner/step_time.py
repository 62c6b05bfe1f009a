"""Seconds of an optimizer step by part, and the bytes that a rank sends, by axis.

a layer's forward     its matrix products, attention, elementwise kernels; or what the host needs to
                      launch them, whichever is longer
its backward          twice that, and its forward once more with full recomputation
axes                  tp, cp, ep within the layers; ZeRO-3's gathers beside them
pipeline              m microbatches on the slowest rank, and the bubble (`pipeline_time`)
after the last one    gradients' reduction as far as it did not hide behind backwards; optimizer
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from hpcpar.planner.cluster import Cluster
from hpcpar.planner.kernel_time import GroupShape, allreduce_s, elementwise_s, half_allreduce_s, send_s
from hpcpar.planner.layer_time import PASSES, LayerTime, layer_time, plain_layer_time, products_s
from hpcpar.planner.model_shapes import ModelShape
from hpcpar.planner.optimizer_time import optimizer_s
from hpcpar.planner.pipeline_time import span_s
from hpcpar.planner.software import Software
from hpcpar.planner.stage_memory import own_parameters, stays_gathered
from hpcpar.planner.stages import StageLayers, stages_of, stages_of_ranks
from hpcpar.planner.strategy import Strategy

COMPUTE = ("matrix products", "attention", "elementwise", "launches")
COMMUNICATION = ("tensor parallel", "context parallel", "expert parallel", "pipeline", "data parallel")
PARTS = (*COMPUTE, *COMMUNICATION, "bubble", "optimizer", "input")
"""Parts of a step. Those of communication are what computation does not hide."""


@dataclass(frozen=True)
class AxisTraffic:
    """Traffic of one rank on one axis in a step.

    nbytes      that the rank sends
    link        level of the slowest link
    seconds     of its collectives; hidden_s of them behind computation
    """

    axis: str
    link: str
    nbytes: float
    seconds: float
    hidden_s: float = 0.0


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part."""

    parts: Mapping[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class PassesTime:
    """Time of all forwards and backwards of a step, which ZeRO and offload do not change.

    parts      seconds by part, of the slowest pipeline rank
    held       stages of that rank
    layers     its layers: how many take the same time, and that time
    behind_s   its seconds of backward behind which gradients travel: of weights' gradients and launches
    """

    parts: Mapping[str, float]
    held: list[StageLayers]
    layers: list[tuple[int, LayerTime]]
    behind_s: float

    @property
    def seconds(self) -> float:
        """Seconds of all parts."""
        return sum(self.parts.values())


def step_time(
    model: ModelShape,
    cluster: Cluster,
    strategy: Strategy,
    software: Software,
    passes: PassesTime | None = None,
) -> tuple[StepTime, tuple[AxisTraffic, ...]]:
    """Return the time of a step by part, and a rank's traffic by axis.

    passes   of a strategy that differs in ZeRO's stage or offload alone; None: computed here
    """
    passes = passes or passes_time(model, cluster, strategy, software)
    parts = dict(passes.parts)
    reduced = _reduction(model, cluster, strategy, software, passes.held, passes.behind_s)
    parts["data parallel"] += reduced.seconds - reduced.hidden_s
    parts["optimizer"] = optimizer_s(model, cluster, strategy, software, passes.held)
    traffic = _traffic(model, cluster, strategy, software, passes, reduced)
    return StepTime({part: parts[part] for part in PARTS}), traffic


def passes_time(
    model: ModelShape,
    cluster: Cluster,
    strategy: Strategy,
    software: Software,
    of_layers: Mapping[int, LayerTime] | None = None,
) -> PassesTime:
    """Return the time of all forwards and backwards of a step.

    of_layers   time of a layer of each kind; None: computed here
    """
    stages, m = stages_of(model, strategy), strategy.microbatches
    if of_layers is None:
        kinds = [layer for layer, _ in model.layer_kinds]
        of_layers = {layer: layer_time(model, cluster, strategy, software, layer) for layer in kinds}
    layers = {
        stage: list(_layer_times(model, cluster, strategy, software, stage, of_layers))
        for stage in dict.fromkeys(stages)
    }
    head = head_s(model, cluster, strategy, software)
    alike = {stage: _stage_time(layers[stage], head if stage.heads else []) for stage in layers}
    times = [alike[stage] for stage in stages]
    hop = _hop_s(model, cluster, strategy, software)
    blocking = hop if strategy.stages > 1 and not software.hides_messages else 0.0
    if strategy.stages > 1 and cluster.device.on_host:  # to start and await a receive and a send
        blocking += software.calls_s(cluster.device, 4)
    forward, backward, weight = ([one.seconds(which) for one in times] for which in PASSES)
    forward = [seconds + blocking for seconds in forward]
    backward = [seconds + blocking for seconds in backward]
    span = span_s(strategy, forward, backward, weight, hop if software.hides_messages else 0.0)
    by_rank = [sum(forward[s] + backward[s] + weight[s] for s in held) for held in stages_of_ranks(strategy)]
    slowest = max(range(len(by_rank)), key=by_rank.__getitem__)
    numbers = stages_of_ranks(strategy)[slowest]
    held = [stages[number] for number in numbers]
    parts = dict.fromkeys(PARTS, 0.0)
    for number in numbers:
        for which in PASSES:
            for part, seconds in times[number].passes[which].items():
                parts[part] += m * seconds
    parts["pipeline"] += 2 * m * blocking * len(numbers)
    # Ranks that share a core compute while others idle: no step is shorter than their mean work.
    busy_s = m * by_rank[slowest]
    step_s = max(span / cluster.device.ranks_per_core, m * sum(by_rank) / len(by_rank))
    if step_s < busy_s:
        parts = {part: seconds * step_s / busy_s for part, seconds in parts.items()}
    parts["bubble"] = max(0.0, step_s - busy_s)
    behind = m * sum(weight[s] + times[s].passes["backward"].get("launches", 0.0) for s in numbers)
    return PassesTime(parts, held, [each for stage in held for each in layers[stage]], behind)


def _stage_time(layers: Iterable[tuple[int, LayerTime]], head: Iterable[tuple[str, str, float]]) -> LayerTime:
    """Return the time of one microbatch on one stage: its layers, and the head."""
    total: dict[str, dict[str, float]] = {which: defaultdict(float) for which in PASSES}
    for count, time in layers:
        for which in PASSES:
            for part, seconds in time.passes[which].items():
                total[which][part] += count * seconds
    for which, part, seconds in head:
        total[which][part] += seconds
    return LayerTime(total)


def _layer_times(
    model: ModelShape,
    cluster: Cluster,
    strategy: Strategy,
    software: Software,
    stage: StageLayers,
    of_layers: Mapping[int, LayerTime],
) -> Iterator[tuple[int, LayerTime]]:
    """Yield how many layers of a stage take the same time, and that time."""
    for layer, time in of_layers.items():
        plain = stage.plain_count(layer, model)
        yield stage.count(layer, model) - plain, time
        if plain:
            yield plain, plain_layer_time(model, cluster, strategy, software, layer)


def head_s(
    model: ModelShape, cluster: Cluster, strategy: Strategy, software: Software
) -> list[tuple[str, str, float]]:
    """Return the seconds of output projection and loss."""
    device, tp = cluster.device, strategy.layout.tp
    rows, columns = strategy.own_tokens, model.vocab_size / tp
    whole = products_s(cluster, strategy, [model.head_product])
    products = [seconds / software.head_rate for seconds in whole]
    passes = elementwise_s(device, software.logits / 2 * rows * columns)
    group = GroupShape.of(cluster, tp, 1)
    unit = allreduce_s(group, 2.0 * rows * model.hidden_size)
    return [
        ("forward", "matrix products", products[0]),
        ("forward", "elementwise", passes),
        ("backward", "matrix products", products[1]),
        ("backward", "elementwise", passes),
        ("backward", "tensor parallel", unit),
        ("weight", "matrix products", products[2]),
    ]


def _hop_s(model: ModelShape, cluster: Cluster, strategy: Strategy, software: Software) -> float:
    """Return the seconds of one message between two stages."""
    layout = strategy.layout
    if layout.pp == 1:
        return 0.0
    group = GroupShape.of(cluster, layout.pp, layout.size // layout.pp)
    return send_s(group, _message_nbytes(model, strategy, software))


def _message_nbytes(model: ModelShape, strategy: Strategy, software: Software) -> float:
    share = strategy.layout.tp if strategy.sequence_parallel or software.scatters_messages else 1
    return strategy.itemsize * strategy.own_tokens * model.hidden_size / share


def _reduction(
    model: ModelShape,
    cluster: Cluster,
    strategy: Strategy,
    software: Software,
    held: list[StageLayers],
    behind_s: float,
) -> AxisTraffic:
    """Return the traffic of gradients and of sharded parameters."""
    layout, m = strategy.layout, strategy.microbatches
    own = own_parameters(model, strategy, held)
    width = software.gradient_bytes or strategy.itemsize
    total = hidden = nbytes = 0.0
    overlap = 0.0 if cluster.device.on_host else software.overlap
    groups = (
        (own.dense, layout.dp * layout.cp, layout.tp, strategy.shard_ranks),
        (own.experts, layout.edp, layout.ep * layout.etp, strategy.expert_shards),
    )
    link = cluster.node.name
    for parameters, copies, stride, shards in groups:
        ranks = shards if strategy.zero_stage else copies
        if copies > ranks and parameters:  # HSDP: shards are averaged over the sets
            across, nbytes_of_shard = (
                GroupShape.of(cluster, copies // ranks, stride * ranks),
                width * parameters / ranks,
            )
            link = across.link.name
            total += allreduce_s(across, nbytes_of_shard)
            nbytes += 2 * (1 - ranks / copies) * nbytes_of_shard
        if ranks == 1 or not parameters:
            continue
        group = GroupShape.of(cluster, ranks, stride)
        link = group.link.name if copies == ranks else link
        gradient = half_allreduce_s(group, width * parameters)
        weights = half_allreduce_s(group, strategy.itemsize * parameters)
        share = (ranks - 1) / ranks * parameters
        if strategy.zero_stage < 2 or stays_gathered(strategy, software):
            seconds = gradient + (weights if strategy.zero_stage else gradient)
            nbytes += share * (width + (strategy.itemsize if strategy.zero_stage else width))
            last_backward = behind_s / m
            hidden += min(seconds / 2 if strategy.zero_stage else seconds, overlap * last_backward)
        elif strategy.zero_stage == 2 or strategy.keeps_gathered:
            seconds = m * gradient + weights
            nbytes += share * (m * width + strategy.itemsize)
            hidden += min(m * gradient, overlap * behind_s)
        else:
            seconds = m * (gradient + 2 * weights)
            nbytes += share * m * (width + 2 * strategy.itemsize)
            hidden += min(seconds, overlap * 3 * behind_s)
        total += seconds
    if strategy.zero_stage == 3 and strategy.shard_ranks > 1 and cluster.device.on_host:
        units = sum(stage.layers + stage.embeds + stage.heads for stage in held)
        whole = stays_gathered(strategy, software) or strategy.keeps_gathered
        total += software.calls_s(cluster.device, units * (2 + m if whole else 3 * m))
    return AxisTraffic("dp", link, nbytes, total, hidden)


def _traffic(
    model: ModelShape,
    cluster: Cluster,
    strategy: Strategy,
    software: Software,
    passes: PassesTime,
    reduced: AxisTraffic,
) -> tuple[AxisTraffic, ...]:
    """Return a rank's traffic on all axes of more than one rank."""
    layout, m = strategy.layout, strategy.microbatches
    found = []
    spans = {"tp": (layout.tp, 1), "cp": (layout.cp, layout.tp), "ep": (layout.ep, layout.etp)}
    for axis, (size, stride) in spans.items():
        if size == 1:
            continue
        nbytes = sum(m * count * time.nbytes.get(axis, 0.0) for count, time in passes.layers)
        seconds = sum(m * count * time.seconds_of_axis.get(axis, 0.0) for count, time in passes.layers)
        found.append(AxisTraffic(axis, GroupShape.of(cluster, size, stride).link.name, nbytes, seconds))
    if layout.pp > 1:
        group = GroupShape.of(cluster, layout.pp, layout.size // layout.pp)
        # The first stage sends no gradient, the last one no activation.
        messages = m * sum((not stage.embeds) + (not stage.heads) for stage in passes.held)
        nbytes = _message_nbytes(model, strategy, software)
        found.append(AxisTraffic("pp", group.link.name, messages * nbytes, messages * send_s(group, nbytes)))
    if reduced.nbytes:
        found.append(reduced)
    return tuple(found)
