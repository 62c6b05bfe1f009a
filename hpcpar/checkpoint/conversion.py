"""Convert a checkpoint into files that programs without hpcpar read: `hpcpar checkpoint convert`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from hpcpar.checkpoint.checkpoint_directory import choose_together, named_by
from hpcpar.checkpoint.files import save_tensors
from hpcpar.checkpoint.load import Contents
from hpcpar.comm import Communicator
from hpcpar.durable import TEMPORARY_PREFIX, push_to_disk, whole_directory
from hpcpar.errors import CheckpointError


def convert(source: str | Path, target: str | Path) -> Path:
    """Write a checkpoint's tensors, whole, in the format that `target`'s name asks for.

    .safetensors    the model's parameters and buffers alone, tied ones under each of their names
    .pt, .pth       a file of torch.save, which torch.load(weights_only=True) reads: a dictionary of "model",
                    "optimizer" (where it was saved), "step" and "extra"
    no suffix       the same as a directory of torch.distributed.checkpoint, without "extra"

    The optimizer's is {"state": parameter name -> key -> value, "param_groups": [{"params": names, ...}]}, as
    torch.distributed.checkpoint.state_dict.set_optimizer_state_dict takes it. All tensors are in memory at
    once.

    source    a checkpoint, or a directory of them or output directory of `hpcpar train`, of which the newest
              sound one is taken
    result    the checkpoint that was converted
    errors    CheckpointError for a damaged checkpoint, a target that exists or cannot be written, or another
              suffix
    """
    source, target = Path(source), Path(target)
    write = WRITERS.get(target.suffix)
    if write is None:
        known = ", ".join(suffix for suffix in WRITERS if suffix)
        raise CheckpointError(
            f"{target} ends in {target.suffix}, which is no known format: end it in {known}, or in nothing "
            "for a directory"
        )
    if target.exists():
        raise CheckpointError(f"{target} exists: name another file, or remove it")
    named = named_by(source)
    path = choose_together(source if named == [source] else named[0].parent, Communicator.alone())
    contents = Contents.read(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        write(contents, target)
    except (RuntimeError, CheckpointException) as error:  # torch's, for which an OSError is none
        reason = str(error).strip().splitlines()[-1]
        raise CheckpointError(
            f"{target} cannot be written: {reason}; make room there, or name another place"
        ) from error
    return path


def _everything(contents: Contents) -> dict[str, Any]:
    found: dict[str, Any] = {"model": _model(contents), "step": contents.state.step}
    if contents.optimizer is not None:
        found["optimizer"] = contents.optimizer.by_parameter()
    return found


def _model(contents: Contents) -> dict[str, torch.Tensor]:
    return {name: stored.whole(contents.files) for name, stored in contents.tensors.items()}


def _write_file(target: Path, write: Callable[[Path], object]) -> None:
    staging = target.with_name(f"{TEMPORARY_PREFIX}{target.name}")
    try:
        write(staging)
        push_to_disk(staging)
        staging.replace(target)
    finally:
        staging.unlink(missing_ok=True)


def _safetensors(contents: Contents, target: Path) -> None:
    _write_file(target, lambda path: save_tensors(_model(contents), path, {"format": "pt"}))


def _torch_file(contents: Contents, target: Path) -> None:
    found = _everything(contents) | {"extra": contents.state.extra}
    _write_file(target, lambda path: torch.save(found, path))


def _distributed(contents: Contents, target: Path) -> None:
    with whole_directory(target) as staging, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it takes one process for the whole job
        save_distributed(_everything(contents), checkpoint_id=staging, no_dist=True)


WRITERS: dict[str, Callable[[Contents, Path], None]] = {
    ".safetensors": _safetensors,
    ".pt": _torch_file,
    ".pth": _torch_file,
    "": _distributed,
}
