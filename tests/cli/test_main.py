"""The command `hpcpar` itself: finding commands, statuses, and what it costs to start."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

import hpcpar
from hpcpar import cli
from hpcpar.cli import COMMANDS, group, main
from tests.command import run

REPOSITORY = Path(__file__).parents[2]


def status_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_help_names_every_command_and_imports_none_of_them() -> None:
    code = (
        "import sys\nfrom hpcpar.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "loaded = {'torch', 'numpy', 'mpi4py', 'hpcpar.cli.run'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = run(sys.executable, "-c", code, directory=REPOSITORY)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert f"  {name} " in done.stdout


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_is_there_and_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, _ = COMMANDS[name]
    assert isinstance(getattr(importlib.import_module(f"hpcpar.cli.{module}"), name), click.Command)
    assert status_of(name, "--help") == 0
    assert f"hpcpar {name}" in capsys.readouterr().out


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("--version") == 0
    assert capsys.readouterr().out == f"hpcpar {hpcpar.__version__}\n"


@pytest.mark.parametrize(
    ("words", "meant"), [(["trian"], "'train'? `hpcpar --"), (["bench", "colectives"], "'collectives'?")]
)
def test_an_unknown_command_is_a_usage_error_that_names_the_one_that_was_meant(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(*words) == 2
    assert f"there is no command {words[-1]!r}; did you mean {meant}" in capsys.readouterr().err


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (3, 3)])
def test_what_a_command_returns_is_the_exit_status(
    returned: int | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(lambda: returned, monkeypatch)
    assert status_of("run") == status


def test_an_error_in_a_command_is_left_to_the_exception_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ZeroDivisionError

    use(fails, monkeypatch)
    with pytest.raises(ZeroDivisionError):
        main(["run"])


def test_an_interrupt_in_a_command_is_left_to_the_exception_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_interrupted() -> None:
        raise KeyboardInterrupt

    use(is_interrupted, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        main(["run"])


def use(function: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `hpcpar run` call this function instead."""
    command = click.Command("run", callback=function)
    monkeypatch.setattr(type(group), "get_command", lambda self, context, name: command)


def test_what_the_locale_cannot_write_is_spelled_out_and_ends_nothing() -> None:
    words = ("hpcpar", "draw", "ring", "--size", "2")
    done = run(sys.executable, "-m", *words, directory=REPOSITORY, PYTHONIOENCODING="latin-1")
    assert done.returncode == 0, done.stderr
    assert r"0\u21921" in done.stdout


def test_python_dash_m_is_the_same_command() -> None:
    done = run(sys.executable, "-m", "hpcpar", "--version", directory=REPOSITORY)
    assert done.stdout == f"hpcpar {hpcpar.__version__}\n"
    assert cli.main is main
