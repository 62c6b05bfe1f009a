"""Horovod's timeline: a Chrome trace of each tensor's negotiation, wait and collective.

A tensor is a process of the trace, named like allreduce.grad_1; its bars are nested:

    |NEGOTIATE_ALLREDUCE      |ALLREDUCE                                                        |
    |  0    1      3    2     |QUEUE |MEMCPY_IN_FUSION_BUFFER|MPI_ALLREDUCE|MEMCPY_OUT_FUSION_…|

The ticks are instants at which a rank was known to be ready. The file is a JSON array whose last
bracket comes with `close`; trace viewers do without it, and read the file while the run goes on.

source   Trace Event Format (Google, 2016): duration events ph = B, E; instants i; metadata M; ts in
         microseconds
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcpar.errors import OperationError

if TYPE_CHECKING:
    from hpcpar.horovod.negotiation import ReadyRequest
    from hpcpar.horovod.operations import ReadyOp

MOST_PENDING = 4096
"""Events that wait for a flush; after so many they are written anyway."""

NEGOTIATE = "NEGOTIATE_"


class ChromeTimeline:
    """Events of one rank, added from any thread: cheap, as nothing is written before `flush`.

    kind       what is done to a tensor: allreduce, allgather, broadcast, alltoall, reducescatter …
    activity   a part of that: QUEUE, MEMCPY_IN_FUSION_BUFFER, MPI_ALLREDUCE …

    A timeline may begin, and be closed, while tensors are under way: the end of what it has not seen the
    beginning of, and all that comes after `close`, is left out.
    """

    def __init__(self, path: Path, mark_cycles: bool) -> None:
        """Begin a new file.

        mark_cycles   whether `mark_cycle` leaves a mark
        errors        OperationError where the file cannot be written
        """
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise OperationError(
                f"the timeline cannot be written to {path}: {error.strerror}; name a file in a directory "
                f"that exists and can be written to"
            ) from error
        self._mark_cycles = mark_cycles
        self._lock = threading.Lock()
        self._processes: dict[str, int] = {}
        self._open: dict[str, list[str]] = {}
        self._origin_s = time.perf_counter()
        self._separator = "[\n"
        # Where Horovod says when the trace's time 0 was: in what would be the name of process 0.
        epoch = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
        self._pending = [_metadata("process_name", 0, epoch), _metadata("process_sort_index", 0, _index(0))]
        self.flush()

    def negotiate(self, name: str, kind: str) -> None:
        """Record that a tensor was submitted here, or on another rank first."""
        with self._lock:
            self._begin(name, NEGOTIATE + kind.upper())

    def ready(self, name: str, ranks: Iterable[int]) -> None:
        """Record that these ranks have submitted a tensor, and that its negotiation is over."""
        with self._lock:
            for rank in ranks:
                self._add(name, "i", str(rank), s="p")
            if self._open.get(name, [""])[-1].startswith(NEGOTIATE):
                self._end_last(name)

    def activity(self, name: str, kind: str, activity: str) -> None:
        """Record the begin of an activity of a tensor's operation; it ends the one before."""
        with self._lock:
            if not self._open.get(name):
                self._begin(name, kind.upper())
            elif len(self._open[name]) > 1:
                self._end_last(name)
            self._begin(name, activity)

    def end(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        """Record the end of a tensor's operation and of its activity."""
        with self._lock:
            opened = self._open.get(name, [])
            while len(opened) > 1:
                self._end_last(name)
            if opened:
                self._end_last(name, args={"dtype": dtype, "shape": list(shape)})

    def mark_cycle(self) -> None:
        """Record the begin of a negotiation round."""
        if self._mark_cycles:
            with self._lock:
                self._pending.append(
                    {"name": "CYCLE_START", "ph": "i", "s": "g", "pid": 0, "ts": self._now()}
                )
                self._write_if_many()

    def flush(self) -> None:
        """Write all events so far, where others can read them."""
        with self._lock:
            self._write()

    def close(self) -> None:
        """Write what is left, and end what has begun, so that the file is complete. Again: nothing."""
        with self._lock:
            if self._file.closed:
                return
            for name, opened in self._open.items():
                while opened:
                    self._end_last(name)
            self._write()
            self._file.write("\n]\n")
            self._file.close()

    def _begin(self, name: str, event: str) -> None:
        self._add(name, "B", event)
        self._open.setdefault(name, []).append(event)

    def _end_last(self, name: str, **more: Any) -> None:
        self._add(name, "E", self._open[name].pop(), **more)

    def _add(self, name: str, phase: str, event: str, **more: Any) -> None:
        process = self._processes.get(name)
        if process is None:
            process = self._processes[name] = len(self._processes) + 1
            self._pending.append(_metadata("process_name", process, {"name": name}))
            self._pending.append(_metadata("process_sort_index", process, _index(process)))
        self._pending.append({"name": event, "ph": phase, "pid": process, "ts": self._now(), **more})
        self._write_if_many()

    def _now(self) -> float:
        return round((time.perf_counter() - self._origin_s) * 1e6, 1)

    def _write_if_many(self) -> None:
        if len(self._pending) >= MOST_PENDING:
            self._write()

    def _write(self) -> None:
        if self._pending and not self._file.closed:
            events = ",\n".join(json.dumps(event) for event in self._pending)
            self._file.write(self._separator + events)
            self._file.flush()
            self._separator = ",\n"
        self._pending.clear()


class TimelineObserver:
    """Tells a timeline what one engine does; the engine does the same without one.

    timeline   None: nothing is recorded
    """

    def __init__(self, timeline: ChromeTimeline | None, size: int) -> None:
        self.timeline = timeline
        self._size = size

    def asked(self, name: str, kind: str) -> None:
        """Record that this rank has asked for an operation."""
        if self.timeline is not None:
            self.timeline.negotiate(name, kind)

    def cycle(self) -> None:
        """Record the begin of a negotiation round."""
        if self.timeline is not None:
            self.timeline.mark_cycle()

    def ready(self, ready: Sequence[ReadyRequest], is_open: Container[str]) -> None:
        """Record that all ranks have asked for these, those among them that are open on this rank."""
        if self.timeline is not None:
            for request, _ in ready:
                if request.name in is_open:
                    self.timeline.ready(request.name, range(self._size))

    def activity(self, items: Sequence[ReadyOp], activity: str) -> None:
        """Record what is being done with these from now on."""
        if self.timeline is not None:
            for request, _ in items:
                self.timeline.activity(request.name, request.kind, activity)

    def done(self, items: Sequence[ReadyOp]) -> None:
        """Record the end of these."""
        if self.timeline is not None:
            for request, _ in items:
                self.timeline.end(request.name, request.dtype, request.shape)
            self.timeline.flush()

    # In the timeline each gradient is an all-reduce of its own, as in Horovod's, though buckets are shared.

    def bucket_leaves(self, names: Sequence[str]) -> None:
        """Record that the collective of these gradients' bucket starts."""
        if self.timeline is not None:
            for name in names:
                self.timeline.ready(name, ())
                self.timeline.activity(name, "allreduce", "MPI_ALLREDUCE")

    def bucket_done(self, gradients: Sequence[tuple[str, str, Sequence[int]]]) -> None:
        """Record that these gradients (name, dtype, shape) have been waited for."""
        if self.timeline is not None:
            for gradient in gradients:
                self.timeline.end(*gradient)
            self.timeline.flush()


def _metadata(kind: str, process: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "args": arguments}


def _index(process: int) -> dict[str, int]:
    return {"sort_index": process}
