from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpar.comm import Communicator, Trace, TraceEvent, run_loopback
from hpcpar.training.step_timeline import StepTimeline, flow_events, lanes, span, trace_events


def event(start_s: float, stop_s: float, category: str = "compute") -> TraceEvent:
    return TraceEvent("work", category, start_s, stop_s)


def test_nested_events_share_a_lane_and_overlapping_ones_do_not() -> None:
    outer, inner, after, across = event(0, 4), event(1, 2), event(4, 6), event(3, 5)
    assert lanes([inner, outer, after, across]) == [[outer, inner, after], [across]]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=25))
def test_events_of_one_lane_are_nested_or_apart(spans: list[tuple[int, int]]) -> None:
    events = [event(start, start + length) for start, length in spans]
    spread = lanes(events)
    assert sorted((e.start_s, e.stop_s) for lane in spread for e in lane) == sorted(
        (e.start_s, e.stop_s) for e in events
    )
    for lane in spread:
        for i, first in enumerate(lane):
            for second in lane[i + 1 :]:
                apart = first.stop_s <= second.start_s or second.stop_s <= first.start_s
                nested = first.start_s <= second.start_s and second.stop_s <= first.stop_s
                assert apart or nested


def test_compute_comes_first_and_times_are_microseconds_from_the_origin() -> None:
    formed = trace_events(2, [event(11, 12, "communication"), event(10.5, 11)], origin_s=10)
    assert [(e["name"], e["args"].get("name"), e["tid"]) for e in formed if e["ph"] == "M"] == [
        ("process_name", "rank 2", 0),
        ("thread_name", "compute", 0),
        ("thread_name", "communication", 1),
    ]
    assert [(e["tid"], e["ts"], e["dur"], e["pid"]) for e in formed if e["ph"] == "X"] == [
        (0, 5e5, 5e5, 2),
        (1, 1e6, 1e6, 2),
    ]


def test_a_span_is_an_event_and_without_a_trace_nothing() -> None:
    trace = Trace()
    with span(trace, "forward", microbatch=3):
        pass
    with span(None, "forward"):
        pass
    (only,) = trace.events
    assert (only.name, only.category, only.arguments) == ("forward", "compute", {"microbatch": 3})
    assert only.stop_s >= only.start_s


def test_a_timeline_shows_compute_and_communication_of_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"

    def work(comm: Communicator) -> bool:
        timeline = StepTimeline(comm)
        with span(comm.trace, "forward"):
            comm.allreduce(torch.ones(5))
        timeline.write(path)
        return comm.trace is None

    assert run_loopback(3, work) == [True] * 3
    events = json.loads(path.read_text())["traceEvents"]
    for rank in range(3):
        named = {(e["name"], e["cat"]) for e in events if e["ph"] == "X" and e["pid"] == rank}
        assert named - {("allreduce world", "waiting")} == {
            ("forward", "compute"),
            ("allreduce world", "communication"),
        }
    assert all(e["ts"] >= 0 for e in events if e["ph"] == "X")


def test_arrows_lead_from_who_came_last_to_a_collective_to_the_others(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    came = [threading.Semaphore(0) for _ in range(3)]

    def sum_with_last(comm: Communicator, last: int, number: int) -> None:
        if comm.rank != last:
            came[number].release()
        else:
            for _ in range(comm.size - 1):
                came[number].acquire(timeout=60)
            time.sleep(0.2)
        comm.allreduce(torch.ones(5))

    def work(comm: Communicator) -> None:
        halves = comm.split(comm.rank // 2, name="half")
        assert halves is not None
        timeline = StepTimeline(comm)
        sum_with_last(comm, 2, 0)
        sum_with_last(comm, 0, 1)
        if comm.rank < 2:
            sum_with_last(halves, 1, 2)
        timeline.write(path)

    run_loopback(3, work)
    events = json.loads(path.read_text())["traceEvents"]
    starts, ends = ([each for each in events if each["ph"] == kind] for kind in "sf")
    assert [each["id"] for each in starts] == [each["id"] for each in ends]
    assert {each["name"] for each in starts} == {"came last"}
    pairs = [(start["pid"], end["pid"]) for start, end in zip(starts, ends, strict=True)]
    assert pairs == [(2, 0), (2, 1), (0, 1), (0, 2), (1, 0)]
    for start, end in zip(starts, ends, strict=True):
        assert start["ts"] <= end["ts"]
        assert any(
            each["ts"] <= end["ts"] <= each["ts"] + each["dur"] and each["name"].startswith("allreduce")
            for each in events
            if each["ph"] == "X" and (each["pid"], each["tid"]) == (end["pid"], end["tid"])
        )


def test_ranks_of_a_node_count_from_one_moment() -> None:
    origins = run_loopback(3, lambda comm: StepTimeline(comm)._origin_s, nodes=[0, 0, 1])
    assert origins[0] == origins[1] != origins[2]


def test_a_counter_has_its_values_and_no_thread() -> None:
    trace = Trace()
    trace.count("activations", nbytes=3)
    (noted,) = trace.events
    process, counter = trace_events(1, trace.events, origin_s=noted.start_s - 2)
    assert process["args"] == {"name": "rank 1"}
    assert counter == {"ph": "C", "name": "activations", "pid": 1, "ts": 2e6, "args": {"nbytes": 3}}


def test_arrows_lead_from_an_action_to_the_stage_that_needs_it() -> None:
    def recorded(rank: int, *names: str) -> list[Any]:
        spans = [
            TraceEvent(name, "compute", at, at + 1, {"pipeline": rank % 2}) for at, name in enumerate(names)
        ]
        return trace_events(rank, spans, origin_s=0)

    # Pipelines of ranks 0, 2 and 1, 3, two steps each.
    events = [
        event
        for rank in (0, 1, 2, 3)
        for event in recorded(rank, *(2 * (("0F0", "0B0", "0W0") if rank < 2 else ("1F0", "1B0", "1W0"))))
    ]
    flows = list(flow_events(events))
    starts, ends = flows[::2], flows[1::2]
    assert {(each["ph"], each["name"]) for each in starts} == {("s", "activation"), ("s", "gradient")}
    assert all(each["ph"] == "f" and each["bp"] == "e" for each in ends)
    assert [each["id"] for each in starts] == [each["id"] for each in ends] == list(range(1, 9))
    pairs = {
        (a["name"], a["pid"], int(a["ts"] / 1e6), b["pid"], round(b["ts"] / 1e6))
        for a, b in zip(starts, ends, strict=True)
    }
    assert pairs == {
        (name, source, start + step, target, start + step)
        for step in (0, 3)
        for name, start, ways in (
            ("activation", 0, ((0, 2), (1, 3))),
            ("gradient", 1, ((2, 0), (3, 1))),
        )
        for source, target in ways
    }
    assert list(flow_events(recorded(4, "0F0", "1F0", "1B0", "0B0"))) == []
