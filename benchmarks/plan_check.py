"""The planner's figures beside this machine's, for many layouts and two model sizes.

    make plan-check

describes this machine, trains each layout for some steps on 2 and on 4 ranks, and once more with a larger
model for how far processes grow, and reports:

    bytes         sent beyond theory
    state         weights, gradients, optimizer state of the fullest rank: largest error
    activations   largest error
    growth        of a process's peak memory, with pages that ranks share divided among them: largest error.
                  Predicted: state, activations, working memory. The C library gives memory back at once here
                  (MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_), else its free lists would count, too.
    step          median error, and the rank correlation of predicted and measured (Spearman) within a size
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import give_freed_memory_back, kernel_nbytes, proportional_nbytes, reset_peak

import hpcpar
from hpcpar.planner.approaches import EXPERTS
from hpcpar.planner.memory import STATE
from hpcpar.planner.stage_memory import ACTIVATIONS, WORKING
from hpcpar.training.comparison import configured, measure
from hpcpar.units import format_duration, format_nbytes

SIZES = {
    "small": ("model.preset=tiny", "train.sequence=128", "train.global_batch=16", "train.microbatch=4"),
    "large": (
        *(
            "model.preset=tiny",
            "model.hidden_size=256",
            "model.layers=4",
            "model.heads=8",
            "model.kv_heads=4",
        ),
        *("model.ffn_size=768", "train.sequence=256", "train.global_batch=8", "train.microbatch=2"),
    ),
}
GROWN = (
    *SIZES["large"],
    *("model.hidden_size=512", "model.layers=8", "model.ffn_size=1536"),
)
"""What processes grow by, 150 to 600 MiB, is mostly the model's."""
SEQUENCE_PARALLEL = "tensor_parallel.sequence_parallel=true"
LAYOUTS: dict[int, list[tuple[str, ...]]] = {
    2: [
        *[(f"optimizer.zero_stage={stage}",) for stage in (0, 1, 2, 3)],
        ("mesh.tp=2",),
        ("mesh.tp=2", SEQUENCE_PARALLEL),
        ("mesh.cp=2",),
        ("mesh.pp=2",),
        ("mesh.pp=2", "pipeline.schedule=gpipe"),
        ("mesh.pp=2", "pipeline.schedule=zb-h1"),
        ("train.recompute=full",),
        ("mesh.tp=2", "train.recompute=selective"),
        EXPERTS,
        ("mesh.ep=2", *EXPERTS),
    ],
    4: [
        *[(f"optimizer.zero_stage={stage}",) for stage in (0, 1, 2, 3)],
        ("optimizer.zero_stage=3", "mesh.dp_shard=2"),
        ("optimizer.zero_stage=3", "optimizer.reshard=step"),
        ("mesh.tp=4", SEQUENCE_PARALLEL),
        ("mesh.tp=2", "optimizer.zero_stage=1"),
        ("mesh.pp=2", "optimizer.zero_stage=1"),
        ("mesh.pp=2", "optimizer.zero_stage=3", "optimizer.reshard=step"),
        ("mesh.pp=2", "mesh.tp=2"),
        ("mesh.pp=4",),
        ("mesh.cp=2", "mesh.tp=2"),
        ("mesh.cp=4", "optimizer.zero_stage=2"),
        ("mesh.ep=4", *EXPERTS),
    ],
}


def run(file: Path, steps: int) -> None:
    """Measure the layouts of this many ranks; add a line for each to the file."""
    world = hpcpar.init(sets_threads=True)
    for size, options in SIZES.items():
        for layout in LAYOUTS[world.size]:
            with configured("", "plan-check", (*options, *layout), world) as config:
                found = measure(" ".join(layout), config, world, steps=steps)
            if world.rank == 0:
                with file.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps({"ranks": world.size, "size": size, **found.as_record()}) + "\n")
                print(
                    f"{world.size} ranks, {size}: {found.name or 'dp'} {format_duration(found.step_s)}",
                    flush=True,
                )


