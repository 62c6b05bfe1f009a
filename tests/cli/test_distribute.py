"""Copying the environment to every node: all nodes have it, or all ranks hear why not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcpar.cli import distribute
from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import LaunchError, PeerFailedError
from hpcpar.launch.environment_trees import Tree
from hpcpar.launch.local_copy import NAME


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small one in this Python's place."""
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/tool").write_bytes(os.urandom(100_000))
    (tmp_path / "env/empty").mkdir()
    monkeypatch.setattr(distribute, "trees_of_this_python", lambda: (Tree(str(tmp_path / "env"), "env"),))
    (tmp_path / "disk").mkdir()
    return tmp_path / "env"


@pytest.mark.parametrize("piece_nbytes", [1000, 16 << 20])
def test_the_copy_is_the_environment(
    tmp_path: Path, environment: Path, piece_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distribute, "PIECE_NBYTES", piece_nbytes)
    copy = tmp_path / "disk" / f"{NAME}0"
    said = distribute.distribute(Communicator.alone(), str(copy))
    assert (copy / "env/bin/tool").read_bytes() == (environment / "bin/tool").read_bytes()
    assert (copy / "env/empty").is_dir()
    assert said.startswith("the environment (4 files, ")
    assert "packed in" in said
    assert f"was copied to {copy} on 1 node in " in said
    assert "packed before" in distribute.distribute(Communicator.alone(), f"{copy}1")


def test_a_directory_that_two_nodes_share_is_refused_on_every_rank(tmp_path: Path) -> None:
    def refused(comm: Communicator) -> str:
        with pytest.raises(PeerFailedError) as error:
            distribute.distribute(comm, str(tmp_path / "disk" / NAME))
        return str(error.value)

    first, second = run_loopback(2, refused, nodes=(0, 1))
    assert first == second
    assert "is there already" in first


def test_an_environment_that_cannot_be_read_ends_it_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distribute, "trees_of_this_python", lambda: (Tree(str(tmp_path / "none"), "env"),))
    monkeypatch.setattr(distribute.local_copy, "make_private", lambda directory: None)

    def refused(comm: Communicator) -> str:
        with pytest.raises(PeerFailedError) as error:
            distribute.distribute(comm, str(tmp_path / "disk" / NAME))
        return str(error.value)

    first, second = run_loopback(2, refused, nodes=(0, 1))
    assert first == second
    assert "packing the environment" in first


def test_two_ranks_on_a_node_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="2 ranks are on 1 nodes: it takes one on each"):
        run_loopback(2, lambda comm: distribute.distribute(comm, str(tmp_path / "disk" / NAME)))
