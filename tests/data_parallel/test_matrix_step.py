"""Muon with AdamW in every stage and over tensor-parallel ranks is Muon with AdamW in one process.

Muon orthogonalizes in bfloat16, where a last bit that differs may grow to a hundredth. So gradients are
small integers times the number of ranks, whose averages are exact, and parameters are the same to the last
bit: a loss that is the sum of products of parameters and numbers has these numbers as its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import CombinedOptimizer, DistributedOptimizer
from hpcpar.errors import OperationError
from hpcpar.tensor_parallel.split import Split, own_shard, place, split_evenly, split_sections
from tests.data_parallel.staged import ranks, staged, whole
from tests.grid import pairwise

Muon = pytest.importorskip("torch.optim._muon", reason="torch before 2.9").Muon

STEPS = 10
LIMITS: dict[str, Any] = {"bucket_bytes": 2_000, "first_bucket_bytes": 500}
SHAPES = {"wide": (6, 16), "tall": (24, 8), "square": (8, 8), "bias": (8,)}
TALL, WIDE = 0, 1
SPLITS: dict[str, Callable[[int], Split]] = {
    "wide": lambda size: split_evenly(16, size, dim=1),
    "tall": lambda size: split_sections((16, 8), size),
}
"""A row-parallel matrix, a fused column-parallel one; the others are whole on every rank."""


class Products(nn.Module):
    """Parameters whose gradients are what the forward is given."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], tp: Communicator, generator: torch.Generator):
        super().__init__()
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            split = SPLITS[name](tp.size) if name in SPLITS else None
            parameter = nn.Parameter(value if split is None else split.shard(value, tp.rank))
            if split is not None:
                place(parameter, split, tp)
            self.register_parameter(name, parameter)

    def forward(self, gradients: Iterator[Tensor]) -> Tensor:
        products = [(p * own_shard(p, next(gradients)).to(p.device)).sum() for p in self.parameters()]
        return torch.stack(products).sum()


class Network(nn.Module):
    def __init__(self, tp: Communicator) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = Products({"weight": (11, 8)}, tp, generator)
        self.layers = nn.ModuleList(Products(SHAPES, tp, generator) for _ in range(3))

    def forward(self, gradients: Sequence[Tensor], *, layers: int = 3) -> Tensor:
        given = iter(gradients)
        return torch.stack([self.embed(given), *(layer(given) for layer in self.layers[:layers])]).sum()


WHOLE_SHAPES = [(11, 8), *(shape for _ in range(3) for shape in SHAPES.values())]


def gradients_of(step: int, rank: int, size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randint(-9, 9, s, generator=generator).double() * size for s in WHOLE_SHAPES]


def take_averages(model: Network, given: list[list[Tensor]], ranks: int | None = None) -> None:
    """Give a whole model the sum of the gradients given, over the number of ranks; None: that of `given`."""
    for parameter, each in zip(model.parameters(), zip(*given, strict=True), strict=True):
        parameter.grad = (sum(each) / (ranks or len(given))).to(parameter)


def muon_with_adamw(model: Network, **options: Any) -> CombinedOptimizer:
    matrices = [p for layer in model.layers for p in layer.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if not any(p is each for each in matrices)]
    return CombinedOptimizer(Muon(matrices, lr=0.02, **options), AdamW(rest, lr=0.01))


