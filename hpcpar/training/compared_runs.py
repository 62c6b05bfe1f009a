"""Runs side by side: what differs in configuration, software and place, and what came of it.

    found = compare([read_run(Path("runs/a")), read_run(Path("runs/b"))])
    found["differs"]    {"optimizer.zero_stage": [0, 2], …}
    found["results"]    {"held-out loss": [1.52, 1.51], …}, None where a run does not say

All of it is read from run.json, metrics.jsonl and summary.json of the output directories.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcpar.errors import ConfigError
from hpcpar.training.metrics import records_of
from hpcpar.training.resolved_config import flat
from hpcpar.training.run_record import NAME, attempts_of

OF_EVERY_RUN_ITS_OWN = ("config.output.directory",)
"""Keys whose difference tells nothing."""


@dataclass(frozen=True)
class ReadRun:
    """The files of one run.

    attempt   the last one of run.json; {} where an earlier version ran, which wrote none
    steps     lines of metrics.jsonl of a step each, in order; held_out: those of held-out losses
    summary   {} where the run has not come to its end
    """

    directory: Path
    attempt: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    held_out: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]

    def seconds(self) -> list[float]:
        """Return the training time at the end of each step, without evaluation, saving and pauses."""
        total_s, ends_s = 0.0, []
        for step in self.steps:
            total_s += step["step_s"]
            ends_s.append(total_s)
        return ends_s


def read_run(directory: Path) -> ReadRun:
    """Read an output directory of `hpcpar train`; ConfigError where there are no metrics in it."""
    metrics, summary = directory / "metrics.jsonl", directory / "summary.json"
    if not metrics.exists():
        raise ConfigError(
            f"{directory} is no output directory of a run: it has no metrics.jsonl; name the "
            "output.directory of hpcpar train"
        )
    records = records_of(metrics)
    try:
        summarized = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {}
    except ValueError as error:
        raise ConfigError(
            f"{summary} is no JSON: {error}; compare runs that were not changed by hand"
        ) from error
    return ReadRun(
        directory,
        next(reversed(attempts_of(directory / NAME)), {}),
        [each for each in records if "loss" in each],
        [each for each in records if each.get("held_out_loss") is not None],
        summarized,
    )


def compare(runs: Sequence[ReadRun]) -> dict[str, Any]:
    """Return directories, facts that differ and results of runs; lists have an element for each run."""
    facts = [_facts(run) for run in runs]
    keys = dict.fromkeys(key for of_run in facts for key in of_run)
    differs = {key: [of_run.get(key) for of_run in facts] for key in keys if key not in OF_EVERY_RUN_ITS_OWN}
    results = [_results(run) for run in runs]
    names = dict.fromkeys(name for of_run in results for name in of_run)
    return {
        "runs": [str(run.directory) for run in runs],
        "differs": {
            key.removeprefix("config."): values
            for key, values in differs.items()
            if any(value != values[0] for value in values)
        },
        "results": {name: [of_run.get(name) for of_run in results] for name in names},
    }


def _facts(run: ReadRun) -> dict[str, Any]:
    attempt = run.attempt
    if not attempt:
        return {}
    told = {key: attempt[key] for key in ("launcher", "parameters", "versions", "config")}
    hosts, git = attempt["hosts"], attempt["git"] or {"commit": None, "clean": None}
    ranks = sum(each["ranks"] for each in hosts)
    return flat({"ranks": ranks, "hosts": sorted(each["host"] for each in hosts), "git": git, **told})


def _results(run: ReadRun) -> dict[str, Any]:
    """Return the figures of a run by name; medians are over all steps in metrics.jsonl."""
    best = min(run.held_out, key=lambda each: each["held_out_loss"], default={})
    step_s = [each["step_s"] for each in run.steps]
    quartiles = statistics.quantiles(step_s, n=4, method="inclusive") if len(step_s) > 1 else step_s * 3
    sent = dict.fromkeys(name for each in run.steps for name in each.get("nbytes_sent", {}))
    worst = run.summary.get("memory", {}).get("worst", {})
    return {
        "status": run.attempt.get("status"),
        "error": run.attempt.get("error"),
        "steps": run.steps[-1]["step"] + 1 if run.steps else 0,
        "tokens": _last(run.steps, "tokens"),
        "loss": _last(run.steps, "loss"),
        "lowest loss": min(_told(run.steps, "loss"), default=None),
        "held-out loss": _last(run.held_out, "held_out_loss"),
        "lowest held-out loss": best.get("held_out_loss"),
        "after step": best.get("step"),
        "step_s": _of(statistics.median, step_s),
        "step_s, quartiles": [quartiles[0], quartiles[2]] if step_s else None,
        "tokens_per_s": _of(statistics.median, _told(run.steps, "tokens_per_s")),
        "mfu": _of(statistics.median, _told(run.steps, "mfu")),
        "peak_nbytes": worst.get("peak_nbytes"),
        **{
            f"nbytes_sent, {name}": statistics.median(each["nbytes_sent"].get(name, 0) for each in run.steps)
            for name in sent
        },
    }


def _told(records: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    return [each[key] for each in records if each.get(key) is not None]


def _last(records: Sequence[Mapping[str, Any]], key: str) -> Any:
    return next(reversed(_told(records, key)), None)


def _of(what: Callable[[Sequence[float]], float], values: Sequence[float]) -> float | None:
    return what(values) if values else None
