"""Hugging Face: the config.json of our models, and our sizes from the config.json of theirs.

    model type    sizes
    llama         no experts
    qwen3         no experts; qk_norm="head"
    mixtral       softmax, renormalised
    qwen3_moe     softmax; qk_norm="head"; perhaps first layers dense
    olmoe         softmax; qk_norm="all"
    glm4_moe      sigmoid, groups, a shared expert, biases, first layers dense, perhaps qk_norm="head":
                  the mixture of DeepSeek-V3, behind attention as ours

mistral with "sliding_window": null is a llama by another name. The library `transformers` is not needed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from hpcpar.errors import ConfigError
from hpcpar.planner.experts import Experts
from hpcpar.planner.hugging_face_shapes import BIAS_RATE
from hpcpar.planner.shapes import LlamaConfig

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
}
"""Class of transformers by the model type of its config."""

HEAD_NORMS = ("qwen3", "qwen3_moe")

AT_LEAST_ONE = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "max_position_embeddings",
)
WHOLE_NUMBERS = (
    *("num_key_value_heads", "head_dim", "num_experts_per_tok", "num_local_experts", "num_experts"),
    *("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "n_group", "topk_group"),
    *("first_k_dense_replace", "decoder_sparse_step"),
)
NUMBERS = ("initializer_range", "rms_norm_eps", "router_aux_loss_coef", "routed_scaling_factor")
ROTARY_NUMBERS = ("rope_theta", "partial_rotary_factor")
FLAGS = ("tie_word_embeddings", "norm_topk_prob", "use_qk_norm", "use_sliding_window")
TABLES = ("rope_parameters", "rope_scaling")
"""Keys of a config.json by what their values must be."""


def hugging_face_config(sizes: LlamaConfig, *, dtype: str, end_of_document: int | None) -> dict[str, Any]:
    """Return the contents of config.json for a model with the parameters of `sizes.shapes()`.

    dtype             of the parameters in the files: float32, bfloat16, …
    end_of_document   the token at which to stop writing; None = never
    errors            ConfigError for a mixture that no model of transformers computes

    Dropout, capacity and losses belong to training. `balance_loss` becomes `router_aux_loss_coef`, although
    transformers' loss of the same routing is k times ours and takes all layers together. `torch_dtype` is
    what transformers before 5 and vLLM call `dtype`; both are given.
    """
    kind = model_type(sizes)
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.ffn_width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.key_value_heads,
        "head_dim": sizes.head_width,
        "max_position_embeddings": sizes.max_sequence,
        "rope_theta": sizes.rope_theta,
        "rms_norm_eps": sizes.norm_epsilon,
        "tie_word_embeddings": sizes.tie_embeddings,
        "initializer_range": sizes.initial_std,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": end_of_document,
        "pad_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,
    } | ({} if sizes.experts is None else _of_experts(kind, sizes, sizes.experts))


def model_type(sizes: LlamaConfig) -> str:
    """Return the model type of transformers that computes what ours does; ConfigError if there is none."""
    experts, norm = sizes.experts, sizes.qk_norm
    if experts is None:
        fitting = {"none": "llama", "head": "qwen3"}
    elif experts.score == "sigmoid":
        fitting = {"none": "glm4_moe", "head": "glm4_moe"}
    else:
        fitting = {"none": "mixtral", "head": "qwen3_moe", "all": "olmoe"}
    kind = fitting.get(norm)
    if kind is None:
        of_such = "no experts" if experts is None else f"experts.score={experts.score!r}"
        raise ConfigError(
            f"transformers has no model with {of_such} and qk_norm={norm!r}; there are "
            f"{', '.join(f'qk_norm={name!r} ({kind})' for name, kind in fitting.items())}"
        )
    if experts is not None:
        _require_fitting(kind, sizes, experts)
    return kind


def _require_fitting(kind: str, sizes: LlamaConfig, experts: Experts) -> None:
    """ConfigError unless a model of this type computes such a mixture."""
    wanted: dict[str, Any] = {}
    if kind == "glm4_moe":
        if not experts.shared_ffn_size or experts.shared_ffn_size % experts.ffn_size:
            wanted["shared_ffn_size"] = f"a multiple of experts.ffn_size={experts.ffn_size}"
    else:
        wanted |= {"shared_ffn_size": 0, "scale": 1.0, "groups_per_token": experts.groups, "bias_rate": 0.0}
        if kind != "qwen3_moe":
            wanted["first_dense"] = 0
        if kind == "mixtral":
            wanted["renormalise"] = True
    unfit = [
        f"experts.{name}={getattr(experts, name)!r}, where it has {value}"
        for name, value in wanted.items()
        if getattr(experts, name) != value
    ]
    if kind == "olmoe" and sizes.head_width * sizes.heads != sizes.hidden_size:
        unfit.append(f"head_size={sizes.head_width}, where it has hidden_size / heads")
    if unfit:
        raise ConfigError(
            f"transformers has no model with this mixture: the nearest is {ARCHITECTURES[kind]}, but here is "
            f"{', '.join(unfit)}"
        )


def _of_experts(kind: str, sizes: LlamaConfig, experts: Experts) -> dict[str, Any]:
    """Return what config.json says of a mixture, where it differs from a Llama's."""
    told: dict[str, Any] = {"num_experts_per_tok": experts.per_token, "output_router_logits": False}
    if kind == "glm4_moe":
        return told | {
            "n_routed_experts": experts.count,
            "n_shared_experts": experts.shared_ffn_size // experts.ffn_size,
            "moe_intermediate_size": experts.ffn_size,
            "n_group": experts.groups,
            "topk_group": experts.groups_per_token,
            "norm_topk_prob": experts.renormalise,
            "routed_scaling_factor": experts.scale,
            "first_k_dense_replace": experts.first_dense,
            "use_qk_norm": sizes.qk_norm == "head",
            "partial_rotary_factor": 1.0,
            "num_nextn_predict_layers": 0,
        }
    told["router_aux_loss_coef"] = experts.balance_loss
    if kind == "qwen3_moe":
        return told | {
            "num_experts": experts.count,
            "moe_intermediate_size": experts.ffn_size,
            "norm_topk_prob": experts.renormalise,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(experts.first_dense)),
        }
    told["intermediate_size"] = experts.ffn_size
    if kind == "mixtral":
        return told | {"num_local_experts": experts.count, "sliding_window": None}
    return told | {"num_experts": experts.count, "norm_topk_prob": experts.renormalise, "clip_qkv": None}


