"""Commands as users type them, with nothing set: the ranks that were asked for, or one clear error."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slurm import mpi_libraries
from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0
HOROVOD = (
    "import hpcpar.horovod.torch as h, torch; h.init(); print('sum', h.allreduce(torch.ones(2), op=h.Sum)[0])"
)
RANK = """
import hpcpar, os
world = hpcpar.init()
print(f"rank {world.rank} of {world.size}", flush=True)
"""
WAITS = RANK + "import time\nwhile world.size: time.sleep(0.1)\n"

Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with the wheel of MPICH, whose mpiexec and `hpcpar` are the first on PATH."""
    return mpi_libraries.wheel("mpich", tmp_path_factory.mktemp("mpi")).python


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "waits.py").write_text(WAITS)
    return tmp_path


def bare(cluster: Cluster, python: str) -> dict[str, str]:
    """The environment of somebody who has just logged in and activated this Python's environment."""
    path = f"{Path(python).parent}:{cluster.environ['PATH']}"
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "USER") if name in os.environ}
    return {**kept, "PATH": path, "SLURM_CONF": cluster.environ["SLURM_CONF"]}


@pytest.fixture
def start(cluster: Cluster, python: str, scripts: Path) -> Start:
    """Run a command line on the head, beside rank.py and waits.py."""

    def run(line: str, directory: Path = scripts) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            cluster.command(*shlex.split(line), directory=directory),
            env=bare(cluster, python),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    return run


def assert_ranks(done: subprocess.CompletedProcess[str], size: int) -> None:
    """There are so many ranks, and no others."""
    found = re.findall(r"rank (\d+) of (\d+)", done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(found) == [(str(rank), str(size)) for rank in range(size)], done.stdout + done.stderr


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode != 0
    assert "rank 0 of" not in done.stdout
    for word in ("LaunchError", *words):
        assert word in done.stderr, done.stderr


# Horovod, and times of any length


@pytest.mark.parametrize("plugin", ["none", "pmi2", "pmix"])
def test_a_horovod_program_starts_under_plain_srun_with_every_plugin(start: Start, plugin: str) -> None:
    done = start(f"srun --mpi={plugin} -N2 -n2 python -c {shlex.quote(HOROVOD)}")
    sums = [line for line in done.stdout.splitlines() if line.startswith("sum")]  # UCX may warn there
    assert (done.returncode, sums) == (0, ["sum tensor(2.)"] * 2), done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "srun -N2 -n2 python -m hpcpar.horovod examples/horovod_digits.py --epochs 1",
        "srun -N2 -n2 python examples/keras_digits.py --epochs 1",
        "salloc -N2 -n2 hpcpar run -n 2 --as-horovod examples/horovod_digits.py --epochs 1",
    ],
)
def test_a_horovod_script_trains_in_an_allocation(start: Start, line: str) -> None:
    done = start(line, ROOT)
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout + done.stderr


@pytest.mark.parametrize("patience", ["inf", "1e300", "3e6"])
def test_a_time_limit_may_be_unlimited_or_larger_than_any_system_calls(start: Start, patience: str) -> None:
    limits = f"HPCPAR_TIMEOUT_S={patience}"
    assert_ranks(start(f"env {limits} srun --mpi=none -N2 -n2 python rank.py"), 2)


# The size that was asked for


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("per_gpu", [1, 2])
def test_as_many_ranks_start_as_were_asked_for_whatever_the_job_says_of_its_gpus(
    start: Start, n: int, per_gpu: int
) -> None:
    assert_ranks(start(f"salloc -N2 --gpus=4 --ntasks-per-gpu={per_gpu} hpcpar run -n {n} rank.py"), n)


def test_a_launcher_that_starts_another_number_of_ranks_is_found_out(start: Start) -> None:
    done = start("salloc -N2 -n4 hpcpar run -n 2 --options=--ntasks=4 rank.py")
    assert_refused(done, "`hpcpar run` was asked for 2 ranks, but there are 4")


# Signals


@pytest.mark.parametrize(("name", "status"), [("INT", 130), ("TERM", 143), ("HUP", 129)])
@pytest.mark.parametrize("launcher", ["srun", "mpiexec"])
def test_one_signal_ends_the_job_with_its_status(start: Start, launcher: str, name: str, status: int) -> None:
    script = (
        f"set -m; hpcpar run --launcher {launcher} -n 2 waits.py > out & "
        f"until grep -q 'rank 1' out 2>/dev/null && grep -q 'rank 0' out; do sleep 0.1; done; "
        f"kill -{name} $!; wait $!; echo ended with $?"
    )
    done = start(f"salloc -N2 -n2 bash -c {shlex.quote(script)}")
    assert f"ended with {status}\n" in done.stdout, done.stdout + done.stderr


# Launchers in launchers


@pytest.mark.parametrize(
    "line",
    [
        "salloc -N2 --ntasks-per-node=2 env SLURM_MPI_TYPE=pmix mpiexec -n 4 python rank.py",
        "salloc -N2 --ntasks-per-node=2 env SLURM_MPI_TYPE=pmix hpcpar run --launcher mpiexec -n 4 rank.py",
        "salloc -N2 --ntasks-per-node=2 env SLURM_MPI_TYPE=pmix hpcpar run -n 4 rank.py",
    ],
)
def test_variables_of_slurms_pmix_do_not_stop_an_mpich_that_another_launcher_starts(
    start: Start, line: str
) -> None:
    assert_ranks(start(line), 4)


