"""A run that needs more memory than there is ends on every rank before it allocates."""

from __future__ import annotations

import pytest

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import ConfigError
from hpcpar.mesh import Layout
from hpcpar.models import LlamaConfig
from hpcpar.planner.memory import BUILDING, MemoryNeed
from hpcpar.training import Config, Run, memory_check
from hpcpar.training.memory_check import memory_need
from hpcpar.units import KiB
from tests.training.runs import MakeConfig

SIZES = LlamaConfig.preset("llama2-7b")
PHI = SIZES.parameters()

OTHERS = PHI - SIZES.layer_matrix_parameters()
"""Embeddings, the output projection and vectors, which have two moments with Muon, too."""

MUON = 10 + 4 * OTHERS / PHI
"""Gradients, masters and moments for each parameter in bfloat16."""


def need(config: Config, *, dp: int = 4, sharers: int = 1, on_gpu: bool = False) -> MemoryNeed:
    return memory_need(config, SIZES, Layout(dp=dp), node_sharers=sharers, on_gpu=on_gpu)


@pytest.mark.parametrize(
    ("changes", "per_parameter"),
    [
        (("train.precision=float32",), 16),
        (("train.precision=bfloat16",), 16),
        (("train.precision=float64",), 32),
        (("train.precision=float32", "optimizer.name=sgd"), 12),
        (("train.precision=float32", "optimizer.name=muon"), 12 + 4 * OTHERS / PHI),
        (("train.precision=bfloat16", "optimizer.name=muon", "optimizer.zero_stage=2"), 2 + MUON / 4),
        (("train.precision=float32", "optimizer.zero_stage=1"), 8 + 8 / 4),
        (("train.precision=bfloat16", "optimizer.zero_stage=2"), 2 + 14 / 4),
        (("train.precision=bfloat16", "optimizer.zero_stage=3"), 16 / 4),
        (("train.precision=bfloat16", "optimizer.moments=bfloat16"), 12),
        (("train.precision=bfloat16", "optimizer.offload=runs/state"), 4),
    ],
)
def test_the_model_state_is_that_of_the_zero_paper(
    config_of: MakeConfig, changes: tuple[str, ...], per_parameter: float
) -> None:
    total = sum(need(config_of(*changes)).host.values())
    assert total == pytest.approx(per_parameter * PHI, rel=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_experts_are_divided_by_ep_and_sharded_over_their_copies(config_of: MakeConfig, stage: int) -> None:
    sizes = LlamaConfig.preset("mixtral-8x7b")
    experts = sizes.expert_parameters()
    assert 0.95 < experts / sizes.parameters() < 1
    config = config_of("train.precision=bfloat16", f"optimizer.zero_stage={stage}")
    found = memory_need(config, sizes, Layout(dp=8, tp=2, ep=4), node_sharers=1, on_gpu=False)
    of_experts, of_others = model_state_of(stage, 4), model_state_of(stage, 8)
    expected = experts / 4 * of_experts + (sizes.parameters() - experts) / 2 * of_others
    assert sum(found.host.values()) == pytest.approx(expected, rel=1e-6)


def model_state_of(stage: int, ranks: int) -> float:
    """Bytes for each parameter, as in the paper."""
    return (16, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks)[stage]


def test_a_model_is_built_in_32_bits_before_it_is_rounded_and_spread(config_of: MakeConfig) -> None:
    config = config_of("train.precision=bfloat16", "optimizer.zero_stage=2")
    assert need(config, dp=64).host == {BUILDING: 4 * PHI}
    on_gpu = need(config, dp=64, on_gpu=True)
    assert on_gpu.host == {BUILDING: 4 * PHI}
    assert sum(on_gpu.device.values()) == pytest.approx((2 + 14 / 64) * PHI, rel=1e-6)


def test_parameters_that_a_node_has_in_common_count_once(config_of: MakeConfig) -> None:
    for stage in (1, 3):
        config = config_of(f"optimizer.zero_stage={stage}", "optimizer.shared_parameters=true")
        assert need(config, sharers=2).host["parameters"] == pytest.approx(8 * PHI / 2)


def test_what_does_not_fit_is_said_on_every_rank_before_anything_is_allocated(
    config_of: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_check, "available_on_node", lambda: 20 * KiB)
    config = config_of("optimizer.zero_stage=1")

    def body(comm: Communicator) -> str:
        with pytest.raises(ConfigError) as caught:
            Run(config, comm)
        return str(caught.value)

    first, second = run_loopback(2, body)
    assert first == second
    assert "model.preset = 'tiny', 10,544 parameters" in first
    for purpose in ("parameters", "gradients", "optimizer state"):
        assert f"82.4 KiB for {purpose}" in first
    assert "494.2 KiB for all 2 of its node, which has 20.0 KiB" in first
    assert "optimizer.zero_stage=3" in first


def test_a_limit_of_one_process_counts_for_each_by_itself(
    config_of: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_check, "available_to_process", lambda: 1000)
    with pytest.raises(ConfigError, match=r"in all, and may have \(ulimit -v\) 1000 B"):
        Run(config_of(), Communicator.alone())
