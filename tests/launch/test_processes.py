"""Processes as /proc shows them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hpcpar.launch.processes import ancestors, every_process, process
from tests.launch.proc_tree import add_process


def test_this_process_is_a_child_of_its_parent() -> None:
    here = process("self")
    assert here is not None
    assert (here.pid, here.parent, here.group) == (os.getpid(), os.getppid(), os.getpgrp())
    assert os.getppid() in [each.pid for each in ancestors()]


def test_a_name_may_hold_anything_and_what_has_gone_is_none(tmp_path: Path) -> None:
    add_process(tmp_path, 7, "a) (b R 1", parent=3, group=4, session=5, terminal=6, title="a b")
    found = process(7, tmp_path)
    assert found is not None
    assert (found.name, found.parent, found.group, found.session, found.terminal) == ("a) (b R 1", 3, 4, 5, 6)
    assert found.title == "a b"
    assert process(8, tmp_path) is None


def test_what_has_ended_is_no_process_any_more() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process(child.pid) is not None
    assert child.pid not in [each.pid for each in every_process()]
    child.wait()
