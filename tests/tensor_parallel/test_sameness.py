"""Ranks that share layers but not the batch, the labels or the random numbers are told so, all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar.comm import Communicator
from hpcpar.comm import run_loopback as run
from hpcpar.errors import LayoutError, MismatchError
from hpcpar.tensor_parallel import (
    Column,
    ColumnParallelLinear,
    Enter,
    Gather,
    Norm,
    Plan,
    RMSNorm,
    Row,
    RowParallelLinear,
    Scatter,
    TensorParallel,
    VocabParallelEmbedding,
    Vocabulary,
    VocabularyEmbedding,
    draw_shard,
    gather_whole,
    parallelize,
    vocabulary_parallel_cross_entropy,
)
from hpcpar.tensor_parallel.sameness import EVERY, Sameness, different, fingerprints


def mlp() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8), nn.LayerNorm(8)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


MLP: Plan = {"0": Column(), "2": Row()}

ROWS = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def other(x: Tensor, comm: Communicator) -> Tensor:
    """Rank 0's batch in another order."""
    return x.flip(0) if comm.rank else x


def on_other_rows(comm: Communicator) -> None:
    parallelize(mlp(), MLP, comm)(other(ROWS, comm))


def on_other_rows_of_an_entered_layer(comm: Communicator) -> None:
    model = nn.ModuleDict({"mlp": mlp()})
    plan: Plan = {"mlp": Enter(), "mlp.0": Column(enter=False), "mlp.2": Row(), "mlp.3": Norm()}
    parallelize(model, plan, comm)["mlp"](other(ROWS, comm))


def on_other_rows_of_a_row_layer(comm: Communicator) -> None:
    parallelize(mlp(), {"0": Row(input_is_parallel=False)}, comm)(other(ROWS, comm))


def with_other_labels(comm: Communicator) -> None:
    labels = torch.arange(24) % 8
    output = parallelize(mlp(), MLP, comm)(ROWS).flatten(0, 1)
    functional.cross_entropy(output, other(labels, comm)).backward()


def with_other_labels_of_gathered_logits(comm: Communicator) -> None:
    logits = parallelize(mlp()[:1], {"0": Vocabulary()}, comm)(ROWS).flatten(0, 1)
    functional.cross_entropy(logits, other(torch.arange(24) % 12, comm)).backward()


def with_other_dropout(comm: Communicator) -> None:
    generator = torch.Generator().manual_seed(comm.rank)
    mask = torch.rand(ROWS.shape, generator=generator) < 0.9
    (parallelize(mlp(), MLP, comm)(ROWS) * mask).sum().backward()


def with_another_bias(comm: Communicator) -> None:
    row = RowParallelLinear(8, 4, comm)
    with torch.no_grad():
        row.weight.fill_(1.0)
        row.bias.fill_(comm.rank)
    row(torch.ones(2, 4)).square().sum().backward()  # by what comes of it


def with_another_norm(comm: Communicator) -> None:
    norm = RMSNorm(8, 1e-6, comm)
    with torch.no_grad():
        norm.weight.add_(0.01 * comm.rank)
    norm(torch.ones(2, 8))


def on_other_tokens(comm: Communicator) -> None:
    model = nn.Sequential(nn.Embedding(10, 8))
    with torch.no_grad():
        model[0].weight.fill_(1.0)  # what is embedded looks the same
    parallelize(model, {"0": VocabularyEmbedding()}, comm)(other(torch.arange(8).view(2, 4), comm))


def on_other_targets(comm: Communicator) -> None:
    vocabulary_parallel_cross_entropy(
        torch.ones(2, 4, 3), other(torch.arange(6)[:, None][:2].expand(2, 4), comm), vocabulary=6, comm=comm
    )


def on_other_sequences(comm: Communicator) -> None:
    model = nn.Sequential(nn.Identity(), *mlp())
    plan: Plan = {"0": Scatter(), "1": Column(), "3": Row(), "4": (Norm(), Gather())}
    parallelize(model, plan, TensorParallel(comm, sequence_parallel=True))(other(ROWS, comm))


def with_other_labels_of_sequences(comm: Communicator) -> None:
    model = nn.Sequential(nn.Identity(), *mlp())
    plan: Plan = {"0": Scatter(), "1": Column(), "3": Row(), "4": (Norm(), Gather())}
    output = parallelize(model, plan, TensorParallel(comm, sequence_parallel=True))(ROWS)
    functional.mse_loss(output, other(ROWS, comm)).backward()


