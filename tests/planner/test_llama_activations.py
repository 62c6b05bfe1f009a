"""Bytes that a Llama layer saves for backward, measured through saved-tensor hooks, equal the formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hpcpar.autograd import Recompute
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import watch_activations
from hpcpar.models import Experts, Llama, LlamaConfig, parallel_layers
from hpcpar.planner.activations import llama_layer_nbytes
from hpcpar.tensor_parallel import TensorParallel
from tests.grid import pairwise

BATCH, SEQUENCE = 2, 24

WAYS: dict[str, dict[str, bool]] = {
    "plain": {},
    "sequence": {"sequence_parallel": True},
    "sequence, gather again": {"sequence_parallel": True, "gather_again": True},
}


def config_of(layers: int, kv_heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=16, hidden_size=40, layers=layers, heads=8, kv_heads=kv_heads, head_size=6, ffn_size=56
    )


@pytest.mark.parametrize("norm", ["head", "all"])
@pytest.mark.parametrize("mode", ["none", "selective"])
def test_norms_of_queries_and_keys_keep_what_the_formula_says(norm: str, mode: str) -> None:
    of_three, of_two, of_one = (replace(config_of(n, 2), qk_norm=norm) for n in (3, 2, 1))
    alone = Communicator.alone()
    found = kept(alone, of_three, torch.float32, mode, {}) - kept(alone, of_two, torch.float32, mode, {})
    assert found == llama_layer_nbytes(of_one, BATCH, SEQUENCE, itemsize=4, mode=mode)  # type: ignore[arg-type]


def kept(comm: Communicator, config: LlamaConfig, dtype: torch.dtype, mode: str, way: dict[str, Any]) -> int:
    layers = parallel_layers(config, TensorParallel(comm, **way))
    model = Llama(config, layers, recompute=Recompute(mode)).to(dtype)  # type: ignore[arg-type]
    tokens = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE) % 16
    with watch_activations(model) as activations:
        logits = model(tokens)
        found = activations.nbytes
    del logits
    return found


CASES = pairwise([1, 2, 4], [8, 2], WAYS, ["none", "selective", "full"], [torch.float32, torch.float64])


@pytest.mark.parametrize(("size", "kv_heads", "way", "mode", "dtype"), CASES)
def test_a_layer_keeps_what_the_formula_says(
    size: int, kv_heads: int, way: str, mode: str, dtype: torch.dtype
) -> None:
    """One layer's share: what a model of three layers keeps beyond one of two."""

    def more(comm: Communicator) -> int:
        of_three, of_two = (kept(comm, config_of(n, kv_heads), dtype, mode, WAYS[way]) for n in (3, 2))
        return of_three - of_two

    expected = llama_layer_nbytes(
        config_of(1, kv_heads),
        BATCH,
        SEQUENCE,
        itemsize=dtype.itemsize,
        tp=size,
        mode=mode,  # type: ignore[arg-type]
        **WAYS[way],
    )
    assert run_loopback(size, more) == [expected] * size


MIXTURES = {
    "mixtral": Experts(6, 2, 16),
    "olmoe": Experts(6, 3, 16, renormalise=False),
    "deepseek": Experts(6, 3, 16, score="sigmoid", scale=2.5, shared_ffn_size=24, bias_rate=0.1),
}


@pytest.mark.parametrize(
    ("kind", "size", "way", "mode", "dtype"),
    pairwise(MIXTURES, [1, 2, 4], WAYS, ["none", "full"], [torch.float32, torch.float64]),
)
def test_a_layer_with_experts_keeps_what_the_formula_says(
    kind: str, size: int, way: str, mode: str, dtype: torch.dtype
) -> None:
    of_three, of_two = (replace(config_of(n, 8), experts=MIXTURES[kind]) for n in (3, 2))

    def more(comm: Communicator) -> int:
        three, two = (kept(comm, config, dtype, mode, WAYS[way]) for config in (of_three, of_two))
        return three - two

    expected = llama_layer_nbytes(
        of_three,
        BATCH,
        SEQUENCE,
        itemsize=dtype.itemsize,
        tp=size,
        mode=mode,  # type: ignore[arg-type]
        **WAYS[way],
    )
    assert run_loopback(size, more) == [expected] * size
