"""Runs whose sequences several ranks share: dropout, checkpoints, samples, and what is refused."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import ConfigError, LayoutError
from hpcpar.training import Run
from tests.training.runs import (
    SEQUENCE,
    MakeConfig,
    OfOneProcess,
    course,
    refused,
    require_resumed_bit_for_bit,
    trained,
)

MODEL = (
    "model.hidden_size=16",
    "model.layers=2",
    "model.heads=8",
    "model.kv_heads=2",
    "model.ffn_size=32",
    "train.sequence=24",
    "train.steps=4",
    "train.evaluate_every=2",
    "optimizer.clip_norm=0.2",
)
"""Small; every gradient is clipped."""

PACKED = "data.pack_documents=true"
SHORT = "train.sequence=400"
"""A sequence with several of the documents of the test's text, which have about 500 bytes."""


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_what_is_dropped_does_not_depend_on_the_ranks_of_a_sequence(
    config_of: MakeConfig, of_one_process: OfOneProcess, recompute: str
) -> None:
    alone, _ = of_one_process(*MODEL, "model.dropout=0.2")
    without, _ = of_one_process(*MODEL)
    assert course(alone) != pytest.approx(course(without), abs=1e-3)
    for cp, method in ((2, "exchange"), (2, "ulysses"), (4, "allgather")):
        config = config_of(
            *MODEL,
            "model.dropout=0.2",
            f"mesh.cp={cp}",
            f"context_parallel.method={method}",
            f"train.recompute={recompute}",
            name=f"{method}-{cp}",
        )
        trained(config, cp)
        assert course(config) == pytest.approx(course(alone), abs=1e-10)


def test_ranks_of_a_sequence_read_the_same_samples_and_others_the_next(config_of: MakeConfig) -> None:
    config = config_of(*MODEL, "mesh.cp=2", "train.global_batch=4")

    def work(comm: Communicator) -> list[list[int]]:
        tokens, _ = Run(config, comm).batches.training_batch(0)
        return tokens.tolist()

    first, second, third, fourth = run_loopback(4, work)
    (whole,) = run_loopback(1, lambda comm: Run(config_of(*MODEL, "train.global_batch=4"), comm))
    assert first == second
    assert third == fourth
    assert first + third == whole.batches.training_batch(0)[0].tolist()


# --- checkpoints ----------------------------------------------------------------------------------------


def test_a_run_with_dropout_and_documents_is_resumed_bit_for_bit(config_of: MakeConfig) -> None:
    told = (*MODEL, "mesh.cp=2", "model.dropout=0.2", PACKED, SHORT)
    require_resumed_bit_for_bit(config_of(*told, name="whole"), config_of(*told, name="parts"), 2)


# --- what is said, and refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, ("mesh.cp=2",)),
        (4, ("mesh.cp=4", "context_parallel.method=ulysses")),
        (4, ("mesh.cp=2", "mesh.pp=2", "train.microbatch=1")),
    ],
)
def test_a_sample_is_the_serial_models(config_of: MakeConfig, size: int, layout: tuple[str, ...]) -> None:
    told = (*MODEL, "output.sample_tokens=5", "train.steps=2")

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
            4,
            ("mesh.cp=4", "context_parallel.method=ulysses", "model.heads=6", "model.head_size=4"),
            ConfigError,
            "model.heads = 6 do not divide among 4 ranks that exchange heads (context_parallel.method = "
            "'ulysses'); make it 4 or 8, set mesh.cp to 1 or 2 or 3 or 6, or take the method 'exchange'",
        ),
        (
            4,
            (
                "mesh.cp=2",
                "mesh.tp=2",
                "context_parallel.method=ulysses",
                "model.heads=6",
                "model.head_size=4",
            ),
            ConfigError,
            "model.heads = 6, of which each of mesh.tp = 2 ranks has 3, do not divide among 2 ranks that "
            "exchange heads",
        ),
        (2, ("mesh.cp=2", "context_parallel.inner=2"), LayoutError, "inner=2 is for methods with two levels"),
        (
            4,
            ("mesh.cp=2", "mesh.tp=2", SEQUENCE, "train.sequence=25"),
            ConfigError,
            "train.sequence = 25 does not divide among mesh.tp = 2 ranks",
        ),
        (4, ("mesh.cp=3",), LayoutError, "cp=3"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_start_with_what_does(
    config_of: MakeConfig, size: int, options: tuple[str, ...], kind: type[Exception], message: str
) -> None:
    config = config_of(*MODEL, *options)
    assert message in refused(config, size, kind)
    assert not config.output.directory.exists()


def test_documents_that_run_together_are_not_packed(config_of: MakeConfig, tmp_path: Path) -> None:
    compiled = Tokenizer(models.WordLevel({"the": 0, "?": 1}, unk_token="?"))
    compiled.pre_tokenizer = pre_tokenizers.Whitespace()
    compiled.save(str(tmp_path / "words.json"))
    joined = (f"data.tokenizer={tmp_path / 'words.json'}", "data.eos_token=false")
    for layout in ((), ("mesh.cp=2",)):
        config = config_of(*MODEL, *joined, PACKED, *layout)
        assert "data.pack_documents = true, but data.eos_token = false" in refused(config, 2, ConfigError)
        assert not config.output.directory.exists()
    trained(config_of(*MODEL, *joined, "mesh.cp=2"), 2)


# --- MPI ------------------------------------------------------------------------------------------------
