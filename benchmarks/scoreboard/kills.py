"""Signals at random moments of training and saving: a run that goes on has every bit of another one.

    python benchmarks/scoreboard/kills.py
    python benchmarks/scoreboard/kills.py --tries 200 --seed 3 --json kills.jsonl
    python benchmarks/scoreboard/kills.py --asked --tries 100 --json preemptions.jsonl

Each layout is trained once undisturbed, over `hpcpar run -n 2`; then again, and one rank, drawn at random,
gets SIGKILL at a random moment, while a checkpoint is saved after every step. The run goes on by --resume,
and is killed again, until all steps are done. With --asked the job is asked to stop instead, in eight ways
in turn, and saves then alone. (SIGTERM to mpiexec is none of them: Open MPI's kills the ranks within 0.3 s.)
Each signal is a try:

    exact   at the end all losses and gradient norms are those of the undisturbed run. The job that was asked
            had status 75, and its checkpoint is of the step after which it stopped
    wrong   it was not so

and tells whether a checkpoint was being written in that moment.
"""

from __future__ import annotations

import argparse
import functools
import itertools
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
from hpcpar.launch.signals import START_AGAIN
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
WORDS = (
    *("train.sequence=32", "train.global_batch=4", "train.microbatch=2", "train.evaluate_every=0"),
    "output.log_every=1",
)
LIMIT_S = 300.0
ASKED = (
    *("SIGUSR1 to a rank", "SIGTERM to a rank", "SIGUSR1 to all ranks", "SIGTERM to all ranks"),
    *("SIGUSR1 to mpiexec", "SIGUSR1 to hpcpar run", "SIGTERM to hpcpar run", "SIGHUP to hpcpar run"),
)


class Row(NamedTuple):
    """A row of the scoreboard: its ways, how long its runs are, and within which time they are disturbed."""

    ways: tuple[str, ...]
    steps: int
    words: tuple[str, ...]
    within_s: float


KILLS = Row(("SIGKILL to a rank",), 20, ("output.checkpoint_every=1",), 1.5)
PREEMPTIONS = Row(ASKED, 20, (), 0.5)

Course = list[tuple[int, float, float]]
"""Step, loss and norm of the gradient."""


class Try(NamedTuple):
    """steps: that metrics.jsonl has when the job has ended."""

    layout: str
    way: str
    result: str
    steps: int = 0
    was_saving: bool = False
    why: str = ""


def command(directory: Path, row: Row, layout: str, *more: str) -> list[str]:
    words = (*WORDS, f"train.steps={row.steps}", *row.words, *LAYOUTS[layout])
    train = ("-m", "hpcpar", "train", "examples/tiny.toml", *words)
    run = (sys.executable, "-m", "hpcpar", "run", "-n", "2", "--", *train)
    return [*run, f"output.directory={directory}", *more]


def course(directory: Path) -> Course:
    found = records_of(directory / "metrics.jsonl")
    return [(each["step"], each["loss"], each["gradient_norm"]) for each in found if "loss" in each]


def targets_of(job: subprocess.Popen[str], way: str, draw: random.Random) -> list[psutil.Process]:
    """The processes that get the signal; none: the job has ended."""
    ranks, launchers = [], []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(job.pid).children(recursive=True):
            words = process.cmdline()
            if words[1:4] == ["-m", "hpcpar", "train"]:
                ranks.append(process)
            elif words and Path(words[0]).name.startswith("mpiexec"):
                launchers.append(process)
    if len(ranks) < 2:
        return []
    whom = {"a rank": [draw.choice(ranks)], "all ranks": ranks, "mpiexec": launchers[:1]}
    return whom.get(way.partition(" to ")[2], [psutil.Process(job.pid)])


def stamp(path: Path) -> tuple[int, int] | None:
    """Tells whether a file was written meanwhile."""
    with suppress(FileNotFoundError):
        return path.stat().st_mtime_ns, path.stat().st_size
    return None


def newest_step(directory: Path) -> int:
    """The step of the newest checkpoint that is whole."""
    return max((int(each.name[5:]) for each in (directory / "checkpoints").glob("step-*")), default=0)


