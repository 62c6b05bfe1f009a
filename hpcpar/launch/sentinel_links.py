"""The links between the sentinels of a job's nodes: who was lost when a whole node is.

A sentinel that dies with its node cannot speak. So the sentinels of several nodes are joined in a star
over TCP: that of node 0, the hub, listens, each other one, a spoke, connects.

    spoke                                          hub
                                                ←  nonce
    node, nonce, HMAC(token, …)                 →  check
                                                ←  HMAC(token, …), the hub's host and ranks
    joined 5 PID host / done 5 / aborting 5 why →  keep book of every rank
    lost 5                                      →  the first of the job?
                                                ←  speak LINE, else hush; 0.3 s later, to all: end
    suspect 5   (ended from outside, it seems)  →  if others work on 1 s later, or more of them are lost
                                                   after it than are suspects, too, it was a loss
    leaving                                     →  this node needs no watching any more
    (end of the link without it)                →  0.3 s later: the node is lost; say so, end the job

The ranks' loss is judged where all of it is known and in the order in which it was heard: the first is
named, the others are what a launcher did about it. When the hub's own node is lost, the deputy,
which is the lowest node that is linked, says so; every spoke ends its ranks.

An end of file comes from a node whose kernel lives; a machine that is off or cut off is found
by TCP's keepalive within `node_timeout_s`. Between events nothing is sent and nobody wakes: a star
of a thousand links is a thousand idle sockets in one process.

Where a link cannot be had (a firewall), the hub warns once, and that node is watched as if alone.

Run with `sentinel_process`, in an isolated interpreter: standard library only, and little of that.
"""

from __future__ import annotations

import _thread
import errno
import json
import os
import resource
import socket
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:  # without importing `typing`, which takes longer than all the rest
    from typing import Any

    from hpcpar.launch.sentinel_process import Alone, Sentinel

SETTLE_S = 0.3
"""Between the first loss and the job's end: a sentinel may be about to be killed with its node."""

OUTSIDE_S = 1.0
"""How long ranks may go on working after one was ended from outside, before that counts as its loss."""

ABORT_RELAY_S = 0.15
"""A rank that aborts tells its sentinel so, and MPI 0.2 s later (`comm.failure`)."""

VERDICT_S = 1.0
GREETING_S = 5.0
GREETING_LIMIT = 4096
KEEPALIVE_PAUSE_LIMIT_S = 32767
KEEPALIVE_PROBES_LIMIT = 127
SPARE_DESCRIPTORS = 64


class Link:
    """Lines of text on a TCP connection that never blocks."""

    def __init__(self, connection: socket.socket, *, node_timeout_s: float) -> None:
        self.connection = connection
        self.received = b""
        self.ended = False
        self.fell_silent = False
        connection.setblocking(False)
        keep_alive(connection, node_timeout_s)

    def send(self, text: str) -> None:
        with suppress(OSError):  # a link that has broken is found by reading
            self.connection.sendall(text.encode("utf-8", "replace") + b"\n")

    def receive(self) -> bytes:
        """All that has come and was not yet taken as a line; `ended` tells of the other end."""
        try:
            while data := self.connection.recv(GREETING_LIMIT):
                self.received += data
            self.ended = True
        except BlockingIOError:
            pass
        except OSError as error:
            self.ended = True
            self.fell_silent = error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
        return self.received

    def next_line(self) -> str | None:
        line, newline, rest = self.received.partition(b"\n")
        if not newline:
            return None
        self.received = rest
        return line.decode("utf-8", "replace")


def keep_alive(connection: socket.socket, node_timeout_s: float) -> None:
    """Have the kernel end the connection once its other end has not answered for `node_timeout_s`.

    Linux's limits of keepalive make 48 days together: beyond, and for inf, no probe is sent. An unanswered
    message may wait for 24 days, for its time is in 31 bits of milliseconds.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    pause_s = max(1, round(min(node_timeout_s / 4, KEEPALIVE_PAUSE_LIMIT_S)))
    probes = max(3.0, node_timeout_s / pause_s - 1)
    wishes = (
        (socket.SOL_SOCKET, "SO_KEEPALIVE", int(probes <= KEEPALIVE_PROBES_LIMIT)),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", pause_s),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", pause_s),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", int(min(probes, KEEPALIVE_PROBES_LIMIT))),
        # Keepalive rests while something that was sent is not acknowledged: then this one decides.
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", max(1, round(min(node_timeout_s * 1000, 2**31 - 1)))),
    )
    for level, name, value in wishes:
        if hasattr(socket, name):  # not every system has all of them
            connection.setsockopt(level, getattr(socket, name), value)


def proof(token: bytes, role: str, *nonces: str) -> str:
    """Compute the proof of knowing the token, over both sides' nonces, for one role."""
    import hmac  # here, for no rank shall wait the 4 ms that it takes at the start

    return hmac.digest(token, " ".join((role, *nonces)).encode(), "sha256").hex()


