"""A decoder of the Llama architecture: RMSNorm, rotary embeddings, grouped queries, SwiGLU.

Shape letters: B batch, S sequence on this rank, H hidden, F ffn, A heads, K key-value heads,
D head size, V vocabulary. A, K, F and V are those of this rank when its layers are parallel.

    tokens [B, S] -> embed_tokens -> [B, S, H]
      x = x + self_attn(input_layernorm(x))                 \\  layers
      x = x + mlp(post_attention_layernorm(x))              /   mlp: feed-forward or mixture of experts
    norm -> lm_head -> logits [B, S, V]

A `Part` of it begins and ends between any two of its layers: a pipeline stage.

Modules are named as in Hugging Face's Llama, so a state dict of one is that of the other.
source   Touvron et al. 2023, arXiv 2302.13971; Ainslie et al. 2023, arXiv 2305.13245
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpcpar.autograd import Recompute, recompute
from hpcpar.context_parallel import Mask
from hpcpar.errors import ConfigError, LayoutError, MismatchError
from hpcpar.models.initialise import initial_value, initialise
from hpcpar.models.layers import Layers, Reduction
from hpcpar.models.mixture import FeedForward, MixtureOfExperts
from hpcpar.planner.shapes import LlamaConfig, Part, RecomputeMode
from hpcpar.tensor_parallel import Dropout, Stream, own_shard

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, [S, D/2] each."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Names of one parameter where embeddings are tied."""


