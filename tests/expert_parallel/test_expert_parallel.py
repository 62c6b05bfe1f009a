"""Experts on several ranks, compared with one process; rows, compared with theory."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import LayoutError, MismatchError, OperationError
from hpcpar.expert_parallel import ExpertParallel
from hpcpar.expert_parallel.dispatch import Dispatch, between_nodes, rows_sent
from hpcpar.expert_parallel.exchange import POSITIONS
from hpcpar.partition import bounds
from tests.command import until

HIDDEN, WIDTH = 32, 48
NODES = {2: [0, 1], 3: [0, 0, 1], 4: [0, 0, 1, 1], 5: [0, 1, 0, 1, 1]}


@dataclass
class Problem:
    """Tokens of all ranks in global order, and their experts."""

    hidden: Tensor
    experts: Tensor
    weights: Tensor
    first: Tensor
    second: Tensor
    gradient: Tensor

    @classmethod
    def random(
        cls,
        tokens: int = 61,
        count: int = 8,
        slots: int = 2,
        dtype: torch.dtype = torch.float32,
        routing: str = "uneven",
    ) -> Problem:
        generator = torch.Generator().manual_seed(tokens + count)
        wide = {"generator": generator, "dtype": torch.float64}
        liked = torch.rand(count, **wide) if routing == "uneven" else torch.zeros(count)
        scores = torch.rand(tokens, count, **wide) + liked
        if routing == "one expert":
            scores[:, count // 2] = 9
        return cls(
            torch.randn(tokens, HIDDEN, **wide).to(dtype),
            scores.topk(slots).indices[:, torch.randperm(slots, generator=generator)],
            torch.rand(tokens, slots, **wide).to(torch.float32),
            (torch.randn(count, HIDDEN, WIDTH, **wide) / 6).to(dtype),
            (torch.randn(count, WIDTH, HIDDEN, **wide) / 7).to(dtype),
            torch.randn(tokens, HIDDEN, **wide).to(dtype),
        )

    @property
    def count(self) -> int:
        return len(self.first)


def serial(of: Problem, kept: Tensor | None = None) -> list[Tensor]:
    """Output and gradients of hidden, weights and experts, by torch's own autograd."""
    inputs = [t.clone().requires_grad_() for t in (of.hidden, of.weights, of.first, of.second)]
    hidden, weights, first, second = inputs
    tokens, slots = of.experts.shape
    flat = of.experts.flatten()
    flat = flat if kept is None else flat.masked_fill(~kept.flatten(), of.count)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=of.count + 1).tolist()
    rows = hidden.unsqueeze(1).expand(-1, slots, -1).reshape(-1, HIDDEN)[order].split(counts)
    outputs = [gelu(rows[e] @ first[e]) @ second[e] for e in range(of.count)]
    outputs += [torch.zeros_like(rows[of.count])]
    home = torch.empty(tokens * slots, HIDDEN, dtype=hidden.dtype).index_copy(0, order, torch.cat(outputs))
    home = home.view(tokens, slots, HIDDEN)
    out = home[:, 0] * weights[:, :1]
    for slot in range(1, slots):
        out = out + home[:, slot] * weights[:, slot : slot + 1]
    return [out.detach(), *torch.autograd.grad(out, inputs, of.gradient)]


def experts_of(of: Problem, ep: ExpertParallel) -> list[Tensor]:
    """This rank's experts, as leaves."""
    own = slice(ep.own.start, ep.own.stop)
    return [tensor[own].clone().requires_grad_() for tensor in (of.first, of.second)]


def compute_by(first: Tensor, second: Tensor) -> Callable[[Tensor, list[int]], Tensor]:
    def compute(rows: Tensor, counts: list[int]) -> Tensor:
        parts = zip(rows.split(counts), first, second, strict=True)
        return torch.cat([gelu(part @ one) @ two for part, one, two in parts])

    return compute


