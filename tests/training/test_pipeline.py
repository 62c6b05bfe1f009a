"""Runs whose layers are divided over a pipeline: tied weights, overlap, checkpoints, files of schedules."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import ConfigError, LayoutError, PeerFailedError
from hpcpar.models import LlamaStages
from hpcpar.pipeline_schedules.timetable import read_timetable
from hpcpar.training import Run
from hpcpar.training.pipelined import make_schedule
from tests.training.runs import (
    MakeConfig,
    OfOneProcess,
    course,
    refused,
    require_resumed_bit_for_bit,
    trained,
)

MODEL = (
    "model.hidden_size=24",
    "model.layers=6",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn_size=48",
    "train.sequence=24",
    "train.steps=4",
    "train.evaluate_every=2",
    "train.global_batch=8",
    "optimizer.clip_norm=0.2",
)
"""Every gradient is clipped."""

TIED = "model.tie_embeddings=true"


@pytest.mark.parametrize("stage", [0, 1])
def test_copies_of_tied_weights_stay_the_same_to_the_last_bit(config_of: MakeConfig, stage: int) -> None:
    # Over three replicas the order of a sum depends on where in its bucket a gradient lies.
    config = config_of(
        *MODEL,
        TIED,
        "mesh.pp=2",
        "train.microbatch=1",
        "train.global_batch=6",
        "train.precision=float32",
        f"optimizer.zero_stage={stage}",
    )

    def work(comm: Communicator) -> bytes:
        run = Run(config, comm)
        run.train_steps(0, 3, None)
        run.optimizer.wait_for_parameters()
        assert isinstance(run.model, LlamaStages)
        (copy,) = run.model.tied_parameters().values()
        assert copy is not None
        return copy.detach().numpy().tobytes()

    assert len(set(run_loopback(6, work))) == 1


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_averages_over_replicas_travel_while_other_stages_still_work(
    config_of: MakeConfig, schedule: str
) -> None:
    config = config_of(
        *MODEL, "mesh.pp=2", "train.microbatch=1", f"pipeline.schedule={schedule}", "output.timeline_steps=1"
    )
    trained(config, 4)
    events = json.loads((config.output.directory / "timeline.json").read_text())["traceEvents"]
    # Rank 2's last backward is of a later stage than rank 0's, which waits for its gradient: however fast
    # either is, what rank 2 sends in that backward's hooks leaves before rank 0 has done its last.
    ends = [event["ts"] + event["dur"] for event in events if event["pid"] == 0 and event["name"][0] == "0"]
    averaging = "allreduce dp gradients"
    sent = [event["ts"] for event in events if event["pid"] == 2 and event["name"] == averaging]
    assert sent
    assert min(sent) < max(ends)


# --- checkpoints ----------------------------------------------------------------------------------------


def test_a_run_with_dropout_is_resumed_bit_for_bit(config_of: MakeConfig) -> None:
    told = (*MODEL, "mesh.pp=2", "model.dropout=0.2", "train.microbatch=1")
    require_resumed_bit_for_bit(config_of(*told, name="whole"), config_of(*told, name="parts"), 4)


# --- what is said, and left behind ------------------------------------------------------------------------


def test_the_stages_are_told_a_sample_is_the_serial_models_and_the_last_step_is_recorded(
    config_of: MakeConfig,
) -> None:
    told = (*MODEL, "output.sample_tokens=5", "train.steps=2", "output.timeline_steps=1")
    consoles = [Console(file=io.StringIO(), width=200) for _ in range(3)]

    def said(number: int) -> str:
        stream = consoles[number].file
        assert isinstance(stream, io.StringIO)
        return stream.getvalue()

    alone = config_of(*told, name="alone")
    run_loopback(1, lambda comm: Run(alone, comm, console=consoles[2]).train())
    config = config_of(*told, "mesh.pp=2", name="together")
    run_loopback(2, lambda comm: Run(config, comm, console=consoles[comm.rank]).train())
    assert said(2).split("a sample:\n")[1].splitlines()[0] == said(0).split("a sample:\n")[1].splitlines()[0]
    assert "pipeline: 1f1b, 2 ranks, 4 microbatches, layers of the stages 3, 3" in said(0)
    assert said(1) == ""
    timetable = read_timetable(config.output.directory / "pipeline.json")
    actions = [str(timed.action) for timed in timetable.rows[1]]
    assert actions == [f"1{kind}{number}" for number in range(4) for kind in "FB"]
    events = json.loads((config.output.directory / "timeline.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"0F0", "1B3", "tied weights", "optimizer"} <= names
    layers = {(event["pid"], event["name"]) for event in events if event.get("cat") == "layers"}
    assert layers == {(number // 3, f"model.layers.{number}") for number in range(6)}
    # An arrow for each activation and each gradient of four microbatches; none leads back in time.
    arrows = [event for event in events if event.get("cat") == "pipeline"]
    left, came = ({each["id"]: each["ts"] for each in arrows if each["ph"] == phase} for phase in "sf")
    assert len(left) == len(came) == 8
    assert all(left[number] <= came[number] for number in left)


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        (
            ("train.microbatch=3",),
            ConfigError,
            "global_batch = 8 is not divided by .* 1 x 3.* make it 6 or 9",
        ),
        (
            ("optimizer.zero_stage=2", "pipeline.schedule=zb-h1"),
            ConfigError,
            "two for each microbatch; use zero_stage=1",
        ),
        (("optimizer.zero_stage=3", "pipeline.schedule=zb-v"), ConfigError, "zero_stage = 3 with pipeline"),
        (
            ("pipeline.schedule=1f1",),
            PeerFailedError,
            "'1f1' is neither a file nor a name; there are naive, g",
        ),
        (("pipeline.balance=[1, 2, 3]",), PeerFailedError, "for 3 stages, but the schedule '1f1b' has 2"),
        (("pipeline.balance=[1, 2]",), PeerFailedError, "1, 2 are 3 together, but the model has 6"),
        (("mesh.pp=3",), LayoutError, "pp=3 does not divide"),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(
    config_of: MakeConfig, options: tuple[str, ...], kind: type[Exception], words: str
) -> None:
    assert re.search(words, refused(config_of(*MODEL, "mesh.pp=2", *options), 2, kind))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n", "for 2 ranks and 2 microbatches, but the run has .* 2 and 4"),
        (
            "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3\n1F0 1B0 1F1 1B1 1F2 1B2 1F3\n",
            "txt cannot work: 1B3 is miss",
        ),
        ("0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3\n1F1 1B1 1F0 1B0 1F2 1B2 1F3 1B3\n", "txt cannot work: .*0B0"),
    ],
)
def test_a_schedule_of_a_file_is_followed_or_refused(
    config_of: MakeConfig, of_one_process: OfOneProcess, tmp_path: Path, rows: str, words: str
) -> None:
    path = tmp_path / "own.txt"
    path.write_text(rows)
    config = config_of(*MODEL, "mesh.pp=2", f"pipeline.schedule={path}", name="refused")
    assert re.search(words, refused(config, 2, PeerFailedError))
    path.write_text("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3\n")
    followed = config_of(*MODEL, "mesh.pp=2", f"pipeline.schedule={path}", name="followed")
    alone, _ = of_one_process(*MODEL)
    trained(followed, 2)
    assert course(followed) == pytest.approx(course(alone), abs=1e-10)


def test_a_schedule_of_a_file_with_a_rank_that_has_no_stage_is_refused(
    config_of: MakeConfig, tmp_path: Path
) -> None:
    path = tmp_path / "own.txt"
    path.write_text("0F0 1F0 1B0 0B0\n-\n")
    config = config_of("mesh.pp=2", f"pipeline.schedule={path}")
    with pytest.raises(ConfigError, match=r"own\.txt has no stage on rank 1, which would have nothing to"):
        make_schedule(config, 2, 1, [])


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("stages_per_rank=2", r"stages_per_rank = 2, but the schedule in \S+own\.txt has 1, 1 stages"),
        ("memory_limit=3", r"memory_limit = 3, but the schedule in \S+own\.txt keeps 4 chunks on rank 0"),
    ],
)
def test_what_is_asked_of_a_schedule_is_asked_of_a_files_too(
    config_of: MakeConfig, tmp_path: Path, option: str, words: str
) -> None:
    path = tmp_path / "own.txt"
    path.write_text("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3\n")
    config = config_of(*MODEL, "mesh.pp=2", f"pipeline.schedule={path}", f"pipeline.{option}")
    assert re.search(words, refused(config, 2, PeerFailedError))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("pipeline.schedule=1f1", "'1f1' is neither a file nor a name; there are naive, g"),
        (
            "pipeline.balance=[1, 5]",
            r"pipeline\.balance = \(1, 5\), but with mesh\.pp = 1 there are no",
        ),
        ("pipeline.balance=measured", r"pipeline\.balance = 'measured', but with mesh\.pp = 1"),
    ],
)
def test_what_is_said_about_a_pipeline_that_is_none_is_refused(
    config_of: MakeConfig, option: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Run(config_of(*MODEL, option), Communicator.alone())
