"""Random programs of data_parallel/random_programs.py by Horovod's interface, in every stage."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import hpcpar.horovod.torch as hvd
from hpcpar.comm import Communicator
from tests.data_parallel.random_programs import World, assert_same, course_of, program_of

KINDS = ["0", "1", "1 overlapping", "2", "2 overlapping"]
SEEDS_OF_EACH = 2


class HorovodWorld(World):
    """Horovod's interface: backwards are declared, gradients waited for before somebody reads them."""

    def distributed(self, inner: torch.optim.Optimizer) -> Any:
        number, _, more = str(self.kind).partition(" ")
        options: dict[str, Any] = {}
        if number != "0":
            options = {"zero_stage": int(number), "model": self.model, "overlap_allgather": bool(more)}
        return hvd.DistributedOptimizer(inner, self.model.named_parameters(), **options)

    def whole(self) -> AbstractContextManager[None]:
        self.model.state_dict()  # waits
        return nullcontext()

    def backward(self, samples: int, seed: int, *, microbatches: int = 1, factor: float = 1.0) -> None:
        self.optimizer.set_backward_passes_per_step(microbatches)
        self.optimizer.no_sync = nullcontext
        super().backward(samples, seed, microbatches=microbatches, factor=factor)
        self.synchronized = self.kind == "0" or seed % 2 == 1
        if self.synchronized:
            self.optimizer.synchronize()

    def step(self) -> None:
        with self.optimizer.skip_synchronize() if self.synchronized else nullcontext():
            self.optimizer.step()
        self.synchronized = True

    def forget(self, how: str) -> None:
        """Horovod's own zero_grad() is an error while gradients are on their way."""
        super().forget(how if self.synchronized else how.replace("optimizer", "model"))

    def do_train(self, clip: str | None, **given: Any) -> Any:
        if self.kind == "0" and clip is not None and clip.startswith("optimizer"):
            clip = "value" if clip.endswith("value") else "torch"  # Horovod's own has no such method
        return super().do_train(clip=clip, **given)


def compare(kind: str, seed: int) -> None:
    expected = course_of(World(Communicator.alone(), None, seed), seed)
    ranks: Any = SimpleNamespace(rank=hvd.rank(), size=hvd.size())
    found = course_of(HorovodWorld(ranks, kind, seed), seed)
    everybodys: list[list[tuple[str, list[Tensor]]]] = hvd.allgather_object(found)
    for rank, course in enumerate(everybodys):
        assert_same(course, expected, f"rank {rank}, seed {seed}: {program_of(seed)}")


@pytest.mark.mpi
@pytest.mark.usefixtures("hvd")
@pytest.mark.parametrize("number", range(SEEDS_OF_EACH))
@pytest.mark.parametrize("kind", KINDS)
def test_a_random_program_computes_what_one_process_does(kind: str, number: int) -> None:
    compare(kind, 2000 + 10 * KINDS.index(kind) + number)


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("hvd")
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_random_programs_compute_what_one_process_does(kind: str) -> None:
    for number in range(100):
        compare(kind, 2 * 10**6 + 1000 * KINDS.index(kind) + number)
