"""Attention by every method, compared with one process; bytes, compared with theory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hpcpar.comm import Communicator, run_loopback
from hpcpar.context_parallel import ContextParallel, Mask
from hpcpar.errors import LayoutError, MismatchError, OperationError

LENGTH, BATCH, HEAD_SIZE = 97, 2, 16
DOCUMENTS = (13, 30, 1, 53)
MASKS = {
    "causal": Mask(LENGTH),
    "full": Mask(LENGTH, causal=False),
    "window": Mask(LENGTH, window=9),
    "window on both sides": Mask(LENGTH, causal=False, window=9),
    "documents": Mask(LENGTH, documents=DOCUMENTS),
    "documents and window": Mask(LENGTH, window=7, documents=DOCUMENTS),
    "full documents": Mask(LENGTH, causal=False, documents=DOCUMENTS),
}


def tensors(heads: int, key_heads: int, dtype: torch.dtype, length: int = LENGTH) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output, of the whole sequence."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, count, length, HEAD_SIZE) for count in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def serial(whole: list[Tensor], mask: Mask, scale: float = HEAD_SIZE**-0.5) -> list[Tensor]:
    """Output and gradients in float64, by the definition."""
    queries, keys, values = (tensor.double().requires_grad_() for tensor in whole[:3])
    served = queries.shape[1] // keys.shape[1]
    allowed = torch.zeros(mask.length, mask.length, dtype=torch.bool)
    for query in range(mask.length):
        allowed[query, slice(*mask.keys(query))] = True
    scores = queries @ keys.repeat_interleave(served, 1).mT * scale
    out = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ values.repeat_interleave(served, 1)
    return [out.detach(), *torch.autograd.grad(out, (queries, keys, values), whole[3].double())]


def parallel(
    size: int,
    whole: list[Tensor],
    mask: Mask,
    method: str,
    *,
    window: int | None = None,
    scale: float | None = None,
    autocast: torch.dtype | None = None,
    **options: object,
) -> list[Tensor]:
    """Output and gradients of all ranks, put together."""

    def own(comm: Communicator) -> tuple[Tensor, list[Tensor]]:
        cp = ContextParallel(comm, method, **options)  # type: ignore[arg-type]
        with cp.using(mask):
            inputs = [cp.shard(tensor, 2).clone().requires_grad_() for tensor in whole[:3]]
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                out = cp.attention(*inputs, window=window, scale=scale)
            gradients = torch.autograd.grad(out, inputs, cp.shard(whole[3], 2))
            return cp.places(), [out.detach(), *gradients]

    found = [torch.full_like(tensor, torch.nan) for tensor in (whole[0], *whole[:3])]
    found[0] = found[0].to(autocast)
    for places, parts in run_loopback(size, own):
        for tensor, part in zip(found, parts, strict=True):
            tensor[:, :, places] = part
    return found


def error(found: list[Tensor], true: list[Tensor]) -> float:
    pairs = zip(found, true, strict=True)
    return max(float((one.double() - other).norm() / other.norm()) for one, other in pairs)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("size", "method", "heads", "key_heads", "options"),
    [
        (1, "exchange", 8, 2, {}),
        (2, "exchange", 8, 8, {}),
        (2, "ring", 8, 2, {"keep": True}),
        (2, "ulysses", 6, 3, {}),
        (3, "exchange", 8, 1, {"keep": True}),
        (3, "ring", 8, 2, {}),
        (3, "allgather", 8, 2, {}),
        (4, "allgather", 8, 8, {"keep": True}),
        (4, "ulysses", 8, 2, {}),
        (4, "ulysses+exchange", 8, 2, {"inner": 2}),
        (4, "ulysses+ring", 8, 1, {"inner": 2, "keep": True}),
        (8, "exchange", 8, 2, {}),
        (8, "ulysses+ring", 8, 2, {"inner": 4}),
    ],
)
def test_output_and_gradients_are_those_of_one_process(
    mask: str, size: int, method: str, heads: int, key_heads: int, options: dict[str, object]
) -> None:
    for dtype, tolerance in ((torch.float64, 5e-15), (torch.float32, 5e-7)):
        whole = tensors(heads, key_heads, dtype)
        true = serial(whole, MASKS[mask])
        assert error(parallel(size, whole, MASKS[mask], method, **options), true) <= tolerance


@pytest.mark.parametrize("method", ["exchange", "ring", "allgather", "ulysses"])
@pytest.mark.parametrize("narrow", [True, False])
def test_bfloat16_is_no_worse_than_the_kernel_of_one_process(method: str, narrow: bool) -> None:
    whole = tensors(8, 2, torch.bfloat16, length=256)
    mask = Mask(256)
    true = serial(whole, mask)
    inputs = [tensor.clone().requires_grad_() for tensor in whole[:3]]
    out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    alone = [out.detach(), *torch.autograd.grad(out, inputs, whole[3])]
    found = parallel(4, whole, mask, method, narrow=narrow)
    assert error(found, true) <= error(alone, true)
    for one, kernel, correct in zip(found, alone, true, strict=True):
        # A block's output is rounded before it is merged.
        assert error([one], [correct]) <= 1.2 * error([kernel], [correct])


@pytest.mark.parametrize("method", ["exchange", "allgather", "ulysses"])
def test_under_autocast_all_is_cast_to_its_type_as_for_torchs_attention(method: str) -> None:
    """Queries and keys that were rotated in float32 come beside values of a linear layer."""
    halves = tensors(4, 2, torch.bfloat16)
    mixed = [*map(Tensor.float, halves[:2]), *halves[2:]]
    found = parallel(2, mixed, Mask(LENGTH), method, autocast=torch.bfloat16)
    expected = parallel(2, halves, Mask(LENGTH), method)
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in (halves[0], *mixed[:3])]
    for one, true in zip(found, expected, strict=True):
        assert torch.equal(one.bfloat16(), true)


@pytest.mark.parametrize("scale", [0.3, -1.0])
def test_scores_are_scaled_as_asked(scale: float) -> None:
    """torch's own kernel returns NaN for a causal mask and a scale below 0."""
    whole, mask = tensors(4, 2, torch.float64), Mask(LENGTH)
    assert error(parallel(2, whole, mask, "exchange", scale=scale), serial(whole, mask, scale)) <= 5e-15


