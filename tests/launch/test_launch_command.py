"""The command and the environment by which `hpcpar run` starts a job."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from hpcpar.errors import ConfigError, LaunchError
from hpcpar.launch import launch_command
from hpcpar.launch.hosts import Host
from hpcpar.launch.launch_command import (
    NO_OPTIONS,
    LaunchOptions,
    Which,
    environ_for,
    launcher_environ,
    launcher_kind,
    prepare,
    program_for,
    require_one_component,
    under,
    words_for,
)
from tests.command import write_script
from tests.launch.proc_tree import add_process

PYTHON = "/venv/bin/python"
SLURM = {"SLURM_JOB_ID": "12"}


def which(*found: str) -> Which:
    """PATH as a test wants it: names that resolve into /usr/bin, and paths that exist."""

    def look(name: str) -> str | None:
        if os.sep in name:
            return name if name in found else None
        return f"/usr/bin/{name}" if name in found else None

    return look


def command(
    n: int,
    *argv: str,
    environ: Mapping[str, str] | None = None,
    found: tuple[str, ...] = ("mpiexec", "srun"),
    library: str | None = None,
    offered: tuple[str, ...] | None = None,
    options: LaunchOptions = NO_OPTIONS,
) -> list[str]:
    """Return the command for n ranks where this Python has such a library, and srun such plugins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_command, "own_library", lambda environ: library)
        patch.setattr(launch_command, "srun_plugins", lambda environ: offered)
        patch.setattr(launch_command, "launcher_kind", lambda path: "")
        return prepare(
            n, argv, options, "/run", say=print, environ=environ or {}, which=which(*found), executable=PYTHON
        )[0]


def test_outside_slurm_mpiexec_starts_the_ranks_the_one_beside_python_before_the_one_on_path() -> None:
    assert command(2, "a.py", found=("mpiexec", "/venv/bin/mpiexec"))[0] == "/venv/bin/mpiexec"
    expected = ["/usr/bin/mpiexec", "-n", "4", PYTHON, "train.py", "--lr", "0.1"]
    assert command(4, "train.py", "--lr", "0.1") == expected


def test_inside_an_allocation_srun_starts_the_ranks_and_ends_the_job_with_the_first_that_fails() -> None:
    assert command(4, "a.py", environ=SLURM) == [
        "/usr/bin/srun",
        "--ntasks=4",
        "--kill-on-bad-exit=1",
        "--quit-on-interrupt",
        PYTHON,
        "a.py",
    ]


@pytest.mark.parametrize(
    ("library", "option"), [("mpich", "--mpi=pmi2"), ("openmpi", "--mpi=pmix"), ("intel", "--mpi=pmi2")]
)
def test_srun_is_told_the_plugin_that_this_environments_mpi_understands(library: str, option: str) -> None:
    assert option in command(2, "a.py", environ=SLURM, library=library)


def test_srun_is_not_told_a_plugin_that_it_does_not_have() -> None:
    words = command(2, "a.py", environ=SLURM, library="mpich", offered=("none", "pmix"))
    assert not any(word.startswith("--mpi") for word in words)
    assert "--mpi=pmix" in command(2, "a.py", environ=SLURM, library="openmpi", offered=("none", "pmix"))


def test_the_sites_own_choice_of_plugin_is_left_alone() -> None:
    words = command(2, "a.py", environ=SLURM | {"SLURM_MPI_TYPE": "pmix"}, library="mpich")
    assert not any(word.startswith("--mpi") for word in words)


STEP = SLURM | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}


def test_how_the_step_around_us_was_started_is_nobodys_choice_of_plugin() -> None:
    """The shell that salloc opens on a node has SLURM_MPI_TYPE=none."""
    for told, said in (("none", True), ("pmi2", True), ("pmix", False), ("pmix_v4", False)):
        words = command(2, "a.py", environ=STEP | {"SLURM_MPI_TYPE": told}, library="openmpi")
        assert ("--mpi=pmix" in words) is said, told


