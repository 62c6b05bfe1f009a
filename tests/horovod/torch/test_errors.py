"""What goes wrong: on every rank, with words that name both sides, and the library works on afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcpar.horovod.exceptions import HorovodInternalError

ones = torch.ones
Ask = Callable[[ModuleType, str, bool], Any]
"""What a rank asks for: (hvd, name, whether it is the odd one, rank 0)."""


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def ask_reduce(hvd: ModuleType, name: str, tensor: Tensor, **told: Any) -> Any:
    return hvd.allreduce_async(tensor, name=name, **{"op": hvd.Sum, **told})


def ask_scatter(hvd: ModuleType, name: str, tensor: Tensor, **told: Any) -> Any:
    return hvd.reducescatter_async(tensor, name=name, **{"op": hvd.Sum, **told})


MISMATCHES: dict[str, tuple[Ask, list[str]]] = {
    "allreduce of other lengths": (lambda h, n, odd: ask_reduce(h, n, ones(3 if odd else 4)), ["[3]", "[4]"]),
    "allreduce of the same number of elements": (
        lambda h, n, odd: ask_reduce(h, n, ones(2, 3) if odd else ones(3, 2)),
        ["[2, 3]", "[3, 2]"],
    ),
    "allreduce of other dimensions": (
        lambda h, n, odd: ask_reduce(h, n, ones(4) if odd else ones(2, 2)),
        ["[4]", "[2, 2]"],
    ),
    "allreduce of a scalar": (
        lambda h, n, odd: ask_reduce(h, n, ones(()) if odd else ones(1)),
        ["[]", "[1]"],
    ),
    "allreduce of other types": (
        lambda h, n, odd: ask_reduce(h, n, ones(4, dtype=torch.int32 if odd else torch.float32)),
        ["int32", "float32"],
    ),
    "allreduce of types of one size": (
        lambda h, n, odd: ask_reduce(h, n, ones(4, dtype=torch.bfloat16 if odd else torch.float16)),
        ["bfloat16", "float16"],
    ),
    "allreduce with other ops": (
        lambda h, n, odd: ask_reduce(h, n, ones(4), op=h.Max if odd else h.Sum),
        ["max", "sum"],
    ),
    "allreduce with sum and average": (
        lambda h, n, odd: ask_reduce(h, n, ones(4), op=h.Average if odd else h.Sum),
        ["average", "sum"],
    ),
    "allreduce with other prescale factors": (
        lambda h, n, odd: ask_reduce(h, n, ones(4), prescale_factor=0.25 if odd else 0.5),
        ["prescale", "0.25", "0.5"],
    ),
    "allreduce with other postscale factors": (
        lambda h, n, odd: ask_reduce(h, n, ones(4), postscale_factor=0.25 if odd else 1.0),
        ["postscale", "0.25", "1.0"],
    ),
    "large allreduce": (
        lambda h, n, odd: ask_reduce(h, n, ones(300_000 + odd)),
        ["[300001]", "[300000]"],
    ),
    "in place": (
        lambda h, n, odd: h.allreduce_async_(ones(3 if odd else 4), name=n, op=h.Sum),
        ["[3]", "[4]"],
    ),
    "one of a group": (
        lambda h, n, odd: h.grouped_allreduce_async([ones(2), ones(3 if odd else 4)], name=n, op=h.Sum),
        ["[3]", "[4]"],
    ),
    "broadcast from other roots": (
        lambda h, n, odd: h.broadcast_async(ones(4), 0 if odd else 1, name=n),
        ["root", "0", "1"],
    ),
    "broadcast of other shapes": (
        lambda h, n, odd: h.broadcast_async(ones(3 if odd else 4), 0, name=n),
        ["[3]", "[4]"],
    ),
    "broadcast of other types": (
        lambda h, n, odd: h.broadcast_async(ones(4, dtype=torch.bool if odd else torch.uint8), 0, name=n),
        ["bool", "uint8"],
    ),
    "allgather of other rows": (
        lambda h, n, odd: h.allgather_async(ones(2, 3 if odd else 4), name=n),
        ["[3]", "[4]"],
    ),
    "allgather of other dimensions": (
        lambda h, n, odd: h.allgather_async(ones(2) if odd else ones(2, 1), name=n),
        [],
    ),
    "allgather of other types": (
        lambda h, n, odd: h.allgather_async(ones(2, dtype=torch.int8 if odd else torch.int16), name=n),
        ["int8", "int16"],
    ),
    "one of a group of allgathers": (
        lambda h, n, odd: h.grouped_allgather_async([ones(2), ones(2, 3 if odd else 4)], name=n),
        ["[3]", "[4]"],
    ),
    "alltoall of other rows": (
        lambda h, n, odd: h.alltoall_async(ones(h.size(), 3 if odd else 4), name=n),
        ["[3]", "[4]"],
    ),
    "alltoall of other types": (
        lambda h, n, odd: h.alltoall_async(ones(h.size(), dtype=torch.int8 if odd else torch.bool), name=n),
        ["int8", "bool"],
    ),
    "reducescatter of other lengths": (
        lambda h, n, odd: ask_scatter(h, n, ones(8 if odd else 12)),
        ["[8]", "[12]"],
    ),
    "reducescatter of other types": (
        lambda h, n, odd: ask_scatter(h, n, ones(8, dtype=torch.int64 if odd else torch.float64)),
        ["int64", "float64"],
    ),
    "reducescatter with other ops": (
        lambda h, n, odd: ask_scatter(h, n, ones(8), op=h.Average if odd else h.Sum),
        ["average", "sum"],
    ),
    "reducescatter with other factors": (
        lambda h, n, odd: ask_scatter(h, n, ones(8), prescale_factor=3.0 if odd else 1.0),
        ["prescale", "3.0", "1.0"],
    ),
    "one of a group of reducescatters": (
        lambda h, n, odd: h.grouped_reducescatter_async([ones(2), ones(3 if odd else 4)], name=n),
        ["[3]", "[4]"],
    ),
    "allgather of a scalar on one rank": (
        lambda h, n, odd: h.allgather_async(ones(()) if odd else ones(2), name=n),
        [],
    ),
    "alltoall of a scalar on one rank": (
        lambda h, n, odd: h.alltoall_async(ones(()) if odd else ones(h.size()), name=n),
        [],
    ),
    "reducescatter of a scalar on one rank": (
        lambda h, n, odd: ask_scatter(h, n, ones(()) if odd else ones(h.size())),
        [],
    ),
}


@pytest.mark.mpi
@pytest.mark.usefixtures("needs_two")
@pytest.mark.parametrize("case", MISMATCHES)
def test_ranks_that_disagree_are_told_so_on_every_rank_with_both_sides(hvd, error_of, case):
    ask, words = MISMATCHES[case]
    name = case.replace(" ", "_")
    error = error_of(lambda: hvd.synchronize(ask(hvd, name, hvd.rank() == 0)))
    again = hvd.synchronize(ask(hvd, name, False))  # at once, under the same name
    told = hvd.allgather_object((type(error).__name__, str(error)))
    assert again is not None
    assert {kind for kind, _ in told} == {"HorovodInternalError"}
    assert len({message for _, message in told}) == 1, "every rank says the same"
    _, message = told[0]
    for word in [name, "rank 0", _ranks(list(range(1, hvd.size()))), *words]:
        assert word in message, message


@pytest.mark.mpi
def test_a_handle_can_be_polled_until_it_is_synchronized(hvd):
    handle = hvd.allreduce_async(ones(2))
    while not hvd.poll(handle):
        pass
    hvd.synchronize(handle)
    with pytest.raises(ValueError, match=f"handle {handle} was not created, or has been synchronized"):
        hvd.poll(handle)


@pytest.mark.mpi
@pytest.mark.usefixtures("needs_two")
@pytest.mark.parametrize("odd", [0, -1])
def test_the_odd_one_may_be_any_rank(hvd, error_of, odd):
    odd %= hvd.size()
    error = error_of(lambda: hvd.allreduce(ones(5 if hvd.rank() == odd else 6), name="any"))
    assert f"rank {odd} sent" in str(error)
    others = [rank for rank in range(hvd.size()) if rank != odd]
    assert f"{_ranks(others)} sent" in str(error)


@pytest.mark.mpi
@pytest.mark.usefixtures("needs_two")
def test_as_many_sides_are_named_as_there_are(hvd, error_of):
    error = error_of(lambda: hvd.allreduce(ones(hvd.rank() + 1), name="all_differ"))
    for rank in range(hvd.size()):
        assert f"rank {rank} sent a tensor of shape [{rank + 1}]" in str(error), str(error)


@pytest.mark.mpi
def test_messages_of_a_process_set_name_ranks_of_the_job(hvd, error_of):
    if hvd.size() < 3:
        pytest.skip("two ranks and one that does not belong to them")
    pair = hvd.add_process_set([1, 2])
    error = rooted = None
    if pair.included():
        error = error_of(lambda: hvd.allreduce(ones(hvd.rank()), name="pair", process_set=pair))
        rooted = error_of(lambda: hvd.broadcast(ones(1), hvd.rank(), name="pair", process_set=pair))
    hvd.remove_process_set(pair)
    if hvd.rank() in (1, 2):
        assert "rank 1 sent a tensor of shape [1]" in str(error)
        assert "rank 2 sent a tensor of shape [2]" in str(error)
        assert "rank 1 named root 1" in str(rooted)
        assert "rank 2 named root 2" in str(rooted)


@pytest.mark.mpi
@pytest.mark.usefixtures("needs_two")
def test_an_error_comes_at_synchronize_and_spares_the_others_under_way(hvd, error_of):
    wrong = 4
    handles = [
        hvd.allreduce_async(
            ones(3 if k == wrong and hvd.rank() == 0 else 2) * k, name=f"spared.{k}", op=hvd.Sum
        )
        for k in range(9)
    ]
    results = {k: hvd.synchronize(handles[k]) for k in range(9) if k != wrong}
    error = error_of(lambda: hvd.synchronize(handles[wrong]))
    second = hvd.synchronize(handles[wrong])
    assert isinstance(error, HorovodInternalError)
    assert f"spared.{wrong}" in str(error)
    assert second is None
    for k, result in results.items():
        assert torch.equal(result, ones(2) * k * hvd.size())


@pytest.mark.mpi
@pytest.mark.usefixtures("needs_two")
def test_unnamed_operations_of_different_kinds_are_an_error_and_no_hang(hvd, error_of):
    """Their numbers are counted together, so that no rank can ever ask for the other one's."""
    ask = hvd.allgather_async if hvd.rank() == 0 else hvd.allreduce_async
    error = error_of(lambda: hvd.synchronize(ask(ones(2))))
    after = hvd.allreduce(ones(2), op=hvd.Sum)
    told = hvd.allgather_object((type(error).__name__, str(error)))
    assert {kind for kind, _ in told} == {"HorovodInternalError"}
    for word in ("allgather", "allreduce", "rank 0", _ranks(list(range(1, hvd.size())))):
        assert word in told[-1][1]
    assert torch.equal(after, ones(2) * hvd.size())


