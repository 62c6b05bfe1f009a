"""Metrics of a run on rank 0: lines of JSON, a progress display and the picture of the losses."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from hpcpar.durable import write_whole
from hpcpar.models.balancing import LayerBalance
from hpcpar.training.run_record import now
from hpcpar.training.sinks import Sinks
from hpcpar.units import format_duration

LINE_INTERVAL_S = 5.0
"""Shortest time between lines of progress, where there is no live bar."""


class Metrics:
    """Lines of JSON, one for every step and every held-out loss, and the display of progress.

    step           its index; with a held-out loss, steps done before it
    time           at its end, UTC by ISO 8601
    loss, held_out_loss, gradient_norm, learning_rate
    tokens         learnt from so far
    step_s, tokens_per_s   mean of the steps since the last line of progress, as are the next two
    mfu            model FLOPs utilisation, by the description of this machine; absent where there is none
    nbytes_sent    by rank 0 in a step, by communicator (dp, tp, …; losses: the sum of the losses over ranks)
    skipped        why the optimizer left the step out
    experts        see `balance_record`

    Numbers that are not finite, such as the gradient norm of a step that float16 skipped, are null.

    directory     of metrics.jsonl; lines of an earlier run from `first_step` on are dropped
    steps         of the whole run; where none is left, the last held-out loss is dropped and taken again
    console       None = no display
    sinks         get the same lines, and are closed with the file
    """

    def __init__(
        self,
        directory: Path,
        *,
        first_step: int,
        steps: int,
        console: Console | None,
        sinks: Sinks | None = None,
    ) -> None:
        self.path = directory / "metrics.jsonl"
        keep_lines_before(self.path, first_step, is_evaluated_again=first_step >= steps)
        self._file: TextIO = self.path.open("a", encoding="utf-8")
        self._display = Display(console, first_step=first_step, steps=steps) if console else None
        self._sinks = sinks

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._display is not None:
            self._display.stop()
        if self._sinks is not None:
            self._sinks.close(failed=error is not None)
        # Closing writes the rest once more; its error has been reported.
        with suppress(OSError) if isinstance(error, OSError) else nullcontext():
            self._file.close()

    def steps(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write a line for each step since the last call, oldest first; advance the display."""
        self._write(records)
        if self._display is not None and records:
            last = records[-1]
            self._display.show(last["step"] + 1, last["loss"], last["tokens_per_s"])

    def held_out(self, step: int, loss: float) -> None:
        """Write the held-out loss after `step` steps."""
        self._write([{"step": step, "time": now(), "held_out_loss": loss}])
        if self._display is not None:
            self._display.say(f"step {step}: held-out loss {loss:.3f} nats")

    def _write(self, records: Sequence[Mapping[str, Any]]) -> None:
        try:
            self._file.writelines(map(_line, records))
            self._file.flush()
        except OSError as error:  # whose message lacks the file
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if self._sinks is not None:
            for record in records:
                self._sinks.log(record)


def balance_record(of_stages: Iterable[Mapping[int, LayerBalance]]) -> dict[str, Any]:
    """Return the entry "experts" of a step's line.

    layer           numbers of the layers with experts; what follows has an element for each of them
    max_over_mean   load of the fullest expert over the mean load, of all of the step's tokens
    entropy         of the loads, over ln E; 1 is perfect balance
    idle, dropped   experts without a token, and the share of choices beyond the capacity
    balance_loss, z_loss   with their coefficients
    """
    by_layer = dict(sorted((number, each) for layers in of_stages for number, each in layers.items()))
    found = by_layer.values()
    return {
        "experts": {
            "layer": list(by_layer),
            "max_over_mean": [each.loads.max_over_mean for each in found],
            "entropy": [each.loads.entropy for each in found],
            "idle": [each.loads.idle for each in found],
            "dropped": [each.loads.dropped for each in found],
            "balance_loss": [each.balance_loss for each in found],
            "z_loss": [each.z_loss for each in found],
        }
    }


class Display:
    """A live bar on a terminal, a line every few seconds elsewhere (a batch job's output file)."""

    def __init__(self, console: Console, *, first_step: int, steps: int) -> None:
        self._console = console
        self._first_step, self._steps = first_step, steps
        self._start_s = self._last_line_s = time.perf_counter()
        self._bar: Progress | None = None
        if console.is_interactive:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
                console=console,
            )
            self._task = self._bar.add_task("train", total=steps, completed=first_step, text="")
            self._bar.start()

    def show(self, done: int, loss: float, tokens_per_s: float) -> None:
        """Show that `done` steps are done, with the latest loss and speed."""
        now_s = time.perf_counter()
        per_step_s = (now_s - self._start_s) / max(1, done - self._first_step)
        text = f"loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s"
        if done < self._steps:
            text += f"  {format_duration(per_step_s * (self._steps - done))} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, text=text)
        elif now_s - self._last_line_s >= LINE_INTERVAL_S or done == self._steps:
            self._last_line_s = now_s
            self.say(f"step {done}/{self._steps}  {text}")

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def keep_lines_before(path: Path, first_step: int, *, is_evaluated_again: bool = False) -> None:
    """Drop lines of steps that will be trained again, and a half-written last line.

    is_evaluated_again   the held-out loss after `first_step` steps is taken again
    """
    if not path.exists():
        return
    # A training record holds the index of its step, a held-out one the number of steps done.
    kept = [
        record
        for record in records_of(path)
        if record["step"] < first_step + ("held_out_loss" in record and not is_evaluated_again)
    ]
    write_whole(path, "".join(map(_line, kept)))


def _line(record: Mapping[str, Any]) -> str:
    """Encode a record; NaN and infinity become null, as JSON has neither."""
    return json.dumps(_finite(record), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def records_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file as dictionaries; skip lines that are no JSON (a torn last one)."""
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def draw_losses(records: Sequence[Mapping[str, Any]], path: Path, *, vocabulary: int) -> None:
    """Draw the losses of a run as PNG: each step's, their running mean, and the held-out ones."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    trained = [(record["step"] + 1, loss) for record in records if (loss := record.get("loss")) is not None]
    held_out = [
        (record["step"], loss) for record in records if (loss := record.get("held_out_loss")) is not None
    ]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if trained:
        steps, losses = zip(*trained, strict=True)
        axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=1)
        axes.plot(steps, running_mean(losses, 0.9), color="tab:blue", label="training")
    if held_out:
        steps, losses = zip(*held_out, strict=True)
        axes.plot(steps, losses, "o-", color="tab:orange", label="held out")
        axes.annotate(
            f"{losses[-1]:.3f}",
            (steps[-1], losses[-1]),
            textcoords="offset points",
            xytext=(4, 8),
            ha="right",
        )
    axes.axhline(
        math.log(vocabulary), color="grey", linestyle=":", label=f"ln({vocabulary}), knowing nothing"
    )
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def running_mean(values: Sequence[float], decay: float) -> list[float]:
    """Return the exponential running mean with bias correction (Kingma and Ba 2015, section 3)."""
    means: list[float] = []
    total = weight = 0.0
    for value in values:
        total = decay * total + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        means.append(total / weight)
    return means
