"""Modules whose gradients are compared with those of one backward by torch, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from hpcpar.autograd import Recompute
from hpcpar.autograd.weight_grad_mode import stand_in
from hpcpar.models import Llama, LlamaConfig

TOLERANCE = 1e-12
"""In float64: a bias's gradient may be summed in another order."""

CONFIG = LlamaConfig(vocab_size=11, hidden_size=8, layers=2, heads=4, kv_heads=2, ffn_size=12)


def values(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(1))


X = values(2, 5, 8)
MEMORY = values(2, 3, 8, seed=2)


class Itself(nn.MultiheadAttention):
    """Queries, keys and values are one tensor."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


class Other(nn.MultiheadAttention):
    """Keys and values are of another length than queries."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, y, y)[0]


class Written(nn.Module):
    """Products and embeddings without torch's modules, and parameters in other places."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6, 8))
        self.both = nn.Parameter(torch.randn(12, 8))
        self.bias, self.scale = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.start = nn.Parameter(torch.randn(1, 8))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.start.expand(2, 1, 8), x], dim=1)
        first = torch.addmm(self.bias, x.flatten(0, 1), self.one).view(*x.shape[:-1], 6)
        second = x @ self.one + torch.mm(x.flatten(0, 1), self.one).view(first.shape)
        third = functional.linear(x, weight=self.both[:6]) * self.scale + x @ self.two.T
        fourth = torch.matmul(x, self.both.t()[:, 6:]) + torch.einsum("bsh,ho->bso", x, self.one)
        upper, lower = self.both.chunk(2)  # of one the product, of the other not; then of that, too
        fourth = fourth + functional.linear(x, upper) * torch.einsum("bsh,oh->bso", x, lower)
        fourth = fourth + functional.linear(x, lower)
        return first + torch.addmm(self.scale, second[0], self.scale.diag(), beta=2) + third * fourth


class Tied(nn.Module):
    """A table that is an embedding, a product, a factor and, by way of a function of its own, a term."""

    def __init__(self, *, openly: bool = True) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 8))
        self.openly = openly

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = functional.embedding(tokens, self.table)
        scaled = hidden * self.table[0] + functional.linear(hidden, self.table).sum(-1, keepdim=True)
        table = stand_in(self.table) if self.openly else self.table
        return scaled + _Mean.apply(table)  # type: ignore[no-untyped-call]


class _Mean(Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor) -> Tensor:
        ctx.rows = table.shape[0]
        return table.mean(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.div(ctx.rows).expand(ctx.rows, -1)


class Complex(nn.Module):
    """Complex weights in products and by their parts, between real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.complex128)
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(torch.fft.fft(x)) @ self.weight.mH
        mixed = torch.einsum("bsh,ho->bso", hidden, self.weight) * self.weight.imag
        return torch.fft.ifft(mixed + self.weight.H + self.weight.real).real


class Sharing(nn.Module):
    """Two modules with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.embed(tokens)))
        return output


def mlp(*, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> nn.Module:
    return nn.Sequential(norm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8, bias=False))


def llama(mode: Any = "none", **options: Any) -> Llama:
    return Llama(replace(CONFIG, **options), recompute=Recompute(mode))


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "Linear": (lambda: nn.Linear(8, 6), (X,)),
    "Linear without bias": (lambda: nn.Linear(8, 6, bias=False), (X,)),
    "Linear, of a vector": (lambda: nn.Linear(8, 6), (X[0, 0],)),
    "Linear, of a matrix": (lambda: nn.Linear(8, 6), (X[0],)),
    "Linear, of four dims": (lambda: nn.Linear(8, 6), (X.view(2, 5, 1, 8),)),
    "Linear, of no sequences": (lambda: nn.Linear(8, 6), (X[:0],)),
    "Linear, across memory": (lambda: nn.Linear(5, 6), (X.transpose(1, 2),)),
    "Linear, changed in place": (lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(inplace=True)), (X,)),
    "Linear, weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 6)), (X,)),
    "MLP, LayerNorm": (mlp, (X,)),
    "MLP, RMSNorm": (lambda: mlp(norm=nn.RMSNorm), (X,)),
    "GroupNorm, Conv1d": (lambda: nn.Sequential(nn.GroupNorm(5, 5), nn.Conv1d(5, 3, 2)), (X,)),
    "Embedding": (lambda: nn.Embedding(9, 4, padding_idx=-2), (tokens(2, 5),)),
    "Embedding, by frequency": (lambda: nn.Embedding(9, 4, scale_grad_by_freq=True), (tokens(2, 5),)),
    "Embedding, of no sequences": (lambda: nn.Embedding(9, 4), (tokens(0, 5),)),
    "attention": (lambda: Itself(8, 2, batch_first=True), (X,)),
    "attention to others": (lambda: Other(8, 2, batch_first=True, add_bias_kv=True), (X, MEMORY)),
    "attention, other widths": (lambda: Other(8, 2, batch_first=True, kdim=8, vdim=8), (X, MEMORY)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (X,)),
    "decoder layer": (lambda: nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), (X, MEMORY)),
    "products written out": (Written, (X,)),
    "one table in several places": (Tied, (tokens(2, 5),)),
    "two modules with one weight": (Sharing, (tokens(2, 5),)),
    "complex numbers": (Complex, (values(2, 8, 8),)),
    "Llama": (llama, (tokens(2, 5),)),
    "Llama, selective": (lambda: llama("selective"), (tokens(2, 5),)),
    "Llama, full": (lambda: llama("full"), (tokens(2, 5),)),
    "Llama, tied, dropout, full": (lambda: llama("full", tie_embeddings=True, dropout=0.2), (tokens(2, 5),)),
    "no parameters": (nn.Tanh, (X,)),
}


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def leaves(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [each.detach().requires_grad_(each.is_floating_point()) for each in inputs]


def cotangent(output: Tensor) -> Tensor:
    return torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)


Gradients = dict[str, Tensor | None]


def gradients(module: nn.Module, inputs: Sequence[Tensor]) -> Gradients:
    named = {name: parameter.grad for name, parameter in module.named_parameters()}
    return named | {f"input {number}": each.grad for number, each in enumerate(inputs)}


def whole(module: nn.Module, inputs: Sequence[Tensor]) -> Gradients:
    """By one backward."""
    given = leaves(inputs)
    output = module(*given)
    torch.autograd.backward(output, cotangent(output))
    return gradients(module, given)


def require_same(found: Gradients, expected: Gradients, tolerance: float = TOLERANCE) -> None:
    assert found.keys() == expected.keys()
    for name, truth in expected.items():
        mine = found[name]
        if truth is None or mine is None:
            assert truth is mine, name
        else:
            torch.testing.assert_close(mine, truth, rtol=tolerance, atol=tolerance, msg=name)


def heard(module: nn.Module) -> list[str]:
    """Grows by a parameter's name when its hook runs."""
    names: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: names.append(name))
    return names


class Made(TorchDispatchMode):
    """The sizes of tensors that are made in new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        known = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        given = {each.untyped_storage().data_ptr() for each in known}
        if isinstance(found, Tensor) and found.untyped_storage().data_ptr() not in given:
            self.numels.add(found.numel())
        return found
