"""The paper's formulas for activations, held to the paper's table."""

from __future__ import annotations

import pytest

from hpcpar.planner.activations import TECHNIQUES, LayerShape, layer_nbytes
from hpcpar.units import MiB

S = 2048
TP = 8

# heads, hidden, microbatch; 5as/h; MiB per layer, in the order of TECHNIQUES
TABLE = {
    "22 B": ((64, 6144, 4), "106.7", "6752 1264 844 624 204 96"),
    "175 B": ((96, 12288, 1), "80.0", "2736 552 342 312 102 48"),
    "530 B": ((128, 20480, 1), "64.0", "3920 840 490 520 170 80"),
    "1 T": ((160, 25600, 1), "64.0", "4900 1050 612.5 650 212.5 100"),
}


def shape_of(model: str) -> LayerShape:
    heads, hidden, batch = TABLE[model][0]
    return LayerShape(S, batch, hidden, heads)


@pytest.mark.parametrize("model", list(TABLE))
def test_the_table_of_the_paper_is_reproduced_to_its_printed_digits(model: str) -> None:
    _, core, row = TABLE[model]
    shape = shape_of(model)
    assert f"{shape.core_nbytes / shape.sbh:.1f}" == core
    assert list(TECHNIQUES) == ["none", "TP", "TP+SP", "TP+selective", "TP+SP+selective", "full"]
    assert " ".join(f"{way.nbytes(shape, TP) / MiB:g}" for way in TECHNIQUES.values()) == row


def test_a_layer_drawn_by_hand() -> None:
    shape = LayerShape(sequence=4, batch=1, hidden=2, heads=1)  # sbh = 8, 5as²b = 80
    assert layer_nbytes(shape) == 34 * 8 + 80
    assert layer_nbytes(shape, 2) == 10 * 8 + 12 * 8 + 40
    assert layer_nbytes(shape, 2, sequence_parallel=True) == 17 * 8 + 40
    assert layer_nbytes(shape, 2, sequence_parallel=True, recompute="selective") == 17 * 8
    assert layer_nbytes(shape, 2, recompute="full") == 16
    assert layer_nbytes(shape, 2, sequence_parallel=True, recompute="full") == 8


@pytest.mark.parametrize("model", list(TABLE))
def test_one_rank_keeps_what_a_layer_that_is_not_divided_keeps(model: str) -> None:
    shape = shape_of(model)
    assert (
        TECHNIQUES["none"].nbytes(shape, TP)
        == TECHNIQUES["TP"].nbytes(shape, 1)
        == TECHNIQUES["TP+SP"].nbytes(shape, 1)
    )


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
def test_sequence_parallelism_divides_everything(tp: int) -> None:
    shape = LayerShape(sequence=24, batch=3, hidden=48, heads=24)
    assert layer_nbytes(shape, tp, sequence_parallel=True) == pytest.approx(layer_nbytes(shape) / tp)
