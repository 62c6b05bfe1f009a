"""Runs whose experts are divided among ranks: uneven routing, samples and checkpoints."""

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
from tests.training.runs import (
    MakeConfig,
    refused,
    require_resumed_bit_for_bit,
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
            ("model.experts.capacity_factor=inf",),
            ConfigError,
            "capacity_factor=inf is no number of tokens",
        ),
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


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (
            0.05,
            0.0,
            r"model\.experts\.bias_rate = 0\.05 there, 0\.0 here; set model\.experts\.bias_rate=0\.05",
        ),
        (
            0.0,
            0.05,
            r"model\.experts\.bias_rate = 0\.0 there, 0\.05 here; set model\.experts\.bias_rate=0\.0",
        ),
    ],
)
def test_resuming_with_biases_switched_on_or_off_names_the_key(
    config_of: MakeConfig, before: float, now: float, words: str
) -> None:
    trained(config_of(*MODEL, "train.steps=1", f"model.experts.bias_rate={before}"))

    def work(comm: Communicator) -> None:
        with pytest.raises(CheckpointError, match=words):
            Run(config_of(*MODEL, f"model.experts.bias_rate={now}"), comm, resume=True)

    run_loopback(2, work)


def test_a_model_without_experts_has_none_to_divide(config_of: MakeConfig) -> None:
    message = refused(config_of("mesh.ep=2"), 2, ConfigError)
    assert "mesh.ep = 2, but the model has no experts to divide; take a preset" in message


# --- MPI ------------------------------------------------------------------------------------------------
