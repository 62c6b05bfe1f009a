"""Which checkpoints a directory holds, and which of them to keep."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path

from hpcpar.checkpoint.manifest import MANIFEST, Manifest
from hpcpar.durable import TEMPORARY_PREFIX
from hpcpar.errors import CheckpointError

logger = logging.getLogger(__name__)

STATE = "state.json"
"""The file of a checkpoint that is not of tensors."""

NOT_FINITE = "not_finite"
"""Its key for the first tensor with values that are no finite numbers; None or missing: there is none."""

_NAME = re.compile(r"step-(\d+)")


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step lies: step-00000200."""
    return directory / f"step-{step:08d}"


def by_step(directory: Path) -> dict[int, Path]:
    """All that is called a checkpoint, complete or not, lowest step first."""
    if not directory.is_dir():
        return {}
    named = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir() if path.is_dir())
    return dict(sorted((int(match[1]), path) for match, path in named if match))


def is_called_one(path: Path) -> bool:
    """Tell whether a path is itself a checkpoint, or has the name of one, whole or not."""
    return (path / MANIFEST).exists() or (_NAME.fullmatch(path.name) is not None and not by_step(path))


def latest(directory: str | Path) -> Path | None:
    """The sound checkpoint of the highest step; None when there is no checkpoint at all.

    Others are passed over with a warning: those that are incomplete, were changed after they were written,
    or hold values that are no finite numbers. Of what nobody changed, sizes alone are looked at: `load`
    reads all. CheckpointError when there is no sound one: to begin anew then would be a surprise.
    """
    faults = []
    for path in reversed(by_step(Path(directory)).values()):
        fault = fault_of(path)
        if fault is None:
            return path
        logger.warning("passed over a checkpoint: %s", fault)
        faults.append(fault)
    if faults:
        raise CheckpointError(none_is_sound(Path(directory), faults))
    return None


def none_is_sound(directory: Path, faults: list[str]) -> str:
    """The text of an error; `faults` are of all checkpoints there, the newest first."""
    return (
        f"none of the {len(faults)} checkpoints in {directory} is sound: {faults[0]}; one that is whole is "
        "loaded as it is where it is named itself"
    )


def fault_of(path: Path) -> str | None:
    """Say why a checkpoint is not sound, as far as that shows without reading what nobody changed."""
    try:
        Manifest.read(path).check_changed(path)
    except CheckpointError as error:
        return str(error)
    return not_finite(path)


def not_finite(path: Path) -> str | None:
    """Say which tensor of a whole checkpoint has values that are no finite numbers; None where none has."""
    try:
        name = json.loads((path / STATE).read_text()).get(NOT_FINITE)
    except (OSError, ValueError, AttributeError) as error:
        return f"{path / STATE} cannot be read: {error}"
    return None if name is None else f"{path} has values that are no finite numbers, the first in {name}"


def prune(directory: Path, *, newest: Path, keep: int) -> None:
    """Remove all but `newest`, which was just written, and the keep - 1 sound others of the highest steps.

    Those that are not sound stay only where there are not so many. While `newest` is not sound, the newest
    sound one stays besides. Remains of writers that were killed go. What cannot be removed is told in a
    warning: the checkpoint that was written is whole all the same.
    """
    others = [path for path in by_step(directory).values() if path != newest]
    if len(others) > keep - 1:
        sound = {path for path in others if fault_of(path) is None}
        others.sort(key=sound.__contains__)
        stay = max(keep - 1, 1) if sound and fault_of(newest) is not None else keep - 1
        for path in others[: len(others) - stay]:
            # First the name goes, so that a removal that is cut short leaves no half of a checkpoint.
            doomed = directory / f"{TEMPORARY_PREFIX}removed-{path.name}"
            path.rename(doomed)
    for path in directory.glob(f"{TEMPORARY_PREFIX}*"):
        try:
            _remove(path)
        except OSError as error:
            logger.warning("cannot remove %s, which is needed no more: %s", path, error)


def _remove(path: Path) -> None:
    """A directory and all that is in it; of a link to one, as to an archive, the link alone."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)
