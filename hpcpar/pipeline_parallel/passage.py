"""One pass of one rank over its row: for every action take what it needs, compute, send what it made.

A stage that fails does not leave the others waiting. Its rank goes on through its row without computing,
takes what is sent to it and sends what was promised, and so do ranks that hear of it; when all have come to
the end, with no message left over, they agree on what went wrong and raise together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from torch import Tensor

from hpcpar.comm import Communicator
from hpcpar.errors import HpcparError, PeerLeftError, StallError
from hpcpar.pipeline_parallel.forms import as_tensors, form_of
from hpcpar.pipeline_parallel.mailbox import Mailbox
from hpcpar.pipeline_parallel.microbatches import as_arguments
from hpcpar.pipeline_parallel.stage import Stage
from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.schedule import Schedule
from hpcpar.pipeline_schedules.timetable import Timed

COMPUTE = "compute"
"""Category of actions in a trace."""


class StageError(HpcparError, RuntimeError):
    """What a stage's module or the loss raised; the message says in which action, and that is its cause."""


class Passage:
    """One step or evaluation.

    inputs      of the first stage by microbatch, where it is on this rank
    finish      (output of the last stage, microbatch) -> loss; None: outputs are the result as they are
    results     by microbatch, on the rank with the last stage: losses, without their graphs, or outputs
    timed       when the actions ran; waiting for what they need does not count
    peak_alive  the most microbatches that this rank's stages kept together
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
        self._action_of = {"F": self._forward, "B": self._backward, "W": self._weights}
        self.results: dict[int, Any] = {}
        self.timed: list[Timed] = []
        self.peak_alive = 0

    def run(self, around: Callable[[int], AbstractContextManager[Any]] = lambda _: nullcontext()) -> None:
        """Do all of the row, and agree with the other ranks that it is done. Collective.

        around   of a position in the row: what is entered while its action computes
        errors   PeerFailedError on every rank when a stage has failed on any; of one rank, StageError
        """
        row = self._schedule.rows[self._comm.rank]
        for position, action in enumerate(row):
            self._mailbox.prepare(position)
            self._action_of[action.kind](action, around(position))
            self._mailbox.advance()
        self._mailbox.finish()
        failed = np.array([self._error is not None], dtype=np.int64)
        if self._comm.unchecked("agreement").allreduce(failed, "max")[0]:
            for stage in self._stages.values():
                stage.forget()
            self._comm.agree(self._error, "pipeline")

    def _forward(self, action: Action, around: AbstractContextManager[Any]) -> None:
        stage, _, microbatch = action
        if stage == 0:
            form, inputs = None, as_arguments(self._inputs[microbatch])
        else:
            form, inputs = self._mailbox.activation(stage, microbatch)
            self._is_cut_off |= form is None

        def compute() -> Any:
            own, finish = self._stages[stage], self._finish
            split = self._schedule.is_split(stage, microbatch)
            if stage < self._last or finish is None:
                output = own.forward(microbatch, inputs, form, split=split)
            else:
                loss = own.forward(
                    microbatch, inputs, form, split=split, loss=lambda output: finish(output, microbatch)
                )
                return loss.detach()
            if stage == self._last:
                return output
            tensors = as_tensors(output, f"stage {stage}")
            self._mailbox.require_fit(stage, microbatch, form_of(tensors))
            return tensors

        output = self._computed(action, compute, around)
        if stage == self._last:
            self.results[microbatch] = output
        elif output is None:
            self._mailbox.send_nothing(action)
        else:
            self._mailbox.send_activation(stage, microbatch, form_of(output), output)
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
        """What an action makes, and when; None once a stage has failed here or before this one."""
        if self._error is not None or self._is_cut_off:
            return None
        self._mailbox.advance()
        start_s = time.perf_counter()
        try:
            with around:
                made = compute()
        except (StallError, PeerLeftError):
            raise  # other ranks will not come to the end of their rows, either
        except Exception as error:
            self._error = StageError(f"{action}: {type(error).__name__}: {error}")
            self._error.__cause__ = error
            return None
        stop_s = time.perf_counter()
        self.timed.append(Timed(action, start_s, stop_s))
        if self._comm.trace is not None:
            self._comm.trace.add(str(action), COMPUTE, start_s, stop_s)
        return made
