"""DistributedOptimizer: any torch optimizer, stepping on gradients averaged over all replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpcpar.data_parallel.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES
from hpcpar.data_parallel.gradients import GradientSynchronizer
from hpcpar.data_parallel.parameters import Named, distinct
from hpcpar.errors import OperationError

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


class DistributedOptimizer(Optimizer):
    """A torch optimizer whose every step is taken on the average gradient of `dp_comm`'s ranks.

        optimizer = DistributedOptimizer(AdamW(model.parameters()), model.named_parameters(), mesh.dp)
        with optimizer.no_sync():               # all microbatches but the last: nothing is sent
            loss(microbatch).backward()
        loss(last_microbatch).backward()        # averages travel while this runs
        optimizer.clip_grad_norm_(1.0)          # waits for them
        optimizer.step()
        optimizer.zero_grad()

    The optimizer is held, not copied: its groups, state and state_dict are this one's, so
    learning-rate schedulers and checkpoints see no difference. Of `named_parameters` those that the
    optimizer holds are averaged; it may name more. With k microbatches, divide each loss by k.

    Making one is collective. Raises OperationError for parameters without a name or with the same
    name, MismatchError (on every rank) when ranks hold different parameters.
    """

    # Deliberately without super().__init__(): every attribute of an Optimizer is the inner one's.
    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[Named],
        dp_comm: Communicator,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        algorithm: str | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, DistributedOptimizer):
            raise OperationError(
                f"DistributedOptimizer was given a {type(optimizer).__name__} where a torch.optim.Optimizer "
                "is needed; pass for example torch.optim.AdamW(model.parameters())"
            )
        self.inner = optimizer
        self.dp_comm = dp_comm
        self._bucketing: dict[str, Any] = {
            "bucket_bytes": bucket_bytes,
            "first_bucket_bytes": first_bucket_bytes,
            "algorithm": algorithm,
        }
        self._named = distinct(named_parameters)
        self._synchronizer = self._make_synchronizer()

    def __getattr__(self, name: str) -> Any:
        # Step and state-dict hooks, defaults and whatever a particular optimizer adds live in it.
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer over {self.dp_comm.size} ranks of {self.inner!r}"

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def synchronizer(self) -> GradientSynchronizer:
        """Buckets, flat gradients and the traffic of one step."""
        return self._synchronizer

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside add to the gradients and send nothing: for all microbatches but the last."""
        return self._synchronizer.no_sync()

    def synchronize(self) -> None:
        """Wait until every gradient is the average over all ranks; to look at gradients before `step`."""
        self._synchronizer.synchronize()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the inner optimizer on averaged gradients; collective.

        closure   computes the loss with its backward, perhaps several times (LBFGS); the average loss
                  over all ranks is returned to the inner optimizer, so that all take the same path
        """
        if closure is None:
            self._ensure_synchronized()
            outcome = self.inner.step()
        else:
            outcome = self.inner.step(lambda: self._averaged(closure))
        # One synchronization for each step, also where a rank's next backward brings no gradient.
        self._synchronizer.synchronized = False
        return outcome

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; averages still under way are awaited first.

        set_to_none=True    the next backward's gradients are copied into the buckets as they come
        set_to_none=False   the buckets are filled with zeros and the next backward adds to them
        """
        self._synchronizer.zero(set_to_none=set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their common norm is at most `max_norm`; returns the norm before.

        The norm is that of the average gradient, waited for if it is still under way; every rank finds
        the same bits. As torch.nn.utils.clip_grad_norm_, but one kernel per bucket.
        """
        self._ensure_synchronized()
        flats = self._synchronizer.flats
        if not flats:
            return torch.zeros(())
        norms: list[Tensor] = [
            torch.linalg.vector_norm(flat, norm_type, dtype=_norm_dtype(flat)) for flat in flats
        ]
        total: Tensor = torch.linalg.vector_norm(
            torch.stack([norm.to(norms[0]) for norm in norms]), norm_type
        )
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        # On a GPU, asking for the value would make the host wait; multiplying by 1 is cheaper there.
        if coefficient.device.type != "cpu" or not coefficient.item() >= 1:
            for flat in flats:
                flat.mul_(coefficient.to(device=flat.device, dtype=_norm_dtype(flat)))
        return total

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, equal on every rank."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the inner optimizer; every rank loads the same."""
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, given as (name, parameter) pairs unless named at construction; collective.

        Not while averages are under way: call it between `step` and the next backward.
        """
        if self._synchronizer.round_open:
            raise OperationError(
                "add_param_group was called while gradients are under way; call it between step() and the "
                "next backward"
            )
        members = param_group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        named = [member for member in members if not isinstance(member, Tensor)]
        tensors = [member if isinstance(member, Tensor) else member[1] for member in members]
        self._named = distinct([*self._named, *named])
        _require_names([{"params": tensors}], self._named)
        self.inner.add_param_group({**param_group, "params": tensors})
        self._synchronizer.close()
        self._synchronizer = self._make_synchronizer()

    def expected_nbytes(self, steps: int = 1) -> int:
        """Bytes that all ranks together send as allreduce for so many steps, by theory."""
        return self._synchronizer.expected_nbytes(steps)

    def _make_synchronizer(self) -> GradientSynchronizer:
        _require_names(self.inner.param_groups, self._named)
        held = {id(parameter) for group in self.inner.param_groups for parameter in group["params"]}
        named = [(name, parameter) for name, parameter in self._named if id(parameter) in held]
        return GradientSynchronizer(named, self.dp_comm, **self._bucketing)

    def _ensure_synchronized(self) -> None:
        if not self._synchronizer.synchronized:
            self._synchronizer.synchronize()

    def _averaged(self, closure: Callable[[], Any]) -> Any:
        """Run the closure; leave average gradients, and return the average loss in the type it gave."""
        with torch.enable_grad():
            loss = closure()
        self._ensure_synchronized()
        mean = torch.as_tensor(loss).detach().to(torch.float64, copy=True).reshape(1)
        self.dp_comm.allreduce(mean, "average")
        return mean[0].to(loss.dtype) if isinstance(loss, Tensor) else mean.item()


def _require_names(groups: Iterable[dict[str, Any]], named: Iterable[Named]) -> None:
    """Every parameter of the groups must have a name, for errors and checkpoints to call it by."""
    known = {id(parameter) for _, parameter in named}
    held = [parameter for group in groups for parameter in group["params"]]
    unnamed = [str(list(parameter.shape)) for parameter in held if id(parameter) not in known]
    if unnamed:
        shown = ", ".join(unnamed[:4]) + (", …" if len(unnamed) > 4 else "")
        raise OperationError(
            f"{len(unnamed)} of the optimizer's {len(held)} parameters have no name (shapes {shown}); pass "
            "the named_parameters() of every model whose parameters it holds, or (name, parameter) pairs"
        )


def _norm_dtype(flat: Tensor) -> torch.dtype:
    """The real type in which a norm is accumulated: at least single precision."""
    if flat.is_complex():
        return flat.dtype
    return torch.promote_types(flat.dtype, torch.float32)