def is_proof(shown: str, token: bytes, role: str, *nonces: str) -> bool:
    """Compare a shown proof with the right one, in constant time."""
    import hmac

    return hmac.compare_digest(shown.encode(), proof(token, role, *nonces).encode())


def connect(order: dict[str, Any], address: str, patience_s: float) -> tuple[socket.socket, dict[str, Any]]:
    """A connection to the hub, each side sure of the other, and what the hub says of itself.

    errors   OSError or ValueError where nobody answers at this address, or it is not the hub
    """
    connection = socket.create_connection((address, int(order["port"])), timeout=patience_s)
    try:
        connection.settimeout(GREETING_S)
        # Unbuffered: what follows the greeting is for others to read.
        with connection.makefile("rb", buffering=0) as incoming:
            theirs = incoming.readline(GREETING_LIMIT).decode().strip()
            ours, number, token = os.urandom(16).hex(), str(order["node"]), str(order["token"]).encode()
            answer = proof(token, "spoke", theirs, number, ours)
            connection.sendall(f"{number} {ours} {answer}\n".encode())
            shown, _, about = incoming.readline(1 << 20).decode().partition(" ")
            if not is_proof(shown, token, "hub", ours, theirs):
                raise ConnectionError(f"{address} does not know this job's token")
            return connection, json.loads(about)
    except (OSError, ValueError):
        connection.close()
        raise


def raise_descriptor_limit(needed: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        with suppress(OSError, ValueError):  # links beyond the limit are not had, and warned of
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))


def in_words(ranks: list[int]) -> str:
    """in_words([0, 1, 2, 8]) == "ranks 0-2, 8"; in_words([3]) == "rank 3"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def say_node_lost(
    sentinel: Sentinel, host: str, ranks: list[int], pids: dict[int, int], silence_s: float | None
) -> tuple[str, bool]:
    """Name the ranks of a lost node. Returns what was said, and whether anybody listened.

    pids        as far as they are known
    silence_s   how long the node had not answered; None where its processes were seen to end
    """
    known = [str(pids[rank]) for rank in ranks if rank in pids]
    processes = f" (pid{'s' if len(known) > 1 else ''} {', '.join(known)})" if 0 < len(known) <= 8 else ""
    how = "all its processes ended at once"
    if silence_s is not None:
        how = f"it has not answered for {silence_s:g} s (off, or cut off from the network)"
    line = f"{host} was lost with {in_words(ranks)}{processes}: {how}; ending the job{sentinel.moment()}"
    sentinel.leave_word("lost", host, ranks[0], line)
    return line, sentinel.say(line)


def tell_batch_output(line: str, *, if_on: str = "") -> None:
    """Append what nobody has heard to the output of Slurm's batch job, which this may be a part of.

    if_on   only if the batch script was on this host, which is lost: then srun or mpiexec, which would
            have passed on what a sentinel says, is lost with it
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    import subprocess  # here, for hardly any sentinel ever needs it

    with suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(
            ["scontrol", "show", "job", job], capture_output=True, text=True, timeout=3, check=True
        ).stdout
        facts = dict(fact.strip().split("=", 1) for fact in shown.splitlines() if "=" in fact)
        path = facts.get("StdErr", "")
        was_there = facts.get("BatchHost", "").split(".")[0] == if_on.split(".")[0]
        if (was_there or not if_on) and os.path.isfile(path):
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"hpcpar: {line}\n")


class Node:
    """One node, as the hub knows it."""

    def __init__(self, number: int, ranks: list[int]) -> None:
        self.number = number
        self.ranks = ranks
        self.host = f"node {number} of the job"
        self.link: Link | None = None
        self.was_linked = False
        self.told = False
        self.fell_silent = False


