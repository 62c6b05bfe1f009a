from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, Reducer
from hpcpar.data_parallel.buckets import Bucket
from hpcpar.errors import BufferTypeError, OperationError
from tests.data_parallel.staged import ranks


def parameters(*values: Iterable[float]) -> list[tuple[str, nn.Parameter]]:
    return [
        (f"p{i}", nn.Parameter(torch.tensor(value, dtype=torch.float64))) for i, value in enumerate(values)
    ]


def gradients(named: list[tuple[str, nn.Parameter]]) -> list[list[float] | None]:
    return [None if p.grad is None else p.grad.tolist() for _, p in named]


@ranks(2)
def test_gradients_become_views_into_their_bucket(comm: Communicator) -> None:
    named = parameters([1.0, 2.0], [3.0])
    reducer = Reducer(named, comm)
    (named[0][1].sum() * (comm.rank + 1) + named[1][1].sum()).backward()
    reducer.synchronize()
    assert gradients(named) == [[1.5, 1.5], [1.0]]
    assert reducer.flats[0].tolist() == [1.0, 1.5, 1.5]
    reducer.flats[0].fill_(7)
    assert gradients(named) == [[7.0, 7.0], [7.0]]


@pytest.mark.parametrize("set_to_none", [True, False])
@ranks(2)
def test_a_gradient_whose_data_was_set_is_in_its_bucket_again_at_the_next_backward(
    comm: Communicator, set_to_none: bool
) -> None:
    named = parameters([1.0, 2.0], [3.0])
    reducer = Reducer(named, comm)
    for step in range(3):
        (named[0][1].sum() * (comm.rank + 1 + step) + named[1][1].sum()).backward()
        reducer.synchronize()
        assert gradients(named) == [[1.5 + step] * 2, [1.0]]
        for _, parameter in named:
            assert parameter.grad is not None
            parameter.grad.data = parameter.grad.data.clamp(-1.25, 1.25)
        assert gradients(named) == [[1.25] * 2, [1.0]]
        reducer.zero(set_to_none=set_to_none)


def test_a_parameter_that_has_changed_its_type_since_is_named() -> None:
    def body(comm: Communicator) -> str:
        model = nn.Linear(2, 1)
        reducer = Reducer(model.named_parameters(), comm)
        model(torch.ones(1, 2)).sum().backward()
        reducer.synchronize()
        model.double()
        with pytest.raises(OperationError, match="change the model first") as told:
            model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        return str(told.value)

    assert all(
        "torch.float64" in str(text) and "torch.float32" in str(text) for text in run_loopback(2, body)
    )


@ranks(2)
def test_a_gradient_that_is_replaced_while_its_average_is_under_way_is_named(comm: Communicator) -> None:
    named = parameters([1.0, 2.0])
    reducer = Reducer(named, comm)
    named[0][1].sum().backward()
    named[0][1].grad = torch.zeros(2, dtype=torch.float64)
    with pytest.raises(OperationError, match="p0 was set to another tensor while its average was under"):
        reducer.synchronize()


@ranks(2)
def test_a_gradient_that_is_set_to_none_while_its_average_is_under_way_is_named(comm: Communicator) -> None:
    named = parameters([1.0, 2.0], [3.0])
    reducer = Reducer(named, comm)
    for forgets in (True, False):
        (named[0][1].sum() + named[1][1].sum()).backward()
        named[1][1].grad = None
        if forgets:
            reducer.zero()
    with pytest.raises(OperationError, match="of p1 was set to None while its average was under way"):
        reducer.synchronize()
    assert gradients(named) == [[1.0, 1.0], [1.0]]


@ranks(2)
def test_a_gradient_is_added_to_in_place_in_later_microbatches(comm: Communicator) -> None:
    named = parameters([1.0])
    reducer = Reducer(named, comm)
    with reducer.no_sync():
        named[0][1].sum().backward()
    view = named[0][1].grad
    named[0][1].sum().backward()
    assert named[0][1].grad is view
    reducer.synchronize()
    assert gradients(named) == [[2.0]]