SPLIT: dict[str, tuple[Callable[[Communicator], nn.Module], Tensor]] = {
    "column": (lambda comm: ColumnParallelLinear(8, 6, comm, bias=False), torch.ones(2, 8)),
    "row": (lambda comm: RowParallelLinear(6, 8, comm, bias=False), torch.ones(2, 2)),
    "embedding": (lambda comm: VocabParallelEmbedding(9, 4, comm), torch.arange(9)),
}


@pytest.mark.parametrize(
    ("program", "what"),
    [
        (on_other_rows, "the input of a column-parallel layer"),
        (on_other_rows_of_an_entered_layer, "the input of the column-parallel layers of an Enter"),
        (on_other_rows_of_a_row_layer, "the input of a row-parallel layer"),
        (with_other_labels, "the gradient of a row-parallel layer's output"),
        (with_other_labels_of_gathered_logits, "the gradient of a column-parallel layer's gathered output"),
        (with_other_dropout, "the gradient of a row-parallel layer's output"),
        (with_another_bias, "the gradient of a row-parallel layer's output"),
        (with_another_norm, "the weight of an RMSNorm"),
        (on_other_tokens, "the tokens of a vocabulary-parallel embedding"),
        (on_other_targets, "the targets of a vocabulary-parallel loss"),
        (on_other_sequences, r"what torch\.nn\.modules\.linear\.Identity gets whole, to be scattered,"),
        (with_other_labels_of_sequences, "the gradient of what is gathered after"),
    ],
)
def test_what_ranks_do_not_have_alike_is_named_on_every_rank(
    program: Callable[[Communicator], None], what: str
) -> None:
    def refused(comm: Communicator) -> str:
        with pytest.raises(MismatchError, match=f"^{what}") as caught:
            program(comm)
        return str(caught.value)

    for found in run(2, refused):
        assert "is not the same on all ranks of 'world'" in found
        assert "seed by mesh.dp.rank" in found


@pytest.mark.parametrize("layer", SPLIT)
def test_shards_that_ranks_drew_alike_are_refused_and_wholes_that_they_drew_alike_are_right(
    layer: str,
) -> None:
    build, x = SPLIT[layer]

    def alike() -> torch.Generator:
        return torch.Generator().manual_seed(3)

    def made(comm: Communicator) -> Tensor:
        module = build(comm)
        nn.init.normal_(module.weight, generator=alike())
        with pytest.raises(LayoutError, match=r"the same values on ranks 0 and 1 .*\.draw_shard"):
            module(x)
        module = build(comm)
        nn.init.zeros_(module.weight)
        module(x)
        module = build(comm)
        draw_shard(module.weight, lambda whole: nn.init.xavier_uniform_(whole, generator=alike()))
        module(x)
        return gather_whole(module.weight)

    for found in run(3, made):
        assert torch.equal(found, nn.init.xavier_uniform_(torch.empty_like(found), generator=alike()))


def test_ranks_that_part_later_are_found_too() -> None:
    def calls(comm: Communicator) -> int:
        sameness = Sameness(comm, "it")
        for call in range(1, 3 * EVERY):
            try:
                sameness.require(ROWS if call < 5 else ROWS + comm.rank)
            except MismatchError:
                return call
        return 0

    assert run(2, calls) == [EVERY, EVERY]
    assert run(1, calls) == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool])
def test_rounding_is_no_difference_but_another_order_is(dtype: torch.dtype) -> None:
    values = (
        (torch.randn(6, 5, generator=torch.Generator().manual_seed(1)) * 3).round().clamp(min=0).to(dtype)
    )

    def found(comm: Communicator, change: Callable[[Tensor], Tensor]) -> int | None:
        own = change(values) if comm.rank == 1 else values
        return different(fingerprints(own, comm), dtype)

    def rounded(values: Tensor) -> Tensor:
        return values * (1 + torch.finfo(dtype).eps) if dtype.is_floating_point else values.clone()

    changes = (torch.clone, rounded, lambda v: v.flip(0), lambda v: v.flip(1), lambda v: v.view(5, 6))
    assert [run(3, lambda comm, change=change: found(comm, change)) for change in changes] == [
        [None] * 3,
        [None] * 3,
        *[[1] * 3] * 3,
    ]


def test_nothing_and_what_is_not_finite_are_alike() -> None:
    for values in (torch.ones(0), torch.ones(2, 0), torch.tensor(1.0), torch.tensor([torch.nan, torch.inf])):
        assert run(2, lambda comm, v=values: different(fingerprints(v, comm), v.dtype)) == [None, None]
