"""Windows of a token stream as tensors. Shape letters: B batch, S sequence."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from hpcpar.data.token_files import TokenStream


class Dataset:
    """A token stream cut into windows of S tokens, each with the token that follows it.

    window w   tokens w·S … w·S + S - 1, targets w·S + 1 … w·S + S
    """

    def __init__(self, stream: TokenStream, sequence: int) -> None:
        self.stream = stream
        self.sequence = sequence

    @property
    def windows(self) -> int:
        """Number of whole windows with a following token."""
        return max(0, (len(self.stream) - 1) // self.sequence)

    def batch(self, windows: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Return (tokens, targets) of these windows: int64, [B, S] each; no window gives [0, S].

        Both are views of one tensor [B, S + 1]: do not write to them.
        """
        rows = [self._row(int(window)) for window in windows]
        joined = np.stack(rows) if rows else np.empty((0, self.sequence + 1), dtype=np.int64)
        both = torch.from_numpy(joined)
        return both[:, :-1], both[:, 1:]

    def spread(self, count: int) -> list[int]:
        """Choose up to `count` windows at equal distances over the whole stream, for a held-out loss."""
        count = min(count, self.windows)
        return [place * self.windows // count for place in range(count)]

    def _row(self, window: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        if not 0 <= window < self.windows:
            raise IndexError(
                f"window {window} asked for, but {len(self.stream)} tokens give windows 0 … "
                f"{self.windows - 1} of {self.sequence} tokens"
            )
        start = window * self.sequence
        return self.stream.read(start, start + self.sequence + 1).astype(np.int64)