def serial(size: int, steps: int = STEPS, **options: Any) -> list[Tensor]:
    model = Network(Communicator.alone())
    optimizer = muon_with_adamw(model, **options)
    for step in range(steps):
        given = [gradients_of(step, rank, size) for rank in range(size)]
        take_averages(model, given)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def axes(world: Communicator, tp_size: int) -> tuple[Communicator, Communicator]:
    """Return dp and tp."""
    tp = world.split(world.rank // tp_size, name="tp")
    dp = world.split(world.rank % tp_size, name="dp")
    assert tp is not None
    assert dp is not None
    return dp, tp


def trained(
    world: Communicator, stage: int, tp_size: int, *, steps: int = STEPS, muon: Any = None, **options: Any
) -> tuple[list[Tensor], dict[str, int], dict[str, int]]:
    """Train; return parameters, bytes sent in the last step by theory and as counted, on dp and tp."""
    dp, tp = axes(world, tp_size)
    model = Network(tp)
    optimizer = staged(model, muon_with_adamw(model, **(muon or {})), dp, stage, **LIMITS, **options)
    for step in range(steps):
        for comm in (dp, tp):
            comm.traffic.reset()
        model(gradients_of(step, dp.rank, dp.size)).backward()
        optimizer.step()
        optimizer.zero_grad()
    theory = optimizer.traffic_by_comm(norms=1)
    expected = {
        f"{name} {collective}": theory.get((comm, collective), 0)
        for name, comm in (("dp", dp), ("tp", tp))
        for collective in ("reduce_scatter", "allgather", "alltoall")
    }
    sent = {
        key: sum(comm.allgather_object(comm.traffic.nbytes_sent(key.split()[1])))
        for key, comm in ((key, dp if key.startswith("dp") else tp) for key in expected)
    }
    return whole_of(model, tp), expected, sent


def whole_of(model: Network, tp: Communicator) -> list[Tensor]:
    """Return the parameters, whole over dp and tp."""
    values = whole(model)
    found = []
    for (name, _), own in zip(model.named_parameters(), values, strict=True):
        kind = name.rpartition(".")[2]
        parts = tp.allgather_object(own)
        found.append(SPLITS[kind](tp.size).whole(parts) if kind in SPLITS else own)
    return found


@pytest.mark.parametrize(
    ("stage", "size", "nesterov", "adjust"),
    pairwise([0, 1, 2, 3], [1, 2, 3, 4], [True, False], [None, "match_rms_adamw"]),
)
def test_every_stage_has_the_bits_of_one_process(
    stage: int, size: int, nesterov: bool, adjust: str | None
) -> None:
    options: dict[str, Any] = {"nesterov": nesterov, "adjust_lr_fn": adjust}
    expected = serial(size, **options)
    for parameters, theory, sent in run_loopback(size, lambda comm: trained(comm, stage, 1, muon=options)):
        torch.testing.assert_close(parameters, expected, rtol=0, atol=0)
        assert sent == theory


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_over_some_of_the_ranks_have_the_bits_of_one_process(stage: int) -> None:
    """Each group of two ranks has owners of all matrices."""
    expected = serial(4, steps=3)
    for parameters, _, _ in run_loopback(4, lambda comm: trained(comm, stage, 1, steps=3, shard_ranks=2)):
        torch.testing.assert_close(parameters, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("stage", "dp_size"), [(0, 1), (0, 2), (1, 2), (2, 2), (3, 2), (3, 1)])
def test_matrices_that_tensor_parallel_ranks_share_have_the_bits_of_one_process(
    stage: int, dp_size: int
) -> None:
    expected = serial(dp_size)
    for parameters, theory, sent in run_loopback(2 * dp_size, lambda comm: trained(comm, stage, 2)):
        torch.testing.assert_close(parameters, expected, rtol=0, atol=0)
        assert sent == theory
        assert sent["tp alltoall"] > 0


@pytest.mark.mpi
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_on_mpi_has_the_bits_of_one_process(world: Communicator, stage: int) -> None:
    expected = serial(world.size, steps=3)
    parameters, theory, sent = trained(world, stage, 1, steps=3)
    torch.testing.assert_close(parameters, expected, rtol=0, atol=0)
    assert sent == theory


@pytest.mark.mpi
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tensor_parallel_matrices_on_mpi_have_the_bits_of_one_process(
    world: Communicator, stage: int
) -> None:
    tp_size = 1 if world.size % 2 else 2
    expected = serial(world.size // tp_size, steps=3)
    parameters, theory, sent = trained(world, stage, tp_size, steps=3)
    torch.testing.assert_close(parameters, expected, rtol=0, atol=0)
    assert sent == theory


# --- what else an optimizer does ------------------------------------------------------------------


def distributed(
    comm: Communicator, stage: int, tp_size: int = 1, **options: Any
) -> tuple[Network, DistributedOptimizer, Communicator]:
    dp, tp = axes(comm, tp_size)
    model = Network(tp)
    return model, staged(model, muon_with_adamw(model), dp, stage, **LIMITS, **options), tp


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_norm_is_of_all_shards_also_where_a_rank_owns_no_matrix(stage: int, norm_type: float) -> None:
    size = 4

    def body(comm: Communicator) -> tuple[float, list[Tensor]]:
        model, optimizer, tp = distributed(comm, stage)
        model(gradients_of(0, comm.rank, size)).backward()
        norm = optimizer.clip_grad_norm_(1.0, norm_type)
        optimizer.step()
        return float(norm), whole_of(model, tp)

    model = Network(Communicator.alone())
    optimizer = muon_with_adamw(model)
    given = [gradients_of(0, rank, size) for rank in range(size)]
    take_averages(model, given)
    expected = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type))
    optimizer.step()
    for norm, parameters in run_loopback(size, body):
        assert norm == pytest.approx(expected, rel=1e-12)
        # Matrices that are clipped by another last bit are orthogonalized from other bfloat16 numbers.
        torch.testing.assert_close(parameters, list(model.parameters()), rtol=0, atol=2e-3)


