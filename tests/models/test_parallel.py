"""A Llama that ranks compute together is the serial one: loss, every gradient, and training."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hpcpar.autograd import Recompute
from hpcpar.comm import Communicator
from hpcpar.comm import run_loopback as run
from hpcpar.data_parallel import DistributedOptimizer, fully_shard, summon_full_parameters
from hpcpar.errors import LayoutError
from hpcpar.mesh import Mesh
from hpcpar.models import Llama, LlamaConfig, generate, parallel_layers
from hpcpar.models.initialise import initial_value
from hpcpar.tensor_parallel import RandomStreams, TensorParallel, gather_whole, own_shard
from tests.grid import checkered, pairwise

TOLERANCE = 1e-10
"""In float64: sums over ranks are taken in another order, and 10 steps carry the last bits on."""

SMALL = LlamaConfig(
    vocab_size=23,
    hidden_size=16,
    layers=2,
    heads=12,
    head_size=2,
    ffn_size=24,
    max_sequence=16,
    initial_std=0.3,
)
STEPS = 10
SAMPLES, SEQUENCE = 4, 12
SEQUENTIAL: dict[str, Any] = {"sequence_parallel": True}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence": SEQUENTIAL,
    "sequence, again, chunks": {**SEQUENTIAL, "gather_again": True, "chunks": 2},
}
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.5, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
}


def config_for(kv_heads: int, *, tied: bool = False) -> LlamaConfig:
    return replace(SMALL, kv_heads=kv_heads, tie_embeddings=tied)


def batch() -> tuple[Tensor, Tensor]:
    drawn = torch.randint(23, (2, SAMPLES, SEQUENCE), generator=torch.Generator().manual_seed(5))
    drawn[1, 0, 3] = -100
    return drawn[0], drawn[1]


class Trained(NamedTuple):
    """Loss and gradients of the first step, each step's norm, parameters at the end; all of it whole."""

    loss: Tensor
    gradients: dict[str, Tensor]
    norms: list[float]
    parameters: dict[str, Tensor]


@cache
def train_serially(config: LlamaConfig, optimizer: str, clip: float = math.inf) -> Trained:
    model = Llama(config, seed=1).double()
    steps = OPTIMIZERS[optimizer](model.parameters())
    tokens, targets = batch()
    first, norms = None, []
    for _ in range(STEPS):
        steps.zero_grad()
        loss = model.loss(model(tokens), targets, reduction="sum") / 50
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        first = first or (loss.detach(), gradients)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        steps.step()
    assert first is not None
    return Trained(*first, norms, {name: p.detach() for name, p in model.named_parameters()})


def build(config: LlamaConfig, tp: TensorParallel, dp: Communicator, mode: str, zero_stage: int) -> Llama:
    layers = parallel_layers(config, tp)
    again = Recompute(mode)  # type: ignore[arg-type]
    if zero_stage < 3:
        model = Llama(config, layers, seed=1, recompute=again).double()
        return model
    model = Llama(config, layers, seed=None, recompute=again).double()
    fully_shard(model, dp, values=lambda name, p: own_shard(p, initial_value(config, name, 1).double()))
    return model


def train(
    config: LlamaConfig,
    tp: TensorParallel,
    dp: Communicator,
    optimizer: str,
    *,
    mode: str = "none",
    zero_stage: int = 0,
    clip: float = math.inf,
) -> Trained:
    model = build(config, tp, dp, mode, zero_stage)
    steps = DistributedOptimizer(
        OPTIMIZERS[optimizer](model.parameters()),
        model.named_parameters(),
        dp,
        zero_stage=zero_stage,
    )
    tokens, targets = (half.chunk(dp.size)[dp.rank] for half in batch())
    first, norms = None, []
    for _ in range(STEPS):
        steps.zero_grad()
        loss = model.loss(model(tokens), targets, reduction="sum") / 50
        (loss * dp.size).backward()  # type: ignore[no-untyped-call]
        steps.synchronize()
        if first is None:
            gradients = {}
            if not zero_stage:
                gradients = {name: gather_whole(p, p.grad) for name, p in model.named_parameters()}
            first = dp.allreduce(loss.detach().clone()), gradients
        norms.append(float(steps.clip_grad_norm_(clip)))
        steps.step()
    with summon_full_parameters(model):
        whole = {name: gather_whole(p) for name, p in model.named_parameters()}
    assert first is not None
    return Trained(*first, norms, whole)


