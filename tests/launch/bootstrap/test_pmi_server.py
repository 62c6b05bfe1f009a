"""The PMI-1 server against ranks that are played by this process: many, wrong, slow, lost."""

from __future__ import annotations

import json
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpar.launch.bootstrap import pmi_server
from hpcpar.launch.bootstrap.pmi_server import PROTOCOL, process_mapping, proof, ranges
from tests.command import until

KEY = b"k" * 32
ORDER = {"key": KEY.hex(), "step": "7.0", "end_command": [], "handshake_limit_s": 10.0}
Start = Callable[..., "Running"]


class Running:
    """A server as a rank starts one; its standard error ends when it does."""

    def __init__(self, size: int, *, preexec: Callable[[], None] | None = None, **order: object) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.port = listener.getsockname()[1]
        told = {**ORDER, "size": size, "join_limit_s": 20.0, "loss_grace_s": 0.2}
        self.starter = subprocess.Popen(
            [sys.executable, "-I", "-S", pmi_server.__file__, str(listener.fileno())],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(listener.fileno(),),
            preexec_fn=preexec,
        )
        assert self.starter.stdin is not None
        self.starter.stdin.write(json.dumps(told | order).encode() + b"\n")
        self.starter.stdin.close()
        assert self.starter.wait(20) == 0
        listener.close()

    def said(self, timeout_s: float = 20.0) -> str:
        """All that it wrote, once it has gone."""
        assert self.starter.stderr is not None
        os.set_blocking(self.starter.stderr.fileno(), False)
        text, deadline = b"", time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            part = self.starter.stderr.read()
            if part == b"":
                return text.decode()
            text += part or b""
            time.sleep(0.01)
        raise AssertionError(f"the server is still there after {timeout_s} s; it said {text.decode()!r}")

    def pid(self) -> int:
        """The process that has our pipe as its standard error."""
        assert self.starter.stderr is not None
        pipe = os.fstat(self.starter.stderr.fileno()).st_ino
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if pmi_server.__file__ in _command_line(entry) and (entry / "fd/2").stat().st_ino == pipe:
                    return int(entry.name)
        raise AssertionError("no server is running")


def _command_line(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[Running] = []

    def begin(size: int, **order: object) -> Running:
        servers.append(Running(size, **order))  # type: ignore[arg-type]
        return servers[-1]

    yield begin
    for server in servers:
        assert server.starter.stderr is not None
        server.starter.stderr.close()


class Peer:
    """A rank, or somebody who would like to be one."""

    def __init__(self, server: Running) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        self.received = b""

    def send(self, line: str) -> None:
        self.socket.sendall(line.encode() + b"\n")

    def hear(self) -> str:
        """The next line; "" where the server has closed the connection."""
        while b"\n" not in self.received:
            try:
                data = self.socket.recv(65536)
            except ConnectionResetError:
                data = b""
            if not data:
                return ""
            self.received += data
        line, _, self.received = self.received.partition(b"\n")
        return line.decode()

    def ask(self, line: str) -> str:
        self.send(line)
        return self.hear()

    def knock(self) -> None:
        self.nonce = secrets.token_hex(16)
        self.send(f"{PROTOCOL} {self.nonce}")

    def show(self, rank: int, size: int, key: bytes = KEY, node: str = "node1") -> None:
        _, theirs, shown = self.hear().split(" ")
        assert shown == proof(KEY, "server", self.nonce, theirs)
        facts = json.dumps({"rank": rank, "size": size, "host": node, "node": node})
        self.send(f"{proof(key, 'rank', self.nonce, theirs, facts)} {facts}")

    def join(self, rank: int, size: int, **others: str) -> str:
        self.knock()
        self.show(rank, size, **others)  # type: ignore[arg-type]
        return self.hear()

    def close(self) -> None:
        self.socket.close()


def world(server: Running, size: int) -> list[Peer]:
    peers = [Peer(server) for _ in range(size)]
    for rank, peer in enumerate(peers):
        assert peer.join(rank, size) == "here"
    for peer in peers:
        assert peer.hear() == "go"
    return peers


def finish(peers: list[Peer]) -> None:
    for peer in peers:
        assert peer.ask("cmd=finalize") == "cmd=finalize_ack rc=0"
        peer.close()


# rank   0 1 2 3 4
@pytest.mark.parametrize(
    ("nodes", "blocks"),
    [
        ("a", "(0,1,1)"),
        ("a a b b", "(0,2,2)"),
        ("a a a b", "(0,1,3),(1,1,1)"),
        ("a b a b", "(0,2,1),(0,2,1)"),
        ("a b a a a", "(0,2,1),(0,1,3)"),
        ("a a b b a a", "(0,2,2),(0,1,2)"),
        ("c a a c b", "(0,1,1),(1,1,2),(0,1,1),(2,1,1)"),
    ],
)
def test_the_mapping_has_every_rank_on_its_node(nodes: str, blocks: str) -> None:
    assert process_mapping(nodes.split()) == f"(vector,{blocks})"


@settings(deadline=None)
@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=60))
def test_any_distribution_of_ranks_can_be_read_back_from_its_mapping(nodes: list[str]) -> None:
    blocks = process_mapping(nodes).removeprefix("(vector,(").removesuffix("))").split("),(")
    read = [
        node
        for first, count, ranks in (map(int, block.split(",")) for block in blocks)
        for node in range(first, first + count)
        for _ in range(ranks)
    ]
    number = {name: i for i, name in enumerate(dict.fromkeys(nodes))}
    assert read == [number[name] for name in nodes]


