"""A run that is asked to stop, and goes on later, has the course of one that never was."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from hpcpar.comm import Communicator, run_loopback
from hpcpar.comm.preemption import Preemption
from hpcpar.training import Config, Outcome, Preempted, Run
from hpcpar.training.metrics import records_of
from tests.training.runs import MakeConfig

# Cut by log_every = 3 and evaluate_every = 4 into steps 0-3, 3-4, 4-6, 6-8.
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "replicas": (3, ()),
    "zero-1": (2, ("optimizer.zero_stage=1",)),
    "zero-2, float16": (3, ("optimizer.zero_stage=2", "train.precision=float16")),
    "zero-3": (3, ("optimizer.zero_stage=3",)),
    "pipeline": (2, ("mesh.pp=2", "model.layers=2", "train.global_batch=4")),
    "pipeline of replicas, zero-1": (
        4,
        ("mesh.pp=2", "model.layers=2", "train.global_batch=4", "optimizer.zero_stage=1"),
    ),
    "tensor parallel": (2, ("mesh.tp=2", "model.kv_heads=2")),
}


def course(config: Config) -> list[dict[str, Any]]:
    """All that a run has written down, but for when, how fast, and the means of what was sent meanwhile."""
    records = records_of(config.output.directory / "metrics.jsonl")
    others = ("time", "tokens_per_s", "step_s", "nbytes_sent")
    return [{k: v for k, v in record.items() if k not in others} for record in records]


def run(
    config: Config,
    size: int,
    *,
    stop: int | None = None,
    resume: bool = False,
    console: Console | None = None,
) -> list[Outcome | Preempted]:
    """On all ranks; the last of them is asked to stop such that so many steps are done then."""

    def work(comm: Communicator) -> Outcome | Preempted:
        with Preemption(comm, ()) as preemption:
            run = Run(
                config,
                comm,
                resume=resume,
                console=console if comm.rank == 0 else None,
                preemption=preemption,
            )
            if stop is not None and comm.rank == size - 1:
                real_step = run._step

                def step(number: int) -> Any:
                    if number == stop - 2:
                        preemption.request()
                    return real_step(number)

                run._step = step  # type: ignore[method-assign]
            return run.train()

    return run_loopback(size, work)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stopped_anywhere_and_resumed_a_run_has_the_course_of_an_uninterrupted_one(
    config_of: MakeConfig, layout: str
) -> None:
    size, options = LAYOUTS[layout]
    whole = config_of(*options, name="whole")
    uninterrupted = run(whole, size)
    # In the middle of a stretch; where one ends; where an evaluation is due; with one step left.
    for stop in (2, 3, 4, 7) if layout == "replicas" else (4, 7):
        parts = config_of(*options, name=f"stopped-after-{stop}")
        stopped = run(parts, size, stop=stop)
        checkpoint = parts.output.directory / "checkpoints" / f"step-{stop:08d}"
        assert stopped == [Preempted(stop, checkpoint)] * size
        assert (checkpoint / "manifest.json").exists()
        assert [record["step"] for record in course(parts) if "loss" in record] == list(range(stop))
        resumed = run(parts, size, resume=True)
        assert course(parts) == course(whole)
        for one, other in zip(resumed, uninterrupted, strict=True):
            assert isinstance(one, Outcome)
            assert isinstance(other, Outcome)
            assert (one.first_step, one.steps, one.loss, one.held_out_loss) == (
                stop,
                8,
                other.loss,
                other.held_out_loss,
            )
            deviations = {(line.communicator, line.collective): line.deviation for line in one.traffic}
            assert set(deviations.values()) <= {0, None}, deviations


def test_stopped_at_every_step_of_all_a_run_has_the_same_course_still(config_of: MakeConfig) -> None:
    whole, parts = config_of(name="whole"), config_of(name="parts")
    run(whole, 3)
    for stop in range(2, 8, 2):
        assert isinstance(run(parts, 3, stop=stop, resume=stop > 2)[0], Preempted)
    assert isinstance(run(parts, 3, resume=True)[0], Outcome)
    assert course(parts) == course(whole)


def test_a_request_in_the_last_steps_comes_too_late(config_of: MakeConfig) -> None:
    config = config_of()
    assert all(isinstance(each, Outcome) for each in run(config, 2, stop=9))
    assert json.loads((config.output.directory / "summary.json").read_text())["steps"] == 8


def test_a_step_that_is_saved_already_is_saved_once(config_of: MakeConfig) -> None:
    config = config_of("output.checkpoint_every=2")
    assert isinstance(run(config, 2, stop=4)[0], Preempted)
    names = sorted(path.name for path in (config.output.directory / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_questions_bytes_are_exactly_the_theory(config_of: MakeConfig, size: int) -> None:
    outcome = run(config_of(), size)[0]
    assert isinstance(outcome, Outcome)
    lines = [line for line in outcome.traffic if line.communicator == "preemption"]
    assert [(line.collective, line.calls, line.deviation) for line in lines] == (
        [] if size == 1 else [("allreduce", 7, 0)]
    )


def test_people_are_told_the_step_and_the_checkpoint(config_of: MakeConfig) -> None:
    console = Console(file=io.StringIO(), width=500)
    config = config_of()
    run(config, 2, stop=3, console=console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    saved = config.output.directory / "checkpoints" / "step-00000003"
    assert f"asked to stop: 3 of 8 steps are done and saved in {saved}; --resume goes on from there" in said
