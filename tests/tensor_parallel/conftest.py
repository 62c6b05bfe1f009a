"""Helpers of the tests of parallel layers: one layer on several ranks compared with the serial one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from hpcpar.comm import Communicator
from hpcpar.comm import run_loopback as run
from hpcpar.partition import bounds
from hpcpar.tensor_parallel import TensorParallel, gather_whole, own_shard

TOLERANCE = 1e-10
"""In float64: sums over ranks are taken in another order, and 10 steps carry the last bits on."""

STEPS = 10

WAYS: dict[str, dict[str, object]] = {
    "plain": {},
    "no overlap": {"overlap": False},
    "twice": {"twice": True},
    "sequence": {"sequence_parallel": True},
    "sequence, gather again": {"sequence_parallel": True, "gather_again": True},
    "sequence, chunks": {"sequence_parallel": True, "chunks": 2},
    "sequence, uneven chunks, gather again": {"sequence_parallel": True, "chunks": 5, "gather_again": True},
    "sequence, twice": {"sequence_parallel": True, "twice": True},
}
"""Every way in which layers communicate."""

OPTIMIZERS: dict[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Trained(NamedTuple):
    """Results of training a layer, all of them whole."""

    output: Tensor
    of_input: Tensor
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def draw(module: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Float64 values for all parameters of a serial layer; takes them, and returns them by name."""
    generator = torch.Generator().manual_seed(seed)
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def load(module: nn.Module, whole: dict[str, Tensor]) -> None:
    """This rank's shards of whole values, by name."""
    module.double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(own_shard(parameter, whole[name]))


def trained(
    layer: nn.Module,
    x: Tensor,
    optimizer: str = "sgd",
    *,
    enter: Callable[[Tensor], Tensor] = lambda x: x,
    whole_of: Callable[[Tensor], Tensor] = lambda part: part,
) -> Trained:
    """10 steps on a loss that every output counts in, differently; of the first one outputs and gradients."""
    steps = OPTIMIZERS[optimizer](list(layer.parameters()))
    first: tuple[Tensor, Tensor, dict[str, Tensor]] | None = None
    for _ in range(STEPS):
        steps.zero_grad()
        own = enter(x).detach().requires_grad_(x.is_floating_point())
        output = layer(own)
        weights = torch.linspace(-1, 1, output.shape[-1], dtype=output.dtype)
        ((output.square() * weights).sum() / 1000).backward()  # type: ignore[no-untyped-call]
        if first is None:
            of_input = torch.zeros(()) if own.grad is None else whole_of(own.grad)
            gradients = {
                name: gather_whole(p, p.grad) for name, p in layer.named_parameters() if p.grad is not None
            }
            first = whole_of(output.detach()), of_input, gradients
        steps.step()
    assert first is not None
    return Trained(*first, {name: gather_whole(p) for name, p in layer.named_parameters()})


def own_tokens(x: Tensor, tp: TensorParallel) -> Tensor:
    """Return this rank's part of [B, S, …] under sequence parallelism, else all of it."""
    if not tp.sequence_parallel:
        return x
    start, stop = bounds(x.shape[1], tp.size)[tp.rank]
    return x[:, start:stop]


def all_tokens(part: Tensor, tp: TensorParallel) -> Tensor:
    """Join the parts of all ranks. Collective."""
    gathered = tp.comm.allgather(part.detach().contiguous())
    return torch.cat(list(gathered.view(tp.size, *part.shape)), dim=1)


def require_same(found: Trained, serial: Trained) -> None:
    assert found.gradients.keys() == serial.gradients.keys()
    for mine, truth in (
        (found.output, serial.output),
        (found.of_input, serial.of_input),
        *((found.gradients[name], serial.gradients[name]) for name in serial.gradients),
        *((found.parameters[name], serial.parameters[name]) for name in serial.parameters),
    ):
        torch.testing.assert_close(mine, truth, rtol=TOLERANCE, atol=TOLERANCE)


def compare(
    size: int,
    serial: nn.Module,
    parallel: Callable[[TensorParallel], nn.Module],
    x: Tensor,
    way: str,
    optimizer: str,
    renamed: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda whole: whole,
) -> None:
    """A serial layer and its parallel form make the same of the same input [B, S, …] and first values."""
    whole = renamed(draw(serial))
    truth = trained(serial, x, optimizer)
    truth = truth._replace(gradients=renamed(truth.gradients), parameters=renamed(truth.parameters))

    def on_rank(comm: Communicator) -> Trained:
        tp = TensorParallel(comm, **WAYS[way])  # type: ignore[arg-type]
        layer = parallel(tp)
        load(layer, whole)
        return trained(
            layer,
            x,
            optimizer,
            enter=lambda x: own_tokens(x, tp) if x.is_floating_point() else x,
            whole_of=lambda part: part if part.shape[1] == x.shape[1] else all_tokens(part, tp),
        )

    for found in run(size, on_rank):
        require_same(found, truth)


SIZES = (1, 2, 3, 4)

Compare = Callable[..., None]


@pytest.fixture(name="compare")
def fixture_compare() -> Compare:
    return compare


@pytest.fixture(params=SIZES)
def size(request: pytest.FixtureRequest) -> int:
    """Number of ranks."""
    return int(request.param)
