"""Damaged checkpoints and disks that fail: what is found, and what is loaded instead.

    python benchmarks/scoreboard/checkpoints.py --tries 500 --json checkpoints.jsonl

Two ranks (loopback) with ZeRO-1 save two checkpoints. Of the newer one a file, drawn at random, is damaged in
one of ten ways; both ranks load. A try is

    older     the file was named, and every bit loaded is that of the older checkpoint
    harmless  every bit loaded is that of the newer one: as a changed letter in a note leaves it
    wrong     anything else

Then the third save fails, at each of its operations on the disk in turn, with each of four errors:

    kept      every rank raised an error that names errno and path, and every bit that is loaded then is that
              of the second checkpoint; or of the third, where only the last operations failed
    wrong     anything else
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import random
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hpcpar import checkpoint
from hpcpar.checkpoint import files
from hpcpar.checkpoint.manifest import MANIFEST
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.errors import HpcparError

RANKS = 2
STEPS = (10, 20, 30)
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)

Bits = dict[str, bytes]
lock = threading.Lock()


# --- a small run -----------------------------------------------------------------------------------------


class Run:
    """Model and optimizer of one rank."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        with lock:  # loopback's ranks are threads, which share torch's generator
            torch.manual_seed(0)
            self.model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
        inner = torch.optim.AdamW(self.model.parameters(), 1e-2)
        named = list(self.model.named_parameters())
        self.optimizer = DistributedOptimizer(inner, named, comm, zero_stage=1)

    def step(self) -> None:
        self.model(torch.ones(2, 16) * (self.comm.rank + 1)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, directory: Path, step: int) -> None:
        checkpoint.save(directory, step=step, model=self.model, optimizer=self.optimizer, comm=self.comm)

    def load(self, directory: Path) -> int:
        return checkpoint.load(directory, model=self.model, optimizer=self.optimizer, comm=self.comm).step

    def bits(self) -> Bits:
        found = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        for number, state in enumerate(self.optimizer.state.values()):
            found |= {f"{number}/{name}": torch.as_tensor(value) for name, value in state.items()}
        return {name: tensor.detach().numpy().tobytes() for name, tensor in found.items()}


def prepare(directory: Path) -> dict[int, list[Bits]]:
    """Save all but the last of `STEPS`; what each rank has after each of them."""

    def work(comm: Communicator) -> dict[int, Bits]:
        run, found = Run(comm), {}
        for step in STEPS:
            run.step()
            if step != STEPS[-1]:
                run.save(directory, step)
            found[step] = run.bits()
        return found

    told = run_loopback(RANKS, work)
    return {step: [each[step] for each in told] for step in STEPS}


def loaded(directory: Path) -> tuple[set[int], list[Bits]]:
    def work(comm: Communicator) -> tuple[int, Bits]:
        run = Run(comm)
        run.step()  # the optimizer has a state, of other values
        return run.load(directory), run.bits()

    told = run_loopback(RANKS, work)
    return {step for step, _ in told}, [bits for _, bits in told]


# --- damage ----------------------------------------------------------------------------------------------


def changed(change: Callable[[bytearray, random.Random], object]) -> Callable[[Path, random.Random], None]:
    def apply(path: Path, draw: random.Random) -> None:
        content = bytearray(path.read_bytes())
        change(content, draw)
        path.write_bytes(content)

    return apply


def flip(content: bytearray, draw: random.Random) -> None:
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def zero(content: bytearray, draw: random.Random) -> None:
    """Clear a block that has something in it."""
    starts = [start for start in range(0, len(content), 64) if any(content[start : start + 64])]
    start = draw.choice(starts)
    content[start : start + 64] = bytes(len(content[start : start + 64]))


def cut(content: bytearray, draw: random.Random) -> None:
    del content[draw.randrange(len(content)) :]


def exchange(path: Path, draw: random.Random) -> None:
    """Exchange a file with another one of its checkpoint."""
    other = draw.choice([each for each in sorted(path.parent.iterdir()) if each != path])
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


def age(path: Path, draw: random.Random) -> None:
    """Put the older checkpoint's file of this name in its place."""
    shutil.copyfile(path.parent.parent / f"step-{STEPS[0]:08d}" / path.name, path)


AGED = "a file of the older one"
DAMAGES: dict[str, Callable[[Path, random.Random], object]] = {
    "a bit flipped": changed(flip),
    "a block of zeros": changed(zero),
    "cut off": changed(cut),
    "bytes appended": changed(lambda content, draw: content.extend(draw.randbytes(8))),
    "emptied": changed(lambda content, draw: content.clear()),
    "removed": lambda path, draw: path.unlink(),
    "two files exchanged": exchange,
    AGED: age,
    "replaced by random bytes": changed(
        lambda content, draw: content.__setitem__(slice(None), draw.randbytes(len(content)))
    ),
    "a directory in its place": lambda path, draw: (path.unlink(), path.mkdir()),
}


