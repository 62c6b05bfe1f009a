"""The prediction of a step: what it holds together, whatever its constants."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from hpcpar.context_parallel.context_plan import balanced
from hpcpar.context_parallel.context_traffic import HeadSizes, traffic
from hpcpar.context_parallel.mask import Mask
from hpcpar.errors import ConfigError, LayoutError
from hpcpar.mesh import Layout
from hpcpar.pipeline_schedules.pipeline_simulation import Durations, simulate
from hpcpar.pipeline_schedules.proof import peak_chunks
from hpcpar.pipeline_schedules.schedule_registry import make
from hpcpar.planner.cluster import Cluster, machine_names
from hpcpar.planner.estimate import Estimate, estimate
from hpcpar.planner.experts import Experts
from hpcpar.planner.layer_time import layer_time
from hpcpar.planner.model_shapes import PUBLISHED, ModelShape
from hpcpar.planner.pipeline_time import closed_span_s, span_s
from hpcpar.planner.shapes import PRESETS, Recompute
from hpcpar.planner.software import HPCPAR
from hpcpar.planner.stage_memory import ACTIVATIONS, layer_activations, own_parameters
from hpcpar.planner.stages import chunks_alive, stages_of
from hpcpar.planner.strategy import ContextMethod, Strategy

NO_CALLS = replace(HPCPAR, call_kernels=0)


def test_parts_sum_to_the_step_and_the_worst_rank_is_named() -> None:
    strategy = Strategy(Layout(pp=4, dp=4, tp=8), 128, 2, 4096, zero_stage=1, sequence_parallel=True)
    found = estimate(ModelShape.named("llama3-70b"), Cluster.named("h100-dgx"), strategy)
    assert sum(found.parts().values()) == pytest.approx(found.step_s)
    assert found.peak_nbytes == max(stage.nbytes for stage in found.stages)
    assert found.worst.rank == 0
    assert 0.2 < found.mfu < 0.7
    assert {one.axis for one in found.traffic} == {"tp", "pp", "dp"}


@pytest.mark.parametrize("name", machine_names())
def test_each_machine_that_comes_with_hpcpar_is_read(name: str) -> None:
    cluster = Cluster.named(name)
    precision = "bfloat16" if name != "two-cores" else "float32"
    strategy = Strategy(Layout(dp=cluster.devices_per_node), 16, 1, 256, precision=precision)
    assert estimate(ModelShape.named("tiny"), cluster, strategy).step_s > 0


def test_an_unknown_machine_or_model_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'h100-dgx'.*lumi-g"):
        Cluster.named("h100-dgz")
    with pytest.raises(ConfigError, match=r"did you mean 'llama3-405b'.*gpt-175b"):
        ModelShape.named("llama3-405")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_of_the_model_that_is_trained(name: str) -> None:
    shape, config = ModelShape.named(name), PRESETS[name]
    assert shape.parameters() == config.parameters()
    assert shape.parameters(active=True) == config.parameters(active=True)
    assert shape.flops_per_token(1024) == config.flops_per_token(1024)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt-175b", 174.6), ("gpt-1t", 1008.0), ("llama3-405b", 405.9), ("deepseek-v3", 671)],
)
def test_published_models_have_their_published_parameters(name: str, billions: float) -> None:
    assert PUBLISHED[name].parameters() / 1e9 == pytest.approx(billions, rel=1e-3)


def test_batches_and_stages_that_do_not_divide_are_refused() -> None:
    with pytest.raises(LayoutError, match="take global_batch=12"):
        Strategy(Layout(dp=3), 10, 2)
    with pytest.raises(LayoutError, match="take at most 4 stages"):
        estimate(
            ModelShape.named("tiny"),
            Cluster.named("two-cores"),
            Strategy(Layout(pp=8), 8, precision="float32"),
        )


SCHEDULES = ["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_closed_form_of_a_span_is_that_of_the_simulated_schedule(schedule: str) -> None:
    strategy = Strategy(Layout(pp=4), 8, 1, 256, schedule=schedule)
    times = [[1.0] * strategy.stages] * 3
    assert closed_span_s(strategy, *times, 0.0) == pytest.approx(span_s(strategy, *times, 0.0))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"])
def test_few_microbatches_take_as_long_as_simulated(schedule: str) -> None:
    for microbatches in (2, 3, 5, 7):
        strategy = Strategy(Layout(pp=6), microbatches, 1, 256, schedule=schedule)
        times = [[1.0] * strategy.stages] * 3
        durations = Durations(*times, 0.0)
        rows = simulate(make(schedule, 6, microbatches), durations).rows
        simulated = max(row[-1].end_s for row in rows if row)
        assert closed_span_s(strategy, *times, 0.0) == pytest.approx(simulated, rel=0.04)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-h2"])
def test_as_many_chunks_are_alive_as_the_schedule_keeps(schedule: str) -> None:
    for ranks, microbatches in itertools.product((2, 3, 4), range(1, 14)):
        strategy = Strategy(Layout(pp=ranks), microbatches, 1, 256, schedule=schedule)
        kept = peak_chunks(make(schedule, ranks, microbatches))
        assert [chunks_alive(strategy, rank) for rank in range(ranks)] == list(kept)


def test_uneven_experts_count_as_those_of_the_fullest_rank() -> None:
    model = ModelShape.named("qwen3-30b-a3b")  # 128 experts
    ways = {ep: Strategy(Layout(dp=96, ep=ep), 96, 1, 4096) for ep in (1, 48, 96)}
    own = {ep: own_parameters(model, way, stages_of(model, way)) for ep, way in ways.items()}
    assert own[48].experts == own[1].experts * 3 // 128
    assert own[96].experts == own[1].experts * 2 // 128


def test_activations_of_a_gpt_are_of_the_precision() -> None:
    model = ModelShape.named("gpt-1.7b")
    halves, singles = (
        layer_activations(model, Strategy(Layout(), 2, 2, 2048, precision=precision), HPCPAR, 0, "none")
        for precision in ("bfloat16", "float32")
    )
    assert singles == 2 * halves


def test_recomputation_trades_time_for_memory() -> None:
    of = {}
    for mode in ("none", "selective", "full"):
        strategy = Strategy(Layout(dp=8), 64, 1, 4096, zero_stage=3, recompute=Recompute(mode))
        of[mode] = estimate(ModelShape.named("llama2-7b"), Cluster.named("a100-dgx"), strategy)
    assert of["none"].step_s < of["selective"].step_s < of["full"].step_s
    assert of["none"].peak_nbytes > of["selective"].peak_nbytes > of["full"].peak_nbytes


def test_sets_of_shards_take_more_memory_and_send_shards_alone_between_them() -> None:
    """HSDP: 2(n - 1)/n of the parameters within a set of n, 2(r - 1)/r of a shard between r sets."""
    model, cluster = ModelShape.named("llama3-8b"), Cluster.named("h100-dgx").with_nodes(4)

    def found(dp_shard: int | None) -> tuple[float, float]:
        layout = Layout(dp=32, dp_shard=dp_shard)
        one = estimate(model, cluster, Strategy(layout, global_batch=32, zero_stage=1, sequence=2048))
        (dp,) = one.traffic
        return dp.nbytes, one.stages[0].purposes["optimizer state"]

    phi = model.parameters()
    sent, state = found(8)
    assert sent == pytest.approx(2 * 2 * phi * 7 / 8 + 2 * 2 * (phi / 8) * 3 / 4, rel=1e-6)
    assert found(None)[0] == pytest.approx(2 * 2 * phi * 31 / 32, rel=1e-6)
    assert state == pytest.approx(12 * phi / 8, rel=1e-6)


def test_experts_are_sharded_over_their_copies_in_a_set() -> None:
    strategy = Strategy(Layout(dp=8, ep=4, dp_shard=4), global_batch=8, zero_stage=1)
    assert strategy.expert_shards == 1
    assert replace(strategy, layout=Layout(dp=8, ep=2, dp_shard=4)).expert_shards == 2
    assert replace(strategy, layout=Layout(dp=8, ep=2)).expert_shards == 4


def test_on_the_host_launches_add_to_the_kernels_and_no_communication_hides() -> None:
    cluster = Cluster.named("h100-dgx").with_nodes(1)
    on_host = replace(cluster, device=replace(cluster.device, on_host=True, launch_s=1e-3))
    strategy = Strategy(Layout(dp=8), 64, 8, 1024)
    model = ModelShape.named("llama3-8b")
    queued, alone = (estimate(model, each, strategy) for each in (cluster, on_host))
    assert queued.parts()["launches"] == 0  # of large products
    # 20 of a layer's forward, as many of its backward.
    assert alone.parts()["launches"] == pytest.approx(2 * 20 * model.layers * 1e-3)
    (of_dp,) = alone.traffic
    assert of_dp.hidden_s == 0 < queued.traffic[0].hidden_s
    assert alone.parts()["data parallel"] == pytest.approx(of_dp.seconds)


def on_cpus(ranks: int, ranks_per_core: float = 1.0) -> Cluster:
    """So many ranks of a node, and 1 ms for each launch."""
    cluster = Cluster.named("two-cores")
    device = replace(cluster.device, launch_s=1e-3, ranks_per_core=ranks_per_core)
    return replace(cluster, device=device, devices_per_node=ranks)


@pytest.mark.parametrize(
    ("layout", "more", "calls"),
    [
        (Layout(tp=2), {}, 4 * 2 * 2),  # layers, passes, all-reduces of each
        (Layout(tp=2), {"sequence_parallel": True}, 4 * 2 * 4),
        (Layout(cp=2), {}, 4 * (1 + 2)),  # keys; keys once more, and their gradients
        # Units of ZeRO-3, with embedding and head: two gathers and a reduction of each.
        (Layout(dp=2), {"zero_stage": 3}, (4 + 2) * 3),
        (Layout(dp=2), {"zero_stage": 3, "microbatch": 1}, (4 + 2) * 3 * 2),
        (Layout(dp=2), {"zero_stage": 3, "microbatch": 1, "reshard": "step"}, (4 + 2) * (2 + 2)),
    ],
)
def test_on_the_host_each_collective_takes_launches_and_turns_of_those_on_its_core(
    layout: Layout, more: dict[str, object], calls: int
) -> None:
    strategy = Strategy(layout, 2 * layout.dp, 2, 64, precision="float32")
    strategy = replace(strategy, **more)  # type: ignore[arg-type]
    model = ModelShape.named("tiny")
    for ranks_per_core in (1, 2):
        cluster = on_cpus(2, ranks_per_core)
        with_calls, without = (estimate(model, cluster, strategy, each) for each in (HPCPAR, NO_CALLS))
        expected = calls * HPCPAR.call_kernels * ranks_per_core * 1e-3
        assert with_calls.step_s - without.step_s == pytest.approx(expected)


def test_a_mixture_takes_launches_for_its_router_and_for_each_expert_of_the_rank() -> None:
    def launches(count: int, ep: int) -> float:
        shape = replace(ModelShape.named("tiny"), experts=Experts(count, 2, 128))
        strategy = Strategy(Layout(dp=4, ep=ep), 4, 1, 64, precision="float32")
        found = estimate(shape, on_cpus(4), strategy, NO_CALLS)
        return found.parts()["launches"] / (2 * shape.layers * 1e-3)

    assert launches(8, 1) == pytest.approx(
        HPCPAR.kernels + HPCPAR.routing_kernels + 8 * HPCPAR.expert_kernels
    )
    assert launches(8, 1) - launches(8, 4) == pytest.approx(6 * HPCPAR.expert_kernels)


def test_the_rank_whose_experts_have_most_rows_decides_memory_and_time() -> None:
    shape = replace(ModelShape.named("tiny"), experts=Experts(8, 2, 128))
    cluster = Cluster.named("h100-dgx").with_devices(8)

    def priced(ep: int, load: float) -> Estimate:
        strategy = Strategy(Layout(dp=8, ep=ep), 8, 1, 1024)
        return estimate(shape, cluster, strategy, replace(NO_CALLS, expert_load=load))

    even, uneven = priced(4, 1.0), priced(4, 1.5)
    rows = 0.5 * 1024 * 2 * (shape.hidden_size + 4 * 128)
    more = uneven.worst.purposes[ACTIVATIONS] - even.worst.purposes[ACTIVATIONS]
    assert more == shape.layers * rows * 2  # bytes of a bfloat16
    assert uneven.parts()["expert parallel"] > even.parts()["expert parallel"]
    assert priced(4, 9.0).step_s == priced(4, 4.0).step_s  # all rows on one of four ranks
    assert priced(1, 1.5).step_s == priced(1, 1.0).step_s


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("method", ["exchange", "ring", "allgather", "ulysses"])
def test_keys_that_travel_are_those_that_context_parallelism_sends(method: ContextMethod, keep: bool) -> None:
    model, ranks, sequence = ModelShape.named("llama3-8b"), 4, 4096
    plan = balanced(Mask(sequence), 1 if method == "ulysses" else ranks)
    heads = HeadSizes(model.heads, model.kv_heads, model.head_size)
    sent = traffic(plan, method, heads, inner=ranks // plan.size, keep=keep).of_ranks
    cluster = Cluster.named("h100-dgx").with_nodes(1)
    strategy = Strategy(Layout(cp=ranks), 1, sequence=sequence, cp_method=method, cp_keep=keep)
    priced = layer_time(model, cluster, strategy, HPCPAR, 0)
    assert priced.nbytes["cp"] == pytest.approx(sum(sent) / ranks * strategy.itemsize)


def test_stages_that_share_a_core_compute_while_others_idle() -> None:
    model = ModelShape.named("tiny")
    strategy = Strategy(Layout(pp=4), 4, 1, 256, precision="float32")
    own, shared = (estimate(model, on_cpus(4, each), strategy, NO_CALLS) for each in (1, 4))
    assert own.parts()["bubble"] > 0 == shared.parts()["bubble"]
    alone = estimate(model, on_cpus(1), Strategy(Layout(), 4, 1, 256, precision="float32"), NO_CALLS)
    passes = {key: seconds for key, seconds in alone.parts().items() if key not in ("optimizer", "pipeline")}
    busy = {key: seconds for key, seconds in shared.parts().items() if key not in ("optimizer", "pipeline")}
    assert 4 * sum(busy.values()) == pytest.approx(sum(passes.values()))
