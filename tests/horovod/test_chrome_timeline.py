"""The timeline's file: what a trace viewer gets to see of a tensor, during the run and after it."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hpcpar.errors import OperationError
from hpcpar.horovod import chrome_timeline as module
from hpcpar.horovod.chrome_timeline import ChromeTimeline

Event = dict[str, Any]


ACTIVITIES = ("QUEUE", "MEMCPY_IN_FUSION_BUFFER", "MPI_ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def allreduce(timeline: ChromeTimeline, name: str) -> None:
    """Draw one all-reduce of two ranks, as the engine does."""
    timeline.negotiate(name, "allreduce")
    timeline.ready(name, (1, 0))
    for activity in ACTIVITIES:
        timeline.activity(name, "allreduce", activity)
    timeline.end(name, "float32", (3, 4))


def of_process(events: list[Event], name: str) -> list[tuple[str, str]]:
    """(phase, name) of the events of one tensor, without metadata."""
    (process,) = {
        event["pid"] for event in events if event["ph"] == "M" and event["args"].get("name") == name
    }
    return [
        (event["ph"], event["name"]) for event in events if event["pid"] == process and event["ph"] != "M"
    ]


def test_an_allreduce_is_drawn_in_nested_bars_of_a_process_with_its_name(path: Path) -> None:
    timeline = ChromeTimeline(path, mark_cycles=False)
    allreduce(timeline, "allreduce.grad")
    timeline.close()
    events = json.loads(path.read_text())
    negotiated = [("B", "NEGOTIATE_ALLREDUCE"), ("i", "1"), ("i", "0"), ("E", "NEGOTIATE_ALLREDUCE")]
    done = [(phase, activity) for activity in ACTIVITIES for phase in "BE"]
    expected = [*negotiated, ("B", "ALLREDUCE"), *done, ("E", "ALLREDUCE")]
    assert of_process(events, "allreduce.grad") == expected
    assert events[-1]["args"] == {"dtype": "float32", "shape": [3, 4]}
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)


def test_every_tensor_is_one_process_however_often_it_comes(path: Path) -> None:
    timeline = ChromeTimeline(path, mark_cycles=False)
    for name in ("allreduce.a", "broadcast.b", "allreduce.a"):
        allreduce(timeline, name)
    timeline.close()
    events = json.loads(path.read_text())
    named = {e["pid"]: e["args"].get("name") for e in events if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert named == {0: None, 1: "allreduce.a", 2: "broadcast.b"}
    assert order == {0: 0, 1: 1, 2: 2}


def test_the_first_event_says_when_time_0_was(path: Path) -> None:
    before = time.time() * 1e6
    timeline = ChromeTimeline(path, mark_cycles=False)
    after = time.time() * 1e6
    timeline.close()
    first = json.loads(path.read_text())[0]
    assert first["ph"] == "M"
    assert before - 1 <= first["args"]["start_time_since_epoch_in_micros"] <= after


def test_times_are_microseconds(path: Path) -> None:
    timeline = ChromeTimeline(path, mark_cycles=False)
    timeline.negotiate("allreduce.a", "allreduce")
    time.sleep(0.02)
    timeline.close()
    begin, end = (e["ts"] for e in json.loads(path.read_text()) if e["ph"] in "BE")
    assert 20_000 <= end - begin < 2_000_000


def test_what_was_flushed_can_be_read_while_the_run_goes_on(path: Path) -> None:
    timeline = ChromeTimeline(path, mark_cycles=True)
    at_first = json.loads(path.read_text() + "]")
    allreduce(timeline, "allreduce.a")
    timeline.mark_cycle()
    timeline.flush()
    text = path.read_text()
    timeline.close()
    assert len(at_first) == 2
    assert "]" not in re.sub(r'"shape": \[[\d, ]*\]', "", text), "the array is still open"
    assert {"ALLREDUCE", "CYCLE_START"} <= {event["name"] for event in json.loads(text + "]")}
    assert json.loads(path.read_text()) == json.loads(text + "]")


@pytest.mark.parametrize("mark_cycles", [True, False])
def test_cycles_are_marked_across_all_processes_only_when_asked_for(path: Path, mark_cycles: bool) -> None:
    timeline = ChromeTimeline(path, mark_cycles=mark_cycles)
    timeline.mark_cycle()
    timeline.mark_cycle()
    timeline.close()
    events = json.loads(path.read_text())
    assert [(e["ph"], e["s"]) for e in events if e["name"] == "CYCLE_START"] == [("i", "g")] * 2 * mark_cycles


def test_what_has_not_ended_ends_with_what_it_is_part_of(path: Path) -> None:
    timeline = ChromeTimeline(path, mark_cycles=False)
    timeline.activity("allgather.a", "allgather", "QUEUE")
    timeline.end("allgather.a", "int64", (2,))
    timeline.negotiate("allreduce.b", "allreduce")
    timeline.close()
    events = json.loads(path.read_text())
    gather = [("B", "ALLGATHER"), ("B", "QUEUE"), ("E", "QUEUE"), ("E", "ALLGATHER")]
    assert of_process(events, "allgather.a") == gather
    assert of_process(events, "allreduce.b") == [("B", "NEGOTIATE_ALLREDUCE"), ("E", "NEGOTIATE_ALLREDUCE")]


def test_a_timeline_that_begins_in_the_middle_leaves_out_what_has_no_beginning(path: Path) -> None:
    timeline = ChromeTimeline(path, mark_cycles=False)
    timeline.ready("allreduce.a", ())
    timeline.end("allreduce.a", "float32", (1,))
    timeline.activity("allreduce.b", "allreduce", "QUEUE")
    timeline.ready("allreduce.b", ())
    timeline.end("allreduce.b", "float32", (1,))
    timeline.close()
    drawn = [e for e in json.loads(path.read_text()) if e["ph"] != "M"]
    expected = [("B", "ALLREDUCE"), ("B", "QUEUE"), ("E", "QUEUE"), ("E", "ALLREDUCE")]
    assert [(e["ph"], e["name"]) for e in drawn] == expected


def test_after_close_nothing_more_is_written(path: Path) -> None:
    timeline = ChromeTimeline(path, mark_cycles=True)
    timeline.close()
    text = path.read_text()
    allreduce(timeline, "allreduce.a")
    timeline.mark_cycle()
    timeline.flush()
    timeline.close()
    assert path.read_text() == text


def test_many_events_are_written_without_a_flush(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PENDING", 10)
    timeline = ChromeTimeline(path, mark_cycles=True)
    for _ in range(25):
        timeline.mark_cycle()
    seen = path.read_text().count("CYCLE_START")
    timeline.close()
    assert seen == 20
    assert path.read_text().count("CYCLE_START") == 25


def test_threads_may_add_events_at_once(path: Path) -> None:
    timeline = ChromeTimeline(path, mark_cycles=False)

    def work(number: int) -> None:
        for _ in range(200):
            allreduce(timeline, f"allreduce.{number}")
            timeline.flush()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.close()
    events = json.loads(path.read_text())
    assert [len(of_process(events, f"allreduce.{number}")) for number in range(4)] == [200 * 14] * 4


def test_names_with_quotes_and_newlines_stay_readable(path: Path) -> None:
    timeline = ChromeTimeline(path, mark_cycles=False)
    allreduce(timeline, 'allreduce."a"\nβ')
    timeline.close()
    assert of_process(json.loads(path.read_text()), 'allreduce."a"\nβ')


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OperationError) as caught:
        ChromeTimeline(tmp_path / "missing" / "trace.json", mark_cycles=False)
    assert f"{tmp_path / 'missing' / 'trace.json'}: No such file or directory" in str(caught.value)
