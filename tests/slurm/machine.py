"""A machine in all but CPU, disk and network: its own name, processes, memory segments and mounts.

A `Machine` lives exactly as long as our end of the pipe to its first process. When we close it, end,
crash or are killed, that process reads the end of its input and ends; it is process 1 of its PID
namespace, so the kernel kills every other process in there with it. Nothing can be left behind.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

END_TIMEOUT_S = 20.0
"""A machine takes some 10 ms to end, if nobody holds on to it."""

FLAGS = ("--uts", "--ipc", "--mount", "--pid", "--propagation=private", "--fork", "--mount-proc")

# boot_id as well: UCX takes two machines with the same one for one machine, and would use shared memory.
FIRST_PROCESS = """
set -e
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
cat /proc/sys/kernel/random/uuid > "$2/$1/boot_id"
mount --bind "$2/$1/boot_id" /proc/sys/kernel/random/boot_id
mount --bind "$2/$1/disk" "$2/disk"
{daemons}
cat > /dev/null        # waits for the pipe's end; and the shell, waiting for cat, buries orphans meanwhile
kill -KILL -1 || true  # all but this process
{farewell}
"""


class Machine:
    """One machine: `daemons` run in it, `command` tells how to run something else in it.

    name       host name
    state      directory that all machines see, with `hosts`, to be mounted over /etc/hosts; this one's own
               directory in there is `state/name`, and `state/disk` is a disk of its own
    daemons    shell commands that stay in the foreground
    mounts     directories of `state` by the place where they are to be seen
    farewell   a shell command to run after everything else in the machine has ended
    """

    def __init__(
        self,
        name: str,
        state: Path,
        daemons: Sequence[str],
        *,
        mounts: Mapping[Path, Path],
        environ: Mapping[str, str],
        farewell: str = "",
    ) -> None:
        self.name, self.log = name, state / name / "log"
        (state / name / "disk").mkdir(parents=True, exist_ok=True)
        binds = [f"mount --bind {shlex.quote(str(source))} {at}" for at, source in mounts.items()]
        script = FIRST_PROCESS.format(
            daemons="\n".join([*binds, *(f"{daemon} &" for daemon in daemons)]), farewell=farewell
        )
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                ["unshare", *FLAGS, "--kill-child=KILL", "sh", "-c", script, name, name, str(state)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=dict(environ),
                start_new_session=True,  # Ctrl-C is for the tests, which then end us in order
            )

    def command(self, argv: Sequence[str], directory: Path) -> list[str]:
        """The words that run `argv` in here; killing the process that they start kills `argv`, too."""
        spaces = f"/proc/{self._process.pid}/ns"
        return [
            "nsenter",
            f"--uts={spaces}/uts",
            f"--ipc={spaces}/ipc",
            f"--mount={spaces}/mnt",
            f"--pid={spaces}/pid_for_children",
            *("setpriv", "--pdeathsig=KILL", "--"),
            *("env", f"--chdir={directory}"),
            *argv,
        ]

    def end(self) -> None:
        """Every process in here is gone when this returns."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its child then gets KILL from the kernel
            self._process.wait(END_TIMEOUT_S)