class Hub:
    """The sentinel of node 0 as the judge of the whole job.

    order   "ranks": those of each node; "link_limit_s": how long the spokes may take to connect
    """

    def __init__(self, sentinel: Sentinel, order: dict[str, Any], listener: socket.socket) -> None:
        self.sentinel = sentinel
        self.token = str(order["token"]).encode()
        self.node_timeout_s = float(order["node_timeout_s"])
        self.nodes = [Node(number, ranks) for number, ranks in enumerate(order["ranks"])]
        self.nodes[0].host = sentinel.host
        self.node_of = {rank: node for node in self.nodes for rank in node.ranks}
        self.working = set(self.nodes[0].ranks)
        self.pids: dict[int, int] = {}
        self.suspects: dict[int, float] = {}
        self.followers = 0  # ranks lost by themselves behind a suspect
        self.gone: list[Node] = []
        self.deputy: Node | None = None
        self.named = self.over = False
        self.aborted_at: float | None = None
        self.end_at: float | None = None
        self.strangers: dict[int, tuple[Link, str, float]] = {}
        self.linked: dict[int, Node] = {}
        self.listener: socket.socket | None = listener
        self.link_deadline: float | None = time.monotonic() + float(order["link_limit_s"])
        raise_descriptor_limit(len(self.nodes) + 2 * len(self.nodes[0].ranks) + SPARE_DESCRIPTORS)
        listener.setblocking(False)
        sentinel.poller.add(listener.fileno(), level=True)

    # What the ranks of any node do, in the order in which it is heard.

    def joined(self, rank: int, pid: int) -> None:
        self.pids[rank] = pid

    def done(self, rank: int) -> None:
        self.working.discard(rank)
        if self.node_of[rank] is self.nodes[0] and not self.working.intersection(self.nodes[0].ranks):
            # The launcher may now take away what is left on this node, its sentinel included.
            self.tell_all("finished")

    def aborting(self, rank: int, why: str) -> None:
        self.working.discard(rank)
        if self.aborted_at is None:
            self.aborted_at = time.monotonic()
            host = self.node_of[rank].host
            self.sentinel.leave_word("aborted", host, rank, f"rank {rank} (on {host}) ended the job: {why}")
        if self.end_at is None:
            self.end_at = self.aborted_at + self.sentinel.abort_grace_s

    def lost(self, rank: int) -> None:
        """Have it named, unless it is or may be what came of something else; see `judge_suspects`."""
        self.working.discard(rank)
        if self.gone:  # a node went just before: this is what came of it
            self.end_at = time.monotonic()
        if not self.suspects and not self.is_decided:
            self.name(rank)
            return
        self.followers += 1
        link = self.node_of[rank].link
        if link is not None:
            link.send("hush")

    def suspect(self, rank: int) -> None:
        self.working.discard(rank)
        self.suspects[rank] = time.monotonic()

    def told(self) -> None:
        self.nodes[0].told = True

    def leave(self) -> None:
        """It does so after the others, or after it has told them to end; or for something unforeseen."""
        self.tell_all("finished")

    @property
    def stays(self) -> bool:
        """True while there is something left to watch or to say, though this node's ranks have gone."""
        return not self.over and (bool(self.linked or self.suspects) or self.end_at is not None)

    # What comes over the links.

    def read(self, descriptor: int) -> bool:
        """Hear what has come, if the descriptor is one of the hub's."""
        if self.listener is not None and descriptor == self.listener.fileno():
            self.accept(self.listener)
        elif descriptor in self.strangers:
            self.greet(descriptor)
        elif descriptor in self.linked:
            self.hear(descriptor)
        else:
            return False
        return True

    def accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        if len(self.strangers) > len(self.nodes) + SPARE_DESCRIPTORS:
            connection.close()
            return
        link = Link(connection, node_timeout_s=self.node_timeout_s)
        nonce = os.urandom(16).hex()
        self.strangers[connection.fileno()] = (link, nonce, time.monotonic() + GREETING_S)
        self.sentinel.poller.add(connection.fileno())
        link.send(nonce)

    def greet(self, descriptor: int) -> None:
        """Hear a connection that has yet to show that it knows the job's token."""
        link, nonce, _ = self.strangers[descriptor]
        if b"\n" not in link.receive() and not link.ended and len(link.received) <= GREETING_LIMIT:
            return
        words = (link.next_line() or "").split()
        node = next((node for node in self.nodes[1:] if [str(node.number)] == words[:1]), None)
        if (
            node is None
            or node.link is not None
            or node.was_linked
            or len(words) != 3
            or not is_proof(words[2], self.token, "spoke", nonce, *words[:2])
        ):
            self.refuse(descriptor)
            return
        del self.strangers[descriptor]
        self.linked[descriptor] = node
        node.link = link
        about = {"host": self.nodes[0].host, "ranks": self.nodes[0].ranks}
        link.send(f"{proof(self.token, 'hub', words[1], nonce)} {json.dumps(about)}")
        if not self.working.intersection(self.nodes[0].ranks):
            link.send("finished")
        self.appoint()
        self.hear(descriptor)

    def refuse(self, descriptor: int) -> None:
        link, _, _ = self.strangers.pop(descriptor)
        self.sentinel.poller.remove(descriptor)
        link.connection.close()

    def hear(self, descriptor: int) -> None:
        node = self.linked[descriptor]
        assert node.link is not None
        node.link.receive()
        while (text := node.link.next_line()) is not None:
            self.obey(node, text)
        if node.link.ended:
            self.part(node, node.link)

    def obey(self, node: Node, text: str) -> None:
        word, _, rest = text.partition(" ")
        number, _, more = rest.partition(" ")
        rank = int(number) if number.isdigit() else -1
        if word == "host":  # from now on the link's end is the node's
            node.host, node.was_linked = rest, True
            self.working.update(node.ranks)
            if all(node.was_linked for node in self.nodes[1:]):
                self.close_door()
        elif word == "told":
            node.told = True
        elif word == "leaving":
            self.working.difference_update(node.ranks)
        elif self.node_of.get(rank) is not node:
            return
        elif word == "joined":
            self.joined(rank, int(more) if more.isdigit() else 0)
        elif word == "done":
            self.done(rank)
        elif word == "aborting":
            self.aborting(rank, more)
        elif word == "lost":
            self.lost(rank)
        elif word == "suspect":
            self.suspect(rank)

    def part(self, node: Node, link: Link) -> None:
        """The link has ended: so has its node, unless nobody worked there any more."""
        descriptor = link.connection.fileno()
        self.sentinel.poller.remove(descriptor)
        del self.linked[descriptor]
        link.connection.close()
        node.link, node.fell_silent = None, link.fell_silent
        left = sorted(self.working.intersection(node.ranks))
        self.working.difference_update(left)
        if node.told:
            for rank in left:
                self.suspect(rank)
        elif left and not self.over:
            self.node_gone(node)
        self.appoint()

    def node_gone(self, node: Node) -> None:
        now = time.monotonic()
        if self.aborted_at is not None:
            if now - self.aborted_at > ABORT_RELAY_S:
                return  # the launcher has ended it, because of the abort
            self.aborted_at = None  # too soon for that: the rank aborted because the node went
            self.end_at = None
        self.gone.append(node)
        if self.end_at is None:
            self.end_at = now + SETTLE_S

    def appoint(self) -> None:
        """Tell the lowest node that is linked to speak, should this one be lost."""
        lowest = min(self.linked.values(), key=lambda node: node.number, default=None)
        if lowest is self.deputy:
            return
        if self.deputy is not None and self.deputy.link is not None:
            self.deputy.link.send("deputy no")
        if lowest is not None and lowest.link is not None:
            lowest.link.send("deputy yes")
        self.deputy = lowest

    # What time brings.

    def deadlines(self) -> list[float]:
        times = [t for t in (self.end_at, self.link_deadline) if t is not None]
        times += [since + OUTSIDE_S for since in self.suspects.values()]
        return times + [until for _, _, until in self.strangers.values()]

    def act_on_time(self, now: float) -> None:
        for descriptor in [key for key, (_, _, until) in self.strangers.items() if now >= until]:
            self.refuse(descriptor)
        if self.link_deadline is not None and now >= self.link_deadline:
            self.warn()
            self.close_door()
        if self.suspects:
            self.judge_suspects(now)
        if self.end_at is not None and now >= self.end_at:
            self.end()

    @property
    def is_decided(self) -> bool:
        """True once the cause of this job's end is known, and said or about to be."""
        return self.named or self.over or bool(self.gone) or self.aborted_at is not None

    def judge_suspects(self, now: float) -> None:
        """Ranks were ended from outside: with nearly all others that was the job's end, else a loss."""
        first = min(self.suspects, key=self.suspects.__getitem__)
        if self.working and now < self.suspects[first] + OUTSIDE_S:
            return
        if (self.working or self.followers > len(self.suspects)) and not self.is_decided:
            # A sentinel whose last rank has gone does not wait for a verdict on a suspect.
            self.name(first, has_left=not self.working.intersection(self.node_of[first].ranks))
        self.suspects.clear()
        self.followers = 0

    def name(self, rank: int, *, has_left: bool = False) -> None:
        """Have it said that this rank was lost: by its own node's sentinel, unless that may have left."""
        node = self.node_of[rank]
        line = self.sentinel.loss_of(rank, self.pids.get(rank, 0), node.host, "ending the job")
        self.named = True
        self.end_at = time.monotonic() + SETTLE_S
        if node.link is not None and not has_left:
            node.link.send(f"speak {rank} {line}")
        else:
            self.sentinel.say(line)
        self.sentinel.leave_word("lost", node.host, rank, line)

    def end(self) -> None:
        self.end_at, self.over = None, True
        unheard = []
        for node in self.gone:
            silence_s = self.node_timeout_s if node.fell_silent else None
            line, heard = say_node_lost(self.sentinel, node.host, node.ranks, self.pids, silence_s)
            if not heard:
                unheard.append(line)
        self.tell_all("end")
        self.sentinel.end(elsewhere=True)
        for line in unheard:
            tell_batch_output(line)

    def warn(self) -> None:
        """Say, once for the job, which sentinels have not connected."""
        missing = [node for node in self.nodes[1:] if not node.was_linked]
        if missing and not self.over:
            ranks = sorted(rank for node in missing for rank in node.ranks)
            self.sentinel.say(
                f"the sentinels of {len(missing)} of {len(self.nodes)} nodes (those of {in_words(ranks)}) "
                f"could not connect to {self.nodes[0].host}: the job runs on, but if one of these nodes is "
                f"lost nobody will say so; let the nodes of a job connect to each other over TCP"
            )

    def tell_all(self, text: str) -> None:
        for node in self.linked.values():
            if node.link is not None:
                node.link.send(text)

    def close_door(self) -> None:
        self.link_deadline = None
        if self.listener is not None:
            self.sentinel.poller.remove(self.listener.fileno())
            self.listener.close()
            self.listener = None


