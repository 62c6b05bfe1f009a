"""Vocabulary-parallel cross-entropy: no rank ever holds all logits.

Shape letters: B batch, S sequence, V vocabulary, p ranks.

    m  = maximum over all logits            1 value a token is sent
    s  = Σ exp(logit - m)                   1 value
    x  = the target's logit                 1 value, in the same message as s
    loss = m + log s - x                    instead of V values
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from hpcpar.autograd import gather_from
from hpcpar.autograd.dim_collectives import summed
from hpcpar.autograd.own_functions import differentiated_once
from hpcpar.errors import ConfigError, MismatchError
from hpcpar.tensor_parallel.sameness import Sameness
from hpcpar.tensor_parallel.split import Split, padded_length, split_evenly
from hpcpar.uncompiled import uncompiled

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

IGNORED = -100
"""Target without a loss: padding, or a prompt that is not to be learnt."""


@uncompiled
def vocabulary_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    vocabulary: int,
    comm: Communicator,
    *,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = IGNORED,
) -> Tensor:
    """Compute the cross-entropy in nats of logits and targets [B, S], the same on every rank. Collective.

    logits            [B, S, V/p], from a column-parallel layer with `pad`; padding is ignored
    vocabulary        V, without padding
    label_smoothing   share of the target's weight that is spread evenly over the vocabulary
    z_loss            factor of log² of the softmax's denominator in the loss (arXiv 2204.02311, section 5)
    ignore_index      target without a loss
    reduction         "mean" over targets with a loss, "sum", or "none" for [B, S]
    sends             all-reduces of 1 and of 2 values a token; with label smoothing 1 more

    Half-precision logits are widened to float32. Its gradient cannot be differentiated again.
    errors   MismatchError for shapes that do not fit, for a target outside the vocabulary (on a CPU);
             ConfigError for a label_smoothing outside 0 … 1, or another reduction
    source   Shoeybi et al. 2019, arXiv 1909.08053, section 3; Szegedy et al. 2016, arXiv 1512.00567, sec. 7
    """
    split = _split(vocabulary, comm)
    if logits.shape[:-1] != targets.shape or logits.shape[-1] != split.shard_length(comm.rank):
        raise MismatchError(
            f"logits {list(logits.shape)} and targets {list(targets.shape)} do not fit: of a vocabulary of "
            f"{vocabulary} on {comm.size} ranks, logits must be [B, S, {split.shard_length(comm.rank)}] and "
            f"targets [B, S]"
        )
    if not 0 <= label_smoothing <= 1:
        raise ConfigError(f"label_smoothing={label_smoothing}; give a share from 0 to 1")
    if reduction not in ("mean", "sum", "none"):
        raise ConfigError(f"reduction={reduction!r}; there are 'mean', 'sum' and 'none'")
    if comm.size > 1:
        if comm not in _SAMENESS:
            _SAMENESS[comm] = Sameness(comm, "the targets of a vocabulary-parallel loss")
        _SAMENESS[comm].require(targets)
    counted = targets != ignore_index
    _require_known(targets, counted, vocabulary)
    wide = logits.float() if logits.element_size() < 4 else logits
    losses = _CrossEntropy.apply(wide, targets, counted, split, comm, label_smoothing, z_loss)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses  # type: ignore[no-any-return]
    total: Tensor = losses.sum()
    return total / counted.sum() if reduction == "mean" else total


_SAMENESS: weakref.WeakKeyDictionary[Communicator, Sameness] = weakref.WeakKeyDictionary()
"""Counters of calls by communicator: a function has no state of its own."""


def whole_logits(logits: Tensor, vocabulary: int, comm: Communicator) -> Tensor:
    """Gather [B, S, V] from every rank's [B, S, V/p], for inspection: it sends V values a token."""
    return gather_from(logits, comm, -1)[..., :vocabulary]


def _split(vocabulary: int, comm: Communicator) -> Split:
    return split_evenly(vocabulary, comm.size, padded=padded_length(vocabulary, comm.size))


def _require_known(targets: Tensor, counted: Tensor, vocabulary: int) -> None:
    if targets.device.type != "cpu" or not targets.numel():
        return
    lowest, highest = torch.aminmax(targets.masked_fill(~counted, 0))
    if lowest < 0 or highest >= vocabulary:
        wrong = lowest if lowest < 0 else highest
        raise MismatchError(f"target {int(wrong)} is outside a vocabulary of {vocabulary}")


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        counted: Tensor,
        split: Split,
        comm: Communicator,
        smoothing: float,
        z_loss: float,
    ) -> Tensor:
        held = split.held(comm.rank)
        known = logits[..., :held]
        highest = known.amax(-1) if held else logits.new_full(targets.shape, -torch.inf)
        highest = summed(highest, comm, consume=True, op="max")
        shares = torch.empty_like(logits)
        torch.sub(known, highest.unsqueeze(-1), out=shares[..., :held])
        shares[..., held:] = 0.0  # padding has no share
        of_vocabulary = shares[..., :held].sum(-1) if smoothing else None
        place = targets - split.parts[comm.rank][0][0]
        own = counted & (place >= 0) & (place < held)
        place = place.masked_fill(~own, 0)
        of_target = shares.gather(-1, place.unsqueeze(-1)).squeeze(-1).masked_fill(~own, 0.0)
        shares[..., :held].exp_()
        own_sums = [shares.sum(-1), of_target, *([] if of_vocabulary is None else [of_vocabulary])]
        sums = summed(torch.stack(own_sums), comm, consume=True)
        total, of_target = sums[0], sums[1]
        log_total = total.log()
        losses = log_total - of_target
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * (log_total - sums[2] / split.length)
        log_denominator = log_total + highest
        if z_loss:
            losses = losses + z_loss * log_denominator.square()
        ctx.save_for_backward(shares, total, log_denominator if z_loss else None, place, own, counted)
        ctx.smoothing, ctx.z_loss, ctx.held, ctx.vocabulary = smoothing, z_loss, held, split.length
        return losses.masked_fill(~counted, 0.0)

    @staticmethod
    @differentiated_once(
        "a vocabulary-parallel loss; give torch's cross_entropy the logits of whole_logits()"
    )
    def backward(ctx: Any, gradient: Tensor) -> Any:
        shares, total, log_denominator, place, own, counted = ctx.saved_tensors
        gradient = gradient.masked_fill(~counted, 0.0)
        slope = gradient / total
        if log_denominator is not None:
            slope = slope * (1 + 2 * ctx.z_loss * log_denominator)
        of_logits = shares * slope.unsqueeze(-1)
        if ctx.smoothing:
            of_logits[..., : ctx.held] -= (gradient * (ctx.smoothing / ctx.vocabulary)).unsqueeze(-1)
        of_target = (gradient * (ctx.smoothing - 1)).masked_fill(~own, 0.0)
        of_logits.scatter_add_(-1, place.unsqueeze(-1), of_target.unsqueeze(-1))
        return of_logits, None, None, None, None, None, None
