"""Activations of a layer: measured as the paper counts, and as a table."""

from __future__ import annotations

import pytest

from hpcpar.bench.layer_activations import MeasuredActivations, measure, table, title
from hpcpar.errors import LayoutError
from hpcpar.planner.activations import TECHNIQUES, LayerShape

SHAPE = LayerShape(sequence=64, batch=2, hidden=64, heads=4)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_way_is_measured_within_five_percent_of_its_formula(tp: int) -> None:
    found = measure(SHAPE, tp)
    assert [(each.way, each.formula) for each in found] == [
        (name, way.formula) for name, way in TECHNIQUES.items()
    ]
    for each in found:
        assert each.formula_nbytes == TECHNIQUES[each.way].nbytes(SHAPE, tp)
        assert 0 <= each.beyond <= 0.05


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (LayerShape(64, 2, 60, 6), "heads=6 does not divide among tp=4 ranks"),
        (LayerShape(66, 2, 64, 4), "sequence=66 does not divide among tp=4 ranks"),
        (LayerShape(64, 2, 66, 4), "hidden=66 does not divide among heads=4"),
    ],
)
def test_a_shape_that_does_not_divide_is_refused_before_anything_is_measured(
    shape: LayerShape, words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        measure(shape, 4)


KEPT = [
    MeasuredActivations("none", "sbh(34 + 5as/h)", 1010, {"between the blocks": 200, "attention core": 800}),
    MeasuredActivations("full", "2sbh", 5, {"layer's input": 5}),
]


def test_a_line_has_both_numbers_and_how_far_they_are_apart() -> None:
    head, *lines = table(KEPT).splitlines()
    assert head.split() == ["formula", "formula", "bytes", "measured", "bytes", "beyond"]
    assert [line.split()[-4:] for line in lines] == [
        ["1,000", "1,010", "+1.00%", "█" * 32],
        ["5", "5", "+0.00%", "█"],
    ]


def test_the_title_has_the_papers_letters() -> None:
    assert "s=64 b=2 h=64 a=4 (5as/h = 20), t=2" in title(SHAPE, 2)
