"""All-reduces in all their forms, against the same sums in one place."""

from __future__ import annotations

import random
import weakref
from functools import reduce
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.grid import checkered

pytestmark = pytest.mark.mpi

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHAPES = ((), (1,), (17,), (17, 17), (2, 3, 4, 5), (0,), (3, 0, 2), (300_000,))
"""The last is longer than what is fused, in every type."""

REDUCE = {"Sum": torch.add, "Min": torch.minimum, "Max": torch.maximum, "Product": torch.mul}


def total_of(inputs: list[Tensor], op: str) -> Tensor:
    """Reduce all ranks' tensors; the result has their type."""
    if op != "Average":
        return reduce(REDUCE[op], inputs)
    return quotient(reduce(torch.add, inputs), len(inputs))


def quotient(total: Tensor, size: int) -> Tensor:
    if total.is_floating_point():
        return total / size
    return torch.div(total, size, rounding_mode="trunc")


@pytest.fixture
def inputs(hvd: ModuleType, brought: Any) -> Any:
    """Make the inputs of all ranks."""

    def make(
        shape: Any, dtype: torch.dtype = torch.float32, salt: int = 0, ranks: Any = None
    ) -> list[Tensor]:
        return [brought(rank, shape, dtype, salt) for rank in (range(hvd.size()) if ranks is None else ranks)]

    return make


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
def test_every_operation_of_every_type_is_that_of_one_process(hvd, inputs, assert_same, dtype):
    checks = []
    for op, (salt, shape) in product(("Sum", "Average", "Min", "Max", "Product"), enumerate(SHAPES)):
        of_ranks = inputs(shape, dtype, salt)
        own = of_ranks[hvd.rank()]
        before = own.clone()
        found = hvd.allreduce(own, op=getattr(hvd, op))
        checks += [
            (f"{op} of {shape}", found, total_of(of_ranks, op)),
            (f"input of {shape}", own, before),
            ("a tensor of its own", found.data_ptr() == own.data_ptr() and own.numel() > 0, False),
        ]
    assert_same(checks)


@pytest.mark.parametrize("op", ["Sum", "Average", "Max"])
def test_in_place_returns_the_tensor_itself(hvd, inputs, assert_same, op):
    checks = []
    for salt, shape in enumerate(SHAPES):
        of_ranks = inputs(shape, salt=salt)
        own, later = (of_ranks[hvd.rank()].clone() for _ in range(2))
        found = hvd.allreduce_(own, op=getattr(hvd, op))
        handle = hvd.allreduce_async_(later, op=getattr(hvd, op))
        also = hvd.synchronize(handle)
        expected = total_of(of_ranks, op)
        checks += [("same object", (found is own, also is later), (True, True))]
        checks += [(f"{op} of {shape}", own, expected), (f"later {op} of {shape}", later, expected)]
    assert_same(checks)


def test_the_average_of_equal_numbers_is_that_number(hvd, assert_same):
    """Horovod multiplies by 1/size: at three ranks most floats come back changed."""
    values = torch.arange(1, 401, dtype=torch.float32)
    checks = []
    for dtype in FLOATS:
        own = values[:64].to(dtype)
        checks.append((f"average of {dtype}", hvd.allreduce(own), own))
    assert_same([*checks, ("whole numbers", hvd.allreduce(values), values)])


def test_averages_of_integers_are_truncated_towards_zero(hvd, assert_same):
    checks = []
    for dtype in (torch.int8, torch.int32, torch.int64):
        values = torch.tensor([-5, -4, -1, 0, 1, 4, 5], dtype=dtype)
        own = values if hvd.rank() == 0 else torch.zeros_like(values)
        expected = torch.tensor([int(int(x) / hvd.size()) for x in values], dtype=dtype)
        checks.append((f"average of {dtype}", hvd.allreduce(own), expected))
    assert_same(checks)


@pytest.mark.parametrize(
    ("which", "dtype"),
    checkered(["prescale_factor", "postscale_factor"], [torch.uint8, torch.int8, torch.int32, torch.int64]),
)
def test_scaled_integers_are_multiplied_in_float64_and_truncated(hvd, assert_same, which, dtype):
    sign = -1 if dtype != torch.uint8 else 1
    of_ranks = [
        torch.tensor([rank, 3, 5, sign * 7, sign * (rank + 1)], dtype=dtype) for rank in range(hvd.size())
    ]
    checks = []
    for factor, times in ((0.5, 1), (0.3, 60_000), (1.7, 1)):  # fused, alone, fused
        brought = [x.repeat(times) for x in of_ranks]
        found = hvd.allreduce(brought[hvd.rank()], op=hvd.Sum, **{which: factor})
        scaled = [(x.double() * factor).trunc().to(dtype) for x in brought]
        total = sum(brought)
        after = (total.double() * factor).trunc().to(dtype)
        checks.append((f"{which} {factor}", found, sum(scaled) if which == "prescale_factor" else after))
    assert_same(checks)


