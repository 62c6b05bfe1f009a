"""Runs whose experts are divided among ranks: the serial run's numbers, bytes, samples and checkpoints."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable

import pytest
import torch
from rich.console import Console

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import CheckpointError, ConfigError, LayoutError
from hpcpar.tensor_parallel import own_shard
from hpcpar.training import Run
from hpcpar.training.metrics import records_of
from tests.training.runs import (
    SEQUENCE,
    MakeConfig,
    OfOneProcess,
    deviations,
    refused,
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
    "model.experts.balance_over=sequence",
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
        (3, ("mesh.ep=3", "optimizer.name=sgd", *BALANCED)),
        (4, ("mesh.ep=2", "optimizer.zero_stage=1", *BALANCED)),
        (4, ("mesh.ep=2", "optimizer.zero_stage=3", "train.recompute=full", *BALANCED)),
        (4, ("mesh.ep=4", "mesh.tp=2", *BALANCED)),
        (4, ("mesh.ep=2", "mesh.tp=2", "mesh.etp=2", SEQUENCE, *BALANCED)),
        (4, ("mesh.cp=2", "mesh.ep=4", "train.recompute=selective", *BALANCED)),
        (4, ("mesh.cp=2", "mesh.ep=2", "mesh.tp=2", "optimizer.name=sgd")),
        (4, ("mesh.pp=2", "mesh.ep=2", "train.microbatch=1", "train.global_batch=4", *BALANCED)),
        (
            4,
            (
                *("mesh.pp=2", "mesh.ep=2", "train.microbatch=1", "train.global_batch=4"),
                *("pipeline.balance=measured", *BALANCED),
            ),
        ),
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


def send_all_to_the_first(run: Run) -> None:
    """Give all experts the same score, so that every token goes to the first ones."""
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.zero_()


WHOLE = [
    pytest.param(*degrees, 1, None, marks=() if degrees in ((3, 1, 1), (3, 2, 2)) else pytest.mark.long)
    for degrees in itertools.product((1, 2, 3, 4), (1, 2), (1, 2))
]
SPLIT = [(*degrees, 2, None) for degrees in ((1, 2, 1), (2, 2, 1), (3, 2, 1), (2, 2, 2))]
TO_THE_FIRST = [(ep, tp, 1, 1, send_all_to_the_first) for ep, tp in itertools.product((2, 3, 4), (1, 2))]


@pytest.mark.parametrize(("ep", "tp", "cp", "etp", "prepare"), WHOLE + SPLIT + TO_THE_FIRST)
def test_every_parameter_is_that_of_one_process_after_ten_steps_of_sgd(
    config_of: MakeConfig, ep: int, tp: int, cp: int, etp: int, prepare: Callable[[Run], None] | None
) -> None:
    told = (*MODEL, "train.steps=10", "optimizer.name=sgd", "optimizer.learning_rate=0.3")
    told += ("model.experts.balance_loss=0.1", "model.experts.balance_over=sequence", "train.global_batch=4")

    def train(comm: Communicator, name: str, *options: str) -> Run:
        run = Run(config_of(*told, *options, name=name), comm)
        if prepare is not None:
            prepare(run)
        run.train_steps(0, 10)
        return run

    (whole,) = run_loopback(1, lambda comm: dict(train(comm, "alone").model.named_parameters()))
    sizes = [size for size in range(tp * cp, 13, tp * cp) if not (size // etp) % ep]
    mesh = [f"mesh.{axis}={degree}" for axis, degree in (("ep", ep), ("tp", tp), ("cp", cp), ("etp", etp))]

    def deviation(comm: Communicator) -> float:
        parts = train(comm, "together", *mesh).model.named_parameters()
        return max((own_shard(part, whole[name]) - part).abs().max().item() for name, part in parts)

    assert max(run_loopback(sizes[0], deviation)) < 1e-10


# --- checkpoints ----------------------------------------------------------------------------------------


def test_a_run_with_capacity_and_biases_is_resumed_bit_for_bit(config_of: MakeConfig) -> None:
    told = (*MODEL, *BALANCED, "mesh.ep=2", "model.experts.capacity_factor=1.0", "optimizer.zero_stage=1")
    require_resumed_bit_for_bit(config_of(*told, name="whole"), config_of(*told, name="parts"), 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            (*MODEL, "model.experts.count=6"),
            r"model\.experts\.count = 5 there, 6 here; set model\.experts\.count=5",
        ),
        (
            (*MODEL, "model.experts.score=sigmoid"),
            r'experts\.score = "softmax" there, "sigmoid" here; set model\.ex',
        ),
        (
            [o for o in MODEL if "experts" not in o],
            r"experts\.count = 5 there, null here; .* set model\.experts\.count=5",
        ),
    ],
)
def test_a_run_with_other_experts_is_not_resumed(
    config_of: MakeConfig, options: tuple[str, ...], words: str
) -> None:
    trained(config_of(*MODEL, "train.steps=1"))
    with pytest.raises(CheckpointError, match=words):
        Run(config_of(*options), Communicator.alone(), resume=True)


def test_a_run_resumed_with_another_balance_says_so(
    config_of: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    trained(config_of(*MODEL, "train.steps=1"))
    trained(config_of(*MODEL, "train.steps=2", "model.experts.balance_loss=0.5"), resume=True)
    assert "resuming with model.experts.balance_loss = 0.5, which was 0.0 before" in caplog.text
    assert caplog.text.count("model.experts") == 1


# --- what is said, and refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, ("mesh.ep=2",)),
        (4, ("mesh.ep=4", "mesh.tp=2")),
        (4, ("mesh.pp=2", "mesh.ep=2", "train.microbatch=1")),
    ],
)
def test_a_sample_is_the_serial_models(config_of: MakeConfig, size: int, layout: tuple[str, ...]) -> None:
    told = (*MODEL, "output.sample_tokens=5", "train.steps=2", "train.global_batch=4")

    def sample(name: str, size: int, *options: str) -> str:
        consoles = [Console(file=io.StringIO(), width=200) for _ in range(size)]
        config = config_of(*told, *options, name=name)
        run_loopback(size, lambda comm: Run(config, comm, console=consoles[comm.rank]).train())
        said: str = consoles[0].file.getvalue()  # type: ignore[attr-defined]
        return said.split("a sample:\n")[1].split("held-out loss")[0]

    assert sample("together", size, *layout) == sample("alone", 1)


@pytest.mark.parametrize(
    ("size", "options", "kind", "message"),
    [
        (
            2,
            (
                "mesh.ep=2",
                "model.experts.count=1",
                "model.experts.per_token=1",
                "model.experts.renormalise=false",
            ),
            ConfigError,
            "mesh.ep = 2 ranks",
        ),
        (3, ("mesh.ep=2",), LayoutError, "ep=2 is folded out of dp x cp = 3 ranks"),
        (4, ("mesh.tp=4", "mesh.etp=2"), LayoutError, "etp=2"),
        (
            2,
            ("model.experts.per_token=6",),
            ConfigError,
            "experts.per_token=6, but there are experts.count=5",
        ),
        (2, ("model.experts.groups=2",), ConfigError, "does not divide into experts.groups=2"),
        (2, ("model.experts.capacity_factor=0",), ConfigError, "would drop every token"),
        (
            2,
            ("mesh.ep=2", "optimizer.shared_parameters=true", "optimizer.zero_stage=1"),
            ConfigError,
            "ranks of a node hold different experts",
        ),
    ],
)
def test_what_does_not_fit_is_refused_at_the_start_with_what_does(
    config_of: MakeConfig, size: int, options: tuple[str, ...], kind: type[Exception], message: str
) -> None:
    config = config_of(*MODEL, *options)
    assert message in refused(config, size, kind)
    assert not config.output.directory.exists()


def test_a_model_without_experts_has_none_to_divide(config_of: MakeConfig) -> None:
    message = refused(config_of("mesh.ep=2"), 2, ConfigError)
    assert "mesh.ep = 2, but the model has no experts to divide; take a preset" in message


# --- MPI ------------------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize("options", [(), ("optimizer.zero_stage=3", "model.experts.shared_ffn_size=8")])
def test_over_mpi_it_is_the_run_of_one_process(
    world: Communicator, config_of: MakeConfig, options: tuple[str, ...]
) -> None:
    config = world.broadcast_object(config_of(*MODEL, *options, f"mesh.ep={world.size}"))
    expected = trained(config_of(*MODEL, *of_model(options), name="alone"))[0]
    outcome = Run(config, world).train()
    found = world.allgather_object((abs(outcome.held_out_loss - expected.held_out_loss), deviations(outcome)))
    assert max(difference for difference, _ in found) < 1e-10
    assert {nbytes for _, each in found for nbytes in each.values()} <= {0, None}, found
