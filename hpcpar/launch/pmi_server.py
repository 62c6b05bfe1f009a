"""The PMI-1 server: one small process per Slurm step through which MPICH's ranks find each other.

Run as a script by `hpcpar.launch.rendezvous`, in an isolated interpreter without site packages; it
imports the standard library only. Rank 0 starts it where srun brings no such service along, and it
stands where Hydra would: each rank's MPI library has one connection to it, puts addresses in, waits
for the others at a barrier, and gets theirs out.

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
(`sentinel_process.py`) is quicker, and this one acts only where there is none.

source   MPICH's src/pmi (wire protocol 1.1) as MPICH 4.0.2, MPICH 5.0.2 and Intel MPI 2021.18 speak it
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import resource
import secrets
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress

PROTOCOL = "hpcpar-pmi-1"

JOIN_LIMIT_S = 600.0
NOTICE_S = 20.0
HANDSHAKE_LIMIT_S = 10.0
LOSS_GRACE_S = 3.0
REFUSAL_GRACE_S = 3.0
STARTER_POLL_S = 0.5
LINE_LIMIT = 65536

# The lengths that MPICH is told. Its lines end at 1,024 bytes in every version up to 4.0, so that
# "cmd=put kvsname=… key=… value=…" of the longest parts must stay below; longer values it cuts itself.
KEY_LIMIT = 64
VALUE_LIMIT = 800


def proof(key: bytes, role: str, *facts: str) -> str:
    """What only somebody who knows the step's key can say in this role about these facts."""
    return hmac.new(key, "\0".join((PROTOCOL, role, *facts)).encode(), hashlib.sha256).hexdigest()


def process_mapping(nodes: list[str]) -> str:
    """MPICH's PMI_process_mapping: process_mapping(["a", "a", "b", "b"]) == "(vector,(0,2,2))".

    nodes     name of each rank's node, by rank
    returns   blocks of (first node, nodes, ranks on each), nodes numbered as they first appear

        rank   0 1 | 2 3 | 4        a a | b b | a
        block  (0,2,2)     (0,1,1)
    """
    number = {name: i for i, name in enumerate(dict.fromkeys(nodes))}
    runs: list[list[int]] = []
    for name in nodes:
        if runs and runs[-1][0] == number[name]:
            runs[-1][1] += 1
        else:
            runs.append([number[name], 1])
    blocks: list[list[int]] = []
    for node, count in runs:
        if blocks and blocks[-1][0] + blocks[-1][1] == node and blocks[-1][2] == count:
            blocks[-1][1] += 1
        else:
            blocks.append([node, 1, count])
    return f"(vector,{','.join('({},{},{})'.format(*block) for block in blocks)})"


