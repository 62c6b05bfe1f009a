"""Which MPI library this Python would load."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcpar.launch.own_library import name_hint, own_library


def python_that(tmp_path: Path, does: str) -> str:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{does}\n")
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize(
    ("version", "library"),
    [
        ("MPICH Version: 5.0.2", "mpich"),
        ("Open MPI v5.0.11, package: Open MPI", "openmpi"),
        ("Intel(R) MPI Library 2021.19", "intel"),
        ("something else", None),
    ],
)
def test_the_library_is_known_by_what_it_says(tmp_path: Path, version: str, library: str | None) -> None:
    assert own_library({}, python_that(tmp_path, f"echo '{version}'")) == library


@pytest.mark.parametrize("does", ["exit 1", "echo MPICH; exit 1", "kill -SEGV $$"])
def test_a_python_that_cannot_load_mpi_has_none(tmp_path: Path, does: str) -> None:
    assert own_library({}, python_that(tmp_path, does)) is None
    assert own_library({}, str(tmp_path / "nowhere")) is None


def test_this_environments_library_is_the_one_that_mpi4py_loads() -> None:
    from hpcpar.launch.crosscheck import flavour
    from hpcpar.transport.mpi import library_version

    assert own_library(os.environ) == flavour(library_version())


@pytest.mark.parametrize(("machine_has", "hinted"), [("libmpich.so.12", True), (None, False)])
def test_an_mpich_by_debians_name_is_pointed_out(
    monkeypatch: pytest.MonkeyPatch, machine_has: str | None, hinted: bool
) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda name: machine_has)
    hint = name_hint("libmpi.so.12: cannot open shared object file: No such file or directory")
    assert ("ln -s" in hint) is hinted
    assert name_hint("No module named 'mpi4py'") == ""
