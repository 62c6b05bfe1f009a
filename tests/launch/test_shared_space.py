"""The room in /dev/shm that MPICH takes; the sizes are those at which it was seen to live or to crash."""

from __future__ import annotations

import pytest

from hpcpar.errors import LaunchError
from hpcpar.launch import shared_space
from hpcpar.launch.shared_space import free_nbytes, require, room_within_ranks, size_nbytes
from hpcpar.units import MiB

OVER_UCX = "MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\n"
OVER_OFI = "MPICH Version:      5.0.2\nMPICH Device:       ch4:ofi\n"


@pytest.mark.parametrize(
    ("ranks", "room_mib"), [(1, 2), (1, 20), (2, 3), (2, 12), (2, 24), (2, 64), (4, 64), (12, 80)]
)
def test_where_mpich_starts_nothing_is_said(ranks: int, room_mib: int) -> None:
    require(ranks, OVER_UCX, room_mib * MiB, {})


@pytest.mark.parametrize(
    ("ranks", "room_mib"), [(1, 1), (2, 1), (2, 16), (2, 20), (12, 32), (12, 64), (12, 70)]
)
def test_where_mpich_crashes_the_sizes_and_what_to_set_are_named(ranks: int, room_mib: int) -> None:
    with pytest.raises(LaunchError, match=rf"room for .* MB, but {ranks} rank.*--shm-size=1g"):
        require(ranks, OVER_UCX, room_mib * MiB, {})


def test_without_ucx_shared_memory_less_is_enough_and_the_error_says_so() -> None:
    with pytest.raises(LaunchError, match=r"`export UCX_TLS=\^posix`, with which 12.8 MB suffice"):
        require(12, OVER_UCX, 64 * MiB, {})
    require(12, OVER_UCX, 64 * MiB, {"UCX_TLS": "^posix"})
    require(12, OVER_OFI, 64 * MiB, {})
    with pytest.raises(LaunchError):
        require(12, OVER_OFI, 8 * MiB, {})


@pytest.mark.parametrize(
    "library", ["Open MPI v5.0.11, package: …", "MPICH Version:\t4.0.2\nMPICH Device:\tch4:ucx", ""]
)
def test_libraries_that_say_it_themselves_are_left_alone(library: str) -> None:
    require(12, library, MiB, {})
    require(12, OVER_UCX, None, {})


def test_the_room_is_asked_of_the_system() -> None:
    size, free = size_nbytes(), free_nbytes()
    assert size is not None
    assert free is not None
    assert 0 <= free <= size


@pytest.mark.parametrize(
    ("size_mib", "free_mib", "room_mib"),
    [
        (64, 64, 64),
        (64, 40, 64),  # three others of four ranks have their part
        (1024, 0, 0),  # full of what others left
        (1024, 15, 15),
        (16, 3, 16),  # too small in any case
    ],
)
def test_within_the_ranks_what_they_have_taken_themselves_counts_as_room(
    size_mib: int, free_mib: int, room_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_space, "size_nbytes", lambda: size_mib * MiB)
    monkeypatch.setattr(shared_space, "free_nbytes", lambda: free_mib * MiB)
    assert room_within_ranks(4) == room_mib * MiB
