"""Reports of a run: its announcement, its outcome, summary.json, loss.png and a sample of text."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from hpcpar.data_parallel import MemoryReport
from hpcpar.launch.rank_map import RankMap, gather_rank_map
from hpcpar.models import generate
from hpcpar.training.metrics import draw_losses, records_of
from hpcpar.training.pipelined import PipelinedLogits, PipelinedModel
from hpcpar.training.prediction import layers_of, median_step_s, predict
from hpcpar.training.traffic_report import TrafficLine, as_records, table
from hpcpar.units import format_duration

if TYPE_CHECKING:
    from hpcpar.training.trainer import Run

PROMPT_TOKENS = 32
"""Tokens of held-out text that the trained model's sample continues."""


@dataclass(frozen=True)
class Outcome:
    """Result of a whole run, the same on every rank.

    first_step      steps that an earlier run had done
    steps           steps done in all
    loss            of the last step's training batch, nats per token; None if it was skipped or none was left
    held_out_loss   nats per token, after the last step
    tokens_per_s    of this run's steps, over all ranks
    seconds         that this run's steps took
    traffic         bytes and messages of all ranks, beside the theory
    memory          bytes of all ranks at the end, beside the formula; activations as in the first step
    expert_load     rows that came to the experts of the rank that needs most memory, over those of its
                    tokens, as `Run.expert_load`; None without experts
    """

    first_step: int
    steps: int
    loss: float | None
    held_out_loss: float
    tokens_per_s: float
    seconds: float
    traffic: tuple[TrafficLine, ...]
    memory: MemoryReport
    expert_load: float | None = None


@dataclass(frozen=True)
class Preempted:
    """Result of a run that was asked to stop, the same on every rank.

    steps        done in all, of those that were asked for
    checkpoint   of exactly these, from which a resumed run goes on
    """

    steps: int
    checkpoint: Path


def announce(run: Run) -> RankMap | None:
    """Report ranks, model, text and steps, before the first step; return the ranks on rank 0. Collective."""
    config, shards = run.config, run.data.shards
    total = config.train.last_step * run.tokens_per_step
    rank_map = gather_rank_map(run.comm)
    if rank_map is not None:
        run.say("\n".join(rank_map.lines()))
    run.say(
        f"ranks: {run.comm.size} ({run.mesh.layout}), torch threads on each: "
        f"{torch.get_num_threads()}, on {run.device}\n"
        f"model: {config.model.hugging_face or config.model.preset}, "
        f"{run.model.config.parameters():,} parameters{_tensor_parallel(run)}\n"
        f"text:  {len(shards.train):,} tokens to learn from, {len(shards.held_out):,} held out\n"
        f"{_pipeline(run)}"
        f"steps: {config.train.last_step} of {config.train.global_batch} × {config.train.sequence} tokens, "
        f"{total:,} in all, {total / len(shards.train):.2f} of the text"
    )
    return rank_map


def _tensor_parallel(run: Run) -> str:
    if run.tp.size == 1:
        return ""
    held = sum(parameter.numel() for parameter in run.model.parameters())
    sequences = ", which share the sequence, too" if run.tp.sequence_parallel else ""
    return f", {held:,} on each of {run.tp.size} ranks{sequences}"


def _pipeline(run: Run) -> str:
    if not isinstance(run.worker, PipelinedModel):
        return ""
    schedule, layers = run.worker.pipeline.schedule, layers_of(run.worker.model.split)
    return (
        f"pipeline: {schedule.name}, {schedule.ranks} ranks, {schedule.microbatches} microbatches, "
        f"layers of the stages {', '.join(map(str, layers))}\n"
    )


def sample(run: Run) -> str | None:
    """Continue the beginning of the held-out text with the trained model, if configured. Collective."""
    config = run.config
    if not config.output.sample_tokens:
        return None
    prompt = run.data.shards.held_out.read(0, min(PROMPT_TOKENS, config.train.sequence))
    tokens = torch.from_numpy(prompt.astype(np.int64)).unsqueeze(0).to(run.device)
    # All ranks generate the same: ranks that share layers or parameters must call the model alike.
    model = PipelinedLogits(run.worker) if isinstance(run.worker, PipelinedModel) else run.worker.model
    written = generate(model, tokens, config.output.sample_tokens, seed=config.train.seed)
    known = written[0][written[0] < run.data.shards.vocabulary].tolist()
    return run.data.tokenizer.decode(known)


def write_reports(run: Run, outcome: Outcome, sampled: str | None) -> None:
    """Write summary.json and loss.png; print traffic, memory and the sample. On rank 0."""
    if run.comm.rank != 0:
        return
    directory, vocabulary = run.directory.path, run.data.shards.vocabulary
    records = records_of(directory / "metrics.jsonl")
    prediction = predict(
        run,
        memory=outcome.memory,
        traffic=outcome.traffic,
        step_s=median_step_s(records, outcome.first_step),
        expert_load=outcome.expert_load,
    )
    summary = {
        "layout": str(run.mesh.layout),
        **{name: value for name, value in vars(outcome).items() if name not in ("traffic", "memory")},
        "traffic": as_records(outcome.traffic),
        "memory": outcome.memory.as_record(),
        "prediction": prediction.as_record(),
    }
    (directory / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    draw_losses(records, directory / "loss.png", vocabulary=vocabulary)
    if run.console is not None:
        run.console.print(table(outcome.traffic, size=run.comm.size), crop=False)
        run.console.print(outcome.memory.table())
        run.console.print(prediction.table())
        if prediction.missing is not None:
            run.say(prediction.missing)
    if sampled is not None:
        run.say(f"a sample:\n{sampled}")
    run.say(
        f"held-out loss {outcome.held_out_loss:.3f} nats per token (ln({vocabulary}) = "
        f"{math.log(vocabulary):.3f} knows nothing)\n"
        f"{outcome.tokens_per_s:,.0f} tokens/s, {format_duration(outcome.seconds)} of training\n"
        f"run.json, metrics.jsonl, loss.png, summary.json and checkpoints are in {directory}"
    )