@pytest.mark.mpi
@pytest.mark.usefixtures("needs_two")
@pytest.mark.parametrize("what", ["a group and one", "groups of two and three", "kinds of groups"])
def test_unnamed_groups_that_differ_are_an_error_and_no_hang(hvd, error_of, what):
    odd = hvd.rank() == 0
    pair = [ones(2), ones(2)]
    ask = {
        "a group and one": lambda: hvd.allreduce(ones(2)) if odd else hvd.grouped_allreduce(pair),
        "groups of two and three": lambda: hvd.grouped_allreduce([*pair, ones(2)] if odd else pair),
        "kinds of groups": lambda: hvd.grouped_allgather(pair) if odd else hvd.grouped_allreduce(pair),
    }
    error = error_of(ask[what])
    after = hvd.allreduce(ones(2), op=hvd.Sum)
    assert isinstance(error, HorovodInternalError)
    assert "rank 0" in str(error)
    assert torch.equal(after, ones(2) * hvd.size())


@pytest.mark.mpi
@pytest.mark.usefixtures("needs_two")
def test_unnamed_operations_in_another_order_are_never_mixed_up(hvd, error_of):
    shapes = [(2,), (3,)] if hvd.rank() == 0 else [(3,), (2,)]
    handles = [hvd.allreduce_async(torch.full(shape, 1.0 + hvd.rank())) for shape in shapes]
    errors = [error_of(lambda handle=handle: hvd.synchronize(handle)) for handle in handles]
    after = hvd.allreduce(ones(2), op=hvd.Sum)
    assert [type(error) for error in errors] == [HorovodInternalError] * 2
    for error in errors:
        assert "[2]" in str(error)
        assert "[3]" in str(error)
    assert torch.equal(after, ones(2) * hvd.size())


