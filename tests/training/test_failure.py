"""A rank that is lost during training ends the job soon, with a status, and is named."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = """
import os, signal
from pathlib import Path
import hpcpar
from hpcpar.training import Run, parse, trainer

world = hpcpar.init()
real_step, steps = trainer.train_step, iter(range(10**6))


def step_with_a_mistake(*arguments, **options):
    if next(steps) == 3 and world.rank == 1:
        Path("{mark}").touch()
        {mistake}
    return real_step(*arguments, **options)


trainer.train_step = step_with_a_mistake
Run(parse(Path("{config}").read_text(), source="run.toml"), world).train()
"""

CONFIG = """
[model]
hidden_size = 16
layers = 1
heads = 2
kv_heads = 1
ffn_size = 32
[data]
paths = ["{text}"]
cache = "{cache}"
held_out = 0.3
[train]
steps = 100000
sequence = 16
global_batch = 6
threads = 1
[output]
directory = "{output}"
"""

ENDS_WITHIN_S = 15
"""After the mistake: until then a busy machine may take as long as it likes."""


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", ["hpcpar: rank 1 (pid", "was lost"]),
        ("raise ValueError('only here')", ["hpcpar: rank 1 of 3", "Traceback", "ValueError: only here"]),
    ],
)
def test_a_rank_lost_during_training_ends_the_job_and_is_named(
    tmp_path: Path,
    run_ranks: Callable[..., subprocess.CompletedProcess[str]],
    mistake: str,
    words: list[str],
) -> None:
    (tmp_path / "text").mkdir()
    for number in range(12):
        (tmp_path / "text" / f"{number}.txt").write_text(f"document {number} " * 40)
    places = {"text": tmp_path / "text", "cache": tmp_path / "cache", "output": tmp_path / "run"}
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(**places))
    script = tmp_path / "script.py"
    mark = tmp_path / "mistake"
    script.write_text(PROGRAM.format(mistake=mistake, config=config, mark=mark))
    done = run_ranks(3, str(script))
    assert done.returncode != 0
    assert time.time() - mark.stat().st_mtime < ENDS_WITHIN_S
    told = [line for line in done.stderr.splitlines() if line.startswith("hpcpar: rank")]
    assert told, done.stderr
    assert told[0].startswith(words[0])
    assert all(word in done.stderr for word in words[1:])
