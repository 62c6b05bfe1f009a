"""Waits that last: the log says who is missing, and where; an error is shown though its rank waits."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest

from hpcpar.comm import Communicator
from hpcpar.comm.watch import Watch
from hpcpar.comm.whereabouts import Place, announce, here, locate
from hpcpar.transport import loopback

WAIT_AT_MOST_S = 60


class Warned(logging.Handler):
    """Keeps warnings; `enough` is set when this many have come."""

    def __init__(self, count: int) -> None:
        super().__init__(logging.WARNING)
        self.count = count
        self.texts: list[str] = []
        self.enough = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        if len(self.texts) >= self.count:
            self.enough.set()


@pytest.fixture
def warned(request):
    handlers = []

    def keep(count):
        handlers.append(Warned(count))
        logging.getLogger("hpcpar").addHandler(handlers[-1])
        return handlers[-1]

    yield keep
    for handler in handlers:
        logging.getLogger("hpcpar").removeHandler(handler)


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_waiting_rank_says_once_who_is_missing_and_from_what(size, blocking, warned):
    told = warned(size - 1)

    def work(transport):
        comm = Communicator.over(transport, timeout_s=WAIT_AT_MOST_S, stall_warn_s=0.2)
        if comm.rank == size - 1:
            assert told.enough.wait(WAIT_AT_MOST_S)
        x = np.ones(3)
        return (comm.allreduce(x) if blocking else comm.start_allreduce(x).wait()).tolist()

    assert loopback.run(size, work) == [[size] * 3] * size
    assert len(told.texts) == size - 1
    for rank in range(size - 1):
        (text,) = [text for text in told.texts if text.startswith(f"rank {rank} has waited")]
        assert "in allreduce (call 0 of 'world')" in text
        # Some wait for a rank that waits itself.
        assert f"rank {size - 1} does not answer" in text or "its program is at" in text
    assert any(f"rank {size - 1} does not answer" in text for text in told.texts)


def test_a_message_that_does_not_come_is_told_and_the_one_who_waits_says_in_which_line(warned):
    told = warned(2)

    def work(transport):
        comm = Communicator.over(transport, timeout_s=WAIT_AT_MOST_S, stall_warn_s=0.2)
        if comm.rank == 0:
            comm.recv(np.zeros(1), 1)  # meanwhile rank 1 waits for rank 2
        elif comm.rank == 1:
            comm.recv(np.zeros(1), 2)
            comm.send(np.ones(1), 0)
        else:
            assert told.enough.wait(WAIT_AT_MOST_S)
            comm.send(np.ones(1), 1)

    loopback.run(3, work)
    (text,) = [text for text in told.texts if text.startswith("rank 0")]
    assert "rank 1 waits in recv from rank 2" in text
    assert "test_stall.py:" in text


def test_a_barrier_in_finally_does_not_hide_the_error(warned):
    told = warned(1)

    def work(transport):
        comm = Communicator.over(transport, timeout_s=WAIT_AT_MOST_S)
        if comm.rank == 0:
            assert told.enough.wait(WAIT_AT_MOST_S)
            return comm.barrier()
        try:
            raise KeyError("only here")
        finally:
            comm.barrier()

    with pytest.raises(KeyError, match="only here"):
        loopback.run(2, work)
    assert "while it handles this error" in told.texts[0]
    assert "raise KeyError" in told.texts[0]
    assert len(told.texts) == 1


def test_another_process_is_never_asked_where_it_is():
    own = announce()
    assert locate(own._replace(descriptor=0)) is None
    assert locate(own._replace(host="elsewhere")) is None
    assert locate(Place(own.host, 2**22 + 1, 3)) is None


def test_this_process_is_asked_where_it_is():
    assert "test_this_process_is_asked_where_it_is" in here()
    found = locate(announce())
    assert found is not None
    assert ".py:" in found


SLOW = """
import ctypes, sys, time
import numpy as np
import hpcpar

world = hpcpar.init(stall_warn_s=1)

def slow():
    {how}

if world.rank == 1:
    slow()
print(world.allreduce(np.ones(1)).item())
"""


@pytest.mark.parametrize("how", ["time.sleep(4)", "list(map(ctypes.PyDLL(None).usleep, [100_000] * 40))"])
def test_of_a_rank_that_computes_the_others_log_process_file_and_line(tmp_path, run_ranks, how):
    script = tmp_path / "slow.py"
    script.write_text(SLOW.replace("{how}", how))
    done = run_ranks(3, str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3.0"] * 3
    for rank in (0, 2):
        (line,) = [line for line in done.stderr.splitlines() if f"rank {rank} has waited" in line]
        assert "rank 1 (pid " in line
        assert "slow.py:9 in slow" in line


ASKED_AT_ONCE = """
import time
import hpcpar
from hpcpar.comm import whereabouts

whereabouts.QUIET_LOOKS, whereabouts.ANSWER_WITHIN_S = 0, 1.0
world = hpcpar.init()
places = world.allgather_object(whereabouts.announce())
for _ in range(20):
    world.barrier()
    if world.rank == 1:
        time.sleep(0.05)
    elif whereabouts.locate(places[1]) is None:
        print("no answer")
"""


def test_a_rank_that_several_ask_at_once_answers_all(tmp_path, run_ranks):
    # A process's second signal goes to any thread, and that may take the first one with it.
    script = tmp_path / "asked.py"
    script.write_text(ASKED_AT_ONCE)
    done = run_ranks(4, str(script))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


DIFFERENT = """
import os
from hpcpar.launch import environment
if environment.detect().rank == 1:
    os.environ.update({"HPCPAR_SHARED_MEMORY": "0", "HPCPAR_ALGORITHM": "allgather=ring"})
import hpcpar
try:
    hpcpar.init(timeout_s=60)
except hpcpar.errors.ConfigError as error:
    print(error)
"""


def test_settings_that_differ_are_named_on_every_rank(tmp_path, run_ranks):
    script = tmp_path / "different.py"
    script.write_text(DIFFERENT)
    done = run_ranks(3, str(script))
    told = done.stdout.splitlines()
    assert len(told) == 3, done.stderr
    for line in told:
        assert "HPCPAR_SHARED_MEMORY (shared_memory) is True on ranks 0,2, False on ranks 1" in line
        assert "HPCPAR_ALGORITHM (algorithm) is None on ranks 0,2, 'allgather=ring' on ranks 1" in line
        assert "HPCPAR_CHECK" not in line


def test_answers_that_come_after_the_wait_are_received_at_the_end():
    asks, answers = (Watch(transport, 60.0) for transport in loopback.connect(2))
    for _ in range(2):
        asks._send_question(1)
    late = threading.Timer(0.05, answers.leave)
    late.start()
    asks.settle()
    late.join()
    assert asks.has_left(1)
    assert asks._transport.control_receive() == []
