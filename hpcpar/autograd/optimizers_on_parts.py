"""torch's optimizers over parameters of which this rank holds parts: what would be wrong is refused.

    step              of an optimizer that needs whole matrices (Adafactor, Muon, LAMB, …) or sums over all
                      parameters (LBFGS, Prodigy, …): not the serial model's, and ranks would drift apart;
                      and of one that was made before its parameters were divided, which would move nothing
                      and, in first steps and now and then, where gradients of a parameter that all ranks have
                      whole differ: each has a part of it, as between a column and a row layer
    load_state_dict   of what another rank has saved: moments of other shards, which have the same shapes

`DistributedOptimizer` gives torch.optim.Muon whole matrices.
"""

from __future__ import annotations

import functools
import math
import re
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hpcpar.autograd.held_parameter import own_gradient
from hpcpar.autograd.split_norms import wide
from hpcpar.errors import OperationError
from hpcpar.parameter_info import ParameterInfo, info_of

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

OF_MATRICES = {
    "Adafactor|CAME|SM3": "it keeps the means of a matrix's rows and columns",
    "Muon|Dion": "it makes the whole matrix of a layer's momentum orthogonal, which "
    "hpcpar.DistributedOptimizer does for torch.optim.Muon itself, alone or in a CombinedOptimizer",
    "Shampoo|SOAP|K_?FAC|Kron|PSGD": "it multiplies the whole matrix of a layer by preconditioners",
    "GaLore|APOLLO|Fira": "it projects the whole matrix of a layer",
    "LAMB|Lamb(?!da)|LARS|Lars|LARC|NovoGrad|Novograd|Adam_?[Mm]ini": "it uses the norms or means of layers",
}
"""Patterns of names of optimizers that need each matrix whole, and what for."""

OF_ALL = {
    "LBFGS": "its search direction is a product of the gradients of all parameters",
    "Prodigy|DAdapt|L?DoG$|Mechanic": "it estimates its rate from products over all parameters",
}
"""Patterns of names of optimizers that need all parameters together, and what for."""

PARTS = "hpcpar_parts"
"""Key of an optimizer's state that tells whose parts it is of: [rank, size] of each communicator."""

REPLACED = "hpcpar_replaced"
"""Attribute of parameters that are no longer in a model: another took the place of each."""

FIRST, EVERY = 2, 128
"""First steps, and one in so many, that are looked at."""

_STEPS: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

_LOCK = threading.Lock()  # ranks may be threads of one process


def install() -> None:
    """Look at each optimizer's step and state; once is enough."""
    with _LOCK:
        if not hasattr(Optimizer.state_dict, PARTS):
            register_optimizer_step_pre_hook(_before_step)
            Optimizer.state_dict = _state_dict(Optimizer.state_dict)  # type: ignore[method-assign]
            Optimizer.load_state_dict = _load_state_dict(Optimizer.load_state_dict)  # type: ignore[method-assign]


def note_replaced(parameter: Tensor) -> None:
    """Note on a parameter that another one took its place in the model."""
    setattr(parameter, REPLACED, True)
    install()


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    step = _STEPS[optimizer] = _STEPS.get(optimizer, 0) + 1
    if step > FIRST and step % EVERY:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    _require_known(optimizer, parameters)
    infos = [info_of(parameter) for parameter in parameters]
    comms = {info.comm for info in infos if _is_divided(info)}
    if len(comms) == 1 and (comm := comms.pop()) is not None:
        common = set.intersection(*(set(info.split_over) for info in infos))  # the stages of a pipeline
        wholes = [
            parameter
            for parameter, info in zip(parameters, infos, strict=True)
            if not _is_divided(info) and info.replicas is None and common.issuperset(info.split_over)
        ]
        if wholes:
            _require_same_gradients(optimizer, wholes, comm)