@pytest.mark.mpi
def test_every_kind_of_error_is_the_same_on_gradients(hvd, error_of):
    """A mismatch in a forward that records a gradient raises as without."""
    if hvd.size() < 2:
        pytest.skip("one rank cannot disagree with itself")
    own = ones(2 + (hvd.rank() == 0), requires_grad=True)
    error = error_of(lambda: hvd.allreduce(own, name="with_gradient"))
    assert isinstance(error, HorovodInternalError)


@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["allreduce", "allgather", "broadcast", "alltoall", "reducescatter"])
def test_a_name_that_is_under_way_is_refused_and_the_first_goes_on(hvd, error_of, kind):
    """The second one comes before the first can be done: nothing is done before all ranks ask."""
    more = (0,) if kind == "broadcast" else ()
    ask = getattr(hvd, f"{kind}_async")
    own = torch.arange(hvd.size(), dtype=torch.float32)
    first = ask(own, *more, name=f"twice.{kind}")
    refused = error_of(lambda: ask(own, *more, name=f"twice.{kind}"))
    result = hvd.synchronize(first)
    third = hvd.synchronize(ask(own, *more, name=f"twice.{kind}"))
    assert type(refused) is ValueError
    assert f"twice.{kind}" in str(refused)
    assert result is not None
    assert third is not None