@ranks(2)
def test_inner_microbatches_send_nothing(comm: Communicator) -> None:
    named = parameters([1.0], [2.0])
    reducer = Reducer(named, comm)
    comm.traffic.reset()
    with reducer.no_sync(), reducer.no_sync():
        (named[0][1] * named[1][1]).sum().backward()
    with reducer.no_sync():
        (named[0][1] * named[1][1]).sum().backward()
    assert comm.traffic.nbytes_sent() == 0
    (named[0][1] * named[1][1]).sum().backward()
    reducer.synchronize()
    assert comm.traffic.nbytes_sent() > 0
    assert gradients(named) == [[6.0], [3.0]]


@ranks(2)
def test_buckets_leave_during_backward_before_anybody_waits(comm: Communicator) -> None:
    named = parameters([1.0], [2.0], [3.0])
    started: list[int] = []
    reducer = Reducer(named, comm, bucket_bytes=8, first_bucket_bytes=8)
    for index, (_, parameter) in enumerate(named):
        parameter.register_post_accumulate_grad_hook(
            lambda _, index=index: started.append((index, reducer._departed))
        )
    chain = named[2][1] * (named[1][1] * (named[0][1] * 2))
    chain.sum().backward()
    reducer.synchronize()
    assert started == [(2, 1), (1, 2), (0, 3)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_parameter_used_nowhere_keeps_no_gradient_and_one_used_somewhere_gets_its_average(
    size: int,
) -> None:
    def body(comm: Communicator) -> list[list[float] | None]:
        named = parameters([1.0], [2.0], [3.0], [4.0])
        reducer = Reducer(named, comm, bucket_bytes=16, first_bucket_bytes=8)
        found = []
        for _ in range(2):
            loss = named[0][1].sum()
            if comm.rank == size - 1:
                loss = loss + named[2][1].sum() * size
            loss.backward()
            reducer.synchronize()
            found.append(gradients(named))
            reducer.zero()
        return found

    for found in run_loopback(size, body):
        assert found == [[[1.0], None, [1.0], None]] * 2


@ranks(2)
def test_a_gradient_from_an_inner_microbatch_counts_though_the_last_one_brings_none(
    comm: Communicator,
) -> None:
    named = parameters([1.0], [2.0])
    reducer = Reducer(named, comm)
    with reducer.no_sync():
        (named[0][1] * (comm.rank + 1)).sum().backward()
    named[1][1].sum().backward()
    reducer.synchronize()
    assert gradients(named) == [[1.5], [1.0]]


@ranks(2)
def test_a_parameter_shared_by_two_modules_is_averaged_once(comm: Communicator) -> None:
    embed = nn.Embedding(3, 2, dtype=torch.float64)
    head = nn.Linear(2, 3, bias=False, dtype=torch.float64)
    head.weight = embed.weight
    model = nn.Sequential(embed, head)
    nn.init.ones_(embed.weight)
    named = list(model.named_parameters(remove_duplicate=False))
    reducer = Reducer(named, comm)
    (model(torch.tensor([comm.rank])).sum()).backward()
    reducer.synchronize()
    assert len(reducer.parameters) == 1
    # d/dW of the sum of W's rows times its row r: the row itself everywhere, and the sum of rows in row r.
    assert embed.weight.grad.tolist() == [[2.5, 2.5], [2.5, 2.5], [1.0, 1.0]]


@ranks(2)
def test_frozen_parameters_travel_not_at_all(comm: Communicator) -> None:
    named = parameters([1.0], [2.0])
    named[0][1].requires_grad_(False)
    reducer = Reducer(named, comm)
    (named[0][1] * named[1][1]).sum().backward()
    reducer.synchronize()
    assert reducer.names == ["p1"]
    assert gradients(named) == [None, [1.0]]
    assert sum(flat.numel() for flat in reducer.flats) == 1


@ranks(2)
def test_gradients_of_unusual_memory_order_are_averaged(comm: Communicator) -> None:
    transposed = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    image = nn.Parameter(torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last))
    expanded = nn.Parameter(torch.zeros(2, 2))
    reducer = Reducer([("t", transposed), ("i", image), ("e", expanded)], comm)
    weights = torch.arange(6.0).view(3, 2) * (comm.rank + 1)
    (transposed * weights).sum().backward(inputs=[transposed])
    (image * image).sum().backward(inputs=[image])
    expanded.grad = torch.tensor([[1.0], [2.0]]).expand(2, 2)
    reducer.synchronize()
    assert torch.equal(transposed.grad, torch.arange(6.0).view(3, 2) * 1.5)
    assert transposed.grad.stride() == transposed.stride()
    assert torch.equal(image.grad, torch.full((2, 3, 2, 2), 2.0))
    assert expanded.grad.tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert all(
        p.grad.untyped_storage().data_ptr() == transposed.grad.untyped_storage().data_ptr()
        for p in (image, expanded)
    )