def test_one_task_of_slurms_pmix_is_a_world_of_one(start: Start) -> None:
    assert_ranks(start("srun --mpi=pmix -n1 python rank.py"), 1)


def test_the_mpiexec_of_another_mpi_is_named_before_mpi_aborts(start: Start) -> None:
    done = start(
        "env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpiexec.openmpi -n 2 python rank.py"
    )
    assert_refused(done, "Open MPI's mpiexec started 2 processes and speaks PMIx, which MPICH")
    assert done.stderr.count("LaunchError: ") == 1
    assert "Abort(" not in done.stderr


@pytest.mark.parametrize("nodes", [1, 2])
def test_an_mpiexec_in_each_task_of_a_step_is_refused(start: Start, nodes: int) -> None:
    done = start(f"srun --overlap -N{nodes} -n2 env HYDRA_LAUNCHER=fork mpiexec -n 2 python rank.py")
    assert_refused(done, "srun started 2 tasks, and each of them an mpiexec of its own")


def test_a_job_that_a_rank_has_submitted_starts_ranks_of_its_own(start: Start, scripts: Path) -> None:
    submit = "sbatch --wait -n2 --output=next --wrap='hpcpar run -n 2 rank.py'"
    done = start(f"srun -n2 sh -c {shlex.quote(f'test $SLURM_PROCID = 1 || {submit}')}")
    done.stdout += (scripts / "next").read_text()
    assert_ranks(done, 2)


# Nothing left to tell


@pytest.mark.parametrize(
    "line",
    [
        "srun -N1 -n2 env -i python rank.py",
        "srun -N2 -n2 sh -c 'env -i $(command -v python) rank.py; exit $?'",
    ],
)
def test_tasks_whose_variables_were_taken_away_do_not_train_alone(
    start: Start, python: str, line: str
) -> None:
    done = start(line.replace("env -i python", f"env -i {python}"))
    assert_refused(done, "started 2 processes, of which this is one, but none of its variables is left")


def test_one_task_without_variables_is_meant_to_be_alone(start: Start, python: str) -> None:
    done = start(f"srun -n1 env -i {python} rank.py")
    assert_ranks(done, 1)
    assert "variables" not in done.stderr


# Shells


class Terminal:
    """A command on a terminal, into which lines are typed."""

    def __init__(self, argv: list[str], environ: dict[str, str]) -> None:
        pid, self._descriptor = pty.fork()
        if pid == 0:
            os.execvpe(argv[0], argv, environ)
        self._pid = pid
        self._shown = ""

    def type(self, line: str) -> None:
        os.write(self._descriptor, line.encode() + b"\n")

    def await_(self, pattern: str) -> re.Match[str]:
        """Wait until this is shown; AssertionError with all that was shown when the time is over."""
        deadline = time.monotonic() + LIMIT_S
        while (found := re.search(pattern, self._shown)) is None:
            assert time.monotonic() < deadline, self._shown
            if select.select([self._descriptor], [], [], 0.5)[0]:
                self._shown += os.read(self._descriptor, 4096).decode(errors="replace")
        return found

    def close(self) -> None:
        os.kill(self._pid, 9)
        os.waitpid(self._pid, 0)
        os.close(self._descriptor)


@pytest.fixture
def shell(cluster: Cluster, python: str, scripts: Path) -> Iterator[Terminal]:
    """The shell of `srun -n2 --pty bash`."""
    argv = cluster.command("srun", "-N2", "-n2", "--pty", "bash", "--norc", "-i", directory=scripts)
    terminal = Terminal(argv, bare(cluster, python))
    terminal.type("PS1=; echo up and $((40 + 2))")
    terminal.await_("up and 42")
    yield terminal
    terminal.close()


def test_one_process_in_the_shell_of_a_step_runs_alone_with_a_hint(shell: Terminal) -> None:
    shell.type("python rank.py; echo status $?")
    shell.await_(r"has 2 tasks, but .*`srun --overlap python …` or `hpcpar run -n 2 …`")
    shell.await_(r"rank 0 of 1\s+status 0")


@pytest.mark.parametrize("launcher", ["srun", "mpiexec"])
def test_in_the_shell_of_a_step_hpcpar_run_starts_ranks_by_either_launcher(
    shell: Terminal, launcher: str
) -> None:
    shell.type(f"hpcpar run --launcher {launcher} -n 2 rank.py; echo status $?")
    shell.await_(r"status \d")
    shell.await_(r"rank 0 of 2")
    shell.await_(r"rank 1 of 2")
    shell.await_(r"status 0")


# Shared memory


@pytest.mark.parametrize(
    ("mebibytes", "line", "words"),
    [
        (64, "hpcpar run -n 12 rank.py", "but 12 ranks of MPICH"),
        (64, "mpiexec -n 12 python rank.py", "but 12 ranks of MPICH"),
        (1, "hpcpar run -n 2 rank.py", "but 2 ranks of MPICH"),
        (1, "mpiexec -n 2 hpcpar doctor", "but 2 ranks of MPICH"),
        (1, "hpcpar doctor", "but 1 rank of MPICH"),
    ],
)
def test_too_little_shared_memory_is_named_with_what_to_set(
    start: Start, mebibytes: int, line: str, words: str
) -> None:
    mounted = f"mount -t tmpfs -o size={mebibytes}m tmpfs /dev/shm && {line}"
    done = start(f"unshare --mount sh -c {shlex.quote(mounted)}")
    told = done.stdout + done.stderr
    assert done.returncode == 1, told
    assert words in told
    assert "--shm-size=1g" in told
    assert "signal" not in told
