"""Copies of a tied parameter get the sum of their gradients, and stay the same."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar.comm import Communicator
from hpcpar.comm import run_loopback as run
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.errors import MismatchError, OperationError, PeerFailedError
from hpcpar.mesh import Mesh
from hpcpar.models import Layers, Llama, LlamaConfig, LlamaStages
from hpcpar.pipeline_parallel import Pipeline
from hpcpar.pipeline_parallel.balance import balanced
from hpcpar.pipeline_parallel.tied import TiedWeights
from hpcpar.pipeline_schedules.schedule_registry import make

CONFIG = LlamaConfig(
    vocab_size=23,
    hidden_size=16,
    layers=2,
    heads=4,
    kv_heads=2,
    ffn_size=24,
    max_sequence=16,
    initial_std=0.3,
    tie_embeddings=True,
)
EMBEDDING = "model.embed_tokens.weight"


def holding(*gradients: list[float] | None, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """A copy for each rank, with these gradients."""
    copies = []
    for gradient in gradients:
        copy = nn.Parameter(torch.zeros(3, dtype=dtype))
        copy.grad = None if gradient is None else torch.tensor(gradient, dtype=dtype)
        copies.append(copy)
    return copies


def test_every_copy_gets_the_sum_and_who_has_none_gets_nothing() -> None:
    """Ranks 0 and 2 of three, as embedding and head of a pipeline; in place."""
    first, other, last = holding([1.0, 2.0, 3.0], [7.0, 7.0, 7.0], [10.0, 20.0, 30.0])

    def on_rank(comm: Communicator) -> tuple[dict[str, tuple[int, ...]], bool]:
        own = {0: first, 1: None, 2: last}[comm.rank]
        gradient = None if own is None else own.grad
        tied = TiedWeights(comm, {"shared": own})
        tied.sum_gradients()
        in_place = own is None or own.grad is gradient
        tied.free()
        return tied.holders, in_place

    assert run(3, on_rank) == [({"shared": (0, 2)}, True)] * 3
    for copy in (first, last):
        assert copy.grad is not None
        assert copy.grad.tolist() == [11.0, 22.0, 33.0]
    assert other.grad is not None
    assert other.grad.tolist() == [7.0, 7.0, 7.0]


def test_a_copy_without_a_gradient_counts_as_zeros() -> None:
    copies = holding(None, [1.0, 2.0, 3.0])
    run(2, lambda comm: TiedWeights(comm, {"shared": copies[comm.rank]}).sum_gradients())
    assert [copy.grad.tolist() for copy in copies if copy.grad is not None] == [[1.0, 2.0, 3.0]] * 2


def test_where_no_copy_has_a_gradient_none_gets_one() -> None:
    copies = holding(None, None)
    run(2, lambda comm: TiedWeights(comm, {"shared": copies[comm.rank]}).sum_gradients())
    assert [copy.grad for copy in copies] == [None, None]


def test_a_sparse_gradient_of_an_embedding_adds_to_the_dense_one_of_the_head() -> None:
    copies = [nn.Parameter(torch.ones(4, 2)) for _ in range(2)]
    functional.embedding(torch.tensor([1, 3, 1]), copies[0], sparse=True).sum().backward()
    functional.linear(torch.ones(2), copies[1]).sum().backward()
    run(2, lambda comm: TiedWeights(comm, {"shared": copies[comm.rank]}).sum_gradients())
    for copy in copies:
        assert copy.grad is not None
        assert copy.grad.tolist() == [[1.0] * 2, [3.0] * 2, [1.0] * 2, [2.0] * 2]


def test_copies_of_different_values_are_refused_on_every_holder() -> None:
    """As drawn by each rank with its own stages, after other layers."""
    copies = holding([1.0] * 3, None, [1.0] * 3)
    with torch.no_grad():
        copies[2] += 1e-15

    def on_rank(comm: Communicator) -> None:
        tied = TiedWeights(comm, {"shared": None if comm.rank == 1 else copies[comm.rank]})
        if comm.rank == 1:
            tied.sum_gradients()
            return
        with pytest.raises(MismatchError, match=r"copies of shared on ranks 0, 2 have different values"):
            tied.sum_gradients()

    run(3, on_rank)


def test_copies_of_which_one_is_frozen_are_refused_on_every_holder() -> None:
    def on_rank(comm: Communicator) -> str:
        own = nn.Parameter(torch.ones(3), requires_grad=comm.rank == 0)
        tied = TiedWeights(comm, {"embedding": own})
        own.grad = torch.ones(3) if own.requires_grad else None
        with pytest.raises(MismatchError) as error:
            tied.sum_gradients()
        tied.free()
        return str(error.value)

    assert all("embedding is frozen on some of ranks 0, 1" in each for each in run(2, on_rank))


@pytest.mark.parametrize("given", [nn.Linear(2, 2), {"embedding": nn.Linear(2, 2)}], ids=["module", "values"])
def test_what_are_no_named_parameters_is_refused_on_every_rank(given: Any) -> None:
    def on_rank(comm: Communicator) -> str:
        with pytest.raises(PeerFailedError) as error:
            TiedWeights(comm, given if comm.rank else {"embedding": None})
        return str(error.value)

    assert all("rank 1: OperationError: tied weights: expected {name: nn" in each for each in run(2, on_rank))


def test_a_gradient_that_does_not_lie_in_rows_is_summed_in_place() -> None:
    copies = [nn.Parameter(torch.zeros(2, 3)) for _ in range(2)]
    for copy in copies:
        copy.grad = torch.arange(6.0).view(3, 2).t()
    run(2, lambda comm: TiedWeights(comm, {"shared": copies[comm.rank]}).sum_gradients())
    for copy in copies:
        assert copy.grad is not None
        assert copy.grad.tolist() == [[0.0, 4.0, 8.0], [2.0, 6.0, 10.0]]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_copies_get_the_same_bits(size: int) -> None:
    drawn = torch.randn(size, 1000, generator=torch.Generator().manual_seed(2))
    copies = [nn.Parameter(torch.zeros(1000)) for _ in range(size)]
    for copy, gradient in zip(copies, drawn, strict=True):
        copy.grad = gradient.clone()
    run(size, lambda comm: TiedWeights(comm, {"shared": copies[comm.rank]}).sum_gradients())
    for copy in copies:
        assert copy.grad is not None
        assert torch.equal(copy.grad, copies[0].grad)  # type: ignore[arg-type]
        torch.testing.assert_close(copy.grad.double(), drawn.double().sum(0), rtol=1e-5, atol=1e-5)


def test_parameters_tied_between_other_ranks_are_summed_among_these() -> None:
    """a on ranks 0 and 1, b on 1 and 2, c on 0 and 1 again, and d on rank 2 alone."""
    where = {"a": (0, 1), "b": (1, 2), "c": (0, 1), "d": (2,)}

    def on_rank(comm: Communicator) -> tuple[dict[str, float], int]:
        own: dict[str, nn.Parameter | None] = dict.fromkeys(where)
        for name, ranks in where.items():
            if comm.rank in ranks:
                parameter = nn.Parameter(torch.zeros(()))
                parameter.grad = torch.tensor(10.0**comm.rank)
                own[name] = parameter
        tied = TiedWeights(comm, own)
        assert tied.holders == where
        tied.sum_gradients()
        found = {name: float(p.grad) for name, p in own.items() if p is not None and p.grad is not None}
        return found, len(set(tied.comms.values()))

    assert run(3, on_rank) == [
        ({"a": 11.0, "c": 11.0}, 1),
        ({"a": 11.0, "b": 110.0, "c": 11.0}, 2),
        ({"b": 110.0, "d": 100.0}, 1),
    ]


def test_one_of_the_copies_counts_and_every_parameter_that_is_not_tied() -> None:
    def on_rank(comm: Communicator) -> tuple[bool, bool]:
        own, plain = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        tied = TiedWeights(comm, {"shared": own if comm.rank else None})
        return tied.counts_here(own), tied.counts_here(plain)

    assert run(3, on_rank)[1:] == [(True, True), (False, True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_holders_send_their_gradient_once_each(dtype: torch.dtype) -> None:
    """2(n - 1)/n·S, beside a byte for whether there are gradients, and the first time 32 for the values.

    Nothing goes over the pipeline's communicator.
    """
    copies = holding([1.0] * 3, [2.0] * 3, dtype=dtype)

    def on_rank(comm: Communicator) -> tuple[int, int, int]:
        own = {0: copies[0], 3: copies[1]}.get(comm.rank)
        tied = TiedWeights(comm, {"shared": own})
        comm.traffic.reset()
        tied.sum_gradients()
        sent = comm.traffics().get(f"{comm.name}-tied")
        mine = (0, 0) if sent is None else (sent.nbytes_sent("allreduce"), sent.nbytes_sent("agreement"))
        return *mine, comm.traffic.nbytes_sent()

    # Unchecked, because to agree on every call costs messages of its own.
    found = run(4, on_rank)
    assert found[1] == found[2] == (0, 0, 0)
    assert sum(sent for sent, _, _ in found) == 2 * 3 * dtype.itemsize
    assert sum(agreed for _, agreed, _ in found) == 2 * (1 + 32)
    assert all(over == 0 for _, _, over in found)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_copies_that_the_optimizer_is_not_told_of_are_refused(stage: int) -> None:
    """Two replicas of two stages: where averages had left already, sums would be of nobody knows what."""

    def on_rank(comm: Communicator) -> tuple[str, list[float]]:
        mesh = Mesh(comm, pp=2, dp=2)
        (own,) = holding(None, dtype=torch.bfloat16)  # writes to which torch does not count
        tied = TiedWeights(mesh.pp, {"shared": own})

        def stepped(**told: dict[str, bool]) -> None:
            optimizer = DistributedOptimizer(
                torch.optim.SGD([own], lr=1.0), [("shared", own)], mesh.dp, zero_stage=stage, **told
            )
            try:
                (own * 2.0**comm.rank).sum().backward()
                tied.sum_gradients()
                optimizer.step()
            finally:
                optimizer.zero_grad()
                optimizer.close()

        with pytest.raises(OperationError) as caught:
            stepped()
        if stage < 2:
            stepped(tied={"shared": tied.counts_here(own)})
        return str(caught.value), own.tolist()

    for told, values in run(4, on_rank):
        assert "shared is among the TiedWeights of a pipeline, but tied= does not name it" in told
        assert "pass tied={'shared': tied.counts_here(parameter)}" in told
        assert values == [-7.5 if stage < 2 else 0.0] * 3


def test_a_parameter_that_one_rank_has_alone_goes_nowhere() -> None:
    """The first rank of a V has both ends."""
    (own,) = holding([1.0, 2.0, 3.0])

    def on_rank(comm: Communicator) -> int:
        tied = TiedWeights(comm, {"shared": None if comm.rank else own})
        tied.sum_gradients()
        return len(tied.comms)

    assert run(2, on_rank) == [0, 0]
    assert own.grad is not None
    assert own.grad.tolist() == [1.0, 2.0, 3.0]


def test_copies_of_other_shapes_are_refused_on_every_rank() -> None:
    def on_rank(comm: Communicator) -> str:
        with pytest.raises(MismatchError) as refused:
            TiedWeights(comm, {"shared": nn.Parameter(torch.zeros(2, 3 + comm.rank))})
        return str(refused.value)

    for told in run(2, on_rank):
        assert "copies of shared are of different forms: rank 0 2 x 3 torch.float32; rank 1 2 x 4" in told


def test_other_names_are_refused_on_every_rank() -> None:
    def on_rank(comm: Communicator) -> str:
        with pytest.raises(MismatchError) as refused:
            TiedWeights(comm, {} if comm.rank else {"shared": None})
        return str(refused.value)

    for told in run(2, on_rank):
        assert "rank 0 names shared, rank 1 none" in told


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_by_every_kind_of_schedule_gradients_are_those_of_the_serial_tied_model(name: str) -> None:
    """Copies on two ranks, or ends on one; backwards whole, or in two parts."""
    schedule = make(name, 2, 4)
    config = replace(CONFIG, layers=4)
    tokens, targets = torch.randint(23, (2, 4, 8), generator=torch.Generator().manual_seed(6))
    serial = Llama(config, seed=1).double()
    truth = serial.loss(serial(tokens), targets)
    truth.backward()  # type: ignore[no-untyped-call]
    split = balanced(config.flops_per_item(8), schedule.stages, schedule.rank_of_stage)

    def on_rank(comm: Communicator) -> tuple[float | None, dict[str, Tensor]]:
        rank = LlamaStages(config, Layers(), split, schedule.stages_of(comm.rank), seed=1).double()
        tied = TiedWeights(comm, rank.tied_parameters())
        pipeline = Pipeline(rank.stages, schedule, comm, loss=lambda *made: rank.loss(*made) / 4)
        losses = pipeline.step(tokens, targets)
        tied.sum_gradients()
        gradients = {name: p.grad for name, p in rank.named_parameters() if p.grad is not None}
        return None if losses is None else losses.sum().item(), gradients

    found = run(2, on_rank)
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    (loss,) = [loss for loss, _ in found if loss is not None]
    close(torch.tensor(loss, dtype=torch.float64), truth.detach())
    gradients = found[0][1] | found[1][1]
    if name not in ("zb-v", "dualpipe-v"):
        assert torch.equal(gradients.pop("lm_head.weight"), gradients[EMBEDDING])
    assert gradients.keys() == dict(serial.named_parameters()).keys()
    for of_parameter, parameter in serial.named_parameters():
        close(gradients[of_parameter], parameter.grad)


@pytest.mark.mpi(min_size=2)
def test_over_mpi_the_first_and_the_last_rank_get_the_sum(world: Communicator) -> None:
    (own,) = holding([1.0 + world.rank] * 3)
    tied = TiedWeights(world, {"shared": own if world.rank in (0, world.size - 1) else None})
    tied.sum_gradients()
    found = world.allgather_object(None if own.grad is None else own.grad.tolist())
    assert found[0] == found[-1] == [1.0 + world.size] * 3
    assert found[1:-1] == [[1.0 + rank] * 3 for rank in range(1, world.size - 1)]
