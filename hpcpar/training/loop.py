"""A training run from its configuration to its last checkpoint.

`Run(config, comm)` builds everything, on all ranks or on none; `run.train()` goes through the steps.
What a run does at a step depends on the step alone, but for its data: their place is counted in
sequences, so that a run may be resumed with another global batch. The learning rate is that of the step.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from hpcpar.checkpoint import Loaded, load, save
from hpcpar.checkpoint.checkpoint_directory import by_step
from hpcpar.comm import Communicator
from hpcpar.comm.places import gather_placement
from hpcpar.comm.preemption import Preemption
from hpcpar.data import Dataset, Sampler
from hpcpar.data_parallel import (
    MemoryReport,
    expected_broadcast_nbytes,
    memory_report,
    watch_activations,
)
from hpcpar.data_parallel.saved_activations import Activations
from hpcpar.errors import CheckpointError, ConfigError, DataError, DivergenceError, PeerFailedError
from hpcpar.mesh import Mesh
from hpcpar.models import Llama, LlamaStages, generate
from hpcpar.partition import bounds
from hpcpar.pipeline_parallel import TiedWeights
from hpcpar.pipeline_schedules.timetable import write_timetable
from hpcpar.training.build import (
    build_model,
    build_optimizer,
    build_stages,
    place_on_hardware,
    prepare_data,
    tensor_parallel_of,
)
from hpcpar.training.config import Config, model_config_saved
from hpcpar.training.expected_traffic import ExpectedTraffic, Passes, expected_traffic
from hpcpar.training.memory_check import require_memory
from hpcpar.training.metrics import Metrics, draw_losses, records_of
from hpcpar.training.pipelined import PipelinedLogits, PipelinedModel, copies_here, require_known
from hpcpar.training.schedule import learning_rate
from hpcpar.training.step import StepResult, WholeModel, held_out_loss, train_step
from hpcpar.training.summary import TrafficLine, as_records, gather_traffic, table
from hpcpar.training.timeline import Timeline, span
from hpcpar.units import format_duration

logger = logging.getLogger(__name__)

PROMPT_TOKENS = 32
"""Of held-out text, which the trained model's sample goes on from."""

MODEL_KEYS = (
    *("hidden_size", "layers", "heads", "kv_heads", "head_size", "ffn_size"),
    *("rope_theta", "norm_epsilon", "tie_embeddings"),
)
"""That decide which parameters a model has, but for its vocabulary, and what it makes of them."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to; the same on every rank.

    first_step      steps that an earlier run had done
    steps           steps done in all
    loss            of the last step's training batch, nats per token; None if no step was left to do
    held_out_loss   nats per token, after the last step
    tokens_per_s    of this run's steps, over all ranks
    seconds         that this run's steps took
    traffic         bytes and messages of all ranks, beside the theory
    memory          bytes of all ranks at the end, beside the formula; activations as in the first step
    """

    first_step: int
    steps: int
    loss: float | None
    held_out_loss: float
    tokens_per_s: float
    seconds: float
    traffic: tuple[TrafficLine, ...]
    memory: MemoryReport


@dataclass(frozen=True)
class Preempted:
    """What a run that was asked to stop came to; the same on every rank.

    steps        done in all, of those that were asked for
    checkpoint   of exactly these, from which a resumed run goes on
    """

    steps: int
    checkpoint: Path


