"""One stage by itself: its forward, backward and weights' part beside autograd's own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpcpar.autograd import recompute
from hpcpar.comm import Communicator
from hpcpar.data_parallel import fully_shard
from hpcpar.errors import BufferTypeError, OperationError
from hpcpar.pipeline_parallel.stage import Stage, poking_between_layers
from hpcpar.pipeline_parallel.tensor_spec import OutputSpec, TensorSpec, as_tensors, spec_of

WITH_GRADIENT = OutputSpec((TensorSpec((2, 3), torch.float64, True),))


def stage(seed: int = 0) -> Stage:
    torch.manual_seed(seed)
    return Stage(1, nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).double())


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradients_of(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def truth(x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    module = stage().module
    x = x.clone().requires_grad_()
    output = module(x)
    output.backward(gradient)
    assert x.grad is not None
    return output.detach(), x.grad, gradients_of(module)


@pytest.mark.parametrize("split", [False, True])
def test_forward_and_backward_are_those_of_autograd_and_weights_come_with_w_where_split(split):
    own, x, gradient = stage(), drawn(2, 3), drawn(2, 2, seed=2)
    output = own.forward(0, (x,), WITH_GRADIENT, split=split)
    assert own.alive == 1
    (of_x,) = own.backward(0, (gradient,))
    if split:
        assert own.alive == 1
        assert gradients_of(own.module) == [None] * 6
        own.weights(0)
    assert own.alive == 0
    expected, expected_of_x, of_weights = truth(x, gradient)
    torch.testing.assert_close(output.detach(), expected)
    torch.testing.assert_close(of_x, expected_of_x)
    torch.testing.assert_close(gradients_of(own.module), of_weights)
    assert x.grad is None
    assert not x.requires_grad


class Recomputed(nn.Module):
    def __init__(self, how: Callable[..., Tensor]) -> None:
        super().__init__()
        self.how = how
        self.layers = stage().module

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.layers, x)


@pytest.mark.parametrize(
    "how", [recompute, partial(checkpoint, use_reentrant=True), partial(checkpoint, use_reentrant=False)]
)
def test_a_split_backward_of_what_is_recomputed_is_autograds_or_an_error_that_says_how_it_can_be(how):
    own, x, gradient = Stage(1, Recomputed(how)), drawn(2, 3), drawn(2, 2, seed=2)
    own.forward(0, (x,), WITH_GRADIENT, split=True)
    if how is not recompute and not how.keywords["use_reentrant"]:
        with pytest.raises(OperationError, match=r"stage 1 recomputes by .*: call hpcpar.autograd.recompute"):
            own.backward(0, (gradient,))
        return
    (of_x,) = own.backward(0, (gradient,))
    own.weights(0)
    _, expected_of_x, of_weights = truth(x, gradient)
    torch.testing.assert_close(of_x, expected_of_x)
    torch.testing.assert_close(gradients_of(own.module), of_weights)


def test_a_split_backward_of_a_fully_sharded_stage_says_which_schedules_can_be_had():
    """The model's own error would advise to use weights inside its forward, which W cannot."""
    own = Stage(1, fully_shard(nn.Linear(3, 2).double(), Communicator.alone()))
    own.forward(0, (drawn(2, 3),), WITH_GRADIENT, split=True)
    own.backward(0, (drawn(2, 2),))
    with pytest.raises(
        OperationError, match=r"stage 1 is fully sharded .*: take one without W, such as 1f1b"
    ):
        own.weights(0)


def test_between_b_and_w_only_what_the_weights_need_is_kept():
    own = Stage(1, nn.Sequential(nn.Tanh(), nn.Linear(3, 2)).double())
    x = drawn(2, 3)
    gone = weakref.ref(x.untyped_storage())
    own.forward(0, (x,), WITH_GRADIENT, split=True)
    del x
    assert gone() is not None
    own.backward(0, (drawn(2, 2),))
    assert gone() is None
    own.weights(0)
    assert own.module[1].weight.grad is not None