def test_a_step_inside_a_step_may_share_its_cores() -> None:
    assert "--overlap" in command(2, "a.py", environ=STEP)
    assert "--overlap" not in command(2, "a.py", environ=SLURM)


def test_the_launcher_can_be_chosen_and_given_more_words() -> None:
    assert command(2, "a.py", environ=SLURM, found=("mpiexec",))[0] == "/usr/bin/mpiexec"
    words = command(2, "a.py", environ=SLURM, options=LaunchOptions(launcher="mpiexec", words=("-ppn", "1")))
    assert words == ["/usr/bin/mpiexec", "-n", "2", "-ppn", "1", PYTHON, "a.py"]
    with pytest.raises(LaunchError, match="allocation"):
        command(2, "a.py", options=LaunchOptions(launcher="srun"))


def test_without_any_launcher_the_error_says_what_to_install() -> None:
    with pytest.raises(LaunchError, match="pip install mpich"):
        command(2, "a.py", found=())


def test_a_rank_of_a_job_starts_no_other_job() -> None:
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
    with pytest.raises(LaunchError, match="already rank 1 of 2, started by hydra"):
        command(2, "a.py", environ=hydra)


def test_a_job_of_no_ranks_or_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        command(0, "a.py")
    with pytest.raises(ConfigError, match="nothing to run"):
        command(2)


@pytest.mark.parametrize(
    ("argv", "program"),
    [
        (("a.py", "-x"), [PYTHON, "a.py", "-x"]),
        (("-m", "mod", "-x"), [PYTHON, "-m", "mod", "-x"]),
        (("-c", "print(1)"), [PYTHON, "-c", "print(1)"]),
        (("./train.sh", "1"), ["./train.sh", "1"]),
        (("hpcpar", "doctor"), ["/venv/bin/hpcpar", "doctor"]),
        (("hostname",), ["hostname"]),
    ],
)
def test_scripts_and_modules_get_this_python_and_commands_are_run_as_they_are(
    argv: tuple[str, ...], program: list[str]
) -> None:
    assert program_for(argv, which("/venv/bin/hpcpar"), PYTHON) == program


def test_open_mpi_may_start_more_ranks_than_cores_and_as_root_only_where_we_are() -> None:
    job = environ_for({"HOME": "/root"}, "/tmp/r", is_root=True)
    assert job["HPCPAR_RUN_DIRECTORY"] == "/tmp/r"
    assert job["HOME"] == "/root"
    assert job["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert job["OMPI_ALLOW_RUN_AS_ROOT"] == job["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in environ_for({}, "/tmp/r", is_root=False)
    # The user's own settings stay.
    mine = {"PRTE_MCA_rmaps_default_mapping_policy": "node", "OMPI_ALLOW_RUN_AS_ROOT": "0"}
    job = environ_for(mine, "/tmp/r", is_root=True)
    assert {name: job[name] for name in mine} == mine


def test_ranks_may_draw_progress_bars_where_their_output_ends_on_a_terminal() -> None:
    job = environ_for({}, "/tmp/r", is_root=False, terminal_columns=123)
    assert (job["TTY_COMPATIBLE"], job["TTY_INTERACTIVE"], job["COLUMNS"]) == ("1", "1", "123")
    assert "TTY_INTERACTIVE" not in environ_for({}, "/tmp/r", is_root=False)
    assert environ_for({"COLUMNS": "80"}, "/tmp/r", is_root=False, terminal_columns=123)["COLUMNS"] == "80"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["a.py", "-x"], ["-m", "hpcpar.horovod", "a.py", "-x"]),
        (["-m", "mod", "-x"], ["-m", "hpcpar.horovod", "-m", "mod", "-x"]),
        (["-c", "print(1)"], ["-m", "hpcpar.horovod", "-c", "print(1)"]),
        (["python", "-u", "-cpass"], ["python", "-u", "-m", "hpcpar.horovod", "-c", "pass"]),
        (["python", "a.py"], ["python", "-m", "hpcpar.horovod", "a.py"]),
        (
            ["/usr/bin/python3.11", "-u", "-W", "error", "-m", "mod"],
            ["/usr/bin/python3.11", "-u", "-W", "error", "-m", "hpcpar.horovod", "-m", "mod"],
        ),
        (["python3", "train"], ["python3", "-m", "hpcpar.horovod", "train"]),
    ],
)
def test_a_horovod_program_is_run_by_ours(argv: list[str], words: list[str]) -> None:
    assert under("hpcpar.horovod", argv) == words


