"""The secret that a user's processes share, and the keys made of it."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from hpcpar.errors import LaunchError
from hpcpar.launch.bootstrap.secret import secret_file, step_key, step_name, user_secret

STEP = {"SLURM_CLUSTER_NAME": "big", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}


def home(path: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(path)}


def test_every_cluster_job_step_and_restart_has_a_key_of_its_own() -> None:
    others = [
        {"SLURM_CLUSTER_NAME": "small"},
        {"SLURM_JOB_ID": "18"},
        {"SLURM_STEP_ID": "1"},
        {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "70"},
        {"SLURM_RESTART_COUNT": "1"},
    ]
    keys = {step_key(b"secret", STEP | other) for other in [{}, *others]}
    assert len(keys) == 1 + len(others)
    assert step_key(b"secret", STEP) == step_key(b"secret", STEP | {"SLURM_RESTART_COUNT": "0"})
    assert step_key(b"another", STEP) not in keys
    assert step_name(STEP) == "17.0"


def test_the_environment_comes_before_the_file(tmp_path: Path) -> None:
    environ = home(tmp_path) | {"HPCPAR_STEP_SECRET": "a" * 32}
    assert user_secret(environ, may_create=True) == b"a" * 32
    assert not secret_file(environ).exists()


def test_a_user_without_a_home_is_told_what_to_set_and_gets_no_directory_called_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match=r"has no home directory to keep a secret in.*HPCPAR_STEP_SECRET"):
        user_secret({}, may_create=True)
    assert not list(tmp_path.iterdir())


def test_a_short_word_is_no_secret() -> None:
    with pytest.raises(LaunchError, match="has 4 characters: a secret has at least 16"):
        user_secret({"HPCPAR_STEP_SECRET": "1234"}, may_create=True)


def test_rank_0_makes_a_file_that_nobody_else_can_read_and_the_others_read_it(tmp_path: Path) -> None:
    made = user_secret(home(tmp_path), may_create=True)
    assert len(made) == 64
    path = secret_file(home(tmp_path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["step-secret"]
    assert user_secret(home(tmp_path), may_create=False) == made
    assert user_secret(home(tmp_path), may_create=True) == made


def test_many_jobs_that_start_at_once_agree_on_one_secret(tmp_path: Path) -> None:
    found: list[bytes] = []
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait(10)
        found.append(user_secret(home(tmp_path), may_create=True))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 8
    assert len(set(found)) == 1


def test_another_rank_waits_until_rank_0_has_made_the_file(tmp_path: Path) -> None:
    later = threading.Timer(0.3, lambda: user_secret(home(tmp_path), may_create=True))
    later.start()
    assert len(user_secret(home(tmp_path), may_create=False, limit_s=10.0)) == 64
    later.join(10)


def test_a_file_that_does_not_appear_is_named_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"step-secret is not there.*export HPCPAR_STEP_SECRET="):
        user_secret(home(tmp_path), may_create=False, limit_s=0.1)


@pytest.mark.parametrize("mode", [0o640, 0o602])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    user_secret(home(tmp_path), may_create=True)
    secret_file(home(tmp_path)).chmod(mode)
    with pytest.raises(LaunchError, match=f"can be read or written by other users .mode {mode:04o}"):
        user_secret(home(tmp_path), may_create=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    user_secret(home(tmp_path), may_create=True)
    os.chown(secret_file(home(tmp_path)), 65534, -1)
    with pytest.raises(LaunchError, match="belongs to user 65534, this process to user 0"):
        user_secret(home(tmp_path), may_create=True)


def test_an_empty_file_is_no_secret(tmp_path: Path) -> None:
    path = secret_file(home(tmp_path))
    path.parent.mkdir()
    path.touch(0o600)
    with pytest.raises(LaunchError, match="holds 0 characters"):
        user_secret(home(tmp_path), may_create=True)


def test_a_home_that_cannot_be_written_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "hpcpar").touch()  # a file where the directory should be: nobody can write there, nor root
    with pytest.raises(LaunchError, match=r"step-secret cannot be made .*export HPCPAR_STEP_SECRET="):
        user_secret(home(tmp_path), may_create=True)


def test_without_an_own_directory_for_settings_the_home_directory_has_it() -> None:
    assert secret_file({"HOME": "/home/ada"}) == Path("/home/ada/.config/hpcpar/step-secret")
