"""Backwards that add to gradients where they lie: the same gradients, and every hook runs once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

from hpcpar.autograd import DeferredGradients, fused_layers, grad_accumulation_fusion, recompute
from hpcpar.autograd.fused_layers import adding_in_place
from hpcpar.autograd.grad_accumulation_fusion import GradBufferOffer
from hpcpar.comm import Communicator, run_loopback
from hpcpar.tensor_parallel import ColumnParallelLinear, RowParallelLinear, TensorParallel
from tests.autograd.modules import (
    MODULES,
    Gradients,
    Made,
    X,
    cotangent,
    gradients,
    heard,
    made,
    mlp,
    require_same,
    tokens,
    values,
    whole,
)


def several(module: nn.Module, inputs: Sequence[Tensor], *, here: bool, times: int = 3) -> Gradients:
    """Of several microbatches, in place or as torch does it."""
    found: Gradients = {}
    for _ in range(times):
        if here:
            with adding_in_place([module]):
                found = whole(module, inputs)
        else:
            found = whole(module, inputs)
    return found


@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_several_backwards_are_torch_s_and_hooks_run_once_in_each(name: str) -> None:
    make, inputs = MODULES[name]
    expected = several(made(make), inputs, here=False)
    module = made(make)
    names = heard(module)
    require_same(several(module, inputs, here=True), expected)
    assert sorted(names) == sorted(
        3 * [name for name, parameter in module.named_parameters() if parameter.grad is not None]
    )


def large() -> nn.Sequential:
    """Weights of 23 x 8 and 29 x 8, of a size that nothing else has."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(23, 8), nn.Linear(8, 29)).double()


pytestmark = pytest.mark.usefixtures("gradients_of_any_size_are_added_in_place")

LARGE = {23 * 8, 29 * 8}
TOKENS = tokens(1, 3)


def made_in(backward: Callable[[], None]) -> set[int]:
    """Sizes of weights that a backward makes tensors of."""
    with Made() as found:
        backward()
    return found.numels & LARGE


@pytest.mark.parametrize("split", [False, True], ids=["whole", "B and W"])
def test_a_weight_s_gradient_is_made_once_and_then_only_added_to(split: bool) -> None:
    module = large()

    def backward() -> None:
        deferred = DeferredGradients()
        with deferred.recording() if split else adding_in_place([module]):
            output = module(TOKENS)
        output.backward(cotangent(output))
        deferred.compute()

    assert made_in(backward) == LARGE
    places = [parameter.grad for parameter in module.parameters()]
    assert made_in(backward) == set()
    assert all(p.grad is place for p, place in zip(module.parameters(), places, strict=True))


def test_without_it_they_are_made_every_time() -> None:
    """So that the test above can fail."""
    module = large()
    for _ in range(2):
        assert made_in(lambda: whole(module, [TOKENS]) and None) == LARGE


def test_room_that_is_offered_is_used_for_the_first_gradient_until_the_offer_is_taken_back() -> None:
    module = large()
    rooms = [torch.full_like(parameter, float("nan")) for parameter in module.parameters()]
    offers = [
        GradBufferOffer(p, lambda room=room: room) for p, room in zip(module.parameters(), rooms, strict=True)
    ]
    names = heard(module)

    def backward() -> None:
        with adding_in_place([module]):
            whole(module, [TOKENS])

    assert made_in(backward) == set()
    assert [p.grad is room for p, room in zip(module.parameters(), rooms, strict=True)] == [True, True, False]
    assert len(names) == 3
    assert made_in(backward) == set()
    require_same(gradients(module, [TOKENS]), several(large(), [TOKENS], here=False, times=2))
    module.zero_grad()
    for offer in offers:
        offer.remove()
    assert made_in(backward) == LARGE


def test_an_offer_may_be_declined_and_the_last_one_counts() -> None:
    module = large()
    weight = module[1].weight
    first = GradBufferOffer(weight, lambda: torch.zeros_like(weight))
    GradBufferOffer(weight, lambda: None)
    first.remove()  # was replaced
    with adding_in_place([module]):
        assert made_in(lambda: whole(module, [TOKENS]) and None) == LARGE


