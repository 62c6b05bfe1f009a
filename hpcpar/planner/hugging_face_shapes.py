"""Shapes of Hugging Face's models, from their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hpcpar.errors import ConfigError, did_you_mean
from hpcpar.planner.experts import Experts
from hpcpar.planner.model_shapes import LatentAttention, ModelShape, naming_file, usual_head_size
from hpcpar.planner.read_input import finite_number, whole_number
from hpcpar.planner.shapes import QueryKeyNorm


@dataclass(frozen=True)
class _Family:
    """Models of one `model_type` of transformers, by how they differ from Llama.

    positions   learned ones
    trained     hpcpar's own model computes them, but for what `_beyond_trainer` finds
    keys        their names of Llama's keys
    defaults    of keys that their config.json may leave out
    """

    gated: bool = True
    layer_norm: bool = False
    positions: bool = False
    latent: bool = False
    qk_norm: QueryKeyNorm = "none"
    trained: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


_TIED = {"tie_word_embeddings": True}
_GEMMA = {**_TIED, "head_dim": 256}
_GEMMA3 = {
    **_GEMMA,
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
_BY_SIGMOID = {"scoring_func": "sigmoid", "n_shared_experts": 1}
_NOT_RENORMALISED = {"norm_topk_prob": False}
_GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "dropout": "resid_pdrop",
}
_FALCON_KEYS = {"intermediate_size": "ffn_hidden_size", "num_key_value_heads": "num_kv_heads"}
_GPT = _Family(gated=False, layer_norm=True)

FAMILIES: dict[str, _Family] = {
    "llama": _Family(trained=True),
    "mistral": _Family(trained=True),
    "qwen2": _Family(),
    "qwen3": _Family(qk_norm="head", trained=True),
    "olmo2": _Family(qk_norm="all"),
    "phi3": _Family(),
    "gemma": _Family(defaults=_GEMMA),
    "gemma2": _Family(defaults=_GEMMA),
    "gemma3_text": _Family(qk_norm="head", defaults=_GEMMA3),
    "mixtral": _Family(trained=True),
    "qwen2_moe": _Family(defaults=_NOT_RENORMALISED),
    "qwen3_moe": _Family(qk_norm="head", trained=True, defaults=_NOT_RENORMALISED),
    "olmoe": _Family(qk_norm="all", trained=True, defaults=_NOT_RENORMALISED),
    "glm4_moe": _Family(trained=True, defaults={**_BY_SIGMOID, "first_k_dense_replace": 1}),
    "deepseek_v2": _Family(latent=True, defaults={**_NOT_RENORMALISED, "n_shared_experts": 2}),
    "deepseek_v3": _Family(latent=True, defaults={**_BY_SIGMOID, "first_k_dense_replace": 3}),
    "gpt2": replace(_GPT, positions=True, keys=_GPT2_KEYS, defaults={**_TIED, "dropout": 0.1}),
    "gptj": replace(_GPT, keys=_GPT2_KEYS),
    "gpt_neox": _GPT,
    "phi": _GPT,
    "opt": replace(
        _GPT, positions=True, keys={"intermediate_size": "ffn_dim"}, defaults={**_TIED, "dropout": 0.1}
    ),
    "falcon": replace(_GPT, keys=_FALCON_KEYS, defaults={**_TIED, "multi_query": True}),
    "starcoder2": replace(_GPT, defaults=_TIED),
}
"""What is read of transformers, by `model_type`. Without one a config.json is read as Llama's."""

BIAS_RATE = 0.001
"""Step of the biases that select experts by sigmoid: DeepSeek-V3's, which no config.json says."""


def shape_from_hugging_face(config: Any, *, where: str) -> ModelShape:
    """Return the shape of a Hugging Face config.json whose `model_type` is one of FAMILIES, or has none.

    errors   ConfigError that names the field that is missing or wrong; for another type, with the list
    """
    with naming_file(where):
        return _HuggingFaceConfig(config).shape()


