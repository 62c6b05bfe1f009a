from __future__ import annotations

import importlib.util
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hpcpar.errors import ConfigError, PeerFailedError
from hpcpar.training.config import parse
from hpcpar.training.metrics import records_of
from hpcpar.training.sinks import MODULES, values_of
from tests.training.runs import MakeConfig, refused, trained

Calls = list[tuple[str, dict[str, Any]]]


class Writer:
    """The calls of torch's SummaryWriter that are used, by their published signatures."""

    def __init__(self, calls: Calls, log_dir: str | None = None, purge_step: int | None = None) -> None:
        self._calls = calls
        calls.append(("SummaryWriter", {"log_dir": log_dir, "purge_step": purge_step}))

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        self._calls.append(("add_text", {"tag": tag, "text": text_string, "step": global_step}))

    def add_scalar(
        self,
        tag: str,
        scalar_value: float,
        global_step: int | None = None,
        walltime: float | None = None,
        new_style: bool = False,
        double_precision: bool = False,
    ) -> None:
        told = {"tag": tag, "value": scalar_value, "step": global_step, "walltime": walltime}
        self._calls.append(("add_scalar", told))

    def close(self) -> None:
        self._calls.append(("close", {}))


class WandBRun:
    """The calls of wandb.Run that are used."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self._calls.append(("log", {"data": data, "step": step}))

    def finish(self, exit_code: int | None = None) -> None:
        self._calls.append(("finish", {"exit_code": exit_code}))


def stand_in(name: str, calls: Calls, fails_after: float) -> ModuleType:
    """Return a module that records calls; logging fails after so many of them."""

    def record(what: str, **words: Any) -> None:
        calls.append((what, words))
        if what == "log_metrics" and sum(each == what for each, _ in calls) > fails_after:
            raise ConnectionError("no server")

    def init(project: str, name: str, group: str, dir: str, config: dict[str, Any], mode: str) -> WandBRun:
        record("init", project=project, name=name, group=group, dir=dir, config=config, mode=mode)
        return WandBRun(calls)

    module: Any = ModuleType(MODULES[name])
    module.SummaryWriter = lambda log_dir, purge_step: Writer(calls, log_dir, purge_step)
    module.init = init
    module.start_run = lambda run_name: record("start_run", run_name=run_name)
    module.log_params = lambda params: record("log_params", params=params)
    module.log_metrics = lambda metrics, step: record("log_metrics", metrics=metrics, step=step)
    module.end_run = lambda status="FINISHED": record("end_run", status=status)
    return module  # type: ignore[no-any-return]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Calls]:
    """Put a stand-in in the place of a sink's package; return the list of its calls."""

    def install(name: str, fails_after: float = math.inf) -> Calls:
        calls: Calls = []
        monkeypatch.setitem(sys.modules, MODULES[name], stand_in(name, calls, fails_after))
        return calls

    return install


def of(calls: Calls, name: str) -> list[dict[str, Any]]:
    return [words for each, words in calls if each == name]


def test_tensorboard_gets_every_number_at_its_step_and_time_from_rank_0_alone(
    config_of: MakeConfig, recorded: Callable[..., Calls]
) -> None:
    calls = recorded("tensorboard")
    config = config_of("output.sinks=tensorboard", "train.steps=4")
    trained(config, 2)
    assert calls[0] == (
        "SummaryWriter",
        {"log_dir": str(config.output.directory / "tensorboard"), "purge_step": 1},
    )
    assert "    train.steps = 4" in of(calls, "add_text")[0]["text"]
    scalars = of(calls, "add_scalar")
    records = records_of(config.output.directory / "metrics.jsonl")
    losses = {each["step"]: each["value"] for each in scalars if each["tag"] == "loss"}
    assert losses == {each["step"] + 1: each["loss"] for each in records if "loss" in each}
    assert [each["step"] for each in scalars if each["tag"] == "held_out_loss"] == [4]
    assert "nbytes_sent/dp" in {each["tag"] for each in scalars}
    steps, times = ([each[key] for each in scalars] for key in ("step", "walltime"))
    assert (steps, times) == (sorted(steps), sorted(times))
    assert len(of(calls, "SummaryWriter")) == len(of(calls, "close")) == 1


