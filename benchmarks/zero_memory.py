"""What each rank keeps in memory in each stage of ZeRO, measured, beside the formula.

    hpcpar run -n 4 benchmarks/zero_memory.py [--model 5m] [--precision bfloat16]
        [--offload DIRECTORY] [--shared-parameters] [--json FILE] [--output FILE]

In every stage some steps are trained, on communicators of their own within the same job. Then every rank
counts the bytes of its tensors, each storage once. Checked: on every rank the model state is the formula, up
to the padding of buckets, which is worked out, too; all ranks together hold the whole; and there is room for
two buckets on their way at most.

Beyond the model state, at most during a step:

    gradients on their way   two rooms as large as the largest bucket, and gradients that wait for one
    units in flight          stage 3: what is gathered at once, of so many units
    blocks from disk         with --offload: three blocks of the optimizer's state
    activations              what autograd keeps of a microbatch, the same in all stages

Beside it, what the process has more than before, as the system says: all but what is needed for a while.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import (
    add_options,
    add_picture_options,
    append_json,
    give_freed_memory_back,
    header,
    print_header,
    write_picture,
)
from memory_picture import draw
from rich.console import Console
from rich.table import Table

import hpcpar
from hpcpar.comm import Communicator
from hpcpar.data_parallel import (
    DistributedOptimizer,
    MemoryReport,
    fully_shard,
    memory_report,
    watch_activations,
)
from hpcpar.data_parallel.process_memory import process_memory
from hpcpar.data_parallel.staging import STAGING_BUFFERS
from hpcpar.launch import binding
from hpcpar.models import PRESETS, Llama, LlamaConfig, next_token_loss
from hpcpar.models.initialise import initial_value
from hpcpar.planner.memory import STATE
from hpcpar.units import MiB, format_nbytes

SEED = 0


@dataclass(frozen=True)
class Variant:
    stage: int
    name: str = "plain"
    offload: str | None = None
    common: bool = False


@dataclass
class Result:
    """What was measured.

    bucket_nbytes   of the largest bucket of gradients, or, in stage 3, of a unit's
    added_nbytes    by rank: the process's memory after the steps, when what is free has been given back, less
                    what it had before the model was built; of what processes have in common its share. None
                    where the system does not say
    """

    variant: Variant
    report: MemoryReport
    bucket_nbytes: int
    added_nbytes: list[int | None]
    loss: float

    def as_record(self) -> dict[str, Any]:
        return {
            "variant": self.variant.name,
            **self.report.as_record(every_rank=True),
            "bucket_nbytes": self.bucket_nbytes,
            "added_nbytes": self.added_nbytes,
            "loss": self.loss,
        }

    def faults(self) -> list[str]:
        """Return what contradicts the formula."""
        found = [
            f"rank {each.rank}: {float(each.unexplained_nbytes):.0f} bytes are neither formula nor padding"
            for each in self.report.of_ranks
            if each.unexplained_nbytes
        ]
        # Rounding to shards takes from one rank what it gives to another.
        lines = [line for each in self.report.of_ranks for line in each.state.values()]
        if sum(line.beyond_nbytes for line in lines) < 0:
            found.append("all ranks together hold less than the whole model state")
        rooms = max(each.staging_nbytes for each in self.report.of_ranks)
        if rooms > STAGING_BUFFERS * self.bucket_nbytes:
            found.append(
                f"rooms of {rooms} bytes, more than {STAGING_BUFFERS} buckets of {self.bucket_nbytes}"
            )
        return [f"{self.variant.stage} {self.variant.name}: {text}" for text in found]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Memory of each rank in each stage of ZeRO.")
    parser.add_argument("--model", default="5m", choices=PRESETS, help="size of the Llama (default: 5m)")
    parser.add_argument(
        "--precision", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="of parameters"
    )
    add_options(parser, sequence=64, batch=1, steps=3, json=None)
    parser.add_argument("--bucket-mib", type=float, default=1.0, help="of stages 0 to 2 (default: 1)")
    parser.add_argument(
        "--offload",
        type=Path,
        help="each stage also with the optimizer's state in files under this directory",
    )
    parser.add_argument(
        "--shared-parameters",
        action="store_true",
        help="stages 1 to 3 also with parameters that all ranks have in common",
    )
    add_picture_options(parser)
    return parser.parse_args()


def variants(offload: str | None, common: bool) -> list[Variant]:
    found = [Variant(stage) for stage in range(4)]
    if offload is not None:
        found += [Variant(stage, "state on disk", offload=offload) for stage in range(4)]
    if common:
        found += [Variant(stage, "parameters in common", common=True) for stage in range(1, 4)]
    return found


def build(
    comm: Communicator, variant: Variant, options: argparse.Namespace
) -> tuple[Llama, DistributedOptimizer]:
    config = LlamaConfig.preset(options.model)
    precision = None if options.precision == "float32" else options.precision
    if variant.stage == 3:
        with torch.device("meta"):
            model = Llama(config, seed=None)
        fully_shard(
            model,
            comm,
            precision=precision,
            shared_parameters=variant.common,
            values=lambda name, _: initial_value(config, name, SEED),
        )
    else:
        model = Llama(config, seed=SEED)
    bucket_bytes = round(options.bucket_mib * MiB)
    optimizer = DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        model.named_parameters(),
        comm,
        zero_stage=variant.stage,
        precision=None if variant.stage == 3 else precision,
        offload=variant.offload,
        shared_parameters=variant.common and variant.stage < 3,
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=bucket_bytes,
    )
    return model, optimizer


def measure(comm: Communicator, variant: Variant, options: argparse.Namespace) -> Result:
    before = settled_nbytes(comm)
    model, optimizer = build(comm, variant, options)
    generator = torch.Generator().manual_seed(comm.rank)
    shape = (options.batch, options.sequence + 1)
    tokens = torch.randint(model.config.vocab_size, shape, generator=generator)
    for _ in range(options.steps):
        with watch_activations(model) as activations:
            loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
            optimizer.scale_loss(loss).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    report = memory_report(model, optimizer, comm, activations=activations)
    value = loss.item()
    del loss
    after = settled_nbytes(comm)
    added = None if after is None or before is None else after - before
    bucket_nbytes = max(bucket.nbytes for bucket in optimizer.reducer.buckets)
    return Result(variant, report, bucket_nbytes, comm.allgather_object(added), value)


def settled_nbytes(comm: Communicator) -> int | None:
    """Return this process's memory with its share of shared memory, when all ranks have freed theirs."""
    gc.collect()
    give_freed_memory_back()
    comm.barrier()
    nbytes = process_memory().proportional_nbytes
    comm.barrier()
    return nbytes


