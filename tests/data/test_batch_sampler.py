from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hpcpar import checkpoint
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data import DistributedBatchSampler
from hpcpar.errors import DataError, MismatchError

Batches = list[list[int]]
ALONE = Communicator.alone()


class Squares(Dataset[tuple[int, int]]):
    """Sample i of 41 is (i, i²)."""

    def __len__(self) -> int:
        return 41

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index**2


def learn(
    size: int,
    global_batch: int,
    state: dict[str, Any] | None,
    *,
    most: int | None = None,
    workers: int = 0,
    **options: Any,
) -> tuple[Batches, dict[str, Any]]:
    """Read the rest of an epoch, or `most` batches of it, on so many ranks; the batches and the state."""

    # Made on ranks that are threads, and read in turn: a process with threads had better not fork workers.
    samplers = run_loopback(size, lambda comm: DistributedBatchSampler(41, global_batch, comm, **options))
    read: list[Batches] = []
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(state)
        loader = DataLoader(Squares(), batch_sampler=sampler, num_workers=workers)
        expected = min(len(loader), most or 41)
        read.append([])
        for indices, squares in loader:
            assert torch.equal(indices**2, squares)
            read[-1].append(indices.tolist())
            sampler.advance()
            if len(read[-1]) == expected:
                break  # with workers, further batches have been fetched
    states = [json.loads(json.dumps(sampler.state_dict())) for sampler in samplers]
    assert states == states[:1] * size
    together = []
    for parts in zip(*read, strict=True):
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        together.append(list(chain.from_iterable(parts)))
    return together, states[0]


@pytest.mark.parametrize(
    ("before", "after", "batch", "workers"),
    [(1, 2, 6, 0), (2, 1, 6, 2), (3, 4, 5, 0), (4, 3, 5, 0), (2, 4, 8, 1), (4, 1, 8, 0), (3, 2, 4, 0)],
)
@pytest.mark.parametrize("drop_last", [True, False])
def test_an_epoch_resumed_on_other_ranks_sees_every_sample_once(
    before: int, after: int, batch: int, workers: int, drop_last: bool
) -> None:
    told: dict[str, Any] = {"seed": 3, "drop_last": drop_last}
    first, state = learn(before, batch, None, most=3, workers=workers, **told)
    assert state == {"samples": 41, "seed": 3, "epoch": 0, "done": 3 * batch}
    rest, end = learn(after, batch, state, workers=workers, **told)
    assert (end["epoch"], end["done"]) == (1, 0)
    whole, _ = learn(1, batch, None, **told)
    assert [set(each) for each in first + rest] == [set(each) for each in whole]
    seen = list(chain.from_iterable(first + rest))
    if drop_last:
        assert len(seen) == len(set(seen)) == 41 // batch * batch
    elif 41 % batch >= after:
        assert sorted(seen) == list(range(41))
    else:  # the last batch has fewer samples than ranks
        assert set(seen) == set(range(41))
        assert len(seen) == 41 + after - 41 % batch


def train(directory: Path, most: int) -> torch.Tensor:
    """Train a model with dropout for 3 epochs or `most` steps, from the checkpoint if there is one."""
    is_resumed = directory.exists()
    torch.manual_seed(is_resumed)  # of no effect after a resume
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedBatchSampler(41, 6, ALONE)
    loader = DataLoader(Squares(), batch_sampler=sampler, generator=torch.Generator())
    step = 0
    if is_resumed:
        loaded = checkpoint.load(directory, model=model, optimizer=optimizer, comm=ALONE)
        step = loaded.step
        sampler.load_state_dict(loaded.extra["data"])
    while sampler.epoch < 3 and step < most:
        for indices, squares in loader:
            (model(indices[:, None] / 41)[:, 0] - squares / 1681).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sampler.advance()
            step += 1
            if step == most:
                break
    extra = {"data": sampler.state_dict()}
    checkpoint.save(directory, step=step, model=model, optimizer=optimizer, extra=extra, comm=ALONE)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_training_resumed_in_an_epoch_ends_with_the_bits_of_one_that_was_not_interrupted(
    tmp_path: Path,
) -> None:
    whole = train(tmp_path / "whole", most=100)
    assert not torch.equal(train(tmp_path / "resumed", most=8), whole)
    assert torch.equal(train(tmp_path / "resumed", most=100), whole)


