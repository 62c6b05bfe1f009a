"""The engine's stream on GPUs: what it comes after, and what comes after it. Streams here only note it.

With GPUs: torch/test_on_gpus.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hpcpar.comm.calls import Calls
from hpcpar.comm.compiled import Handle
from hpcpar.horovod import operations
from hpcpar.horovod.engine import Engine
from hpcpar.horovod.gpu_streams import GpuStreams, in_this_stream
from hpcpar.horovod.negotiation import TensorRequest
from hpcpar.horovod.operations import ReadyOp, Ticket
from tests.horovod.test_engine import all_of, brought, ticket, total, with_engines


class Notes:
    """Stand-in of `GpuStreams` that notes its calls, and which came in the engine's stream."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, bool]] = []
        self._is_inside = False

    def note(self, what: str) -> None:
        self.lines.append((what, self._is_inside))

    def asked(self, ticket: Ticket) -> None:
        self.note("asked")

    @contextmanager
    def working_on(self, items: Sequence[ReadyOp]) -> Iterator[None]:
        assert {item.request.device for item in items} == {"GPU"}
        self._is_inside = True
        yield
        self._is_inside = False

    def finished(self, items: Sequence[ReadyOp]) -> None:
        self.note("finished")
        for item in items:
            if item.ticket is not None:
                item.ticket.finished = True

    def taken(self, ticket: Ticket) -> None:
        assert ticket.finished
        self.note("taken")


def noted(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> Notes:
    notes = engine._queue.gpu = Notes()  # type: ignore[assignment]
    copy_all, wait, run = operations.copy_all, Handle.wait, Calls.run

    def copy(targets: Any, sources: Any) -> None:
        notes.note("copied")
        copy_all(targets, sources)

    def waited(handle: Handle) -> Any:
        notes.note("ordered")
        return wait(handle)

    def blocked(calls: Calls, *arguments: Any) -> Any:
        notes.note("ordered")
        return run(calls, *arguments)

    monkeypatch.setattr(operations, "copy_all", copy)
    monkeypatch.setattr(Calls, "run", blocked)
    monkeypatch.setattr(Handle, "wait", waited)
    return notes


@pytest.mark.parametrize("tensors", [1, 5])
def test_all_that_is_done_with_tensors_on_gpus_is_in_the_engines_stream(monkeypatch, tensors) -> None:
    def work(engine: Engine) -> list[tuple[str, bool]]:
        notes = noted(monkeypatch, engine)
        found = all_of(
            engine,
            [ticket("allreduce", brought(0, (4,), salt=n), f"{n}", device="GPU") for n in range(tensors)],
        )
        for number, result in enumerate(found):
            torch.testing.assert_close(result, total(1, (4,), salt=number))
        return notes.lines

    (lines,) = with_engines(1, work, cycle_time_s=1000.0)
    rounds = ("ordered", False)  # of a single tensor, whose ranks agree on it by a blocking call
    steps = [line for line in lines if line[0] not in ("asked", "taken") and line != rounds]
    # In, the reduction, which this stream comes after, and out again.
    assert steps == [("copied", True), ("ordered", True), ("copied", True), ("finished", True)]
    assert lines[:tensors] == [("asked", False)] * tensors
    assert lines[-tensors:] == [("taken", False)] * tensors


@pytest.mark.parametrize("kind", ["allgather", "reducescatter", "broadcast"])
@pytest.mark.parametrize("count", [8, 300_000])
def test_every_handle_is_waited_for_there(monkeypatch, kind, count) -> None:
    def work(engine: Engine) -> list[tuple[str, bool]]:
        notes = noted(monkeypatch, engine)
        told = {"root": 0} if kind == "broadcast" else {}
        all_of(engine, [ticket(kind, brought(0, (count,)), "x", device="GPU", **told)])
        return notes.lines

    (lines,) = with_engines(1, work)
    assert ("ordered", True) in lines
    assert ("ordered", False) not in lines
    assert [line for line in lines if line[0] == "finished"] == [("finished", True)]


def test_tensors_on_gpus_and_in_host_memory_do_not_travel_together(monkeypatch) -> None:
    def work(engine: Engine) -> int:
        notes = noted(monkeypatch, engine)
        tickets = [
            ticket("allreduce", brought(0, (4,), salt=n), f"{n}", device=("CPU", "GPU")[n % 2])
            for n in range(6)
        ]
        for number, result in enumerate(all_of(engine, tickets)):
            torch.testing.assert_close(result, total(1, (4,), salt=number))
        return notes.lines.count(("finished", True))

    assert with_engines(1, work, cycle_time_s=1000.0) == [1]


GPU = torch.device("cuda", 0)


class OnGpu(torch.Tensor):
    """A tensor of the host that says it is on a GPU, and notes the streams that it is used in."""

    is_cuda = property(lambda self: True)
    device = property(lambda self: GPU)  # type: ignore[assignment]

    def record_stream(self, stream: Any) -> None:
        stream.lines.append("uses it")


class Stream:
    """Notes what it is given."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: list[str] = []

    def record_event(self) -> str:
        event = f"{self.name} {len(self.lines)}"
        self.lines.append(f"records {event}")
        return event

    def wait_event(self, event: str) -> None:
        self.lines.append(f"waits for {event}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins of torch's streams: the current one, under "now", and those that were made."""
    found: dict[str, Any] = {"now": Stream("caller's"), "made": []}

    def make(device: torch.device) -> Stream:
        found["made"].append(Stream("engine's"))
        return found["made"][-1]

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        before, found["now"] = found["now"], stream
        yield
        found["now"] = before

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: found["now"])
    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    return found


def test_the_engines_stream_waits_for_the_makers_and_the_takers_for_the_engines(streams) -> None:
    gpu, maker, taker = GpuStreams(), streams["now"], Stream("taker's")
    given = Ticket(TensorRequest("a", "allreduce", device="GPU"), torch.ones(3).as_subclass(OnGpu))
    gpu.asked(given)
    items = [ReadyOp(given.request, given)]
    for _ in range(2):
        with gpu.working_on(items):
            streams["now"].lines.append("works")
    with gpu.working_on(items):
        gpu.finished(items)
    given.result = torch.zeros(3).as_subclass(OnGpu)
    streams["now"] = taker
    gpu.taken(given)
    (engines,) = streams["made"]
    assert maker.lines == ["records caller's 0"]
    assert engines.lines == ["waits for caller's 0", "uses it", "works", "works", "records engine's 4"]
    assert taker.lines == ["waits for engine's 4", "uses it"]


def test_a_rank_without_a_tensor_and_without_a_gpu_does_nothing_there(streams, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu = GpuStreams()
    items = [ReadyOp(TensorRequest("a", "allreduce", device="GPU"), None)]
    with gpu.working_on(items):
        gpu.finished(items)
    assert not streams["made"]
    assert not streams["now"].lines


def test_a_call_for_later_is_made_in_the_stream_of_now(streams) -> None:
    first = streams["now"]
    later = in_this_stream(GPU, lambda: streams["now"])
    streams["now"] = Stream("another")
    assert later() is first
    assert in_this_stream(torch.device("cpu"), lambda: streams["now"])() is streams["now"]
