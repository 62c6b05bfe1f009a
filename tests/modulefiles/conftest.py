"""A site with hpcpar, once for all tests here and all processes that run them; and both module systems."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.modulefiles import installation, systems
from tests.modulefiles.systems import ModuleSystem


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of `make install-module` with this version over MPICH's wheel."""
    mine = tmp_path_factory.getbasetemp()
    # Under xdist every process has its own directory below one that they share.
    return installation.installed(mine.parent if mine.name.startswith("popen-") else mine)


@pytest.fixture(params=systems.NAMES)
def modules(request: pytest.FixtureRequest) -> ModuleSystem:
    """One after the other."""
    return systems.find(request.param)
