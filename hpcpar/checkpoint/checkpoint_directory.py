"""The checkpoints in a directory: list them, verify them, choose one to load, prune the others."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcpar.checkpoint.files import Pieces
from hpcpar.checkpoint.manifest import MANIFEST, MODEL, RANDOM, STATE, Manifest, SavedState
from hpcpar.durable import TEMPORARY_PREFIX, at_work
from hpcpar.errors import CheckpointError

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d+)")


def checkpoint_path(directory: Path, step: int) -> Path:
    """Return the path of a step's checkpoint: step-00000200."""
    return directory / f"step-{step:08d}"


def by_step(directory: Path) -> dict[int, Path]:
    """List all directories with a checkpoint's name, complete or not, lowest step first."""
    if not directory.is_dir():
        return {}
    named = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir() if path.is_dir())
    return dict(sorted((int(match[1]), path) for match, path in named if match))


def named_by(path: Path) -> list[Path]:
    """List the checkpoints that a path names: itself, those in it, or those of a run's output directory.

    errors   CheckpointError if there is none
    """
    if _is_checkpoint(path):
        return [path]
    found = by_step(path) or by_step(path / "checkpoints")
    if not found:
        raise CheckpointError(_no_checkpoint(path))
    return list(found.values())


def _is_checkpoint(path: Path) -> bool:
    """Tell whether a path is itself a checkpoint, or has the name of one, whole or not."""
    return (path / MANIFEST).exists() or (_NAME.fullmatch(path.name) is not None and not by_step(path))


# --- on one rank, without reading files that nobody changed ---------------------------------------


def latest(directory: str | Path) -> Path | None:
    """Return the sound checkpoint of the highest step; None if there is no checkpoint at all.

    Passes over others with a warning: incomplete ones, those changed after they were written, and those
    with NaN or infinite values. Checks only sizes of files that nobody changed; `load` reads all.

    errors   CheckpointError if there are checkpoints and none is sound: starting anew would be a surprise
    """
    faults = []
    for path in reversed(by_step(Path(directory)).values()):
        fault = fault_of(path)
        if fault is None:
            return path
        logger.warning("passed over a checkpoint: %s", fault)
        faults.append(fault)
    if faults:
        raise CheckpointError(_none_is_sound(Path(directory), faults))
    return None


