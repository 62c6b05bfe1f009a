"""Data divided by rank: rows of each batch, weights of gradients, and training that equals one process's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

import hpcpar.horovod.torch as hvd
from hpcpar.errors import DataError, HpcparError, MismatchError
from hpcpar.horovod.keras.data import DataShard, digest, shard
from hpcpar.horovod.keras.gradient_weight import gradient_weight

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("hvd")]

ROWS, BATCH = 21, 8  # the last batch has 5
X = np.arange(ROWS * 2, dtype="float32").reshape(ROWS, 2)
Y = np.arange(ROWS, dtype="float32")[:, None]


class Batches(keras.utils.PyDataset):
    """Batches of 8, 8 and 5 rows."""

    def __init__(self, first: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.first = first

    def __len__(self) -> int:
        return -(-ROWS // BATCH)

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return X[rows] + self.first, Y[rows]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(X, Y, strict=True)


class Counted(Dataset[Any]):
    """Counts the samples that are loaded."""

    loaded = 0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        self.loaded += 1
        return X[index], Y[index]


def batches() -> Iterator[Any]:
    for index in range(3):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        yield X[rows], Y[rows]


SOURCES: dict[str, Callable[[], DataShard]] = {
    "arrays": lambda: shard(X, Y, batch_size=BATCH),
    "tensors": lambda: shard(torch.tensor(X), torch.tensor(Y), batch_size=BATCH),
    "loader": lambda: shard(DataLoader(TensorDataset(torch.tensor(X), torch.tensor(Y)), batch_size=BATCH)),
    "workers": lambda: shard(DataLoader(Counted(), batch_size=BATCH, num_workers=1)),
    "stream": lambda: shard(DataLoader(Stream(), batch_size=BATCH)),
    "dataset": lambda: shard(Batches()),
    "threads": lambda: shard(Batches(workers=2)),
    "generator": lambda: shard(batches()),
}


def one_pass(data: DataShard) -> list[tuple[float, list[float]]]:
    """(weight, targets) of each of this rank's batches."""
    data.on_epoch_begin()
    found = []
    for batch in data:
        targets = np.asarray(batch[1]).reshape(-1)
        np.testing.assert_array_equal(np.asarray(batch[0])[:, 0], 2 * targets)
        found.append((gradient_weight.value, targets.tolist()))
    data.on_epoch_end()
    return found


def of_all(data: DataShard) -> list[list[float]]:
    """Targets of each batch of all ranks together, in rank order."""
    passes = hvd.allgather_object([targets for _, targets in one_pass(data)])
    return [[target for rank in step for target in rank] for step in zip(*passes, strict=True)]


@pytest.mark.parametrize("source", SOURCES)
def test_every_batch_is_divided_by_rows_and_weighted_by_them(source: str) -> None:
    found = one_pass(SOURCES[source]())
    everywhere = hvd.allgather_object(found)
    rows = [8, 8, 5]
    assert [len(steps) for steps in everywhere] == [3] * hvd.size()
    for step in range(3):
        targets = [target for steps in everywhere for target in steps[step][1]]
        assert targets == list(range(step * BATCH, step * BATCH + rows[step]))
        for weight, own in (steps[step] for steps in everywhere):
            assert weight == pytest.approx(len(own) * hvd.size() / rows[step])
    assert gradient_weight.value == 1.0


def test_a_loader_with_samples_by_index_loads_those_of_this_rank_only() -> None:
    dataset = Counted()
    one_pass(shard(DataLoader(dataset, batch_size=BATCH)))
    assert sum(hvd.allgather_object(dataset.loaded)) == ROWS


def test_nested_arrays_and_weights_are_divided_together() -> None:
    data = shard({"a": X, "b": [X, Y]}, {"c": Y}, sample_weight={"c": Y[:, 0]}, batch_size=BATCH)
    x, y, weights = next(iter(data))
    assert x["a"].shape[0] == y["c"].shape[0] == weights["c"].shape[0]
    np.testing.assert_array_equal(np.asarray(x["b"][0]), np.asarray(x["a"]))
    np.testing.assert_array_equal(np.asarray(weights["c"]), np.asarray(y["c"])[:, 0])


def test_class_weights_become_sample_weights() -> None:
    labels = (Y[:, 0] % 2).astype("int32")
    _, y, weights = next(iter(shard(X, labels, batch_size=BATCH, class_weight={0: 0.5, 1: 3.0})))
    assert weights.tolist() == [3.0 if label else 0.5 for label in y.tolist()]


