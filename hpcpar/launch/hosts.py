"""Hosts of a job: lists as users write them, words as launchers want them.

source   the manuals of Slurm's srun, MPICH's Hydra, Intel MPI and Open MPI
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcpar.errors import ConfigError
from hpcpar.launch.slurm import host_names

_ENTRY = re.compile(r"(?P<name>[^\s:]+)(?::(?P<slots>\d+))?")
_SLOTS = re.compile(r"\bslots\s*=\s*(?P<slots>\d+)")
_MOST_SLOTS = re.compile(r"\bmax[-_]slots\s*=\s*\d+")
_OUTSIDE_BRACKETS = re.compile(r",(?![^\[]*\])")

_VERSIONS = {"intel": r"Intel\(R\) MPI", "mpich": "HYDRA", "openmpi": "Open MPI|OpenRTE|PRRTE"}


@dataclass(frozen=True, slots=True)
class Host:
    """Host with the number of ranks that may run there."""

    name: str
    slots: int


@dataclass(frozen=True, slots=True)
class HostOptions:
    """Options, variables and a host file by which a launcher places ranks as asked.

    words       options of the launcher
    variables   of its environment
    file_text   what has to stand in the file that words or variables name; "" where they name none
    """

    words: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    file_text: str = ""


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse hosts and their slots: "node[1-2]:4,login" -> node1 with 4, node2 with 4, login with 1.

    A host that is named twice has the slots of both.
    errors   ConfigError where the text is not of this form
    """
    found: list[Host] = []
    for item in _OUTSIDE_BRACKETS.split(text):
        match = _ENTRY.fullmatch(item.strip())
        if match is None:
            raise ConfigError(
                f"{item.strip()!r} in the hosts {text!r} is not like host, host:4 or host[1-3]:4"
            )
        found += _hosts(match["name"], int(match["slots"] or 1))
    return added_up(found)


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Read hosts from a file, one on a line: `host slots=4` (Horovod, Open MPI), `host:4` (MPICH) or `host`.

    `#` starts a comment; Open MPI's max_slots is passed over. Without a number a host has one slot.
    errors   ConfigError names the line that is not understood
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file of hosts {path} cannot be read: {error}") from error
    found: list[Host] = []
    for number, line in enumerate(lines, start=1):
        entry = line.partition("#")[0].strip()
        if entry:
            found += _line_hosts(entry, f"{path}, line {number}")
    if not found:
        raise ConfigError(f"the file of hosts {path} names none: write lines like `node1 slots=4`")
    return added_up(found)


def _line_hosts(entry: str, where: str) -> list[Host]:
    told = _MOST_SLOTS.sub("", entry)  # first: `max-slots=8` has the word `slots=8` in it
    slots = _SLOTS.search(told)
    rest = _SLOTS.sub("", told).strip()
    match = _ENTRY.fullmatch(rest)
    if match is None or (slots and match["slots"]):
        raise ConfigError(f"{where}: {entry!r} is not like `node1 slots=4`, `node1:4` or `node1`")
    return _hosts(match["name"], int((slots or match)["slots"] or 1))


def _hosts(name: str, slots: int) -> list[Host]:
    if slots < 1:
        raise ConfigError(f"host {name} has {slots} slots: give it at least 1, or leave it out")
    return [Host(each, slots) for each in (host_names(name) if "[" in name else (name,))]


