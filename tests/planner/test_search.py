"""The search finds what pricing every strategy finds, says why layouts cannot be, and is quick."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import hpcpar
from hpcpar.errors import ConfigError, HpcparError
from hpcpar.mesh import Layout
from hpcpar.planner.cluster import Cluster
from hpcpar.planner.estimate import Estimate, estimate
from hpcpar.planner.model_shapes import ModelShape
from hpcpar.planner.rules import zero_refusal
from hpcpar.planner.search import (
    SCHEDULES,
    STAGES_PER_RANK,
    PlanRequest,
    divisors,
    layouts_of,
    search,
    strategies,
)
from hpcpar.planner.shapes import Recompute
from hpcpar.planner.strategy import Strategy
from hpcpar.units import GiB

DENSE = ModelShape("dense", 32_000, 1024, 8, 16, 4, 64, 2816)
MIXTURE = replace(ModelShape.named("olmoe-1b-7b"), qk_norm="none", layers=4)


def cluster_with(memory_gib: float, *, nodes: int = 2, devices_per_node: int = 4) -> Cluster:
    cluster = Cluster.named("a100-dgx").with_nodes(nodes)
    device = replace(cluster.device, memory_nbytes=int(memory_gib * GiB))
    return replace(cluster, device=device, devices_per_node=devices_per_node)


def every_strategy(request: PlanRequest, layout: Layout) -> Iterator[Strategy]:
    """Yield all that the trainer could be told, one by one."""
    schedules = [("1f1b", None)]
    if layout.pp > 1:
        of_rank = request.model.layers // layout.pp
        schedules = [(name, None) for name in (*SCHEDULES, "gpipe") if name != "interleaved"]
        schedules += [("interleaved", n) for n in STAGES_PER_RANK if n <= of_rank]
    for microbatch, mode, (schedule, per_rank), divided, stage in itertools.product(
        divisors(request.global_batch // layout.dp),
        ("none", "selective", "full"),
        schedules,
        (False, True),
        (0, 1, 2, 3),
    ):
        if zero_refusal(layout, stage, schedule):
            continue
        try:
            yield Strategy(
                *(layout, request.global_batch, microbatch, request.sequence, stage),
                schedule=schedule,
                stages_per_rank=per_rank,
                recompute=Recompute(mode),
                sequence_parallel=divided,
            )
        except HpcparError:
            continue


def priced(request: PlanRequest, strategy: Strategy) -> Estimate | None:
    try:
        found = estimate(request.model, request.cluster, strategy)
    except HpcparError:
        return None
    return found if found.fits else None


@pytest.mark.parametrize(
    ("model", "memory_gib", "batch", "of_device"),
    [
        (DENSE, 40, 16, {}),
        (DENSE, 1.6, 32, {}),
        (DENSE, 0.9, 8, {}),
        (MIXTURE, 40, 2, {}),
        (MIXTURE, 8, 8, {}),
        (DENSE, 1.6, 8, {"on_host": True, "launch_s": 2e-5}),
        (MIXTURE, 8, 8, {"on_host": True, "launch_s": 2e-4, "ranks_per_core": 2.0}),
    ],
    ids=["roomy", "tight", "scarce", "mixture", "mixture-tight", "cpus", "shared-cpus"],
)
def test_the_search_finds_what_pricing_every_strategy_finds(
    model: ModelShape, memory_gib: float, batch: int, of_device: dict[str, float]
) -> None:
    cluster = cluster_with(memory_gib)
    cluster = replace(cluster, device=replace(cluster.device, **of_device))  # type: ignore[arg-type]
    request = PlanRequest(model, cluster, batch, 1024)
    plan = search(request, top=1000)
    refused = {one.layout for one in plan.rejected}
    best: dict[Layout, float] = {}
    for layout in layouts_of(request):
        if layout in refused and not any(
            one.kind == "memory" for one in plan.rejected if one.layout == layout
        ):
            continue
        of_layout = (priced(request, one) for one in every_strategy(request, layout))
        times = [found.step_s for found in of_layout if found is not None]
        if times:
            best[layout] = min(times)
    found = {one.strategy.layout: one.step_s for one in plan.ranked}
    assert found.keys() == best.keys()
    assert found == pytest.approx(best)
    few = search(request, top=3)
    assert [one.step_s for one in few.ranked] == pytest.approx(sorted(best.values())[:3])
    assert few.priced <= plan.priced


def test_every_layout_is_ranked_or_rejected_with_its_reason() -> None:
    request = PlanRequest(DENSE, cluster_with(0.9), 32, 1024)
    plan = search(request, top=1000)
    assert {one.strategy.layout for one in plan.ranked} | {one.layout for one in plan.rejected} == set(
        layouts_of(request)
    )
    assert plan.layouts == len(plan.ranked) + len(plan.rejected)
    kinds = plan.rejected_by_kind()
    assert kinds.keys() >= {"memory", "node boundary"}
    assert all("over by" in one.reason and one.over_nbytes > 0 for one in kinds["memory"])
    crossing = kinds["node boundary"][0]
    assert f"tp={crossing.layout.tp} crosses the node boundary" in crossing.reason


FIXED = {
    **{"microbatch": 2, "zero_stage": 1, "recompute": "full", "schedule": "interleaved", "tp": 2},
    **{"stages_per_rank": 4, "sequence_parallel": True, "optimizer": "muon", "reshard": "step"},
}


@pytest.mark.parametrize("key", FIXED)
def test_what_is_fixed_is_kept(key: str) -> None:
    value = FIXED[key]
    request = PlanRequest(DENSE, cluster_with(40), 32, 1024, fixed={key: (value,)})
    free = {"schedule": "pp", "stages_per_rank": "pp", "sequence_parallel": "tp", "reshard": "zero_stage"}
    ranked = search(request, top=1000).ranked
    assert ranked
    for one in ranked:
        strategy = one.strategy
        found = strategy.layout.tp if key == "tp" else getattr(strategy, key)
        if key == "recompute":
            found = strategy.recompute.mode
        has_effect = {"pp": strategy.layout.pp > 1, "tp": strategy.layout.tp > 1}
        has_effect["zero_stage"] = strategy.zero_stage == 3
        assert found == value or not has_effect.get(free.get(key, ""), True)


def test_a_wrong_key_and_a_missing_precision_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'tensor' cannot be fixed; there are pp, dp"):
        PlanRequest(DENSE, cluster_with(40), 32, 1024, fixed={"tensor": (2,)})
    with pytest.raises(ConfigError, match=r"no peak FLOP/s for 'float4'"):
        PlanRequest(DENSE, cluster_with(40), 32, 1024, precision="float4")


def test_tp_across_nodes_is_ranked_where_it_is_asked_for() -> None:
    request = PlanRequest(DENSE, cluster_with(40), 32, 1024, fixed={"tp": (8,), "pp": (1,)})
    assert search(replace(request, model=replace(DENSE, kv_heads=8))).best.strategy.layout.tp == 8


def test_tp_that_does_not_divide_a_node_crosses_its_boundary() -> None:
    request = PlanRequest(
        replace(DENSE, heads=24, kv_heads=12, ffn_size=3072), cluster_with(40, devices_per_node=3), 24, 1024
    )
    crossing = search(request, top=1000).rejected_by_kind()["node boundary"]
    assert {2, 6} <= {one.layout.tp for one in crossing}
    assert 3 not in {one.layout.tp for one in crossing}


def test_ulysses_is_refused_where_heads_do_not_divide() -> None:
    fixed = {"cp_method": ("ulysses",), "cp": (8,), "tp": (1,)}
    request = PlanRequest(replace(DENSE, heads=12), cluster_with(40), 8, 1024, fixed=fixed)
    plan = search(request)
    assert not plan.ranked
    assert "12 heads of each of tp=1 ranks do not divide among cp=8" in plan.rejected[0].reason


def test_a_host_that_lacks_memory_is_named_as_such() -> None:
    cluster = replace(cluster_with(40), host_memory_nbytes=GiB // 4, host_bandwidth=1e10)
    plan = search(PlanRequest(DENSE, cluster, 32, 1024, fixed={"offload": ("cpu",), "zero_stage": (1,)}))
    assert not plan.ranked
    assert "memory of a node's host over by" in plan.rejected_by_kind()["memory"][0].reason


def test_strategies_of_a_layout_are_legal() -> None:
    request = PlanRequest(DENSE, cluster_with(40), 32, 1024)
    for layout in (Layout(pp=2, dp=2, tp=2), Layout(dp=4, cp=2)):
        found = list(strategies(request, layout))
        assert found
        assert all(priced(request, one) is not None for one in found)


PURE = """
import json, sys
sys.path.insert(0, {path!r})
for name in ("torch", "numpy", "mpi4py", "pydantic", "rich", "matplotlib"):
    sys.modules[name] = None
import time
start = time.perf_counter()
from hpcpar.planner.cluster import Cluster
from hpcpar.planner.model_shapes import ModelShape
from hpcpar.planner.search import PlanRequest, search
cluster = Cluster.named("h100-dgx").with_nodes(2048)
plan = search(PlanRequest(ModelShape.named("llama3-405b"), cluster, 2048, 8192))
# Of this program alone; getrusage knows the parent's, too.
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([plan.layouts, plan.best.strategy.layout.size, time.perf_counter() - start, peak]))
"""


def test_405b_on_2048_nodes_is_planned_by_bare_python_in_little_memory() -> None:
    path = str(Path(hpcpar.__file__).parents[1])
    bare = ["-S"] if sys.version_info >= (3, 11) else []  # Python 3.10 reads TOML with tomli, a package
    told = subprocess.run(
        [sys.executable, "-I", *bare, "-c", PURE.format(path=path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    layouts, size, _seconds, resident_kib = json.loads(told.stdout)
    assert layouts == 680
    assert size == 16_384
    assert resident_kib < 300 * 1024