def ranges(numbers: list[int], most: int = 12) -> str:
    """ranges([0, 1, 2, 5]) == "ranks 0-2, 5"; beyond `most` parts the rest is counted."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in parts[:most]]
    if len(parts) > most:
        words.append(f"and {sum(last - first + 1 for first, last in parts[most:])} more")
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(words)}"


class Client:
    """One connection: somebody who knocks, then perhaps a rank."""

    def __init__(self, connection: socket.socket, since: float) -> None:
        self.connection = connection
        self.since = since
        self.received = b""
        self.outgoing = b""
        self.nonces: tuple[str, str] | None = None
        self.rank = -1
        self.host = ""
        self.node = ""
        self.spawning = False
        self.finished = False

    @property
    def joined(self) -> bool:
        return self.rank >= 0


class Server:
    """Gathers the ranks of one step, then answers their MPI libraries until the last one has gone."""

    def __init__(self, order: dict[str, object], listener: socket.socket, starter: int) -> None:
        self.key = bytes.fromhex(str(order["key"]))
        self.size = int(str(order["size"]))
        self.step = str(order["step"])
        self.end_command: list[str] = [str(word) for word in order["end_command"] or ()]  # type: ignore[attr-defined]
        self.join_limit_s = float(str(order["join_limit_s"]))
        self.handshake_limit_s = float(str(order["handshake_limit_s"]))
        self.loss_grace_s = float(str(order["loss_grace_s"]))
        self.listener: socket.socket | None = listener
        self.starter = starter
        now = time.monotonic()
        self.join_deadline = now + self.join_limit_s
        self.notice_at: float | None = now + NOTICE_S
        self.selector = selectors.DefaultSelector()
        self.clients: dict[int, Client] = {}
        self.ranks: dict[int, Client] = {}
        self.lost: dict[int, str] = {}
        self.refusal = ""
        self.gathered = False
        self.told_to_end = False
        self.ended = False
        self.end_at: float | None = None
        self.leave_at: float | None = None
        # Unique: an MPICH that was killed leaves memory segments that are named after it.
        self.name = f"hpcpar-{secrets.token_hex(6)}"
        self.values: dict[str, str] = {}
        self.at_barrier: list[Client] = []
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self.on_end_signal)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)

    def on_end_signal(self, number: int, frame: object) -> None:
        """The whole step is being ended from outside: no rank is lost then. Stay until they are gone."""
        self.told_to_end = True

    def serve(self) -> None:
        while not self.is_over():
            for key, events in self.selector.select(self.patience_s()):
                if key.fileobj is self.listener:
                    self.accept()
                    continue
                client = self.clients.get(key.fd)
                if client is not None and events & selectors.EVENT_WRITE:
                    self.flush(client)
                if client is not None and events & selectors.EVENT_READ:
                    self.read(client)
            self.act_on_time()
        if self.refusal and self.missing():
            self.run_end_command()  # somebody may be on the way who would look for us in vain

    def is_over(self) -> bool:
        if self.leave_at is not None and time.monotonic() >= self.leave_at:
            return True
        everybody_came = self.gathered or (self.refusal != "" and not self.missing())
        return everybody_came and not any(client.joined for client in self.clients.values())

    def patience_s(self) -> float | None:
        """How long nothing may happen before there is something to do by the clock."""
        deadlines = [t for t in (self.end_at, self.leave_at) if t is not None]
        now = time.monotonic()
        if not self.gathered and not self.refusal:
            deadlines += [self.join_deadline, now + STARTER_POLL_S]
        return max(0.0, min(deadlines) - now) if deadlines else None

    # The door

    def accept(self) -> None:
        assert self.listener is not None
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return
        strangers = [client for client in self.clients.values() if not client.joined]
        if len(strangers) >= self.size + 64:
            self.forget(strangers[0])  # whoever has been silent for longest
        connection.setblocking(False)
        set_options(connection)
        client = Client(connection, time.monotonic())
        self.clients[connection.fileno()] = client
        self.selector.register(connection, selectors.EVENT_READ)

    def read(self, client: Client) -> None:
        """Hear all that has come; the end of file after it."""
        try:
            data = client.connection.recv(LINE_LIMIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        client.received += data
        while b"\n" in client.received and client.connection.fileno() in self.clients:
            line, _, client.received = client.received.partition(b"\n")
            self.hear(client, line.decode("utf-8", "replace"))
        if not data or len(client.received) > LINE_LIMIT:
            self.gone(client)

    def hear(self, client: Client, line: str) -> None:
        if client.joined:
            self.obey(client, line)
        elif client.nonces is None:
            self.challenge(client, line)
        else:
            self.admit(client, line)

    def challenge(self, client: Client, line: str) -> None:
        words = line.split(" ")
        if len(words) != 2 or words[0] != PROTOCOL or not 32 <= len(words[1]) <= 128:
            self.forget(client)
            return
        client.nonces = (words[1], secrets.token_hex(16))
        self.say(client, f"{PROTOCOL} {client.nonces[1]} {proof(self.key, 'server', *client.nonces)}")

    def admit(self, client: Client, line: str) -> None:
        """A rank that knows the key joins; another is shown the door without a word."""
        assert client.nonces is not None
        shown, _, facts = line.partition(" ")
        if not hmac.compare_digest(shown.encode(), proof(self.key, "rank", *client.nonces, facts).encode()):
            self.forget(client)
            return
        said = json.loads(facts)  # our own words, for the key is known to us alone
        rank, size = int(said["rank"]), int(said["size"])
        where = f"rank {rank} (on {said['host']})"
        if size != self.size or not 0 <= rank < self.size:
            why = f"{where} counts {size} ranks, rank 0 counts {self.size}"
        elif rank in self.ranks or rank in self.lost:
            why = f"{where} has joined already: only one program of a task can be this rank"
        else:
            client.rank, client.host, client.node = rank, str(said["host"]), str(said["node"])
            self.ranks[rank] = client
            self.say(client, "here")
            if self.refusal:
                self.say(client, f"quiet {self.refusal}")
            elif len(self.ranks) == self.size:
                self.open_world()
            return
        self.say(client, f"no {why}")

    def open_world(self) -> None:
        """All ranks are here: no one else will come, and their MPI libraries may speak."""
        self.gathered = True
        self.close_door()
        for client in [client for client in self.clients.values() if not client.joined]:
            self.forget(client)
        mapping = process_mapping([self.ranks[rank].node for rank in range(self.size)])
        if len(mapping) <= VALUE_LIMIT:
            self.values["PMI_process_mapping"] = mapping  # else MPICH compares host names
        for client in list(self.ranks.values()):
            self.say(client, "go")

    def refuse(self, why: str) -> None:
        """The world cannot form: tell all who are here, and those who come while we are still there."""
        self.refusal = why
        present = sorted(rank for rank in self.ranks if rank not in self.lost)
        for rank in present:
            self.say(self.ranks[rank], f"{'no' if rank == present[0] else 'quiet'} {why}")
        if not present:
            tell(why)
        self.leave_at = time.monotonic() + REFUSAL_GRACE_S

    def close_door(self) -> None:
        if self.listener is not None:
            self.selector.unregister(self.listener)
            self.listener.close()
            self.listener = None

    def missing(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.ranks and rank not in self.lost]

    # Leaving

    def forget(self, client: Client) -> None:
        descriptor = client.connection.fileno()
        if self.clients.pop(descriptor, None) is not None:
            self.selector.unregister(client.connection)
            client.connection.close()

    def gone(self, client: Client) -> None:
        """The other end has closed: of a rank that has not finished, this is a loss."""
        self.forget(client)
        if not client.joined or client.finished:
            return
        self.lost[client.rank] = client.host
        if self.refusal:
            return
        if not self.gathered:
            self.refuse(
                f"rank {client.rank} (on {client.host}) ended before all ranks had come to MPI's start "
                f"({len(self.ranks)} of {self.size} had)"
            )
        elif self.end_at is None:
            self.end_at = time.monotonic() + self.loss_grace_s

    def act_on_time(self) -> None:
        now = time.monotonic()
        if not self.gathered and not self.refusal:
            self.act_on_gathering(now)
        for client in [c for c in self.clients.values() if not c.joined]:
            if now - client.since > self.handshake_limit_s:
                self.forget(client)
        if self.end_at is not None and now >= self.end_at:
            self.end_at = None
            self.end_step()

    def act_on_gathering(self, now: float) -> None:
        if 0 not in self.ranks and not exists(self.starter):
            self.refuse(f"rank 0 (process {self.starter}) ended before MPI's start")
        elif now >= self.join_deadline:
            missing = self.missing()
            have = "have" if len(missing) > 1 else "has"
            self.refuse(
                f"{ranges(missing)} {have} not come to MPI's start within {self.join_limit_s:g} s, of "
                f"{self.size} ranks: see what was written there, or whether imports take so long; "
                f"HPCPAR_TIMEOUT_S=… waits longer"
            )
        elif self.notice_at is not None and now >= self.notice_at:
            self.notice_at = None
            tell(
                f"{len(self.ranks)} of {self.size} ranks are at MPI's start after {NOTICE_S:g} s; "
                f"waiting for {ranges(self.missing())} (at most {self.join_limit_s:g} s)"
            )

    def end_step(self) -> None:
        """A loss that nobody else has acted upon: end what is left, for it waits for the lost rank."""
        if self.told_to_end or not self.clients:
            return
        rank, host = next(iter(self.lost.items()))
        ending = f"ending step {self.step}" if self.end_command else "the others may hang: no scancel found"
        tell(f"rank {rank} (on {host}) was lost: it left without MPI_Finalize; {ending}")
        self.run_end_command()

    def run_end_command(self) -> None:
        if not self.end_command or self.ended:
            return
        self.ended = True
        quiet = [(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_RDWR, 0) for descriptor in (0, 1, 2)]
        with suppress(OSError):  # failing that, the ranks end by their own time limits
            os.posix_spawn(self.end_command[0], self.end_command, dict(os.environ), file_actions=quiet)

    # What MPI libraries ask

    def obey(self, client: Client, line: str) -> None:
        """Answer one line of the PMI-1 wire protocol."""
        if client.spawning:
            client.spawning = line.strip() != "endcmd"
            if not client.spawning:
                self.say(client, "cmd=spawn_result rc=-1 msg=unsupported")
            return
        words = dict(word.split("=", 1) for word in line.split(" ") if "=" in word)
        command = words.get("cmd", "")
        if words.get("mcmd") == "spawn":
            client.spawning = True
            tell(f"rank {client.rank}: MPI_Comm_spawn is not possible where hpcpar itself connects the ranks")
        elif command == "init":
            known = words.get("pmi_version") == "1"
            self.say(client, f"cmd=response_to_init pmi_version=1 pmi_subversion=1 rc={0 if known else -1}")
        elif command == "get_maxes":
            self.say(client, f"cmd=maxes kvsname_max=256 keylen_max={KEY_LIMIT} vallen_max={VALUE_LIMIT}")
        elif command == "get_appnum":
            self.say(client, "cmd=appnum appnum=0")
        elif command == "get_my_kvsname":
            self.say(client, f"cmd=my_kvsname kvsname={self.name}")
        elif command == "get_universe_size":
            self.say(client, f"cmd=universe_size size={self.size}")
        elif command == "put":
            self.values[words.get("key", "")] = line.partition(" value=")[2]
            self.say(client, "cmd=put_result rc=0 msg=success")
        elif command == "get":
            value = self.values.get(words.get("key", ""))
            found = (
                "rc=-1 msg=key_not_found value=unknown"
                if value is None
                else f"rc=0 msg=success value={value}"
            )
            self.say(client, f"cmd=get_result {found}")
        elif command == "barrier_in":
            self.enter_barrier(client)
        elif command == "finalize":
            client.finished = True
            self.say(client, "cmd=finalize_ack rc=0")
        elif command == "abort":
            client.finished = True
            self.run_end_command()
        else:
            self.say(client, f"cmd={command}_result rc=-1 msg=unsupported")

    def enter_barrier(self, client: Client) -> None:
        self.at_barrier.append(client)
        if len(self.at_barrier) == self.size:
            waiting, self.at_barrier = self.at_barrier, []
            for each in waiting:
                self.say(each, "cmd=barrier_out rc=0")

    def say(self, client: Client, line: str) -> None:
        client.outgoing += line.encode() + b"\n"
        self.flush(client)

    def flush(self, client: Client) -> None:
        """Send what there is to send; the rest when the connection takes more."""
        if client.connection.fileno() not in self.clients:
            return
        with suppress(OSError):  # gone: its end of file comes next
            client.outgoing = client.outgoing[client.connection.send(client.outgoing) :]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.outgoing else 0)
        if self.selector.get_key(client.connection).events != events:
            self.selector.modify(client.connection, events)


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


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def raise_descriptor_limit(wanted: int) -> None:
    """Let this process have that many files open, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def main() -> None:
    order = json.loads(sys.stdin.readline())
    starter = os.getppid()
    listener = socket.socket(fileno=int(sys.argv[1]))
    if os.fork():
        os._exit(0)  # the rank that started us waits for this, and has no child to look after then
    os.chdir("/")  # hold no file system that someone may want to unmount
    raise_descriptor_limit(2 * int(order["size"]) + 128)
    Server(order, listener, starter).serve()


if __name__ == "__main__":
    main()