@ranks(2)
def test_several_element_types_have_buckets_of_their_own(comm: Communicator) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.complex64)
    named = [(str(dtype), nn.Parameter(torch.ones(3, dtype=dtype))) for dtype in dtypes]
    reducer = Reducer(named, comm)
    for _, parameter in named:
        with reducer.no_sync():
            (parameter * (2 * comm.rank + 1)).sum().abs().backward()
    reducer.synchronize()
    assert len(reducer.buckets) == 4
    for _, parameter in named:
        assert torch.equal(parameter.grad, torch.full_like(parameter, 2))


@ranks(2)
def test_no_parameters_and_empty_parameters_are_no_trouble(comm: Communicator) -> None:
    empty = Reducer([], comm)
    empty.synchronize()
    empty.zero()
    named = [("none", nn.Parameter(torch.zeros(0, 2))), ("one", nn.Parameter(torch.zeros(())))]
    reducer = Reducer(named, comm)
    (named[0][1].sum() + named[1][1]).backward()
    reducer.synchronize()
    assert named[1][1].grad.item() == 1.0


def test_counted_bytes_equal_the_theory_exactly() -> None:
    for size in (2, 3, 4):
        for algorithm in (None, "ring", "rabenseifner"):

            def body(comm: Communicator, algorithm: str | None = algorithm) -> tuple[int, int, int]:
                model = nn.Sequential(nn.Linear(50, 301), nn.Linear(301, 7))
                reducer = Reducer(
                    model.named_parameters(),
                    comm,
                    bucket_bytes=20_000,
                    first_bucket_bytes=3,
                    algorithm=algorithm,
                )
                comm.traffic.reset()
                for _ in range(3):
                    model(torch.ones(2, 50)).sum().backward()
                    reducer.synchronize()
                    reducer.zero()
                sent = comm.traffic.nbytes_sent("allreduce")
                return sent, comm.traffic.nbytes_sent(), reducer.expected_nbytes(3)

            found = run_loopback(size, body)
            assert sum(sent for sent, _, _ in found) == found[0][2]
            assert sum(everything for _, everything, _ in found) == found[0][2]


@ranks(2)
def test_synchronizing_twice_is_refused(comm: Communicator) -> None:
    named = parameters([1.0])
    reducer = Reducer(named, comm)
    named[0][1].sum().backward()
    reducer.synchronize()
    with pytest.raises(OperationError, match="the gradients are averages already; call synchronize"):
        reducer.synchronize()
    named[0][1].sum().backward()
    reducer.synchronize()
    assert gradients(named) == [[2.0]]


@ranks(1)
def test_synchronizing_inside_no_sync_is_refused(comm: Communicator) -> None:
    reducer = Reducer(parameters([1.0]), comm)
    with reducer.no_sync(), pytest.raises(OperationError, match="averaged inside no_sync"):
        reducer.synchronize()


@pytest.mark.parametrize("accumulating", [False, True])
def test_a_backward_after_the_averaging_one_is_refused(accumulating: bool) -> None:
    def body(comm: Communicator) -> str:
        named = parameters([1.0])
        reducer = Reducer(named, comm)
        named[0][1].sum().backward()
        context = reducer.no_sync() if accumulating else nullcontext()
        with context, pytest.raises(OperationError) as caught:
            named[0][1].sum().backward()
        reducer.zero()
        return str(caught.value)

    for rank, message in enumerate(run_loopback(2, body)):
        assert (
            f"rank {rank}: gradient number 2 of p0 came when its bucket was due to leave or gone" in message
        )
        assert "all microbatches but the last inside no_sync()" in message
        assert "or say by backward_passes_per_step= how many there are, as for a pipeline's" in message


