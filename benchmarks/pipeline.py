"""Pipelines: hpcpar's beside torch's; and beside what their schedules promise.

    mpiexec -n 2 python benchmarks/pipeline.py peers [--hidden 256] [--layers 8] [--peers …]
    mpiexec -n 4 python benchmarks/pipeline.py sleep [--forward-ms 50] [--backward-ms 50] [--weight-ms 50]
    mpiexec -n 2 python benchmarks/pipeline.py layers [--hidden 256] [--schedules gpipe zb-v …]

peers    Everybody trains the same Llama on the same tokens, in the same microbatches, strictly in turn: in
         every round each takes some steps while nothing else runs, so that a noisy machine touches all.

             hpcpar gpipe, 1f1b, interleaved, zb-h1, zb-v     Pipeline over MPI, stages balanced by time
             hpcpar even gpipe, …                             the same with as many layers in every stage
             torch gpipe, …                                   torch.distributed.pipelining over gloo, even
             one process                                      rank 0 alone, one microbatch after another

         A step is all microbatches and the optimizer, from a barrier on, on the slowest rank.

sleep    Stages whose forward, backward and weights' part sleep for a time: every schedule of the registry
         beside its price, with more ranks than cores, too. The times are those of a stage, so that ranks
         with several have more to do. What is above the price is sleep that lasts too long (0.1 ms or
         more, every time), messages, and what the executor does with a cold core.

layers   Stages of a Llama, balanced. F, B and W of every stage are measured alone, in turn with the steps of
         the pipeline; the schedule is priced with them, and bubbles are compared.

Each rank has one thread unless said otherwise. A benchmark asserts no speed: what is hoped for is a column.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import training
from common import add_options, at_least, give_up, header
from pipeline_peers import (
    PHASES,
    PIPELINE,
    PipelinePeer,
    PipelineTask,
    live_nbytes,
    schedule_of,
)
from pipeline_report import (
    PipelineResult,
    print_durations,
    report_comparisons,
    report_peers,
    write_comparisons,
)
from pipeline_times import Asleep, Comparison, Seconds, Stopwatch, Work, compare, sleeping
from training import ADAMW, TOLERANCES, make_config, those_that_can
from training_peers import build
from training_report import write_json, wrong

import hpcpar
from hpcpar.comm import Communicator
from hpcpar.errors import ConfigError, LayoutError, ScheduleError
from hpcpar.models import Layers
from hpcpar.models.llama_stages import measured_costs
from hpcpar.pipeline_schedules import schedule_registry
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.pipeline_schedules.pipeline_simulation import Durations

SLEEP_TOLERANCE = 0.05
"""Hoped for: a step that takes at most this much more or less than its price."""

BUBBLE_TOLERANCE = 0.1
"""Hoped for: a bubble rate that is at most this much larger or smaller than priced."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pipelines beside their peers and their prices.")
    parts = parser.add_subparsers(dest="part", required=True)
    job = argparse.ArgumentParser(add_help=False)
    job.add_argument("--microbatches", type=at_least(1), default=8, help="of a step (default: 8)")
    add_options(job, threads=1, json=None)
    model = argparse.ArgumentParser(add_help=False)
    # The rest is as of this preset: twice as many heads as of keys, ffn of 3 times the hidden size.
    model.set_defaults(model="5m", forward_only=False)
    model.add_argument("--hidden", type=int, default=256, help="a multiple of 64 (default: 256)")
    model.add_argument("--layers", type=int, default=8, help="(default: 8)")
    model.add_argument("--vocabulary", type=int, default=8192, help="(default: 8192)")
    model.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    add_options(model, sequence=128, batch=1, stages_per_rank=2)
    catalogued = argparse.ArgumentParser(add_help=False)
    catalogued.add_argument(
        "--schedules",
        nargs="+",
        choices=list(schedule_registry.METHODS),
        metavar="NAME",
        help=f"of {', '.join(schedule_registry.METHODS)} (default: all that can be made so)",
    )
    catalogued.add_argument(
        "--output", type=Path, help="a picture (.png, .svg, .pdf): priced beside measured"
    )

    peers = parts.add_parser("peers", parents=[job, model], help="beside torch.distributed.pipelining")
    add_options(peers, rounds=5, steps=1)
    peers.add_argument(
        "--peers",
        nargs="+",
        choices=list(PIPELINE),
        metavar="PEER",
        help="by name, see above (default: all but those of hpcpar with even stages)",
    )
    sleep = parts.add_parser("sleep", parents=[job, catalogued], help="stages that sleep, beside the price")
    for kind, what in (("forward", "F"), ("backward", "B without W"), ("weight", "W")):
        sleep.add_argument(f"--{kind}-ms", type=float, default=50.0, help=f"{what} of a stage (default: 50)")
    add_options(sleep, stages_per_rank=2, steps=3)
    layers = parts.add_parser("layers", parents=[job, model, catalogued], help="a Llama's, beside the price")
    add_options(layers, steps=7)
    layers.add_argument(
        "--repeats", type=at_least(1), default=3, help="of each stage alone, before every step (default: 3)"
    )
    return parser.parse_args()


