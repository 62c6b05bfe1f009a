"""Training data for ranks: every batch of all ranks is divided by rows, so that a step is one process's step.

data = hvd.data.shard(x, y, batch_size=64, shuffle=True)      # 64 samples of all ranks together
model.fit(data, epochs=5, validation_data=hvd.data.shard(x_val, y_val, batch_size=64))

batch of 64 on 4 ranks    16 rows each
last batch of 7           2 2 2 1 rows; gradients are weighted by rows * size / 7, so that their average
                          over ranks is the mean over the 7 samples
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import torch
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from hpcpar.errors import DataError, MismatchError
from hpcpar.horovod.keras.gradient_weight import gradient_weight
from hpcpar.horovod.torch.functions import allgather_object, require_same
from hpcpar.horovod.torch.mpi_ops import rank, size
from hpcpar.partition import bounds

DIGEST_NBYTES = 2**20
"""So much of each array of a batch goes into its digest."""


def shard(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    drop_last: bool = False,
    class_weight: Mapping[int, float] | None = None,
) -> DataShard:
    """Return this rank's rows of every batch, for `fit`, `evaluate` and `predict`. Collective over all ranks.

    Every rank gives the same data and takes as many steps. With a DistributedOptimizer the gradients' average
    is that of the whole batch, also of an uneven last one, for losses that are means over samples.

    x, y, sample_weight  arrays, or lists and dicts of them; or as x alone: a torch DataLoader (of which a
                         rank loads its own samples only, unless its dataset is iterable), a PyDataset, or a
                         generator (of which every rank reads all batches)
    batch_size           samples of a step on all ranks together; 32 for arrays, else the data's own
    shuffle              another order in each epoch, equal on all ranks: of samples, or of a PyDataset's
                         batches; None: as a DataLoader's sampler says, and not for other data
    seed                 of the order of epoch e: seed + e; `DataShard.epoch` may be set to go on with one
    drop_last            leave the incomplete batch at the end out (of arrays; a DataLoader has its own)
    class_weight         weights by label, which `fit` would not apply to such data
    errors               ValueError for other samplers, and for arguments that the data does not take;
                         DataError on every rank for a batch of fewer samples than ranks
                         HorovodInternalError on every rank when ranks' sizes or arguments differ;
                         MismatchError when they read different batches
    """
    adapter = get_data_adapter(
        x, y, sample_weight, batch_size=batch_size, class_weight=dict(class_weight) if class_weight else None
    )
    if batch_size is not None and not isinstance(adapter, ArrayDataAdapter):
        raise ValueError(
            f"shard was given batch_size={batch_size} and a {type(x).__name__}, which has batches already: "
            f"its batches are those of all ranks together; leave batch_size out"
        )
    ranks = size(), rank()
    loader = _loader_of_samples(adapter, drop_last)
    source: _Samples | _Batches
    if loader is None:
        source = _Batches(_shuffled(adapter, shuffle, seed), *ranks)
    else:
        is_shuffled = isinstance(loader.sampler, RandomSampler) if shuffle is None else shuffle
        source = _Samples(loader, is_shuffled, seed, *ranks)
    require_same("shard", [f"{source.described}, shuffle={shuffle}, seed={seed}"])
    source.require_rows()  # after it, so that ranks of different data do not fail one by one
    return DataShard(source)


class DataShard(DataAdapter):  # type: ignore[misc]
    """This rank's rows of every batch; `shard` makes it, and Keras reads it.

    epoch   number of complete passes, which the order of the next depends on
    """

    def __init__(self, source: _Samples | _Batches) -> None:
        self._source = source

    @property
    def epoch(self) -> int:
        return self._source.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._source.epoch = epoch

    @property
    def num_batches(self) -> int | None:
        return self._source.num_batches

    @property
    def batch_size(self) -> None:
        """Unknown to Keras: the last one differs by rank."""
        return None

    def get_torch_dataloader(self) -> DataShard:
        return self

    def __iter__(self) -> Iterator[Any]:
        try:
            for weight, batch in self._source:
                gradient_weight.set(self, weight)
                yield batch
        finally:
            gradient_weight.reset(self)

    def on_epoch_begin(self) -> None:
        self._source.adapter_hook("on_epoch_begin")

    def on_epoch_end(self) -> None:
        gradient_weight.reset(self)
        self._source.adapter_hook("on_epoch_end")


def digest(batch: Any) -> bytes:
    """Return a digest of the arrays of a batch, of the first MiB of each."""
    hashed = hashlib.sha256()
    for leaf in keras.tree.flatten(batch):
        if leaf is not None:
            array = keras.ops.convert_to_numpy(leaf)
            hashed.update(f"{array.shape}{array.dtype}".encode())
            row_nbytes = max(array[:1].nbytes, 1)
            hashed.update(array[: -(-DIGEST_NBYTES // row_nbytes)].tobytes())
    return hashed.digest()


def _loader_of_samples(adapter: DataAdapter, drop_last: bool) -> DataLoader[Any] | None:
    """Return a loader whose samples can be had by index, batches as those of all ranks; None without one."""
    if isinstance(adapter, ArrayDataAdapter):
        of_arrays: DataLoader[Any] = adapter.get_torch_dataloader()
        of_arrays.batch_sampler.drop_last = drop_last  # type: ignore[union-attr]
        return of_arrays
    if drop_last:
        raise ValueError(
            "shard takes drop_last for arrays only; let the data leave its last batch out itself"
        )
    loader: DataLoader[Any] | None = getattr(adapter, "_dataloader", None)
    if loader is None or isinstance(loader.dataset, IterableDataset):
        return None
    is_plain = type(loader.sampler) in (RandomSampler, SequentialSampler) and loader.batch_size is not None
    if not is_plain or getattr(loader.sampler, "replacement", False):
        raise ValueError(
            f"shard was given a DataLoader with a {type(loader.sampler).__name__} of its own (or without a "
            f"batch_size), whose order may differ by rank: give it DataLoader(dataset, batch_size=..., "
            f"shuffle=...), whose samples are divided here; a loader that has a DistributedSampler is "
            f"divided already and goes to fit as it is"
        )
    return loader


class _Samples:
    """Batches by index: each rank loads its own rows of each."""

    def __init__(self, loader: DataLoader[Any], shuffle: bool, seed: int, size: int, rank: int) -> None:
        batches: Any = loader.batch_sampler
        samples, batch = len(batches.sampler), batches.batch_size
        self.described = f"{samples} samples, batch_size={batch}, drop_last={batches.drop_last}"
        if batches.drop_last:
            samples -= samples % batch
        self.order = _Order(samples, batch, shuffle, seed, size, rank)
        workers = {"num_workers": loader.num_workers, "prefetch_factor": loader.prefetch_factor}
        self.loader: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=self.order,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            persistent_workers=loader.persistent_workers,
            **workers,  # type: ignore[arg-type]
        )
        self.epoch = 0
        self.num_batches = len(self.order)

    def require_rows(self) -> None:
        """Raise DataError for a batch of fewer samples than ranks."""
        self.order.require_rows()

    def adapter_hook(self, name: str) -> None:
        """Do nothing: there is no data of the user's that is told of epochs."""

    def __iter__(self) -> Iterator[tuple[float, Any]]:
        self.order.epoch = self.epoch
        for step, batch in enumerate(self.loader):
            if step == self.num_batches - 1:
                self.epoch += 1  # here: Keras does not ask for more after the last
            yield self.order.weight(step), batch


