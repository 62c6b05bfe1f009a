"""Runs on ranks that are threads, and what they leave: for the tests beside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpcpar.comm import Communicator, run_loopback
from hpcpar.training import Config, Outcome, Run
from hpcpar.training.metrics import records_of

MakeConfig = Callable[..., Config]
OfOneProcess = Callable[..., tuple[Config, Outcome]]

SEQUENCE = "tensor_parallel.sequence_parallel=true"


def trained(config: Config, size: int = 1, *, resume: bool = False) -> list[Outcome]:
    return run_loopback(size, lambda comm: Run(config, comm, resume=resume).train())


def losses(config: Config) -> list[float]:
    return course(config)[::2]


def course(config: Config) -> list[float]:
    """Losses and gradient norms of all steps."""
    records = records_of(config.output.directory / "metrics.jsonl")
    return [record[key] for record in records if "loss" in record for key in ("loss", "gradient_norm")]


def deviations(outcome: Outcome) -> dict[tuple[str, str], Any]:
    """Bytes beyond the theory, by communicator and collective; exchanges of objects left out."""
    return {
        (line.communicator, line.collective): line.deviation
        for line in outcome.traffic
        if line.communicator.split("-")[0] in ("pp", "dp", "cp", "tp", "losses")
        and line.collective in ("send", "allreduce", "allgather", "reduce_scatter", "broadcast", "alltoall")
    }


def require_same_on_all(outcomes: list[Outcome]) -> None:
    assert len({(each.loss, each.held_out_loss, each.traffic) for each in outcomes}) == 1


def half_of(config: Config, size: int, steps: int = 2) -> None:
    """Train some of the steps, save, and be gone."""

    def interrupted(comm: Communicator) -> None:
        run = Run(config, comm)
        run.train_steps(0, steps, None)
        run.save(steps)

    run_loopback(size, interrupted)


def require_resumed_bit_for_bit(whole: Config, parts: Config, size: int, steps: int = 2) -> None:
    uninterrupted = trained(whole, size)[0]
    half_of(parts, size, steps)
    resumed = trained(parts, size, resume=True)[0]
    assert (resumed.first_step, resumed.steps) == (steps, uninterrupted.steps)
    assert (resumed.loss, resumed.held_out_loss) == (uninterrupted.loss, uninterrupted.held_out_loss)
    assert course(parts) == course(whole)[2 * steps :]


def require_resumed(config: Config, size: int, whole: Config, expected: Outcome, steps: int = 2) -> Outcome:
    """Go on with a run that was interrupted on another layout; float64, so only sums' order differs."""
    resumed = trained(config, size, resume=True)[0]
    assert resumed.first_step == steps
    assert resumed.held_out_loss == pytest.approx(expected.held_out_loss, abs=1e-10)
    assert course(config) == pytest.approx(course(whole)[2 * steps :], abs=1e-10)
    return resumed


def refused(config: Config, size: int, kind: type[Exception], *, resume: bool = False) -> str:
    """Return what all ranks say."""

    def work(comm: Communicator) -> str:
        with pytest.raises(kind) as caught:
            Run(config, comm, resume=resume)
        return str(caught.value)

    (message,) = set(run_loopback(size, work))
    return message