def test_ranks_are_listed_in_ranges() -> None:
    assert ranges([3]) == "rank 3"
    assert ranges([0, 1, 2, 5, 9, 8]) == "ranks 0-2, 5, 8-9"
    assert ranges(list(range(0, 60, 2))) == "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, and 18 more"


def test_512_ranks_at_once_exchange_their_addresses(start: Start) -> None:
    size = 512
    # Fewer descriptors than ranks: the server has to raise its limit.
    server = start(size, preexec=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096)))
    peers = [Peer(server) for _ in range(size)]
    for peer in peers:
        peer.knock()
    for rank, peer in enumerate(peers):
        peer.show(rank, size, node=f"node{rank // 4}")
    assert {peer.hear() for peer in peers} == {"here"}
    assert {peer.hear() for peer in peers} == {"go"}
    assert peers[7].ask("cmd=init pmi_version=1 pmi_subversion=1").endswith("rc=0")
    name = peers[7].ask("cmd=get_my_kvsname").partition("kvsname=")[2]
    for rank, peer in enumerate(peers):
        peer.send(f"cmd=put kvsname={name} key=P{rank} value=address={rank}")
    assert {peer.hear() for peer in peers} == {"cmd=put_result rc=0 msg=success"}
    for peer in peers:
        peer.send("cmd=barrier_in")
    assert {peer.hear() for peer in peers} == {"cmd=barrier_out rc=0"}
    for rank, peer in enumerate(peers):
        peer.send(f"cmd=get kvsname={name} key=P{(rank + 1) % size}")
    found = [peer.hear().partition("value=")[2] for peer in peers]
    assert found == [f"address={(rank + 1) % size}" for rank in range(size)]
    mapping = peers[0].ask(f"cmd=get kvsname={name} key=PMI_process_mapping")
    assert mapping.endswith("value=(vector,(0,128,4))")
    finish(peers)
    assert server.said() == ""


def test_a_barrier_waits_for_the_last_rank(start: Start) -> None:
    peers = world(start(3), 3)
    peers[0].send("cmd=barrier_in")
    peers[2].send("cmd=barrier_in")
    peers[0].socket.settimeout(0.3)
    with pytest.raises(TimeoutError):
        peers[0].hear()
    assert peers[1].ask("cmd=barrier_in") == peers[0].hear() == peers[2].hear() == "cmd=barrier_out rc=0"
    finish(peers)


