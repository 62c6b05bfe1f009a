"""Ranks ask in different orders, at different times, or not at all."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("seed", range(2))
def test_a_thousand_names_in_another_random_order_on_every_rank_are_all_right(hvd, seed):
    size, rank = hvd.size(), hvd.rank()
    names = list(range(1000))
    asked, awaited = (random.Random(1000 * seed + 10 * rank + k).sample(names, 1000) for k in range(2))
    values = torch.arange(1000.0) * (rank + 1)
    handles = {
        k: hvd.allreduce_async(values[k : k + 1 + k % 3], op=hvd.Sum, name=f"order.{seed}.{k}") for k in asked
    }
    found = {k: hvd.synchronize(handles[k]) for k in awaited}
    factor = sum(range(1, size + 1))
    wrong = [k for k in names if not torch.equal(found[k], torch.arange(1000.0)[k : k + 1 + k % 3] * factor)]
    assert wrong == []


def test_orders_may_change_from_step_to_step(hvd):
    size, rank = hvd.size(), hvd.rank()
    wrong = []
    for step in range(8):
        order = random.Random(100 * step + rank).sample(range(60), 60)
        handles = {
            k: hvd.allreduce_async(torch.full((3,), float(k + rank + step)), op=hvd.Sum, name=f"again.{k}")
            for k in order
        }
        for k in reversed(order):
            found = hvd.synchronize(handles[k])
            expected = float(size * (k + step) + sum(range(size)))
            wrong += [(step, k)] if not torch.equal(found, torch.full((3,), expected)) else []
    assert wrong == []


def test_kinds_and_groups_in_other_orders_are_all_right(hvd, assert_same):
    size, rank = hvd.size(), hvd.rank()
    own = torch.arange(size) + 10 * rank
    ask = {}
    for k in range(8):
        ask[f"sum {k}"] = lambda name: hvd.allreduce_async(own, op=hvd.Sum, name=name)
        ask[f"max {k}"] = lambda name: hvd.allreduce_async(own, op=hvd.Max, name=name)
        ask[f"rows {k}"] = lambda name: hvd.allgather_async(own[: rank + 1], name=name)
        ask[f"cast {k}"] = lambda name: hvd.broadcast_async(own, size - 1, name=name)
        ask[f"part {k}"] = lambda name: hvd.reducescatter_async(own, op=hvd.Sum, name=name)
        ask[f"swap {k}"] = lambda name: hvd.alltoall_async(own, name=name)
        ask[f"group {k}"] = lambda name: hvd.grouped_allreduce_async([own, own + 1], op=hvd.Sum, name=name)
    order = random.Random(rank).sample(sorted(ask), len(ask))
    handles = {name: ask[name](name) for name in order}
    found = {name: hvd.synchronize(handles[name]) for name in reversed(order)}
    total = size * torch.arange(size) + 10 * sum(range(size))
    everyones = [torch.arange(size) + 10 * r for r in range(size)]
    expected = {
        "sum": total,
        "max": everyones[-1],
        "rows": torch.cat([x[: r + 1] for r, x in enumerate(everyones)]),
        "cast": everyones[-1],
        "part": total[rank : rank + 1],
        "swap": torch.stack([x[rank] for x in everyones]),
    }
    for name, x in found.items():
        kind = name.split()[0]
        if kind == "group":
            assert_same([(name, x[0], total), (name, x[1], total + size)])
        else:
            assert_same([(name, x[0] if kind == "swap" else x, expected[kind])])


def test_ranks_may_come_late(hvd):
    time.sleep(0.15 * hvd.rank())
    first = hvd.allreduce(torch.ones(1), op=hvd.Sum)
    time.sleep(0.15 * (hvd.size() - hvd.rank()))
    second = hvd.allreduce(torch.ones(1), op=hvd.Sum)
    assert first.item() == second.item() == hvd.size()


def test_process_sets_that_overlap_are_awaited_in_other_orders_by_their_members(hvd):
    """In a ring of pairs every rank asks in both of its own, and waits for them in another order."""
    size, rank = hvd.size(), hvd.rank()
    if size < 3:
        pytest.skip("pairs that overlap need three ranks")
    pairs = [hvd.add_process_set([k, (k + 1) % size]) for k in range(size)]
    mine = [pair for pair in pairs if pair.included()]
    found = []
    for step in range(20):
        own = mine if (rank + step) % 2 else mine[::-1]
        handles = [
            hvd.allreduce_async(torch.tensor([rank + step]), op=hvd.Sum, process_set=pair) for pair in own
        ]
        together = hvd.allreduce_async(torch.tensor([step]), op=hvd.Sum)
        results = [hvd.synchronize(handle).item() for handle in reversed(handles)][::-1]
        expected = [sum(pair.ranks) + 2 * step for pair in own]
        found.append((results, expected, hvd.synchronize(together).item(), step * size))
    for pair in pairs:
        hvd.remove_process_set(pair)
    for results, expected, together, total in found:
        assert results == expected
        assert together == total


@pytest.mark.usefixtures("needs_two")
def test_two_sets_with_the_same_ranks_in_common_are_awaited_in_opposite_orders(hvd, half):
    """One operation with all and one with a half are under way; odd ranks wait the other way round."""
    found = []
    for step in range(10):
        handles = {
            "all": hvd.allreduce_async(torch.tensor([hvd.rank()]), op=hvd.Sum, name="all"),
            "half": hvd.allreduce_async(
                torch.tensor([hvd.rank()]), op=hvd.Sum, name="half", process_set=half
            ),
        }
        order = ["all", "half"] if (hvd.rank() + step) % 2 else ["half", "all"]
        results = {which: hvd.synchronize(handles[which]).item() for which in order}
        found.append((results["all"], results["half"]))
    assert found == [(sum(range(hvd.size())), sum(half.ranks))] * 10


@pytest.mark.usefixtures("needs_two")
def test_a_barrier_of_a_process_set_passes_while_other_ranks_sleep(hvd, halves, tmp_path):
    even, odd = halves
    passed = Path(hvd.broadcast_object(str(tmp_path), 0))
    seen = []
    if hvd.rank() % 2:
        for _ in range(5):
            hvd.barrier(process_set=odd)
        (passed / str(hvd.rank())).touch()
    else:
        deadline_s = time.monotonic() + 15
        while len(seen) < len(odd.ranks) and time.monotonic() < deadline_s:
            time.sleep(0.01)
            seen = sorted(int(path.name) for path in passed.iterdir())
        hvd.barrier(process_set=even)
    found = hvd.allgather_object(seen)
    assert found[::2] == [odd.ranks] * len(even.ranks)


@pytest.mark.usefixtures("needs_two")
def test_no_one_leaves_a_barrier_before_the_last_one_comes(hvd):
    hvd.barrier()
    late_s = 0.5 if hvd.rank() == hvd.size() - 1 else 0.0
    time.sleep(late_s)
    came_s = time.time()
    hvd.barrier()
    left_s = time.time()
    times = hvd.allgather_object((came_s, left_s))
    assert max(came for came, _ in times) <= min(left for _, left in times)


def test_several_threads_may_ask_and_wait_at_once(hvd):
    size, rank = hvd.size(), hvd.rank()
    wrong: list[tuple[int, int]] = []

    def work(k: int) -> None:
        for step in range(30):
            own = torch.full((5 + 50 * step,), float(rank + k + step))
            found = hvd.allreduce(own, op=hvd.Sum, name=f"thread.{k}.{step}")
            if not torch.equal(found, torch.full_like(own, float(size * (k + step) + sum(range(size))))):
                wrong.append((k, step))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_thread_may_communicate_beside_a_training(hvd):
    size, rank = hvd.size(), hvd.rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001))
    wrong: list[int] = []

    def report() -> None:
        for step in range(100):
            found = hvd.allreduce(torch.tensor([rank + step]), op=hvd.Sum, name=f"beside.{step}")
            if found.item() != size * step + sum(range(size)):
                wrong.append(step)

    thread = threading.Thread(target=report)
    thread.start()
    for step in range(40):
        optimizer.zero_grad()
        (model(torch.ones(2, 20)) + rank + step).square().mean().backward()
        optimizer.step()
    thread.join()
    weights = hvd.allgather(model[1].weight.detach().reshape(1, -1))
    assert wrong == []
    assert torch.equal(weights, weights[:1].expand_as(weights))
