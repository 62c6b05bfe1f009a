"""torch's functions of gradient norms, over all ranks that a parameter is split over.

    torch.nn.utils.clip_grad_norm_(parameters, …)    over the communicators that the parameters note
    torch.nn.utils.get_total_norm(gradients, …)      the same: gradients are known by whose `.grad` they are
    gradients of which this rank has a shard         their own `total_norm`
    torch.amp.GradScaler                             an overflow on one of those ranks skips the step on all
    parameters that note nothing                     torch's own function

`clip_grads_with_norm_` and `clip_grad_value_` look at each element by itself, and stay torch's. A rank alone
would take the norm of its own parts, and ranks would scale what they share by different factors.

A parameter's record (`hpcpar.parameter_info`) tells over which communicators it is split, and whether another
rank counts its copy.

torch wraps each of these functions in another, which holds it in a closure; from the first note on that
closure holds ours. So it also reaches `from torch.nn.utils import clip_grad_norm_` written before.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import clip_grad

from hpcpar.autograd import optimizers_on_parts
from hpcpar.autograd.held_parameter import own_gradient
from hpcpar.autograd.split_norms import (
    Spread,
    in_common_order,
    norm_of_parts,
    require_norm_type,
    split_over_of,
)
from hpcpar.parameter_info import info_of, note

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

_LOCK = threading.Lock()  # ranks may be threads of one process
_NOTED: dict[int, weakref.ref[Tensor]] = {}
_INSTALLED: list[str] = []


def note_split_over(parameter: Tensor, *comms: Communicator) -> None:
    """Note on a parameter that it is one of several parts, which the ranks of these communicators hold.

    comms   those that are not noted yet are added at the end; one of a single rank changes nothing

    From then on it counts with all its parts in norms: torch's, and those of `DistributedOptimizer`.
    """
    noted = split_over_of(parameter)
    more = tuple(comm for comm in comms if comm.size > 1 and comm not in noted)
    if not more:
        return
    note(parameter, split_over=noted + more)
    with _LOCK:
        _NOTED[id(parameter)] = weakref.ref(parameter)
        for key in [key for key, held in _NOTED.items() if held() is None]:
            del _NOTED[key]
    install()


def install() -> None:
    """Have torch's functions look at what parameters note; once is enough."""
    with _LOCK:
        for name, ours in {"clip_grad_norm_": _clip_grad_norm_, "_get_total_norm": _get_total_norm}.items():
            wrapper = getattr(clip_grad, name, None)  # torch 2.5 has no function for the norm alone
            if wrapper is None or name in _INSTALLED:
                continue
            cell = wrapper.__closure__[wrapper.__code__.co_freevars.index("func")]
            cell.cell_contents = ours(cell.cell_contents)
            _INSTALLED.append(name)
        if "_unscale_grads_" not in _INSTALLED:
            GradScaler._unscale_grads_ = _unscale_grads_(GradScaler._unscale_grads_)  # type: ignore[method-assign]
            _INSTALLED.append("_unscale_grads_")
    optimizers_on_parts.install()


def _clip_grad_norm_(torchs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def clip_grad_norm_(
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        if isinstance(parameters, types.GeneratorType):
            given: Any = list(parameters) or parameters  # torch warns of one that is used up
        else:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        listed = list(given)
        gradients = [parameter.grad for parameter in listed]  # of an optimizer's, waited for
        if not any(map(split_over_of, listed)) and not any(map(_is_shard, gradients)):
            return torchs(given, max_norm, norm_type, error_if_nonfinite, foreach)
        # By the parameters, not by the gradients: a rank that has none is to take part all the same.
        total = _norm(list(zip(listed, gradients, strict=True)), norm_type, error_if_nonfinite)
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(coefficient.to(gradient.device))
        return total

    return clip_grad_norm_


def _get_total_norm(torchs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def get_total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        owners = _owners(listed)
        if not owners and not any(map(_is_shard, listed)):
            return torchs(listed, norm_type, error_if_nonfinite, foreach)
        pairs = [(owners.get(id(tensor), tensor), tensor) for tensor in listed]
        return _norm(pairs, norm_type, error_if_nonfinite)

    return get_total_norm


def _unscale_grads_(torchs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(torchs)
    def unscale_grads_(self: GradScaler, optimizer: Any, *given: Any, **options: Any) -> Any:
        found: dict[Any, Tensor] = torchs(self, optimizer, *given, **options)
        kinds = {split_over_of(each): None for group in optimizer.param_groups for each in group["params"]}
        for comm in in_common_order(list(kinds)):
            overflow = torch.stack([torch.zeros(()), *(each.cpu() for each in found.values())]).max().view(1)
            comm.allreduce(overflow, "max")
            for each in found.values():
                each.fill_(overflow.item())
        return found

    return unscale_grads_


def _owners(tensors: list[Tensor]) -> dict[int, Tensor]:
    """Map gradients, by id, to the parameters with a note that have them; parameters to themselves."""
    wanted = set(map(id, tensors))
    with _LOCK:
        noted = [parameter for held in _NOTED.values() if (parameter := held()) is not None]
    owners: dict[int, Tensor] = {}
    for parameter in noted:
        # Past a property of a subclass, which may refuse to be read.
        for tensor in (parameter, own_gradient(parameter)):
            if id(tensor) in wanted:
                owners[id(tensor)] = parameter
    return owners


def _norm(pairs: list[tuple[Tensor, Tensor | None]], norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """The norm of gradients, each beside what notes whom it is split over. Collective."""
    norm_type = float(norm_type)
    require_norm_type(norm_type)
    shard = next((gradient for _, gradient in pairs if _is_shard(gradient)), None)
    if shard is not None:
        given = [gradient for _, gradient in pairs if gradient is not None]
        return _checked(type(shard).total_norm(given, norm_type), error_if_nonfinite)  # type: ignore[attr-defined]
    parts = (
        (Spread(split_over_of(noted)), gradient)
        for noted, gradient in pairs
        if gradient is not None and not info_of(noted).counts_elsewhere
    )
    total = norm_of_parts(parts, (Spread(split_over_of(noted)) for noted, _ in pairs), norm_type)
    like = next((gradient for _, gradient in pairs if gradient is not None), None)
    total = total if like is None else total.to(device=like.device, dtype=like.abs().dtype)
    return _checked(total, error_if_nonfinite)


def _is_shard(gradient: Tensor | None) -> bool:
    """Return whether a gradient stands for shards, as data_parallel/held_gradient.py does."""
    return hasattr(type(gradient), "total_norm")


def _checked(total: Tensor, error_if_nonfinite: bool) -> Tensor:
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of the gradients is {total.item()}, on every rank; look for the first layer whose "
            f"output is not finite, or set error_if_nonfinite=False"
        )
    return total
