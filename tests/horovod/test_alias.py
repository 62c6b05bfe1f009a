"""`import horovod` means ours; each case in a process or a copy of its own, because modules stay imported."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hpcpar.horovod import util
from hpcpar.horovod.alias import ALIASES, NAMESPACES, own_name
from hpcpar.horovod.exceptions import HorovodVersionMismatchError, get_version_mismatch_message

HERE = {theirs: ours for theirs, ours in ALIASES.items() if find_spec("keras") or not ours.endswith(".keras")}
"""Those of an environment that may be without Keras."""


def python(code: str, *options: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def aliased(code: str, *, cwd: Path | None = None) -> str:
    """Return what the code prints after the alias has been installed."""
    done = python(f"from hpcpar.horovod import alias\nalias.install()\n{code}", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def missing(name: str) -> str:
    """Code that prints what is said of a part that there is not."""
    return f"""
try:
    import horovod.{name}
except ModuleNotFoundError as error:
    print(error.name, "|", error)
"""


IN_COPIES = {
    "every module": f"""
import importlib, sys
for theirs, ours in {HERE!r}.items():
    module = importlib.import_module(theirs)
    assert module is importlib.import_module(ours), theirs
    assert module.__name__ == ours == module.__spec__.name, module.__spec__
for room in {list(NAMESPACES)!r}:
    importlib.import_module(room)
print("same")
""",
    "parts of horovod.torch": """
from importlib import import_module
names = ("mpi_ops", "functions", "compression", "optimizer", "sync_batch_norm")
for name in (*names, "elastic", "elastic.state", "elastic.sampler"):
    theirs, ours = (import_module(f"{package}.torch.{name}") for package in ("horovod", "hpcpar.horovod"))
    assert theirs is ours, name
print("all")
""",
    "what scripts import": """
import horovod
import horovod.torch as hvd
from horovod import run
from horovod.runner import run as run_too
from horovod.runner.util.threads import in_thread
from horovod.common import util
from horovod.common.util import env, extension_available, gpu_available, split_list
from horovod.common.util import _cache, check_installed_version, get_extension_full_path
from horovod.common.util import is_version_greater_equal_than
from horovod.common.basics import HorovodBasics
from horovod.common.elastic import HostUpdateResult, ObjectState, State, run_fn
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.exceptions import HorovodVersionMismatchError, get_version_mismatch_message
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.process_sets import add_process_set, remove_process_set
from horovod.torch.mpi_ops import HorovodAllgather, HorovodAllreduce, HorovodAlltoall, HorovodBroadcast
from horovod.torch.mpi_ops import HorovodGroupedAllgather, HorovodGroupedAllreduce
from horovod.torch.mpi_ops import HorovodGroupedReducescatter, HorovodReducescatter
from horovod.torch.mpi_ops import handle_average_backwards_compatibility, num_rank_is_power_2
from horovod.torch.mpi_ops import rank, size, allreduce_async_, synchronize, Average
assert run is run_too is horovod.run
assert hvd.HorovodInternalError is HorovodInternalError
assert hvd.ProcessSet is ProcessSet
assert hvd.add_process_set is add_process_set
assert hvd.elastic.run_fn is run_fn and issubclass(hvd.elastic.TorchState, ObjectState)
print(horovod.__version__)
""",
    "no part": missing("torch.nothing"),
}
"""Programs that import torch anyway."""


@pytest.fixture(scope="module")
def told() -> dict[str, str]:
    """Run IN_COPIES, each in a copy of one process that has imported torch, and nothing of ours.

    That import takes longer than all else, and so does the orderly end of a process that has it.
    """
    code = f"""
import os, sys
import torch

for name, code in {IN_COPIES!r}.items():
    print("####", name, flush=True)
    if os.fork() == 0:
        from hpcpar.horovod import alias
        alias.install()
        exec(code, {{}})
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0, name
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    pairs = (part.partition("\n") for part in done.stdout.split("#### ")[1:])
    return {name: printed.strip() for name, _, printed in pairs}


def test_every_module_is_ours_under_both_names(told: dict[str, str]) -> None:
    assert told["every module"] == "same"


def test_the_parts_of_horovod_torch_are_ours(told: dict[str, str]) -> None:
    assert told["parts of horovod.torch"] == "all"


def test_what_scripts_import_is_there(told: dict[str, str]) -> None:
    assert told["what scripts import"] == "0.28.1"


def require_explained(said: str, name: str) -> None:
    assert said.startswith(f"horovod.{name} | horovod.{name} is not part of hpcpar")
    assert "install Horovod itself" in said


@pytest.mark.parametrize("name", ["mxnet", "spark", "ray", "tensorflow.x", "common.x"])
def test_a_part_that_we_have_not_is_no_module_and_the_error_says_why(name: str) -> None:
    require_explained(aliased(missing(name)), name)


def test_a_part_of_horovod_torch_that_we_have_not_is_no_module_either(told: dict[str, str]) -> None:
    require_explained(told["no part"], "torch.nothing")


