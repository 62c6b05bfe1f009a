"""Output directory of a run: earlier runs moved aside, checkpoints saved, and the newest one resumed from.

<directory>/
    checkpoints/step-00000040/          whole or absent
    run.json, metrics.jsonl, loss.png, summary.json, timeline.json, pipeline.json
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from hpcpar.checkpoint import Loaded, PendingSave, load, save, save_async
from hpcpar.checkpoint.checkpoint_directory import by_step
from hpcpar.comm import Communicator
from hpcpar.data import Prepared, Sampler
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.errors import CheckpointError, ConfigError, PeerFailedError
from hpcpar.models import LlamaConfig
from hpcpar.training.config import Config, model_config_saved
from hpcpar.training.run_record import require_newest
from hpcpar.units import format_duration

logger = logging.getLogger(__name__)

MODEL_KEYS = (
    *("hidden_size", "layers", "heads", "kv_heads", "head_size", "ffn_size"),
    *("rope_theta", "norm_epsilon", "tie_embeddings", "qk_norm"),
    *("experts.count", "experts.per_token", "experts.ffn_size", "experts.shared_ffn_size"),
    *("experts.first_dense", "experts.score", "experts.renormalise", "experts.scale"),
    *("experts.groups", "experts.groups_per_token"),
)
"""Keys that decide a model's parameters, vocabulary aside, and its function of them."""


@dataclass(frozen=True)
class StartPoint:
    """State that a run starts from, beside model and optimizer.

    step              steps done
    tokens            learnt from in these, perhaps with another global batch
    sampler           of the steps that are left
    owes_evaluation   the held-out loss that was due at `step` was not taken
    is_resumed        a checkpoint was loaded
    """

    step: int
    tokens: int
    sampler: Sampler
    owes_evaluation: bool = False
    is_resumed: bool = False


@dataclass(frozen=True)
class _BeingWritten:
    """A checkpoint that is written while training goes on.

    start_s   by the monotonic clock
    stall_s   for which training stood still to copy its state
    """

    save: PendingSave
    step: int
    start_s: float
    stall_s: float


