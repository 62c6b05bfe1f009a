"""Runs as files: what a file of the trainer says of batch and layout, and the files of a planned run.

read_run("run.toml")       model, sequence, batch, precision, and what it decides
write_run(estimate, …)     train.toml and job.sh of a layout, for `sbatch job.sh`
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hpcpar.errors import ConfigError
from hpcpar.planner.cluster import Cluster
from hpcpar.planner.estimate import Estimate
from hpcpar.planner.experts import Experts
from hpcpar.planner.hugging_face_shapes import training_values_of_hugging_face
from hpcpar.planner.layout import AXES, DEGREES
from hpcpar.planner.model_shapes import (
    OWN_FIELDS,
    TRAINER_SECTIONS,
    ModelShape,
    model_section,
    naming_file,
)
from hpcpar.planner.read_input import read_table, whole_number
from hpcpar.planner.shapes import ITEMSIZE, PRESETS, LlamaConfig
from hpcpar.planner.stages import stages_of

OF_TRAINER = {
    "zero_stage": ("optimizer", "zero_stage"),
    "microbatch": ("train", "microbatch"),
    "recompute": ("train", "recompute"),
    "schedule": ("pipeline", "schedule"),
    "stages_per_rank": ("pipeline", "stages_per_rank"),
    "sequence_parallel": ("tensor_parallel", "sequence_parallel"),
    "cp_method": ("context_parallel", "method"),
    "optimizer": ("optimizer", "name"),
    "offload": ("optimizer", "offload"),
    "reshard": ("optimizer", "reshard"),
    **{axis: ("mesh", axis) for axis in DEGREES},
}
"""Keys of a strategy, and where the trainer's file has them."""


@dataclass(frozen=True)
class PlannedRun:
    """A model, and what its file says of the run; None and {} where it says nothing.

    table     the file's [model] table, where it is one of the trainer's
    fixed     what the file decides, as `PlanRequest.fixed`
    extra     fields of a config.json that the trainer needs and a plan does not
    machine   of a recipe; devices: those of its mesh, where all degrees are given
    """

    model: ModelShape
    table: Mapping[str, Any] | None = None
    sequence: int | None = None
    global_batch: int | None = None
    precision: str | None = None
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    machine: str | None = None
    devices: int | None = None


def read_run(name: str) -> PlannedRun:
    """Read MODEL of `hpcpar plan`: a preset's name, config.json, or a TOML file.

    errors   ConfigError as of `ModelShape.named`
    """
    model, path = ModelShape.named(name), Path(name)
    if path.suffix == ".json":
        told = read_table(path, "model file")
        return PlannedRun(model, extra=training_values_of_hugging_face(told, where=name))
    if path.suffix != ".toml":
        return PlannedRun(model, {"preset": name} if name in PRESETS else None)
    with naming_file(path):
        return _of_sections(_sections(read_table(path, "model file")), model, path.stem)


