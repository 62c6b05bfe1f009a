"""Check that MPI tells the same story as the launcher, and say what to type where it does not.

The failure that every site knows: the launcher starts four processes, the MPI library cannot speak
with that launcher, and each process becomes rank 0 of 1 without a word: four trainings of the whole
model, each alone. `check_against_mpi` refuses it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import NoReturn

from hpcpar.errors import LaunchError
from hpcpar.launch.environment import RankInfo
from hpcpar.launch.settings import ASKED_RANKS

MPIEXECS = ("openmpi", "pals", "mvapich", "hydra")
"""Launchers of one program, which manage no resources."""


@dataclass(frozen=True, slots=True)
class MpiView:
    """Position of this rank by MPI's count; what is not known is None.

    library                  what MPI_Get_library_version says
    local_rank, local_size   from a shared-memory split of MPI_COMM_WORLD
    node                     index of this rank's node
    neighbours               what the launcher told the ranks of the same shared memory as their local ranks,
                             in MPI's order: any order of 0 to n-1 is as good as MPI's (Open MPI deals ranks
                             out anew when there are more than cores)
    started_before           the program had started MPI itself, before hpcpar could see to it
    """

    rank: int
    size: int
    library: str
    local_rank: int | None = None
    local_size: int | None = None
    node: int | None = None
    neighbours: Sequence[int | None] | None = None
    started_before: bool = False


def check_against_mpi(info: RankInfo, mpi: MpiView, host: str) -> RankInfo:
    """Complete the launcher's word by MPI's; LaunchError where the two disagree.

    A launcher that is not in our table ("single" by the variables, several ranks by MPI) is
    taken at MPI's word.
    """
    if info.launcher == "single" and mpi.size > 1:
        info = RankInfo(mpi.rank, mpi.size, None, None, None, None, launcher="unknown", pmi="own")
    where = f"on {host}, rank {info.rank}"
    if info.size > 1 and mpi.size == 1:
        raise LaunchError(
            f"{where}: {_started(info)} {info.size} processes, but MPI_COMM_WORLD has size 1 "
            f"({_offer(info)}the library is {library_name(mpi.library)}): every rank would train alone. "
            f"{_too_early(info, mpi.library) if mpi.started_before else ''}{remedy(info, mpi.library)}"
        )
    if (info.rank, info.size) != (mpi.rank, mpi.size):
        said = f"rank {info.rank} of {info.size}", f"rank {mpi.rank} of {mpi.size}"
        _refuse(where, *said, info, mpi.library)
    if mpi.local_rank is None or mpi.local_size is None:
        return info
    local_rank = mpi.local_rank if info.local_rank is None else info.local_rank
    local_size = mpi.local_size if info.local_size is None else info.local_size
    reordered = sorted(map(str, mpi.neighbours or ())) == sorted(map(str, range(local_size)))
    if local_size != mpi.local_size or not (reordered or local_rank == mpi.local_rank):
        by_mpi = f"local rank {mpi.local_rank} of {mpi.local_size} (shared-memory split)"
        _refuse(where, f"local rank {local_rank} of {local_size}", by_mpi, info, mpi.library)
    node = mpi.node if info.node is None else info.node
    return replace(info, local_rank=local_rank, local_size=local_size, node=node)


def believed(info: RankInfo, claims: Sequence[RankInfo], mpi_rank: int, mpi_size: int) -> RankInfo:
    """Choose the launcher that counts: the innermost, or an outer one that alone agrees with MPI.

    claims   what each launcher's variables say, from the inside out
    """
    if mpi_size == 1 or (info.rank, info.size) == (mpi_rank, mpi_size):
        return info
    return next((claim for claim in claims if (claim.rank, claim.size) == (mpi_rank, mpi_size)), info)


def refuse_separate_worlds(info: RankInfo, claims: Sequence[RankInfo]) -> None:
    """Raise LaunchError where each of several tasks of another launcher has started an mpiexec of its own.

    There is a world for each task then, and every world has a rank 0. Flux and Slurm may well run in what
    another launcher has started: they manage resources.
    """
    if info.launcher not in MPIEXECS:
        return
    for other in claims:
        if other.size > 1 and (other.rank, other.size) != (info.rank, info.size):
            srun, flux = "`srun -n N python …`", "`flux run -n N python …`"
            one_world = {"slurm": srun, "flux": flux}.get(other.launcher, "one mpiexec")
            raise LaunchError(
                f"{_started(other)} {other.size} tasks, and each of them an mpiexec of its own: this is rank "
                f"{info.rank} of {info.size} in the world of task {other.rank}, beside {other.size - 1} more "
                f"such worlds, which would all do the same work and write the same files. Start one world: "
                f"{one_world}, or mpiexec alone; worlds that shall be separate take a launch each, "
                f"as `srun -n1 mpiexec …`"
            )


def require_asked_size(asked: int | None, size: int) -> None:
    """Raise LaunchError unless there are as many ranks as `hpcpar run` was asked for; None: it was not."""
    if asked not in (None, size):
        raise LaunchError(
            f"`hpcpar run` was asked for {asked} ranks, but there are {size}: variables or options of the "
            f"launcher say otherwise (SLURM_NTASKS_PER_*, --options); leave them out. Where this is a job of "
            f"its own inside of that one, start it with `env -u {ASKED_RANKS} …`"
        )


def library_name(mpi_library: str) -> str:
    """Return the library's first line without its tail: "MPICH Version: 5.0.2 …" -> "MPICH 5.0.2"."""
    line = mpi_library.strip().splitlines()[0] if mpi_library.strip() else "unknown"
    line = line.split(",")[0].replace("\t", " ").replace("Version", "").replace(":", " ")
    return " ".join(line.split())


