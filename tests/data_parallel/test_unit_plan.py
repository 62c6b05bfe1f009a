from __future__ import annotations

import pytest
import torch
from torch import nn

from hpcpar.data_parallel.unit_plan import hides, layers_policy, plan_units, tensors_in
from hpcpar.errors import OperationError


def names(model: nn.Module, policy: object = None) -> dict[str, list[str]]:
    """Unit -> the names of its parameters."""
    plans = plan_units(model, policy)  # type: ignore[arg-type]
    return {plan.name: [name for name, _, _ in plan.parameters] for plan in plans}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.outer = nn.Linear(2, 2, bias=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(2, 3, bias=False)


def layer(number: int) -> list[str]:
    return [f"layers.{number}.{name}" for name in ("inner.weight", "inner.bias", "outer.weight")]


def test_layers_are_units_and_the_rest_is_the_roots_as_drawn() -> None:
    assert names(Model()) == {
        "": ["embed.weight", "head.weight"],
        "layers.0": layer(0),
        "layers.1": layer(1),
    }


def test_what_is_tied_within_the_root_is_listed_once_with_all_its_places() -> None:
    model = Model()
    model.head.weight = model.embed.weight
    root = plan_units(model)[0]
    assert [(name, places) for name, _, places in root.parameters] == [
        ("embed.weight", [(model.embed, "weight"), (model.head, "weight")])
    ]


def test_what_is_tied_across_units_belongs_to_the_unit_around_both() -> None:
    model = Model()
    model.layers[1].outer.weight = model.layers[0].outer.weight
    assert names(model)[""] == ["embed.weight", "layers.0.outer.weight", "head.weight"]
    assert names(model)["layers.0"] == layer(0)[:2]

    outer = nn.Sequential(nn.Linear(2, 2, bias=False), model)
    found = names(outer, lambda name, module: isinstance(module, Block | Model))
    assert found["1"] == ["1.embed.weight", "1.layers.0.outer.weight", "1.head.weight"]
    assert found[""] == ["0.weight"]


def test_what_is_tied_within_a_unit_stays_there() -> None:
    model = Model()
    model.layers[0].outer.weight = model.layers[0].inner.weight
    assert names(model)["layers.0"] == layer(0)[:2]


def test_of_nested_units_the_inner_one_has_its_parameters() -> None:
    model = Model()
    found = names(model, lambda name, module: name in ("layers.0", "layers.0.inner"))
    assert found == {
        "": ["embed.weight", *layer(1), "head.weight"],
        "layers.0": ["layers.0.outer.weight"],
        "layers.0.inner": ["layers.0.inner.weight", "layers.0.inner.bias"],
    }


def test_a_unit_all_of_whose_parameters_are_in_inner_ones_is_none_but_the_root_is() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    assert names(model, lambda name, module: True) == {"": [], "0.0": ["0.0.weight", "0.0.bias"]}


def test_of_lists_in_lists_the_outermost_members_are_units() -> None:
    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Model(), Block()])

    assert list(names(Stages())) == ["", "layers.0", "layers.1"]
    # A member that is a list itself is never called: its members are the units.
    nested = nn.Module()
    nested.stages = nn.ModuleList(nn.ModuleList(nn.Linear(1, 1) for _ in range(2)) for _ in range(2))
    assert list(names(nested)) == ["", "stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]


def test_lists_whose_names_begin_alike_are_different_lists() -> None:
    model = nn.Module()
    model.layer = nn.ModuleList([nn.Linear(1, 1)])
    model.layers = nn.ModuleList([nn.Linear(1, 1)])
    assert list(names(model)) == ["", "layer.0", "layers.0"]


def test_a_model_that_is_a_list_itself_has_its_members_as_units() -> None:
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    policy = layers_policy(model)
    assert [name for name, module in model.named_modules() if policy(name, module)] == ["0", "1"]


def test_a_module_that_is_reached_by_two_names_is_one_unit() -> None:
    model = Model()
    model.last = model.layers[1]
    assert list(names(model)) == ["", "layers.0", "layers.1"]


def test_a_model_without_lists_is_one_unit() -> None:
    assert names(nn.Linear(2, 2)) == {"": ["weight", "bias"]}


def test_a_policy_that_chooses_linear_layers() -> None:
    found = names(Model(), lambda name, module: isinstance(module, nn.Linear))
    assert found[""] == ["embed.weight"]
    assert [unit for unit in found if unit] == [
        "layers.0.inner",
        "layers.0.outer",
        "layers.1.inner",
        "layers.1.outer",
        "head",
    ]


def test_a_policy_that_chooses_nothing_is_refused() -> None:
    with pytest.raises(OperationError, match="the policy chooses none of the model's modules"):
        plan_units(Model(), lambda name, module: False)


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.ModuleDict])
def test_a_unit_that_is_never_called_is_refused(kind: type) -> None:
    model = nn.Module()
    model.members = (
        nn.ModuleDict({"a": nn.Linear(1, 1)}) if kind is nn.ModuleDict else nn.ModuleList([Model()])
    )
    with pytest.raises(
        OperationError, match=f"makes members a unit, which is a {kind.__name__} and is never"
    ):
        plan_units(model, lambda name, module: name == "members")


def test_tensors_are_found_in_what_modules_return() -> None:
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert [t.numel() for t in tensors_in([a, {"x": (b, None)}, "text", {"y": [c]}])] == [1, 2, 3]
    assert tensors_in(None) == tensors_in(object()) == []


def test_an_object_among_what_modules_return_may_hide_tensors() -> None:
    a = torch.zeros(1)
    assert not any(map(hides, [None, a, 1, 2.5, True, "text", (a, [None]), {"x": (a, 3)}, []]))
    assert all(map(hides, [object(), (a, object()), {"x": [object()]}]))