def disturbed(directory: Path, row: Row, layout: str, way: str, after_s: float, draw: random.Random) -> Try:
    """Start a run, or go on with it, and send a signal so many seconds after it has written of a step."""
    metrics = directory / "metrics.jsonl"
    before = stamp(metrics)
    with tempfile.TemporaryFile("w+") as said:
        words = command(directory, row, layout, *(("--resume",) if before else ()))
        job = subprocess.Popen(words, cwd=HERE, stdout=said, stderr=said, text=True)
        started_s = time.monotonic()
        while stamp(metrics) == before and job.poll() is None and time.monotonic() - started_s < LIMIT_S:
            time.sleep(0.005)
        time.sleep(after_s)
        targets = targets_of(job, way, draw)
        was_saving = any((directory / "checkpoints").glob(f"{TEMPORARY_PREFIX}*"))
        for target in targets:
            with suppress(psutil.NoSuchProcess):  # it has ended in this moment
                target.send_signal(signal.Signals[way.split()[0]])
        try:
            status = job.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            job.kill()
            status = job.wait()
        said.seek(0)
        last_words = said.read()[-500:]
    steps = len(course(directory))
    if status == 0:
        return Try(layout, way, "through", steps)
    saved = newest_step(directory)
    if not targets or (row is PREEMPTIONS and (status, saved) != (START_AGAIN, steps)):
        why = f"status {status}, a checkpoint of step {saved}: {last_words}"
        return Try(layout, way, "wrong", steps, why=why)
    return Try(layout, way, "exact", steps, was_saving)


def chain(row: Row, layout: str, ways: list[str], draw: random.Random) -> list[Try]:
    """Disturb a run again and again, in these ways, until all of its steps are done; and compare."""
    expected = undisturbed(row, layout)
    tries: list[Try] = []
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "run"
        for way in ways:
            found = disturbed(directory, row, layout, way, draw.uniform(0, row.within_s), draw)
            if found.result == "through":
                break
            tries.append(found)
            if found.result == "wrong":
                return tries
            if found.steps == row.steps:
                break
        finish(directory, row, layout, "--resume")
        return compared(tries, course(directory), expected)


def compared(tries: list[Try], found: Course, expected: Course) -> list[Try]:
    if found == expected:
        return tries
    return [each._replace(result="wrong", why="other losses or gradient norms") for each in tries]


@functools.cache
def undisturbed(row: Row, layout: str) -> Course:
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "run"
        finish(directory, row, layout)
        return course(directory)


def finish(directory: Path, row: Row, layout: str, *more: str) -> None:
    words = command(directory, row, layout, *more)
    done = subprocess.run(words, cwd=HERE, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        print(f"{layout}, undisturbed: status {done.returncode}: {done.stderr[-2000:]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tries", type=int, default=24, help="of all layouts in turn (default: 24)")
    parser.add_argument("--asked", action="store_true", help="ask the job to stop, in eight ways in turn")
    parser.add_argument("--layouts", default="", help="only those whose name has this in it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    draw, row = random.Random(options.seed), PREEMPTIONS if options.asked else KILLS
    tries: list[Try] = []
    names = itertools.cycle([name for name in LAYOUTS if options.layouts in name])
    ways = list(itertools.islice(itertools.cycle(row.ways), options.tries))
    while len(tries) < options.tries:
        layout = next(names)
        for each in chain(row, layout, ways[len(tries) :], draw):
            tries.append(each)
            print(
                f"{len(tries):>4}  {layout:<30} {each.way:<21} {each.result:<6} after {each.steps:>2} steps"
                f"{', while saving' if each.was_saving else ''}  {each.why}".rstrip(),
                flush=True,
            )
        if options.json is not None:
            options.json.write_text("".join(json.dumps(each._asdict()) + "\n" for each in tries))
    exact = sum(each.result == "exact" for each in tries)
    saving = sum(each.was_saving for each in tries)
    print(f"{exact} of {len(tries)} exact to the bit (target: all), {saving} disturbed while saving")
    raise SystemExit(exact < len(tries))


if __name__ == "__main__":
    main()
