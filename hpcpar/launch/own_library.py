"""Which MPI library this Python would load, asked without starting MPI: in a process of its own."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
from collections.abc import Mapping

from hpcpar.launch.crosscheck import flavour

ASK = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version())
"""
ASK_LIMIT_S = 60.0


def own_library(environ: Mapping[str, str] = os.environ, executable: str = sys.executable) -> str | None:
    """ "mpich", "openmpi", "intel", "mvapich" or "cray": whatever mpi4py finds, be it a wheel, the machine's
    or a loaded module; None where it finds none, or one that is not known here."""
    found = flavour(library_version(environ, executable))
    return None if found == "unknown" else found


def library_version(environ: Mapping[str, str] = os.environ, executable: str = sys.executable) -> str:
    """Return what MPI_Get_library_version of that library says; "" where there is none."""
    try:
        said = subprocess.run(
            [executable, "-c", ASK],
            capture_output=True,
            text=True,
            timeout=ASK_LIMIT_S,
            check=False,
            env=dict(environ),
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.stdout if said.returncode == 0 else ""


def name_hint(problem: str) -> str:
    """Advise where the machine has an MPICH under a name by which mpi4py does not look for it.

    problem   what loading mpi4py said
    """
    if "libmpi.so.12" not in problem or ctypes.util.find_library("mpich") is None:
        return ""
    return (
        ". This machine's MPICH is called libmpich.so.12, as Debian does: give it the usual name with "
        "`mkdir -p ~/mpich; ln -s $(ldconfig -p | grep -o '/.*libmpich.so.12$') ~/mpich/libmpi.so.12` "
        "and `export MPI4PY_MPIABI=mpich LD_LIBRARY_PATH=~/mpich`"
    )
