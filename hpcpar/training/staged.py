"""Runs in stages: one file whose layout, batch or sequence changes after given steps.

    [mesh]                      the run as a whole, and what its first stage has
    tp = 2
    [[stage]]
    until = 20                  steps done when the stage ends
    [[stage]]
    until = 40
    train.global_batch = 32     changes to the tables above, for this stage alone
    [[stage]]                   the last one ends with train.steps
    train.sequence = 256
    mesh = { tp = 2, cp = 2 }

Each stage is a configuration of its own, and goes on from the last one's checkpoint: parameters, optimizer
state and place in the text are those that it left, whatever ranks hold them now.

    configs = parse_stages(text, source="run.toml")
    for run in runs(configs, comm):
        outcome = run.train()
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console

from hpcpar.checkpoint.checkpoint_directory import by_step
from hpcpar.comm import Communicator
from hpcpar.comm.preemption import Preemption
from hpcpar.errors import ConfigError, LayoutError
from hpcpar.mesh import AXES, Layout
from hpcpar.training.config import Config, config_of, read_table, write_override
from hpcpar.training.hugging_face_start import with_hugging_face
from hpcpar.training.run_directory import MODEL_KEYS, model_value
from hpcpar.training.trainer import Run

SAME_KEYS = (
    *("model.preset", "model.hugging_face", "model.vocab_size", "model.seed", "optimizer.name"),
    *("train.precision", "train.steps", "output.directory", "data.tokenizer", "data.eos_token"),
)
"""Keys that all stages share, because a checkpoint of one is gone on from by the next."""


def parse_stages(text: str, *, source: str, overrides: Sequence[str] = ()) -> tuple[Config, ...]:
    """Return the configuration of each stage of a file; of a file without stages, the one.

    overrides   as for `parse`, of every stage; stage.2.until=30 is of the second one alone
    errors      ConfigError for stages that do not follow each other, or that change what a checkpoint keeps
    """
    return stages_of(read_table(text, source), source=source, overrides=overrides)


def stages_of(table: dict[str, Any], *, source: str, overrides: Sequence[str] = ()) -> tuple[Config, ...]:
    """Return the configurations of a file's tables, as `parse_stages`."""
    tables = table.pop("stage", [])
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise ConfigError(f"{source}: stage is not a list of tables; write each under [[stage]]")
    common = [each for each in overrides if not each.startswith("stage.")]
    for override in overrides:
        if override not in common:
            _override_stage(tables, override, source)
    if not tables:
        return (config_of(table, source=source, overrides=common),)
    _require_no_until(table, common, source)
    configs = tuple(
        config_of(_of_stage(table, stage), source=f"{source}, stage {number}", overrides=common)
        for number, stage in enumerate(tables, start=1)
    )
    _require_following(configs, source)
    _require_same(configs, source)
    return _with_common_block(configs, source)


def runs(
    configs: Sequence[Config],
    comm: Communicator,
    *,
    resume: bool = False,
    console: Console | None = None,
    preemption: Preemption | None = None,
) -> Iterator[Run]:
    """Yield the run of each stage that is left, to be trained before the next one is asked for. Collective.

    `resume` goes on from the last checkpoint, in its stage. Where ranks have agreed to stop no stage begins.
    A stage of another number of ranks is for another job: the runs end before it.

    Keep no reference to a run when asking for the next, or two models are in memory at once.

    errors   as for `Run`
    """
    configs = [with_hugging_face(config, comm) for config in configs]
    _require_layouts(configs, comm.size)
    first = stage = _stage_at(configs, _newest_step(configs[0], comm) if resume else 0)
    resumes = resume
    while stage < len(configs):
        if stage > first and not _is_for(configs[stage], comm.size):
            return  # which the stage before has announced
        run = Run(configs[stage], comm, resume=resumes, console=console, preemption=preemption)
        earlier = _stage_at(configs, run.first_step)
        if earlier < stage:  # the newest checkpoint was damaged, and one of an earlier stage was loaded
            stage = earlier
            del run
            _forget_run(comm)
            continue
        if len(configs) > 1:
            run.say(_announcement(configs, stage, comm.size))
        yield run
        del run
        _forget_run(comm)
        stage, resumes = stage + 1, True
        if preemption is not None and preemption.has_agreed:
            return


def _forget_run(comm: Communicator) -> None:
    """Free the memory of a run that nobody refers to, and count the next one's bytes from zero."""
    gc.collect()
    for traffic in comm.traffics().values():
        traffic.reset()


def _announcement(configs: Sequence[Config], stage: int, ranks: int) -> str:
    """Return what people are told at the start of a stage."""
    told = f"stage {stage + 1} of {len(configs)}: until step {configs[stage].train.last_step}"
    if stage + 1 == len(configs) or _is_for(configs[stage + 1], ranks):
        return told
    others = _own_size(configs[stage + 1])
    return f"{told}; the next one is for {others} ranks: start it on so many with --resume"


def _own_size(config: Config) -> int | None:
    """Return the ranks that the degrees multiply to; None where one of them is left to the job."""
    degrees = [getattr(config.mesh, axis) for axis in AXES]
    return None if -1 in degrees else math.prod(degrees)


def _is_for(config: Config, ranks: int) -> bool:
    """True where a job of so many ranks can run the stage."""
    return _own_size(config) in (None, ranks)


