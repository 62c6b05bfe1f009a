"""A training run: its configuration, one optimizer step, the loop around it and what it reports."""

from __future__ import annotations

from hpcpar.training.config import Config, parse, read
from hpcpar.training.loop import Outcome, Preempted, Run
from hpcpar.training.step import held_out_loss, train_step

__all__ = ["Config", "Outcome", "Preempted", "Run", "held_out_loss", "parse", "read", "train_step"]