@pytest.mark.parametrize("length", [2, 3, 5])
def test_ranks_without_tokens_take_part(length: int) -> None:
    whole, mask = tensors(4, 2, torch.float64, length), Mask(length)
    for method in ("exchange", "ring", "allgather", "ulysses"):
        assert error(parallel(4, whole, mask, method), serial(whole, mask)) <= 5e-15


@pytest.mark.parametrize("method", ["exchange", "ring", "allgather", "ulysses", "ulysses+exchange"])
@pytest.mark.parametrize("mask", ["causal", "window", "documents"])
def test_a_layer_with_a_window_of_its_own_leaves_tokens_where_they_are(method: str, mask: str) -> None:
    whole, window = tensors(8, 2, torch.float64), 5
    options = {"inner": 2} if "+" in method else {}
    found = parallel(4, whole, MASKS[mask], method, window=window, **options)
    assert error(found, serial(whole, replace(MASKS[mask], window=window))) <= 5e-15
    wider = parallel(4, whole, MASKS[mask], method, window=50, **options)
    of_both = replace(MASKS[mask], window=min(50, MASKS[mask].window or 50))
    assert error(wider, serial(whole, of_both)) <= 5e-15


@pytest.mark.parametrize("method", ["exchange", "ring", "allgather", "ulysses"])
def test_no_document_sees_another(method: str) -> None:
    whole, mask = tensors(4, 2, torch.float64), MASKS["documents"]
    out = parallel(4, whole, mask, method)[0]
    for place in range(13, 43, 7):  # in the second document
        changed = [tensor.clone() for tensor in whole]
        for tensor in changed[:3]:
            tensor[:, :, place] += 1
        differs = (parallel(4, changed, mask, method)[0] != out).any(dim=3).flatten(0, 1).any(dim=0)
        assert differs.nonzero().flatten().tolist() == list(range(place, 43))


def test_packed_documents_are_what_they_are_by_themselves() -> None:
    whole, start = tensors(4, 2, torch.float64), 0
    packed = parallel(4, whole, MASKS["documents"], "exchange")
    for length in DOCUMENTS:
        alone = [tensor[:, :, start : start + length] for tensor in whole]
        by_itself = parallel(1, alone, Mask(length), "exchange")
        assert error([tensor[:, :, start : start + length] for tensor in packed], by_itself) <= 5e-15
        start += length


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("method", "keep", "mean"),
    [
        ("exchange", False, 4.5),
        ("exchange", True, 3),
        ("ring", False, 6),
        ("ring", True, 4),
        ("allgather", False, 6),
        ("allgather", True, 4),
    ],
)
def test_values_sent_are_those_of_the_theory(size: int, method: str, keep: bool, mean: float) -> None:
    length = 64 * size
    unit = BATCH * 64 * 2 * HEAD_SIZE * 8

    def sent(comm: Communicator) -> float:
        cp = ContextParallel(comm, method, keep=keep)  # type: ignore[arg-type]
        with cp.using(Mask(length)):
            inputs = [cp.shard(t, 2).requires_grad_() for t in tensors(8, 2, torch.float64, length)[:3]]
            before = cp.outer.traffic.nbytes_sent()
            cp.attention(*inputs).sum().backward()
            return (cp.outer.traffic.nbytes_sent() - before) / unit

    of_ranks = run_loopback(size, sent)
    assert sum(of_ranks) == size * mean * (size - 1)
    if method != "exchange" or keep:
        assert len(set(of_ranks)) == 1


