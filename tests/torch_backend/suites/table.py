"""The table of outcomes: a line for each test of torch's class, kept in `outcomes.tsv`."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PATH = Path(__file__).with_name("outcomes.tsv")
HEAD = ("test", "hpcpar", "gloo", "reason")
SIZES = (2, 3, 4)


@dataclass(frozen=True)
class Row:
    """Outcomes of a test with 2, 3 and 4 ranks: passed, failed or skipped.

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
    outcomes: Mapping[tuple[str, str, int], Mapping[str, str]], before: Mapping[str, Row]
) -> dict[str, Row]:
    """Rows of outcomes by test, backend and ranks.

    A reason is torch's where it skips a test; that of the table before, written by hand, where one fails;
    else the first line of the error.
    """
    rows = {}
    for test in sorted({test for test, _, _ in outcomes}):
        found = {backend: [outcomes[test, backend, size] for size in SIZES] for backend in ("hpcpar", "gloo")}
        failed = [each["reason"] for each in found["hpcpar"] if each["outcome"] == "failed"]
        skipped = [each["reason"] for each in found["hpcpar"] if each["outcome"] == "skipped"]
        known = [before[test].reason] if failed and test in before and before[test].reason else []
        reason = next(iter([*known, *failed, *skipped]), "")
        words = {backend: tuple(each["outcome"] for each in found[backend]) for backend in found}
        rows[test] = Row(test, words["hpcpar"], words["gloo"], " ".join(reason.split()))
    return rows
