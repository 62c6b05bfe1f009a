"""Executor of a pipeline schedule: for every action of this rank's row receive, compute, send.

    agree_on_pass     one small all-gather: all ranks start the same pass, or fail together
    ScheduleExecutor  the loop over the row
    forward_only      the schedule of an evaluation

A stage that fails does not leave other ranks waiting. Its rank goes on through its row without computing: it
receives what is sent to it and sends placeholders. Ranks that receive placeholders do the same. At the end no
message is left over; the ranks agree on the failure and raise together.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from hpcpar.comm import Communicator
from hpcpar.errors import HpcparError, MismatchError, OperationError, PeerLeftError, StallError
from hpcpar.pipeline_parallel.mailbox import Mailbox
from hpcpar.pipeline_parallel.microbatches import as_arguments
from hpcpar.pipeline_parallel.stage import Stage
from hpcpar.pipeline_parallel.tensor_spec import spec_of
from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.pipeline_schedules.timetable import Timed

KINDS = ("step", "evaluate")

COMPUTE = "compute"
"""Category of actions in a trace."""

_DIGEST_NBYTES = 16
_UNKNOWN = -1


class StageError(HpcparError, RuntimeError):
    """Error of a stage's module or the loss; the message names the action, and the cause is chained."""


# --- before a pass --------------------------------------------------------------------------------


class AgreedPass(NamedTuple):
    """Pass that all ranks are about to run.

    key   equal for passes whose messages have the same shapes
    """

    microbatches: int
    key: bytes


def agree_on_pass(
    comm: Communicator,
    kind: str,
    microbatches: int | None,
    length: int | None,
    of_targets: int | None,
    description: str,
    error: Exception | None,
) -> AgreedPass:
    """Agree on the next pass. Collective.

    Only the first stage's rank has seen the inputs, and the last stage's rank the targets.

    microbatches   None: take the number that other ranks have
    length         of the batch before it was divided; None: no batch on this rank, or a list of microbatches
    of_targets     checksum of the targets on the first and on the last stage's rank; None: not compared
    description    everything that the shapes of this rank's messages depend on
    error          error in this rank's arguments
    cost           one all-gather of 56 bytes a rank
    errors         PeerFailedError on every rank if one has an error, MismatchError if ranks start different
                   passes
    """
    digest = hashlib.blake2b(description.encode(), digest_size=_DIGEST_NBYTES).digest()
    own = [
        error is not None,
        _UNKNOWN if length is None else length,
        _UNKNOWN if of_targets is None else of_targets,
        KINDS.index(kind),
        _UNKNOWN if microbatches is None else microbatches,
    ]
    message = np.concatenate([np.array(own, dtype=np.int64), np.frombuffer(digest, np.int64)])
    everyone = comm.unchecked("agreement").allgather(message).reshape(comm.size, -1)
    if everyone[:, 0].any():
        comm.agree(error, f"pipeline {kind}")
    counts = _known(everyone[:, 4])
    _require_equal(comm, "was asked for", {rank: KINDS[each] for rank, each in enumerate(everyone[:, 3])})
    _require_equal(comm, "was given microbatches:", counts)
    _require_equal(comm, "was given a batch of", _known(everyone[:, 1]))
    _require_equal(comm, "was given targets of checksum", _known(everyone[:, 2]))
    return AgreedPass(next(iter(counts.values())), everyone[:, 3:].tobytes())


def _known(numbers: Any) -> dict[int, int]:
    return {rank: int(number) for rank, number in enumerate(numbers) if number != _UNKNOWN}


def _require_equal(comm: Communicator, what: str, by_rank: Mapping[int, object]) -> None:
    if len(set(by_rank.values())) > 1:
        told = "; ".join(f"rank {rank} {what} {each}" for rank, each in by_rank.items())
        raise MismatchError(
            f"ranks of {comm.name!r} are not about to do the same in their pipeline: {told}. Every rank must "
            "call step and evaluate in the same order, with inputs and targets of as many microbatches, "
            "of one length where they are tensors, and of the same samples, chosen by mesh.dp.rank"
        )


MAX_UNDELIVERED = 2
"""Activations under way over a boundary in an evaluation, so that no rank runs far ahead of the others."""


def forward_only(schedule: Schedule, microbatches: int) -> Schedule:
    """Build the schedule of an evaluation, with stages on the ranks that `schedule` gives them.

        loop, 2 stages a rank          V, 2 stages a rank
        0F0 2F0 0F1 2F1 0F2 2F2        0F0 0F1 3F0 0F2 3F1 3F2
            1F0 3F0 1F1 3F1 1F2 3F2        1F0 2F0 1F1 2F1 1F2 2F2

    With v the most stages on a rank, a microbatch can enter every v actions: stage s runs microbatch k in
    slot s + vk. Every action depends on one of an earlier slot, and rows are sorted by slot, so there is no
    deadlock; nor is there one if a rank sends microbatch k only after k - 2 was received.
    """
    stages_of = [schedule.stages_of(rank) for rank in range(schedule.ranks)]
    most = max(map(len, stages_of))
    rows = []
    for stages in stages_of:
        actions = [Action(stage, "F", number) for stage in stages for number in range(microbatches)]
        rows.append(tuple(sorted(actions, key=lambda a: (a.stage + most * a.microbatch, a.stage))))
    return Schedule(tuple(rows), name=f"{schedule.name} forward")


