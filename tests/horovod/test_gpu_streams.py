"""The engine's stream on GPUs: what it comes after, and what comes after it. Streams are noted here, not had.

With GPUs: torch/test_on_gpus.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hpcpar.comm.progress import Handle
from hpcpar.horovod import responses
from hpcpar.horovod.engine import Engine
from hpcpar.horovod.responses import Item, Ticket
from tests.horovod.test_engine import all_of, brought, ticket, total, with_engines


class Notes:
    """In the place of `GpuStreams`: what was called when, and whether in the engine's stream."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, bool]] = []
        self._is_inside = False

    def note(self, what: str) -> None:
        self.lines.append((what, self._is_inside))

    def asked(self, ticket: Ticket) -> None:
        self.note("asked")

    @contextmanager
    def working_on(self, items: Sequence[Item]) -> Iterator[None]:
        assert {item.request.device for item in items} == {"GPU"}
        self._is_inside = True
        yield
        self._is_inside = False

    def finished(self, items: Sequence[Item]) -> None:
        self.note("finished")
        for item in items:
            if item.ticket is not None:
                item.ticket.finished = True

    def taken(self, ticket: Ticket) -> None:
        assert ticket.finished
        self.note("taken")


def noted(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> Notes:
    notes = engine._gpu = Notes()  # type: ignore[assignment]
    copy_all, wait = responses.copy_all, Handle.wait

    def copy(targets: Any, sources: Any) -> None:
        notes.note("copied")
        copy_all(targets, sources)

    def waited(handle: Handle) -> Any:
        notes.note("ordered")
        return wait(handle)

    monkeypatch.setattr(responses, "copy_all", copy)
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