@pytest.mark.mpi
@pytest.mark.usefixtures("needs_two")
def test_a_second_use_of_a_name_on_one_rank_only_harms_nobody_else(hvd, error_of):
    first = hvd.allreduce_async(ones(2), name="one_sided", op=hvd.Sum)
    refused = None
    if hvd.rank() == 0:
        refused = error_of(lambda: hvd.allreduce_async(ones(3), name="one_sided", op=hvd.Sum))
    result = hvd.synchronize(first)
    assert torch.equal(result, ones(2) * hvd.size())
    assert (type(refused) is ValueError) == (hvd.rank() == 0)


@pytest.mark.mpi
def test_a_group_with_a_name_under_way_asks_for_nothing_at_all(hvd, error_of):
    first = hvd.grouped_allreduce_async([ones(2), ones(3)], name="pair", op=hvd.Sum)
    refused = error_of(lambda: hvd.grouped_allreduce_async([ones(2), ones(3)], name="pair", op=hvd.Sum))
    results = hvd.synchronize(first)
    again = hvd.grouped_allreduce([ones(2), ones(3)], name="pair", op=hvd.Sum)
    assert type(refused) is ValueError
    for found in (results, again):
        assert [x.tolist() for x in found] == [[hvd.size()] * 2, [hvd.size()] * 3]


def unregistered(hvd: ModuleType) -> Any:
    return hvd.ProcessSet([0])