@pytest.mark.parametrize(("stage", "passes"), pairwise([0, 1, 2, 3], [2, 3]))
def test_accumulated_gradients_are_summed_before_the_momentum(stage: int, passes: int) -> None:
    def body(comm: Communicator) -> list[Tensor]:
        model, optimizer, tp = distributed(comm, stage)
        for step in range(2):
            for number in range(passes):
                given = gradients_of(step, comm.rank + 10 * number, comm.size)
                if number < passes - 1:
                    with optimizer.no_sync():
                        model(given).backward()
                else:
                    model(given).backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole_of(model, tp)

    model = Network(Communicator.alone())
    optimizer = muon_with_adamw(model)
    for step in range(2):
        given = [gradients_of(step, rank + 10 * n, 2) for rank in range(2) for n in range(passes)]
        take_averages(model, given, 2)
        optimizer.step()
    for parameters in run_loopback(2, body):
        torch.testing.assert_close(parameters, list(model.parameters()), rtol=0, atol=0)


@pytest.mark.parametrize(("stage", "tp_size"), [(0, 1), (0, 2), (1, 1), (2, 2), (3, 1), (3, 2)])
def test_bfloat16_parameters_have_the_masters_of_float32(stage: int, tp_size: int) -> None:
    dp_size = 2

    def body(comm: Communicator) -> list[Tensor]:
        dp, tp = axes(comm, tp_size)
        model = Network(tp).float()
        optimizer = staged(model, muon_with_adamw(model), dp, stage, precision="bfloat16", **LIMITS)
        for step in range(3):
            model(gradients_of(step, dp.rank, dp.size)).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()["state"]
        matrices = [p for layer in model.layers for p in layer.parameters() if p.dim() == 2]
        found = []
        for number, _ in enumerate(matrices):
            master, kind = state[number]["master_weight"], ["wide", "tall", "square"][number % 3]
            assert master.dtype == torch.float32
            parts = tp.allgather_object(master)
            found.append(SPLITS[kind](tp.size).whole(parts) if kind in SPLITS else master)
        return found

    model = Network(Communicator.alone()).float()
    optimizer = muon_with_adamw(model)
    for step in range(3):
        given = [gradients_of(step, rank, dp_size) for rank in range(dp_size)]
        take_averages(model, given)
        optimizer.step()
    expected = [p.detach() for layer in model.layers for p in layer.parameters() if p.dim() == 2]
    for masters in run_loopback(dp_size * tp_size, body):
        torch.testing.assert_close(masters, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("saved", "loaded"), pairwise([0, 1, 2, 3], [0, 1, 2, 3]))