def make_task(world: Communicator, options: argparse.Namespace) -> PipelineTask:
    """Make the task, with measured costs; ConfigError for a model that makes no sense. Collective."""
    config = replace(make_config(options), vocab_size=options.vocabulary, max_sequence=options.sequence)
    dtype = getattr(torch, options.dtype)
    own = measured_costs(config, Layers(), microbatch=options.batch, sequence=options.sequence, dtype=dtype)
    everyone = world.allgather_object(own)
    return PipelineTask(
        world=world,
        peers=PIPELINE,
        config=config,
        dtype=dtype,
        start_dtype=dtype,
        sequence=options.sequence,
        batch=options.batch,
        bucket_bytes=None,
        microbatches=options.microbatches,
        stages_per_rank=options.stages_per_rank,
        costs=tuple(map(statistics.mean, zip(*everyone, strict=True))),
    )


# --- beside torch -----------------------------------------------------------------------------------


def run_peers(world: Communicator, options: argparse.Namespace) -> None:
    if options.microbatches % world.size or options.microbatches < 2 * world.size:
        raise ConfigError(
            f"--microbatches {options.microbatches} on {world.size} ranks: what all schedules take is a "
            f"multiple of the ranks, from {2 * world.size} on"
        )
    task = make_task(world, options)
    task.even(world.size * max(2, options.stages_per_rank))  # LayoutError for too few layers, before any peer
    with ExitStack() as cleanup:
        usual = [name for name in task.peers if not name.startswith("hpcpar even")]
        asked = list(dict.fromkeys(options.peers or usual))
        names = those_that_can(asked, task, cleanup, were_named=bool(options.peers))
        results = measure(names, task, options)
        about = {
            **header(world, part=options.part, microbatches=options.microbatches),
            **described(task, options),
            "tolerance": TOLERANCES[options.dtype],
        }
        if world.rank == 0:
            report_peers(about, results)
            write_json(options.json, about, results)
    if any(wrong(result, about) for result in results):
        give_up(world, "a peer computes something else than one process: see WRONG above")


def measure(names: Sequence[str], task: PipelineTask, options: argparse.Namespace) -> list[PipelineResult]:
    """Check, weigh and time the peers; collective."""
    splits, live = {}, {}
    for name in names:
        peer: Any = build(name, task, ADAMW)
        split = peer.split if isinstance(peer, PipelinePeer) else [(0, task.config.layers + 2)]
        splits[name] = [stop - start for start, stop in split]
        live[name] = task.world.allgather_object(live_nbytes(peer))
        del peer
    return [
        PipelineResult(**vars(result), split=splits[result.peer], live_nbytes=live[result.peer])
        for result in training.measure(names, task, options, phases=PHASES)
    ]


# --- beside the price -------------------------------------------------------------------------------