def require_same(found: Trained, truth: Trained) -> None:
    close = partial(torch.testing.assert_close, rtol=TOLERANCE, atol=TOLERANCE)
    close(found.loss, truth.loss)
    for name, gradient in found.gradients.items():
        close(gradient, truth.gradients[name])
    close(torch.tensor(found.norms), torch.tensor(truth.norms))
    assert found.parameters.keys() == truth.parameters.keys()
    for name, parameter in truth.parameters.items():
        close(found.parameters[name], parameter)


HEADS = [(1, 4), (2, 4), (2, 1), (3, 3), (3, 1), (4, 4), (4, 2)]
"""Ranks and key-value heads: as many, more, and fewer that ranks share."""

ONE_OF_EACH_SIZE = [(1, 4), (2, 4), (3, 3), (4, 2)]


@pytest.mark.parametrize(
    ("heads", "mode", "way"),
    [
        *((heads, "none", way) for heads, way in checkered(HEADS, WAYS)),
        *pairwise(ONE_OF_EACH_SIZE, ("selective", "full"), WAYS)[::2],
    ],
)
def test_training_is_that_of_the_serial_model(heads: tuple[int, int], mode: str, way: str) -> None:
    size, kv_heads = heads
    config = config_for(kv_heads, tied=way == "plain")
    truth = train_serially(config, "sgd", clip=0.5)

    def on_rank(comm: Communicator) -> Trained:
        tp = TensorParallel(comm, **WAYS[way])
        return train(config, tp, Communicator.alone(), "sgd", mode=mode, clip=0.5)

    for found in run(size, on_rank):
        require_same(found, truth)


@pytest.mark.parametrize(("heads", "way"), checkered([(2, 4), (3, 3), (4, 2)], WAYS))
def test_training_with_adamw_is_that_of_the_serial_model(heads: tuple[int, int], way: str) -> None:
    size, kv_heads = heads
    config = config_for(kv_heads)
    truth = train_serially(config, "adamw")

    def on_rank(comm: Communicator) -> Trained:
        return train(config, TensorParallel(comm, **WAYS[way]), Communicator.alone(), "adamw")

    for found in run(size, on_rank):
        require_same(found, truth)


@pytest.mark.parametrize(("kv_heads", "way"), [(4, "plain"), (2, "plain"), (4, "sequence")])
def test_norms_of_heads_see_the_gradients_of_all_heads(kv_heads: int, way: str) -> None:
    config = replace(config_for(kv_heads), qk_norm="head")
    truth = train_serially(config, "sgd", clip=0.5)

    def on_rank(comm: Communicator) -> Trained:
        return train(config, TensorParallel(comm, **WAYS[way]), Communicator.alone(), "sgd", clip=0.5)

    for found in run(4, on_rank):
        require_same(found, truth)


def test_a_norm_of_all_heads_is_refused_where_a_rank_has_some_of_them() -> None:
    def on_rank(comm: Communicator) -> None:
        with pytest.raises(
            LayoutError, match="qk_norm='all' normalises all heads together, and each of tp=2"
        ):
            parallel_layers(replace(SMALL, qk_norm="all"), comm)

    run(2, on_rank)


@pytest.mark.parametrize(
    ("zero_stage", "way", "optimizer"), checkered((0, 1, 2, 3), ("plain", "sequence"), OPTIMIZERS)
)
def test_two_replicas_of_two_ranks_follow_the_serial_model(zero_stage: int, way: str, optimizer: str) -> None:
    config = config_for(1)  # one head of keys and values, which the ranks share
    truth = train_serially(config, optimizer, clip=0.5)

    def on_rank(comm: Communicator) -> Trained:
        mesh = Mesh(comm, tp=2)
        tp = TensorParallel(mesh.tp, **WAYS[way])
        mode = "full" if way == "sequence" else "none"
        return train(config, tp, mesh.dp, optimizer, mode=mode, zero_stage=zero_stage, clip=0.5)

    for found in run(4, on_rank):
        require_same(found, truth)


@pytest.mark.mpi
@pytest.mark.parametrize("way", ["plain", "sequence"])
def test_training_over_mpi_is_that_of_the_serial_model(world: Communicator, way: str) -> None:
    kv_heads = {1: 4, 2: 4, 3: 3, 4: 2}.get(world.size, world.size)
    config = config_for(kv_heads)
    found = train(config, TensorParallel(world, **WAYS[way]), Communicator.alone(), "sgd", clip=0.5)
    require_same(found, train_serially(config, "sgd", clip=0.5))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_first_values_are_those_of_the_serial_model(size: int) -> None:
    config = config_for(2)
    serial = Llama(config, seed=3)

    def whole(comm: Communicator) -> dict[str, Tensor]:
        model = Llama(config, parallel_layers(config, comm), seed=3)
        return {name: gather_whole(p) for name, p in model.named_parameters()}

    for found in run(size, whole):
        assert all(torch.equal(found[name], p) for name, p in serial.named_parameters())


