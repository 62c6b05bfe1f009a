"""A layer written as the paper counts: as the serial one, and its saved bytes as the formulas say.

Shape letters: B batch, S sequence, H hidden, A heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
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
from hpcpar.tensor_parallel.split import gather_whole
from tests.grid import pairwise

B, S, H, A = 2, 8, 16, 4
SHAPE = LayerShape(sequence=64, batch=2, hidden=64, heads=4)  # 5as/h = 20

EXACT = 1e-10  # float64, sums of at most a few hundred values of order 1 in another order


def parallel(comm: Communicator, *, sequence_parallel: bool, gather_again: bool = True) -> TensorParallel:
    again = sequence_parallel and gather_again
    return TensorParallel(comm, sequence_parallel=sequence_parallel, gather_again=again)


def own_tokens(tensor: Tensor, tp: TensorParallel, dim: int = 1) -> Tensor:
    """This rank's part of the sequence, where it is divided."""
    return tensor.chunk(tp.size, dim)[tp.rank] if tp.sequence_parallel else tensor


def all_tokens(tensor: Tensor, tp: TensorParallel, dim: int = 1) -> Tensor:
    if not tp.sequence_parallel or tp.size == 1:
        return tensor
    flat = tp.comm.allgather(tensor.contiguous().view(-1))
    return torch.cat([part.view(tensor.shape) for part in flat.chunk(tp.size)], dim)


def inputs() -> tuple[Tensor, Tensor]:
    """x, and what the output is multiplied by to make a loss."""
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(2, B, S, H, dtype=torch.float64, generator=generator)
    return x, weight


@dataclass
class Result:
    """Whole tensors, whatever ranks had of them."""

    output: Tensor
    of_input: Tensor
    gradients: dict[str, Tensor]
    after: dict[str, Tensor]

    def tensors(self) -> list[Tensor]:
        return [self.output, self.of_input, *self.gradients.values(), *self.after.values()]


def make_norms_uneven(layer: GptLayer) -> None:
    """So that an error in their gradients' sum is not hidden by ones and zeros."""
    with torch.no_grad():
        for norm in (layer.attention_norm, layer.mlp_norm):
            norm.weight.copy_(torch.linspace(0.5, 1.5, H))
            norm.bias.copy_(torch.linspace(-0.5, 0.5, H))


def step(layer: GptLayer, tp: TensorParallel) -> Result:
    """Forward, backward and a step of SGD."""
    make_norms_uneven(layer)
    layer = layer.double()
    x, weight = (own_tokens(each, tp) for each in inputs())
    x = x.clone().requires_grad_()
    output = layer(x)
    (output * weight).sum().backward()
    assert x.grad is not None
    gradients = {}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = gather_whole(parameter, parameter.grad)
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    after = {name: gather_whole(parameter) for name, parameter in layer.named_parameters()}
    return Result(all_tokens(output.detach(), tp), all_tokens(x.grad, tp), gradients, after)


def results(
    size: int, mode: RecomputeMode = "none", *, sequence_parallel: bool = False, **dropouts: float
) -> list[Result]:
    def work(comm: Communicator) -> Result:
        tp = parallel(comm, sequence_parallel=sequence_parallel)
        streams = RandomStreams(3, comm.rank)
        return step(GptLayer(H, A, tp, streams, mode=mode, seed=9, **dropouts), tp)

    return run_loopback(size, work)


NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}


def require_close(found: Result, expected: Result) -> None:
    for mine, theirs in zip(found.tensors(), expected.tensors(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=EXACT, atol=EXACT)


def written_out(values: dict[str, Tensor], x: Tensor) -> Tensor:
    """The layer in torch's own functions, one head at a time."""

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, (H,), values[f"{name}.weight"], values[f"{name}.bias"])

    def product(x: Tensor, name: str) -> Tensor:
        return x @ values[f"{name}.weight"].T + values[f"{name}.bias"]

    queries, keys, values_of = product(norm(x, "attention_norm"), "qkv").split(H, dim=-1)
    heads = []
    for head in range(A):
        own = slice(head * H // A, (head + 1) * H // A)
        scores = queries[..., own] @ keys[..., own].transpose(1, 2) / math.sqrt(H // A)
        scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -math.inf)
        heads.append(scores.softmax(-1) @ values_of[..., own])
    x = x + product(torch.cat(heads, -1), "projection")
    return x + product(functional.gelu(product(norm(x, "mlp_norm"), "mlp.up_proj")), "mlp.down_proj")


def test_the_layer_is_the_one_written_out_in_torch() -> None:
    def work(comm: Communicator) -> tuple[Result, dict[str, Tensor]]:
        layer = GptLayer(H, A, comm, RandomStreams(3, 0), seed=9, **NO_DROPOUT)
        make_norms_uneven(layer)
        before = {name: value.detach().double() for name, value in layer.named_parameters()}
        return step(layer, TensorParallel(comm)), before

    ((found, values),) = run_loopback(1, work)
    for value in values.values():
        value.requires_grad_()
    x, weight = inputs()
    x.requires_grad_()
    output = written_out(values, x)
    (output * weight).sum().backward()
    torch.testing.assert_close(found.output, output.detach(), rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(found.of_input, x.grad, rtol=EXACT, atol=EXACT)
    assert found.gradients.keys() == values.keys()
    for name, value in values.items():
        torch.testing.assert_close(found.gradients[name], value.grad, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize(
    ("size", "sequence_parallel", "mode"), pairwise([1, 2, 4], [False, True], RECOMPUTE_MODES)
)
def test_any_number_of_ranks_computes_what_one_does(
    size: int, sequence_parallel: bool, mode: RecomputeMode
) -> None:
    (expected,) = results(1, **NO_DROPOUT)
    for found in results(size, mode, sequence_parallel=sequence_parallel, **NO_DROPOUT):
        require_close(found, expected)


@pytest.mark.parametrize("mode", RECOMPUTE_MODES)
def test_dropout_on_what_all_ranks_hold_is_the_serial_one(mode: RecomputeMode) -> None:
    (expected,) = results(1, attention_dropout=0.0, hidden_dropout=0.3)
    for found in results(2, mode, attention_dropout=0.0, hidden_dropout=0.3):
        require_close(found, expected)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_with_dropout_recomputation_changes_no_bit(size: int, sequence_parallel: bool) -> None:
    dropouts = {"attention_dropout": 0.2, "hidden_dropout": 0.3}
    expected = results(size, sequence_parallel=sequence_parallel, **dropouts)
    for mode in ("selective", "full"):
        found = results(size, mode, sequence_parallel=sequence_parallel, **dropouts)  # type: ignore[arg-type]
        for mine, theirs in zip(found, expected, strict=True):
            assert all(map(torch.equal, mine.tensors(), theirs.tensors()))


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
    """What autograd keeps on each rank between forward and backward of a model in bfloat16."""

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


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((16, 3), LayoutError, "heads=3 does not divide among tp=2 ranks"),
        ((18, 4), LayoutError, "hidden_size=18 does not divide among heads=4"),
    ],
)
def test_what_does_not_divide_is_refused(
    arguments: tuple[int, int], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        run_loopback(2, lambda comm: GptLayer(*arguments, comm, RandomStreams(0, comm.rank)))


def test_a_mode_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="no mode 'some'"):
        run_loopback(1, lambda comm: GptLayer(H, A, comm, RandomStreams(0, 0), mode="some"))  # type: ignore[arg-type]
