"""A training run from its configuration to its last checkpoint.

`Run(config, comm)` builds everything, on all ranks or on none; `run.train()` goes through the steps.
What a run does with the step it is at depends on the step alone (its data, its learning rate), so a
resumed run needs no more than model, optimizer, random numbers and the number of steps done.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from hpcpar.checkpoint import latest, load, save
from hpcpar.comm import Communicator
from hpcpar.data import Dataset, Prepared, Sampler, prepare
from hpcpar.data_parallel import DistributedOptimizer, broadcast_parameters, expected_nbytes
from hpcpar.errors import ConfigError, DataError, HpcparError
from hpcpar.launch.binding import affinity, gpu_for, thread_count
from hpcpar.mesh import Mesh
from hpcpar.models import Llama
from hpcpar.partition import bounds
from hpcpar.together import together
from hpcpar.training.config import Config, OptimizerSection
from hpcpar.training.metrics import Metrics, draw_losses, records_of
from hpcpar.training.schedule import learning_rate
from hpcpar.training.step import StepResult, held_out_loss, train_step
from hpcpar.training.summary import Theory, TrafficLine, as_records, gather_traffic, table
from hpcpar.training.timeline import Timeline, span
from hpcpar.units import MiB, format_duration

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What a run came to; the same on every rank.

    first_step      steps that an earlier run had done
    steps           steps done in all
    loss            of the last step's training batch, nats per token; None if no step was left to do
    held_out_loss   nats per token, after the last step
    tokens_per_s    of this run's steps, over all ranks
    traffic         bytes and messages of all ranks, beside the theory
    """

    first_step: int
    steps: int
    loss: float | None
    held_out_loss: float
    tokens_per_s: float
    traffic: tuple[TrafficLine, ...]
    directory: Path


class Run:
    """One rank's part of a training run; every method is collective.

    config    the same on every rank
    comm      over all ranks of the run; its axes are split from it
    resume    go on from the newest checkpoint in the output directory, if there is one
    console   rank 0 reports to it; None = in silence

    errors    ConfigError, LayoutError, DataError, CheckpointError or PeerFailedError, on all ranks
    """

    def __init__(
        self, config: Config, comm: Communicator, *, resume: bool = False, console: Console | None = None
    ) -> None:
        self.config = config
        self.comm = comm
        self._console = console if comm.rank == 0 else None
        self.mesh = Mesh(comm, config.mesh.model_dump())
        # Losses travel apart from gradients, so that the bytes of both can be held to their theory.
        losses = comm.split(0, name="losses")
        assert losses is not None, "every rank is in it"
        self._losses = losses
        self._place_on_hardware()
        self.data = self._prepare_data()
        self.training_data = Dataset(self.data.shards.train, config.train.sequence)
        self.held_out_data = Dataset(self.data.shards.held_out, config.train.sequence)
        self._require_enough_text()
        self.sampler = Sampler(
            len(self.data.shards.train), config.train.sequence, config.train.global_batch, config.train.seed
        )
        self.model = self._build_model()
        self.optimizer = self._build_optimizer()
        self.first_step = self._prepare_directory(resume)

    @property
    def directory(self) -> Path:
        return self.config.output.directory

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the global batch."""
        return self.config.train.global_batch * self.config.train.sequence

    # --- the loop ---------------------------------------------------------------------------------

    def train(self) -> Outcome:
        """All steps from the first that is left to the last, and what belongs around them."""
        config = self.config
        self._announce()
        loss, held_out = None, None
        seconds = 0.0
        with ExitStack() as stack:
            metrics = self._open_metrics(stack)
            timeline = Timeline(self.comm) if config.output.timeline_steps else None
            for start in range(self.first_step, config.train.steps, config.output.log_every):
                stop = min(start + config.output.log_every, config.train.steps)
                start_s = time.perf_counter()
                loss = self._steps(start, stop, metrics, timeline)
                seconds += time.perf_counter() - start_s
                held_out = self._between_steps(start, stop, metrics)
            if timeline is not None:
                timeline.write(self.directory / "timeline.json")
            if held_out is None:
                held_out = self._evaluate(config.train.steps, metrics)
        traffic = tuple(gather_traffic(self.comm, self.comm.traffics(), self._theory()))
        outcome = Outcome(
            first_step=self.first_step,
            steps=max(self.first_step, config.train.steps),
            loss=loss,
            held_out_loss=held_out,
            tokens_per_s=self._steps_left() * self.tokens_per_step / seconds if seconds else 0.0,
            traffic=traffic,
            directory=self.directory,
        )
        self._leave_reports(outcome)
        return outcome