# --- from theirs ---------------------------------------------------------------------------------------


def sizes_from_hugging_face(config: Mapping[str, Any]) -> LlamaConfig:
    """Return the sizes of ours that compute what a model with this config.json does.

    Its losses and its dropout are not read, except for `router_aux_loss_coef` (balance_loss). A glm4_moe gets
    a `bias_rate`, without which our model has no biases.
    errors   ConfigError for another kind of model, for values that are none, and for what our attention does
             not do: latent attention (DeepSeek), windows, scaled rotary embeddings, biases of projections
    """
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"a config of {type(config).__name__}: {config!r:.60}; it must be an object of keys and values, "
            "as save_pretrained of transformers writes"
        )
    kind = config.get("model_type")
    # null is as if left out, but for Mistral's window: transformers gives it one unless that is null.
    left_out = {"sliding_window": 4096} if kind == "mistral" else {}
    config = {key: value for key, value in (left_out | dict(config)).items() if value is not None}
    if not isinstance(kind, str):
        raise ConfigError(f"a model of the type {kind!r}; hpcpar computes {', '.join(ARCHITECTURES)}")
    if kind in ("deepseek_v2", "deepseek_v3", "deepseek_v32"):
        raise ConfigError(
            f"a model of the type {kind!r} has multi-head latent attention, which makes keys and values of "
            "one latent vector, and hpcpar's attention has heads of keys and values. Its mixture of experts "
            "is here: take the preset deepseek-v3-mixture, or a glm4_moe, which has both"
        )
    if kind in ("qwen2", "qwen2_moe"):
        raise ConfigError(
            f"a model of the type {kind!r} has biases in the attention's projections, and hpcpar has "
            "none; Qwen3 has none either. Train it as a model of transformers: hugging_face_llama_plan, "
            "share_sequences and share_experts make it parallel"
        )
    if kind not in ARCHITECTURES:
        raise ConfigError(f"a model of the type {kind!r}; hpcpar computes {', '.join(ARCHITECTURES)}")
    _require_forms(config)
    _require_plain_attention(config)
    try:
        return _sizes_from(kind, config)
    except KeyError as error:
        raise ConfigError(f"the config of a model of the type {kind!r} lacks {error.args[0]}") from error


def _require_forms(config: Mapping[str, Any]) -> None:
    """ConfigError for a key whose value is of another kind, such as a list in place of a number."""

    def is_whole(value: object, least: int = 0) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    def is_number(value: object) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool)

    def are_layers(value: object) -> bool:
        return isinstance(value, list) and all(is_whole(each) for each in value)

    def require(
        keys: Iterable[str], found: Mapping[str, Any], fits: Callable[[Any], bool], form: str
    ) -> None:
        for key in keys:
            if key in found and not fits(found[key]):
                raise ConfigError(
                    f"the config of a model of the type {config['model_type']!r} has {key}={found[key]!r}; "
                    f"give {form}"
                )

    require(AT_LEAST_ONE, config, lambda value: is_whole(value, 1), "a whole number of at least 1")
    require(WHOLE_NUMBERS, config, is_whole, "a whole number of at least 0")
    require(NUMBERS, config, is_number, "a number")
    require(FLAGS, config, lambda value: isinstance(value, bool), "true or false")
    require(TABLES, config, lambda value: isinstance(value, Mapping), "an object of keys and values")
    require(["mlp_only_layers"], config, are_layers, "a list of layers' numbers")
    require(ROTARY_NUMBERS, _rotary(config), is_number, "a number")


