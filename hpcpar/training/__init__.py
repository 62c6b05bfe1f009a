"""Training runs: configuration, optimizer step, loop, checkpoints and reports."""

from __future__ import annotations

from hpcpar.training.config import Config, parse, read
from hpcpar.training.parallelize import ParallelLlama, parallelize_llama
from hpcpar.training.reports import Outcome, Preempted
from hpcpar.training.staged import parse_stages, runs
from hpcpar.training.trainer import Run
from hpcpar.training.training_step import held_out_loss, train_step

__all__ = [
    "Config",
    "Outcome",
    "ParallelLlama",
    "Preempted",
    "Run",
    "held_out_loss",
    "parallelize_llama",
    "parse",
    "parse_stages",
    "read",
    "runs",
    "train_step",
]
