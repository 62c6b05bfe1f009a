"""The module files under the real Lmod and Environment Modules: what a user sees, and that nothing stays."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path

import pytest

from tests.modulefiles.installation import QUICK, ROOT, VERSION, installer, page_block, pasted
from tests.modulefiles.systems import NAMES, ModuleSystem, absent, find

pytestmark = pytest.mark.timeout(200)

# What the module systems write down for themselves.
BOOKKEEPING = re.compile(r"_ModuleTable|__LMOD_|__MODULES_|_LMFILES_$|LOADEDMODULES$|_$|SHLVL$")

# What a user may have set for other work.
OWN = {
    "SLURM_MPI_TYPE": "pmix",
    "SLURM_KILL_BAD_EXIT": "0",
    "MPI4PY_LIBMPI": "/opt/mpi",
    "HPCPAR_ROOT": "/home/me",
}


def environ_of(path: Path) -> dict[str, str]:
    """Read what `env -0` has written, without the module systems' own variables."""
    pairs = (pair.partition("=") for pair in path.read_text().split("\0") if pair)
    return {name: value for name, _, value in pairs if not BOOKKEEPING.match(name)}


@pytest.fixture
def two_versions(prefix: Path, tmp_path: Path) -> Path:
    """A prefix with 0.0.1, too: the same installation by another name, as one over the site's own MPI."""
    install = installer()
    site = tmp_path / "site"
    site.mkdir()
    facts = json.loads((prefix / VERSION / "installed.json").read_text())["facts"]
    for version, mpi in ((VERSION, "mpich"), ("0.0.1", "own")):
        (site / version).symlink_to(prefix / VERSION)
        install.write_module_files(install.Installation(site, version, mpi), facts)
    return site


@pytest.fixture
def openmpi_modules(tmp_path: Path) -> Path:
    """Module files of two versions of an MPI, as a site has them, over Debian's Open MPI."""
    mpiexec = shutil.which("mpiexec.openmpi")
    if mpiexec is None:
        absent("Open MPI is not installed (apt-get install openmpi-bin)")
    tree = tmp_path / "mpi"
    programs = tree / "bin"
    programs.mkdir(parents=True)
    (programs / "mpiexec").symlink_to(str(mpiexec))
    (programs / "mpicc").symlink_to("/usr/bin/mpicc.openmpi")
    (tree / "modulefiles/openmpi").mkdir(parents=True)
    for version in ("4.1", "5.0"):
        (tree / "modulefiles/openmpi" / f"{version}").write_text(
            f"#%Module1.0\nconflict openmpi\nsetenv SITE_MPI {version}\nprepend-path PATH {programs}\n"
        )
        (tree / "modulefiles/openmpi" / f"{version}.lua").write_text(
            f'family("mpi")\nsetenv("SITE_MPI", "{version}")\nprepend_path("PATH", "{programs}")\n'
        )
    return tree / "modulefiles"


@pytest.fixture
def over_openmpi(tmp_path: Path) -> Path:
    """Module files in `site` of an hpcpar over the site's own Open MPI; the directory that it is in."""
    install = installer()
    setup = install.Installation(tmp_path / "site", "1.0", "own", needs=("openmpi/4.1",))
    facts = {"library": "Open MPI v4.1.4", "torch": "2.13.0", "python": "3.11", "summary": "x"}
    install.write_module_files(setup, {**facts, "srun_mpi": "pmix"})
    return Path(setup.root)


def wheel(directory: Path, name: str, text: str) -> None:
    """A package of one module, which pip installs without building it and without a network."""
    about = f"{name}-1.dist-info"
    with zipfile.ZipFile(directory / f"{name}-1-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", text)
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")


def test_both_kinds_share_a_directory_and_each_system_sees_one_module(
    modules: ModuleSystem, two_versions: Path, tmp_path: Path
) -> None:
    done = modules.run(f"module use {two_versions}/modulefiles; module --terse avail 2>&1", tmp_path)
    lines = [line.removesuffix("(default)") for line in done.stdout.split() if line.startswith("hpcpar/")]
    assert sorted(line for line in lines if line != "hpcpar/") == sorted(
        ["hpcpar/0.0.1", f"hpcpar/{VERSION}"]
    )


