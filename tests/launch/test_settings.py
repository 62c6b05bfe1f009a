"""HPCPAR_* variables."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from hpcpar.errors import ConfigError
from hpcpar.launch.settings import (
    CAPABILITIES,
    RANK_PID,
    Settings,
    announce_rank,
    env,
    machine_file,
    mark_as_rank,
    own_tuning_file,
    parent_is_the_rank,
    read_tuning,
    tuning_file,
)
from tests.command import variables


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Settings.from_environ({}) == Settings(False, 600.0, None, None, None, True)


def test_every_variable_is_read() -> None:
    environ = {
        "HPCPAR_CHECK": "1",
        "HPCPAR_TIMEOUT_S": "2.5",
        "HPCPAR_ALGORITHM": "allreduce=ring",
        "HPCPAR_RUN_DIRECTORY": "/scratch/run",
        "HPCPAR_TUNING": "/home/me/tuning.toml",
        "HPCPAR_SHARED_MEMORY": "0",
        "HPCPAR_CUDA_AWARE": "reductions, point-to-point",
    }
    assert Settings.from_environ(environ) == Settings(
        True,
        2.5,
        "allreduce=ring",
        "/scratch/run",
        "/home/me/tuning.toml",
        False,
        ("point_to_point", "reductions"),
    )


@pytest.mark.parametrize(
    ("text", "check"),
    [("0", False), ("no", False), ("OFF", False), ("", False), ("yes", True), ("True", True)],
)
def test_a_flag_may_be_written_as_people_do(text: str, check: bool) -> None:
    assert Settings.from_environ({"HPCPAR_CHECK": text}).check is check


@pytest.mark.parametrize(
    ("text", "names"),
    [("1", CAPABILITIES), ("Yes", CAPABILITIES), ("0", ()), ("off", ()), ("", None), ("  ", None)],
)
def test_of_device_pointers_all_nothing_or_no_word_may_be_said(
    text: str, names: tuple[str, ...] | None
) -> None:
    assert Settings.from_environ({"HPCPAR_CUDA_AWARE": text}).cuda_aware == names


def test_a_time_limit_may_be_infinite() -> None:
    assert Settings.from_environ({"HPCPAR_TIMEOUT_S": "inf"}).timeout_s == math.inf


WRONG = """
CHECK=maybe SHARED_MEMORY=sometimes TIMEOUT_S=soon TIMEOUT_S=0 TIMEOUT_S=-3 TIMEOUT_S=nan CUDA_AWARE=perhaps
CUDA_AWARE=2 CUDA_AWARE=, CUDA_AWARE=point_to_point,allreduce DEVICES=all
"""


@pytest.mark.parametrize("wrong", WRONG.split())
def test_a_value_that_is_not_understood_is_an_error_that_names_the_variable(wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"HPCPAR_{wrong.partition('=')[0]}"):
        Settings.from_environ(variables(f"HPCPAR_{wrong}"))


@pytest.mark.parametrize(
    ("name", "meant"),
    [("HPCPAR_TIMOUT_S", "HPCPAR_TIMEOUT_S"), ("HPCPAR_CHECKED", "HPCPAR_CHECK"), ("HPCPAR_MINE", None)],
    ids=["letter", "ending", "another's"],
)
def test_a_variable_that_is_nearly_one_of_ours_is_not_passed_over(name: str, meant: str | None) -> None:
    with pytest.raises(ConfigError, match=f"say {meant} ") if meant else nullcontext():
        Settings.from_environ({name: "1"})


def test_the_users_own_tuning_file_is_where_settings_are_kept() -> None:
    assert own_tuning_file({"XDG_CONFIG_HOME": "/etc/me"}) == Path("/etc/me/hpcpar/tuning.toml")
    assert own_tuning_file({}) == Path.home() / ".config/hpcpar/tuning.toml"


def test_a_user_without_a_home_has_no_tuning_file_and_is_told_so_where_one_is_to_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert own_tuning_file({}) is None
    assert read_tuning(None, own_tuning_file({})) == ("", "")
    assert tuning_file({"HPCPAR_TUNING": "mine.toml"}) == Path("mine.toml")
    with pytest.raises(
        ConfigError, match=r"has no home directory to keep a table in: name a file with --file"
    ):
        tuning_file({})


def test_the_machines_description_is_the_one_named_or_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_file({"HPCPAR_MACHINE": "mine.toml"}) == Path("mine.toml")
    assert machine_file({"XDG_CONFIG_HOME": "/c"}) == Path("/c/hpcpar/machine.toml")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(ConfigError, match="HPCPAR_MACHINE"):
        machine_file({})


def test_the_home_of_somebody_else_has_no_tuning_file_for_us(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", forbidden)
    assert read_tuning(None, Path("/root/.config/hpcpar/tuning.toml")) == ("", "")


def test_the_tuning_file_asked_for_goes_before_the_users_own(tmp_path: Path) -> None:
    own, asked = tmp_path / "own.toml", tmp_path / "asked.toml"
    own.write_text("own")
    asked.write_text("asked")
    assert read_tuning(str(asked), own) == ("asked", str(asked))
    assert read_tuning(None, own) == ("own", str(own))
    assert read_tuning("none", own) == ("", "")
    assert read_tuning(None, tmp_path / "missing.toml") == ("", "")


def test_a_tuning_file_asked_for_and_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml cannot be read.*HPCPAR_TUNING"):
        read_tuning(str(tmp_path / "missing.toml"), tmp_path / "own.toml")


def test_a_rank_is_announced_over_what_another_job_has_left() -> None:
    environ = {"HOROVOD_RANK": "7", "HOROVOD_FUSION_THRESHOLD": "1"}
    announce_rank(1, 6, (1, 2), (0, 3), environ)
    assert environ == variables(
        "HOROVOD_FUSION_THRESHOLD=1 HOROVOD_RANK=1 HOROVOD_SIZE=6 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2 "
        "HOROVOD_CROSS_RANK=0 HOROVOD_CROSS_SIZE=3"
    )


def test_variables_are_set_for_a_while_and_then_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCPAR_TEST_ONE", "before")
    monkeypatch.delenv("HPCPAR_TEST_TWO", raising=False)
    names = ("HPCPAR_TEST_ONE", "HPCPAR_TEST_TWO", "HPCPAR_TEST_THREE")

    def now() -> list[str | None]:
        return [os.environ.get(name) for name in names]

    with env(HPCPAR_TEST_ONE="1", HPCPAR_TEST_TWO="2", HPCPAR_TEST_THREE=None):
        during = now()
        del os.environ["HPCPAR_TEST_TWO"]
    assert during == ["1", "2", None]
    assert now() == ["before", None, None]
    with pytest.raises(RuntimeError), env(HPCPAR_TEST_TWO="2"):
        raise RuntimeError
    assert now() == ["before", None, None]


def test_a_process_knows_a_rank_that_started_it_from_one_further_up() -> None:
    environ: dict[str, str] = {}
    mark_as_rank(environ)
    assert environ == {RANK_PID: str(os.getpid())}
    assert not parent_is_the_rank(environ)
    assert parent_is_the_rank({RANK_PID: str(os.getppid())})
    assert not parent_is_the_rank({})
