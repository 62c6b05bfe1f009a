"""Compare the losses of two runs of `hpcpar train`, to a tolerance.

    python benchmarks/same_losses.py runs/one-rank runs/two-ranks --tolerance 0.02

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
    parser = argparse.ArgumentParser(description="Compare the losses of two runs.")
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    first, second = losses(options.first), losses(options.second)
    found = largest_difference(first, second)
    summaries = [
        json.loads((directory / "summary.json").read_text(encoding="utf-8"))
        for directory in (options.first, options.second)
    ]
    lines = [
        {
            "benchmark": "same losses",
            "steps": len(first),
            "tolerance": options.tolerance,
            "largest_difference": found if found < float("inf") else None,
        },
        *(
            {
                "layout": summary["layout"],
                "held_out_loss": summary["held_out_loss"],
                "tokens_per_s": summary["tokens_per_s"],
                "losses": list(run.values()),
            }
            for summary, run in zip(summaries, (first, second), strict=True)
        ),
    ]
    if options.json is not None:
        options.json.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    for line in lines[1:]:
        shown = f"held-out loss {line['held_out_loss']:.4f}, {line['tokens_per_s']:,.0f} tokens/s"
        print(f"{line['layout']}: {shown}")
    print(f"losses of {len(first)} steps differ by {found:.2%} at most; {options.tolerance:.1%} are allowed")
    sys.exit(found > options.tolerance)


if __name__ == "__main__":
    main()