def _sections(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trainer's tables of a file; of a run in stages those of the first, which is planned.

    errors   ConfigError for one that is no table
    """
    found = dict(table)
    stages = found.pop("stage", [])
    if not isinstance(stages, list):
        raise ConfigError(f"stage = {stages!r} must be tables, each of which begins with [[stage]]")
    for stage in stages[:1]:
        _require_tables(stage)
        for section, entries in stage.items():
            found[section] = {**found.get(section, {}), **entries} if isinstance(entries, dict) else entries
    _require_tables(found)
    return found


def _require_tables(found: Any) -> None:
    for section in TRAINER_SECTIONS:
        if section in found and not isinstance(found[section], Mapping):
            raise ConfigError(f"{section} = {found[section]!r} must be a table, [{section}]")


def _of_sections(table: Mapping[str, Any], model: ModelShape, name: str) -> PlannedRun:
    train, recipe, mesh = (table.get(section, {}) for section in ("train", "recipe", "mesh"))
    for section, entry in (("train", "precision"), ("recipe", "shape"), ("recipe", "machine")):
        value = table.get(section, {}).get(entry, "")
        if not isinstance(value, str):
            raise ConfigError(f"{section}.{entry} = {value!r} must be text")
    for key in ("sequence", "global_batch"):
        if key in train:
            whole_number(train[key], f"train.{key}")
    for axis, degree in mesh.items():
        if degree != -1:
            whole_number(degree, f"mesh.{axis}")
    # A preset with changes is another model; the file's name says which.
    model = replace(ModelShape.named(recipe["shape"]) if "shape" in recipe else model, name=name)
    fixed = {}
    for key, (section, entry) in OF_TRAINER.items():
        value = table.get(section, {}).get(entry)
        if value is not None and value != -1:
            fixed[key] = (value,)
    is_whole = all(mesh.get(axis, 1) != -1 for axis in AXES) and "dp" in mesh
    own = model_section(table)
    is_ours = own is not table and not OWN_FIELDS & own.keys() and "shape" not in recipe
    return PlannedRun(
        model,
        own if is_ours and own.get("preset", "tiny") in PRESETS else None,
        train.get("sequence"),
        train.get("global_batch"),
        train.get("precision"),
        fixed,
        machine=recipe.get("machine"),
        devices=math.prod(mesh.get(axis, 1) for axis in AXES) if is_whole else None,
    )


# --- the files of a planned run -------------------------------------------------------------------


def write_run(estimate: Estimate, run: PlannedRun, directory: Path, *, tokens: float | None) -> list[Path]:
    """Write train.toml and job.sh of a planned layout into `directory`, which is made; return their paths.

    errors   ConfigError for a model, precision or machine without training; a directory that is not writable
    """
    texts = {"train.toml": train_toml(estimate, run, tokens=tokens), "job.sh": job_script(estimate)}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (directory / name).write_text(text, encoding="utf-8")
        (directory / "job.sh").chmod(0o755)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from error
    return [directory / name for name in texts]


def train_toml(estimate: Estimate, run: PlannedRun, *, tokens: float | None = None) -> str:
    """Return the trainer's file of a layout."""
    strategy, layout, cluster = estimate.strategy, estimate.strategy.layout, estimate.cluster
    if strategy.precision not in ITEMSIZE:
        raise ConfigError(
            f"{strategy.precision} is planned, but hpcpar does not train in it; take --precision "
            f"{', '.join(ITEMSIZE)}, or leave --write out"
        )
    train: dict[str, Any] = {
        "sequence": strategy.sequence,
        "global_batch": strategy.global_batch,
        "microbatch": strategy.microbatch,
        "precision": strategy.precision,
        "recompute": strategy.recompute.mode,
        "device": _trainers_device(cluster),
    }
    if tokens is not None:
        train["steps"] = max(1, round(tokens / strategy.tokens))
    tables: dict[str, dict[str, Any]] = {
        "model": _model_table(estimate.model, run),
        "train": train,
        "optimizer": {"name": strategy.optimizer, "zero_stage": strategy.zero_stage},
        "mesh": layout.degrees,
        "output": {"directory": f"runs/{estimate.model.name}"},
    }
    if strategy.offload is not None:
        tables["optimizer"]["offload"] = strategy.offload
    if strategy.keeps_gathered:
        tables["optimizer"]["reshard"] = strategy.reshard
    if layout.tp > 1:
        tables["tensor_parallel"] = {"sequence_parallel": strategy.sequence_parallel}
    if layout.cp > 1:
        tables["context_parallel"] = {"method": strategy.cp_method}
    if layout.pp > 1:
        tables["pipeline"] = {"schedule": strategy.schedule}
        if strategy.stages_per_rank is not None:
            tables["pipeline"]["stages_per_rank"] = strategy.stages_per_rank
        # What was priced; by itself the trainer would balance FLOPs, which is not always the same.
        tables["pipeline"]["balance"] = [stage.layers for stage in stages_of(estimate.model, strategy)]
    head = [
        f"# by hpcpar plan: {estimate.model.name} on {cluster.nodes} nodes of {cluster.name},",
        f"# {strategy}",
        f"# predicted: {estimate.peak_nbytes / 2**30:.1f} GiB on the rank that needs most, "
        f"{estimate.step_s:.3g} s a step, {estimate.tokens_per_s:,.0f} tokens/s, MFU {estimate.mfu:.1%}",
        "# [data] paths and tokenizer are yours to add: without them Python's own library is learnt from.",
    ]
    return "\n".join(
        [*head, *(line for name, table in tables.items() for line in toml_lines(name, table)), ""]
    )


def toml_lines(name: str, table: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> list[str]:
    """Return the TOML of a table and those in it, after an empty line each.

    comments   by key with its table ("train.steps"), for the end of its line
    """
    lines = ["", f"[{name}]"]
    for key, value in table.items():
        if not isinstance(value, Mapping):
            comment = (comments or {}).get(f"{name}.{key}")
            lines.append(f"{key} = {toml_value(value)}" + (f"  # {comment}" if comment else ""))
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += toml_lines(f"{name}.{key}", value, comments)
    return lines


def toml_value(value: Any) -> str:
    """Return the TOML of text, a number, a truth value or a list of these."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml_value, value))}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _model_table(model: ModelShape, run: PlannedRun) -> dict[str, Any]:
    """Return a [model] table from which the trainer builds this shape."""
    if model.untrained is not None:
        raise ConfigError(
            f"{model.name} has {model.untrained}, which hpcpar plans but does not train; write the files for "
            "another model, or leave --write out"
        )
    if run.table is not None:
        # Without it the vocabulary would be the tokenizer's.
        return {"vocab_size": model.vocab_size, **run.table}
    base = next(
        (name for name, one in PRESETS.items() if one.vocab_size == model.vocab_size and not one.experts),
        "tiny",
    )
    table: dict[str, Any] = {"preset": base, "initial_std": 0.02, **run.extra}
    for key in (
        *("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "head_size", "ffn_size"),
        *("tie_embeddings", "qk_norm", "dropout"),
    ):
        table[key] = getattr(model, key)
    if model.experts is not None:
        table["experts"] = {
            one.name: getattr(model.experts, one.name)
            for one in fields(Experts)
            if getattr(model.experts, one.name) is not None
        }
    made = LlamaConfig.preset(base, **{key: value for key, value in table.items() if key != "preset"})
    assert made.parameters() == model.parameters(), "the trainer builds what was planned"
    return table


def _trainers_device(cluster: Cluster) -> str:
    """Return the trainer's `device` for this machine's; ConfigError for TPUs, on which it does not run."""
    if "TPU" in f"{cluster.name} {cluster.device.name}".upper():
        raise ConfigError(
            f"{cluster.name} has devices {cluster.device.name!r}, for which hpcpar plans, but on which it "
            "does not train; write the files for a machine of GPUs or CPUs, or leave --write out"
        )
    return "cpu" if cluster.device.on_host else "cuda"


JOB = """#!/bin/bash
# {strategy}
#
#   sbatch job.sh                 from the directory of train.toml; further words override its keys
#SBATCH --job-name={model}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={per_node}
{gpus}#SBATCH --cpus-per-task=1
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --output=%x-%j.out

# --- site: account, partition, modules, environment ---------------------------------------------------
##SBATCH --account=project
##SBATCH --partition=standard
# module load hpcpar              # or whatever has Python and MPI at your site
# shellcheck source=/dev/null
if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi
# ------------------------------------------------------------------------------------------------------
set -euo pipefail

# Slurm from 22.05 on does not tell srun the cores of a task by itself.
export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-1}}" OMP_NUM_THREADS="${{SLURM_CPUS_PER_TASK:-1}}"
# Each rank on its own cores, for all steps of this job.
export SLURM_CPU_BIND=cores
hpcpar run -n "$SLURM_NTASKS" -- -m hpcpar train train.toml "$@"
"""


def job_script(estimate: Estimate) -> str:
    """Return the Slurm script of a layout, one rank for each device."""
    cluster, gpus = estimate.cluster, ""
    if _trainers_device(cluster) == "cuda":
        gpus = f"#SBATCH --gpus-per-node={cluster.devices_per_node}\n"
    return JOB.format(
        strategy=estimate.strategy,
        model=re.sub(r"[^\w.+-]+", "-", estimate.model.name).strip("-") or "hpcpar",
        nodes=cluster.nodes,
        per_node=cluster.devices_per_node,
        gpus=gpus,
    )
