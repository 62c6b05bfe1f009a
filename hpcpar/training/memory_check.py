"""Refuse a run whose model state is larger than the memory that there is, before anything is allocated.

Activations come on top; so what does not fit here fits nowhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from hpcpar.data_parallel.process_memory import available_on_node, available_to_process
from hpcpar.errors import ConfigError
from hpcpar.mesh import Layout, Mesh
from hpcpar.models import LlamaConfig
from hpcpar.planner.memory import MemoryNeed, StateWidths, model_state_nbytes
from hpcpar.training.config import Config
from hpcpar.units import format_nbytes


def memory_need(
    config: Config, sizes: LlamaConfig, layout: Layout, *, node_sharers: int, on_gpu: bool
) -> MemoryNeed:
    """Return the bytes of model state on each rank, taken to have an equal share of layers and experts.

    node_sharers   ranks of a node that hold the parameters in common; 1 = each has its own
    """
    section, experts = config.optimizer, sizes.expert_parameters()
    stage, ways = section.zero_stage, layout.tp * layout.pp
    own_experts = experts // (layout.ep * layout.etp * layout.pp)
    matrices = (sizes.layer_matrix_parameters() - experts) // ways
    others = (sizes.parameters() - experts) // ways - matrices
    of_matrices, of_others = (state_widths(config, moments) for moments in section.moment_counts)
    state: Counter[str] = Counter()
    for parameters, widths, ranks, sharers in (
        (matrices, of_matrices, layout.dp * layout.cp, node_sharers),
        (others, of_others, layout.dp * layout.cp, node_sharers),
        (own_experts, of_matrices, layout.edp, 1),
    ):
        state.update(model_state_nbytes(parameters, widths, stage=stage, ranks=ranks, node_sharers=sharers))
    built = (matrices + others + own_experts) * of_matrices.building
    return MemoryNeed.of(
        state,
        building_nbytes=0 if stage == 3 else built,
        offload=section.offload,
        on_gpu=on_gpu,
    )


def state_widths(config: Config, moments: int) -> StateWidths:
    """Return the bytes of model state per parameter, with so many moments of the optimizer.

    Below stage 2 gradients stay in their own type, and only what travels is of the type of their sums.
    """
    keeps_sums = config.optimizer.zero_stage >= 2
    return StateWidths.of(
        config.train.precision,
        moments=moments,
        moment_dtype=config.optimizer.moments,
        sum_dtype=config.optimizer.reduction if keeps_sums else None,
    )


def require_memory(config: Config, vocabulary: int, mesh: Mesh, device: torch.device) -> None:
    """Raise ConfigError on every rank where the model state exceeds some node's memory. Collective."""
    sizes, world = config.model_config_for(vocabulary), mesh.world
    nodes = list(world.nodes)
    local = nodes.count(nodes[world.rank])
    need = memory_need(
        config,
        sizes,
        mesh.layout,
        node_sharers=local if config.optimizer.shared_parameters else 1,
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
            f"{config.model}, {sizes.parameters():,} parameters, does not fit: "
            f"{found}, and activations come on top. Take more ranks or nodes with optimizer.zero_stage=3, "
            "mesh.tp or mesh.ep, 16 bits (train.precision=bfloat16), optimizer.offload, or a smaller model"
        )


def _lack(need: Mapping[str, int], ranks: int, available: int | None, who: str) -> str | None:
    """Describe the need and the available memory, where that is less; else None."""
    total = ranks * sum(need.values())
    if available is None or total <= available:
        return None
    purposes = ", ".join(f"{format_nbytes(nbytes)} for {what}" for what, nbytes in need.items() if nbytes)
    return f"{purposes}: {format_nbytes(total)} {who} {format_nbytes(available)}"
