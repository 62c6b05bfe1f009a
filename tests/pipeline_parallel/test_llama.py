"""Ten optimizer steps of a Llama by every schedule are those of one process, parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.mesh import Mesh
from hpcpar.models import Layers, Llama, LlamaConfig, LlamaStages, parallel_layers
from hpcpar.pipeline_parallel import Pipeline, TiedWeights, balanced
from hpcpar.pipeline_schedules import schedule_registry
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.pipeline_schedules.pipeline_simulation import Durations
from hpcpar.tensor_parallel import TensorParallel, gather_whole
from tests.grid import WHOLE_GRID, checkered

STEPS, SEQUENCE = 10, 4


def config_for(schedule: Schedule) -> LlamaConfig:
    """Choose sizes that give each stage an item, and some stages several layers."""
    return LlamaConfig(
        7,
        8,
        layers=min(schedule.stages + 1, 6),
        heads=2,
        kv_heads=1,
        ffn_size=8,
        max_sequence=SEQUENCE,
        initial_std=0.2,
        tie_embeddings=True,
    )


OPTIMIZERS = ("sgd", "adamw")

Case = tuple[str, int, int, str]
"""schedule, ranks, microbatches, optimizer"""


def cases() -> Iterator[Case]:
    """Yield one case in nineteen: each schedule with each number of ranks, and many of microbatches."""
    number = 0
    for name in schedule_registry.METHODS:
        for ranks in (2, 3, 4):
            for microbatches in range(1, 9):
                for optimizer in OPTIMIZERS:
                    number += 1
                    if WHOLE_GRID or number % 19 == 0:
                        yield name, ranks, microbatches, optimizer


def inner(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    # A larger epsilon: near zero, Adam makes of rounding whatever it likes.
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)


def batch(step: int, sequences: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 7, (sequences, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


@cache
def serial(config: LlamaConfig, optimizer_name: str, sequences: int) -> tuple[dict[str, Tensor], list[float]]:
    """The parameters after all steps, and the losses."""
    model = Llama(config, seed=3).double()
    optimizer = inner(optimizer_name, list(model.parameters()))
    losses = []
    for step in range(STEPS):
        tokens, targets = batch(step, sequences)
        optimizer.zero_grad()
        loss = model.loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {name: value.detach() for name, value in model.named_parameters()}, losses


def pipelined(
    world: Communicator,
    schedule: Schedule,
    optimizer_name: str,
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
    zero_stage: int = 0,
) -> tuple[dict[str, Tensor], list[float] | None]:
    """The parameters of this rank's stages after all steps, whole, and the losses where they are known."""
    config = config_for(schedule)
    mesh = Mesh(world, pp=schedule.ranks, tp=tp)
    sequences = schedule.microbatches * mesh.dp.size
    layers = (
        Layers()
        if tp == 1
        else parallel_layers(config, TensorParallel(mesh.tp, sequence_parallel=sequence_parallel))
    )
    split = balanced([0.1, *config.layers * [1.0], 1.5], schedule.stages, schedule.rank_of_stage)
    model = LlamaStages(config, layers, split, schedule.stages_of(mesh.pp.rank), seed=3).double()
    tied = TiedWeights(mesh.pp, model.tied_parameters())
    copies = {id(copy) for copy in model.tied_parameters().values()}
    optimizer = DistributedOptimizer(
        inner(optimizer_name, list(model.parameters())),
        model.named_parameters(),
        mesh.dp,
        zero_stage=zero_stage,
        backward_passes_per_step=schedule.microbatches,
        tied={name: tied.counts_here(p) for name, p in model.named_parameters() if id(p) in copies},
    )

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return model.loss(logits, targets) / schedule.microbatches

    pipeline = Pipeline(model.stages, schedule, mesh.pp, loss=loss)
    losses = []
    for step in range(STEPS):
        tokens, targets = (each.chunk(mesh.dp.size)[mesh.dp.rank] for each in batch(step, sequences))
        found = pipeline.step(tokens, targets)
        tied.sum_gradients()
        optimizer.step()
        optimizer.zero_grad()
        if found is not None:
            losses.append(mesh.dp.allreduce(found.sum().reshape(1), "average").item())
    whole = {name: gather_whole(value).detach() for name, value in model.named_parameters()}
    return whole, losses or None


def require_serial(
    results: list[tuple[dict[str, Tensor], list[float] | None]],
    schedule: Schedule,
    optimizer: str,
    sequences: int,
) -> None:
    expected, expected_losses = serial(config_for(schedule), optimizer, sequences)
    missing = set(expected)
    embedding = "model.embed_tokens.weight"
    copies = []
    for parameters, losses in results:
        if losses is not None:
            assert losses == pytest.approx(expected_losses, abs=1e-10)
        for name, value in parameters.items():
            first = name if name in expected else embedding
            missing.discard(first)
            copies += [value] if first == embedding else []
            # float64: only the order of summation differs.
            torch.testing.assert_close(value, expected[first], rtol=0, atol=1e-10)
    assert not missing
    assert all(torch.equal(copy, copies[0]) for copy in copies)
    assert any(losses is not None for _, losses in results)


@pytest.mark.parametrize(("name", "ranks", "microbatches", "optimizer"), list(cases()))
def test_a_llama_is_trained_as_by_one_process(
    name: str, ranks: int, microbatches: int, optimizer: str
) -> None:
    schedule = schedule_registry.make(name, ranks, microbatches, durations=Durations(1, 1, 1))
    results = run_loopback(ranks, lambda comm: pipelined(comm, schedule, optimizer))
    require_serial(results, schedule, optimizer, microbatches)


BESIDE: dict[str, dict[str, int | bool]] = {
    "dp": {},
    "zero-1": {"zero_stage": 1},
    "tp": {"tp": 2},
    "tp-sp": {"tp": 2, "sequence_parallel": True},
}
"""What there is beside two stages."""


TWO_BY_TWO = checkered(("1f1b", "interleaved", "zb-h1", "zb-v"), BESIDE, OPTIMIZERS)


@pytest.mark.usefixtures("weights_small_or_as_if_large")
@pytest.mark.parametrize(("name", "beside", "optimizer"), TWO_BY_TWO)
def test_two_by_two_with_replicas_or_shared_layers(name: str, beside: str, optimizer: str) -> None:
    schedule, options = schedule_registry.make(name, 2, 3), BESIDE[beside]
    results = run_loopback(4, lambda comm: pipelined(comm, schedule, optimizer, **options))
    require_serial(results, schedule, optimizer, 3 if "tp" in options else 6)
