"""Activations of a transformer layer, measured by autograd's hooks beside the paper's formulas.

All ranks are threads of this process: what is counted is what autograd keeps on each, not time.
source   Korthikanti et al. 2022, arXiv 2205.05198, table 2
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel.saved_activations import watch_activations
from hpcpar.errors import LayoutError
from hpcpar.models.gpt_layer import GptLayer
from hpcpar.planner.activations import TECHNIQUES, ActivationKind, LayerShape, Technique
from hpcpar.tensor_parallel.axis import TensorParallel
from hpcpar.tensor_parallel.random_streams import RandomStreams
from hpcpar.tensor_parallel.split import require_divisible

DROPOUT = 0.1
"""Any that is not 0 has masks."""

BAR_CELLS = 32

ROW = "{:<16}  {:<26}  {:>14}  {:>14}  {:>7}  {}"


@dataclass(frozen=True)
class MeasuredActivations:
    """Bytes that a layer saves from forward to backward, on the rank that saves most.

    nbytes   measured
    parts    by the formula
    """

    way: str
    formula: str
    nbytes: int
    parts: dict[ActivationKind, float]

    @property
    def formula_nbytes(self) -> float:
        return sum(self.parts.values())

    @property
    def beyond(self) -> float:
        """Difference from the formula, relative to it."""
        return self.nbytes / self.formula_nbytes - 1


def measure(shape: LayerShape, tp: int) -> list[MeasuredActivations]:
    """Measure every technique of the paper's table.

    errors   LayoutError for a shape of which `tp` ranks cannot have equal parts
    """
    require_divisible(shape.heads, tp, "heads")
    require_divisible(shape.sequence, tp, "sequence")
    if shape.hidden % shape.heads:
        raise LayoutError(f"hidden={shape.hidden} does not divide among heads={shape.heads}")
    return [
        MeasuredActivations(name, way.formula, kept_nbytes(shape, way, tp), way.parts(shape, tp))
        for name, way in TECHNIQUES.items()
    ]


def kept_nbytes(shape: LayerShape, way: Technique, tp: int) -> int:
    """Measure a layer in bfloat16, between its forward and its backward."""

    def work(comm: Communicator) -> int:
        axis = TensorParallel(
            comm, sequence_parallel=way.sequence_parallel, gather_again=way.sequence_parallel
        )
        layer = GptLayer(
            shape.hidden,
            shape.heads,
            axis,
            RandomStreams(0, comm.rank),
            attention_dropout=DROPOUT,
            hidden_dropout=DROPOUT,
            mode=way.recompute,
        ).bfloat16()
        sequence = shape.sequence // comm.size if way.sequence_parallel else shape.sequence
        x = torch.ones(shape.batch, sequence, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
        with watch_activations(layer) as activations:
            output = layer(x)
            kept = activations.nbytes
        del output  # until here, or autograd would keep nothing
        return kept

    return max(run_loopback(way.size(tp), work))


def title(shape: LayerShape, tp: int) -> str:
    return (
        f"Kept by a transformer layer from forward to backward: bfloat16, s={shape.sequence} b={shape.batch} "
        f"h={shape.hidden} a={shape.heads} (5as/h = {shape.core_nbytes / shape.sbh:g}), t={tp}"
    )


def table(found: list[MeasuredActivations]) -> str:
    """Format a line for each technique, with the measured bytes as a bar."""
    most = max(each.nbytes for each in found)
    lines = [ROW.format("", "formula", "formula bytes", "measured bytes", "beyond", "").rstrip()]
    lines += [
        ROW.format(
            each.way,
            each.formula,
            f"{each.formula_nbytes:,.0f}",
            f"{each.nbytes:,}",
            f"{each.beyond:+.2%}",
            "█" * max(1, round(BAR_CELLS * each.nbytes / most)),
        )
        for each in found
    ]
    return "\n".join(lines)