class RunDirectory:
    """Output directory and checkpoints of a run; every method is collective.

    say   reports to the user, on rank 0
    """

    def __init__(
        self,
        config: Config,
        comm: Communicator,
        data: Prepared,
        model_config: LlamaConfig,
        *,
        say: Callable[[str], None],
    ) -> None:
        self.path = config.output.directory
        self.checkpoints = self.path / "checkpoints"
        self._config = config
        self._comm = comm
        self._data = data
        self._model_config = model_config
        self._say = say
        self._saved_s = time.monotonic()
        self._being_written: _BeingWritten | None = None

    def open(
        self, model: nn.Module, optimizer: DistributedOptimizer, sampler: Sampler, *, resume: bool
    ) -> StartPoint:
        """Make the directory, moving an earlier run aside, or load its newest sound checkpoint.

        errors   ConfigError, CheckpointError or PeerFailedError, on all ranks
        """
        is_found = False
        with self._comm.together("making the output directory"):
            if self._comm.rank == 0:
                if resume:
                    is_found = bool(by_step(self.checkpoints))
                else:
                    moved = move_aside(self.path, offload=self._config.optimizer.offload)
                    if moved is not None:
                        self._say(f"the earlier run in {self.path} is now {moved}")
                self._make()
        is_found = self._comm.broadcast_object(is_found)
        if is_found:
            return self._resume(model, optimizer, sampler)
        if resume:
            self._say(f"no checkpoint in {self.checkpoints}: starting from the first step")
        return StartPoint(0, 0, sampler)

    def start_clock(self) -> None:
        """Count the minutes to the next checkpoint from here."""
        self._saved_s = time.monotonic()

    def is_time_to_save(self) -> bool:
        """Return True if the last checkpoint is as old as one may be, by rank 0's clock."""
        limit_s = 60 * self._config.output.checkpoint_minutes
        if not limit_s:
            return False
        is_due = self._comm.rank == 0 and time.monotonic() - self._saved_s >= limit_s
        answer: bool = self._comm.broadcast_object(is_due)
        return answer

    def save(
        self,
        point: StartPoint,
        model: nn.Module,
        optimizer: DistributedOptimizer,
        *,
        wait: bool,
        attempt: Mapping[str, Any],
    ) -> None:
        """Save the checkpoint that a resumed run starts from; one that is being written is finished before.

        wait      until it is there, also with output.save_async
        attempt   of run.json, on rank 0
        errors    CheckpointError, on all ranks; also if another run has taken the directory
        """
        self.finish_save()
        start_s = time.monotonic()
        epoch, place = point.sampler.position(point.step)
        extra = {
            "config": self._config.model_dump(mode="json"),
            "text": self._data.shards.digest,
            "tokenizer": self._data.shards.tokenizer_identity,
            "end_of_document": self._data.tokenizer.end_of_document,
            "tokens": point.tokens,
            # Windows of an epoch's order, which the seed names.
            "data": {
                "epoch": epoch,
                "place": place,
                "seed": point.sampler.seed,
                "block": point.sampler.block_tokens,
            },
            "owes_evaluation": point.owes_evaluation,
        }
        begin = save_async if self._config.output.save_async and not wait else save
        with self._saving(point.step):
            with self._comm.together("looking whose directory it is"):
                require_newest(self.path, attempt)
            begun = begin(
                self.checkpoints,
                step=point.step,
                model=model,
                optimizer=optimizer,
                extra=extra,
                comm=self._comm,
                keep=self._config.output.keep,
            )
        self._saved_s = time.monotonic()
        if isinstance(begun, PendingSave):
            self._being_written = _BeingWritten(begun, point.step, start_s, self._saved_s - start_s)

    def finish_save(self, *, if_written: bool = False) -> None:
        """Have the checkpoint that is being written there, if there is one.

        if_written   only if no rank would wait
        errors       CheckpointError, on all ranks
        """
        one = self._being_written
        if one is None or (if_written and not all(self._comm.allgather_object(one.save.is_written()))):
            return
        self._being_written = None
        finish_s = time.monotonic()
        with self._saving(one.step):
            one.save.finish()
        now_s = time.monotonic()
        self._say(
            f"checkpoint of step {one.step}: there after {format_duration(now_s - one.start_s)}, training "
            f"stood still {format_duration(one.stall_s + now_s - finish_s)}"
        )

    @contextmanager
    def _saving(self, step: int) -> Iterator[None]:
        try:
            yield
        except (OSError, CheckpointError, PeerFailedError) as error:
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be saved in {self.checkpoints}: {error}; once "
                "that is mended, go on from the one before with --resume"
            ) from error

    def _make(self) -> None:
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"output.directory = {self.path} cannot be made: {error}; name another one"
            ) from error

    def _resume(self, model: nn.Module, optimizer: DistributedOptimizer, sampler: Sampler) -> StartPoint:
        # The checkpoint holds weight decay, betas and the like too, but the configuration decides them.
        configured = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        restored = load(
            self.checkpoints,
            model=model,
            optimizer=optimizer,
            comm=self._comm,
            accept=self._require_compatible,
        )
        for group, options in zip(optimizer.param_groups, configured, strict=True):
            group.update(options)
        extra, train = restored.extra, self._config.train
        self._warn_of_changes(extra.get("config", {}))
        sampler = self._resumed_sampler(restored, sampler)
        self._say(f"resuming after step {restored.step} from {restored.path}")
        return StartPoint(
            restored.step,
            extra.get("tokens", restored.step * train.global_batch * train.sequence),
            sampler,
            owes_evaluation=extra.get("owes_evaluation", False),
            is_resumed=True,
        )

    def _require_compatible(self, checkpoint: Path, extra: Mapping[str, Any]) -> None:
        """Raise CheckpointError for another optimizer, another model, or text cut into other windows."""
        saved: dict[str, Any] = extra.get("config", {})
        name = self._config.optimizer.name
        stepped = saved.get("optimizer", {}).get("name", name)
        if stepped != name:
            raise CheckpointError(
                f"{checkpoint} is of another optimizer: optimizer.name = {stepped!r} there, {name!r} here; "
                f"set optimizer.name={stepped}, or start anew without --resume"
            )
        self._require_same_windows(checkpoint, extra)
        before, now = model_config_saved(saved), self._model_config
        if before is None:
            return
        if before.experts is None and now.experts is not None:
            raise CheckpointError(
                f"{checkpoint} is of a model without experts, and there are experts.count = "
                f"{now.experts.count} here; leave out model.experts and presets that "
                "have them, or start anew without --resume"
            )
        changed = [key for key in MODEL_KEYS if model_value(before, key) != model_value(now, key)]
        rates = [of.experts.bias_rate for of in (before, now) if of.experts is not None]
        if len({rate > 0 for rate in rates}) > 1:  # with a rate the model has biases, without one it has none
            changed.append("experts.bias_rate")
        if changed:
            there, here = ({key: json.dumps(model_value(of, key)) for key in changed} for of in (before, now))
            differences = [f"model.{key} = {there[key]} there, {here[key]} here" for key in changed]
            advice = " ".join(f"model.{key}={value}" for key, value in there.items())
            raise CheckpointError(
                f"{checkpoint} is of another model: {'; '.join(differences)}; set {advice}, or start anew "
                "without --resume"
            )

    def _warn_of_changes(self, saved: dict[str, Any]) -> None:
        """Warn of settings that change the course of a resumed run."""
        now = self._config.model_dump(mode="json")
        changes = [
            (f"{section}.{key}", value, saved.get(section, {}).get(key, value))
            for section in ("data", "train", "optimizer", "schedule")
            for key, value in now[section].items()
        ]
        model = model_config_saved(saved)
        if model is not None:
            keys = ["dropout"]
            if model.experts is not None:
                keys += [f"experts.{field.name}" for field in fields(model.experts)]
            # Those of MODEL_KEYS are equal by now.
            changes += [
                (f"model.{key}", model_value(self._model_config, key), model_value(model, key))
                for key in keys
            ]
        for key, value, before in changes:
            if key != "train.until" and before != value and self._comm.rank == 0:
                logger.warning("resuming with %s = %r, which was %r before", key, value, before)

    def _is_same_text(self, extra: Mapping[str, Any]) -> bool:
        return extra.get("text") in (None, self._data.shards.digest)

    def _require_same_windows(self, checkpoint: Path, extra: Mapping[str, Any]) -> None:
        """Raise CheckpointError where another order would mix text learnt from with text that was not."""
        position = extra.get("data", {"place": 1})
        now = self._config.data.block or self._config.train.sequence
        sequence = _saved_sequence(extra, self._config.train.sequence)
        before = position.get("block", sequence)
        if before == now or not self._is_same_text(extra) or not position["place"]:
            return
        what = f"sequences of {before} tokens" if before == sequence else f"blocks of {before} tokens"
        key = "train.sequence" if before == sequence else "data.block"
        raise CheckpointError(
            f"{checkpoint} was saved amid an epoch of {what}, and "
            f"{'data.block' if self._config.data.block else 'train.sequence'} = {now} here: cut into others, "
            "text would be learnt from twice in it and other text never; set "
            f"{key}={before}, give other text, or start anew without --resume. A run whose sequences become "
            "longer has data.block, of the longest ones, from its start on; [[stage]] tables set it"
        )

    def _resumed_sampler(self, restored: Loaded, sampler: Sampler) -> Sampler:
        """Go on behind the sequences that were learnt from, whatever the global batch was.

        Files may change under their names: changed text is begun with, in an order of its own.
        """
        extra, train = restored.extra, self._config.train
        saved = extra.get("config", {}).get("train", {})
        position = extra.get("data")
        if position is None:  # saved by a version that counted steps
            batch = saved.get("global_batch", train.global_batch)
            epoch, steps = divmod(restored.step, max(1, sampler.windows // batch))
            position = {"epoch": epoch, "place": steps * batch, "seed": saved.get("seed", train.seed)}
        if self._is_same_text(extra):
            before = _saved_sequence(extra, train.sequence)
            place, skipped = place_with(train.sequence, position["place"], before)
            if skipped:
                self._say(f"going on {skipped} tokens later, where a sequence of {train.sequence} begins")
            if position["seed"] != train.seed and self._comm.rank == 0:
                logger.warning("the text's order stays that of train.seed = %r", position["seed"])
            return replace(sampler, seed=position["seed"]).going_on_from(
                restored.step, position["epoch"], place
            )
        if self._comm.rank == 0:
            logger.warning(
                "resuming with other text than before: the files or the tokenizer, or how they are cut, have "
                "changed, and what is held out now may have been learnt from; the text that is there now is "
                "gone through from the beginning of an order of its own"
            )
        return sampler.going_on_from(restored.step, position["epoch"] + 1, 0)


def place_with(sequence: int, place: int, before: int) -> tuple[int, int]:
    """Return the first window of `sequence` tokens behind `place` windows of `before`, and tokens skipped.

    place_with(64, 3, 16) == (1, 16)
    """
    tokens = place * before
    found = -(-tokens // sequence)
    return found, found * sequence - tokens


def _saved_sequence(extra: Mapping[str, Any], otherwise: int) -> int:
    """Return the tokens of a sequence when the checkpoint was saved."""
    found: int = extra.get("config", {}).get("train", {}).get("sequence", otherwise)
    return found


def move_aside(directory: Path, *, offload: str | None = None) -> Path | None:
    """Rename a directory that holds a run (to runs/tiny.1, .2, …), so that none is overwritten.

    offload   place of the new run's optimizer state, which may be a directory
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


def model_value(config: LlamaConfig, key: str) -> Any:
    """Return the model's value of a key such as "experts.count"; None where it has no experts."""
    value: Any = config
    for name in key.split("."):
        value = None if value is None else getattr(value, name)
    return value
