"""An action is written as in the papers, and read again; what is none is told how one is written."""

from __future__ import annotations

import pytest

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.action import KINDS, Action


def test_an_action_is_stage_kind_microbatch() -> None:
    assert str(Action(2, "F", 10)) == "2F10"
    assert Action.parse("12W0") == (12, "W", 0)


def test_every_action_is_read_as_it_was_written() -> None:
    for kind in KINDS:
        for stage, microbatch in ((0, 0), (1, 23), (31, 7)):
            action = Action(stage, kind, microbatch)
            assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2f0", "-1F0", "2F0 ", "2F0.5"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match=f"{text!r} is no action: write the stage, F, B or W"):
        Action.parse(text)