@pytest.mark.parametrize("numel", [5, 300_000])
@pytest.mark.parametrize("dtype", FLOATS)
def test_scaled_floats_keep_their_type_and_16_bits_are_scaled_in_float32(hvd, inputs, dtype, numel):
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    of_ranks = inputs((numel,), dtype)
    own = of_ranks[hvd.rank()].clone()
    found = {}
    for pre, post in ((0.3, 1.0), (1.0, 0.3), (0.7, 1.3)):
        found[pre, post] = hvd.allreduce(own, op=hvd.Sum, prescale_factor=pre, postscale_factor=post)
    assert torch.equal(own, of_ranks[hvd.rank()]), "the input was changed"
    for (pre, post), result in found.items():
        scaled = [(x.to(wide) * pre).to(dtype) for x in of_ranks]
        expected = (sum(x.to(wide) for x in scaled).to(dtype).to(wide) * post).to(dtype)
        # Sums of four addends may be rounded in another order: one unit in the last place for each.
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=0.0)


def test_factors_and_the_average_work_together(hvd, inputs, assert_same):
    of_ranks = inputs((9,), torch.float64)
    found = hvd.allreduce(of_ranks[hvd.rank()], op=hvd.Average, prescale_factor=4.0, postscale_factor=0.5)
    whole = inputs((9,), torch.int32, 1)
    truncated = hvd.allreduce(whole[hvd.rank()], op=hvd.Average, prescale_factor=3.0, postscale_factor=0.5)
    halved = (sum(whole) * 3).double().mul(0.5).trunc().to(torch.int32)
    assert_same(
        [
            ("floats", found, sum(of_ranks) * 2 / hvd.size()),
            ("integers", truncated, quotient(halved, hvd.size())),
        ]
    )


@pytest.mark.parametrize("factors", [(0.0, 1.0), (-1.0, 1.0), (1.0, -2.0), (2.0, 0.0)])
def test_factors_may_be_zero_or_negative(hvd, inputs, assert_same, factors):
    pre, post = factors
    of_ranks = inputs((6,), torch.int64)
    found = hvd.allreduce(of_ranks[hvd.rank()], op=hvd.Sum, prescale_factor=pre, postscale_factor=post)
    assert_same([("sum", found, sum(of_ranks) * int(pre * post))])


def test_many_under_way_at_once_are_all_right(hvd, inputs, assert_same):
    chosen = [(dtype, shape) for dtype in INTEGERS + FLOATS for shape in ((17,), (5, 3), (0,), ())]
    handles, expected, polled = [], [], []
    for salt, (dtype, shape) in enumerate(chosen):
        of_ranks = inputs(shape, dtype, salt)
        handles.append(hvd.allreduce_async(of_ranks[hvd.rank()], op=hvd.Sum))
        expected.append(sum(of_ranks).to(dtype))
        polled.append(hvd.poll(handles[-1]))
    found = [hvd.synchronize(handle) for handle in handles]
    named = zip(chosen, found, expected, strict=True)
    assert_same([("not all were done at once", False in polled, True)])
    assert_same([(f"{dtype} {shape}", result, truth) for (dtype, shape), result, truth in named])


def test_polling_alone_completes_an_operation(hvd):
    handle = hvd.allreduce_async(torch.ones(5), op=hvd.Sum, name="polled")
    while not hvd.poll(handle):
        pass
    assert torch.equal(hvd.synchronize(handle), torch.full((5,), float(hvd.size())))


def test_a_result_is_handed_out_once(hvd):
    handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
    first, second, unknown = hvd.synchronize(handle), hvd.synchronize(handle), hvd.synchronize(10**9)
    assert first is not None
    assert (second, unknown) == (None, None)


def test_results_stay_what_they_are_in_later_steps(hvd):
    """The fusion buffer is used again in every step; results are not views of it."""
    kept = []
    for step in range(4):
        handles = [
            hvd.allreduce_async(torch.full((100,), float(step + k)), name=f"kept.{k}") for k in range(3)
        ]
        kept.append([hvd.synchronize(handle) for handle in handles])
    for step, results in enumerate(kept):
        for k, result in enumerate(results):
            assert torch.equal(result, torch.full((100,), float(step + k))), (step, k)


