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


def test_operations_of_one_name_are_waits_of_their_own(clock, caplog):
    """One rank is a little late with each of many operations by the name: none of them has waited long."""
    watched = Watched()
    inspector = StallInspector(HorovodSettings(stall_check_s=2.0, stall_shutdown_s=5.0), watched)
    for _ in range(20):
        watched.waiting = [("allreduce.loss", clock.s, (1,))]
        clock.s += 1.0
        inspector.inspect(())
    assert messages(caplog) == []
    for _ in range(2):
        watched.waiting = [("allreduce.loss", clock.s, (1,))]
        clock.s += 3.0
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


SKIPPED = """
import logging
import torch
import hpcpar.horovod.torch as hvd

warned = []
class Keep(logging.Handler):
    def emit(self, record):
        warned.append((time.perf_counter() - began, record.getMessage()))

hvd.init()
logging.getLogger("hpcpar").addHandler(Keep())
rank = hvd.rank()
hvd.barrier()
began = time.perf_counter()
names = [f"loss.{k}" for k in range(50) if (k, rank) != (7, 1)]
handles = {name: hvd.allreduce_async(torch.ones(2), name=name, op=hvd.Sum) for name in names}
# Nobody holds them up: what they wait for would come after the error only.
results = {name: hvd.synchronize(handles[name]).tolist() for name in names if name != "loss.7"}
tell(results=results)
late = error_of(lambda: hvd.synchronize(handles["loss.7"]) if rank != 1 else hvd.barrier())
ended_s = time.perf_counter() - began
after = error_of(lambda: hvd.allreduce(torch.ones(1)))
tell(warned=warned, late=late, ended_s=ended_s, after=after)
files = [Path(sys.argv[1]) / f"{number}.json" for number in range(int(sys.argv[2]))]
while not all(file.exists() and "after" in json.loads(file.read_text()) for file in files):
    time.sleep(0.05)  # who leaves ends the others
os._exit(0)
"""


def test_a_rank_that_skips_one_is_named_on_every_rank_and_the_wait_is_ended(job):
    size = 3
    told = job(
        size,
        SKIPPED,
        fails=True,
        HOROVOD_STALL_CHECK_TIME_SECONDS="1",
        HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="3",
    )
    for rank, of_rank in enumerate(told):
        assert list(of_rank["results"].values()) == [[float(size)] * 2] * 49
        about = [(s, text) for s, text in of_rank["warned"] if "allreduce.loss.7" in text]
        assert about, f"rank {rank} says nothing"
        when_s, text = about[0]
        assert 1.0 < when_s < of_rank["ended_s"]
        assert "allreduce.loss.7 waits for rank 1" in text
        kind, kinds, message = of_rank["late"]
        assert kind == "HorovodInternalError"
        assert "RuntimeError" in kinds
        assert "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS" in message
        assert "rank 1" in message
        assert of_rank["ended_s"] > 3.0
        assert of_rank["after"][0] == "HorovodInternalError"


LATE = """
import logging
import torch
import hpcpar.horovod.torch as hvd

warnings = Path(sys.argv[1]) / "warnings"
if detect().rank == 0:
    logging.getLogger("hpcpar").addHandler(logging.FileHandler(warnings))

# Until rank 0 says so; unchecked, for longer than it would take to say so.
def be_busy(what):
    end_s = time.monotonic() + (15 if life == "checked" else 1.5)
    while time.monotonic() < end_s and not (warnings.exists() and what in warnings.read_text()):
        time.sleep(0.02)

sums = []
for life in ("checked", "unchecked"):
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 1:
        be_busy(f"{life}.polled")
    polled = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name=f"{life}.polled")
    while not hvd.poll(polled):
        pass
    sums.append(hvd.synchronize(polled).item())
    for name in ("waited", "gathered"):
        hvd.barrier()
        if hvd.rank() == 1:
            be_busy(f"{life}.{name}")
        call = hvd.allreduce if name == "waited" else hvd.allgather
        sums.append(call(torch.ones(1), name=f"{life}.{name}").sum().item())
    hvd.shutdown()
    os.environ["HOROVOD_STALL_CHECK_DISABLE"] = "1"
tell(sums=sums)
"""


def test_a_rank_that_is_busy_is_named_while_it_is_and_all_goes_on_unless_it_is_switched_off(job, tmp_path):
    """A program may poll, wait for one small all-reduce by blocking calls, or wait for the queue."""
    told = job(2, LATE, HOROVOD_STALL_CHECK_TIME_SECONDS="1")
    assert [of_rank["sums"] for of_rank in told] == [[2.0, 1.0, 2.0] * 2] * 2
    warned = (tmp_path / "warnings").read_text()
    for name in ("allreduce.checked.polled", "allreduce.checked.waited", "allgather.checked.gathered"):
        assert f"{name} waits for rank 1" in warned
    assert "unchecked" not in warned + told[0]["printed"]
