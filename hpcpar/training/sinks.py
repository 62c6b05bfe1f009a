"""Trackers that receive the lines of metrics.jsonl as well: TensorBoard, Weights & Biases, MLflow.

    [output]
    sinks = ["tensorboard", "wandb", "mlflow"]

    tensorboard   event files in <directory>/tensorboard
    wandb         an offline run in <directory>/wandb; `wandb sync` uploads it
    mlflow        a run at MLFLOW_TRACKING_URI, or where MLflow keeps runs by itself

Rank 0 alone writes, a run of the tracker for each attempt; its steps are steps done. A sink that fails is
warned of once and left out from there on: training goes on, and metrics.jsonl has everything.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from hpcpar.comm import Communicator
from hpcpar.errors import ConfigError

logger = logging.getLogger(__name__)

MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""What is imported for a sink; the name of the sink is that of the package to install."""

MLFLOW_BATCH = 100
"""Most parameters that MLflow's server takes at a time."""

MLFLOW_LENGTH = 500
"""Longest value of a parameter that servers of all versions take."""


class Sink(Protocol):
    """One tracker's run. Each call may raise whatever the tracker's package raises."""

    def log(self, steps_done: int, time_s: float, values: Mapping[str, float]) -> None:
        """Take the values of a step; steps_done never falls. `time_s` is of the epoch."""

    def close(self, *, failed: bool) -> None:
        """End the tracker's run."""


class TensorBoard:
    def __init__(self, directory: Path, first_step: int, config: Mapping[str, Any]) -> None:
        module = importlib.import_module(MODULES["tensorboard"])
        # Of an earlier attempt, steps behind the checkpoint are trained again.
        self._writer = module.SummaryWriter(log_dir=str(directory / "tensorboard"), purge_step=first_step + 1)
        lines = [f"    {key} = {value}" for key, value in config.items()]
        self._writer.add_text("config", "\n".join(lines), global_step=first_step)

    def log(self, steps_done: int, time_s: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=steps_done, walltime=time_s)

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class WandB:
    def __init__(self, directory: Path, first_step: int, config: Mapping[str, Any]) -> None:
        self._run = importlib.import_module(MODULES["wandb"]).init(
            project="hpcpar",
            name=directory.name,
            group=directory.name,
            dir=str(directory),
            config=dict(config),
            mode="offline",
        )

    def log(self, steps_done: int, time_s: float, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=steps_done)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow:
    def __init__(self, directory: Path, first_step: int, config: Mapping[str, Any]) -> None:
        self._mlflow = importlib.import_module(MODULES["mlflow"])
        self._mlflow.start_run(run_name=directory.name)
        parameters = ((key, str(value)[:MLFLOW_LENGTH]) for key, value in config.items())
        while batch := dict(islice(parameters, MLFLOW_BATCH)):
            self._mlflow.log_params(batch)

    def log(self, steps_done: int, time_s: float, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=steps_done)

    def close(self, *, failed: bool) -> None:
        self._mlflow.end_run(status="FAILED" if failed else "FINISHED")


KINDS: dict[str, Callable[[Path, int, Mapping[str, Any]], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}


def require_sinks(names: Iterable[str], comm: Communicator) -> None:
    """Import what the sinks need, on rank 0. Collective where there are sinks.

    errors   ConfigError with the package to install; PeerFailedError on the other ranks
    """
    if not names:
        return
    with comm.together("loading output.sinks"):
        for name in names if comm.rank == 0 else ():
            try:
                importlib.import_module(MODULES[name])
            except ImportError as error:
                raise ConfigError(
                    f"output.sinks has {name!r}, which cannot be imported ({error}): pip install {name}, or "
                    "leave it out; metrics.jsonl is written in any case"
                ) from error


class Sinks:
    """All sinks of a run, on rank 0; those that fail are left out."""

    def __init__(
        self, names: Iterable[str], directory: Path, first_step: int, config: Mapping[str, Any]
    ) -> None:
        self._open: dict[str, Sink] = {}
        for name in names:
            self._guarded(name, partial(self._begin, name, directory, first_step, config))

    def log(self, record: Mapping[str, Any]) -> None:
        """Pass on a line of metrics.jsonl."""
        values = values_of(record)
        steps_done = record["step"] if "held_out_loss" in record else record["step"] + 1
        time_s = datetime.fromisoformat(record["time"]).timestamp()
        for name, sink in list(self._open.items()):
            self._guarded(name, partial(sink.log, steps_done, time_s, values))

    def close(self, *, failed: bool) -> None:
        for name, sink in list(self._open.items()):
            self._guarded(name, partial(sink.close, failed=failed))

    def _begin(self, name: str, directory: Path, first_step: int, config: Mapping[str, Any]) -> None:
        self._open[name] = KINDS[name](directory, first_step, config)

    def _guarded(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._open.pop(name, None)
            logger.warning("%s fails and gets nothing more: %s: %s", name, type(error).__name__, error)


def values_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a line of metrics.jsonl by name; those of a table as table/name.

    Numbers of experts are by layer: experts/entropy/3.
    """
    found: dict[str, float] = {}
    for name, value in record.items():
        if name == "experts":
            for figure in value.keys() - {"layer"}:
                found |= {
                    f"experts/{figure}/{layer}": of
                    for layer, of in zip(value["layer"], value[figure], strict=True)
                }
        elif isinstance(value, Mapping):
            found |= {f"{name}/{key}": of for key, of in value.items()}
        elif name != "step" and isinstance(value, (int, float)):
            found[name] = value
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}
