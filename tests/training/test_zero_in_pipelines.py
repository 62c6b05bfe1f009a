"""ZeRO-2 and ZeRO-3 in pipelines with tied embeddings: one process's model, theory's bytes, checkpoints."""

from __future__ import annotations

import pytest

from tests.training.runs import (
    MakeConfig,
    OfOneProcess,
    half_of,
    require_resumed,
    require_serial,
    trained,
)

MODEL = (
    "model.hidden_size=16",
    "model.layers=4",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn_size=32",
    "model.tie_embeddings=true",
    "train.sequence=16",
    "train.steps=4",
    "train.global_batch=8",
    "train.microbatch=2",
    "train.evaluate_every=2",
    "optimizer.clip_norm=0.2",
)
PIPELINE = ("mesh.pp=2", "train.microbatch=1")
INTERLEAVED = (*PIPELINE, "pipeline.schedule=interleaved")
KEPT = ("optimizer.zero_stage=3", "optimizer.reshard=step")


@pytest.mark.parametrize(
    "options",
    [
        (*PIPELINE, "optimizer.zero_stage=2"),
        (*INTERLEAVED, "optimizer.zero_stage=2", "optimizer.name=sgd"),
        (*INTERLEAVED, "optimizer.zero_stage=3", "optimizer.name=sgd"),
        (*INTERLEAVED, *KEPT),
        (*PIPELINE, *KEPT, "optimizer.shared_parameters=true"),
    ],
    ids=" ".join,
)
def test_a_run_is_that_of_one_process_and_sends_what_theory_says(
    config_of: MakeConfig, of_one_process: OfOneProcess, options: tuple[str, ...]
) -> None:
    alone, expected = of_one_process(*MODEL, *(each for each in options if "name" in each))
    together = config_of(*MODEL, *options, name="together")
    require_serial(together, trained(together, 4), alone, expected)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((*PIPELINE, *KEPT), ("mesh.tp=2", "optimizer.zero_stage=1")),
        (("optimizer.zero_stage=3", "train.microbatch=1"), (*INTERLEAVED, "optimizer.zero_stage=3")),
        ((*INTERLEAVED, "optimizer.zero_stage=3"), (*PIPELINE, "optimizer.zero_stage=2")),
    ],
)
def test_a_checkpoint_goes_on_in_another_layout(
    config_of: MakeConfig, of_one_process: OfOneProcess, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    alone, expected = of_one_process(*MODEL)
    half_of(config_of(*MODEL, *before, name="resumed"), 4)
    require_resumed(config_of(*MODEL, *after, name="resumed"), 4, alone, expected)
