"""Errors: on every rank, with words that name both sides; the library works on afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hpcpar.horovod.torch as hvd
from hpcpar.horovod.exceptions import HorovodInternalError
from tests.grid import checkered

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("hvd")]

ones = torch.ones


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def of_type(dtype: torch.dtype, *shape: int) -> Tensor:
    return ones(*(shape or (12,)), dtype=dtype)


MISMATCHES: dict[str, tuple[str, Any, Any, str]] = {
    "allreduce of other lengths": ("allreduce", ones(3), ones(4), "[3]|[4]"),
    "allreduce of as many elements": ("allreduce", ones(2, 3), ones(3, 2), "[2, 3]|[3, 2]"),
    "allreduce of other dimensions": ("allreduce", ones(4), ones(2, 2), "[4]|[2, 2]"),
    "allreduce of a scalar": ("allreduce", ones(()), ones(1), "[]|[1]"),
    "allreduce of other types": ("allreduce", of_type(torch.int32), ones(12), "int32|float32"),
    "types of one size": ("allreduce", of_type(torch.bfloat16), of_type(torch.float16), "bfloat16|float16"),
    "allreduce with other ops": ("allreduce", {"op": hvd.Max}, {"op": hvd.Sum}, "max|sum"),
    "allreduce with sum and average": ("allreduce", {"op": hvd.Average}, {"op": hvd.Sum}, "average|sum"),
    "other prescale": ("allreduce", {"prescale_factor": 0.25}, {"prescale_factor": 0.5}, "prescale|0.25|0.5"),
    "other postscale factors": ("allreduce", {"postscale_factor": 0.25}, {}, "postscale|0.25|1.0"),
    "large allreduce": ("allreduce", ones(300_001), ones(300_000), "[300001]|[300000]"),
    "in place": ("allreduce_", ones(3), ones(4), "[3]|[4]"),
    "one of a group": ("grouped_allreduce", [ones(2), ones(3)], [ones(2), ones(4)], "[3]|[4]"),
    "broadcast from other roots": ("broadcast", {"root_rank": 0}, {"root_rank": 1}, "root|0|1"),
    "broadcast of other shapes": ("broadcast", ones(3), ones(4), "[3]|[4]"),
    "broadcast of other types": ("broadcast", of_type(torch.bool), of_type(torch.uint8), "bool|uint8"),
    "allgather of other rows": ("allgather", ones(2, 3), ones(2, 4), "[3]|[4]"),
    "allgather of other dimensions": ("allgather", ones(2), ones(2, 1), ""),
    "allgather of other types": ("allgather", of_type(torch.int8), of_type(torch.int16), "int8|int16"),
    "one of allgathers": ("grouped_allgather", [ones(2), ones(2, 3)], [ones(2), ones(2, 4)], "[3]|[4]"),
    "alltoall of other rows": ("alltoall", ones(12, 3), ones(12, 4), "[3]|[4]"),
    "alltoall of other types": ("alltoall", of_type(torch.int8), of_type(torch.bool), "int8|bool"),
    "reducescatter of other lengths": ("reducescatter", ones(8), ones(12), "[8]|[12]"),
    "scattered types": ("reducescatter", of_type(torch.int64), of_type(torch.float64), "int64|float64"),
    "reducescatter with other ops": ("reducescatter", {"op": hvd.Average}, {"op": hvd.Sum}, "average|sum"),
    "reducescatter with other factors": ("reducescatter", {"prescale_factor": 3.0}, {}, "prescale|3.0|1.0"),
    "one of reducescatters": ("grouped_reducescatter", [ones(2), ones(3)], [ones(2), ones(4)], "[3]|[4]"),
    "allgather of a scalar on one rank": ("allgather", ones(()), ones(2), ""),
    "alltoall of a scalar on one rank": ("alltoall", ones(()), ones(12), ""),
    "reducescatter of a scalar on one rank": ("reducescatter", ones(()), ones(12), ""),
}
"""Case -> kind, what the odd rank gives and what the others do (tensors or options), words of the error."""


def ask(kind: str, name: str, given: Any) -> int:
    options = given if isinstance(given, dict) else {}
    tensor = ones(12) if isinstance(given, dict) else given
    if "reduce" in kind:
        options = {"op": hvd.Sum, **options}
    if kind == "broadcast":
        options = {"root_rank": 0, **options}
    in_place = kind.endswith("_")
    start = getattr(hvd, f"{kind.removesuffix('_')}_async{'_' * in_place}")
    handle: int = start(tensor.clone() if in_place else tensor, name=name, **options)
    return handle


@pytest.mark.usefixtures("needs_two")
@pytest.mark.parametrize("case", MISMATCHES)
def test_ranks_that_disagree_are_told_so_on_every_rank_with_both_sides(error_of, case):
    kind, odd, other, words = MISMATCHES[case]
    name = case.replace(" ", "_")
    error = error_of(lambda: hvd.synchronize(ask(kind, name, other if hvd.rank() else odd)))
    again = hvd.synchronize(ask(kind, name, other))  # at once, under the same name
    told = hvd.allgather_object((type(error).__name__, str(error)))
    assert again is not None
    assert {kind for kind, _ in told} == {"HorovodInternalError"}
    assert len({message for _, message in told}) == 1, "every rank says the same"
    _, message = told[0]
    for word in [name, "rank 0", _ranks(list(range(1, hvd.size()))), *words.split("|")]:
        assert word in message, message


def test_a_handle_can_be_polled_until_it_is_synchronized():
    handle = hvd.allreduce_async(ones(2))
    while not hvd.poll(handle):
        pass
    hvd.synchronize(handle)
    with pytest.raises(ValueError, match=f"handle {handle} was not created, or has been synchronized"):
        hvd.poll(handle)


@pytest.mark.usefixtures("needs_two")
@pytest.mark.parametrize("odd", [0, -1])
def test_the_odd_one_may_be_any_rank(error_of, odd):
    odd %= hvd.size()
    error = error_of(lambda: hvd.allreduce(ones(5 if hvd.rank() == odd else 6), name="any"))
    assert f"rank {odd} sent" in str(error)
    others = [rank for rank in range(hvd.size()) if rank != odd]
    assert f"{_ranks(others)} sent" in str(error)


@pytest.mark.usefixtures("needs_two")
def test_as_many_sides_are_named_as_there_are(error_of):
    error = error_of(lambda: hvd.allreduce(ones(hvd.rank() + 1), name="all_differ"))
    for rank in range(hvd.size()):
        assert f"rank {rank} sent a tensor of shape [{rank + 1}]" in str(error), str(error)


def test_messages_of_a_process_set_name_ranks_of_the_job(error_of):
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


@pytest.mark.usefixtures("needs_two")
def test_an_error_comes_at_synchronize_and_spares_the_others_under_way(error_of):
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


@pytest.mark.usefixtures("needs_two")
def test_unnamed_operations_of_different_kinds_are_an_error_and_no_hang(error_of):
    """Their numbers are counted together, so that no rank can ever ask for the other one's."""
    ask = hvd.allgather_async if hvd.rank() == 0 else hvd.allreduce_async
    error = error_of(lambda: hvd.synchronize(ask(ones(2))))
    after = hvd.allreduce(ones(2), op=hvd.Sum)
    told = hvd.allgather_object((type(error).__name__, str(error)))
    assert {kind for kind, _ in told} == {"HorovodInternalError"}
    for word in ("allgather", "allreduce", "rank 0", _ranks(list(range(1, hvd.size())))):
        assert word in told[-1][1]
    assert torch.equal(after, ones(2) * hvd.size())


