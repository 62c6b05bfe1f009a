"""What benchmarks/training.py found: figures of each peer, beside the others', as tables and JSON lines."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from common import append_json, print_header, quartiles, ratios

from hpcpar.units import format_nbytes

FREE = ("one rank alone", "no communication")
"""The peers that show what a step would take if communication were free. They learn something else."""
IN_BFLOAT16 = (
    "hpcpar, deepspeed: bfloat16 parameters and gradients, float32 masters; "
    "fsdp2: MixedPrecisionPolicy, parameters and averages in bfloat16, float32 shards; "
    "others: torch.autocast on a float32 model; checked against one process in float32"
)


@dataclass
class Result:
    """Figures of one peer; the JSON line.

    step_s         in each turn, of the slowest rank
    cpu_s          in each turn, processor time of all threads for a step, mean of the ranks that work
    exposed_s      median over turns of what the slowest rank stood still in a step for communication that
                   computation did not hide; None for whom hpcpar does not carry it
    phases_s       medians over all steps of rank 0
    peak_nbytes    most resident memory of any rank during steps, above what it held without the peer
    shared_nbytes  the same with pages that ranks share divided among them, the most at the ends of phases
    difference     what `check` found; None for a peer that learns something else
    saved_nbytes   most that autograd holds for backward on any rank
    allocated_nbytes   most that torch allocates in forward and backward on any rank, beside what it held
    forward_only   figures of forward passes without gradients: there is no check, and no memory is measured

    None where the system does not say.
    """

    peer: str
    forward_only: bool
    step_s: list[float]
    cpu_s: list[float]
    exposed_s: float | None
    phases_s: dict[str, float]
    tokens_per_step: int
    peak_nbytes: int | None
    shared_nbytes: int | None
    loss: float
    difference: float | None
    saved_nbytes: int | None = None
    allocated_nbytes: int | None = None

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)

    @property
    def median_cpu_s(self) -> float:
        return statistics.median(self.cpu_s)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.median_s

    def quartiles_s(self) -> tuple[float, float]:
        first, _, third = quartiles(self.step_s)
        return first, third


def speeds(mine: Result, other: Result) -> list[float]:
    """Return quartiles of the ratio of tokens/s over turns, each beside the other's in time."""
    tokens = mine.tokens_per_step / other.tokens_per_step
    return [tokens * times for times in ratios(other.step_s, mine.step_s)]


def derived(result: Result, results: Sequence[Result]) -> dict[str, Any]:
    """Return what follows from the figures of a peer and of the others, in turns of the same kind."""
    results = [other for other in results if other.forward_only == result.forward_only]
    steps = {other.peer: ratios(result.step_s, other.step_s)[1] for other in results}
    cpus = {other.peer: ratios(result.cpu_s, other.cpu_s)[1] for other in results}
    free = next((name for name in FREE if name in steps), None)
    if result.peer == "one process":
        free = None
    return {
        "median_s": result.median_s,
        "median_cpu_s": result.median_cpu_s,
        "tokens_per_s": result.tokens_per_s,
        "efficiency": 1 / steps[free] if free else None,
        "ratio_to": steps,
        "cpu_ratio_to": cpus,
        "tokens_per_s_ratio_to": {other.peer: speeds(result, other) for other in results},
    }


def print_checked(about: dict[str, Any], results: Sequence[Result]) -> None:
    """Print the header, whether peers agree with one process, and how to read the figures."""
    print_header(about)
    agreement = ", ".join(
        f"{result.peer} {result.difference:.1e}" + (" (WRONG)" if wrong(result, about) else "")
        for result in results
        if result.difference is not None
    )
    print(
        "# checked: what 3 steps of SGD changed, beside one process; relative difference, at most "
        f"{about['tolerance']:.0e}: {agreement}"
    )
    print(
        "# step: median (quartiles) of the slowest rank; cpu: median, of all threads, mean of the ranks that "
        "work; phases: medians of rank 0; times in ms"
    )


