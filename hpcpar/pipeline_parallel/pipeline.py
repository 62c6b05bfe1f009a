"""`Pipeline`: the ranks of an axis carry a model's stages, and work on several microbatches at once.

    pipeline = Pipeline({0: first, 3: last}, schedule, mesh.pp, loss=loss)     # the stages of this rank
    losses = pipeline.step(inputs, targets)                                    # gradients are added to .grad
    optimizer.step()

    losses       of the microbatches, where the last stage is; None on other ranks
    gradients    of the sum of the microbatches' losses: have `loss` divide by their number for the mean. Of
                 unequal ones, such as some with ignored tokens, have it return sums times the factor that
                 `DistributedOptimizer.loss_factor` gives where the last stage is

With data parallelism: give the DistributedOptimizer backward_passes_per_step=m, and every parameter's average
leaves with its m-th gradient, in the cool-down. Where it was made for one backward, pass its `no_sync` here.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hpcpar.autograd.fused_layers import adding_in_place
from hpcpar.autograd.scripted import refuse_scripted
from hpcpar.autograd.torch_clipping import note_split_over
from hpcpar.comm import Communicator
from hpcpar.comm.agree import require_same
from hpcpar.errors import OperationError, ScheduleError
from hpcpar.pipeline_parallel.evaluation import MOST_UNDELIVERED, forward_only
from hpcpar.pipeline_parallel.forms import Form
from hpcpar.pipeline_parallel.mailbox import Mailbox
from hpcpar.pipeline_parallel.microbatches import batch_length, microbatches_of, signature
from hpcpar.pipeline_parallel.opening import open_pass
from hpcpar.pipeline_parallel.passage import Passage
from hpcpar.pipeline_parallel.stage import Stage, poking_between_layers
from hpcpar.pipeline_schedules.prove import prove
from hpcpar.pipeline_schedules.schedule import Schedule
from hpcpar.pipeline_schedules.timetable import Timed, Timetable

Loss = Callable[[Any, Any], Tensor]

NoSync = Callable[[], AbstractContextManager[Any]]

MOST_SHAPES = 64
"""Passes of different shapes whose forms are remembered; those of the longest unused one go."""


class Pipeline:
    """This rank's stages, and how they work with those of the others. Making one is collective.

    stages     this rank's, by number
    schedule   of all ranks, the same on each
    loss       (output of the last stage, target of the microbatch) -> a tensor of one number; None: the last
               stage's output is that
    no_sync    entered around actions that make gradients of which more will come: see `late_from`
    effect     parameters note that those of other stages are on other ranks of `comm`: norms are over all
    errors     MismatchError on every rank where schedules differ, ScheduleError where the schedule is wrong,
               PeerFailedError where a rank has other stages than the schedule gives it

    Shapes. What goes from stage to stage may have any shapes and types that follow from those of the
    pipeline's inputs, the stages' modes and types, torch.autocast, and what is frozen; they may differ from
    microbatch to microbatch and from step to step. Where a pass with the same ones has been before, each rank
    knows what it will receive and posts receives early. Else every activation is announced by a small
    message, and the forms are remembered. A stage that then returns something else has failed, and the next
    such pass is announced again.

    Failures. What one rank's stage raises becomes a PeerFailedError on every rank at the end of the pass, and
    the next pass can be had: gradients are then to be zeroed first. Where a rank is lost or stuck, others get
    a PeerLeftError or StallError, and the communicator is of no more use.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        comm: Communicator,
        *,
        loss: Loss | None = None,
        no_sync: NoSync = nullcontext,
    ) -> None:
        rows = " | ".join(" ".join(map(str, row)) for row in schedule.rows)
        require_same(comm, f"a pipeline by {schedule.name or 'a schedule'}: {rows}")
        prove(schedule)
        if schedule.ranks != comm.size:
            raise ScheduleError(
                f"schedule {schedule.name!r} has {schedule.ranks} ranks, but communicator {comm.name!r} "
                f"{comm.size}: make it for {comm.size}"
            )
        with comm.together("making a pipeline"):
            if tuple(sorted(stages)) != schedule.stages_of(comm.rank):
                raise ScheduleError(
                    f"rank {comm.rank} was given stages {_numbers(sorted(stages))}, but the schedule's row "
                    f"for it has stages {_numbers(schedule.stages_of(comm.rank))}: give {{number: module}} "
                    "for each of these"
                )
            for number, stage in stages.items():
                refuse_scripted(stage, f"give stage {number} without it")
        self.schedule = schedule
        self.comm = comm
        self.stages = {number: Stage(number, stages[number]) for number in sorted(stages)}
        for stage in stages.values():
            for parameter in stage.parameters():
                note_split_over(parameter, comm)
        self.peak_alive = 0
        self._loss = loss
        self._no_sync = no_sync
        self._late_from = late_from(schedule, comm.rank)
        self._forms: OrderedDict[bytes, dict[tuple[int, int], Form]] = OrderedDict()
        self._timed: list[Timed] = []

    @property
    def first_rank(self) -> int:
        """Where the first stage is, which gets the inputs."""
        return self.schedule.rank_of_stage[0]

    @property
    def last_rank(self) -> int:
        """Where the last stage is, which gets the targets and has the losses."""
        return self.schedule.rank_of_stage[self.schedule.stages - 1]

    def step(self, inputs: Any = None, targets: Any = None) -> Tensor | None:
        """Forward and backward of all microbatches, by the schedule. Collective.

        inputs    used where the first stage is: a batch (a tensor, or a tuple of them, the first stage's
                  arguments), which is divided along dim 0, or a list of microbatches
        targets   used where the last stage is, and divided alike; not where there is no `loss`
        returns   losses [m] where the last stage is, else None
        errors    PeerFailedError on every rank where a stage fails on any; MismatchError where another rank
                  evaluates, or where inputs and targets are batches of different lengths
        """
        with torch.enable_grad():
            results = self._pass("step", inputs, targets, with_loss=True)
        return None if results is None else torch.stack([loss.reshape(()) for loss in results])

    def evaluate(self, inputs: Any = None, targets: Any = None) -> Tensor | list[Any] | None:
        """Forward alone of any number of microbatches. Collective.

        inputs, targets   as for `step`, but lists may have any length, the same for both
        returns           where the last stage is: losses [m], without targets the outputs in a list; or None
        """
        with_loss = targets is not None
        with torch.no_grad():
            results = self._pass("evaluate", inputs, targets, with_loss=with_loss)
        if results is None or not with_loss:
            return results
        return torch.stack([loss.reshape(()) for loss in results])

    def timetable(self) -> Timetable:
        """When the actions of the last pass ran, on all ranks, from 0 s on. Collective.

        Ranks of one node share a clock. Nodes are set to one time by a barrier, so they are right to within
        the time that it takes. An action starts when all that it needs has arrived.
        """
        self.comm.barrier()
        now_s = time.perf_counter()
        everyone: list[tuple[float, list[Timed]]] = self.comm.allgather_object((now_s, self._timed))
        # The first rank of each node says when the barrier was, by the node's clock.
        origins_s: dict[int, float] = {}
        for node, (at_s, _) in zip(self.comm.nodes, everyone, strict=True):
            origins_s.setdefault(node, at_s)
        rows = [
            _later(timed, -origins_s[node])
            for node, (_, timed) in zip(self.comm.nodes, everyone, strict=True)
        ]
        first_s = min((timed.start_s for row in rows for timed in row), default=0.0)
        return Timetable(tuple(_later(row, -first_s) for row in rows))

    def _pass(self, kind: str, inputs: Any, targets: Any, *, with_loss: bool) -> list[Any] | None:
        has_first, has_last = 0 in self.stages, self.schedule.stages - 1 in self.stages
        error: Exception | None = None
        given: list[list[Any]] = []
        lengths: list[int] = []
        try:
            if has_first:
                given.append(self._microbatches(kind, inputs, "inputs"))
                lengths += _lengths(inputs)
            if has_last and with_loss and self._loss is not None:
                given.append(self._microbatches(kind, targets, "targets"))
                lengths += _lengths(targets)
            if len({len(each) for each in given}) > 1:
                raise OperationError(
                    f"inputs of {len(given[0])} microbatches, but targets of {len(given[1])}"
                )
            if len(set(lengths)) > 1:
                raise OperationError(
                    f"inputs are a batch of {lengths[0]}, but targets one of {lengths[1]}: give as "
                    "many of both, or lists of microbatches"
                )
        except Exception as caught:  # whatever it is, the other ranks must hear of it
            error = caught
        description = self._description(given[0] if has_first and given else [])
        opened = open_pass(
            self.comm,
            kind,
            len(given[0]) if given else None,
            lengths[0] if lengths else None,
            description,
            error,
        )

        schedule = self.schedule if kind == "step" else forward_only(self.schedule, opened.microbatches)
        mailbox = Mailbox(
            self.comm,
            schedule,
            self._forms.pop(opened.key, None),
            {number: stage.device for number, stage in self.stages.items()},
            most_undelivered=None if kind == "step" else MOST_UNDELIVERED,
        )
        passage = Passage(
            self.comm,
            schedule,
            self.stages,
            mailbox,
            given[0] if has_first else [],
            self._finish(given[-1] if given else []) if with_loss else None,
        )
        modules = [stage.module for stage in self.stages.values()]
        with poking_between_layers(modules, self.comm.poke), adding_in_place(modules):
            passage.run(self._around if kind == "step" else lambda _: nullcontext())
        self._remember(opened.key, mailbox)
        self._timed, self.peak_alive = passage.timed, passage.peak_alive
        return [passage.results[number] for number in range(opened.microbatches)] if has_last else None

    def _microbatches(self, kind: str, batch: Any, what: str) -> list[Any]:
        is_free = kind == "evaluate" and isinstance(batch, list) and batch
        return microbatches_of(batch, len(batch) if is_free else self.schedule.microbatches, what)

    def _finish(self, targets: Sequence[Any]) -> Callable[[Any, int], Tensor]:
        loss = self._loss
        if loss is None:
            return lambda output, _: output
        return lambda output, microbatch: loss(output, targets[microbatch])

    def _description(self, inputs: Sequence[Any]) -> str:
        """Of all on this rank that shapes, and what requires a gradient, follow from."""
        modes = [
            (
                stage.module.training,
                stage.autocast,
                [(parameter.requires_grad, parameter.dtype) for parameter in stage.module.parameters()],
            )
            for stage in self.stages.values()
        ]
        return f"{signature(inputs)} {modes}"

    def _around(self, position: int) -> AbstractContextManager[Any]:
        makes_gradients = self.schedule.rows[self.comm.rank][position].kind != "F"
        return self._no_sync() if makes_gradients and position < self._late_from else nullcontext()

    def _remember(self, key: bytes, mailbox: Mailbox) -> None:
        """All ranks have come to the end, so that all remember the same passes; and none that failed."""
        self._forms[key] = {place: form for place, form in mailbox.forms.items() if form is not None}
        if len(self._forms) > MOST_SHAPES:
            self._forms.popitem(last=False)