def parallel(
    size: int,
    of: Problem,
    *,
    tokens: list[int] | None = None,
    kept: Tensor | None = None,
    places: list[list[int]] | None = None,
    nodes: list[int] | None = None,
    **options: object,
) -> list[Tensor]:
    """Output and gradients, of all ranks put together.

    tokens   of each rank, one after the other; or `places` of each rank's in the global order
    """
    total = len(of.hidden)
    if places is None:
        edges = bounds(total, size) if tokens is None else []
        if tokens is not None:
            starts = [sum(tokens[:rank]) for rank in range(size)]
            edges = tuple((start, start + n) for start, n in zip(starts, tokens, strict=True))
        held = [list(range(*edge)) for edge in edges]
    else:
        held = places

    def own(comm: Communicator) -> list[Tensor]:
        ep = ExpertParallel(comm, of.count, **options)  # type: ignore[arg-type]
        mine = torch.tensor(held[comm.rank], dtype=torch.int64)
        hidden, weights = (t[mine].requires_grad_() for t in (of.hidden, of.weights))
        first, second = experts_of(of, ep)
        out = ep.mix(
            hidden,
            of.experts[mine],
            weights,
            compute_by(first, second),
            kept=None if kept is None else kept[mine],
            positions=None if places is None else mine,
        )
        out.backward(of.gradient[mine])
        leaves = (hidden, weights, first, second)
        return [out.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)]

    found = run_loopback(size, own, nodes=nodes)
    order = torch.tensor([place for of_rank in held for place in of_rank], dtype=torch.int64)
    whole = [torch.cat(parts) for parts in zip(*found, strict=True)]
    for number in range(3):  # by token, not by expert
        whole[number] = torch.empty_like(whole[number]).index_copy(0, order, whole[number])
    return whole


def assert_equal(found: list[Tensor], true: list[Tensor]) -> None:
    names = ("output", "hidden", "weights", "first", "second")
    different = [
        (name, float((one - other).abs().max()))
        for name, one, other in zip(names, found, true, strict=True)
        if not torch.equal(one, other)
    ]
    assert not different


def error(found: list[Tensor], true: list[Tensor]) -> float:
    return max(float((a - b).norm() / (b.norm() + 1e-30)) for a, b in zip(found, true, strict=True))


@pytest.mark.smoke
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("routing", ["uneven", "one expert"])
@pytest.mark.parametrize("count", [8, 3])
def test_output_and_gradients_are_those_of_one_process_to_the_bit(
    size: int, routing: str, count: int
) -> None:
    problem = Problem.random(count=count, routing=routing)
    true = serial(problem)
    assert_equal(parallel(size, problem), true)
    if size > 1:
        assert_equal(parallel(size, problem, nodes=NODES[size], stages=2), true)


