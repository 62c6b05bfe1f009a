"""Layouts and strategies that the trainer refuses, by the same rules; and one that only wastes a machine.

    tp       divides heads and ffn_size; kv_heads are divided, or shared by equal numbers of ranks
    tp       stays within a node, unless it is asked for: its traffic is on every layer's critical path
    pp       every stage has a layer
    ep       every rank has an expert; dense models have none
    dp       divides the global batch
    cp, tp   divide the sequence where ranks share it
    ZeRO     stages 2 and 3 without schedules that split the backward

A refusal has a kind, by which `hpcpar plan` sums up, and a reason with what was found.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcpar.planner.cluster import Cluster
from hpcpar.planner.layout import Layout
from hpcpar.planner.model_shapes import ModelShape

SPLIT_BACKWARD = ("zb-h1", "zb-h2", "zb-v", "dualpipe-v", "automatic")
"""Schedules with two backwards for each microbatch, of which ZeRO-2 would send all gradients."""


@dataclass(frozen=True)
class Refusal:
    """Why a layout cannot be. `kind` is one of a few words; `reason` has the figures."""

    kind: str
    reason: str


def layout_refusal(
    model: ModelShape,
    cluster: Cluster,
    layout: Layout,
    *,
    global_batch: int,
    sequence: int,
    across_nodes: bool = False,
) -> Refusal | None:
    """Return why no strategy with this layout can be; None where one can.

    across_nodes   tp may cross the node boundary
    """
    return (
        _axes_refusal(model, cluster, layout.tp, layout.pp, across_nodes)
        or _batch_refusal(layout, global_batch, sequence)
        or _experts_refusal(model, layout)
    )


def _axes_refusal(
    model: ModelShape, cluster: Cluster, tp: int, pp: int, across_nodes: bool
) -> Refusal | None:
    """Return why tp or pp cannot be of these degrees."""
    if pp > model.layers:
        return Refusal(
            "layers",
            f"pp={pp} stages, but {model.name} has {model.layers} layers; take pp={model.layers} or less",
        )
    if tp == 1:
        return None
    if model.heads % tp:
        return Refusal("heads", f"heads={model.heads} do not divide among tp={tp} ranks")
    if model.kv_heads % tp and tp % model.kv_heads:
        return Refusal(
            "heads", f"kv_heads={model.kv_heads} neither divide among tp={tp} ranks nor divide them"
        )
    if model.qk_norm == "all":
        return Refusal(
            "heads", f"qk_norm='all' normalises all heads together, and tp={tp} ranks have some each"
        )
    experts = model.experts
    if (experts is None or experts.first_dense) and model.ffn_size % tp:
        return Refusal("ffn", f"ffn_size={model.ffn_size} does not divide among tp={tp} ranks")
    if experts is not None and experts.shared_ffn_size % tp:
        return Refusal(
            "ffn", f"experts.shared_ffn_size={experts.shared_ffn_size} does not divide among tp={tp} ranks"
        )
    if cluster.nodes > 1 and cluster.devices_per_node % tp and not across_nodes:
        return Refusal(
            "node boundary",
            f"tp={tp} crosses the node boundary: it does not divide the {cluster.devices_per_node} devices "
            f"of a node of {cluster.name}, and each layer would wait for the network; --fix tp=… asks for it",
        )
    return None


def _batch_refusal(layout: Layout, global_batch: int, sequence: int) -> Refusal | None:
    if global_batch % layout.dp:
        return Refusal(
            "batch", f"a batch of {global_batch} sequences does not divide among dp={layout.dp} ranks"
        )
    # Ranks of cp have two runs of the sequence each, so that causal attention is even.
    if layout.cp > 1 and sequence % (2 * layout.cp):
        return Refusal(
            "sequence",
            f"sequence={sequence} does not divide into the {2 * layout.cp} parts of cp={layout.cp} ranks",
        )
    return None


def _experts_refusal(model: ModelShape, layout: Layout) -> Refusal | None:
    experts = model.experts
    if experts is None:
        return (
            None
            if layout.ep == layout.etp == 1
            else Refusal("experts", f"{model.name} has no experts to divide")
        )
    if layout.ep > experts.count:
        return Refusal(
            "experts", f"ep={layout.ep} ranks are to divide {experts.count} experts, and each is to have one"
        )
    if layout.etp > 1 and experts.ffn_size % layout.etp:
        return Refusal(
            "ffn", f"experts.ffn_size={experts.ffn_size} does not divide among etp={layout.etp} ranks"
        )
    return None


def zero_refusal(layout: Layout, zero_stage: int, schedule: str) -> str | None:
    """Return why the stage of ZeRO cannot be with this pipeline; None where it can."""
    if layout.pp == 1 or zero_stage < 2:
        return None
    if schedule in SPLIT_BACKWARD:
        return f"every backward sends its gradients, and {schedule} has two for each microbatch"
    return None


def sequence_parallel_fits(layout: Layout, sequence: int) -> bool:
    """True where the ranks of tp can have equal parts of each rank's sequence."""
    return sequence % (layout.cp * layout.tp) == 0