class Run:
    """One rank's part of a training run; making one and every method are collective.

    config    the same on every rank
    comm      over all ranks of the run; its axes are split from it
    resume    go on from the newest checkpoint in the output directory, if there is one
    console   rank 0 reports to it; None = in silence
    preemption   asked between steps whether to stop; it stays the caller's to close

    errors    ConfigError, LayoutError, DataError, CheckpointError or PeerFailedError, on all ranks
    """

    def __init__(
        self,
        config: Config,
        comm: Communicator,
        *,
        resume: bool = False,
        console: Console | None = None,
        preemption: Preemption | None = None,
    ) -> None:
        self.config = config
        self.comm = comm
        self._preemption = preemption
        self._console = console if comm.rank == 0 else None
        self.mesh = Mesh(comm, config.mesh.model_dump())
        config.require_recompute()
        config.require_sequence_for(self.mesh.tp.size)
        self.tp = tensor_parallel_of(config, self.mesh.tp)
        config.require_pipeline_for(self.mesh.pp.size, self.mesh.dp.size)
        # Losses travel apart from gradients, so that the bytes of the latter can be held to theory; not over
        # tp, as ranks that share layers have the same loss.
        over = self.mesh.dp if self.mesh.pp.size == 1 else self.mesh.comm("pp", "dp")
        losses = over.split(0, name="losses")
        assert losses is not None, "every rank is in it"
        self._losses = losses
        self.device = place_on_hardware(config, comm)
        self.data = prepare_data(config, comm, say=self._say)
        self.training_data = Dataset(self.data.shards.train, config.train.sequence)
        self.held_out_data = Dataset(self.data.shards.held_out, config.train.sequence)
        self._require_enough_sequences()
        self.sampler = Sampler(
            len(self.data.shards.train), config.train.sequence, config.train.global_batch, config.train.seed
        )
        require_memory(config, self.data.shards.vocabulary, self.mesh, self.device)
        self.model: Llama | LlamaStages
        self.worker: WholeModel | PipelinedModel
        if self.mesh.pp.size == 1:
            with comm.together("looking at pipeline.schedule"):
                require_known(config.pipeline.schedule)
            self._build_whole()
        else:
            self._build_stages()
        self._resumed = self._owes_evaluation = False
        self._tokens_before = 0
        self._activations: Activations | None = None
        self._is_to_stop = False
        self._saved_s = 0.0
        self.first_step = self._prepare_directory(resume)

    def _build_whole(self) -> None:
        config, vocabulary = self.config, self.data.shards.vocabulary
        model = build_model(config, vocabulary, self.device, self.mesh.dp, self.tp)
        # Before the optimizer may give the parameters another type.
        self._start_nbytes = expected_broadcast_nbytes(model, self.mesh.dp)
        self.optimizer = build_optimizer(config, model, self.mesh.dp)
        self.model = model
        microbatches = self._microbatches(config.train.global_batch)
        self.worker = WholeModel(model, self.optimizer, microbatches, self.tokens_per_step)

    def _build_stages(self) -> None:
        config, mesh = self.config, self.mesh
        microbatches = self._microbatches(config.train.global_batch)
        model, schedule = build_stages(
            config, self.data.shards.vocabulary, self.device, mesh, self.tp, microbatches
        )
        self._start_nbytes = expected_broadcast_nbytes(model, mesh.dp)
        tied = TiedWeights(mesh.pp, model.tied_parameters())
        self.optimizer = build_optimizer(
            config,
            model,
            mesh.dp,
            tied=copies_here(model, tied),
            backwards=microbatches,
        )
        self.model = model
        self.worker = PipelinedModel(
            model, schedule, mesh, tied, self.optimizer, global_tokens=self.tokens_per_step
        )

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

    def _tokens(self, steps_done: int) -> int:
        """Learnt from in so many steps, of which those before a resumption may have had another batch."""
        return self._tokens_before + (steps_done - self.first_step) * self.tokens_per_step

    def train(self) -> Outcome | Preempted:
        """Every step that is left, and what belongs between and after them; or less if asked to stop."""
        train, output = self.config.train, self.config.output
        self._announce()
        self._saved_s = time.monotonic()
        loss: float | None = None
        held_out: float | None = None
        seconds = 0.0
        with ExitStack() as stack:
            metrics = self._open_metrics(stack)
            timeline = Timeline(self.comm) if output.timeline_steps and self._steps_left else None
            if self._owes_evaluation:
                held_out = self._evaluate(self.first_step, metrics)
            for start, stop in self._stretches():
                start_s = time.perf_counter()
                done, loss = self._steps(start, stop, metrics)
                seconds += time.perf_counter() - start_s
                if self._is_to_stop:
                    return self._leave(done)
                if timeline is not None and stop == self._traced_until:
                    timeline.write(self.directory / "timeline.json")
                if isinstance(self.worker, PipelinedModel) and stop == train.steps:
                    self._record_last_step(self.worker)
                if self._is_evaluated(stop):
                    held_out = self._evaluate(stop, metrics)
                is_last = stop == train.steps
                if is_last or is_due(stop, output.checkpoint_every) or self._is_time_to_save():
                    self._save(stop)
            if held_out is None:
                held_out = self._evaluate(self.first_step, metrics)
        if self._preemption is not None:
            self._preemption.settle()
        outcome = Outcome(
            first_step=self.first_step,
            steps=self.first_step + self._steps_left,
            loss=loss,
            held_out_loss=held_out,
            tokens_per_s=self._steps_left * self.tokens_per_step / seconds if seconds else 0.0,
            seconds=seconds,
            traffic=tuple(gather_traffic(self.comm, self._theory())),
            memory=memory_report(self.model, self.optimizer, self.comm, activations=self._activations),
        )
        sample = self._sample()
        self._leave_reports(outcome, sample)
        return outcome

    # --- when -------------------------------------------------------------------------------------

    @property
    def _steps_left(self) -> int:
        return max(0, self.config.train.steps - self.first_step)

    @property
    def _traced_until(self) -> int:
        return min(self.first_step + self.config.output.timeline_steps, self.config.train.steps)

    def _is_evaluated(self, steps_done: int) -> bool:
        train = self.config.train
        return steps_done == train.steps or is_due(steps_done, train.evaluate_every)

    def _is_time_to_save(self) -> bool:
        """Tell whether the last checkpoint is as old as one may be, by rank 0's clock. Collective."""
        limit_s = 60 * self.config.output.checkpoint_minutes
        if not limit_s:
            return False
        is_due = self.comm.rank == 0 and time.monotonic() - self._saved_s >= limit_s
        answer: bool = self.comm.broadcast_object(is_due)
        return answer

    def _stretches(self) -> list[tuple[int, int]]:
        """The steps that are left, cut wherever something happens between two of them."""
        train, output = self.config.train, self.config.output
        periods = (output.log_every, train.evaluate_every, output.checkpoint_every)
        return list(stretches(self.first_step, train.steps, periods, also=(self._traced_until,)))

    # --- steps ------------------------------------------------------------------------------------

    def _steps(self, start: int, stop: int, metrics: Metrics | None) -> tuple[int, float]:
        """Train steps start … stop - 1, or less if the run is to stop.

        returns   steps done in all, and the last one's loss

        Losses are summed over ranks once for all of these steps, so that no step waits for a number.
        """
        start_s = time.perf_counter()
        results: list[StepResult] = []
        while not results or (start + len(results) < stop and not self._is_to_stop):
            results.append(self._watched_step(start + len(results)))
            self._ask(start + len(results))
        stop = start + len(results)
        losses = torch.stack([result.loss_share for result in results]).cpu()
        self._losses.allreduce(losses)
        step_s = (time.perf_counter() - start_s) / len(results)
        self._require_finite(start, losses, torch.stack([result.gradient_norm for result in results]).cpu())
        if metrics is not None:
            metrics.steps(
                [
                    {
                        "step": step,
                        "loss": loss,
                        "learning_rate": self._learning_rate(step),
                        "gradient_norm": float(result.gradient_norm),
                        "tokens": self._tokens(step + 1),
                        "tokens_per_s": self.tokens_per_step / step_s,
                        "step_s": step_s,
                    }
                    for step, loss, result in zip(range(start, stop), losses.tolist(), results, strict=True)
                ]
            )
        return stop, float(losses[-1])

    def _ask(self, steps_done: int) -> None:
        """Whether ranks want to stop here; after the last step it makes no difference."""
        if self._preemption is not None and steps_done < self.config.train.steps:
            self._is_to_stop = self._preemption.is_agreed()

    def _watched_step(self, step: int) -> StepResult:
        """A step; the run's first one under the eyes of who counts activations."""
        if self._activations is not None:
            return self._step(step)
        with watch_activations(self.model) as self._activations:
            return self._step(step)

    def _step(self, step: int) -> StepResult:
        trace, dp = self.comm.trace, self.mesh.dp
        with span(trace, "data"):
            windows = self.sampler.shard(step, dp.rank, dp.size)
            tokens, targets = self._to_device(self.training_data.batch(windows))
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(step)
        return train_step(
            self.worker,
            tokens,
            targets,
            clip_norm=self.config.optimizer.clip_norm or math.inf,
            trace=trace,
        )

    def _learning_rate(self, step: int) -> float:
        steps, schedule = self.config.train.steps, self.config.schedule
        return learning_rate(
            step,
            steps=steps,
            peak=self.config.optimizer.learning_rate,
            warmup_steps=int(schedule.warmup_fraction * steps),
            final_fraction=schedule.final_fraction,
        )

    def _require_finite(self, start: int, losses: Tensor, gradient_norms: Tensor) -> None:
        """DivergenceError for the first of these steps that left parameters which are no numbers."""
        found = {"loss": losses}
        if not self.optimizer.scaler.dynamic:  # which skips a step whose gradients overflowed
            found["norm of the gradient"] = gradient_norms
        for what, values in found.items():
            broken = torch.nonzero(~values.isfinite()).flatten().tolist()
            if broken:
                raise self._diverged(f"the {what} of step {start + broken[0]} is {values[broken[0]].item()}")

    def _diverged(self, found: str) -> DivergenceError:
        return DivergenceError(
            f"{found}, and nothing can be learnt from there on; lower optimizer.learning_rate "
            f"(now {self.config.optimizer.learning_rate}), "
            f"raise schedule.warmup_fraction, or set optimizer.clip_norm"
        )

    def _evaluate(self, steps_done: int, metrics: Metrics | None) -> float:
        loss = held_out_loss(self.worker, self._held_out_batches(), self._losses)
        if metrics is not None:
            metrics.held_out(steps_done, loss)
        if not math.isfinite(loss):
            raise self._diverged(f"the held-out loss after step {steps_done} is {loss}")
        return loss

    def _held_out_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of the held-out windows, the same every time, a microbatch at a time."""
        windows, start = self._held_out_windows, self._own_share(len(self._held_out_windows))[0]
        for sequences in self._microbatch_sizes(len(windows)):
            yield self._to_device(self.held_out_data.batch(windows[start : start + sequences]))
            start += sequences

    @property
    def _held_out_windows(self) -> Sequence[int]:
        train = self.config.train
        return self.held_out_data.spread(train.held_out_batches * train.global_batch)

    def _microbatches(self, sequences: int) -> int:
        """Into how many microbatches each rank cuts its share, so that all ranks do the same."""
        largest_share = -(-sequences // self.mesh.dp.size)
        return -(-largest_share // self.config.train.microbatch)

    def _own_share(self, sequences: int) -> tuple[int, int]:
        """Of so many sequences, the first of this dp rank's, and the first that is not any more."""
        return bounds(sequences, self.mesh.dp.size)[self.mesh.dp.rank]

    def _microbatch_sizes(self, sequences: int) -> list[int]:
        """Sequences in each microbatch of this dp rank's share of so many."""
        first, last = self._own_share(sequences)
        return [stop - start for start, stop in bounds(last - first, self._microbatches(sequences))]

    def _to_device(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0].to(self.device), batch[1].to(self.device)

    def _require_enough_sequences(self) -> None:
        config, ranks = self.config, self.mesh.dp.size
        if config.train.global_batch < ranks:
            raise ConfigError(
                f"train.global_batch = {config.train.global_batch} sequences cannot be shared by {ranks} "
                f"data-parallel ranks; make it at least {ranks}"
            )
        if not self.held_out_data.windows:
            raise DataError(
                f"the held-out text has {len(self.data.shards.held_out)} tokens, less than a sequence of "
                f"{config.train.sequence} and the token after it; give more text or more documents, raise "
                f"data.held_out (now {config.data.held_out}), or lower train.sequence"
            )

    # --- what a run leaves behind -----------------------------------------------------------------

    def _prepare_directory(self, resume: bool) -> int:
        """Make the output directory, or go back to its newest sound checkpoint; the steps done there."""
        is_found = False
        with self.comm.together("making the output directory"):
            if self.comm.rank == 0:
                if resume:
                    is_found = bool(by_step(self.checkpoints))
                else:
                    moved = move_aside(self.directory, offload=self.config.optimizer.offload)
                    if moved is not None:
                        self._say(f"the earlier run in {self.directory} is now {moved}")
                self._make_directory()
        is_found = self.comm.broadcast_object(is_found)
        if not is_found:
            if resume:
                self._say(f"no checkpoint in {self.checkpoints}: starting from the first step")
            return 0
        told = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        restored = load(
            self.checkpoints,
            model=self.model,
            optimizer=self.optimizer,
            comm=self.comm,
            accept=self._require_same_make,
        )
        # The checkpoint has decay, betas and the like as well, but it is the configuration that says them.
        for group, options in zip(self.optimizer.param_groups, told, strict=True):
            group.update(options)
        self._resumed = True
        self._tokens_before = restored.extra.get("tokens", restored.step * self.tokens_per_step)
        self._owes_evaluation = restored.extra.get("owes_evaluation", False)
        self._warn_of_changes(restored.extra.get("config", {}))
        self._go_on_in_text(restored)
        self._say(f"resuming after step {restored.step} from {restored.path}")
        return restored.step

    def _make_directory(self) -> None:
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"output.directory = {self.directory} cannot be made: {error}; name another one"
            ) from error

    def _require_same_make(self, checkpoint: Path, extra: dict[str, Any]) -> None:
        """CheckpointError where it would go on as another function, by another method, or in text it had."""
        saved: dict[str, Any] = extra.get("config", {})
        name = self.config.optimizer.name
        stepped = saved.get("optimizer", {}).get("name", name)
        if stepped != name:
            raise CheckpointError(
                f"{checkpoint} is of another optimizer: optimizer.name = {stepped!r} there, {name!r} here; "
                f"set optimizer.name={stepped}, or start anew without --resume"
            )
        self._require_same_windows(checkpoint, extra)
        before, now = model_config_saved(saved), self.model.config
        if before is None:
            return
        changed = [key for key in MODEL_KEYS if getattr(before, key) != getattr(now, key)]
        if changed:
            there, here = ({key: json.dumps(getattr(of, key)) for key in changed} for of in (before, now))
            differences = [f"model.{key} = {there[key]} there, {here[key]} here" for key in changed]
            advice = " ".join(f"model.{key}={value}" for key, value in there.items())
            raise CheckpointError(
                f"{checkpoint} is of another model: {'; '.join(differences)}; set {advice}, or start anew "
                "without --resume"
            )

    def _warn_of_changes(self, saved: dict[str, Any]) -> None:
        """A resumed run may be told other things than before; what changes its course is said aloud."""
        now = self.config.model_dump(mode="json")
        changes = [
            (f"{section}.{key}", value, saved.get(section, {}).get(key, value))
            for section in ("data", "train", "optimizer", "schedule")
            for key, value in now[section].items()
        ]
        model = model_config_saved(saved)
        if model is not None:
            changes.append(("model.dropout", self.model.config.dropout, model.dropout))
        for key, value, before in changes:
            if before != value and self.comm.rank == 0:
                logger.warning("resuming with %s = %r, which was %r before", key, value, before)

    def _is_same_text(self, extra: dict[str, Any]) -> bool:
        return extra.get("text") in (None, self.data.shards.digest)

    def _require_same_windows(self, checkpoint: Path, extra: dict[str, Any]) -> None:
        """CheckpointError where text that was learnt from cannot be told from what was not."""
        now = self.config.train.sequence
        before = extra.get("config", {}).get("train", {}).get("sequence", now)
        if before == now or not self._is_same_text(extra) or not extra.get("data", {"place": 1})["place"]:
            return
        raise CheckpointError(
            f"{checkpoint} was saved amid an epoch of sequences of {before} tokens, and train.sequence = "
            f"{now} here: cut into others, text would be learnt from twice in it and other text never; set "
            f"train.sequence={before}, give other text, or start anew without --resume"
        )

    def _go_on_in_text(self, restored: Loaded) -> None:
        """Take up the order of the text behind the sequences that were learnt from, however many a step had.

        Files may change under their names: text that is not what it was is begun with, in another order.
        """
        extra, train = restored.extra, self.config.train
        saved = extra.get("config", {}).get("train", {})
        position = extra.get("data")
        if position is None:  # by a version that counted steps
            batch = saved.get("global_batch", train.global_batch)
            epoch, steps = divmod(restored.step, max(1, self.sampler.windows // batch))
            position = {"epoch": epoch, "place": steps * batch, "seed": saved.get("seed", train.seed)}
        if self._is_same_text(extra):
            self.sampler = replace(self.sampler, seed=position["seed"]).going_on_from(
                restored.step, position["epoch"], position["place"]
            )
            if position["seed"] != train.seed and self.comm.rank == 0:
                logger.warning("the text's order stays that of train.seed = %r", position["seed"])
            return
        self.sampler = self.sampler.going_on_from(restored.step, position["epoch"] + 1, 0)
        if self.comm.rank == 0:
            logger.warning(
                "resuming with other text than before: the files or the tokenizer, or how they are cut, have "
                "changed, and what is held out now may have been learnt from; the text that is there now is "
                "gone through from the beginning of an order of its own"
            )

    def _leave(self, steps_done: int) -> Preempted:
        """Save what a resumed run needs to go on as if nothing had happened; there is no time for more."""
        checkpoint = self._save(steps_done, owes_evaluation=self._is_evaluated(steps_done))
        self._say(
            f"asked to stop: {steps_done} of {self.config.train.steps} steps are done and saved in "
            f"{checkpoint}; --resume goes on from there"
        )
        return Preempted(steps_done, checkpoint)

    def _save(self, steps_done: int, *, owes_evaluation: bool = False) -> Path:
        """The checkpoint after so many steps; `owes_evaluation`: of that which is due now there was none.

        errors   CheckpointError, on all ranks
        """
        extra = {
            "config": self.config.model_dump(mode="json"),
            "text": self.data.shards.digest,
            "tokenizer": self.data.shards.tokenizer_identity,
            "end_of_document": self.data.tokenizer.end_of_document,
            "tokens": self._tokens(steps_done),
            "data": self._position(steps_done),
            "owes_evaluation": owes_evaluation,
        }
        try:
            saved = save(
                self.checkpoints,
                step=steps_done,
                model=self.model,
                optimizer=self.optimizer,
                extra=extra,
                comm=self.comm,
                keep=self.config.output.keep,
            )
        except (OSError, CheckpointError, PeerFailedError) as error:
            raise CheckpointError(
                f"the checkpoint of step {steps_done} cannot be saved in {self.checkpoints}: {error}; once "
                "that is mended, go on from the one before with --resume"
            ) from error
        self._saved_s = time.monotonic()
        return saved

    def _position(self, steps_done: int) -> dict[str, int]:
        """The place in the text to go on from: windows of an epoch's order, which the seed names."""
        epoch, place = self.sampler.position(steps_done)
        return {"epoch": epoch, "place": place, "seed": self.sampler.seed}

    def _record_last_step(self, worker: PipelinedModel) -> None:
        """When each stage worked in the last step, for `hpcpar draw pipeline --measured`. Collective."""
        timetable = worker.pipeline.timetable()
        if self.comm.rank == 0:
            write_timetable(timetable, self.directory / "pipeline.json")

    def _open_metrics(self, stack: ExitStack) -> Metrics | None:
        """On rank 0: metrics.jsonl and the display of progress."""
        if self.comm.rank != 0:
            return None
        steps = self.config.train.steps
        return stack.enter_context(
            Metrics(self.directory, first_step=self.first_step, steps=steps, console=self._console)
        )

    def _theory(self) -> ExpectedTraffic:
        """Bytes of the common start, the layers, the gradients and the losses."""
        cuts = self._stretches()
        passes = Passes(
            trained=self._microbatch_sizes(self.config.train.global_batch),
            evaluations=max(1, self._owes_evaluation + sum(self._is_evaluated(stop) for _, stop in cuts)),
            held_out=self._microbatch_sizes(len(self._held_out_windows)),
            sequence=self.config.train.sequence,
            stretches=[stop - start for start, stop in cuts],
            loads=1 if self._resumed else 0,
        )
        return expected_traffic(
            self.model,
            self.optimizer,
            self.tp,
            self._losses,
            passes,
            recompute=self.config.recompute,
            worker=self.worker if isinstance(self.worker, PipelinedModel) else None,
            preemption=None if self._preemption is None else self._preemption.comm,
            start_nbytes=0 if self.optimizer.zero_stage == 3 else self._start_nbytes,
        )

    def _announce(self) -> None:
        config, shards = self.config, self.data.shards
        total = config.train.steps * self.tokens_per_step
        placement = gather_placement(self.comm)
        if placement is not None:
            self._say("\n".join(placement.lines()))
        self._say(
            f"ranks: {self.comm.size} ({self.mesh.layout}), torch threads on each: "
            f"{torch.get_num_threads()}, on {self.device}\n"
            f"model: {config.model.preset}, {self.model.config.parameters():,} parameters{self._division}\n"
            f"text:  {len(shards.train):,} tokens to learn from, {len(shards.held_out):,} held out\n"
            f"{self._working_together}"
            f"steps: {config.train.steps} of {config.train.global_batch} × {config.train.sequence} tokens, "
            f"{total:,} in all, {total / len(shards.train):.2f} of the text"
        )

    def _sample(self) -> str | None:
        """What the model writes after the beginning of the held-out text, if it is to. Collective."""
        if not self.config.output.sample_tokens:
            return None
        prompt = self.data.shards.held_out.read(0, min(PROMPT_TOKENS, self.config.train.sequence))
        tokens = torch.from_numpy(prompt.astype(np.int64)).unsqueeze(0).to(self.device)
        # All ranks write the same, as those that share layers, or parameters, must call the model alike.
        worker = self.worker
        model = worker.model if isinstance(worker, WholeModel) else PipelinedLogits(worker)
        written = generate(model, tokens, self.config.output.sample_tokens, seed=self.config.train.seed)
        known = written[0][written[0] < self.data.shards.vocabulary].tolist()
        return self.data.tokenizer.decode(known)

    def _leave_reports(self, outcome: Outcome, sample: str | None) -> None:
        """summary.json and loss.png, and traffic, memory and the sample on the console."""
        if self.comm.rank != 0:
            return
        summary = {
            "layout": str(self.mesh.layout),
            **{name: value for name, value in vars(outcome).items() if name not in ("traffic", "memory")},
            "traffic": as_records(outcome.traffic),
            "memory": outcome.memory.as_record(),
        }
        (self.directory / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        draw_losses(
            records_of(self.directory / "metrics.jsonl"),
            self.directory / "loss.png",
            vocabulary=self.data.shards.vocabulary,
        )
        if self._console is not None:
            self._console.print(table(outcome.traffic, size=self.comm.size), crop=False)
            self._console.print(outcome.memory.table())
        if sample is not None:
            self._say(f"a sample:\n{sample}")
        self._say(
            f"held-out loss {outcome.held_out_loss:.3f} nats per token (ln({self.data.shards.vocabulary}) = "
            f"{math.log(self.data.shards.vocabulary):.3f} knows nothing)\n"
            f"{outcome.tokens_per_s:,.0f} tokens/s, {format_duration(outcome.seconds)} of training\n"
            f"metrics.jsonl, loss.png, summary.json and checkpoints are in {self.directory}"
        )

    @property
    def _working_together(self) -> str:
        """How ranks of a pipeline do, for the announcement; nothing where there is none."""
        if not isinstance(self.worker, PipelinedModel):
            return ""
        schedule, split = self.worker.pipeline.schedule, self.worker.model.split
        ends = {0: -1, len(split) - 1: -1}
        layers = [stop - start + ends.get(stage, 0) for stage, (start, stop) in enumerate(split)]
        return (
            f"pipeline: {schedule.name}, {schedule.ranks} ranks, {schedule.microbatches} microbatches, "
            f"layers of the stages {', '.join(map(str, layers))}\n"
        )

    @property
    def _division(self) -> str:
        """How ranks share the layers, for the announcement; nothing where they do not."""
        if self.tp.size == 1:
            return ""
        held = sum(parameter.numel() for parameter in self.model.parameters())
        sequences = ", which share the sequence, too" if self.tp.sequence_parallel else ""
        return f", {held:,} on each of {self.tp.size} ranks{sequences}"

    def _say(self, text: str) -> None:
        if self._console is not None:
            # Text that a model wrote may look like markup.
            self._console.print(text, highlight=False, markup=False)


def stretches(
    first: int, last: int, periods: Sequence[int], *, also: Sequence[int] = ()
) -> Iterator[tuple[int, int]]:
    """Cut steps first … last - 1 after every multiple of each period (0 = never) and at `also`.

    stretches(3, 10, (4, 0, 5)) gives (3, 4), (4, 5), (5, 8), (8, 10)
    """
    start = first
    for stop in range(first + 1, last + 1):
        if stop == last or stop in also or any(is_due(stop, period) for period in periods):
            yield start, stop
            start = stop


def is_due(steps_done: int, period: int) -> bool:
    """Whether what happens every `period` steps happens now; 0 = never."""
    return period > 0 and steps_done % period == 0


def move_aside(directory: Path, *, offload: str | None = None) -> Path | None:
    """Give a directory that holds a run another name (runs/tiny.1, .2, …), so that none is written over.

    offload   of the optimizer that is to go on, which may be a directory
    """
    if not (directory / "metrics.jsonl").exists() and not by_step(directory / "checkpoints"):
        return None
    refusal = f"output.directory = {directory} has an earlier run in it, which cannot be moved aside, as"
    if Path.cwd().is_relative_to(directory.resolve()):
        raise ConfigError(
            f"{refusal} the current directory is there, too; name one below, as in "
            "output.directory=runs/latest, or go on with --resume"
        )
    if offload not in (None, "cpu") and Path(offload).resolve().is_relative_to(directory.resolve()):
        raise ConfigError(
            f"{refusal} optimizer.offload = {offload!r} is there, too; name a place outside of it for one of "
            "them, or go on with --resume"
        )
    number = 1
    while (target := directory.with_name(f"{directory.name}.{number}")).exists():
        number += 1
    return directory.rename(target)