def _is_divided(info: ParameterInfo) -> bool:
    """True for a shard of a matrix, and not for a whole one of a stage or an expert."""
    return info.split is not None and bool(info.split.is_divided)


def _require_same_gradients(optimizer: Optimizer, wholes: list[Tensor], comm: Communicator) -> None:
    """Compare the norms of gradients over ranks that each have these parameters whole. Collective."""
    norms = torch.tensor([_norm(own_gradient(each)) for each in wholes], dtype=torch.float64)
    everyone: Tensor = comm.unchecked("agreement").allgather(norms).view(comm.size, -1)
    noise = 1e-3 * everyone.nan_to_num(0.0, 0.0, 0.0).max().item()
    alike = torch.isclose(everyone, everyone[:1], rtol=0.03, atol=noise, equal_nan=True).all(0)
    if not alike.all():
        place = int(alike.long().argmin())
        raise OperationError(
            f"{type(optimizer).__name__} was to step on a parameter of shape {list(wholes[place].shape)} "
            f"that all ranks of {comm.name!r} have whole, but the norms of its gradient on them are "
            f"{', '.join(f'{norm:.4g}' for norm in everyone[:, place].tolist())}: each has a part of it, as "
            f"it works on a rank's features or tokens. Use hpcpar.autograd.copy_to(parameter, comm) in its "
            f"place there, hpcpar.tensor_parallel's norms, or in a plan the style Norm(of_heads=True)"
        )


def _norm(gradient: Tensor | None) -> float:
    if gradient is None or gradient.layout != torch.strided:
        return math.nan
    return float(torch.linalg.vector_norm(gradient, dtype=wide(gradient)))


def _require_known(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    of_all, of_matrices = reason_of(optimizer, OF_ALL), reason_of(optimizer, OF_MATRICES)
    for parameter in parameters:
        if hasattr(parameter, REPLACED):
            raise OperationError(
                f"{type(optimizer).__name__} was to step on a parameter of shape {list(parameter.shape)} "
                f"that is no longer in the model, as parallelize put another there: make the optimizer "
                f"after parallelize"
            )
        info = info_of(parameter)
        if (of_all and info.split_over) or (of_matrices and _is_divided(info)):
            raise OperationError(
                f"{type(optimizer).__name__} was to step on a parameter of shape {list(parameter.shape)} "
                f"that is one of several parts on the ranks of {info.split_over[0].name!r}, but "
                f"{of_all or of_matrices}: the result would not be the serial model's. Take an optimizer "
                f"that treats each element by itself (AdamW, SGD, …)"
            )


def reason_of(optimizer: Optimizer, reasons: Mapping[str, str]) -> str | None:
    """Return the first of these reasons whose pattern fits the name of the optimizer's class, or a base's."""
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    found = (why for name, why in reasons.items() if any(re.search(name, each) for each in names))
    return next(found, None)


def _state_dict(torchs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(torchs)
    def state_dict(self: Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = torchs(self)
        parts = _parts(self)
        return {**state, PARTS: parts} if parts else state

    setattr(state_dict, PARTS, True)
    return state_dict


def _load_state_dict(torchs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(torchs)
    def load_state_dict(self: Optimizer, state_dict: Any) -> None:
        saved, own = state_dict.get(PARTS), _parts(self)
        if saved is not None and saved != own:
            raise OperationError(
                f"the state of an optimizer with parts [rank, size] {saved} of its parameters was to be "
                f"loaded into one that has {own or 'whole ones'}: it has moments of other shards. Save and "
                f"load a file on every rank, or use hpcpar.checkpoint.save and load, for any number of ranks"
            )
        torchs(self, state_dict)

    return load_state_dict


def _parts(optimizer: Optimizer) -> list[list[int]]:
    """Rank and size of this rank in each communicator over which parameters are split."""
    over = (info_of(each).split_over for group in optimizer.param_groups for each in group["params"])
    return sorted([comm.rank, comm.size] for comm in {comm: None for comms in over for comm in comms})
