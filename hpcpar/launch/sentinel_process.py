"""The sentinel: one small process per node that says which rank was lost.

Run as a script by `hpcpar.launch.sentinel.start`, in an isolated interpreter without site
packages; it imports the standard library only, and little of that. A launcher that sees a rank die
may kill all others within 0.1 s without naming any (MPICH's does), so whoever is to name the
first must not be one of the launcher's own: the sentinel has a session of its own and has left
its parent.

    rank                                 sentinel
    connect, {"rank", "pid", "token"} →  check user and token
                                      ←  ok
    ... trains ...
    done                              →  forget this rank
                                      ←  ok
    aborting: why                     →  from now on say nothing, but end what is left after 8 s
    (end of file without either)      →  lost: say so, end the ranks of this node, exit

A dying process closes its socket before its parent hears of the death, and epoll hands events out
in the order in which they happened: so the first end of file is the first loss, even when
all the others are dead by the time the sentinel runs. That needs edge-triggered events: a
level-triggered descriptor, once reported, keeps its place in the kernel's queue until the next wait,
and would overtake a rank that was lost in between. The rank's pidfd is watched as well, because a
child that a rank forked can keep the rank's socket open.

A rank that was ended from outside (SIGTERM, as scancel and time limits send it; or anything after the
sentinel has had one itself) is a loss only if others still work a second later, or if more of them went
by themselves after it: where a whole job is ended, SIGTERM may find that a rank has crashed for want
of its peers.

The sentinels of several nodes do not know of each other. The one that sees a loss ends its own ranks and
runs `end_command`; the launcher ends the other nodes' ranks. Their sentinels may name a rank as well:
each line then gives the time of day, and the earliest names the cause.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress

JOIN_LIMIT_S = 60.0
ABORT_GRACE_S = 8.0
KILL_GRACE_S = 5.0
STARTER_POLL_S = 0.5
GREETING_LIMIT = 65536
OUTSIDE_S = 1.0

EXIT_CODE_FIELD = 49
"""In /proc/PID/stat, counted behind the command's name; see proc(5)."""

PIDFD_INFO_NBYTES = 64
PIDFD_INFO_EXIT = 1 << 3
PIDFD_GET_INFO = 0xC0000000 | PIDFD_INFO_NBYTES << 16 | 0xFF << 8 | 11
"""_IOWR(0xFF, 11, struct pidfd_info) of linux/pidfd.h."""

CHANGES = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
CLOSED = select.EPOLLHUP | select.EPOLLRDHUP | select.EPOLLERR

FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals by which a launcher or a person ends a program."""

TYPE_CHECKING = False
if TYPE_CHECKING:  # without importing `typing`, which takes longer than all the rest
    from typing import Any


class Rank:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = b""
        self.number = -1
        self.named_pid = 0
        self.pid = 0
        self.pidfd = -1
        self.finished = False

    @property
    def joined(self) -> bool:
        return self.number >= 0

    def signal(self, number: int) -> None:
        """Send a signal, to this very process where a pidfd says which it is."""
        with suppress(OSError):  # it has gone by itself
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, number)
            elif self.pid > 0:
                os.kill(self.pid, number)


class LossJudge:
    """Judge whether a rank was lost, or was ended together with the whole job."""

    def __init__(self, sentinel: Sentinel) -> None:
        self.sentinel = sentinel
        self.pids: dict[int, int] = {}
        self.suspects: dict[int, float] = {}
        self.followers = 0  # ranks lost by themselves after a suspect
        self.end_at: float | None = None

    @property
    def is_decided(self) -> bool:
        return self.end_at is not None or self.sentinel.ending

    def aborting(self, rank: int, why: str) -> None:
        """Record the first abort, and end what is left after `abort_grace_s` if it does not end by itself."""
        if self.end_at is None:
            self.sentinel.leave_word(
                "aborted", rank, f"rank {rank} (on {self.sentinel.host}) ended the job: {why}"
            )
            self.end_at = time.monotonic() + self.sentinel.abort_grace_s

    def lost(self, rank: int) -> None:
        """Name the rank, unless its loss may follow from another rank's end (`judge_suspects`)."""
        if self.suspects:
            self.followers += 1
        elif not self.is_decided:
            self.name(rank)

    def suspect(self, rank: int) -> None:
        self.suspects[rank] = time.monotonic()

    def name(self, rank: int) -> None:
        ending = "ending the job"
        if self.sentinel.nodes == 1:
            others = self.sentinel.members()
            ending = "ending the other ranks of this node" if others else "no other rank of this node is left"
        line = (
            f"rank {rank} (pid {self.pids.get(rank, 0)} on {self.sentinel.host}) was lost: killed or exited "
            f"without finishing; {ending}{self.sentinel.moment()}"
        )
        self.sentinel.say(line)
        self.sentinel.leave_word("lost", rank, line)
        self.sentinel.end()

    def deadlines(self) -> list[float]:
        times = [since + OUTSIDE_S for since in self.suspects.values()]
        return times if self.end_at is None else [*times, self.end_at]

    def act_on_time(self, now: float) -> None:
        if self.suspects:
            self.judge_suspects(now)
        if self.end_at is not None and now >= self.end_at:
            self.end_at = None
            self.sentinel.end()

    def judge_suspects(self, now: float) -> None:
        """Decide about ranks that were ended from outside: with nearly all others it was the job's end."""
        working = bool(self.sentinel.working())
        first = min(self.suspects, key=self.suspects.__getitem__)
        if working and now < self.suspects[first] + OUTSIDE_S:
            return
        if (working or self.followers > len(self.suspects)) and not self.is_decided:
            self.name(first)
        elif self.sentinel.nodes > 1 and not self.sentinel.was_told:
            # Nobody works on this node any more. Should only this node's ranks have been signalled, the
            # ranks of the others would wait for them; where the whole job ends, this changes nothing.
            self.sentinel.end_elsewhere()
        self.suspects.clear()
        self.followers = 0


