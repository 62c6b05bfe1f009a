"""Training that goes on after a failed collective: `hvd.elastic.run`, `TorchState`, `ElasticSampler`.

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            ...
            state.commit()

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0))

What MPI allows and what it does not: the ranks of a job are those that it was started with. None can be
added, and when a process is lost MPI ends the job. So what `run` saves a training from is a collective
that failed on all ranks while all their processes live on (ranks that disagreed, a shutdown under way);
all go back to the last commit and start anew. Commits are in memory: against lost nodes write checkpoints,
and let the job's own restart read them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from hpcpar.errors import HpcparError, LaunchError
from hpcpar.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from hpcpar.horovod.torch import mpi_ops
from hpcpar.horovod.torch.elastic.sampler import ElasticSampler
from hpcpar.horovod.torch.elastic.state import HostUpdateResult, ObjectState, State, TorchState

__all__ = ["ElasticSampler", "HostUpdateResult", "ObjectState", "State", "TorchState", "run", "run_fn"]

T = TypeVar("T")
log = logging.getLogger("hpcpar")

RESTARTS_WITHOUT_COMMIT = 3
"""Failures in a row without a commit after which `run` gives up."""


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Decorate `func(state, *args, **kwargs)` so that it goes on after failures; collective.

    Before the first call, and after each failure, all ranks get rank 0's state (`state.sync()`). Then

        HorovodInternalError     the state goes back to the last commit, Horovod shuts down and starts
                                 again, reset callbacks are called, and `func` is called again
        HostsUpdatedInterrupt    the same without going back; with skip_sync also without `sync`

    The exception has to come on all ranks, as those of collectives do; every other exception passes.
    What was given to `hvd.init`, and process sets, are to be set up again in a reset callback.

    errors   HorovodInternalError itself, on all ranks, after 3 failures in a row without a commit on any
             LaunchError when Horovod cannot start again on the same ranks: MPI neither adds nor replaces
    """

    return run_fn(func, _reset)


def run_fn(func: Callable[..., T], reset: Callable[[], Any]) -> Callable[..., T]:
    """Do what `run` does with a function of one's own that shuts Horovod down and starts it again."""

    @functools.wraps(func)
    def call(state: State, *args: Any, **kwargs: Any) -> T:
        idle, skip_sync, commits = 0, False, state.commit_count
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                failure: HpcparError = error
                skip_sync = False
                state.restore()
            except HostsUpdatedInterrupt as interrupt:
                failure = interrupt
                skip_sync = interrupt.skip_sync
            _start_again(failure, reset)
            idle = 0 if _any_rank(state.commit_count > commits) else idle + 1
            commits = state.commit_count
            if idle == RESTARTS_WITHOUT_COMMIT:
                raise failure
            log.warning("elastic: starting again after: %s", failure)
            state.on_reset()

    return call


def _reset() -> None:
    mpi_ops.shutdown()
    mpi_ops.init()


def _start_again(failure: HpcparError, reset: Callable[[], Any]) -> None:
    """Shut Horovod down and start it on the same ranks. Collective."""
    size = mpi_ops.size() if mpi_ops.is_initialized() else None
    try:
        reset()
    except HpcparError as error:
        raise LaunchError(
            f"elastic training cannot start again on the {size} ranks that it had: {error}. It was stopped "
            f"by: {failure}. Under MPI a job keeps its ranks and ends with the first one that is lost; start "
            f"a new job, with as many ranks as there are, from the last checkpoint"
        ) from failure
    if size is not None and mpi_ops.size() != size:
        raise LaunchError(
            f"elastic training had {size} ranks and starts again on {mpi_ops.size()}: under MPI their number "
            f"is fixed, but hvd.init() was given some of them; wrap all of it, or start a new job"
        )


def _any_rank(flag: bool) -> bool:
    own = torch.tensor([int(flag)], device="cpu")
    return bool(mpi_ops.allreduce(own, name="elastic.progress", op=mpi_ops.Max))
