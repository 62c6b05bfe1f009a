"""The loss of a language model. Shape letters: B batch, S sequence, V vocabulary."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional

from hpcpar.errors import MismatchError
from hpcpar.tensor_parallel.cross_entropy import IGNORED

Reduction = Literal["mean", "sum", "none"]


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
