"""The walk of a call in docs/design.md: the functions that it names are called, in that order."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import hpcpar
from hpcpar.comm import Communicator, run_loopback

PACKAGE = Path(hpcpar.__file__).parent
DESIGN = PACKAGE.parent / "docs" / "design.md"


def walk() -> list[tuple[str, str, bool]]:
    """(file, function, only when the request is not in the cache) of each line of the walk."""
    text = DESIGN.read_text()
    block = text[text.index("## A call, from") :].split("```")[1]
    found = re.findall(r"^( *)(\S+\.py) +(\w+) ", block, flags=re.MULTILINE)
    return [(file, function, bool(indent)) for indent, file, function in found]


def called(comm: Communicator) -> list[list[tuple[str, str]]]:
    """Functions of the package that a first and a second all-reduce of the same array enter, in order."""
    found: list[list[tuple[str, str]]] = []
    array = np.ones(1013, np.float32)  # a length of no other test: plans are memoised
    for _ in range(2):
        entered: list[tuple[str, str]] = []

        def note(
            frame: FrameType, event: str, argument: Any, entered: list[tuple[str, str]] = entered
        ) -> None:
            path = Path(frame.f_code.co_filename)
            if event == "call" and path.is_relative_to(PACKAGE):
                entered.append((path.relative_to(PACKAGE).as_posix(), frame.f_code.co_name))

        comm.barrier()
        sys.setprofile(note)
        try:
            comm.allreduce(array)
        finally:
            sys.setprofile(None)
        found.append(entered)
    return found


def is_subsequence(steps: list[tuple[str, str]], entered: list[tuple[str, str]]) -> bool:
    rest = iter(entered)
    return all(step in rest for step in steps)


def test_the_walk_in_the_documentation_is_what_a_call_does():
    first, second = run_loopback(2, called, shared_memory=True)[0]
    steps = walk()
    assert len(steps) > 10
    assert is_subsequence([(file, function) for file, function, _ in steps], first)
    always = [(file, function) for file, function, on_miss in steps if not on_miss]
    assert is_subsequence(always, second)
    missed = {(file, function) for file, function, on_miss in steps if on_miss}
    assert not missed & set(second), "found in the cache"
