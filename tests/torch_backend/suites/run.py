"""Run torch's own distributed tests over a backend, on ranks that MPI has started.

python -m tests.torch_backend.suites.run -n 2 -n 3 --backend hpcpar --backend gloo [TEST ...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.torch_backend.suites import table

HERE = Path(__file__).parent


def names_of_tests() -> list[str]:
    """All tests of torch's class, in the order of its source."""
    command = [sys.executable, str(HERE / "ranks.py")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def run_tests(
    size: int, backend: str, names: list[str], *, limit_s: float = 60.0
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the outcome and the reason of each test, with as many jobs as it takes."""
    done: set[str] = set()
    while rest := [name for name in names if name not in done]:
        with tempfile.TemporaryDirectory() as directory:
            outcomes = run_job(size, backend, rest, Path(directory), limit_s)
        yield from outcomes.items()
        done |= set(outcomes)


def run_job(size: int, backend: str, names: list[str], directory: Path, limit_s: float) -> dict[str, Any]:
    """Run tests until one fails; at least one of them."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PMI_")}
    command = [sys.executable, "-m", "hpcpar", "run", "-n", str(size), "--"]
    with (directory / "output").open("w") as output:
        subprocess.run(
            [*command, str(HERE / "ranks.py"), backend, str(directory), str(limit_s), *names],
            env={**outside, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    by_rank = [lines(directory / f"outcomes-{rank}") for rank in range(size)]
    outcomes = {}
    for at, name in enumerate(names):
        found = [outcomes[at] for outcomes in by_rank if len(outcomes) > at]
        if not found and outcomes:
            break
        outcomes[name] = combine(found, size, directory)
        if outcomes[name]["outcome"] == "failed":
            break
    return outcomes


def combine(found: list[dict[str, str]], size: int, directory: Path) -> dict[str, str]:
    """One outcome of those of the ranks."""
    failed = [each for each in found if each["outcome"] == "failed"]
    if failed or len(found) < size:
        log = "".join(path.read_text() for path in sorted(directory.glob("log-*")))
        log += (directory / "output").read_text()
        first = failed[0] if failed else {"reason": "a rank ended, or was not done in time"}
        details = "\n".join(each.get("traceback", "") for each in failed)
        return {"outcome": "failed", "reason": first["reason"], "details": details + log[-20000:]}
    skipped = [each for each in found if each["outcome"] == "skipped"]
    return {"outcome": "skipped" if skipped else "passed", "reason": skipped[0]["reason"] if skipped else ""}


def lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-n", type=int, action="append", dest="sizes", metavar="RANKS")
    parser.add_argument("--backend", action="append", dest="backends", choices=["hpcpar", "gloo"])
    parser.add_argument("--json", type=Path, help="append the outcomes, and the output of tests that fail")
    parser.add_argument("--write-table", action="store_true", help="make the table of those in --json")
    parser.add_argument("--limit-s", type=float, default=60.0, help="of each test")
    parser.add_argument("tests", nargs="*")
    asked = parser.parse_args()
    if asked.write_table:
        found = [json.loads(line) for line in asked.json.read_text().splitlines()]
        outcomes = {(line["test"], line["backend"], line["ranks"]): line for line in found}
        table.write(table.merged(outcomes))
        return
    names = asked.tests or names_of_tests()
    for size in asked.sizes or table.SIZES:
        for backend in asked.backends or ["hpcpar", "gloo"]:
            for name, outcome in run_tests(size, backend, names, limit_s=asked.limit_s):
                print(size, backend, name, outcome["outcome"], outcome["reason"], flush=True)
                if asked.json:
                    with asked.json.open("a") as file:
                        line = {"ranks": size, "backend": backend, "test": name, **outcome}
                        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
