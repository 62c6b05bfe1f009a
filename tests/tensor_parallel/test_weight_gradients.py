"""Deferred weights' gradients of parallel layers: those of a whole backward, by the same communication."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpcpar.autograd import DeferredGradients, Recompute
from hpcpar.comm import Communicator
from hpcpar.comm import run_loopback as run
from hpcpar.models import Llama, LlamaConfig, parallel_layers
from hpcpar.tensor_parallel import (
    ColumnParallelLinear,
    Heads,
    LayerNorm,
    Norm,
    ParallelMLP,
    ParallelSelfAttention,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    draw_shard,
    parallelize,
    split_of,
)

TOLERANCE = 1e-12
"""In float64, of sums over ranks in one order, and of a few parts of a gradient in any."""

WAYS: dict[str, dict[str, object]] = {
    "plain": {},
    "no overlap": {"overlap": False},
    "twice": {"twice": True},
    "sequence": {"sequence_parallel": True},
    "sequence, chunks, gather again": {"sequence_parallel": True, "chunks": 2, "gather_again": True},
}

CONFIG = LlamaConfig(
    vocab_size=11, hidden_size=12, layers=2, heads=6, kv_heads=1, ffn_size=12, tie_embeddings=True
)


class Stack(nn.Module):
    """A bit of everything, with biases; heads of keys and values that two ranks or three share."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(11, 12, tp)
        self.norm = LayerNorm(12, tp=tp)
        self.attention = ParallelSelfAttention(12, 6, tp, kv_heads=1, selective=True)
        self.mlp = ParallelMLP(12, 18, tp, activation="swiglu")

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.attention(self.norm(hidden))
        output: Tensor = hidden + self.mlp(self.norm(hidden))
        return output


def llama(tp: TensorParallel, mode: Any = "none") -> nn.Module:
    return Llama(CONFIG, parallel_layers(CONFIG, tp), recompute=Recompute(mode))


MODULES: dict[str, Callable[[TensorParallel], nn.Module]] = {
    "layers": Stack,
    "Llama": llama,
    "Llama, full": lambda tp: llama(tp, "full"),
}


CASES = [
    ("layers", "plain", 1),
    *(("layers", way, size) for way in WAYS for size in (2, 3)),
    ("Llama", "no overlap", 1),
    ("Llama", "plain", 2),
    ("Llama", "sequence, chunks, gather again", 3),
    ("Llama, full", "plain", 1),
    ("Llama, full", "sequence", 2),
    ("Llama, full", "sequence, chunks, gather again", 3),
]


class Multiplications(TorchDispatchMode):
    """Count the multiplications of matrix products in this thread; ranks are threads here."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            left, right = args[-2:]
            self.count += left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


class Found(NamedTuple):
    """Parameters' gradients, how often hooks ran, and of each part of backward the sums, gathers and work."""

    gradients: dict[str, Tensor | None]
    hooks: dict[str, int]
    calls: list[dict[str, int]]
    work: list[int]


def measured(
    comm: Communicator, module: nn.Module, x: Tensor, *, deferred: DeferredGradients | None
) -> Found:
    for parameter in module.parameters():
        parameter.grad = None
    hooks = dict.fromkeys(dict(module.named_parameters()), 0)

    def hear(name: str) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            hooks[name] += 1

        return hook

    handles = [p.register_post_accumulate_grad_hook(hear(name)) for name, p in module.named_parameters()]
    if deferred is None:
        output = module(x)
    else:
        with deferred.recording():
            output = module(x)
    calls, work = [], []

    def part(step: Callable[[], None]) -> None:
        before = {row.collective: row.calls for row in comm.traffic.rows()}
        with Multiplications() as multiplications:
            step()
        calls.append(
            {
                row.collective: row.calls - before.get(row.collective, 0)
                for row in comm.traffic.rows()
                if row.collective != "agreement"  # on what ranks must have alike, in first calls alone
            }
        )
        work.append(multiplications.count)

    cotangent = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    part(lambda: torch.autograd.backward(output, cotangent))
    if deferred is not None:
        assert not any(hooks.values()), hooks
        part(deferred.compute)
    for handle in handles:
        handle.remove()
    return Found({name: p.grad for name, p in module.named_parameters()}, hooks, calls, work)


def summed(calls: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(each.get(name, 0) for each in calls) for name in calls[-1]}


