"""Jobs that Slurm, or a person, asks to stop: saved after one step, and on from there with the same losses.

Every way to ask takes Slurm its time (a requeued job waits for some seconds, time limits are looked at every
30 s), so all jobs run side by side, and the tests look at what became of each.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.job import Job

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

LIMIT_S = 280  # for a busy machine

SCRIPT = Path(__file__).parent.parent.parent / "jobscripts" / "preemptible.sh"

RUN = """
[model]
hidden_size = 32
layers = 1
heads = 2
kv_heads = 1
ffn_size = 64
[data]
paths = ["{directory}/text"]
cache = "{directory}/cache"
held_out = 0.3
[train]
steps = 240
sequence = 32
global_batch = 4
microbatch = 1
threads = 1
evaluate_every = 40
held_out_batches = 1
[output]
log_every = 6
"""

# Rank 1 takes 4000 short naps, half a second in all, when MPI and Python are through, as ranks with large
# memory do. Meanwhile srun --kill-on-bad-exit=1 has seen the status of rank 0, and sends SIGTERM.
PROGRAM = """
import ctypes, sys, time
import hpcpar

world = hpcpar.init()
if world.rank == 1:
    libc = ctypes.CDLL(None)
    for _ in range(4000):
        libc.on_exit(libc.usleep, None)
with hpcpar.Preemption(world) as preemption:
    for step in range(100_000):
        world.barrier()
        time.sleep(0.1)
        if step == 5 and world.rank == 0:
            print("is under way", flush=True)
        if preemption.is_agreed() and not {deaf}:
            steps = world.gather_object(step)
            if world.rank == 0:
                print("stop after steps", *steps, flush=True)
            sys.exit(preemption.exit_status)
"""

TWO_TASKS = ("--nodes=2", "--ntasks-per-node=1", "--open-mode=append", "--requeue", "--output=%j.out")


class Scene:
    """Directory of the jobs, and the commands upon them."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster, self.directory = cluster, directory
        (directory / "text").mkdir()
        for number in range(12):
            words = f"document {number}: " + "the cat sat on the mat. " * (20 + number)
            (directory / "text" / f"{number}.txt").write_text(words)
        (directory / "run.toml").write_text(RUN.format(directory=directory))
        for name, deaf in (("stops.py", False), ("deaf.py", True)):
            (directory / name).write_text(PROGRAM.format(deaf=deaf))

    def submit(self, *words: str) -> Job:
        return self.cluster.submit(*TWO_TASKS, *words, directory=self.directory)

    def wrapped(self, command: str, *words: str) -> Job:
        """A job that is nothing but an srun."""
        return self.submit(*words, f"--wrap=srun --kill-on-bad-exit=1 {command}; echo status $?")

    def metrics(self, name: str) -> Path:
        return self.directory / name / "metrics.jsonl"

    def steps(self, name: str) -> list[int]:
        """In the order in which they were trained, as far as they are written down."""
        path = self.metrics(name)
        lines = path.read_text().splitlines() if path.exists() else []
        return [record["step"] for record in map(json.loads, lines) if "loss" in record]

    def course(self, name: str) -> list[dict[str, float]]:
        """All that a run has written down, but for times, and means of the steps between two stops."""
        records = map(json.loads, self.metrics(name).read_text().splitlines())
        left_out = ("time", "tokens_per_s", "step_s", "nbytes_sent")
        return [{k: v for k, v in record.items() if k not in left_out} for record in records]

    def scancel(self, job: Job, *words: str) -> None:
        assert self.cluster.run("scancel", *words, job.id).returncode == 0


def until(condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"after {limit_s:g} s: {what}")
        time.sleep(0.1)


def is_running(job: Job, restarts: int) -> bool:
    record = job.records()[0]
    return (record["JobState"], record["Restarts"]) == ("RUNNING", str(restarts))


def says(job: Job, words: str, times: int = 1) -> None:
    until(
        lambda: job.output.count(words) >= times, f"job {job.id} should say {words!r}: {job.output[-2000:]}"
    )


# --- what is done to the jobs, each in a thread of its own --------------------------------------------


def uninterrupted(scene: Scene) -> Job:
    job = scene.wrapped("python -m hpcpar train run.toml output.directory=whole")
    return job.wait(LIMIT_S)


def thrice(scene: Scene) -> Job:
    """The job script, asked to stop in three ways, each time after some more steps."""
    job = scene.submit(str(SCRIPT), "run.toml", "output.directory=thrice")
    ways = (
        ("scancel", "--signal=USR1", job.id),
        ("scontrol", "requeue", job.id),
        ("scancel", "--full", "--signal=USR1", job.id),
    )
    for restarts, way in enumerate(ways):
        until(lambda restarts=restarts: is_running(job, restarts), f"start {restarts} does not come")
        before = len(scene.steps("thrice"))
        until(lambda before=before: len(scene.steps("thrice")) > before, f"no steps after start {restarts}")
        assert scene.cluster.run(*way).returncode == 0
    return job.wait(LIMIT_S)


