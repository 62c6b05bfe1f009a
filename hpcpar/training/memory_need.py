"""Memory that a run needs for its model state, and what there is: known before anything is allocated.

    of Φ parameters on a rank, its share of tp and pp       float32      16 bits
    parameters              ZeRO-3: over dp                 4            2
    gradients               ZeRO-2: over dp                 4            2
    optimizer state         ZeRO-1: over dp                 4 + 4        4 + 4 + 4 (master weights), AdamW
    building the model      but for ZeRO-3                  4            4, before it is rounded

Activations come on top; so what does not fit here fits nowhere.
source   Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, section 3
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hpcpar.data_parallel.memory import GRADIENTS, OPTIMIZER, PARAMETERS, shares
from hpcpar.data_parallel.process_memory import available_on_node, available_to_process
from hpcpar.errors import ConfigError
from hpcpar.mesh import Mesh
from hpcpar.models import LlamaConfig
from hpcpar.training.config import Config
from hpcpar.units import format_nbytes

BUILDING = "building the model"


@dataclass(frozen=True)
class Need:
    """Bytes of one rank, by purpose, in the memory of its node and of its GPU."""

    host: Mapping[str, int]
    device: Mapping[str, int]

    @classmethod
    def of(
        cls, config: Config, sizes: LlamaConfig, *, dp: int, tp: int, pp: int, sharers: int, on_gpu: bool
    ) -> Need:
        """That of each rank, taken to have an equal share of the layers.

        sharers   ranks of the node that have parameters in common; 1: each has its own
        """
        section, parameters = config.optimizer, sizes.parameters() // (tp * pp)
        whole = 8 if config.train.precision == "float64" else 4
        kept = 2 if config.train.precision in ("bfloat16", "float16") else whole
        moment = whole if section.moments is None else 2
        moments = 2 * moment if section.name == "adamw" else moment if section.momentum else 0
        state = {
            PARAMETERS: parameters * kept // sharers,
            GRADIENTS: parameters * (kept if section.reduction is None else whole),
            OPTIMIZER: parameters * (moments + (whole if kept < whole else 0)),
        }
        for what in state:
            if what != PARAMETERS or sharers == 1:
                state[what] //= shares(what, section.zero_stage, dp)
        building = 0 if section.zero_stage == 3 else parameters * whole
        apart = state.pop(OPTIMIZER) if section.offload is not None else 0
        host = {OPTIMIZER: apart} if section.offload == "cpu" and apart else {}
        if on_gpu:
            return cls({**host, BUILDING: building} if building else host, state)
        host = {**state, **host}
        return cls({BUILDING: building} if building > sum(host.values()) else host, {})


def require_memory(config: Config, vocabulary: int, mesh: Mesh, device: torch.device) -> None:
    """ConfigError on every rank where the model state is larger than some node's memory. Collective."""
    sizes, world = config.model_config_for(vocabulary), mesh.world
    nodes = list(world.nodes)
    local = nodes.count(nodes[world.rank])
    need = Need.of(
        config,
        sizes,
        dp=mesh.dp.size,
        tp=mesh.tp.size,
        pp=mesh.pp.size,
        sharers=local if config.optimizer.shared_parameters else 1,
        on_gpu=device.type == "cuda",
    )
    lacks = [
        _lack(need.host, local, available_on_node(), f"for all {local} of its node, which has"),
        _lack(need.host, 1, available_to_process(), "in all, and may have (ulimit -v)"),
    ]
    if device.type == "cuda":
        lacks.append(
            _lack(need.device, 1, torch.cuda.mem_get_info(device)[0], f"in all, and its {device} has")
        )
    told = world.allgather_object(next((lack for lack in lacks if lack), None))
    found = next((f"rank {rank} needs {lack}" for rank, lack in enumerate(told) if lack), None)
    if found is not None:
        raise ConfigError(
            f"model.preset = {config.model.preset!r}, {sizes.parameters():,} parameters, does not fit: "
            f"{found}, and activations come on top. Take more ranks or nodes with optimizer.zero_stage=3 or "
            "mesh.tp, 16 bits (train.precision=bfloat16), optimizer.offload, or a smaller model"
        )


def _lack(need: Mapping[str, int], ranks: int, available: int | None, who: str) -> str | None:
    """The text of what is needed and of what there is, where that is less."""
    total = ranks * sum(need.values())
    if available is None or total <= available:
        return None
    purposes = ", ".join(f"{format_nbytes(nbytes)} for {what}" for what, nbytes in need.items() if nbytes)
    return f"{purposes}: {format_nbytes(total)} {who} {format_nbytes(available)}"
