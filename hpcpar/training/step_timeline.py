"""Timeline of all ranks' compute and communication, for chrome://tracing, Perfetto or Speedscope.

One process for each rank, one thread for its compute, as many for its communication as there were
collectives in flight at once, and one for when its program stood still for them:

    rank 0   compute            |forward|backward         |optimizer|
             communication              |allreduce dp gradients|
             communication 2                |allreduce dp gradients|
             waiting                                  |allreduce …|

Counters have the bytes of what autograd saves, and after each step those of the model state. Arrows lead from
the rank that came last to a collective to the others, which it kept waiting; in a pipeline also from each
action to the next stage's that has its activation or gradient.

source   Trace Event Format (Google, 2016), "complete" events: ph = X, ts and dur in microseconds;
         counters: C; flows: s and f
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hpcpar.comm import Communicator, Trace, TraceEvent
from hpcpar.comm.accounting import COUNTER
from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.timetable import name_event, span_event, trace_file

COMPUTE = "compute"

WITHIN = 0.999
"""A viewer wants the end of an arrow within the event."""


@contextmanager
def span(trace: Trace | None, name: str, **arguments: Any) -> Iterator[None]:
    """Record the block as an event of compute; do nothing without a trace."""
    if trace is None:
        yield
        return
    start_s = time.perf_counter()
    try:
        yield
    finally:
        trace.add(name, COMPUTE, start_s, time.perf_counter(), **arguments)


class StepTimeline:
    """Trace of this rank from here until `write`; both are collective.

    Ranks of one node share a clock. The clocks of nodes are aligned at a barrier, so they agree to within the
    time that a barrier takes.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.trace = Trace()
        comm.barrier()
        left_s = comm.allgather_object(time.perf_counter())
        self._origin_s: float = left_s[comm.nodes.index(comm.nodes[comm.rank])]
        comm.trace = self.trace

    def stop(self) -> None:
        """Stop recording; keep the events so far."""
        self._comm.trace = None

    def write(self, path: Path) -> None:
        """Gather the events of all ranks; rank 0 writes the file."""
        self.stop()
        events = trace_events(self._comm.rank, self.trace.events, origin_s=self._origin_s)
        gathered = self._comm.gather_object(events)
        if gathered is not None:
            merged = [event for of_rank in gathered for event in of_rank]
            path.write_text(trace_file([*merged, *flow_events(merged)]), encoding="utf-8")


def trace_events(rank: int, events: Sequence[TraceEvent], *, origin_s: float) -> list[dict[str, Any]]:
    """Return one rank's events in the viewer's format, with names of its process and threads."""
    found = {event.category for event in events} - {COUNTER}
    categories = sorted(found, key=lambda name: (name != COMPUTE, name))
    formed = [name_event("process_name", rank, 0, f"rank {rank}")]
    thread = 0
    for category in categories:
        for number, lane in enumerate(lanes([event for event in events if event.category == category])):
            title = f"{category} {number + 1}" if number else category
            formed.append(name_event("thread_name", rank, thread, title))
            formed += [
                span_event(each.name, category, each.start_s - origin_s, each.stop_s - each.start_s)
                | {"pid": rank, "tid": thread, "args": each.arguments}
                for each in lane
            ]
            thread += 1
    return formed + [
        {
            "ph": "C",
            "name": each.name,
            "pid": rank,
            "ts": (each.start_s - origin_s) * 1e6,
            "args": each.arguments,
        }
        for each in events
        if each.category == COUNTER
    ]


class Arrow(NamedTuple):
    """From a moment in one event to a moment in another rank's; in microseconds."""

    name: str
    category: str
    source: dict[str, Any]
    leaves: float
    target: dict[str, Any]
    arrives: float


def flow_events(events: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the arrows between events of all ranks."""
    complete = [event for event in events if event["ph"] == "X"]
    for number, arrow in enumerate([*pipeline_arrows(complete), *collective_arrows(complete)], 1):
        common = {"name": arrow.name, "cat": arrow.category, "id": number}
        for event, end in (
            (arrow.source, {"ph": "s", "ts": arrow.leaves}),
            (arrow.target, {"ph": "f", "bp": "e", "ts": arrow.arrives}),
        ):
            yield common | end | {key: event[key] for key in ("pid", "tid")}


def collective_arrows(events: Sequence[dict[str, Any]]) -> Iterator[Arrow]:
    """Yield arrows from the rank that came last to each collective to the ends of the others."""
    calls: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if "call" in event["args"]:
            calls[event["args"]["comm"], event["args"]["call"]].append(event)
    for found in calls.values():
        last = max(found, key=lambda event: event["ts"])
        for event in found:
            if event["pid"] != last["pid"]:
                arrives = max(last["ts"], event["ts"] + WITHIN * event["dur"])
                yield Arrow("came last", "communication", last, last["ts"], event, arrives)


def pipeline_arrows(events: Sequence[dict[str, Any]]) -> Iterator[Arrow]:
    """Yield arrows from the actions of pipelines to those that use what they send, on other ranks.

    events   of all ranks. The k-th 0F3 of a pipeline sends to its k-th 1F3, and a 1B3 to its 0B3.
    """
    times: dict[tuple[int, Action], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if "pipeline" in event["args"]:
            times[event["args"]["pipeline"], Action.parse(event["name"])].append(event)
    for (pipeline, (stage, kind, microbatch)), sent in times.items():
        if kind == "W":
            continue
        name, following = ("activation", stage + 1) if kind == "F" else ("gradient", stage - 1)
        # At a pipeline's ends there is nobody who uses it, and not recorded is what ended with an error.
        used = times.get((pipeline, Action(following, kind, microbatch)), ())
        for source, target in zip(sent, used, strict=False):
            if source["pid"] != target["pid"]:
                leaves = source["ts"] + WITHIN * source["dur"]
                yield Arrow(name, "pipeline", source, leaves, target, target["ts"])


def lanes(events: Sequence[TraceEvent]) -> list[list[TraceEvent]]:
    """Spread events over few lanes, so that those of one lane are nested or disjoint.

    A viewer draws one thread's events as a call stack, and loses partly overlapping ones.
    """
    spread: list[list[TraceEvent]] = []
    open_stops: list[list[float]] = []
    for event in sorted(events, key=lambda event: (event.start_s, -event.stop_s)):
        for lane, stops in zip(spread, open_stops, strict=True):
            while stops and stops[-1] <= event.start_s:
                stops.pop()
            if not stops or event.stop_s <= stops[-1]:
                lane.append(event)
                stops.append(event.stop_s)
                break
        else:
            spread.append([event])
            open_stops.append([event.stop_s])
    return spread
