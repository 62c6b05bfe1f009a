"""Seconds of the optimizer's step, by hand."""

from __future__ import annotations

import pytest

from hpcpar.planner.cluster import Cluster
from hpcpar.planner.estimate import Estimate, estimate
from hpcpar.planner.layout import Layout
from hpcpar.planner.memory import OPTIMIZER
from hpcpar.planner.model_shapes import ModelShape
from hpcpar.planner.muon import orthogonalization_flops
from hpcpar.planner.strategy import Optimizer, Strategy

MODEL = ModelShape.named("llama3-8b")
MACHINE = Cluster.named("h100-dgx").with_nodes(1)
HIDDEN, KEYS, FFN, LAYERS = 4096, 2 * 1024, 14_336, 32
MATRICES = LAYERS * (HIDDEN * (HIDDEN + KEYS) + HIDDEN * HIDDEN + 3 * HIDDEN * FFN)


def planned(optimizer: Optimizer, stage: int = 1, **degrees: int) -> Estimate:
    layout = Layout.fit(8, **degrees)
    strategy = Strategy(layout, 64, zero_stage=stage, optimizer=optimizer)
    return estimate(MODEL, MACHINE, strategy)


def test_muon_keeps_one_moment_of_the_layers_matrices() -> None:
    adamw, muon, sgd = (planned(each, 0).stages[0].purposes[OPTIMIZER] for each in ("adamw", "muon", "sgd"))
    assert adamw - muon == 4 * MATRICES
    assert adamw - sgd == 4 * MODEL.parameters()


@pytest.mark.parametrize(("stage", "degrees", "owners"), [(0, {}, 1), (1, {}, 8), (1, {"tp": 2}, 8)])
def test_each_owner_has_its_share_of_the_iterations(stage: int, degrees: dict[str, int], owners: int) -> None:
    shapes = 2 * [(HIDDEN, HIDDEN), (HIDDEN, KEYS // 2)] + 3 * [(HIDDEN, FFN)]
    flops = LAYERS * sum(orthogonalization_flops(*shape) for shape in shapes) / owners
    device = MACHINE.device
    iterations = flops / (device.peak("bfloat16") * device.efficiency.matrix)
    muon, adamw = (planned(each, stage, **degrees).time.parts["optimizer"] for each in ("muon", "adamw"))
    # What a moment less saves, and what tp sends, is little beside it.
    assert muon - adamw == pytest.approx(iterations, rel=0.1)


def test_in_stage_3_updates_go_to_their_owners_and_back() -> None:
    third, second = (planned("muon", stage).time.parts["optimizer"] for stage in (3, 2))
    sent = 4 * MATRICES / 8 * 7 / 8
    assert third - second == pytest.approx(sent * MACHINE.node.beta_s_per_byte, rel=0.05)
