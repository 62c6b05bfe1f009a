"""Versions of the software that a job runs on, for the heads of results and the records of runs."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import hpcpar

PACKAGES = ("mpi4py", "numpy", "torch")


def versions() -> dict[str, str]:
    """Return the versions of hpcpar, of the packages under it and of Python, and the kind of machine."""
    return {
        "hpcpar": hpcpar.__version__,
        **{package: _version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {platform.system()}",
    }


def mpi_vendor() -> str:
    """Return name and version of the MPI library; "none" in a process where MPI does not run."""
    library = sys.modules.get("hpcpar.transport.mpi_library")
    return str(library.library_facts()["vendor"]) if library is not None and library.is_started() else "none"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # one that was built in place, without metadata
        return "unknown"
