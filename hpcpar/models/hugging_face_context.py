"""Hugging Face: models of `transformers` whose sequences several ranks share.

The library `transformers` is not needed to import this.

    cp = ContextParallel(mesh.cp)
    share_sequences(model, cp)                          # in place; then the optimizer
    with cp.using(Mask(tokens.shape[1])):               # forward and backward
        model(tokens, labels=tokens).loss.backward()    # averaged over cp: the gradient of one process

With `hugging_face_llama_plan` as well, `parallelize` comes first.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn

from hpcpar.context_parallel import ContextParallel
from hpcpar.errors import LayoutError, MismatchError
from hpcpar.tensor_parallel.cross_entropy import IGNORED

ATTENTION = "hpcpar_context"
"""Name of the attention in transformers' AttentionInterface, and of an attribute of layers that have it."""

KINDS = (*("llama", "mistral", "qwen2", "qwen3"), *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe"))
"""Model types whose attention is scores, a causal mask, perhaps a window, and softmax; nothing else."""

ROTARY = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on the length of a rank's part."""


def share_sequences(model: nn.Module, cp: ContextParallel) -> nn.Module:
    """Let the ranks of `cp` share each sequence of a transformers model of one of the `KINDS`, in place.

    The model takes whole sequences [B, S], the same on all ranks of `cp`, within `cp.using(mask)`. Each rank
    computes its own tokens, and has the logits of these alone: `cp.unshard(logits)` has all. Windows of
    layers are those of the model's config. With documents in the mask, no document sees another.

    With `labels` the average of the ranks' losses is that of one process, and so is the average of their
    gradients, however many labels each rank has; the last token of a document has no label.

    errors   LayoutError for another model, for attention dropout, and where the mask is not causal or leaves
             a rank without tokens; MismatchError for what a call cannot have: padding, caches, positions of
             its own. All of them on all ranks
    """
    from transformers import AttentionInterface

    config, pretrained = _require_known(model), cast("Any", model)
    AttentionInterface.register(ATTENTION, _attention)
    pretrained.set_attn_implementation(ATTENTION)
    if config._attn_implementation != ATTENTION:
        raise LayoutError(
            f"the model keeps attn_implementation={config._attn_implementation!r}; context parallelism needs "
            "transformers 4.53 or later, which takes attention functions of others"
        )
    for module in model.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "q_proj"):
            setattr(module, ATTENTION, cp)
    signature = inspect.signature(model.forward)

    def own_part(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        bound = signature.bind(*args, **kwargs)
        given = dict(bound.arguments)
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= given.pop(parameter.name, {})
        return (), _own_inputs(cp, config, given)

    model.register_forward_pre_hook(own_part, with_kwargs=True)
    return model


def _require_known(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in KINDS:
        raise LayoutError(
            f"a model of the type {kind!r}, whose attention may have more than a causal mask and a window; "
            f"share_sequences is for {', '.join(KINDS)} of transformers. Call cp.attention in your own model"
        )
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    rotation = rotary.get("rope_type", rotary.get("type", "default"))
    if rotation not in ROTARY:
        raise LayoutError(
            f"rope_type={rotation!r} has frequencies by the length of the input, and each rank has another "
            f"part of it; give one of {', '.join(ROTARY)}"
        )
    if getattr(config, "attention_dropout", 0.0):
        raise LayoutError(
            f"attention_dropout={config.attention_dropout} draws by rank, and not by token; make the "
            "model with attention_dropout=0.0 in its config"
        )
    return config


def _own_inputs(cp: ContextParallel, config: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call for this rank's tokens."""
    _require_shareable(cp, config, given)
    tokens, labels = given.pop("input_ids"), given.get("labels")
    own = cp.own_tokens(tokens)
    positions = cp.positions().to(own.device)
    given |= {"input_ids": own, "position_ids": positions.expand(own.shape), "use_cache": False}
    given.pop("attention_mask", None)
    if labels is not None:
        targets = _next_tokens(cp, labels)
        items = given.get("num_items_in_batch")
        whole = (targets != IGNORED).sum() if items is None else torch.as_tensor(items)
        # The average over the ranks of sum / (items / size) is the sum of all over items.
        given["num_items_in_batch"] = whole.to(torch.float64).to(own.device) / cp.comm.size
        given["shift_labels"] = cp.own_tokens(targets)
        given["labels"] = given["shift_labels"]
    return given


def _next_tokens(cp: ContextParallel, labels: Tensor) -> Tensor:
    """Return the labels [B, S] of the tokens before them; the last of each document has none."""
    rows = labels.reshape(1, -1) if labels.numel() == cp.mask.length else labels
    targets = torch.roll(rows, -1, dims=1)
    targets[:, [stop - 1 for stop in cp.mask.starts[1:]]] = IGNORED
    return targets


def _require_shareable(cp: ContextParallel, config: Any, given: dict[str, Any]) -> None:
    mask, padding = cp.mask, given.get("attention_mask")
    if given.get("input_ids") is None:
        raise MismatchError("a call without input_ids; give whole sequences [B, S], the same on all ranks")
    labels = given.get("labels")
    if labels is not None and labels.shape != given["input_ids"].shape:
        raise MismatchError(
            f"labels of shape {list(labels.shape)} for input_ids of shape {list(given['input_ids'].shape)}; "
            "give one for each token, -100 where there is none: the model shifts them itself"
        )
    if not mask.causal:
        raise LayoutError(f"{mask} is not causal, and the model is; leave causal=False out")
    counts = [sum(span.length for span in spans) for spans in cp.spans()]
    if 0 in counts:
        raise LayoutError(
            f"a sequence of {mask.length} tokens leaves rank {counts.index(0)} of {cp.comm.size} without "
            "any, which transformers cannot compute; give at least one token for each rank"
        )
    if padding is not None and (padding.dim() != 2 or not bool(padding.all())):
        raise MismatchError(
            "attention_mask has padding, or is a mask of its own; leave it out, and make padding a document: "
            "Mask(length, documents=…), with labels of -100"
        )
    if given.get("use_cache") or given.get("past_key_values") is not None:
        raise MismatchError(
            "a cache of keys has whole sequences, and each rank has a part; leave use_cache and "
            "past_key_values out, and generate with a model of one process"
        )
    if given.get("output_router_logits", getattr(config, "output_router_logits", False)):
        raise MismatchError(
            "output_router_logits adds the balance loss of a rank's own tokens, and not of whole sequences; "
            "set it to False, and train such a loss without shared sequences"
        )
    for name in ("position_ids", "inputs_embeds", "logits_to_keep", "output_attentions", "shift_labels"):
        value = given.get(name)
        if isinstance(value, Tensor) or value:  # False and 0 ask for nothing
            raise MismatchError(
                f"{name} cannot be given where ranks share sequences; leave it out: the model takes whole "
                "sequences as input_ids, and positions are those in the documents of the mask in use"
            )


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks an attention function to: [B, A, N, D] -> [B, N, A, D]."""
    cp: ContextParallel | None = getattr(module, ATTENTION, None)
    if cp is None:
        raise LayoutError(
            "this model has the config of one whose sequences ranks share; give each model a config of its "
            "own, or call share_sequences for this one, too"
        )
    if dropout:
        raise LayoutError(f"attention dropout of {dropout} draws by rank, and not by token; set it to 0")
    assert attention_mask is None, "transformers makes no mask for an attention function of others"
    out = cp.attention(query, key, value, scale=scaling, window=sliding_window)
    return out.transpose(1, 2).contiguous(), None
