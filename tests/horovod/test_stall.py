"""The stall inspector, with a clock that the tests turn."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from hpcpar.horovod import stall
from hpcpar.horovod.exceptions import HorovodInternalError
from hpcpar.horovod.stall import StallInspector
from hpcpar.launch.horovod_settings import HorovodSettings

Late = tuple[str, float, tuple[int, ...]]


@dataclass
class Watched:
    """An engine of which the test says what is late."""

    waiting: list[Late] = field(default_factory=list)
    asked: int = 0

    def late(self, missing: tuple[int, ...]) -> list[Late]:
        self.asked += 1
        return self.waiting


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(stall.time, "perf_counter", lambda: now.s)
    return now


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    caplog.clear()
    return found


def test_a_wait_is_told_of_once_after_its_time_with_name_and_ranks(clock, caplog):
    watched = Watched([("allreduce.loss", 100.0, (1, 3))])
    inspector = StallInspector(HorovodSettings(stall_check_s=10.0), watched)
    told = []
    for s in range(0, 40, 2):
        clock.s = 100.0 + s
        inspector.inspect(())
        told.append((s, messages(caplog)))
    told = [(s, texts) for s, texts in told if texts]
    assert len(told) == 1
    s, (text,) = told[0]
    assert 10 < s <= 12
    assert "allreduce.loss waits for ranks 1, 3" in text
    assert "10" in text


def test_what_comes_later_is_told_of_by_itself_and_anew_after_it_was_done(clock, caplog):
    watched = Watched([("a", 100.0, (1,))])
    inspector = StallInspector(HorovodSettings(stall_check_s=1.0), watched)
    clock.s = 102.0
    inspector.inspect(())
    assert ["a waits for rank 1" in text for text in messages(caplog)] == [True]
    watched.waiting.append(("b", 102.0, (2,)))
    clock.s = 104.0
    inspector.inspect(())
    (text,) = messages(caplog)
    assert "b waits for rank 2" in text
    assert "a waits" not in text
    watched.waiting = []
    clock.s = 105.0
    inspector.inspect(())
    watched.waiting = [("a", 105.0, (1,))]
    clock.s = 105.9
    inspector.inspect(())
    assert messages(caplog) == []
    clock.s = 107.0
    inspector.inspect(())
    assert len(messages(caplog)) == 1


def test_what_others_asked_for_counts_from_when_it_was_first_seen(clock, caplog):
    """This rank has not asked: it does not know since when the others wait."""
    watched = Watched([("theirs", 0.0, (0,))])
    inspector = StallInspector(HorovodSettings(stall_check_s=2.0), watched)
    inspector.inspect(())
    assert messages(caplog) == []
    clock.s += 1.9
    inspector.inspect(())
    assert messages(caplog) == []
    clock.s += 1.0
    inspector.inspect(())
    assert len(messages(caplog)) == 1


def test_the_shutdown_time_ends_the_wait_with_names_and_ranks(clock, caplog):
    watched = Watched([("allreduce.loss", 100.0, (1,)), ("young", 104.0, (2,))])
    inspector = StallInspector(HorovodSettings(stall_check_s=2.0, stall_shutdown_s=5.0), watched)
    clock.s = 104.9
    inspector.inspect(())
    clock.s = 105.9
    with pytest.raises(HorovodInternalError) as raised:
        inspector.inspect(())
    text = str(raised.value)
    assert "allreduce.loss waits for rank 1" in text
    assert "young" not in text
    assert "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS" in text
    assert "5" in text


def test_what_ends_the_wait_also_names_what_stalled_a_little_later(clock, caplog):
    """A rank that left an operation out hears of it later than it asks for its next one."""
    watched = Watched([("barrier", 100.0, (0, 2)), ("allreduce.loss", 100.3, (1,)), ("young", 103.9, (2,))])
    inspector = StallInspector(HorovodSettings(stall_check_s=2.0, stall_shutdown_s=5.0), watched)
    clock.s = 105.2
    with pytest.raises(HorovodInternalError) as raised:
        inspector.inspect(())
    overdue, stalled = str(raised.value).split("Stalled as well")
    assert "barrier waits for ranks 0, 2" in overdue
    assert "allreduce.loss waits for rank 1" in stalled
    assert "young" not in overdue + stalled


def test_a_shutdown_time_of_zero_is_never(clock, caplog):
    inspector = StallInspector(HorovodSettings(stall_check_s=1.0), Watched([("a", 100.0, (1,))]))
    clock.s = 1e9
    inspector.inspect(())
    assert len(messages(caplog)) == 1


def test_nothing_is_told_where_the_check_is_switched_off(clock, caplog):
    watched = Watched([("a", 100.0, (1,))])
    inspector = StallInspector(
        HorovodSettings(stall_check=False, stall_check_s=1.0, stall_shutdown_s=2.0), watched
    )
    clock.s = 1e6
    inspector.inspect(())
    assert messages(caplog) == []
    assert watched.asked == 0


def test_many_are_counted_and_a_few_are_named(clock, caplog):
    watched = Watched([(f"loss.{number}", 100.0, (1,)) for number in range(stall.MOST_SHOWN + 92)])
    inspector = StallInspector(HorovodSettings(stall_check_s=1.0), watched)
    clock.s = 102.0
    inspector.inspect(())
    (text,) = messages(caplog)
    assert text.count("waits for rank 1") == stall.MOST_SHOWN
    assert "and 92 more" in text


def test_looking_often_costs_nothing(clock, caplog):
    """An engine's state is gone through a few times within the stall time, not at every look."""
    watched = Watched()
    inspector = StallInspector(HorovodSettings(stall_check_s=60.0), watched)
    for _ in range(10_000):
        clock.s += 1e-4
        inspector.inspect(())
    assert watched.asked <= 3
