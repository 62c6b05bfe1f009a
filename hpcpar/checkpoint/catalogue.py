"""Which checkpoints a directory holds, and which of them to keep."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

from hpcpar.checkpoint.manifest import Manifest
from hpcpar.durable import TEMPORARY_PREFIX
from hpcpar.errors import CheckpointError

logger = logging.getLogger(__name__)

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


def latest(directory: str | Path) -> Path | None:
    """The complete checkpoint of the highest step; None when there is no checkpoint at all.

    An incomplete one is passed over with a warning. CheckpointError when there are only such: to
    begin anew then would be a surprise.
    """
    faults = []
    for path in reversed(by_step(Path(directory)).values()):
        try:
            Manifest.read(path).check_sizes(path)
        except CheckpointError as error:
            logger.warning("passed over an incomplete checkpoint: %s", error)
            faults.append(str(error))
        else:
            return path
    if faults:
        raise CheckpointError(
            f"none of the {len(faults)} checkpoints in {directory} is complete: {faults[0]}"
        )
    return None


def _is_complete(path: Path) -> bool:
    try:
        Manifest.read(path).check_sizes(path)
    except CheckpointError:
        return False
    return True


def prune(directory: Path, *, newest: Path, keep: int) -> None:
    """Remove all but `newest`, which was just written, and the keep - 1 complete others of the highest steps.

    An incomplete one stays only where there are not so many, and remains of writers that were killed go. What
    cannot be removed is told in a warning: the checkpoint that was written is whole all the same.
    """
    others = [path for path in by_step(directory).values() if path != newest]
    others.sort(key=_is_complete)
    for path in others[: max(0, len(others) - (keep - 1))]:
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