def test_what_has_changed_about_a_tensor_since_its_last_step_is_seen(hvd, assert_same):
    """A tensor under its old name may differ in anything."""
    tensor = torch.zeros(4)
    checks: list[tuple[str, Any, Any]] = []

    def reduced(what: str, own: Tensor, expected: Tensor, *, in_place: bool = True, **asked: Any) -> None:
        tensor.data = own
        begun = own.clone()
        for step in range(3):
            tensor.data.copy_(begun)
            call = hvd.allreduce_ if in_place else hvd.allreduce
            found = call(tensor, name="watched", **{"op": hvd.Sum, **asked})
            checks.append((f"{what}, step {step}", found.detach().clone(), expected))
            checks.append((f"{what}, step {step}: in place", found is tensor, in_place))

    own = torch.full((4,), hvd.rank() + 1.0)
    total = torch.full((4,), sum(rank + 1.0 for rank in range(hvd.size())))
    reduced("a sum", own.clone(), total)
    reduced("of another type", own.double() + 2**-40, total.double() + hvd.size() * 2**-40)
    reduced("an average", own.clone(), total / hvd.size(), op=hvd.Average)
    reduced("the default, an average", own.clone(), total / hvd.size(), op=None)
    reduced("with a factor", own.clone(), total * 3, prescale_factor=3.0)
    reduced("into a new tensor", own.clone(), total, in_place=False)
    reduced("of another shape", own.view(2, 2).clone(), total.view(2, 2))
    reduced("longer", own.repeat(3), total.repeat(3))
    reduced("in another order of memory", own.view(2, 2).clone().t(), total.view(2, 2))
    tensor.requires_grad_()
    reduced("a leaf with gradients", own.clone(), total)
    tensor = torch.zeros(4)
    reduced("another tensor", 2 * own, 2 * total)
    assert_same(checks)


def test_what_cannot_be_reduced_is_refused_also_where_the_last_step_could(hvd):
    tensor = torch.ones(3)
    hvd.allreduce_(tensor, name="spread", op=hvd.Sum)
    with pytest.raises(ValueError, match="on the meta device was asked for"):
        hvd.allreduce_(torch.ones(3, device="meta"), name="spread", op=hvd.Sum)
    tensor.data = torch.ones(1).expand(3)
    with pytest.raises(ValueError, match="expanded tensor was asked for"):
        hvd.allreduce_(tensor, name="spread", op=hvd.Sum)


def test_a_name_does_not_keep_its_tensor_alive(hvd):
    tensor = torch.ones(3)
    hvd.allreduce_(tensor, name="short-lived", op=hvd.Sum)
    reference = weakref.ref(tensor)
    del tensor
    assert reference() is None


def test_one_name_may_belong_to_different_kinds_and_process_sets_at_once(hvd, half):
    own = torch.tensor([float(hvd.rank() + 1)])
    handles = [
        hvd.allreduce_async(own, name="shared", op=hvd.Sum),
        hvd.allgather_async(own, name="shared"),
        hvd.broadcast_async(own, 0, name="shared"),
    ]
    if half is not hvd.global_process_set:
        handles.append(hvd.allreduce_async(own, name="shared", op=hvd.Sum, process_set=half))
    found = [hvd.synchronize(handle).tolist() for handle in handles]
    everyones = [float(rank + 1) for rank in range(hvd.size())]
    assert found[:3] == [[sum(everyones)], everyones, [1.0]]
    assert found[3:] in ([], [[sum(float(rank + 1) for rank in half.ranks)]])


@pytest.mark.parametrize("op", ["Sum", "Average", "Min", "Max", "Product"])
def test_a_process_set_reduces_among_its_ranks_only(hvd, half, inputs, assert_same, op):
    checks = []
    for salt, dtype in enumerate((torch.int32, torch.float32, torch.bfloat16)):
        of_ranks = inputs((11,), dtype, salt, half.ranks)
        own = of_ranks[half.rank()].clone()
        found = hvd.allreduce(own, op=getattr(hvd, op), process_set=half)
        hvd.allreduce_(own, op=getattr(hvd, op), process_set=half)
        expected = total_of(of_ranks, op)
        checks += [(f"{op} of {dtype}", found, expected), (f"in place {dtype}", own, expected)]
    assert_same(checks)


