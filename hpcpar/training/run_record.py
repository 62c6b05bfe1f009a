"""run.json: what was trained where, by which software, and how it ended.

    {"attempts": [{"status": "preempted", "started": "2026-01-31T12:00:00+00:00", "steps": 300, …},
                  {"status": "ended", "first_step": 300, "steps": 600, …}]}

Each start adds an attempt: a resumed run, and each stage of a run in stages. Rank 0 writes it when the first
step is about to begin, and again at the end.

    status       running, ended, preempted or failed; the next attempt notes that one was killed
    error        kind and first line of what ended it
    first_step   steps that earlier attempts had done; steps: done in all, by the last line of progress
    command      as the interpreter got it; directory, git: where it was started, and its checkout
    hosts        with their numbers of ranks
    config       with the model's sizes, the degrees of the mesh and the threads that were left open
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpcpar.comm.job_facts import mpi_vendor, versions
from hpcpar.durable import write_whole
from hpcpar.errors import CheckpointError
from hpcpar.launch.rank_map import RankMap

if TYPE_CHECKING:
    from hpcpar.training.trainer import Run

logger = logging.getLogger(__name__)

NAME = "run.json"

GIT_LIMIT_S = 10.0
"""Longest time that git may take; on a parallel file system a large checkout takes minutes."""


def now(*, ago_s: float = 0.0) -> str:
    """Return the time in UTC, or that of so many seconds before, by ISO 8601 in milliseconds."""
    return (datetime.now(timezone.utc) - timedelta(seconds=ago_s)).isoformat(timespec="milliseconds")


@contextmanager
def recorded(run: Run, ranks: RankMap | None) -> Iterator[dict[str, Any]]:
    """Add an attempt to run.json, and complete it when the block ends; the block sets status and steps.

    ranks   on rank 0; None elsewhere, where nothing is written
    """
    attempt: dict[str, Any] = {}
    if ranks is None:
        yield attempt
        return
    path = run.directory.path / NAME
    attempts = attempts_of(path)
    for each in attempts:
        if each["status"] == "running":
            each |= {"status": "failed", "error": "it did not come to an end: killed, or its node was lost"}
    attempt |= _begun(run, ranks)
    _write(path, [*attempts, attempt])
    try:
        yield attempt
    except BaseException as error:
        first, *_ = str(error).splitlines() or [""]
        told = f"{type(error).__name__}: {first}".removesuffix(": ")
        attempt |= {"status": "failed", "error": told, "ended": now()}
        with suppress(OSError):  # a full disk, which is the error to be seen
            if _is_newest(path, attempt):
                _write(path, [*attempts, attempt])
        raise
    attempt["ended"] = now()
    _write(path, [*attempts, attempt])


def require_newest(directory: Path, attempt: Mapping[str, Any]) -> None:
    """CheckpointError if another run began in the directory after this attempt; {}: on ranks but 0."""
    if "started" in attempt and not _is_newest(directory / NAME, attempt):
        raise CheckpointError(
            f"{directory} is another run's now, which began there while this one ran; give each run an "
            "output.directory of its own"
        )


def _is_newest(path: Path, attempt: Mapping[str, Any]) -> bool:
    return [each.get("started") for each in attempts_of(path)[-1:]] == [attempt["started"]]


def attempts_of(path: Path) -> list[dict[str, Any]]:
    """Return the attempts of a run.json, oldest first; none where the file is not there, or is another."""
    if not path.exists():
        return []
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["attempts"]
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("%s is no record of a run: %r", path, error)
        return []
    return found


def git_state(directory: Path) -> dict[str, Any] | None:
    """Return commit and cleanness of the checkout that a directory is in; None: there is none, or no git.

    clean   no file that git knows is changed; None where git took too long to say
    """

    def ask(*words: str) -> str:
        return subprocess.run(
            ["git", *words],
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=GIT_LIMIT_S,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        ).stdout.strip()

    try:
        commit = ask("rev-parse", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None
    try:
        return {"commit": commit, "clean": not ask("status", "--porcelain", "--untracked-files=no")}
    except (OSError, subprocess.SubprocessError):
        return {"commit": commit, "clean": None}


def _begun(run: Run, ranks: RankMap) -> dict[str, Any]:
    return {
        "status": "running",
        "error": None,
        "started": now(),
        "ended": None,
        "first_step": run.first_step,
        "steps": run.first_step,
        "command": shlex.join(sys.orig_argv),
        "directory": str(Path.cwd()),
        "git": git_state(Path.cwd()),
        "launcher": ranks.launcher,
        "hosts": [{"host": node.host, "ranks": len(node.ranks)} for node in ranks.nodes],
        "versions": {**versions(), "mpi": mpi_vendor()},
        "parameters": run.model.config.parameters(),
        "config": resolved_config(run),
    }


def resolved_config(run: Run) -> dict[str, Any]:
    """Return the configuration as plain values, with what the run has settled of it."""
    config = run.config
    return config.model_dump(mode="json") | {
        "model": config.model.model_dump(mode="json") | asdict(run.model.config),
        "mesh": config.mesh.model_dump() | run.mesh.layout.degrees,
        "train": config.train.model_dump(mode="json") | {"threads": torch.get_num_threads()},
    }


def _write(path: Path, attempts: Sequence[dict[str, Any]]) -> None:
    write_whole(path, json.dumps({"attempts": list(attempts)}, indent=1) + "\n")
