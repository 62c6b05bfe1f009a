"""A job from copies: the words that reach every node once, and the three jobs in their order."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcpar.errors import ConfigError
from hpcpar.launch import node_copies, supervise
from hpcpar.launch.hosts import Host
from hpcpar.launch.local_copy import LocalCopy
from hpcpar.launch.node_copies import EachNode, each_node

FOUR_NODES = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4"}


@pytest.mark.parametrize(
    ("kind", "hosts", "environ", "found"),
    [
        ("srun", (), FOUR_NODES, EachNode(4, (), ("--nodes=4", "--ntasks-per-node=1"))),
        ("mpich", (), FOUR_NODES, EachNode(4, (), ("-ppn", "1"))),
        ("intel", (), FOUR_NODES, EachNode(4, (), ("-ppn", "1"))),
        ("openmpi", (), FOUR_NODES, EachNode(4, (), ("--map-by", "ppr:1:node"))),
        ("mpich", (), {}, EachNode(1)),
        ("", (), {}, EachNode(1)),
        (
            "srun",
            (Host("a", 2), Host("b", 2), Host("c", 2)),
            FOUR_NODES,
            EachNode(2, (Host("a", 1), Host("b", 1))),
        ),
    ],
)
def test_every_node_gets_one_process(
    kind: str, hosts: Sequence[Host], environ: dict[str, str], found: EachNode
) -> None:
    assert each_node(kind, 4, hosts, environ) == found


def test_a_pbs_jobs_nodes_are_counted_once_each(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a\na\nb\nb\n")
    assert each_node("mpich", 4, (), {"PBS_NODEFILE": str(tmp_path / "nodes")}).n == 2


def test_where_the_launcher_cannot_be_told_nothing_is_started() -> None:
    with pytest.raises(ConfigError, match="not known here"):
        each_node("", 4, (), FOUR_NODES)
    with pytest.raises(ConfigError, match="heterogeneous"):
        each_node("srun", 4, (), {**FOUR_NODES, "SLURM_HET_SIZE": "2"})


class Jobs:
    """Takes the place of `supervise.run`: notes down what is started and answers with statuses in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *statuses: int | BaseException) -> None:
        self.statuses = list(statuses)
        self.started: list[tuple[int, Sequence[str], dict[str, Any]]] = []
        monkeypatch.setattr(supervise, "run", self.run)
        monkeypatch.setattr(node_copies, "settled_launcher", lambda *_: ("mpiexec", "mpich"))

    def run(self, n: int, argv: Sequence[str], **others: Any) -> int:
        self.started.append((n, argv, others))
        status = self.statuses.pop(0)
        if isinstance(status, BaseException):
            raise status
        return status


def start(said: list[str]) -> int:
    return node_copies.run(3, ["train.py"], say=said.append, wanted="/local", environ=FOUR_NODES)


def test_copies_are_made_used_and_removed_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(monkeypatch, 0, 5, 0)
    assert start([]) == 5, "the job's own status"
    (n, make, _), (ranks, program, how), (again, remove, _) = jobs.started
    assert (n, ranks, again) == (4, 3, 4)
    assert make[:2] == ("-m", "hpcpar.cli.distribute")
    assert program == ["train.py"]
    assert remove[:3] == ("-m", "hpcpar.launch.local_copy", "remove")
    copy = how["copy"]
    assert isinstance(copy, LocalCopy)
    assert make[2] == remove[3] == copy.directory
    assert copy.directory.startswith("/local/hpcpar-env-")


def test_what_is_on_standard_input_is_left_to_the_users_job(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(monkeypatch, 0, 0, 0)
    start([])
    assert [how.get("stdin") for *_, how in jobs.started] == [subprocess.DEVNULL, None, subprocess.DEVNULL]


def test_without_copies_the_job_is_not_started_and_what_was_made_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs, said = Jobs(monkeypatch, 1, 0), list[str]()
    assert start(said) == 1
    assert [argv[1] for _, argv, _ in jobs.started] == ["hpcpar.cli.distribute", "hpcpar.launch.local_copy"]
    assert "without the copies the job was not started" in said[0]


def test_copies_are_removed_after_an_interrupt_too_and_a_failure_to_do_so_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs, said = Jobs(monkeypatch, 0, KeyboardInterrupt(), 1), list[str]()
    with pytest.raises(KeyboardInterrupt):
        start(said)
    assert len(jobs.started) == 3
    assert "no job could be started to see that /local/hpcpar-env-" in said[-1]


def test_under_srun_the_ranks_ends_remove_the_copy() -> None:
    copy = LocalCopy("/local/c", ())
    assert node_copies.after_each_rank("srun", copy) == ("--task-epilog=/local/c/after-rank",)
    assert node_copies.after_each_rank("mpich", copy) == ()


def test_the_ranks_program_is_the_copys(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcpar.launch.environment_trees import Tree

    copy = LocalCopy("/local/c", (Tree("/shared/env", "env"),))
    found = supervise.command_for(
        2,
        ["train.py", "data.bin"],
        {},
        lambda name: name if name.endswith("mpiexec") else None,
        executable="/shared/env/bin/python",
        output_directory="/out",
        copy=copy,
    )
    python = "/local/c/env/bin/python"
    assert found == [
        "/shared/env/bin/mpiexec",
        *("-n", "2", python, "-m", "hpcpar.launch.redirect", "/out", python, "train.py", "data.bin"),
    ]
