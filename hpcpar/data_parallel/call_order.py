"""Agreement of ranks on the order in which a forward calls the units of a sharded model.

    rank 0   call 3: experts.0   told 5, -5 ─┐ the maximum of both: 6, -5
    rank 1   call 3: experts.1   told 6, -6 ─┘ so some rank called unit 6 where another called unit 5

Without it ranks would gather shards of different units as if they were one, or wait for each other for good.
cost     an all-reduce of 8 bytes for each gather of a forward, under way beside it, and one for its end
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpcpar.errors import MismatchError

if TYPE_CHECKING:
    from hpcpar.comm import Communicator
    from hpcpar.comm.compiled import Handle

ADVICE = (
    "Every rank calls the units in the same order. Give what only some ranks call, such as experts, to the "
    "unit around it: fully_shard(model, comm, policy=lambda name, module: isinstance(module, TheLayerAround))"
)


@dataclass(frozen=True, eq=False)
class _Call:
    """A call that all ranks are told of; what a watch is told of a wait for it."""

    name: str
    number: int
    told: NDArray[np.int32]
    handle: Handle

    def waiting_for(self) -> tuple[int, ...]:
        return self.handle.waiting_for()

    def progress(self) -> str:
        return f"which all ranks are to call. {ADVICE}"


class CallOrder:
    """Compares the calls of all ranks in turn.

    names   of the units, as they are numbered
    """

    def __init__(self, names: Sequence[str], dp_comm: Communicator) -> None:
        self._names = [f"unit {name!r}" if name else "the model" for name in names]
        self._names.append("nothing more before the end of forward")
        self._comm = dp_comm
        self._calls: deque[_Call] = deque()

    def note(self, number: int | None) -> None:
        """Begin to tell the others that this rank's next call is of this unit; None: its forward is over."""
        if self._comm.size == 1:
            return
        number = len(self._names) - 1 if number is None else number
        told = np.array([number, -number], dtype=np.int32)
        handle: Any = self._comm.unchecked("agreement").start_allreduce(told, "max")
        self._calls.append(_Call(f"the call of {self._names[number]}", number, told, handle))

    def require_same(self, number: int | None = None) -> None:
        """MismatchError, on every rank, unless all have made the same calls, up to that of a unit or all."""
        while self._calls and (number is None or any(call.number == number for call in self._calls)):
            call = self._calls.popleft()
            self._comm.wait_until(call.handle.test, call)
            call.handle.wait()
            last, first = int(call.told[0]), -int(call.told[1])
            if first != last:
                self._calls.clear()
                raise MismatchError(
                    f"ranks call different parts of a sharded model: rank {self._comm.rank} calls "
                    f"{self._names[call.number]}, where one calls {self._names[first]} and another "
                    f"{self._names[last]}. {ADVICE}"
                )
