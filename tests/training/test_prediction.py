"""Every summary has the planner's figures beside the measured ones."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from hpcpar.comm import run_loopback
from hpcpar.errors import ConfigError
from hpcpar.mesh import Layout
from hpcpar.planner.cluster import MACHINES
from hpcpar.training import Config, Run
from hpcpar.training.prediction import MAKE_MACHINE, PredictedLine, machine_of, median_step_s, strategy_of
from tests.training.runs import MakeConfig

COMMON = (
    *("train.precision=float32", "train.global_batch=8", "train.microbatch=2", "train.steps=3"),
    *("model.layers=2", "model.heads=4", "model.kv_heads=2", "model.hidden_size=32"),
)


def told_by(
    config: Config, size: int, nodes: Sequence[int] | None = None
) -> tuple[dict[str, dict[str, float]], str]:
    """Train; return the figures of summary.json by name, and what was printed."""
    consoles = [Console(file=io.StringIO(), width=80) for _ in range(size)]
    run_loopback(size, lambda comm: Run(config, comm, console=consoles[comm.rank]).train(), nodes=nodes)
    summary = json.loads((config.output.directory / "summary.json").read_text())
    figures = {line["what"]: line for line in summary["prediction"]["figures"]}
    return figures, consoles[0].file.getvalue()  # type: ignore[attr-defined]


EXPERTS = ("model.experts.count=5", "model.experts.per_token=2", "model.experts.ffn_size=48")
OF_FOUR = [
    ("mesh.ep=2", "mesh.tp=2"),
    ("mesh.ep=2", "mesh.tp=2", "mesh.etp=2", "train.microbatch=4"),
    ("mesh.ep=2", "mesh.pp=2", "model.layers=4", "model.ffn_size=128"),
    (
        *("mesh.ep=4", "mesh.tp=2", "tensor_parallel.sequence_parallel=true"),
        "model.experts.shared_ffn_size=24",
    ),
]


@pytest.mark.parametrize(
    "options",
    [
        ("optimizer.zero_stage=0",),
        ("optimizer.zero_stage=2",),
        ("optimizer.zero_stage=3", "train.recompute=full"),
        ("mesh.tp=2", "optimizer.algorithm=ring"),
        ("mesh.tp=2", "tensor_parallel.sequence_parallel=true"),
        (
            *("mesh.tp=2", "tensor_parallel.sequence_parallel=true", "tensor_parallel.gather_again=true"),
            "model.dropout=0.1",
        ),
        ("mesh.pp=2", "model.layers=4", "model.ffn_size=128"),  # layers that divide evenly, by flops too
        ("mesh.pp=2", "model.layers=4", "train.recompute=full", "train.recompute_layers=1"),
        (
            *("mesh.pp=2", "pipeline.schedule=zb-v", "model.layers=4", "model.tie_embeddings=true"),
            "data.pack_documents=true",
        ),
        ("mesh.pp=2", "pipeline.schedule=interleaved", "model.layers=5"),
        ("mesh.cp=2",),
        ("mesh.cp=2", "context_parallel.keep=true", "model.qk_norm=head"),
        (
            *("mesh.cp=2", "context_parallel.method=ulysses"),
            *("train.precision=bfloat16", "optimizer.reduction=float32"),
        ),
        ("mesh.dp_shard=1", "optimizer.zero_stage=2"),
        ("optimizer.name=muon", "optimizer.zero_stage=0"),
        ("optimizer.name=sgd", "optimizer.zero_stage=3"),
        ("mesh.ep=2", *EXPERTS),
        ("mesh.tp=2", "train.recompute=full", "model.dropout=0.1", *EXPERTS),
        *((*options, *EXPERTS) for options in OF_FOUR),
    ],
    ids=" ".join,
)
def test_memory_and_bytes_are_predicted(
    config_of: MakeConfig, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCPAR_MACHINE", str(MACHINES / "two-cores.toml"))
    is_of_four = options[: -len(EXPERTS)] in OF_FOUR
    figures, printed = told_by(config_of(*COMMON, *options), 4 if is_of_four else 2)
    for what in ("parameters", "gradients", "optimizer state"):
        assert figures[what]["predicted"] == pytest.approx(figures[what]["measured"], rel=0.01), what
    # In full recomputation one layer at a time is recomputed on top of the inputs that are kept.
    if options[-1] != "train.recompute=full":
        # Also where experts' loads are uneven, as they are here.
        assert figures["activations"]["predicted"] == pytest.approx(
            figures["activations"]["measured"], rel=0.02
        )
    assert figures["bytes sent"]["error"] == 0
    assert figures["step"]["predicted"] > 0
    assert figures["step"]["measured"] > 0
    assert "Predicted by the planner, and measured" in printed


def test_the_fullest_rank_is_of_its_stage_where_the_mesh_reorders_the_job(
    config_of: MakeConfig,
) -> None:
    config = config_of(*COMMON, "mesh.pp=2", "mesh.tp=2", "model.layers=4", "pipeline.balance=[1,3]")
    figures, _ = told_by(config, 4, nodes=(0, 1, 0, 1))
    assert figures["parameters"]["error"] == figures["optimizer state"]["error"] == 0


def test_without_a_description_of_the_machine_the_command_that_makes_it_is_told(
    config_of: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCPAR_MACHINE", str(tmp_path / "none.toml"))
    figures, printed = told_by(config_of(*COMMON), 2)
    assert figures["step"]["predicted"] is None
    assert figures["step"]["error"] is None
    assert figures["parameters"]["predicted"] > 0
    assert "there is no description of this machine" in printed
    assert "bench fit lines.jsonl --machine own" in " ".join(printed.split())


def test_a_run_that_the_planner_has_no_figures_for_says_so_and_ends_well(config_of: MakeConfig) -> None:
    figures, printed = told_by(config_of("train.global_batch=5", "train.microbatch=2"), 2)
    assert figures["parameters"]["predicted"] is None
    assert figures["parameters"]["measured"] > 0
    assert "not predicted: global_batch=5 does not divide" in " ".join(printed.split())


@pytest.mark.parametrize(("batch", "most", "size"), [(16, 8, 4), (24, 4, 3), (16, 3, 2), (8, 1, 1)])
def test_a_microbatch_is_as_long_as_the_run_makes_it(
    config_of: MakeConfig, batch: int, most: int, size: int
) -> None:
    config = config_of(f"train.global_batch={batch}", f"train.microbatch={most}", "mesh.dp=4")
    assert strategy_of(config).microbatch == size


def test_an_offloaded_state_is_measured_alone(config_of: MakeConfig, tmp_path: Path) -> None:
    figures, _ = told_by(config_of(*COMMON, f"optimizer.offload={tmp_path / 'state'}"), 2)
    assert figures["optimizer state"]["predicted"] is None
    assert figures["optimizer state"]["measured"] > 0
    assert figures["gradients"]["predicted"] > 0


def test_a_description_of_fewer_ranks_to_a_node_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"3 devices do not fill nodes of 2"):
        machine_of(MACHINES / "two-cores.toml", Layout(dp=3))
    with pytest.raises(ConfigError, match=MAKE_MACHINE[:30]):
        machine_of(tmp_path / "none.toml", Layout())


def test_the_step_is_the_median_of_this_run() -> None:
    records = [{"step": n, "step_s": float(n)} for n in range(9)] + [{"step": 9, "held_out_loss": 1.0}]
    assert median_step_s(records, 0) == 4
    assert median_step_s(records, 6) == 7
    assert median_step_s(records, 9) is None
    assert PredictedLine("step", "seconds", 1.1, 1.0).error == pytest.approx(0.1)
    assert PredictedLine("step", "seconds", None, 1.0).error is None
