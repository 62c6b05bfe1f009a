"""The easyconfig passes EasyBuild's own checks, and its versions are ones that setup.py accepts."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import hpcpar
from tests.modulefiles.installation import ROOT
from tests.modulefiles.systems import absent, find, login_environ

pytestmark = pytest.mark.timeout(200)

(EASYCONFIG,) = (ROOT / "modulefiles/easybuild").glob("*.eb")

# Whose version decides, where EasyBuild has what we need under another name, or in a bundle of several.
PROVIDERS = {
    "torch": "PyTorch",
    "numpy": "SciPy-bundle",
    "click": "Python-bundle-PyPI",
    "rich": "Python-bundle-PyPI",
    "safetensors": "Safetensors",
}


def contents() -> dict[str, Any]:
    """The easyconfig's parameters: it is Python, with a few constants."""
    names: dict[str, Any] = {"PYPI_LOWER_SOURCE": "PYPI_LOWER_SOURCE"}
    exec(EASYCONFIG.read_text(), names)
    return names


def eb() -> Path:
    """EasyBuild's command: on the PATH, or named in HPCPAR_EASYBUILD."""
    found = os.environ.get("HPCPAR_EASYBUILD") or shutil.which("eb")
    if found is None:
        absent(
            "EasyBuild is not there: pip install easybuild pycodestyle, and name its eb in HPCPAR_EASYBUILD"
        )
    return Path(str(found))


def run_eb(*words: str, directory: Path) -> str:
    """What `eb words…` says; it takes Lmod, and nothing of ours."""
    command, lmod = eb(), find("Lmod")
    environ = {
        "EASYBUILD_PREFIX": str(directory),
        "EASYBUILD_MODULES_TOOL": "Lmod",
        # Root is who runs tests in a container.
        "EASYBUILD_ALLOW_USE_AS_ROOT_AND_ACCEPT_CONSEQUENCES": "1",
    }
    path = f"{command.parent}:{login_environ()['PATH']}"
    done = lmod.run(f"eb {' '.join(words)}", directory, timeout_s=180, PATH=path, **environ)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_it_passes_easybuilds_checks_for_contributions(tmp_path: Path) -> None:
    said = run_eb("--check-contrib", str(EASYCONFIG), directory=tmp_path)
    assert ">> All style checks PASSed!" in said
    assert ">> All SHA256 checksums checks PASSed!" in said
    assert ">> All contribution checks PASSed!" in said


def test_everything_that_it_needs_is_in_easybuilds_tree(tmp_path: Path) -> None:
    said = run_eb("--dry-run", "--robot", str(EASYCONFIG), directory=tmp_path)
    modules = re.findall(r"\(module: (\S+)\)", said)
    assert modules[-1] == f"hpcpar/{hpcpar.__version__}-foss-2025a"
    parameters = contents()
    for name, version in parameters["dependencies"]:
        assert any(module.startswith(f"{name}/{version}") for module in modules), name


def test_the_bundles_have_what_setup_py_asks_for() -> None:
    tree = eb().parent.parent / "easybuild/easyconfigs"
    versions = dict(contents()["dependencies"])
    for name in ("numpy", "click", "rich"):
        bundle = PROVIDERS[name]
        (file, *_) = sorted(tree.glob(f"*/{bundle}/{bundle}-{versions[bundle]}-*.eb"))
        found = re.search(rf"^    \('{name}', '([\d.]+)'", file.read_text(), re.MULTILINE)
        assert found is not None, file
        assert requirements()[name].specifier.contains(found[1]), name


def requirements() -> dict[str, Requirement]:
    """What hpcpar always needs on the easyconfig's Python, by name in small letters."""
    python = dict(contents()["dependencies"])["Python"]
    needed = [Requirement(text) for text in importlib.metadata.requires("hpcpar") or ()]
    environment = {"extra": "", "python_version": python.rpartition(".")[0]}
    return {one.name.lower(): one for one in needed if one.marker is None or one.marker.evaluate(environment)}


def test_the_versions_are_ones_that_setup_py_accepts() -> None:
    parameters = contents()
    versions = dict(parameters["dependencies"])
    versions |= {name.lower(): version for name, version, _ in parameters["exts_list"]}
    for name, requirement in requirements().items():
        provider = PROVIDERS.get(name, name)
        assert provider in versions, name
        if not provider.endswith(("-bundle", "-PyPI")):
            assert requirement.specifier.contains(versions[provider]), name
    assert importlib.metadata.metadata("hpcpar")["Requires-Python"] == ">=3.10"


def test_it_is_of_this_version_and_called_as_easybuild_calls_it() -> None:
    parameters = contents()
    toolchain = parameters["toolchain"]
    name = f"{parameters['name']}-{parameters['version']}-{toolchain['name']}-{toolchain['version']}.eb"
    assert name == EASYCONFIG.name
    assert parameters["version"] == hpcpar.__version__
    assert parameters["description"] == importlib.metadata.metadata("hpcpar")["Summary"]
    assert {key: value["value"] for key, value in parameters["modextravars"].items()} == {
        "SLURM_KILL_BAD_EXIT": "1",
        "SLURM_MPI_TYPE": "pmix",
    }
