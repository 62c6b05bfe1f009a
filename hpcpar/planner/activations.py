"""Bytes of activations that a transformer layer keeps from forward for backward.

`Technique`: a GPT layer by the formulas of the paper, 2-byte values and 1-byte masks:

    none               sbh (34 + 5as/h)
    TP                 sbh (10 + 24/t + 5as/(ht))
    TP+SP              sbh/t (34 + 5as/h)
    TP+selective       sbh (10 + 24/t)
    TP+SP+selective    34 sbh/t
    full               2 sbh

s sequence, b microbatch, h hidden, a heads, t tensor-parallel ranks:

    inputs of the two norms                    2 · 2 sbh  ╮ between the blocks: 10 sbh,
    inputs of the QKV product and of h → 4h    2 · 2 sbh  │ divided by t under sequence parallelism only
    masks of the two dropouts                  2 · sbh    ╯
    Q, K, V, and the projection's input        8 sbh      ╮ within the blocks: 24 sbh, divided by t
    GELU's input and output                    16 sbh     ╯
    softmax's output, dropped and the mask     5 as²b     attention core: divided by t

`llama_layer_nbytes`: a Llama layer as implemented here, to the byte.

source   Korthikanti et al. 2022, arXiv 2205.05198, sections 4 and 5, table 2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hpcpar.planner.shapes import LlamaConfig, RecomputeMode

ActivationKind = Literal["layer's input", "between the blocks", "within the blocks", "attention core"]

ACTIVATION_KINDS: tuple[ActivationKind, ...] = get_args(ActivationKind)


@dataclass(frozen=True)
class LayerShape:
    """Sizes s, b, h and a of the whole layer."""

    sequence: int
    batch: int
    hidden: int
    heads: int

    @property
    def sbh(self) -> int:
        return self.sequence * self.batch * self.hidden

    @property
    def core_nbytes(self) -> int:
        """Bytes of the attention core: 5as²b."""
        return 5 * self.heads * self.sequence**2 * self.batch


@dataclass(frozen=True)
class Technique:
    """A row of the paper's table 2: how a layer is divided, and what is recomputed."""

    formula: str
    is_divided: bool
    sequence_parallel: bool
    recompute: RecomputeMode

    def size(self, tp: int) -> int:
        """Return the number of ranks that share a layer, of `tp` that there are."""
        return tp if self.is_divided else 1

    def parts(self, shape: LayerShape, tp: int) -> dict[ActivationKind, float]:
        """Return the bytes on each of the ranks, by kind."""
        return layer_parts(
            shape, self.size(tp), sequence_parallel=self.sequence_parallel, recompute=self.recompute
        )

    def nbytes(self, shape: LayerShape, tp: int) -> float:
        """Return the bytes on each of the ranks."""
        return sum(self.parts(shape, tp).values())


TECHNIQUES = {
    "none": Technique("sbh(34 + 5as/h)", False, False, "none"),
    "TP": Technique("sbh(10 + 24/t + 5as/(ht))", True, False, "none"),
    "TP+SP": Technique("sbh/t(34 + 5as/h)", True, True, "none"),
    "TP+selective": Technique("sbh(10 + 24/t)", True, False, "selective"),
    "TP+SP+selective": Technique("34sbh/t", True, True, "selective"),
    "full": Technique("2sbh", True, False, "full"),
}
"""The paper's table, in its order."""


def layer_nbytes(
    shape: LayerShape, tp: int = 1, *, sequence_parallel: bool = False, recompute: RecomputeMode = "none"
) -> float:
    """Return the bytes that a GPT layer keeps on each rank.

    Full recomputation keeps the layer's input, of which a rank has a shard under sequence parallelism.
    """
    return sum(layer_parts(shape, tp, sequence_parallel=sequence_parallel, recompute=recompute).values())


def layer_parts(
    shape: LayerShape, tp: int = 1, *, sequence_parallel: bool = False, recompute: RecomputeMode = "none"
) -> dict[ActivationKind, float]:
    """Return the terms of `layer_nbytes` by kind."""
    of_sequence = tp if sequence_parallel else 1
    if recompute == "full":
        return {"layer's input": 2 * shape.sbh / of_sequence}
    parts: dict[ActivationKind, float] = {
        "between the blocks": 10 * shape.sbh / of_sequence,
        "within the blocks": 24 * shape.sbh / tp,
    }
    if recompute == "none":
        parts["attention core"] = shape.core_nbytes / tp
    return parts