def test_an_error_inside_no_sync_ends_it() -> None:
    reducer = Reducer(parameters([1.0]), Communicator.alone())
    with pytest.raises(ZeroDivisionError), reducer.no_sync():
        _ = 1 / 0
    reducer.synchronize()


@ranks(2)
def test_zeroing_awaits_averages_under_way(comm: Communicator) -> None:
    named = parameters([1.0], [2.0])
    reducer = Reducer(named, comm, bucket_bytes=8, first_bucket_bytes=8)
    loss = named[1][1].sum() if comm.rank == 0 else named[0][1].sum()
    loss.backward()
    reducer.zero()
    (named[0][1] * 3).sum().backward()
    reducer.synchronize()
    assert gradients(named) == [[3.0], None]


@ranks(2)
def test_zeroing_in_place_keeps_views_and_fills_them_with_zeros(comm: Communicator) -> None:
    named = parameters([1.0], [2.0])
    reducer = Reducer(named, comm)
    named[0][1].sum().backward()
    reducer.synchronize()
    view = named[0][1].grad
    reducer.zero(set_to_none=False)
    assert named[0][1].grad is view
    assert gradients(named) == [[0.0], None]


def test_sparse_gradients_are_refused_by_name() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    reducer = Reducer(embedding.named_parameters(), Communicator.alone())
    with pytest.raises(BufferTypeError, match=r"gradient of weight is torch\.sparse_coo.* sparse=False"):
        embedding(torch.tensor([1])).sum().backward()
    reducer.close()


def test_a_forgotten_reducer_answers_no_more() -> None:
    named = parameters([1.0])
    reducer = Reducer(named, Communicator.alone())
    named[0][1].sum().backward()
    flat: Tensor = reducer.flats[0]
    del reducer
    named[0][1].grad = None
    named[0][1].sum().backward()
    assert named[0][1].grad is not None
    assert named[0][1].grad.data_ptr() != flat.data_ptr()


# Several backwards a round


@pytest.mark.parametrize("passes", [1, 2, 3])
@ranks(2)
def test_the_last_of_the_passes_sends_the_sum(comm: Communicator, passes: int) -> None:
    named = parameters([1.0], [2.0])
    reducer = Reducer(named, comm, passes=passes)
    for _ in range(3):
        comm.traffic.reset()
        for number in range(1, passes + 1):
            assert not reducer.round_open
            assert comm.traffic.nbytes_sent() == 0
            ((comm.rank + number) * named[0][1].sum() + named[1][1].sum()).backward()
        assert reducer.round_open
        assert reducer._departed == 1
        reducer.synchronize()
        assert comm.traffic.nbytes_sent() > 0
        assert gradients(named) == [[0.5 * passes + passes * (passes + 1) / 2], [float(passes)]]
        reducer.zero()


@pytest.mark.parametrize("taken", [0, 1, 2])
@ranks(2)
def test_synchronizing_before_the_last_pass_averages_what_there_is(comm: Communicator, taken: int) -> None:
    named = parameters([1.0])
    reducer = Reducer(named, comm, passes=3)
    found = []
    for _ in range(2):
        for _ in range(taken):
            (named[0][1].sum() * 2 * comm.rank).backward()
        reducer.synchronize()
        found.append(gradients(named))
        reducer.zero()
    assert found == [[[float(taken)] if taken else None]] * 2


@ranks(2)
def test_a_parameter_with_fewer_gradients_than_passes_leaves_when_it_is_waited_for(
    comm: Communicator,
) -> None:
    named = parameters([1.0], [2.0], [3.0])
    reducer = Reducer(named, comm, passes=2)
    (named[0][1].sum() * (comm.rank + 1)).backward()
    (named[1][1].sum() if comm.rank == 0 else named[0][1].sum()).backward()
    reducer.synchronize()
    assert gradients(named) == [[2.0], [0.5], None]