def test_a_state_of_any_stage_goes_on_in_any_other(saved: int, loaded: int) -> None:
    """Momentum is as the parameter's shape, whoever holds it, as torch's Muon has it."""
    size = 3

    def body(comm: Communicator) -> list[Tensor]:
        model, optimizer, tp = distributed(comm, saved)
        for step in range(2):
            model(gradients_of(step, comm.rank, size)).backward()
            optimizer.step()
            optimizer.zero_grad()
        state, values = optimizer.state_dict(), whole_of(model, tp)
        assert state["state"][0]["momentum_buffer"].shape == SHAPES["wide"]
        optimizer.close()
        again = Network(tp)
        with torch.no_grad():
            for parameter, value in zip(again.parameters(), values, strict=True):
                parameter.copy_(value)
        resumed = staged(again, muon_with_adamw(again), comm, loaded, **LIMITS)
        resumed.load_state_dict(state)
        for step in range(2, 4):
            again(gradients_of(step, comm.rank, size)).backward()
            resumed.step()
            resumed.zero_grad()
        return whole_of(again, tp)

    expected = serial(size, steps=4)
    for parameters in run_loopback(size, body):
        torch.testing.assert_close(parameters, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("stage", "where"), [(1, "cpu"), (1, "disk"), (2, "disk"), (3, "cpu")])
def test_offloaded_states_step_as_others(stage: int, where: str, tmp_path: Any) -> None:
    offload = "cpu" if where == "cpu" else str(tmp_path)
    expected = serial(2, steps=3)
    for parameters, _, _ in run_loopback(2, lambda comm: trained(comm, stage, 1, steps=3, offload=offload)):
        torch.testing.assert_close(parameters, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("stage", "tp_size"), [(3, 1), (1, 2)])
def test_files_are_refused_where_matrices_lie_on_several_ranks(
    stage: int, tp_size: int, tmp_path: Any
) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(OperationError, match='take offload="cpu"'):
            distributed(comm, stage, tp_size, offload=str(tmp_path))

    run_loopback(2, body)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks(2)
def test_a_matrix_without_a_gradient_keeps_its_value(comm: Communicator, stage: int) -> None:
    """Some ranks own it, in stage 3 in pieces, and all take part in its exchange."""
    model, optimizer, tp = distributed(comm, stage)
    before = whole_of(model, tp)
    model(gradients_of(0, comm.rank, comm.size), layers=1).backward()
    optimizer.step()
    same = [torch.equal(a, b) for a, b in zip(before, whole_of(model, tp), strict=True)]
    assert same == [False] * 5 + [True] * 8


def test_shared_parameters_and_unknown_splits_are_refused() -> None:
    def shared(comm: Communicator) -> None:
        with pytest.raises(OperationError, match="shared_parameters=True was asked for with Muon"):
            distributed(comm, 1, shared_parameters=True)

    def unknown(comm: Communicator) -> None:
        model = Network(Communicator.alone())
        inner = muon_with_adamw(model)
        alone = Communicator.alone()
        with pytest.raises(OperationError, match="Muon needs to know how"):
            DistributedOptimizer(
                inner, model.named_parameters(), alone, split_over={"layers.0.square": [comm]}
            )

    run_loopback(2, shared)
    run_loopback(2, unknown)


def without_one(model: Network) -> tuple[CombinedOptimizer, Tensor]:
    """Return the optimizer of all parameters but one matrix, and that."""
    late = model.layers[2].get_parameter("square")
    matrices = [p for layer in model.layers for p in layer.parameters() if p.dim() == 2 and p is not late]
    rest = [p for p in model.parameters() if p is not late and not any(p is each for each in matrices)]
    return CombinedOptimizer(Muon(matrices, lr=0.02), AdamW(rest, lr=0.01)), late


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_matrices_that_are_added_later_have_owners_too(stage: int) -> None:
    def body(comm: Communicator) -> list[Tensor]:
        model = Network(Communicator.alone())
        inner, late = without_one(model)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, zero_stage=stage, **LIMITS)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": [late], "optimizer": "Muon"})
            model(gradients_of(step, comm.rank, comm.size)).backward()
            optimizer.step()
            optimizer.zero_grad()
            late.grad = None
        return whole(model)

    model = Network(Communicator.alone())
    plain, late = without_one(model)
    for step in range(4):
        if step == 2:
            plain.add_param_group({"params": [late], "optimizer": "Muon"})
        given = [gradients_of(step, rank, 2) for rank in range(2)]
        take_averages(model, given)
        plain.step()
    for parameters in run_loopback(2, body):
        torch.testing.assert_close(parameters, list(model.parameters()), rtol=0, atol=0)