def test_a_group_is_a_list_of_results_in_the_given_order(hvd, inputs, assert_same):
    shapes = [(3,), (2, 2), (), (0,), (700,)]
    types = [torch.float32, torch.int64, torch.bfloat16, torch.float32, torch.float64]
    of_tensors = [inputs(s, t, k) for k, (s, t) in enumerate(zip(shapes, types, strict=True))]
    own = [of_ranks[hvd.rank()] for of_ranks in of_tensors]
    in_place, later = [x.clone() for x in own], [x.clone() for x in own]
    found = {
        "new": hvd.grouped_allreduce(own, op=hvd.Sum),
        "in place": hvd.grouped_allreduce_(in_place, op=hvd.Sum),
        "async": hvd.synchronize(hvd.grouped_allreduce_async(own, op=hvd.Sum, name="group")),
        "async in place": hvd.synchronize(hvd.grouped_allreduce_async_(later, op=hvd.Sum, name="group")),
        "a tuple": hvd.grouped_allreduce(tuple(own), op=hvd.Sum),
    }
    assert_same([(f"{what} is a list", isinstance(results, list), True) for what, results in found.items()])
    assert_same(
        [
            (f"{what} {k}", result, sum(of_tensors[k]).to(types[k]))
            for what, results in found.items()
            for k, result in enumerate(results)
        ]
    )
    assert all(a is b for a, b in zip(found["in place"], in_place, strict=True))
    assert all(a is b for a, b in zip(found["async in place"], later, strict=True))


@pytest.mark.parametrize("op", ["Average", "Min", "Product"])
def test_groups_know_all_operations_factors_and_process_sets(hvd, half, inputs, assert_same, op):
    of_tensors = [inputs((5,), torch.float64, k, half.ranks) for k in range(3)]
    found = hvd.grouped_allreduce(
        [of_ranks[half.rank()] for of_ranks in of_tensors],
        op=getattr(hvd, op),
        prescale_factor=2.0,
        postscale_factor=4.0,
        process_set=half,
    )
    expected = [total_of([2 * x for x in of_ranks], op) * 4 for of_ranks in of_tensors]
    assert_same([(f"{op} {k}", result, expected[k]) for k, result in enumerate(found)])


def test_groups_and_single_operations_mix(hvd, assert_same):
    one = torch.ones(3)
    order = list(range(6))
    random.Random(hvd.rank()).shuffle(order)
    handles: dict[int, int] = {}
    for k in order:
        if k % 2:
            handles[k] = hvd.allreduce_async(one * k, op=hvd.Sum, name=f"mixed.{k}")
        else:
            handles[k] = hvd.grouped_allreduce_async([one * k, one * k + 1], op=hvd.Sum, name=f"mixed.{k}")
    found = {k: hvd.synchronize(handles[k]) for k in sorted(handles)}
    n = hvd.size()
    assert_same([(f"single {k}", found[k], one * k * n) for k in (1, 3, 5)])
    assert_same([(f"group {k}", found[k][1], (one * k + 1) * n) for k in (0, 2, 4)])


def laid_out(values: Tensor) -> dict[str, Tensor]:
    """Return a 4-dimensional tensor in several orders of memory."""
    wide = torch.zeros(*values.shape[:-1], 2 * values.shape[-1], dtype=values.dtype)
    wide[..., ::2] = values
    return {
        "contiguous": values.clone(),
        "channels_last": values.clone(memory_format=torch.channels_last),
        "transposed": values.transpose(0, 3).contiguous().transpose(0, 3),
        "every second": wide[..., ::2],
    }


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (8, 64, 32, 32)], ids=["fused", "alone"])
def test_any_order_of_memory_is_taken_in_and_out_of_place(hvd, inputs, assert_same, shape):
    of_ranks = inputs(shape, torch.float32)
    expected = sum(of_ranks)
    checks = []
    for what, own in laid_out(of_ranks[hvd.rank()]).items():
        checks.append((what, hvd.allreduce(own, op=hvd.Sum), expected))
        checks.append((f"{what}, input", own.clone(), of_ranks[hvd.rank()]))
        checks.append((f"{what}, scaled", hvd.allreduce(own, op=hvd.Sum, prescale_factor=2.0), 2 * expected))
        checks.append((f"{what}, input of scaled", own.clone(), of_ranks[hvd.rank()]))
        strides = own.stride()
        hvd.allreduce_(own, op=hvd.Sum)
        checks += [(f"{what}, in place", own, expected), (f"{what}, strides", own.stride(), strides)]
    assert_same(checks)


