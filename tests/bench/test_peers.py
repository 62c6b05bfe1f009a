"""MPI's own collectives and gloo, as the benchmark calls them, give right results on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hpcpar.bench.measure import PLACES
from hpcpar.bench.sweep import SweepOptions, run

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

MPI = ("mpi", "mpi_nonblocking", "mpi_persistent")


def quick(**others: object) -> SweepOptions:
    options = {"min_nbytes": 4, "max_nbytes": 4096, "factor": 1024, "rounds": 1, "round_s": 0.0}
    return SweepOptions(**{**options, **others})  # type: ignore[arg-type]


@pytest.mark.mpi
def test_mpis_own_and_gloo_give_right_results(world: Communicator) -> None:
    from hpcpar.bench import peers

    wanted = ("chosen", "gloo", *MPI)
    with peers.connected(world, wanted) as (others, said):
        rows = run(quick(collectives=tuple(PLACES), candidates=wanted), world, others)
    wrong = [row for row in rows if row.wrong]
    by_collective = {
        collective: {row.algorithm for row in rows if row.collective == collective} for collective in PLACES
    }
    everyone = world.allgather_object((wrong, by_collective, sorted(said)))
    assert all(answer == everyone[0] for answer in everyone)
    assert wrong == []
    assert sorted(said) == ["gloo", "mpi"]
    for collective, found in by_collective.items():
        if collective == "send_window":
            assert world.size == 1 or found >= {"chosen", "mpi_nonblocking"}
        elif not collective.startswith("send") or world.size > 1:
            assert found >= {"chosen", "mpi", "mpi_nonblocking"}
            assert "gloo" in found or said["gloo"].startswith("left out")


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["bfloat16", "int64"])
def test_mpi_is_measured_in_every_type_that_it_can_do(world: Communicator, dtype: str) -> None:
    from hpcpar.bench import peers

    collectives = ("allreduce", "broadcast", "alltoall")
    with peers.connected(world, ("mpi",)) as (others, _):
        rows = run(quick(collectives=collectives, dtype=dtype, candidates=MPI), world, others)
    wrong = [row for row in rows if row.wrong]
    sums = {row.algorithm for row in rows if row.collective == "allreduce"}
    moves = {row.algorithm for row in rows if row.collective == "alltoall"}
    assert wrong == []
    assert ("mpi" in sums) is (dtype == "int64")
    assert "mpi" in moves


@pytest.mark.mpi
def test_a_peer_that_nobody_wants_is_not_started(world: Communicator) -> None:
    from hpcpar.bench import peers

    with peers.connected(world, ("chosen", "ring")) as (others, said):
        assert (others, said) == ([], {})
