"""The job scripts are bash, ask for what the trainer knows, and fail when what they start fails.

On a real Slurm they run in tests/slurm/test_jobscripts.py.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hpcpar.training.config import Config, parse
from hpcpar.training.recipes import names, recipe

ROOT = Path(__file__).parent.parent
DIRECTORY = ROOT / "jobscripts"
FILES = sorted(DIRECTORY.glob("*.sh"))
SUBMITTED = [path for path in FILES if path.name != "ray-cluster.sh"]
SLURM = [path for path in SUBMITTED if not path.name.startswith(("pbs-", "flux-"))]

BLOCK = re.compile(r"^# --- site: .*?^# -{60,}\n", re.DOTALL | re.MULTILINE)

# Of each script that trains: pp, tp, stage of ZeRO.
TRAINING = {
    "3d": (2, 2, 1),
    "container": (1, 1, 1),
    "context": (1, 1, 1),
    "experts": (1, 1, 1),
    "flux-many-nodes": (1, 1, 1),
    "flux-single-node": (1, 1, 0),
    "fsdp-tp": (1, 4, 3),
    "gpu": (1, 1, 0),
    "heterogeneous": (1, 1, 1),
    "many-nodes": (1, 1, 1),
    "node-local": (1, 1, 1),
    "pbs-many-nodes": (1, 1, 1),
    "pbs-single-node": (1, 1, 0),
    "preemptible": (1, 1, 0),
    "ray-preprocess": (1, 1, 0),
    "recipe-deepseek-v3": (16, 1, 1),
    "recipe-gemma2-27b": (1, 8, 3),
    "recipe-gemma2-2b": (1, 1, 3),
    "recipe-gemma2-9b": (1, 4, 3),
    "recipe-llama3-405b": (16, 8, 1),
    "recipe-olmo-7b": (1, 1, 3),
    "recipe-yi-34b": (2, 4, 1),
    "recipe-yi-lightning": (1, 1, 1),
    "single-node": (1, 1, 0),
    "sweep": (1, 1, 0),
    "zero-3": (1, 1, 3),
}


def named(name: str) -> Path:
    return DIRECTORY / f"{name}.sh"


def asked(script: Path) -> Config:
    """What a script overrides, outside of its comments; where it says a variable, its name stands.

    Of a recipe its first stage.
    """
    lines = [line for line in script.read_text().splitlines() if not line.startswith("#")]
    words = re.sub(r"\$\{?(\w+)\}?", r"\1", "\n".join(lines).replace("\\\n", " ")).split()
    overrides = [word.replace('"', "") for word in words if re.match(r"[a-z_]+\.[a-z_]+=", word)]
    overrides = [word.replace("device=device", "device=cuda") for word in overrides]
    if "--recipe" in words:
        name = words[words.index("--recipe") + 1]
        return recipe(name, full="--full" in words, overrides=overrides).stages[0]
    return parse("", source="nothing", overrides=overrides)


def directives(script: Path) -> dict[str, str]:
    """Those of Slurm that are in force, of a heterogeneous job those of the first component."""
    before = script.read_text().partition("#SBATCH hetjob")[0]
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", before, re.MULTILINE))


def test_shellcheck_finds_nothing() -> None:
    if shutil.which("shellcheck") is None:
        if os.environ.get("HPCPAR_REQUIRE_SLURM") == "1":
            pytest.fail("HPCPAR_REQUIRE_SLURM=1, but shellcheck is not installed: apt-get install shellcheck")
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(
        ["shellcheck", "--external-sources", *map(str, FILES)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_what_trains_overrides_keys_of_the_configuration_and_is_known_here() -> None:
    found = {}
    for script in SUBMITTED:
        if "-m hpcpar train" in script.read_text():
            config = asked(script)
            assert config.output.directory.parts[0] == "runs", script.name
            found[script.stem] = (config.mesh.pp, config.mesh.tp, config.optimizer.zero_stage)
    assert found == TRAINING


def test_layers_are_divided_within_a_node_and_pipelines_and_stage_3_are_across_nodes() -> None:
    fsdp = asked(named("fsdp-tp"))
    assert directives(named("fsdp-tp"))["ntasks-per-node"] == str(fsdp.mesh.tp)
    assert fsdp.tensor_parallel.sequence_parallel
    three, shape = asked(named("3d")), directives(named("3d"))
    assert shape["nodes"] == str(three.mesh.pp)
    dp, rest = divmod(int(shape["ntasks-per-node"]), three.mesh.tp)
    assert (dp, rest) == (2, 0)


@pytest.mark.parametrize("name", names())
def test_each_recipe_has_a_script_that_asks_for_its_ranks(name: str) -> None:
    script = named(f"recipe-{name}")
    mesh, shape = asked(script).mesh, directives(script)
    assert int(shape["nodes"]) * int(shape["ntasks-per-node"]) == mesh.pp * mesh.dp * mesh.cp * mesh.tp


def test_the_site_block_is_the_same_in_every_script_and_in_the_readme() -> None:
    blocks = {path.name: BLOCK.findall(path.read_text()) for path in SUBMITTED}
    assert all(len(found) == 1 for found in blocks.values()), blocks
    of_slurm = {blocks[path.name][0] for path in SLURM}
    assert len(of_slurm) == 1
    assert BLOCK.findall((DIRECTORY / "README.md").read_text()) == list(of_slurm)
    # Other schedulers have other directives, but the same commands.
    commands = {
        "\n".join(line for line in found[0].splitlines() if not re.search("SBATCH|PBS|flux:", line))
        for found in blocks.values()
    }
    assert len(commands) == 1


def test_scripts_are_bash_with_directives_before_commands_and_end_at_errors() -> None:
    for script in FILES:
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)
    for script in SUBMITTED:
        text = script.read_text()
        lines = text.splitlines()
        first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
        late = [line for line in lines[first:] if re.match(r"#SBATCH|#PBS|# flux:", line)]
        assert late == [], script.name
        assert text.startswith("#!/bin/bash\n# "), script.name
        # After the block: `module` and `activate` of some sites read variables that are not set.
        assert BLOCK.split(text)[1].startswith("set -euo pipefail\n"), script.name


def test_flux_takes_none_of_the_comments_for_directives() -> None:
    # By RFC 36 of Flux any other prefix before the tag would be a second kind of sentinel, and an error.
    for script in SUBMITTED:
        if script.name.startswith("flux-"):
            found = set(re.findall(r"^([^\w\n]*)(?:flux|FLUX):", script.read_text(), re.MULTILINE))
            assert found == {"# "}, script.name


def test_the_readme_links_every_file_and_no_other() -> None:
    linked = set(re.findall(r"\]\(([\w.-]+)\)", (DIRECTORY / "README.md").read_text()))
    assert linked == {path.name for path in DIRECTORY.iterdir()} - {"README.md"}


def test_the_image_is_made_of_what_is_here() -> None:
    text = (DIRECTORY / "hpcpar.def").read_text()
    sections = dict(re.findall(r"^%(\w+)\n(.*?)(?=^%|\Z)", text, re.DOTALL | re.MULTILINE))
    copied = [line.split() for line in sections["files"].strip().splitlines()]
    assert all((ROOT / source).exists() and target.startswith("/opt/hpcpar/") for source, target in copied)
    extras = re.search(r"/opt/hpcpar\[([\w,]+)\]", sections["post"])
    assert extras is not None
    setup = (ROOT / "setup.py").read_text()
    assert all(f'"{extra}":' in setup for extra in extras[1].split(","))
    for name in ("post", "environment", "test", "runscript"):
        subprocess.run(["sh", "-n"], input=sections[name], text=True, check=True, timeout=30)


# --- with stand-ins for what starts ranks ---------------------------------------------------------


def stand_in(directory: Path, name: str, body: str) -> None:
    path = directory / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def environ(directory: Path, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PMI_"))}
    path = os.pathsep.join((str(directory), str(Path(sys.executable).parent), kept["PATH"]))
    return kept | {"PATH": path} | variables


def submit(name: str, directory: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a directory without .venv, so that stand-ins come first on the PATH."""
    for linked in ("examples", "jobscripts"):
        if not (directory / linked).exists():
            (directory / linked).symlink_to(ROOT / linked)
    return subprocess.run(
        ["bash", str(named(name)), *words],
        cwd=directory,
        env=environ(directory, **variables),
        capture_output=True,
        text=True,
        timeout=200,  # some 8 s on two free cores
        check=False,
    )


BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURMD_NODENAME": "node1",
    "SLURM_NTASKS": "4",
    "SLURM_CPUS_ON_NODE": "4",
    "SLURM_ARRAY_JOB_ID": "7",
    "SLURM_ARRAY_TASK_ID": "1",
    "SLURM_GPUS_ON_NODE": "2",
    "PBS_JOBID": "7.head",
    "PBS_NODEFILE": "examples/tiny.toml",
    "IMAGE": "/dev/null",
}


@pytest.mark.parametrize("script", [p for p in SUBMITTED if p.stem != "sweep-summary"], ids=lambda p: p.name)
def test_a_script_fails_when_what_it_starts_fails(script: Path, tmp_path: Path) -> None:
    for name in ("srun", "hpcpar", "mpiexec", "flux", "vllm"):
        stand_in(tmp_path, name, f'echo "{name} was started" >&2; exit 41')
    told = [str(tmp_path)] if script.stem == "serve-vllm" else []
    done = submit(script.stem, tmp_path, *told, **BATCH)
    assert done.returncode != 0
    assert "was started" in done.stderr, done.stderr


def test_the_summary_of_a_sweep_is_sorted_and_names_what_is_missing(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    for task, loss in (("1", "2.5"), ("2", "NaN"), ("5", "1.5"), ("10", "2.0")):
        (sweep / task).mkdir(parents=True)
        (sweep / task / "summary.json").write_text(f'{{"held_out_loss": {loss}}}')
        (sweep / task / "row.txt").write_text(f"optimizer.learning_rate={task}\n")
    done = submit("sweep-summary", tmp_path, str(sweep))
    assert [line.split() for line in done.stdout.splitlines()[1:]] == [
        ["1.5000", "5", "optimizer.learning_rate=5"],
        ["2.0000", "10", "optimizer.learning_rate=10"],
        ["2.5000", "1", "optimizer.learning_rate=1"],
        ["nan", "2", "optimizer.learning_rate=2"],
    ]
    (sweep / "3").mkdir()
    done = submit("sweep-summary", tmp_path, str(sweep))
    assert (done.returncode, done.stderr) == (1, "not finished: tasks 3\n")


def test_a_task_of_a_sweep_that_comes_to_nothing_is_named_by_the_summary(tmp_path: Path) -> None:
    stand_in(tmp_path, "hpcpar", "exit 2")
    assert submit("sweep", tmp_path, **BATCH).returncode == 2
    done = submit("sweep-summary", tmp_path, "runs/sweep-7", **BATCH)
    assert (done.returncode, done.stderr) == (1, "not finished: tasks 1\n")


def test_rays_head_is_asked_for_by_slurms_name_of_the_node(tmp_path: Path) -> None:
    stand_in(tmp_path, "hostname", "echo node1.site.example")
    stand_in(tmp_path, "srun", f'echo "$*" >> {tmp_path}/words; exit 41')
    submit("ray-preprocess", tmp_path, **BATCH)
    assert " --nodelist=node1 " in (tmp_path / "words").read_text().splitlines()[0]


TINY = ("train.steps=1", "train.held_out_batches=1", "train.sequence=16", "data.max_mib=1")
TINY += ("model.layers=1", "model.hidden_size=32")

# What the ranks of each launcher see, made of the variables that Hydra's ranks see.
AS_PALS = """
export PALS_RANKID=$PMI_RANK PALS_LOCAL_RANKID=$MPI_LOCALRANKID PALS_LOCAL_SIZE=$MPI_LOCALNRANKS PALS_NODEID=0
"""
AS_FLUX = "export FLUX_TASK_RANK=$PMI_RANK FLUX_JOB_SIZE=$PMI_SIZE FLUX_TASK_LOCAL_ID=$MPI_LOCALRANKID"

FLUX = """
case "$1 $2" in "getattr jobid") echo f12; exit;; "getattr size") echo 2; exit;; esac
"""


def starting(words_of: str, ranks: int, directory: Path, variables: str) -> str:
    """The body of a stand-in that shows its words, and starts ranks of the program by MPICH's mpiexec."""
    mpiexec = Path(sys.executable).parent / "mpiexec.hydra"
    if not mpiexec.exists():
        pytest.skip("needs the MPICH wheel's mpiexec.hydra beside this Python")
    stand_in(directory, "as-its-rank", f'{variables}\nunset MPI_LOCALNRANKS MPI_LOCALRANKID\nexec "$@"')
    return f"""
echo "{words_of} $*"
while [ "$1" != python ]; do shift; done
unset PBS_JOBID PBS_NODEFILE    # Hydra would take itself to be in a job of PBS
exec {mpiexec} -n {ranks} {directory}/as-its-rank "$@"
"""


def run_script(name: str, directory: Path, *words: str, **variables: str) -> str:
    done = submit(name, directory, *words, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(240)
def test_a_script_for_pbs_trains_under_the_words_of_pals(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("node1\nnode2\n")
    stand_in(tmp_path, "mpiexec", starting("mpiexec", 2, tmp_path, AS_PALS))
    told = {"PBS_JOBID": "12.head", "PBS_NODEFILE": str(tmp_path / "nodes"), "OVERRIDES": " ".join(TINY)}
    said = run_script("pbs-many-nodes", tmp_path, **told)
    train = "python -m hpcpar train examples/tiny.toml "
    assert f"mpiexec -n 2 --ppn 1 --depth 1 --cpu-bind depth {train}" in said
    assert "ranks: 2 (dp=2)" in said
    assert "step 1/1  loss" in said
    assert (tmp_path / "runs" / "many-nodes-12" / "summary.json").exists()


@pytest.mark.timeout(240)
def test_a_script_for_flux_trains_under_the_words_of_flux(tmp_path: Path) -> None:
    stand_in(tmp_path, "flux", FLUX + starting("flux", 4, tmp_path, AS_FLUX))
    said = run_script("flux-single-node", tmp_path, "examples/tiny.toml", *TINY)
    assert "flux run --ntasks=4 --cores-per-task=1 python -m hpcpar train examples/tiny.toml " in said
    assert "ranks: 4 (dp=4)" in said
    assert "step 1/1  loss" in said
    assert (tmp_path / "runs" / "single-node-f12" / "summary.json").exists()


def test_the_others_for_pbs_and_flux_say_the_words_of_their_launcher(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("node1\n" * 3)
    stand_in(tmp_path, "mpiexec", 'echo "mpiexec $*"')
    stand_in(tmp_path, "flux", f'{FLUX}\necho "flux $*"')
    told = {"PBS_JOBID": "12.head", "PBS_NODEFILE": str(tmp_path / "nodes"), "OVERRIDES": "train.steps=9"}
    train = "python -m hpcpar train examples/tiny.toml"
    said = run_script("pbs-single-node", tmp_path, **told)
    assert said == f"mpiexec -n 3 {train} output.directory=runs/single-node-12 train.steps=9\n"
    said = run_script("flux-many-nodes", tmp_path, "examples/tiny.toml", "train.steps=9")
    assert said == (
        f"flux run --nodes=2 --tasks-per-node=4 --cores-per-task=1 {train} "
        "optimizer.zero_stage=1 output.directory=runs/many-nodes-f12 train.steps=9\n"
    )
