"""What every test shares: defaults as shipped, one thread per rank, and quiet ranks above 0."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

# A test of what users do sets nothing that they do not set: a setting belongs to the test of the setting.
# This one is a limit of the machine, which has fewer cores than ranks. Before torch looks at it, once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONUNBUFFERED", None)  # with it, a line and its end are two writes: those of ranks mix

pytest_plugins = ["tests.transport.gpu.cuda_stand_in.fixtures"]


def _world_rank() -> int:
    from hpcpar.launch.environment import detect

    return detect().rank


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let rank 0 alone write; another rank's report is kept back and shown only if it fails."""
    if not config.getoption("--with-mpi", default=False) or _world_rank() == 0:
        return
    from _pytest.terminal import TerminalReporter

    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(TerminalReporter(config, io.StringIO()), "terminalreporter")


def pytest_unconfigure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    kept = getattr(reporter, "_tw", None) and reporter._tw._file
    if isinstance(kept, io.StringIO) and reporter.stats.keys() & {"failed", "error"}:
        sys.stderr.write(f"\n[rank {_world_rank()}]\n{kept.getvalue()}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell of a failure on one of many ranks at once: others may wait for it until a limit ends them all."""
    report = yield
    if report.failed and item.config.getoption("--with-mpi", default=False):
        with item.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
            sys.stderr.write(f"\n[rank {_world_rank()}] {report.nodeid}\n{report.longreprtext[-3000:]}\n")
            sys.stderr.flush()
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


RANKS_ARE_THREADS = {
    "autograd",
    "checkpoint",
    "comm",
    "data_parallel",
    "expert_parallel",
    "models",
    "pipeline_parallel",
    "tensor_parallel",
    "training",
}
"""Directories of tests that are mostly so."""


@pytest.fixture(autouse=True)
def _ranks_that_are_threads_share_a_core(request: pytest.FixtureRequest) -> Iterator[None]:
    """They take turns at the interpreter; on several cores, beside another worker, it takes them longer."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    of_threads = request.path.parent.name in RANKS_ARE_THREADS
    of_processes = "run_ranks" in request.fixturenames or request.node.get_closest_marker("every_core")
    if of_processes or not (worker and of_threads and hasattr(os, "sched_setaffinity")):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[int(worker.removeprefix("gw")) % len(cores)]})
    yield
    os.sched_setaffinity(0, cores)


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    """Ranks and helpers share few cores; a test is not faster with more threads."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def gradients_of_any_size_are_added_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a large model are; weights of tests are small."""
    monkeypatch.setattr("hpcpar.autograd.fused_layers.LEAST_NBYTES", 0)


@pytest.fixture(params=["small", "large"])
def weights_small_or_as_if_large(request: pytest.FixtureRequest) -> None:
    """One after the other: gradients as they are made for a test's weights, and as for a large model's."""
    if request.param == "large":
        request.getfixturevalue("gradients_of_any_size_are_added_in_place")


@pytest.fixture(scope="session")
def world() -> Communicator:
    """The communicator over all ranks of this job, for tests marked `mpi`."""
    import hpcpar

    return hpcpar.init()


@pytest.fixture(scope="session")
def world_of_messages() -> Iterator[Communicator]:
    """The same ranks without memory that they share, for tests marked `mpi`."""
    from hpcpar.comm import Communicator
    from hpcpar.transport.mpi import MpiTransport

    comm = Communicator.over(MpiTransport.world())
    yield comm
    comm.free()


@pytest.fixture(params=["shared memory", "messages"])
def any_world(request: pytest.FixtureRequest) -> Communicator:
    """One after the other."""
    name = "world" if request.param == "shared memory" else "world_of_messages"
    comm: Communicator = request.getfixturevalue(name)
    return comm


@pytest.fixture
def run_ranks() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Start ranks of a script in a job of their own: `run_ranks(3, "script.py", "argument")`.

    By `hpcpar run`, not by mpiexec itself: MPICH's returns 0 now and then although a rank was lost.
    """

    def run(n: int, *argv: str, timeout_s: float = 100.0) -> subprocess.CompletedProcess[str]:
        outside = {name: value for name, value in os.environ.items() if not name.startswith("PMI_")}
        return subprocess.run(
            [sys.executable, "-m", "hpcpar", "run", "-n", str(n), "--", *argv],
            env=outside,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    return run