@pytest.mark.usefixtures("needs_two")
@pytest.mark.parametrize(
    "what", ["a group and one", "groups of two and three", "kinds of groups", "groups of one name"]
)
def test_groups_that_differ_are_an_error_and_no_hang(error_of, what):
    odd = hvd.rank() == 0
    pair = [ones(2), ones(2)]
    ask = {
        "a group and one": lambda: hvd.allreduce(ones(2)) if odd else hvd.grouped_allreduce(pair),
        "groups of two and three": lambda: hvd.grouped_allreduce([*pair, ones(2)] if odd else pair),
        "kinds of groups": lambda: hvd.grouped_allgather(pair) if odd else hvd.grouped_allreduce(pair),
        "groups of one name": lambda: hvd.grouped_allreduce([*pair, ones(2)] if odd else pair, name="g"),
    }
    error = error_of(ask[what])
    after = hvd.allreduce(ones(2), op=hvd.Sum)
    assert isinstance(error, HorovodInternalError)
    assert "rank 0" in str(error)
    assert torch.equal(after, ones(2) * hvd.size())


@pytest.mark.usefixtures("needs_two")
def test_unnamed_operations_in_another_order_are_never_mixed_up(error_of):
    shapes = [(2,), (3,)] if hvd.rank() == 0 else [(3,), (2,)]
    handles = [hvd.allreduce_async(torch.full(shape, 1.0 + hvd.rank())) for shape in shapes]
    errors = [error_of(lambda handle=handle: hvd.synchronize(handle)) for handle in handles]
    after = hvd.allreduce(ones(2), op=hvd.Sum)
    assert [type(error) for error in errors] == [HorovodInternalError] * 2
    for error in errors:
        assert "[2]" in str(error)
        assert "[3]" in str(error)
    assert torch.equal(after, ones(2) * hvd.size())


