"""Runs whose shards spread over some of the dp ranks: mesh.dp_shard (HSDP)."""

from __future__ import annotations

import pytest

from hpcpar.errors import HpcparError
from tests.training.runs import (
    SEQUENCE,
    MakeConfig,
    OfOneProcess,
    refused,
    require_serial,
    trained,
)
from tests.training.test_expert_parallel import MODEL as EXPERTS
from tests.training.test_expert_parallel import of_model

SMALL = (
    "model.hidden_size=16",
    "model.layers=2",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn_size=32",
    "train.sequence=24",
    "train.steps=4",
    "train.evaluate_every=2",
    "optimizer.clip_norm=0.2",
)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (4, ("mesh.dp_shard=2", "optimizer.zero_stage=1")),
        (4, ("mesh.dp_shard=2", "optimizer.zero_stage=2", "train.microbatch=1", "optimizer.name=sgd")),
        (4, ("mesh.dp_shard=2", "optimizer.zero_stage=3", "train.microbatch=1")),
        (4, ("mesh.dp_shard=1", "mesh.cp=2", "optimizer.zero_stage=3")),
        (8, ("mesh.dp_shard=2", "mesh.tp=2", SEQUENCE, "optimizer.zero_stage=2")),
        (
            8,
            (
                *("mesh.dp_shard=2", "mesh.pp=2", "train.microbatch=1", "optimizer.zero_stage=1"),
                "train.global_batch=8",
            ),
        ),
    ],
)
def test_a_run_is_that_of_one_process_and_sends_what_theory_says(
    config_of: MakeConfig, of_one_process: OfOneProcess, size: int, options: tuple[str, ...]
) -> None:
    alone, expected = of_one_process(*SMALL, *of_model(options))
    together = config_of(*SMALL, *options, name="together")
    require_serial(together, trained(together, size), alone, expected)


@pytest.mark.parametrize(
    "options",
    [
        ("mesh.ep=2", "mesh.dp_shard=2", "optimizer.zero_stage=1"),  # a group has each expert once
        ("mesh.ep=2", "mesh.dp_shard=4", "optimizer.zero_stage=3"),  # a group has it twice, and shards it
    ],
)
def test_experts_are_sharded_over_their_copies_within_a_group(
    config_of: MakeConfig, of_one_process: OfOneProcess, options: tuple[str, ...]
) -> None:
    alone, expected = of_one_process(*EXPERTS, "train.global_batch=8", *of_model(options))
    together = config_of(*EXPERTS, "train.global_batch=8", *options, name="together")
    require_serial(together, trained(together, 8), alone, expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("mesh.dp_shard=2", "optimizer.zero_stage=0"), "nothing is sharded"),
        (("mesh.dp_shard=3", "optimizer.zero_stage=1"), "try dp_shard=2 or dp_shard=4"),
        (("mesh.dp_shard=2", "optimizer.zero_stage=1", "optimizer.shared_parameters=true"), "leave one of"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(
    config_of: MakeConfig, options: tuple[str, ...], words: str
) -> None:
    assert words in refused(config_of(*SMALL, *options), 4, HpcparError)
