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

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpcpar.errors import ConfigError
from hpcpar.planner.experts import Experts
from hpcpar.planner.hugging_face_shapes import shape_from_hugging_face, training_values_of_hugging_face
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

FLAGS = ("tie_word_embeddings", "norm_topk_prob", "use_qk_norm", "use_sliding_window")

REQUIRED = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("max_position_embeddings", "rms_norm_eps"),
)
READ = (
    *("model_type", "num_key_value_heads", "head_dim", "tie_word_embeddings", "initializer_range"),
    *("rope_theta", "partial_rotary_factor", "rope_scaling", "rope_parameters"),
    *("sliding_window", "attention_bias", "mlp_bias", "clip_qkv", "hidden_act", "router_aux_loss_coef"),
)
"""Keys of a config.json that all models must have, and that they may have; transformers ignores others."""

REQUIRED_OF_EXPERTS = {
    "mixtral": ("num_experts_per_tok", "num_local_experts"),
    "olmoe": ("num_experts_per_tok", "num_experts"),
    "qwen3_moe": ("num_experts_per_tok", "num_experts", "moe_intermediate_size"),
    "glm4_moe": ("num_experts_per_tok", "n_routed_experts", "moe_intermediate_size"),
}
READ_OF_TYPE = {
    "qwen3": ("use_sliding_window",),
    "olmoe": ("norm_topk_prob",),
    "qwen3_moe": ("use_sliding_window", "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step"),
    "glm4_moe": (
        *("norm_topk_prob", "n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"),
        *("routed_scaling_factor", "use_qk_norm"),
    ),
}
"""The same by model type: what mixtures must have, and what a type may have."""


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
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ConfigError(f"a model of the type {kind!r}; hpcpar computes {', '.join(ARCHITECTURES)}")
    if config.get("rope_scaling"):  # transformers takes it in the place of rope_parameters
        config.pop("rope_parameters", None)
    if kind == "qwen3_moe" and "num_local_experts" in config:  # the same by another name
        config["num_experts"] = config.get("num_experts") or config["num_local_experts"]
    told = f"the config of a model of the type {kind!r}"
    for key in REQUIRED:
        if key not in config:
            raise ConfigError(f"{told} lacks {key}")
    of_experts = REQUIRED_OF_EXPERTS.get(kind, ())
    keys = (*REQUIRED, *READ, *of_experts, *READ_OF_TYPE.get(kind, ()))
    read = {key: config[key] for key in keys if key in config}
    for key in FLAGS:
        if not isinstance(read.get(key, False), bool):
            raise ConfigError(f"{told} has {key}={read[key]!r}; give true or false")
    where = f"of the type {kind!r}"
    shape = shape_from_hugging_face(read, where=where)
    if shape.beyond_trainer is not None:
        raise ConfigError(
            f"the model has {shape.beyond_trainer}, which hpcpar's does not compute; train it as a model of "
            "transformers: hugging_face_llama_plan, share_sequences and share_experts make it parallel"
        )
    for key in of_experts:
        if not config.get(key):
            raise ConfigError(f"{told} lacks {key}")
    return replace(shape.as_llama(), **training_values_of_hugging_face(read, where=where))
