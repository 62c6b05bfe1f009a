"""Terminals that only a launcher has made."""

from __future__ import annotations

from hpcpar.launch.terminal import is_made_by_launcher

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
HYDRA = {"MPI_LOCALNRANKS": "2", "PMI_RANK": "0", "PMI_SIZE": "2"}


def test_open_mpi_gives_ranks_a_terminal_wherever_their_output_goes() -> None:
    assert is_made_by_launcher(OPEN_MPI)
    assert not is_made_by_launcher(HYDRA)
    assert not is_made_by_launcher({})


def test_who_knows_what_is_at_the_end_is_believed() -> None:
    assert not is_made_by_launcher({**OPEN_MPI, "TTY_COMPATIBLE": "1"})