def flavour(mpi_library: str) -> str:
    """Recognise a version text: "openmpi", "intel", "mvapich", "cray", "mpich" or "unknown"."""
    text = mpi_library.lower().replace("open mpi", "openmpi")
    return next(
        (name for name in ("openmpi", "intel", "mvapich", "cray", "mpich") if name in text), "unknown"
    )


SRUN_OPTION = {
    "openmpi": "--mpi=pmix",
    "mpich": "--mpi=pmi2",
    "mvapich": "--mpi=pmi2",
    "intel": "--mpi=pmi2",
    "cray": "--mpi=cray_shasta",
}


def refusal(info: RankInfo, mpi_library: str, offered: Collection[str] | None = None) -> str:
    """Say why launcher and library cannot meet, before MPI starts, and what to do."""
    if info.launcher == "single":
        return (
            f"PMIX_NAMESPACE says that a launcher started this process, but {library_name(mpi_library)} does "
            f"not speak PMIx and could not find the others. {remedy(info, mpi_library)} If this process is "
            f"meant to be alone, unset PMIX_NAMESPACE"
        )
    if info.launcher == "slurm":
        offer = f"offers --mpi={info.pmi}"
    else:
        offer = "speaks PMI-1" if info.launcher == "hydra" else "speaks PMIx"
    return (
        f"{_started(info)} {info.size} processes and {offer}, which {library_name(mpi_library)} does not "
        f"speak: every rank would train alone. {remedy(info, mpi_library, offered)}"
    )


def remedy(info: RankInfo, mpi_library: str, offered: Collection[str] | None = None) -> str:
    """Say what to type so that this launcher and this library meet.

    offered   what this Slurm's `srun --mpi=` can be, where it is known
    """
    library = flavour(mpi_library)
    own = (
        "Open MPI's own `mpiexec`"
        if library == "openmpi"
        else f"the `mpiexec` of {library_name(mpi_library)}"
    )
    if info.launcher == "slurm":
        return _slurm_remedy(info, library, own, offered)
    if info.launcher == "torchrun":
        return (
            "torchrun does not start MPI ranks, which MPICH and its relatives can do without (`pip install "
            "mpich`): use one of these, `srun python …`, `mpiexec -n N python …` or `hpcpar run`."
        )
    if info.launcher in ("hydra", "openmpi") and library != "unknown":
        return (
            f"That mpiexec belongs to another MPI: use {own} (Debian calls them mpiexec.mpich and "
            f"mpiexec.openmpi), or load one MPI module only. `hpcpar run` starts the mpiexec beside this "
            f"Python, else the first on PATH, whichever MPI's it is."
        )
    whose = "its launcher" if info.launcher == "single" else info.launcher
    return f"Use {own}, or the module of the MPI that {whose} belongs to."


def _slurm_remedy(info: RankInfo, library: str, own: str, offered: Collection[str] | None) -> str:
    option = SRUN_OPTION.get(library, "--mpi=pmix")
    plugin = option.removeprefix("--mpi=")
    run = f"`hpcpar run -n {info.size} …` in the batch script instead of srun, or {own} there"
    if offered is not None and plugin not in offered:
        return (
            f"This Slurm has no {plugin} (it has {', '.join(sorted(offered))}): use {run}; or "
            f"`pip install mpich` in place of this library, for hpcpar itself connects "
            f"an MPICH's ranks under any srun."
        )
    extra = " with I_MPI_PMI_LIBRARY set to the path of Slurm's libpmi2.so" if library == "intel" else ""
    ask = "`srun --mpi=list` shows what this Slurm offers, and a" if offered is None else "a"
    return (
        f"Use `srun {option} …`{extra} (or `export SLURM_MPI_TYPE={plugin}`), or {run}; "
        f"{ask} module of the site's own MPI, loaded before Python starts, may set this for you."
    )


def _too_early(info: RankInfo, mpi_library: str) -> str:
    """Advise a program that started MPI itself, where hpcpar would have connected the ranks."""
    if info.launcher != "slurm" or flavour(mpi_library) not in ("mpich", "intel", "mvapich"):
        return ""
    return (
        "The program had started MPI (`from mpi4py import MPI` does) before hpcpar could connect the ranks: "
        "call `hpcpar.init()` first and import mpi4py.MPI after it, and it needs no option of srun's. Else: "
    )


def _started(info: RankInfo) -> str:
    names = {"slurm": "srun", "hydra": "MPICH's or Intel's mpiexec", "openmpi": "Open MPI's mpiexec"}
    return f"{names.get(info.launcher, info.launcher)} started"


def _offer(info: RankInfo) -> str:
    return f"srun offers --mpi={info.pmi}, " if info.launcher == "slurm" else ""


def _refuse(where: str, launcher_says: str, mpi_says: str, info: RankInfo, mpi_library: str) -> NoReturn:
    raise LaunchError(
        f"{where}: {info.launcher}'s variables say {launcher_says}, "
        f"{library_name(mpi_library)} says {mpi_says}. "
        f"Variables of another launcher may be left over (start from a fresh shell), or the launcher is not "
        f"this library's. {remedy(info, mpi_library)}"
    )


def leave_it_to_another_rank(line: str = "") -> None:
    """Have an uncaught LaunchError end this process without a traceback; its status is 1 as ever.

    For what all ranks find wrong and one of them says.

    line   what is written instead, to standard error
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, LaunchError):
            before(kind, error, trace)
        elif line:
            sys.stderr.write(f"hpcpar: {line}\n")

    sys.excepthook = hook
