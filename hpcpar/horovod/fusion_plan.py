"""Tensor fusion planning: which ready operations share one message, in one order on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hpcpar.horovod import operations
from hpcpar.horovod.negotiation import BATCHES_REMEMBERED, ReadyRequest, TensorRequest
from hpcpar.horovod.operations import MakeCoroutine
from hpcpar.launch.horovod_settings import HorovodSettings
from hpcpar.units import KiB, MiB

FUSED_NBYTES = 4 * MiB
"""Upper limit of a fused message: a larger one is no quicker, and two of them keep both sides busy."""
ALONE_FROM_NBYTES = 512 * KiB
"""Tensors from this size on are sent from where they lie: two copies would cost more than a message."""

SINGLE: dict[str, MakeCoroutine] = {
    "allreduce": operations.allreduce,
    "broadcast": operations.broadcast,
    "allgather": operations.allgather,
    "reducescatter": operations.reducescatter,
    "alltoall": operations.alltoall,
    "barrier": operations.barrier,
}
FUSED: dict[str, MakeCoroutine] = {
    "allreduce": operations.fused_allreduce,
    "broadcast": operations.fused_broadcast,
}


class FusionPlan(NamedTuple):
    """Ready operations sorted into messages.

    ready      the list that was sorted; held so that its id stays its own
    together   operations that share a message, and the coroutine that runs them
    refused    operations that fail, with their errors
    """

    ready: list[ReadyRequest]
    together: list[tuple[MakeCoroutine, list[TensorRequest]]]
    refused: list[ReadyRequest]


class FusionPlanner:
    """Plans fusion, once for each batch of requests that the negotiation remembers."""

    def __init__(self, knobs: HorovodSettings) -> None:
        self.threshold_nbytes = min(knobs.fusion_threshold_nbytes, FUSED_NBYTES)
        self._by_group = knobs.disable_group_fusion
        self._plans: dict[int, FusionPlan] = {}

    def is_fusible(self, request: TensorRequest) -> bool:
        """Return True for a tensor that is small enough for the fusion buffer."""
        return nbytes_of(request) <= min(self.threshold_nbytes, ALONE_FROM_NBYTES - 1)

    def plan(self, ready: list[ReadyRequest]) -> FusionPlan:
        """Sort the operations; a list seen before gets the plan it got then."""
        plan = self._plans.get(id(ready))
        if plan is None:
            accepted = [operation.request for operation in ready if operation.error is None]
            refused = [operation for operation in ready if operation.error is not None]
            if len(self._plans) >= BATCHES_REMEMBERED:
                del self._plans[next(iter(self._plans))]
            plan = self._plans[id(ready)] = FusionPlan(ready, list(self._messages(accepted)), refused)
        return plan

    def _messages(
        self, requests: Sequence[TensorRequest]
    ) -> Iterable[tuple[MakeCoroutine, list[TensorRequest]]]:
        filling: dict[object, tuple[list[TensorRequest], int]] = {}
        for request in requests:
            if request.op == "adasum":
                factors = request.prescale, request.postscale
                key: object = ("adasum", request.dtype, request.device, *factors, request.group)
                filling.setdefault(key, ([], 0))[0].append(request)
                continue
            if request.kind not in FUSED or not self.is_fusible(request):
                yield SINGLE.get(request.kind, operations.barrier), [request]
                continue
            of_group = request.group if self._by_group else None
            key = (*request[1:3], *request[4:9], of_group)  # all but name and shape
            together, held = filling.get(key, ([], 0))
            nbytes = nbytes_of(request)
            if together and held + nbytes > self.threshold_nbytes:
                yield FUSED[request.kind], together
                together, held = [], 0
            together.append(request)
            filling[key] = together, held + nbytes
        for together, _ in filling.values():
            is_adasum = together[0].op == "adasum"
            yield operations.adasum_allreduce if is_adasum else FUSED[together[0].kind], together


def nbytes_of(request: TensorRequest) -> int:
    """Return the bytes that the request's tensor takes in a message."""
    return math.prod(request.shape) * operations.travels_as(request).itemsize
