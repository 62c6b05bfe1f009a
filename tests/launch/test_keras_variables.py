"""A backend that the environment names stays."""

from __future__ import annotations

from hpcpar.launch.keras_variables import prefer_torch


def test_torch_is_preferred_where_nobody_has_chosen() -> None:
    environ: dict[str, str] = {}
    prefer_torch(environ)
    assert environ == {"KERAS_BACKEND": "torch"}


def test_a_backend_that_the_environment_names_stays() -> None:
    environ = {"KERAS_BACKEND": "jax"}
    prefer_torch(environ)
    assert environ == {"KERAS_BACKEND": "jax"}
