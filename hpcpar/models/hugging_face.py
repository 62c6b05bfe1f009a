"""Hugging Face: the parallel plan of a `transformers` Llama.

The library `transformers` is not needed to import this.

model = LlamaForCausalLM(config)                                  # or from_pretrained(…)
parallelize(model, hugging_face_llama_plan(model.config), mesh)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from torch import nn

from hpcpar.errors import LayoutError
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
    from hpcpar.tensor_parallel import Plan


class HuggingFaceLlamaConfig(Protocol):
    """Attributes of a transformers.LlamaConfig that the plan reads."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int


def hugging_face_llama_plan(config: HuggingFaceLlamaConfig, *, gather_logits: bool = True) -> Plan:
    """Return the plan of a transformers.LlamaForCausalLM (4.48 or later) or a model with the same modules.

    Such are Mistral, Qwen2, and Qwen3 with its norms of queries and keys.

    gather_logits   every rank gets all logits, as the model's own loss and `generate` need; False: its part
                    of the vocabulary, for `vocabulary_parallel_cross_entropy`

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
        f"{layer}.mlp": Enter(),
        f"{layer}.mlp.gate_proj": Column(enter=False),
        f"{layer}.mlp.up_proj": Column(enter=False),
        f"{layer}.mlp.down_proj": Row(),
        "model.norm": (Norm(), Gather()),
        "lm_head": Vocabulary(gather_output=gather_logits, whole_sequence=True),
    }


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
            if list(values.shape) != [self.head_size]:
                raise LayoutError(
                    f"{name}.{parameter} has the shape {list(values.shape)}, where the norm of a head has "
                    f"[{self.head_size}]; a norm of all heads together is not in this plan: write one for "
                    f"this model"
                )
        return {}