class _Order(Sampler[list[int]]):
    """Indices of this rank's rows of each batch of an epoch."""

    def __init__(self, samples: int, batch: int, shuffle: bool, seed: int, size: int, rank: int) -> None:
        self.samples, self.batch, self.shuffle, self.seed = samples, batch, shuffle, seed
        self.size, self.rank = size, rank
        self.epoch = 0

    def __len__(self) -> int:
        return -(-self.samples // self.batch)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self.samples)
        if self.shuffle:
            order = torch.randperm(
                self.samples, generator=torch.Generator().manual_seed(self.seed + self.epoch)
            )
        for step in range(len(self)):
            start, stop = bounds(self._rows(step), self.size)[self.rank]
            yield order[step * self.batch + start : step * self.batch + stop].tolist()

    def require_rows(self) -> None:
        """Raise DataError without any batch, or for one of fewer samples than ranks."""
        if not self.samples:
            raise DataError(f"shard has no batch: batch_size={self.batch} leaves none of its samples")
        _require_rows_for_all(min(self._rows(0), self._rows(len(self) - 1)), self.size)

    def weight(self, step: int) -> float:
        return _weight(self._rows(step), self.size, self.rank)

    def _rows(self, step: int) -> int:
        return min(self.batch, self.samples - step * self.batch)


class _Batches:
    """Whole batches, which each rank reads and takes its own rows of."""

    def __init__(self, adapter: DataAdapter, size: int, rank: int) -> None:
        self.adapter = adapter
        self.size, self.rank = size, rank
        self.epoch = 0
        self.num_batches: int | None = adapter.num_batches
        self.described = f"{self.num_batches} batches"

    def require_rows(self) -> None:
        """Do nothing: the batches' sizes are seen as they come."""

    def adapter_hook(self, name: str) -> None:
        """Tell the user's data of an epoch's begin or end."""
        getattr(self.adapter, name)()

    def __iter__(self) -> Iterator[tuple[float, Any]]:
        if isinstance(dataset := getattr(self.adapter, "py_dataset", None), _Shuffled):
            dataset.reorder(self.epoch)
        for step, batch in enumerate(self.adapter.get_torch_dataloader()):
            if step == 0:
                _require_same_batch(batch)
            rows = {leaf.shape[0] for leaf in keras.tree.flatten(batch) if leaf is not None}
            if len(rows) != 1:
                raise DataError(f"batch {step} has arrays of {sorted(rows)} rows, where all need as many")
            (count,) = rows
            _require_rows_for_all(count, self.size)
            start, stop = bounds(count, self.size)[self.rank]
            own = [None if leaf is None else leaf[start:stop] for leaf in keras.tree.flatten(batch)]
            if step + 1 == self.num_batches:
                self.epoch += 1
            yield (
                _weight(count, self.size, self.rank),
                keras.tree.pack_sequence_as(batch, own),
            )


class _Shuffled(keras.utils.PyDataset):  # type: ignore[misc]
    """A PyDataset's batches in an order by seed and epoch."""

    def __init__(self, dataset: keras.utils.PyDataset, seed: int) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self.dataset, self.seed = dataset, seed
        self.reorder(0)

    def reorder(self, epoch: int) -> None:
        generator = torch.Generator().manual_seed(self.seed + epoch)
        self.order = torch.randperm(self.dataset.num_batches, generator=generator).tolist()

    def __len__(self) -> int:
        return int(self.dataset.num_batches)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.order[index]]

    def on_epoch_begin(self) -> None:
        self.dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self.dataset.on_epoch_end()


