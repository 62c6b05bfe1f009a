"""Lower bounds on the time of a step, each tighter and dearer than the one before.

no_bubble     forwards and backwards of all microbatches, evenly over the ranks
with_bubble   of the rank with most layers, and what its schedule leaves idle
passes        forwards and backwards as they are priced; reduction and optimizer come on top
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hpcpar.planner.cluster import Cluster
from hpcpar.planner.layer_time import PASSES, LayerTime, plain_layer_time, recomputing
from hpcpar.planner.model_shapes import ModelShape
from hpcpar.planner.pipeline_time import SIMULATED
from hpcpar.planner.rules import SPLIT_BACKWARD
from hpcpar.planner.software import Software
from hpcpar.planner.stages import stages_of, stages_of_ranks
from hpcpar.planner.step_time import PassesTime, head_s, passes_time
from hpcpar.planner.strategy import Strategy


class _Passes(NamedTuple):
    """Seconds of F, B and W of one microbatch."""

    forward: float
    backward: float
    weight: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.weight


class _Microbatch(NamedTuple):
    """One microbatch on one rank's part: by layer; passes of all layers and the head, of a layer at least."""

    of_layers: Mapping[int, LayerTime]
    total: _Passes
    least: _Passes


class _Pipeline(NamedTuple):
    """Layers of the rank with most of them, of the last rank, and of the stages before its first one."""

    most: int
    last: int
    before: int


class StepBounds:
    """Bounds for one model and machine. Layers' times are kept by what they depend on."""

    def __init__(self, model: ModelShape, cluster: Cluster, software: Software) -> None:
        self._model, self._cluster, self._software = model, cluster, software
        self._plain: dict[tuple[Any, ...], dict[int, LayerTime]] = {}
        self._microbatches: dict[tuple[Any, ...], _Microbatch] = {}
        self._pipelines: dict[tuple[Any, ...], _Pipeline] = {}

    def no_bubble(self, strategy: Strategy) -> float:
        """Return the least seconds with any schedule."""
        return strategy.microbatches * self._microbatch(strategy).total.seconds / strategy.layout.pp

    def with_bubble(self, strategy: Strategy) -> float:
        """Return the least seconds with the strategy's schedule: m·T and the closed form's idle time.

        T   of the slowest rank, at least: the average, and that of the layers of the rank with most of them

        Of what is simulated: the last rank waits for the first forward of the stages before its own, and they
        for its last backward, behind which it may leave the weights' gradients.
        """
        one, pipeline = self._microbatch(strategy), self._pipeline(strategy)
        total, p, m = one.total.seconds, strategy.layout.pp, strategy.microbatches
        if p == 1:
            return m * total
        if self._cluster.device.ranks_per_core > 1:  # others compute while a rank idles
            return m * total / p
        slowest = max(total / p, pipeline.most * one.least.seconds)
        if m * strategy.stages <= SIMULATED:
            least, before, own = one.least, pipeline.before, m * pipeline.last
            after = least.backward if strategy.schedule in SPLIT_BACKWARD else least.seconds - least.forward
            done = own * (least.forward + least.backward) + before * after
            return max(m * slowest, before * least.forward + max(own * least.seconds, done))
        v = strategy.chunks_per_rank
        if strategy.schedule in ("1f1b", "interleaved"):
            return (m - 1 / v) * slowest + total / v
        if strategy.schedule == "zb-h1":
            return (m - 1) * slowest + max(0.0, total - 2 * one.total.weight)
        if strategy.schedule == "zb-v":
            return (m - 0.5) * slowest + one.total.forward / 2
        return m * slowest

    def passes(self, strategy: Strategy) -> PassesTime:
        """Return the time of all forwards and backwards, from the layers' times that are kept."""
        of_layers = self._microbatch(strategy).of_layers
        return passes_time(self._model, self._cluster, strategy, self._software, of_layers)

    def _microbatch(self, strategy: Strategy) -> _Microbatch:
        layout = strategy.layout
        key = (
            *(layout.cp, layout.tp, layout.ep, layout.etp),
            *(strategy.microbatch, strategy.cp_method, strategy.sequence_parallel),
        )
        mode = strategy.recompute.mode
        whole = (*key, mode)
        if whole in self._microbatches:
            return self._microbatches[whole]
        model, cluster, software = self._model, self._cluster, self._software
        if key not in self._plain:
            self._plain[key] = {
                layer: plain_layer_time(model, cluster, strategy, software, layer)
                for layer, _ in model.layer_kinds
            }
        of_layers = {layer: recomputing(plain, mode, software) for layer, plain in self._plain[key].items()}
        total = dict.fromkeys(PASSES, 0.0)
        least = dict.fromkeys(PASSES, float("inf"))
        for layer, count in model.layer_kinds:
            for which in PASSES:
                seconds = of_layers[layer].seconds(which)
                least[which] = min(least[which], seconds)
                total[which] += count * seconds
        for which, _, seconds_of_head in head_s(model, cluster, strategy, software):
            total[which] += seconds_of_head
        found = _Microbatch(of_layers, _Passes(**total), _Passes(**least))
        self._microbatches[whole] = found
        return found

    def _pipeline(self, strategy: Strategy) -> _Pipeline:
        key = strategy.layout.pp, strategy.schedule, strategy.stages_per_rank
        if key not in self._pipelines:
            layers = [stage.layers for stage in stages_of(self._model, strategy)]
            held = [sum(layers[each] for each in those) for those in stages_of_ranks(strategy)]
            self._pipelines[key] = _Pipeline(max(held), held[-1], sum(layers[: strategy.layout.pp - 1]))
        return self._pipelines[key]
