"""Select the PMI by which the ranks find each other: the launcher's, a server of our own, or none.

Decided before MPI starts, for a library that cannot speak with its launcher often starts a world of
one rank without a word. MPI says who it is before that (MPI_Get_library_version), and what is loaded
into the process says what it was built with.

    srun --mpi=     none              pmi2                    pmix
    MPICH, Intel    our server        srun; MPICH over UCX:   srun if linked with PMIx, else our server
                                      our server
    Open MPI        refused           srun if built for it,   srun
                                      else refused

torchrun brings no MPI up: MPICH and its relatives get our server, Open MPI is refused.

Slurm's pmi2 reads PMI-1 in lines of 1,024 bytes, but lets MPICH put values of that length in: a UCX address
whose pieces are dense (several network devices, or by chance) breaks the exchange, and the start hangs.

Slurm's pmix lets a rank out of Open MPI 5's MPI_Init while others are still in the exchange before the
last; a message that meets such a one ends it with a segmentation fault. The wait after MPI_Init is for that.

source   MPICH issue 6924; seen with MPICH 5.0.2 under Slurm 22.05
         Open MPI issue 12495; with 5.0.11 under Slurm 22.05 and one rank's exchanges 0.05 s late, 4 starts
         of 12 ended so, and none with the wait
"""

from __future__ import annotations

import ctypes.util
import os
import re
import shutil
import sys
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from hpcpar.errors import ConfigError
from hpcpar.launch.crosscheck import flavour, library_name
from hpcpar.launch.environment import RankInfo
from hpcpar.launch.processes import ask

CHOICES = ("auto", "launcher", "server")
VARIABLES = ("HPCPAR_BOOTSTRAP", "HPCPAR_WIRE")
"""The user's choice; the second one is its former name."""

PMI_1 = ("mpich", "intel", "mvapich")
"""Libraries that speak PMI-1."""

SETTLE_S = 0.25
"""Longer than a rank is late for the end of an exchange that it has joined, and not felt at a start."""


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Means by which MPI_COMM_WORLD comes about.

    kind      "launcher": nothing to do; "server": hpcpar's own PMI-1 server; "none": launcher and library
              cannot meet
    settle_s  how long not to send anything after MPI_Init
    stale     prefixes of variables that are to go before MPI starts: of a protocol that the library does not
              speak, or that another launcher has left. MPICH aborts where it finds both PMI_SIZE and
              PMIX_NAMESPACE, or the latter alone and was built without PMIx
    """

    kind: str
    why: str
    settle_s: float = 0.0
    stale: tuple[str, ...] = ()


def choose(
    info: RankInfo,
    mpi_library: str,
    *,
    environ: Mapping[str, str] = os.environ,
    loaded: Collection[str] | None = None,
) -> Bootstrap:
    """Select for this rank; every rank of the job selects the same.

    mpi_library   what MPI_Get_library_version says
    loaded        paths of the shared libraries in this process (default: look)
    errors        ConfigError for an HPCPAR_BOOTSTRAP that is not understood
    """
    variable = next((name for name in VARIABLES if environ.get(name)), VARIABLES[0])
    asked = environ.get(variable) or "auto"
    if asked not in CHOICES:
        raise ConfigError(f"{variable}={asked!r} is not understood: set it to {', '.join(CHOICES)}")
    library, name = flavour(mpi_library), library_name(mpi_library)
    libraries = loaded_libraries() if loaded is None else tuple(loaded)
    if info.launcher != "slurm" or info.size == 1:
        return _not_srun(info, library, mpi_library, libraries, environ)
    offer = f"srun offers --mpi={info.pmi}"
    settle_s = SETTLE_S if library == "openmpi" and _major(mpi_library) >= 5 else 0.0
    if asked == "launcher":
        return Bootstrap("launcher", f"{offer}; {variable}=launcher leaves it at that", settle_s)
    if library == "openmpi":
        if _open_mpi_can(info.pmi, mpi_library, libraries):
            return Bootstrap("launcher", f"{offer}, which {name} speaks", settle_s)
        return Bootstrap("none", f"{offer}, which {name} does not speak")
    if library not in PMI_1:
        return Bootstrap("launcher", f"{offer}; what {name} speaks is not known here")
    if asked == "auto":
        if info.pmi == "pmi2" and library == "mpich" and re.search("^MPICH Device.*ucx", mpi_library, re.M):
            return Bootstrap(
                "server", f"own PMI-1 server: {offer}, whose lines may be too short for {name} over UCX"
            )
        spoken = _srun_speaks(info.pmi, library, libraries, environ)
        if spoken:
            stale = {"pmi2": ("PMIX_",), "pmix": ("PMI_",)}.get(info.pmi, ()) if library == "mpich" else ()
            return Bootstrap("launcher", f"{offer}, {spoken.format(name)}", stale=stale)
    cause = f"{variable}=server asks for it" if asked == "server" else offer
    return Bootstrap("server", f"own PMI-1 server: {cause}, {name} speaks PMI-1")


def remove_variables(prefixes: tuple[str, ...], environ: MutableMapping[str, str] = os.environ) -> None:
    for name in [name for name in environ if name.startswith(prefixes)]:
        del environ[name]


def _not_srun(
    info: RankInfo, library: str, mpi_library: str, libraries: Collection[str], environ: Mapping[str, str]
) -> Bootstrap:
    """Leave it to a launcher other than srun, unless it speaks another protocol than the library."""
    own = f"{info.launcher} brings MPI up itself"
    why = "one rank: nobody to find" if info.size == 1 else own
    pmi_1 = "PMI_FD" in environ or "PMI_PORT" in environ
    pmix = environ.get("PMIX_NAMESPACE", "")
    if info.launcher == "torchrun" and info.size > 1:
        can = library in PMI_1
        return Bootstrap("server" if can else "launcher", "own PMI-1 server: torchrun brings no MPI up")
    if library == "openmpi" and _major(mpi_library) >= 5 and info.launcher == "hydra" and info.size > 1:
        return Bootstrap("none", "PMI-1 is all that Hydra speaks")
    if library != "mpich" or not pmix or (_has(libraries, "libpmix") and not pmi_1):
        return Bootstrap("launcher", why)
    of_slurm = pmix.startswith("slurm.pmix.")
    if not pmi_1 and (info.size > 1 or (info.launcher == "single" and not of_slurm)):
        return Bootstrap("none", "PMIx is all that the launcher speaks")
    return Bootstrap("launcher", why, stale=("PMIX_",))


def _srun_speaks(
    pmi: str, library: str, libraries: Collection[str], environ: Mapping[str, str]
) -> str | None:
    """Say why srun's offer fits a library of MPICH's family ({} for its name); None where it does not."""
    if pmi == "pmi2":
        return "which {} speaks"
    if library == "intel" and environ.get("I_MPI_PMI_LIBRARY"):
        return "and {} is told of I_MPI_PMI_LIBRARY"
    if pmi == "pmix" and _has(libraries, "libpmix"):
        return "and {} is linked with PMIx"
    if pmi == "none" and _has(libraries, "libpmi"):
        return "and {} is linked with Slurm's libpmi"
    return None


def _has(libraries: Collection[str], stem: str) -> bool:
    return any(os.path.basename(path).startswith(f"{stem}.so") for path in libraries)


def _open_mpi_can(pmi: str, mpi_library: str, libraries: Collection[str]) -> bool:
    """Return whether Open MPI may understand srun: False only where it certainly does not."""
    if pmi in ("pmix", "cray") or _major(mpi_library) >= 5:  # PMIx is all that Open MPI 5 speaks
        return pmi in ("pmix", "cray")
    homes = {
        os.path.dirname(os.path.realpath(path)) for path in libraries if "libmpi." in os.path.basename(path)
    }
    plugins = [found.name for home in homes for found in Path(home, "openmpi").glob("**/mca_pmix_*.so")]
    # Without plugins they are built in.
    return not plugins or any(name.startswith(("mca_pmix_s1", "mca_pmix_s2")) for name in plugins)


def _major(mpi_library: str) -> int:
    """ "Open MPI v4.1.4, package: …" -> 4; 0 where it does not say."""
    digits = mpi_library.partition(" v")[2].partition(".")[0]
    return int(digits) if digits.isdigit() else 0


def loaded_libraries() -> tuple[str, ...]:
    """Return the paths of the shared libraries in this process; none where the system does not tell."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return ()
    paths = (line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6)
    return tuple(dict.fromkeys(path for path in paths if ".so" in os.path.basename(path)))


