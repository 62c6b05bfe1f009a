"""DistributedOptimizer's steps while some ranks have joined, and trainings drawn at random.

What ranks find is gathered first and asserted after, so that no rank fails alone while others wait.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import hpcpar.horovod.torch as hvd
from tests.horovod.torch.training import (
    ROUNDING,
    EverySecond,
    all_ranks,
    assert_as_alone,
    distance,
    expected_sum,
    here,
    loss_of,
    model_alone,
    model_of,
    part,
    rows_of,
    sgd,
    sum_of_ranks,
    train,
    wrapped,
)

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("hvd")]


# Ranks without data


def join_reference(make: Callable[[Any], Optimizer], steps_of: list[int], passes: int) -> list[nn.Sequential]:
    """The model after each step: ranks that have joined bring zeros, and still count in the average."""
    model = model_of()
    optimizer = make(model.parameters())
    kept = [model_of()]
    for step in range(max(steps_of)):
        optimizer.zero_grad()
        for rank in [rank for rank in all_ranks() if steps_of[rank] > step]:
            for number in range(passes):
                (loss_of(model, 10 * step + number, rank) / hvd.size()).backward()
        optimizer.step()
        kept.append(model_of())
        kept[-1].load_state_dict(model.state_dict())
    return kept


STEPS_OF: dict[str, Callable[[int], int]] = {
    "rank 0 has none": lambda rank: 2 * rank,
    "the last one has none": lambda rank: 2 * (hvd.size() - 1 - rank),
    "all but rank 0 have one": lambda rank: 4 if rank == 0 else 1,
    "all have as many": lambda rank: 3,
    "nobody has any": lambda rank: 0,
}


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("steps_of", STEPS_OF.values(), ids=STEPS_OF)
def test_ranks_that_have_joined_bring_zeros_and_training_goes_on_afterwards(
    steps_of: Callable[[int], int], passes: int
) -> None:
    counts = [steps_of(rank) for rank in all_ranks()]
    model, optimizer = wrapped(backward_passes_per_step=passes)
    train(model, optimizer, part, steps=range(counts[hvd.rank()]), passes=passes)
    last = hvd.join()
    expected = join_reference(sgd, counts, passes)
    own = distance(model, expected[counts[hvd.rank()]])
    # All of them have the same again, and the same state, and go on together.
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    hvd.broadcast_optimizer_state(optimizer, root_rank=last)
    together = distance(model, expected[max(counts)])
    again = range(max(counts), max(counts) + 3)
    train(model, optimizer, part, steps=again, passes=passes)
    reference = model_of()
    other = sgd(reference.parameters())
    for step in range(again.stop):
        other.zero_grad()
        for rank in [rank for rank in all_ranks() if step in again or counts[rank] > step]:
            for number in range(passes):
                (loss_of(reference, 10 * step + number, rank) / hvd.size()).backward()
        other.step()
    assert_as_alone(model, reference)
    told = hvd.allgather_object((own, together, last))
    assert max(max(distances) for *distances, _ in told) <= ROUNDING
    assert {last for *_, last in told} == {last}
    assert counts[last] == max(counts)


def test_epochs_of_uneven_length_follow_each_other() -> None:
    def steps_of(epoch: int, rank: int) -> int:
        return 1 + (epoch * 7 + rank * 5) % 4

    model, optimizer = wrapped(lambda parameters: SGD(parameters, lr=0.05))
    reference = model_of()
    other = SGD(reference.parameters(), lr=0.05)
    lasts = []
    for epoch in range(5):
        for step in range(steps_of(epoch, hvd.rank())):
            optimizer.zero_grad()
            loss_of(model, 10 * epoch + step, hvd.rank()).backward()
            optimizer.step()
            hvd.allreduce(torch.ones(1))
            hvd.allreduce(torch.ones(1), name="metric")
        lasts.append(hvd.join())
        hvd.broadcast_parameters(model.state_dict(), root_rank=lasts[-1])
    for epoch in range(5):
        for step in range(4):
            active = [rank for rank in all_ranks() if steps_of(epoch, rank) > step]
            other.zero_grad()
            for rank in active:
                (loss_of(reference, 10 * epoch + step, rank) / hvd.size()).backward()
            if active:
                other.step()
    assert_as_alone(model, reference)
    assert hvd.allgather_object(lasts) == [lasts] * hvd.size()


@pytest.mark.parametrize(
    "options", [{"op": "Sum"}, {"compression": "fp16"}, {"compression": EverySecond}], ids=str
)
def test_joined_ranks_bring_zeros_with_every_way_of_reducing(options: dict[str, Any]) -> None:
    compression = options.get("compression", "none")
    chosen = getattr(hvd.Compression, compression) if isinstance(compression, str) else compression
    op = getattr(hvd, options.get("op", "Average"))
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(SGD([parameter], lr=1.0), compression=chosen, op=op)
    found = []
    for _ in range(hvd.rank()):
        optimizer.zero_grad()
        (parameter * 12).sum().backward()
        optimizer.step()
        found.append(parameter.grad.item())
    last = hvd.join()
    factor = 1.0 if op == hvd.Sum else 1.0 / hvd.size()
    expected = [12.0 * (hvd.size() - 1 - step) * factor for step in range(hvd.rank())]
    assert found == pytest.approx(expected, rel=1e-3)
    assert last == hvd.size() - 1


def test_a_joined_rank_does_its_part_for_two_optimizers_and_unused_parameters() -> None:
    models = [model_of(0), model_of(1)]
    optimizers = [hvd.DistributedOptimizer(sgd(model.parameters())) for model in models]
    references = [model_of(0), model_of(1)]
    others = [sgd(model.parameters()) for model in references]
    for step in range(1 + hvd.rank()):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model[0](rows_of(step, hvd.rank())[0]).square().mean().backward()
        for optimizer in reversed(optimizers):
            optimizer.step()
    hvd.join()
    for step in range(hvd.size()):
        for model, other in zip(references, others, strict=True):
            other.zero_grad()
            for rank in range(step, hvd.size()):
                (model[0](rows_of(step, rank)[0]).square().mean() / hvd.size()).backward()
            other.step()
    for model, reference in zip(models, references, strict=True):
        hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
        assert_as_alone(model, reference)


@pytest.mark.parametrize("least", [1, 0], ids=["after some steps", "before its first step"])
def test_a_joined_rank_brings_zeros_also_for_optimizers_that_it_has_let_go(least: int) -> None:
    parameter = nn.Parameter(torch.zeros(2))

    def epoch(steps: int) -> list[float]:
        optimizer = hvd.DistributedOptimizer(SGD([parameter], lr=1.0), [("p", parameter)])
        found = []
        for _ in range(steps):
            optimizer.zero_grad()
            (parameter * hvd.size()).sum().backward()
            optimizer.step()
            found.append(parameter.grad[0].item())
        return found

    found, expected = [], []
    for number in range(3):
        counts = [least + (number + rank) % 3 for rank in all_ranks()]
        found += epoch(counts[hvd.rank()])
        hvd.join()
        expected += [sum(count > step for count in counts) for step in range(counts[hvd.rank()])]
    assert found == expected


def test_named_and_unnamed_collectives_and_steps_go_on_after_a_join() -> None:
    model, optimizer = wrapped()
    sums = []
    for epoch in range(3):
        handles = [hvd.allreduce_async(torch.ones(1), name=name, op=hvd.Sum) for name in "ab"]
        handles.append(hvd.allreduce_async(torch.ones(1), op=hvd.Sum))
        train(model, optimizer, part, steps=range(epoch, epoch + 1))
        sums += [hvd.synchronize(handle).item() for handle in handles]
        hvd.join()
    assert_as_alone(model, model_alone(steps=range(3)))
    assert sums == [hvd.size()] * 9


@pytest.mark.parametrize("taken", [0, 1], ids=["in the first step", "in a later step"])
@pytest.mark.parametrize("what", ["sparse gradients", "Adasum"])
def test_what_cannot_be_reduced_with_a_joined_rank_is_an_error_that_changes_nothing(
    what: str, taken: int, needs_two: None
) -> None:
    if what == "Adasum" and hvd.size() == 3:
        pytest.skip("Adasum is for powers of two")
    table = nn.Embedding(5, 2, sparse=what != "Adasum")
    op = hvd.Adasum if what == "Adasum" else hvd.Average
    optimizer = hvd.DistributedOptimizer(SGD(table.parameters(), lr=1.0), table.named_parameters(), op=op)

    def step() -> None:
        optimizer.zero_grad()
        table(torch.tensor([1])).sum().backward()
        optimizer.step()

    for _ in range(taken):
        step()
    told = None
    before = table.weight.tolist()
    if hvd.rank() > 0:
        with pytest.raises(hvd.HorovodInternalError) as caught:
            step()
        told = str(caught.value)
    after = table.weight.tolist()
    hvd.join()
    working = sum_of_ranks()
    assert told is None or "rank 0 had joined" in told
    assert after == before
    assert working == expected_sum()


@pytest.mark.parametrize("taken", [0, 1], ids=["in the first step", "in a later step"])
def test_who_has_joined_brings_zeros_to_sparse_gradients_that_travel_as_dense_ones(taken: int) -> None:
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(SGD(table.parameters(), lr=0.0), sparse_as_dense=True)
    found = []
    for _ in range(taken + (hvd.rank() > 0)):
        optimizer.zero_grad()
        table(torch.tensor([1, hvd.rank() % 5])).sum().backward()
        optimizer.step()
        found.append(table.weight.grad.to_dense()[1, 0].item())
    hvd.join()
    with_row_1 = sum(1 + (rank % 5 == 1) for rank in all_ranks()) / hvd.size()
    expected = [with_row_1] * taken + [with_row_1 - 1 / hvd.size()] * (hvd.rank() > 0)
    assert found == pytest.approx(expected)


def test_large_gradients_of_a_joined_rank_are_out_of_the_way_when_the_next_epoch_begins() -> None:
    parameter = nn.Parameter(torch.zeros(300_000))
    optimizer = hvd.DistributedOptimizer(SGD([parameter], lr=0.0))
    wrong = []
    for epoch in range(8):
        for _ in range(2 if (hvd.rank() + epoch) % 2 else 1):
            optimizer.zero_grad()
            parameter.sum().backward()
            optimizer.step()
        hvd.join()
        optimizer.zero_grad()
        (parameter.sum() * (epoch + hvd.rank())).backward()
        optimizer.step()
        expected = epoch + (hvd.size() - 1) / 2
        wrong.append(int((parameter.grad != expected).sum()))
        hvd.barrier()
    assert wrong == [0] * 8


# Any training


@dataclass(frozen=True)
class Program:
    """A training drawn at random, the same on all ranks; `trainings` optimizers step in a common loop."""

    trainings: int
    passes: int
    op: str
    options: dict[str, Any]
    set_to_none: bool
    steps_of: tuple[tuple[int, ...], ...]

    @classmethod
    def drawn(cls, seed: int) -> Program:
        draw = random.Random(seed)
        op = draw.choice(["Average", "Sum"])
        predivide = {"gradient_predivide_factor": 3.0} if op == "Average" and draw.random() < 0.5 else {}
        return cls(
            trainings=draw.choice([1, 2]),
            passes=draw.choice([1, 2, 3]),
            op=op,
            options={"groups": draw.choice([None, 1, 2]), **predivide},
            set_to_none=draw.random() < 0.5,
            steps_of=tuple(tuple(draw.randrange(4) for _ in all_ranks()) for _ in range(2)),
        )

    def losses(self, models: list[Any], rank: int, seed: str) -> Iterator[Tensor]:
        """One for each model that this rank uses in this pass: some of its layers."""
        draw = random.Random(f"{seed} {rank}")
        for model in models:
            used = [layer for layer in model if draw.random() < 0.4]
            x = torch.tensor([[draw.gauss(0, 1) for _ in range(4)]], dtype=torch.float64)
            if used:
                yield sum(layer(x) for layer in used).square().mean()

    def run(
        self,
        models: list[Any],
        optimizers: list[Any],
        ranks: list[int],
        scale: float = 1.0,
        after_epoch: Callable[[list[Any]], None] = lambda models: None,
    ) -> None:
        """Run the part of these ranks."""
        for epoch, counts in enumerate(self.steps_of):
            for step in range(max(counts[rank] for rank in ranks)):
                for optimizer in optimizers:
                    optimizer.zero_grad(set_to_none=self.set_to_none)
                for number in range(self.passes):
                    for rank in ranks:
                        if counts[rank] > step:
                            for loss in self.losses(models, rank, f"{epoch} {step} {number}"):
                                (loss * scale).backward()
                for optimizer in optimizers[:: -1 if step % 2 else 1]:
                    optimizer.step()
            after_epoch(models)


def joined_and_together_again(models: list[Any]) -> None:
    last = hvd.join()
    for model in models:
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)


@pytest.mark.parametrize("seed", range(6))
def test_any_training_is_that_of_one_process(seed: int) -> None:
    program = Program.drawn(seed)

    def made() -> list[nn.ModuleList]:
        torch.manual_seed(seed)
        return [nn.ModuleList(nn.Linear(4, 4).double() for _ in range(5)) for _ in range(program.trainings)]

    models, references = made(), made()
    optimizers = [
        hvd.DistributedOptimizer(
            SGD(model.parameters(), lr=0.05),
            model.named_parameters(),
            op=getattr(hvd, program.op),
            backward_passes_per_step=program.passes,
            **program.options,
        )
        for model in models
    ]
    program.run(models, optimizers, here(), after_epoch=joined_and_together_again)
    scale = 1.0 / hvd.size() if program.op == "Average" else 1.0
    program.run(references, [SGD(model.parameters(), lr=0.05) for model in references], all_ranks(), scale)
    for model, reference in zip(models, references, strict=True):
        assert_as_alone(model, reference)