def added_up(hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Merge hosts of one name with all of their slots, in the order of first mention."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, count) for name, count in slots.items())


def place(hosts: Sequence[Host], n: int) -> tuple[Host, ...]:
    """Place n ranks on hosts, filled in their order; leave out a host without any.

    errors   ConfigError where the slots do not suffice
    """
    room = sum(host.slots for host in hosts)
    if n > room:
        listed = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ConfigError(
            f"{n} ranks were asked for, but the hosts have {room} slots ({listed}): "
            f"give them more (host:slots), name more hosts, or start fewer ranks"
        )
    placed: list[Host] = []
    for host in hosts:
        taken = min(host.slots, n)
        if taken:
            placed.append(Host(host.name, taken))
        n -= taken
    return tuple(placed)


def kind_of(version: str) -> str:
    """Recognise a launcher by its version: "mpich" (Hydra), "intel", "openmpi", or "" if not known."""
    return next((kind for kind, mark in _VERSIONS.items() if re.search(mark, version)), "")


def host_options(
    kind: str, placed: Sequence[Host], directory: str, job_nodes: Sequence[str] = ()
) -> HostOptions:
    """Tell a launcher to run so many ranks on each host, the first ones on the first host.

    kind       "srun", "mpich", "intel" or "openmpi"
    directory  where a file of hosts may lie
    job_nodes  those of the Slurm job, in its order
    """
    with_counts = ",".join(f"{host.name}:{host.slots}" for host in placed)
    file = os.path.join(directory, "hosts")
    if kind == "srun":
        return _srun_host_options(placed, file, job_nodes)
    if kind == "mpich":
        return HostOptions(("-hosts", with_counts))
    if kind == "openmpi":
        return HostOptions(("--host", with_counts))
    if kind == "intel":
        return HostOptions(("-machinefile", file), file_text="".join(f"{h.name}:{h.slots}\n" for h in placed))
    raise ConfigError(
        "this mpiexec is of an MPI library that is not known here, so it cannot be told of hosts: "
        'give its own words for them, as in --options="--hosts node1,node2 --ppn 2"'
    )


def _srun_host_options(placed: Sequence[Host], file: str, job_nodes: Sequence[str]) -> HostOptions:
    """Place equal numbers by options; else by a line for each rank, which srun calls arbitrary.

    So it is where hosts are not named in the job's order, in which srun takes those of an option.
    """
    numbers = [job_nodes.index(host.name) for host in placed if host.name in job_nodes]
    if len({host.slots for host in placed}) == 1 and numbers == sorted(numbers):
        names = ",".join(host.name for host in placed)
        tasks = f"--ntasks-per-node={placed[0].slots}"
        return HostOptions((f"--nodelist={names}", f"--nodes={len(placed)}", tasks))
    lines = "".join(f"{host.name}\n" * host.slots for host in placed)
    return HostOptions(("--distribution=arbitrary",), {"SLURM_HOSTFILE": file}, lines)


def ssh_variables(port: int | None, identity_file: str | None) -> dict[str, str]:
    """Return the variables by which each mpiexec calls ssh with a port and a private key, if given.

    source   MPICH's and Intel MPI's Hydra, Open MPI's plm/rsh, PRRTE's plm/ssh. srun needs no ssh
    """
    words = [f"-p {port}"] * (port is not None) + [f"-i {identity_file}"] * (identity_file is not None)
    names = (
        "HYDRA_LAUNCHER_EXTRA_ARGS",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS",
        "OMPI_MCA_plm_rsh_args",
        "PRTE_MCA_plm_ssh_args",
    )
    return dict.fromkeys(names, " ".join(words)) if words else {}


def interface_words(kind: str, interfaces: Sequence[str]) -> tuple[str, ...]:
    """Return the launcher's words for the network interfaces to use; ConfigError where it has none."""
    if not interfaces:
        return ()
    if kind in ("mpich", "intel"):
        if len(interfaces) > 1:
            raise ConfigError(
                f"network interfaces {', '.join(interfaces)}: this mpiexec takes a single one, name it alone"
            )
        return ("-iface", interfaces[0])
    if kind == "openmpi":
        return ("--mca", "btl_tcp_if_include", ",".join(interfaces))
    raise ConfigError(
        f"{'srun' if kind == 'srun' else 'this mpiexec'} has no option for network interfaces: "
        f"set what its MPI reads, for example UCX_NET_DEVICES or FI_TCP_IFACE, or leave the choice to it"
    )