LOCAL: dict[str, tuple[Callable[[ModuleType], Any], type[Exception], list[str]]] = {
    "allreduce of bool": (
        lambda h: h.allreduce(ones(2, dtype=torch.bool)),
        ValueError,
        ["bool", "not supported"],
    ),
    "allreduce of complex": (
        lambda h: h.allreduce(ones(2, dtype=torch.complex64)),
        ValueError,
        ["complex", "not supported"],
    ),
    "Adasum of integers": (
        lambda h: h.allreduce(ones(2, dtype=torch.int32), op=h.Adasum),
        ValueError,
        ["Adasum", "int32", "not supported"],
    ),
    "reducescatter of bool": (
        lambda h: h.reducescatter(ones(2, dtype=torch.bool)),
        ValueError,
        ["bool", "not supported"],
    ),
    "broadcast of 8-bit floats": (
        lambda h: h.broadcast(ones(2).to(torch.float8_e4m3fn), 0),
        ValueError,
        ["float8"],
    ),
    "allgather of 8-bit floats": (
        lambda h: h.allgather(ones(2).to(torch.float8_e5m2)),
        ValueError,
        ["float8"],
    ),
    "group with a bool": (
        lambda h: h.grouped_allreduce([ones(2), ones(2, dtype=torch.bool)]),
        ValueError,
        ["bool"],
    ),
    "allreduce of a sparse tensor": (lambda h: h.allreduce(ones(2).to_sparse()), ValueError, ["sparse"]),
    "allreduce of a tensor without values": (
        lambda h: h.allreduce(ones(2, device="meta")),
        ValueError,
        ["meta", "to_empty"],
    ),
    "broadcast of a tensor without values": (
        lambda h: h.broadcast_(ones(2, device="meta"), 0),
        ValueError,
        ["meta", "to_empty"],
    ),
    "group with a sparse tensor": (
        lambda h: h.grouped_allreduce([ones(2), ones(2).to_sparse()]),
        ValueError,
        ["sparse"],
    ),
    "group of allgathers with 8-bit floats": (
        lambda h: h.grouped_allgather([ones(2), ones(2).to(torch.float8_e5m2)]),
        ValueError,
        ["float8"],
    ),
    "sparse allreduce with Max": (
        lambda h: h.sparse_allreduce_async(ones(2).to_sparse(), op=h.Max),
        ValueError,
        [],
    ),
    "op and average": (lambda h: h.allreduce(ones(2), average=True, op=h.Sum), ValueError, ["average", "op"]),
    "integers times what is no number": (
        lambda h: h.allreduce(ones(2, dtype=torch.int32), op=h.Sum, prescale_factor=float("nan")),
        ValueError,
        ["prescale_factor=nan", "int32", "finite"],
    ),
    "scattered integers times infinity": (
        lambda h: h.reducescatter(ones(4, dtype=torch.int64), op=h.Sum, postscale_factor=float("inf")),
        ValueError,
        ["postscale_factor=inf", "int64"],
    ),
    "unknown op": (lambda h: h.allreduce(ones(2), op=17), ValueError, ["17"]),
    "unknown op of a reducescatter": (lambda h: h.reducescatter(ones(2), op=17), ValueError, ["17"]),
    "reducescatter with Min": (lambda h: h.reducescatter(ones(2), op=h.Min), HorovodInternalError, ["min"]),
    "reducescatter with Max": (lambda h: h.reducescatter(ones(2), op=h.Max), HorovodInternalError, ["max"]),
    "reducescatter with Product": (
        lambda h: h.reducescatter(ones(2), op=h.Product),
        HorovodInternalError,
        ["product"],
    ),
    "reducescatter with Adasum": (
        lambda h: h.reducescatter(ones(2), op=h.Adasum),
        HorovodInternalError,
        ["adasum"],
    ),
    "group of reducescatters with Max": (
        lambda h: h.grouped_reducescatter([ones(2)], op=h.Max),
        HorovodInternalError,
        ["max"],
    ),
    "root below 0": (lambda h: h.broadcast(ones(2), -1), ValueError, ["-1"]),
    "root beyond the last": (lambda h: h.broadcast(ones(2), h.size()), ValueError, ["root"]),
    "root in place beyond the last": (lambda h: h.broadcast_(ones(2), h.size()), ValueError, ["root"]),
    "splits for too few": (
        lambda h: h.alltoall(ones(h.size()), splits=torch.ones(h.size() - 1, dtype=torch.int32)),
        ValueError,
        ["splits"],
    ),
    "splits for too many": (
        lambda h: h.alltoall(ones(h.size() + 1), splits=torch.ones(h.size() + 1, dtype=torch.int32)),
        ValueError,
        ["splits"],
    ),
    "splits beyond the rows": (
        lambda h: h.alltoall(ones(h.size()), splits=torch.full((h.size(),), 2, dtype=torch.int32)),
        ValueError,
        ["splits", "rows"],
    ),
    "negative splits": (
        lambda h: h.alltoall(ones(9), splits=torch.full((h.size(),), -1, dtype=torch.int32)),
        ValueError,
        ["splits"],
    ),
    "splits that are no whole numbers": (
        lambda h: h.alltoall(ones(h.size()), splits=torch.ones(h.size())),
        ValueError,
        ["splits", "float32"],
    ),
    "allreduce in place of an expanded tensor": (
        lambda h: h.allreduce_(ones(1).expand(3)),
        ValueError,
        ["expanded", "[3]", "clone"],
    ),
    "group in place with an expanded tensor": (
        lambda h: h.grouped_allreduce_([ones(2), ones(2, 1).expand(2, 3)]),
        ValueError,
        ["expanded", "[2, 3]", "clone"],
    ),
    "broadcast in place of an expanded tensor": (
        lambda h: h.broadcast_(ones(1).expand(3), 0),
        ValueError,
        ["expanded", "[3]", "clone"],
    ),
    "an unregistered process set": (
        lambda h: h.allreduce(ones(2), process_set=unregistered(h)),
        ValueError,
        ["add_process_set"],
    ),
    "an unregistered process set of a barrier": (
        lambda h: h.barrier(process_set=unregistered(h)),
        ValueError,
        ["add_process_set"],
    ),
    "a group of nothing": (lambda h: h.grouped_allreduce([]), ValueError, ["no tensors"]),
    "a group of no allgathers": (lambda h: h.grouped_allgather([]), ValueError, ["no tensors"]),
    "a group of no reducescatters": (lambda h: h.grouped_reducescatter([]), ValueError, ["no tensors"]),
}


