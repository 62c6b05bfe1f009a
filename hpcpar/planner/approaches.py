"""Approaches to parallelism that use all of so many ranks: options of a run, and the planner's estimate."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from hpcpar.errors import LayoutError
from hpcpar.planner.cluster import Cluster
from hpcpar.planner.estimate import Estimate, estimate
from hpcpar.planner.experts import Experts
from hpcpar.planner.layout import Layout
from hpcpar.planner.model_shapes import ModelShape
from hpcpar.planner.rules import layout_refusal
from hpcpar.planner.run_file import OF_TRAINER
from hpcpar.planner.strategy import Strategy

EXPERTS = ("model.experts.count=8", "model.experts.per_token=2", "model.experts.ffn_size=128")

KEY_OF = {f"{section}.{entry}": key for key, (section, entry) in OF_TRAINER.items()}
"""Keys of a strategy by the trainer's."""


@dataclass(frozen=True)
class Approach:
    """Options of a way to train a model on some ranks.

    options   of the trainer, as on its command line
    changes   parts of the program that take another form than on one rank
    """

    name: str
    options: tuple[str, ...] = ()
    changes: str = ""

    @property
    def has_experts(self) -> bool:
        """True where the model must have experts."""
        return any(option.startswith("model.experts") for option in self.options)

    def given(self) -> dict[str, Any]:
        """Return the options by key of a strategy, without those of the model."""
        found = {}
        for key, value in (option.split("=") for option in self.options if not option.startswith("model.")):
            found[KEY_OF[key]] = int(value) if value.isdigit() else value == "true"
        return found


def approaches(ranks: int) -> list[Approach]:
    """Return the ways that use all of so many ranks."""
    parts = "train.microbatch=2"
    found = [
        Approach("data parallel", (), "gradients are averaged"),
        *(
            Approach(f"ZeRO-{stage}", (f"optimizer.zero_stage={stage}",), changes)
            for stage, changes in (
                (1, "the optimizer has a shard, parameters are gathered"),
                (2, "and gradients have an owner, who sums them in each backward"),
                (3, "and each unit is gathered before its forward and its backward"),
            )
        ),
        Approach("tensor parallel", (f"mesh.tp={ranks}",), "linear layers, embedding, loss"),
        Approach(
            "tensor and sequence parallel",
            (f"mesh.tp={ranks}", "tensor_parallel.sequence_parallel=true"),
            "and norms, dropout, residuals",
        ),
        Approach(
            "pipeline", (f"mesh.pp={ranks}", parts), "the model is cut into stages, the step is a schedule"
        ),
        Approach("context parallel", (f"mesh.cp={ranks}",), "attention, positions, the order of tokens"),
    ]
    if not ranks % 4:
        axes = ("mesh.tp=2", "mesh.pp=2", parts)
        name = "2D: tp x pp" if ranks == 4 else "3D: dp x tp x pp"
        found.append(Approach(name, axes, "all that its axes change"))
    found.append(Approach("experts, data parallel", EXPERTS, "gradients are averaged"))
    found.append(
        Approach(
            "experts, expert parallel",
            (f"mesh.ep={ranks}", *EXPERTS),
            "mixtures send tokens to their experts",
        )
    )
    return found


@dataclass(frozen=True)
class Batch:
    """Batch and precision of a comparison; fields as in `Strategy`."""

    global_batch: int
    microbatch: int
    sequence: int
    precision: str

    @property
    def twice(self) -> Batch:
        """The batch with twice the sequences."""
        return replace(self, global_batch=2 * self.global_batch)


def with_experts(model: ModelShape) -> ModelShape:
    """Return the model if it has experts, or with 8 of half its ffn's width, of which a token visits 2."""
    if model.experts is not None:
        return model
    return replace(model, experts=Experts(8, 2, max(1, model.ffn_size // 2)))


def estimate_of(approach: Approach, model: ModelShape, cluster: Cluster, batch: Batch) -> Estimate:
    """Predict a step by an approach on all devices of a cluster.

    Ranks of dp have smaller microbatches where their part of the batch is smaller than one.
    errors   LayoutError where the model or the batch cannot be so divided
    """
    given = approach.given()
    degrees = {axis: given.pop(axis) for axis in ("pp", "cp", "tp", "ep") if axis in given}
    layout = Layout.fit(cluster.size, **degrees)
    refusal = layout_refusal(
        model,
        cluster,
        layout,
        global_batch=batch.global_batch,
        sequence=batch.sequence,
        across_nodes=True,
    )
    if refusal is not None:
        raise LayoutError(refusal.reason)
    own = batch.global_batch // layout.dp
    microbatch = math.gcd(own, min(batch.microbatch, given.pop("microbatch", batch.microbatch)))
    strategy = Strategy(
        layout,
        batch.global_batch,
        microbatch,
        batch.sequence,
        precision=batch.precision,
        **given,
    )
    return estimate(model, cluster, strategy)
