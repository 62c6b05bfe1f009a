"""Ranks that find each other: several in this process, over real sockets, without Slurm or MPI."""

from __future__ import annotations

import math
import os
import re
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcpar.errors import ConfigError, LaunchError
from hpcpar.launch.bootstrap import pmi_client, pmi_server
from hpcpar.launch.bootstrap.pmi_client import (
    addresses_to_listen_at,
    connected,
    hosts_of_rank_0,
    listen,
    port_row,
)
from hpcpar.launch.bootstrap.secret import step_key
from hpcpar.launch.environment import RankInfo
from tests.command import write_script

SECRET = "s" * 32
Environ = dict[str, str]


@pytest.fixture(autouse=True)
def _quiet_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that leaves the word to another one changes the process's exception hook."""
    monkeypatch.setattr("sys.excepthook", __import__("sys").excepthook)


@pytest.fixture
def job() -> str:
    """A job that nobody else on this machine has, for its ports follow from it."""
    return str(secrets.randbelow(10**9))


def environ(job: str, rank: int, size: int, **others: str) -> Environ:
    return {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURMD_NODENAME": f"node{rank // 2}",
        "SLURM_GTIDS": str(rank),
        "HPCPAR_STEP_SECRET": SECRET,
        **others,
    }


def info(rank: int, size: int) -> RankInfo:
    return RankInfo(rank, size, 0, 1, 0, None, "slurm", "none")


class Ranks:
    """One thread for each rank: what it found inside `connected`, or its error."""

    def __init__(self, environs: list[Environ], *, timeout_s: float = 20.0) -> None:
        self.environs = environs
        self.answers: dict[int, str] = {}
        self.errors: dict[int, str] = {}
        threads = [threading.Thread(target=self._be, args=(environ, timeout_s)) for environ in environs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()

    def _be(self, environ: Environ, timeout_s: float) -> None:
        rank, size = int(environ["SLURM_PROCID"]), int(environ["SLURM_STEP_NUM_TASKS"])
        try:
            with connected(info(rank, size), timeout_s=timeout_s, environ=environ):
                assert (environ["PMI_RANK"], environ["PMI_SIZE"]) == (str(rank), str(size))
                with socket.socket(fileno=int(environ["PMI_FD"])) as connection:
                    connection.sendall(b"cmd=get kvsname=a key=PMI_process_mapping\n")
                    self.answers[rank] = connection.recv(1000).decode().strip()
                    connection.sendall(b"cmd=finalize\n")
                    connection.recv(1000)
        except LaunchError as error:
            self.errors[rank] = str(error)


@pytest.mark.parametrize("timeout_s", [1e9, math.inf])
def test_ranks_find_each_other_and_the_library_gets_their_nodes(job: str, timeout_s: float) -> None:
    ranks = Ranks([environ(job, rank, 5) for rank in range(5)], timeout_s=timeout_s)
    assert ranks.errors == {}
    assert {answer.partition("value=")[2] for answer in ranks.answers.values()} == {
        "(vector,(0,2,2),(2,1,1))"
    }


def test_afterwards_no_child_can_take_itself_for_a_rank(job: str) -> None:
    left = {"PMI_JOBID": "7", "PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.7.0"}
    ranks = Ranks([environ(job, rank, 2, **left) for rank in range(2)])
    for environment in ranks.environs:
        assert [name for name in environment if name.startswith("PMI")] == []
    again = Ranks(ranks.environs)
    assert "cannot join its world" in again.errors[0]
    assert "cannot join its world" in again.errors[1]


def test_another_world_can_form_in_the_same_step(job: str) -> None:
    for _ in range(2):
        assert Ranks([environ(job, rank, 2) for rank in range(2)]).errors == {}


def test_listeners_of_others_on_the_steps_ports_are_passed_over(job: str) -> None:
    ports = port_row(step_key(SECRET.encode(), environ(job, 0, 2)), {})
    talkative = socket.create_server(("127.0.0.1", ports[0]), backlog=50)
    mute = socket.create_server(("127.0.0.1", ports[1]), backlog=50)

    def chat() -> None:
        while True:
            try:
                connection, _ = talkative.accept()
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                connection.close()
            except OSError:
                return

    thread = threading.Thread(target=chat, daemon=True)
    thread.start()
    try:
        ranks = Ranks([environ(job, rank, 2) for rank in range(2)])
    finally:
        talkative.close()
        mute.close()
    assert ranks.errors == {}


def test_another_secret_is_refused_and_the_error_names_hosts_ports_and_remedies(job: str) -> None:
    wrong = environ(job, 1, 2, HPCPAR_STEP_SECRET="t" * 32)
    # The ports follow from the secret as well: lead both to the same ones.
    both = {"HPCPAR_PMI_PORTS": "{0}-{0}".format(port_row(step_key(SECRET.encode(), wrong), {})[3])}
    ranks = Ranks([environ(job, 0, 2, **both), wrong | both], timeout_s=3.0)
    assert "rank 1 of step" in ranks.errors[1]
    assert "localhost" in ranks.errors[1]
    assert both["HPCPAR_PMI_PORTS"].split("-")[0] in ranks.errors[1]
    assert "somebody who does not know this step's key" in ranks.errors[1]
    for remedy in ("HPCPAR_PMI_PORTS", "HPCPAR_PMI_HOST", "HPCPAR_STEP_SECRET", "--mpi=pmi2"):
        assert remedy in ranks.errors[1]
    assert "rank 1 has not come to MPI's start within 3 s" in ranks.errors[0]


def test_without_rank_0_the_others_end_with_what_they_tried(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks([environ(job, 1, 2)], timeout_s=1.0)
    assert re.search(r"did not find rank 0 within \d+ s", ranks.errors[1])
    assert "nobody listens yet" in ranks.errors[1]

    def unknown(host: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(pmi_client, "address_of", unknown)
    ranks = Ranks([environ(job, 1, 2, SLURM_STEP_NODELIST="node1")], timeout_s=1.0)
    assert "node1: Name or service not known" in ranks.errors[1]


def scontrol_that(does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_script(tmp_path / "scontrol", does)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_slurm_is_asked_for_the_address_of_a_node_whose_name_means_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "echo NodeName=$4 Arch=x86_64 NodeAddr=192.0.2.7 NodeHostName=$4"
    scontrol_that(told, tmp_path, monkeypatch)
    assert pmi_client.address_of("no-such-host.invalid") == "192.0.2.7"
    assert pmi_client.address_of("localhost") == "localhost"


def test_a_slurm_that_does_not_answer_in_time_is_asked_again_and_named(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol_that(f"echo asked >> {tmp_path}/asked\nexec sleep 20", tmp_path, monkeypatch)
    monkeypatch.setattr(pmi_client, "SCONTROL_LIMIT_S", 0.2)
    ranks = Ranks([environ(job, 1, 2, SLURM_STEP_NODELIST="no-such-host.invalid")], timeout_s=1.0)
    assert (
        "no-such-host.invalid: its name is not known here, and scontrol did not answer in 0.2 s"
        in (ranks.errors[1])
    )
    assert 2 <= len((tmp_path / "asked").read_text().split()) <= 8


def test_a_forked_child_neither_speaks_for_its_rank_nor_keeps_its_connection(job: str) -> None:
    table = environ(job, 0, 1)
    with connected(info(0, 1), timeout_s=20.0, environ=table):
        descriptor = int(table["PMI_FD"])
    assert not os.get_inheritable(descriptor)
    child = os.fork()
    if child == 0:
        os._exit(0 if os.path.samestat(os.fstat(descriptor), os.stat(os.devnull)) else 1)
    assert os.waitpid(child, 0)[1] == 0
    with socket.socket(fileno=descriptor) as connection:
        connection.sendall(b"cmd=finalize\n")
        assert connection.recv(100) == b"cmd=finalize_ack rc=0\n"


def test_a_number_that_belongs_to_another_file_by_now_is_left_alone(job: str) -> None:
    table = environ(job, 0, 1)
    with connected(info(0, 1), timeout_s=20.0, environ=table):
        descriptor = int(table["PMI_FD"])
    os.write(descriptor, b"cmd=finalize\n")
    other, end = os.pipe()
    os.dup2(other, descriptor)
    child = os.fork()
    if child == 0:
        os._exit(0 if os.path.samestat(os.fstat(descriptor), os.fstat(other)) else 1)
    assert os.waitpid(child, 0)[1] == 0
    for number in (descriptor, other, end):
        os.close(number)


def test_ports_follow_from_the_step_and_lie_in_the_range_asked_for() -> None:
    key = step_key(SECRET.encode(), {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"})
    other = step_key(SECRET.encode(), {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "1"})
    row = port_row(key, {})
    assert row == port_row(key, {})
    assert row != port_row(other, {})
    assert len(set(row)) == 16
    assert all(20000 <= port < 30000 for port in row)
    assert sorted(port_row(key, {"HPCPAR_PMI_PORTS": "5000-5003"})) == [5000, 5001, 5002, 5003]
    assert port_row(key, {"HPCPAR_PMI_PORTS": "5000"}) == (5000,)


@pytest.mark.parametrize("text", ["a", "1-2-3", "0-5", "70000", "9-8"])
def test_a_range_of_ports_that_is_not_understood_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"HPCPAR_PMI_PORTS='{text}'"):
        port_row(b"k", {"HPCPAR_PMI_PORTS": text})


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
STEP = {"SLURM_STEP_NODELIST": "node[1-3]", "SLURM_GTIDS": "1,2"}


@pytest.mark.parametrize(
    ("variables", "likely", "others"),
    [
        ({}, ["node1"], ["node2", "node3"]),
        ({"SLURM_DISTRIBUTION": "cyclic"}, ["node1"], ["node2", "node3"]),
        ({"SLURM_DISTRIBUTION": "arbitrary"}, ["node1", "node2", "node3"], []),
        ({"SLURM_HET_SIZE": "2"}, ["node1", "node2", "node3"], []),
        ({"SLURM_GTIDS": "0,5"}, ["localhost", "node1", "node2", "node3"], []),
        ({"HPCPAR_PMI_HOST": "10.0.0.1"}, ["10.0.0.1"], []),
        (TORCHRUN | {"GROUP_RANK": "1"}, ["node7"], []),
        (TORCHRUN | {"GROUP_RANK": "0"}, ["localhost"], []),
    ],
)
def test_rank_0_is_looked_for_where_the_launcher_puts_it(
    variables: Environ, likely: list[str], others: list[str]
) -> None:
    assert hosts_of_rank_0(STEP | variables) == (likely, others)


def test_without_a_list_of_hosts_the_error_names_the_variable_to_set() -> None:
    with pytest.raises(LaunchError, match=r"SLURM_STEP_NODELIST.*HPCPAR_PMI_HOST"):
        hosts_of_rank_0({})


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_port_that_is_taken_is_passed_over_and_named_where_all_are(taken: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with listen([taken, port]) as listener:
        assert listener.getsockname()[1] == port
    with pytest.raises(LaunchError, match=f"{taken}: Address already in use.*HPCPAR_PMI_PORTS"):
        listen([taken])


LOOPBACK = ["127.0.0.1", "::1"]
TWO_NODES = {"SLURM_STEP_NODELIST": "node[1-2]", "SLURMD_NODENAME": "node1", "SLURM_GTIDS": "0,1"}
RUN = {"TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TWO_NODES | {"SLURM_STEP_NODELIST": "node1"}, LOOPBACK),
        (TWO_NODES, ["10.0.0.1", ""]),
        # Its name stands for an address that leads elsewhere; nobody knows the other node; or its own name.
        (TWO_NODES | {"SLURMD_NODENAME": "node9"}, [""]),
        (TWO_NODES | {"SLURM_STEP_NODELIST": "node1,node7"}, [""]),
        (TWO_NODES | {"SLURMD_NODENAME": "node7"}, [""]),
        (TWO_NODES | {"SLURM_STEP_NODELIST": "node1", "SLURM_HET_SIZE": "2"}, [""]),
        (TWO_NODES | {"SLURM_STEP_NODELIST": "node1", "SLURM_GTIDS": "2,3"}, [""]),
        (TWO_NODES | {"HPCPAR_PMI_HOST": "node2"}, ["10.0.0.2", ""]),
        (TWO_NODES | {"HPCPAR_PMI_HOST": "own"}, [""]),  # 127.0.1.1 on the node itself, as Debian has it
        (RUN | {"GROUP_WORLD_SIZE": "1"}, LOOPBACK),
        (RUN | {"GROUP_WORLD_SIZE": "2"}, [""]),
    ],
)
def test_rank_0_listens_where_the_others_come_from_and_everywhere_if_that_is_not_sure(
    variables: Environ, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"node1": "10.0.0.1", "node2": "10.0.0.2", "node9": "192.168.0.9", "own": "127.0.1.1"}

    def look_up(host: str, *_: object, **__: object) -> list[object]:
        if host not in known:
            raise socket.gaierror(f"{host} is not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(pmi_client, "_source_address", lambda destination: "10.0.0.1")
    assert addresses_to_listen_at(variables) == expected


def test_an_address_of_another_host_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with listen([port], ["192.0.2.1", "127.0.0.1"]) as listener:
        assert listener.getsockname() == ("127.0.0.1", port)
    assert pmi_client._source_address("127.0.0.2") == "127.0.0.1"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_ranks_come_in_by_both_internet_protocols(address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with listen([port]), socket.create_connection((address, port), timeout=5) as connection:
        assert connection.getpeername()[0] == address


def test_a_server_that_cannot_be_started_is_an_error_with_a_way_out(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pmi_server, "__file__", "/nowhere/pmi_server.py")
    ranks = Ranks([environ(job, 0, 1)])
    assert "server cannot be started" in ranks.errors[0]
    assert "--mpi=pmi2" in ranks.errors[0]
