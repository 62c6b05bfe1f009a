"""Whether MPI takes device pointers, as far as the environment and the library's name tell.

Nothing is asked of MPI here, and no process started: a real answer needs a probe of two ranks. The
MPI wheels as they come are not CUDA-aware and crash on a device pointer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hpcpar.launch.crosscheck import flavour


@dataclass(frozen=True, slots=True)
class CudaAwareness:
    """`likely` is None where nothing speaks for it or against it; `why` is a phrase for people."""

    likely: bool | None
    why: str


# variable, what it must hold, whose it is
_SWITCHES = {
    "cray": ("MPICH_GPU_SUPPORT_ENABLED", "1"),
    "mvapich": ("MV2_USE_CUDA", "1"),
    "intel": ("I_MPI_OFFLOAD", "1"),
}


def cuda_awareness(mpi_library: str, environ: Mapping[str, str] = os.environ) -> CudaAwareness:
    """What the library's version text and the environment say about device pointers."""
    library = flavour(mpi_library)
    if library in _SWITCHES:
        name, value = _SWITCHES[library]
        if environ.get(name) == value:
            return CudaAwareness(True, f"{name}={value}")
        return CudaAwareness(False, f"needs {name}={value}")
    if library == "openmpi":
        if environ.get("OMPI_MCA_pml") == "ucx":
            return CudaAwareness(None, "OMPI_MCA_pml=ucx: yes, if this UCX was built with CUDA")
        return CudaAwareness(
            None, "not known: needs a build with CUDA, or UCX with CUDA and OMPI_MCA_pml=ucx"
        )
    if library == "mpich":
        if environ.get("MPIR_CVAR_ENABLE_GPU") == "0":
            return CudaAwareness(False, "MPIR_CVAR_ENABLE_GPU=0")
        return CudaAwareness(None, "not known: the PyPI wheel is not, a site's build may be")
    return CudaAwareness(None, "not known for this library")