def _sizes_from(kind: str, config: Mapping[str, Any]) -> LlamaConfig:
    heads = config["num_attention_heads"]
    sizes = LlamaConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
        ffn_size=config["intermediate_size"],
        max_sequence=config["max_position_embeddings"],
        rope_theta=float(_rotary(config).get("rope_theta", 1e6 if kind == "mixtral" else 1e4)),
        norm_epsilon=config["rms_norm_eps"],
        tie_embeddings=config.get("tie_word_embeddings", False),
        initial_std=config.get("initializer_range", 0.02),
        qk_norm=_query_key_norm(kind, config),
    )
    if kind in ("mixtral", "qwen3_moe", "olmoe", "glm4_moe"):
        sizes = replace(sizes, experts=_experts_from(kind, config))
    return sizes


def _query_key_norm(kind: str, config: Mapping[str, Any]) -> Literal["none", "head", "all"]:
    if kind in HEAD_NORMS or (kind == "glm4_moe" and config.get("use_qk_norm", False)):
        return "head"
    return "all" if kind == "olmoe" else "none"


def _experts_from(kind: str, config: Mapping[str, Any]) -> Experts:
    renormalises = kind == "mixtral" or config.get("norm_topk_prob", kind == "glm4_moe")
    if config["num_experts_per_tok"] == 1 and renormalises:
        raise ConfigError(
            f"the config of a model of the type {kind!r} has num_experts_per_tok=1 and divides a token's "
            "weights by their sum: the one weight is always 1, and hpcpar trains no router by it. Take a "
            "model with more experts for each token, or train this one as a model of transformers: "
            "share_experts divides its experts"
        )
    common = {
        "per_token": config["num_experts_per_tok"],
        "balance_loss": config.get("router_aux_loss_coef", 0.0),
    }
    if kind == "mixtral":
        return Experts(count=config["num_local_experts"], ffn_size=config["intermediate_size"], **common)
    if kind == "olmoe":
        return Experts(
            count=config["num_experts"],
            ffn_size=config["intermediate_size"],
            renormalise=config.get("norm_topk_prob", False),
            **common,
        )
    if kind == "qwen3_moe":
        return Experts(
            count=config.get("num_experts") or config["num_local_experts"],
            ffn_size=config["moe_intermediate_size"],
            renormalise=config.get("norm_topk_prob", False),
            first_dense=_first_dense(config),
            **common,
        )
    return Experts(
        count=config["n_routed_experts"],
        ffn_size=config["moe_intermediate_size"],
        shared_ffn_size=config.get("n_shared_experts", 1) * config["moe_intermediate_size"],
        first_dense=config.get("first_k_dense_replace", 1),
        score="sigmoid",
        renormalise=config.get("norm_topk_prob", True),
        scale=config.get("routed_scaling_factor", 1.0),
        groups=config.get("n_group", 1),
        groups_per_token=config.get("topk_group", 1),
        bias_rate=BIAS_RATE,
        **common,
    )


def _first_dense(config: Mapping[str, Any]) -> int:
    """Return how many first layers of a Qwen3-MoE are dense; ConfigError where others are."""
    dense, step = sorted(config.get("mlp_only_layers") or []), config.get("decoder_sparse_step", 1)
    if step != 1 or dense != list(range(len(dense))):
        raise ConfigError(
            f"decoder_sparse_step={step} and mlp_only_layers={dense}: here only the first layers can be "
            "without experts"
        )
    return len(dense)


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters, as transformers 5 (`rope_parameters`) or 4 writes them."""
    older = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if name in config}
    return older | dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})


def _require_plain_attention(config: Mapping[str, Any]) -> None:
    rotary = _rotary(config)
    scaling = rotary.get("rope_type", rotary.get("type", "default"))
    partial = rotary.get("partial_rotary_factor", 0.5 if config["model_type"] == "glm4_moe" else 1.0)
    windowed = config.get("use_sliding_window", True) and config.get("sliding_window")
    found = {
        f"rotary embeddings of the type {scaling!r}": scaling != "default",
        f"rotary embeddings of {partial} of each head": partial != 1.0,
        f"a window of {config.get('sliding_window')} tokens": windowed,
        "biases of the attention's projections": config.get("attention_bias"),
        "biases of the feed-forward's projections": config.get("mlp_bias"),
        "clipped queries, keys and values (clip_qkv)": config.get("clip_qkv"),
        f"the activation {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
    }
    present = [what for what, is_there in found.items() if is_there]
    if present:
        raise ConfigError(
            f"the model has {', '.join(present)}, which hpcpar's does not compute; train it as a model of "
            "transformers: hugging_face_llama_plan, share_sequences and share_experts make it parallel"
        )
