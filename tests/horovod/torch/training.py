"""Trainings that the tests of DistributedOptimizer compare with one process that sees all ranks' rows.

Everything is in float64 and equal up to rounding. Ranks gather what they find and assert afterwards, so that
no rank fails alone while others wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import hpcpar.horovod.torch as hvd
from hpcpar.horovod.torch.compression import Compressor

ROUNDING = 1e-12
"""Sums in another order, over a few steps of values near 1."""
ROWS = 2
"""Samples of each rank in one batch."""
STEPS = 4

Make = Callable[[Any], Optimizer]
Share = Callable[[Tensor], Tensor]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "AdamW": lambda parameters: AdamW(parameters, lr=0.01, weight_decay=0.1),
}
sgd, adamw = OPTIMIZERS.values()
REDUCTIONS = {"Average": "mean", "Sum": "sum"}
"""Reduction of the loss that belongs to an operation on gradients."""


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(number: int) -> tuple[Tensor, Tensor]:
    """All ranks' rows and their targets."""
    generator = torch.Generator().manual_seed(number)
    rows = ROWS * hvd.size()
    return (
        torch.randn(rows, 6, generator=generator, dtype=torch.float64),
        torch.randn(rows, 3, generator=generator, dtype=torch.float64),
    )


def of_ranks(ranks: Sequence[int]) -> Share:
    return lambda rows: torch.cat([rows[ROWS * rank : ROWS * (rank + 1)] for rank in ranks])


def whole(rows: Tensor) -> Tensor:
    return rows


def part(rows: Tensor) -> Tensor:
    return of_ranks([hvd.rank()])(rows)


def rows_of(number: int, rank: int) -> tuple[Tensor, Tensor]:
    x, y = (rows[ROWS * rank : ROWS * (rank + 1)] for rows in batch(number))
    return x, y


def loss_of(model: nn.Module, number: int, rank: int) -> Tensor:
    x, y = rows_of(number, rank)
    return F.mse_loss(model(x), y)


def here() -> list[int]:
    return [hvd.rank()]


def all_ranks() -> list[int]:
    return list(range(hvd.size()))


def backward(model: nn.Module, share: Share, number: int, reduction: str = "mean") -> Tensor:
    x, y = batch(number)
    dtype = next(model.parameters()).dtype
    loss = F.mse_loss(model(share(x).to(dtype)), share(y).to(dtype), reduction=reduction)
    if reduction == "sum":
        loss = loss / 10  # so that steps are no larger than with the mean, and rounding neither
    loss.backward()
    return loss


def train(
    model: nn.Module,
    optimizer: Optimizer,
    share: Share,
    *,
    steps: range = range(STEPS),
    passes: int = 1,
    reduction: str = "mean",
) -> None:
    for step in steps:
        optimizer.zero_grad()
        for number in range(passes):
            backward(model, share, 10 * step + number, reduction)
        optimizer.step()


def train_on(
    model: nn.Module,
    optimizer: Optimizer,
    ranks: Sequence[int],
    loss: Callable[[Any, int, int], Tensor | None] = loss_of,
    *,
    steps: range = range(STEPS),
    passes: int = 1,
) -> None:
    """Train on the mean of the ranks' losses."""
    for step in steps:
        optimizer.zero_grad()
        for number in range(passes):
            for rank in ranks:
                found = loss(model, 10 * step + number, rank)
                if found is not None:
                    (found / len(ranks)).backward()
        optimizer.step()


def alone(make: Make = OPTIMIZERS["SGD"], seed: int = 0, **options: Any) -> tuple[nn.Sequential, Optimizer]:
    """One process that has all ranks' rows."""
    model = model_of(seed)
    optimizer = make(model.parameters())
    train(model, optimizer, whole, **options)
    return model, optimizer


def model_alone(make: Make = sgd, **options: Any) -> nn.Sequential:
    return alone(make, **options)[0]


def wrapped(make: Make = OPTIMIZERS["SGD"], seed: int = 0, **options: Any) -> tuple[nn.Sequential, Any]:
    model = model_of(seed)
    return model, hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **options)


class Branches(nn.Module):
    """Layers of which each rank uses some: "ab" are a and b."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.c, self.never = (nn.Linear(6, 3).double() for _ in range(4))

    def forward(self, x: Tensor, used: str) -> Tensor:
        return sum((getattr(self, name)(x) for name in used), start=torch.zeros(len(x), 3).double())


def bits(model: nn.Module) -> bytes:
    return b"".join(p.detach().flatten().view(torch.uint8).numpy().tobytes() for p in model.parameters())


def distance(model: nn.Module, reference: nn.Module) -> float:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max((own - other).abs().max().item() for own, other in pairs)


def assert_as_alone(model: nn.Module, reference: nn.Module, bound: float = ROUNDING) -> None:
    """Assert that parameters are those of one process, and on all ranks the same to the last bit."""
    told = hvd.allgather_object((distance(model, reference), bits(model)))
    assert max(far for far, _ in told) <= bound
    assert len({own for _, own in told}) == 1, "ranks differ"


Steps = Callable[[Any, Any, list[int]], Any]


def compare(
    steps: Steps,
    make: Make = sgd,
    build: Callable[[], nn.Module] = model_of,
    bound: float = ROUNDING,
    **options: Any,
) -> tuple[Any, Any, nn.Module]:
    """Hold steps(model, optimizer, ranks) of a wrapped optimizer on this rank to one process of all ranks.

    options   of DistributedOptimizer
    returns   what the steps returned here, what they returned in one process, and the model that was wrapped
    """
    model, reference = build(), build()
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **options)
    found = steps(model, optimizer, here())
    expected = steps(reference, make(reference.parameters()), all_ranks())
    assert_as_alone(model, reference, bound)
    return found, expected, model


Told = list[tuple[tuple[str, ...], str]]


def error_of(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def errors_everywhere(call: Callable[[], Any]) -> Told:
    """On every rank: the names of the error's types, and its message."""
    error = error_of(call)
    names = () if error is None else tuple(kind.__name__ for kind in type(error).__mro__)
    return hvd.allgather_object((names, str(error)))


def assert_errors(told: Told, kind: str, *words: str) -> None:
    for kinds, text in told:
        assert kind in kinds, text
        for word in words:
            assert word in text


def sum_of_ranks() -> float:
    """Return 0 + 1 + …: collectives go on working."""
    return hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum).item()


def expected_sum() -> float:
    return hvd.size() * (hvd.size() - 1) / 2


NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}


class EverySecond(Compressor):
    """Sends half of the values, in float32; the others count as zero."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor.flatten()[::2].float(), tensor

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        result = torch.zeros_like(ctx)
        result.view(-1)[::2] = tensor.to(ctx.dtype)
        return result
