"""`Work` and `Future` of calls that move only while this process makes progress.

torch waits for a future in C++, where nothing would move. DDP asks for the future of a bucket in backward:
it is completed by a callback that the autograd engine runs after the last node and before DDP's own, so
that buckets travel while backward goes on. Outside of backward it is completed at once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.futures import Future

from hpcpar.comm import Handle
from hpcpar.errors import StallError

Finish = Callable[[], None]

under_way: set[Work] = set()
"""Works that nobody has waited for yet. C++ keeps its half of a work alone (torch 2.5), which never ends."""


latest: list[Work] = []
"""The last work of one element that was waited for. DDP with uneven inputs then asks for its future."""


class Work(distributed._Work):  # type: ignore[misc, name-defined]
    """Calls under way, and what is to be done with their results.

    result      tensors, as torch wants them of this call
    handles     of the calls
    finish      puts results where the caller wants them; None: they are there
    timeout_s   how long `wait` waits unless it is told; None: as long as the communicator
    """

    def __init__(
        self,
        result: list[Any],
        handles: Sequence[Handle] = (),
        finish: Finish | None = None,
        source: int = -1,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        self._result = result
        self._handles = list(handles)
        self._finish = finish
        self._source = source
        self._timeout_s = timeout_s
        self._error: BaseException | None = None
        self._future: DrivenFuture | None = None
        if self._handles or finish is not None:
            under_way.add(self)

    def drive(self) -> None:
        """Wait for the calls, and complete the future."""
        try:
            while self._handles:
                self._handles[0].wait()
                del self._handles[0]
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()
        except BaseException as error:
            self._error, self._handles, self._finish = error, [], None
            if self._future is not None and not self._future.is_set:
                self._future.fail(error)
            raise
        finally:
            under_way.discard(self)
            match self._result:
                case [Tensor() as only] if only.numel() == 1:
                    latest[:] = [self]
        if self._future is not None and not self._future.is_set:
            self._future.complete(self._result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all is done; its error is raised. StallError after `timeout`, or the group's own."""
        if self._error is not None:
            raise self._error
        limit_s = seconds_of(timeout) or self._timeout_s
        if limit_s:
            self._wait_at_most(limit_s)
        self.drive()
        return True

    def _wait_at_most(self, limit_s: float) -> None:
        until_s = time.monotonic() + limit_s
        while not self._has_come():
            if time.monotonic() > until_s:
                missing = self.waiting_for()
                raise StallError(
                    f"the call was not complete within the timeout of {limit_s:g} s: it waits for rank"
                    f"{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
                )
            time.sleep(0)

    def _has_come(self) -> bool:
        """Make progress; True if nothing more has to come from other ranks."""
        return all(handle.test() for handle in self._handles)

    def waiting_for(self) -> tuple[int, ...]:
        """World ranks whose part is missing."""
        return tuple(sorted({rank for handle in self._handles for rank in handle.waiting_for()}))

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if self._error is None and self._has_come():
            self.drive()
            return True
        return self._error is not None

    def is_success(self) -> bool:
        return self._error is None and self.is_completed()

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Any]:
        return self._result

    def source_rank(self) -> int:
        """Rank of the group from which a message came that could come from any."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """The future of the result: a list of tensors."""
        if self._future is None:
            self._future = DrivenFuture(self.drive, self._result)
            if not self._handles or _is_waited_for_in_cpp() or not _runs_after_backward(self.drive):
                self.drive()
        return self._future


class AnySource(Work):
    """A receive from whichever rank sends first."""

    def __init__(
        self,
        comm: Any,
        tensors: list[Tensor],
        receive: Callable[[int], Handle],
        tag: int,
        timeout_s: float | None,
    ) -> None:
        super().__init__(tensors, timeout_s=timeout_s)
        self._comm = comm
        self._receive = receive
        self._tag = tag

    def drive(self) -> None:
        if self._source < 0:
            self._comm.wait_until(self._has_begun, self)
        super().drive()

    def _has_begun(self) -> bool:
        if self._source < 0 and (source := self._comm.probe(self._tag)) is not None:
            self._handles = [self._receive(source)]
            self._source = source
        return self._source >= 0

    def _has_come(self) -> bool:
        return self._has_begun() and super()._has_come()

    @property
    def name(self) -> str:
        return f"recv with tag {self._tag} from any rank of {self._comm.name!r}"

    def waiting_for(self) -> tuple[int, ...]:
        if self._source >= 0:
            return super().waiting_for()
        others: tuple[int, ...] = self._comm.world_ranks
        return tuple(rank for rank in others if rank != others[self._comm.rank])

    def progress(self) -> str:
        return "no message yet"


def seconds_of(timeout: timedelta | None) -> float | None:
    """Seconds of a timeout; None where torch has none: 0 and below."""
    return timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None


def _is_waited_for_in_cpp() -> bool:
    """True in a hook in Python that has DDP call its own hook, and gets but C++'s half of this future.

    torch's hooks for mixed precision, and for an optimizer in backward, are such.
    """
    caller = sys._getframe(1).f_back  # of get_future; on a GPU the engine's own thread, which has no Python
    return caller is not None and "_run_allreduce_hook" in caller.f_code.co_names


def _runs_after_backward(call: Callable[[], None]) -> bool:
    """Have the autograd engine run this after the last node; False outside of backward.

    Among its final callbacks, where DDP with static_graph starts its calls, nothing comes after.
    """
    if torch._C._current_graph_task_id() == -1 or torch._C._current_autograd_node() is None:
        return False
    torch.autograd.Variable._execution_engine.queue_callback(call)
    return True


class DrivenFuture(Future[Any]):
    """A future whose `wait` makes progress, and so do those of what follows it."""

    def __init__(self, drive: Callable[[], None], result: Any) -> None:
        devices = {each.device for each in _tensors(result) if each.device.type != "cpu"}
        super().__init__(devices=sorted(devices, key=str) or None)
        self._drive = drive
        self._devices = result
        self.is_set = False

    def complete(self, result: Any) -> None:
        self.is_set = True
        self.set_result(result)

    def fail(self, error: BaseException) -> None:
        self.is_set = True
        self.set_exception(error if isinstance(error, Exception) else RuntimeError(str(error)))

    def wait(self) -> Any:
        if not self.is_set:
            self._drive()
        return super().wait()

    def value(self) -> Any:
        self.wait()  # another thread may be about to complete it
        return super().value()

    def then(self, callback: Callable[[Future[Any]], Any]) -> Future[Any]:
        following = DrivenFuture(self._drive, self._devices)

        def follow(_: Any) -> None:
            try:
                following.complete(callback(self))
            except Exception as error:
                following.fail(error)

        self.add_done_callback(follow)
        return following


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [tensor for each in result for tensor in _tensors(each)] if isinstance(result, list) else []
