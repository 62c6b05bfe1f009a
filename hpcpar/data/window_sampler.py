"""Sampler: the windows of a training step as a pure function of the step, without state.

Window w is `sequence` tokens from token w · sequence on, and the one after them. Every epoch visits each
window at most once, in an order of its own:

    epoch 0   step 0: windows 7 2 9 4    step 1: 0 5 1 8     (3 and 6 are left over)
    epoch 1   step 2: windows 3 8 0 6    step 3: …

    step 0 on two ranks:   rank 0: 7 2    rank 1: 9 4

A run resumed with another global batch continues after the windows it has had (`going_on_from`); its position
in the text counts windows, not steps:

    from step 1 on with 2:              step 1: 0 5    step 2: 1 8    step 3: 3 6

and with another sequence too, where the order is one of blocks that are multiples of both: a block's windows
follow each other, so that what was visited is whole blocks and the beginning of one.

    block = 2 windows:   epoch 0   blocks 3 1 4 …  =  windows 6 7  2 3  8 9 …
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hpcpar.data.permutation import permute
from hpcpar.errors import DataError
from hpcpar.partition import bounds


@dataclass(frozen=True)
class Sampler:
    """Order of training, the same for any number of ranks.

    tokens         tokens of the training split
    sequence       tokens of a window
    global_batch   windows of a step, over all ranks and microbatches
    seed           names the order
    block          tokens of neighbouring windows that stay together in the order, a multiple of `sequence`;
                   None = one window
    first_step     first step of this sampler, at window `first_place` of the order of `first_epoch`
    """

    tokens: int
    sequence: int
    global_batch: int
    seed: int = 0
    first_step: int = 0
    first_epoch: int = 0
    first_place: int = 0
    block: int | None = None

    def __post_init__(self) -> None:
        if self.sequence < 1 or self.global_batch < 1:
            raise DataError(
                f"sequence={self.sequence} and global_batch={self.global_batch} must both be at least 1"
            )
        if self.block_tokens % self.sequence:
            below = max(1, self.block_tokens // self.sequence) * self.sequence
            raise DataError(
                f"a block of {self.block_tokens} tokens is not cut into sequences of {self.sequence}; "
                f"make it (data.block) {below} or another multiple of the sequence"
            )
        if self.windows < self.global_batch:
            needed = -(-self.global_batch // self.per_block) * self.block_tokens + 1
            raise DataError(
                f"a global batch of {self.global_batch} windows of {self.sequence} tokens needs "
                f"{needed} tokens, but there are {self.tokens}; "
                f"give more text, or a smaller batch or sequence"
            )

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.block or self.sequence

    @property
    def per_block(self) -> int:
        """Windows of a block."""
        return self.block_tokens // self.sequence

    @property
    def windows(self) -> int:
        """Number of windows in the split; the last one needs a token after it."""
        return max(0, (self.tokens - 1) // self.block_tokens) * self.per_block

    @property
    def steps_per_epoch(self) -> int:
        """Number of whole global batches in an epoch; up to global_batch - 1 windows are left over."""
        return self.windows // self.global_batch

    def position(self, step: int) -> tuple[int, int]:
        """Return (epoch, windows of its order already visited) before a step."""
        if step < self.first_step:
            raise DataError(f"there is no step {step}: steps count from {self.first_step}")
        steps = step - self.first_step
        left = max(0, self.windows - self.first_place) // self.global_batch
        if steps < left:
            return self.first_epoch, self.first_place + steps * self.global_batch
        epochs, steps = divmod(steps - left, self.steps_per_epoch)
        return self.first_epoch + 1 + epochs, steps * self.global_batch

    def going_on_from(self, step: int, epoch: int, place: int) -> Sampler:
        """Return a sampler whose batches begin at this step and window of an epoch's order."""
        return replace(self, first_step=step, first_epoch=epoch, first_place=place)

    def batch(self, step: int) -> npt.NDArray[np.int64]:
        """Return the windows of a step's whole global batch, [global_batch]."""
        epoch, place = self.position(step)
        blocks, within = np.divmod(np.arange(place, place + self.global_batch), self.per_block)
        ordered = permute(blocks, self.windows // self.per_block, key=(self.seed << 32) + epoch)
        return ordered * self.per_block + within

    def shard(self, step: int, dp_rank: int, dp_size: int) -> npt.NDArray[np.int64]:
        """Return the windows of one data-parallel rank in a step.

        Shares are as equal as `partition.bounds` makes them: if the size does not divide the batch, the mean
        of the ranks' means is not the mean over the batch.
        """
        if not 0 <= dp_rank < dp_size:
            raise DataError(f"dp_rank={dp_rank} is not a rank of a communicator of size {dp_size}")
        start, stop = bounds(self.global_batch, dp_size)[dp_rank]
        return self.batch(step)[start:stop]
