"""Text generation, token by token. Shape letters: B batch, S sequence, V vocabulary."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hpcpar.errors import ConfigError
from hpcpar.planner.shapes import LlamaConfig


class LanguageModel(Protocol):
    """A Llama, or its parts on several ranks. Shapes as there."""

    config: LlamaConfig
    sequence_multiple: int
    training: bool

    def logits_at(self, tokens: Tensor, place: int) -> Tensor: ...

    def train(self, mode: bool = True) -> Any: ...


@torch.no_grad()
def generate(
    model: LanguageModel,
    tokens: Tensor,
    new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Continue tokens [B, S], S >= 1, by `new_tokens` each: [B, S + new_tokens].

    tokens        all of them are text: there is no padding, so texts of other lengths take calls of their own
    temperature   0 takes the likeliest token, 1 draws from the model's own distribution
    top_k         draw among the k likeliest only
    seed          of the draws, from a generator of their own

    The model sees the last `max_sequence` tokens. Every token costs a forward pass over all of them (there is
    no cache of keys and values), which suits samples during training, not serving. All ranks of a parallel
    model call it alike, and all get the text.
    """
    if tokens.dim() != 2 or tokens.shape[1] < 1:
        raise ConfigError(
            f"generate needs tokens [B, S] with at least one to continue, not {[*tokens.shape]}"
        )
    if not temperature >= 0 or (top_k is not None and top_k < 1) or new_tokens < 0:
        raise ConfigError(
            f"temperature={temperature} and new_tokens={new_tokens} must be >= 0, top_k={top_k} >= 1 or None"
        )
    generator = torch.Generator(tokens.device).manual_seed(seed)
    was_training = model.training
    model.train(False)
    try:
        for _ in range(new_tokens):
            chosen = _choose(_next_logits(model, tokens).float(), temperature, top_k, generator)
            tokens = torch.cat((tokens, chosen), dim=1)
    finally:
        model.train(was_training)
    return tokens


def _next_logits(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Return logits [B, V] of the token after tokens [B, S]."""
    multiple = model.sequence_multiple
    window = tokens[:, -(model.config.max_sequence // multiple * multiple) :]
    length = window.shape[1]
    # Attention is causal: the padding does not change the logits before it.
    padded = functional.pad(window, (0, -length % multiple))
    return model.logits_at(padded, length - 1)


def _choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """Choose one token for each row of logits [B, V]: [B, 1]."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    probabilities = (logits / temperature).softmax(-1)
    return torch.multinomial(probabilities, 1, generator=generator)
