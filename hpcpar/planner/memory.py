"""Bytes of the model state on one rank, by stage of ZeRO: parameters, gradients, optimizer state.

    stage   parameters   gradients   optimizer state     mixed-precision Adam, p ranks, Φ parameters
    0       all          all         all                 2Φ + 2Φ + 12Φ = 16Φ bytes
    1       all          all         its shard           4Φ + 12Φ/p
    2       all          its shard   its shard           2Φ + 14Φ/p
    3       its shard    its shard   its shard           16Φ/p

Activations come on top (`planner.activations`).
source   Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, sections 3 and 5, figure 1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from hpcpar.planner.shapes import ITEMSIZE

PARAMETERS, GRADIENTS, OPTIMIZER = STATE = ("parameters", "gradients", "optimizer state")
"""The three parts of the model state."""

SHARDED_FROM = {PARAMETERS: 3, GRADIENTS: 2, OPTIMIZER: 1}
"""First stage in which a rank holds only its shard of a part."""

MOMENTS = {"adamw": (2, 2), "muon": (1, 2), "sgd": (1, 1)}
"""Moments for each parameter by optimizer: of the layers' matrices, and of all others."""

BUILDING = "building the model"
"""Parameters in the type in which they are initialized, before they are rounded and sharded."""


def shards(part: str, stage: int, ranks: int | Fraction) -> int | Fraction:
    """Return the number of shards into which a part of the model state is divided."""
    return ranks if stage >= SHARDED_FROM[part] else 1


@dataclass(frozen=True, slots=True)
class StateWidths:
    """Bytes of model state per parameter, before sharding."""

    parameters: int
    gradients: int
    optimizer: int
    building: int

    @classmethod
    def of(
        cls, precision: str, *, moments: int, moment_dtype: str | None = None, sum_dtype: str | None = None
    ) -> StateWidths:
        """Return the widths for a type of parameters; 16-bit types have float32 master weights.

                          parameters   gradients   optimizer state (AdamW)     building
            float32       4            4           4 + 4                       4
            16 bits       2            2           4 + 4 + 4 (masters)         4

        moments        per parameter: 2 for Adam, 1 for SGD with momentum
        moment_dtype   None = as the master weights
        sum_dtype      in which gradients are kept; None = as the parameters
        """
        width = ITEMSIZE[precision]
        master = max(width, ITEMSIZE["float32"])
        moment = master if moment_dtype is None else ITEMSIZE[moment_dtype]
        return cls(
            parameters=width,
            gradients=width if sum_dtype is None else master,
            optimizer=moments * moment + (master if width < master else 0),
            building=master,
        )


def model_state_nbytes(
    parameters: int, widths: StateWidths, *, stage: int, ranks: int | Fraction, node_sharers: int = 1
) -> dict[str, int]:
    """Return the bytes of each part of the model state on one of `ranks` data-parallel ranks.

    parameters     Φ of this rank, which with tensor or pipeline parallelism is its part of the model
    ranks          a fraction where shards differ: Φ over the largest of them
    node_sharers   ranks of a node that hold the parameters in common; 1 = each has its own
    """
    state = {
        PARAMETERS: parameters * widths.parameters // node_sharers,
        GRADIENTS: parameters * widths.gradients,
        OPTIMIZER: parameters * widths.optimizer,
    }
    return {
        part: nbytes if part == PARAMETERS and node_sharers > 1 else nbytes // shards(part, stage, ranks)
        for part, nbytes in state.items()
    }


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that one rank needs, by purpose, in the memory of its node and of its GPU."""

    host: Mapping[str, int]
    device: Mapping[str, int]

    @classmethod
    def of(
        cls, state: Mapping[str, int], *, building_nbytes: int, offload: str | None, on_gpu: bool
    ) -> MemoryNeed:
        """Return where the model state lies.

        state             by part, from `model_state_nbytes`
        building_nbytes   of the parameters while they are initialized on the host; 0 = nowhere whole
        offload           of the optimizer state: "cpu", a directory, or None
        """
        kept = dict(state)
        offloaded = kept.pop(OPTIMIZER) if offload is not None else 0
        host = {OPTIMIZER: offloaded} if offload == "cpu" and offloaded else {}
        if on_gpu:
            return cls({**host, BUILDING: building_nbytes} if building_nbytes else host, kept)
        host = {**kept, **host}
        return cls({BUILDING: building_nbytes} if building_nbytes > sum(host.values()) else host, {})