@pytest.mark.parametrize("source", ["arrays", "loader", "dataset"])
def test_a_shuffled_order_is_equal_on_all_ranks_and_another_in_each_epoch(source: str) -> None:
    def make() -> DataShard:
        if source == "loader":  # its own sampler asks for it
            return shard(
                DataLoader(TensorDataset(*map(torch.tensor, (X, Y))), batch_size=BATCH, shuffle=True)
            )
        return shard(Batches() if source == "dataset" else X, None if source == "dataset" else Y,
                     batch_size=None if source == "dataset" else BATCH, shuffle=True, seed=4)  # fmt: skip

    torch.manual_seed(hvd.rank())  # ranks' own generators differ, and do not matter
    data, again = make(), make()
    passes = [of_all(data) for _ in range(6)]
    again.epoch = 1
    for targets in passes:
        assert sorted(target for batch in targets for target in batch) == list(range(ROWS))
    assert len({str(targets) for targets in passes}) > 1
    assert of_all(again) == passes[1]
    assert data.epoch == 6


def test_an_abandoned_pass_counts_as_none_and_leaves_no_weight() -> None:
    data = shard(X, Y, batch_size=2 * hvd.size() - 1 if hvd.size() > 1 else 3, drop_last=True)
    iterator = iter(data)
    next(iterator)
    del iterator
    assert gradient_weight.value == 1.0
    assert data.epoch == 0


def test_the_incomplete_batch_can_be_left_out() -> None:
    data = shard(X, Y, batch_size=BATCH, drop_last=True)
    assert data.num_batches == 2
    assert sum(len(batch) for batch in of_all(data)) == 16


def one_error(call: Callable[[], Any]) -> tuple[type[Exception] | None, str]:
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    return None, ""


@pytest.mark.usefixtures("needs_two")
def test_a_batch_of_fewer_samples_than_ranks_is_refused_on_every_rank() -> None:
    rows = BATCH + hvd.size() - 1
    errors = [one_error(lambda: shard(X[:rows], Y[:rows], batch_size=BATCH))]
    errors.append(one_error(lambda: one_pass(shard(DataLoader(Stream(), batch_size=20)))))
    assert [kind for kind, _ in errors] == [DataError, DataError]
    assert all("drop_last=True" in text for _, text in errors)
    assert f"{hvd.size() - 1} samples for {hvd.size()} ranks" in errors[0][1]


@pytest.mark.usefixtures("needs_two")
def test_ranks_with_other_numbers_of_samples_are_named_on_every_rank() -> None:
    kind, text = one_error(lambda: shard(X[hvd.rank() :], Y[hvd.rank() :], batch_size=BATCH))
    assert kind is not None
    assert issubclass(kind, HpcparError)
    assert "21 samples" in text
    assert "20 samples" in text


@pytest.mark.usefixtures("needs_two")
def test_ranks_that_read_different_batches_are_named_on_every_rank() -> None:
    kind, text = one_error(lambda: one_pass(shard(Batches(first=float(hvd.rank() == 1)))))
    assert kind is MismatchError
    assert "ranks 0 and 1" in text


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "batch_size of batches": (lambda: shard(Batches(), batch_size=4), "has batches already"),
    "sampler": (
        lambda: shard(DataLoader(Counted(), batch_size=4, sampler=WeightedRandomSampler([1.0] * ROWS, ROWS))),
        "WeightedRandomSampler",
    ),
    "shuffled stream": (lambda: shard(batches(), shuffle=True), "cannot shuffle"),
    "drop_last of batches": (lambda: shard(Batches(), drop_last=True), "drop_last for arrays only"),
    "labels of a dataset": (lambda: shard(Batches(), Y), "should not be passed"),
    "no rows": (lambda: shard(X[:3], Y[:3], batch_size=4, drop_last=True), "none of its samples"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_divided_is_refused_with_a_reason(case: str) -> None:
    call, reason = REFUSED[case]
    kind, text = one_error(call)
    assert kind in (ValueError, DataError)
    assert reason in text


def test_digests_tell_batches_apart() -> None:
    assert digest((X, Y)) == digest((torch.tensor(X), Y, None))
    assert digest((X, Y)) != digest((X, Y + 1))
    assert digest((X, Y)) != digest((X[:, None], Y))
