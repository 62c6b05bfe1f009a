"""Tensor-parallel layers of a Llama."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hpcpar.context_parallel import ContextParallel
from hpcpar.errors import LayoutError
from hpcpar.models.expert_ranks import ExpertRanks, expert_layers, require_feed_forward
from hpcpar.models.layers import Layers
from hpcpar.planner.shapes import LlamaConfig
from hpcpar.tensor_parallel import (
    ColumnParallelLinear,
    Heads,
    RandomStreams,
    RMSNorm,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    causal_attention,
    project,
    vocabulary_parallel_cross_entropy,
    whole_logits,
)
from hpcpar.tensor_parallel.attention import require_heads
from hpcpar.tensor_parallel.region_styles import OnOwnPart

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


def parallel_layers(
    config: LlamaConfig,
    tp: TensorParallel | Communicator,
    *,
    context: ContextParallel | None = None,
    streams: RandomStreams | None = None,
    experts: ExpertRanks | None = None,
) -> Layers:
    """Divide heads, ffn and vocabulary over the ranks of `tp`: Llama(config, parallel_layers(config, tp)).

    context   ranks that share each sequence, as well; None: each has whole ones
    streams   random numbers of dropout; None: from seed 0
    experts   ranks among which experts are divided, as well; None: they are split as the other layers are
    errors    LayoutError for heads or an ffn_size that do not divide among the ranks, and for a norm of all
              heads together; key-value heads may be fewer than ranks, and a vocabulary that does not divide
              is padded
    """
    tp = TensorParallel.of(tp)
    require_heads(config.heads, config.key_value_heads, tp.size)
    experts = experts or ExpertRanks(split=True)
    require_feed_forward(config, tp.size, experts)

    if config.qk_norm == "all" and tp.size > 1:
        raise LayoutError(
            f"qk_norm='all' normalises all heads together, and each of tp={tp.size} ranks has some of them; "
            "take tp=1, and more ranks of dp, cp, ep or pp"
        )

    def column(in_features: int, out_features: int) -> nn.Module:
        return ColumnParallelLinear(in_features, out_features, tp, bias=False, draw=False)

    def key_value(in_features: int, heads: int, head_size: int) -> nn.Module:
        return ColumnParallelLinear(in_features, Heads(heads, head_size), tp, bias=False, draw=False)

    def head_norm(width: int, epsilon: float) -> nn.Module:
        norm = RMSNorm(width, epsilon)
        return norm if tp.size == 1 else OnOwnPart(norm, tp)

    def vocabulary(in_features: int, out_features: int) -> nn.Module:
        return ColumnParallelLinear(in_features, out_features, tp, bias=False, pad=True, draw=False)

    return Layers(
        column_linear=column,
        key_value_linear=key_value,
        row_linear=partial(RowParallelLinear, tp=tp, bias=False, draw=False),
        vocabulary_linear=vocabulary,
        embedding=partial(VocabParallelEmbedding, tp=tp, draw=False),
        norm=partial(RMSNorm, tp=tp),
        head_norm=head_norm,
        project=project,
        loss=partial(vocabulary_parallel_cross_entropy, vocabulary=config.vocab_size, comm=tp.comm),
        whole_logits=partial(whole_logits, vocabulary=config.vocab_size, comm=tp.comm),
        streams=streams or RandomStreams(0, tp.rank),
        residual_stream="different" if tp.sequence_parallel else "same",
        sequence_multiple=tp.size if tp.sequence_parallel else 1,
        attention=causal_attention if context is None else context.model_attention,
        context=context,
        **expert_layers(config, tp, context, experts),
        places=None if context is None else partial(_own_places, context, tp),
    )


def _own_places(context: ContextParallel, tp: TensorParallel) -> Tensor:
    """Return the places of the tokens that this rank has between the layers."""
    places = context.places()
    return torch.tensor_split(places, tp.size)[tp.rank] if tp.sequence_parallel else places
