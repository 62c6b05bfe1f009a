"""Files of a checkpoint that rank 0 writes for all: states that are no tensors, random numbers, manifest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hpcpar.checkpoint import random_state
from hpcpar.checkpoint.files import pieces_text, write_tensors
from hpcpar.checkpoint.manifest import MANIFEST, PIECES, RANDOM, STATE, FileDigest, Manifest, with_text_keys
from hpcpar.checkpoint.ownership import Groups, PipelinePositions
from hpcpar.checkpoint.rank_files import RankOutput
from hpcpar.errors import CheckpointError


def _require_same_options(outputs: Sequence[RankOutput], positions: PipelinePositions) -> None:
    """CheckpointError if positions of the pipeline step with different options."""
    first, *others = map(positions.first_rank, range(len(positions.contents)))
    expected = outputs[first].every_option()
    for rank in others:
        found = outputs[rank].every_option()
        for name in expected | found:
            if expected.get(name) != found.get(name):
                raise CheckpointError(
                    f"the optimizer has {name} = {expected.get(name)} on rank {first}, "
                    f"{found.get(name)} on rank {rank}; a checkpoint has it once, so make them equal"
                )


def _optimizer_state(outputs: Sequence[RankOutput], groups: Groups | None) -> dict[str, Any] | None:
    """Describe the optimizer as `manifest.SavedOptimizer`."""
    if groups is None:
        return None
    described = [
        {"parameters": names, "options": options}
        for names, options in zip(groups, outputs[0].options, strict=True)
    ]
    scalars = {name: values for each in outputs for name, values in each.scalars.items()}
    return {"scalars": scalars, "groups": described, "loss_scale": outputs[0].loss_scale}


def write_common(
    staging: Path,
    state: dict[str, Any],
    positions: PipelinePositions,
    random_states: Sequence[random_state.Captured],
    outputs: Sequence[RankOutput],
) -> str | None:
    """Write state.json, random numbers, pieces.json, and last the manifest, which vouches for all.

    state           the part of state.json that is not of the ranks' outputs: step, extra, coordinates
    random_states   of all ranks
    returns         the first tensor of all ranks with NaN or infinite values; None if there is none
    """
    _require_same_options(outputs, positions)
    written = (files for each in outputs for files in (each.model, each.optimizer))
    not_finite = next((files.not_finite for files in written if files.not_finite is not None), None)
    state = state | {
        "ranks": len(outputs),
        "aliases": positions.aliases,
        "optimizer": _optimizer_state(outputs, positions.groups),
        "random": [scalars for _, scalars in random_states],
        "names": positions.digests,
        "not_finite": not_finite,
    }
    digests: dict[str, FileDigest] = {}
    for each in outputs:
        digests |= each.model.digests | each.optimizer.digests
    digests[STATE] = _write_text(as_json("a value of the optimizer's state", state), staging / STATE)
    arrays = {
        f"{rank}/{name}": torch.tensor(array)
        for rank, (arrays, _) in enumerate(random_states)
        for name, array in arrays.items()
    }
    digests[RANDOM] = write_tensors(arrays, staging / RANDOM)
    pieces = pieces_text(
        (shard for each in outputs for shard in each.model.shards),
        (shard for each in outputs for shard in each.optimizer.shards),
    )
    if pieces is not None:
        digests[PIECES] = _write_text(pieces, staging / PIECES)
    manifest = Manifest(step=state["step"], files=digests)
    # A rank's file that is not on the shared file system shows here, before the checkpoint gets its name.
    manifest.check_sizes(staging)
    _write_text(manifest.text(), staging / MANIFEST)
    return not_finite


def _write_text(text: str, path: Path) -> FileDigest:
    path.write_text(text)
    return FileDigest.of(path)


def as_json(what: str, values: dict[str, Any]) -> str:
    """Return the values as JSON; CheckpointError, which names `what`, for values that JSON has not."""
    try:
        return json.dumps(with_text_keys(values), indent=1) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{what} holds what JSON cannot: {error}; give numbers, strings, lists and dictionaries"
        ) from error
