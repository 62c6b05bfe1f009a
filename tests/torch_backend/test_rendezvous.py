"""A store that ranks do not share says so instead of waiting; torch's own is taken where it is asked for."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
from torch import distributed

from hpcpar.errors import OperationError
from hpcpar.launch import torch_variables
from hpcpar.launch.environment import RankInfo
from hpcpar.torch_backend.rendezvous import LocalStore, rendezvous


def test_what_a_process_puts_there_it_gets() -> None:
    local = LocalStore()
    store = distributed.PrefixStore("group", local)
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert [store.add("count", 2), store.add("count", 3)] == [2, 5]
    assert store.compare_set("key", "value", "other") == b"other"
    assert store.compare_set("key", "value", "third") == b"other"
    assert store.compare_set("new", "", "first") == b"first"
    assert store.check(["key", "count"])
    assert store.num_keys() == 3
    assert store.delete_key("new")
    assert not store.check(["new"])
    store.wait(["key"], timedelta(seconds=1))


def test_what_another_rank_would_put_there_is_refused_at_once() -> None:
    local = LocalStore()
    store = distributed.PrefixStore("group", local)
    with pytest.raises(OperationError, match="asked for group/missing, which another rank would put there"):
        store.get("missing")


def by_torch(url: str, **options: object):
    yield "torch's", url, options


@pytest.mark.parametrize("master", [None, "somewhere"])
def test_torchs_rendezvous_is_taken_where_a_master_is_named(monkeypatch, master: str | None) -> None:
    named = {"MASTER_ADDR": master, "MASTER_PORT": "29500"} if master is not None else {}
    monkeypatch.setattr(os, "environ", named)  # which is filled
    found = next(rendezvous(by_torch, "env://?rank=1&world_size=2", timeout=timedelta(seconds=1)))
    if master is None:
        assert isinstance(found[0], LocalStore)
        assert found[1:] == (1, 2)
    else:
        assert found[0] == "torch's"


def test_libraries_that_ask_for_a_master_find_one_and_ranks_meet_without_it_again(monkeypatch) -> None:
    monkeypatch.setattr(os, "environ", {"RANK": "1", "WORLD_SIZE": "3"})
    for _ in range(2):
        store, *rank_and_size = next(rendezvous(by_torch, "env://"))
        assert isinstance(store, LocalStore)
        assert rank_and_size == [1, 3]  # as they say, which is then held against MPI
        assert os.environ["MASTER_ADDR"] == "localhost"
        assert not torch_variables.names_a_master(os.environ)


def test_variables_of_the_rank_that_started_a_process_are_not_its_own() -> None:
    given = {"RANK": "3", "WORLD_SIZE": "8"}
    environ = dict(given)
    torch_variables.fill(environ)
    assert environ == {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", **given}
    environ["HPCPAR_RANK_PID"] = "1"  # that of another process
    torch_variables.fill(environ)
    assert (environ["RANK"], environ["WORLD_SIZE"]) == ("0", "1")


def test_variables_are_those_of_torchrun_and_none_is_overwritten() -> None:
    info = RankInfo(5, 8, 1, 4, 1, ("a", "b"), "slurm", "pmix")
    assert torch_variables.of(info) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
    }
    environ = {"MASTER_ADDR": "node1", "MASTER_PORT": "1234"}
    torch_variables.fill_master(environ)
    assert torch_variables.names_a_master(environ)
    environ.clear()
    torch_variables.fill_master(environ)
    assert environ["MASTER_ADDR"] == "localhost"
    assert not torch_variables.names_a_master(environ)
