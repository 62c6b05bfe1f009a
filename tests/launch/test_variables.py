"""Variables that are set for Horovod's programs."""

from __future__ import annotations

import os

import pytest

from hpcpar.launch.variables import RANK_PID, announce_rank, env, mark_as_rank, parent_is_the_rank


def test_a_rank_is_announced_over_what_another_job_has_left() -> None:
    environ = {"HOROVOD_RANK": "7", "HOROVOD_FUSION_THRESHOLD": "1"}
    announce_rank(1, 6, (1, 2), (0, 3), environ)
    assert environ == {
        "HOROVOD_FUSION_THRESHOLD": "1",
        "HOROVOD_RANK": "1",
        "HOROVOD_SIZE": "6",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "3",
    }


def test_variables_are_set_for_a_while_and_then_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCPAR_TEST_ONE", "before")
    monkeypatch.delenv("HPCPAR_TEST_TWO", raising=False)
    names = ("HPCPAR_TEST_ONE", "HPCPAR_TEST_TWO", "HPCPAR_TEST_THREE")

    def now() -> list[str | None]:
        return [os.environ.get(name) for name in names]

    with env(HPCPAR_TEST_ONE="1", HPCPAR_TEST_TWO="2", HPCPAR_TEST_THREE=None):
        during = now()
        del os.environ["HPCPAR_TEST_TWO"]
    assert during == ["1", "2", None]
    assert now() == ["before", None, None]
    with pytest.raises(RuntimeError), env(HPCPAR_TEST_TWO="2"):
        raise RuntimeError
    assert now() == ["before", None, None]


def test_a_process_knows_a_rank_that_started_it_from_one_further_up() -> None:
    environ: dict[str, str] = {}
    mark_as_rank(environ)
    assert environ == {RANK_PID: str(os.getpid())}
    assert not parent_is_the_rank(environ)
    assert parent_is_the_rank({RANK_PID: str(os.getppid())})
    assert not parent_is_the_rank({})