@pytest.mark.mpi
@pytest.mark.parametrize("who", ["all ranks", "one rank"])
@pytest.mark.parametrize("case", LOCAL)
def test_wrong_arguments_are_refused_by_the_call_and_disturb_no_one(hvd, error_of, case, who):
    """Also where one rank alone makes the mistake, unnamed operations go on: nothing has been counted."""
    call, kind, words = LOCAL[case]
    error = error_of(lambda: call(hvd)) if who == "all ranks" or hvd.rank() == 0 else None
    after = hvd.allreduce(ones(2), op=hvd.Sum)
    gathered = hvd.allgather(torch.tensor([hvd.rank()]))
    assert torch.equal(after, ones(2) * hvd.size())
    assert gathered.tolist() == list(range(hvd.size()))
    if error is not None or hvd.rank() == 0:
        assert type(error) is kind, error
        for word in words:
            assert word in str(error), str(error)


@pytest.mark.mpi
@pytest.mark.parametrize("wants_gradient", [False, True])
@pytest.mark.parametrize("kind", ["allgather", "alltoall", "reducescatter", "grouped_allgather"])
def test_tensors_without_dimensions_are_refused_where_rows_are_needed(hvd, error_of, kind, wants_gradient):
    call, number = getattr(hvd, kind), ones((), requires_grad=wants_gradient)
    error = error_of(lambda: call([ones(2), number] if "grouped" in kind else number))
    after = hvd.allreduce(ones(2), op=hvd.Sum)
    assert type(error) is ValueError, error
    assert "dimension" in str(error)
    assert torch.equal(after, ones(2) * hvd.size())


@pytest.mark.mpi
@pytest.mark.usefixtures("needs_two")
def test_rows_that_cannot_be_split_evenly_are_refused(hvd, error_of):
    error = error_of(lambda: hvd.alltoall(ones(hvd.size() + 1)))
    assert type(error) is ValueError
    assert str(hvd.size() + 1) in str(error)


@pytest.mark.mpi
@pytest.mark.usefixtures("needs_two")
def test_a_rank_outside_of_a_process_set_cannot_use_it(hvd, error_of):
    first = hvd.add_process_set([0])
    error = error_of(lambda: hvd.allreduce(ones(2), process_set=first))
    barrier = error_of(lambda: hvd.barrier(process_set=first))
    rank = error_of(first.rank)
    foreign = error_of(lambda: hvd.broadcast(ones(1), 1, process_set=first))
    hvd.remove_process_set(first)
    gone = error_of(lambda: hvd.allreduce(ones(2), process_set=first))
    if hvd.rank() == 0:
        assert (error, barrier, rank) == (None, None, None)
    else:
        for one in (error, barrier, rank):
            assert type(one) is ValueError
            assert f"rank {hvd.rank()}" in str(one)
    assert type(foreign) is ValueError
    assert type(gone) is ValueError


@pytest.mark.mpi
def test_adasum_is_refused_where_it_is_not_defined(hvd, error_of):
    own = hvd.add_process_set([0]) if hvd.size() > 1 else None
    on_all = error_of(lambda: hvd.allreduce(ones(2), op=hvd.Adasum))
    on_part = error_of(lambda: hvd.allreduce(ones(2), op=hvd.Adasum, process_set=own)) if own else None
    if own:
        hvd.remove_process_set(own)
    if hvd.size() == 3:
        assert type(on_all) is NotImplementedError
        assert "power of two" in str(on_all)
        assert "3" in str(on_all)
    else:
        assert on_all is None
    if own and hvd.rank() == 0:
        assert type(on_part) is NotImplementedError


@pytest.mark.mpi
def test_no_warning_comes_without_average(hvd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hvd.allreduce(ones(2), op=hvd.Sum)
        hvd.grouped_allreduce_([ones(2)])


@pytest.mark.mpi
def test_what_is_under_way_in_a_process_set_fails_when_the_set_is_removed(hvd, error_of):
    if hvd.size() < 3:
        pytest.skip("two ranks that are not all")
    pair = hvd.add_process_set([0, 1])
    error = None
    if pair.included():
        handle = hvd.allreduce_async(ones(1), name=f"never.{hvd.rank()}", process_set=pair)
    hvd.remove_process_set(pair)
    if hvd.rank() < 2:
        error = error_of(lambda: hvd.synchronize(handle))
    after = hvd.allreduce(ones(1), op=hvd.Sum)
    assert after.item() == hvd.size()
    if hvd.rank() < 2:
        assert isinstance(error, HorovodInternalError)
        assert "removed" in str(error)
