"""The planner refuses the layouts that the trainer refuses, no more and no less."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpcpar.errors import HpcparError
from hpcpar.mesh import Layout
from hpcpar.models.parallel import ExpertRanks, require_feed_forward
from hpcpar.planner.cluster import Cluster
from hpcpar.planner.model_shapes import ModelShape
from hpcpar.planner.rules import SPLIT_BACKWARD, layout_refusal, sequence_parallel_fits, zero_refusal
from hpcpar.planner.search import PlanRequest, layouts_of
from hpcpar.planner.shapes import LlamaConfig
from hpcpar.tensor_parallel.attention import require_heads
from hpcpar.training.composition import require_composition
from hpcpar.training.config import parse

NODE = replace(Cluster.named("a100-dgx").with_nodes(1), devices_per_node=12)

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("tiny", {}),
    ("tiny", {"heads": 6, "head_size": 32, "kv_heads": 3}),
    ("tiny", {"ffn_size": 96 * 3, "heads": 12, "head_size": 8, "kv_heads": 2}),
    ("tiny-moe", {}),
    ("tiny-moe", {"experts": {"count": 3, "shared_ffn_size": 64}}),
    ("olmoe-1b-7b", {}),
]


def trainer_refuses(config: LlamaConfig, text: str, layout: Layout) -> bool:
    """True where the trainer's own functions raise for these degrees."""
    told = parse(text, source="test")
    try:
        require_composition(told, replace(layout, pp=1))
        if layout.pp > config.layers:  # a stage without a layer: the trainer has it, the planner does not
            return True
        require_composition(told, layout)
        require_heads(config.heads, config.key_value_heads, layout.tp)
        split = layout.etp == layout.tp
        replicas: Any = "the optimizer's own"
        require_feed_forward(config, layout.tp, ExpertRanks(split=split, replicas=replicas))
        if config.qk_norm == "all" and layout.tp > 1:
            return True
    except HpcparError:
        return True
    return False


def toml_of(preset: str, changes: dict[str, Any], batch: int, sequence: int) -> str:
    lines = ["[model]", f"preset = '{preset}'"]
    lines += [f"{key} = {value}" for key, value in changes.items() if key != "experts"]
    lines += [f"experts.{key} = {value}" for key, value in changes.get("experts", {}).items()]
    return "\n".join(
        [*lines, "[train]", f"global_batch = {batch}", "microbatch = 1", f"sequence = {sequence}"]
    )


@pytest.mark.parametrize(
    ("preset", "changes"), MODELS, ids=[f"{name}-{n}" for n, (name, _) in enumerate(MODELS)]
)
def test_the_planner_refuses_the_layouts_that_the_trainer_refuses(
    preset: str, changes: dict[str, Any]
) -> None:
    config = LlamaConfig.preset(preset, **changes)
    model, batch, sequence = ModelShape.from_llama(config, preset), 24, 240
    text = toml_of(preset, changes, batch, sequence)
    seen = set()
    for layout in layouts_of(PlanRequest(model, NODE, batch, sequence)):
        refusal = layout_refusal(model, NODE, layout, global_batch=batch, sequence=sequence)
        refused = trainer_refuses(config, text, layout)
        assert (refusal is not None) == refused, f"{layout}: {refusal}"
        seen.add(refused)
    assert seen == {True, False}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", *SPLIT_BACKWARD])
def test_zero_with_a_pipeline_is_refused_as_by_the_trainer(stage: int, schedule: str) -> None:
    text = f"[pipeline]\nschedule = {schedule!r}\n[optimizer]\nzero_stage = {stage}"
    told = parse(text, source="test")
    try:
        require_composition(told, Layout(pp=2))
        refused = False
    except HpcparError:
        refused = True
    assert (zero_refusal(Layout(pp=2), stage, schedule) is not None) == refused
    assert zero_refusal(Layout(dp=2), stage, schedule) is None


@pytest.mark.parametrize("tp", [1, 2, 3, 5, 7])
def test_sequence_parallelism_needs_what_the_trainer_needs(tp: int) -> None:
    told = parse("[train]\nsequence = 60\n[tensor_parallel]\nsequence_parallel = true", source="test")
    try:
        require_composition(told, Layout(tp=tp))
        refused = False
    except HpcparError:
        refused = True
    assert sequence_parallel_fits(Layout(tp=tp), 60) == (not refused)