def late_from(schedule: Schedule, rank: int) -> int:
    """The place in a rank's row from which on no parameter gets more than one gradient: the last one.

        … 0B1 0W1 0B2 0W2          with a stage on the rank, its last backward
        … 1B2 0B1 1B3 0B2 0B3      with several, from where none of them is due twice
                          ▲
    Before it, actions are inside `no_sync`. In a split backward B gives gradients of parameters that are not
    deferred, and W of the others.
    """
    row = schedule.rows[rank]
    given: set[tuple[int, str]] = set()
    for position in reversed(range(len(row))):
        stage, kind, microbatch = row[position]
        if kind == "F":
            continue
        is_whole = kind == "B" and not schedule.is_split(stage, microbatch)
        gives = {(stage, "B"), (stage, "W")} if is_whole else {(stage, kind)}
        if gives & given:
            return position + 1
        given |= gives
    return 0


def _later(row: Sequence[Timed], seconds: float) -> tuple[Timed, ...]:
    return tuple(Timed(action, start_s + seconds, end_s + seconds) for action, start_s, end_s in row)


def _lengths(batch: Any) -> tuple[int, ...]:
    length = batch_length(batch)
    return () if length is None else (length,)


def _numbers(stages: Sequence[int]) -> str:
    return ", ".join(map(repr, stages)) or "none"
