"""A rank's side of the sentinel: start it, join it, tell it how this rank ends.

    address = start(local_size=4)         # local rank 0; send the address to the node's other ranks
    guard = Guard.connect(address, rank=2)  # every rank
    ...
    guard.done()                          # the rank has finished its work
    guard.aborting("ValueError: …")       # or is about to end the job on purpose

Nothing here raises into the job: without a sentinel the job runs on, unwatched, with a warning.
`hpcpar.launch.sentinel_process` is the sentinel's own program.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hpcpar.launch import sentinel_process

_log = logging.getLogger("hpcpar.launch")

START_LIMIT_S = 60.0


def start(
    *,
    local_size: int,
    nodes: int = 1,
    run_directory: str | None = None,
    host: str | None = None,
    end_command: Sequence[str] = (),
    join_limit_s: float = sentinel_process.JOIN_LIMIT_S,
    abort_grace_s: float = sentinel_process.ABORT_GRACE_S,
    kill_grace_s: float = sentinel_process.KILL_GRACE_S,
) -> str:
    """Start this node's sentinel; call it on local rank 0 only. Returns its address, "" if it cannot be had.

    local_size     ranks that will join, this one too; late ones may take `join_limit_s`
    nodes          nodes of the job; with several each line says when, for the earliest names the cause
    run_directory  where to leave `lost-<host>-<rank>`
    end_command    run once after a loss, to end ranks on other nodes (see `end_command_for`)

    The sentinel needs no looking after: it leaves when its last rank has gone.
    """
    try:
        if sys.platform != "linux":
            raise OSError("it needs Linux")
        name = f"\0hpcpar-{secrets.token_hex(8)}"  # an abstract name, which leaves no file behind
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with listener:
            listener.bind(name)
            listener.listen(max(128, local_size))
            token = secrets.token_hex(16)
            order = {
                "token": token,
                "host": host or socket.gethostname(),
                "local_size": local_size,
                "nodes": nodes,
                "run_directory": os.path.abspath(run_directory) if run_directory else None,
                "end_command": list(end_command),
                "join_limit_s": join_limit_s,
                "abort_grace_s": abort_grace_s,
                "kill_grace_s": kill_grace_s,
            }
            start_daemon(sentinel_process.__file__, json.dumps(order), listener)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        _log.warning("no sentinel on this node (%s): the job runs, but a lost rank will not be named", error)
        return ""
    return json.dumps([name, token])


def start_daemon(script: str, order: str, listener: socket.socket, without: Sequence[str] = ()) -> None:
    """Start a small process beside the ranks: the sentinel of a node, or the PMI-1 server of a step.

    It outlives the rank that starts it, is nobody's child, and has a session of its own, so that what ends
    the ranks does not end it. Waits for the script's first process; the one that it forks stays. It runs in
    an isolated interpreter without site packages.

    order      goes through standard input, for a command line can be read by other users
    listener   a socket that it inherits; its number is the script's argument
    without    variables that it shall not see
    errors     OSError or subprocess.SubprocessError where it cannot be started
    """
    process = subprocess.run(
        [sys.executable, "-I", "-S", script, str(listener.fileno())],
        input=order + "\n",
        text=True,
        stdout=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", *without)},
        pass_fds=(listener.fileno(),),
        start_new_session=True,
        timeout=START_LIMIT_S,
        check=False,
    )
    if process.returncode != 0:
        name = os.path.basename(script)
        raise OSError(f"{sys.executable} ended with status {process.returncode} when it was to start {name}")


def end_command_for(launcher: str, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the command that ends a job's ranks on other nodes, where the launcher would leave them hanging.

    `srun` without `--kill-on-bad-exit` does; every mpiexec ends its job by itself.
    """
    if launcher != "slurm" or "SLURM_JOB_ID" not in environ or "SLURM_STEP_ID" not in environ:
        return ()
    scancel = shutil.which("scancel", path=environ.get("PATH"))
    return (scancel, f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}") if scancel else ()


class Guard:
    """Connection of this rank to its sentinel; one without a connection does nothing.

    Keep it for as long as the rank works: a Guard that is dropped closes its connection, which the
    sentinel takes for the rank's death.
    """

    def __init__(self, connection: socket.socket | None = None) -> None:
        self._connection = connection
        if connection is not None:
            # A forked child (a data loader's worker) would hold the connection open
            # beyond its rank's death.
            reference = weakref.ref(self)
            os.register_at_fork(after_in_child=lambda: _let_go(reference()))

    @classmethod
    def connect(cls, address: str | None, *, rank: int) -> Guard:
        """Join the sentinel at `address` as `rank` of the world; "" gives a Guard that does nothing."""
        if not address:
            return cls()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            name, token = json.loads(address)
            connection.settimeout(30.0)
            connection.connect(name)
            greeting = {"rank": rank, "pid": os.getpid(), "token": token}
            connection.sendall(json.dumps(greeting).encode() + b"\n")
            if connection.recv(3) != b"ok\n":
                raise ConnectionError("it refused this rank")
        except (OSError, ValueError, TypeError) as error:
            connection.close()
            _log.warning(
                "rank %d cannot join its node's sentinel (%s): its loss would not be named", rank, error
            )
            return cls()
        return cls(connection)

    @property
    def connected(self) -> bool:
        return self._connection is not None

    def done(self) -> None:
        """Tell the sentinel that this rank has finished: its end from here on is no loss.

        Returns when the sentinel knows: once a node's ranks have ended, a launcher kills what is left.
        """
        self._say("done")
        if self._connection is not None:
            with suppress(OSError):
                self._connection.recv(3)

    def aborting(self, message: str) -> None:
        """Tell the sentinel that this rank ends the job and has said why itself: it shall be silent."""
        self._say(f"aborting: {' '.join(message.split())[:2000]}")

    def _say(self, line: str) -> None:
        if self._connection is not None:
            # A sentinel that does not answer any more must not stop a rank from ending.
            with suppress(OSError):
                self._connection.settimeout(1.0)
                self._connection.sendall(line.encode("utf-8", "replace") + b"\n")

    def close(self) -> None:
        """Leave the sentinel; without `done()` before it, that is a loss."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _let_go(guard: Guard | None) -> None:
    if guard is not None:
        guard.close()
