"""`parallelize(…, check=…)` lets a right plan pass, and names where a wrong one leaves the serial model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar.comm import Communicator
from hpcpar.comm import run_loopback as run
from hpcpar.errors import HpcparError, LayoutError, MismatchError
from hpcpar.tensor_parallel import (
    Column,
    Enter,
    Norm,
    Plan,
    Row,
    TensorParallel,
    Vocabulary,
    parallelize,
    split_of,
)
from hpcpar.tensor_parallel.check import part
from tests.grid import pairwise

Between = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    """A residual around a norm, a column layer, what comes between, and a row layer."""

    def __init__(self, between: Between = lambda _, x: functional.silu(x), out: int = 12) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(out, 8)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        return x + self.down(self.between(self, self.up(self.norm(x))))


class Scaled(Block):
    """A block with a parameter of its own; `size` is 1 or all features."""

    def __init__(self, size: int) -> None:
        super().__init__(lambda block, x: functional.silu(x) * block.scale)
        self.scale = nn.Parameter(torch.ones(size))


class Gate(Block):
    """Gate and up in one projection, a module between."""

    def __init__(self) -> None:
        super().__init__(lambda block, x: block.glu(x), 6)
        self.glu = nn.GLU()


class Softmax(Block):
    def __init__(self) -> None:
        super().__init__(lambda block, x: block.softmax(x))
        self.softmax = nn.Softmax(-1)


PLAN: Plan = {"up": Column(), "down": Row()}


def x(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1)).to(dtype)


def built(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make().to(dtype)


def outcomes(
    make: Callable[[], nn.Module], plan: Plan, check: Any, size: int = 2, **options: Any
) -> list[str]:
    """On each rank, what `parallelize` raised, or nothing."""
    dtype = options.pop("dtype", torch.float64)
    models = [built(make, dtype) for _ in range(size)]

    def outcome(comm: Communicator) -> str:
        try:
            parallelize(models[comm.rank], plan, TensorParallel(comm, **options), check=check)
        except LayoutError as error:
            assert all(split_of(parameter) is None for parameter in models[comm.rank].parameters())
            return str(error)
        return ""

    return run(size, outcome)


def gated(block: nn.Module, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


TYPES = [torch.float64, torch.float32, torch.bfloat16]

WRONG: dict[str, tuple[Callable[[], nn.Module], Plan, str]] = {
    "a gate in one projection": (
        lambda: Block(gated, 6),
        PLAN,
        "what down makes differs from the serial model's",
    ),
    "a module that gates": (Gate, PLAN, "what down makes differs .* what up makes is right"),
    "a softmax": (Softmax, PLAN, "what down makes differs"),
    "a norm without weights": (
        lambda: Block(lambda _, x: functional.layer_norm(x, x.shape[-1:])),
        PLAN,
        "what down makes differs",
    ),
    "features of length one": (
        lambda: Block(lambda _, x: functional.normalize(x, dim=-1)),
        PLAN,
        "what down makes differs",
    ),
    "a mean": (lambda: Block(lambda _, x: x - x.mean(-1, keepdim=True)), PLAN, "what down makes differs"),
    "a parameter of all features": (lambda: Scaled(12), PLAN, "fails where the serial one does not"),
    "a parameter of one number": (
        lambda: Scaled(1),
        PLAN,
        r"the gradient of scale is not: .* give its module the style Norm\(of_heads=True\)",
    ),
    "a norm counted as one of heads": (
        Block,
        {**PLAN, "norm": Norm(of_heads=True)},
        r"Norm\(of_heads=True\)",
    ),
}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", WRONG)
def test_what_a_plan_cannot_see_is_named_on_every_rank(case: str, dtype: torch.dtype) -> None:
    make, plan, message = WRONG[case]
    found = outcomes(make, plan, x(dtype), dtype=dtype)
    assert found[0] == found[1]
    with pytest.raises(LayoutError, match=message):
        raise LayoutError(found[0])


RIGHT: dict[str, tuple[Callable[[], nn.Module], Plan]] = {
    "a residual around a norm": (Block, PLAN),
    "sections": (lambda: Block(gated, 6), {"up": Column(sections=(6, 6)), "down": Row()}),
    "a module that gates": (Gate, {"up": Column(sections=(6, 6)), "down": Row()}),
    "gathered": (Softmax, {"up": Column(gather_output=True), "down": Row(input_is_parallel=False)}),
    "logits in parts": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 13)),
        {"1": Vocabulary(gather_output=False)},
    ),
}


@pytest.mark.parametrize(("case", "size", "dtype"), pairwise(RIGHT, [1, 2, 3], TYPES))
def test_a_right_plan_passes(case: str, size: int, dtype: torch.dtype) -> None:
    make, plan = RIGHT[case]
    assert outcomes(make, plan, x(dtype), size, dtype=dtype) == [""] * size


class Entered(nn.Module):
    """A norm and a residual within a module that several column layers are in."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 8)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.inp(x))


def entered(norm: Norm) -> Plan:
    return {
        "block": Enter(),
        "block.inp": Norm(),
        "block.norm": norm,
        "block.up": Column(enter=False),
        "block.down": Row(),
    }


def test_a_norm_and_a_residual_in_an_enter_are_right_or_refused() -> None:
    assert outcomes(Entered, entered(Norm()), x()) == ["", ""]
    for found in outcomes(Entered, entered(Norm(of_heads=True)), x()):
        assert "give it the style Norm()" in found