def test_of_complex_numbers_a_product_s_gradients_are_torch_s() -> None:
    def module() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Linear(8, 6, dtype=torch.complex128), nn.Linear(6, 3, dtype=torch.complex128)
        return nn.Sequential(*layers)

    x = torch.complex(values(2, 5, 8), values(2, 5, 8, seed=2))
    found = several(module(), [x], here=True)
    require_same(found, several(module(), [x], here=False))


class Counted(nn.Module):
    """A parametrization that does something else each time."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.times += 1
        return weight * self.times


@pytest.mark.parametrize("kind", [nn.Linear, nn.Embedding])
def test_a_weight_that_is_worked_out_of_others_is_so_once(kind: type[nn.Module]) -> None:
    layer = kind(9, 4)
    parametrize.register_parametrization(layer, "weight", Counted(), unsafe=True)
    counted = layer.parametrizations.weight[0]
    counted.times = 0
    x = torch.ones(2, 9) if kind is nn.Linear else TOKENS
    with adding_in_place([layer]):
        layer(x)
    assert counted.times == 1


def test_hooks_that_want_to_see_or_change_a_gradient_by_itself_do() -> None:
    seen: dict[bool, dict[str, list[Tensor]]] = {False: {}, True: {}}
    found: dict[bool, Gradients] = {}
    for here in (False, True):
        module = made(mlp)
        for name, parameter in module.named_parameters():
            seen[here][name] = []

            def doubled(gradient: Tensor, seen: list[Tensor] = seen[here][name]) -> Tensor:
                seen.append(gradient.clone())
                return gradient * 2

            parameter.register_hook(doubled)
        found[here] = several(module, [X], here=here)
    torch.testing.assert_close(seen[True], seen[False])
    require_same(found[True], found[False])


def test_where_torch_runs_no_hooks_for_a_gradient_of_none_autograd_adds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert grad_accumulation_fusion._hooks_run_without_a_gradient() in (False, True)
    monkeypatch.setattr(grad_accumulation_fusion, "_hooks_run_without_a_gradient", lambda: False)
    module = large()
    names = heard(module)
    for number in (1, 2):
        assert made_in(lambda: several(module, [TOKENS], here=True) and None) == LARGE
        assert all(names.count(name) == 3 * number for name, _ in module.named_parameters())


def parallel(comm: Communicator) -> nn.Module:
    """The same weights' sizes in parallel layers."""
    tp = TensorParallel(comm)
    column = ColumnParallelLinear(8, 23 * comm.size, tp)
    return nn.Sequential(column, RowParallelLinear(23 * comm.size, 29, tp)).double()


@pytest.mark.parametrize("there", [True, False], ids=["a gradient there", "room offered"])
@pytest.mark.parametrize("kind", ["torch's layers", "parallel layers"])
def test_gradients_that_are_asked_for_are_handed_over_and_nothing_is_added(kind: str, there: bool) -> None:
    def program(comm: Communicator) -> None:
        module = large() if kind == "torch's layers" else parallel(comm)
        x = TOKENS if kind == "torch's layers" else torch.ones(1, 3, 8, dtype=torch.float64)
        parameters = list(module.parameters())
        output = module(x)
        expected = torch.autograd.grad(output, parameters, cotangent(output))
        offers = []
        if there:
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
        else:
            offers = [GradBufferOffer(p, lambda p=p: torch.empty_like(p)) for p in parameters]
        before = [None if p.grad is None else p.grad.clone() for p in parameters]
        with adding_in_place([module]):
            first, second = module(x), module(x)
        found = torch.autograd.grad(first, parameters, cotangent(first))
        # Of a backward, too, that is for others.
        second.backward(cotangent(second), inputs=[parameters[-1]])
        torch.testing.assert_close(found, expected)
        for parameter, value in zip(parameters[:-1], before[:-1], strict=True):
            assert (parameter.grad is None) == (value is None)
            assert value is None or torch.equal(parameter.grad, value)
        for offer in offers:
            offer.remove()

    run_loopback(1 if kind == "torch's layers" else 2, program)