def both(comm: Communicator, make: Callable[[], nn.Module], x: Tensor) -> tuple[Found, Found]:
    """Measure a whole backward, and a split one."""
    module = make().double()
    draw = partial(nn.init.normal_, std=0.3, generator=torch.Generator().manual_seed(0))
    for parameter in module.parameters():
        draw_shard(parameter, draw) if split_of(parameter) else draw(parameter)
    return (
        measured(comm, module, x, deferred=None),
        measured(comm, module, x, deferred=DeferredGradients()),
    )


def require_same(whole: Found, split: Found) -> None:
    for name, truth in whole.gradients.items():
        torch.testing.assert_close(split.gradients[name], truth, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
    assert set(split.hooks.values()) == {1}


@pytest.mark.parametrize(("name", "way", "size"), CASES)
def test_gradients_and_communication_are_those_of_a_whole_backward(name: str, way: str, size: int) -> None:
    tokens = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(1))

    def work(comm: Communicator) -> tuple[Found, Found]:
        tp = TensorParallel(comm, **WAYS[way])  # type: ignore[arg-type]
        return both(comm, lambda: MODULES[name](tp), tokens)

    for whole, split in run(size, work):
        require_same(whole, split)
        assert summed(split.calls) == summed(whole.calls)
        if name != "Llama, full":  # whose recomputation stops at another place
            assert sum(split.work) == sum(whole.work)
        assert split.work[1] > 0


class Pair(nn.Module):
    """A column of two sections, a row."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(12, (12, 24), tp)
        self.down = RowParallelLinear(36, 12, tp)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(torch.tanh(self.up(x)))
        return output


@pytest.mark.parametrize(
    ("way", "of_b", "of_w"),
    [
        ("plain", {"allreduce": 1}, {}),
        # The bias of the row is for own tokens: a sum. Gathered is dy, scattered dx.
        ("sequence", {"allgather": 1, "reduce_scatter": 1, "allreduce": 1}, {}),
        (
            "sequence, chunks, gather again",
            {"allgather": 2, "reduce_scatter": 2, "allreduce": 1},
            {"allgather": 1},
        ),
    ],
)
def test_w_multiplies_half_and_gathers_what_is_gathered_again(
    way: str, of_b: dict[str, int], of_w: dict[str, int]
) -> None:
    def work(comm: Communicator) -> tuple[Found, Found]:
        tp = TensorParallel(comm, **WAYS[way])  # type: ignore[arg-type]
        x = torch.linspace(-1, 1, 2 * 6 * 12, dtype=torch.float64).view(2, 6, 12)
        own = x.chunk(comm.size, dim=1)[comm.rank] if tp.sequence_parallel else x
        return both(comm, lambda: Pair(tp), own.requires_grad_())

    for whole, split in run(3, work):
        require_same(whole, split)
        of_parts = [{name: calls for name, calls in part.items() if calls} for part in split.calls]
        assert of_parts == [of_b, of_w]
        assert split.work == [sum(whole.work) // 2] * 2


def test_heads_that_ranks_share_have_their_product_and_its_sum_in_w() -> None:
    def work(comm: Communicator) -> tuple[Found, Found]:
        x = torch.linspace(-1, 1, 2 * 6 * 12, dtype=torch.float64).view(2, 6, 12).requires_grad_()
        return both(comm, lambda: ColumnParallelLinear(12, (Heads(1, 4), Heads(1, 4)), comm), x)

    for whole, split in run(2, work):
        require_same(whole, split)
        assert split.work == [sum(whole.work) // 2] * 2


def test_modules_by_a_plan_defer_too() -> None:
    serial = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12))

    def work(comm: Communicator) -> tuple[Found, Found]:
        tp = TensorParallel(comm, sequence_parallel=True)
        x = torch.linspace(-1, 1, 2 * 3 * 12, dtype=torch.float64).view(2, 3, 12).requires_grad_()
        return both(comm, lambda: parallelize(deepcopy(serial), {"0": Norm(), "1": Norm()}, tp), x)

    for whole, split in run(2, work):
        require_same(whole, split)
        # Sums of the norm's two gradients in B, of the product's two in W.
        assert [part["allreduce"] for part in split.calls] == [2, 2]
        assert split.work == [sum(whole.work) // 2] * 2