def before_its_limit(scene: Scene) -> Job:
    """Slurm looks every 30 s, and warns at the last look that is early enough: after 60 to 90 s."""
    job = scene.wrapped("python stops.py", "--time=2", "--signal=USR1@30")
    return job.wait(LIMIT_S)


def by_scancel(scene: Scene) -> Job:
    job = scene.wrapped("python stops.py")
    says(job, "is under way")
    scene.scancel(job)
    says(job, "stop after steps")
    return job.wait(60)


def at_its_limit(scene: Scene) -> Job:
    job = scene.wrapped("python stops.py", "--time=1")
    return job.wait(LIMIT_S)


def by_a_second_signal(scene: Scene) -> Job:
    job = scene.wrapped("python deaf.py")
    says(job, "is under way")
    scene.scancel(job, "--signal=USR1")
    says(job, "the job will stop")
    time.sleep(5.5)
    scene.scancel(job, "--signal=USR1")
    return job.wait(30)


SCENES = (uninterrupted, thrice, before_its_limit, by_scancel, at_its_limit, by_a_second_signal)

Outcome = Callable[[Callable[[Scene], Job]], Job]


@pytest.fixture(scope="module")
def scene(_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    yield Scene(_cluster, tmp_path_factory.mktemp("preemption"))
    _cluster.clear()


@pytest.fixture(scope="module")
def outcome(scene: Scene) -> Outcome:
    """Begin all at once; what became of one, or what went wrong there."""
    found: dict[Callable[[Scene], Job], Job | BaseException] = {}

    def play(what: Callable[[Scene], Job]) -> None:
        try:
            found[what] = what(scene)
        except BaseException as error:
            found[what] = error

    threads = {what: threading.Thread(target=play, args=(what,), daemon=True) for what in SCENES}
    for thread in threads.values():
        thread.start()

    def get(what: Callable[[Scene], Job]) -> Job:
        threads[what].join(LIMIT_S)
        job = found[what]
        if isinstance(job, BaseException):
            raise job
        return job

    return get


def assert_all_stopped_after_the_same_step(job: Job, why: str) -> None:
    assert f"{why}: the job will stop" in job.output, job.output
    first, second = job.output.split("stop after steps ")[1].split("\n")[0].split()
    assert first == second
    assert "lost" not in job.output, job.output


def test_preempted_requeued_and_resumed_three_times_a_run_has_the_losses_of_an_uninterrupted_one(
    scene: Scene, outcome: Outcome
) -> None:
    job = outcome(thrice)
    assert (job.state(), job.field("Restarts")) == ("COMPLETED", "3"), job.output
    assert "status 0" in outcome(uninterrupted).output, outcome(uninterrupted).output
    assert scene.steps("thrice") == list(range(240))
    assert scene.course("thrice") == scene.course("whole")
    assert job.output.count("asked to stop: ") == 3
    assert job.output.count("Slurm started this job again") == 3
    # scontrol requeue sends SIGTERM; the SIGUSR1 that `hpcpar run` makes of it may be there before.
    assert job.output.count(": the job will stop") >= 3
    assert job.output.count("back into the queue") >= 2
    assert "lost" not in job.output


def test_a_cancelled_job_stops_after_the_same_step_on_all_ranks(outcome: Outcome) -> None:
    job = outcome(by_scancel)
    assert job.state() == "CANCELLED", job.output
    assert_all_stopped_after_the_same_step(job, "SIGTERM")


def test_a_second_signal_ends_a_job_at_once(outcome: Outcome) -> None:
    job = outcome(by_a_second_signal)
    assert "ends the job: SIGUSR1, after it had been asked to stop already" in job.output
    assert "status 138" in job.output
    assert "lost" not in job.output


def test_a_job_warned_before_its_time_limit_stops_in_good_order_with_status_75(outcome: Outcome) -> None:
    job = outcome(before_its_limit)
    assert job.state() == "COMPLETED", job.output
    assert_all_stopped_after_the_same_step(job, "SIGUSR1")
    assert "status 75" in job.output


def test_a_job_at_its_time_limit_stops_after_the_same_step_on_all_ranks(outcome: Outcome) -> None:
    job = outcome(at_its_limit)
    assert job.state() == "TIMEOUT", job.output
    assert_all_stopped_after_the_same_step(job, "SIGTERM")
