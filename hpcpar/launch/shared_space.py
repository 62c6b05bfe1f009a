"""The room in /dev/shm that MPI's shared memory takes: without it MPICH dies by a signal and says nothing.

Measured with MPICH 5.0.2 over UCX: for each rank of the node 1.06 MB are MPICH's own and 4.33 MB UCX's, which
does without where a rank finds less than 13 MB free. Where one finds them and another does not, both crash.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from hpcpar.errors import LaunchError
from hpcpar.launch.crosscheck import library_name

DIRECTORY = "/dev/shm"
OWN_NBYTES = 1_070_000
UCX_NBYTES = 4_330_000
UCX_MARGIN_NBYTES = 13_000_000


def require(
    local_size: int, mpi_library: str, room_nbytes: int | None, environ: Mapping[str, str] = os.environ
) -> None:
    """Raise LaunchError where so many ranks of this node would die for want of room in /dev/shm.

    room_nbytes   `free_nbytes()` before the ranks start, `room_within_ranks` from within them; None: unknown
    """
    if "MPICH Version:      5" not in mpi_library or room_nbytes is None:
        return
    own = local_size * OWN_NBYTES
    over_ucx = local_size > 1 and "ucx" in mpi_library and "UCX_TLS" not in environ
    needed = most_nbytes(local_size) if over_ucx else own
    if own <= room_nbytes <= UCX_MARGIN_NBYTES or room_nbytes >= needed:
        return
    ranks = f"{local_size} {'ranks' if local_size > 1 else 'rank'} of {library_name(mpi_library)} on one node"
    less = f", or `export UCX_TLS=^posix`, with which {_mb(own)} suffice" if room_nbytes >= own else ""
    raise LaunchError(
        f"{DIRECTORY} has room for {_mb(room_nbytes)}, but {ranks} take up to {_mb(needed)} there and crash "
        f"without it: start the container with more (Docker, Podman: --shm-size=1g; Kubernetes: a memory "
        f"volume at {DIRECTORY}), remove what others left there, or start fewer ranks on the node{less}"
    )


def most_nbytes(local_size: int) -> int:
    """Return the room with which so many ranks of a node start, whatever the library does."""
    return local_size * (OWN_NBYTES + UCX_NBYTES) + UCX_MARGIN_NBYTES


def room_within_ranks(local_size: int) -> int | None:
    """Return the room that there was before the ranks of this node started, as far as one of them can tell.

    Of what is free now those that came first may have taken their part. So it is the whole of /dev/shm,
    unless less is free than they can have left.
    """
    size, free = size_nbytes(), free_nbytes()
    if size is None or free is None:
        return None
    left = size - (local_size - 1) * (OWN_NBYTES + UCX_NBYTES)
    return size if size < most_nbytes(local_size) or free >= min(left, most_nbytes(1)) else free


def _room(count: Callable[[os.statvfs_result], int]) -> int | None:
    try:
        return count(os.statvfs(DIRECTORY))
    except OSError:
        return None


def size_nbytes() -> int | None:
    return _room(lambda found: found.f_blocks * found.f_frsize)


def free_nbytes() -> int | None:
    """Return the free bytes of /dev/shm; None where there is none."""
    return _room(lambda found: found.f_bavail * found.f_frsize)


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"