def test_ranks_may_hold_one_tensor_in_different_orders_of_memory(hvd, inputs, assert_same):
    checks = []
    for salt, shape in enumerate([(2, 3, 4, 5), (8, 64, 32, 32)]):
        of_ranks = inputs(shape, torch.float64, salt)
        forms = list(laid_out(of_ranks[hvd.rank()]).values())
        found = hvd.allreduce(forms[hvd.rank() % len(forms)], op=hvd.Sum)
        checks.append((f"{shape}", found, sum(of_ranks)))
    assert_same(checks)


def test_an_expanded_tensor_is_reduced_as_if_it_were_written_out(hvd):
    own = torch.tensor([[float(hvd.rank())], [1.0]]).expand(2, 6)
    found = hvd.allreduce(own, op=hvd.Sum)
    expected = torch.tensor([[float(sum(range(hvd.size())))], [float(hvd.size())]]).expand(2, 6)
    assert torch.equal(found, expected)


def test_a_tensor_larger_than_the_fusion_buffer_is_reduced(hvd):
    count = 2_500_000  # 10 MB
    own = torch.arange(count, dtype=torch.float32) % 1000 + hvd.rank()
    found = hvd.allreduce(own, op=hvd.Sum)
    expected = (torch.arange(count, dtype=torch.float32) % 1000) * hvd.size() + sum(range(hvd.size()))
    assert torch.equal(found, expected)


def test_more_small_tensors_than_the_fusion_buffer_holds_are_all_right(hvd):
    count, many = 60_000, 120  # 120 × 240 KB = 28.8 MB
    handles = [hvd.allreduce_async(torch.full((count,), float(k)), op=hvd.Sum) for k in range(many)]
    found = [hvd.synchronize(handle) for handle in handles]
    for k, result in enumerate(found):
        assert result.min() == result.max() == k * hvd.size(), k


@pytest.mark.parametrize("seed", range(6))
def test_any_mixture_of_sizes_types_and_operations_is_right(hvd, inputs, assert_same, seed):
    """Ranks ask in orders of their own, for sizes around the limit of fusion."""
    chance = random.Random(seed)
    sizes = (0, 1, 7, 1000, 16_384, 65_536, 131_071, 131_072, 200_000)
    programme = []
    for k in range(40):
        shape = (chance.choice(sizes),)
        dtype = chance.choice((torch.float32, torch.float64, torch.int32, torch.bfloat16))
        programme.append((k, shape, dtype, chance.choice(["Sum", "Min", "Max", "Average"])))
    order = list(programme)
    random.Random(100 * seed + hvd.rank()).shuffle(order)
    handles = {}
    for k, shape, dtype, op in order:
        own = inputs(shape, dtype, k)[hvd.rank()]
        handles[k] = hvd.allreduce_async(own, name=f"mixture.{seed}.{k}", op=getattr(hvd, op))
    found = {k: hvd.synchronize(handles[k]) for k, *_ in programme}
    expected = {k: total_of(inputs(shape, dtype, k), op) for k, shape, dtype, op in programme}
    assert_same([(f"{shape} {dtype} {op}", found[k], expected[k]) for k, shape, dtype, op in programme])


def test_nothing_between_other_tensors_disturbs_no_one(hvd, assert_same):
    """Tensors without elements take no room in the fusion buffer."""
    sizes = {
        torch.float32: 300_000,
        torch.float16: 1000,
        torch.int32: 0,
        torch.float64: 5000,
        torch.int64: 9000,
    }
    checks = []
    for step in range(3):
        own = {dtype: torch.full((count,), 1 + step, dtype=dtype) for dtype, count in sizes.items()}
        handles = {dtype: hvd.allreduce_async(x, op=hvd.Sum) for dtype, x in own.items()}
        found = {dtype: hvd.synchronize(handle) for dtype, handle in handles.items()}
        checks += [(f"{step} {dtype}", found[dtype], own[dtype] * hvd.size()) for dtype in sizes]
    assert_same(checks)


@pytest.mark.parametrize("which", ["none", "fp16", "bf16"])
def test_a_compressed_sum_comes_back_in_its_own_type(hvd, inputs, assert_same, which):
    compression = getattr(hvd.Compression, which)
    checks = []
    for dtype in (torch.float32, torch.float64, torch.int32):
        of_ranks = inputs((13,), dtype)
        expected = sum(of_ranks)
        own = of_ranks[hvd.rank()]
        checks.append((f"{dtype}", hvd.allreduce(own, op=hvd.Sum, compression=compression), expected))
        (grouped,) = hvd.grouped_allreduce([own], op=hvd.Sum, compression=compression)
        checks.append((f"group of {dtype}", grouped, expected))
    assert_same(checks)