def test_every_kind_of_error_is_the_same_on_gradients(error_of):
    """A mismatch in a forward that records a gradient raises as without."""
    if hvd.size() < 2:
        pytest.skip("one rank cannot disagree with itself")
    own = ones(2 + (hvd.rank() == 0), requires_grad=True)
    error = error_of(lambda: hvd.allreduce(own, name="with_gradient"))
    assert isinstance(error, HorovodInternalError)


@pytest.mark.parametrize("kind", ["allreduce", "allgather", "broadcast", "alltoall", "reducescatter"])
def test_a_name_that_is_under_way_is_refused_and_the_first_goes_on(error_of, kind):
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


@pytest.mark.usefixtures("needs_two")
def test_a_second_use_of_a_name_on_one_rank_only_harms_nobody_else(error_of):
    first = hvd.allreduce_async(ones(2), name="one_sided", op=hvd.Sum)
    refused = None
    if hvd.rank() == 0:
        refused = error_of(lambda: hvd.allreduce_async(ones(3), name="one_sided", op=hvd.Sum))
    result = hvd.synchronize(first)
    assert torch.equal(result, ones(2) * hvd.size())
    assert (type(refused) is ValueError) == (hvd.rank() == 0)


def test_a_group_with_a_name_under_way_asks_for_nothing_at_all(error_of):
    first = hvd.grouped_allreduce_async([ones(2), ones(3)], name="pair", op=hvd.Sum)
    refused = error_of(lambda: hvd.grouped_allreduce_async([ones(2), ones(3)], name="pair", op=hvd.Sum))
    results = hvd.synchronize(first)
    again = hvd.grouped_allreduce([ones(2), ones(3)], name="pair", op=hvd.Sum)
    assert type(refused) is ValueError
    for found in (results, again):
        assert [x.tolist() for x in found] == [[hvd.size()] * 2, [hvd.size()] * 3]


def splits(*counts: int) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32)


