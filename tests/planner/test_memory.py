"""Model state by stage of ZeRO, held to the figures of the paper."""

from __future__ import annotations

import pytest

from hpcpar.planner.memory import (
    BUILDING,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    MemoryNeed,
    StateWidths,
    model_state_nbytes,
)
from hpcpar.units import GB

ADAM = StateWidths.of("bfloat16", moments=2)
PHI = 7_500_000_000


def state_gb(phi: int, stage: int, ranks: int) -> float:
    return sum(model_state_nbytes(phi, ADAM, stage=stage, ranks=ranks).values()) / GB


@pytest.mark.parametrize(
    ("stage", "printed"), [(0, "120.0"), (1, "31.4"), (2, "16.6"), (3, "1.9")]
)  # ZeRO, figure 1: 7.5 billion parameters on 64 ranks
def test_the_first_figure_of_the_zero_paper_is_reproduced(stage: int, printed: str) -> None:
    assert f"{state_gb(PHI, stage, 64):.1f}" == printed


@pytest.mark.parametrize(
    ("ranks", "printed"),
    [
        (1, "2048 2048 2048"),
        (4, "896 704 512"),
        (16, "608 368 128"),
        (64, "536 284 32"),
        (256, "518 263 8"),
        (1024, "513 257 2"),
    ],
)  # ZeRO, table 1, in GB; it prints 257 for 257.75
def test_the_first_table_of_the_zero_paper_follows_for_128_billion_parameters(
    ranks: int, printed: str
) -> None:
    expected = [float(each) for each in printed.split()]
    assert [state_gb(128 * GB, stage, ranks) for stage in (1, 2, 3)] == pytest.approx(expected, abs=0.8)


@pytest.mark.parametrize(
    ("precision", "options", "widths"),
    [
        ("float32", {"moments": 2}, (4, 4, 8, 4)),
        ("float64", {"moments": 2}, (8, 8, 16, 8)),
        ("float16", {"moments": 2}, (2, 2, 12, 4)),
        ("bfloat16", {"moments": 1}, (2, 2, 8, 4)),
        ("bfloat16", {"moments": 2, "moment_dtype": "bfloat16"}, (2, 2, 8, 4)),
        ("bfloat16", {"moments": 2, "sum_dtype": "float32"}, (2, 4, 12, 4)),
        ("float32", {"moments": 0}, (4, 4, 0, 4)),
    ],
)
def test_bytes_per_parameter_follow_from_the_types(
    precision: str, options: dict[str, int], widths: tuple[int, ...]
) -> None:
    assert StateWidths.of(precision, **options) == StateWidths(*widths)  # type: ignore[arg-type]


def test_parameters_that_a_node_shares_are_divided_among_its_ranks_alone() -> None:
    state = model_state_nbytes(800, ADAM, stage=3, ranks=8, node_sharers=2)
    assert state == {PARAMETERS: 800, GRADIENTS: 200, OPTIMIZER: 1200}


def test_offloaded_state_lies_on_the_host_or_on_disk_beside_a_gpu() -> None:
    state = {PARAMETERS: 2, GRADIENTS: 3, OPTIMIZER: 10}
    for offload, host in (("cpu", {OPTIMIZER: 10, BUILDING: 4}), ("/scratch", {BUILDING: 4})):
        need = MemoryNeed.of(state, building_nbytes=4, offload=offload, on_gpu=True)
        assert need == MemoryNeed(host, {PARAMETERS: 2, GRADIENTS: 3})
    kept = MemoryNeed.of(state, building_nbytes=4, offload=None, on_gpu=False)
    assert kept == MemoryNeed(state, {})
    building = MemoryNeed.of(state, building_nbytes=99, offload=None, on_gpu=False)
    assert building == MemoryNeed({BUILDING: 99}, {})
