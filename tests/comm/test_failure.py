"""One rank fails in some way; the job must end soon, not with status 0, and say what happened."""

from __future__ import annotations

import io
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from hpcpar.comm import Communicator, failure
from hpcpar.errors import OperationError

PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
import hpcpar

world = hpcpar.init({patience})
values = np.ones(1000)
for step in range(10**6):
    values[:] = 1
    world.allreduce(values)
    world.broadcast(values, root=1)
    if step == 50 and world.rank == 1:
        open(sys.argv[1], "w").close()
        {mistake}
"""

ENDS_WITHIN_S = 15
"""After the mistake: until then a busy machine may take as long as it likes."""


@pytest.fixture
def assert_named(tmp_path, run_ranks):
    """Run three ranks of which rank 1 makes a mistake; the job must fail soon, and say these words."""

    def run(mistake, words):
        script = tmp_path / "script.py"
        patience = "timeout_s=2" if words == STALLED else ""
        script.write_text(PROGRAM.replace("{patience}", patience).replace("{mistake}", mistake))
        mark = tmp_path / "mistake"
        done = run_ranks(3, str(script), str(mark))
        assert mark.exists(), done.stderr
        assert time.time() - mark.stat().st_mtime < ENDS_WITHIN_S
        assert done.returncode != 0
        assert all(word in done.stderr for word in words), done.stderr
        return done.stderr

    return run


LOST = ["hpcpar: rank 1 (pid", "was lost"]
LEFT = ["PeerLeftError", "rank 1 came to the end of the program"]
STALLED = ["StallError", "rank 1 does not answer"]
KILLS_ITSELF, RAISES = "os.kill(os.getpid(), signal.SIGKILL)", "raise ValueError('only here')"


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (KILLS_ITSELF, LOST),
        ("os._exit(0)", LOST),
        (
            "import contextlib, io; redirect = contextlib.redirect_stderr(io.StringIO()); "
            "hook = sys.excepthook; "
            "sys.excepthook = lambda *e: (redirect.__enter__(), hook(*e)); raise ValueError('redirected')",
            ["rank 1 of 3", "Traceback", "ValueError: redirected"],
        ),
        (
            "threading.Thread(target=lambda: 1 / 0).start(); time.sleep(60)",
            ["rank 1 of 3", "ZeroDivisionError"],
        ),
        ("os.kill(os.getpid(), signal.SIGINT)", ["rank 1 of 3", "KeyboardInterrupt"]),
        ("sys.exit()", LEFT),
        ("break", LEFT),
        ("time.sleep(60)", STALLED),
        ("os.kill(os.getpid(), signal.SIGSTOP)", STALLED),
    ],
)
def test_a_rank_that_fails_ends_the_job_and_is_named(assert_named, mistake, words):
    assert_named(mistake, words)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("HPCPAR_SHARED_MEMORY", "0"), ("HPCPAR_ALGORITHM", "allreduce=native,broadcast=native")],
    ids=["messages", "native"],
)
@pytest.mark.parametrize(
    ("mistake", "words"),
    [(KILLS_ITSELF, LOST), ("break", LEFT), ("time.sleep(60)", STALLED), (RAISES, ["ValueError: only here"])],
)
def test_ranks_that_do_not_exchange_by_memory_are_told_the_same(
    assert_named, mistake, words, variable, value, monkeypatch
):
    monkeypatch.setenv(variable, value)
    assert_named(mistake, words)


def test_the_failing_ranks_traceback_comes_first(assert_named):
    printed = assert_named(RAISES, ["rank 1 of 3", "Traceback", "ValueError: only here"])
    told = [line for line in printed.splitlines() if line.startswith("hpcpar: rank")]
    assert told[0].startswith("hpcpar: rank 1 of 3")
    assert printed.index("ValueError: only here") < printed.find("MPI_Abort") or "MPI_Abort" not in printed


def test_an_error_of_a_call_ends_at_the_programs_line_and_another_is_shown_whole(monkeypatch):
    shown, ended = io.StringIO(), []
    monkeypatch.setattr(sys, "__stderr__", shown)
    monkeypatch.setattr(failure, "RELAY_S", 0)
    transport = SimpleNamespace(rank=1, size=2, abort=ended.append)
    hooks = failure.FailureHooks(transport, None, SimpleNamespace(aborting=ended.append))
    alone = Communicator.alone()
    for call, arguments, kind in (
        (alone.allreduce, {"buffer": np.ones(3), "algorithm": "rign"}, OperationError),
        (alone.wait_until, {"condition": lambda: 1 / 0, "waited": None}, ZeroDivisionError),
    ):
        with pytest.raises(kind) as caught:
            call(**arguments)
        hooks._on_exception(kind, caught.value, caught.value.__traceback__)
    asked, other = shown.getvalue().split("rank 1 of 2")[1:]
    assert "call(**arguments)" in asked
    assert "did you mean 'ring'?" in asked
    assert (asked.count("  File "), ended[1]) == (1, 1)
    assert other.count("  File ") > 1


def test_a_rank_that_cannot_write_what_is_wrong_ends_the_job_all_the_same(monkeypatch):
    closed, told, ended = io.StringIO(), [], []
    closed.close()
    monkeypatch.setattr(sys, "__stderr__", closed)
    monkeypatch.setattr(failure, "RELAY_S", 0)
    transport = SimpleNamespace(rank=1, size=2, abort=ended.append)
    hooks = failure.FailureHooks(transport, None, SimpleNamespace(aborting=told.append))
    hooks._on_exception(ValueError, ValueError("only here"), None)
    assert (told, ended) == (["ValueError: only here"], [1])


def test_ranks_that_end_at_different_times_without_waiting_for_each_other_end_well(tmp_path, run_ranks):
    script = tmp_path / "script.py"
    script.write_text(
        "import time, hpcpar; world = hpcpar.init(); time.sleep(0.5 * world.rank); print('end')"
    )
    done = run_ranks(3, str(script))
    assert (done.returncode, done.stdout.count("end")) == (0, 3), done.stderr
    assert "lost" not in done.stderr


def test_forked_children_that_fail_or_end_do_not_end_the_job_and_are_no_ranks(tmp_path, run_ranks):
    """As a data loader's workers do."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, hpcpar, multiprocessing; import numpy as np\n"
        "world = hpcpar.init()\n"
        "for work in (lambda: 1 / 0, lambda: sys.exit(5), hpcpar.init):\n"
        "    child = multiprocessing.get_context('fork').Process(target=work)\n"
        "    child.start()\n"
        "    child.join(20)\n"
        "    total = world.allreduce(np.array([child.exitcode]))\n"
        "    if world.rank == 0:\n"
        "        print('children', int(total[0]))\n"
    )
    done = run_ranks(2, str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["children", "2", "children", "10", "children", "2"]
    assert "LaunchError: rank 1 of 2 forked this process" in done.stderr
    assert "return to it what is to be communicated" in done.stderr


def test_what_a_program_leaves_for_its_exit_before_init_may_still_communicate(tmp_path, run_ranks):
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, hpcpar, numpy as np\n"
        "atexit.register(lambda: print(f'total={int(world.allreduce(np.array([1]))[0])} '))\n"
        "world = hpcpar.init()\n"
    )
    done = run_ranks(2, str(script))
    assert (done.returncode, done.stdout.count("total=2")) == (0, 2), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("others", "exits"),
    [
        ("time.sleep(60)", "sys.exit(3)"),
        ("world.barrier()", "sys.exit(3)"),
        ("time.sleep(60)", "sys.exit('nothing to do')"),
    ],
)
def test_a_status_that_says_failure_is_heard_whatever_the_others_do(tmp_path, run_ranks, others, exits):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time, hpcpar\n"
        "world = hpcpar.init()\n"
        f"if world.rank == 1:\n    open(sys.argv[1], 'w').close()\n    {exits}\n"
        f"{others}\n"
    )
    done = run_ranks(3, str(script), str(tmp_path / "mark"))
    assert time.time() - (tmp_path / "mark").stat().st_mtime < ENDS_WITHIN_S
    status = 3 if exits == "sys.exit(3)" else 1
    left = f"ends the job: it has left by sys.exit({status})" in done.stderr
    # Who waits for that rank ends the job as well, at about the same time.
    missed = others == "world.barrier()" and "rank 1 came to the end" in done.stderr
    assert left or missed, done.stderr
    assert done.returncode in [status] * left + [1] * missed, done.stderr