# --- the pass -------------------------------------------------------------------------------------


class ScheduleExecutor:
    """One step or evaluation of this rank.

    inputs      first stage's inputs by microbatch, if it is on this rank
    finish      (output of the last stage, microbatch) -> loss; None: the outputs are the result
    results     by microbatch, on the rank with the last stage: losses, without their graphs, or outputs
    timed       times of the actions, without waiting for their inputs
    peak_alive  most microbatches that this rank's stages kept at once
    """

    def __init__(
        self,
        comm: Communicator,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        mailbox: Mailbox,
        inputs: Sequence[Any],
        finish: Callable[[Any, int], Tensor] | None,
    ) -> None:
        self._comm = comm
        self._schedule = schedule
        self._stages = stages
        self._mailbox = mailbox
        self._inputs = inputs
        self._finish = finish
        self._last = schedule.stages - 1
        self._error: Exception | None = None
        self._is_cut_off = False
        self._run_action = {"F": self._forward, "B": self._backward, "W": self._weights}
        self.results: dict[int, Any] = {}
        self.timed: list[Timed] = []
        self.peak_alive = 0

    def run(self, around: Callable[[int], AbstractContextManager[Any]] = lambda _: nullcontext()) -> None:
        """Run the row, and agree with the other ranks that it is done. Collective.

        around   position in the row -> context entered while its action computes
        errors   PeerFailedError on every rank if a stage has failed on any; on one rank alone, StageError
        """
        for position, action in enumerate(self._schedule.rows[self._comm.rank]):
            self._mailbox.prepare(position)
            self._run_action[action.kind](action, around(position))
            self._mailbox.advance()
        try:
            self._mailbox.finish()
        except OperationError as error:
            self._error = self._error or error
        failed = np.array([self._error is not None], dtype=np.int64)
        if self._comm.unchecked("agreement").allreduce(failed, "max")[0]:
            for stage in self._stages.values():
                stage.forget()
            self._comm.agree(self._error, "pipeline")

    def _forward(self, action: Action, around: AbstractContextManager[Any]) -> None:
        stage, _, microbatch = action
        if stage == 0:
            spec, inputs = None, as_arguments(self._inputs[microbatch])
        else:
            spec, inputs = self._mailbox.activation(stage, microbatch)
            self._is_cut_off |= spec is None
        finish = self._finish if stage == self._last else None

        def compute() -> Any:
            output = self._stages[stage].forward(
                microbatch,
                inputs,
                spec,
                split=self._schedule.is_split(stage, microbatch),
                loss=None if finish is None else lambda output: finish(output, microbatch),
            )
            if stage == self._last:
                return output if finish is None else output.detach()
            tensors = self._stages[stage].apart(output)
            self._mailbox.require_fit(stage, microbatch, spec_of(tensors))
            return tensors

        output = self._computed(action, compute, around)
        if stage == self._last:
            self.results[microbatch] = output
        elif output is None:
            self._mailbox.send_nothing(action)
        else:
            self._mailbox.send_activation(stage, microbatch, spec_of(output), output)
        self.peak_alive = max(self.peak_alive, sum(each.alive for each in self._stages.values()))

    def _backward(self, action: Action, around: AbstractContextManager[Any]) -> None:
        stage, _, microbatch = action
        gradients = () if stage == self._last else self._mailbox.gradients(stage, microbatch)
        found = self._computed(action, lambda: self._stages[stage].backward(microbatch, gradients), around)
        if stage == 0:
            return
        if found is None:
            self._mailbox.send_nothing(action)
        else:
            self._mailbox.send_gradients(stage, microbatch, found)

    def _weights(self, action: Action, around: AbstractContextManager[Any]) -> None:
        self._computed(action, lambda: self._stages[action.stage].weights(action.microbatch), around)

    def _computed(
        self, action: Action, compute: Callable[[], Any], around: AbstractContextManager[Any]
    ) -> Any:
        """Compute and time an action; None once a stage has failed, here or before this one."""
        if self._error is not None or self._is_cut_off:
            return None
        self._mailbox.advance()
        start_s = time.perf_counter()
        try:
            with around:
                output = compute()
        except (StallError, PeerLeftError):
            raise  # other ranks will not reach the end of their rows, either
        except Exception as error:
            self._error = StageError(f"{action}: {type(error).__name__}: {error}")
            self._error.__cause__ = error
            return None
        stop_s = time.perf_counter()
        self.timed.append(Timed(action, start_s, stop_s))
        if self._comm.trace is not None:
            replica = self._comm.world_ranks[0]  # its first rank names a pipeline
            self._comm.trace.add(str(action), COMPUTE, start_s, stop_s, pipeline=replica)
        return output
