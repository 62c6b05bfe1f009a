"""Bytes that a Llama layer saves for backward, measured through saved-tensor hooks, equal the formula."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from hpcpar.autograd import Recompute
from hpcpar.comm import Communicator, run_loopback
from hpcpar.context_parallel import ContextParallel, Mask
from hpcpar.data_parallel import watch_activations
from hpcpar.models import Experts, Llama, LlamaConfig, parallel_layers
from hpcpar.planner.activations import llama_layer_nbytes
from hpcpar.planner.layout import Layout
from hpcpar.planner.shapes import RECOMPUTE_MODES, QueryKeyNorm
from hpcpar.planner.strategy import CONTEXT_METHODS, Strategy
from hpcpar.tensor_parallel import TensorParallel
from tests.grid import pairwise

BATCH, SEQUENCE = 2, 48

WAYS: dict[str, dict[str, bool]] = {
    "plain": {},
    "sequence": {"sequence_parallel": True},
    "sequence, gather again": {"sequence_parallel": True, "gather_again": True},
}
TYPES = ("bfloat16", "float32", "float64")


def config_of(layers: int, kv_heads: int = 8, **more: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=16,
        hidden_size=40,
        layers=layers,
        heads=8,
        kv_heads=kv_heads,
        head_size=6,
        ffn_size=56,
        **more,
    )


def of_a_layer(config: LlamaConfig, comm: Communicator, strategy: Strategy, mode: Any) -> int:
    """Return one layer's share: what the model of three layers keeps beyond one of two."""
    cp = ContextParallel(comm, strategy.cp_method, keep=strategy.cp_keep) if strategy.layout.cp > 1 else None
    tp = TensorParallel(
        comm if cp is None else Communicator.alone(),
        sequence_parallel=strategy.sequence_parallel,
        gather_again=strategy.gather_again,
    )
    found = []
    for layers in (3, 2):
        sizes = replace(config, layers=layers)
        model = Llama(sizes, parallel_layers(sizes, tp, context=cp), recompute=Recompute(mode))
        model.to(getattr(torch, strategy.precision))
        tokens = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE) % 16
        with (
            nullcontext() if cp is None else cp.using(Mask(SEQUENCE)),
            watch_activations(model) as activations,
        ):
            logits = model(tokens)
            found.append(activations.nbytes)
        del logits
    return found[0] - found[1]


def strategy_of(layout: Layout, dtype: str, **more: Any) -> Strategy:
    return Strategy(layout, BATCH, BATCH, SEQUENCE, precision=dtype, **more)


@pytest.mark.parametrize(
    ("size", "kv_heads", "way", "mode", "dtype", "norm"),
    pairwise([1, 2, 4], [8, 2], WAYS, RECOMPUTE_MODES, TYPES, get_args(QueryKeyNorm)),
)
def test_a_layer_keeps_what_the_formula_says(
    size: int, kv_heads: int, way: str, mode: Any, dtype: str, norm: Any
) -> None:
    config = config_of(3, kv_heads, qk_norm="head" if norm == "all" and size > 1 else norm)
    strategy = strategy_of(Layout(tp=size), dtype, **WAYS[way])
    expected = llama_layer_nbytes(config, strategy, mode)
    assert run_loopback(size, lambda comm: of_a_layer(config, comm, strategy, mode)) == [expected] * size


@pytest.mark.parametrize(
    ("size", "method", "keep", "mode", "dtype", "dropout"),
    pairwise([2, 4], CONTEXT_METHODS[:4], [False, True], RECOMPUTE_MODES, TYPES, [0.0, 0.1]),
)
def test_ranks_that_share_a_sequence_keep_what_the_formula_says(
    size: int, method: Any, keep: bool, mode: Any, dtype: str, dropout: float
) -> None:
    config = config_of(3, dropout=dropout)
    strategy = strategy_of(Layout(cp=size), dtype, cp_method=method, cp_keep=keep)
    found = run_loopback(size, lambda comm: of_a_layer(config, comm, strategy, mode))
    # With "exchange" later ranks need fewer of the others' keys.
    assert max(found) == llama_layer_nbytes(config, strategy, mode)
    assert len(set(found)) == 1 or (method == "exchange" and keep)


MIXTURES = {
    "mixtral": Experts(6, 2, 16),
    "olmoe": Experts(6, 3, 16, renormalise=False, z_loss=0.01),
    "deepseek": Experts(6, 3, 16, score="sigmoid", scale=2.5, shared_ffn_size=24, bias_rate=0.1),
}


@pytest.mark.parametrize(
    ("kind", "size", "way", "mode", "dtype"), pairwise(MIXTURES, [1, 2, 4], WAYS, ["none", "full"], TYPES)
)
def test_a_layer_with_experts_keeps_what_the_formula_says(
    kind: str, size: int, way: str, mode: Any, dtype: str
) -> None:
    config = config_of(3, experts=MIXTURES[kind])
    strategy = strategy_of(Layout(tp=size, etp=size), dtype, **WAYS[way])
    expected = llama_layer_nbytes(config, strategy, mode)
    assert run_loopback(size, lambda comm: of_a_layer(config, comm, strategy, mode)) == [expected] * size
