"""A training run from its configuration to its last checkpoint.

`Run(config, comm)` builds everything, on all ranks or on none; `run.train()` goes through the steps.

    until the next milestone    data → forward and backward → gradients averaged → optimizer
    at a milestone              losses summed and logged; held-out loss; checkpoint

A step depends on its number alone, except for its data: their position is counted in sequences, so that a run
can be resumed with another global batch.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hpcpar.checkpoint import checkpoint_path
from hpcpar.comm import Communicator
from hpcpar.comm.agree import is_same_everywhere
from hpcpar.comm.preemption import Preemption
from hpcpar.data_parallel import MemoryReport, expected_broadcast_nbytes, memory_report, watch_activations
from hpcpar.data_parallel.memory_measurement import model_state
from hpcpar.data_parallel.saved_activations import Activations
from hpcpar.errors import DivergenceError, MismatchError
from hpcpar.mesh import Mesh
from hpcpar.models import LlamaStages
from hpcpar.pipeline_parallel.balance import StageSplit
from hpcpar.pipeline_schedules.timetable import write_timetable
from hpcpar.training.batches import RankBatches
from hpcpar.training.build import end_of_document, place_on_hardware, plain_optimizer, prepare_data
from hpcpar.training.composition import require_composition
from hpcpar.training.config import Config
from hpcpar.training.expected_traffic import ExpectedTraffic, Passes, expected_traffic
from hpcpar.training.hugging_face_start import with_hugging_face, without_reading
from hpcpar.training.layer_spans import layer_spans
from hpcpar.training.learning_rate import learning_rate
from hpcpar.training.memory_check import require_memory
from hpcpar.training.metrics import Metrics, balance_record
from hpcpar.training.milestones import Milestones, is_due
from hpcpar.training.parallelize import parallelize_llama
from hpcpar.training.pipelined import PipelinedModel
from hpcpar.training.prediction import mfu_of_a_token, own_machine
from hpcpar.training.reports import Outcome, Preempted, announce, sample, write_reports
from hpcpar.training.resolved_config import flat
from hpcpar.training.run_directory import RunDirectory
from hpcpar.training.run_record import now, recorded, resolved_config
from hpcpar.training.sequences import Sequences
from hpcpar.training.sinks import Sinks, require_sinks
from hpcpar.training.step_timeline import StepTimeline, span
from hpcpar.training.traffic_report import gather_traffic
from hpcpar.training.training_step import StepResult, held_out_loss, train_step

OF_A_NODE = (
    *("data.paths", "data.tokenizer", "data.cache", "model.hugging_face"),
    *("output.directory", "optimizer.offload", "train.threads"),
)
"""Keys that may differ between ranks: places of the same files, and cores."""


def _require_same_configuration(config: Config, comm: Communicator) -> None:
    """Raise MismatchError on all ranks for the first key that one of them has set otherwise. Collective."""
    own = {key: value for key, value in flat(config).items() if key not in OF_A_NODE}
    if is_same_everywhere(comm, str(own)):
        return
    of_ranks: list[dict[str, Any]] = comm.allgather_object(own)
    rank, key = next((n, key) for n, of in enumerate(of_ranks) for key in of if of[key] != of_ranks[0][key])
    raise MismatchError(
        f"{key} = {of_ranks[0][key]!r} on rank 0, and {of_ranks[rank][key]!r} on rank {rank}; give all ranks "
        "of a run the same configuration"
    )


class Run:
    """One rank's part of a training run; making one and every method are collective.

    config    the same on every rank
    comm      over all ranks of the run; its axes are split from it
    resume    go on from the newest checkpoint in the output directory, if there is one
    console   rank 0 reports to it; None = in silence
    preemption   asked between steps whether to stop; the caller closes it

    errors    ConfigError, LayoutError, DataError, CheckpointError, MismatchError or PeerFailedError, on all
              ranks
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
        _require_same_configuration(config, comm)
        config = with_hugging_face(config, comm)
        self.config = config
        self.comm = comm
        self.console = console if comm.rank == 0 else None
        self._preemption = preemption
        self._is_to_stop = False
        self._activations: Activations | None = None
        self._expert_load = 0.0
        self._attempt: dict[str, Any] = {}
        self.mesh = Mesh(comm, config.mesh.model_dump())
        require_composition(config, self.mesh.layout)
        require_sinks(config.output.sinks, comm)
        self._losses = self._split_for_losses()
        self.device = place_on_hardware(config, comm)
        self.data = prepare_data(config, comm, say=self.say)
        self._end_of_document = end_of_document(config, self.data.tokenizer)
        documents = Sequences(None, end_of_document=self._end_of_document)
        self.batches = RankBatches(config, self.data, self.mesh.dp, self.device, documents)
        require_memory(config, self.data.shards.vocabulary, self.mesh, self.device)
        self._build(without_reading(config, comm, resume=resume))
        self.directory = RunDirectory(config, comm, self.data, self.model.config, say=self.say)
        self._start = self.directory.open(self.model, self.optimizer, self.batches.sampler, resume=resume)
        self.batches.sampler = self._start.sampler
        self.milestones = Milestones(config, self._start.step)
        machine = own_machine() if comm.rank == 0 else None  # a file that not all ranks need to read
        self._mfu_of_a_token = mfu_of_a_token(config, self.model.config, comm.size, machine)

    # --- building ---------------------------------------------------------------------------------

    def _split_for_losses(self) -> Communicator:
        """Return a communicator of their own for losses, so that bytes of gradients equal the theory.

        It does not cross tp: ranks that share layers have the same loss.
        """
        over = self.mesh.replicas if self.mesh.pp.size == 1 else self.mesh.comm("pp", "dp", "cp")
        losses = over.split(0, name="losses")
        assert losses is not None, "every rank is in it"
        return losses

    def _build(self, config: Config) -> None:
        self._parallel = parallel = parallelize_llama(
            config.model_config_for(self.data.shards.vocabulary),
            self.mesh,
            config,
            device=self.device,
            end_of_document=self._end_of_document,
            counts_targets=self._end_of_document is not None,
        )
        self.tp, self.sequences, self.model = parallel.tp, parallel.sequences, parallel.model
        # Counted before the optimizer may give the parameters another type.
        self._start_nbytes = expected_broadcast_nbytes(self.model, self.mesh.replicas)
        self.worker = parallel.worker(
            plain_optimizer(config.optimizer, self.model),
            nonfinite="skip",
            skip_limit=config.optimizer.skip_limit,
            overlap_allgather=config.optimizer.zero_stage in (1, 2),
        )
        self.optimizer = self.worker.optimizer

    # --- the run ----------------------------------------------------------------------------------

    @property
    def split(self) -> StageSplit | None:
        """Items of the pipeline's stages; None without a pipeline."""
        return self.model.split if isinstance(self.model, LlamaStages) else None

    @property
    def first_step(self) -> int:
        """Steps that an earlier run had done."""
        return self._start.step

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the global batch."""
        return self.config.train.global_batch * self.config.train.sequence

    def tokens_after(self, steps_done: int) -> int:
        """Return the tokens learnt from, with the batch sizes that earlier runs had."""
        return self._start.tokens + (steps_done - self.first_step) * self.tokens_per_step

    def train(self) -> Outcome | Preempted:
        """Train the steps that are left; evaluate, save and report. Stop early if asked to."""
        with recorded(self, announce(self)) as self._attempt:
            outcome = self._train()
            status = "preempted" if isinstance(outcome, Preempted) else "ended"
            self._attempt |= {"status": status, "steps": outcome.steps}
        return outcome

    def _train(self) -> Outcome | Preempted:
        milestones = self.milestones
        self.directory.start_clock()
        loss: float | None = None
        held_out: float | None = None
        seconds = 0.0
        with ExitStack() as stack:
            metrics = self._open_metrics(stack)
            has_timeline = self.config.output.timeline_steps and milestones.steps_left
            timeline = StepTimeline(self.comm) if has_timeline else None
            if self._start.owes_evaluation:
                held_out = self._evaluate(self.first_step, metrics)
            try:
                for start, stop in milestones.intervals():
                    start_s = time.perf_counter()
                    done, loss = self.train_steps(start, stop, metrics)
                    seconds += time.perf_counter() - start_s
                    self._attempt["steps"] = done
                    if self._is_to_stop:
                        return self._stop_early(done)
                    if timeline is not None and stop == milestones.traced_until:
                        timeline.write(self.directory.path / "timeline.json")
                    if isinstance(self.worker, PipelinedModel) and stop == milestones.steps:
                        self._record_last_step(self.worker)
                    if milestones.is_evaluated(stop):
                        held_out = self._evaluate(stop, metrics)
                    self.directory.finish_save(if_written=True)
                    if milestones.is_saved(stop) or self.directory.is_time_to_save():
                        self.save(stop, wait=stop == milestones.steps)
            except DivergenceError:
                self.directory.finish_save()  # of a step before
                raise
            if held_out is None:
                held_out = self._evaluate(self.first_step, metrics)
        if self._preemption is not None:
            self._preemption.settle()
        memory = self.memory_report()
        outcome = Outcome(
            first_step=self.first_step,
            steps=self.first_step + milestones.steps_left,
            loss=loss if loss is not None and math.isfinite(loss) else None,
            held_out_loss=held_out,
            tokens_per_s=milestones.steps_left * self.tokens_per_step / seconds if seconds else 0.0,
            seconds=seconds,
            traffic=tuple(gather_traffic(self.comm, self._expected_traffic())),
            memory=memory,
            expert_load=self.expert_load(memory),
        )
        write_reports(self, outcome, sample(self))
        return outcome

    def train_steps(self, start: int, stop: int, metrics: Metrics | None = None) -> tuple[int, float]:
        """Train steps start … stop - 1, or fewer if the run is to stop.

        returns   steps done in all, and the last one's loss
        errors    DivergenceError on all ranks, and no checkpoint: for optimizer.skip_limit steps in a row
                  whose gradients are not finite; for a loss that is not, in a step that was taken; for
                  replicas that differ

        Losses are summed over ranks once for all of these steps, so that no step waits for a number.
        """
        start_s, sent = time.perf_counter(), self._nbytes_sent()
        results: list[StepResult] = []
        while not results or (start + len(results) < stop and not self._is_to_stop):
            try:
                results.append(self._watched_step(start + len(results)))
                if is_due(start + len(results), self.config.train.compare_every):
                    self.optimizer.require_same_replicas()
            except DivergenceError as error:
                raise DivergenceError(
                    f"step {start + len(results)}: {error}. --resume goes on from the newest checkpoint in "
                    f"{self.directory.checkpoints}"
                ) from error
            self._ask_whether_to_stop(start + len(results))
        stop = start + len(results)
        losses = torch.stack([result.loss_share for result in results]).cpu()
        self._losses.allreduce(losses)
        step_s = (time.perf_counter() - start_s) / len(results)
        self._require_finite(start, losses.tolist(), results)
        balances = self._balances(results)
        if metrics is not None:
            of_all = self._means(step_s, self._nbytes_sent() - sent, len(results))
            metrics.steps(
                [
                    {
                        "step": step,
                        "time": now(ago_s=step_s * (stop - 1 - step)),
                        "loss": loss,
                        "learning_rate": self._learning_rate(step, self.config.optimizer.learning_rate),
                        "gradient_norm": float(result.gradient_norm),
                        "tokens": self.tokens_after(step + 1),
                        **of_all,
                        **({} if result.skipped is None else {"skipped": str(result.skipped)}),
                        **balance,
                    }
                    for step, loss, result, balance in zip(
                        range(start, stop), losses.tolist(), results, balances, strict=True
                    )
                ]
            )
        return stop, float(losses[-1])

    def _nbytes_sent(self) -> Counter[str]:
        """Return the bytes that this rank has sent so far, by communicator; those of one name together."""
        sent: Counter[str] = Counter()
        for name, traffic in self.comm.traffics().items():
            sent[name.partition("#")[0]] += traffic.nbytes_sent()
        return sent

    def _means(self, step_s: float, sent: Counter[str], steps: int) -> dict[str, Any]:
        """Return the part of a line of metrics that the steps of one call of `train_steps` have in common."""
        tokens_per_s = self.tokens_per_step / step_s
        told: dict[str, Any] = {"tokens_per_s": tokens_per_s, "step_s": step_s}
        if self._mfu_of_a_token is not None:
            told["mfu"] = tokens_per_s * self._mfu_of_a_token
        return told | {"nbytes_sent": {name: nbytes / steps for name, nbytes in sent.items()}}

    def _balances(self, results: Sequence[StepResult]) -> list[dict[str, Any]]:
        """Return what the metrics tell of the experts of all layers, for each step. Collective."""
        if self.worker.balancing is None:
            return [{} for _ in results]
        of_ranks = self.mesh.pp.allgather_object([result.balance for result in results])
        return [balance_record(by_layer) for by_layer in zip(*of_ranks, strict=True)]

    def save(self, steps_done: int, *, owes_evaluation: bool = False, wait: bool = True) -> Path:
        """Save the checkpoint after so many steps.

        owes_evaluation   the held-out loss that is due now has not been taken
        wait              until it is there, also with output.save_async
        errors            CheckpointError, on all ranks
        """
        point = replace(
            self._start,
            step=steps_done,
            tokens=self.tokens_after(steps_done),
            sampler=self.batches.sampler,
            owes_evaluation=owes_evaluation,
        )
        self.directory.save(point, self.model, self.optimizer, wait=wait, attempt=self._attempt)
        return checkpoint_path(self.directory.checkpoints, steps_done)

    def memory_report(self) -> MemoryReport:
        """Return the memory of all ranks now, and activations as in the first step. Collective."""
        return memory_report(self.model, self.optimizer, self.comm, activations=self._activations)

    def expert_load(self, memory: MemoryReport) -> float | None:
        """Return the rows that came to a rank's experts over those of its tokens; None without experts.

        Of the rank that needs most memory, in the first step: in the forward with most, or on average in a
        pipeline, which keeps several. Collective.
        """
        if self.worker.balancing is None:
            return None
        return self.comm.allgather_object(self._expert_load)[memory.worst.rank]

    def say(self, text: str) -> None:
        """Print to the console, on rank 0."""
        if self.console is not None:
            # Text that a model wrote may look like markup.
            self.console.print(text, highlight=False, markup=False)

    # --- steps ------------------------------------------------------------------------------------

    def _watched_step(self, step: int) -> StepResult:
        """Run a step; in the run's first one, and in those of the timeline, count the saved activations."""
        trace = self.comm.trace
        if self._activations is not None and trace is None:
            return self._step(step)
        with watch_activations(self.model, trace) as activations, layer_spans(self.model, trace):
            result = self._step(step)
        if self._activations is None:
            self._activations = activations
            if self.worker.balancing is not None and self.worker.balancing.expert_loads:
                loads = self.worker.balancing.expert_loads
                self._expert_load = max(loads) if self.mesh.pp.size == 1 else statistics.fmean(loads)
        if trace is not None:
            state = model_state(self.model, self.optimizer)
            trace.count("model state", **{what: line.nbytes for what, line in state.items()})
        return result

    def _step(self, step: int) -> StepResult:
        trace = self.comm.trace
        with span(trace, "data"):
            tokens, targets = self.batches.training_batch(step)
        for group in self.optimizer.param_groups:
            peak = self.config.optimizer.rate_of(group.get("optimizer", ""))
            group["lr"] = self._learning_rate(step, peak)
        clip_norm = self.config.optimizer.clip_norm or math.inf
        return train_step(self.worker, tokens, targets, clip_norm=clip_norm, trace=trace)

    def _learning_rate(self, step: int, peak: float) -> float:
        steps, schedule = self.config.train.steps, self.config.schedule
        return learning_rate(
            step,
            steps=steps,
            peak=peak,
            warmup_steps=int(schedule.warmup_fraction * steps),
            final_fraction=schedule.final_fraction,
        )

    def _ask_whether_to_stop(self, steps_done: int) -> None:
        """Agree on whether to stop here; after the last step it makes no difference."""
        if self._preemption is not None and steps_done < self.milestones.steps:
            self._is_to_stop = self._preemption.is_agreed()

    def _stop_early(self, steps_done: int) -> Preempted:
        """Save the state that a resumed run goes on from, and leave out the rest: time is short."""
        checkpoint = self.save(steps_done, owes_evaluation=self.milestones.is_evaluated(steps_done))
        self.say(
            f"asked to stop: {steps_done} of {self.config.train.steps} steps are done and saved in "
            f"{checkpoint}; --resume goes on from there"
        )
        return Preempted(steps_done, checkpoint)

    def _evaluate(self, steps_done: int, metrics: Metrics | None) -> float:
        loss = held_out_loss(self.worker, self.batches.held_out_batches(), self._losses)
        if metrics is not None:
            metrics.held_out(steps_done, loss)
        if not math.isfinite(loss):
            raise self._diverged(f"the held-out loss after step {steps_done} is {loss}")
        return loss

    def _require_finite(self, start: int, losses: Sequence[float], results: Sequence[StepResult]) -> None:
        """Raise DivergenceError for the first of these steps that was taken on a loss that is not finite."""
        for step, (loss, result) in enumerate(zip(losses, results, strict=True), start):
            if result.skipped is None and not math.isfinite(loss):
                raise self._diverged(f"the loss of step {step} is {loss}")

    def _diverged(self, found: str) -> DivergenceError:
        return DivergenceError(
            f"{found}, and nothing can be learnt from there on; lower optimizer.learning_rate "
            f"(now {self.config.optimizer.learning_rate}), "
            f"raise schedule.warmup_fraction, or set optimizer.clip_norm"
        )

    # --- records ----------------------------------------------------------------------------------

    def _open_metrics(self, stack: ExitStack) -> Metrics | None:
        """Open metrics.jsonl and the display of progress, on rank 0."""
        if self.comm.rank != 0:
            return None
        metrics = Metrics(
            self.directory.path,
            first_step=self.first_step,
            steps=self.config.train.steps,
            console=self.console,
            sinks=Sinks(
                self.config.output.sinks, self.directory.path, self.first_step, flat(resolved_config(self))
            ),
        )
        return stack.enter_context(metrics)

    def _record_last_step(self, worker: PipelinedModel) -> None:
        """Write the times of the last step's actions, for `hpcpar draw pipeline --measured`."""
        timetable = worker.pipeline.timetable()
        if self.comm.rank == 0:
            write_timetable(timetable, self.directory.path / "pipeline.json")

    def _expected_traffic(self) -> ExpectedTraffic:
        intervals = self.milestones.intervals()
        due = sum(self.milestones.is_evaluated(stop) for _, stop in intervals)
        return self.expected_traffic(
            [stop - start for start, stop in intervals],
            evaluations=max(1, self._start.owes_evaluation + due),
        )

    def expected_traffic(
        self, intervals: Sequence[int], *, evaluations: int, from_start: bool = True
    ) -> ExpectedTraffic:
        """Return the bytes that theory says for some steps and evaluations.

        intervals    steps of each call of `train_steps`
        from_start   with what is sent before the first step
        """
        passes = Passes(
            trained=self.batches.microbatch_sizes(self.config.train.global_batch),
            evaluations=evaluations,
            held_out=self.batches.microbatch_sizes(len(self.batches.held_out_windows)),
            intervals=intervals,
            loads=1 if self._start.is_resumed and from_start else 0,
            announces=from_start,
        )
        return expected_traffic(
            self._parallel,
            self.worker,
            self._losses,
            passes,
            start_nbytes={} if self.optimizer.zero_stage == 3 or not from_start else self._start_nbytes,
            preemption=None if self._preemption is None else self._preemption.comm,
        )
