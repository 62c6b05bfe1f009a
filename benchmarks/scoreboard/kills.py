"""Ranks are killed at random moments of training and saving: a run that goes on has every bit of another one.

    python benchmarks/scoreboard/kills.py
    python benchmarks/scoreboard/kills.py --tries 200 --seed 3 --json kills.jsonl

Each layout is trained once undisturbed, over `hpcpar run -n 2`, with a checkpoint after every step. In each
try one rank, drawn at random, gets SIGKILL at a random moment after the first step; the run then goes on by
--resume. A try is

    exact   all losses and gradient norms are those of the undisturbed run, and the killed job did not say 0
    wrong   they are not, or it did
    early   the run had ended before: drawn again

and tells whether a checkpoint was being written in that moment.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from hpcpar.durable import TEMPORARY_PREFIX
from hpcpar.training.metrics import records_of

HERE = Path(__file__).parents[2]
LAYOUTS = {
    "dp": (),
    "dp, saved behind training": ("output.save_async=true",),
    "ZeRO-1": ("optimizer.zero_stage=1",),
    "ZeRO-3": ("optimizer.zero_stage=3",),
    "ZeRO-3, saved behind training": ("optimizer.zero_stage=3", "output.save_async=true"),
    "tp": ("mesh.tp=2",),
    "pp": ("mesh.pp=2",),
    "cp": ("mesh.cp=2",),
    "ep": ("model.preset=tiny-moe", "mesh.ep=2"),
}
STEPS = 10
WORDS = (
    *("train.sequence=32", "train.global_batch=4", "train.microbatch=2", "train.evaluate_every=0"),
    *(f"train.steps={STEPS}", "output.log_every=1", "output.checkpoint_every=1"),
)
LIMIT_S = 300.0

Course = list[tuple[int, float, float]]
"""Step, loss and norm of the gradient."""


class Try(NamedTuple):
    """steps: that metrics.jsonl has when the rank is killed."""

    layout: str
    result: str
    steps: int = 0
    was_saving: bool = False
    why: str = ""


def command(directory: Path, layout: str, *more: str) -> list[str]:
    train = ("-m", "hpcpar", "train", "examples/tiny.toml", *WORDS, *LAYOUTS[layout])
    run = (sys.executable, "-m", "hpcpar", "run", "-n", "2", "--", *train)
    return [*run, f"output.directory={directory}", *more]


def course(directory: Path) -> Course:
    found = records_of(directory / "metrics.jsonl")
    return [(each["step"], each["loss"], each["gradient_norm"]) for each in found if "loss" in each]


def finish(directory: Path, layout: str, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(directory, layout, *more), cwd=HERE, capture_output=True, text=True, timeout=LIMIT_S
    )


def ranks_of(job: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that train, of which each is a rank."""
    found = []
    for process in psutil.Process(job.pid).children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if words[1:4] == ["-m", "hpcpar", "train"]:
            found.append(process)
    return found


def killed(directory: Path, layout: str, after_s: float, draw: random.Random) -> Try:
    """Start a run, and kill a rank so many seconds after its first step."""
    metrics = directory / "metrics.jsonl"
    with tempfile.TemporaryFile("w+") as said:
        job = subprocess.Popen(command(directory, layout), cwd=HERE, stdout=said, stderr=said, text=True)
        started_s = time.monotonic()
        while not (metrics.exists() and metrics.stat().st_size):
            if job.poll() is not None or time.monotonic() - started_s > LIMIT_S:
                job.kill()
                said.seek(0)
                return Try(layout, "wrong", why=f"no first step: {said.read()[-500:]}")
            time.sleep(0.005)
        time.sleep(after_s)
        ranks = ranks_of(job)
        if len(ranks) < 2:
            job.wait(LIMIT_S)
            return Try(layout, "early")
        victim = draw.choice(ranks)
        was_saving = any((directory / "checkpoints").glob(f"{TEMPORARY_PREFIX}*"))
        with suppress(psutil.NoSuchProcess):  # it has ended in this moment
            victim.send_signal(signal.SIGKILL)
        status = job.wait(LIMIT_S)
    steps = len(course(directory))
    if status == 0:
        return Try(layout, "early") if steps == STEPS else Try(layout, "wrong", steps, why="the job said 0")
    return Try(layout, "exact", steps, was_saving)


def tried(layout: str, expected: Course, length_s: float, draw: random.Random) -> Try:
    """Kill, go on, and compare."""
    while True:
        with tempfile.TemporaryDirectory() as place:
            directory = Path(place) / "run"
            found = killed(directory, layout, draw.uniform(0, length_s), draw)
            if found.result == "early":
                continue
            if found.result == "exact":
                again = finish(directory, layout, "--resume")
                if again.returncode:
                    return found._replace(result="wrong", why=again.stderr[-500:])
                if course(directory) != expected:
                    return found._replace(result="wrong", why="other losses or gradient norms")
            return found


def undisturbed(layout: str) -> tuple[Course, float]:
    """The course of a run, and twice the seconds of its steps: about what they take with the saving."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "run"
        done = finish(directory, layout)
        if done.returncode:
            raise SystemExit(f"{layout} undisturbed: {done.stderr[-2000:]}")
        steps_s = [each["step_s"] for each in records_of(directory / "metrics.jsonl") if "step_s" in each]
        return course(directory), max(0.2, 2 * sum(steps_s[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tries", type=int, default=24, help="of all layouts in turn (default: 24)")
    parser.add_argument("--layouts", default="", help="only those whose name has this in it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    known: dict[str, tuple[Course, float]] = {}
    tries: list[Try] = []
    names = [name for name in LAYOUTS if options.layouts in name]
    for number in range(options.tries):
        layout = names[number % len(names)]
        if layout not in known:
            known[layout] = undisturbed(layout)
        tries.append(tried(layout, *known[layout], draw))
        last = tries[-1]
        print(
            f"{number + 1:>4}  {layout:<30} {last.result:<6} after {last.steps:>2} steps"
            f"{', while saving' if last.was_saving else ''}  {last.why}".rstrip(),
            flush=True,
        )
        if options.json is not None:
            options.json.write_text("".join(json.dumps(each._asdict()) + "\n" for each in tries))
    exact = sum(each.result == "exact" for each in tries)
    saving = sum(each.was_saving for each in tries)
    print(f"{exact} of {len(tries)} exact to the bit (target: all), {saving} killed while saving")
    raise SystemExit(exact < len(tries))


if __name__ == "__main__":
    main()
