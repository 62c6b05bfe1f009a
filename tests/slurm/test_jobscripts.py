"""Every job script ends COMPLETED on a real Slurm, submitted as it is, with what it should leave and say.

The words that follow a script make its run short; options of sbatch give it fewer ranks. What scripts do
when something fails, and those for other schedulers, are in tests/test_jobscripts.py; preemptible.sh is in
test_preemption.py.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.command import until
from tests.greedy import greedy_answer, needs_vllm
from tests.slurm.cluster import Cluster
from tests.slurm.job import ENDED, Job
from tests.vllm_stand_in import stand_in

# A job of a few ranks takes 10 s on two free cores, and up to a minute on busy ones.
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]
JOB_S = 200

ROOT = Path(__file__).parents[2]
STEPS = 2
TINY = (
    f"train.steps={STEPS}",
    "train.global_batch=8",
    "train.sequence=32",
    "train.held_out_batches=1",
    "model.layers=2",
    "model.hidden_size=64",
    "data.max_mib=1",
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory to submit from like the project's own, but with `runs` of its own."""
    directory = tmp_path_factory.mktemp("project")
    for name, target in (
        (".venv", sys.prefix),
        ("benchmarks", ROOT / "benchmarks"),
        ("examples", ROOT / "examples"),
        ("jobscripts", ROOT / "jobscripts"),
    ):
        (directory / name).symlink_to(target)
    return directory


class Submit:
    """`submit("zero-3", "--ntasks-per-node=1", words=TINY)`: the job, which has ended COMPLETED."""

    def __init__(self, cluster: Cluster, project: Path) -> None:
        self.cluster, self.project = cluster, project

    def __call__(self, script: str, *options: str, words: tuple[str, ...] = (), **variables: str) -> Job:
        job = self.cluster.sbatch(
            *options, f"jobscripts/{script}.sh", *words, directory=self.project, timeout_s=JOB_S, **variables
        )
        assert job.state() == "COMPLETED", job.output
        return job

    def trained(self, script: str, *options: str, words: tuple[str, ...] = (), **variables: str) -> Job:
        """A job of `hpcpar train`, which has left what such a run leaves in runs/script-JOB."""
        job = self(script, *options, words=("examples/tiny.toml", *TINY, *words), **variables)
        self.check(job, self.project / "runs" / f"{script}-{job.id}")
        return job

    @staticmethod
    def check(job: Job, output: Path) -> dict[str, Any]:
        """Steps were made, nothing was sent beyond the theory, and there is a checkpoint."""
        assert f"step {STEPS}/{STEPS}  loss" in job.output, job.output
        assert "held-out loss" in job.output
        summary: dict[str, Any] = json.loads((output / "summary.json").read_text())
        counted = [line for line in summary["traffic"] if line["nbytes_theory"] is not None]
        assert counted or summary["layout"] == "dp=1"
        assert all(line["nbytes_sent"] == line["nbytes_theory"] for line in counted), counted
        beyond = re.findall(r"iB +(\d[\d.]* \w+) +[\d.]+ (?:s|ms|µs)$", job.output, re.MULTILINE)
        assert set(beyond) <= {"0 B"}
        assert (output / "checkpoints" / f"step-{STEPS:08d}" / "manifest.json").exists()
        return summary


@pytest.fixture
def submit(cluster: Cluster, project: Path) -> Submit:
    return Submit(cluster, project)


def node_names(job: Job) -> set[str]:
    """Return the nodes of the ranks' own report at the start."""
    return set(re.findall(r"^node \d+  (\w+): rank", job.output, re.MULTILINE))


def test_single_node(submit: Submit) -> None:
    job = submit.trained("single-node", "--ntasks-per-node=2")
    assert "ranks: 2 (dp=2)" in job.output
    assert len(node_names(job)) == 1


def test_many_nodes(submit: Submit) -> None:
    job = submit.trained("many-nodes", "--ntasks-per-node=1")
    assert "ranks: 2 (dp=2)" in job.output
    assert "ZeRO-1" in job.output
    assert len(node_names(job)) == 2


