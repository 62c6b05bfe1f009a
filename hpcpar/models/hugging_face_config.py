"""A Llama's sizes in the words of Hugging Face's config.json, which transformers and vLLM read."""

from __future__ import annotations

from typing import Any

from hpcpar.planner.shapes import LlamaConfig


def hugging_face_config(sizes: LlamaConfig, *, dtype: str, end_of_document: int | None) -> dict[str, Any]:
    """What config.json says of a model whose parameters have the names of `sizes.shapes()`.

    dtype             of the parameters in the files: float32, bfloat16, …
    end_of_document   the token at which to stop writing; None = never

    Dropout is of training alone and is left out. `torch_dtype` is what transformers before 5 and vLLM call
    `dtype`; both are given.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
    }
