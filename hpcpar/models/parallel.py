"""Parallel layers of a Llama: divided over tp, with sequences over cp and experts over ep."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar.context_parallel import ContextParallel
from hpcpar.errors import LayoutError
from hpcpar.expert_parallel import ExpertParallel
from hpcpar.models.balancing import Balancing
from hpcpar.models.expert_tokens import ExpertTokens
from hpcpar.models.layers import Layers, Linear
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
from hpcpar.tensor_parallel.split import require_divisible

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


@dataclass(frozen=True, eq=False)
class ExpertRanks:
    """Ranks that divide a model's experts among themselves.

    parallel    divides the experts: ExpertParallel(mesh.ep, count); None: each has all of them
    split       each expert is split over the ranks of tp, as the other layers are (etp = tp); False: each is
                whole on a rank (etp = 1), and `parallel` may spread them over tp as well
    replicas    ranks with copies of this rank's experts (mesh.edp); None: the optimizer's, as where ep = 1
    replica     this rank's place among those with other sequences (its dp coordinate), by which tokens are
                ordered
    balancing   of the model; None: a new one, for ranks without others that have other sequences (dp = 1)
    """

    parallel: ExpertParallel | None = None
    split: bool = False
    replicas: Communicator | None = None
    replica: int = 0
    balancing: Balancing | None = None


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

    column = partial(ColumnParallelLinear, tp=tp, bias=False, draw=False)
    row = partial(RowParallelLinear, tp=tp, bias=False, draw=False)
    split = experts.split and tp.size > 1
    tokens = ExpertTokens(tp, split, context, experts.replica)

    def key_value(in_features: int, heads: int, head_size: int) -> nn.Module:
        return column(in_features, Heads(heads, head_size))

    def head_norm(width: int, epsilon: float) -> nn.Module:
        norm = RMSNorm(width, epsilon)
        return norm if tp.size == 1 else OnOwnPart(norm, tp)

    return Layers(
        column_linear=column,
        key_value_linear=key_value,
        row_linear=row,
        vocabulary_linear=partial(column, pad=True),
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
        experts=experts.parallel,
        expert_replicas=experts.replicas,
        expert_column_linear=partial(column, enter=False) if split else Linear,
        expert_row_linear=partial(_PartialRowLinear, tp=tp, bias=False, draw=False) if split else Linear,
        expert_tokens=tokens,
        balancing=experts.balancing or _balancing_within(config, tokens),
        places=None if context is None else partial(_own_places, context, tp),
    )


def _own_places(context: ContextParallel, tp: TensorParallel) -> Tensor:
    """Return the places of the tokens that this rank has between the layers."""
    places = context.places()
    return torch.tensor_split(places, tp.size)[tp.rank] if tp.sequence_parallel else places


def _balancing_within(config: LlamaConfig, tokens: ExpertTokens) -> Balancing | None:
    """Return what balances experts over the ranks that share sequences."""
    if config.experts is None:
        return None
    comms = [tokens.tp.comm] if tokens.tp is not None and tokens.are_shared_out else []
    if tokens.context is not None and tokens.context.comm.size > 1:
        comms.append(tokens.context.comm)
    if len(comms) > 1:
        raise LayoutError(
            "tp and cp both divide the tokens of a sequence, and loads are counted over both; give "
            "ExpertRanks(balancing=Balancing(experts, mesh.comm('dp', 'cp', 'tp'), mesh.comm('cp', 'tp')))"
        )
    return Balancing(config.experts, *comms, *comms)


class _PartialRowLinear(RowParallelLinear):
    """A row-parallel layer whose caller sums the outputs over ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


def require_feed_forward(config: LlamaConfig, tp: int, ranks: ExpertRanks) -> None:
    """Raise LayoutError where the feed-forwards do not divide among `tp` ranks."""
    experts = config.experts
    if experts is None or experts.first_dense:
        require_divisible(config.ffn_width, tp, "ffn_size")
    if experts is None:
        return
    if experts.shared_ffn_size:
        require_divisible(experts.shared_ffn_size, tp, "experts.shared_ffn_size")
    if ranks.split:
        require_divisible(experts.ffn_size, tp, "experts.ffn_size")
    is_divided = ranks.parallel is not None and ranks.parallel.comm.size > 1
    if ranks.replicas is None and (is_divided or (tp > 1 and not ranks.split)):
        raise LayoutError(
            "ExpertRanks without replicas: the ranks with copies of an expert are not those of the optimizer "
            f"here where {'experts are divided' if is_divided else f'each of tp={tp} ranks has whole ones'}; "
            "give them, as replicas=mesh.edp"
        )