@pytest.fixture
def small_environment(tmp_path: Path) -> Path:
    """A project whose .venv has an MPI of its own, a package, and a view of this environment's packages."""
    environment, own = tmp_path / ".venv", Path(sys.prefix)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=60)
    packages = next(environment.glob("lib/python3*/site-packages"))
    (packages / "others.pth").write_text(
        f"{next(own.glob('lib/python3*/site-packages'))}\n{ROOT}\nimport where_from\n"
    )
    (packages / "where_from.py").write_text(
        "import os, sys\n"
        "if 'train' in sys.argv: print('from', __file__, 'on', os.uname().nodename, flush=True)\n"
    )
    mpi = [
        *own.glob("lib/libmpi*"),
        *own.glob("lib/mpich"),
        *own.glob("bin/mpiexec*"),
        *own.glob("bin/hydra*"),
    ]
    for found in mpi:
        subprocess.run(["cp", "-a", str(found), str(environment / found.relative_to(own))], check=True)
    for name in ("examples", "jobscripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def test_ranks_start_from_copies_on_their_nodes_which_are_gone_after_the_job(
    cluster: Cluster, small_environment: Path
) -> None:
    # /tmp is one directory for all nodes of this cluster; /dev/shm is a node's own.
    job = cluster.sbatch(
        "--ntasks-per-node=1",
        "jobscripts/node-local.sh",
        "examples/tiny.toml",
        *TINY,
        directory=small_environment,
        timeout_s=JOB_S,
        SLURM_TMPDIR="/dev/shm",
    )
    assert job.state() == "COMPLETED", job.output
    Submit.check(job, small_environment / "runs" / f"node-local-{job.id}")
    copy = f"/dev/shm/hpcpar-environment-{job.id}"
    for node in ("node1", "node2"):
        assert re.search(rf"^from {copy}/lib/python\S+/where_from.py on {node}$", job.output, re.MULTILINE)
    look = "ls -d /dev/shm/hpcpar-environment-*; echo seen on $(hostname)"
    seen = cluster.run("srun", "-N2", "-n2", "-t1", "sh", "-c", look)
    assert sorted(seen.stdout.splitlines()) == ["seen on node1", "seen on node2"]
    assert not list(small_environment.glob("*.tar"))


def test_zero_3(submit: Submit) -> None:
    job = submit.trained("zero-3", "--ntasks-per-node=1")
    assert "ZeRO-3" in job.output
    assert re.search(r"^dp +reduce_scatter .* 0 B ", job.output, re.MULTILINE)


def test_zero_3_across_nodes_and_tensor_parallelism_within_them(submit: Submit) -> None:
    job = submit.trained("fsdp-tp", "--ntasks-per-node=2", words=("mesh.tp=2",))
    assert "ranks: 4 (dp=2 x tp=2)" in job.output
    assert "65,856 on each of 2 ranks, which share the" in job.output
    assert "crosses" not in job.output  # no warning that layers are divided over nodes


def test_ranks_of_a_node_share_each_sequence(submit: Submit) -> None:
    job = submit.trained("context", "--ntasks-per-node=2", words=("mesh.cp=2", "data.pack_documents=true"))
    assert "ranks: 4 (dp=2 x cp=2)" in job.output
    assert "crosses" not in job.output  # no warning that sequences are divided over nodes


def test_ranks_of_a_node_divide_the_experts(submit: Submit) -> None:
    words = ("model.preset=tiny-moe", "mesh.ep=2")
    job = submit.trained("experts", "--ntasks-per-node=2", words=words)
    assert "ranks: 4 (dp=4, ep=2)" in job.output


def test_all_three_axes(submit: Submit) -> None:
    job = submit.trained("3d")
    assert "ranks: 8 (pp=2 x dp=2 x tp=2)" in job.output
    assert "pipeline: 1f1b, 2 ranks, 2 microbatches" in job.output
    assert re.search(r"^pp .* 0 B ", job.output, re.MULTILINE)
    assert len(node_names(job)) == 2
    assert "crosses" not in job.output


def test_collectives(submit: Submit, project: Path) -> None:
    job = submit("collectives", "--ntasks-per-node=1", words=("--max-bytes", "64", "--rounds", "1"))
    lines = [
        json.loads(line)
        for line in (project / "runs" / f"collectives-{job.id}.jsonl").read_text().splitlines()
    ]
    measured = {
        (line["collective"], line["algorithm"])
        for line in lines
        if "algorithm" in line and line["collective"] != "copy"
    }
    assert {collective for collective, _ in measured} == {
        "allreduce",
        "reduce_scatter",
        "allgather",
        "alltoall",
    }
    assert {algorithm for _, algorithm in measured} >= {"chosen", "native", "mpi"}
    assert (project / "runs" / f"collectives-{job.id}.png").read_bytes().startswith(b"\x89PNG")