def test_an_exit_that_was_caught_is_none(tmp_path, run_ranks):
    script = tmp_path / "script.py"
    script.write_text(
        "import pickle, sys, time, hpcpar\n"
        "world = hpcpar.init()\n"
        "for work in (sys.exit, lambda: sys.exit(3)):\n"
        "    try:\n        work()\n"
        "    except SystemExit as error:\n"
        "        print('caught', pickle.loads(pickle.dumps(error)).code)\n"
        "time.sleep(2 * world.rank)\n"
    )
    done = run_ranks(2, str(script))
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["3", "3", "None", "None", *["caught"] * 4])


def test_who_was_asked_to_stop_leaves_the_others_time_to_save(tmp_path, run_ranks):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time, hpcpar\n"
        "world = hpcpar.init()\n"
        "time.sleep(0 if world.rank else 3)\nprint('end')\nsys.exit(75)\n"
    )
    done = run_ranks(2, str(script))
    assert (done.returncode, done.stdout.count("end")) == (75, 2), done.stderr


def test_the_exit_status_that_all_ranks_choose_is_the_jobs(tmp_path, run_ranks):
    script = tmp_path / "script.py"
    script.write_text("import sys, hpcpar; hpcpar.init(); sys.exit(3)")
    assert run_ranks(2, str(script)).returncode == 3


def test_a_program_may_finalize_mpi_itself(tmp_path, run_ranks):
    script = tmp_path / "script.py"
    script.write_text("import hpcpar; hpcpar.init(); from mpi4py import MPI; MPI.Finalize()")
    done = run_ranks(2, str(script))
    told = [line for line in done.stderr.splitlines() if not line.startswith("hpcpar run:")]
    assert (done.returncode, told) == (0, [])


FORKED = """
import os, sys, time
import hpcpar

world = hpcpar.init()
from mpi4py import MPI


class Tell:
    def __del__(self, write=os.write, getpid=os.getpid, pid=os.getpid(), is_finalized=MPI.Is_finalized):
        if getpid() == pid:
            write(1, b"finalized\\n" if is_finalized() else b"finalized not\\n")


sys.tells = Tell()  # goes after the names of sys that begin with an underscore
child = os.fork()
if child == 0:
    sys.exit(3)
give_up_at = time.monotonic() + 20
while True:
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid or time.monotonic() > give_up_at:
        break
    time.sleep(0.01)
print("child", os.waitstatus_to_exitcode(status) if pid else os.kill(child, 9), flush=True)
"""


def test_a_forked_process_comes_to_its_end_and_its_rank_finalizes_mpi(tmp_path, run_ranks):
    script = tmp_path / "script.py"
    script.write_text(FORKED)
    done = run_ranks(2, str(script))
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith(("child", "finalized")))
    assert lines == ["child 3"] * 2 + ["finalized"] * 2, done.stderr
