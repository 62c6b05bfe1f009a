from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcpar.comm import Communicator
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.data_parallel.elementwise import require_elementwise
from hpcpar.errors import OperationError
from tests.data_parallel.staged import staged


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(3))]


class Signs(Optimizer):
    """Element by element, of nobody's library."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                held = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                held.mul_(group["momentum"]).add_(parameter.grad)
                parameter.sub_(group["lr"] * held.sign())


class Trusting(torch.optim.SGD):
    """LARS: every tensor's step is in proportion to its norm."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    ratio = parameter.norm() / parameter.grad.norm().clamp(min=1e-12)
                    parameter.sub_(group["lr"] * ratio * parameter.grad)


class Chosen(Signs):
    """Some groups are stepped on as matrices, as by those who mix Muon and AdamW."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    whole = parameter.grad.norm() if group.get("matrices") else 1.0
                    parameter.sub_(group["lr"] * parameter.grad / whole)


class Around(Optimizer):
    """Another optimizer in a wrapper, which is the one that steps: on tensors that it knows itself."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {"lr": 0.1})
        self.wrapped = inner

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self.wrapped.step()


class Counting(Signs):
    """The rate falls with every call of step, which are counted in the group."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] / group["calls"] * parameter.grad)


class Shaped(Signs):
    """Refuses what is no matrix."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if any(parameter.dim() != 2 for group in self.param_groups for parameter in group["params"]):
            raise ValueError("only matrices, please")
        super().step()