unregistered = hvd.ProcessSet([0])
float8 = ones(2).to(torch.float8_e5m2)
wholes = of_type(torch.int32)
Call = Callable[[], Any]
REFUSED: dict[str, tuple[Call, str]] = {
    "allreduce of bool": (lambda: hvd.allreduce(of_type(torch.bool)), "bool|not supported"),
    "allreduce of complex": (lambda: hvd.allreduce(of_type(torch.complex64)), "complex|not supported"),
    "Adasum of integers": (lambda: hvd.allreduce(wholes, op=hvd.Adasum), "Adasum|int32|not supported"),
    "reducescatter of bool": (lambda: hvd.reducescatter(of_type(torch.bool)), "bool|not supported"),
    "broadcast of 8-bit floats": (lambda: hvd.broadcast(ones(2).to(torch.float8_e4m3fn), 0), "float8"),
    "allgather of 8-bit floats": (lambda: hvd.allgather(float8), "float8"),
    "group with a bool": (lambda: hvd.grouped_allreduce([ones(2), of_type(torch.bool)]), "bool"),
    "allreduce of a sparse tensor": (lambda: hvd.allreduce(ones(2).to_sparse()), "sparse"),
    "allreduce without values": (lambda: hvd.allreduce(ones(2, device="meta")), "meta|to_empty"),
    "broadcast without values": (lambda: hvd.broadcast_(ones(2, device="meta"), 0), "meta|to_empty"),
    "group with a sparse tensor": (lambda: hvd.grouped_allreduce([ones(2), ones(2).to_sparse()]), "sparse"),
    "group with 8-bit floats": (lambda: hvd.grouped_allgather([ones(2), float8]), "float8"),
    "allreduce of a number": (lambda: hvd.allreduce(1.0), "float|as_tensor"),
    "group with an array": (lambda: hvd.grouped_allreduce_([ones(2), ones(2).numpy()]), "ndarray|as_tensor"),
    "alltoall of an array": (lambda: hvd.alltoall(ones(12).numpy()), "ndarray|as_tensor"),
    "sparse allreduce of a dense tensor": (
        lambda: hvd.sparse_allreduce_async(ones(2)),
        "not sparse|to_sparse",
    ),
    "ranks as a process set": (lambda: hvd.allreduce(ones(2), process_set=[0]), "process_set=[0]|ProcessSet"),
    "sparse with Max": (lambda: hvd.sparse_allreduce_async(ones(2).to_sparse(), op=hvd.Max), ""),
    "op and average": (lambda: hvd.allreduce(ones(2), average=True, op=hvd.Sum), "average|op"),
    "integers times what is no number": (
        lambda: hvd.allreduce(wholes, op=hvd.Sum, prescale_factor=float("nan")),
        "prescale_factor=nan|int32|finite",
    ),
    "scattered integers times infinity": (
        lambda: hvd.reducescatter(wholes, op=hvd.Sum, postscale_factor=float("inf")),
        "postscale_factor=inf|int32",
    ),
    "unknown op": (lambda: hvd.allreduce(ones(2), op=17), "17"),
    "unknown op of a reducescatter": (lambda: hvd.reducescatter(ones(2), op=17), "17"),
    "root below 0": (lambda: hvd.broadcast(ones(2), -1), "-1"),
    "root beyond the last": (lambda: hvd.broadcast(ones(2), hvd.size()), "root"),
    "root in place beyond the last": (lambda: hvd.broadcast_(ones(2), hvd.size()), "root"),
    "splits for too few": (lambda: hvd.alltoall(ones(12), splits=splits(*[1] * (hvd.size() - 1))), "splits"),
    "splits for too many": (lambda: hvd.alltoall(ones(12), splits=splits(*[1] * (hvd.size() + 1))), "splits"),
    "splits beyond the rows": (
        lambda: hvd.alltoall(ones(hvd.size()), splits=splits(*[2] * hvd.size())),
        "splits|rows",
    ),
    "negative splits": (lambda: hvd.alltoall(ones(9), splits=splits(*[-1] * hvd.size())), "splits"),
    "fractions as splits": (lambda: hvd.alltoall(ones(12), splits=ones(hvd.size())), "splits|float32"),
    "in place of an expanded tensor": (lambda: hvd.allreduce_(ones(1).expand(3)), "expanded|[3]|clone"),
    "group in place with an expanded tensor": (
        lambda: hvd.grouped_allreduce_([ones(2), ones(2, 1).expand(2, 3)]),
        "expanded|[2, 3]|clone",
    ),
    "broadcast in place of an expanded tensor": (
        lambda: hvd.broadcast_(ones(1).expand(3), 0),
        "expanded|[3]|clone",
    ),
    "an unregistered set": (lambda: hvd.allreduce(ones(2), process_set=unregistered), "add_process_set"),
    "an unregistered set's barrier": (lambda: hvd.barrier(process_set=unregistered), "add_process_set"),
    "a group of nothing": (lambda: hvd.grouped_allreduce([]), "no tensors"),
    "a group of no allgathers": (lambda: hvd.grouped_allgather([]), "no tensors"),
    "a group of no reducescatters": (lambda: hvd.grouped_reducescatter([]), "no tensors"),
}
"""Case -> a call that raises ValueError, and words of the error."""
NOT_SCATTERED: dict[str, tuple[Call, str]] = {
    "reducescatter with Min": (lambda: hvd.reducescatter(ones(2), op=hvd.Min), "min"),
    "reducescatter with Max": (lambda: hvd.reducescatter(ones(2), op=hvd.Max), "max"),
    "reducescatter with Product": (lambda: hvd.reducescatter(ones(2), op=hvd.Product), "product"),
    "reducescatter with Adasum": (lambda: hvd.reducescatter(ones(2), op=hvd.Adasum), "adasum"),
    "group of reducescatters with Max": (lambda: hvd.grouped_reducescatter([ones(2)], op=hvd.Max), "max"),
}
"""Case -> a call that raises HorovodInternalError, and words of the error."""