def test_a_gradient_of_gradients_is_torch_s() -> None:
    def penalty(here: bool) -> Gradients:
        module = made(mlp)
        whole(module, [X])
        x = X.clone().requires_grad_()
        with adding_in_place([module] if here else []):
            output = module(x)
        of_x, *of_parameters = torch.autograd.grad(
            output, [x, *module.parameters()], cotangent(output), create_graph=True
        )
        (of_x.square().sum() + sum(each.square().sum() for each in of_parameters)).backward()
        return gradients(module, [x])

    require_same(penalty(True), penalty(False))


TRANSFORMS: dict[str, Callable[[nn.Module], Tensor]] = {
    "vmap": lambda module: torch.func.vmap(module)(TOKENS),
    "jvp": lambda module: torch.func.jvp(module[1], (torch.ones(8).double(),), (torch.ones(8).double(),))[1],
    "grad": lambda module: torch.func.grad(lambda x: module[1](x).sum())(torch.ones(8).double()),
    "forward mode": lambda module: _tangent(module[1]),
}


def _tangent(module: nn.Module) -> Tensor:
    x = torch.ones(8).double()
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(module(forward_ad.make_dual(x, x))).tangent  # type: ignore


@pytest.mark.parametrize("name", TRANSFORMS)
def test_under_transforms_layers_are_torch_s(name: str) -> None:
    module = large()
    expected = TRANSFORMS[name](module)
    with adding_in_place([module]):
        assert torch.equal(TRANSFORMS[name](module), expected)


def test_layers_that_are_computed_anew_in_backward_add_in_place_too() -> None:
    module = large()

    def backward() -> None:
        with adding_in_place([module]):
            output = recompute(module[1], module[0](TOKENS))
            output.backward(cotangent(output))

    backward()
    assert made_in(backward) == set()
    backward()
    require_same(gradients(module, [TOKENS]), several(large(), [TOKENS], here=False))


def test_weights_too_small_for_it_and_layers_with_a_forward_of_their_own_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    with adding_in_place([own := Own(4, 4)]):
        assert "forward" not in vars(own)
    module = large()
    monkeypatch.setattr(fused_layers, "LEAST_NBYTES", 29 * 8 * 8)
    several(module, [TOKENS], here=True)
    assert made_in(lambda: several(module, [TOKENS], here=True) and None) == {23 * 8}


def test_afterwards_layers_are_as_they_were_also_after_an_error() -> None:
    module = large()
    with adding_in_place([module, module[1]]):
        assert "forward" in vars(module[1])
    with pytest.raises(IndexError), adding_in_place([module]):
        module(TOKENS + 1000)
    assert all("forward" not in vars(layer) for layer in module.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_gradients_are_torch_s(dtype: torch.dtype) -> None:
    def run(here: bool) -> Gradients:
        module = made(lambda: nn.Sequential(nn.Embedding(9, 8), mlp())).to(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            return several(module, [tokens(2, 5)], here=here)

    require_same(run(True), run(False), 2**-6)


def test_parallel_layers_add_to_their_gradients_where_they_lie() -> None:
    def program(comm: Communicator) -> tuple[set[int], bool]:
        module = parallel(comm)
        x = torch.ones(1, 3, 8, dtype=torch.float64)

        def backward() -> None:
            output = module(x)
            output.backward(cotangent(output))

        backward()
        places = [parameter.grad for parameter in module.parameters()]
        once = [place.clone() for place in places]
        with Made() as found:
            backward()
        doubled = all(torch.allclose(place, 2 * each) for place, each in zip(places, once, strict=True))
        return found.numels & {23 * 8, 29 * 23}, doubled

    for made_anew, doubled in run_loopback(2, program):
        assert made_anew == set()
        assert doubled
