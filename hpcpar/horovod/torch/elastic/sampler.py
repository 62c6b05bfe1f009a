"""`ElasticSampler`: each rank's share of an epoch, also of the rest of one after a new start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from hpcpar.horovod.torch.mpi_ops import rank, size


class ElasticSampler(Sampler[int]):
    """Shares a dataset's indices out to the ranks, and knows which of them have been processed.

        sampler = ElasticSampler(dataset)
        for batch_index, batch in enumerate(DataLoader(dataset, batch_size=32, sampler=sampler)):
            ...
            sampler.record_batch(batch_index, 32)
        sampler.set_epoch(epoch + 1)                # at the end of an epoch, not at its start

    As part of a `TorchState`: whenever the ranks start anew, what any of them has processed in this epoch
    is left out, and the rest is shared out again. All shares have the same length; where the indices do
    not suffice some come twice.

    shuffle   in another order in each epoch, the same on all ranks
    epoch     which one it is
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self._history: list[
            list[int]
        ] = []  # for each sharing out: how many indices of its share each rank did
        self._recorded = 0  # of the present share, on this rank
        self.rank, self.num_replicas = rank(), size()
        self._share_out()

    @property
    def processed_num(self) -> int:
        """Indices processed in this epoch: by all ranks before the last sharing out, by this one since."""
        return sum(sum(counts) for counts in self._history) + self._recorded

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: nothing of it has been processed."""
        self.epoch = epoch
        self._history, self._recorded = [], 0
        self._share_out()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record the next `batch_size` indices of this rank's share as processed; the last may be fewer.

        batch_idx   as Horovod's callers pass it; after a new start it may begin anywhere, so it is not used
        """
        self._recorded = min(self._recorded + batch_size, len(self))

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and what has been processed of it; a few numbers for each sharing out."""
        return {
            "epoch": self.epoch,
            "history": [list(counts) for counts in self._history],
            "recorded": self._recorded,
            "num_replicas": self.num_replicas,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint, on any number of ranks, which all load that of one rank.

        The other ranks are taken to have processed as much as that one since the last sharing out. Of
        Horovod's own state, {"epoch", "processed_num"}, the first so many of the epoch are left out; a
        shuffled order is ours, not Horovod's.
        """
        if "history" not in state_dict:
            done = [[state_dict["processed_num"]]]
            state_dict = {**state_dict, "history": done, "recorded": 0, "num_replicas": 1}
        self._set(state_dict)
        self.num_replicas = state_dict["num_replicas"]
        self.reset()

    def reset(self) -> None:
        """Share out what is left to the ranks as they are now; all others have recorded as much as this."""
        self._begin_share([self._recorded] * self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        return iter(self._share.tolist())

    def __len__(self) -> int:
        return len(self._share)

    def _set(self, state_dict: dict[str, Any]) -> None:
        """Go back to a state of this same rank."""
        self.epoch, self._recorded = state_dict["epoch"], state_dict["recorded"]
        self._history = [list(counts) for counts in state_dict["history"]]
        self._share_out()

    def _begin_share(self, counts: Sequence[int]) -> None:
        """Share out what is left after each rank has done so many of its present share."""
        if any(counts):
            self._history.append(list(counts))
        self._recorded = 0
        self.rank, self.num_replicas = rank(), size()
        self._share_out()

    def _share_out(self) -> None:
        left = order(len(self.dataset), self.seed + self.epoch if self.shuffle else None)
        for counts in self._history:
            left = rest(left, counts)
        self._share = left[positions(len(left), self.rank, self.num_replicas)]


def order(count: int, seed: int | None) -> torch.Tensor:
    """0 to count - 1, shuffled by a seed or in ascending order."""
    if seed is None:
        return torch.arange(count, device="cpu")
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed), device="cpu")


def positions(count: int, rank: int, size: int) -> torch.Tensor:
    """Positions that a rank has of `count` indices: as many on each rank, by turns, going round at the end.

    5 indices, 2 ranks    rank 0: 0 2 4    rank 1: 1 3 0
    """
    turns = -(-count // size)
    return (rank + size * torch.arange(turns, device="cpu")) % max(count, 1)


def rest(indices: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return the indices left, in order, after rank r has done the first counts[r] of its share."""
    is_left = torch.ones(len(indices), dtype=torch.bool, device="cpu")
    for done_rank, done in enumerate(counts):
        is_left[positions(len(indices), done_rank, len(counts))[:done]] = False
    return indices[is_left]