def test_who_asks_for_a_part_that_we_have_not_is_told_none() -> None:
    code = """
from importlib.util import find_spec
names = "mxnet spark ray tensorflow.x common.x torch.nothing runner.launch".split()
print([name for name in names if find_spec("horovod." + name) is not None])
print(find_spec("horovod.torch.mpi_ops").name, find_spec("horovod.common.util") is not None)
try:
    __import__("importlib").import_module("horovod.mxnet")
except ModuleNotFoundError as error:
    print("install Horovod itself" in str(error))
"""
    assert aliased(code) == "[]\nhorovod.torch.mpi_ops True\nTrue"


def test_tensorflow_itself_is_named_as_missing() -> None:
    code = """
import horovod.tensorflow as hvd
try:
    hvd.init()
except AttributeError as error:
    print(error)
"""
    assert "TensorFlow itself is not part of hpcpar" in aliased(code)


def test_looking_for_a_module_imports_no_torch() -> None:
    code = """
import importlib.util, sys
import horovod
print(importlib.util.find_spec("horovod.torch") is not None, "torch" in sys.modules)
"""
    assert aliased(code) == "True False"


def test_a_second_installation_changes_nothing() -> None:
    code = "import sys; before = list(sys.meta_path); alias.install(); print(before == sys.meta_path)"
    assert aliased(code) == "True"


def test_where_the_real_one_is_imported_already_the_alias_is_refused(tmp_path: Path) -> None:
    (tmp_path / "horovod.py").write_text("")
    code = "import horovod\nfrom hpcpar.horovod import alias\nalias.install()"
    done = python(code, cwd=tmp_path)
    assert done.returncode == 1
    assert "AliasError: horovod has been imported from " in done.stderr
    assert str(tmp_path) in done.stderr


def test_the_alias_goes_before_a_horovod_that_is_installed(tmp_path: Path) -> None:
    (tmp_path / "horovod.py").write_text("raise RuntimeError('the real one')")
    assert aliased("import horovod; print(horovod.__version__)", cwd=tmp_path) == "0.28.1"


def test_other_interpreters_are_untouched() -> None:
    code = """
import subprocess, sys
look = "import importlib.util; print(importlib.util.find_spec('hpcpar.horovod.alias') is not None, "
look += "any('hpcpar' in type(finder).__module__ for finder in __import__('sys').meta_path))"
subprocess.run([sys.executable, "-c", look], check=True)
"""
    assert aliased(code) == "True False"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_data_loading_children_of_a_script_can_import_horovod_too(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import multiprocessing
import horovod


def version(number):
    return horovod.__version__ + "/" + str(number)


if __name__ == "__main__":
    with multiprocessing.get_context({method!r}).Pool(1) as pool:
        print(pool.map(version, [1, 2]))
"""
    )
    done = subprocess.run(
        [sys.executable, "-m", "hpcpar.horovod", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "['0.28.1/1', '0.28.1/2']\n", done.stderr


def test_names_are_ours_by_their_longest_part() -> None:
    assert own_name("horovod.torch.elastic.state") == "hpcpar.horovod.torch.elastic.state"
    assert own_name("horovod.common.util") == "hpcpar.horovod.util"
    assert own_name("horovod.torchvision") is None


def test_torch_is_the_only_framework() -> None:
    found = [util.extension_available(name) for name in ("torch", "tensorflow", "mxnet")]
    assert found == [True, False, False]
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    with pytest.raises(ImportError, match=r"horovod\.mxnet is not part of hpcpar"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__, "mpi_lib")
    assert not util.gpu_available("tensorflow")


def test_helpers_of_builds_and_versions_answer() -> None:
    util.check_installed_version("pytorch", "0.1")
    path = util.get_extension_full_path("/site/horovod/torch/__init__.py", "lib", "mpi_lib")
    assert path == f"/site/horovod/torch/lib/mpi_lib{util.get_ext_suffix()}"
    assert util.is_version_greater_equal_than("2.10.0", "2.9.1")
    assert not util.is_version_greater_equal_than("2.8", "2.9.1")
    with pytest.raises(ValueError, match=r"'2\.5\.0'"):
        util.is_version_greater_equal_than("2.8", "2.9")
    error = HorovodVersionMismatchError("torch", "2.0", "1.0")
    assert str(error) == get_version_mismatch_message("torch", "2.0", "1.0")
    assert (error.name, error.version, error.installed_version) == ("torch", "2.0", "1.0")


def test_lists_are_split_evenly_with_the_longer_pieces_first() -> None:
    assert util.split_list(list(range(7)), 3) == [[0, 1, 2], [3, 4], [5, 6]]
    assert util.split_list([1], 2) == [[1], []]


def test_powers_of_two_are_told_from_other_numbers() -> None:
    assert [n for n in range(10) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8]


def test_what_can_be_walked_over_is_iterable() -> None:
    assert util.is_iterable([])
    assert util.is_iterable("text")
    assert not util.is_iterable(3)


def test_the_older_average_becomes_an_operation() -> None:
    class Operations:
        Average, Sum = "average", "sum"

    choose = util.get_average_backwards_compatibility_fun(Operations)
    assert choose(None, None) == "average"
    assert choose("max", None) == "max"
    with pytest.warns(DeprecationWarning, match="give `op`"):
        assert choose(None, False) == "sum"
    with pytest.raises(ValueError, match="both op='sum' and average=True"):
        choose("sum", True)