class Spoke:
    """The sentinel of another node: tells the hub, and does what it says; without a link, judges alone.

    order   "addresses": where the hub may be found; "port"; "node": our own number
    """

    def __init__(self, sentinel: Sentinel, order: dict[str, Any], alone: Alone) -> None:
        self.sentinel = sentinel
        self.alone = alone
        self.order = order
        self.node_timeout_s = float(order["node_timeout_s"])
        self.link: Link | None = None
        self.book: list[str] = [f"host {sentinel.host}"]
        self.hub_host, self.hub_ranks = "", [0]
        self.is_deputy = self.hub_finished = self.hub_fell_silent = False
        self.unsaid: int | None = None
        self.unjudged: list[int] = []
        self.verdict_by: float | None = None
        self.hub_lost_at: float | None = None
        # Looking a name up and connecting may block, and ranks must be watched meanwhile.
        self.found: list[tuple[socket.socket, dict[str, Any]]] = []
        self.bell, ring = socket.socketpair()
        sentinel.poller.add(self.bell.fileno())
        _thread.start_new_thread(self.look_for_hub, (ring,))

    def look_for_hub(self, ring: socket.socket) -> None:
        """In a thread: connect, and leave the connection in `found`; the bell rings when this has ended."""
        with ring:
            deadline = time.monotonic() + float(self.order["link_limit_s"])
            patience_s = 1.0
            while not self.found and (left_s := deadline - time.monotonic()) > 0:
                for address in self.order["addresses"]:
                    with suppress(OSError, ValueError):
                        self.found.append(connect(self.order, address, min(patience_s, left_s)))
                        return
                patience_s *= 2
                time.sleep(min(0.1, left_s))

    def read(self, descriptor: int) -> bool:
        if self.bell.fileno() == descriptor:
            self.sentinel.poller.remove(descriptor)
            self.bell.close()
            if self.found:
                self.begin(*self.found.pop())
            else:
                self.judge_alone()
        elif self.link is not None and self.link.connection.fileno() == descriptor:
            self.hear(self.link)
        else:
            return False
        return True

    def judge_alone(self) -> None:
        """There is no link, and there will be none."""
        for rank in self.unjudged:
            self.alone.suspect(rank)
        if self.unsaid is not None:
            self.verdict_by = time.monotonic()

    def begin(self, connection: socket.socket, about: dict[str, Any]) -> None:
        self.hub_host, self.hub_ranks = str(about["host"]), [int(rank) for rank in about["ranks"]]
        self.link = Link(connection, node_timeout_s=self.node_timeout_s)
        self.sentinel.poller.add(connection.fileno())
        for text in self.book:
            self.link.send(text)

    @property
    def may_be_linked(self) -> bool:
        return self.link is not None or self.bell.fileno() >= 0

    def tell(self, text: str) -> None:
        """Tell the hub now, or as soon as there is a link."""
        if self.link is not None:
            self.link.send(text)
        else:
            self.book.append(text)

    def joined(self, rank: int, pid: int) -> None:
        self.alone.joined(rank, pid)
        self.tell(f"joined {rank} {pid}")

    def done(self, rank: int) -> None:
        self.tell(f"done {rank}")

    def aborting(self, rank: int, why: str) -> None:
        self.alone.aborting(rank, why)
        self.tell(f"aborting {rank} {why}")

    def lost(self, rank: int) -> None:
        if self.hub_lost_at is not None:  # the hub's node went just before: this is what came of it
            self.hub_lost_at = time.monotonic()
        elif not self.may_be_linked:
            self.alone.lost(rank)
        elif self.verdict_by is None:
            self.tell(f"lost {rank}")
            self.unsaid = rank
            self.verdict_by = time.monotonic() + VERDICT_S

    def suspect(self, rank: int) -> None:
        if self.may_be_linked:
            self.tell(f"suspect {rank}")
            self.unjudged.append(rank)
        else:
            self.alone.suspect(rank)

    def told(self) -> None:
        self.tell("told")

    def leave(self) -> None:
        self.tell("leaving")

    @property
    def stays(self) -> bool:
        return self.verdict_by is not None or self.hub_lost_at is not None

    def hear(self, link: Link) -> None:
        link.receive()
        while (text := link.next_line()) is not None:
            self.obey(text)
        if link.ended:
            self.sentinel.poller.remove(link.connection.fileno())
            link.connection.close()
            self.link, self.hub_fell_silent = None, link.fell_silent
            concerned = self.sentinel.working() or self.unsaid is not None
            if concerned and not self.hub_finished and not self.sentinel.ending:
                self.hub_lost_at = time.monotonic() + (OUTSIDE_S if self.sentinel.was_told else SETTLE_S)

    def obey(self, text: str) -> None:
        word, _, rest = text.partition(" ")
        if word == "speak":
            number, _, line = rest.partition(" ")
            self.unsaid = None
            self.verdict_by = time.monotonic() + VERDICT_S
            self.sentinel.say(line)
            self.sentinel.leave_word("lost", self.sentinel.host, int(number), line)
        elif word == "hush":
            self.unsaid = self.verdict_by = None
        elif word == "end":
            self.unsaid = self.verdict_by = None
            self.sentinel.end(elsewhere=False)
        elif word == "deputy":
            self.is_deputy = rest == "yes"
        elif word == "finished":
            self.hub_finished = True

    def deadlines(self) -> list[float]:
        own = [t for t in (self.verdict_by, self.hub_lost_at) if t is not None]
        return own + self.alone.deadlines()

    def act_on_time(self, now: float) -> None:
        self.alone.act_on_time(now)
        if self.hub_lost_at is not None and now >= self.hub_lost_at:
            self.hub_lost()
        if self.verdict_by is not None and now >= self.verdict_by:
            self.verdict_by = None  # the hub is stuck: end the job without it
            if self.unsaid is not None:
                self.alone.lost(self.unsaid)
            else:
                self.sentinel.end(elsewhere=True)

    def hub_lost(self) -> None:
        self.hub_lost_at = self.verdict_by = None
        if self.sentinel.was_told and not self.sentinel.working():
            return  # the whole job was ended from outside
        line, heard = "", True
        if self.is_deputy:
            silence_s = self.node_timeout_s if self.hub_fell_silent else None
            line, heard = say_node_lost(self.sentinel, self.hub_host, self.hub_ranks, {}, silence_s)
        self.sentinel.end(elsewhere=self.is_deputy)
        if line:
            tell_batch_output(line, if_on=self.hub_host if heard else "")
