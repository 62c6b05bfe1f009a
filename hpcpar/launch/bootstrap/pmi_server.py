"""The PMI-1 server: one small process per Slurm step through which MPICH's ranks find each other.

Rank 0 starts it as a script, in an isolated interpreter without site packages, where srun brings no such
service along. It stands where Hydra would: each rank's MPI library has one connection to it, puts addresses
in, waits for the others at a barrier, and gets theirs out.

    rank                                     server
    hpcpar-pmi-1 <nonce>                  →
                                          ←  hpcpar-pmi-1 <nonce> <proof>
    <proof> {"rank", "size", "node", …}   →  prove that both know the step's key; nothing secret travels
                                          ←  here
    (waits)                                  until all ranks have come, or one has left
                                          ←  go    or    no <why> to one, quiet <why> to the others
    cmd=init pmi_version=1 …              →  from here on the MPI library speaks
    (end of file before cmd=finalize)     →  lost: after a while end the step, should nobody else have

A rank that is lost before `go` ends the start of all others with its name. After it, the node's sentinel
(`sentinel_process.py`) is quicker, and this server acts only where there is none.

source   MPICH's src/pmi (wire protocol 1.1) as MPICH 4.0.2, MPICH 5.0.2 and Intel MPI 2021.18 speak it
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import resource
import secrets
import signal
import socket
import sys
import time
from contextlib import suppress
from itertools import groupby

TYPE_CHECKING = False
if TYPE_CHECKING:  # without importing `typing`, which takes longer than it is worth here
    from typing import Any

PROTOCOL = "hpcpar-pmi-1"

NOTICE_S = 20.0
HANDSHAKE_LIMIT_S = 10.0
LOSS_GRACE_S = 3.0
REFUSAL_GRACE_S = 3.0
STARTER_POLL_S = 0.5
LINE_LIMIT = 65536
BACKLOG = 4096

# The lengths that MPICH is told. Its lines end at 1,024 bytes in every version up to 4.0, so that
# "cmd=put kvsname=… key=… value=…" of the longest parts must stay below; longer values it cuts itself.
KEY_LIMIT = 64
VALUE_LIMIT = 800


def proof(key: bytes, role: str, *facts: str) -> str:
    return hmac.new(key, "\0".join((PROTOCOL, role, *facts)).encode(), hashlib.sha256).hexdigest()


def process_mapping(nodes: list[str]) -> str:
    """MPICH's PMI_process_mapping of each rank's node: blocks of (first node, nodes, ranks on each).

    rank   0 1 | 2 3 | 4        a a | b b | a: nodes are numbered as they first appear
    block  (0,2,2)     (0,1,1)
    """
    number = {name: i for i, name in enumerate(dict.fromkeys(nodes))}
    blocks: list[list[int]] = []
    for node, run in groupby(number[name] for name in nodes):
        count = len(list(run))
        if blocks and [sum(blocks[-1][:2]), blocks[-1][2]] == [node, count]:
            blocks[-1][1] += 1
        else:
            blocks.append([node, 1, count])
    return f"(vector,{','.join('({},{},{})'.format(*block) for block in blocks)})"


def ranges(numbers: list[int]) -> str:
    """ranges([0, 1, 2, 5]) == "ranks 0-2, 5"; beyond 12 parts the rest is counted."""
    grouped = groupby(enumerate(sorted(numbers)), key=lambda item: item[1] - item[0])
    runs = [[number for _, number in run] for _, run in grouped]
    words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:12]]
    if len(runs) > 12:
        words.append(f"and {sum(map(len, runs[12:]))} more")
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(words)}"


class Client:
    def __init__(self, writer: asyncio.StreamWriter, facts: dict[str, Any]) -> None:
        self.writer = writer
        self.rank = int(facts["rank"])
        self.host, self.node = str(facts["host"]), str(facts["node"])
        self.connected = True
        self.finished = False

    def say(self, line: str) -> None:
        self.writer.write(line.encode() + b"\n")


class Server:
    """Gather the ranks of one step, then answer their MPI libraries until the last one has gone."""

    def __init__(self, order: dict[str, Any], starter: int) -> None:
        self.key = bytes.fromhex(order["key"])
        self.size = int(order["size"])
        self.step = str(order["step"])
        self.end_command = [str(word) for word in order["end_command"]]
        self.join_limit_s = float(order["join_limit_s"])
        self.handshake_limit_s = float(order.get("handshake_limit_s", HANDSHAKE_LIMIT_S))
        self.loss_grace_s = float(order.get("loss_grace_s", LOSS_GRACE_S))
        self.starter = starter
        self.strangers: dict[asyncio.StreamWriter, None] = {}
        self.ranks: dict[int, Client] = {}
        self.lost: dict[int, str] = {}
        self.refusal = ""
        self.gathered = self.step_is_ending = self.has_ended_step = False
        self.decided, self.over = asyncio.Event(), asyncio.Event()
        # Unique: an MPICH that was killed leaves memory segments that are named after it.
        self.name = f"hpcpar-{secrets.token_hex(6)}"
        self.values: dict[str, str] = {}
        self.at_barrier: list[Client] = []

    async def run(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self.on_end_signal)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        server = await asyncio.start_server(self.serve, sock=listener, limit=LINE_LIMIT, backlog=BACKLOG)
        await self.gather()
        if self.gathered:
            server.close()
            for stranger in self.strangers:
                stranger.close()
        else:  # stay for a while, to tell those who come late
            loop.call_later(REFUSAL_GRACE_S, self.over.set)
        await self.over.wait()
        if self.refusal and self.missing():
            self.run_end_command()  # somebody may be on the way who would look for us in vain

    def on_end_signal(self) -> None:
        """Note that the whole step is being ended from outside: no rank is lost then. Stay until they go."""
        self.step_is_ending = True

    # The start: until all ranks have come, or the world cannot form

    async def gather(self) -> None:
        start, was_told = time.monotonic(), False
        while not self.gathered and not self.refusal:
            left_s = start + self.join_limit_s - time.monotonic()
            if 0 not in self.ranks and not os.path.exists(f"/proc/{self.starter}"):
                self.refuse(f"rank 0 (process {self.starter}) ended before MPI's start")
            elif left_s <= 0:
                missing = self.missing()
                have = "have" if len(missing) > 1 else "has"
                self.refuse(
                    f"{ranges(missing)} {have} not come to MPI's start within {self.join_limit_s:g} s, of "
                    f"{self.size} ranks: see what was written there, or whether imports take so long; "
                    f"HPCPAR_TIMEOUT_S=… waits longer"
                )
            elif not was_told and time.monotonic() - start >= NOTICE_S:
                was_told = True
                tell(
                    f"{len(self.ranks)} of {self.size} ranks are at MPI's start after {NOTICE_S:g} s; "
                    f"waiting for {ranges(self.missing())} (at most {self.join_limit_s:g} s)"
                )
            else:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.decided.wait(), min(left_s, STARTER_POLL_S))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        set_options(writer.get_extra_info("socket"))
        if len(self.strangers) >= self.size + 64:
            next(iter(self.strangers)).close()  # whoever has been silent for longest
        self.strangers[writer] = None
        client = None
        try:
            with suppress(OSError, ValueError, asyncio.TimeoutError):
                client = await asyncio.wait_for(self.admit(reader, writer), self.handshake_limit_s)
            with suppress(OSError, ValueError):
                while client is not None:
                    self.answer(client, await self.request(client, reader))
        finally:
            self.strangers.pop(writer, None)
            writer.close()
            if client is not None:
                self.gone(client)

    async def admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Client | None:
        """Let a rank join that knows the key; somebody else is hung up on without a word."""
        words = (await read_line(reader)).split(" ")
        if len(words) != 2 or words[0] != PROTOCOL or not 32 <= len(words[1]) <= 128:
            return None
        nonces = (words[1], secrets.token_hex(16))
        writer.write(f"{PROTOCOL} {nonces[1]} {proof(self.key, 'server', *nonces)}\n".encode())
        shown, _, facts = (await read_line(reader)).partition(" ")
        if not hmac.compare_digest(shown.encode(), proof(self.key, "rank", *nonces, facts).encode()):
            return None
        said = json.loads(facts)  # our own words, for the key is known to us alone
        client, size = Client(writer, said), int(said["size"])
        where = f"rank {client.rank} (on {client.host})"
        if size != self.size or not 0 <= client.rank < self.size:
            client.say(f"no {where} counts {size} ranks, rank 0 counts {self.size}")
            return None
        if client.rank in self.ranks:
            client.say(f"no {where} has joined already: only one program of a task can be this rank")
            return None
        del self.strangers[writer]
        self.ranks[client.rank] = client
        client.say("here")
        if self.refusal:
            client.say(f"quiet {self.refusal}")
        elif len(self.ranks) == self.size:
            self.open_world()
        return client

    def open_world(self) -> None:
        self.gathered = True
        mapping = process_mapping([self.ranks[rank].node for rank in range(self.size)])
        if len(mapping) <= VALUE_LIMIT:
            self.values["PMI_process_mapping"] = mapping  # else MPICH compares host names
        for client in self.ranks.values():
            client.say("go")
        self.decided.set()

    def refuse(self, why: str) -> None:
        """Tell all who are here that the world cannot form; those who come later hear it as well."""
        self.refusal = why
        present = sorted(rank for rank, client in self.ranks.items() if client.connected)
        for rank in present:
            self.ranks[rank].say(f"{'no' if rank == present[0] else 'quiet'} {why}")
        if not present:
            tell(why)
        self.decided.set()

    def missing(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.ranks]

    # The end: of one rank, of the step

    def gone(self, client: Client) -> None:
        client.connected = False
        if not client.finished:  # before `cmd=finalize` it is a loss
            self.lost[client.rank] = client.host
            if not self.gathered and not self.refusal:
                self.refuse(
                    f"rank {client.rank} (on {client.host}) ended before all ranks had come to MPI's start "
                    f"({len(self.ranks)} of {self.size} had)"
                )
            elif self.gathered and len(self.lost) == 1:
                asyncio.get_running_loop().call_later(self.loss_grace_s, self.end_step)
        if not self.missing() and not any(each.connected for each in self.ranks.values()):
            self.over.set()

    def end_step(self) -> None:
        """End what is left after a loss that nobody else has acted upon, for it waits for the lost rank."""
        if self.step_is_ending or self.over.is_set():
            return
        rank, host = next(iter(self.lost.items()))
        ending = f"ending step {self.step}" if self.end_command else "the others may hang: no scancel found"
        tell(f"rank {rank} (on {host}) was lost: it left without MPI_Finalize; {ending}")
        self.run_end_command()

    def run_end_command(self) -> None:
        if not self.end_command or self.has_ended_step:
            return
        self.has_ended_step = True
        quiet = [(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_RDWR, 0) for descriptor in (0, 1, 2)]
        with suppress(OSError):  # failing that, the ranks end by their own time limits
            os.posix_spawn(self.end_command[0], self.end_command, dict(os.environ), file_actions=quiet)

    # The PMI-1 wire protocol

    async def request(self, client: Client, reader: asyncio.StreamReader) -> str:
        line = await read_line(reader)
        if "mcmd=spawn" in line.split(" "):
            while (await read_line(reader)).strip() != "endcmd":
                pass
            tell(f"rank {client.rank}: MPI_Comm_spawn is not possible where hpcpar itself connects the ranks")
            return "cmd=spawn"
        return line

    def answer(self, client: Client, line: str) -> None:
        words = dict(word.split("=", 1) for word in line.split(" ") if "=" in word)
        key = words.get("key", "")
        match words.get("cmd", ""):
            case "init":
                rc = 0 if words.get("pmi_version") == "1" else -1
                client.say(f"cmd=response_to_init pmi_version=1 pmi_subversion=1 rc={rc}")
            case "get_maxes":
                client.say(f"cmd=maxes kvsname_max=256 keylen_max={KEY_LIMIT} vallen_max={VALUE_LIMIT}")
            case "get_appnum":
                client.say("cmd=appnum appnum=0")
            case "get_my_kvsname":
                client.say(f"cmd=my_kvsname kvsname={self.name}")
            case "get_universe_size":
                client.say(f"cmd=universe_size size={self.size}")
            case "put":
                self.values[key] = line.partition(" value=")[2]
                client.say("cmd=put_result rc=0 msg=success")
            case "get" if key in self.values:
                client.say(f"cmd=get_result rc=0 msg=success value={self.values[key]}")
            case "get":
                client.say("cmd=get_result rc=-1 msg=key_not_found value=unknown")
            case "barrier_in":
                self.at_barrier.append(client)
                if len(self.at_barrier) == self.size:
                    waiting, self.at_barrier = self.at_barrier, []
                    for each in waiting:
                        each.say("cmd=barrier_out rc=0")
            case "abort":
                client.finished = True
                self.run_end_command()
            case "finalize":
                client.finished = True
                client.say("cmd=finalize_ack rc=0")
            case other:
                client.say(f"cmd={other}_result rc=-1 msg=unsupported")


async def read_line(reader: asyncio.StreamReader) -> str:
    """Read one line; ConnectionError at the end of file, ValueError beyond LINE_LIMIT."""
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise ConnectionError("the other end has closed the connection")
    return line[:-1].decode("utf-8", "replace")


def set_options(connection: socket.socket) -> None:
    """Send at once, and notice a node that has vanished without closing its connections."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def tell(line: str) -> None:
    with suppress(OSError):  # nobody may listen to standard error any more
        os.write(2, f"hpcpar: {line}\n".encode())


def main() -> None:
    order = json.loads(sys.stdin.readline())
    starter = os.getppid()
    listener = socket.socket(fileno=int(sys.argv[1]))
    if os.fork():
        os._exit(0)  # the rank that started us waits for this, and has no child to look after then
    os.chdir("/")  # hold no file system that someone may want to unmount
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * int(order["size"]) + 128
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    asyncio.run(Server(order, starter).run(listener))


if __name__ == "__main__":
    main()