def test_gpus_are_bound_and_training_is_where_torch_can(submit: Submit) -> None:
    job = submit.trained("gpu")
    shown = re.findall(
        r"^rank (\d) on (node\d): local rank (\d), GPUs seen: ([\d,]+), cores: [\d,-]+$",
        job.output,
        re.MULTILINE,
    )
    assert [(rank, local, gpus) for rank, _, local, gpus in shown] == [
        ("0", "0", "0,1"),
        ("1", "1", "0,1"),
        ("2", "0", "0,1"),
        ("3", "1", "0,1"),
    ]
    assert len({node for _, node, _, _ in shown}) == 2
    # The cluster's GPUs are files; torch finds no driver.
    assert "WARNING: torch sees no GPU" in job.output
    assert "on cpu\n" in job.output


def test_without_a_gpu_collectives_on_gpus_are_not_measured(cluster: Cluster, project: Path) -> None:
    """The cluster's GPUs are files; torch finds no driver."""
    job = cluster.sbatch("jobscripts/device-collectives.sh", directory=project)
    assert job.state() == "FAILED"
    assert "ERROR: torch sees no GPU on ranks 0, 1 of 2" in job.output
    assert not (project / "runs" / f"device-collectives-{job.id}.jsonl").exists()


APPTAINER = """#!/bin/bash
# As Apptainer without root's help: the command is in a user namespace of its own.
echo "apptainer $*"
[ "$1" = exec ] && shift
while [ "${1#--}" != "$1" ]; do
    case $1 in --bind | --pwd | --env) shift 2 ;; *) shift ;; esac
done
[ -f "$1" ] && shift
exec unshare --user --map-root-user --mount "$@"
"""


def test_in_a_container_of_which_a_stand_in_makes_the_namespaces(
    submit: Submit, project: Path, tmp_path: Path
) -> None:
    """Two ranks of a node which the kernel does not let into each other's memory. There is no Apptainer."""
    apptainer = tmp_path / "apptainer"
    apptainer.write_text(APPTAINER)
    apptainer.chmod(apptainer.stat().st_mode | stat.S_IXUSR)
    (project / "hpcpar.sif").touch()
    path = f"{tmp_path}:{submit.cluster.environ['PATH']}"
    # .venv would put itself first, but has no apptainer.
    job = submit.trained("container", "--nodes=1", "--ntasks-per-node=2", PATH=path)
    expected = f"apptainer exec --bind {project} --pwd {project} hpcpar.sif python -m hpcpar train examples/"
    assert job.output.count(expected) == 2
    assert "ranks: 2 (dp=2)" in job.output
    assert "ERROR" not in job.output


def test_a_sweep_and_its_summary(submit: Submit, project: Path) -> None:
    job = submit(
        "sweep",
        "--array=1-2",
        "--ntasks-per-node=1",
        words=("examples/tiny.toml", "jobscripts/sweep.txt", *TINY),
    )
    for task in ("1", "2"):
        output = project / "runs" / f"sweep-{job.id}" / task
        assert (output / "row.txt").read_text() in (ROOT / "jobscripts" / "sweep.txt").read_text()
        assert json.loads((output / "summary.json").read_text())["steps"] == STEPS
    assert "row 1: optimizer.learning_rate=1e-3" in job.output
    assert "row 2: optimizer.learning_rate=2e-3" in job.output
    summary = submit("sweep-summary", words=(f"runs/sweep-{job.id}",))
    rows = [line.split() for line in summary.output.splitlines()[1:]]
    assert sorted(row[1] for row in rows) == ["1", "2"]
    assert float(rows[0][0]) <= float(rows[1][0])


def test_a_row_that_is_not_in_the_table_fails_the_task(cluster: Cluster, project: Path) -> None:
    job = cluster.sbatch("--array=5", "jobscripts/sweep.sh", directory=project)
    assert job.state() == "FAILED"
    assert "jobscripts/sweep.txt has no row 5: submit with --array=1-4" in job.output


def test_nodes_of_two_kinds_are_one_world(submit: Submit) -> None:
    job = submit.trained("heterogeneous")
    assert "ranks: 4 (dp=4)" in job.output
    assert len(node_names(job)) == 3


def test_a_horovod_program(submit: Submit) -> None:
    pytest.importorskip("sklearn")
    job = submit("horovod", "--ntasks-per-node=1", words=("examples/horovod_digits.py", "--epochs", "1"))
    assert re.search(r"^epoch 1  loss [\d.]+$", job.output, re.MULTILINE)
    assert re.search(r"^held-out accuracy 0\.\d+ on 2 ranks$", job.output, re.MULTILINE)


