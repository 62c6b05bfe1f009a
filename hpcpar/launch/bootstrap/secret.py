"""The secret of a user's processes, and the key of one Slurm step, or run of torchrun, that is made of it.

A port can be reached by every user of the machine, so the ranks of a step prove to each other that
they belong to one user and to one step. The secret is a word in HPCPAR_STEP_SECRET, which srun hands to
all its tasks, or a file in the user's home that nobody else can read, made when it is first needed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpcpar.errors import LaunchError
from hpcpar.launch.settings import own_directory

VARIABLE = "HPCPAR_STEP_SECRET"
SHORTEST = 16
FILE_LIMIT_S = 30.0


def is_torchruns(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun started this process; it may itself be a task of a Slurm step."""
    return "TORCHELASTIC_RUN_ID" in environ


def step_name(environ: Mapping[str, str]) -> str:
    if is_torchruns(environ):
        # Runs have one id unless the user names them: the port of their store tells them apart.
        master = f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"
        return f"{environ['TORCHELASTIC_RUN_ID']} of torchrun at {master}"
    return f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"


def step_key(secret: bytes, environ: Mapping[str, str]) -> bytes:
    """Derive this step's key: another for every cluster, job, step, and restart of the job."""
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", environ.get("SLURM_RESTART_COUNT", "0"))
    step = "\0".join((environ.get("SLURM_CLUSTER_NAME", ""), step_name(environ), restart))
    return hmac.new(secret, step.encode(), hashlib.sha256).digest()


def user_secret(environ: Mapping[str, str], *, may_create: bool, limit_s: float = FILE_LIMIT_S) -> bytes:
    """Read the user's secret from the environment or the file.

    may_create   make the file where there is none: for rank 0 alone; others wait for it
    limit_s      how long a file that rank 0 has made on another node may take to be seen here
    errors       LaunchError where it is too short, cannot be had, or is not the user's alone
    """
    word = environ.get(VARIABLE)
    if word is not None:
        if len(word) < SHORTEST:
            raise LaunchError(
                f"{VARIABLE} has {len(word)} characters: a secret has at least {SHORTEST}; set it in the job "
                f'script, before srun, with `export {VARIABLE}="$(openssl rand -hex 32)"`'
            )
        return word.encode()
    path = secret_file(environ)
    if may_create:
        _create(path)
    deadline = time.monotonic() + limit_s
    while (found := _read(path)) is None:
        if time.monotonic() >= deadline:
            raise LaunchError(
                f"{path} is not there, although rank 0 makes it: is your home directory another one on each "
                f"node? {_way_out()}"
            )
        with suppress(OSError):
            os.listdir(path.parent)  # network file systems remember that a name was not there
        time.sleep(0.05)
    return found


def secret_file(environ: Mapping[str, str]) -> Path:
    """Return the secret's file, which may not be there yet; LaunchError for a user without a home."""
    directory = own_directory(environ)
    if directory is None:
        raise LaunchError(f"user {os.getuid()} has no home directory to keep a secret in. {_way_out()}")
    return directory / "step-secret"


def _create(path: Path) -> None:
    """Make the file unless it is there: whole or not at all, and the first one stays."""
    if os.path.lexists(path):
        return
    draft = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{secrets.token_hex(32)}\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(draft, path)
    except OSError as error:
        raise LaunchError(f"{path} cannot be made ({error.strerror}). {_way_out()}") from error
    finally:
        with suppress(OSError):
            os.unlink(draft)


def _read(path: Path) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LaunchError(f"{path} cannot be read ({error.strerror}). {_way_out()}") from error
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise LaunchError(f"{path} is no file: remove it, and it is made anew")
        anew = f"remove it, and it is made anew. {_way_out()}"
        if facts.st_uid != os.geteuid():
            raise LaunchError(
                f"{path} belongs to user {facts.st_uid}, this process to user {os.geteuid()}: {anew}"
            )
        if facts.st_mode & 0o077:
            mode = f"mode {stat.S_IMODE(facts.st_mode):04o}"
            raise LaunchError(
                f"{path} can be read or written by other users ({mode}), so it is no secret: {anew}"
            )
        secret = file.read().strip()
    if len(secret) < SHORTEST:
        raise LaunchError(f"{path} holds {len(secret)} characters, which is no secret: remove it")
    return secret


def _way_out() -> str:
    return (
        f"The ranks of a step need a secret in common to find each other: put `export "
        f'{VARIABLE}="$(openssl rand -hex 32)"` into the job script before srun, or start with `hpcpar run`'
    )
