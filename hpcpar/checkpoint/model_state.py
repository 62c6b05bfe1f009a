"""A model's parameters and buffers, by name, and the way back into a model that is built alike."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hpcpar.errors import CheckpointError


def on_cpu(tensor: Tensor) -> Tensor:
    """A contiguous CPU tensor with a storage of its own, as safetensors wants it."""
    value = tensor.detach().cpu().contiguous()
    shares = value.untyped_storage().nbytes() != value.nbytes
    return value.clone() if shares else value


def model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(each tensor once, by its first name; further names -> first name, of tied parameters)."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_names: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name} in the model's state is a {type(value).__name__}, but only tensors can be saved; "
                f"pass it in extra= instead"
            )
        first = first_names.setdefault(id(value), name)
        if first == name:
            tensors[name] = on_cpu(value)
        else:
            aliases[name] = first
    return tensors, aliases


def check_fits(
    model: nn.Module, tensors: Mapping[str, Tensor], aliases: Mapping[str, str], where: str
) -> None:
    """CheckpointError that names the first tensors which are missing, too many, or of another form."""
    expected = model.state_dict(keep_vars=True)
    found = dict(tensors) | {name: tensors[first] for name, first in aliases.items()}
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    if missing or unexpected:
        raise CheckpointError(
            f"{where} is of another model: "
            + "; ".join(
                f"{len(names)} tensors {word}, the first is {names[0]}"
                for names, word in ((missing, "missing"), (unexpected, "that the model does not have"))
                if names
            )
        )
    for name, value in expected.items():
        if found[name].shape != value.shape or found[name].dtype != value.dtype:
            raise CheckpointError(
                f"{where} is of another model: {name} there is {tuple(found[name].shape)} "
                f"{found[name].dtype}, in the model {tuple(value.shape)} {value.dtype}"
            )


@torch.no_grad()
def fill(model: nn.Module, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
    """Copy into the model's own memory, so that views of it (buckets, ties) stay what they are."""
    for name, value in model.state_dict(keep_vars=True).items():
        value.copy_(tensors[aliases.get(name, name)])