@pytest.mark.skipif(not (find_spec("keras") and find_spec("sklearn")), reason="needs Keras, scikit-learn")
def test_a_keras_program(submit: Submit) -> None:
    words = ("examples/keras_digits.py", "--epochs", "1")
    # What Open MPI needs of srun, and MPICH does not mind.
    job = submit("keras", "--ntasks-per-node=1", words=words, SLURM_MPI_TYPE="pmix")
    assert re.search(r"^epoch 1  loss [\d.]+  held-out accuracy 0\.\d+$", job.output, re.MULTILINE)
    assert "trained on 2 ranks" in job.output


def test_a_program_of_torch_distributed(submit: Submit) -> None:
    # What Open MPI needs of srun, and MPICH does not mind.
    job = submit("torch", "--ntasks-per-node=1", SLURM_MPI_TYPE="pmix")
    assert re.search(r"^last loss 0\.\d{8}$", job.output, re.MULTILINE)


needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None and os.environ.get("HPCPAR_REQUIRE_SLURM") != "1",
    reason="Ray is not installed: pip install '.[ray]'",
)


@needs_ray
def test_ray_cleans_text_on_all_nodes_which_is_then_trained_on(submit: Submit, project: Path) -> None:
    job = submit(
        "ray-preprocess", "--ntasks-per-node=1", "--cpus-per-task=2", words=("examples/tiny.toml", *TINY)
    )
    runs = project / "runs" / f"ray-{job.id}"
    summary = submit.check(job, runs / "training")
    assert summary["layout"] == "dp=2"
    assert "Ray is on 2 nodes: 4 cores, 0 GPUs" in job.output
    assert sorted(re.findall(r"^node\d cleaned (\d+) shards$", job.output, re.MULTILINE)) == ["8", "8"]
    documents = [
        json.loads(line)["text"]
        for shard in sorted((runs / "text").iterdir())
        for line in shard.read_text(encoding="utf-8").splitlines()
    ]
    assert len(documents) == len(set(documents)) > 200
    assert all(len(text) >= 200 and text == text.strip() for text in documents)
    assert f"{len(documents)} documents of 400 files" in job.output
    tokens = sum(len(text.encode()) + 1 for text in documents)
    told = re.search(r"text:  ([\d,]+) tokens to learn from, ([\d,]+) held out", job.output)
    assert told is not None
    # Long documents are cut, and each piece ends with a token.
    assert tokens <= sum(int(count.replace(",", "")) for count in told.groups()) < tokens * 1.01
    assert not Path(f"/tmp/ray-{job.id}").exists()


@needs_ray
def test_ray_trains_models_on_all_nodes_each_with_its_ranks_on_one(submit: Submit, project: Path) -> None:
    job = submit("ray-models", "--cpus-per-task=2", words=("--steps", "2"))
    assert "Ray is on 2 nodes: 4 cores, 0 GPUs" in job.output
    trained = re.findall(r"^(\w+) on (node\d): loss [\d.]+ to [\d.]+, on held-out", job.output, re.MULTILINE)
    assert [name for name, _ in trained] == ["asyncio", "email", "unittest"]
    assert {node for _, node in trained} == {"node1", "node2"}
    weights = project / "runs" / f"ray-models-{job.id}"
    assert sorted(path.stem for path in weights.iterdir()) == ["asyncio", "email", "unittest"]
    assert not Path(f"/tmp/ray-{job.id}").exists()


@pytest.fixture
def serving(cluster: Cluster, project: Path) -> Callable[..., tuple[Job, str]]:
    """Submit serve-vllm.sh, and return the job, which is ready, and its address."""

    def submitted(*words: str, limit_s: float = JOB_S) -> tuple[Job, str]:
        job = cluster.submit(*words, "--port", "0", directory=project)
        until(lambda: "ready after" in job.output or job.state() in ENDED, "a server", limit_s)
        found = re.search(r"^curl (http://\S+)/v1/completions ", job.output, re.MULTILINE)
        assert found is not None, job.output
        return job, found[1]

    return submitted


def ask(cluster: Cluster, url: str, model: str, prompt: str) -> str:
    """Ask from the cluster's head, for 16 tokens, the likeliest each time."""
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0})
    code = (
        "import sys, urllib.request as u\n"
        "asked = u.Request(sys.argv[1], sys.argv[2].encode(), {'Content-Type': 'application/json'})\n"
        "print(u.urlopen(asked).read().decode())"
    )
    done = cluster.run(sys.executable, "-c", code, f"{url}/v1/completions", body)
    assert done.returncode == 0, done.stderr
    text: str = json.loads(done.stdout)["choices"][0]["text"]
    return text


