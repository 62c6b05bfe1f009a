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
from hpcpar.planner.software import Software
from hpcpar.planner.stages import stages_of, stages_of_ranks
from hpcpar.planner.step_time import PassesTime, head_s, passes_time
from hpcpar.planner.strategy import Strategy


class _Microbatch(NamedTuple):
    """Time of one microbatch on one rank's part of all layers: by layer; F, B and W of all and the head."""

    of_layers: Mapping[int, LayerTime]
    forward: float
    backward: float
    weight: float
    least_layer: float


class StepBounds:
    """Bounds for one model and machine. Layers' times are kept by what they depend on."""

    def __init__(self, model: ModelShape, cluster: Cluster, software: Software) -> None:
        self._model, self._cluster, self._software = model, cluster, software
        self._plain: dict[tuple[Any, ...], dict[int, LayerTime]] = {}
        self._microbatches: dict[tuple[Any, ...], _Microbatch] = {}
        self._most_layers: dict[tuple[Any, ...], int] = {}

    def no_bubble(self, strategy: Strategy) -> float:
        """Return the least seconds with any schedule."""
        one = self._microbatch(strategy)
        return strategy.microbatches * (one.forward + one.backward + one.weight) / strategy.layout.pp

    def with_bubble(self, strategy: Strategy) -> float:
        """Return the least seconds with the strategy's schedule: m·T and the closed form's idle time.

        T   of the slowest rank, at least: the average, and that of the layers of the rank with most of them
        """
        one = self._microbatch(strategy)
        total, p, m = one.forward + one.backward + one.weight, strategy.layout.pp, strategy.microbatches
        if p == 1:
            return m * total
        slowest = max(total / p, self._most(strategy) * one.least_layer)
        if m * strategy.stages <= SIMULATED:
            return m * slowest
        v = strategy.chunks_per_rank
        if strategy.schedule in ("1f1b", "interleaved"):
            return (m - 1 / v) * slowest + total / v
        if strategy.schedule == "zb-h1":
            return (m - 1) * slowest + max(0.0, one.forward + one.backward - one.weight)
        if strategy.schedule == "zb-v":
            return (m - 0.5) * slowest + one.forward / 2
        return m * slowest

    def passes(self, strategy: Strategy) -> PassesTime:
        """Return the time of all forwards and backwards, from the layers' times that are kept."""
        of_layers = self._microbatch(strategy).of_layers
        return passes_time(self._model, self._cluster, strategy, self._software, of_layers)

    def _microbatch(self, strategy: Strategy) -> _Microbatch:
        layout = strategy.layout
        key = (layout.cp, layout.tp, layout.ep, layout.etp, strategy.microbatch, strategy.cp_method)
        mode = strategy.recompute.mode
        if (*key, mode) in self._microbatches:
            return self._microbatches[(*key, mode)]
        model, cluster, software = self._model, self._cluster, self._software
        if key not in self._plain:
            self._plain[key] = {
                layer: plain_layer_time(model, cluster, strategy, software, layer)
                for layer, _ in model.layer_kinds
            }
        of_layers = {layer: recomputing(plain, mode, software) for layer, plain in self._plain[key].items()}
        total = dict.fromkeys(PASSES, 0.0)
        least = float("inf")
        for layer, count in model.layer_kinds:
            seconds = {which: of_layers[layer].seconds(which) for which in PASSES}
            least = min(least, sum(seconds.values()))
            for which in PASSES:
                total[which] += count * seconds[which]
        for which, _, seconds_of_head in head_s(model, cluster, strategy, software):
            total[which] += seconds_of_head
        found = _Microbatch(of_layers, total["forward"], total["backward"], total["weight"], least)
        self._microbatches[(*key, mode)] = found
        return found

    def _most(self, strategy: Strategy) -> int:
        """Return the layers of the rank with most of them."""
        key = strategy.layout.pp, strategy.schedule, strategy.stages_per_rank
        if key not in self._most_layers:
            stages = stages_of(self._model, strategy)
            held = stages_of_ranks(strategy)
            self._most_layers[key] = max(sum(stages[each].layers for each in those) for those in held)
        return self._most_layers[key]
