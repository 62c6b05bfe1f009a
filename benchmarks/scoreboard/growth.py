"""Memory, descriptors, threads and shared memory over many steps; and whether anybody calls a stall.

    hpcpar run -n 8 benchmarks/scoreboard/growth.py --steps 10000 --json growth.jsonl

Every rank trains a small model by ZeRO-1 with clipping, asks after each step whether the job is to stop, and
on every hundredth compares the replicas. More ranks than cores wait for each other all the time: a warning in
that is a false alarm. Growth is that of resident memory (after garbage collection and malloc_trim) from the
second tenth of the steps to the last one, each the median of its samples, by the steps between them. The exit
status is 1 where it is 64 B or more on any rank, where something else became more, or after a warning.
`tests/soak.py` has collectives of all kinds.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

import hpcpar
from hpcpar.data_parallel import DistributedOptimizer

sys.path.append(str(Path(__file__).parents[1]))
from common import give_freed_memory_back

MOST_PER_STEP = 64
SAMPLES_PER_TENTH = 5


class Sample(NamedTuple):
    """A rank's process after so many steps; regions are those of shared memory."""

    steps: int
    nbytes: int
    descriptors: int
    threads: int
    regions: int


class Growth(NamedTuple):
    """Of one rank: bytes for each step, and how many more there were of the others at the end."""

    rank: int
    nbytes_per_step: float
    descriptors: int
    threads: int
    regions: int
    warnings: int

    @property
    def is_none(self) -> bool:
        return self.nbytes_per_step < MOST_PER_STEP and not any(each > 0 for each in self[2:])


class Warnings(logging.Handler):
    """Counts hpcpar's warnings, and keeps the first."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0
        self.first = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1
        self.first = self.first or record.getMessage()


def sample(steps: int) -> Sample:
    process = psutil.Process()
    gc.collect()
    give_freed_memory_back()
    shared = sum(region.path.startswith("/dev/shm") for region in process.memory_maps(grouped=False))
    return Sample(steps, process.memory_info().rss, process.num_fds(), process.num_threads(), shared)


def train(comm: hpcpar.Communicator, steps: int) -> list[Sample]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    inner = torch.optim.AdamW(model.parameters(), 1e-3)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, zero_stage=1)
    between = max(1, steps // (10 * SAMPLES_PER_TENTH))
    samples = []
    with hpcpar.Preemption(comm) as preemption:
        for step in range(1, steps + 1):
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if preemption.is_agreed():
                sys.exit(preemption.exit_status)
            if step % 100 == 0:
                optimizer.require_same_replicas()
            if step % between == 0:
                samples.append(sample(step))
    return samples


def growth(rank: int, samples: list[Sample], warnings: int) -> Growth:
    warm, end = samples[SAMPLES_PER_TENTH : 2 * SAMPLES_PER_TENTH], samples[-SAMPLES_PER_TENTH:]
    before, after = (
        [statistics.median(column) for column in zip(*each, strict=True)] for each in (warm, end)
    )
    more = [late - early for early, late in zip(before, after, strict=True)]
    return Growth(rank, more[1] / more[0], int(more[2]), int(more[3]), int(more[4]), warnings)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="also write each rank as a line of JSON")
    options = parser.parse_args()
    if options.steps < 10 * SAMPLES_PER_TENTH:
        parser.error(f"--steps {options.steps}: it takes {10 * SAMPLES_PER_TENTH} to tell growth")
    torch.set_num_threads(1)
    comm, warnings = hpcpar.init(), Warnings()
    logging.getLogger("hpcpar").addHandler(warnings)
    own = growth(comm.rank, train(comm, options.steps), warnings.count)
    found = comm.allgather_object((own, warnings.first))
    if comm.rank == 0:
        print(f"{options.steps:,} steps on {comm.size} ranks")
        print(f"{'rank':>4} {'B/step':>8} {'descriptors':>12} {'threads':>8} {'shared':>7} {'warnings':>9}")
        for each, first in found:
            print(
                f"{each.rank:>4} {each.nbytes_per_step:>8.1f} {each.descriptors:>+12} {each.threads:>+8} "
                f"{each.regions:>+7} {each.warnings:>9}  {first}".rstrip()
            )
        counted = Counter(each.is_none for each, _ in found)
        print(f"{counted[True]} of {comm.size} ranks do not grow (target: all, below {MOST_PER_STEP} B/step)")
        if options.json is not None:
            options.json.write_text("".join(json.dumps(each._asdict()) + "\n" for each, _ in found))
    sys.exit(not all(each.is_none for each, _ in found))


if __name__ == "__main__":
    main()
