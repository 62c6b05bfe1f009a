"""Train a model of your own as a pipeline: its layers divided over the ranks, by any schedule.

mpiexec -n 2 python examples/pipeline.py                              1F1B
mpiexec -n 2 python examples/pipeline.py --schedule zb-v              two stages on each rank, no bubble
mpiexec -n 2 python examples/pipeline.py --schedule gpipe --record gpipe.json
mpiexec -n 4 python examples/pipeline.py --pp 2                       two pipelines, gradients averaged

Prints each step's loss, which no schedule changes, and how the last step's idle time compares with what the
schedule promises for the times that its actions took.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import hpcpar
from hpcpar.mesh import Mesh
from hpcpar.pipeline_parallel import Pipeline, balanced
from hpcpar.pipeline_schedules import schedule_registry
from hpcpar.pipeline_schedules.pipeline_simulation import Durations, predicted
from hpcpar.pipeline_schedules.timetable import write_timetable

LAYERS, WIDTH, CLASSES = 8, 256, 10


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A model of one's own as a pipeline.")
    parser.add_argument("--pp", type=int, help="ranks that share the layers (default: all)")
    parser.add_argument("--schedule", default="1f1b", choices=schedule_registry.METHODS, metavar="NAME")
    parser.add_argument("--microbatches", type=int, default=8, help="(default: 8)")
    parser.add_argument("--batch", type=int, default=256, help="rows of each pipeline (default: 256)")
    parser.add_argument("--steps", type=int, default=20, help="(default: 20)")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="when the last step's actions ran, for `hpcpar draw pipeline`",
    )
    return parser.parse_args()


def layer(number: int) -> nn.Module:
    """One of LAYERS; the same on whichever rank it is made."""
    torch.manual_seed(number)
    out = CLASSES if number == LAYERS - 1 else WIDTH
    linear = nn.Linear(WIDTH, out)
    return nn.Sequential(nn.LayerNorm(WIDTH), linear) if out == CLASSES else nn.Sequential(linear, nn.GELU())


def batch(step: int, replica: int, rows: int) -> tuple[Tensor, Tensor]:
    """Rows to classify by the largest of their first CLASSES values."""
    inputs = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1000 * step + replica))
    return inputs, inputs[:, :CLASSES].argmax(1)


def main() -> None:
    """Every rank runs this; each builds only the layers of its own stages."""
    options = arguments()
    world = hpcpar.init()
    torch.set_num_threads(1)
    mesh = Mesh(world, pp=options.pp or world.size, dp=None)
    schedule = schedule_registry.make(
        options.schedule, mesh.pp.size, options.microbatches, durations=Durations()
    )
    split = balanced([1.0] * LAYERS, schedule.stages, schedule.rank_of_stage)
    stages = {
        stage: nn.Sequential(*(layer(number) for number in range(*split[stage])))
        for stage in schedule.stages_of(mesh.pp.rank)
    }

    named = [(f"{s}.{name}", p) for s, stage in stages.items() for name, p in stage.named_parameters()]
    optimizer = hpcpar.DistributedOptimizer(
        torch.optim.AdamW([parameter for _, parameter in named], lr=1e-3),
        named,
        mesh.dp,
        backward_passes_per_step=options.microbatches,  # averages travel while other stages still work
    )

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        # The mean, as all microbatches are equal; of unequal ones it would be sums times loss_factor.
        return functional.cross_entropy(outputs, targets) / options.microbatches

    pipeline = Pipeline(stages, schedule, mesh.pp, loss=loss)
    for step in range(options.steps):
        losses = pipeline.step(*batch(step, mesh.dp.rank, options.batch))
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if losses is not None and mesh.dp.rank == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1:3d}  loss {losses.sum().item():.4f}", flush=True)

    measured = pipeline.timetable()
    if world.rank == 0:
        found, promised = measured.bubble_rate, predicted(measured).bubble_rate
        print(
            f"{schedule.name}: {found:.1%} of the last step idle, of which the schedule says {promised:.1%}"
        )
        if options.record is not None:
            write_timetable(measured, options.record)


if __name__ == "__main__":
    main()
