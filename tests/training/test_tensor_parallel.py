"""Runs whose layers several ranks compute together: dropout, checkpoints, samples, and what is refused."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import ConfigError, LayoutError
from hpcpar.mesh import Mesh
from hpcpar.training import Run
from hpcpar.training.parallelize import parallelize_llama
from tests.training.runs import (
    SEQUENCE,
    MakeConfig,
    course,
    deviations,
    refused,
    require_resumed_bit_for_bit,
    trained,
)

MODEL = (
    "model.hidden_size=24",
    "model.layers=2",
    "model.heads=12",
    "model.kv_heads=6",
    "model.ffn_size=48",
    "train.sequence=24",
    "train.steps=4",
    "train.evaluate_every=2",
    "optimizer.clip_norm=0.2",
)
"""Small, and divisible by 2, 3 and 4; every gradient is clipped."""


@pytest.mark.parametrize("options", [(), (SEQUENCE, "tensor_parallel.gather_again=true")])
def test_with_dropout_recomputation_changes_no_bit_and_sends_what_theory_says(
    config_of: MakeConfig, options: tuple[str, ...]
) -> None:
    courses = []
    for mode in ("none", "selective", "full"):
        config = config_of(
            *MODEL, *options, "mesh.tp=2", "model.dropout=0.2", f"train.recompute={mode}", name=mode
        )
        assert set(deviations(trained(config, 2)[0]).values()) == {0}
        courses.append(course(config))
    assert courses[0] == courses[1] == courses[2]


# --- checkpoints ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), (SEQUENCE, "optimizer.zero_stage=3")])
def test_a_run_with_dropout_is_resumed_bit_for_bit(config_of: MakeConfig, options: tuple[str, ...]) -> None:
    told = (*MODEL, *options, "mesh.tp=2", "model.dropout=0.2")
    require_resumed_bit_for_bit(config_of(*told, name="whole"), config_of(*told, name="parts"), 4)


# --- what is said, and refused --------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
def test_the_layout_is_told_and_a_sample_is_the_serial_models(config_of: MakeConfig, stage: int) -> None:
    told = (*MODEL, "output.sample_tokens=5", "train.steps=2")
    consoles = [Console(file=io.StringIO(), width=200) for _ in range(5)]
    alone = run_loopback(1, lambda comm: Run(config_of(*told), comm, console=consoles[4]).train())[0]
    config = config_of(*told, "mesh.tp=2", SEQUENCE, f"optimizer.zero_stage={stage}", name="together")
    outcomes = run_loopback(4, lambda comm: Run(config, comm, console=consoles[comm.rank]).train())
    said, *others, serial = [console.file.getvalue() for console in consoles]  # type: ignore[attr-defined]
    assert others == ["", "", ""]
    assert "ranks: 4 (dp=2 x tp=2)" in said
    divided = (
        f"22,776 parameters, {(22776 + 5 * 24) // 2:,} on each of 2 ranks, which share the sequence, too"
    )
    assert divided in said
    assert json.loads((config.output.directory / "summary.json").read_text())["layout"] == "dp=2 x tp=2"

    def sample(text: str) -> str:
        return text.split("a sample:\n")[1].split("held-out loss")[0]

    assert sample(said) == sample(serial)
    assert sample(said).startswith("document ")
    assert outcomes[0].memory.parameters < alone.memory.parameters < 2 * outcomes[0].memory.parameters


def test_a_sequence_that_does_not_divide_is_refused_before_anything_is_built(config_of: MakeConfig) -> None:
    config = config_of(*MODEL, "mesh.tp=4", SEQUENCE, "train.sequence=30")
    assert refused(config, 4, ConfigError) == (
        "train.sequence = 30 does not divide among mesh.tp = 4 ranks, which are to have equal parts of it; "
        "make it 28 or 32, or set tensor_parallel.sequence_parallel=false"
    )
    assert not config.data.cache.exists()
    assert not config.output.directory.exists()


def test_heads_that_do_not_divide_are_refused(config_of: MakeConfig) -> None:
    assert "kv_heads=6 neither divides among tp=4 ranks" in refused(
        config_of(*MODEL, "mesh.tp=4"), 4, LayoutError
    )


def test_one_rank_builds_the_model_that_it_builds_without_tensor_parallelism(config_of: MakeConfig) -> None:
    config = config_of(*MODEL)
    model = parallelize_llama(config.model_config_for(256), Mesh(Communicator.alone()), config).model
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == model.config.shapes()


# --- MPI ------------------------------------------------------------------------------------------------