def test_a_user_is_told_what_it_is_and_how_to_start(
    modules: ModuleSystem, prefix: Path, tmp_path: Path
) -> None:
    script = (
        f"module use {prefix}/modulefiles; module help hpcpar; echo ====; module whatis hpcpar; echo ====; "
    )
    done = modules.run(script + "module show hpcpar", tmp_path)
    helped, whatis, shown = done.stdout.split("====")
    for words in ("srun python train.py", "hpcpar doctor", "MPICH", "$HPCPAR_ROOT/share/hpcpar"):
        assert words in helped
    for words in ("Name: hpcpar", f"Version: {VERSION}", "Description: Training PyTorch models"):
        assert words in whatis
    assert f"{prefix}/{VERSION}/bin" in shown
    assert "error" not in done.stdout.lower()


def test_the_newest_version_is_the_default(modules: ModuleSystem, two_versions: Path, tmp_path: Path) -> None:
    script = f"module use {two_versions}/modulefiles; module load hpcpar; echo $HPCPAR_ROOT"
    assert modules.run(script, tmp_path).stdout == f"{two_versions}/{VERSION}\n"


def test_loaded_it_has_its_own_python_mpi_and_settings_for_srun(
    modules: ModuleSystem, prefix: Path, tmp_path: Path
) -> None:
    script = f"""
    module use {prefix}/modulefiles; module load hpcpar
    which python hpcpar mpiexec
    echo $SLURM_MPI_TYPE $SLURM_KILL_BAD_EXIT
    python -c 'import hpcpar; print(hpcpar.__file__)'
    """
    root = prefix / VERSION
    lines = modules.run(script, tmp_path).stdout.splitlines()
    assert lines[:4] == [*(f"{root}/bin/{name}" for name in ("python", "hpcpar", "mpiexec")), "pmi2 1"]
    assert Path(lines[4]).is_relative_to(root)


@pytest.mark.parametrize("before", [{}, OWN], ids=["a fresh login", "variables of the user's"])
@pytest.mark.parametrize(
    "there_and_back",
    [
        "module load hpcpar/0.0.1; module unload hpcpar",
        "module load hpcpar/0.0.1; module swap hpcpar hpcpar/{version}; module unload hpcpar",
        "module load hpcpar; module purge",
        "module load hpcpar; module load hpcpar; module unload hpcpar",
    ],
    ids=["unload", "swap", "purge", "twice"],
)
def test_unloaded_it_leaves_the_environment_as_it_was(
    modules: ModuleSystem, two_versions: Path, tmp_path: Path, before: dict[str, str], there_and_back: str
) -> None:
    script = f"""
    module use {two_versions}/modulefiles
    env -0 > before; alias > names-before; declare -F >> names-before
    {there_and_back.format(version=VERSION).replace(";", "; env -0 >> between;")}
    env -0 > after; alias > names-after; declare -F >> names-after
    """
    done = modules.run(script, tmp_path, **before)
    assert done.returncode == 0, done.stdout
    assert environ_of(tmp_path / "after") == environ_of(tmp_path / "before")
    assert "SLURM_MPI_TYPE=pmi2\0" in (tmp_path / "between").read_text()
    assert (tmp_path / "names-after").read_text() == (tmp_path / "names-before").read_text()


def test_of_two_versions_only_one_is_loaded(
    modules: ModuleSystem, two_versions: Path, tmp_path: Path
) -> None:
    script = f"""
    module use {two_versions}/modulefiles
    module load hpcpar/0.0.1
    module load hpcpar/{VERSION}; echo status $?
    echo $HPCPAR_ROOT; tr : '\\n' <<< $PATH | grep -c {two_versions}
    """
    said = modules.run(script, tmp_path).stdout
    if modules.name == "Lmod":
        assert f"hpcpar/0.0.1 => hpcpar/{VERSION}" in said
        assert said.splitlines()[-3:] == ["status 0", f"{two_versions}/{VERSION}", "1"]
    else:
        assert "cannot be loaded due to a conflict" in said
        assert said.splitlines()[-3:] == ["status 1", f"{two_versions}/0.0.1", "1"]


def test_of_two_mpis_only_one_is_loaded(
    modules: ModuleSystem, prefix: Path, openmpi_modules: Path, tmp_path: Path
) -> None:
    script = f"""
    module use {openmpi_modules} {prefix}/modulefiles
    module load openmpi/4.1
    module load hpcpar; echo status $?
    echo ${{SITE_MPI:-none}} ${{HPCPAR_ROOT:-none}}
    """
    said = modules.run(script, tmp_path).stdout
    if modules.name == "Lmod":
        assert 'automatically replacing "openmpi/4.1"' in " ".join(said.split())
        assert said.splitlines()[-2:] == ["status 0", f"none {prefix}/{VERSION}"]
    else:
        assert "cannot be loaded due to a conflict" in said
        assert said.splitlines()[-2:] == ["status 1", "4.1 none"]