def _require_layouts(configs: Sequence[Config], ranks: int) -> None:
    """Raise the error that a later stage would end with, before the first one begins."""
    if len(configs) == 1:
        return
    for number, config in enumerate(configs, 1):
        try:
            layout = Layout.fit(_own_size(config) or ranks, **config.mesh.model_dump())
            config.require_recompute()
            config.require_sequence_for(layout.tp)
            config.require_experts_for(layout.ep)
            config.require_shards_for(layout.dp_shard)
            config.require_pipeline_for(layout.pp, layout.dp)
        except (ConfigError, LayoutError) as error:
            raise type(error)(f"stage {number}: {error}") from error


def _stage_at(configs: Sequence[Config], steps_done: int) -> int:
    """Return the stage that goes on after so many steps; of a finished run the last one."""
    left = [number for number, config in enumerate(configs) if steps_done < config.train.last_step]
    return left[0] if left else len(configs) - 1


def _newest_step(config: Config, comm: Communicator) -> int:
    """Return the steps of the newest checkpoint, sound or not; 0 = there is none. Collective."""
    step = 0
    with comm.together("looking for checkpoints"):
        if comm.rank == 0:
            step = max(by_step(config.output.directory / "checkpoints"), default=0)
    newest: int = comm.broadcast_object(step)
    return newest


# --- tables ---------------------------------------------------------------------------------------


def merged(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested table with these values in place of its own."""
    result = copy.deepcopy(dict(table))
    for key, value in changes.items():
        own = result.get(key)
        if isinstance(own, dict) and isinstance(value, Mapping):
            result[key] = merged(own, value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def _of_stage(table: Mapping[str, Any], stage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run's tables with the stage's changes."""
    changes = {key: value for key, value in stage.items() if key != "until"}
    found = merged(table, changes)
    if "until" in stage:
        found = merged(found, {"train": {"until": stage["until"]}})
    return found


def _override_stage(tables: list[dict[str, Any]], override: str, source: str) -> None:
    """Write `stage.2.train.sequence=64` into the second stage's table."""
    number, _, rest = override.removeprefix("stage.").partition(".")
    if not number.isdecimal() or not rest or not 1 <= int(number) <= len(tables):
        raise ConfigError(
            f"override {override!r}: {source} has {len(tables)} stages, numbered from 1; write "
            "stage.1.until=20 or stage.1.train.sequence=64, or leave the stage out to mean all of them"
        )
    write_override(tables[int(number) - 1], rest)


def _require_no_until(table: Mapping[str, Any], overrides: Sequence[str], source: str) -> None:
    if "until" in table.get("train", {}) or any(each.startswith("train.until") for each in overrides):
        raise ConfigError(f"{source} has stages, each with its own until; leave train.until out")


def _require_following(configs: Sequence[Config], source: str) -> None:
    """ConfigError unless each stage ends behind the one before, and the last one with the run."""
    ends = [config.train.last_step for config in configs]
    open_ends = [number for number, config in enumerate(configs[:-1], 1) if config.train.until is None]
    if open_ends:
        raise ConfigError(
            f"{source}: stage {open_ends[0]} has no `until`; say after how many steps the next one begins"
        )
    for number, (before, after) in enumerate(pairwise(ends), 2):
        if after <= before:
            raise ConfigError(
                f"{source}: stage {number} ends at step {after}, and the one before it at {before}; `until` "
                "counts steps from the run's start and grows from stage to stage, up to train.steps"
            )
    if ends[-1] != configs[-1].train.steps:
        raise ConfigError(
            f"{source}: the last stage ends at step {ends[-1]}, and train.steps = {configs[-1].train.steps}; "
            "leave its `until` out, or make train.steps that"
        )


def _require_same(configs: Sequence[Config], source: str) -> None:
    """ConfigError where a stage could not go on from the checkpoint of the one before."""
    first = configs[0].model_dump(mode="json")
    for number, config in enumerate(configs[1:], 2):
        now = config.model_dump(mode="json")
        for key in SAME_KEYS:
            section, _, name = key.partition(".")
            before, here = (of[section][name] if name else of[section] for of in (first, now))
            if before != here:
                raise ConfigError(
                    f"{source}: stage {number} changes {key}, from {before!r} to {here!r}, and all stages "
                    "train one model from one checkpoint to the next; set it above the first [[stage]]"
                )
        model, of_first = (each.model_config_for(1) for each in (config, configs[0]))
        changed = [key for key in MODEL_KEYS if model_value(model, key) != model_value(of_first, key)]
        if changed:
            raise ConfigError(
                f"{source}: stage {number} changes {', '.join(f'model.{key}' for key in changed)}, and all "
                "stages train one model; set it above the first [[stage]]"
            )


def _with_common_block(configs: tuple[Config, ...], source: str) -> tuple[Config, ...]:
    """Order the text by the longest sequence of all stages, so that each goes on where the last one was."""
    sequences = {config.train.sequence for config in configs}
    if len(sequences) == 1:
        return configs
    blocks = {config.data.block for config in configs if config.data.block is not None}
    block = max(blocks | sequences)
    unfit = sorted(sequence for sequence in sequences if block % sequence)
    if unfit or len(blocks) > 1:
        raise ConfigError(
            f"{source}: stages have sequences of {', '.join(map(str, sorted(sequences)))} tokens, and each "
            f"is to divide one block of text, here {block}; change "
            f"{', '.join(map(str, unfit or sorted(blocks)))}"
        )
    return tuple(
        config.model_copy(update={"data": config.data.model_copy(update={"block": block})})
        for config in configs
    )