def test_what_mpich_asks_at_its_start_is_answered_in_lengths_that_it_can_read(start: Start) -> None:
    others, peers = world(start(1), 1), world(start(1), 1)
    # Two steps never have the same name for their memory.
    assert others[0].ask("cmd=get_my_kvsname") != peers[0].ask("cmd=get_my_kvsname")
    assert peers[0].ask("cmd=init pmi_version=2 pmi_subversion=0").endswith("rc=-1")
    assert peers[0].ask("cmd=get_appnum") == "cmd=appnum appnum=0"
    assert peers[0].ask("cmd=get_universe_size") == "cmd=universe_size size=1"
    maxima = peers[0].ask("cmd=get_maxes")
    lengths = dict(word.split("=") for word in maxima.split()[1:])
    name = peers[0].ask("cmd=get_my_kvsname").partition("kvsname=")[2]
    key, value = "k" * int(lengths["keylen_max"]), "v" * int(lengths["vallen_max"])
    assert len(f"cmd=put kvsname={name} key={key} value={value}\n") < 1024
    assert "key_not_found" in peers[0].ask(f"cmd=get kvsname={name} key=nothing")
    finish(peers)


def test_more_processes_cannot_be_spawned_and_unknown_commands_do_no_harm(start: Start) -> None:
    server = start(1)
    peers = world(server, 1)
    spawn = "mcmd=spawn\nnprocs=1\nexecname=/bin/true\ncmd=finalize\nendcmd"
    assert peers[0].ask(spawn) == "cmd=spawn_result rc=-1 msg=unsupported"
    assert (
        peers[0].ask("cmd=publish_name service=a port=b") == "cmd=publish_name_result rc=-1 msg=unsupported"
    )
    finish(peers)
    assert "MPI_Comm_spawn is not possible" in server.said()


def test_who_does_not_know_the_key_is_not_let_in_and_hinders_nobody(start: Start) -> None:
    server = start(2)
    stranger = Peer(server)
    assert stranger.join(0, 2, key=b"another") == ""  # type: ignore[arg-type]
    finish(world(server, 2))
    assert server.said() == ""


def test_a_proof_that_was_overheard_is_worth_nothing_the_next_time(start: Start) -> None:
    server = start(2)
    rank = Peer(server)
    rank.knock()
    challenge = rank.hear()
    facts = json.dumps({"rank": 0, "size": 2, "host": "a", "node": "a"})
    overheard = f"{proof(KEY, 'rank', rank.nonce, challenge.split(' ')[1], facts)} {facts}"
    thief = Peer(server)
    thief.send(f"{PROTOCOL} {rank.nonce}")
    assert thief.hear() != challenge
    assert thief.ask(overheard) == ""
    assert rank.ask(overheard) == "here"


HTTP, TLS = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\n"
NOISE = (HTTP, TLS, b"\n", b"x" * 200_000, b"\xff\xfe\n")


def test_noise_is_hung_up_on(start: Start) -> None:
    server = start(1)
    for noise in NOISE:
        stranger = Peer(server)
        stranger.socket.sendall(noise)
        assert stranger.hear() == "", noise[:20]
    finish(world(server, 1))


def test_silent_strangers_are_hung_up_on_after_a_while_and_hinder_nobody(start: Start) -> None:
    server = start(2, handshake_limit_s=1.5)
    silent = [Peer(server) for _ in range(50)]
    assert {peer.hear() for peer in silent} == {""}
    silent = [Peer(server) for _ in range(200)]
    finish(world(server, 2))
    assert {peer.hear() for peer in silent} == {""}
    assert server.said() == ""


def test_a_rank_may_speak_as_slowly_as_it_likes(start: Start) -> None:
    peer = Peer(start(1))
    peer.nonce = secrets.token_hex(16)
    for byte in f"{PROTOCOL} {peer.nonce}\n".encode():
        peer.socket.sendall(bytes([byte]))
        time.sleep(0.001)
    peer.show(0, 1)
    assert (peer.hear(), peer.hear()) == ("here", "go")
    for byte in b"cmd=get_appnum\n":
        peer.socket.sendall(bytes([byte]))
    assert peer.hear() == "cmd=appnum appnum=0"
    finish([peer])


