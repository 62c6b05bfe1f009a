"""A run that takes no time, of a text that takes no room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpcpar.training import Config, parse

MakeConfig = Callable[..., Config]

RUN = """
[model]
hidden_size = 16
layers = 1
heads = 2
kv_heads = 1
ffn_size = 32
[data]
held_out = 0.3
[train]
steps = 8
sequence = 16
global_batch = 5
microbatch = 2
precision = "float64"
threads = 1
evaluate_every = 4
held_out_batches = 2
[optimizer]
learning_rate = 1e-2
algorithm = "ring"
[output]
log_every = 3
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A dozen small documents."""
    directory = tmp_path / "text"
    directory.mkdir()
    for number in range(12):
        (directory / f"{number}.txt").write_text(
            f"document {number}: " + "the cat sat on the mat. " * (20 + number)
        )
    return directory


@pytest.fixture
def config_of(tmp_path: Path, text: Path) -> MakeConfig:
    def make(*overrides: str, name: str = "run") -> Config:
        places = (
            f"data.paths={text}",
            f"data.cache={tmp_path / 'cache'}",
            f"output.directory={tmp_path / name}",
        )
        return parse(RUN, source="run.toml", overrides=[*places, *overrides])

    return make
