"""A small trained run, in float64 with one training step."""

from __future__ import annotations

from pathlib import Path

from hpcpar.comm import Communicator
from hpcpar.training import Run, parse

SMALL = (
    *("train.steps=1", "train.sequence=16", "train.global_batch=2", "train.microbatch=2", "train.threads=1"),
    *("train.precision=float64", "data.held_out=0.3", "model.hidden_size=64", "model.layers=1"),
    *("model.heads=2", "model.kv_heads=1"),
)


def train(directory: Path, *overrides: str) -> Path:
    """Train directory/runs/small on texts there, and return it."""
    texts = directory / "texts"
    texts.mkdir(exist_ok=True)
    for number in range(8):
        (texts / f"{number}.txt").write_text(f"document {number} " * 30)
    run = directory / "runs" / "small"
    places = (f"data.paths={texts}", f"data.cache={directory / 'cache'}", f"output.directory={run}")
    Run(parse("", source="nothing", overrides=[*places, *SMALL, *overrides]), Communicator.alone()).train()
    return run