@needs_ray
def test_a_trained_model_is_served_on_gpus_of_all_nodes_until_the_job_is_cancelled(
    submit: Submit, project: Path, tmp_path: Path, serving: Callable[..., tuple[Job, str]]
) -> None:
    """All but vLLM itself, which needs GPUs: in its place is one that answers without a model."""
    trained = submit.trained("single-node", "--ntasks-per-node=1")
    name = f"single-node-{trained.id}"
    words = (f"runs/{name}", "--max-model-len", "32", "--python", str(stand_in(tmp_path, "vllm 0.32.0")))
    dry = submit("serve-vllm", words=(*words, "--dry-run"))
    (exported,) = (project / "runs" / name / "served").iterdir()
    assert json.loads((exported / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert (
        f"vllm.entrypoints.cli.main serve runs/{name}/served/{exported.name} --served-model-name {name} "
        "--host 0.0.0.0 --port 8000 --tensor-parallel-size 2 --pipeline-parallel-size 2 --max-model-len 32 "
        "--dtype float32 --distributed-executor-backend ray\n"
    ) in dry.output
    assert "Ray is on" not in dry.output

    job, url = serving("jobscripts/serve-vllm.sh", *words)
    assert "Ray is on 2 nodes: 8 cores, 4 GPUs" in job.output
    assert re.fullmatch(r"http://node\d:\d+", url)
    assert ask(submit.cluster, url, name, "def") == f"{name} was asked 'def'"
    submit.cluster.run("scancel", "--full", "--signal=TERM", job.id)
    job.wait()
    assert "the server ends, as asked" in job.output


def test_a_model_is_served_on_the_cores_of_a_node(
    submit: Submit, tmp_path: Path, serving: Callable[..., tuple[Job, str]]
) -> None:
    trained = submit.trained(
        "single-node", "--ntasks-per-node=1", words=("model.heads=2", "model.kv_heads=2")
    )
    run, python = f"runs/single-node-{trained.id}", ("--python", str(stand_in(tmp_path)))
    on_cpus = ("--nodes=1", "--gpus-per-node=0", "jobscripts/serve-vllm.sh", run, *python)
    job, url = serving(*on_cpus, "--tp", "2")
    assert "--tensor-parallel-size 2 --dtype float32 --enforce-eager --kv-cache-memory-bytes" in job.output
    assert "ray" not in job.output
    name = run.removeprefix("runs/")
    assert ask(submit.cluster, url, name, "def") == f"{name} was asked 'def'"
    submit.cluster.run("scancel", job.id)
    assert job.wait().state() == "CANCELLED"


def test_nodes_without_gpus_are_not_served_on_together(cluster: Cluster, project: Path) -> None:
    job = cluster.sbatch("--gpus-per-node=0", "jobscripts/serve-vllm.sh", "runs/none", directory=project)
    assert job.state() == "FAILED"
    assert "2 nodes without GPUs, but vLLM on CPUs serves within one: submit with --nodes=1" in job.output


def test_without_vllm_the_script_that_serves_says_so(cluster: Cluster, project: Path) -> None:
    job = cluster.sbatch("jobscripts/serve-vllm.sh", "runs/none", directory=project)
    assert job.state() == "FAILED"
    assert "there is no vLLM with " in job.output
    assert "Ray is on" not in job.output


@pytest.mark.long
@pytest.mark.timeout(900)
@needs_vllm
def test_vllm_itself_answers_on_the_cores_of_a_node(
    submit: Submit, project: Path, serving: Callable[..., tuple[Job, str]]
) -> None:
    heads = ("model.heads=2", "model.kv_heads=2")  # 32 wide, which vLLM on CPUs can
    trained = submit.trained("single-node", "--ntasks-per-node=1", words=heads)
    (project / ".venv-serve").symlink_to(ROOT / ".venv-serve")
    run = f"runs/single-node-{trained.id}"
    job, url = serving("--nodes=1", "--gpus-per-node=0", "jobscripts/serve-vllm.sh", run, limit_s=600)
    (exported,) = (project / run / "served").iterdir()
    answer = ask(submit.cluster, url, f"single-node-{trained.id}", "def main(")
    assert answer == greedy_answer(exported, "def main(", tokens=16)
    submit.cluster.run("scancel", job.id)
    assert job.wait().state() == "CANCELLED"