def test_wandb_gets_an_offline_run_with_the_whole_configuration(
    config_of: MakeConfig, recorded: Callable[..., Calls]
) -> None:
    calls = recorded("wandb")
    config = config_of("output.sinks=wandb", "train.steps=2")
    trained(config)
    assert calls[0][0] == "init"
    told = calls[0][1]
    assert (told["mode"], told["dir"], told["name"]) == ("offline", str(config.output.directory), "run")
    assert (told["config"]["train.steps"], told["config"]["mesh.dp"]) == (2, 1)
    assert [each["step"] for each in of(calls, "log")] == [1, 2, 2]
    assert set(of(calls, "log")[2]["data"]) == {"held_out_loss"}
    assert calls[-1] == ("finish", {"exit_code": 0})


def test_mlflow_gets_parameters_in_batches_and_metrics_by_step(
    config_of: MakeConfig, recorded: Callable[..., Calls]
) -> None:
    calls = recorded("mlflow")
    trained(config_of("output.sinks=mlflow", "train.steps=2"))
    assert calls[0] == ("start_run", {"run_name": "run"})
    batches = [each["params"] for each in of(calls, "log_params")]
    assert all(0 < len(batch) <= 100 for batch in batches)
    parameters = {key: value for batch in batches for key, value in batch.items()}
    assert parameters["train.steps"] == "2"
    assert len(parameters) == sum(map(len, batches)) > 90
    assert [each["step"] for each in of(calls, "log_metrics")] == [1, 2, 2]
    assert calls[-1] == ("end_run", {"status": "FINISHED"})


def test_a_sink_that_fails_is_warned_of_once_and_the_run_and_the_others_go_on(
    config_of: MakeConfig, recorded: Callable[..., Calls], caplog: pytest.LogCaptureFixture
) -> None:
    broken, sound = recorded("mlflow", fails_after=1), recorded("wandb")
    with caplog.at_level(logging.WARNING):
        outcome = trained(config_of('output.sinks=["mlflow", "wandb"]', "train.steps=4"))[0]
    assert outcome.steps == 4
    assert [each.getMessage() for each in caplog.records if "mlflow" in each.getMessage()] == [
        "mlflow fails and gets nothing more: ConnectionError: no server"
    ]
    assert len(of(broken, "log_metrics")) == 2
    assert [each["step"] for each in of(sound, "log")] == [1, 2, 3, 4, 4]


def test_a_run_that_fails_is_told_to_be_so(
    config_of: MakeConfig, recorded: Callable[..., Calls], monkeypatch: pytest.MonkeyPatch
) -> None:
    flow, biases = recorded("mlflow"), recorded("wandb")
    config = config_of(
        *('output.sinks=["mlflow", "wandb"]', "optimizer.name=sgd", "optimizer.learning_rate=1e30"),
        *("optimizer.skip_limit=2",),
    )
    with pytest.raises(Exception, match="in a row"):
        trained(config)
    assert flow[-1] == ("end_run", {"status": "FAILED"})
    assert biases[-1] == ("finish", {"exit_code": 1})


def test_a_package_that_is_missing_is_named_on_every_rank(
    config_of: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = config_of("output.sinks=wandb")
    assert "pip install wandb" in refused(config, 1, ConfigError)
    assert "pip install wandb" in refused(config, 2, PeerFailedError)


def test_a_sink_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="'tensorboard', 'wandb' or 'mlflow'"):
        parse("", source="run.toml", overrides=["output.sinks=tensorbord"])


def test_numbers_of_a_line_are_named_and_others_are_left_out() -> None:
    record = {
        "step": 3,
        "time": "2026-01-01T00:00:00+00:00",
        "loss": 1.5,
        "gradient_norm": math.nan,
        "nbytes_sent": {"dp": 8.0},
        "experts": {"layer": [1, 3], "entropy": [0.5, 0.75], "dropped": [None, 0]},
    }
    assert values_of(record) == {
        "loss": 1.5,
        "nbytes_sent/dp": 8.0,
        "experts/entropy/1": 0.5,
        "experts/entropy/3": 0.75,
        "experts/dropped/3": 0.0,
    }


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_itself_reads_what_is_written(config_of: MakeConfig) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_of("output.sinks=tensorboard", "train.steps=4", "train.until=2")
    trained(config)
    trained(config_of("output.sinks=tensorboard", "train.steps=4"), resume=True)
    read = EventAccumulator(str(Path(config.output.directory) / "tensorboard"))
    read.Reload()
    records = records_of(config.output.directory / "metrics.jsonl")
    expected = [(each["step"] + 1, each["loss"]) for each in records if "loss" in each]
    found = [(each.step, each.value) for each in read.Scalars("loss")]
    assert [step for step, _ in found] == [1, 2, 3, 4]
    assert [value for _, value in found] == pytest.approx([loss for _, loss in expected], rel=1e-6)
