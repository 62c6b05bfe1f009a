"""The checkpoint that a path means: itself, or the newest sound one of a directory, verified by all ranks."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcpar.checkpoint.catalogue import (
    STATE,
    by_step,
    fault_of,
    is_called_one,
    latest,
    none_is_sound,
    not_finite,
)
from hpcpar.checkpoint.manifest import MANIFEST, Manifest
from hpcpar.errors import CheckpointError

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

logger = logging.getLogger(__name__)


def read_extra(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """Which checkpoint `load` would take, and the `extra` of it; not collective, and no tensor is read.

    errors  CheckpointError as of `load`, where files are missing or were cut short
    """
    path = Path(path)
    if is_called_one(path):
        chosen = path
        try:
            Manifest.read(chosen).check_sizes(chosen)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{_advice(chosen, _sound_beside(chosen))}") from error
    else:
        newest = latest(path)
        if newest is None:
            raise CheckpointError(_none_there(path))
        chosen = newest
    if STATE not in Manifest.read(chosen).files:
        raise CheckpointError(f"{chosen} is not a checkpoint of this program: it has no {STATE}")
    extra: dict[str, Any] = json.loads((chosen / STATE).read_text())["extra"]
    return chosen, extra


def choose_together(path: Path, comm: Communicator) -> Path:
    """The checkpoint itself, or the newest sound one of a directory. Collective.

    cost     every file is read, by one of the ranks
    errors   as of `load`
    """
    with comm.together(f"looking for a checkpoint in {path}"):
        is_one = is_called_one(path)
        there = [] if is_one else list(reversed(by_step(path).values()))
        if comm.rank == 0 and not is_one and not there:
            raise CheckpointError(_none_there(path))
    # Rank 0's choice is everybody's: another may not see yet what was written a moment ago.
    is_one, there = comm.broadcast_object((is_one, there))
    if is_one:
        own, worst = _verify(path, comm)
        beside = None
        if worst is not None:
            siblings = by_step(path.parent) if comm.rank == 0 else {}
            others = [each for each in reversed(siblings.values()) if each != path]
            beside = _first_sound(comm.broadcast_object(others), comm)[0]
        with comm.together(f"loading the checkpoint {path}"):
            if own is not None:
                raise CheckpointError(f"{own}{_advice(path, beside)}")
        fault = not_finite(path) if comm.rank == 0 else None
        if fault is not None:
            logger.warning(
                "%s, and is loaded as it was asked for%s", fault, _advice(path, _sound_beside(path))
            )
        return path
    chosen, faults = _first_sound(there, comm)
    with comm.together(f"looking for a checkpoint in {path}"):
        if chosen is None and comm.rank == 0:
            raise CheckpointError(none_is_sound(path, faults))
    assert chosen is not None, "or all ranks have raised"
    if faults and comm.rank == 0:
        for fault in faults:
            logger.warning("passed over a checkpoint: %s", fault)
        logger.warning("going on from %s, which is the newest sound one, not %s", chosen, there[0].name)
    return chosen


def _first_sound(there: list[Path], comm: Communicator) -> tuple[Path | None, list[str]]:
    """The first of these checkpoints that is whole and finite, and what is wrong with those before it."""
    faults: list[str] = []
    for path in there:
        _, worst = _verify(path, comm)
        if worst is None:
            worst = comm.broadcast_object(not_finite(path) if comm.rank == 0 else None)
        if worst is None:
            return path, faults
        faults.append(worst)
    return None, faults


def _verify(path: Path, comm: Communicator) -> tuple[str | None, str | None]:
    """(own, first): this rank's complaint about its part of the files, and that of the first rank with one.

    Collective.
    """
    own = None
    try:
        Manifest.read(path).check_content(path, rank=comm.rank, size=comm.size)
    except CheckpointError as error:
        own = str(error)
    return own, next((each for each in comm.allgather_object(own) if each is not None), None)


def _sound_beside(path: Path) -> Path | None:
    """The newest other checkpoint in the same directory that is sound at a glance."""
    others = [each for each in by_step(path.parent).values() if each != path and fault_of(each) is None]
    return others[-1] if others else None


def _advice(path: Path, sound: Path | None) -> str:
    if sound is None:
        return ""
    return f"; the newest sound one is {sound}: name that, or {path.parent}, of which the newest is taken"


def _none_there(path: Path) -> str:
    fault = "holds no checkpoint" if path.is_dir() else "is a file" if path.exists() else "does not exist"
    return f"{path} {fault}: expected a directory with a {MANIFEST}, or one with step-… directories in it"
