"""The rules of thumb, and where a search departs from them; what would make a layout fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcpar.planner.cluster import Cluster
from hpcpar.planner.explain import by_part, difference, walk
from hpcpar.planner.model_shapes import ModelShape
from hpcpar.planner.remedies import fewest_nodes, remedies
from hpcpar.planner.search import PlanRequest, fits_somewhere, search


def request_for(name: str, nodes: int, batch: int, **fixed: tuple[object, ...]) -> PlanRequest:
    cluster = Cluster.named("h100-dgx").with_nodes(nodes)
    return PlanRequest(ModelShape.named(name), cluster, batch, 4096, fixed=fixed)


def test_a_model_that_fits_a_device_is_data_parallel() -> None:
    request = request_for("125m", 1, 64)
    found = walk(request, search(request, top=1))
    assert found.by_rule is not None
    assert found.by_rule.strategy.layout.dp == 8
    assert len(found.steps) == 2
    assert "agrees" in found.departure() or "as good" in found.departure() or "departs" in found.departure()


def test_one_that_does_not_is_tensor_parallel_and_then_across_nodes() -> None:
    request = request_for("llama3-70b", 16, 256)
    found = walk(request, search(request, top=1))
    assert found.by_rule is not None
    assert found.by_rule.strategy.layout.tp > 1
    assert "memory over by" in found.steps[0].found
    request = request_for("llama3-405b", 64, 512)
    found = walk(request, search(request, top=1))
    assert found.by_rule is not None
    assert [step.estimate is not None for step in found.steps] == [False, False, True, False]
    assert "ZeRO-3" in found.steps[2].found
    assert found.searched is not None
    assert found.searched.step_s <= found.by_rule.step_s * (1 + 1e-9)


def test_no_rule_helps_where_nothing_fits() -> None:
    request = request_for("llama3-405b", 1, 64)
    found = walk(request, search(request, top=1))
    assert found.by_rule is None
    assert found.departure() == "no layout fits, whatever the rules"


def test_a_difference_is_made_of_its_parts() -> None:
    one = search(request_for("llama3-8b", 1, 64, tp=(8,)), top=1).best
    other = search(request_for("llama3-8b", 1, 64, dp=(8,)), top=1).best
    pairs = by_part(one, other)
    changes = sum(after - before for before, after in pairs.values())
    assert changes == pytest.approx(other.step_s - one.step_s)
    assert "tensor parallel -" in difference(one, other)


@pytest.mark.parametrize(
    ("name", "batch", "fixed"),
    [
        ("llama3-8b", 64, {}),
        ("llama3-405b", 64, {}),
        ("llama3-70b", 512, {"pp": (8,)}),
        ("llama3-70b", 30, {"cp": (1,), "pp": (1,)}),
        ("llama3-70b", 7, {"cp": (1,), "pp": (1,)}),
    ],
)
def test_no_number_of_nodes_below_the_fewest_fits(
    name: str, batch: int, fixed: dict[str, tuple[int, ...]]
) -> None:
    request = replace(request_for(name, 1, batch), fixed=fixed)
    fitting = [
        nodes
        for nodes in range(1, 65)
        if fits_somewhere(replace(request, cluster=request.cluster.with_nodes(nodes)))
    ]
    assert fewest_nodes(request, most=64) == min(fitting, default=None)


def test_every_remedy_helps() -> None:
    request = request_for("llama3-70b", 1, 64, recompute=("none",))
    assert not fits_somewhere(request)
    found = list(remedies(request))
    assert found
    assert all(fits_somewhere(one.request) for one in found)
