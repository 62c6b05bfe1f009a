"""HPCPAR_* variables."""

from __future__ import annotations

import math

import pytest

from hpcpar.errors import ConfigError
from hpcpar.launch.settings import Settings


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Settings.from_environ({}) == Settings(False, 600.0, None, None)


def test_every_variable_is_read() -> None:
    environ = {
        "HPCPAR_CHECK": "1",
        "HPCPAR_TIMEOUT_S": "2.5",
        "HPCPAR_ALGORITHM": "ring",
        "HPCPAR_RUN_DIRECTORY": "/scratch/run",
    }
    assert Settings.from_environ(environ) == Settings(True, 2.5, "ring", "/scratch/run")


@pytest.mark.parametrize(
    ("text", "check"),
    [("0", False), ("no", False), ("OFF", False), ("", False), ("yes", True), ("True", True)],
)
def test_a_flag_may_be_written_as_people_do(text: str, check: bool) -> None:
    assert Settings.from_environ({"HPCPAR_CHECK": text}).check is check


def test_a_time_limit_may_be_infinite() -> None:
    assert Settings.from_environ({"HPCPAR_TIMEOUT_S": "inf"}).timeout_s == math.inf


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HPCPAR_CHECK", "maybe"),
        ("HPCPAR_TIMEOUT_S", "soon"),
        ("HPCPAR_TIMEOUT_S", "0"),
        ("HPCPAR_TIMEOUT_S", "-3"),
        ("HPCPAR_TIMEOUT_S", "nan"),
    ],
)
def test_a_value_that_is_not_understood_is_an_error_that_names_the_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Settings.from_environ({name: value})
