"""What threads see of the gate before an optimizer's buckets."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch

from hpcpar.horovod.negotiation import TensorRequest
from hpcpar.horovod.operations import Ticket
from hpcpar.horovod.torch.readiness import BucketGate


class Engine:
    """Runs nothing by itself: another thread does what its tickets ask for."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_over = threading.Event()

    def poll(self, ticket: Ticket) -> bool:
        return ticket.done

    def wait(self, ticket: Ticket) -> None:
        assert self.is_over.wait(60)


def test_a_bucket_that_another_thread_is_beginning_is_waited_for() -> None:
    engine, asked = Engine(), Ticket(TensorRequest("step", "schedule"))
    is_beginning, may_begin, done = threading.Event(), threading.Event(), []

    def start(flat: torch.Tensor, bucket: Any) -> Any:
        is_beginning.set()
        assert may_begin.wait(60)
        return SimpleNamespace(wait=lambda: done.append(bucket))

    opens = []
    gate = BucketGate(engine, SimpleNamespace(start=start), lambda on_ready: opens.append(on_ready) or asked)
    pending = gate.start(torch.zeros(3), "bucket")

    def run_engine() -> None:
        with engine.lock:
            opens[0]()
            asked.done = True
            engine.is_over.set()

    other = threading.Thread(target=run_engine)
    other.start()
    assert is_beginning.wait(60)
    threading.Timer(0.05, may_begin.set).start()
    pending.wait()
    other.join(60)
    assert done == ["bucket"]