def test_microbatches_end_in_another_order_than_they_began_and_add_up():
    own, x, gradient = stage(), drawn(2, 3), drawn(2, 2, seed=2)
    for microbatch in (0, 1):
        own.forward(microbatch, (x * (1 + microbatch),), WITH_GRADIENT)
    assert own.alive == 2
    found = {microbatch: own.backward(microbatch, (gradient,))[0] for microbatch in (1, 0)}
    of_weights = [sum(pair) for pair in zip(truth(x, gradient)[2], truth(2 * x, gradient)[2], strict=True)]
    torch.testing.assert_close(found[0], truth(x, gradient)[1])
    torch.testing.assert_close(found[1], truth(2 * x, gradient)[1])
    torch.testing.assert_close(gradients_of(own.module), of_weights)


def test_a_loss_starts_its_own_backward():
    own = stage()
    loss = own.forward(0, (drawn(2, 3),), WITH_GRADIENT, loss=lambda output: output.sum())
    (of_x,) = own.backward(0, ())
    output, expected, of_weights = truth(drawn(2, 3), torch.ones(2, 2, dtype=torch.float64))
    assert loss.item() == pytest.approx(output.sum().item())
    torch.testing.assert_close(of_x, expected)
    torch.testing.assert_close(gradients_of(own.module), of_weights)


def test_weights_that_the_loss_uses_too_get_one_gradient_and_with_w_where_split():
    own, came = stage(), []
    for weight in own.module.parameters():
        weight.register_post_accumulate_grad_hook(lambda each: came.append(each.grad.clone()))

    def loss(output: Tensor) -> Tensor:
        return output.sum() + sum(weight.pow(2).sum() for weight in own.module.parameters())

    own.forward(0, (drawn(2, 3),), WITH_GRADIENT, split=True, loss=loss)
    own.backward(0, ())
    assert not came
    own.weights(0)
    assert len(came) == 6
    of_weights = truth(drawn(2, 3), torch.ones(2, 2, dtype=torch.float64))[2]
    expected = [of + 2 * weight for of, weight in zip(of_weights, own.module.parameters(), strict=True)]
    torch.testing.assert_close(gradients_of(own.module), expected)


@pytest.mark.parametrize("number", [0, 1])
def test_a_stage_that_changes_its_input_in_place_is_told_what_to_do(number):
    own = Stage(number, nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2)).double())
    if number == 0:  # the caller's own tensor, as in one process
        own.forward(0, (drawn(2, 3),), None)
        return
    with pytest.raises(OperationError, match=r"stage 1 changes its input in place .*: set inplace=False"):
        own.forward(0, (drawn(2, 3),), WITH_GRADIENT)


