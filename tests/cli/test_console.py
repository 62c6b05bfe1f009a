"""Rank 0's console, on a terminal and on what only looks like one."""

from __future__ import annotations

import io

import pytest

from hpcpar.cli.console import is_launchers_terminal, own_console
from hpcpar.launch.environment import LAUNCHERS


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        *(launcher.marker for launcher in LAUNCHERS),
        "TTY_COMPATIBLE",
        "TTY_INTERACTIVE",
        "FORCE_COLOR",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def open_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")


def test_a_terminal_is_drawn_on() -> None:
    assert own_console(file=Terminal()).is_interactive


def test_one_of_open_mpis_own_making_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    open_mpi(monkeypatch)
    console = own_console(file=Terminal())
    assert not console.is_terminal
    assert not console.is_interactive


def test_one_that_hpcpar_run_vouches_for_is(monkeypatch: pytest.MonkeyPatch) -> None:
    open_mpi(monkeypatch)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    assert own_console(file=io.StringIO()).is_interactive


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
HYDRA = {"MPI_LOCALNRANKS": "2", "PMI_RANK": "0", "PMI_SIZE": "2"}


def test_open_mpi_gives_ranks_a_terminal_wherever_their_output_goes() -> None:
    assert is_launchers_terminal(OPEN_MPI)
    assert not is_launchers_terminal(HYDRA)
    assert not is_launchers_terminal({})


def test_who_knows_what_is_at_the_end_is_believed() -> None:
    assert not is_launchers_terminal({**OPEN_MPI, "TTY_COMPATIBLE": "1"})