@pytest.mark.parametrize(("case", "who"), checkered([*REFUSED, *NOT_SCATTERED], ["all ranks", "one rank"]))
def test_wrong_arguments_are_refused_by_the_call_and_disturb_no_one(error_of, case, who):
    """Also where one rank alone makes the mistake, unnamed operations go on: nothing has been counted."""
    call, words = {**REFUSED, **NOT_SCATTERED}[case]
    error = error_of(call) if who == "all ranks" or hvd.rank() == 0 else None
    after = hvd.allreduce(ones(2), op=hvd.Sum)
    gathered = hvd.allgather(torch.tensor([hvd.rank()]))
    assert torch.equal(after, ones(2) * hvd.size())
    assert gathered.tolist() == list(range(hvd.size()))
    if error is not None or hvd.rank() == 0:
        assert type(error) is (ValueError if case in REFUSED else HorovodInternalError), error
        for word in words.split("|"):
            assert word in str(error), str(error)


@pytest.mark.parametrize("wants_gradient", [False, True])
@pytest.mark.parametrize("kind", ["allgather", "alltoall", "reducescatter", "grouped_allgather"])
def test_tensors_without_dimensions_are_refused_where_rows_are_needed(error_of, kind, wants_gradient):
    call, number = getattr(hvd, kind), ones((), requires_grad=wants_gradient)
    error = error_of(lambda: call([ones(2), number] if "grouped" in kind else number))
    after = hvd.allreduce(ones(2), op=hvd.Sum)
    assert type(error) is ValueError, error
    assert "dimension" in str(error)
    assert torch.equal(after, ones(2) * hvd.size())


@pytest.mark.usefixtures("needs_two")
def test_rows_that_cannot_be_split_evenly_are_refused(error_of):
    error = error_of(lambda: hvd.alltoall(ones(hvd.size() + 1)))
    assert type(error) is ValueError
    assert str(hvd.size() + 1) in str(error)


@pytest.mark.usefixtures("needs_two")
def test_a_rank_outside_of_a_process_set_cannot_use_it(error_of):
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


def test_adasum_is_refused_where_it_is_not_defined(error_of):
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


def test_no_warning_comes_without_average():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hvd.allreduce(ones(2), op=hvd.Sum)
        hvd.grouped_allreduce_([ones(2)])


def test_what_is_under_way_in_a_process_set_fails_when_the_set_is_removed(error_of):
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