def read_extra(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """Return the checkpoint that `load` would take, and its `extra`. Not collective; reads no tensor.

    errors   CheckpointError as for `load`, for missing or truncated files
    """
    path = Path(path)
    if _is_checkpoint(path):
        chosen = path
        try:
            Manifest.of(chosen).check_sizes(chosen)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{_advice(chosen, _sound_beside(chosen))}") from error
    else:
        newest = latest(path)
        if newest is None:
            raise CheckpointError(_no_checkpoint(path))
        chosen = newest
    Manifest.of(chosen).require(STATE, directory=chosen)
    return chosen, SavedState.read(chosen / STATE).extra


def fault_of(path: Path) -> str | None:
    """Say why a checkpoint is not sound, reading only files that changed after the manifest."""
    try:
        Manifest.of(path).check_changed(path)
    except CheckpointError as error:
        return str(error)
    return not_finite(path)


def not_finite(path: Path) -> str | None:
    """Say which tensor of a whole checkpoint has NaN or infinite values; None if none has."""
    try:
        name = SavedState.read(path / STATE).not_finite
    except CheckpointError as error:
        return str(error)
    return None if name is None else f"{path} has values that are no finite numbers, the first in {name}"


def prune(directory: Path, *, newest: Path, keep: int) -> None:
    """Remove all checkpoints but `newest`, just written, and the keep - 1 sound others of the highest steps.

    Unsound ones go first. While `newest` itself is not sound, the newest sound one stays besides. Remains of
    killed writers go, too. Failures to remove are warnings: the new checkpoint is whole all the same.
    """
    others = [path for path in by_step(directory).values() if path != newest]
    if len(others) > keep - 1:
        sound = {path for path in others if fault_of(path) is None}
        others.sort(key=sound.__contains__)
        stay = max(keep - 1, 1) if sound and fault_of(newest) is not None else keep - 1
        for path in others[: len(others) - stay]:
            # The name goes first: a removal that is cut short must not leave half a checkpoint.
            path.rename(directory / f"{TEMPORARY_PREFIX}removed-{path.name}")
    for path in directory.glob(f"{TEMPORARY_PREFIX}*"):
        if path.resolve() in at_work:
            continue
        try:
            # Of a link to an archive, only the link goes.
            path.unlink() if path.is_symlink() else shutil.rmtree(path)
        except OSError as error:
            logger.warning("cannot remove %s, which is needed no more: %s", path, error)


# --- on all ranks, reading every file once --------------------------------------------------------


def choose_together(path: Path, comm: Communicator) -> Path:
    """Return the checkpoint that a path names, or the newest sound one of a directory. Collective.

    cost     one of the ranks reads each file
    errors   as for `load`
    """
    with comm.together(f"looking for a checkpoint in {path}"):
        is_one = _is_checkpoint(path)
        listed = [] if is_one else list(reversed(by_step(path).values()))
        if comm.rank == 0 and not is_one and not listed:
            raise CheckpointError(_no_checkpoint(path))
    # Rank 0's listing is everybody's: on a network file system another rank may not see yet what was
    # written a moment ago.
    is_one, listed = comm.broadcast_object((is_one, listed))
    if is_one:
        _require_sound(path, comm)
        return path
    chosen, faults = _first_sound(listed, comm)
    with comm.together(f"looking for a checkpoint in {path}"):
        if chosen is None and comm.rank == 0:
            raise CheckpointError(_none_is_sound(path, faults))
    assert chosen is not None, "or all ranks have raised"
    if faults and comm.rank == 0:
        for fault in faults:
            logger.warning("passed over a checkpoint: %s", fault)
        logger.warning("going on from %s, which is the newest sound one, not %s", chosen, listed[0].name)
    return chosen


def _require_sound(path: Path, comm: Communicator) -> None:
    """CheckpointError, with the newest sound sibling, unless the checkpoint is whole. Collective."""
    own, first = _verify(path, comm)
    beside = None
    if first is not None:
        siblings = by_step(path.parent) if comm.rank == 0 else {}
        others = [each for each in reversed(siblings.values()) if each != path]
        beside = _first_sound(comm.broadcast_object(others), comm)[0]
    with comm.together(f"loading the checkpoint {path}"):
        if own is not None:
            raise CheckpointError(f"{own}{_advice(path, beside)}")
    fault = not_finite(path) if comm.rank == 0 else None
    if fault is not None:
        logger.warning("%s, and is loaded as it was asked for%s", fault, _advice(path, _sound_beside(path)))


def _first_sound(paths: list[Path], comm: Communicator) -> tuple[Path | None, list[str]]:
    """Return the first checkpoint that is whole and finite, and the faults of those before. Collective."""
    faults: list[str] = []
    for path in paths:
        fault = verified_fault_of(path, comm)
        if fault is None:
            return path, faults
        faults.append(fault)
    return None, faults


def verified_fault_of(path: Path, comm: Communicator) -> str | None:
    """Say why a checkpoint is not sound, after reading all of it. Collective."""
    _, fault = _verify(path, comm)
    return fault or comm.broadcast_object(not_finite(path) if comm.rank == 0 else None)


def _verify(path: Path, comm: Communicator) -> tuple[str | None, str | None]:
    """Check digests, and that all JSON and headers fit each other, each rank a share of the files.

    Returns (this rank's fault, the first rank's fault). Collective.
    """
    own = None
    try:
        manifest = Manifest.of(path)
        share = manifest.check_content(path, rank=comm.rank, size=comm.size)
        manifest.require(STATE, MODEL, RANDOM, directory=path)
        SavedState.read(path / STATE)
        Pieces(path, manifest).check_files(share)
    except CheckpointError as error:
        own = str(error)
    return own, next((each for each in comm.allgather_object(own) if each is not None), None)


def _sound_beside(path: Path) -> Path | None:
    """Return the newest other checkpoint in the same directory that is sound at a glance."""
    others = [each for each in by_step(path.parent).values() if each != path and fault_of(each) is None]
    return others[-1] if others else None


def _none_is_sound(directory: Path, faults: list[str]) -> str:
    return (
        f"none of the {len(faults)} checkpoints in {directory} is sound: {faults[0]}; one that is whole is "
        "loaded as it is where it is named itself"
    )


def _advice(path: Path, sound: Path | None) -> str:
    if sound is None:
        return ""
    return f"; the newest sound one is {sound}: name that, or {path.parent}, of which the newest is taken"


def _no_checkpoint(path: Path) -> str:
    fault = "holds no checkpoint" if path.is_dir() else "is a file" if path.exists() else "does not exist"
    return f"{path} {fault}: expected a directory with a {MANIFEST}, or one with step-… directories in it"
