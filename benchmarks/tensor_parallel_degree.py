"""Throughput of ZeRO-3 with tensor parallelism against the degree: examples/fsdp_tp.py, on 4 ranks.

    python benchmarks/tensor_parallel_degree.py [--ranks 4] [--degrees 1 2 4] [--rounds 3]
        [--json FILE] [--output FILE] [-- --hidden 512 …]

Each degree is a job of its own, and the degrees are run in turn, round by round, so that a noisy machine
touches all of them. What follows "--" goes to the example, otherwise 8 layers and no limit of memory.

    tp   step, median of rounds   tokens/s       each rank: activations, memory
    1    …
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import add_picture_options, append_json, at_least, output_file, write_picture

from hpcpar.cli.picture import ACTIVATIONS, FORWARD, MEASURED, new_figure
from hpcpar.units import MiB, format_nbytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXAMPLE = Path(__file__).parents[1] / "examples" / "fsdp_tp.py"

TIMEOUT_S = 1200.0
"""Of one job."""

Record = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Throughput against the degree of tensor parallelism.")
    parser.add_argument("--ranks", type=at_least(1), default=4, help="of each job (default: 4)")
    parser.add_argument("--degrees", type=int, nargs="+", default=[1, 2, 4], help="(default: 1 2 4)")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="jobs of each degree (default: 3)")
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="append a line for each job to this file"
    )
    add_picture_options(parser)
    parser.add_argument("example", nargs="*", help="options of the example, after --")
    return parser.parse_args()


def run(ranks: int, degree: int, options: Sequence[str]) -> Record:
    with tempfile.TemporaryDirectory() as directory:
        line = Path(directory) / "line.jsonl"
        example = [str(EXAMPLE), "--tp", str(degree), "--json", str(line), *options]
        command = [sys.executable, "-m", "hpcpar", "run", "-n", str(ranks), "--", *example]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr}")
        record: Record = json.loads(line.read_text(encoding="utf-8"))
        return record


def by_degree(records: Sequence[Record], key: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for record in records:
        found.setdefault(record["tp"], []).append(record[key])
    return dict(sorted(found.items()))


def medians(records: Sequence[Record], key: str) -> dict[int, float]:
    return {degree: statistics.median(values) for degree, values in by_degree(records, key).items()}


def table(records: Sequence[Record]) -> str:
    rows = [f"{'tp':>3}  {'dp':>3}  {'step':>9}  {'tokens/s':>9}  {'activations':>12}  {'memory':>10}"]
    steps, speeds = medians(records, "median_s"), medians(records, "tokens_per_s")
    kept, added = medians(records, "activations_nbytes"), medians(records, "added_nbytes")
    ranks = records[0]["ranks"]
    for tp in steps:
        rows.append(
            f"{tp:>3}  {ranks // tp:>3}  {steps[tp]:>7.3f} s  {speeds[tp]:>9,.0f}  "
            f"{format_nbytes(kept[tp]):>12}  {format_nbytes(added[tp]):>10}"
        )
    return "\n".join(rows)


def heading(record: Record) -> str:
    way = "sequence parallel" if record["sequence_parallel"] else "tensor parallel only"
    return (
        f"{record['n_layers']} layers of {record['hidden']}, {record['batch']} x {record['sequence']} tokens "
        f"for every tp ranks of {record['ranks']}, ZeRO-3 over the others, {way}"
    )


def draw(records: Sequence[Record]) -> Figure:
    """Return a figure of tokens per second, and memory of a rank, against the degree."""
    figure = new_figure(4.0)
    speed, memory = figure.subplots(1, 2)
    of_rounds = by_degree(records, "tokens_per_s")
    places = {degree: place for place, degree in enumerate(of_rounds)}
    for degree, values in of_rounds.items():
        speed.plot([places[degree]] * len(values), values, "o", color=FORWARD, alpha=0.3)
    middle, steps = medians(records, "tokens_per_s"), medians(records, "median_s")
    speed.plot([*places.values()], [*middle.values()], "-", color=FORWARD)
    for degree, value in middle.items():
        speed.annotate(
            f"{value:,.0f}\n{steps[degree]:.2f} s a step",
            (places[degree], value),
            textcoords="offset points",
            xytext=(0, 10),
            ha="center",
            fontsize=8,
        )
    speed.set(ylabel="tokens/s, all ranks together")
    speed.set_ylim(0, 1.3 * max(max(values) for values in of_rounds.values()))
    for key, name, colour in (
        ("added_nbytes", "all that the process took", MEASURED),
        ("activations_nbytes", "activations", ACTIVATIONS),
    ):
        bars = [nbytes / MiB for nbytes in medians(records, key).values()]
        memory.bar([*places.values()], bars, width=0.6, color=colour, label=name)
    memory.set(ylabel="MiB of a rank, at most")
    memory.legend(fontsize=8)
    for axes in (speed, memory):
        axes.set_xlabel("tensor-parallel degree")
        axes.set_xticks([*places.values()], [str(degree) for degree in places])
        axes.margins(x=0.15)
        axes.grid(axis="y", alpha=0.3)
    figure.suptitle(heading(records[0]), fontsize=9)
    return figure


def main() -> None:
    options = arguments()
    given = options.example or ["--n-layers", "8", "--memory-limit-gib", "0"]
    records = []
    for number in range(options.rounds):
        for degree in options.degrees:
            records.append(run(options.ranks, degree, given))
            found = records[-1]
            print(
                f"# round {number + 1}, tp={degree}: {found['median_s']:.3f} s, "
                f"{found['tokens_per_s']:,.0f} tokens/s",
                flush=True,
            )
    first = records[0]
    about = ("ranks", "nodes", "cores", "dtype", "dataset", "steps", "torch", "hpcpar")
    print("# " + "  ".join(f"{key} {first[key]}" for key in about) + f"  rounds {options.rounds}")
    print(f"# {heading(first)}")
    print(table(records))
    append_json(options.json, records)
    write_picture(options, lambda: draw(records))


if __name__ == "__main__":
    main()