class Said(logging.Handler):
    """Keeps what hpcpar logs."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


@contextmanager
def listening() -> Iterator[Said]:
    said, log = Said(), logging.getLogger("hpcpar")
    log.addHandler(said)
    was, log.propagate = log.propagate, False
    try:
        yield said
    finally:
        log.removeHandler(said)
        log.propagate = was


def try_damage(saved: Path, expected: dict[int, list[Bits]], kind: str, draw: random.Random) -> str:
    with tempfile.TemporaryDirectory() as place, listening() as said:
        directory = Path(place) / "run"
        shutil.copytree(saved, directory)
        path = draw.choice(sorted((directory / f"step-{STEPS[1]:08d}").iterdir()))
        DAMAGES[kind](path, draw)
        try:
            steps, bits = loaded(directory)
        except HpcparError as error:
            return f"wrong: {path.name}: {error}"
        if steps == {STEPS[0]} and bits == expected[STEPS[0]]:
            # Of two exchanged files either one may be named; so may any that another manifest does not fit.
            either = kind == "two files exchanged" or (kind == AGED and path.name == MANIFEST)
            named = path.name in said.text or either
            return "older" if named else f"wrong: {path.name} was not named: {said.text}"
        if steps == {STEPS[1]} and bits == expected[STEPS[1]]:
            return "harmless"
        return f"wrong: {path.name}: loaded {steps}"


# --- disks -----------------------------------------------------------------------------------------------


class FailingDisk:
    """The n-th operation that writes, and all after it, end with this error."""

    def __init__(self, at: int, number: int) -> None:
        self.left = at
        self.number = number
        self.operations = 0

    def wrap(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*arguments: Any, **named: Any) -> Any:
            with lock:
                self.operations += 1
                self.left -= 1
                failing = self.left < 0
            if failing:
                path = next((each for each in arguments if isinstance(each, (Path, str))), None)
                raise OSError(self.number, os.strerror(self.number), None if path is None else str(path))
            return operation(*arguments, **named)

        return attempt

    @contextmanager
    def mounted(self) -> Iterator[None]:
        with (
            mock.patch.object(files, "save_file", self.wrap(files.save_file)),
            mock.patch.object(Path, "write_text", self.wrap(Path.write_text)),
            mock.patch.object(os, "fsync", self.wrap(os.fsync)),
            mock.patch.object(os, "rename", self.wrap(os.rename)),
            mock.patch.object(os, "mkdir", self.wrap(os.mkdir)),
        ):
            yield


def try_disk(saved: Path, expected: dict[int, list[Bits]], number: int, at: int) -> str | None:
    """Save on a disk that fails at its operation `at`; None: the save has fewer operations."""
    with tempfile.TemporaryDirectory() as place, listening():
        directory = Path(place) / "run"
        shutil.copytree(saved, directory)
        disk = FailingDisk(at, number)

        def work(comm: Communicator) -> str | None:
            run = Run(comm)
            for _ in STEPS:
                run.step()
            try:
                run.save(directory, STEPS[2])
            except (HpcparError, OSError) as error:
                return str(error)
            return None

        with disk.mounted():
            told = run_loopback(RANKS, work)
        steps, bits = loaded(directory)
        if disk.left >= 0:
            return None
        if None in told:
            return f"wrong: no error on some rank: {told}"
        if not all(f"[Errno {number}]" in str(text) for text in told):
            return f"wrong: unnamed: {told}"
        step = max(steps)
        return "kept" if step in STEPS[1:] and bits == expected[step] else f"wrong: loaded {steps}"


# --- the table -------------------------------------------------------------------------------------------


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tries", type=int, default=20, help="of each damage (default: %(default)s)")
    parser.add_argument("--damages", default="", help="only those whose name has this in it, and no disks")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="also write each row as a line of JSON")
    return parser.parse_args()


def main() -> None:
    asked = options()
    draw, rows = random.Random(asked.seed), []

    def show(what: str, results: list[str]) -> None:
        counted = dict(Counter(each.split(":")[0] for each in results))
        rows.append({"what": what, "tries": len(results), "results": counted})
        print(f"{what:40} {len(results):6}  {counted}", flush=True)
        for text in sorted({each for each in results if each.startswith("wrong")})[:3]:
            print(f"    {text}", flush=True)

    print(f"{'what':40} {'tries':>6}  results")
    with tempfile.TemporaryDirectory() as place:
        saved = Path(place)
        expected = prepare(saved)
        for kind in (each for each in DAMAGES if asked.damages in each):
            show(kind, [try_damage(saved, expected, kind, draw) for _ in range(asked.tries)])
        for number in () if asked.damages else ERRORS:
            results: list[str] = []
            while (found := try_disk(saved, expected, number, len(results))) is not None:
                results.append(found)
            show(f"disk: {os.strerror(number)}", results)
    if asked.json:
        asked.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    raise SystemExit(any("wrong" in row["results"] for row in rows))


if __name__ == "__main__":
    main()