class Large(Signs):
    """Like one that factors its state from some size on, or clips at a norm: nothing to see in small ones."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    norm = parameter.grad.norm().clamp(min=8.0)
                    parameter.sub_(group["lr"] * parameter.grad * (8.0 / norm))


NEED_WHOLE_TENSORS = {
    "LBFGS": "product of the gradients",
    "SparseAdam": "sparse gradients",
    "Adafactor": "rows and columns",
    "CAME": "rows and columns",
    "Muon": "orthogonal",
    "MuonWithAuxAdam": "orthogonal",
    "DistributedShampoo": "preconditioners",
    "SOAP": "preconditioners",
    "Prodigy": "estimates its rate",
    "DAdaptAdam": "estimates its rate",
    "FusedLAMB": "norms or means of layers",
    "Lamb": "norms or means of layers",
    "LARS": "norms or means of layers",
    "NovoGrad": "norms or means of layers",
    "AdamW8bit": "quantized by blocks",
    "AdamWScheduleFree": "counts steps in a group",
    "SophiaG": "curvature",
}


@pytest.mark.parametrize("name", NEED_WHOLE_TENSORS)
def test_optimizers_of_whole_tensors_are_refused_by_name_and_reason_whatever_is_said(name: str) -> None:
    parameters = [nn.Parameter(torch.ones(4, 3))]
    kind = getattr(torch.optim, name, None) or type(name, (Signs,), {})
    for heir in (kind, type("Mine", (kind,), {})):
        with pytest.raises(
            OperationError,
            match=f"{heir.__name__} cannot work on shards: .*{NEED_WHOLE_TENSORS[name]}.*zero_stage=0",
        ):
            require_elementwise(heir(parameters), said=True)


def test_no_optimizer_of_torch_is_taken_for_one_of_others_that_needs_whole_tensors() -> None:
    found = {
        name: kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type)
        and issubclass(kind, Optimizer)
        and kind is not Optimizer
        and name not in NEED_WHOLE_TENSORS
    }
    assert len(found) >= 11
    for kind in found.values():
        require_elementwise(kind(weights()))
        # They are taken by their names; the trial, which is for others, must agree.
        step = {"step": lambda self, closure=None, step=kind.step: step(self, closure)}
        require_elementwise(type("Mine", (kind,), step)(weights()), said=True)


def test_an_unknown_optimizer_is_taken_at_its_users_word_alone() -> None:
    optimizer = Signs(weights())
    with pytest.raises(
        OperationError, match=r"Signs of .*test_elementwise is not known .*, elementwise=True\).*zero_stage=0"
    ):
        require_elementwise(optimizer)
    require_elementwise(optimizer, said=True)
    assert not optimizer.state, "it was tried on other tensors"
    assert all(torch.equal(p, torch.ones_like(p)) for p in optimizer.param_groups[0]["params"])


def test_lion_needs_no_word() -> None:
    lion = type("Lion", (Signs,), {"__module__": "lion_pytorch.lion_pytorch"})
    require_elementwise(lion(weights()))


def test_an_heir_that_leaves_its_step_alone_is_as_well_known_as_torchs() -> None:
    class Named(torch.optim.AdamW):
        def __init__(self, params: Iterable[Any]) -> None:
            super().__init__(params, lr=0.1)

        def rates(self) -> list[float]:
            return [group["lr"] for group in self.param_groups]

    optimizer = Named(weights())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    require_elementwise(optimizer)


def clipping(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def clipped(*args: Any, **options: Any) -> Any:
        return step(*args, **options)

    return clipped


def test_an_heir_with_a_step_of_its_own_is_unknown() -> None:
    class Mixin:
        step = clipping(torch.optim.AdamW.step)

    heirs = [
        type("Mine", (torch.optim.AdamW,), {"step": clipping(torch.optim.AdamW.step)}),
        type("Mine", (torch.optim.AdamW,), {"_init_group": clipping(torch.optim.AdamW._init_group)}),
        type("Mine", (Mixin, torch.optim.AdamW), {}),
    ]
    for heir in heirs:
        with pytest.raises(OperationError, match=r"Mine of .* is not known"):
            require_elementwise(heir(weights()))


def test_an_optimizer_whose_step_was_replaced_is_unknown() -> None:
    for is_scheduled in (True, False):
        optimizer = torch.optim.SGD(weights(), lr=0.1)
        step = types.MethodType(clipping(torch.optim.SGD.step), optimizer)
        optimizer.step = step  # type: ignore[method-assign]
        if is_scheduled:
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with pytest.raises(OperationError, match=r"SGD of .* is not known"):
            require_elementwise(optimizer)


REFUSED_BY_TRIAL: dict[str, tuple[Callable[[], Optimizer], str]] = {
    "whatever is said": (lambda: Large(weights()), "Large cannot work on shards: tried .* different values"),
    "norms": (lambda: Trusting(weights(), lr=0.1), "Trusting cannot .*: tried on a matrix and on its pieces"),
    "calls that are counted": (lambda: Counting(weights()), r"Counting cannot .* counted calls of step\(\)"),
    "nothing of its own": (
        lambda: Around(torch.optim.SGD(weights(), lr=0.1)),
        "Around .* it changes nothing",
    ),
    "its own words": (lambda: Shaped(weights()), "flat pieces of a matrix it says: only matrices, please"),
}


@pytest.mark.parametrize("name", REFUSED_BY_TRIAL)
def test_an_optimizer_that_a_trial_shows_to_be_no_elementwise_one_is_refused(name: str) -> None:
    make, words = REFUSED_BY_TRIAL[name]
    with pytest.raises(OperationError, match=words):
        require_elementwise(make(), said=name == "whatever is said")


def test_a_learning_rate_that_is_still_zero_hides_nothing() -> None:
    optimizer = Trusting(weights(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    with pytest.raises(OperationError, match="gives different values"):
        require_elementwise(optimizer)
    warming_up = Signs(weights(), lr=0.0)
    require_elementwise(warming_up, said=True)
    assert warming_up.param_groups[0]["lr"] == 0


def test_every_group_is_tried() -> None:
    matrix, bias = weights()
    groups = [{"params": [bias]}, {"params": [matrix], "matrices": True}]
    with pytest.raises(OperationError, match="gives different values"):
        require_elementwise(Chosen(groups))
    require_elementwise(Chosen(groups[:1]), said=True)


def test_the_trial_calls_none_of_the_users_hooks() -> None:
    optimizer = Signs(weights())
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    require_elementwise(optimizer, said=True)
    assert called == []


def test_an_optimizer_with_a_scheduler_is_tried_without_it() -> None:
    optimizer = Signs(weights())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    require_elementwise(optimizer, said=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        scheduler.step()
    assert [str(each.message)[:40] for each in told] == ["Detected call of `lr_scheduler.step()` b"]


def test_what_is_refused_for_shards_is_taken_for_whole_parameters() -> None:
    model = nn.Linear(3, 2)
    optimizer = Trusting(model.parameters(), lr=0.1)
    DistributedOptimizer(optimizer, model.named_parameters(), Communicator.alone())
    for stage, options in ((1, {}), (0, {"precision": "bfloat16"}), (0, {"offload": "cpu"})):
        with pytest.raises(OperationError, match="Take zero_stage=0, without precision and offload"):
            staged(model, Trusting(model.parameters(), lr=0.1), Communicator.alone(), stage, **options)


def test_a_step_of_somebody_elses_optimizer_is_the_same_on_pieces() -> None:
    def stepped(stage: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = staged(model, Signs(model.parameters()), Communicator.alone(), stage, elementwise=True)
        for _ in range(3):
            model(torch.arange(3.0)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    plain = stepped(0)
    assert all(torch.equal(a, b) for stage in (1, 2) for a, b in zip(stepped(stage), plain, strict=True))
