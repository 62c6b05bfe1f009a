"""Activations that a transformer layer keeps for backward, by the paper's formulas: integers in, bytes out.

    none               sbh (34 + 5as/h)
    TP                 sbh (10 + 24/t + 5as/(ht))
    TP+SP              sbh/t (34 + 5as/h)
    TP+selective       sbh (10 + 24/t)
    TP+SP+selective    34 sbh/t
    full               2 sbh

s sequence, b microbatch, h hidden, a heads, t tensor-parallel ranks; values of two bytes, masks of one:

    inputs of the two norms                    2 · 2 sbh  ╮ between the blocks: 10 sbh,
    inputs of the QKV product and of h → 4h    2 · 2 sbh  │ divided by t under sequence parallelism only
    masks of the two dropouts                  2 · sbh    ╯
    Q, K, V, and the projection's input        8 sbh      ╮ within the blocks: 24 sbh, divided by t
    GELU's input and output                    16 sbh     ╯
    softmax's output, dropped and the mask     5 as²b     attention core: divided by t

source   Korthikanti et al. 2022, arXiv 2205.05198, sections 4 and 5, table 2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from hpcpar.autograd.recompute import Mode


Part = Literal["layer's input", "between the blocks", "within the blocks", "attention core"]

PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class LayerShape:
    """s, b, h and a of the whole layer."""

    sequence: int
    batch: int
    hidden: int
    heads: int

    @property
    def sbh(self) -> int:
        return self.sequence * self.batch * self.hidden

    @property
    def core_nbytes(self) -> int:
        """Of the attention core: 5as²b."""
        return 5 * self.heads * self.sequence**2 * self.batch


@dataclass(frozen=True)
class Way:
    """A column of the paper's table: who shares a layer, and what is computed anew."""

    formula: str
    is_divided: bool
    sequence_parallel: bool
    recompute: Mode

    def size(self, tp: int) -> int:
        """Ranks that share a layer, where `tp` would."""
        return tp if self.is_divided else 1

    def parts(self, shape: LayerShape, tp: int) -> dict[Part, float]:
        """Bytes on each of the ranks, by what they are."""
        return layer_parts(
            shape, self.size(tp), sequence_parallel=self.sequence_parallel, recompute=self.recompute
        )

    def nbytes(self, shape: LayerShape, tp: int) -> float:
        """Bytes on each of the ranks."""
        return sum(self.parts(shape, tp).values())


WAYS = {
    "none": Way("sbh(34 + 5as/h)", False, False, "none"),
    "TP": Way("sbh(10 + 24/t + 5as/(ht))", True, False, "none"),
    "TP+SP": Way("sbh/t(34 + 5as/h)", True, True, "none"),
    "TP+selective": Way("sbh(10 + 24/t)", True, False, "selective"),
    "TP+SP+selective": Way("34sbh/t", True, True, "selective"),
    "full": Way("2sbh", True, False, "full"),
}
"""The paper's table, in its order."""


def layer_nbytes(
    shape: LayerShape, tp: int = 1, *, sequence_parallel: bool = False, recompute: Mode = "none"
) -> float:
    """Bytes that a layer keeps on each rank from forward to backward.

    With full recomputation it is the layer's input, of which a rank has a shard under sequence parallelism.
    """
    return sum(layer_parts(shape, tp, sequence_parallel=sequence_parallel, recompute=recompute).values())


def layer_parts(
    shape: LayerShape, tp: int = 1, *, sequence_parallel: bool = False, recompute: Mode = "none"
) -> dict[Part, float]:
    """What `layer_nbytes` consists of."""
    of_sequence = tp if sequence_parallel else 1
    if recompute == "full":
        return {"layer's input": 2 * shape.sbh / of_sequence}
    parts: dict[Part, float] = {
        "between the blocks": 10 * shape.sbh / of_sequence,
        "within the blocks": 24 * shape.sbh / tp,
    }
    if recompute == "none":
        parts["attention core"] = shape.core_nbytes / tp
    return parts