def rotary_tables(
    positions: Tensor, head_size: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [S, D/2] of position · theta^(-2i/D), i = 0 … D/2 - 1.

    Angles are computed in float64: position · frequency loses digits in float32 from a few thousand positions
    on. The tables are float64 for a float64 model and float32 for any other.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float64, device=positions.device) / head_size
    angles = positions.to(torch.float64)[:, None] * theta**-exponents
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return angles.cos().to(wide), angles.sin().to(wide)


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate each pair (i, i + D/2) of the last dim by its angle: [B, S, A, D] -> the same shape.

    cosines, sines   [S, 1, D/2]

    Pairs are halves, not neighbours, as in Hugging Face's Llama, so its weights fit.
    source   Su et al. 2021, arXiv 2104.09864
    """
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return turned.to(heads.dtype)


class SelfAttention(nn.Module):
    """Causal self-attention with grouped queries: A/K heads of queries share a head of keys and values."""

    def __init__(self, config: LlamaConfig, layers: Layers, *, selective: bool) -> None:
        super().__init__()
        queries = config.heads * config.head_width
        self.head_size = config.head_width
        self.q_proj = layers.column_linear(config.hidden_size, queries)
        self.k_proj = layers.key_value_linear(config.hidden_size, config.key_value_heads, self.head_size)
        self.v_proj = layers.key_value_linear(config.hidden_size, config.key_value_heads, self.head_size)
        self.o_proj = layers.row_linear(queries, config.hidden_size)
        self.qk_norm = config.qk_norm
        if config.qk_norm != "none":
            norms = (layers.head_norm(width, config.norm_epsilon) for width in config.query_key_norms)
            self.q_norm, self.k_norm = norms
        self.dropout = _dropout(config, layers, "different")
        self.selective = selective
        self._attention = layers.attention
        self._project = layers.project
        self._streams = layers.streams

    def forward(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        """[B, S, H] -> [B, S, H]"""
        projected = self._project((self.q_proj, self.k_proj, self.v_proj), hidden)
        queries, keys, values = (self._heads(part) for part in projected)
        if self.qk_norm != "none":
            queries, keys = self._normalised(self.q_norm, queries), self._normalised(self.k_norm, keys)
        cosines, sines = (table.unsqueeze(1) for table in rotation)
        # Rotated as [B, S, A, D], so that the attention's output has that memory layout too, as o_proj needs.
        queries, keys = rotate(queries, cosines, sines), rotate(keys, cosines, sines)
        queries, keys, values = (heads.transpose(1, 2) for heads in (queries, keys, values))
        if self.selective:
            mixed = recompute(self._core, queries, keys, values, streams=self._streams)
        else:
            mixed = self._core(queries, keys, values)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output

    def _core(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self._attention(queries, keys, values, self.dropout)

    def _heads(self, projected: Tensor) -> Tensor:
        """[B, S, A·D] -> [B, S, A, D], for this rank's heads."""
        heads = projected.shape[-1] // self.head_size  # not -1: a batch may be empty
        return projected.view(*projected.shape[:-1], heads, self.head_size)

    def _normalised(self, norm: nn.Module, heads: Tensor) -> Tensor:
        """[B, S, A, D] -> the same shape"""
        normalised: Tensor = norm(heads.flatten(-2) if self.qk_norm == "all" else heads)
        return normalised.view_as(heads)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream.

    number   in the whole model, from 0
    mode     activations recomputed in backward
    """

    def __init__(self, config: LlamaConfig, layers: Layers, number: int, mode: RecomputeMode) -> None:
        super().__init__()
        self.input_layernorm = layers.norm(config.hidden_size, config.norm_epsilon)
        self.self_attn = SelfAttention(config, layers, selective=mode == "selective")
        self.post_attention_layernorm = layers.norm(config.hidden_size, config.norm_epsilon)
        self.mlp = _feed_forward(config, layers, number)
        self.dropout = _dropout(config, layers, layers.residual_stream)
        self.mode = mode
        self._streams = layers.streams

    def forward(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        """[B, S, H] -> [B, S, H]"""
        if self.mode == "full":
            return recompute(self._layer, hidden, *rotation, streams=self._streams)
        return self._layer(hidden, *rotation)

    def _layer(self, hidden: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        attended = self.self_attn(self.input_layernorm(hidden), (cosines, sines))
        hidden = hidden + self.dropout(attended)
        fed = self.mlp(self.post_attention_layernorm(hidden))
        output: Tensor = hidden + self.dropout(fed)
        return output


def _feed_forward(config: LlamaConfig, layers: Layers, number: int) -> nn.Module:
    experts = config.experts_of(number)
    if experts is not None:
        return MixtureOfExperts(config.hidden_size, experts, layers, number)
    column, row = layers.column_linear, layers.row_linear
    return FeedForward(config.hidden_size, config.ffn_width, column=column, row=row, project=layers.project)


def _dropout(config: LlamaConfig, layers: Layers, stream: Stream) -> Dropout:
    return Dropout(config.dropout, layers.streams, stream, layers.places)


class Decoder(nn.Module):
    """A Llama, or a part of one, without its output projection."""

    def __init__(self, config: LlamaConfig, layers: Layers, again: Recompute, part: Part) -> None:
        super().__init__()
        self.config = config
        self.part = part
        self.sequence_multiple = layers.sequence_multiple
        self._context = layers.context
        if part.embeds:
            self.embed_tokens = layers.embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList()
        for number in part.layers:
            layer = DecoderLayer(config, layers, number, again.of_layer(number, config.layers))
            self.layers.add_module(str(number), layer)  # append would count from 0
        if part.heads:
            self.norm = layers.norm(config.hidden_size, config.norm_epsilon)

    def forward(self, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
        """tokens [B, S], or the previous part's output, and positions [S] -> [B, S, H]

        positions   None: 0 … S - 1, or those of this rank's tokens in their documents
        """
        if positions is None and self._context is not None:
            positions = self._context.positions().to(inputs.device)
        elif positions is None:
            positions = torch.arange(self.sequence(inputs), device=inputs.device)
        elif list(positions.shape) != [self.sequence(inputs)]:
            raise MismatchError(
                f"positions {list(positions.shape)} of sequences of {self.sequence(inputs)} tokens; give one "
                "for each token, [S], the same in all rows"
            )
        hidden: Tensor = self.embed_tokens(inputs) if self.part.embeds else inputs
        rotation = rotary_tables(positions, self.config.head_width, self.config.rope_theta, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, rotation)
        return self.norm(hidden) if self.part.heads else hidden

    def sequence(self, inputs: Tensor) -> int:
        """Return the tokens of each whole sequence; a rank may hold a part of it in [B, S, H]."""
        return inputs.shape[1] * (1 if self.part.embeds else self.sequence_multiple)


class Llama(nn.Module):
    """The whole model or a part of it, serial with the default `layers`.

    layers      factories of its layers: `parallel_layers(config, tp)` for tensor parallelism
    seed        of the initial values, which depend on it and on parameter names alone; None leaves the
                parameters as the layers made them (unset memory), for a caller that loads or shards values
                itself
    recompute   activations recomputed in backward; None = none
    part        its parameters have the names and the values of the whole model; None = the whole model
    embedding   with tied embeddings, the embedding's parameter for a part that has only the head; None = the
                head has its own, initialized with the embedding's values
    errors      LayoutError for a part with layers that the model does not have
    """

    def __init__(
        self,
        config: LlamaConfig,
        layers: Layers | None = None,
        *,
        seed: int | None = 0,
        recompute: Recompute | None = None,
        part: Part | None = None,
        embedding: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        layers, part = (layers or Layers()).balanced(config), part or Part.whole(config.layers)
        _require_layers(part.layers, config)
        self.config = config
        self.part = part
        self.model = Decoder(config, layers, recompute or Recompute(), part)
        if part.heads:
            self.lm_head = layers.vocabulary_linear(config.hidden_size, config.vocab_size)
            if config.tie_embeddings and part.embeds:
                embedding = self.model.embed_tokens.get_parameter("weight")
            if config.tie_embeddings and embedding is not None:
                self.lm_head.weight = embedding
        self.sequence_multiple = layers.sequence_multiple
        self.random_streams = layers.streams
        self.context = layers.context
        self.balancing = layers.balancing
        self._loss = layers.loss
        self._whole_logits = layers.whole_logits
        if seed is not None:
            self._initialise(
                seed, copies_embedding=part.heads and config.tie_embeddings and embedding is None
            )

    def forward(self, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return logits [B, S, V] of the token that follows each of tokens [B, S].

        With parallel layers V is this rank's part of the vocabulary: see `loss` and `whole_logits`. A part
        without the embedding takes [B, S, H] of the part before, and one without the head returns such; S is
        then this rank's part of the sequence, with sequence parallelism.

        With a `context` tokens are those of whole sequences, the same on all its ranks. Each takes its own,
        and so its logits are of these alone: see `logits_at`.

        positions   [S], of each token in the whole sequence, for a rank that holds a part of it; None = 0 …
                    S - 1
        """
        if self.context is not None and self.part.embeds:
            inputs = self.context.own_tokens(inputs)
        sequence = self.model.sequence(inputs) if self.context is None else self.context.longest
        if sequence > self.config.max_sequence:
            raise ConfigError(
                f"a sequence of {sequence} tokens is longer than max_sequence="
                f"{self.config.max_sequence}; cut it, or build the model with a larger max_sequence"
            )
        hidden: Tensor = self.model(inputs, positions)
        return self.lm_head(hidden) if self.part.heads else hidden

    def loss(self, logits: Tensor, targets: Tensor, *, reduction: Reduction = "mean") -> Tensor:
        """Return `next_token_loss` of `forward`'s logits, also where each rank has a part of them.

        targets   [B, S], of whole sequences
        """
        own = targets if self.context is None else self.context.own_tokens(targets)
        return self._loss(logits, own, reduction=reduction)

    def logits_at(self, tokens: Tensor, place: int) -> Tensor:
        """Return the logits [B, V] of what follows tokens [B, S] at a place, on every rank; collective."""
        if self.context is None:
            return self.whole_logits(self(tokens)[:, place])
        with self.context.using(Mask(tokens.shape[1])):
            return self.whole_logits(self.context.unshard(self(tokens))[:, place])

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Return all of `forward`'s logits on every rank; collective where each has a part."""
        return self._whole_logits(logits)

    @torch.no_grad()
    def _initialise(self, seed: int, *, copies_embedding: bool) -> None:
        # A tied head is the embedding, or starts as a copy of it.
        own = nn.Module()
        own.model = self.model
        if self.part.heads and not self.config.tie_embeddings:
            own.lm_head = self.lm_head
        initialise(own, self.config, seed=seed)
        if copies_embedding:
            weight = self.lm_head.get_parameter("weight")
            if not weight.is_meta:
                weight.copy_(own_shard(weight, initial_value(self.config, EMBEDDING, seed)))


def _require_layers(numbers: range, config: LlamaConfig) -> None:
    for number in numbers:
        if not 0 <= number < config.layers:
            raise LayoutError(
                f"a part with layer {number} of a model whose layers are 0 to {config.layers - 1}; "
                "choose among these"
            )
