"""The command `hpcpar serve`, with a stand-in for vLLM."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpcpar.cli import main
from hpcpar.launch.processes import process
from tests.command import until
from tests.vllm_stand_in import stand_in


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["serve", *map(str, words)])
    assert caught.value.code == 1
    return capsys.readouterr().err


def test_the_last_run_is_exported_and_a_dry_run_shows_the_command(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    python = stand_in(tmp_path)
    for words in (("--max-num-seqs", "4"), ("runs/small", "--max-num-seqs", "4")):
        main_words = ["serve", "--dry-run", "--port", "0", "--python", str(python), *words]
        with pytest.raises(SystemExit) as caught:
            main(main_words)
        assert caught.value.code == 0
        said = capsys.readouterr().out
        (served,) = (trained / "served").iterdir()
        assert (
            "vLLM 0.32.0 serves small: runs/small/checkpoints/step-00000001, in float32; a token is" in said
        )
        assert (
            f"{python} -m vllm.entrypoints.openai.api_server --model runs/small/served/{served.name} " in said
        )
        assert "--dtype float32 --enforce-eager --kv-cache-memory-bytes " in said
        assert said.endswith(" --max-num-seqs 4\n")
        assert said.splitlines()[1].startswith("HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 ")


def test_errors_are_one_sentence_and_come_before_the_server(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    python = ("--python", stand_in(tmp_path))
    assert "hpcpar serve: heads=2 does not divide" in refused(
        capsys, *python, "--port", 0, "--tp", 3, trained
    )
    assert "name the run first, then options of vLLM: hpcpar serve runs/small --seed …" in refused(
        capsys, *python, "--seed", 4, "runs/small"
    )
    assert "there is no vLLM with" in refused(capsys, "--python", "nowhere", trained)
    monkeypatch.chdir(tmp_path / "texts")
    assert "there is no trained model in runs/" in refused(capsys, *python, "--port", 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_answers_until_a_signal_ends_it(trained: Path, tmp_path: Path, number: signal.Signals) -> None:
    words = ["--python", str(stand_in(tmp_path)), "--port", "0", "--served-model-name", "mine", str(trained)]
    with subprocess.Popen(
        [sys.executable, "-m", "hpcpar", "serve", *words], stdout=subprocess.PIPE, text=True
    ) as serving:
        assert serving.stdout is not None
        said = ""
        for line in serving.stdout:
            said += line
            if line.startswith("curl "):
                break
        assert "ask for mine:" in said
        port = int(said.split("--port ")[1].split()[0])
        connection = http.client.HTTPConnection("127.0.0.1", port)
        body = json.dumps({"model": "mine", "prompt": "def"})
        connection.request("POST", "/v1/completions", body)
        assert json.load(connection.getresponse())["choices"][0]["text"] == "mine was asked 'def'"
        serving.send_signal(number)
        assert serving.stdout.read() == "hpcpar serve: the server ends, as asked\n"
        assert serving.wait(60) == 0


def test_the_server_goes_with_a_command_that_was_killed(trained: Path, tmp_path: Path) -> None:
    words = ["--python", str(stand_in(tmp_path)), "--port", "0", str(trained)]
    with subprocess.Popen(
        [sys.executable, "-m", "hpcpar", "serve", *words], stdout=subprocess.PIPE, text=True
    ) as serving:
        assert serving.stdout is not None
        second = next(int(line.split()[2].rstrip(",")) for line in serving.stdout if "serving with" in line)
        found = process(second)
        assert found is not None
        server = found.parent
        serving.kill()
        until(lambda: (now := process(server)) is None or now.state in "ZX", "the server ends")
        os.kill(second, signal.SIGKILL)  # vLLM's first process ends its others; the stand-in does not