def _shuffled(adapter: DataAdapter, shuffle: bool | None, seed: int) -> DataAdapter:
    if not shuffle:
        return adapter
    if not isinstance(adapter, PyDatasetAdapter) or adapter.num_batches is None:
        raise ValueError(
            "shard cannot shuffle data whose samples or batches have no index; shuffle where they are made, "
            "by the same seed on every rank"
        )
    return PyDatasetAdapter(_Shuffled(adapter.py_dataset, seed), class_weight=adapter.class_weight)


def _weight(rows: int, size: int, rank: int) -> float:
    start, stop = bounds(rows, size)[rank]
    return (stop - start) * size / rows


def _require_rows_for_all(rows: int, size: int) -> None:
    if rows < size:
        raise DataError(
            f"a batch has {rows} samples for {size} ranks, and each needs one for a step; give shard another "
            f"batch_size (that of all ranks together), or leave the last batch out by drop_last=True"
        )


def _require_same_batch(batch: Any) -> None:
    """Raise MismatchError on every rank unless all read the same first batch. Collective."""
    digests = allgather_object(digest(batch), "keras.data.digest")
    other = next((rank for rank, found in enumerate(digests) if found != digests[0]), None)
    if other is not None:
        raise MismatchError(
            f"shard divides batches that every rank reads alike, but ranks 0 and {other} read different "
            f"first ones: shuffle them by the same seed on every rank, or give fit data that is divided "
            f"already without shard"
        )