@pytest.mark.parametrize(("hidden", "width"), [(33, 47), (257, 511), (1, 1)])
def test_bits_do_not_depend_on_where_rows_lie_in_memory(
    hidden: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of odd sizes: those of an expert begin at another alignment on each number of ranks."""
    monkeypatch.setitem(globals(), "HIDDEN", hidden)
    monkeypatch.setitem(globals(), "WIDTH", width)
    problem = Problem.random(tokens=200, count=5)
    for size in (2, 3):
        assert_equal(parallel(size, problem), serial(problem))


@pytest.mark.parametrize("stages", [1, 2])
def test_many_ranks_on_nodes_of_several_sizes(stages: int) -> None:
    problem = Problem.random(tokens=120, count=32, slots=4)
    nodes = [0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2]
    assert_equal(parallel(12, problem, nodes=nodes, stages=stages), parallel(1, problem))


def test_in_checked_mode_the_same_runs() -> None:
    problem = Problem.random()

    def mixed(comm: Communicator) -> Tensor:
        ep = ExpertParallel(comm, problem.count)
        mine = slice(*bounds(len(problem.hidden), comm.size)[comm.rank])
        arguments = problem.hidden[mine], problem.experts[mine], problem.weights[mine]
        return ep.mix(*arguments, compute_by(*experts_of(problem, ep))).detach()

    found = run_loopback(4, mixed, nodes=NODES[4], check=True)
    assert torch.equal(torch.cat(found), serial(problem)[0])


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("tokens", [[61, 0, 0], [0, 60, 1], [1, 0, 60]])
def test_ranks_without_tokens_take_part(tokens: list[int], stages: int) -> None:
    problem = Problem.random()
    found = parallel(3, problem, tokens=tokens, nodes=NODES[3], stages=stages)
    assert_equal(found, serial(problem))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("halves", [False, True])
def test_no_token_at_all_gives_nothing_and_zero_gradients(stages: int, halves: bool) -> None:
    problem = Problem.random(tokens=0)
    found = parallel(4, problem, nodes=NODES[4], stages=stages, halves=halves)
    assert found[0].shape == found[1].shape == (0, HIDDEN)
    assert not found[3].any()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("halves", [False, True])
def test_ranks_without_experts_take_part(count: int, stages: int, halves: bool) -> None:
    problem = Problem.random(count=count, slots=1, dtype=torch.float64)
    found = parallel(5, problem, nodes=NODES[5], stages=stages, halves=halves)
    assert error(found, serial(problem)) < 1e-14


@pytest.mark.parametrize(
    "options", [{}, {"stages": 2}, {"halves": True}, {"sum_on_node": True}, {"stages": 2, "halves": True}]
)
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_every_way_is_right_in_float64(slots: int, options: dict[str, object]) -> None:
    problem = Problem.random(slots=slots, dtype=torch.float64)
    assert error(parallel(4, problem, nodes=NODES[4], **options), serial(problem)) < 1e-14


@pytest.mark.parametrize("slots", [3, 8])
@pytest.mark.parametrize("stages", [1, 2])
def test_many_experts_of_a_token_are_added_in_the_same_order_by_any_number_of_ranks(
    slots: int, stages: int
) -> None:
    problem = Problem.random(slots=slots)
    alone = parallel(1, problem)
    assert_equal(parallel(3, problem, nodes=NODES[3], stages=stages), alone)


@pytest.mark.parametrize("options", [{}, {"stages": 1}, {"halves": True}])
@pytest.mark.parametrize("seed", range(8))
def test_each_expert_gets_exactly_its_rows_in_the_order_of_positions(
    seed: int, options: dict[str, object]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    count, slots, total = (int(torch.randint(1, most, (), generator=generator)) for most in (12, 4, 60))
    experts = torch.randint(count, (total, slots), generator=generator)
    kept = torch.rand(total, slots, generator=generator) < 0.8
    places = torch.randperm(total, generator=generator).tensor_split(7)

    def own(comm: Communicator) -> list[tuple[int, list[int]]]:
        ep = ExpertParallel(comm, count, **options)  # type: ignore[arg-type]
        mine, found = places[comm.rank], []

        def compute(rows: Tensor, counts: list[int]) -> Tensor:
            parts = zip(ep.own, rows.split(counts), strict=True)
            found.extend((expert, part[:, 0].int().tolist()) for expert, part in parts)
            return rows

        hidden, weights = mine.float().unsqueeze(1), torch.ones(len(mine), slots)
        out = ep.mix(hidden, experts[mine], weights, compute, kept=kept[mine], positions=mine)
        assert torch.equal(out, hidden * kept[mine].sum(1, keepdim=True))
        return found

    calls = [call for of_rank in run_loopback(7, own, nodes=[0, 1, 0, 1, 1, 2, 0]) for call in of_rank]
    for expert in range(count):
        came = [tokens for number, tokens in calls if number == expert]
        assert len(came) == (2 if "halves" in options else 1)
        assert all(tokens == sorted(tokens) for tokens in came)
        wanted = ((experts == expert) & kept).nonzero()[:, 0].tolist()
        assert sorted(token for tokens in came for token in tokens) == wanted


@pytest.mark.parametrize("stages", [1, 2])
def test_tokens_anywhere_in_the_sequence_go_by_their_positions(stages: int) -> None:
    problem = Problem.random(tokens=60)
    zigzag = [[*range(0, 10), *range(50, 60)], [*range(10, 20), *range(40, 50)], [*range(20, 40)]]
    true = serial(problem)
    assert_equal(parallel(3, problem, places=zigzag, nodes=NODES[3], stages=stages), true)
    backwards = [list(range(40, 60)), list(range(20, 40)), list(range(20))]
    assert_equal(parallel(3, problem, places=backwards, nodes=NODES[3], stages=stages), true)


@pytest.mark.parametrize("options", [{}, {"stages": 2}, {"stages": 2, "sum_on_node": True}])
@pytest.mark.parametrize("size", [1, 3])
def test_rows_that_are_not_kept_do_not_travel_and_count_as_zero(
    size: int, options: dict[str, object]
) -> None:
    problem = Problem.random()
    kept = torch.rand(problem.experts.shape, generator=torch.Generator().manual_seed(1)) < 0.6
    kept[5:9] = False  # tokens of which nothing is left
    nodes = NODES[3] if size == 3 else None
    found = parallel(size, problem, kept=kept, nodes=nodes, **options)
    assert_equal(found, serial(problem, kept))
    assert not found[0][5:9].any()


def counted(comm: Communicator, of: Problem, dispatch: Dispatch, **options: object) -> tuple[int, int, int]:
    """Rows sent for a forward and backward: on the communicator itself, within the node; and all bytes."""
    ep = ExpertParallel(comm, of.count, **options)  # type: ignore[arg-type]
    before = comm.traffic.nbytes_sent()
    start = sum(len(tokens) for tokens in dispatch.routing[: comm.rank])
    mine = slice(start, start + len(dispatch.routing[comm.rank]))
    hidden, weights = (t[mine].clone().requires_grad_() for t in (of.hidden, of.weights))
    ep.mix(hidden, of.experts[mine], weights, compute_by(*experts_of(of, ep))).sum().backward()
    within = 0 if ep.node is None else ep.node.traffic.nbytes_sent("alltoall")
    itemsize = HIDDEN * of.hidden.element_size()
    nbytes = comm.traffic.nbytes_sent() - before
    return comm.traffic.nbytes_sent("alltoall") // itemsize, within // itemsize, nbytes


def dispatch_of(of: Problem, nodes: list[int], stages: int) -> Dispatch:
    edges = bounds(len(of.hidden), len(nodes))
    routing = tuple(tuple(map(tuple, of.experts[slice(*edge)].tolist())) for edge in edges)
    return Dispatch(routing, of.count, tuple(nodes), stages)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("routing", ["even", "uneven", "one expert"])
@pytest.mark.parametrize("halves", [False, True])
def test_rows_sent_are_those_of_the_counts(size: int, routing: str, halves: bool) -> None:
    problem = Problem.random(tokens=64, routing=routing)
    dispatch = dispatch_of(problem, [0] * size, 1)
    found = run_loopback(size, lambda comm: counted(comm, problem, dispatch, halves=halves)[0])
    own = [range(*edge) for edge in bounds(problem.count, size)]
    for rank in range(size):
        there = sum(count for expert, count in enumerate(dispatch.counts[rank]) if expert not in own[rank])
        back = sum(dispatch.counts[other][e] for other in range(size) if other != rank for e in own[rank])
        assert found[rank] == 2 * there + 2 * back
    rows = sum(map(sum, rows_sent(dispatch.messages, size)))
    assert sum(found) == 4 * rows


@pytest.mark.parametrize("size", [2, 4])
def test_a_balanced_routing_sends_as_many_values_as_the_formula(size: int) -> None:
    problem = Problem.random(tokens=64)
    problem.experts = torch.stack([torch.arange(64) % 8, (torch.arange(64) + 3) % 8], 1)
    dispatch = dispatch_of(problem, [0] * size, 1)
    found = run_loopback(size, lambda comm: counted(comm, problem, dispatch)[0] * HIDDEN)
    assert found == [4 * (64 // size) * 2 * HIDDEN * (size - 1) // size] * size


@pytest.mark.parametrize("size", [3, 4, 5])
@pytest.mark.parametrize("sums", [False, True])
def test_in_two_stages_no_more_rows_go_between_nodes_than_in_one(size: int, sums: bool) -> None:
    problem, nodes = Problem.random(tokens=64, slots=3), NODES[size]
    one, two = (dispatch_of(problem, nodes, stages) for stages in (1, 2))
    found = run_loopback(
        size, lambda comm: counted(comm, problem, two, stages=2, sum_on_node=sums), nodes=nodes
    )
    returns = two.returns(sum_on_node=sums)
    for rank, (between, within, _) in enumerate(found):
        # Each way twice: tokens and gradients of outputs, outputs and gradients of tokens.
        sent = [m for m in (*two.messages, *returns) if m.sender == rank != m.receiver]
        assert between == 2 * between_nodes(sent, nodes)
        assert between + within == 2 * sum(len(message.rows) for message in sent)
    # With the notes on which token and expert a row is for, too, though rows are as short as these.
    nbytes = sum(of_rank for _, _, of_rank in found)
    assert nbytes < 4 * between_nodes(one.messages, nodes) * HIDDEN * 4
    if not sums:  # there a token goes once; outputs come home each by itself
        assert between_nodes(returns, nodes) == between_nodes(one.messages, nodes)


def test_two_stages_are_chosen_for_several_nodes_of_several_ranks() -> None:
    def chosen(comm: Communicator) -> bool:
        return ExpertParallel(comm, 4).node is not None

    assert run_loopback(4, chosen, nodes=NODES[4]) == [True] * 4
    assert run_loopback(4, chosen) == [False] * 4
    assert run_loopback(4, chosen, nodes=range(4)) == [False] * 4


def test_what_is_computed_meanwhile_is_added() -> None:
    problem = Problem.random(tokens=64)

    def mixed(comm: Communicator) -> list[Tensor]:
        ep = ExpertParallel(comm, problem.count)
        mine = slice(*bounds(64, comm.size)[comm.rank])
        hidden = problem.hidden[mine].clone().requires_grad_()
        shared = problem.first[0] @ problem.second[0]
        calls = []

        def meanwhile() -> Tensor:
            calls.append(1)
            return hidden @ shared

        compute = compute_by(*experts_of(problem, ep))
        arguments = hidden, problem.experts[mine], problem.weights[mine], compute
        with_shared = ep.mix(*arguments, meanwhile=meanwhile)
        apart = ep.mix(*arguments) + hidden @ shared
        assert len(calls) == 1
        gradients = [torch.autograd.grad(out.sum(), hidden)[0] for out in (with_shared, apart)]
        return [with_shared, apart, *gradients]

    for with_shared, apart, one, other in run_loopback(2, mixed):
        assert torch.equal(with_shared, apart)
        torch.testing.assert_close(one, other)


class Meeting:
    """Let rank 0 stay in the middle of its work until rank 1 has come to a point that needs rank 0's rows."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def come(self, comm: Communicator) -> None:
        if comm.rank == 1:
            self.reached.set()
        else:
            until(lambda: comm.progress() or self.reached.is_set(), "rows come while rank 0 computes", 20)


def test_rows_travel_meanwhile() -> None:
    problem, meeting = Problem.random(), Meeting()

    def mixed(comm: Communicator) -> None:
        ep = ExpertParallel(comm, problem.count)

        def compute(rows: Tensor, counts: list[int]) -> Tensor:
            if comm.rank == 1:
                meeting.come(comm)
            return rows

        def meanwhile() -> None:
            if comm.rank == 0:
                meeting.come(comm)

        ep.mix(problem.hidden, problem.experts, problem.weights, compute, meanwhile=meanwhile)

    run_loopback(2, mixed)


def test_rows_of_one_half_travel_while_the_experts_of_the_other_compute_there_and_back() -> None:
    """Rank 0 is in its first half while rank 1 comes to the second, and in backward the other way round."""
    problem, forward, backward = Problem.random(), Meeting(), Meeting()

    def mixed(comm: Communicator) -> None:
        ep = ExpertParallel(comm, problem.count, halves=True)
        calls: list[int] = []

        def compute(rows: Tensor, counts: list[int]) -> Tensor:
            calls.append(1)
            outputs = rows * 2
            if len(calls) == 1 + comm.rank:
                forward.come(comm)
            if len(calls) == 2 - comm.rank:
                outputs.register_hook(lambda gradient: backward.come(comm))
            return outputs

        hidden = problem.hidden.clone().requires_grad_()
        ep.mix(hidden, problem.experts, problem.weights, compute).sum().backward()

    run_loopback(2, mixed)


@pytest.mark.parametrize("halves", [False, True])
def test_with_halves_progress_is_made_between_experts_in_backward_too(
    halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ep, calls = ExpertParallel(Communicator.alone(), 8, halves=halves), []
    monkeypatch.setattr(ep.comm, "progress", lambda: calls.append(1))
    weight = torch.ones(3, requires_grad=True)
    outputs = weight * 2
    ep.progress(outputs)
    ep.progress()
    ep.progress(outputs.detach())
    assert len(calls) == 3
    outputs.sum().backward()
    assert len(calls) == 3 + halves


@pytest.mark.parametrize("options", [{"stages": 1}, {"stages": 2}, {"stages": 2, "sum_on_node": True}])
@pytest.mark.parametrize("frozen", ["hidden", "hidden and weights", "weights", "experts"])
@pytest.mark.parametrize("count", [2, 8])
def test_what_is_frozen_has_no_gradient_and_the_rest_the_same(
    frozen: str, options: dict[str, object], count: int
) -> None:
    problem = Problem.random(count=count)
    true = serial(problem)

    def gradients(comm: Communicator) -> list[Tensor | None]:
        ep = ExpertParallel(comm, problem.count, **options)  # type: ignore[arg-type]
        mine = slice(*bounds(len(problem.hidden), comm.size)[comm.rank])
        hidden, weights = problem.hidden[mine].clone(), problem.weights[mine].clone()
        first, second = experts_of(problem, ep)
        hidden.requires_grad_("hidden" not in frozen)
        weights.requires_grad_("weights" not in frozen)
        if frozen == "experts":
            first, second = first.detach(), second.detach()
        ep.mix(hidden, problem.experts[mine], weights, compute_by(first, second)).backward(
            problem.gradient[mine]
        )
        return [hidden.grad, weights.grad, first.grad]

    for rank, found in enumerate(run_loopback(4, gradients, nodes=NODES[4])):
        tokens = bounds(len(problem.hidden), 4)[rank], bounds(len(problem.hidden), 4)[rank]
        edges = (*tokens, bounds(count, 4)[rank])
        for name, gradient, whole, edge in zip(
            ("hidden", "weights", "experts"), found, true[1:4], edges, strict=True
        ):
            if name in frozen:
                assert gradient is None
            elif edge[0] < edge[1]:
                assert gradient is not None
                assert torch.equal(gradient, whole[slice(*edge)])


def test_nothing_is_trained_and_the_output_has_no_gradient() -> None:
    problem = Problem.random(count=3)

    def without(comm: Communicator) -> list[bool]:
        ep = ExpertParallel(comm, problem.count)
        mine = slice(*bounds(len(problem.hidden), comm.size)[comm.rank])
        first, second = experts_of(problem, ep)
        arguments = problem.hidden[mine], problem.experts[mine], problem.weights[mine]
        frozen = ep.mix(*arguments, compute_by(first.detach(), second.detach()))
        with torch.no_grad():
            alone = ep.mix(*arguments, compute_by(first, second))
        with torch.inference_mode():
            inferred = ep.mix(*arguments, compute_by(first, second))
        assert torch.equal(frozen, alone)
        assert torch.equal(frozen, inferred)
        return [frozen.requires_grad, alone.requires_grad]

    assert run_loopback(4, without) == [[False, False]] * 4


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("count", [3, 8])
def test_a_layer_that_is_recomputed_has_the_same_gradients(reentrant: bool, count: int) -> None:
    problem = Problem.random(count=count)
    true = serial(problem)

    def gradients(comm: Communicator) -> list[Tensor]:
        ep = ExpertParallel(comm, problem.count)
        mine = slice(*bounds(len(problem.hidden), comm.size)[comm.rank])
        hidden, weights = (t[mine].clone().requires_grad_() for t in (problem.hidden, problem.weights))
        compute = compute_by(*experts_of(problem, ep))

        def layer(hidden: Tensor, weights: Tensor) -> Tensor:
            return ep.mix(hidden, problem.experts[mine], weights, compute)

        out = checkpoint(layer, hidden, weights, use_reentrant=reentrant)
        out.backward(problem.gradient[mine])
        return [hidden.grad, weights.grad]  # type: ignore[list-item]

    found = run_loopback(4, gradients)
    for number in (0, 1):
        assert torch.equal(torch.cat([of_rank[number] for of_rank in found]), true[number + 1])


def test_gradients_are_not_differentiated_again() -> None:
    def twice(comm: Communicator) -> None:
        problem = Problem.random()
        hidden = problem.hidden.clone().requires_grad_()
        compute = compute_by(problem.first, problem.second)
        out = ExpertParallel(comm, problem.count).mix(hidden, problem.experts, problem.weights, compute)
        torch.autograd.grad(out.sum(), hidden, create_graph=True)

    with pytest.raises(OperationError, match=r"differentiated again .* mixture"):
        run_loopback(1, twice)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("options", [{}, {"stages": 2}])
def test_outputs_alone_are_saved_for_backward_and_only_for_weights_with_a_gradient(
    trained: bool, options: dict[str, object]
) -> None:
    def saved(comm: Communicator) -> int:
        problem = Problem.random(tokens=64)
        ep = ExpertParallel(comm, problem.count, **options)  # type: ignore[arg-type]
        found: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            found[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        hidden = problem.hidden.clone().requires_grad_()
        weights = problem.weights.clone().requires_grad_(trained)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            ep.mix(hidden, problem.experts, weights, lambda rows, counts: rows)
        return sum(t.untyped_storage().nbytes() for t in found.values()) // 4 - weights.numel()

    room = int(bool(options))  # a row of zeros
    assert (
        run_loopback(3, saved, nodes=NODES[3] if options else None)
        == [trained * (64 * 2 + room) * HIDDEN] * 3
    )


def test_bfloat16_is_added_in_float32_and_rounded_once() -> None:
    problem = Problem.random(slots=4, dtype=torch.bfloat16)
    found = parallel(3, problem)
    whole = Problem(*(t.double() if t.dtype == torch.bfloat16 else t for t in vars(problem).values()))
    assert found[0].dtype == torch.bfloat16
    assert error([t.double() for t in found], [t.double() for t in serial(whole)]) < 8e-3


def test_ten_steps_of_sgd_give_the_same_experts() -> None:
    problem = Problem.random()

    def trained(comm: Communicator) -> list[Tensor]:
        ep = ExpertParallel(comm, problem.count)
        mine = slice(*bounds(len(problem.hidden), comm.size)[comm.rank])
        first, second = experts_of(problem, ep)
        for _ in range(10):
            out = ep.mix(
                problem.hidden[mine], problem.experts[mine], problem.weights[mine], compute_by(first, second)
            )
            (out - problem.gradient[mine]).square().sum().backward()
            with torch.no_grad():
                for weight in (first, second):
                    weight -= 1e-3 * weight.grad
                    weight.grad = None
        return [first.detach(), second.detach()]

    (alone,) = run_loopback(1, trained)
    assert not torch.equal(alone[0], problem.first)
    for size in (2, 3, 4):
        found = run_loopback(size, trained)
        for number in (0, 1):
            assert torch.equal(torch.cat([of_rank[number] for of_rank in found]), alone[number])


WRONG = [
    (
        lambda g: g.update(experts=g["experts"] + 4),
        "experts from .* to 11 .* 0 to 7",
    ),
    (lambda g: g.update(experts=g["experts"] - 9), "they must be from 0 to 7"),
    (lambda g: g.update(weights=g["weights"][:, :1]), r"must be \[T, H\], \[T, k\]"),
    (lambda g: g.update(experts=g["experts"].int()), "must be int64"),
    (lambda g: g.update(hidden=g["hidden"][0]), r"must be \[T, H\] of floating"),
    (lambda g: g.update(kept=torch.ones(3, 2)), r"kept \[3, 2\] of torch.float32"),
    (lambda g: g.update(positions=torch.zeros(61)), r"they must be \[T\] int64"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG)
def test_what_does_not_fit_is_refused_on_every_rank(wrong: Callable, words: str) -> None:
    def call(comm: Communicator, of_ranks: set[int]) -> str:
        problem = Problem.random()
        given = {name: getattr(problem, name) for name in ("hidden", "experts", "weights")}
        if comm.rank in of_ranks:
            wrong(given)
        ep = ExpertParallel(comm, problem.count)
        given["compute"] = compute_by(*experts_of(problem, ep))
        with pytest.raises((OperationError, MismatchError)) as caught:
            ep.mix(**given)
        assert isinstance(caught.value, OperationError if len(of_ranks) == comm.size else MismatchError)
        return str(caught.value)

    for said in run_loopback(2, lambda comm: call(comm, {0, 1})):
        assert re.search(words, said)
    for said in run_loopback(3, lambda comm: call(comm, {1})):
        assert re.search(f"rank 1 asked for.*{words}", said)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: Problem(p.hidden[:, :16], *list(vars(p).values())[1:]), r"tokens \[T, 16\]"),
        (lambda p: Problem(p.hidden.double(), *list(vars(p).values())[1:]), "of torch.float64"),
        (lambda p: Problem.random(slots=3), "with 3 experts each"),
    ],
)
def test_ranks_that_differ_are_named_on_every_rank(change: Callable, words: str) -> None:
    def call(comm: Communicator) -> str:
        problem = Problem.random()
        problem = change(problem) if comm.rank == 2 else problem
        ep = ExpertParallel(comm, problem.count)
        with pytest.raises(MismatchError) as caught:
            ep.mix(problem.hidden, problem.experts, problem.weights, lambda rows, counts: rows)
        return str(caught.value)

    for said in run_loopback(3, call):
        assert re.search(f"rank 2 asked for.*{words}", said)


def test_positions_of_as_many_replicas_as_there_may_be_fit() -> None:
    from hpcpar.models.expert_tokens import REPLICA

    assert 65_536 * REPLICA <= POSITIONS


def test_layouts_that_differ_or_cannot_be_are_refused() -> None:
    with pytest.raises(MismatchError, match=r"count=8.*count=9"):
        run_loopback(2, lambda comm: ExpertParallel(comm, 8 + comm.rank))
    with pytest.raises(LayoutError, match="count is from 1 to 32767"):
        run_loopback(2, lambda comm: ExpertParallel(comm, 0))
    with pytest.raises(LayoutError, match='stages are 1, 2 or "auto"'):
        run_loopback(2, lambda comm: ExpertParallel(comm, 8, stages=3))  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="summed on nodes in two stages"):
        run_loopback(2, lambda comm: ExpertParallel(comm, 8, stages=1, sum_on_node=True))

    def shapes(comm: Communicator) -> None:
        problem = Problem.random()
        ep = ExpertParallel(comm, 8)
        ep.mix(problem.hidden, problem.experts, problem.weights, lambda rows, counts: rows[:1])

    with pytest.raises(OperationError, match=r"compute was given rows .* and returned \[1, 32\]"):
        run_loopback(2, shapes)


