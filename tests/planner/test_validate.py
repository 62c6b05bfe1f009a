"""Rows of measured steps: reading, fitting, errors and regret. The rows here are made by the model itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcpar.errors import ConfigError
from hpcpar.planner.cluster import Cluster
from hpcpar.planner.constants import constants_of, read_constants, with_constants, write_constants
from hpcpar.planner.software import SOFTWARE
from hpcpar.planner.validate import Judged, MeasuredStep, Validation, read_rows, validate

VTRAIN_HEADER = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,"
    "tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)"
)
HEADER = "model,devices,global_batch,microbatch,sequence,tp,dp,pp,step_ms,software,machine"

LAYOUTS = [
    (tp, dp, pp, microbatch)
    for tp, dp, pp in ((1, 8, 1), (2, 4, 1), (4, 2, 1), (8, 1, 1), (1, 2, 4), (2, 2, 2), (4, 1, 2), (1, 4, 2))
    for microbatch in (1, 2, 4)
]


def _rows(path: Path, times: list[float] | None = None) -> list[MeasuredStep]:
    lines = [HEADER]
    for index, (tp, dp, pp, microbatch) in enumerate(LAYOUTS):
        ms = 1000.0 if times is None else 1000 * times[index]
        lines.append(f"gpt-3.6b,8,64,{microbatch},2048,{tp},{dp},{pp},{ms},megatron,a100-dgx")
    path.write_text("\n".join(lines) + "\n")
    return read_rows(path)


def test_constants_of_another_machine_are_found_from_a_fifth_of_its_rows(tmp_path: Path) -> None:
    start = constants_of(Cluster.named("a100-dgx"), SOFTWARE["megatron"])
    other = {**start, "device.efficiency.matrix": 0.6, "node.beta_s_per_byte": 1 / 120e9}
    other["software.whole"] = 2 * start["software.whole"]
    rows = _rows(tmp_path / "rows.csv")
    rows = _rows(tmp_path / "rows.csv", [row.predicted(other) for row in rows])
    before, after = validate(rows, share=0), validate(rows, share=0.25)
    assert before.mean_error > 0.1
    assert after.mean_error < 0.03
    assert after.fitted == 6
    assert len(after.judged) == len(rows) - 6
    assert max(after.regrets) < 0.02


def test_one_odd_row_does_not_move_the_constants(tmp_path: Path) -> None:
    start = constants_of(Cluster.named("a100-dgx"), SOFTWARE["megatron"])
    rows = _rows(tmp_path / "rows.csv")
    times = [row.predicted(start) for row in rows]
    times[4] *= 3
    found = validate(_rows(tmp_path / "rows.csv", times), share=0.9)
    assert found.constants["device.efficiency.matrix"] == pytest.approx(
        start["device.efficiency.matrix"], rel=0.03
    )


def test_regret_is_of_the_layout_that_the_prediction_prefers(tmp_path: Path) -> None:
    rows = _rows(tmp_path / "rows.csv", [1.0] * len(LAYOUTS))[:3]
    measured = [1.2, 1.0, 1.5]
    predicted = [0.9, 1.1, 2.0]
    rows = [
        MeasuredStep(2, row.model, row.cluster, row.software, row.strategy, s)
        for row, s in zip(rows, measured, strict=True)
    ]
    found = Validation({}, 0, tuple(Judged(row, s, False) for row, s in zip(rows, predicted, strict=True)))
    assert found.regrets == [pytest.approx(0.2)]
    assert "3 rows judged, constants fitted on 0 others" in found.summary()


def test_headers_of_vtrain_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"{VTRAIN_HEADER}\n64,512,8,3072,32,30,2048,2,16,2,3975.2\n")
    (row,) = read_rows(path)
    assert (row.strategy.layout.tp, row.strategy.layout.dp, row.strategy.layout.pp) == (2, 16, 2)
    assert row.strategy.recompute.mode == "full"
    assert row.step_s == pytest.approx(3.9752)
    assert row.cluster.size == 64


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gpt-3.6b,8,64,1,2048,2,2,1,100,megatron,a100-dgx", "line 2.*4 ranks, but devices = 8"),
        ("gpt-3.6,8,64,1,2048,2,4,1,100,megatron,a100-dgx", "did you mean 'gpt-3.6b'"),
        ("gpt-3.6b,8,64,1,2048,2,4,1,,megatron,a100-dgx", "line 2: the row lacks step_ms"),
        ("gpt-3.6b,8,64,1,2048,2,4,1,5,megatrom,a100-dgx", "no software is called 'megatrom'"),
        ("gpt-3.6b,8,65,1,2048,2,4,1,5,megatron,a100-dgx", "take global_batch=68"),
    ],
)
def test_a_row_that_cannot_be_is_refused_by_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"{HEADER}\n{line}\n")
    with pytest.raises(ConfigError, match=message):
        read_rows(path)


def test_constants_are_kept_in_a_file_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    cluster, software = Cluster.named("h800"), SOFTWARE["hpcpar"]
    constants = constants_of(cluster, software)
    write_constants(tmp_path / "mine.json", constants)
    assert read_constants(str(tmp_path / "mine.json")) == pytest.approx(constants, rel=1e-4)
    assert with_constants(cluster, software, constants) == (cluster, software)
    with pytest.raises(ConfigError, match=r"no constant 'device\.speed'"):
        with_constants(cluster, software, {"device.speed": 1.0})
    with pytest.raises(ConfigError, match="vtrain-multi"):
        read_constants("vtrain")
