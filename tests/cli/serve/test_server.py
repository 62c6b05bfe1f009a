"""A server's start and end, with a stand-in for vLLM."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from hpcpar.cli.serve.server import Address, free_address, serve_until_asked_to_end
from hpcpar.errors import ConfigError, LaunchError
from hpcpar.launch.processes import process
from tests.vllm_stand_in import stand_in


def serve(tmp_path: Path, say: list[str], how: str = "") -> Address:
    address = free_address("127.0.0.1", 0, "tiny")
    words = ["-m", "vllm", "--host", address.host, "--port", str(address.port)]
    environ = {**os.environ, "STAND_IN": how}
    serve_until_asked_to_end([str(stand_in(tmp_path)), *words], environ, address, say.append)
    return address


def test_it_says_how_to_ask_and_a_signal_ends_all_of_its_processes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    class Say(list[str]):
        def append(self, line: str) -> None:
            said.append(line)
            if line.startswith("ready"):
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    address = serve(tmp_path, Say())
    assert signal.getsignal(signal.SIGTERM) is before
    ready, ended = said
    assert ready.startswith("ready after ")
    url = f"http://127.0.0.1:{address.port}/v1/completions"
    assert f'ask for tiny:\ncurl {url} -H \'Content-Type: application/json\' -d \'{{"model": "tiny"' in ready
    assert ended == "hpcpar serve: the server ends, as asked"
    second = int(capfd.readouterr().out.split("serving with ")[1].split(",")[0])
    found = process(second)
    assert found is None or found.state in "ZX"
    with socket.create_server(("127.0.0.1", address.port)):
        pass


def test_a_server_that_ends_before_it_serves_is_an_error_with_its_status(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="ended with status 7 before it served; the lines above say why"):
        serve(tmp_path, [], "refuses")


def test_a_server_that_is_healthy_but_cannot_answer_is_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    with pytest.raises(LaunchError, match="failed at its first request"):
        serve(tmp_path, said, "breaks")
    assert said == []
    second = int(capfd.readouterr().out.split("serving with ")[1].split(",")[0])
    found = process(second)
    assert found is None or found.state in "ZX"


def test_a_server_that_ends_by_itself_later_is_an_error(tmp_path: Path) -> None:
    class Kill(list[str]):
        def append(self, line: str) -> None:
            ours = next(
                int(path.name)
                for path in Path("/proc").glob("[0-9]*")
                if (found := process(path.name))
                and found.parent == os.getpid()
                and "vllm_stand_in" in found.title
            )
            threading.Timer(0.2, os.kill, (ours, signal.SIGKILL)).start()

    with pytest.raises(LaunchError, match="vLLM has ended with status -9"):
        serve(tmp_path, Kill())


def test_a_port_in_use_is_refused_with_one_that_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"port {port} of 127.0.0.1 cannot be had .*try --port (\d+), or"
        ):
            free_address("127.0.0.1", port, "tiny")
        with pytest.raises(ConfigError, match=f"port {port} of 0.0.0.0 cannot be had"):
            free_address("0.0.0.0", port, "tiny")


def test_a_host_that_is_none_of_this_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        free_address("192.0.2.1", 8000, "tiny")
    with pytest.raises(ConfigError, match=r"--host no\.such\.host\.invalid is no address"):
        free_address("no.such.host.invalid", 8000, "tiny")


def test_a_server_on_all_interfaces_is_asked_for_by_the_hosts_name() -> None:
    assert Address("0.0.0.0", 1, "m").reached_at == socket.gethostname()
    assert Address("::1", 1, "m").reached_at == "[::1]"


def test_a_key_is_sent_and_its_variable_is_shown() -> None:
    address = Address("127.0.0.1", 1, "m", "secret")
    assert ' -H "Authorization: Bearer $VLLM_API_KEY" -H' in address.curl()
    assert "secret" not in address.curl()
