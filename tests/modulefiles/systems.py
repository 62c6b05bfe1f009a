"""Lmod and Environment Modules as this machine has them, each in a fresh shell.

Debian lets only one of the two be installed; the other one may lie where `dpkg -x` has unpacked it, in the
directory that HPCPAR_ENVIRONMENT_MODULES names.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

LMOD = ("/usr/share/lmod/lmod/init/bash", "/opt/apps/lmod/lmod/init/bash", "/opt/lmod/lmod/init/bash")
TCL = (
    "usr/lib/x86_64-linux-gnu/modulecmd.tcl",
    "usr/lib/aarch64-linux-gnu/modulecmd.tcl",
    "usr/share/Modules/libexec/modulecmd.tcl",
    "usr/local/Modules/libexec/modulecmd.tcl",
)

NAMES = ("Lmod", "Environment Modules")


@dataclass(frozen=True)
class ModuleSystem:
    """One of the two.

    start   what makes `module` known to a bash
    """

    name: str
    start: str

    def run(
        self, script: str, directory: Path, *, timeout_s: float = 60.0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a script, its two outputs as one, in a fresh bash as of a new login."""
        return subprocess.run(
            self.command(script),
            env={**login_environ(), **variables},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def command(self, script: str) -> list[str]:
        """The words that run a script in a bash that knows `module`."""
        return ["bash", "--noprofile", "--norc", "-c", f"{self.start}\n{script}"]


def login_environ(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a new login, without this process's Python, modules and launcher."""
    path = "/usr/local/bin:/usr/bin:/bin"
    kept = {name: environ[name] for name in ("HOME", "USER", "LANG", "OMP_NUM_THREADS") if name in environ}
    # Open MPI's launcher refuses root otherwise.
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**kept, "PATH": path, **allowed}


def find(name: str) -> ModuleSystem:
    """One of NAMES; where it is missing the test is skipped, or fails where everything must run."""
    if name == "Lmod":
        starts = [f". {path}" for path in LMOD if Path(path).exists()]
        missing = "Lmod is not installed (apt-get install lmod)"
    else:
        roots = [os.environ.get("HPCPAR_ENVIRONMENT_MODULES") or "/", "/"]
        found = [Path(root) / path for root in roots for path in TCL if (Path(root) / path).exists()]
        tclsh = shutil.which("tclsh", path=login_environ()["PATH"])
        starts = [f'eval "$({tclsh} {shlex.quote(str(path))} bash autoinit)"' for path in found if tclsh]
        missing = (
            "Environment Modules are not there: apt-get install environment-modules; or, beside Lmod, "
            "install tcl, unpack that package with `dpkg -x`, "
            "and set HPCPAR_ENVIRONMENT_MODULES to the directory"
        )
    if not starts:
        absent(missing)
    return ModuleSystem(name, starts[0])


def absent(reason: str) -> None:
    """Skip the test, or fail it where HPCPAR_REQUIRE_SLURM=1 says that everything must run."""
    if os.environ.get("HPCPAR_REQUIRE_SLURM") == "1":
        pytest.fail(f"HPCPAR_REQUIRE_SLURM=1, but {reason}")
    pytest.skip(reason)