def describe(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    return header(
        world,
        model=options.model,
        precision=options.precision,
        optimizer="AdamW",
        sequence=options.sequence,
        batch_per_rank=options.batch,
        steps=options.steps,
    )


def table(results: list[Result]) -> Table:
    """Format the bytes of the rank that needs most."""
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("stage", no_wrap=True)
    headings = (
        *STATE,
        "state",
        "formula",
        "padding",
        "on their way",
        "in flight",
        "from disk",
        "activations",
    )
    for heading in (*headings, "process"):
        shown.add_column(heading, justify="right")
    for result in results:
        worst = result.report.worst
        lines = worst.state.values()
        added = [nbytes for nbytes in result.added_nbytes if nbytes is not None]
        shown.add_row(
            f"{result.variant.stage}" + ("" if result.variant.name == "plain" else f" {result.variant.name}"),
            *(
                format_nbytes(line.nbytes) + ("*" if line.disk_nbytes else "^" if line.common_nbytes else "")
                for line in lines
            ),
            format_nbytes(float(worst.state_nbytes)),
            result.report.formula,
            f"{float(sum(line.padding_nbytes for line in lines)):.0f} B",
            format_nbytes(worst.peak_staging_nbytes),
            format_nbytes(worst.peak_gathered_nbytes) if worst.peak_gathered_units else "",
            format_nbytes(worst.peak_offload_nbytes) if worst.peak_offload_nbytes else "",
            format_nbytes(worst.peak_activations_nbytes or 0),
            format_nbytes(max(added)) if added else "",
        )
    return shown


def main() -> None:
    options = arguments()
    world = hpcpar.init()
    local_size = world.nodes.count(world.nodes[world.rank])
    torch.set_num_threads(max(1, len(binding.affinity()) // local_size))
    results = []
    with ExitStack() as cleanup:
        directory = None
        if options.offload is not None:
            with world.together(f"making {options.offload}"):
                options.offload.mkdir(parents=True, exist_ok=True)
                directory = cleanup.enter_context(tempfile.TemporaryDirectory(dir=options.offload))
        chosen = variants(directory, options.shared_parameters)
        # What torch, MPI and the C library make at their first use is charged to a round that is thrown away.
        for variant in (chosen[0], *chosen):
            gc.collect()
            give_freed_memory_back()
            comm = world.split(0, name=f"stage {variant.stage}")
            assert comm is not None, "every rank is in it"
            with comm:
                results.append(measure(comm, variant, options))
                gc.collect()
    del results[0]
    faults = [fault for result in results for fault in result.faults()]
    if world.rank == 0:
        report(describe(world, options), results, faults, options)
    world.barrier()
    if faults:
        raise SystemExit(1)


def report(
    about: dict[str, Any], results: list[Result], faults: list[str], options: argparse.Namespace
) -> None:
    print_header(about)
    print(
        "# of the rank that needs most; * on disk, ^ once for all ranks; on their way, in flight, from disk, "
        "activations: at most; process: afterwards beyond what it had before"
    )
    Console(width=170).print(table(results), soft_wrap=True)
    print("# WRONG" if faults else "# checked: model state on every rank is the formula and padding")
    for fault in faults:
        print(f"# {fault}")
    records = [{**about, **result.as_record()} for result in results]
    append_json(options.json, records)
    write_picture(options, lambda: draw(records))


if __name__ == "__main__":
    main()
