"""Compare the losses of runs of `hpcpar train` with those of the first, to a tolerance.

    python benchmarks/same_losses.py runs/one-rank runs/two-ranks runs/zero-3 --tolerance 0.02

The tolerance is of each step's loss, in parts of the first run's. In bfloat16 a number is known to 0.4 %, and
several ranks sum gradients in another order than one does, so losses part slowly; gradients of the wrong
scale, or not summed at all, part them within a few steps by more than the 2 % that are allowed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path


def losses(directory: Path) -> dict[int, float]:
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines if line]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def largest_difference(first: dict[int, float], second: dict[int, float]) -> float:
    """Return it as a part of the first; infinite where steps are missing, or nothing was learnt."""
    if not first or first.keys() != second.keys() or min(first.values()) > 0.95 * first[min(first)]:
        return float("inf")
    found = [abs(second[step] - loss) / abs(loss) for step, loss in first.items()]
    return max(found) if all(map(math.isfinite, found)) else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the losses of runs with those of the first.")
    parser.add_argument("first", type=Path)
    parser.add_argument("others", type=Path, nargs="+")
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    first = losses(options.first)
    lines = []
    for directory in (options.first, *options.others):
        summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
        run = losses(directory)
        found = largest_difference(first, run)
        lines.append(
            {
                "run": directory.name,
                "layout": summary["layout"],
                "largest_difference": found if found < float("inf") else None,
                "held_out_loss": summary["held_out_loss"],
                "tokens_per_s": summary["tokens_per_s"],
                "losses": list(run.values()),
            }
        )
        print(
            f"{directory.name} ({summary['layout']}): held-out loss {summary['held_out_loss']:.4f}, "
            f"{summary['tokens_per_s']:,.0f} tokens/s; losses of {len(first)} steps differ by {found:.2%} at "
            f"most, {options.tolerance:.1%} are allowed"
        )
    if options.json is not None:
        about = {"benchmark": "same losses", "steps": len(first), "tolerance": options.tolerance}
        text = "".join(json.dumps(line) + "\n" for line in (about, *lines))
        options.json.write_text(text, encoding="utf-8")
    differences = [line["largest_difference"] for line in lines]
    sys.exit(any(each is None or each > options.tolerance for each in differences))


if __name__ == "__main__":
    main()