def test_one_gradient_more_than_passes_is_refused_with_its_number() -> None:
    def body(comm: Communicator) -> str:
        named = parameters([1.0])
        reducer = Reducer(named, comm, passes=2, advice="Say so before.")
        for _ in range(2):
            named[0][1].sum().backward()
        with pytest.raises(AssertionError) as caught:
            named[0][1].sum().backward()
        reducer.synchronize()
        return str(caught.value)

    for rank, message in enumerate(run_loopback(2, body)):
        assert message.startswith(f"rank {rank}: gradient number 3 of p0 came when its bucket was due")
        assert message.endswith("Say so before.")


@pytest.mark.parametrize("forget", ["zero", "recount"])
def test_passes_can_be_counted_from_the_beginning_again(forget: str) -> None:
    def body(comm: Communicator) -> tuple[bool, list[list[float] | None]]:
        named = parameters([1.0])
        reducer = Reducer(named, comm, passes=2)
        (named[0][1].sum() * 10).backward()
        reducer.zero() if forget == "zero" else reducer.recount()
        named[0][1].sum().backward()
        began_early = reducer.round_open
        named[0][1].sum().backward()
        reducer.synchronize()
        return began_early, gradients(named)

    kept = 10.0 if forget == "recount" else 0.0
    assert run_loopback(2, body) == [(False, [[2.0 + kept]])] * 2


@ranks(2)
def test_recounting_while_averages_are_under_way_does_nothing(comm: Communicator) -> None:
    named = parameters([1.0])
    reducer = Reducer(named, comm)
    named[0][1].sum().backward()
    reducer.recount()
    with pytest.raises(OperationError, match="gradient number 2 of p0"):
        named[0][1].sum().backward()
    reducer.synchronize()
    named[0][1].grad = None
    named[0][1].sum().backward()
    reducer.synchronize()
    assert gradients(named) == [[1.0]]


# Groups


def test_parameters_of_a_group_travel_in_one_bucket() -> None:
    def body(comm: Communicator) -> tuple[list[tuple[int, ...]], list[list[float] | None], int, int]:
        named = parameters([1.0], [2.0], [3.0], [4.0])
        tensors = [parameter for _, parameter in named]
        stranger = torch.ones(1)
        reducer = Reducer(
            named,
            comm,
            bucket_bytes=8,
            first_bucket_bytes=8,
            groups=[[tensors[0], tensors[3], stranger], [stranger]],
        )
        comm.traffic.reset()
        sum(p.sum() * (i + 1) * (comm.rank + 1) for i, p in enumerate(tensors)).backward()
        reducer.synchronize()
        sent = comm.traffic.nbytes_sent("allreduce")
        members = [bucket.members for bucket in reducer.buckets]
        return members, gradients(named), sent, reducer.expected_nbytes()

    found = run_loopback(2, body)
    for members, averages, _, _ in found:
        assert members == [(2,), (1,), (3, 0)]
        assert averages == [[1.5], [3.0], [4.5], [6.0]]
    assert sum(sent for _, _, sent, _ in found) == found[0][3]


# Sparse gradients as dense ones


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("set_to_none", [True, False])
@ranks(2)
def test_sparse_gradients_are_averaged_as_dense_ones_where_that_is_asked_for(
    comm: Communicator, passes: int, set_to_none: bool
) -> None:
    table = nn.Embedding(3, 1, sparse=True, dtype=torch.float64)
    reducer = Reducer(table.named_parameters(), comm, passes=passes, sparse_as_dense=True)
    found = []
    for _ in range(2):
        for _ in range(passes):
            table(torch.tensor([comm.rank, comm.rank, 2])).sum().backward()
        reducer.synchronize()
        assert table.weight.grad.layout is torch.strided
        found.append(table.weight.grad[:, 0].tolist())
        reducer.zero(set_to_none=set_to_none)
    assert found == [[1.0 * passes, 1.0 * passes, 1.0 * passes]] * 2


