"""A layer written as the paper counts: as the serial one, and its saved bytes as the formulas say.

Shape letters: B batch, S sequence, H hidden, A heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise as neighbours

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar import watch_activations
from hpcpar.autograd import Recompute
from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import ConfigError, LayoutError
from hpcpar.models.gpt_layer import GptLayer
from hpcpar.planner.activations import TECHNIQUES, LayerShape, layer_nbytes
from hpcpar.planner.shapes import RECOMPUTE_MODES, RecomputeMode
from hpcpar.tensor_parallel.axis import TensorParallel
from hpcpar.tensor_parallel.random_streams import RandomStreams
from tests.grid import pairwise
from tests.tensor_parallel.conftest import (
    OPTIMIZERS,
    WAYS,
    Trained,
    all_tokens,
    compare,
    own_tokens,
    require_same,
    trained,
)

B, S, H, A = 2, 8, 16, 4
SHAPE = LayerShape(sequence=64, batch=2, hidden=64, heads=4)  # 5as/h = 20

NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}


def parallel(comm: Communicator, *, sequence_parallel: bool, gather_again: bool = True) -> TensorParallel:
    again = sequence_parallel and gather_again
    return TensorParallel(comm, sequence_parallel=sequence_parallel, gather_again=again)


def inputs() -> Tensor:
    return torch.randn(B, S, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Written(nn.Module):
    """The layer in torch's own functions, one head at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(H), nn.LayerNorm(H)
        self.qkv, self.projection = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.mlp = nn.ModuleDict({"up_proj": nn.Linear(H, 4 * H), "down_proj": nn.Linear(4 * H, H)})

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.qkv(self.attention_norm(x)).split(H, dim=-1)
        heads = []
        for head in range(A):
            own = slice(head * H // A, (head + 1) * H // A)
            scores = queries[..., own] @ keys[..., own].transpose(1, 2) / math.sqrt(H // A)
            scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -math.inf)
            heads.append(scores.softmax(-1) @ values[..., own])
        x = x + self.projection(torch.cat(heads, -1))
        added: Tensor = self.mlp["down_proj"](functional.gelu(self.mlp["up_proj"](self.mlp_norm(x))))
        return x + added


@pytest.mark.parametrize(
    ("size", "way", "mode", "optimizer"), pairwise([1, 2, 4], WAYS, RECOMPUTE_MODES, OPTIMIZERS)
)
def test_on_any_number_of_ranks_the_layer_is_the_one_written_out_in_torch(
    size: int, way: str, mode: RecomputeMode, optimizer: str
) -> None:
    def layer(tp: TensorParallel) -> GptLayer:
        return GptLayer(H, A, tp, RandomStreams(3, tp.rank), mode=mode, **NO_DROPOUT)

    compare(size, Written(), layer, inputs(), way, optimizer)


def results(
    size: int, mode: RecomputeMode = "none", *, sequence_parallel: bool = False, **dropouts: float
) -> list[Trained]:
    """Train with dropout, from the same values."""

    def work(comm: Communicator) -> Trained:
        tp = parallel(comm, sequence_parallel=sequence_parallel)
        layer = GptLayer(H, A, tp, RandomStreams(3, comm.rank), mode=mode, seed=9, **dropouts).double()
        return trained(
            layer,
            inputs(),
            enter=lambda x: own_tokens(x, tp),
            whole_of=lambda part: all_tokens(part, tp) if sequence_parallel else part,
        )

    return run_loopback(size, work)


@pytest.mark.parametrize("mode", RECOMPUTE_MODES)
def test_dropout_on_what_all_ranks_hold_is_the_serial_one(mode: RecomputeMode) -> None:
    (expected,) = results(1, attention_dropout=0.0, hidden_dropout=0.3)
    for found in results(2, mode, attention_dropout=0.0, hidden_dropout=0.3):
        require_same(found, expected)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_with_dropout_recomputation_changes_no_bit(size: int, sequence_parallel: bool) -> None:
    dropouts = {"attention_dropout": 0.2, "hidden_dropout": 0.3}
    expected = results(size, sequence_parallel=sequence_parallel, **dropouts)
    for mode in ("selective", "full"):
        found = results(size, mode, sequence_parallel=sequence_parallel, **dropouts)  # type: ignore[arg-type]
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine.output, theirs.output)
            assert torch.equal(mine.of_input, theirs.of_input)
            for name, value in theirs.parameters.items():
                assert torch.equal(mine.gradients[name], theirs.gradients[name])
                assert torch.equal(mine.parameters[name], value)