def test_a_parameter_that_is_changed_in_place_keeps_torchs_words_where_no_input_wants_a_gradient():
    class Scales(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.mul_(2)
            return super().forward(x)

    with pytest.raises(RuntimeError, match=r"^a leaf Variable that requires grad"):
        Stage(0, Scales(3, 2).double()).forward(0, (drawn(2, 3),), None)


@pytest.mark.parametrize("split", [False, True])
def test_a_stage_that_changes_what_an_earlier_microbatch_needs_is_told_what_to_do(split):
    class Growing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.factor = self.factor.mul_(2) if hasattr(self, "factor") else torch.ones_like(self.bias)
            return super().forward(x) * self.factor

    own = Stage(1, Growing(3, 2).double())
    for microbatch in (0, 1):
        own.forward(microbatch, (drawn(2, 3),), WITH_GRADIENT, split=split)
    with pytest.raises(OperationError, match=r"stage 1 changes in place what .*: .* a clone\(\) of it, or"):
        own.backward(0, (drawn(2, 2),))


class Pair(nn.Module):
    """(x, y, indices, None) -> (x passed through, 2x, indices, no y)."""

    def forward(self, x: Tensor, y: Tensor, indices: Tensor, none: None) -> tuple[Any, ...]:
        assert none is None
        return x, 2 * x, indices, y.detach()


def test_gradients_of_several_outputs_meet_and_what_nothing_that_is_used_depends_on_has_none():
    own = Stage(1, Pair())
    x, y, indices = drawn(2, 3), drawn(4), torch.arange(3)
    spec = spec_of((x.requires_grad_(), y.requires_grad_(), indices, None))
    outputs = as_tensors(own.forward(0, (x.detach(), y.detach(), indices, None), spec), "stage 1")
    assert [each.requires_grad for each in spec_of(outputs).present] == [True, True, False, False]
    tens, ones = torch.full((2, 3), 10.0).double(), torch.ones(2, 3).double()
    of_x, of_y = own.backward(0, (tens, ones))
    assert of_x.tolist() == [[12.0] * 3] * 2
    assert of_y is None
    for gradients, of_each in (((None, ones), 2.0), ((None, None), None)):
        own.forward(1, (x.detach(), y.detach(), indices, None), spec)
        of_x, _ = own.backward(1, gradients)
        assert (of_x is None) if of_each is None else of_x.eq(of_each).all()


def test_the_gradient_of_an_input_is_dense_though_a_layer_makes_a_sparse_one():
    class Lookup(nn.Module):
        def forward(self, table: Tensor) -> Tensor:
            return nn.functional.embedding(torch.tensor([1, 1]), table, sparse=True)

    own = Stage(1, Lookup())
    own.forward(0, (drawn(2, 3),), WITH_GRADIENT)
    (found,) = own.backward(0, (torch.ones(2, 3).double(),))
    assert found.tolist() == [[0.0] * 3, [2.0] * 3]


def test_a_stage_without_anything_to_learn_has_a_backward_that_does_nothing():
    own = Stage(0, nn.Identity())
    own.forward(0, (drawn(2),), None)
    assert own.backward(0, ()) == ()
    assert own.alive == 0


def test_without_grad_nothing_is_kept():
    own = stage()
    with torch.no_grad():
        output = own.forward(0, (drawn(2, 3),), WITH_GRADIENT, split=True)
    assert own.alive == 0
    assert not output.requires_grad


def test_an_output_is_free_while_its_backward_is_waited_for():
    own = stage()
    output = own.forward(0, (drawn(2, 3),), WITH_GRADIENT)
    gone = weakref.ref(output.untyped_storage())
    del output
    assert gone() is None
    own.backward(0, (drawn(2, 2, seed=2),))
    torch.testing.assert_close(gradients_of(own.module), truth(drawn(2, 3), drawn(2, 2, seed=2))[2])


@pytest.mark.parametrize("loss", [lambda output: output, lambda output: 3.0])
def test_a_loss_of_anything_but_one_number_is_refused(loss):
    with pytest.raises(
        OperationError, match=r"microbatch 5 must be a tensor of one number, not (\[2, 2\]|float)"
    ):
        stage().forward(5, (drawn(2, 3),), WITH_GRADIENT, loss=loss)


def test_a_loss_from_which_nothing_would_be_learnt_is_refused():
    own = stage()
    with pytest.raises(OperationError, match="microbatch 5 requires no gradient"):
        own.forward(5, (drawn(2, 3),), WITH_GRADIENT, loss=lambda output: output.detach().sum())
    with torch.no_grad():  # as in an evaluation
        own.forward(5, (drawn(2, 3),), WITH_GRADIENT, loss=lambda output: output.sum())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_cannot_go_to_the_next_stage_is_refused_by_its_place():
    nested = torch.nested.nested_tensor([drawn(2), drawn(3)])
    holding = torch.nested.nested_tensor([drawn(2), drawn(3)], layout=torch.jagged)
    for output, kind in (({}, "dict"), (nested, "nested tensor"), (holding, "nested tensor")):
        with pytest.raises(BufferTypeError, match=f"stage 1 returned a {kind} at place 0 of 1"):
            as_tensors(output, "stage 1")
    with pytest.raises(
        BufferTypeError, match=r"stage 2 returned a tensor of float64, .*sparse_coo.* place 1 of 2"
    ):
        as_tensors((None, drawn(2, 2).to_sparse()), "stage 2")


def test_layers_with_parameters_poke_in_forward_and_backward_as_long_as_they_are_asked_to():
    module, pokes = stage().module, []
    with poking_between_layers([module], lambda: pokes.append(1)):
        output = module(drawn(2, 3))
        assert len(pokes) == 3
        output.sum().backward()
        assert len(pokes) == 6
    module(drawn(2, 3)).sum().backward()
    assert len(pokes) == 6


def test_a_layer_that_returns_its_parameter_keeps_no_hook_on_it():
    class Constant(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return self.weight

    module, pokes = Constant(3, 2), []
    with poking_between_layers([module], lambda: pokes.append(1)):
        module(drawn(2, 3)).sum().backward()
    assert pokes
    pokes.clear()
    module(drawn(2, 3)).sum().backward()
    assert not pokes
