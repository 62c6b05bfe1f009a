"""A model's parameters and buffers, by name, and whether a checkpoint is of a model that is built alike."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from hpcpar.checkpoint.holding import holding_of
from hpcpar.checkpoint.stored import Stored
from hpcpar.errors import CheckpointError


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
            tensors[name] = value
        else:
            aliases[name] = first
    return tensors, aliases


def check_fits(
    model: nn.Module,
    stored: Mapping[str, Stored],
    aliases: Mapping[str, str],
    where: str,
    *,
    precision_may_differ: bool,
) -> None:
    """CheckpointError that names the first tensors which are missing, too many, or of another form.

    Shapes are those of whole tensors, however they are split there and here.

    precision_may_differ   a floating-point type may be another one
    """
    expected = model.state_dict(keep_vars=True)
    found = dict(stored) | {name: stored[first] for name, first in aliases.items()}
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
        dtype, shape = found[name].dtype, holding_of(value).shape
        rounds = precision_may_differ and dtype.is_floating_point and value.dtype.is_floating_point
        if found[name].shape != shape or (dtype != value.dtype and not rounds):
            raise CheckpointError(
                f"{where} is of another model: {name} there is {found[name].shape} "
                f"{dtype}, in the model {shape} {value.dtype}"
            )