def report(about: dict[str, Any], results: Sequence[Result]) -> None:
    print_checked(about, results)
    if about["dtype"] == "bfloat16":
        print(f"# {IN_BFLOAT16}")
    print(
        "# efficiency: step without communication / step, turn by turn; memory: peak of two steps, any rank; "
        "shared: with shared pages divided among the ranks that map them"
    )
    for kind, title in ((False, "training"), (True, "forward only")):
        chosen = [result for result in results if result.forward_only == kind]
        if chosen:
            print(f"# {title}")
            print_figures(chosen)
            print_activations(chosen)
            print_speeds(chosen)
            print_ratios("step", "ratio_to", chosen)
            print_ratios("cpu", "cpu_ratio_to", chosen)


def print_figures(results: Sequence[Result]) -> None:
    phases = list(results[0].phases_s)
    titles = ["step", "quartiles", "tokens/s", "cpu", "exposed", "efficiency", "memory", "shared", *phases]
    print(f"{'peer':<22}" + "".join(f"{title:>15}" for title in titles))
    for result in results:
        low, high = result.quartiles_s()
        efficiency = derived(result, results)["efficiency"]
        cells = [
            f"{result.median_s * 1e3:.1f}",
            f"{low * 1e3:.1f}-{high * 1e3:.1f}",
            f"{result.tokens_per_s:,.0f}",
            f"{result.median_cpu_s * 1e3:.1f}",
            "-" if result.exposed_s is None else f"{result.exposed_s * 1e3:.1f}",
            "-" if efficiency is None else f"{efficiency:.3f}",
            *("-" if n is None else format_nbytes(n) for n in (result.peak_nbytes, result.shared_nbytes)),
            *(f"{result.phases_s[phase] * 1e3:.1f}" for phase in phases),
        ]
        print(f"{result.peer:<22}" + "".join(f"{cell:>15}" for cell in cells))


def print_activations(results: Sequence[Result]) -> None:
    """Print what forward and backward hold, if it was measured; by one process's, where that takes part."""
    measured = [result for result in results if result.saved_nbytes and result.allocated_nbytes]
    whole = next((result for result in measured if result.peer == "one process"), None)
    if measured:
        print(
            "# saved: by autograd for backward; allocated: by torch in forward and backward, with gradients"
        )
    for result in measured:
        cells = []
        for figure in ("saved_nbytes", "allocated_nbytes"):
            nbytes = getattr(result, figure)
            beside = f" ({nbytes / getattr(whole, figure):.3f} of one process)" if whole else ""
            cells.append(f"{figure.removesuffix('_nbytes')} {format_nbytes(nbytes)}{beside}")
        print(f"{result.peer:<22}  " + "  ".join(cells))


def print_speeds(results: Sequence[Result]) -> None:
    """Print speeds beside peers that are not hpcpar's, a column for each."""
    others = [result for result in results if not result.peer.startswith("hpcpar")]
    print("# tokens/s, row / column, turn by turn: median (quartiles)")
    print(f"{'':<22}" + "".join(f"{other.peer:>21}" for other in others))
    for result in results:
        cells = ["{1:.3f} ({0:.2f}-{2:.2f})".format(*speeds(result, other)) for other in others]
        print(f"{result.peer:<22}" + "".join(f"{cell:>21}" for cell in cells))


def print_ratios(title: str, figure: str, results: Sequence[Result]) -> None:
    """Print a square table, whose columns have letters because the peers' names are long."""
    letters = ascii_lowercase[: len(results)]
    print(f"# {title}, row / column, turn by turn")
    print(f"{'':<24}" + "".join(f"{letter:>8}" for letter in letters))
    for letter, result in zip(letters, results, strict=True):
        ratios = derived(result, results)[figure].values()
        print(f"{letter} {result.peer:<22}" + "".join(f"{value:>8.3f}" for value in ratios))


def wrong(result: Result, about: dict[str, Any]) -> bool:
    # A difference that is not a number is no agreement either.
    return result.difference is not None and not result.difference <= about["tolerance"]


def write_json(path: Path | None, about: dict[str, Any], results: Sequence[Result]) -> None:
    append_json(path, [{**about, **asdict(result), **derived(result, results)} for result in results])