def test_average_as_an_argument_works_and_is_told_to_be_old(hvd, inputs, assert_same):
    of_ranks = inputs((4,))
    own = of_ranks[hvd.rank()]
    with pytest.warns(DeprecationWarning, match="op="):
        averaged = hvd.allreduce(own, average=True)
    with pytest.warns(DeprecationWarning, match="op="):
        summed = hvd.allreduce(own, False)
    with pytest.warns(DeprecationWarning, match="op="):
        (grouped,) = hvd.grouped_allreduce([own], average=False)
    total = sum(of_ranks)
    assert_same([("True", averaged, total / hvd.size()), ("False", summed, total), ("group", grouped, total)])


@pytest.mark.parametrize("op", ["Sum", "Average"])
@pytest.mark.parametrize("shape", [(6,), (6, 3)])
def test_sparse_tensors_are_reduced_like_dense_ones(hvd, half, op, shape):
    def of(rank: int) -> Tensor:
        dense = torch.zeros(shape, dtype=torch.float64)
        dense[: rank + 1] = float(rank + 1)  # another number of entries on each rank
        return dense.to_sparse()

    found, expected = [], []
    for process_set in (hvd.global_process_set, half):
        wait = hvd.sparse_allreduce_async(of(hvd.rank()), f"sparse.{op}", getattr(hvd, op), process_set)
        found.append(wait())
        total = sum(of(rank).to_dense() for rank in process_set.ranks)
        expected.append(total / process_set.size() if op == "Average" else total)
    for result, truth in zip(found, expected, strict=True):
        assert result.is_sparse
        # Each addend is divided, not the sum: one unit in the last place for each of up to four.
        torch.testing.assert_close(result.to_dense(), truth, rtol=1e-15 if op == "Average" else 0, atol=0)


def test_sparse_tensors_of_odd_kinds_are_reduced(hvd):
    """One row under several indices; nothing on one rank; rows that are vectors; without a name."""
    repeated = torch.sparse_coo_tensor([[1, 1, 3]], torch.ones(3, 2), (5, 2), check_invariants=True)
    nowhere = torch.zeros(1, 0, dtype=torch.int64)
    empty = torch.sparse_coo_tensor(nowhere, torch.zeros(0, 2), (5, 2), check_invariants=True)
    own = empty if hvd.rank() == hvd.size() - 1 and hvd.size() > 1 else repeated
    found = hvd.sparse_allreduce_async(own, op=hvd.Sum)()
    holders = max(hvd.size() - 1, 1)
    assert torch.equal(found.to_dense(), repeated.to_dense() * holders)


@pytest.mark.usefixtures("needs_two")
def test_sparse_tensors_of_different_shapes_are_an_error_on_every_rank(hvd, error_of):
    own = torch.sparse_coo_tensor([[3]], torch.ones(1, 2), (9 if hvd.rank() else 4, 2), check_invariants=True)
    error = error_of(hvd.sparse_allreduce_async(own, "sparse"))
    same = hvd.sparse_allreduce_async(own.to_dense()[:4].to_sparse(), "sparse")()
    told = hvd.allgather_object(str(error))
    assert same.shape == (4, 2)
    assert len(set(told)) == 1, "every rank says the same"
    assert "rank 0 brought a sparse tensor of shape [4, 2]" in told[0]
    assert "brought a sparse tensor of shape [9, 2]" in told[0]


def test_many_names_and_unnamed_operations_leave_no_memory_behind(hvd):
    """Also of handles: what has been synchronized is forgotten."""
    import gc

    def many() -> int:
        for _ in range(50):
            hvd.allreduce(torch.ones(1))
        gc.collect()
        return len(gc.get_objects())

    many()
    before, after = many(), many()
    assert after - before < 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_reduced_in_inference_mode_can_be_so_outside_of_it_afterwards(hvd, dtype):
    """A validation comes before the training; what the calls keep for the next ones serves both."""

    def reduce() -> list[list[float]]:
        sizes = (271, 3331)
        return [hvd.allreduce(torch.ones(n, dtype=dtype), op=hvd.Sum).unique().tolist() for n in sizes]

    with torch.inference_mode():
        within = [reduce() for _ in range(3)]
    outside = [reduce() for _ in range(3)]
    assert within == outside == [[[hvd.size()]] * 2] * 3
