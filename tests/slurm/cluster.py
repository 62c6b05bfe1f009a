"""A real Slurm on this one machine: munged, slurmctld and a slurmd for each node, on 127.0.0.1 only.

Every node is a `Machine` of its own, and so is "head", where the controller and our commands run.
By hand, with a shell on the head or with one command, and gone after it:

    python -m tests.slurm.cluster
    python -m tests.slurm.cluster srun --mpi=pmix -N2 -n4 python examples/train.py 10
"""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.slurm import configuration
from tests.slurm.job import Job
from tests.slurm.machine import FLAGS, Machine

START_TIMEOUT_S = 30.0

COMMANDS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "unshare", "nsenter", "setpriv", "mount")
PACKAGES = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge libpmix2"

# A launcher's or a job's variables, which would tell what we start that it is a rank already.
LEFTOVERS = re.compile(r"SLURM_|SBATCH_|SALLOC_|PMI_|PMIX_|PALS_|OMPI_COMM_WORLD_|MPI_LOCAL|TORCHELASTIC_")

# Below the ports that the system gives to outgoing connections. A cluster takes a whole block.
PORTS = range(10_000, 32_000, 400)


class ClusterError(Exception):
    """The cluster did not come up, or did not do what was asked; says what its logs say."""


def obstacle() -> str | None:
    """Say why no cluster can be brought up on this machine; None where one can."""
    missing = [command for command in COMMANDS if shutil.which(command, path=_path(os.environ)) is None]
    if missing:
        return f"{', '.join(missing)} not installed ({PACKAGES})"
    if os.geteuid() != 0:
        return "only root may start a slurmd for each node"
    probe = "mount -t tmpfs tmpfs /dev/shm && hostname probe && mount --bind /dev/null /etc/hosts"
    tried = subprocess.run(["unshare", *FLAGS, "sh", "-c", probe], capture_output=True, text=True, timeout=20)
    if tried.returncode:
        return f"the system allows no namespaces of our own ({tried.stderr.strip().splitlines()[-1]})"
    return None


