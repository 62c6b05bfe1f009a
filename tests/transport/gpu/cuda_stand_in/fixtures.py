"""Fixtures of the stand-in for the CUDA driver."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def stand_in():
    """The stand-in's module, with its first device in use in this thread; skips where it cannot be built.

    Other tests see no device. Where there is a real one they would lose it: set STAND_IN=1 in a run for the
    tests of the stand-in alone.
    """
    from tests.transport.gpu import cuda_stand_in

    if reason := cuda_stand_in.obstacle():
        pytest.skip(reason)
    if Path("/dev/nvidiactl").exists() and os.environ.get("STAND_IN") != "1":
        pytest.skip("would hide this machine's GPU from later tests; STAND_IN=1 runs it nevertheless")
    from hpcpar.transport.gpu.cuda_driver import driver

    cuda_stand_in.show(True)
    try:
        driver().use(0)
        yield cuda_stand_in
    finally:
        cuda_stand_in.show(False)
