"""Approaches to parallelism: they use all ranks, and planner and trainer take their options alike."""

from __future__ import annotations

import math

import pytest

from hpcpar.errors import LayoutError
from hpcpar.planner.approaches import Approach, Batch, approaches, estimate_of, with_experts
from hpcpar.planner.cluster import Cluster
from hpcpar.planner.model_shapes import ModelShape
from hpcpar.training.config import parse
from hpcpar.training.prediction import strategy_of

TINY = ModelShape.named("tiny")
BATCH = Batch(global_batch=16, microbatch=4, sequence=128, precision="float32")
SIZES = ("train.sequence=128", "train.global_batch=16", "train.microbatch=4")
FOUR = Cluster.named("h100-dgx").with_devices(4)


@pytest.mark.parametrize(
    ("ranks", "last"), [(2, "context parallel"), (4, "2D: tp x pp"), (8, "3D: dp x tp x pp")]
)
def test_approaches_use_all_ranks(ranks: int, last: str) -> None:
    names = [each.name for each in approaches(ranks)]
    assert names[0] == "data parallel"
    assert last in names


@pytest.mark.parametrize("approach", approaches(4), ids=lambda each: each.name)
def test_the_planner_takes_the_options_of_the_trainer(approach: Approach) -> None:
    given = approach.given()
    dp = 4 // math.prod(given.get(axis, 1) for axis in ("pp", "cp", "tp"))
    config = parse("", source="test", overrides=(*SIZES, *approach.options, f"mesh.dp={dp}"))
    model = with_experts(TINY) if approach.has_experts else TINY
    assert estimate_of(approach, model, FOUR, BATCH).strategy == strategy_of(config)


def test_what_cannot_be_divided_is_refused_with_its_reason() -> None:
    tensor = next(each for each in approaches(8) if each.name == "tensor parallel")
    with pytest.raises(LayoutError, match="heads=4 do not divide among tp=8 ranks"):
        estimate_of(tensor, TINY, FOUR.with_devices(8), BATCH)
    expert = next(each for each in approaches(4) if "ep" in each.given())
    with pytest.raises(LayoutError, match="tiny has no experts to divide"):
        estimate_of(expert, TINY, FOUR, BATCH)
