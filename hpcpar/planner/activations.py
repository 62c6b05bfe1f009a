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

from hpcpar.planner.experts import Experts
from hpcpar.planner.shapes import LlamaConfig, RecomputeMode
from hpcpar.planner.strategy import Strategy

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
    config: LlamaConfig, strategy: Strategy, mode: RecomputeMode = "none", expert_load: float = 1.0
) -> int:
    """Return the bytes that each rank keeps of one microbatch for a Llama layer.

    mode          what it recomputes
    expert_load   of `_mixture_nbytes`

    B batch, S sequence, T = B·S/cp tokens, H hidden, F ffn, A heads, K key-value heads, D head size; t ranks
    of tp, T' = T/t under sequence parallelism, else T. A value has x bytes, and w = max(x, 4) where float32
    or wider is computed in.

        two norms        input, normalized input, 1/σ                2·T'(H(w + x) + w)
        two inputs       of queries, keys, values; of gate and up    2·TH x, or 2·T'H x gathered again
        attention        queries and output; keys and values         2·T·AD/t x + 2·T·KD/t x
                         logarithms of softmax's denominators        T·A/t w
                         dropout, Ulysses: its output once more      T·AD/t x
                         Ulysses of u ranks: keys of a head at least 2·T·D(max(K/t, u) - K/t) x
                         cp_keep: other ranks' keys and values       2·T·D·max(K/t, u)(cp/u - 1) x
        their norms      input, normalized input, 1/σ                T(A + K)/t (D(w + x) + w)
        feed-forward     gate, silu(gate), up, their product         4·T·F/t x
        dropout          masks before both residual sums             2·T'H

    With experts the model's last layer is taken, which has them.

    selective   without the four lines from the logarithms on (a kernel that is not fused would keep S values
                in place of each logarithm)
    full        the layer's input: T'H x
    norms of queries and keys are there with a qk_norm; of all heads together they have one 1/σ for a token

    The rotary tables, 2·S·D/2 w, are kept once for all layers of a stage.
    """
    tp, item, wide = strategy.layout.tp, strategy.itemsize, max(strategy.itemsize, 4)
    tokens, own_tokens, hidden = strategy.own_tokens, _own_tokens(strategy), config.hidden_size
    if mode == "full":
        return own_tokens * hidden * item
    norms = 2 * own_tokens * (hidden * (wide + item) + wide)
    inputs = 2 * (own_tokens if strategy.gather_again else tokens) * hidden * item
    queries = tokens * config.heads // tp * config.head_width
    key_values = tokens * max(1, config.key_value_heads // tp) * config.head_width
    attention = 2 * (queries + key_values) * item
    if mode == "none":
        attention += tokens * config.heads // tp * wide
        cp, inner = strategy.layout.cp, 1
        if strategy.cp_method.startswith("ulysses"):
            inner = cp if strategy.cp_method == "ulysses" else strategy.cp_inner or cp
        # One head's output is in place as it is, and so is that of packed documents.
        if inner > 1 or (config.dropout and config.heads > tp and not strategy.packs):
            attention += queries * item
        whole = max(key_values, tokens * inner * config.head_width)
        kept = whole * (cp // inner if strategy.cp_keep else 1)
        attention += 2 * (kept - key_values) * item
    if config.qk_norm != "none":
        sums = 2 * tokens if config.qk_norm == "all" else (queries + key_values) // config.head_width
        attention += (queries + key_values) * (wide + item) + sums * wide
    if config.dropout:
        attention += 2 * own_tokens * hidden
    experts = config.experts_of(config.layers - 1)
    if experts is None:
        return norms + inputs + attention + 4 * tokens * config.ffn_width // tp * item
    return norms + inputs // 2 + attention + _mixture_nbytes(hidden, experts, strategy, expert_load)


def _mixture_nbytes(hidden: int, experts: Experts, strategy: Strategy, expert_load: float) -> int:
    """Return the bytes that are kept in place of gate and up's input and of the feed-forward.

    E experts of width m, k for a token, each split over etp ranks, which mix T" = T·etp/t
    tokens and route T° = min(T', T"). L = expert_load, rows that come to this rank's experts over those of
    its tokens: below 1 where tokens are dropped for want of capacity. M is the width of the shared expert;
    other letters as in `llama_layer_nbytes`.

        router           input, scores, weights                      (T°(H + E) + T"k) w
                         before they are renormalised; their sums    T°(k + 1) w
                         numbers, int64; its matrix where w > x      8·T°k + EH w
                         z-loss; balance loss of sequences           T°(E + 1) w; T°E w
        experts          rows, and what each keeps of them           T"kL(H + 4m/etp) x
                         their outputs                               T"k min(L, 1) H x
        shared expert    as a feed-forward                           4·T·M/t x
                         its input, where the router's is another    TH x, or T'H x gathered again
    """
    tp, item, wide = strategy.layout.tp, strategy.itemsize, max(strategy.itemsize, 4)
    etp, k = strategy.layout.etp, experts.per_token
    tokens, own_tokens = strategy.own_tokens, _own_tokens(strategy)
    routed, own_rows = min(own_tokens, tokens * etp // tp), tokens * k * etp // tp
    router = routed * (hidden + experts.count) + own_rows
    router += routed * (k + 1) if experts.renormalise else 0
    router += routed * (experts.count + 1) if experts.z_loss else 0
    router += routed * experts.count if experts.balance_loss and experts.balance_over == "sequence" else 0
    numbers = 8 * routed * k + (experts.count * hidden * wide if wide > item else 0)
    rows, outputs = round(expert_load * own_rows), round(min(expert_load, 1.0) * own_rows)
    mixed = (rows + outputs) * hidden + 4 * rows * experts.ffn_size // etp
    if experts.shared_ffn_size:
        entered = own_tokens if strategy.gather_again else tokens
        mixed += 4 * tokens * experts.shared_ffn_size // tp
        mixed += entered * hidden if wide > item or entered > routed else 0
    return router * wide + numbers + mixed * item


def llama_ends_nbytes(config: LlamaConfig, strategy: Strategy, *, embeds: bool, heads: bool) -> int:
    """Return the bytes that each rank keeps of one microbatch outside the layers.

    embeds   tokens, int64                                        8·T
    heads    final norm: input, normalized input, 1/σ             T'(H(w + x) + w)
             projection: its input                                TH x, or T'H x gathered again
             loss: log-probabilities, targets                     T·V/t w + 8·T

    Letters as in `llama_layer_nbytes`.
    """
    item, wide = strategy.itemsize, max(strategy.itemsize, 4)
    tokens, hidden = strategy.own_tokens, config.hidden_size
    nbytes = 8 * tokens if embeds else 0
    if heads:
        own_tokens = _own_tokens(strategy)
        nbytes += own_tokens * (hidden * (wide + item) + wide)
        nbytes += (own_tokens if strategy.gather_again else tokens) * hidden * item
        nbytes += wide * tokens * -(-config.vocab_size // strategy.layout.tp) + 8 * tokens
    return nbytes


def _own_tokens(strategy: Strategy) -> int:
    """Tokens of a microbatch between the parallel layers of one rank."""
    return strategy.own_tokens // (strategy.layout.tp if strategy.sequence_parallel else 1)