def run_sleep(world: Communicator, options: argparse.Namespace) -> None:
    seconds = Seconds(options.forward_ms / 1e3, options.backward_ms / 1e3, options.weight_ms / 1e3)

    def run(name: str) -> Comparison:
        schedule = made(name, world, options, Durations(*seconds))
        return compare(world, schedule, sleeping(world, schedule, seconds), Asleep(seconds), options.steps)

    about = {
        **header(world, part=options.part, microbatches=options.microbatches),
        "forward_ms": options.forward_ms,
        "backward_ms": options.backward_ms,
        "weight_ms": options.weight_ms,
        "steps": options.steps,
        "tolerance": SLEEP_TOLERANCE,
        "criterion": f"step within {SLEEP_TOLERANCE:.0%} of its price",
    }
    report_all(world, options, about, compared(world, options, run))


def run_layers(world: Communicator, options: argparse.Namespace) -> None:
    task = make_task(world, options)
    hidden = torch.randn(
        options.batch, options.sequence, options.hidden, dtype=task.dtype, requires_grad=True
    )

    def run(name: str) -> Comparison:
        schedule = made(name, world, options, Durations())
        stages = task.stages(task.balanced(schedule), schedule.stages_of(world.rank))
        work = Work(stages.stages, stages.loss, *task.own_share())
        clock = Stopwatch(world, schedule, work, hidden, options.repeats)
        clock.look()
        # One that is made for given durations has been made for others until here.
        schedule = made(name, world, options, clock.durations())
        return compare(world, schedule, work, clock, options.steps)

    about = {
        **header(world, part=options.part, microbatches=options.microbatches),
        **described(task, options),
        "steps": options.steps,
        "repeats": options.repeats,
        "tolerance": BUBBLE_TOLERANCE,
        "criterion": f"bubble rate within {BUBBLE_TOLERANCE:.0%} of the priced one",
    }
    report_all(world, options, about, compared(world, options, run))


def made(name: str, world: Communicator, options: argparse.Namespace, durations: Durations) -> Schedule:
    return schedule_of(name, world.size, options.microbatches, options.stages_per_rank, durations)


def compared(
    world: Communicator, options: argparse.Namespace, run: Callable[[str], Comparison]
) -> list[Comparison]:
    """Run all schedules that were asked for, or that can be made; print which are left out."""
    comparisons = []
    for name in options.schedules or schedule_registry.METHODS:
        try:
            comparisons.append(run(name))
        except (ScheduleError, LayoutError) as error:
            if options.schedules:
                raise
            if world.rank == 0:
                print(f"# left out: {name}: {error}")
    return comparisons


def report_all(
    world: Communicator,
    options: argparse.Namespace,
    about: dict[str, Any],
    comparisons: Sequence[Comparison],
) -> None:
    if world.rank != 0:
        return
    report_comparisons(about, comparisons)
    if options.part == "layers":
        print_durations(comparisons)
    write_comparisons(options.json, about, comparisons)
    if options.output is not None:
        draw(options.output, comparisons)


def draw(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Draw every schedule's timetable as priced, and below it as measured."""
    from hpcpar.cli.draw_pipeline import Panel, figure_of
    from hpcpar.cli.picture import Output, save

    panels = [
        Panel(f"{each.schedule.name}, {how}", timetable)
        for each in comparisons
        for how, timetable in (("priced", each.predicted), ("measured", each.measured))
    ]
    save(figure_of(panels), Output(path))


# --- what the figures are of ------------------------------------------------------------------------


def described(task: PipelineTask, options: argparse.Namespace) -> dict[str, Any]:
    embedding, layer, *_, head = (round(cost * 1e3, 2) for cost in task.costs)
    return {
        "hidden": task.config.hidden_size,
        "layers": task.config.layers,
        "vocabulary": task.config.vocab_size,
        "parameters": task.config.parameters(),
        "sequence": task.sequence,
        "sequences_per_microbatch": task.batch,
        "dtype": options.dtype,
        "costs_ms": [embedding, layer, head],
    }


PARTS = {"peers": run_peers, "sleep": run_sleep, "layers": run_layers}


def main() -> None:
    options = arguments()
    world = hpcpar.init()
    torch.set_num_threads(options.threads)
    try:
        PARTS[options.part](world, options)
    except (ConfigError, LayoutError, ScheduleError) as error:
        give_up(world, str(error))


if __name__ == "__main__":
    main()