def grow(file: Path) -> None:
    """Measure how far processes grow in the layouts of this many ranks; add a line for each to the file."""
    world = hpcpar.init(sets_threads=True)
    with configured("", "plan-check", SIZES["small"], world) as config:
        measure("", config, world, steps=1)  # what every process takes once
    for layout in LAYOUTS[world.size]:
        with configured("", "plan-check", (*GROWN, *layout), world) as config:
            give_freed_memory_back()
            world.barrier()
            before = proportional_nbytes()
            reset_peak()
            found = measure(" ".join(layout), config, world, steps=1)
            world.barrier()
            others_share = kernel_nbytes("status", "RssShmem") - kernel_nbytes("smaps_rollup", "Pss_Shmem")
            peak = kernel_nbytes("status", "VmHWM") - kernel_nbytes("status", "RssFile") - others_share
            growth = max(world.allgather_object(peak - before))
        line = {"ranks": world.size, "size": "grown", "growth": growth, **found.as_record()}
        if world.rank == 0:
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(line) + "\n")


def report(file: Path) -> None:
    """Print all layouts and the errors."""
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    found = [one for one in lines if "growth" not in one]
    _report_growth([one for one in lines if "growth" in one])
    errors: dict[str, list[float]] = {}
    for one in found:
        for line in one["prediction"]["figures"]:
            if line["error"] is not None:
                errors.setdefault(line["what"], []).append(line["error"])
        step = _figure(one, "step")
        spread = f"{format_duration(min(one['steps_s']))} to {format_duration(max(one['steps_s']))}"
        predicted = "-" if step["predicted"] is None else format_duration(step["predicted"])
        error = "" if step["error"] is None else f"{step['error']:+.0%}"
        print(
            f"{one['ranks']} {one['size']:5} {one['name'][:70]:70} beyond {one['beyond']:>4} B  state "
            f"{_largest(one, STATE):.2%}  activations {_largest(one, [ACTIVATIONS]):.1%}  step {predicted} "
            f"({format_duration(one['step_s'])}, {spread}) {error}"
        )
    print(f"\n{len(found)} runs; sent beyond theory: {sum(abs(one['beyond']) for one in found)} B")
    state = [abs(error) for what in STATE for error in errors.get(what, [])]
    print(f"model state: largest error {max(state):.2%}")
    kept = [abs(error) for error in errors[ACTIVATIONS]]
    print(f"activations: median {statistics.median(kept):.2%}, largest {max(kept):.2%}")
    if "step" not in errors:
        print("step: not predicted, as this machine has no description (hpcpar bench fit --machine)")
        return
    steps = [abs(error) for error in errors["step"]]
    print(f"step: median error {statistics.median(steps):.1%}, largest {max(steps):.1%}")
    for size in SIZES:
        for ranks in LAYOUTS:
            pairs = [
                (_figure(one, "step")["predicted"], one["step_s"])
                for one in found
                if (one["size"], one["ranks"]) == (size, ranks)
                and not any(key in one["name"] for key in EXPERTS)
            ]
            if len(pairs) > 1:
                predicted, measured = zip(*pairs, strict=True)
                correlation = statistics.correlation(_ranks(predicted), _ranks(measured))
                print(
                    f"step, {size}, {ranks} ranks: rank correlation of {len(pairs)} layouts {correlation:.2f}"
                )


def _report_growth(found: Sequence[dict[str, Any]]) -> None:
    errors = []
    for one in found:
        parts = [_figure(one, what)["predicted"] for what in (*STATE, ACTIVATIONS, WORKING)]
        errors.append(sum(parts) / one["growth"] - 1)
        print(
            f"{one['ranks']} {one['size']:5} {one['name'][:70]:70} grows {format_nbytes(sum(parts)):>9} "
            f"({format_nbytes(one['growth'])}) {errors[-1]:+.1%}"
        )
    sizes = [abs(error) for error in errors]
    within = sum(size <= 0.05 for size in sizes)
    print(
        f"growth of a process: median error {statistics.median(sizes):.1%}, largest {max(sizes):.1%}; "
        f"{within} of {len(sizes)} layouts within 5 %\n"
    )


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [float(ordered.index(value)) for value in values]


def _figure(one: dict[str, Any], what: str) -> dict[str, Any]:
    return next(line for line in one["prediction"]["figures"] if line["what"] == what)


def _largest(one: dict[str, Any], whats: Any) -> float:
    return max(abs(_figure(one, what)["error"] or 0.0) for what in whats)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["run", "grow", "report"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    if arguments.action == "run":
        run(arguments.file, arguments.steps)
    elif arguments.action == "grow":
        grow(arguments.file)
    else:
        report(arguments.file)


if __name__ == "__main__":
    main()