@pytest.mark.parametrize("argv", [[], ["./train.sh"], ["python"], ["python", "-u"]])
def test_what_is_no_python_program_is_run_under_none(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"takes a Python program.*--as-torch train"):
        under("hpcpar.torch_backend", argv)


def words_of(
    kind: str, n: int, options: LaunchOptions, environ: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    return words_for(kind, n, options, environ or {}, "/run", lambda line: None).words


def test_hosts_and_interfaces_are_said_in_the_launchers_words() -> None:
    options = LaunchOptions(hosts=(Host("a", 2), Host("b", 2)), interfaces=("ib0",))
    assert words_of("mpich", 3, options) == ("-hosts", "a:2,b:1", "-iface", "ib0")
    assert words_of("mpich", 3, LaunchOptions()) == ()


@pytest.mark.parametrize(
    ("job", "name"),
    [
        ({"SLURM_JOB_NODELIST": "n7"}, "n7"),
        ({"SLURM_JOB_NODELIST": "n[7-8]", "SLURMD_NODENAME": "n8"}, "n8"),
        ({"SLURM_JOB_NODELIST": "n[7-8]"}, "localhost"),
    ],
    ids=["the only node", "the node of the script", "unknown"],
)
def test_srun_is_told_localhost_by_slurms_name(job: dict[str, str], name: str) -> None:
    options = LaunchOptions(hosts=(Host("localhost", 2),))
    assert words_of("srun", 2, options, job)[0] == f"--nodelist={name}"


def test_open_mpi_is_told_what_ranks_on_other_hosts_need_of_the_environment() -> None:
    options = LaunchOptions(hosts=(Host("a", 2),), variables={"HOROVOD_CYCLE_TIME": "2"})
    words = words_of("openmpi", 2, options, {"PATH": "/bin", "HOME": "/root", "HPCPAR_CHECK": "1"})
    assert words == ("--host", "a:2", "-x", "HOROVOD_CYCLE_TIME", "-x", "HPCPAR_CHECK", "-x", "PATH")
    assert words_of("openmpi", 2, LaunchOptions(variables={"HOROVOD_CYCLE_TIME": "2"})) == (
        "-x",
        "HOROVOD_CYCLE_TIME",
    )
    assert words_of("mpich", 2, LaunchOptions(variables={"HOROVOD_CYCLE_TIME": "2"})) == ()
    ucx = {"LD_LIBRARY_PATH": "/env/libucx/lib", "OMPI_MCA_pml": "ucx", "UCX_MEMTYPE_CACHE": "n"}
    words = words_of("openmpi", 2, LaunchOptions(hosts=(Host("a", 2),), variables=ucx), {"UCX_TLS": "tcp"})
    assert {*ucx, "UCX_TLS"} <= {words[i + 1] for i, word in enumerate(words) if word == "-x"}


def test_the_limit_for_starting_is_sruns_and_said_to_be_so() -> None:
    said: list[str] = []
    limit = LaunchOptions(start_limit_s=29.6)
    assert words_for("srun", 2, limit, {}, "/run", said.append).words == ("--immediate=30",)
    for unlimited in (1e300, float("inf")):
        assert (
            words_for("srun", 2, LaunchOptions(start_limit_s=unlimited), {}, "/run", said.append).words == ()
        )
    assert said == []
    assert words_for("mpich", 2, limit, {}, "/run", said.append).words == ()
    assert "srun's alone" in said[0]


def test_a_launcher_is_asked_whose_it_is_whatever_wheels_are_there(tmp_path: Path) -> None:
    fake = write_script(tmp_path / "mpiexec", "echo 'mpiexec (Open MPI) 5.0.11'")
    assert launcher_kind(str(fake)) == "openmpi"
    assert launcher_kind("/usr/bin/srun") == "srun"
    assert launcher_kind(str(tmp_path / "none")) == ""
    options = LaunchOptions(hosts=(Host("a", 2),))
    command, _ = prepare(
        2, ["a.py"], options, str(tmp_path), say=print, environ={}, which=lambda name: str(fake)
    )
    assert command[3:5] == ["--host", "a:2"]


@pytest.fixture
def in_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """An allocation whose srun knows no pmix, on a machine with Open MPI."""
    write_script(tmp_path / "srun", "printf 'MPI plugin types are...\\n\\tnone\\n\\tpmi2\\n'")
    monkeypatch.setattr(launch_command, "own_library", lambda environ: "openmpi")
    return SLURM | {"PATH": f"{tmp_path}:/usr/bin:/bin"}


def in_words(
    environ: Mapping[str, str], launcher: str = "auto"
) -> tuple[list[str], dict[str, str], list[str]]:
    said: list[str] = []
    options = LaunchOptions(launcher=launcher)
    found = which("mpiexec", "srun")
    prepared = prepare(2, ["a.py"], options, "/tmp", say=said.append, environ=environ, which=found)
    return *prepared, said


def test_open_mpi_is_started_by_its_own_launcher_where_srun_has_no_pmix(
    in_allocation: Mapping[str, str],
) -> None:
    words, _, said = in_words(in_allocation)
    assert os.path.basename(words[0]) == "mpiexec"
    assert "no pmix" in said[0]
    assert os.path.basename(in_words(in_allocation, "srun")[0][0]) == "srun"
    believed = in_words({**in_allocation, "SLURM_MPI_TYPE": "pmix_v4"})
    assert os.path.basename(believed[0][0]) == "srun"


def test_the_ranks_of_srun_get_a_secret_in_common(in_allocation: Mapping[str, str]) -> None:
    first, second = (in_words(in_allocation, "srun")[1]["HPCPAR_STEP_SECRET"] for _ in range(2))
    assert len(first) == 64
    assert first != second
    own = {"HPCPAR_STEP_SECRET": "the user's own word"}
    assert in_words({**in_allocation, **own}, "srun")[1]["HPCPAR_STEP_SECRET"] == "the user's own word"


@pytest.mark.parametrize("exported", ["NONE", "NIL", "PATH,HOME"])
def test_a_job_that_was_submitted_without_its_environment_hands_on_the_one_that_it_has(
    exported: str, in_allocation: Mapping[str, str]
) -> None:
    assert in_words({**in_allocation, "SLURM_EXPORT_ENV": exported}, "srun")[1]["SLURM_EXPORT_ENV"] == "ALL"
    assert "SLURM_EXPORT_ENV" not in in_words(in_allocation, "srun")[1]


def test_ranks_for_all_of_a_heterogeneous_job_are_not_started_in_its_first_component(
    in_allocation: Mapping[str, str],
) -> None:
    parts = {"SLURM_NTASKS_HET_GROUP_0": "2", "SLURM_NTASKS_HET_GROUP_1": "1", "SLURM_HET_SIZE": "2"}
    with pytest.raises(LaunchError, match=r"which has 2 of its 3 tasks: .*`srun --het-group=0-1 python"):
        require_one_component(3, (), parts)
    for n, options in ((2, ()), (3, ("--het-group=0",))):
        require_one_component(n, options, parts)
    with pytest.raises(LaunchError, match="first part"):
        in_words({**in_allocation, **parts, "SLURM_NTASKS_HET_GROUP_0": "1"}, "srun")


def test_a_job_in_a_container_without_srun_is_started_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "mpich"
    monkeypatch.setattr(launch_command, "launcher_kind", lambda path: kind)

    def variables(environ: Mapping[str, str], options: LaunchOptions = NO_OPTIONS) -> dict[str, str]:
        found = which("mpiexec")
        job = prepare(2, ["a.py"], options, str(tmp_path), say=print, environ=environ, which=found)[1]
        return {name: value for name, value in job.items() if "HYDRA" in name}

    assert variables(SLURM) == {"HYDRA_LAUNCHER": "fork"}
    assert variables({}) == {}
    assert variables({**SLURM, "HYDRA_LAUNCHER": "rsh"}) == {"HYDRA_LAUNCHER": "rsh"}
    with pytest.raises(LaunchError, match=r"has 2 nodes, but there is no srun on PATH.*srun apptainer exec"):
        variables({**SLURM, "SLURM_JOB_NUM_NODES": "2"})
    two = LaunchOptions(hosts=(Host("a", 1), Host("b", 1)))
    assert variables({**SLURM, "SLURM_JOB_NUM_NODES": "2"}, two) == {"HYDRA_LAUNCHER": "ssh"}
    kind = "intel"
    assert variables(SLURM) == {"I_MPI_HYDRA_BOOTSTRAP": "fork"}
    kind = "openmpi"
    assert variables({**SLURM, "SLURM_JOB_NUM_NODES": "2"}) == {}


JOB_OF_GPUS = SLURM | {"SLURM_GPUS": "4", "SLURM_NTASKS_PER_GPU": "1", "SLURM_NTASKS_PER_TRES": "1"}


def test_srun_does_not_see_what_the_job_says_against_the_request() -> None:
    kept = launcher_environ(JOB_OF_GPUS, True, NO_OPTIONS)
    assert kept == SLURM | {"SLURM_GPUS": "4"}
    placed = SLURM | {"SLURM_DISTRIBUTION": "arbitrary", "SLURM_HOSTFILE": "x", "SLURM_NTASKS_PER_NODE": "1"}
    assert launcher_environ(placed, True, NO_OPTIONS) == placed
    assert launcher_environ(placed, True, LaunchOptions(hosts=(Host("a", 2),))) == SLURM


def test_a_step_of_several_cores_for_each_task_keeps_them(in_allocation: Mapping[str, str]) -> None:
    job = {**in_allocation, "SLURM_CPUS_PER_TASK": "4", "SLURM_JOB_CPUS_PER_NODE": "8"}
    assert in_words(job, "srun")[1]["SRUN_CPUS_PER_TASK"] == "4"
    assert "SRUN_CPUS_PER_TASK" not in in_words(job, "mpiexec")[1]


@pytest.mark.parametrize("by_srun", [True, False], ids=["srun", "mpiexec"])
def test_ranks_are_not_bound_to_the_cores_of_the_shell_that_starts_them(
    by_srun: bool, tmp_path: Path
) -> None:
    task = STEP | {"SLURM_TASK_PID": "391", "SLURM_CPU_BIND": "quiet,mask_cpu:0x1"}
    add_process(tmp_path, 391, "bash", environ=task)
    assert "SLURM_CPU_BIND" not in launcher_environ(task, by_srun, NO_OPTIONS, tmp_path)
    own = task | {"SLURM_CPU_BIND": "cores"}
    assert launcher_environ(own, by_srun, NO_OPTIONS, tmp_path)["SLURM_CPU_BIND"] == "cores"


def test_the_srun_inside_of_an_mpiexec_brings_no_pmi_and_shares_the_cores_of_our_step() -> None:
    assert launcher_environ(SLURM, False, NO_OPTIONS) == SLURM | {"SLURM_MPI_TYPE": "none"}
    assert launcher_environ(STEP, False, NO_OPTIONS)["SLURM_OVERLAP"] == "1"
    assert launcher_environ({"A": "b"}, False, NO_OPTIONS) == {"A": "b"}


@pytest.fixture
def batch_job(tmp_path: Path) -> dict[str, dict[str, str]]:
    """Variables of a job of two hosts with two slots each, by batch system."""
    (tmp_path / "nodes").write_text("a\na\nb\nb\n")
    write_script(tmp_path / "flux", "echo 2")
    return {
        "PBS": {"PBS_NODEFILE": str(tmp_path / "nodes")},
        "LSF": {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 2 b 2"},
        "Flux": {"FLUX_URI": "local:///run/flux", "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    }


def prepared(
    tmp_path: Path, n: int, environ: Mapping[str, str], says: str, options: LaunchOptions = NO_OPTIONS
) -> tuple[list[str], dict[str, str]]:
    """Prepare a job for an mpiexec that says this as its version."""
    fake = write_script(tmp_path / "mpiexec", f"echo '{says}'")
    return prepare(
        n, ["a.py"], options, str(tmp_path), say=print, environ=environ, which=lambda name: str(fake)
    )


@pytest.mark.parametrize("system", ["PBS", "LSF"])
@pytest.mark.parametrize(
    ("says", "words"),
    [("mpiexec (Open MPI) 5.0.11", ["--host", "a:2,b:1"]), ("HYDRA build details", ["-hosts", "a:2,b:1"])],
)
def test_ranks_go_to_the_hosts_of_the_batch_job(
    tmp_path: Path, batch_job: dict[str, dict[str, str]], system: str, says: str, words: list[str]
) -> None:
    told, environ = prepared(tmp_path, 3, batch_job[system], says)
    assert told[3:5] == words
    assert environ["HPCPAR_RUN_RANKS"] == "3"
    assert "oversubscribe" not in str(environ_for(environ, "/run", is_root=False))


def test_a_batch_job_is_not_given_more_ranks_than_slots(
    tmp_path: Path, batch_job: dict[str, dict[str, str]]
) -> None:
    with pytest.raises(ConfigError, match=r"5 ranks were asked for, but the hosts have 4 slots \(a:2, b:2\)"):
        prepared(tmp_path, 5, batch_job["LSF"], "mpiexec (Open MPI) 5.0.11")


def test_hosts_that_the_user_names_and_a_sites_own_mpiexec_are_left_alone(
    tmp_path: Path, batch_job: dict[str, dict[str, str]]
) -> None:
    named = prepared(tmp_path, 8, batch_job["PBS"], "HYDRA", LaunchOptions(hosts=(Host("c", 8),)))
    assert named[0][3:5] == ["-hosts", "c:8"]
    assert prepared(tmp_path, 8, batch_job["PBS"], "HYDRA", LaunchOptions(words=("-hosts", "c")))[0][3:5] == [
        "-hosts",
        "c",
    ]
    program = [sys.executable, "a.py"]
    assert prepared(tmp_path, 4, batch_job["PBS"], "PALS 1.2")[0][3:] == program
    assert prepared(tmp_path, 2, batch_job["PBS"], "HYDRA")[0][3:] == program  # both on the first host


def test_a_flux_instance_of_several_nodes_is_refused_with_the_command_that_works(
    tmp_path: Path, batch_job: dict[str, dict[str, str]]
) -> None:
    with pytest.raises(LaunchError, match=r"Flux instance of 2 nodes, .*`flux run -n 4 python …`"):
        prepared(tmp_path, 4, batch_job["Flux"], "HYDRA")
    (tmp_path / "flux").write_text("#!/bin/sh\necho 1\n")
    assert prepared(tmp_path, 4, batch_job["Flux"], "HYDRA")[0][1:] == ["-n", "4", sys.executable, "a.py"]


def test_the_room_in_shared_memory_is_looked_at_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_command.shared_space, "free_nbytes", lambda: 67_108_864)
    ucx = "MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi"
    monkeypatch.setattr(launch_command, "library_version", lambda environ: ucx)
    prepared(tmp_path, 4, {}, "HYDRA")
    with pytest.raises(LaunchError, match=r"/dev/shm has room for 67.1 MB, but 12 ranks .*--shm-size=1g"):
        prepared(tmp_path, 12, {}, "HYDRA")
