"""A Llama whose sequences ranks share is the serial one, with targets on some ranks only, and packed."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcpar.autograd import Recompute
from hpcpar.comm import Communicator, run_loopback
from hpcpar.context_parallel import ContextParallel
from hpcpar.data_parallel import DistributedOptimizer, fully_shard, summon_full_parameters
from hpcpar.mesh import Mesh
from hpcpar.models import Llama, LlamaConfig, generate, parallel_layers
from hpcpar.models.initialise import initial_value
from hpcpar.tensor_parallel import RandomStreams, TensorParallel, gather_whole, own_shard
from hpcpar.training.sequences import Sequences
from hpcpar.training.training_step import WholeModel, train_step
from tests.grid import pairwise

SMALL = LlamaConfig(
    vocab_size=23,
    hidden_size=16,
    layers=2,
    heads=8,
    kv_heads=2,
    ffn_size=24,
    max_sequence=96,
    initial_std=0.3,
)
STEPS = 10
SAMPLES, SEQUENCE = 6, 16
END = 7
"""The token that ends a document."""

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.3, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
}


def batch() -> tuple[Tensor, Tensor]:
    """Tokens, and targets of which a rank of two, which holds the middle of each sequence, has none."""
    drawn = torch.randint(23, (2, SAMPLES, SEQUENCE), generator=torch.Generator().manual_seed(5))
    drawn[1, :, SEQUENCE // 4 : -SEQUENCE // 4] = -100
    drawn[1, 2:4] = -100  # and neither has any of these rows
    drawn[1, 0, 1] = -100
    return drawn[0], drawn[1]


def documents(tokens: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each document of each row by itself; the target of its end is the next one's start, and left out."""
    found = []
    for row, of_row in zip(tokens, targets.masked_fill(tokens == END, -100), strict=True):
        stops = [*((row == END).nonzero().flatten() + 1).tolist(), SEQUENCE]
        lengths = torch.diff(torch.tensor([0, *stops])).tolist()
        parts = zip(row.split(lengths), of_row.split(lengths), strict=True)
        found += [(part[None], of_part[None]) for part, of_part in parts if len(part)]
    return found


@cache
def train_serially(optimizer: str, *, packed: bool) -> dict[str, Tensor]:
    model = Llama(SMALL, seed=1).double()
    steps = OPTIMIZERS[optimizer](model.parameters())
    texts = documents(*batch()) if packed else [batch()]
    count = sum(int((targets != -100).sum()) for _, targets in texts)
    for _ in range(STEPS):
        steps.zero_grad()
        for tokens, targets in texts:
            (model.loss(model(tokens), targets, reduction="sum") / count).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        steps.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train(
    comm: Communicator,
    optimizer: str,
    axes: dict[str, int],
    method: str,
    *,
    sequence_parallel: bool = False,
    zero_stage: int = 0,
    mode: str = "none",
    microbatches: int = 1,
    packed: bool = False,
) -> dict[str, Tensor]:
    mesh = Mesh(comm, axes)
    tp = TensorParallel(mesh.tp, sequence_parallel=sequence_parallel)
    context = ContextParallel(mesh.cp, method, multiple=tp.size if sequence_parallel else 1)  # type: ignore[arg-type]
    layers = parallel_layers(SMALL, tp, context=context)
    seed = None if zero_stage == 3 else 1
    model = Llama(SMALL, layers, seed=seed, recompute=Recompute(mode)).double()  # type: ignore[arg-type]
    if zero_stage == 3:
        fully_shard(
            model, mesh.replicas, values=lambda name, p: own_shard(p, initial_value(SMALL, name, 1).double())
        )
    steps = DistributedOptimizer(
        OPTIMIZERS[optimizer](model.parameters()),
        model.named_parameters(),
        mesh.replicas,
        zero_stage=zero_stage,
    )
    tokens, targets = batch()
    sequences = Sequences(None, context, END if packed else None)
    targets = sequences.targets(tokens, targets)
    own = [half.chunk(mesh.dp.size)[mesh.dp.rank] for half in (tokens, targets)]
    if axes.get("cp") == 2 and not packed:
        with sequences.using(own[0]):
            assert (sequences.own_targets(own[1]) == 0) == (mesh.cp.rank == 1)
    worker = WholeModel(model, steps, microbatches, sequences)
    for _ in range(STEPS):
        train_step(worker, own[0], own[1], clip_norm=0.5)
    with summon_full_parameters(model):
        return {name: gather_whole(parameter).clone() for name, parameter in model.named_parameters()}