def srun_plugins(environ: Mapping[str, str] = os.environ) -> tuple[str, ...] | None:
    """Ask which plugins this Slurm's `srun --mpi=` has; None where there is no srun to ask."""
    srun = shutil.which("srun", path=environ.get("PATH"))
    if srun is None:
        return None
    said = ask([srun, "--mpi=list"], 10.0, environ)
    if said is None:
        return None
    # One plugin on a line, with sentences before and after; older versions speak on standard error.
    lines = [line.removeprefix("srun:").strip() for line in (said.stdout + said.stderr).splitlines()]
    return tuple(line for line in lines if line and " " not in line) or None


ASK = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
ASK_LIMIT_S = 60.0


def own_library(environ: Mapping[str, str] = os.environ, executable: str = sys.executable) -> str | None:
    """Name the MPI that mpi4py would load: "mpich", "openmpi", "intel", "mvapich", "cray"; None: unknown."""
    found = flavour(library_version(environ, executable))
    return None if found == "unknown" else found


def library_version(environ: Mapping[str, str] = os.environ, executable: str = sys.executable) -> str:
    """Return what MPI_Get_library_version of that library says; "" where there is none."""
    said = ask([executable, "-c", ASK], ASK_LIMIT_S, environ)
    return said.stdout if said is not None and said.returncode == 0 else ""


def name_hint(problem: str) -> str:
    """Advise, given mpi4py's error, where the machine has an MPICH that mpi4py does not find by its name."""
    if "libmpi.so.12" not in problem or ctypes.util.find_library("mpich") is None:
        return ""
    return (
        ". This machine's MPICH is called libmpich.so.12, as Debian does: give it the usual name with "
        "`mkdir -p ~/mpich; ln -s $(ldconfig -p | grep -o '/.*libmpich.so.12$') ~/mpich/libmpi.so.12` "
        "and `export MPI4PY_MPIABI=mpich LD_LIBRARY_PATH=~/mpich`"
    )
