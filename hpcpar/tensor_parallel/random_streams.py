"""Random streams of tensor-parallel layers: the same on all ranks, or different.

    same        dropout of tensors that every rank holds      tp rank 0 and 1:  0.27  0.91  0.44 …
    different   dropout of a rank's own heads, or shard      tp rank 0:  0.63  0.08 …    rank 1:  0.35  0.77 …

Streams have generators of their own and never use the process's default one: nothing else draws from them,
and ranks may be threads of one process.
source   Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053, appendix B.2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from hpcpar.autograd.recompute import require_set_back
from hpcpar.errors import CheckpointError
from hpcpar.seeds import parameter_seed

Stream = Literal["same", "different"]

STREAMS: tuple[Stream, ...] = ("same", "different")


class RandomStreams:
    """Two generators of a tensor-parallel rank.

    same        equal numbers on all tp ranks, as long as all draw alike
    different   other numbers on each tp rank
    replica     number of the dp rank or stage: ranks with another one draw other numbers from both
    """

    def __init__(
        self, seed: int, tp_rank: int, device: torch.device | str = "cpu", *, replica: int = 0
    ) -> None:
        self.same = _generator(f"same/{replica}", seed, device)
        self.different = _generator(f"different/{replica}/{tp_rank}", seed, device)

    def generator(self, stream: Stream) -> torch.Generator:
        """Return the generator to draw from; OperationError where recomputation would draw other numbers."""
        require_set_back(self)
        return self.same if stream == "same" else self.different

    def seed(self, stream: Stream) -> int:
        """Draw the seed of numbers that depend on a place: see `hpcpar.autograd.random_by_place`."""
        generator = self.generator(stream)
        drawn = torch.randint(2**63 - 1, (), generator=generator, device=generator.device)
        return int(drawn)

    def state_dict(self) -> dict[str, Tensor]:
        """Copy the states of both as bytes: 5 kB each on the CPU, 16 bytes on a GPU."""
        return {stream: getattr(self, stream).get_state() for stream in STREAMS}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state of `state_dict`.

        errors   CheckpointError if it is not of two streams
        """
        if set(state) != set(STREAMS):
            raise CheckpointError(
                f"the state of the random streams has {', '.join(sorted(state)) or 'nothing'}; "
                f"it should have {' and '.join(STREAMS)}, as RandomStreams.state_dict() gives"
            )
        for stream in STREAMS:
            getattr(self, stream).set_state(state[stream])


def _generator(name: str, seed: int, device: torch.device | str) -> torch.Generator:
    return torch.Generator(device).manual_seed(parameter_seed(f"random_streams/{name}", seed))
