"""Checkpoints go from any layout to any other: every bit arrives, and training goes on as in one process."""

from __future__ import annotations

import itertools
import random
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import summon_full_parameters
from hpcpar.models import LlamaStages
from hpcpar.tensor_parallel import own_shard
from hpcpar.training import Run
from tests.training import test_composition as drawn
from tests.training.runs import SEQUENCE, MakeConfig, OfOneProcess, half_of, require_resumed
from tests.training.test_expert_parallel import MODEL as EXPERTS

MODEL = (
    *EXPERTS,
    "model.tie_embeddings=true",
    "model.experts.shared_ffn_size=8",
    "model.experts.first_dense=1",
    "train.global_batch=4",
    "optimizer.epsilon=1e-4",
)
"""Five experts do not divide among ranks; the first and the last stage have the embedding."""

PIPELINE = ("mesh.pp=2", "train.microbatch=1")

LAYOUTS = {
    "one process": (1, ()),
    "ep 3, ZeRO-2": (3, ("mesh.ep=3", "optimizer.zero_stage=2")),
    "HSDP, ep 2, ZeRO-3": (4, ("mesh.dp_shard=2", "mesh.ep=2", "optimizer.zero_stage=3")),
    "cp 2, tp 2, ep 4, ZeRO-1": (4, ("mesh.cp=2", "mesh.ep=2", "mesh.tp=2", "optimizer.zero_stage=1")),
    "tp 2, sp, pp 2 (zb-v)": (4, (*PIPELINE, "mesh.tp=2", SEQUENCE, "pipeline.schedule=zb-v")),
    "pp 2, ep 2, ZeRO-3": (4, (*PIPELINE, "mesh.ep=2", "optimizer.zero_stage=3")),
}

Whole = tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]
"""Values and optimizer states of all parameters, by name."""


def whole_of(run: Run) -> Whole:
    """Return what a run in one process holds."""
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    states = {names[id(p)]: dict(state) for p, state in run.optimizer.state.items()}
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}, states


def require_parts_of(whole: Whole, run: Run) -> set[str]:
    """Compare this rank's parts to the bit; return the names of its parameters."""
    values, states = whole
    tied = run.model.tied_names if isinstance(run.model, LlamaStages) else {}
    with summon_full_parameters(run.model, write_back=False):
        held = {tied.get(name, name): parameter for name, parameter in run.model.named_parameters()}
        for name, parameter in held.items():
            assert torch.equal(parameter, own_shard(parameter, values[name])), name
        for piece, state in run.optimizer.own_states():
            name = tied.get(piece.name, piece.name)
            for key, value in state.items():
                expected = states[name].get(key, values[name])
                if expected.dim():
                    expected = own_shard(piece.parameter, expected).flatten()[piece.start : piece.stop]
                assert torch.equal(value.flatten(), expected.flatten()), (piece.name, key)
    return set(held)


@pytest.mark.parametrize("saved", LAYOUTS)
def test_any_of_six_layouts_loads_what_any_other_saved_to_the_bit(config_of: MakeConfig, saved: str) -> None:
    size, options = LAYOUTS[saved]
    half_of(config_of(*MODEL, *options), size)
    (whole,) = run_loopback(1, lambda comm: whole_of(Run(config_of(*MODEL), comm, resume=True)))

    def names_of(comm: Communicator, options: tuple[str, ...]) -> set[str]:
        return require_parts_of(whole, Run(config_of(*MODEL, *options), comm, resume=True))

    for size, options in LAYOUTS.values():
        of_ranks = run_loopback(size, partial(names_of, options=options))
        assert set().union(*of_ranks) == set(whole[0])


@pytest.mark.parametrize(("before", "after"), [*itertools.pairwise([*LAYOUTS, "one process"])])
def test_training_goes_on_in_another_layout_as_in_one_process(
    config_of: MakeConfig, of_one_process: OfOneProcess, before: str, after: str
) -> None:
    alone, expected = of_one_process(*MODEL)
    (size, options), (size_after, options_after) = LAYOUTS[before], LAYOUTS[after]
    half_of(config_of(*MODEL, *options, name="parts"), size)
    require_resumed(config_of(*MODEL, *options_after, name="parts"), size_after, alone, expected)


@cache
def drawn_pairs() -> list[tuple[drawn.Drawn, drawn.Drawn]]:
    """Return a hundred ordered pairs of the drawn layouts of one model."""
    pairs = [
        (one, other)
        for one, other in itertools.permutations(drawn.LAYOUTS, 2)
        if drawn.of_model(one.options) == drawn.of_model(other.options)
    ]
    return random.Random(1).sample(pairs, 100)


@pytest.mark.long
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("number", range(100))
def test_a_drawn_layout_goes_on_from_another_as_in_one_process(
    config_of: MakeConfig, of_one_process: OfOneProcess, number: int
) -> None:
    before, after = drawn_pairs()[number]
    model = (*drawn.MODEL, "train.steps=4", "train.evaluate_every=2")
    alone, expected = of_one_process(*model, *drawn.of_model(before.options))
    half_of(config_of(*model, *before.options, name="parts"), before.ranks)
    require_resumed(config_of(*model, *after.options, name="parts"), after.ranks, alone, expected)
