"""Sizes of a Llama, of the part of it that a pipeline stage holds, and of what is recomputed. Pure integers.

Shape letters: S sequence, H hidden, F ffn, A heads, K key-value heads, D head size, V vocabulary,
L layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from hpcpar.errors import ConfigError, LayoutError, did_you_mean
from hpcpar.planner.experts import Experts, feed_forward_shapes

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of the floating-point types that a model is trained in."""

RecomputeMode = Literal["none", "selective", "full"]

QueryKeyNorm = Literal["none", "head", "all"]
"""Norms of queries and of keys: none, of each head by one weight for all, or of all heads together."""

RECOMPUTE_MODES: tuple[RecomputeMode, ...] = get_args(RecomputeMode)

MAY_BE_ZERO = ("initial_std", "dropout")


def dtype_name(dtype: object) -> str:
    """Return the name of an element type: "float32" for itself and for torch.float32."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Recompute:
    """Activations that a model's layers recompute in backward.

    mode     "none"; "selective", the attention core (scores, softmax, its dropout, and over values); "full",
             each layer from its input
    layers   number of layers that do so, from the first on; None = all
    errors   ConfigError for another mode, or fewer than no layers
    """

    mode: RecomputeMode = "none"
    layers: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in RECOMPUTE_MODES:
            raise ConfigError(
                f"recompute: there is no mode {self.mode!r}; there are {', '.join(RECOMPUTE_MODES)}"
            )
        if self.layers is not None and (not isinstance(self.layers, int) or self.layers < 0):
            raise ConfigError(f"recompute: layers={self.layers!r}; give 0 or more, or None for all of them")

    def of_layer(self, number: int, total: int) -> RecomputeMode:
        """Return the mode of layer `number`, from 0, of a model of `total` layers.

        errors   ConfigError when more layers were asked for than there are
        """
        if self.layers is not None and self.layers > total:
            raise ConfigError(
                f"recompute: layers={self.layers}, but the model has {total}; give {total} or fewer"
            )
        return self.mode if self.layers is None or number < self.layers else "none"


@dataclass(frozen=True)
class Part:
    """The part of a model that one pipeline stage holds.

    layers   by their numbers in the whole model
    embeds   it begins with the embedding: its input is tokens [B, S], else [B, S, H]
    heads    it ends with norm and output projection: its output is logits [B, S, V], else [B, S, H]
    """

    layers: range
    embeds: bool
    heads: bool

    @classmethod
    def of(cls, start: int, stop: int, layers: int) -> Part:
        """Return items start … stop - 1 of a model's embedding, `layers` layers, and head.

        errors   LayoutError where it has no such items
        """
        if not 0 <= start < stop <= layers + 2:
            raise LayoutError(
                f"items {start} to {stop} are no part of a model of {layers} layers; give a start below the "
                f"stop, within the {layers + 2} items that embedding, layers and head are"
            )
        return cls(range(max(start, 1) - 1, min(stop - 1, layers)), start == 0, stop == layers + 2)

    @classmethod
    def whole(cls, layers: int) -> Part:
        return cls(range(layers), embeds=True, heads=True)


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a model of the Llama architecture (arXiv 2302.13971, 2407.21783).

    vocab_size      different tokens
    hidden_size     width of the residual stream
    layers          attention and feed-forward, each with a norm before it
    heads           heads of queries
    kv_heads        heads of keys and values, None = `heads`; each serves heads / kv_heads queries
    head_size       None = hidden_size / heads
    ffn_size        inner width of the gated feed-forward, None = 8/3 hidden_size rounded up to 32s
    max_sequence    longest sequence that the model is meant for; longer ones are refused
    rope_theta      base of the rotary embedding's wavelengths
    norm_epsilon    what RMSNorm adds to the mean square
    tie_embeddings  the output projection is the embedding's matrix
    initial_std     standard deviation of the weights before training; the two projections of a
                    layer that write to the residual stream have it divided by sqrt(2 layers)
    dropout         probability, in training, of the attention's shares and of what is added to the
                    residual stream
    qk_norm         RMSNorm of queries and of keys before they are rotated: "head", of each head, with one
                    weight [D] for all (Qwen3); "all", of all heads together (OLMoE); "none"
    experts         a mixture of experts in place of the feed-forward, in all layers but the first_dense ones;
                    None: there is none
    """

    vocab_size: int = 256
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None
    head_size: int | None = None
    ffn_size: int | None = None
    max_sequence: int = 256
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    tie_embeddings: bool = False
    initial_std: float = 0.02
    dropout: float = 0.0
    qk_norm: QueryKeyNorm = "none"
    experts: Experts | None = None

    def __post_init__(self) -> None:
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        self._check_positive()
        if self.head_size is None:
            if self.hidden_size % self.heads:
                raise ConfigError(
                    f"hidden_size={self.hidden_size} does not divide among heads={self.heads}; "
                    f"choose heads that divide it, or set head_size"
                )
            object.__setattr__(self, "head_size", self.hidden_size // self.heads)
        if self.ffn_size is None:
            object.__setattr__(self, "ffn_size", 32 * math.ceil(self.hidden_size * 8 / 3 / 32))
        self._check_heads()
        if self.experts is not None and self.experts.first_dense >= self.layers:
            raise ConfigError(
                f"experts.first_dense={self.experts.first_dense} leaves none of layers={self.layers} with "
                f"experts; choose {self.layers - 1} or fewer, or leave the experts out"
            )

    def _check_positive(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or isinstance(value, bool) or field.name in MAY_BE_ZERO:
                continue
            if isinstance(value, (Experts, str)):
                continue
            if not value > 0:
                raise ConfigError(f"{field.name}={value!r} must be greater than 0")
        if not self.initial_std >= 0:
            raise ConfigError(f"initial_std={self.initial_std!r} must be 0 or greater")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout!r} must be a probability from 0 to below 1")
        if self.qk_norm not in get_args(QueryKeyNorm):
            raise ConfigError(f"qk_norm={self.qk_norm!r}; there are {', '.join(get_args(QueryKeyNorm))}")

    def _check_heads(self) -> None:
        if self.heads % self.key_value_heads:
            raise ConfigError(
                f"heads={self.heads} is not a multiple of kv_heads={self.key_value_heads}; "
                f"every head of keys and values serves the same number of query heads"
            )
        if self.head_width % 2:
            raise ConfigError(
                f"head_size={self.head_width} is odd, but rotary embeddings turn pairs of values; "
                f"choose an even head_size"
            )

    @property
    def key_value_heads(self) -> int:
        """`kv_heads`, after its default was filled in."""
        assert self.kv_heads is not None
        return self.kv_heads

    @property
    def head_width(self) -> int:
        """`head_size`, after its default was filled in."""
        assert self.head_size is not None
        return self.head_size

    @property
    def ffn_width(self) -> int:
        """`ffn_size`, after its default was filled in."""
        assert self.ffn_size is not None
        return self.ffn_size

    @classmethod
    def preset(cls, name: str, **changes: Any) -> LlamaConfig:
        """Return a config by name, some fields changed: preset("tiny", layers=2).

        Sizes that follow from changed ones (head_size, ffn_size) are derived anew unless given. A mapping for
        `experts` changes these fields of the preset's: preset("tiny-moe", experts={"count": 4}).
        """
        if name not in PRESETS:
            hint = did_you_mean(name, PRESETS)
            raise ConfigError(f"no model is called {name!r}; {hint}there are {', '.join(PRESETS)}")
        known = {field.name for field in fields(cls)}
        for key in changes:
            if key not in known:
                hint = did_you_mean(key, sorted(known))
                raise ConfigError(f"a model has no field {key!r}; {hint}there are {sorted(known)}")
        derived: dict[str, None] = {}
        if changes.keys() & {"hidden_size", "heads"}:
            derived["head_size"] = None
        if "hidden_size" in changes:
            derived["ffn_size"] = None
        if isinstance(changes.get("experts"), Mapping):
            changes["experts"] = Experts.of(changes["experts"], PRESETS[name].experts)
        return replace(PRESETS[name], **(derived | changes))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter of the whole model, by name, in the model's order.

        Names are those of Hugging Face's Llama, and of its Qwen3-MoE and DeepSeek-V3 where there are experts.
        With tied embeddings there is no lm_head.
        """
        hidden = self.hidden_size
        queries, key_values = self.heads * self.head_width, self.key_value_heads * self.head_width
        table: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            table |= {
                f"{prefix}.input_layernorm.weight": (hidden,),
                f"{prefix}.self_attn.q_proj.weight": (queries, hidden),
                f"{prefix}.self_attn.k_proj.weight": (key_values, hidden),
                f"{prefix}.self_attn.v_proj.weight": (key_values, hidden),
                f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
                f"{prefix}.post_attention_layernorm.weight": (hidden,),
            }
            for name, width in zip(("q_norm", "k_norm"), self.query_key_norms, strict=False):
                table[f"{prefix}.self_attn.{name}.weight"] = (width,)
            experts = self.experts_of(layer)
            if experts is None:
                table |= feed_forward_shapes(hidden, self.ffn_width, f"{prefix}.mlp.")
            else:
                table |= {f"{prefix}.mlp.{name}": shape for name, shape in experts.shapes(hidden).items()}
        table["model.norm.weight"] = (hidden,)
        if not self.tie_embeddings:
            table["lm_head.weight"] = (self.vocab_size, hidden)
        return table

    @property
    def query_key_norms(self) -> tuple[int, ...]:
        """Widths of a layer's norms of queries and of keys; empty where there are none."""
        if self.qk_norm == "head":
            return self.head_width, self.head_width
        if self.qk_norm == "all":
            return self.heads * self.head_width, self.key_value_heads * self.head_width
        return ()

    def experts_of(self, layer: int) -> Experts | None:
        """Return the mixture of layer `layer`, from 0; None where it has an ordinary feed-forward."""
        return None if self.experts is None or layer < self.experts.first_dense else self.experts

    def parameters(self, *, active: bool = False) -> int:
        """Count the parameters of the whole model: V·H (twice unless tied) + H + L·(2H + 2HD(A+K) + 3HF).

        With experts a layer has E·H + 3·H·(E·m + shared width) in place of 3HF, and with norms of queries and
        keys these.
        active   those that one token meets: of each layer's experts k
        """
        hidden = self.hidden_size
        embeddings = self.vocab_size * hidden * (1 if self.tie_embeddings else 2)
        layers = sum(self._layer_weights(layer, active=active) for layer in range(self.layers))
        norms = hidden + self.layers * (2 * hidden + sum(self.query_key_norms))
        return embeddings + norms + layers

    def layer_matrix_parameters(self) -> int:
        """Count the parameters of the layers' matrices, routers and experts among them: those of Muon."""
        return sum(self._layer_weights(layer, active=False) for layer in range(self.layers))

    def expert_parameters(self) -> int:
        """Count the parameters of all experts that tokens choose among: those that ep divides."""
        if self.experts is None:
            return 0
        layers = sum(self.experts_of(layer) is not None for layer in range(self.layers))
        return layers * 3 * self.hidden_size * self.experts.count * self.experts.ffn_size

    def _layer_weights(self, layer: int, *, active: bool) -> int:
        attention = 2 * self.hidden_size * self.head_width * (self.heads + self.key_value_heads)
        experts = self.experts_of(layer)
        if experts is None:
            return attention + 3 * self.hidden_size * self.ffn_width
        return attention + experts.parameters(self.hidden_size, active=active)

    def flops_per_token(self, sequence: int, *, backward: bool = True) -> int:
        """Count the floating-point operations of the matrix products for one token of such a sequence.

        forward    2 per weight that multiplies (embedding look-up and norms not counted; of experts those
                   that the token visits, and the router)
                   + 4·L·S·A·D for scores and values, counted in full, without halving for causality
        backward   twice the forward; recomputation is not counted
        source     arXiv 2104.04473, appendix, and 2204.02311, appendix B: the same convention, so
                   an MFU from these figures is comparable with theirs
        """
        layers = sum(self._layer_flops(layer, sequence) for layer in range(self.layers))
        return (layers + self._head_flops) * (3 if backward else 1)

    @property
    def _head_flops(self) -> int:
        return 2 * self.vocab_size * self.hidden_size

    def _layer_flops(self, layer: int, sequence: int) -> int:
        """Count FLOPs of one token's forward through a layer."""
        return 2 * self._layer_weights(layer, active=True) + self._core_flops(sequence)

    def _core_flops(self, sequence: int) -> int:
        return 4 * sequence * self.heads * self.head_width

    def flops_per_item(self, sequence: int, *, recompute: Recompute | None = None) -> list[int]:
        """Count FLOPs per token, forward and backward, of embedding, each layer, and head with loss.

        embedding   0: it looks up
        a layer     as `flops_per_token`, and what is recomputed: a forward (full), or the attention core's
                    4·S·A·D (selective)
        head        6·V·H
        sequence    S of the whole sequence
        """
        again = recompute or Recompute()
        costs = []
        for number in range(self.layers):
            forward = self._layer_flops(number, sequence)
            recomputed = {"none": 0, "selective": self._core_flops(sequence), "full": forward}
            costs.append(3 * forward + recomputed[again.of_layer(number, self.layers)])
        return [0, *costs, 3 * self._head_flops]


# The usual 0.02 suits widths of thousands; narrow models learn faster from about 0.7 / sqrt(width).
PRESETS: dict[str, LlamaConfig] = {
    "tiny": LlamaConfig(256, 128, 4, 4, 2, ffn_size=352, max_sequence=256, initial_std=0.06),
    "5m": LlamaConfig(256, 256, 6, 8, 4, ffn_size=768, max_sequence=512, initial_std=0.04),
    "50m": LlamaConfig(32_000, 512, 12, 8, 4, ffn_size=1408, max_sequence=1024, tie_embeddings=True),
    "125m": LlamaConfig(50_304, 768, 12, 12, 12, ffn_size=2048, max_sequence=2048, tie_embeddings=True),
    "llama2-7b": LlamaConfig(32_000, 4096, 32, 32, 32, ffn_size=11_008, max_sequence=4096),
    "llama2-70b": LlamaConfig(32_000, 8192, 80, 64, 8, ffn_size=28_672, max_sequence=4096),
    "llama3-8b": LlamaConfig(
        128_256, 4096, 32, 32, 8, ffn_size=14_336, max_sequence=8192, rope_theta=500_000.0
    ),
    "llama3-70b": LlamaConfig(
        128_256, 8192, 80, 64, 8, ffn_size=28_672, max_sequence=8192, rope_theta=500_000.0
    ),
    "tiny-moe": LlamaConfig(
        *(256, 128, 4, 4, 2),
        ffn_size=352,
        max_sequence=256,
        initial_std=0.06,
        experts=Experts(8, 2, 128, balance_loss=0.01),
    ),
    "mixtral-8x7b": LlamaConfig(
        *(32_000, 4096, 32, 32, 8),
        ffn_size=14_336,
        max_sequence=32_768,
        rope_theta=1e6,
        experts=Experts(8, 2, 14_336, balance_loss=0.02),
    ),
    "qwen3-30b-a3b": LlamaConfig(
        *(151_936, 2048, 48, 32, 4),
        head_size=128,
        ffn_size=6144,
        max_sequence=40_960,
        rope_theta=1e6,
        norm_epsilon=1e-6,
        qk_norm="head",
        experts=Experts(128, 8, 768, balance_loss=0.001, balance_over="global"),
    ),
    "olmoe-1b-7b": LlamaConfig(
        *(50_304, 2048, 16, 16, 16),
        ffn_size=1024,
        max_sequence=4096,
        qk_norm="all",
        experts=Experts(64, 8, 1024, renormalise=False, balance_loss=0.01, z_loss=0.001),
    ),
    "deepseek-v3-mixture": LlamaConfig(
        *(129_280, 7168, 61, 128, 128),
        head_size=128,
        ffn_size=18_432,
        max_sequence=4096,
        norm_epsilon=1e-6,
        experts=Experts(
            *(256, 8, 2048),
            shared_ffn_size=2048,
            first_dense=3,
            score="sigmoid",
            scale=2.5,
            groups=8,
            groups_per_token=4,
            balance_loss=0.0001,
            balance_over="sequence",
            bias_rate=0.001,
        ),
    ),
}
"""Presets, from a model that two laptop cores train in minutes to published sizes.

Those with experts have the published layers, but deepseek-v3-mixture has our attention in place of DeepSeek's
latent one.
"""