@pytest.mark.parametrize("method", ["exchange", "ring", "allgather"])
@pytest.mark.parametrize("keep", [False, True])
def test_no_keys_of_other_ranks_are_saved_for_backward_unless_kept(method: str, keep: bool) -> None:
    length, size = 96, 3

    def saved(comm: Communicator) -> tuple[int, int]:
        cp = ContextParallel(comm, method, keep=keep)  # type: ignore[arg-type]
        found: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            found[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with cp.using(Mask(length)), saved_tensors_hooks(pack, lambda tensor: tensor):
            inputs = [cp.shard(t, 2).requires_grad_() for t in tensors(8, 2, torch.float64, length)[:3]]
            cp.attention(*inputs)
            plan, own = cp.plan(cp.mask), len(cp.places())
        values = sum(tensor.untyped_storage().nbytes() for tensor in found.values()) // 8
        others = [owner for owner in range(size) if owner != comm.rank]
        needed = [sum(span.length for span in plan.needed(comm.rank, owner)) for owner in others]
        come = sum(needed) if method == "exchange" else length - own
        # Queries, output, log-sum-exp; keys and values.
        expected = BATCH * (own * 8 * (2 * HEAD_SIZE + 1) + (own + keep * come) * 2 * 2 * HEAD_SIZE)
        return values, expected

    for values, expected in run_loopback(size, saved):
        assert values == expected


@pytest.mark.parametrize("method", ["exchange", "ulysses"])
def test_the_output_lies_in_memory_as_the_queries_do(method: str) -> None:
    def strides(comm: Communicator) -> bool:
        cp = ContextParallel(comm, method)  # type: ignore[arg-type]
        with cp.using(Mask(LENGTH)):
            inputs = [
                cp.shard(tensor, 2).transpose(1, 2).contiguous().transpose(1, 2)
                for tensor in tensors(4, 2, torch.float32)[:3]
            ]
            return cp.attention(*inputs).transpose(1, 2).is_contiguous()

    assert all(run_loopback(2, strides))


@pytest.mark.parametrize(("size", "key_heads"), [(2, 8), (2, 2), (4, 8), (4, 2), (4, 1)])
def test_heads_are_exchanged_with_the_bytes_of_the_theory(size: int, key_heads: int) -> None:
    length = 64 * size
    value = BATCH * 64 * HEAD_SIZE * 8

    def sent(comm: Communicator) -> float:
        cp = ContextParallel(comm, "ulysses")
        with cp.using(Mask(length)):
            inputs = [
                cp.shard(t, 2).requires_grad_() for t in tensors(8, key_heads, torch.float64, length)[:3]
            ]
            before = cp.inner.traffic.nbytes_sent()
            cp.attention(*inputs).sum().backward()
            return (cp.inner.traffic.nbytes_sent() - before) / value

    own_keys = max(1, key_heads // size)
    assert run_loopback(size, sent) == [4 * (8 // size + own_keys) * (size - 1)] * size


@pytest.mark.parametrize("size", [1, 3])
def test_a_head_of_whole_sequences_has_the_gradients_of_one_process(size: int) -> None:
    hidden = tensors(1, 1, torch.float64)[0].requires_grad_()
    loss = (hidden.mean(2) * torch.arange(HEAD_SIZE)).square().sum()
    (true,) = torch.autograd.grad(loss, hidden)

    def found(comm: Communicator) -> float:
        cp = ContextParallel(comm)
        with cp.using(Mask(LENGTH, window=9)):
            own = cp.shard(hidden.detach(), 2).requires_grad_()
            whole = cp.unshard(own, 2)
            (whole.mean(2) * torch.arange(HEAD_SIZE)).square().sum().backward()
            return error([whole.detach(), own.grad / size], [hidden.detach(), cp.shard(true, 2)])

    assert max(run_loopback(size, found)) < 1e-14


def test_what_cannot_be_is_refused_with_what_fits() -> None:
    def heads(comm: Communicator) -> None:
        cp = ContextParallel(comm, "ulysses")
        with cp.using(Mask(LENGTH)):
            cp.attention(*[cp.shard(tensor, 2) for tensor in tensors(6, 6, torch.float64)[:3]])

    with pytest.raises(LayoutError, match=r"heads=6 do not divide among the 4 ranks.*1, 2, 3, 6"):
        run_loopback(4, heads)

    def lengths(comm: Communicator) -> None:
        cp = ContextParallel(comm)
        with cp.using(Mask(LENGTH + (comm.rank == 2))):
            cp.unshard(torch.zeros(1, len(cp.places())))

    with pytest.raises(MismatchError, match=r"rank 0 has Mask\(length=97.*rank 2 has Mask\(length=98"):
        run_loopback(3, lengths)

    def samples(comm: Communicator) -> None:
        cp, part = ContextParallel(comm), tensors(4, 2, torch.float64)
        for step in range(2):
            with cp.using(Mask(LENGTH)):
                tokens = torch.arange(LENGTH).view(1, -1)
                cp.shard(tokens + comm.rank if step else tokens)
                cp.attention(*[cp.shard(tensor, 2) for tensor in part[:3]])

    with pytest.raises(MismatchError, match=r"different masks or tokens: .* checksum .*by mesh.dp.rank"):
        run_loopback(2, samples)
    with pytest.raises(LayoutError, match="there is no method 'p2p'"):
        run_loopback(1, lambda comm: ContextParallel(comm, "p2p"))  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="inner=3 ranks that exchange heads do not divide the 4 ranks"):
        run_loopback(4, lambda comm: ContextParallel(comm, "ulysses+ring", inner=3))
    with pytest.raises(LayoutError, match="inner=2 is for methods with two levels"):
        run_loopback(2, lambda comm: ContextParallel(comm, "ring", inner=2))
    with pytest.raises(LayoutError, match="no mask is in use"):
        run_loopback(1, lambda comm: ContextParallel(comm).places())

    def shapes(comm: Communicator) -> None:
        cp = ContextParallel(comm)
        with cp.using(Mask(LENGTH)):
            cp.attention(*tensors(4, 2, torch.float64)[:3])

    with pytest.raises(MismatchError, match=r"they must be \[B, A, 4[89], D\]"):
        run_loopback(2, shapes)

    def twice(comm: Communicator) -> None:
        cp = ContextParallel(comm, "ulysses")
        with cp.using(Mask(LENGTH)):
            inputs = [cp.shard(t, 2).requires_grad_() for t in tensors(4, 2, torch.float64)[:3]]
            torch.autograd.grad(cp.attention(*inputs).sum(), inputs, create_graph=True)

    with pytest.raises(OperationError, match=r"cannot be differentiated again .*context-parallel attention"):
        run_loopback(2, twice)


@pytest.mark.parametrize("method", ["exchange", "ring", "allgather", "ulysses"])
def test_a_known_mask_beside_another_is_refused_on_every_rank(method: str) -> None:
    """One rank goes on with the mask of the step before, the other has a new one, or an older one."""
    masks = [Mask(LENGTH), Mask(LENGTH, documents=DOCUMENTS), Mask(LENGTH, documents=DOCUMENTS[::-1])]

    def refused(comm: Communicator, known: int, other: int) -> str:
        cp = ContextParallel(comm, method)  # type: ignore[arg-type]

        def step(mask: Mask) -> None:
            with cp.using(mask):
                inputs = [cp.shard(t, 2).requires_grad_() for t in tensors(4, 4, torch.float64)[:3]]
                cp.attention(*inputs).sum().backward()

        for mask in masks[:2]:
            step(mask)
        with pytest.raises(MismatchError) as raised:
            step(masks[known if comm.rank else other])
        step(masks[0])  # and nothing is left behind
        return str(raised.value)

    for known, other in ((0, 2), (1, 0)):
        first, *others = run_loopback(2, lambda comm, k=known, o=other: refused(comm, k, o), timeout_s=10)
        assert others == [first]
        assert f"rank 0 has {masks[other]}, rank 1 has {masks[known]}" in first


def test_places_and_shards_need_no_other_rank() -> None:
    def alone(comm: Communicator) -> int:
        cp, found = ContextParallel(comm), 0
        if comm.rank == 1:
            with cp.using(Mask(LENGTH)):
                found = cp.shard(torch.zeros(1, LENGTH)).shape[1] + len(cp.positions())
        comm.barrier()
        return found

    assert run_loopback(2, alone, timeout_s=10) == [0, 2 * 48]


@pytest.mark.parametrize("other", [lambda values: values[..., :8], Tensor.float])
def test_values_of_another_head_size_or_type_are_refused(other: Callable[[Tensor], Tensor]) -> None:
    def values(comm: Communicator) -> None:
        cp = ContextParallel(comm)
        with cp.using(Mask(LENGTH)):
            queries, keys, values, _ = [cp.shard(t, 2) for t in tensors(4, 2, torch.float64)]
            cp.attention(queries, keys, other(values))

    with pytest.raises(MismatchError, match=r"they must be \[B, A, 4[89], D\] and \[B, K, 4[89], D\]"):
        run_loopback(2, values)
