"""The table of outcomes: a line for each test of torch's class, kept in `outcomes.tsv`."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PATH = Path(__file__).with_name("outcomes.tsv")
HEAD = ("test", "hpcpar", "gloo", "reason")
SIZES = (2, 3, 4)
NOT_RUN = {"outcome": "-", "reason": ""}


BY_HAND = {
    "monitored_barrier": "expects gloo's words; hpcpar's StallError names the same ranks in others",
    "ddp_profiling_torch_profiler": "counts events that gloo records in C++; a group in Python has none",
    "apply_optim_in_backward": "needs a GPU: its hook waits for the accelerator's stream",
    "native_mixed_precision": "needs a GPU: its hook records events of the device",
    "compile_static_graph": "needs a GPU: torch.compile does not trace the stand-in for it",
    "ddp_device": "needs a GPU: compares the numbers of devices",
    "logging_data_gpu": "needs a GPU: compares the numbers of devices",
    "hierarchical_sgd": "needs an even number of ranks",
    "ddp_uneven_inputs": "takes minutes for its convolutions alone, over gloo as well",
    "SyncBatchNorm": "needs a GPU: torch refuses SyncBatchNorm in DDP on CPU tensors",
}
"""Reasons of tests that fail, by a part of their names."""


@dataclass(frozen=True)
class Row:
    """Outcomes of a test with 2, 3 and 4 ranks: passed, failed or skipped; "-" where it was not run.

    reason   of what did not pass: torch's own where it skips a test, else written by hand
    """

    test: str
    hpcpar: tuple[str, ...]
    gloo: tuple[str, ...]
    reason: str

    def outcome(self, backend: str, size: int) -> str:
        found: tuple[str, ...] = getattr(self, backend)
        return found[SIZES.index(size)]


def read(path: Path = PATH) -> dict[str, Row]:
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file, delimiter="\t"))
    return {
        line["test"]: Row(
            line["test"], tuple(line["hpcpar"].split()), tuple(line["gloo"].split()), line["reason"]
        )
        for line in lines
    }


def write(rows: Mapping[str, Row], path: Path = PATH) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(HEAD)
        for _, row in sorted(rows.items()):
            writer.writerow([row.test, " ".join(row.hpcpar), " ".join(row.gloo), row.reason])


def merged(
    outcomes: Mapping[tuple[str, str, int], Mapping[str, str]],
) -> dict[str, Row]:
    """Rows of outcomes by test, backend and ranks.

    A reason is torch's where it skips a test, and that of `BY_HAND` or the error's first line where it fails.
    """
    rows = {}
    for test in sorted({test for test, _, _ in outcomes}):
        found = {
            backend: [outcomes.get((test, backend, size), NOT_RUN) for size in SIZES]
            for backend in ("hpcpar", "gloo")
        }
        failed = [each["reason"] for each in found["hpcpar"] if each["outcome"] == "failed"]
        skipped = [each["reason"] for each in found["hpcpar"] if each["outcome"] == "skipped"]
        by_hand = [why for part, why in BY_HAND.items() if failed and part in test]
        reason = next(iter([*by_hand, *failed, *skipped]), "")
        words = {backend: tuple(each["outcome"] for each in found[backend]) for backend in found}
        rows[test] = Row(test, words["hpcpar"], words["gloo"], " ".join(reason.split()))
    return rows