class Cluster:
    """A running Slurm; `Cluster.start()` brings one up, `stop()` or the end of a `with` takes it down.

    environ      environment for commands: SLURM_CONF, and this Python's directory first in PATH
    node_names   without the head
    state        directory that all machines see; `state/disk` is a disk of each machine's own,
                 `state/work` where jobs run and write if not told otherwise
    """

    def __init__(self, state: Path, ports: dict[str, int], claim: socket.socket) -> None:
        self.state, self.environ = state, _environ(state)
        self.node_names = tuple(name for name in ports if name != "head")
        self._ports, self._claim = ports, claim
        self._machines: dict[str, Machine] = {}

    @classmethod
    def start(
        cls,
        nodes: int | Sequence[str] = 4,
        cpus: int = 4,
        gpus: int = 2,
        settings: Mapping[str, str] | None = None,
    ) -> Cluster:
        """Idle nodes with that many CPUs and fake GPUs each.

        nodes      how many, called "node1", "node2", ...; or their names
        settings   further lines of slurm.conf, as {"SlurmdTimeout": "20"}
        errors     ClusterError with the logs where they are not idle within 30 s
        """
        claim, first = _claim_ports()
        names = ("head", *([f"node{i + 1}" for i in range(nodes)] if isinstance(nodes, int) else nodes))
        ports = {name: first + i for i, name in enumerate(names)}
        state = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: names of sockets may not be long
        cluster = cls(state, ports, claim)
        try:
            state.chmod(0o755)
            configuration.write(state, ports, cpus, gpus, settings or {})
            for name in names:
                cluster._boot(name)
            cluster._wait_until_idle(cluster.node_names, START_TIMEOUT_S)
        except BaseException:
            cluster.stop()
            raise
        return cluster

    def stop(self) -> None:
        """Every process of the cluster is gone when this returns, and so are its files."""
        for machine in reversed(self._machines.values()):
            machine.end()
        self._claim.close()
        shutil.rmtree(self.state, ignore_errors=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- commands and jobs

    def command(self, *argv: str, directory: Path | str | None = None) -> list[str]:
        """The words that run `argv` on the head, for subprocess; to be used with `environ`."""
        return self._machines["head"].command(argv, Path(directory or self.state / "work"))

    def run(
        self, *argv: str, timeout_s: float = 60, directory: Path | str | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the head with `variables` added to its environment.

        errors   subprocess.TimeoutExpired; the command and what it started are killed
        """
        return subprocess.run(
            self.command(*argv, directory=directory),
            env=self.environ | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def submit(self, *words: str, directory: Path | str | None = None, **variables: str) -> Job:
        """sbatch; the job's working directory is `directory`."""
        done = self.run("sbatch", "--parsable", *words, timeout_s=60, directory=directory, **variables)
        if done.returncode:
            raise ClusterError(
                f"sbatch {' '.join(words)}: exit code {done.returncode}: {done.stderr.strip()}"
            )
        return Job(self, done.stdout.strip().partition(";")[0])

    def sbatch(
        self, *words: str, timeout_s: float = 120, directory: Path | str | None = None, **variables: str
    ) -> Job:
        """sbatch, and wait for the end of the job."""
        return self.submit(*words, directory=directory, **variables).wait(timeout_s)

    def wait_for(self, job: Job, state: str, timeout_s: float = 60) -> None:
        """Until the job is in this state, like "RUNNING"."""
        wait_until(
            lambda: job.state() == state, timeout_s, lambda: f"job {job.id} is {job.state()}, not {state}"
        )

    def clear(self, timeout_s: float = 30) -> None:
        """Cancel all jobs, and wait until all nodes are idle."""
        if self.run("squeue", "--noheader").stdout:
            self.run("scancel", "--user=root")
        self._wait_until_idle(self.node_names, timeout_s)

    def logs(self, lines: int = 5) -> str:
        """The last lines of every log."""
        return "\n".join(
            f"{log.parent.name}: {line}"
            for log in sorted(self.state.glob("*/log"))
            for line in log.read_text("utf-8", "replace").splitlines()[-lines:]
        )

    def _boot(self, name: str) -> None:
        conf = f"{self.state}/slurm.conf"
        if name == "head":
            munge = f"--key-file={self.state}/munge.key --socket={self.state}/munge.socket"
            files = f"--pid-file={self.state}/head/munged.pid --seed-file={self.state}/head/munge.seed"
            daemons = [
                f"munged --foreground --force {munge} {files} --log-file={self.state}/head/log",
                f"slurmctld -D -i -f {conf}",
            ]
        else:
            daemons = [f"slurmd -D -N {name} -f {conf}"]
        self._machines[name] = Machine(
            name,
            self.state,
            daemons,
            mounts=configuration.mounts(self.state),
            environ=self.environ,
            # Where we are killed, nobody else removes the files. The nodes are about to end as well.
            farewell=f"umount {self.state}/disk; sleep 0.2; rm -rf {self.state}" if name == "head" else "",
        )

    def _wait_until_idle(self, names: Sequence[str], timeout_s: float) -> None:
        wanted = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(names)}", "--format=%N %T"]
        found = ""

        def idle() -> bool:
            nonlocal found
            done = self.run(*wanted, timeout_s=timeout_s)
            found = done.stdout + done.stderr
            return done.stdout.split("\n")[:-1] == [f"{name} idle" for name in names]

        wait_until(idle, timeout_s, lambda: f"{', '.join(names)} should be idle: {found}\n{self.logs()}")


def wait_until(done: Callable[[], bool], timeout_s: float, story: Callable[[], str]) -> None:
    """Ask `done` ten times a second; ClusterError with the `story` when the time is over."""
    end = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > end:
            raise ClusterError(f"after {timeout_s:g} s: {story()}")
        time.sleep(0.1)


def _path(environ: Mapping[str, str]) -> str:
    """PATH with this Python's programs first, and with the daemons' places."""
    return os.pathsep.join((str(Path(sys.executable).parent), environ.get("PATH", ""), "/usr/sbin", "/sbin"))


def _environ(state: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not LEFTOVERS.match(name)}
    return kept | {
        "PATH": _path(os.environ),
        "SLURM_CONF": str(state / "slurm.conf"),
        # The cluster's only user is root, whom Open MPI's launcher refuses otherwise.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def _claim_ports() -> tuple[socket.socket, int]:
    """(claim, first port) of a block that is ours as long as the claim is open: its last port."""
    for first in random.sample(PORTS, len(PORTS)):
        try:
            claim = socket.create_server(("127.0.0.1", first + PORTS.step - 1))
        except OSError:
            continue
        if not any(_listens(port) for port in range(first, first + 32)):
            return claim, first
        claim.close()
    raise ClusterError(f"no free block of {PORTS.step} ports between {PORTS.start} and {PORTS.stop}")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    with Cluster.start() as by_hand:
        words = sys.argv[1:] or [os.environ.get("SHELL", "/bin/sh")]
        done = subprocess.run(by_hand.command(*words, directory=Path.cwd()), env=by_hand.environ, check=False)
    raise SystemExit(done.returncode)
