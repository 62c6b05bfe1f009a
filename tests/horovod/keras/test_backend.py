"""Keras computes by torch, or the import says how to make it; each case in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def python(code: str, *options: str, backend: str | None = None) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    if backend:
        environ["KERAS_BACKEND"] = backend
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.smoke
def test_an_import_before_keras_chooses_torch() -> None:
    done = python("import hpcpar.horovod.keras, keras; print(keras.backend.backend())")
    assert done.stdout == "torch\n", done.stderr


def test_a_script_that_imports_keras_first_runs_by_the_alias() -> None:
    code = """
import keras
import horovod.keras as hvd
import horovod.tensorflow.keras as too
from horovod.keras import load_model
hvd.init()
print(keras.backend.backend(), hvd is too, hvd.size(), hvd.DistributedOptimizer("adam") if 0 else hvd.rank())
"""
    done = python(code, "-m", "hpcpar.horovod")
    assert done.stdout == "torch True 1 0\n", done.stderr


STAND_IN = """
import sys, types
keras = types.ModuleType("keras")
keras.__version__ = {version!r}
keras.backend = types.SimpleNamespace(backend=lambda: {backend!r})
sys.modules["keras"] = keras
try:
    import hpcpar.horovod.keras
except ImportError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_another_backend_is_refused_with_the_line_to_set(backend: str) -> None:
    done = python(STAND_IN.format(version="3.15.1", backend=backend))
    assert done.stdout.startswith(f"KerasBackendError Keras computes by {backend}"), done.stderr
    assert 'os.environ["KERAS_BACKEND"] = "torch"' in done.stdout


def test_keras_2_is_refused() -> None:
    done = python(STAND_IN.format(version="2.15.0", backend="tensorflow"))
    assert "needs Keras 3; found 2.15.0" in done.stdout, done.stderr


def test_without_keras_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "keras.py").write_text("raise ImportError('there is none')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport hpcpar.horovod.keras"
    done = python(code)
    assert "pip install hpcpar[keras]" in done.stderr


def test_a_backend_that_the_job_names_is_not_changed() -> None:
    done = python("import hpcpar.horovod.keras", backend="numpy")
    assert "Keras computes by numpy" in done.stderr or "`import keras` failed" in done.stderr
