"""Tests of Horovod's API for Keras; where Keras is not installed there are none."""

from __future__ import annotations

import os
from importlib.util import find_spec
from types import ModuleType

import pytest

# For test modules that import keras before us, as linters sort them; test_backend.py does without.
os.environ.setdefault("KERAS_BACKEND", "torch")
collect_ignore_glob = [] if find_spec("keras") else ["*.py"]


@pytest.fixture
def hvd() -> ModuleType:
    """`hpcpar.horovod.keras`, initialized with process sets that come and go."""
    import hpcpar.horovod.keras as module
    from hpcpar.horovod.basics import the_context

    if module.is_initialized() and not the_context().dynamic:
        module.shutdown()
    module.init(process_sets="dynamic")
    return module