@pytest.mark.parametrize(("heads", "way"), checkered(ONE_OF_EACH_SIZE, ["plain", "sequence"]))
def test_text_is_that_of_the_serial_model_on_every_rank(heads: tuple[int, int], way: str) -> None:
    """Lengths grow through all remainders, and beyond max_sequence."""
    size, kv_heads = heads
    config = replace(config_for(kv_heads), max_sequence=12)
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    greedy = generate(Llama(config, seed=1).double(), prompt, 14, temperature=0)

    def on_rank(comm: Communicator) -> Tensor:
        model = Llama(config, parallel_layers(config, TensorParallel(comm, **WAYS[way])), seed=1).double()
        drawn = generate(model, prompt, 5, temperature=1.0, seed=4)
        assert torch.equal(comm.broadcast(drawn.clone()), drawn)
        return generate(model, prompt, 14, temperature=0)

    assert all(torch.equal(text, greedy) for text in run(size, on_rank))


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("way", ["plain", "sequence"])
def test_dropout_is_the_same_again_under_recomputation(way: str, mode: str) -> None:
    """Bit for bit the gradients that the same streams give without it; and two steps differ."""
    config = replace(config_for(2), dropout=0.2)

    def gradients(comm: Communicator, mode: str) -> list[Tensor]:
        tp = TensorParallel(comm, **WAYS[way])
        layers = parallel_layers(config, tp, streams=RandomStreams(7, comm.rank))
        model = Llama(config, layers, seed=1, recompute=Recompute(mode)).double()  # type: ignore[arg-type]
        tokens, targets = batch()
        found = []
        for _ in range(2):
            model.zero_grad()
            model.loss(model(tokens), targets).backward()  # type: ignore[no-untyped-call]
            found.append(
                gather_whole(
                    model.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight.grad
                )
            )
        return found

    expected = run(2, lambda comm: gradients(comm, "none"))
    found = run(2, lambda comm: gradients(comm, mode))
    for mine, truth in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, truth, strict=True))
    assert not torch.equal(found[0][0], found[0][1])


def test_dropout_keeps_what_ranks_hold_in_common_the_same() -> None:
    """Without sequence parallelism the residual stream is on every rank, and its dropout must be, too."""
    config = replace(config_for(2), dropout=0.5)

    def on_rank(comm: Communicator) -> Tensor:
        model = Llama(config, parallel_layers(config, comm, streams=RandomStreams(7, comm.rank)), seed=1)
        model.random_streams.generator("different").manual_seed(1)  # attention's part, here alike, too
        return model.model(batch()[0])

    one, other = run(2, on_rank)
    assert torch.equal(one, other)


def test_dropped_training_has_the_loss_of_the_serial_one_on_average() -> None:
    """Dropout of 0.3 with many streams: mean losses of the parallel and the serial model agree."""
    config = replace(config_for(2), dropout=0.3)
    tokens, targets = batch()

    @torch.no_grad()
    def losses(comm: Communicator, **way: Any) -> Tensor:
        tp = TensorParallel(comm, **way)
        layers = parallel_layers(config, tp, streams=RandomStreams(9, comm.rank))
        model = Llama(config, layers, seed=1).double()
        return torch.stack([model.loss(model(tokens), targets) for _ in range(100)])

    serial = losses(Communicator.alone())
    for way in ({}, SEQUENTIAL):
        (parallel, _) = run(2, lambda comm, way=way: losses(comm, **way))
        error = math.sqrt(serial.var() / len(serial) + parallel.var() / len(parallel))
        assert abs(serial.mean() - parallel.mean()) < 5 * error


def test_sizes_that_do_not_divide_are_named() -> None:
    def check(comm: Communicator) -> None:
        for changes, found in (
            ({"heads": 6, "kv_heads": 2}, "heads=6 does not divide among tp=4 ranks; tp=1 or tp=2 or tp=6"),
            ({"kv_heads": 3}, "kv_heads=3 neither divides among tp=4 ranks nor divides them"),
            ({"ffn_size": 30, "kv_heads": 4}, "ffn_size=30 does not divide among tp=4 ranks; tp=2 or tp=3"),
        ):
            with pytest.raises(LayoutError, match=found):
                parallel_layers(replace(SMALL, **changes), comm)

    run(4, check)
