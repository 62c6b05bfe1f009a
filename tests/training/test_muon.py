"""Runs with Muon on the layers' matrices, and AdamW on the rest.

Muon orthogonalizes in bfloat16, where a last bit that differs may grow to a hundredth. Where runs of several
ranks are compared with one process, it iterates in float64 in both: only the order of summation differs then.
"""

from __future__ import annotations

import pytest

from hpcpar.data_parallel import CombinedOptimizer
from hpcpar.errors import ConfigError
from hpcpar.models import Llama
from hpcpar.training.build import plain_optimizer
from hpcpar.training.config import OptimizerSection, parse
from tests.training.runs import (
    MakeConfig,
    OfOneProcess,
    half_of,
    losses,
    require_resumed,
    require_resumed_bit_for_bit,
    trained,
)

pytest.importorskip("torch.optim._muon", reason="torch before 2.9")

MUON = "optimizer.name=muon"
MODEL = ("train.steps=4", "optimizer.clip_norm=0.2", MUON)
PIPELINE = ("mesh.pp=2", "train.microbatch=1")
INTERLEAVED = (*PIPELINE, "pipeline.schedule=interleaved")


def test_muon_has_the_layers_matrices_and_adamw_the_rest() -> None:
    config = parse("[model]\nhidden_size = 8\nlayers = 1\nheads = 2\nffn_size = 16\n", source="x")
    model = Llama(config.model_config_for(256))
    section = OptimizerSection(name="muon", learning_rate=0.02, adam_learning_rate=0.003, weight_decay=0.3)
    optimizer = plain_optimizer(section, model)
    assert isinstance(optimizer, CombinedOptimizer)
    found = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    of = {name: found[id(p)] for name, p in model.named_parameters()}
    muons = {name for name, group in of.items() if group["optimizer"] == "Muon"}
    assert muons == {name for name in of if name.endswith("proj.weight")}
    assert {of[name]["lr"] for name in muons} == {0.02}
    assert of["model.embed_tokens.weight"]["lr"] == of["model.norm.weight"]["lr"] == 0.003
    assert of["lm_head.weight"]["weight_decay"] == 0.3
    assert of["model.norm.weight"]["weight_decay"] == 0.0


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, ("optimizer.zero_stage=1",)), (3, ("optimizer.zero_stage=2",))),
        ((4, ("optimizer.zero_stage=3",)), (2, ("mesh.tp=2",))),
        # Tied embeddings in a pipeline: kept between forward and backward, and with several stages on a rank.
        (
            (4, (*PIPELINE, "optimizer.zero_stage=3", "optimizer.reshard=step")),
            (4, (*INTERLEAVED, "optimizer.zero_stage=3")),
        ),
        ((4, (*INTERLEAVED, "optimizer.zero_stage=3")), (4, (*PIPELINE, "optimizer.zero_stage=2"))),
        ((4, ("mesh.tp=2", "optimizer.zero_stage=1")), (1, ())),
        ((1, ()), (4, ("mesh.tp=2", "optimizer.zero_stage=3"))),
        ((2, ("mesh.tp=2",)), (4, ("mesh.pp=2", "optimizer.zero_stage=1", "train.microbatch=1"))),
    ],
)
def test_a_checkpoint_of_any_layout_goes_on_in_another(
    config_of: MakeConfig,
    of_one_process: OfOneProcess,
    before: tuple[int, tuple[str, ...]],
    after: tuple[int, tuple[str, ...]],
) -> None:
    told = (*MODEL, "model.layers=4", "model.tie_embeddings=true", "train.global_batch=4")
    alone, expected = of_one_process(*told)
    (size, options), (others, other_options) = before, after
    half_of(config_of(*told, *options, name="parts"), size)
    require_resumed(config_of(*told, *other_options, name="parts"), others, alone, expected)


def test_a_run_that_was_interrupted_goes_on_bit_for_bit(config_of: MakeConfig) -> None:
    told = (*MODEL, "optimizer.zero_stage=2", "train.precision=bfloat16")
    require_resumed_bit_for_bit(config_of(*told, name="whole"), config_of(*told, name="parts"), 2)


@pytest.mark.parametrize("option", ["optimizer.zero_stage=1", "optimizer.zero_stage=3", "mesh.tp=2"])
def test_the_usual_bfloat16_iterations_stay_near_one_process(config_of: MakeConfig, option: str) -> None:
    """Gradients that differ in a last bit give updates that differ by up to a bfloat16's; losses by less."""
    # Not `of_one_process`, which keeps what it trains for tests that iterate in float64.
    alone, together = config_of(*MODEL, name="alone"), config_of(*MODEL, option, name="together")
    trained(alone)
    trained(together, 2)
    assert losses(together) == pytest.approx(losses(alone), rel=1e-3)


def test_keys_of_other_optimizers_and_memory_in_common_are_refused_where_they_mean_nothing() -> None:
    for key in ("adam_learning_rate = 0.1", "muon_momentum = 0.9", "muon_scale = 'original'"):
        for name in ("adamw", "sgd"):
            with pytest.raises(ConfigError, match=r"is of muon, and .*; set optimizer.name=muon, too"):
                parse(f"[optimizer]\nname = '{name}'\n{key}\n", source="x")
        parse(f"[optimizer]\nname = 'muon'\n{key}\n", source="x")
    for name in ("adamw", "muon"):
        with pytest.raises(ConfigError, match=r"momentum = 0.5: is of sgd, and optimizer.name is another"):
            parse(f"[optimizer]\nname = '{name}'\nmomentum = 0.5\n", source="x")
    text = "[optimizer]\nname = 'muon'\nzero_stage = 1\nshared_parameters = true\n"
    with pytest.raises(ConfigError, match="muon's ranks own matrices of different sizes"):
        parse(text, source="x")