class Sentinel:
    """Watch the ranks of one node until the last of them has gone."""

    def __init__(self, order: dict[str, Any], listener: socket.socket, starter: int) -> None:
        self.token = str(order["token"])
        self.host = str(order["host"])
        self.local_size = int(order["local_size"])
        self.nodes = int(order["nodes"])
        self.run_directory = str(order["run_directory"] or "")
        self.end_command: list[str] = order["end_command"]
        self.listener: socket.socket | None = listener
        self.starter = starter
        self.join_deadline = time.monotonic() + float(order["join_limit_s"])
        self.kill_grace_s = float(order["kill_grace_s"])
        self.abort_grace_s = float(order["abort_grace_s"])
        self.epoll = select.epoll()
        self.ranks: dict[int, Rank] = {}
        self.pidfds: dict[int, Rank] = {}
        self.was_told = False
        self.ending = False
        self.kill_at: float | None = None
        self.leave_at: float | None = None
        listener.setblocking(False)
        self.epoll.register(listener.fileno(), select.EPOLLIN)
        for number in FROM_OUTSIDE:
            signal.signal(number, self.told_to_end)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        self.judge = LossJudge(self)

    def told_to_end(self, number: int, frame: object) -> None:
        """Note that the job is being ended from outside. Stay: a rank may be lost while others finish."""
        self.was_told = True

    def watch(self) -> None:
        while not self.is_over():
            for descriptor, events in self.epoll.poll(self.patience_s()):
                if self.listener is not None and descriptor == self.listener.fileno():
                    self.accept()
                elif descriptor in self.pidfds:
                    self.read(self.pidfds[descriptor], ended=True)
                elif descriptor in self.ranks:
                    self.read(self.ranks[descriptor], ended=bool(events & CLOSED))
            self.act_on_time()

    def members(self) -> list[Rank]:
        return sorted((rank for rank in self.ranks.values() if rank.joined), key=lambda rank: rank.number)

    def working(self) -> list[Rank]:
        return [rank for rank in self.members() if not rank.finished]

    def is_over(self) -> bool:
        if self.leave_at is not None and time.monotonic() >= self.leave_at:
            return True
        return self.listener is None and not self.members()

    def patience_s(self) -> float | None:
        deadlines = [t for t in (self.kill_at, self.leave_at) if t is not None] + self.judge.deadlines()
        now = time.monotonic()
        if self.listener is not None:
            deadlines += [self.join_deadline, now + STARTER_POLL_S]
        return max(0.0, min(deadlines) - now) if deadlines else None

    def accept(self) -> None:
        assert self.listener is not None
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return
        if len(self.ranks) > 4 * self.local_size + 16 or peer(connection)[1] != os.getuid():
            connection.close()
            return
        connection.setblocking(False)
        self.ranks[connection.fileno()] = Rank(connection)
        self.epoll.register(connection.fileno(), CHANGES)

    def read(self, rank: Rank, *, ended: bool) -> None:
        """Read all that a rank has said.

        ended   the event's word: an end of file that is seen only now has an event of its own, in order
        """
        with suppress(OSError):  # nothing more to read, or a connection that broke
            while len(rank.received) <= GREETING_LIMIT and (data := rank.connection.recv(GREETING_LIMIT)):
                rank.received += data
        while b"\n" in rank.received and rank.connection.fileno() in self.ranks:
            line, _, rank.received = rank.received.partition(b"\n")
            self.hear(rank, line.decode("utf-8", "replace"))
        if ended or len(rank.received) > GREETING_LIMIT:
            self.gone(rank)

    def hear(self, rank: Rank, line: str) -> None:
        if not rank.joined:
            self.greet(rank, line)
        elif line == "done":
            rank.finished = True
            with suppress(OSError):  # the rank may have gone without waiting for the answer
                rank.connection.sendall(b"ok\n")
        elif line.startswith("aborting:"):
            rank.finished = True
            self.judge.aborting(rank.number, line.removeprefix("aborting:").strip())

    def greet(self, rank: Rank, line: str) -> None:
        try:
            greeting = json.loads(line)
            number, named_pid, token = int(greeting["rank"]), int(greeting["pid"]), str(greeting["token"])
        except (ValueError, KeyError, TypeError):
            self.gone(rank)
            return
        if token != self.token or number < 0 or any(number == member.number for member in self.members()):
            self.gone(rank)
            return
        rank.number, rank.named_pid = number, named_pid
        rank.pid = peer(rank.connection)[0]  # in our own namespace: the kernel's word, not the rank's
        rank.pidfd = open_pidfd(rank.pid)
        if rank.pidfd >= 0:
            self.pidfds[rank.pidfd] = rank
            self.epoll.register(rank.pidfd, CHANGES)
        self.judge.pids[number] = named_pid
        with suppress(OSError):  # should it have gone already, its end of file comes next
            rank.connection.sendall(b"ok\n")
        if len(self.members()) == self.local_size:
            self.close_door()

    def gone(self, rank: Rank) -> None:
        """Forget a rank whose connection or process has ended, and judge whether that was a loss."""
        descriptor = rank.connection.fileno()
        if descriptor not in self.ranks:
            return
        unexpected = rank.joined and not rank.finished and not self.ending
        from_outside = unexpected and (self.was_told or ending_signal(rank.pid, rank.pidfd) in FROM_OUTSIDE)
        self.epoll.unregister(descriptor)
        del self.ranks[descriptor]
        rank.connection.close()
        if rank.pidfd >= 0:
            self.epoll.unregister(rank.pidfd)
            del self.pidfds[rank.pidfd]
            os.close(rank.pidfd)
        if from_outside:
            self.judge.suspect(rank.number)
        elif unexpected:
            self.judge.lost(rank.number)

    def say(self, line: str) -> None:
        with suppress(OSError):  # nobody listens to standard error any more
            os.write(2, f"hpcpar: {line}\n".encode())

    def end(self) -> None:
        """End the ranks of this node, now with TERM and soon with KILL, and have those of others ended."""
        if self.ending:
            return
        self.ending = True
        self.close_door()
        self.kill_at = time.monotonic() + self.kill_grace_s
        self.signal_all(signal.SIGTERM)
        self.end_elsewhere()

    def moment(self) -> str:
        """Format the time of day for jobs of several nodes, whose sentinels cannot know which was first."""
        if self.nodes == 1:
            return ""
        now = time.time()
        return f" (at {time.strftime('%H:%M:%S', time.localtime(now))}.{int(now * 1000) % 1000:03d})"

    def leave_word(self, what: str, rank: int, line: str) -> None:
        if not os.path.isdir(self.run_directory):
            return
        try:
            path = os.path.join(self.run_directory, f"{what}-{self.host}-{rank}")
            with open(path, "w", encoding="utf-8") as file:  # whatever the locale: it may quote anything
                file.write(line + "\n")
        except OSError as error:
            self.say(f"cannot leave word in {self.run_directory}: {error}")

    def act_on_time(self) -> None:
        now = time.monotonic()
        if now >= self.join_deadline or not (self.members() or exists(self.starter)):
            self.close_door()
        self.judge.act_on_time(now)
        if self.kill_at is not None and now >= self.kill_at:
            self.kill_at, self.leave_at = float("inf"), now + self.kill_grace_s
            self.signal_all(signal.SIGKILL)

    def close_door(self) -> None:
        if self.listener is None:
            return
        self.epoll.unregister(self.listener.fileno())
        self.listener.close()
        self.listener = None

    def signal_all(self, number: int) -> None:
        for rank in self.members():
            rank.signal(number)

    def end_elsewhere(self) -> None:
        """Ask the launcher to end the job on other nodes, where it would not by itself (plain srun)."""
        if not self.end_command:
            return
        quiet = [(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_RDWR, 0) for descriptor in (0, 1, 2)]
        with suppress(OSError):  # failing that, the ranks of other nodes end by their own time limit
            os.posix_spawn(self.end_command[0], self.end_command, dict(os.environ), file_actions=quiet)


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user of the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


