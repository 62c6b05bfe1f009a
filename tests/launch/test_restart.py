"""A job that fails is started again, as long as its attempts save checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcpar.errors import LaunchError
from hpcpar.launch.restart import COUNT, SAVED, STARTED, Restarts, count, leave_word
from hpcpar.launch.signals import START_AGAIN

FULL = [STARTED, SAVED]


@pytest.mark.parametrize(
    ("most", "is_here", "attempts", "started"),
    [
        (0, True, [FULL], 1),
        (2, True, [FULL] * 5, 3),
        (9, True, [[]] * 5, 2),
        (9, True, [[STARTED]] * 5, 2),
        (9, True, [[STARTED], FULL, [STARTED], FULL, [STARTED], [STARTED], FULL], 6),
        (4, False, [[]] * 9, 5),
        (9, False, [[STARTED]] * 9, 2),
    ],
)
def test_attempts_end_with_their_number_or_with_two_that_saved_nothing(
    most: int, is_here: bool, attempts: list[list[str]], started: int, tmp_path: Path
) -> None:
    said: list[str] = []
    paused: list[float] = []
    restarts = Restarts(most, said.append, is_here=is_here)
    for number, words in enumerate(attempts):
        directory = tmp_path / str(number)
        directory.mkdir()
        for word in words:
            leave_word(word, {"HPCPAR_RUN_DIRECTORY": str(directory)})
        if not restarts.again(1, directory, ended=False, sleep=paused.append):
            break
    assert number + 1 == started
    assert paused == [2.0**each for each in range(started - 1)]
    if most:
        why = f"restart {most} of {most}" if started == most + 1 else "2 attempts in a row have saved no"
        assert why in said[-1]


@pytest.mark.parametrize(("status", "ended"), [(0, False), (START_AGAIN, False), (1, True)])
def test_a_job_that_finished_or_was_ended_is_left_so(status: int, ended: bool, tmp_path: Path) -> None:
    (tmp_path / SAVED).touch()
    assert not Restarts(9, print, is_here=True).again(
        status, tmp_path, ended=ended, sleep=lambda pause_s: None
    )


def test_only_who_may_have_saved_is_told_to_go_on(tmp_path: Path) -> None:
    restarts = Restarts(9, print, is_here=True)
    assert restarts.again(1, tmp_path, ended=False, sleep=lambda pause_s: None)
    assert restarts.variables == {}, "what lies in its directory is another run's"
    (tmp_path / SAVED).touch()
    assert restarts.again(1, tmp_path, ended=False, sleep=lambda pause_s: None)
    assert restarts.variables == {COUNT: "2"}


def test_the_count_is_a_number() -> None:
    assert (count({}), count({COUNT: ""}), count({COUNT: "3"})) == (0, 0, 3)
    with pytest.raises(LaunchError, match=f"{COUNT}='two'"):
        count({COUNT: "two"})