def llama_layer_nbytes(
    config: LlamaConfig,
    batch: int,
    sequence: int,
    *,
    itemsize: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    gather_again: bool = False,
    mode: RecomputeMode = "none",
    etp: int | None = None,
    expert_load: float = 1.0,
) -> int:
    """Return the bytes that each of `tp` ranks keeps for a Llama layer without dropout.

    B batch, S sequence, T = B·S tokens, H hidden, F ffn, A heads, K key-value heads, D head size; t ranks,
    T' = T/t under sequence parallelism, else T. Values of 4 or 8 bytes; a fused attention kernel.

        two norms        input, normalized input, 1/σ                        2·(2·T'H + T')
        two inputs       of queries, keys, values; of gate and up            2·TH, or 2·T'H gathered again
        attention        queries and output; keys and values                 2·T·AD/t + 2·T·KD/t
                         the logarithms of softmax's denominators            T·A/t
        their norms      input, normalized input, 1/σ                        2·T·(A + K)D/t + T·(A + K)/t
        feed-forward     gate, silu(gate), up, their product                 4·T·F/t

    With experts the model's last layer is taken: E experts of width m, k for a token, with all tokens kept
    and no losses. Each is split over `etp` ranks, those of tp where it is None, which mix T" = T·etp/t tokens
    and route T° = min(T', T"). In place of gate and up's input and of the feed-forward there are

        router           input, scores, weights; before they are renormalised; int64 numbers of 8 bytes
                                                                T°H + T°·E + T"·k; T°·(k + 1); T°·k
        experts          rows, gate, silu(gate), up, their product, outputs   T"kL·H + 4·T"kL·m/etp + T"k·H
        shared expert    as a feed-forward, and its input where that is gathered

    L           expert_load: rows that come to this rank's experts, over those of its tokens
    selective   without the logarithms (a kernel that is not fused would keep S values for each of them)
    full        the layer's input: T'H
    norms of queries and keys are there with a qk_norm; of all heads together they have one 1/σ for a token

    The rotary tables, 2·S·D/2 values, are kept once for all layers.
    """
    tokens = batch * sequence
    own_tokens = tokens // tp if sequence_parallel else tokens
    hidden = config.hidden_size
    if mode == "full":
        return own_tokens * hidden * itemsize
    norms = 2 * (2 * own_tokens * hidden + own_tokens)
    inputs = 2 * (own_tokens if gather_again else tokens) * hidden
    queries = tokens * config.heads // tp * config.head_width
    key_values = tokens * max(1, config.key_value_heads // tp) * config.head_width
    logarithms = 0 if mode == "selective" else tokens * config.heads // tp
    attention = 2 * queries + 2 * key_values + logarithms
    if config.qk_norm != "none":
        heads = (queries + key_values) // config.head_width
        attention += 2 * (queries + key_values) + (2 * tokens if config.qk_norm == "all" else heads)
    experts = config.experts_of(config.layers - 1)
    if experts is None:
        feed_forward = 4 * tokens * config.ffn_width // tp
        return (norms + inputs + attention + feed_forward) * itemsize
    k, etp = experts.per_token, etp or tp
    routed = min(own_tokens, tokens * etp // tp)
    entered = inputs // 2 + routed * hidden
    if experts.shared_ffn_size and tokens > routed and not gather_again:
        entered += tokens * hidden
    own_rows = tokens * k * etp // tp
    rows = round(expert_load * own_rows)
    router = routed * experts.count + own_rows + (routed * (k + 1) if experts.renormalise else 0)
    mixture = router + (rows + own_rows) * hidden + 4 * rows * experts.ffn_size // etp
    mixture += 4 * tokens * experts.shared_ffn_size // tp
    numbers = 8 * routed * k
    return (norms + entered + attention + mixture) * itemsize + numbers


def llama_ends_nbytes(
    config: LlamaConfig,
    batch: int,
    sequence: int,
    *,
    itemsize: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    embeds: bool = True,
    heads: bool = True,
) -> int:
    """Return the bytes that each of `tp` ranks keeps of one microbatch outside the layers.

    embeds   tokens, int64                                        8·T
    heads    final norm: input, normalized input, 1/σ             2·T'H + T'
             projection: its input                                TH
             loss: log-probabilities in float32, targets          4·T·V/t + 8·T bytes

    Letters as in `llama_layer_nbytes`.
    """
    tokens = batch * sequence
    own_tokens = tokens // tp if sequence_parallel else tokens
    nbytes = 8 * tokens if embeds else 0
    if heads:
        values = 2 * own_tokens * config.hidden_size + own_tokens + tokens * config.hidden_size
        nbytes += itemsize * values + 4 * tokens * -(-config.vocab_size // tp) + 8 * tokens
    return nbytes
