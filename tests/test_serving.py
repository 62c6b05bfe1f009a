"""A trained model is served by vLLM for CPUs, and answers what transformers writes with it."""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpcpar.cli.serve.vllm_environment import ENVIRONMENT
from hpcpar.launch.processes import every_process
from tests.command import run
from tests.greedy import greedy_answer, needs_vllm

ROOT = Path(__file__).parent.parent
START_LIMIT_S = 600.0  # some 25 s on two free cores
PROMPTS = (
    *("def main(", "import os\n", "class Test(", "    return self."),
    *("for i in range(", "raise ValueError(", "# The ", "if __name__ == "),
)
TOKENS = 24
KEY = "only for those who know"
TINY = (
    *("train.steps=60", "train.global_batch=8", "train.sequence=64", "train.held_out_batches=1"),
    *("model.layers=2", "model.hidden_size=128", "model.heads=4", "model.kv_heads=2", "data.max_mib=1"),
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200), needs_vllm]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of `hpcpar train` on two ranks."""
    directory = tmp_path_factory.mktemp("runs") / "short"
    words = ("train", "examples/tiny.toml", *TINY, f"output.directory={directory}")
    done = run(
        *(sys.executable, "-m", "hpcpar", "run", "-n", "2", "--", "-m", "hpcpar", *words),
        directory=ROOT,
        timeout_s=300,
    )
    assert done.returncode == 0, done.stderr
    return directory


@contextmanager
def serving(*words: str) -> Iterator[int]:
    """The port of `hpcpar serve`, which is ready; after it, nothing of the server is there."""
    command = [sys.executable, "-m", "hpcpar", "serve", "--port", "0", *words]
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environ["VLLM_API_KEY"] = KEY
    server = subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines: queue.Queue[str | None] = queue.Queue()
    assert server.stdout is not None
    reader = threading.Thread(target=lambda: [*map(lines.put, server.stdout), lines.put(None)], daemon=True)
    reader.start()
    said = ""
    try:
        while (line := lines.get(timeout=START_LIMIT_S)) is not None and not line.startswith("curl "):
            said += line
        assert line is not None, said
        found = re.search(r"--port (\d+) ", said)
        assert found is not None, said
        yield int(found[1])
    finally:
        sessions = {each.session for each in every_process() if each.parent == server.pid}
        server.send_signal(signal.SIGTERM)
        try:
            status = server.wait(120)
        finally:
            server.kill()
            left = [each for each in every_process() if each.session in sessions]
            for each in left:
                os.kill(each.pid, signal.SIGKILL)
    assert status == 0
    assert left == []


def ask(port: int, prompt: str, key: str = KEY) -> tuple[int, str]:
    """Return the status and the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = {"model": "short", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    answer = json.load(response)
    return response.status, answer["choices"][0]["text"] if "choices" in answer else str(answer)


def test_nothing_is_missing_but_what_is_left_out() -> None:
    done = run(ROOT / ENVIRONMENT / "bin" / "python", "-m", "pip", "check")
    missing = re.findall(r"requires (\S+), which is not installed", done.stdout)
    assert sorted(missing) == ["torchaudio", "torchcodec", "torchvision", "triton"], done.stdout
    assert len(done.stdout.splitlines()) == len(missing), done.stdout


@pytest.mark.parametrize("tp", [1, 2])
def test_greedy_answers_are_those_of_transformers(trained: Path, tp: int) -> None:
    if len(os.sched_getaffinity(0)) < tp:
        pytest.skip(f"needs {tp} cores")
    before = set(Path("/dev/shm").glob("vllm_*"))
    with serving(str(trained), "--tp", str(tp)) as port:
        answers = [ask(port, prompt) for prompt in PROMPTS]
        refused, _ = ask(port, PROMPTS[0], key="another")
    (exported,) = (trained / "served").iterdir()
    assert refused == 401
    assert answers == [(200, greedy_answer(exported, prompt, tokens=TOKENS)) for prompt in PROMPTS]
    assert len(set(answers)) > 1
    if tp > 1:  # the other test, which may run beside this one, has no such files
        assert set(Path("/dev/shm").glob("vllm_*")) <= before