# A reduction of one's own


class Doubling:
    """Sums twice what it is given, and tells what happened."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.events: list[object] = []

    def start(self, flat: Tensor, bucket: Bucket) -> Doubled:
        assert flat.numel() == bucket.numel
        self.events.append(bucket.members)
        return Doubled(self, bucket.members, flat, self.comm.start_allreduce(flat))

    def start_map(self, bits: Any) -> Doubled:
        self.events.append("map")
        return Doubled(self, "map", None, self.comm.start_allreduce(bits, "or"))


class Doubled:
    def __init__(self, by: Doubling, what: object, flat: Tensor | None, handle: Any) -> None:
        self.by, self.what, self.flat, self.handle = by, what, flat, handle

    def wait(self) -> None:
        self.handle.wait()
        if self.flat is not None:
            self.flat.mul_(2)
        self.by.events.append(("waited", self.what))


@ranks(2)
def test_a_reduction_is_begun_bucket_by_bucket_with_the_map_last_and_awaited_once(comm: Communicator) -> None:
    named = parameters([1.0], [2.0], [3.0])
    doubling = Doubling(comm)
    reducer = Reducer(named, comm, bucket_bytes=8, first_bucket_bytes=8, reduction=doubling)
    for _ in range(2):
        doubling.events.clear()
        (named[0][1] * (comm.rank + 1) + named[2][1]).sum().backward()
        reducer.synchronize()
        found = gradients(named)
        reducer.zero()
    events = doubling.events
    begun = [event for event in events if not (isinstance(event, tuple) and event[0] == "waited")]
    waited = [event[1] for event in events if isinstance(event, tuple) and event[0] == "waited"]
    assert begun == [(2,), (1,), (0,), "map"]
    assert waited == [(2,), (1,), (0,), "map"]
    assert found == [[6.0], None, [4.0]]


# Complete last: a parameter of which other ranks have copies


@ranks(2)
def test_a_late_gradient_may_change_until_synchronize_and_the_others_do_not_wait(
    comm: Communicator,
) -> None:
    named = parameters([1.0], [2.0])
    reducer = Reducer(named, comm, bucket_bytes=1, first_bucket_bytes=1, late=["p0"])
    (named[0][1].sum() + (comm.rank + 1) * named[1][1].sum()).backward()
    assert reducer._departed == 1, "p1's bucket has left, and p0's has not"
    assert named[0][1].grad is not None
    named[0][1].grad += 10 * comm.rank
    reducer.synchronize()
    assert gradients(named) == [[6.0], [1.5]]


@ranks(2)
def test_gradients_of_one_part_may_still_add_up_when_those_of_another_have_left(comm: Communicator) -> None:
    # Two stages of a pipeline on one rank: stage 1's last backward comes before stage 0's.
    named = parameters([1.0], [2.0])
    reducer = Reducer(named, comm, bucket_bytes=1, first_bucket_bytes=1)
    named[1][1].sum().backward()
    with reducer.no_sync():
        named[0][1].sum().backward()
    ((comm.rank + 1) * named[0][1].sum()).backward()
    reducer.synchronize()
    assert gradients(named) == [[2.5], [1.0]]


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_written_to_on_their_way_are_an_error_unless_they_have_been_waited_for(stage: int) -> None:
    def body(comm: Communicator) -> str:
        model = nn.Linear(3, 2)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), comm, zero_stage=stage
        )
        with optimizer.no_sync():
            model(torch.ones(1, 3)).sum().backward()
        gradient = model.weight.grad
        assert gradient is not None
        model(torch.ones(1, 3)).sum().backward()
        gradient.mul_(0.01)
        with pytest.raises(OperationError) as caught:
            optimizer.step()
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.clip_grad_norm_(0.01)
        optimizer.step()
        return str(caught.value)

    for rank, told in enumerate(run_loopback(2, body)):
        assert told.startswith(
            f"rank {rank}: gradients were written to while their averages were under way ("
        )
        assert told.endswith("use optimizer.clip_grad_norm_, or call synchronize() first")
