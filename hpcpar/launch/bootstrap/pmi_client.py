"""A rank's side of the PMI-1 server: rank 0 starts it, every rank finds it and shows that it belongs here.

    with connected(info, timeout_s=600.0):   # PMI_* in the environment, and a connection behind PMI_FD
        MPI.Init_thread()                    # the library takes it from there
                                             # PMI_* are gone again: a child process is no rank

The server listens on rank 0's node, on one of a row of ports that follows from the step's key, and at the
address that leads to the step's other nodes where that is sure. The others try the ports, and the hosts
where rank 0 may be, until one answers with a proof that it knows the key.
Whoever else listens there is passed over. `pmi_server.py` has the protocol.

    HPCPAR_STEP_SECRET   what the key is made of, instead of the file in the user's home
    HPCPAR_PMI_HOST      where rank 0 is reached: a name or an address, where Slurm's host name does not do
    HPCPAR_PMI_PORTS     first-last: the ports that a firewall lets through
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import math
import os
import random
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from hpcpar.errors import ConfigError, LaunchError
from hpcpar.launch.bootstrap import pmi_server
from hpcpar.launch.bootstrap.pmi_selection import remove_variables
from hpcpar.launch.bootstrap.secret import (
    VARIABLE,
    is_torchruns,
    secret_file,
    step_key,
    step_name,
    user_secret,
)
from hpcpar.launch.crosscheck import leave_it_to_another_rank
from hpcpar.launch.environment import RankInfo
from hpcpar.launch.processes import ask
from hpcpar.launch.sentinel import end_command_for, start_daemon
from hpcpar.launch.slurm import host_names
from hpcpar.units import as_timeout

PORTS = (20000, 29999)  # below those that systems deal out by themselves
TRIES = 16
CONNECT_LIMIT_S = 3.0
SCONTROL_LIMIT_S = 10.0
ANSWER_LIMIT_S = 60.0
OTHER_HOSTS_AFTER_S = 5.0
UNREACHABLE_LIMIT_S = 30.0
LAUNCHER_VARIABLES = ("PMI_", "PMIX_")
CONNECTED = "HPCPAR_CONNECTED_STEP"
"""Set for the children of a rank: the step whose world they cannot join again."""

NOBODY = "nobody listens yet, so rank 0 has not come to MPI's start: see what it wrote"
STRANGER = "somebody who does not know this step's key"
WITHOUT_IT = "`srun --mpi=pmi2` with HPCPAR_BOOTSTRAP=launcher"


@contextmanager
def connected(
    info: RankInfo, *, timeout_s: float, environ: MutableMapping[str, str] = os.environ
) -> Iterator[None]:
    """Connect this rank with all others of its step, for the MPI library that is started inside.

    timeout_s   how long to wait for ranks that have not come
    errors      LaunchError, on every rank that has come, where one is missing or was lost; where rank 0
                cannot be reached; where there is no secret
    """
    step = step_name(environ)
    if environ.get(CONNECTED) == step:
        raise LaunchError(
            f"this process was started by rank {info.rank} of step {step} and cannot join its "
            f"world: let the rank itself call hpcpar.init(), or start the child without SLURM_* variables"
        )
    key = step_key(user_secret(environ, may_create=info.rank == 0), environ)
    ports = port_row(key, environ)
    likely, others = hosts_of_rank_0(environ) if info.rank > 0 else ([], [])
    if info.rank == 0:
        host, port = start_server(info, key, ports, timeout_s, environ)
        likely, ports = [host], (port,)
    connection = _Search(info, key, ports, time.monotonic() + timeout_s, environ, likely, others).join()
    remove_variables(LAUNCHER_VARIABLES, environ)  # srun's offer, which the library would try to take
    # MPI reads PMI_FD in this process; programs that it starts do not get the connection.
    descriptor = connection.detach()
    rank, size = str(info.rank), str(info.size)
    environ.update(PMI_FD=str(descriptor), PMI_RANK=rank, PMI_SIZE=size, PMI_ID=rank)
    identity = os.fstat(descriptor).st_ino
    os.register_at_fork(after_in_child=lambda: _let_go(descriptor, identity))
    try:
        yield
    finally:
        remove_variables(LAUNCHER_VARIABLES, environ)
        environ[CONNECTED] = step


def _let_go(descriptor: int, identity: int) -> None:
    """In a forked child, put /dev/null in the connection's place: the library still uses its number.

    Unless MPI has ended, and the number is another file's now.
    """
    with suppress(OSError):
        if os.fstat(descriptor).st_ino == identity:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, descriptor, inheritable=False)
            os.close(nowhere)


def port_row(key: bytes, environ: Mapping[str, str]) -> tuple[int, ...]:
    """Return the ports to try in this order, the same on all ranks of a step, others for another step."""
    first, last = PORTS
    text = environ.get("HPCPAR_PMI_PORTS")
    if text:
        found = re.fullmatch("([0-9]+)(?:-([0-9]+))?", text)
        if found is None:
            raise ConfigError(
                f"HPCPAR_PMI_PORTS={text!r} is not understood: set it to first-last, as 50000-50100"
            )
        first, last = int(found[1]), int(found[2] or found[1])
    if not 0 < first <= last < 65536:
        raise ConfigError(f"HPCPAR_PMI_PORTS={text!r}: ports lie between 1 and 65535, the lower one first")
    shuffled = random.Random(pmi_server.proof(key, "port"))
    return tuple(shuffled.sample(range(first, last + 1), min(TRIES, last + 1 - first)))


def hosts_of_rank_0(environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the likely hosts of rank 0, and the other possible ones.

    Block, cyclic and plane distributions put rank 0 on the step's first node; an arbitrary one, and
    the components of a heterogeneous step, may not.
    """
    if environ.get("HPCPAR_PMI_HOST"):
        return [environ["HPCPAR_PMI_HOST"]], []
    if is_torchruns(environ):  # its master is where rank 0 is
        return ["localhost" if environ.get("GROUP_RANK") == "0" else environ["MASTER_ADDR"]], []
    listed = environ.get("SLURM_STEP_NODELIST")
    nodes = list(dict.fromkeys(host_names(listed))) if listed else []
    if "0" in environ.get("SLURM_GTIDS", "").split(","):
        return ["localhost", *nodes], []
    if not nodes:
        raise LaunchError(
            "Slurm does not say on which hosts this step runs (SLURM_STEP_NODELIST): set HPCPAR_PMI_HOST to "
            f"the host of rank 0, or use {WITHOUT_IT}"
        )
    if environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary") or "SLURM_HET_SIZE" in environ:
        return nodes, []
    return nodes[:1], nodes[1:]


