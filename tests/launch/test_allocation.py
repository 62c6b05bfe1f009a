"""The hosts of batch jobs, as each batch system lists them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcpar.errors import ConfigError
from hpcpar.launch.allocation import (
    allocated_hosts,
    flux_nodes,
    forgotten_launcher,
    has_several_hosts,
    is_batch_job,
)
from hpcpar.launch.environment import detect
from hpcpar.launch.hosts import Host
from tests.command import write_script

HOSTS = (Host("a", 2), Host("b", 2))


@pytest.fixture
def lists(tmp_path: Path) -> dict[str, dict[str, str]]:
    """Variables of a job of two hosts with two slots each, by batch system."""
    (tmp_path / "lines").write_text("a\na\nb\nb\n")
    (tmp_path / "table").write_text("a 2 all.q@a UNDEFINED\nb 2 all.q@b UNDEFINED\n")
    lines, rows = str(tmp_path / "lines"), str(tmp_path / "table")
    return {
        "PBS": {"PBS_JOBID": "7.head", "PBS_NODEFILE": lines},
        "LSF": {"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": lines, "LSB_MCPU_HOSTS": "c 9"},
        "LSF, no file": {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 2 b 2 "},
        "LSF, names": {"LSB_JOBID": "7", "LSB_HOSTS": "a a b b"},
        "Grid Engine": {"JOB_ID": "7", "PE_HOSTFILE": rows},
        "OAR": {"OAR_JOB_ID": "7", "OAR_NODEFILE": lines},
    }


SYSTEMS = ("PBS", "LSF", "LSF, no file", "LSF, names", "Grid Engine", "OAR")


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_jobs_hosts_are_read_with_their_slots(lists: dict[str, dict[str, str]], system: str) -> None:
    environ = lists[system]
    assert allocated_hosts(environ) == HOSTS
    assert has_several_hosts(environ)
    assert is_batch_job(environ)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_process_of_its_script_gets_a_hint_and_a_rank_does_not(
    lists: dict[str, dict[str, str]], system: str
) -> None:
    hint = detect(lists[system]).hint
    assert hint is not None
    assert f"{system.split(',')[0]} job 7" in hint
    assert "has 4 slots" in hint
    assert "`hpcpar run -n 4 …`" in hint
    rank = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}
    assert detect(lists[system] | rank).hint is None


def test_a_job_of_one_slot_gets_no_hint(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a\n")
    environ = {"PBS_NODEFILE": str(tmp_path / "nodes")}
    assert forgotten_launcher(environ) is None
    assert not has_several_hosts(environ)


def test_a_list_that_cannot_be_read_is_an_error_that_says_what_to_do() -> None:
    environ = {"PBS_NODEFILE": "/nowhere/nodes"}
    with pytest.raises(
        ConfigError, match=r"PBS_NODEFILE='/nowhere/nodes' .*`hpcpar run -H node1:4,node2:4 …`"
    ):
        allocated_hosts(environ)
    with pytest.raises(ConfigError, match="LSB_MCPU_HOSTS"):
        allocated_hosts({"LSB_MCPU_HOSTS": "a 2 b"})
    assert has_several_hosts(environ)
    assert forgotten_launcher(environ) is None


def test_outside_of_batch_jobs_there_are_no_hosts() -> None:
    assert allocated_hosts({}) == ()
    assert not is_batch_job({})
    assert not has_several_hosts({})


def test_a_flux_instance_tells_its_nodes(tmp_path: Path) -> None:
    write_script(tmp_path / "flux", '[ "$*" = "getattr size" ] && echo 3')
    environ = {"FLUX_URI": "local:///run/flux", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert flux_nodes(environ) == 3
    assert flux_nodes({"PATH": environ["PATH"]}) == 0
    assert flux_nodes({"FLUX_URI": "local:///run/flux", "PATH": "/nowhere"}) is None
    hint = detect(environ).hint
    assert hint is not None
    assert "`flux run -n … python …`" in hint
