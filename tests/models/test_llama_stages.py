"""Stages of a Llama are the whole model's slices: names, values, outputs and gradients, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcpar.autograd import Recompute
from hpcpar.comm import Communicator
from hpcpar.comm import run_loopback as run
from hpcpar.errors import ConfigError, LayoutError
from hpcpar.models import Layers, Llama, LlamaConfig, LlamaStages, Part, parallel_layers
from hpcpar.models.llama_stages import measured_costs
from hpcpar.pipeline_parallel.balance import StageSplit, balanced, by_hand
from hpcpar.pipeline_schedules.stage_placement import v_shape
from hpcpar.tensor_parallel import RandomStreams, TensorParallel
from tests.grid import checkered

SMALL = LlamaConfig(
    vocab_size=23,
    hidden_size=16,
    layers=4,
    heads=4,
    kv_heads=2,
    ffn_size=24,
    max_sequence=16,
    initial_std=0.3,
)
TIED = replace(SMALL, tie_embeddings=True)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

SPLITS = [[4], [2, 2], [1, 3], [0, 4], [4, 0], [1, 1, 2], [0, 1, 1, 1, 1, 0]]
"""Layers of each stage."""

SPLITS_AND_TIES = [*checkered(SPLITS, [SMALL, TIED]), ([1, 1, 2], SMALL), ([4], TIED)]


def batch() -> tuple[Tensor, Tensor]:
    drawn = torch.randint(23, (2, 3, 12), generator=torch.Generator().manual_seed(5))
    return drawn[0], drawn[1]


def built(config: LlamaConfig, counts: Sequence[int], *own: int, **options: Any) -> LlamaStages:
    """A rank with these stages, in float64; without any named, all of them."""
    split = by_hand(counts, config.layers)
    options.setdefault("layers", Layers())
    return LlamaStages(
        config, options.pop("layers"), split, own or range(len(split)), seed=1, **options
    ).double()


def through(stages: Sequence[Llama], tokens: Tensor) -> Tensor:
    """One after the other, as on one rank."""
    for stage in stages:
        tokens = stage(tokens)
    return tokens


def piecewise(stages: Sequence[Llama], tokens: Tensor, targets: Tensor) -> Tensor:
    """Loss, and gradients of parameters, each stage with a graph of its own, as on several ranks."""
    inputs, outputs = [], []
    hidden = tokens
    for stage in stages:
        inputs.append(hidden if stage.part.embeds else hidden.detach().requires_grad_())
        hidden = stage(inputs[-1])
        outputs.append(hidden)
    loss = stages[-1].loss(hidden, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    for after, output in zip(reversed(inputs[1:]), reversed(outputs[:-1]), strict=True):
        output.backward(after.grad)  # type: ignore[no-untyped-call]
    return loss.detach()


@pytest.mark.parametrize(("counts", "config"), SPLITS_AND_TIES, ids=str)
def test_first_values_are_those_of_the_whole_model(counts: list[int], config: LlamaConfig) -> None:
    whole = Llama(config, seed=1).double().state_dict()
    found: dict[str, Tensor] = {}
    for stage in range(len(counts)):
        slice_ = built(config, counts, stage).state_dict()
        assert not found.keys() & slice_.keys()
        found |= slice_
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], value) for name, value in whole.items())


@pytest.mark.parametrize(("counts", "config"), SPLITS_AND_TIES, ids=str)
def test_all_stages_on_one_rank_have_the_whole_models_state(counts: list[int], config: LlamaConfig) -> None:
    """The order is the same, and tied embeddings are one parameter."""
    whole = Llama(config, seed=1)
    stages = built(config, counts)
    assert list(stages.state_dict()) == list(whole.state_dict())
    assert [name for name, _ in stages.named_parameters()] == [name for name, _ in whole.named_parameters()]
    if config.tie_embeddings:
        assert stages.lm_head.weight is stages.model.embed_tokens.weight
    stages.load_state_dict(whole.state_dict())


@pytest.mark.parametrize(("counts", "config"), SPLITS_AND_TIES, ids=str)
def test_logits_and_gradients_are_those_of_the_whole_model(counts: list[int], config: LlamaConfig) -> None:
    tokens, targets = batch()
    whole = Llama(config, seed=1).double()
    truth = whole(tokens)
    loss = whole.loss(truth, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    ranks = [built(config, counts, stage) for stage in range(len(counts))]
    stages = [rank.stages[number] for number, rank in enumerate(ranks)]
    assert torch.equal(through(stages, tokens), truth)
    assert torch.equal(piecewise(stages, tokens, targets), loss)
    found: dict[str, Tensor] = {}
    for rank in ranks:
        for name, parameter in rank.named_parameters():
            assert parameter.grad is not None
            first = rank.tied_names.get(name, name)
            found[first] = parameter.grad + found.get(first, 0)
    for name, parameter in whole.named_parameters():
        if name == EMBEDDING and config.tie_embeddings:  # sums of two parts, in the other order
            torch.testing.assert_close(found.pop(name), parameter.grad, rtol=1e-12, atol=1e-12)
        else:
            assert parameter.grad is not None
            assert torch.equal(found.pop(name), parameter.grad)
    assert not found


def test_a_rank_builds_its_own_stages_and_nothing_else() -> None:
    made: list[str] = []

    def counted(kind: str, maker: Any) -> Any:
        def make(*sizes: Any) -> Any:
            made.append(kind)
            return maker(*sizes)

        return make

    plain = Layers()
    kinds = ("column_linear", "key_value_linear", "row_linear", "vocabulary_linear", "embedding", "norm")
    layers = Layers(**{kind: counted(kind, getattr(plain, kind)) for kind in kinds})  # type: ignore[arg-type]
    shapes = SMALL.shapes()
    rank = built(SMALL, [1, 1, 2], 1, layers=layers)
    assert len(made) == 9  # seven projections, two norms
    assert {name: tuple(p.shape) for name, p in rank.named_parameters()} == {
        name: shape for name, shape in shapes.items() if name.startswith("model.layers.1.")
    }
    assert not {"embedding", "vocabulary_linear"} & set(made)
    ends = built(SMALL, [1, 1, 2], 0, 2, layers=layers)
    others = sum(p.numel() for model in (rank, ends) for p in model.parameters())
    assert others == SMALL.parameters()
    assert [made.count(kind) for kind in ("embedding", "vocabulary_linear")] == [1, 1]


def test_in_a_v_the_ends_are_on_one_rank_and_share_the_tied_parameter() -> None:
    split = balanced(TIED.flops_per_item(12), 4, v_shape(2).rank_of_stage)
    first, second = (LlamaStages(TIED, Layers(), split, own, seed=1).double() for own in ((0, 3), (1, 2)))
    assert list(first.stages) == [0, 3]
    assert first.stages[0].model.embed_tokens.weight is first.stages[3].lm_head.weight
    assert first.tied_parameters() == {EMBEDDING: first.model.embed_tokens.weight}
    assert second.tied_parameters() == {EMBEDDING: None}
    assert HEAD in first.state_dict()
    assert HEAD not in dict(first.named_parameters())
    tokens, targets = batch()
    whole = Llama(TIED, seed=1).double()
    whole.loss(whole(tokens), targets).backward()  # type: ignore[no-untyped-call]
    piecewise([first.stages[0], second.stages[1], second.stages[2], first.stages[3]], tokens, targets)
    torch.testing.assert_close(
        first.model.embed_tokens.weight.grad, whole.model.embed_tokens.weight.grad, rtol=1e-12, atol=1e-12
    )


def test_copies_of_a_tied_parameter_are_named_on_every_rank() -> None:
    first, middle, last = (built(TIED, [1, 2, 1], stage) for stage in range(3))
    for rank in (first, middle, last):
        assert rank.tied_names == {HEAD: EMBEDDING}
    assert first.tied_parameters() == {EMBEDDING: first.model.embed_tokens.weight}
    assert middle.tied_parameters() == {EMBEDDING: None}
    assert last.tied_parameters() == {EMBEDDING: last.lm_head.weight}
    assert built(SMALL, [1, 2, 1], 0).tied_parameters() == {}
    assert built(TIED, [4]).tied_names == {}


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence": {"sequence_parallel": True},
    "sequence, again": {"sequence_parallel": True, "gather_again": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("counts", [[2, 2], [1, 2, 1]], ids=str)
def test_stages_of_parallel_layers_are_the_parallel_model(counts: list[int], way: str) -> None:
    """Logits and all gradients, on each of two ranks that share every layer."""
    tokens, targets = batch()

    def on_rank(comm: Communicator) -> bool:
        tp = TensorParallel(comm, **WAYS[way])
        whole = Llama(TIED, parallel_layers(TIED, tp), seed=1).double()
        truth = whole(tokens)
        loss = whole.loss(truth, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        rank = built(TIED, counts, layers=parallel_layers(TIED, tp))
        stages = list(rank.stages.values())
        hidden = stages[0](tokens)
        rows = 6 if tp.sequence_parallel else 12
        same = [hidden.shape == (3, rows, 16), rank.sequence_multiple == 12 // rows]
        same.append(torch.equal(through(stages, tokens), truth))
        same.append(torch.equal(rank.whole_logits(truth), whole.whole_logits(truth)))
        same.append(torch.equal(piecewise(stages, tokens, targets), loss))
        gradients = {name: p.grad for name, p in whole.named_parameters()}
        for name, parameter in rank.named_parameters():
            mine, other = parameter.grad, gradients.pop(name)
            assert mine is not None
            assert other is not None
            same.append(torch.allclose(mine, other, rtol=1e-12, atol=1e-12))
        return all(same) and not gradients

    assert all(run(2, on_rank))


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_layers_are_recomputed_by_their_numbers_in_the_whole_model(mode: Any) -> None:
    """The first three of four, and with the same dropout as in the whole model."""
    config = replace(SMALL, dropout=0.2)
    again = Recompute(mode, layers=3)
    tokens, targets = batch()

    def gradients(model: Llama | LlamaStages, stages: Sequence[Llama]) -> list[Tensor | None]:
        piecewise(stages, tokens, targets)
        return [parameter.grad for parameter in model.parameters()]

    def layers() -> Layers:
        return Layers(streams=RandomStreams(7, 0))

    whole = Llama(config, layers(), seed=1, recompute=again).double()
    cut = built(config, [1, 1, 2], layers=layers(), recompute=again)
    modes = [layer.mode for stage in cut.stages.values() for layer in stage.model.layers]
    assert modes == [mode, mode, mode, "none"]
    truth, found = gradients(whole, [whole]), gradients(cut, list(cut.stages.values()))
    assert all(
        torch.equal(a, b) for a, b in zip(truth, found, strict=True) if a is not None and b is not None
    )
    cut.eval()
    stages = list(cut.stages.values())
    assert torch.equal(through(stages, tokens), through(stages, tokens))
    assert not any(stage.training for stage in stages)


def test_positions_may_be_given_to_every_stage() -> None:
    tokens, _ = batch()
    positions = torch.arange(4, 16)
    whole, cut = Llama(SMALL, seed=1).double(), built(SMALL, [2, 2])
    hidden = tokens
    for stage in cut.stages.values():
        hidden = stage(hidden, positions)
    assert torch.equal(hidden, whole(tokens, positions))


def test_a_sequence_that_is_too_long_is_refused_by_every_stage() -> None:
    cut = built(SMALL, [2, 2])
    for number, inputs in ((0, torch.zeros(1, 17, dtype=torch.long)), (1, torch.zeros(1, 17, 16).double())):
        with pytest.raises(ConfigError, match="17 tokens is longer than max_sequence=16"):
            cut.stages[number](inputs)


def test_stages_can_be_built_without_memory() -> None:
    with torch.device("meta"):
        rank = LlamaStages(TIED, Layers(), by_hand([2, 2], 4), [1], seed=1)
    assert all(parameter.is_meta for parameter in rank.parameters())


@pytest.mark.parametrize(
    ("split", "own", "told"),
    [
        (((0, 3), (3, 5)), (0,), "the stages have 5 items, but the model 6"),
        (((0, 3), (3, 6)), (0, 2), "there is no stage 2: the split has stages 0 to 1"),
        (((0, 3), (3, 6)), (1, 1), "name each of them once"),
    ],
)
def test_stages_that_there_are_not_are_refused(split: StageSplit, own: Sequence[int], told: str) -> None:
    with pytest.raises(LayoutError, match=told):
        LlamaStages(SMALL, Layers(), split, own)


def test_a_part_has_the_layers_between_its_items() -> None:
    assert Part.of(0, 6, 4) == Part.whole(4) == Part(range(4), embeds=True, heads=True)
    assert Part.of(0, 1, 4) == Part(range(0), embeds=True, heads=False)
    assert Part.of(1, 3, 4) == Part(range(0, 2), embeds=False, heads=False)
    assert Part.of(3, 6, 4) == Part(range(2, 4), embeds=False, heads=True)
    assert Part.of(5, 6, 4) == Part(range(4, 4), embeds=False, heads=True)


def test_a_part_of_what_there_is_not_is_refused() -> None:
    with pytest.raises(LayoutError, match="items 3 to 7 are no part of a model of 4 layers"):
        Part.of(3, 7, 4)
    with pytest.raises(LayoutError, match="layer 4 of a model whose layers are 0 to 3"):
        Llama(SMALL, part=Part(range(3, 5), embeds=False, heads=True))


@pytest.mark.parametrize("config", [SMALL, TIED, LlamaConfig.preset("llama3-8b")])
def test_costs_by_products_add_up_to_the_models(config: LlamaConfig) -> None:
    costs = config.flops_per_item(512)
    assert len(costs) == config.layers + 2
    assert sum(costs) == config.flops_per_token(512)
    assert costs[0] == 0
    assert costs[-1] == 6 * config.vocab_size * config.hidden_size
    assert len(set(costs[1:-1])) == 1


def test_costs_by_products_count_what_is_recomputed() -> None:
    plain, sequence = SMALL.flops_per_item(8), 8
    full = SMALL.flops_per_item(sequence, recompute=Recompute("full", layers=2))
    assert [3 * cost // 4 for cost in full[1:3]] == plain[1:3]
    assert full[3:] == plain[3:]
    selective = SMALL.flops_per_item(sequence, recompute=Recompute("selective"))
    assert [a - b for a, b in zip(selective, plain, strict=True)] == [0, *[4 * sequence * 16] * 4, 0]


def test_a_head_as_dear_as_two_layers_takes_two_from_its_stage() -> None:
    config = LlamaConfig.preset("llama3-8b", layers=14)
    costs = config.flops_per_item(4096)
    layer_counts = [stop - start for start, stop in balanced(costs, 4)]
    assert layer_counts == [5, 4, 4, 3]  # of which the first is the embedding, the last the head


def test_measured_costs_are_seconds_of_what_a_stage_does() -> None:
    """The wide model's layers take longer than its tiny head, and dropout's numbers are not used up."""
    config = LlamaConfig(vocab_size=16, hidden_size=128, layers=3, heads=4, max_sequence=64, dropout=0.1)
    layers = Layers()
    before = layers.streams.state_dict()
    again = Recompute("full", layers=1)
    costs = measured_costs(config, layers, microbatch=2, sequence=64, recompute=again, repeats=3)
    assert len(costs) == 5
    assert all(cost > 0 for cost in costs)
    assert costs[2] == costs[3] != costs[1]
    assert costs[2] > max(costs[0], costs[-1])
    after = layers.streams.state_dict()
    assert all(torch.equal(after[name], state) for name, state in before.items())


def test_ranks_that_share_layers_measure_together() -> None:
    def on_rank(comm: Communicator) -> list[float]:
        layers = parallel_layers(SMALL, TensorParallel(comm, sequence_parallel=True))
        return measured_costs(SMALL, layers, microbatch=1, sequence=12, repeats=1)

    for costs in run(2, on_rank):
        assert len(costs) == 6
        assert all(cost > 0 for cost in costs)