def test_counts_are_those_of_this_ranks_tokens() -> None:
    problem = Problem.random(tokens=64)

    def counts(comm: Communicator) -> list[int]:
        ep = ExpertParallel(comm, problem.count, halves=True)
        mine = slice(*bounds(64, comm.size)[comm.rank])
        ep.mix(problem.hidden[mine], problem.experts[mine], problem.weights[mine], lambda rows, _: rows)
        return ep.counts

    found = run_loopback(3, counts)
    assert tuple(map(tuple, found)) == dispatch_of(problem, [0, 0, 0], 1).counts


@pytest.mark.mpi
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
def test_over_mpi_outputs_and_gradients_are_those_of_one_process(
    any_world: Communicator, stages: int, halves: bool
) -> None:
    problem = Problem.random()
    ep = ExpertParallel(any_world, problem.count, stages=stages, halves=halves)  # type: ignore[arg-type]
    edges = bounds(len(problem.hidden), any_world.size)
    mine, own = slice(*edges[any_world.rank]), slice(ep.own.start, ep.own.stop)
    hidden, weights = (t[mine].clone().requires_grad_() for t in (problem.hidden, problem.weights))
    first, second = experts_of(problem, ep)
    out = ep.mix(hidden, problem.experts[mine], weights, compute_by(first, second))
    out.backward(problem.gradient[mine])
    true = serial(problem)
    found = [out.detach(), hidden.grad, weights.grad, first.grad, second.grad]
    wanted = [*(tensor[mine] for tensor in true[:3]), *(tensor[own] for tensor in true[3:])]
    if halves:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    else:
        assert_equal(found, wanted)  # type: ignore[arg-type]