def test_another_batch_goes_on_at_the_sample_where_the_other_ended() -> None:
    order = list(chain.from_iterable(learn(1, 1, None, seed=5)[0]))
    assert sorted(order) == list(range(41))
    first, state = learn(2, 4, None, most=2, seed=5)
    rest, _ = learn(3, 7, state, seed=5)
    assert list(chain.from_iterable(first + rest)) == order[: 8 + 28]
    # No batch of 40 is left after these: the next epoch begins, in an order of its own.
    (whole,), end = learn(1, 40, state, seed=5)
    assert end["epoch"] == 2
    assert whole != order[:40]


def test_sizes_may_be_integers_of_numpy() -> None:
    given = DistributedBatchSampler(np.int64(41), np.int64(4), ALONE, seed=np.int64(3))
    plain = DistributedBatchSampler(41, 4, ALONE, seed=3)
    for sampler in (given, plain):
        sampler.advance()
    assert list(given) == list(plain)
    assert json.dumps(given.state_dict()) == json.dumps(plain.state_dict())


def test_without_a_seed_samples_come_in_the_datasets_order() -> None:
    assert learn(2, 4, None, most=2, seed=None)[0] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_an_epoch_whose_batches_were_not_counted_is_refused_the_second_time() -> None:
    sampler = DistributedBatchSampler(8, 4, ALONE)
    assert len(list(sampler)) == 2
    sampler.advance()
    with pytest.raises(DataError, match=r"epoch 0 were read already, but by advance\(\) 4 of 8 samples"):
        iter(sampler)
    sampler.advance()
    assert (sampler.epoch, len(list(sampler))) == (1, 2)


def test_a_loop_left_early_goes_on_although_workers_had_read_the_rest() -> None:
    sampler = DistributedBatchSampler(8, 4, ALONE)
    _, left = list(sampler)
    sampler.advance()
    with pytest.raises(DataError, match=r"read ahead .*, load_state_dict\(state_dict\(\)\) begins"):
        iter(sampler)
    sampler.load_state_dict(sampler.state_dict())
    assert list(sampler) == [left]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"samples": 9}, "saved with samples=9, but here it is 8, .* make the sampler with samples=9"),
        ({"seed": None}, "saved with seed=None, but here it is 0"),
        ({"epoch": -1}, "epoch=-1 and done=0 are no position among 8 samples"),
        ({"done": 8}, "done=8 .* at most 7 samples"),
        ({"done": True}, "done=True"),
        ({"step": 3}, "the state of a sampler has samples, seed, epoch, done; found was"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change: dict[str, Any], said: str) -> None:
    sampler = DistributedBatchSampler(8, 4, ALONE)
    before = sampler.state_dict()
    with pytest.raises(DataError, match=said):
        sampler.load_state_dict({**before, **change})
    assert sampler.state_dict() == before


def test_sizes_that_make_no_batch_are_refused() -> None:
    with pytest.raises(DataError, match="7 samples make no batch of global_batch=8"):
        DistributedBatchSampler(7, 8, ALONE)
    assert len(DistributedBatchSampler(7, 8, ALONE, drop_last=False)) == 1
    with pytest.raises(DataError, match="global_batch=2 leaves some of 3 ranks without a sample"):
        run_loopback(3, lambda comm: DistributedBatchSampler(7, 2, comm))


@pytest.mark.parametrize("varied", ["samples", "global_batch", "seed"])
def test_ranks_that_would_read_in_different_orders_are_refused(varied: str) -> None:
    def on_rank(comm: Communicator) -> None:
        asked = {"samples": 12, "global_batch": 4, "seed": 0}
        asked[varied] -= 3 * comm.rank
        with pytest.raises(MismatchError, match=r"rank 0 asked for .*; rank 1 asked for"):
            DistributedBatchSampler(asked.pop("samples"), asked.pop("global_batch"), comm, **asked)

    run_loopback(2, on_rank)