def training_values_of_hugging_face(config: Any, *, where: str) -> dict[str, Any]:
    """Return fields of the trainer's [model] that a config.json has and a plan does not need."""
    with naming_file(where):
        return _HuggingFaceConfig(config).training_values()


class _HuggingFaceConfig:
    """Values of a config.json; of a model of several parts those of its text."""

    def __init__(self, config: Any) -> None:
        if not isinstance(config, Mapping):
            raise ConfigError(f"it holds a {type(config).__name__}; it must hold one object")
        text = config.get("text_config")
        self._of_text = isinstance(text, Mapping)
        tied = {key: value for key, value in config.items() if key == "tie_word_embeddings"}
        self._table: Mapping[str, Any] = {**tied, **text} if isinstance(text, Mapping) else config
        self.kind = str(self._table.get("model_type", "llama"))
        if self.kind not in FAMILIES:
            hint = did_you_mean(self.kind, FAMILIES)
            raise ConfigError(
                f"models of the type {self.kind!r} are not planned; {hint}there are {', '.join(FAMILIES)}. "
                "Or give the sizes in a .toml file: gated, vocab_size, hidden_size, layers, heads …"
            )
        self._family = FAMILIES[self.kind]

    def get(self, key: str) -> Any:
        """Return the value of Llama's key, or what this family has where it is left out; None: nothing."""
        name = self._name(key)
        return self._table[name] if name in self._table else self._family.defaults.get(key)

    def _name(self, key: str) -> str:
        return self._family.keys.get(key, key)

    def size(self, key: str, default: Any = None, *, least: int = 1) -> int:
        """Return a whole number; ConfigError where it is none, or missing without a default."""
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"it lacks {self._name(key)}; a plan needs this number")
        return whole_number(value, self._name(key), least)

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        return finite_number(default if value is None else value, self._name(key), or_zero=True)

    def shape(self) -> ModelShape:
        hidden, heads, family = self.size("hidden_size"), self.size("num_attention_heads"), self._family
        if self.get("word_embed_proj_dim") not in (None, hidden):
            raise ConfigError("word_embed_proj_dim differs from hidden_size, which is not planned")
        latent = self._latent() if family.latent or self.get("kv_lora_rank") else None
        usual_ffn = self.get("moe_intermediate_size") if family.gated else 4 * hidden
        longest = self.size("max_position_embeddings", None if family.positions else 4096)
        experts = self._experts()
        return ModelShape(
            *(self.kind, self.size("vocab_size"), hidden, self.size("num_hidden_layers"), heads),
            kv_heads=self._kv_heads(heads),
            head_size=self._head_size(hidden, heads, latent),
            ffn_size=self.size("intermediate_size", usual_ffn),
            gated=family.gated,
            layer_norm=family.layer_norm,
            positions=longest if family.positions else 0,
            tie_embeddings=self.get("tie_word_embeddings") or False,
            experts=experts,
            latent=latent,
            qk_norm="head" if self.get("use_qk_norm") else family.qk_norm,
            dropout=self.number("dropout", 0.0),
            max_sequence=longest,
            beyond_trainer=self._beyond_trainer(experts),
        )

    def _kv_heads(self, heads: int) -> int:
        if self.kind == "falcon" and not self.get("new_decoder_architecture"):
            return 1 if self.get("multi_query") else heads
        return self.size("num_key_value_heads", heads)

    def _head_size(self, hidden: int, heads: int, latent: LatentAttention | None) -> int:
        if self.get("head_dim") is not None:
            return self.size("head_dim")
        return usual_head_size(hidden, heads) if latent is None else latent.value

    def _latent(self) -> LatentAttention:
        return LatentAttention(
            # null: queries without a latent vector, as in DeepSeek-V2-Lite.
            query_rank=self.size("q_lora_rank", 0 if "q_lora_rank" in self._table else None, least=0),
            key_value_rank=self.size("kv_lora_rank"),
            plain=self.size("qk_nope_head_dim"),
            rotary=self.size("qk_rope_head_dim"),
            value=self.size("v_head_dim"),
        )

    def _experts(self) -> Experts | None:
        counts = ("n_routed_experts", "num_local_experts", "num_experts")
        count = next((name for name in counts if self.get(name)), None)
        if count is None:
            return None
        width = self.size("moe_intermediate_size", self.get("intermediate_size"))
        shared = self.size("shared_expert_intermediate_size", 0, least=0)
        per_token = self.size("num_experts_per_tok")
        by_sigmoid = self.get("scoring_func") == "sigmoid"
        return Experts(
            *(self.size(count), per_token, width),
            shared_ffn_size=shared or self.size("n_shared_experts", 0, least=0) * width,
            first_dense=self._first_dense(),
            score="sigmoid" if by_sigmoid else "softmax",
            renormalise=per_token > 1 and self.get("norm_topk_prob") is not False,
            scale=self.number("routed_scaling_factor", 1.0),
            groups=self.size("n_group", 1),
            groups_per_token=self.size("topk_group", 1),
            balance_loss=self.number("router_aux_loss_coef", 0.0),
            bias_rate=BIAS_RATE if by_sigmoid else 0.0,
        )

    def _first_dense(self) -> int:
        dense = self.get("mlp_only_layers") or []
        steps = {name: self.get(name) for name in ("decoder_sparse_step", "moe_layer_freq")}
        first = isinstance(dense, list) and {*map(repr, dense)} == {*map(repr, range(len(dense)))}
        if not first or any(step not in (None, 1) for step in steps.values()):
            told = ", ".join(f"{name}={step}" for name, step in steps.items() if step is not None)
            raise ConfigError(
                f"mlp_only_layers={dense}, {told}: a plan is of models whose first layers alone lack experts"
            )
        return len(dense) or self.size("first_k_dense_replace", 0, least=0)

    def _rotary(self) -> dict[str, Any]:
        """Return the rotary parameters, as transformers 5 (`rope_parameters`) or 4 writes them."""
        found = {name: self._table.get(name) for name in ("rope_theta", "partial_rotary_factor")}
        for name in ("rope_scaling", "rope_parameters"):
            told = self._table.get(name) or {}
            if not isinstance(told, Mapping):
                raise ConfigError(f"{name} = {told!r} must be an object")
            found |= told
        return {name: value for name, value in found.items() if value is not None}

    def _beyond_trainer(self, experts: Experts | None) -> str | None:
        """Name what `models.sizes_from_hugging_face` refuses; None where hpcpar's own model computes it."""
        if not self._family.trained:
            return f"the architecture of {self.kind}"
        rotary, window = self._rotary(), self.get("sliding_window")
        scaling = rotary.get("rope_type", rotary.get("type", "default"))
        partial = rotary.get("partial_rotary_factor", 0.5 if self.kind == "glm4_moe" else 1.0)
        activation = self.get("hidden_act") or "silu"
        renormalised = self.get("norm_topk_prob") is not False
        one_weight = experts is not None and experts.per_token == 1 and renormalised
        found = {
            "other parts than text": self._of_text,
            f"rotary embeddings of the type {scaling!r}": scaling != "default",
            f"rotary embeddings of {partial} of each head": partial != 1.0,
            f"a window of {window} tokens": window and self.get("use_sliding_window") is not False,
            "biases of the attention's projections": self.get("attention_bias"),
            "biases of the feed-forward's projections": self.get("mlp_bias"),
            "clipped queries, keys and values": self.get("clip_qkv"),
            f"the activation {activation!r}": activation != "silu",
            "one expert of each token, whose renormalised weight is always 1": one_weight,
        }
        return ", ".join(what for what, is_there in found.items() if is_there) or None

    def training_values(self) -> dict[str, Any]:
        usual = 1e6 if self.kind == "mixtral" else 1e4
        values = {
            "rope_theta": self._rotary().get("rope_theta", usual),
            "norm_epsilon": self.get("rms_norm_eps"),
            "initial_std": self.get("initializer_range"),
        }
        return {key: finite_number(value, key) for key, value in values.items() if value is not None}
