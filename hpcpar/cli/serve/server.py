"""A server's process from its start to its end.

    start → healthy → it has answered one request → "ready" → … → SIGTERM → all of its processes are gone

It ends with the process that started it, however that ends.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hpcpar.errors import ConfigError, LaunchError
from hpcpar.launch.processes import PROC, every_process

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE_S = 20.0
"""Time that the server has to end in good order, and GRACE_S for processes that outlive its first one."""

GRACE_S = 5.0
LOOK_S = 0.5
_PR_SET_PDEATHSIG = 1


class Stopped(BaseException):
    """A signal asked this process, and so the server, to end."""


@dataclass(frozen=True)
class Address:
    """The address of a server, the name of its model, and the key that it asks for, if any."""

    host: str
    port: int
    model: str
    key: str | None = None

    @property
    def reached_at(self) -> str:
        """A host name to ask; a server on all interfaces is reached by this host's own name."""
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        return f"[{host}]" if ":" in host else host

    def request(self, path: str, body: Mapping[str, object] | None = None) -> int | None:
        """Ask from this host, past any proxy; return the status, None while nobody listens."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        connection = http.client.HTTPConnection(host, self.port)
        content = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            connection.request("GET" if body is None else "POST", path, content, headers)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def curl(self) -> str:
        """A command that asks for an answer."""
        body = json.dumps({"model": self.model, "prompt": "def main(", "max_tokens": 50})
        key = ' -H "Authorization: Bearer $VLLM_API_KEY"' if self.key else ""
        return (
            f"curl http://{self.reached_at}:{self.port}/v1/completions{key} "
            f"-H 'Content-Type: application/json' -d {shlex.quote(body)}"
        )


def free_address(host: str, port: int, model: str, key: str | None = None) -> Address:
    """Return an address that nobody listens on; port 0 = any free one.

    errors   ConfigError for a port that is taken, with one that is free; for a host that is not this one
    """
    try:
        return Address(host, _bound(host, port), model, key)
    except OSError as error:
        if isinstance(error, socket.gaierror):
            raise ConfigError(
                f"--host {host} is no address: {error.strerror}; give one of this host"
            ) from error
        with suppress(OSError):
            free = _bound(host, 0)
            raise ConfigError(
                f"port {port} of {host} cannot be had ({error.strerror}): another server may be there; try "
                f"--port {free}, or --port 0 for any free one"
            ) from error
        raise ConfigError(
            f"cannot listen on {host} ({error.strerror}); give an address of this host"
        ) from error


def _bound(host: str, port: int) -> int:
    """Take the port for a moment, and return it."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        taken: int = probe.getsockname()[1]
        return taken


def serve_until_asked_to_end(
    command: Sequence[str], environ: Mapping[str, str], address: Address, say: Callable[[str], None]
) -> None:
    """Start the server, say when it answers, and wait until a signal ends this process.

    errors   LaunchError where the server ends by itself, or fails at its first request
    """
    # What is ignored stays so: SIGHUP under nohup.
    ending = [
        each for each in ENDING if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, _stop) for number in ending}
    process = None
    start_s = time.monotonic()
    try:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        _wait_until_it_answers(process, address)
        say(f"ready after {time.monotonic() - start_s:.0f} s; ask for {address.model}:\n{address.curl()}")
        raise LaunchError(f"vLLM has ended with status {process.wait()}; the lines above say why")
    except Stopped:
        say("hpcpar serve: the server ends, as asked")
    finally:
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        if process is not None:
            _end(process)
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_until_it_answers(process: subprocess.Popen[bytes], address: Address) -> None:
    """Wait for the server's health, then for one token: some models fail at the first request only."""
    while address.request("/health") != 200:
        if process.poll() is not None:
            raise LaunchError(
                f"vLLM has ended with status {process.returncode} before it served; the lines above say why"
            )
        time.sleep(LOOK_S)
    status = address.request("/v1/completions", {"model": address.model, "prompt": "a", "max_tokens": 1})
    if status is None or status >= 500:  # others are answers: 404 of a model that completes no text
        raise LaunchError("vLLM has started, but failed at its first request; the lines above say why")


def _stop(number: int, frame: FrameType | None) -> None:
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    raise Stopped


def _end_with_parent() -> None:
    """Have the server's first process end when we are killed: it ends the others."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _end(process: subprocess.Popen[bytes], patience_s: float = PATIENCE_S) -> None:
    """End the server, and what is left of its session; return when no process of it is there.

    vLLM kills its ranks on CPUs, whose shared memory would stay until the node is started again.
    """
    shared = {file for pid in _session(process) for file in _shared_memory(pid)}
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    now_s = time.monotonic()
    while left := _session(process):
        waited_s = time.monotonic() - now_s
        if waited_s > 2 * GRACE_S:
            raise LaunchError(f"processes {left} of the server cannot be ended; look at them with ps")
        for pid in left if process.poll() is None or waited_s > GRACE_S else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    process.wait()
    for file in shared:
        file.unlink(missing_ok=True)


def _session(process: subprocess.Popen[bytes]) -> list[int]:
    return [each.pid for each in every_process() if each.session == process.pid]


def _shared_memory(pid: int) -> set[Path]:
    """Return vLLM's files in /dev/shm that a process has mapped."""
    try:
        maps = (PROC / str(pid) / "maps").read_text()
    except OSError:  # it has ended
        return set()
    return set(map(Path, re.findall(r"/dev/shm/vllm_\S+", maps)))
