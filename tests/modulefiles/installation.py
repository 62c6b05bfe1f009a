"""hpcpar installed for a site by `make install-module`, for tests."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import hpcpar

ROOT = Path(__file__).parent.parent.parent
VERSION = hpcpar.__version__

# The packages that this Python has are used and not installed again: all else is as for a real site.
QUICK = ("SITE_PACKAGES=1", "PIP_ARGS=--no-build-isolation", f"PYTHON={sys.executable}")


def make(*words: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`make install-module words…` in the repository's root."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", "--silent", "--directory", str(ROOT), "install-module", *words],
        env={**ours, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def installed(shared: Path) -> Path:
    """A prefix with this version over MPICH's wheel, made once for all processes that share a directory.

    HPCPAR_MODULE_PREFIX names one that is there already, such as a full installation.
    """
    given = os.environ.get("HPCPAR_MODULE_PREFIX")
    if given:
        return Path(given)
    prefix = shared / "site"
    with open(shared / "site.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (prefix / "modulefiles").exists():
            done = make(f"PREFIX={prefix}", "MPI=mpich", *QUICK)
            assert done.returncode == 0, done.stdout + done.stderr
    return prefix


def installer() -> ModuleType:
    """modulefiles/install.py as a module."""
    spec = importlib.util.spec_from_file_location("modulefiles_install", ROOT / "modulefiles/install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def page_block(text: str, heading: str, number: int = 0) -> str:
    """The commands of a heading's code block in a page, the first one if not told otherwise."""
    section = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^##+ |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None, f"no heading {heading}"
    blocks = re.findall(r"^```\w*\n(.*?)^```$", section[1], re.MULTILINE | re.DOTALL)
    assert len(blocks) > number, f"{heading} has only {len(blocks)} code blocks"
    return str(blocks[number])


def pasted(block: str, prefix: Path, *, without: str = "") -> str:
    """The commands as a user pastes them, for a prefix that is not the page's; any failure ends them.

    without   leave out the lines that begin with this word
    """
    assert "/opt/hpcpar" in block
    lines = block.replace("/opt/hpcpar", shlex.quote(str(prefix))).splitlines()
    return "\n".join(["set -e", *(line for line in lines if not without or not line.startswith(without))])
