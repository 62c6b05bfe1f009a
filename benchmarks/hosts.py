"""Several hosts on one machine: network namespaces on a bridge, with links that are held to a rate.

                    switch: bridge, 10.77.0.254
            ┌────────────┼────────────┐           every link: veth, a token bucket at both ends
          host1        host2        host3         10.77.0.1, .2, .3

Each host has its own network stack, hostname, processes, System V IPC, /dev/shm, /etc/hosts and boot id,
so that an MPI library takes them for nodes that share nothing and speaks TCP between them. Nothing is
made in the machine's own network: all belongs to a few processes that end with their standard input, and
so with the program that started them, however that ends.

Needs root, and the commands of util-linux and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

COMMANDS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "tc": "iproute2"}
NETWORK = "10.77.0.0/24"
SWITCH = "switch"
PORT = "eth0"
"""The network interface of a host."""

STOP_S = 5.0

ENTER = """\
#!/bin/sh
# Run a command on a host. Hydra starts its proxies with this in place of ssh: {script} [-x] host command ...
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
of=/proc/$(cat {directory}/$host.pid)/ns
[ $host = {switch} ] || processes=--pid=$of/pid_for_children
exec nsenter --net=$of/net --uts=$of/uts --ipc=$of/ipc --mount=$of/mnt $processes sh -c "$*"
"""


class HostsError(RuntimeError):
    """The hosts cannot be made here."""


@dataclass(frozen=True)
class Link:
    """How each host hangs on the switch.

    rate         as `tc` has it
    burst        bytes that may pass at once
    latency      how long a packet may wait for its turn, before it is dropped
    mtu_nbytes   largest packet
    congestion   TCP's congestion control; BBR, for one, halts for 200 ms every 10 s to look at the latency
    """

    rate: str = "1gbit"
    burst: str = "128kb"
    latency: str = "20ms"
    mtu_nbytes: int = 1500
    congestion: str = "cubic"


@dataclass(frozen=True)
class Hosts:
    """Hosts that are up.

    names   by which they find each other
    enter   a program that runs a command on one of them: `enter host command ...`
    """

    names: tuple[str, ...]
    enter: Path

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command that runs these words on the switch, from where a launcher reaches all hosts."""
        return [str(self.enter), SWITCH, f"exec {shlex.join(words)}"]


def missing() -> str:
    """Return why hosts cannot be made here; empty when they can."""
    absent = [
        f"{command} (of {package})" for command, package in COMMANDS.items() if not shutil.which(command)
    ]
    if absent:
        packages = sorted({COMMANDS[name.split()[0]] for name in absent})
        return f"needs {', '.join(absent)}; try apt-get install {' '.join(packages)}"
    if os.geteuid() != 0:
        return f"making network namespaces needs root, but this is user {os.geteuid()}; start it with sudo"
    return ""


@contextlib.contextmanager
def hosts(count: int, link: Link = Link()) -> Iterator[Hosts]:
    """Bring up `count` hosts and the switch; take them down at the end, and all that runs on them.

    errors   HostsError that says what is missing, or which command failed
    """
    reason = missing()
    if reason:
        raise HostsError(f"cannot make {count} hosts: {reason}")
    names = tuple(f"host{number}" for number in range(1, count + 1))
    directory = Path(tempfile.mkdtemp(prefix="hosts-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        stack.enter_context(_terminated_is_interrupted())
        table = [f"{address(number)} {name}" for number, name in enumerate((SWITCH, *names))]
        (directory / "hosts").write_text("\n".join(["127.0.0.1 localhost", *table, ""]), encoding="ascii")
        holders = {name: stack.enter_context(_held(name, directory)).pid for name in (SWITCH, *names)}
        for name, holder in holders.items():
            (directory / f"{name}.pid").write_text(str(holder), encoding="ascii")
        _connect(holders, link)
        enter = directory / "enter"
        enter.write_text(ENTER.format(script=enter, directory=directory, switch=SWITCH), encoding="ascii")
        enter.chmod(0o755)
        yield Hosts(names, enter)


def address(number: int) -> str:
    """Return the address of a host, counted from 1; 0 is the switch."""
    return f"10.77.0.{number or 254}"


@contextlib.contextmanager
def _held(name: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in namespaces of its own, which waits for the end of its input.

    It is the first process there, so that all others in its namespaces are killed when it ends.
    """
    setup = f"""
        set -e
        hostname {name}
        mount --bind {directory}/hosts /etc/hosts
        mount -t tmpfs -o mode=1777 tmpfs /dev/shm
        cat /proc/sys/kernel/random/uuid > {directory}/{name}.boot_id
        mount --bind {directory}/{name}.boot_id /proc/sys/kernel/random/boot_id
        ip link set lo up
        echo up
        exec cat
    """
    flags = ["--net", "--uts", "--ipc", "--mount", "--propagation=private"]
    if name != SWITCH:  # a launcher on the switch needs to see all processes, to enter the hosts
        flags += ["--pid", "--fork", "--mount-proc", "--kill-child"]
    # A session of its own: Ctrl-C is for the program, which then takes the hosts down in order.
    holder = subprocess.Popen(
        ["unshare", *flags, "sh", "-c", setup],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert holder.stdin
    assert holder.stdout
    assert holder.stderr
    try:
        if holder.stdout.readline() != "up\n":
            holder.stdin.close()
            raise HostsError(f"cannot make {name}: {holder.stderr.read().strip() or 'no word of why'}")
        yield holder
    finally:
        holder.stdin.close()
        try:
            holder.wait(STOP_S)
        except subprocess.TimeoutExpired:
            holder.kill()
            holder.wait()


@contextlib.contextmanager
def _terminated_is_interrupted() -> Iterator[None]:
    """SIGTERM and SIGHUP end the program as Ctrl-C does: through what is to be done at the end."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _connect(holders: dict[str, int], link: Link) -> None:
    """The bridge on the switch, and to each host a cable with a token bucket at both ends.

    holders   the process that holds each one's namespaces, the switch first
    """
    bucket = f"root tbf rate {link.rate} burst {link.burst} latency {link.latency}"
    _run(holders[SWITCH], "ip link add bridge type bridge")
    _run(holders[SWITCH], f"ip link set bridge mtu {link.mtu_nbytes} up")
    _run(holders[SWITCH], f"ip addr add {address(0)}/24 dev bridge")
    for number, (name, holder) in enumerate(holders.items()):
        if name == SWITCH:
            continue
        _run(holders[SWITCH], f"ip link add {name} type veth peer name {PORT} netns {holder}")
        _run(holders[SWITCH], f"ip link set {name} mtu {link.mtu_nbytes} master bridge up")
        _run(holders[SWITCH], f"tc qdisc add dev {name} {bucket}")
        _run(holder, f"ip addr add {address(number)}/24 dev {PORT}")
        _run(holder, f"ip link set {PORT} mtu {link.mtu_nbytes} up")
        _run(holder, f"ip route replace {NETWORK} dev {PORT} congctl {link.congestion}")
        _run(holder, f"tc qdisc add dev {PORT} {bucket}")


def _run(holder: int, command: str) -> None:
    words = ["nsenter", f"--net=/proc/{holder}/ns/net", *command.split()]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise HostsError(f"{command!r} failed: {done.stderr.strip() or f'status {done.returncode}'}")