def start_server(
    info: RankInfo, key: bytes, ports: Sequence[int], timeout_s: float, environ: Mapping[str, str]
) -> tuple[str, int]:
    """Start this step's server, on rank 0 only; returns where it listens, as seen from here."""
    with listen(ports, addresses_to_listen_at(environ)) as listener:
        end = list(end_command_for(info.launcher, environ))
        order = {"key": key.hex(), "size": info.size, "step": step_name(environ), "end_command": end}
        order["join_limit_s"] = timeout_s
        try:
            start_daemon(pmi_server.__file__, json.dumps(order), listener, without=[VARIABLE])
        except (OSError, subprocess.SubprocessError) as error:
            raise LaunchError(
                f"hpcpar's PMI-1 server cannot be started on {socket.gethostname()} ({error}): "
                f"{WITHOUT_IT} does without it"
            ) from error
        address, port = listener.getsockname()[:2]
        return {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(address, address), int(port)


def addresses_to_listen_at(environ: Mapping[str, str]) -> list[str]:
    """Return the addresses to try on rank 0's node; "" is all that it has.

    A step on one node is joined by the loopback, another one at HPCPAR_PMI_HOST, or at the address that this
    node's name stands for here. The other nodes may know the name by another one, so that it has to be the
    address that leads to them, too. Ranks that torchrun starts on rank 0's node know the loopback alone.
    """
    if environ.get("HPCPAR_PMI_HOST"):
        return [*_addresses(environ["HPCPAR_PMI_HOST"]), ""]
    loopback = ["127.0.0.1", "::1"]
    if is_torchruns(environ):
        return loopback if environ.get("GROUP_WORLD_SIZE") == "1" else [""]
    nodes, own = host_names(environ.get("SLURM_STEP_NODELIST", "")), environ.get("SLURMD_NODENAME", "")
    if "SLURM_HET_SIZE" in environ or "0" not in environ.get("SLURM_GTIDS", "").split(","):
        return [""]
    if len(set(nodes)) == 1:
        return loopback
    others = _addresses(next(node for node in nodes if node != own))
    towards = _source_address(others[0]) if others else ""
    return [towards, ""] if towards in _addresses(own) else [""]


def _addresses(host: str) -> list[str]:
    """Return the addresses of a host that other hosts may reach; none where its name is not known."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    addresses = dict.fromkeys(str(each[4][0]) for each in found)
    return [each for each in addresses if not ipaddress.ip_address(each.partition("%")[0]).is_loopback]


def _source_address(destination: str) -> str:
    """Return the address of this host from which packets go there. None is sent."""
    family = socket.AF_INET6 if ":" in destination else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((destination, 9))
        return str(probe.getsockname()[0])
    return ""


def listen(ports: Sequence[int], addresses: Sequence[str] = ("",)) -> socket.socket:
    """Listen on the first free port of the row, at the first of these addresses that this host has.

    At "" for IPv6 and IPv4 where the system has both.
    """
    families = {"": (socket.AF_INET6, socket.AF_INET)}
    places = [
        (address, family)
        for address in addresses
        for family in families.get(address, (socket.AF_INET6 if ":" in address else socket.AF_INET,))
    ]
    errors: dict[int, str] = {}
    for port in ports:
        for address, family in places:
            both, backlog = not address and family == socket.AF_INET6, pmi_server.BACKLOG
            try:
                return socket.create_server(
                    (address, port), family=family, backlog=backlog, dualstack_ipv6=both
                )
            except ValueError:  # this system has no IPv6
                continue
            except OSError as error:
                errors[port] = os.strerror(error.errno or 0)
                if "in use" in errors[port]:
                    break  # an IPv4 socket beside it would hear only half of the calls
    tried = "; ".join(f"{port}: {why}" for port, why in errors.items())
    raise LaunchError(
        f"rank 0 can listen on none of {len(ports)} ports of {socket.gethostname()} ({tried}): name others "
        f"in HPCPAR_PMI_PORTS=first-last, or use {WITHOUT_IT}"
    )


@dataclass
class _Search:
    """Search of one rank for its step's server; `found` says by host what answered there instead."""

    info: RankInfo
    key: bytes
    ports: Sequence[int]
    deadline: float
    environ: Mapping[str, str]
    likely: list[str]
    others: list[str] = field(default_factory=list)
    found: dict[str, str] = field(default_factory=dict)

    def join(self) -> socket.socket:
        """Find the server and wait until all ranks have joined it: the connection is MPI's next."""
        connection = self.find()
        verdict = ""
        with suppress(OSError):
            # The server's own limit is the same and runs out first; this one is for a server that is gone.
            connection.settimeout(as_timeout(max(0.0, self.deadline - time.monotonic()) + 10.0))
            verdict = _line(connection)
        if verdict != "go":
            connection.close()
            word, _, why = verdict.partition(" ")
            if word == "quiet":
                leave_it_to_another_rank()
            why = why or "its server on rank 0's node ended: was rank 0 killed?"
            step = step_name(self.environ)
            raise LaunchError(f"rank {self.info.rank} of step {step} cannot start MPI: {why}")
        connection.settimeout(None)
        return connection

    def find(self) -> socket.socket:
        start, waited_s, pause_s = time.monotonic(), 0.0, 0.01
        while True:
            for host in self.likely if waited_s < OTHER_HOSTS_AFTER_S else [*self.likely, *self.others]:
                connection = self.try_host(host)
                if connection is not None:
                    return connection
            waited_s = time.monotonic() - start
            # Where somebody answers the host can be reached: rank 0 may still come.
            answers = any(word in why for why in self.found.values() for word in (NOBODY, STRANGER))
            limit_s = math.inf if answers else UNREACHABLE_LIMIT_S
            if start + waited_s >= self.deadline or waited_s > limit_s:
                if self.info.rank > 1:
                    leave_it_to_another_rank(f"rank {self.info.rank} did not find rank 0, either")
                raise LaunchError(self.not_found(waited_s))
            # Ranks in step with each other would all come at once.
            time.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, 0.5)

    def try_host(self, host: str) -> socket.socket | None:
        found = []
        try:
            where, ports = address_of(host), self.ports
        except OSError as error:
            found, ports = [_reason(error)], ()
        for port in ports:
            try:
                connection = socket.create_connection((where, port), timeout=CONNECT_LIMIT_S)
            except ConnectionRefusedError:
                found.append(NOBODY)
                continue
            except OSError as error:
                found.append(_reason(error))
                continue
            with suppress(OSError, ValueError):
                if self.introduce(connection):
                    return connection
            connection.close()
            found.append(f"on port {port} {STRANGER}")
        self.found[host] = ", ".join(dict.fromkeys(found))
        return None

    def introduce(self, connection: socket.socket) -> bool:
        """Exchange proofs that both sides know the key; True once the server has let this rank in."""
        host = socket.gethostname()
        # Slurm's name for the node: several of its nodes may be one host, with a /dev/shm each.
        node = self.environ.get("SLURMD_NODENAME") or host
        facts = json.dumps({"rank": self.info.rank, "size": self.info.size, "host": host, "node": node})
        pmi_server.set_options(connection)
        mine = secrets.token_hex(16)
        connection.sendall(f"{pmi_server.PROTOCOL} {mine}\n".encode())
        protocol, theirs, shown = _line(connection).split(" ")
        expected = pmi_server.proof(self.key, "server", mine, theirs)
        if protocol != pmi_server.PROTOCOL or not hmac.compare_digest(shown.encode(), expected.encode()):
            return False
        connection.sendall(f"{pmi_server.proof(self.key, 'rank', mine, theirs, facts)} {facts}\n".encode())
        connection.settimeout(ANSWER_LIMIT_S)  # to give up from here on would be taken for this rank's end
        answer = _line(connection)
        if answer.startswith("no "):
            raise LaunchError(f"this rank cannot join its step: {answer[3:]}")
        return answer == "here"

    def not_found(self, waited_s: float) -> str:
        found = "; ".join(f"{host}: {why}" for host, why in sorted(self.found.items())[:8])
        ports = ", ".join(map(str, self.ports))
        secret = VARIABLE if VARIABLE in self.environ else str(secret_file(self.environ))
        return (
            f"rank {self.info.rank} of step {step_name(self.environ)} did not find rank 0 within "
            f"{waited_s:.0f} s: tried {', '.join(list(self.found)[:8])}, ports {ports} "
            f"({found}). Is there a firewall (HPCPAR_PMI_PORTS=first-last), another address "
            f"(HPCPAR_PMI_HOST=…), or another secret on rank 0's node ({secret})? {WITHOUT_IT} "
            f"does without any of this where Slurm has it"
        )


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def _line(connection: socket.socket) -> str:
    """Read one line, and not a byte more: what comes after it is for the MPI library."""
    received = b""
    while not received.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(received) > 4096:
            raise ConnectionError("it closed the connection, or is no server of ours")
        received += byte
    return received[:-1].decode("utf-8", "replace")


def address_of(host: str) -> str:
    """Return the host itself where the system knows its name, else the address that Slurm has for the node.

    errors   OSError where neither knows one now: all ranks ask at once, and Slurm may be slow to answer
    """
    try:
        socket.getaddrinfo(host, None)
        return host
    except OSError:
        scontrol = shutil.which("scontrol")
        if scontrol is None:
            raise
    said = ask([scontrol, "--oneliner", "show", "node", host], SCONTROL_LIMIT_S)
    if said is None:
        raise TimeoutError(
            f"its name is not known here, and scontrol did not answer in {SCONTROL_LIMIT_S:g} s"
        )
    words = dict(word.split("=", 1) for word in said.stdout.split() if "=" in word)
    return words.get("NodeAddr", host)