# Environment Modules' own setting: whether `prereq` loads what is missing, or refuses.
@pytest.mark.parametrize("auto_handling", ["0", "1"])
def test_over_the_sites_own_mpi_its_module_comes_and_goes_with_ours(
    modules: ModuleSystem, openmpi_modules: Path, over_openmpi: Path, tmp_path: Path, auto_handling: str
) -> None:
    shown = "echo ${HPCPAR_ROOT:+loaded} ${SITE_MPI:-none} ${SLURM_MPI_TYPE:-none} ${MPI4PY_LIBMPI:-none}"

    def there_and_back(first: str) -> list[str]:
        script = f"""
        module use {openmpi_modules} {tmp_path}/site/modulefiles; {first}
        env -0 > before; module load hpcpar; {shown}; module unload hpcpar; env -0 > after; {shown}
        """
        lines = modules.run(script, tmp_path, MODULES_AUTO_HANDLING=auto_handling).stdout.splitlines()
        assert environ_of(tmp_path / "after") == environ_of(tmp_path / "before")
        return [line for line in lines if line.endswith(" none")]

    assert there_and_back("") == ["loaded 4.1 pmix none", "none none none"]
    assert there_and_back("module load openmpi/4.1") == ["loaded 4.1 pmix none", "4.1 none none"]


def test_another_version_of_the_sites_mpi_is_replaced_or_refused(
    modules: ModuleSystem, openmpi_modules: Path, over_openmpi: Path, tmp_path: Path
) -> None:
    script = f"""
    module use {openmpi_modules} {tmp_path}/site/modulefiles
    module load openmpi/5.0; module load hpcpar; echo $SITE_MPI ${{HPCPAR_ROOT:-none}}
    """
    last = modules.run(script, tmp_path).stdout.splitlines()[-1]
    assert last == (f"4.1 {over_openmpi}" if modules.name == "Lmod" else "5.0 none")


def test_over_the_sites_own_mpi_ranks_meet_by_it(openmpi_modules: Path, tmp_path: Path) -> None:
    """From `make install-module` in a shell with the MPI's module to a job of two ranks."""
    modules = find(NAMES[0])
    (tmp_path / "train.py").write_text(
        "import hpcpar; w = hpcpar.init(); print('rank', w.rank, 'of', w.size)"
    )
    quick = " ".join(QUICK)
    script = f"""
    set -e
    module use {openmpi_modules}
    module load openmpi/4.1
    make --silent --directory {ROOT} install-module PREFIX={tmp_path}/site NEEDS=openmpi/4.1 {quick}
    module purge
    module use {tmp_path}/site/modulefiles
    module load hpcpar
    echo $SLURM_MPI_TYPE; which mpiexec
    mpiexec --oversubscribe -n 2 python train.py
    """
    done = modules.run(script, tmp_path, timeout_s=180)
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert f"hpcpar {VERSION} is in {tmp_path}/site/{VERSION} (Open MPI" in done.stdout
    assert lines[-4:-2] == ["pmix", f"{openmpi_modules.parent}/bin/mpiexec"]
    assert sorted(lines[-2:]) == ["rank 0 of 2", "rank 1 of 2"]


def test_module_load_to_the_first_training_steps_by_copy_and_paste_from_the_documentation(
    modules: ModuleSystem, prefix: Path, tmp_path: Path
) -> None:
    commands = page_block((ROOT / "docs/install.md").read_text(), "Modules", 1)
    done = modules.run(pasted(commands, prefix, without="srun"), tmp_path, timeout_s=180)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^step   10  loss \d\.\d+$", done.stdout, re.MULTILINE), done.stdout


def test_packages_of_the_users_own_go_on_top_by_copy_and_paste_from_the_documentation(
    prefix: Path, tmp_path: Path
) -> None:
    modules = find(NAMES[0])
    loaded = pasted("module use /opt/hpcpar/modulefiles\nmodule load hpcpar", prefix)
    commands = page_block((ROOT / "docs/install.md").read_text(), "Modules", 2)
    assert "pip install einops" in commands
    wheel(tmp_path, "mine", "import hpcpar; w = hpcpar.init(); print('rank', w.rank, 'of', w.size)")
    (tmp_path / "train.py").write_text("import sys, mine; print(sys.prefix)")
    commands = commands.replace("pip install einops", "pip install --no-index ./mine-1-py3-none-any.whl")
    done = modules.run(f"{loaded}\n{commands}", tmp_path, timeout_s=180)
    assert done.returncode == 0, done.stdout
    assert {"rank 0 of 2", "rank 1 of 2", f"{tmp_path}/mine"} <= set(done.stdout.splitlines())
