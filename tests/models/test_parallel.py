"""A Llama that ranks compute together is the serial one: first values, text, and dropout."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcpar.autograd import Recompute
from hpcpar.comm import Communicator
from hpcpar.comm import run_loopback as run
from hpcpar.errors import LayoutError
from hpcpar.models import Llama, LlamaConfig, generate, parallel_layers
from hpcpar.tensor_parallel import RandomStreams, TensorParallel, gather_whole
from tests.grid import checkered

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
SAMPLES, SEQUENCE = 4, 12
SEQUENTIAL: dict[str, Any] = {"sequence_parallel": True}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence": SEQUENTIAL,
}


def config_for(kv_heads: int) -> LlamaConfig:
    return replace(SMALL, kv_heads=kv_heads)


def batch() -> tuple[Tensor, Tensor]:
    drawn = torch.randint(23, (2, SAMPLES, SEQUENCE), generator=torch.Generator().manual_seed(5))
    drawn[1, 0, 3] = -100
    return drawn[0], drawn[1]


def test_a_norm_of_all_heads_is_refused_where_a_rank_has_some_of_them() -> None:
    def on_rank(comm: Communicator) -> None:
        with pytest.raises(
            LayoutError, match="qk_norm='all' normalises all heads together, and each of tp=2"
        ):
            parallel_layers(replace(SMALL, qk_norm="all"), comm)

    run(2, on_rank)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_first_values_are_those_of_the_serial_model(size: int) -> None:
    config = config_for(2)
    serial = Llama(config, seed=3)

    def whole(comm: Communicator) -> dict[str, Tensor]:
        model = Llama(config, parallel_layers(config, comm), seed=3)
        return {name: gather_whole(p) for name, p in model.named_parameters()}

    for found in run(size, whole):
        assert all(torch.equal(found[name], p) for name, p in serial.named_parameters())


@pytest.mark.parametrize(("heads", "way"), checkered([(1, 4), (2, 4), (3, 3), (4, 2)], WAYS))
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