def open_pidfd(pid: int) -> int:
    """Open a descriptor that becomes readable when the process ends; -1 where there is none to have."""
    try:
        return os.pidfd_open(pid) if pid > 0 else -1
    except (AttributeError, OSError):
        return -1


def ending_signal(pid: int, pidfd: int) -> int:
    """Return the signal that has ended a process; 0 where it ended by itself, or nobody can tell.

    Its parent may reap it at any moment; from then on only a pidfd tells, and only since Linux 6.15.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[EXIT_CODE_FIELD]) & 0x7F
    except (OSError, ValueError, IndexError):
        if pidfd < 0:
            return 0
    import fcntl  # here, for most sentinels never need it

    info = bytearray(struct.pack("=Q", PIDFD_INFO_EXIT).ljust(PIDFD_INFO_NBYTES, b"\0"))
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, info)
    except OSError:
        return 0
    known, *_, status = struct.unpack("=Q52xi", info)
    return int(status & 0x7F) if known & PIDFD_INFO_EXIT else 0


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def watching_file(order: dict[str, Any]) -> str:
    """Return the file that exists while a sentinel may still speak: `hpcpar run` waits for its removal."""
    directory = str(order["run_directory"] or "")
    return (
        os.path.join(directory, f"watching-{order['host']}-{os.getpid()}") if os.path.isdir(directory) else ""
    )


def main() -> None:
    order = json.loads(sys.stdin.readline())
    starter = os.getppid()
    listener = socket.socket(fileno=int(sys.argv[1]))
    if os.fork():
        os._exit(0)  # the rank that started us waits for this, and has no child to look after then
    os.chdir("/")  # hold no file system that someone may want to unmount
    mark = watching_file(order)
    try:
        if mark:
            with open(mark, "w"):
                pass
        sentinel = Sentinel(order, listener, starter)
        sentinel.watch()
    finally:
        if mark:
            os.unlink(mark)


if __name__ == "__main__":
    main()
