"""Hugging Face: the parallel plan of a `transformers` Llama.

The library `transformers` is not needed to import this.

model = LlamaForCausalLM(config)                                  # or from_pretrained(…)
parallelize(model, hugging_face_llama_plan(model.config), mesh)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import nn

from hpcpar.errors import LayoutError
from hpcpar.models.hugging_face_experts import SharedMixture
from hpcpar.tensor_parallel import (
    Column,
    Enter,
    Gather,
    Norm,
    Row,
    Scatter,
    Split,
    Style,
    TensorParallel,
    Vocabulary,
    VocabularyEmbedding,
)
from hpcpar.tensor_parallel.split import require_fitting

if TYPE_CHECKING:
    from hpcpar.mesh import Mesh
    from hpcpar.tensor_parallel import Plan


class HuggingFaceLlamaConfig(Protocol):
    """Attributes of a transformers.LlamaConfig that the plan reads."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int


def hugging_face_llama_plan(
    config: HuggingFaceLlamaConfig, *, gather_logits: bool = True, mesh: Mesh | None = None
) -> Plan:
    """Return the plan of a transformers.LlamaForCausalLM (4.48 or later) or a model with the same modules.

    Such are Mistral, Qwen2, and Qwen3 with its norms of queries and keys; and with mixtures in place of some
    feed-forwards Mixtral, Qwen2-MoE, Qwen3-MoE, GLM-4-MoE, and OLMoE for one rank of tp.

    gather_logits   every rank gets all logits, as the model's own loss and `generate` need; False: its part
                    of the vocabulary, for `vocabulary_parallel_cross_entropy`
    mesh            its ranks of ep divide the experts of mixtures. None: `share_experts(…, tp=mesh.tp)` does
                    that afterwards, or each rank has all of them

    With sequence parallelism the sequence must divide among the ranks, so `generate`, which goes token by
    token, is for models without it. Positions and masks are made for the whole sequence, so the embedding's
    output is whole, and scattered before the first layer.
    Dropout draws from the process's own generator: seed the ranks of a tp group alike, by mesh.dp.rank. Then
    replicated activations have equal masks on all of them, and so have the heads of different ranks.
    """
    heads, key_value_heads = config.num_attention_heads, config.num_key_value_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    layer = "model.layers.*"
    return {
        "model.embed_tokens": VocabularyEmbedding(whole_sequence=True),
        "model.layers.0": Scatter(),
        f"{layer}.input_layernorm": Norm(),
        f"{layer}.self_attn": (Enter(), LlamaHeads(heads, key_value_heads)),
        f"{layer}.self_attn.q_proj": Column(heads=heads, enter=False),
        f"{layer}.self_attn.k_proj": Column(heads=key_value_heads, share_heads=True, enter=False),
        f"{layer}.self_attn.v_proj": Column(heads=key_value_heads, share_heads=True, enter=False),
        f"{layer}.self_attn.[qk]_norm": HeadNorm(head_size=head_size),
        f"{layer}.self_attn.o_proj": Row(),
        f"{layer}.post_attention_layernorm": Norm(),
        **_feed_forwards(config, mesh),
        "model.norm": (Norm(), Gather()),
        "lm_head": Vocabulary(gather_output=gather_logits, whole_sequence=True),
    }


def _feed_forwards(config: Any, mesh: Mesh | None) -> dict[str, Style]:
    """Return the plan of the layers' `mlp`: feed-forwards are divided, mixtures stay as they are."""
    is_mixture = [_has_mixture(config, layer) for layer in range(getattr(config, "num_hidden_layers", 1))]
    is_divided = mesh is not None and mesh.ep.size > 1
    mixture = SharedMixture(mesh.ep, mesh.edp) if mesh is not None and is_divided else SharedMixture()
    plan: dict[str, Style] = {}
    alike = len(set(is_mixture)) == 1
    for layer, mixed in {"*": is_mixture[0]}.items() if alike else enumerate(is_mixture):
        mlp = f"model.layers.{layer}.mlp"
        if mixed:
            plan[mlp] = mixture
            continue
        plan |= {
            mlp: Enter(),
            f"{mlp}.gate_proj": Column(enter=False),
            f"{mlp}.up_proj": Column(enter=False),
            f"{mlp}.down_proj": Row(),
        }
    return plan


def _has_mixture(config: Any, layer: int) -> bool:
    """True where a layer of a model of this config has a mixture of experts."""
    kind = getattr(config, "model_type", None)
    if kind in ("qwen2_moe", "qwen3_moe"):
        is_due = config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0
        return is_due and layer not in (config.mlp_only_layers or [])
    return kind in ("mixtral", "olmoe") or (kind == "glm4_moe" and layer >= config.first_k_dense_replace)


@dataclass(frozen=True)
class LlamaHeads(Style):
    """Sets an attention module's numbers of heads to those of this rank.

    With fewer key-value heads than ranks, a rank's one head serves fewer queries.
    """

    heads: int
    key_value_heads: int

    def splits(self, name: str, module: nn.Module, size: int) -> dict[str, Split]:
        divided = {f"{name}: num_attention_heads": self.heads}
        require_fitting(divided, {f"{name}: num_key_value_heads": self.key_value_heads}, size)
        return {}

    def applied(self, module: nn.Module, tp: TensorParallel) -> nn.Module:
        heads, key_value_heads = self.heads // tp.size, max(1, self.key_value_heads // tp.size)
        local = {
            "num_heads": heads,
            "num_key_value_heads": key_value_heads,
            "num_key_value_groups": heads // key_value_heads,
        }
        for attribute, count in local.items():
            if hasattr(module, attribute):
                setattr(module, attribute, count)
        return module


@dataclass(frozen=True)
class HeadNorm(Norm):
    """An optional norm of each head of queries or keys, with one weight for all heads."""

    of_heads: bool = True
    head_size: int = 0

    optional: ClassVar[bool] = True

    def splits(self, name: str, module: nn.Module, size: int) -> dict[str, Split]:
        for parameter, values in module.named_parameters():
            if size > 1 and list(values.shape) != [self.head_size]:
                raise LayoutError(
                    f"{name}.{parameter} has the shape {list(values.shape)}, where the norm of a head has "
                    f"[{self.head_size}]; a norm of all heads together needs them all on each rank: take "
                    f"tp=1, and more ranks of dp, cp or ep"
                )
        return {}