def require_same(found: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    assert found.keys() == truth.keys()
    for name, parameter in truth.items():
        torch.testing.assert_close(found[name], parameter, rtol=1e-10, atol=1e-10)


LAYOUTS: dict[str, dict[str, int]] = {
    "cp 2": {"cp": 2},
    "cp 4": {"cp": 4},
    "dp 2, cp 2": {"dp": 2, "cp": 2},
    "tp 2, cp 2": {"tp": 2, "cp": 2},
}


@pytest.mark.parametrize(
    ("layout", "zero_stage", "microbatches", "packed"),
    pairwise(LAYOUTS, (0, 1, 2, 3), (1, 3), (False, True)),
)
def test_training_is_that_of_the_serial_model(
    layout: str, zero_stage: int, microbatches: int, packed: bool
) -> None:
    axes = LAYOUTS[layout]
    size = 2 if layout == "cp 2" else 4
    options: dict[str, Any] = {"zero_stage": zero_stage, "microbatches": microbatches, "packed": packed}
    truth = train_serially("sgd", packed=packed)
    for found in run_loopback(size, lambda comm: train(comm, "sgd", axes, "exchange", **options)):
        require_same(found, truth)


@pytest.mark.parametrize(
    ("layout", "method", "mode", "sequence_parallel"),
    [
        ("cp 2", "ring", "selective", False),
        ("cp 2", "ulysses", "full", False),
        ("cp 4", "allgather", "full", False),
        ("cp 4", "ulysses", "selective", False),
        ("dp 2, cp 2", "allgather", "none", False),
        ("tp 2, cp 2", "ulysses", "none", True),
        ("tp 2, cp 2", "exchange", "full", True),
        ("tp 2, cp 2", "ring", "selective", True),
    ],
)
def test_by_every_method_adamw_and_recomputation_it_is_the_same(
    layout: str, method: str, mode: str, sequence_parallel: bool
) -> None:
    axes = LAYOUTS[layout]
    size = 2 if layout == "cp 2" else 4
    truth = train_serially("adamw", packed=True)
    options: dict[str, Any] = {"mode": mode, "sequence_parallel": sequence_parallel, "packed": True}
    for found in run_loopback(size, lambda comm: train(comm, "adamw", axes, method, **options)):
        require_same(found, truth)


@pytest.mark.parametrize("method", ["exchange", "ring", "allgather", "ulysses"])
def test_it_writes_the_same_text(method: str) -> None:
    tokens, _ = batch()
    serial = generate(Llama(SMALL, seed=1).double(), tokens[:2, :5], 6, seed=3)

    def written(comm: Communicator) -> Tensor:
        context = ContextParallel(comm, method)  # type: ignore[arg-type]
        layers = parallel_layers(SMALL, Communicator.alone(), context=context, streams=RandomStreams(0, 0))
        return generate(Llama(SMALL, layers, seed=1).double(), tokens[:2, :5], 6, seed=3)

    for text in run_loopback(4, written):
        assert text.tolist() == serial.tolist()


@pytest.mark.mpi
def test_over_mpi_training_is_that_of_the_serial_model(world: Communicator) -> None:
    found = train(world, "sgd", {"cp": world.size}, "exchange", zero_stage=3, microbatches=3, packed=True)
    require_same(found, train_serially("sgd", packed=True))
