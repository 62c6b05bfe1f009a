"""Runs whose experts are divided among ranks: the serial run's numbers, bytes, samples and checkpoints."""

from __future__ import annotations

import pytest

from hpcpar.errors import ConfigError, LayoutError
from hpcpar.training.metrics import records_of
from tests.training.runs import (
    SEQUENCE,
    MakeConfig,
    OfOneProcess,
    course,
    deviations,
    half_of,
    refused,
    require_resumed,
    require_resumed_bit_for_bit,
    require_serial,
    trained,
)

MODEL = (
    "model.hidden_size=16",
    "model.layers=2",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn_size=32",
    "model.experts.count=5",
    "model.experts.per_token=2",
    "model.experts.ffn_size=8",
    "train.sequence=24",
    "train.steps=4",
    "train.evaluate_every=2",
    "optimizer.clip_norm=0.2",
)
"""Small; every gradient is clipped, and five experts do not divide among ranks."""

BALANCED = (
    "model.experts.balance_loss=0.1",
    "model.experts.z_loss=0.01",
    "model.experts.shared_ffn_size=8",
    "model.experts.first_dense=1",
    "model.experts.bias_rate=0.01",
)


def of_model(options: tuple[str, ...]) -> list[str]:
    """Options that change what is computed, and not only where."""
    same = ("model.", "train.global_batch", "train.sequence", "data.", "optimizer.name")
    return [option for option in options if option.startswith(same)]


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, ("mesh.ep=2",)),
        (3, ("mesh.ep=3", "optimizer.name=sgd", *BALANCED)),
        (4, ("mesh.ep=2", "optimizer.zero_stage=1", *BALANCED)),
        (4, ("mesh.ep=4", "optimizer.zero_stage=2", "train.microbatch=1")),
        (4, ("mesh.ep=2", "optimizer.zero_stage=3", "train.recompute=full", *BALANCED)),
        (4, ("mesh.ep=4", "mesh.tp=2", *BALANCED)),
        (4, ("mesh.ep=2", "mesh.tp=2", "mesh.etp=2", "optimizer.zero_stage=1")),
        (4, ("mesh.ep=4", "mesh.tp=2", SEQUENCE, "optimizer.zero_stage=3", "optimizer.name=sgd")),
        (4, ("mesh.ep=2", "mesh.tp=2", "mesh.etp=2", SEQUENCE, *BALANCED)),
        (2, ("mesh.tp=2", "optimizer.zero_stage=1")),
        (4, ("mesh.cp=2", "mesh.ep=4", "train.recompute=selective", *BALANCED)),
        (4, ("mesh.cp=2", "mesh.ep=2", "mesh.tp=2", "optimizer.name=sgd")),
        (4, ("mesh.pp=2", "mesh.ep=2", "train.microbatch=1", "train.global_batch=4", *BALANCED)),
        (4, ("mesh.pp=2", "mesh.tp=2", "mesh.ep=2", "train.microbatch=1", "optimizer.zero_stage=1")),
        # Some dp ranks have fewer sequences than others.
        (3, ("mesh.ep=3", "train.global_batch=4", "train.microbatch=1", "optimizer.zero_stage=2")),
    ],
)
def test_any_layout_trains_the_model_of_one_process_and_sends_what_theory_says(
    config_of: MakeConfig, of_one_process: OfOneProcess, size: int, options: tuple[str, ...]
) -> None:
    alone, expected = of_one_process(*MODEL, *of_model(options))
    together = config_of(*MODEL, *options, name="together")
    require_serial(together, trained(together, size), alone, expected)
    mine, theirs = (
        [
            record["experts"]
            for record in records_of(config.output.directory / "metrics.jsonl")
            if "loss" in record
        ]
        for config in (together, alone)
    )
    for key in ("layer", "max_over_mean", "idle", "balance_loss", "z_loss"):
        for own, others in zip(mine, theirs, strict=True):
            assert own[key] == pytest.approx(others[key], abs=1e-10), key