def test_ranks_drop_different_attention_shares_and_different_tokens_under_sequence_parallelism() -> None:
    def work(comm: Communicator) -> list[tuple[float, ...]]:
        found = []
        for sequence_parallel in (False, True):
            tp = parallel(comm, sequence_parallel=sequence_parallel)
            layer = GptLayer(H, A, tp, RandomStreams(3, comm.rank))
            ones = torch.ones(256)
            for dropout in (layer.attention_dropout, layer.projection_dropout, layer.mlp_dropout):
                found.append(tuple(dropout(ones).tolist()))
        return found

    of_ranks = run_loopback(2, work)
    same = [first == second for first, second in zip(*of_ranks, strict=True)]
    assert same == [False, True, True, False, False, False]


# --- activations ----------------------------------------------------------------------------------


def kept_nbytes(
    size: int, make: Callable[[TensorParallel], nn.Module], *, sequence_parallel: bool = False
) -> list[int]:
    """Measure the bytes that autograd keeps on each rank between forward and backward, in bfloat16."""

    def work(comm: Communicator) -> int:
        tp = parallel(comm, sequence_parallel=sequence_parallel)
        model = make(tp).bfloat16()
        whole = torch.ones(SHAPE.batch, SHAPE.sequence, SHAPE.hidden, dtype=torch.bfloat16)
        x = own_tokens(whole, tp).clone().requires_grad_()
        with watch_activations(model) as activations:
            output = model(x)
            kept = activations.nbytes
            output.sum().backward()
        assert activations.nbytes == 0, "backward leaves nothing"
        return kept

    return run_loopback(size, work)


def gpt_layer(tp: TensorParallel, mode: RecomputeMode = "none") -> GptLayer:
    return GptLayer(SHAPE.hidden, SHAPE.heads, tp, RandomStreams(0, tp.rank), mode=mode)


@pytest.mark.parametrize(
    ("size", "sequence_parallel", "mode"), pairwise([1, 2, 4], [False, True], RECOMPUTE_MODES)
)
def test_what_is_kept_is_within_five_percent_of_the_formula(
    size: int, sequence_parallel: bool, mode: RecomputeMode
) -> None:
    found = kept_nbytes(size, lambda tp: gpt_layer(tp, mode), sequence_parallel=sequence_parallel)
    formula = layer_nbytes(SHAPE, size, sequence_parallel=sequence_parallel, recompute=mode)
    for nbytes in found:
        # The rest: the norms' means and deviations, four values for a token; an empty tensor of torch's own.
        assert formula <= nbytes <= 1.05 * formula


def test_the_ways_of_the_paper_differ_as_far_as_five_percent_can_tell() -> None:
    found = sorted(way.nbytes(SHAPE, 4) for way in TECHNIQUES.values())
    assert all(second > 1.1 * first for first, second in neighbours(found))


def test_without_gathering_again_each_rank_keeps_two_whole_inputs() -> None:
    def kept(gather_again: bool) -> int:
        def work(comm: Communicator) -> int:
            tp = parallel(comm, sequence_parallel=True, gather_again=gather_again)
            layer = gpt_layer(tp).bfloat16()
            shape = (SHAPE.batch, SHAPE.sequence // 4, SHAPE.hidden)
            with watch_activations(layer) as activations:
                layer(torch.ones(shape, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
            return activations.peak_nbytes

        return run_loopback(4, work)[0]

    assert kept(False) - kept(True) == 2 * 2 * SHAPE.sbh * 3 // 4


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("layers", [0, 1, 3, None])
def test_only_the_first_layers_are_recomputed(layers: int | None, mode: RecomputeMode) -> None:
    total = 3
    which = Recompute(mode, layers)
    (found,) = kept_nbytes(
        1, lambda tp: nn.Sequential(*(gpt_layer(tp, which.of_layer(i, total)) for i in range(total)))
    )
    formula = sum(layer_nbytes(SHAPE, recompute=which.of_layer(i, total)) for i in range(total))
    assert formula <= found <= 1.05 * formula


def test_what_does_not_fit_is_refused() -> None:
    def check(comm: Communicator) -> None:
        streams = RandomStreams(0, comm.rank)
        with pytest.raises(LayoutError, match="heads=3 does not divide among tp=2 ranks"):
            GptLayer(16, 3, comm, streams)
        with pytest.raises(LayoutError, match="hidden_size=18 does not divide among heads=4"):
            GptLayer(18, 4, comm, streams)
        with pytest.raises(ConfigError, match="no mode 'some'"):
            GptLayer(H, A, comm, streams, mode="some")  # type: ignore[arg-type]

    run_loopback(2, check)
