"""Column- and row-parallel layers are the serial layer: outputs, gradients, and parameters after 10 steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from hpcpar.autograd import DeferredGradients, gather_from
from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import LayoutError, MismatchError, OperationError
from hpcpar.tensor_parallel import (
    ColumnParallelLinear,
    Heads,
    RowParallelLinear,
    TensorParallel,
    gather_whole,
    own_shard,
    project,
)
from hpcpar.tensor_parallel.split import split_of
from tests.grid import pairwise
from tests.tensor_parallel.conftest import OPTIMIZERS, SIZES, WAYS

SECTIONS = {
    "one section": 24,
    "fused": (12, 24),
    "heads": (Heads(12, 2), Heads(12, 1)),
    "shared heads": (Heads(1, 4), Heads(1, 2)),
}


def rows(sections: object) -> int:
    parts = sections if isinstance(sections, tuple) else (sections,)
    return sum(part.rows if isinstance(part, Heads) else part for part in parts)


def tokens(hidden: int = 8) -> Tensor:
    return torch.randn(2, 12, hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("size", "way", "sections", "optimizer"), pairwise(SIZES, WAYS, SECTIONS, OPTIMIZERS)
)
def test_a_column_parallel_layer_is_the_serial_one(
    compare: Callable[..., None], size: int, way: str, optimizer: str, sections: str
) -> None:
    out = SECTIONS[sections]
    compare(
        size,
        nn.Linear(8, rows(out)),
        lambda tp: ColumnParallelLinear(8, out, tp, gather_output=True),
        tokens(),
        way,
        optimizer,
    )


def test_padded_outputs_are_those_of_the_serial_layer_and_zeros(size: int) -> None:
    serial = nn.Linear(8, 7)

    def outputs(comm: Communicator) -> tuple[Tensor, Tensor]:
        layer = ColumnParallelLinear(8, 7, comm, pad=True, gather_output=True)
        layer.weight.data = layer.split.shard(serial.weight.data, comm.rank)
        layer.bias.data = layer.split.shard(serial.bias.data, comm.rank)
        return layer(tokens().float()), gather_whole(layer.weight)

    for output, weight in run_loopback(size, outputs):
        torch.testing.assert_close(output, serial(tokens().float()))
        assert torch.equal(weight, serial.weight)


@pytest.mark.parametrize(
    ("size", "way", "optimizer"), pairwise(SIZES, ["plain", "no overlap", "twice"], OPTIMIZERS)
)
def test_a_row_parallel_layer_takes_its_part_of_a_whole_input(
    compare: Callable[..., None], size: int, way: str, optimizer: str
) -> None:
    compare(
        size,
        nn.Linear(12, 5),
        lambda tp: RowParallelLinear(12, 5, tp, input_is_parallel=False),
        tokens(12),
        way,
        optimizer,
    )


class Pair(nn.Module):
    """Two layers that read the same input, and one that reads both outputs."""

    def __init__(self, tp: TensorParallel | None) -> None:
        super().__init__()
        if tp is None:
            self.one, self.other, self.down = nn.Linear(8, 12), nn.Linear(8, 12, bias=False), nn.Linear(12, 6)
        else:
            self.one, self.other = (
                ColumnParallelLinear(8, 12, tp),
                ColumnParallelLinear(8, 12, tp, bias=False),
            )
            self.down = RowParallelLinear(12, 6, tp)

    def forward(self, x: Tensor) -> Tensor:
        one, other = project([self.one, self.other], x)
        output: Tensor = self.down(torch.tanh(one) * other)
        return output


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(
    "way",
    [{}, {"overlap": False}, {"twice": True}, {"sequence_parallel": True, "gather_again": True, "chunks": 2}],
    ids=str,
)
def test_under_autocast_products_are_in_half_precision_and_gradients_as_wide_as_weights(
    way: dict[str, Any], deferred: bool
) -> None:
    """bfloat16 has 8 bits, and sums over ranks are rounded once more than the serial ones."""
    torch.manual_seed(0)
    serial = Pair(None)
    whole = {name: value.detach() for name, value in serial.named_parameters()}
    x = tokens().float()

    def trained(pair: nn.Module, x: Tensor, leave: DeferredGradients | None = None) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16), leave.recording() if leave else nullcontext():
            output: Tensor = pair(x)
        output.float().square().sum().backward()  # type: ignore[no-untyped-call]
        if leave:
            leave.compute()
        return output

    def on_rank(comm: Communicator) -> tuple[Tensor, dict[str, Tensor]]:
        tp = TensorParallel(comm, **way)
        pair = Pair(tp)
        with torch.no_grad():
            for name, parameter in pair.named_parameters():
                parameter.copy_(own_shard(parameter, whole[name]))
        own = x[:, 6 * comm.rank : 6 * comm.rank + 6] if tp.sequence_parallel else x
        output = trained(pair, own, DeferredGradients() if deferred else None)
        output = gather_from(output.detach(), comm, 1) if tp.sequence_parallel else output.detach()
        return output, {name: gather_whole(p, p.grad) for name, p in pair.named_parameters()}

    expected = trained(serial, x)
    for output, gradients in run_loopback(2, on_rank):
        assert output.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(output, expected, rtol=2**-5, atol=2**-5)
        for name, parameter in serial.named_parameters():
            assert parameter.grad is not None
            largest = parameter.grad.abs().max().item()
            assert gradients[name].dtype == torch.float32
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=2**-6 * largest)


@pytest.mark.parametrize(("size", "way", "optimizer"), pairwise(SIZES, WAYS, OPTIMIZERS))
def test_layers_that_share_an_input_are_the_serial_ones(
    compare: Callable[..., None], size: int, way: str, optimizer: str
) -> None:
    compare(size, Pair(None), Pair, tokens(), way, optimizer)


@pytest.mark.mpi
def test_layers_that_share_an_input_are_the_serial_ones_over_mpi(world: Communicator) -> None:
    if 12 % world.size:
        pytest.skip(f"12 features do not divide among {world.size} ranks")
    serial = Pair(None).double()
    torch.manual_seed(0)
    for parameter in serial.parameters():
        nn.init.normal_(parameter)
    x = tokens()
    truth = serial(x)
    truth.square().sum().backward()
    for sequence in (False, True):
        tp = TensorParallel(world, sequence_parallel=sequence)
        layer = Pair(tp).double()
        whole = dict(serial.named_parameters())
        for name, parameter in layer.named_parameters():
            parameter.data = split_of(parameter).shard(whole[name].data, world.rank)
        own = x.chunk(world.size, dim=1)[world.rank] if sequence else x
        layer(own).square().sum().backward()
        gradients = {name: gather_whole(p, p.grad) for name, p in layer.named_parameters()}
        for name, parameter in whole.items():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-10)


def test_hooks_of_layers_that_share_an_input_are_called() -> None:
    x = tokens()

    def body(comm: Communicator) -> list[torch.Tensor]:
        layer = Pair(TensorParallel(comm)).double()
        plain = layer(x)
        halving = layer.one.register_forward_hook(lambda module, inputs, output: output / 2)
        halved = layer(x)
        halving.remove()
        layer.other.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
        seen: list[torch.Tensor] = []
        layer.one.register_full_backward_hook(lambda module, into, out: seen.append(into[0]))
        doubled = layer(x.clone().requires_grad_())
        doubled.sum().backward()
        assert len(seen) == 1
        one, other = layer.one(x), layer.other(x)
        assert torch.equal(doubled, layer.down(torch.tanh(one) * other))
        assert not torch.allclose(doubled, plain)
        assert torch.allclose(halved, layer.down(torch.tanh(one / 2) * other / 2))
        return [plain]

    run_loopback(2, body)


def counted(size: int, **ways: object) -> list[dict[str, int]]:
    """Bytes that each rank sent in forward and backward of `Pair`, by collective; agreement left out."""

    def sent(comm: Communicator) -> dict[str, int]:
        tp = TensorParallel(comm, **ways)  # type: ignore[arg-type]
        layer = Pair(tp).double()
        x = torch.ones(2, 960, 8, dtype=torch.float64, requires_grad=True)
        own = x.chunk(size, dim=1)[comm.rank].detach().requires_grad_() if tp.sequence_parallel else x
        layer.down.bias = None
        layer(own).sum().backward()  # type: ignore[no-untyped-call]
        sent = {row.collective: row.nbytes_sent for row in comm.traffic.rows() if row.nbytes_sent}
        sent.pop("agreement", None)  # on what ranks must have alike, in first calls alone
        return sent

    return run_loopback(size, sent)


@pytest.mark.parametrize("size", [2, 4], indirect=True)
def test_bytes_are_one_sum_of_the_input_and_one_of_the_output(size: int) -> None:
    share = 2 * 960 * 8 // size * (size - 1)
    in_bytes, out_bytes = share * 8, share * 6
    for traffic in counted(size):
        assert traffic == {"allreduce": 2 * (in_bytes + out_bytes)}
    for traffic in counted(size, sequence_parallel=True):
        assert traffic == {
            "allgather": in_bytes + out_bytes,
            "reduce_scatter": in_bytes + out_bytes,
        }
    for traffic in counted(size, sequence_parallel=True, gather_again=True, chunks=3):
        assert traffic == {
            "allgather": 2 * in_bytes + out_bytes,
            "reduce_scatter": in_bytes + out_bytes,
        }


def test_first_values_are_those_of_the_serial_layer(size: int) -> None:
    serial = nn.Linear(8, 12)
    bound = 8**-0.5

    def drawn(comm: Communicator) -> tuple[Tensor, Tensor, Tensor]:
        column, row = ColumnParallelLinear(8, 12, comm), RowParallelLinear(12, 8, comm)
        column.reset_parameters(torch.Generator().manual_seed(1))
        row.reset_parameters(torch.Generator().manual_seed(1))
        return gather_whole(column.weight), gather_whole(column.bias), gather_whole(row.weight)

    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        serial.weight.uniform_(-bound, bound, generator=generator)
        serial.bias.uniform_(-bound, bound, generator=generator)
        of_row = torch.empty(8, 12).uniform_(
            -(12**-0.5), 12**-0.5, generator=torch.Generator().manual_seed(1)
        )
    for weight, bias, row in run_loopback(size, drawn):
        assert torch.equal(weight, serial.weight)
        assert torch.equal(bias, serial.bias)
        assert torch.equal(row, of_row)


def test_torch_draws_the_same_first_values() -> None:
    torch.manual_seed(5)
    serial = nn.Linear(8, 12)
    torch.manual_seed(5)
    alone = ColumnParallelLinear(8, 12, Communicator.alone())
    assert torch.equal(serial.weight, alone.weight)
    assert torch.equal(serial.bias, alone.bias)


def test_what_does_not_fit_is_named() -> None:
    def check(comm: Communicator) -> None:
        with pytest.raises(LayoutError, match=r"out_features=6 does not divide among tp=4 ranks; .*tp=3"):
            ColumnParallelLinear(8, 6, comm)
        with pytest.raises(LayoutError, match=r"in_features=6 does not divide among tp=4 ranks"):
            RowParallelLinear(6, 8, comm)
        with pytest.raises(LayoutError, match=r"heads=3 neither divides among tp=4 ranks nor divides them"):
            ColumnParallelLinear(8, Heads(3, 2), comm)
        with pytest.raises(LayoutError, match="ranks would share the heads of some and divide others"):
            ColumnParallelLinear(8, (Heads(4, 2), Heads(2, 2)), comm)
        with pytest.raises(MismatchError, match=r"each of 4 ranks has 2 of this layer's 8 inputs, but got"):
            RowParallelLinear(8, 8, comm)(torch.zeros(2, 4, 8))
        with pytest.raises(MismatchError, match="a layer of 8 inputs got a tensor of shape"):
            ColumnParallelLinear(8, 8, comm)(torch.zeros(2, 4, 7))
        other = comm.split(0, name="other")
        with pytest.raises(MismatchError, match="on different communicators, 'world' and 'other'"):
            project([ColumnParallelLinear(8, 8, comm), ColumnParallelLinear(8, 8, other)], torch.zeros(2, 8))
        sequence = TensorParallel(comm, sequence_parallel=True)
        with pytest.raises(MismatchError, match=r"a sequence: 6 elements do not divide .* 4 or 8 would"):
            RowParallelLinear(8, 8, sequence)(torch.zeros(2, 6, 2))
        for layer in (RowParallelLinear(8, 8, sequence), ColumnParallelLinear(2, 8, sequence)):
            with pytest.raises(OperationError, match=r"dim -2 was asked for of a tensor of shape \[2\]"):
                layer(torch.zeros(2))
        for layer in (RowParallelLinear(8, 8, comm), ColumnParallelLinear(2, 8, comm, enter=False)):
            with pytest.raises(
                LayoutError, match=r"ParallelLinear is made of other parameters \(weight norm"
            ):
                weight_norm(layer)(torch.zeros(2))
        with pytest.raises(LayoutError, match="set sequence_parallel=True"):
            TensorParallel(comm, chunks=2)
        with pytest.raises(LayoutError, match="chunks=0"):
            TensorParallel(comm, chunks=0)

    run_loopback(4, check)


def test_gradients_of_overlapped_layers_are_not_differentiated_again() -> None:
    def check(comm: Communicator) -> None:
        x = torch.ones(2, 8, requires_grad=True)
        for layer in (ColumnParallelLinear(8, 8, comm), RowParallelLinear(16, 8, comm, bias=False)):
            made = layer(x)
            # The gradient of a sum is a constant, which torch's once_differentiable would let pass.
            for loss in (made.square().sum(), made.sum()):
                with pytest.raises(OperationError, match=r"cannot be .* TensorParallel\(comm, twice=True\)"):
                    torch.autograd.grad(loss, x, create_graph=True)
        made = ColumnParallelLinear(8, 8, TensorParallel(comm, twice=True))(x)
        (back,) = torch.autograd.grad(made.square().sum(), x, create_graph=True)
        back.sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None

    run_loopback(2, check)
