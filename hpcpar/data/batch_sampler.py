"""Batches of any map-style dataset: which samples each rank reads, from any place of an epoch on.

An epoch's order is a permutation of the samples, named by the seed and the epoch. A batch is the next
`global_batch` of them over all ranks, and the position counts samples, so that any number of ranks, with any
batch, goes on behind what has been learnt from:

    order of epoch 0      7 2 9 4 0 5 1 8 3 6
    2 ranks, batch 4      rank 0: 7 2    rank 1: 9 4      saved here: epoch 0, 4 samples done
    3 ranks, batch 3      rank 0: 0      rank 1: 5      rank 2: 1      then 8 3 6
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcpar.comm.agree import require_same
from hpcpar.data.permutation import permute
from hpcpar.errors import DataError
from hpcpar.partition import bounds

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


class DistributedBatchSampler:
    """The `batch_sampler` of a torch DataLoader: each rank's part of every batch, resumable at any of them.

        sampler = DistributedBatchSampler(len(dataset), global_batch=64, comm=world)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2, generator=torch.Generator())
        while sampler.epoch < epochs:
            for inputs, targets in loader:
                ...
                optimizer.step()
                sampler.advance()       # this batch has been learnt from
        hpcpar.checkpoint.save(…, extra={"data": sampler.state_dict()})

    samples        length of the dataset
    global_batch   samples of a batch, over all ranks; each has an equal part, or one more than another
    comm           the ranks that share the batches, as `mesh.dp`; each makes its sampler at the same time
    seed           names the order of each epoch; None: samples come in the dataset's order
    drop_last      True: an epoch ends with its last whole batch, and up to global_batch - 1 samples are not
                   seen in it (others in each epoch). False: its last batch is what is left. Nothing is
                   padded, unless there are fewer samples left than ranks: then these are repeated from the
                   first of them, so that each rank has one

    Workers of the loader fetch batches ahead, so iterating counts nothing; `advance` does. Iterating begins
    at the present position and ends with the epoch. A loader without a `generator` of its own takes one of
    torch's random numbers whenever it is iterated: dropout then differs after a resume.

    errors  MismatchError where ranks ask for different things, as a seed by the clock is;
            DataError for sizes that make no batch, a state that does not fit, and an epoch that is iterated
            again although none of its batches, or not all, were counted by `advance`
    """

    def __init__(
        self,
        samples: int,
        global_batch: int,
        comm: Communicator,
        *,
        seed: int | None = 0,
        drop_last: bool = True,
    ) -> None:
        # Plain integers: a checkpoint keeps the state as JSON, which has none of NumPy's.
        samples, global_batch, seed = (
            index(samples),
            index(global_batch),
            None if seed is None else index(seed),
        )
        told = f"samples={samples}, global_batch={global_batch}, seed={seed}, drop_last={drop_last}"
        require_same(comm, f"DistributedBatchSampler({told})")  # or some samples come twice, others never
        if global_batch < comm.size:
            raise DataError(
                f"global_batch={global_batch} leaves some of {comm.size} ranks without a sample; "
                f"make it at least {comm.size}"
            )
        if samples < (global_batch if drop_last else 1):
            raise DataError(
                f"{samples} samples make no batch of global_batch={global_batch}; give more samples, a "
                f"smaller batch, or drop_last=False"
            )
        self.samples = samples
        self.global_batch = global_batch
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.done = 0
        """Samples of this epoch that were learnt from, over all ranks."""
        self._comm = comm
        self._handed_out = -1  # epoch of which an iterator has given all batches that were left

    def __len__(self) -> int:
        """Number of batches left in the epoch."""
        left = self.samples - self.done
        return left // self.global_batch if self.drop_last else -(-left // self.global_batch)

    def __iter__(self) -> Iterator[list[int]]:
        if self._handed_out == self.epoch:
            raise DataError(
                f"all batches of epoch {self.epoch} were read already, but by advance() {self.done} of "
                f"{self.samples} samples have been learnt from; call it after each batch. Where workers read "
                "ahead and the loop was left early, load_state_dict(state_dict()) begins at the position"
            )
        return self._batches(self.epoch, self.done, len(self))

    def advance(self) -> None:
        """Count the next batch as learnt from; behind the last one the next epoch begins."""
        self.done = min(self.samples, self.done + self.global_batch)
        self._begin_next_epoch_if_over()

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the same on all ranks: for `extra` of `hpcpar.checkpoint.save`."""
        return {"samples": self.samples, "seed": self.seed, "epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position that any number of ranks with any batch has saved.

        errors  DataError for a state of another dataset or order, and for one that is damaged
        """
        own = self.state_dict()
        if not isinstance(state, Mapping) or set(state) != set(own):
            raise DataError(f"the state of a sampler has {', '.join(own)}; found was {state!r}")
        for key, is_here in (("samples", self.samples), ("seed", self.seed)):
            if state[key] != is_here:
                raise DataError(
                    f"the state was saved with {key}={state[key]!r}, but here it is {is_here!r}, which is "
                    f"another order of samples; make the sampler with {key}={state[key]!r}"
                )
        epoch, done = state["epoch"], state["done"]
        if type(epoch) is not int or type(done) is not int or epoch < 0 or not 0 <= done < self.samples:
            raise DataError(
                f"epoch={epoch!r} and done={done!r} are no position among {self.samples} samples: "
                f"epochs count from 0, and at most {self.samples - 1} samples of one are done"
            )
        self.epoch, self.done, self._handed_out = epoch, done, -1
        self._begin_next_epoch_if_over()

    def _begin_next_epoch_if_over(self) -> None:
        if not len(self):
            self.epoch, self.done = self.epoch + 1, 0

    def _batches(self, epoch: int, done: int, count: int) -> Iterator[list[int]]:
        """Yield this rank's indices in so many batches, by the position when the iterator was made."""
        for first in range(done, done + count * self.global_batch, self.global_batch):
            places = np.arange(first, min(first + self.global_batch, self.samples))
            places = np.resize(places, max(len(places), self._comm.size))  # repeats: a rank needs a sample
            if self.seed is not None:
                places = permute(places, self.samples, key=(self.seed << 32) + epoch)
            start, stop = bounds(len(places), self._comm.size)[self._comm.rank]
            yield places[start:stop].tolist()
        self._handed_out = epoch
