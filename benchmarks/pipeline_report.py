"""What benchmarks/pipeline.py found, as tables and JSON lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import append_json, print_header, quartiles
from pipeline_peers import SCHEDULES
from pipeline_times import Comparison
from training_report import Result, print_checked, print_figures, speeds

from hpcpar.units import format_nbytes


@dataclass(kw_only=True)
class PipelineResult(Result):
    """Figures of one peer.

    split         how many of the items, which are embedding, layers and head, each stage has
    live_nbytes   by rank, of tensors at most during the microbatches: see `live_nbytes`
    """

    split: list[int]
    live_nbytes: list[int]


def report_peers(about: dict[str, Any], results: Sequence[PipelineResult]) -> None:
    print_checked(about, results)
    print("# memory: peak of two steps with the optimizer, resident, any rank; shared: pages divided")
    print_figures(results)
    print_by_schedule({result.peer: result for result in results})
    print_memory(results)


def print_by_schedule(results: dict[str, PipelineResult]) -> None:
    """Print hpcpar beside torch with the same schedule, and balanced stages beside even ones."""
    print("# tokens/s by schedule, turn by turn: median (quartiles)")
    pairs = (("hpcpar", "torch"), ("hpcpar even", "torch"), ("hpcpar", "hpcpar even"))
    print(f"{'':<22}" + "".join(f"{' / '.join(pair):>24}" for pair in pairs))
    for schedule in SCHEDULES:
        cells = [cell(results.get(f"{a} {schedule}"), results.get(f"{b} {schedule}")) for a, b in pairs]
        if any(each != "-" for each in cells):
            print(f"{schedule:<22}" + "".join(f"{each:>24}" for each in cells))
    ours, theirs = (fastest(results, whose) for whose in ("hpcpar", "torch"))
    if ours and theirs:
        print(f"# the fastest of each: {ours.peer} / {theirs.peer}: {cell(ours, theirs)}")


def cell(mine: Result | None, other: Result | None) -> str:
    if mine is None or other is None:
        return "-"
    low, middle, high = speeds(mine, other)
    return f"{middle:.3f} ({low:.2f}-{high:.2f})"


def fastest(results: dict[str, PipelineResult], whose: str) -> PipelineResult | None:
    own = [result for peer, result in results.items() if peer.startswith(whose)]
    return max(own, key=lambda result: result.tokens_per_s, default=None)


def print_memory(results: Sequence[PipelineResult]) -> None:
    print(
        "# most memory of tensors made during the microbatches, by rank: activations, and what comes and goes"
    )
    ranks = range(len(results[0].live_nbytes))
    titles = "".join(f"{f'rank {rank}':>12}" for rank in ranks)
    print(f"{'peer':<22}{titles}  items (embedding, layers, head) of each stage")
    for result in results:
        cells = map(format_nbytes, result.live_nbytes)
        print(
            f"{result.peer:<22}"
            + "".join(f"{each:>12}" for each in cells)
            + f"  {' '.join(map(str, result.split))}"
        )


# --- as priced, and as run --------------------------------------------------------------------------


def report_comparisons(about: dict[str, Any], comparisons: Sequence[Comparison]) -> None:
    print_header(about)
    print(
        "# step: as priced, and median (quartiles) of the slowest rank, ms; bubble rate: (cost - work)/cost, "
        "cost the longest span of a rank, work the mean of what ranks were busy; priced with each stage's "
        "times alone, and as in the step: with each action's time there"
    )
    titles = ["stages", "priced", "step", "quartiles", "step/priced", "bubble priced", "as in step", "bubble"]
    print(f"{'schedule':<14}" + "".join(f"{title:>15}" for title in titles) + f"  {about['criterion']}")
    for each in comparisons:
        low, _, high = quartiles(each.step_s)
        cells = [
            f"{each.schedule.stages}",
            f"{each.predicted.seconds * 1e3:.1f}",
            f"{each.median_s * 1e3:.1f}",
            f"{low * 1e3:.1f}-{high * 1e3:.1f}",
            f"{each.median_s / each.predicted.seconds:.4f}",
            f"{max(0.0, each.predicted.bubble_rate):.2%}",  # no -0.00%, where sums are not exact
            f"{max(0.0, each.own_rate):.2%}",
            f"{each.bubble_rate:.2%}",
        ]
        met = "yes" if is_met(each, about) else "no"
        print(f"{each.schedule.name:<14}" + "".join(f"{each:>15}" for each in cells) + f"  {met}")


def is_met(each: Comparison, about: dict[str, Any]) -> bool:
    """Return whether the measurement is as near to the prediction as is hoped for."""
    if about["part"] == "sleep":
        measured, priced = each.median_s, each.predicted.seconds
    else:
        measured, priced = each.bubble_rate, each.own_rate
    return abs(measured - priced) <= about["tolerance"] * priced


def print_durations(comparisons: Sequence[Comparison]) -> None:
    print("# F, B, W of each stage alone, medians in ms; without W the whole backward is in B")
    for each in comparisons:
        columns = each.durations.of_stages(each.schedule.stages)
        stages = "  ".join(
            " ".join(f"{s * 1e3:.1f}" for s in of_stage) for of_stage in zip(*columns, strict=True)
        )
        print(f"{each.schedule.name:<14}{stages}   hop {each.durations.hop_s * 1e3:.3f}")


def write_comparisons(path: Path | None, about: dict[str, Any], comparisons: Sequence[Comparison]) -> None:
    append_json(path, [{**about, **figures(each), "met": is_met(each, about)} for each in comparisons])


def figures(each: Comparison) -> dict[str, Any]:
    forward_s, backward_s, weight_s = each.durations.of_stages(each.schedule.stages)
    return {
        "schedule": each.schedule.name,
        "microbatches": each.schedule.microbatches,
        "stages": each.schedule.stages,
        "forward_s": forward_s,
        "backward_s": backward_s,
        "weight_s": weight_s,
        "hop_s": each.durations.hop_s,
        "predicted_s": each.predicted.seconds,
        "step_s": each.step_s,
        "median_s": each.median_s,
        "step_ratio": each.median_s / each.predicted.seconds,
        "predicted_bubble_rate": each.predicted.bubble_rate,
        "bubble_rates": each.bubble_rates,
        "own_rates": each.own_rates,
        "bubble_rate": each.bubble_rate,
    }
