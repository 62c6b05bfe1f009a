"""Variables that are set for Horovod's programs."""

from __future__ import annotations

import os

import pytest

from hpcpar.launch.environment import RankInfo
from hpcpar.launch.variables import announce_rank, env, horovod_variables

HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}


def test_a_rank_on_one_node_is_told_everything() -> None:
    environ = {"HOROVOD_RANK": "7", "HOROVOD_FUSION_THRESHOLD": "1", **HYDRA}
    announce_rank(environ)
    assert environ == {
        **HYDRA,
        "HOROVOD_FUSION_THRESHOLD": "1",
        "HOROVOD_RANK": "1",
        "HOROVOD_SIZE": "2",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
    }


def test_a_process_alone_is_the_only_rank() -> None:
    environ: dict[str, str] = {}
    announce_rank(environ)
    assert [environ[f"HOROVOD_{name}"] for name in ("RANK", "SIZE", "LOCAL_SIZE", "CROSS_SIZE")] == [
        "0",
        "1",
        "1",
        "1",
    ]


def test_on_several_nodes_the_node_is_the_cross_rank() -> None:
    found = horovod_variables(RankInfo(3, 4, 1, 2, 1, ("a", "b"), "slurm", "pmix"))
    assert (found["HOROVOD_CROSS_RANK"], found["HOROVOD_CROSS_SIZE"]) == ("1", "2")


def test_what_the_launcher_leaves_open_is_left_open_and_not_left_over() -> None:
    environ = {"HOROVOD_CROSS_RANK": "5", "HOROVOD_CROSS_SIZE": "9", **HYDRA, "PMI_SIZE": "4"}
    announce_rank(environ)
    assert environ["HOROVOD_SIZE"] == "4"
    assert "HOROVOD_CROSS_RANK" not in environ
    assert "HOROVOD_CROSS_SIZE" not in environ


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