@dataclass
class Output:
    loss: Tensor
    logits: Tensor
    cache: object = None


class Pair(NamedTuple):
    loss: Tensor
    logits: Tensor


class Model(nn.Module):
    """Several inputs, dropout in train mode and in spite of it, a buffer that counts, any output."""

    def __init__(self, form: Callable[..., Any], between: Between = lambda _, x: functional.silu(x)) -> None:
        super().__init__()
        self.form = form
        self.block = Block(between)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, labels: Tensor, *, scale: float = 1.0) -> Any:
        hidden = functional.dropout(self.dropout(self.block(x)), 0.25)
        logits = self.head(self.norm(hidden.flatten(0, 1))) * scale
        return self.form(functional.cross_entropy(logits, labels.flatten()), logits)


FORMS: dict[str, Callable[..., Any]] = {
    "tuple": lambda loss, logits: (loss, {"logits": [logits], "past": None}),
    "dict": lambda loss, logits: {"loss": loss, "logits": logits},
    "loss": lambda loss, logits: loss,
    "dataclass": Output,
    "named tuple": Pair,
}


@pytest.mark.parametrize("form", FORMS)
def test_models_in_training_with_several_inputs_and_any_output_are_compared_and_stay_as_they_were(
    form: str,
) -> None:
    plan: Plan = {"block.up": Column(), "block.down": Row()}
    wrong = Model(FORMS[form], lambda _, x: x.softmax(-1))
    labels = torch.arange(12).view(2, 6) % 5
    given = {"x": x(), "labels": labels, "scale": 2.0}
    models = [built(lambda: Model(FORMS[form])) for _ in range(2)]
    for model in models:
        model.head.weight.grad = torch.ones_like(model.head.weight)
        model.norm.running_mean.fill_(0.5)
    before = copy.deepcopy(models[0].state_dict())
    torch.manual_seed(11)
    expected = torch.get_rng_state()
    run(2, lambda comm: parallelize(models[comm.rank], plan, comm, check=given))
    assert torch.equal(torch.get_rng_state(), expected)
    for model in models:
        assert all(module.training for module in model.modules())
        assert model.head.weight.grad.eq(1).all()
        assert [name for name, each in model.named_parameters() if each.grad is not None] == ["head.weight"]
        held = dict([*model.named_parameters(), *model.named_buffers()])
        for name in ("norm.running_mean", "norm.num_batches_tracked", "head.weight", "block.norm.weight"):
            assert torch.equal(held[name], before[name])
    refused = [copy.deepcopy(wrong).double() for _ in range(2)]

    def outcome(comm: Communicator) -> str:
        with pytest.raises(LayoutError, match=r"what block\.down makes differs") as caught:
            parallelize(refused[comm.rank], plan, comm, check=(x(), labels))
        return str(caught.value)

    first, second = run(2, outcome)
    assert first == second


def test_sequences_in_parts_are_compared_too() -> None:
    plan: Plan = {
        "block": Enter(),
        "block.inp": Norm(of_heads=True),
        "block.norm": Norm(of_heads=True),
        "block.up": Column(enter=False),
        "block.down": Row(),
        "inp": Norm(),
    }
    # The residual in the block has the whole sequence, what is added to it a part.
    for found in outcomes(Entered, plan, x(), sequence_parallel=True):
        assert "fails where the serial one does not" in found
    plain: Plan = {"inp": Norm(), "norm": Norm(), "up": Column(), "down": Row()}
    assert outcomes(Block, plain, x()[:, :3], 3, sequence_parallel=True) != ["", "", ""]


def test_inputs_that_ranks_do_not_share_are_refused() -> None:
    models = [built(Block) for _ in range(2)]

    def outcome(comm: Communicator) -> None:
        with pytest.raises(MismatchError, match="an input of check= is not the same on all ranks"):
            parallelize(models[comm.rank], PLAN, comm, check=x() + comm.rank)

    run(2, outcome)


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (
            Block,
            torch.ones(2, 9, dtype=torch.float64),
            "running it on the inputs of check=: failed on 2 of 2",
        ),
        (Block, x() * torch.nan, "infinities or NaN in what the serial model makes"),
        (lambda: Wordless(), x(), "no tensor of floating point in what the serial model returns"),
    ],
)
def test_inputs_that_show_nothing_are_refused(
    make: Callable[[], nn.Module], given: Tensor, message: str
) -> None:
    models = [built(make) for _ in range(2)]

    def outcome(comm: Communicator) -> None:
        with pytest.raises(HpcparError, match=message):
            parallelize(models[comm.rank], PLAN, comm, check=given)

    run(2, outcome)


class Wordless(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(-1)


def test_a_part_is_the_whole_or_a_ranks_slice() -> None:
    whole = torch.arange(10.0).view(2, 5)

    def parts(comm: Communicator) -> list[list[list[float]] | None]:
        shapes = [(2, 5), (2, 3), (1, 5), (1, 3), (2, 2), (5,)]
        found = [part(whole, torch.Size(shape), comm) for shape in shapes]
        return [None if each is None else each.tolist() for each in found]

    none = [None, None, None]
    assert run(2, parts) == [
        [[[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], [[0, 1, 2], [5, 6, 7]], [[0, 1, 2, 3, 4]], *none],
        [[[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], [[3, 4, 0], [8, 9, 0]], [[5, 6, 7, 8, 9]], *none],
    ]
