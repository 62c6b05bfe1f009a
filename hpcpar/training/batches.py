"""Sequences that one data-parallel rank trains and evaluates on. Shape letters: B batch, S sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hpcpar.comm import Communicator
from hpcpar.data import Dataset, Prepared, Sampler
from hpcpar.errors import ConfigError, DataError
from hpcpar.partition import bounds
from hpcpar.training.config import Config
from hpcpar.training.sequences import Sequences


class RankBatches:
    """This rank's share of every global batch and of the held-out text, cut into microbatches.

    sampler   which windows a step has; a resumed run replaces it

    errors    ConfigError for fewer sequences than ranks; DataError for too little text
    """

    def __init__(
        self,
        config: Config,
        data: Prepared,
        dp_comm: Communicator,
        device: torch.device,
        sequences: Sequences,
    ) -> None:
        train = config.train
        self._sequences = sequences
        self._config = config
        self._dp = dp_comm
        self._device = device
        self._training = Dataset(data.shards.train, train.sequence)
        self._held_out = Dataset(data.shards.held_out, train.sequence)
        self._require_enough_sequences(len(data.shards.held_out))
        self.sampler = Sampler(
            *(len(data.shards.train), train.sequence, train.global_batch, train.seed),
            block=config.data.block,
        )

    def training_batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's tokens and targets [B, S] of a step."""
        return self._to_device(self._training.batch(self.sampler.shard(step, self._dp.rank, self._dp.size)))

    def held_out_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's held-out tokens and targets [B, S], the same every time, by microbatch."""
        windows, start = self.held_out_windows, self._own_share(len(self.held_out_windows))[0]
        for sequences in self.microbatch_sizes(len(windows)):
            yield self._to_device(self._held_out.batch(windows[start : start + sequences]))
            start += sequences

    @property
    def held_out_windows(self) -> Sequence[int]:
        """Windows of the held-out text in one evaluation, of all ranks."""
        train = self._config.train
        return self._held_out.spread(train.held_out_batches * train.global_batch)

    def microbatches(self, sequences: int) -> int:
        """Return the number of microbatches of each rank's share, the same on all ranks."""
        return microbatches_of(sequences, self._dp.size, self._config.train.microbatch)

    def microbatch_sizes(self, sequences: int) -> list[int]:
        """Return the sequences in each microbatch of this rank's share of so many."""
        first, last = self._own_share(sequences)
        return [stop - start for start, stop in bounds(last - first, self.microbatches(sequences))]

    def _own_share(self, sequences: int) -> tuple[int, int]:
        return bounds(sequences, self._dp.size)[self._dp.rank]

    def _to_device(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        tokens, targets = batch[0], self._sequences.targets(*batch)
        return tokens.to(self._device), targets.to(self._device)

    def _require_enough_sequences(self, held_out_tokens: int) -> None:
        config, ranks = self._config, self._dp.size
        if config.train.global_batch < ranks:
            raise ConfigError(
                f"train.global_batch = {config.train.global_batch} sequences cannot be shared by {ranks} "
                f"data-parallel ranks; make it at least {ranks}"
            )
        if not self._held_out.windows:
            raise DataError(
                f"the held-out text has {held_out_tokens} tokens, less than a sequence of "
                f"{config.train.sequence} and the token after it; give more text or more documents, raise "
                f"data.held_out (now {config.data.held_out}), or lower train.sequence"
            )


def microbatches_of(sequences: int, dp: int, microbatch: int) -> int:
    """Return the number of microbatches of each dp rank's share, the same on all ranks."""
    largest_share = -(-sequences // dp)
    return -(-largest_share // microbatch)
