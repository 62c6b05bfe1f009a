from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Container
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from hpcpar.checkpoint import save
from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergenceError,
    LayoutError,
    MismatchError,
    PeerFailedError,
)
from hpcpar.planner.cluster import MACHINES
from hpcpar.training import Config, Run, run_directory
from hpcpar.training.metrics import records_of
from hpcpar.training.milestones import intervals, is_due
from hpcpar.training.run_directory import move_aside
from tests.grid import checkered
from tests.training.runs import (
    MakeConfig,
    course,
    half_of,
    losses,
    require_resumed,
    require_resumed_bit_for_bit,
    require_same_on_all,
    trained,
)

RING = ("dp", "allreduce")


def test_any_number_of_ranks_trains_the_same_model(config_of: MakeConfig) -> None:
    alone = trained(config_of(name="alone"))[0]
    for size in (2, 3):
        config = config_of(name=f"on-{size}")
        outcomes = trained(config, size)
        # float64: only the order of summation differs.
        assert outcomes[0].held_out_loss == pytest.approx(alone.held_out_loss, abs=1e-10)
        assert losses(config) == pytest.approx(losses(config_of(name="alone")), abs=1e-10)
        require_same_on_all(outcomes)


def test_a_run_learns_and_leaves_metrics_picture_summary_and_checkpoint(config_of: MakeConfig) -> None:
    config = config_of("train.steps=40", "train.evaluate_every=20")
    outcome = trained(config)[0]
    assert outcome.held_out_loss < math.log(256) - 1.5
    directory = config.output.directory
    assert (directory / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (directory / "checkpoints" / "step-00000040" / "manifest.json").exists()
    assert json.loads((directory / "summary.json").read_text())["held_out_loss"] == outcome.held_out_loss
    records = records_of(directory / "metrics.jsonl")
    assert [record["step"] for record in records if "loss" in record] == list(range(40))
    assert [record["step"] for record in records if "held_out_loss" in record] == [20, 40]
    assert set(records[0]) == {
        "step", "time", "loss", "learning_rate", "gradient_norm", "tokens", "tokens_per_s", "step_s",
        "nbytes_sent",
    }  # fmt: skip
    assert not (directory / "timeline.json").exists()


def test_bytes_of_gradients_and_of_the_common_start_are_exactly_the_theory(config_of: MakeConfig) -> None:
    lines = {(line.communicator, line.collective): line for line in trained(config_of(), 3)[0].traffic}
    assert lines["dp", "allreduce"].deviation == 0
    assert lines["dp", "broadcast"].deviation == 0
    assert lines["losses", "allreduce"].deviation == 0
    assert lines["dp", "allreduce"].nbytes_sent > 8 * 2 * 2 * 8 * 4000  # steps · 2(p-1) · bytes · parameters


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_is_the_formula_and_is_told_to_people_and_in_the_summary(
    config_of: MakeConfig, stage: int
) -> None:
    config = config_of(f"optimizer.zero_stage={stage}", "train.steps=2")
    consoles = [Console(file=io.StringIO(), width=80) for _ in range(2)]
    outcomes = run_loopback(2, lambda comm: Run(config, comm, console=consoles[comm.rank]).train())
    assert outcomes[0].memory == outcomes[1].memory
    summary = json.loads((config.output.directory / "summary.json").read_text())
    assert summary["memory"] == outcomes[0].memory.as_record()
    assert summary["memory"]["formula"] == ["32Φ", "16Φ + 16Φ/p", "8Φ + 24Φ/p", "32Φ/p"][stage]
    assert summary["memory"]["unexplained_nbytes"] == 0
    assert summary["memory"]["worst"]["peak_activations_nbytes"] > 0
    said = consoles[0].file.getvalue()  # type: ignore[attr-defined]
    assert f"ZeRO-{stage}, {summary['memory']['formula']}" in said
    assert "activations" in said


@pytest.mark.parametrize(("stage", "precision"), checkered([0, 1, 2, 3], ["float64", "float16", "float32"]))
def test_a_run_of_every_stage_is_resumed_bit_for_bit(
    config_of: MakeConfig, stage: int, precision: str
) -> None:
    options = f"optimizer.zero_stage={stage}", f"train.precision={precision}"
    whole, parts = config_of(*options, name="whole"), config_of(*options, name="parts")
    require_resumed_bit_for_bit(whole, parts, 3, steps=4)


@pytest.mark.parametrize(
    ("before", "ranks_before", "after", "ranks_after"),
    [(0, 1, 3, 3), (1, 3, 2, 2), (2, 2, 0, 1), (3, 3, 1, 2), (3, 2, 0, 3), (0, 2, 1, 1)],
)
def test_a_run_is_resumed_in_another_stage_on_other_ranks(
    config_of: MakeConfig, before: int, ranks_before: int, after: int, ranks_after: int
) -> None:
    whole = trained(config_of(name="whole"))[0]
    half_of(config_of(f"optimizer.zero_stage={before}", name="parts"), ranks_before, steps=4)
    config = config_of(f"optimizer.zero_stage={after}", name="parts")
    resumed = require_resumed(config, ranks_after, config_of(name="whole"), whole, steps=4)
    deviations = {line.collective: line.deviation for line in resumed.traffic if line.communicator == "dp"}
    assert set(deviations.values()) <= {0, None}, deviations
    assert all(deviations.get(name, 0) == 0 for name in ("allreduce", "reduce_scatter", "allgather"))


@pytest.mark.parametrize("size", [1, 3])
def test_by_time_a_checkpoint_is_saved_where_the_log_is_written_and_not_more_often(
    config_of: MakeConfig, size: int
) -> None:
    def steps(config: Config) -> list[int]:
        trained(config, size)
        return sorted(int(path.name[5:]) for path in (config.output.directory / "checkpoints").iterdir())

    always = ("output.checkpoint_minutes=1e-9", "output.keep=9")
    assert steps(config_of(*always, name="always")) == [3, 4, 6, 8]
    assert steps(config_of("output.keep=9", name="half an hour")) == [8]
    assert steps(config_of(*always, "output.checkpoint_minutes=0", name="never")) == [8]


@pytest.mark.parametrize(("size", "stage"), [(1, 0), (3, 3)])
def test_checkpoints_written_while_training_goes_on_are_those_of_a_run_that_waits(
    config_of: MakeConfig, size: int, stage: int
) -> None:
    words = (f"optimizer.zero_stage={stage}", "output.checkpoint_every=2", "output.keep=9")
    waits, goes_on = config_of(*words, name="waits"), config_of(*words, "output.save_async=true", name="on")
    console = Console(file=io.StringIO(), width=200)
    for config in (waits, goes_on):
        run_loopback(
            size, lambda comm, c=config: Run(c, comm, console=console if comm.rank == 0 else None).train()
        )
    assert course(waits) == course(goes_on)
    saved = [sorted((each.output.directory / "checkpoints").iterdir()) for each in (waits, goes_on)]
    assert [path.name for path in saved[0]] == [path.name for path in saved[1]]
    for one, other in zip(*saved, strict=True):
        for path in (each for each in one.iterdir() if each.name.startswith(("model", "optimizer"))):
            assert path.read_bytes() == (other / path.name).read_bytes()
    lines = console.file.getvalue().splitlines()
    told = [line for line in lines if line.startswith("checkpoint of step")]
    assert len(told) == len(saved[1]) - 1, "training has nothing to go on with after the last one"
    assert all("training stood still" in line for line in told)


def test_a_checkpoint_that_is_damaged_is_passed_over_when_resuming_and_one_of_another_model_is_not(
    config_of: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of("output.checkpoint_every=2", "output.keep=9", "optimizer.zero_stage=3")
    trained(config, 2)
    whole = losses(config)
    newest = config.output.directory / "checkpoints" / "step-00000008"
    file = next(newest.glob("model.rank00001*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    (newest.with_name("step-00000006") / "state.json").write_text("{}")
    resumed = trained(config, 2, resume=True)[0]
    assert (resumed.first_step, resumed.steps) == (4, 8)
    assert losses(config) == whole
    assert f"going on from {newest.with_name('step-00000004')}, which is the newest sound one" in caplog.text


def test_resuming_a_finished_run_only_evaluates_it(config_of: MakeConfig) -> None:
    first = trained(config_of())[0]
    metrics = records_of(config_of().output.directory / "metrics.jsonl")
    again = trained(config_of(), resume=True)[0]
    found = records_of(config_of().output.directory / "metrics.jsonl")
    assert found[-1].pop("time") > metrics[-1].pop("time"), "the held-out loss has been taken again"
    assert found == metrics
    assert (again.first_step, again.steps, again.loss) == (8, 8, None)
    assert again.held_out_loss == first.held_out_loss
    assert again.memory.worst.peak_activations_nbytes is None


def test_resuming_where_nothing_is_starts_at_the_first_step(config_of: MakeConfig) -> None:
    assert trained(config_of(), resume=True)[0].first_step == 0


def test_resuming_with_other_settings_says_so(
    config_of: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    trained(config_of())
    trained(config_of("train.seed=3"), resume=True)
    assert "resuming with train.seed = 3, which was 0 before" in caplog.text


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_is_told_of_the_optimizer_when_resuming_is_what_it_does(
    config_of: MakeConfig, stage: int
) -> None:
    options = (f"optimizer.zero_stage={stage}", "optimizer.clip_norm=0")
    changed = (*options, "optimizer.weight_decay=0.7", "optimizer.betas=[0.5, 0.6]", "optimizer.epsilon=1e-3")
    half_of(config_of(*options), 2, steps=4)

    def resumed(comm: Communicator) -> list[tuple[Any, ...]]:
        run = Run(config_of(*changed), comm, resume=True)
        return [(group["weight_decay"], group["betas"], group["eps"]) for group in run.optimizer.param_groups]

    expected = [(0.7, (0.5, 0.6), 1e-3), (0.0, (0.5, 0.6), 1e-3)]
    assert run_loopback(2, resumed) == [expected, expected]


@pytest.mark.parametrize(("before", "after"), [("adamw", "sgd"), ("sgd", "adamw")])
def test_resuming_with_another_optimizer_is_refused(config_of: MakeConfig, before: str, after: str) -> None:
    trained(config_of("train.steps=1", f"optimizer.name={before}"))
    words = rf"optimizer\.name = '{before}' there, '{after}' here; set optimizer\.name={before}, or start"
    with pytest.raises(CheckpointError, match=words):
        Run(config_of(f"optimizer.name={after}"), Communicator.alone(), resume=True)


def test_tokens_are_counted_on_when_resuming_with_another_batch(config_of: MakeConfig) -> None:
    trained(config_of("train.steps=2"))
    for steps, batch in ((4, 3), (5, 1)):
        trained(config_of(f"train.steps={steps}", f"train.global_batch={batch}"), resume=True)
    records = records_of(config_of().output.directory / "metrics.jsonl")
    sequences = [record["tokens"] // 16 for record in records if "loss" in record]
    assert sequences == [5, 10, 13, 16, 17]


def seen(run: Run, first: int, last: int) -> list[int]:
    """The windows of steps first … last - 1, in their order."""
    return [int(window) for step in range(first, last) for window in run.batches.sampler.batch(step)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "after", [("train.global_batch=4",), ("train.global_batch=10", "train.microbatch=1"), ("train.seed=9",)]
)
def test_resumed_with_another_batch_or_seed_a_run_goes_on_behind_the_windows_that_it_had(
    config_of: MakeConfig, ranks: int, after: tuple[str, ...]
) -> None:
    before = config_of("train.global_batch=8", "train.steps=4")
    alone = Communicator.alone()
    order = seen(Run(config_of("train.global_batch=1", name="order"), alone), 0, 300)
    trained(before)
    config = config_of("train.global_batch=8", "train.steps=6", *after)

    def resumed(comm: Communicator) -> tuple[int, list[int]]:
        run = Run(config, comm, resume=True)
        return run.first_step, seen(run, 4, 6)

    batch = config.train.global_batch
    assert run_loopback(ranks, resumed) == [(4, order[32 : 32 + 2 * batch])] * ranks
    # And once more with the first one, from the checkpoint of that.
    trained(config, resume=True)
    again = Run(config_of("train.global_batch=8"), alone, resume=True)
    assert seen(again, 6, 7) == order[32 + 2 * batch : 40 + 2 * batch]


def test_a_checkpoint_that_counts_steps_alone_is_gone_on_from_behind_its_batches(
    config_of: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Communicator.alone()
    order = seen(Run(config_of("train.global_batch=1", name="order"), alone), 0, 50)
    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "save", lambda *a, extra, **k: save(*a, extra=without(extra), **k))
        trained(config_of("train.global_batch=8", "train.steps=4"))
    assert seen(Run(config_of("train.global_batch=3"), alone, resume=True), 4, 6) == order[32:38]


def without(extra: dict[str, Any]) -> dict[str, Any]:
    """Drop the position, which earlier versions did not save."""
    return {key: value for key, value in extra.items() if key != "data"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_resuming_amid_an_epoch_with_another_sequence_is_refused_and_with_other_text_begins_with_that(
    config_of: MakeConfig, tmp_path: Path, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    trained(config_of("train.steps=2"))
    other = config_of("train.sequence=8")

    def refused(comm: Communicator) -> None:
        with pytest.raises(
            CheckpointError, match=r"of 16 tokens, and train\.sequence = 8 here: .* set train"
        ):
            Run(other, comm, resume=True)

    run_loopback(ranks, refused)
    (tmp_path / "text" / "0.txt").write_text("another document " * 40)
    run = Run(other, Communicator.alone(), resume=True)
    assert run.batches.sampler.position(2) == (1, 0)
    assert "gone through from the beginning of an order of its own" in caplog.text


def test_resuming_with_files_that_have_changed_says_so(
    config_of: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(config_of("train.steps=1"))
    trained(config_of("train.steps=2"), resume=True)
    assert "other text" not in caplog.text
    (tmp_path / "text" / "0.txt").write_text("another document " * 40)
    trained(config_of("train.steps=3"), resume=True)
    assert caplog.text.count("resuming with other text than before") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("model.rope_theta=5e5",),
            r"model\.rope_theta = 10000\.0 there, 500000\.0 here; set model\.rope",
        ),
        (("model.norm_epsilon=1e-3",), r"model\.norm_epsilon = 1e-05 there, 0\.001 here"),
        (
            ("model.heads=4", "model.kv_heads=2"),
            r"model\.heads = 2 there, 4 here; .* set model\.heads=2 model",
        ),
        (
            ("model.hidden_size=32",),
            r"model\.hidden_size = 16 there, 32 here; .* set model\.hidden_size=16 model\.head_size=8, or",
        ),
        (("model.tie_embeddings=true",), r"model\.tie_embeddings = false there, true here"),
        (("model.preset=llama3-8b",), r"model\.rope_theta = 10000\.0 there, 500000\.0 here"),
        (
            ("model.experts.count=4", "model.experts.per_token=2", "model.experts.ffn_size=8"),
            r"is of a model without experts, and there are experts\.count = 4 here; leave out model\.experts",
        ),
    ],
)
def test_resuming_as_another_model_is_refused_on_every_rank(
    config_of: MakeConfig, options: tuple[str, ...], words: str
) -> None:
    trained(config_of("train.steps=1"))

    def work(comm: Communicator) -> None:
        with pytest.raises(CheckpointError, match=words):
            Run(config_of(*options), comm, resume=True)

    run_loopback(2, work)


def test_resuming_with_another_preset_of_the_same_model_is_no_change(config_of: MakeConfig) -> None:
    trained(config_of("train.steps=1"))
    same = config_of("model.preset=5m", "train.steps=1")
    assert trained(same, resume=True)[0].first_step == 1


def test_resuming_with_another_dropout_says_so(
    config_of: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    trained(config_of("train.steps=1"))
    trained(config_of("train.steps=1", "model.dropout=0.1"), resume=True)
    assert "resuming with model.dropout = 0.1, which was 0.0 before" in caplog.text


def test_a_checkpoint_that_does_not_tell_its_model_is_resumed(
    config_of: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Config, "model_dump", lambda *_, **__: {"train": {"steps": 1}})
        trained(config_of("train.steps=1"))
    assert trained(config_of("train.steps=1", "model.rope_theta=5e5"), resume=True)[0].first_step == 1


def test_resuming_in_another_plain_precision_is_refused_and_says_which_it_was(config_of: MakeConfig) -> None:
    trained(config_of("train.steps=1"))
    words = r"was saved in float64: model\.\S+ there is .* \(train\.precision=float64\), or"
    with pytest.raises(CheckpointError, match=words):
        Run(config_of("train.precision=float32"), Communicator.alone(), resume=True)


def test_a_new_run_moves_an_earlier_one_aside(config_of: MakeConfig, tmp_path: Path) -> None:
    trained(config_of())
    trained(config_of())
    assert (tmp_path / "run.1" / "metrics.jsonl").exists()
    assert move_aside(tmp_path / "run") == tmp_path / "run.2"
    assert move_aside(tmp_path / "text") is None


def test_checkpoints_alone_are_an_earlier_run_too(config_of: MakeConfig, tmp_path: Path) -> None:
    """Its checkpoints would be taken for those of the new one, and be resumed from."""
    trained(config_of("train.steps=3"))
    (tmp_path / "run" / "metrics.jsonl").unlink()
    trained(config_of("train.steps=1"))
    assert (tmp_path / "run.1" / "checkpoints" / "step-00000003").exists()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]


def test_an_earlier_run_is_not_moved_from_under_an_optimizer_on_disk(
    config_of: MakeConfig, tmp_path: Path
) -> None:
    inside = config_of(f"optimizer.offload={tmp_path / 'run' / 'state'}", "train.steps=1")
    trained(inside)
    with pytest.raises(ConfigError, match=r"run has an earlier run in it, .* as optimizer\.offload = '"):
        Run(inside, Communicator.alone())
    assert trained(inside, resume=True)[0].first_step == 1
    assert trained(config_of(f"optimizer.offload={tmp_path / 'run2'}", "train.steps=1"))[0].steps == 1


@pytest.mark.parametrize("directory", [".", "..", "../below"])
def test_a_second_run_in_the_current_directory_is_refused(
    config_of: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str
) -> None:
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    config = config_of(f"output.directory={directory}", "train.steps=1")
    trained(config)
    with pytest.raises(ConfigError, match=r"output\.directory = \S+ has an earlier run in it"):
        Run(config, Communicator.alone())
    assert trained(config, resume=True)[0].first_step == 1


def test_a_timeline_is_written_on_request(config_of: MakeConfig) -> None:
    config = config_of("output.timeline_steps=2")
    trained(config, 2)
    events = json.loads((config.output.directory / "timeline.json").read_text())["traceEvents"]
    names = {(e["pid"], e["name"]) for e in events if e["ph"] == "X"}
    for rank in range(2):
        assert {
            (rank, name) for name in ("data", "forward", "backward", "optimizer", "allreduce dp gradients")
        } <= names
    assert sum(e["name"] == "optimizer" and e["pid"] == 0 for e in events) == 2


def test_a_timeline_counts_memory_and_has_the_units_of_zero_3(config_of: MakeConfig) -> None:
    config = config_of("output.timeline_steps=2", "optimizer.zero_stage=3", "train.steps=2")
    memory = trained(config, 2)[0].memory
    events = json.loads((config.output.directory / "timeline.json").read_text())["traceEvents"]
    for of_rank in memory.of_ranks:
        own = [event for event in events if event["pid"] == of_rank.rank]
        counts = [e["args"] for e in own if e["ph"] == "C" and e["name"] == "model state"]
        assert len(counts) == 2
        assert all(counts[-1][what] == line.nbytes for what, line in of_rank.state.items())
        activations = [e["args"]["nbytes"] for e in own if e["ph"] == "C" and e["name"] == "activations"]
        assert max(activations) == of_rank.peak_activations_nbytes
        assert activations[-1] == 0
        units = [e for e in own if e["ph"] == "X" and e["cat"] == "units"]
        # A unit has its memory from the start of its gather until it is freed.
        changes = sorted(
            change
            for e in units
            for at, sign in ((e["ts"], 1), (e["ts"] + e["dur"], -1))
            for change in [(round(at, 3), sign * e["args"]["nbytes"])]
        )
        held = [sum(nbytes for _, nbytes in changes[: place + 1]) for place in range(len(changes))]
        assert held[-1] == 0
        assert max(held) == of_rank.peak_gathered_nbytes > 0
        gathers = [e["name"].removeprefix("gather ") for e in units if e["name"].startswith("gather ")]
        holds = [e["name"].removeprefix("hold ") for e in units if e["name"].startswith("hold ")]
        assert sorted(gathers) == sorted(holds)
        assert "the root" in gathers


def test_only_rank_0_reports_and_tells_sizes_progress_traffic_and_files(config_of: MakeConfig) -> None:
    consoles = [Console(file=io.StringIO(), width=80) for _ in range(2)]
    run_loopback(2, lambda comm: Run(config_of(), comm, console=consoles[comm.rank]).train())
    said, nothing = [console.file.getvalue() for console in consoles]  # type: ignore[attr-defined]
    assert nothing == ""
    for expected in (
        "ranks: 2 (dp=2)",
        "steps: 8 of 5 × 16 tokens",
        "step 8/8",
        "Traffic of 2 ranks",
        "loss.png",
    ):
        assert expected in said


def test_degrees_that_do_not_fit_the_ranks_are_refused_on_every_rank(config_of: MakeConfig) -> None:
    with pytest.raises(LayoutError, match="3 ranks, but the job has 2"):
        run_loopback(2, lambda comm: Run(config_of("mesh.dp=3"), comm))


@pytest.mark.parametrize("key", ["train.seed", "train.global_batch", "output.checkpoint_every"])
def test_ranks_with_different_configurations_are_refused(key: str, config_of: MakeConfig) -> None:
    def on_rank(comm: Communicator) -> None:
        with pytest.raises(MismatchError, match=rf"{key} = 4 on rank 0, and 5 on rank 2; give all ranks"):
            Run(config_of(f"{key}={4 + (comm.rank == 2)}"), comm)

    run_loopback(3, on_rank)


def test_a_batch_smaller_than_the_ranks_is_refused(config_of: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"train\.global_batch = 1 sequences cannot be shared by 2 data"):
        run_loopback(2, lambda comm: Run(config_of("train.global_batch=1"), comm))


def test_held_out_text_shorter_than_a_sequence_is_refused(config_of: MakeConfig) -> None:
    with pytest.raises(DataError, match=r"held-out text has \d+ tokens, less than a sequence of 4000"):
        run_loopback(1, lambda comm: Run(config_of("train.sequence=4000"), comm))


def test_text_missing_on_one_rank_fails_on_all_and_names_it(config_of: MakeConfig, tmp_path: Path) -> None:
    gone = tmp_path / "gone"

    def work(comm: Communicator) -> str:
        config = config_of(f"data.paths={gone}") if comm.rank == 1 else config_of()
        with pytest.raises(PeerFailedError) as caught:
            Run(config, comm)
        return str(caught.value)

    messages = run_loopback(3, work)
    assert len(set(messages)) == 1
    assert "rank 1" in messages[0]
    assert str(gone) in messages[0]


def broken_on_rank_1(run: Run, *, at: Container[int]) -> Run:
    """Let the gradients of some steps be infinite on rank 1."""
    step, step_now = run._step, [0]

    def noting(number: int) -> Any:
        step_now[0] = number
        return step(number)

    if run.comm.rank == 1:
        for parameter in run.model.parameters():
            parameter.register_hook(lambda gradient: gradient * math.inf if step_now[0] in at else gradient)
    run._step = noting  # type: ignore[method-assign]
    return run


@pytest.mark.parametrize("options", [("optimizer.zero_stage=2",), ("mesh.pp=2",), ("mesh.tp=2",)])
def test_a_step_that_one_rank_breaks_is_left_out_by_all(
    config_of: MakeConfig, options: tuple[str, ...]
) -> None:
    config = config_of(*options, "output.log_every=2", "train.global_batch=4", "model.layers=2")
    outcomes = run_loopback(2, lambda comm: broken_on_rank_1(Run(config, comm), at=[2]).train())
    assert outcomes[0].steps == config.train.steps
    lines = [line for line in records_of(config.output.directory / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines if "skipped" in line] == [2]
    assert "came from rank 1" in lines[2]["skipped"]
    assert lines[2]["gradient_norm"] is None
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_a_flipped_bit_is_found_at_the_next_comparison(config_of: MakeConfig) -> None:
    config = config_of("train.compare_every=2", "output.log_every=10", "train.global_batch=6")

    def work(comm: Communicator) -> str:
        run = Run(config, comm)
        step = run._step

        def flipping(number: int) -> Any:
            if number == 2 and comm.rank == 1:
                with torch.no_grad():
                    next(run.model.parameters()).data.view(torch.int32)[0, 0] ^= 1 << 20
            return step(number)

        run._step = flipping  # type: ignore[method-assign]
        with pytest.raises(DivergenceError) as caught:
            run.train()
        return str(caught.value)

    (message,) = set(run_loopback(3, work))
    assert message.startswith("step 4: replicas are not the same any more: ")
    assert " on rank 1" in message


def test_so_many_broken_steps_in_a_row_end_the_run_which_can_go_on_from_the_last_checkpoint(
    config_of: MakeConfig,
) -> None:
    config = config_of("output.log_every=10", "output.checkpoint_every=2", "optimizer.skip_limit=2")

    def work(comm: Communicator) -> tuple[str, bool]:
        run = broken_on_rank_1(Run(config, comm), at=[1, 3, 4, 5])
        with pytest.raises(DivergenceError) as caught:
            run.train()
        saved = [parameter.detach().clone() for parameter in run.model.parameters()]
        again = Run(config, comm, resume=True)
        assert again.first_step == 4
        return str(caught.value), all(map(torch.equal, saved, again.model.parameters()))

    found = run_loopback(2, work)
    message = found[0][0]
    assert set(found) == {(message, True)}
    assert "came from rank 1; that was number 2 of such steps in a row" in message
    assert message.startswith("step 4: ")
    names = sorted(path.name for path in (config.output.directory / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004"]


def test_an_infinite_loss_of_a_step_that_was_taken_ends_the_run_on_every_rank(config_of: MakeConfig) -> None:
    def work(comm: Communicator) -> str:
        run = Run(config_of(), comm)
        step = run._step
        run._step = lambda number: replace(step(number), loss_share=torch.tensor(math.inf))  # type: ignore[method-assign]
        with pytest.raises(DivergenceError, match="the loss of step 0 is inf") as caught:
            run.train()
        return str(caught.value)

    assert len(set(run_loopback(2, work))) == 1


def test_a_held_out_loss_that_is_no_number_ends_the_run_before_it_is_saved(config_of: MakeConfig) -> None:
    config = config_of("train.steps=2")
    run = Run(config, Communicator.alone())
    train = run.train_steps

    def steps(*arguments: Any) -> Any:
        done = train(*arguments)
        with torch.no_grad():
            next(run.model.parameters()).fill_(math.nan)
        return done

    run.train_steps = steps  # type: ignore[method-assign]
    with pytest.raises(DivergenceError, match="the held-out loss after step 2 is nan"):
        run.train()
    assert not list((config.output.directory / "checkpoints").iterdir())


def test_steps_are_cut_after_every_multiple_of_each_period_and_where_asked() -> None:
    assert list(intervals(3, 10, (4, 0, 5))) == [(3, 4), (4, 5), (5, 8), (8, 10)]
    assert list(intervals(0, 5, (0,), also=(2,))) == [(0, 2), (2, 5)]
    assert list(intervals(7, 7, (2,))) == []
    assert list(intervals(9, 7, (2,))) == []


def test_nothing_is_due_with_a_period_of_0() -> None:
    assert [is_due(steps, 2) for steps in range(1, 5)] == [False, True, False, True]
    assert not any(is_due(steps, 0) for steps in range(5))


@pytest.mark.mpi
def test_a_run_over_mpi_is_the_run_of_one_process(world: Communicator, config_of: MakeConfig) -> None:
    config = world.broadcast_object(config_of())
    alone = trained(config_of(name="alone"))[0]
    outcome = Run(config, world).train()
    deviations = {line.deviation for line in outcome.traffic if line.communicator.startswith("dp")}
    found = world.allgather_object(abs(outcome.held_out_loss - alone.held_out_loss))
    assert max(found) < 1e-10
    assert deviations <= {0, None}


@pytest.mark.parametrize("size", [1, 3])
def test_each_step_tells_its_time_and_the_bytes_that_the_theory_says(
    config_of: MakeConfig, size: int
) -> None:
    config = config_of(f"train.global_batch={2 * size}")
    outcome = trained(config, size)[0]
    records = [each for each in records_of(config.output.directory / "metrics.jsonl") if "loss" in each]
    times = [datetime.fromisoformat(each["time"]) for each in records]
    assert times == sorted(times)
    # Of a ring each rank sends as much, but for parts that differ by one element.
    all_reduced = [each["nbytes_sent"].get("dp", 0) for each in records]
    of_all = sum(one.nbytes_sent for one in outcome.traffic if (one.communicator, one.collective) == RING)
    assert size * sum(all_reduced) == pytest.approx(of_all, rel=0.01)
    assert (of_all > 0) == (size > 1)


def test_utilisation_is_told_where_the_peak_of_the_machine_is_known(
    config_of: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = tmp_path / "machine.toml"
    monkeypatch.setenv("HPCPAR_MACHINE", str(machine))
    text = (MACHINES / "two-cores.toml").read_text()
    machine.write_text(re.sub(r"float32 = .*", "float32 = 0.5", text))
    for precision, is_known in (("float32", True), ("float16", False)):
        config = config_of(f"train.precision={precision}", name=precision)
        trained(config, 2)
        record = records_of(config.output.directory / "metrics.jsonl")[0]
        assert ("mfu" in record) == is_known
        if is_known:
            sizes = config.model_config_for(256)
            flops = sizes.flops_per_token(config.train.sequence) * record["tokens_per_s"]
            assert record["mfu"] == pytest.approx(flops / (2 * 0.5e12))