def test_a_rank_joins_once_and_a_world_of_its_own_size(start: Start) -> None:
    server = start(2)
    first = Peer(server)
    assert first.join(0, 2) == "here"
    assert "rank 0 (on node1) has joined already" in Peer(server).join(0, 2)
    assert Peer(server).join(1, 3) == "no rank 1 (on node1) counts 3 ranks, rank 0 counts 2"
    assert Peer(server).join(1, 2) == "here"
    assert first.hear() == "go"


def test_a_rank_lost_before_all_have_come_ends_the_start_of_all_others_with_its_name(start: Start) -> None:
    server = start(4)
    peers = [Peer(server) for _ in range(3)]
    for rank, peer in enumerate(peers):
        assert peer.join(rank, 4) == "here"
    peers[1].close()
    why = "rank 1 (on node1) ended before all ranks had come to MPI's start (3 of 4 had)"
    assert peers[0].hear() == f"no {why}"
    assert peers[2].hear() == f"quiet {why}"
    late = Peer(server)
    assert late.join(3, 4) == "here"
    assert late.hear() == f"quiet {why}"
    for peer in (peers[0], peers[2], late):
        peer.close()
    assert server.said(2.0) == ""


def test_ranks_that_do_not_come_are_named_when_the_time_is_up_and_the_step_is_ended(
    start: Start, tmp_path: Path
) -> None:
    ended = tmp_path / "ended"
    server = start(5, join_limit_s=1.5, end_command=["/usr/bin/touch", str(ended)])
    peer = Peer(server)
    assert peer.join(2, 5) == "here"
    assert "ranks 0-1, 3-4 have not come to MPI's start within 1.5 s, of 5 ranks" in peer.hear()
    server.said()
    until(ended.exists)


def test_a_rank_lost_after_the_start_ends_the_step_unless_somebody_else_does(
    start: Start, tmp_path: Path
) -> None:
    ended = tmp_path / "ended"
    server = start(3, end_command=["/usr/bin/touch", str(ended)])
    peers = world(server, 3)
    peers[2].close()
    until(ended.exists)
    for peer in peers[:2]:
        peer.close()
    assert "rank 2 (on node1) was lost: it left without MPI_Finalize; ending step 7.0" in server.said()


def test_where_all_ranks_have_gone_there_is_no_step_to_end(start: Start, tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    server = start(2, loss_grace_s=60.0, end_command=["/usr/bin/touch", str(ended)])
    for peer in world(server, 2):
        peer.close()
    assert server.said() == ""
    assert not ended.exists()


def test_a_step_that_is_ended_from_outside_has_no_lost_ranks(start: Start, tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    server = start(2, end_command=["/usr/bin/touch", str(ended)])
    peers = world(server, 2)
    assert KEY.hex() not in _command_line(Path("/proc", str(server.pid())))
    os.kill(server.pid(), signal.SIGTERM)
    peers[0].close()
    time.sleep(0.5)
    assert peers[1].ask("cmd=get_appnum") == "cmd=appnum appnum=0"
    finish(peers[1:])
    assert server.said() == ""
    assert not ended.exists()


def test_mpi_abort_ends_the_step_at_once(start: Start, tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    server = start(2, loss_grace_s=60.0, end_command=["/usr/bin/touch", str(ended)])
    peers = world(server, 2)
    peers[1].send("cmd=abort exitcode=3")
    until(ended.exists)
    for peer in peers:
        peer.close()
    server.said()


def test_a_server_whose_starter_dies_before_it_has_joined_leaves(tmp_path: Path) -> None:
    # The starter of this one is a process that ends at once.
    code = (
        "import socket, subprocess, sys, json\n"
        "s = socket.create_server(('127.0.0.1', 0))\n"
        "command = [sys.executable, '-I', '-S', sys.argv[1], str(s.fileno())]\n"
        "subprocess.run(command, input=sys.argv[2] + '\\n', text=True, pass_fds=(s.fileno(),))\n"
    )
    order = {**ORDER, "size": 2, "join_limit_s": 60.0, "loss_grace_s": 1.0}
    with open(tmp_path / "said", "w+") as said:
        command = [sys.executable, "-c", code, pmi_server.__file__, json.dumps(order)]
        subprocess.run(command, stderr=said, timeout=30, check=True)
    until(lambda: "ended before MPI's start" in (tmp_path / "said").read_text())
