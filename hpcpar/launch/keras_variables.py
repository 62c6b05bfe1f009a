"""The variable by which Keras chooses the library that it computes with, when it is imported."""

from __future__ import annotations

from collections.abc import MutableMapping

BACKEND = "KERAS_BACKEND"


def prefer_torch(environ: MutableMapping[str, str]) -> None:
    """Let a Keras that is imported later compute by torch, unless the environment names a backend."""
    environ.setdefault(BACKEND, "torch")
