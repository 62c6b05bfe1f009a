"""Factories of a model's layers: parallel layers are passed in here in place of serial ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor, nn
from torch.nn import functional

from hpcpar.context_parallel import ContextParallel
from hpcpar.errors import MismatchError
from hpcpar.expert_parallel import ExpertParallel
from hpcpar.models.balancing import Balancing
from hpcpar.models.expert_tokens import ExpertTokens
from hpcpar.planner.shapes import LlamaConfig
from hpcpar.tensor_parallel import Dropout, RandomStreams, RMSNorm, Stream, causal_attention
from hpcpar.tensor_parallel.cross_entropy import IGNORED

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

LinearFactory = Callable[[int, int], nn.Module]
"""(in_features, out_features), both of the whole layer -> the module, without bias."""

HeadsFactory = Callable[[int, int, int], nn.Module]
"""(in_features, heads, head_size), of the whole layer -> the module, without bias."""

EmbeddingFactory = Callable[[int, int], nn.Module]
"""(vocabulary, hidden) -> the module."""

NormFactory = Callable[[int, float], nn.Module]
"""(hidden, epsilon) -> the module."""

Attention = Callable[[Tensor, Tensor, Tensor, Dropout | None], Tensor]
"""queries [B, A, S, D], keys and values [B, K, S, D] -> [B, A, S, D], causal."""

Projection = Callable[[Sequence[nn.Module], Tensor], Sequence[Tensor]]
"""(layers, their common input) -> output of each."""


Reduction = Literal["mean", "sum", "none"]


class Loss(Protocol):
    """Cross-entropy between the model's logits and targets [B, S], as `next_token_loss`."""

    def __call__(self, logits: Tensor, targets: Tensor, *, reduction: Reduction = "mean") -> Tensor: ...


class Linear(nn.Linear):
    """A linear layer without bias, initialized by `initialise`."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw nothing: building a model must not move the process's random numbers."""


class Embedding(nn.Embedding):
    """An embedding, initialized by `initialise`."""

    def reset_parameters(self) -> None:
        """Draw nothing, as `Linear`."""


def key_value_linear(in_features: int, heads: int, head_size: int) -> nn.Module:
    """Return the projection to keys or to values."""
    return Linear(in_features, heads * head_size)


def project_each(layers: Sequence[nn.Module], hidden: Tensor) -> list[Tensor]:
    """Apply each layer to the same input."""
    return [layer(hidden) for layer in layers]


def next_token_loss(logits: Tensor, targets: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """Return the cross-entropy in nats between logits [B, S, V] and the next tokens [B, S].

    "mean" is over targets that are not `IGNORED`, "sum" leaves the division to the caller, "none"
    gives [B, S]. Half-precision logits are widened to float32 first.
    """
    if logits.shape[:-1] != targets.shape:
        raise MismatchError(
            f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)} do not fit: "
            f"logits must be [B, S, V] and targets [B, S]"
        )
    wide = logits.float() if logits.element_size() < 4 else logits
    loss = functional.cross_entropy(
        wide.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction=reduction
    )
    return loss.view(targets.shape) if reduction == "none" else loss


def unchanged(logits: Tensor) -> Tensor:
    """Return the logits as they are."""
    return logits


@dataclass(frozen=True)
class Layers:
    """Factories and functions of a model's layers; the defaults give the serial model.

    column_linear       projections whose outputs may be split over ranks: queries, gate, up
    key_value_linear    keys and values, whose heads may be fewer than ranks
    row_linear          projections whose inputs are split likewise: o, down
    vocabulary_linear   hidden to logits
    head_norm           of this rank's heads of queries or keys
    project             applies layers that share an input together
    loss                of the logits of `vocabulary_linear`
    whole_logits        gathers the logits of `vocabulary_linear`
    streams             random numbers of dropout
    residual_stream     stream for dropout before the residual sum
    sequence_multiple   sequences must be a multiple of it
    places              gives the places of this rank's tokens in their sequence, for dropout; None: by stream
    context             ranks that share each sequence; None: each has whole sequences
    experts             ExpertParallel: ranks among which experts are divided; None: each has all of them
    expert_replicas     ranks with copies of this rank's experts; None: those with copies of the other layers
    expert_column_linear, expert_row_linear   an expert's gate and up, and its down
    expert_tokens       takes tokens to router and experts where ranks share layers or sequences
    balancing           of all mixtures of a model; None: a new one for each model
    """

    column_linear: LinearFactory = Linear
    key_value_linear: HeadsFactory = key_value_linear
    row_linear: LinearFactory = Linear
    vocabulary_linear: LinearFactory = Linear
    embedding: EmbeddingFactory = Embedding
    norm: NormFactory = RMSNorm
    head_norm: NormFactory = RMSNorm
    attention: Attention = causal_attention
    project: Projection = project_each
    loss: Loss = next_token_loss
    whole_logits: Callable[[Tensor], Tensor] = unchanged
    streams: RandomStreams = field(default_factory=lambda: RandomStreams(0, 0))
    residual_stream: Stream = "same"
    sequence_multiple: int = 1
    places: Callable[[], Tensor] | None = None
    context: ContextParallel | None = None
    experts: ExpertParallel | None = None
    expert_replicas: Communicator | None = None
    expert_column_linear: LinearFactory = Linear
    expert_row_linear: LinearFactory = Linear
    expert_tokens: ExpertTokens = field(default_factory=ExpertTokens)
    balancing: Balancing | None = None

    def balanced(self, config: LlamaConfig) -> Layers:
        """Return these with the object that balances a model's experts, where it has any."""
        if self.balancing is not None or config.experts is None:
            return self
        return replace(self, balancing=Balancing(config.experts))
