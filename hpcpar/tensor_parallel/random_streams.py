"""Random numbers for layers that several ranks compute together: the same on all of them, or different.

    same        dropout on what every rank holds whole       tp rank 0 and 1:  0.27  0.91  0.44 …
    different   dropout on a rank's own heads, or shard      tp rank 0:  0.63  0.08 …    rank 1:  0.35  0.77 …

Generators of their own, never the process's default one: nothing else draws from them, and ranks may be
threads of one process.
source   Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053, appendix B.2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from hpcpar.errors import CheckpointError
from hpcpar.seeds import parameter_seed

Stream = Literal["same", "different"]

STREAMS: tuple[Stream, ...] = ("same", "different")


class RandomStreams:
    """Two generators of a tensor-parallel rank.

    same        draws the same numbers on all tp ranks, as long as all draw the same
    different   draws other numbers on each
    replica     what else tells ranks apart: those with another one (another dp rank, another stage) draw
                other numbers from both
    """

    def __init__(
        self, seed: int, tp_rank: int, device: torch.device | str = "cpu", *, replica: int = 0
    ) -> None:
        self.same = _generator(f"same/{replica}", seed, device)
        self.different = _generator(f"different/{replica}/{tp_rank}", seed, device)

    def generator(self, stream: Stream) -> torch.Generator:
        return self.same if stream == "same" else self.different

    def state_dict(self) -> dict[str, Tensor]:
        """Where both stand, as bytes: copies, of 5 kB each on the CPU and 16 bytes on a GPU."""
        return {stream: self.generator(stream).get_state() for stream in STREAMS}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from where a state was taken.

        errors   CheckpointError when it is not of two streams
        """
        if set(state) != set(STREAMS):
            raise CheckpointError(
                f"the state of the random streams has {', '.join(sorted(state)) or 'nothing'}; "
                f"it should have {' and '.join(STREAMS)}, as RandomStreams.state_dict() gives"
            )
        for stream in STREAMS:
            self.generator(stream).set_state(state[stream])


def _generator(name: str, seed: int, device: torch.device | str) -> torch.Generator:
    return torch.Generator(device).manual_seed(parameter_seed(f"random_streams/{name}", seed))
