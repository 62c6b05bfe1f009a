"""`horovod.run`: call a function on every rank of a job that is started for it.

    results = run(train, args=(config,), np=4)      # what each rank's call returned, by rank

The caller keeps a server: each rank fetches the function there and brings back what it returned or
raised. Ranks on this host reach it by a socket in the file system that only this user may open,
ranks on other hosts by TCP; either way they prove first that they know the job's token.
"""

from __future__ import annotations

import logging
import os
import pickle
import secrets
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from hpcpar.errors import ConfigError, PeerFailedError
from hpcpar.horovod import alias
from hpcpar.horovod.util import in_thread
from hpcpar.launch import ray_task, supervise
from hpcpar.launch.allocation import has_several_hosts
from hpcpar.launch.environment import detect
from hpcpar.launch.horovod_settings import start_limit_s
from hpcpar.launch.hosts import Host, parse_hosts, read_hostfile, ssh_variables
from hpcpar.launch.launch_command import LaunchOptions
from hpcpar.launch.settings import TOKEN, run_directory, take_token

Address = str | tuple[str, int]

log = logging.getLogger("hpcpar")

TALK_LIMIT_S = 10.0
"""Limit for a rank that has ended while something that it started still holds its connection."""


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call `func(*args, **kwargs)` on num_proc new ranks; what each returned, by rank.

    num_proc           ranks (np: its older name)
    hosts, hostfile    where: "host1:2,host2:2", or a file of such; default: where the launcher puts them
    start_timeout      seconds that srun may wait for its nodes; default: HOROVOD_START_TIMEOUT
    ssh_port, ssh_identity_file   for mpiexec's connections to other hosts
    output_filename    directory for files with each rank's output
    verbose            show the command that starts the job
    mpi_args           more words for mpiexec or srun, in one string
    network_interfaces for MPI's traffic: ["eth0", "eth1"] (network_interface: its older name, "eth0,eth1")
    executable         the ranks' Python (default: this one)
    max_num_proc       at least num_proc; a job of this kind keeps its number of ranks
    min_num_proc, host_discovery_script   ask for an elastic job, and are refused
    slots, reset_limit, cooldown_range    of an elastic job; nothing without one, as in Horovod
    disable_cache, use_mpi, use_gloo      nothing: MPI carries all of it, and no checks are remembered
    errors   PeerFailedError names the rank that raised, with its traceback, from its exception
             where that can be pickled; or says that the job ended before all had returned
             KeyboardInterrupt where Ctrl-C, or `ray.cancel`, has ended the job
             ConfigError for arguments that make no sense

    The function, its arguments and its results travel by cloudpickle (`pip install hpcpar[horovod]`).
    Ranks end with this process, however it ends. In a Ray task they stay on its node, share its cores and its
    OMP_NUM_THREADS, and are bound to no cores, so that tasks of a node can train at once.
    """
    if use_gloo and use_mpi:
        raise ConfigError("both use_gloo and use_mpi were given: leave both out, MPI carries all of it here")
    size = _renamed("num_proc", num_proc, np, default=1)
    elastic = {
        "min_num_proc": _renamed("min_num_proc", min_num_proc, min_np),
        "host_discovery_script": host_discovery_script,
    }
    _require_fixed(size, elastic, _renamed("max_num_proc", max_num_proc, max_np))
    places = _places(hosts, hostfile)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        log.log(logging.WARNING if verbose else logging.INFO, line)

    token = secrets.token_hex(32)
    options = LaunchOptions(
        hosts=places,
        interfaces=_interfaces(network_interface, network_interfaces),
        start_limit_s=start_limit_s() if start_timeout is None else start_timeout,
        output_directory=output_filename,
        words=tuple(shlex.split(mpi_args or "")),
        variables={TOKEN: token, **ssh_variables(ssh_port, ssh_identity_file)},
    )
    call = _cloudpickle().dumps((func, tuple(args), kwargs or {}))
    job = pickle.dumps((sys.path, alias.installed(), call))
    with tempfile.TemporaryDirectory(prefix="hpcpar-server-") as directory:
        server = RpcServer(_server_address(places, directory), token.encode(), job)
        command = [executable or sys.executable, "-m", "hpcpar.horovod.runner", *server.words()]
        try:
            status = supervise.run(size, command, options, say=say)
        finally:
            server.close()
    return _results(server, size, status, said)


class RpcServer:
    """A server from which ranks fetch the job and to which they return results.

    failures   by rank what `_account` tells of its exception
    """

    def __init__(self, address: Address, token: bytes, job: bytes) -> None:
        self._token = token
        self._job = job
        self._listener = Listener(address, backlog=1024, authkey=token)
        self._closed = False
        self._talks: list[threading.Thread] = []
        self.returned: dict[int, bytes] = {}
        self.failures: list[tuple[int, tuple[str, str, str, bytes | None]]] = []
        self._thread = in_thread(self._serve, name="hpcpar horovod.run")

    def words(self) -> list[str]:
        """Return the address as words of a command: a path, or a host and a port."""
        address = self._listener.address
        return [address] if isinstance(address, str) else [socket.gethostname(), str(address[1])]

    def _serve(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except (AuthenticationError, ConnectionError, EOFError):
                continue  # a stranger, or somebody who left at once
            self._talks.append(in_thread(self._talk, (connection,)))

    def _talk(self, connection: Connection) -> None:
        with connection, suppress(EOFError, OSError):  # a rank that is lost is found missing in the end
            rank = connection.recv()
            if rank is None:
                return
            connection.send_bytes(self._job)
            kind, answer = connection.recv()
            if kind == "returned":
                self.returned[rank] = answer
            else:
                self.failures.append((rank, answer))

    def close(self) -> None:
        """Stop listening; all that was brought has been read afterwards."""
        self._closed = True
        with suppress(OSError, EOFError), Client(self._listener.address, authkey=self._token) as connection:
            connection.send(None)  # so that it looks up
        self._thread.join()
        for talk in self._talks:
            talk.join(TALK_LIMIT_S)
        self._listener.close()


def _renamed(name: str, value: Any, older: Any, default: Any = None) -> Any:
    """Return the value of an argument that may come under its older name."""
    if older is None:
        return value
    was = name.replace("num_proc", "np")
    warnings.warn(f"`{was}` is the older spelling: give `{name}`", DeprecationWarning, stacklevel=3)
    if value not in (default, older):
        raise ConfigError(f"both {name}={value} and {was}={older} were given: give {name} alone")
    return older


def _require_fixed(size: int, elastic: dict[str, Any], most: int | None) -> None:
    """ConfigError where the number of ranks is to change."""
    asked = ", ".join(name for name, value in elastic.items() if value is not None)
    if asked:
        raise ConfigError(
            f"{asked}: run() starts a job of a fixed number of ranks (num_proc); for elastic "
            f"training see hpcpar.horovod.torch.elastic"
        )
    if most is not None and most < size:
        raise ConfigError(f"max_num_proc={most}, but num_proc={size}: give num_proc alone")


def _interfaces(older: str | None, names: str | Sequence[str] | None) -> tuple[str, ...]:
    if older is not None:
        warnings.warn(
            "`network_interface` is the older spelling: give `network_interfaces`, a list",
            DeprecationWarning,
            stacklevel=3,
        )
        names = older if names is None else names
    listed = names.split(",") if isinstance(names, str) else names or ()
    return tuple(dict.fromkeys(name for name in listed if name))


def _places(hosts: str | None, hostfile: str | None) -> tuple[Host, ...]:
    if hosts is not None and hostfile is not None:
        raise ConfigError("both hosts and hostfile were given: give one of them")
    if hostfile is not None:
        return read_hostfile(hostfile)
    return parse_hosts(hosts) if hosts is not None else ()


def _server_address(places: Sequence[Host], directory: str) -> Address:
    """Return a socket path where all ranks are on this host, else any free port."""
    away = not all(ray_task.is_this_host(host.name) for host in places)
    if not places and not ray_task.stays_here():
        away = has_several_hosts()
    return ("", 0) if away else os.path.join(directory, "server")


def _cloudpickle() -> Any:
    try:
        return import_module("cloudpickle")
    except ImportError as error:
        raise ConfigError("horovod.run needs cloudpickle: `pip install hpcpar[horovod]`") from error


def _results(server: RpcServer, size: int, status: int, said: Sequence[str]) -> list[Any]:
    missing = [rank for rank in range(size) if rank not in server.returned]
    if missing and status == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if server.failures:
        rank, (host, name, text, pickled) = server.failures[0]
        cause = None
        with suppress(Exception):  # an exception whose class is not known here
            cause = pickle.loads(pickled) if pickled else None
        raise PeerFailedError(
            f"rank {rank} of {size} (on {host}) raised {name}; its traceback:\n{text}"
        ) from cause
    if missing or status:
        listed = ", ".join(map(str, missing)) or "none"
        words = "\n".join(said)
        raise PeerFailedError(
            f"the job of {size} ranks ended with status {status}; did not return: {listed}\n{words}"
        )
    return [pickle.loads(server.returned[rank]) for rank in range(size)]


def serve_rank(words: Sequence[str]) -> None:
    """Run on a rank: fetch the job from the server that the words name, and return its result."""
    address: Address = words[0] if len(words) == 1 else (words[0], int(words[1]))
    with Client(address, authkey=take_token().encode()) as server:
        server.send(detect().rank)
        path, aliased, pickled = pickle.loads(server.recv_bytes())
        has_result = threading.Event()
        in_thread(_end_with_caller, (server, has_result, words[0]), name="hpcpar caller's end")
        sys.path[:] = path
        if aliased:
            alias.install()
        try:
            function, args, kwargs = pickle.loads(pickled)
            value = _cloudpickle().dumps(function(*args, **kwargs))
        except BaseException as error:
            has_result.set()
            server.send(("failed", _account(error)))
            raise
        has_result.set()
        server.send(("returned", value))


def _end_with_caller(server: Connection, has_result: threading.Event, place: str) -> None:
    """End this rank when the process that called `run` goes without waiting for it, as one that is killed.

    place   the server's socket, if it is a path: the caller can no longer remove its directory and the run's
    """
    with suppress(EOFError, OSError):
        server.recv_bytes()  # nothing more is sent, so this lasts until the connection is closed
    if has_result.is_set():
        return
    for directory in (run_directory(), os.path.dirname(place)):
        if directory:
            shutil.rmtree(directory, ignore_errors=True)
    with suppress(OSError):
        os.write(2, b"hpcpar: the process that called horovod.run has gone, so this rank ends\n")
    os._exit(1)


def _account(error: BaseException) -> tuple[str, str, str, bytes | None]:
    """Host, name, traceback and, where it can be pickled, the exception itself."""
    pickled = None
    with suppress(Exception):
        pickled = _cloudpickle().dumps(error)
    text = "".join(traceback.format_exception(error))
    return socket.gethostname(), f"{type(error).__name__}: {error}", text, pickled


if __name__ == "__main__":
    serve_rank(sys.argv[1:])
