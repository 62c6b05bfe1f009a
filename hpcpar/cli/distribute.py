"""`python -m hpcpar.cli.distribute DIRECTORY`: copy this Python environment to every node; one rank on each.

A job of its own, before the one that works in the copies: `hpcpar run --broadcast-env` starts both. Rank 0
reads the packed environment once and broadcasts it in pieces, which every node unpacks while the next ones
travel.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np
from numpy.typing import NDArray

from hpcpar.errors import LaunchError
from hpcpar.launch import local_copy
from hpcpar.launch.environment_trees import trees_of_this_python
from hpcpar.launch.local_copy import LocalCopy, Unpacker
from hpcpar.launch.packed_environment import Packed, pack
from hpcpar.units import MiB, format_duration, format_nbytes

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

PIECE_NBYTES = 16 * MiB
PACKING_LIMIT_S = 3600.0
"""How long the others wait while rank 0 packs, which on a busy file system takes minutes."""


def distribute(world: Communicator, directory: str) -> str:
    """Make the copy on every node; a sentence about it. Collective.

    errors   LaunchError or PeerFailedError on all ranks; what was made stays, to be removed with the rest
    """
    if len(set(world.nodes)) < world.size:
        raise LaunchError(f"{world.size} ranks are on {len(set(world.nodes))} nodes: it takes one on each")
    copy = LocalCopy(directory, trees_of_this_python())
    with world.together(f"making {directory}"):
        local_copy.remove_leftovers(os.path.dirname(directory))
        local_copy.make_private(directory)
    start_s = time.perf_counter()
    packed: Packed | None = None
    with world.together("packing the environment"):
        if world.rank == 0:
            packed = pack(copy.trees, Path(directory))
    packed = world.broadcast_object(packed)
    assert packed is not None, "rank 0 has packed, or all have raised"
    packing_s, start_s = time.perf_counter() - start_s, time.perf_counter()
    with world.together(f"looking for room in {os.path.dirname(directory)}"):
        local_copy.require_room(directory, packed.nbytes, packed.files)
    _broadcast(world, packed, directory)
    with world.together("settling the copy in"):
        local_copy.settle(copy)
        if packed.path.parent == Path(directory) and world.rank == 0:
            packed.path.unlink()
    prepared = "packed before" if packed.reused else f"packed in {format_duration(packing_s)}"
    nodes = f"{world.size} node{'s' if world.size > 1 else ''}"
    return (
        f"the environment ({packed.files:,} files, {format_nbytes(packed.nbytes)}, {prepared}) was copied to "
        f"{directory} on {nodes} in {format_duration(time.perf_counter() - start_s)}"
    )


def _broadcast(world: Communicator, packed: Packed, directory: str) -> None:
    """The packed file's bytes, from rank 0 into a `tar` on every node."""
    with world.together("starting to unpack"):
        unpacker = Unpacker(directory)
    failure: LaunchError | None = None
    for piece in _pieces(world, packed):
        world.broadcast(piece)
        unpacker.feed(piece.data)
    try:
        unpacker.close()
    except LaunchError as error:
        failure = error
    world.agree(failure, f"unpacking the environment into {directory}")


def _pieces(world: Communicator, packed: Packed) -> Iterator[NDArray[np.uint8]]:
    """New buffers of the pieces' sizes; on rank 0 with what stands in the file."""
    # A file that cannot be read to its end on rank 0 ends the job: the others wait in a broadcast.
    with packed.path.open("rb") if world.rank == 0 else nullcontext() as file:
        nbytes = int(world.broadcast_object(os.fstat(file.fileno()).st_size if file is not None else None))
        for start in range(0, nbytes, PIECE_NBYTES):
            piece = np.empty(min(PIECE_NBYTES, nbytes - start), dtype=np.uint8)
            if file is not None and file.readinto(piece.data) < piece.size:
                raise LaunchError(f"{packed.path} became shorter while it was read: start the job again")
            yield piece


def main(words: Sequence[str]) -> int:
    import hpcpar

    (directory,) = words
    world = hpcpar.init(timeout_s=PACKING_LIMIT_S, sets_threads=True)
    try:
        said = distribute(world, directory)
    except (LaunchError, hpcpar.errors.PeerFailedError) as error:
        if world.rank == 0:
            click.echo(f"hpcpar run: {error}", err=True)
        return 1
    if world.rank == 0:
        click.echo(f"hpcpar run: {said}", err=True)
    world.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
