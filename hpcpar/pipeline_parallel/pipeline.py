"""`Pipeline`: the stages of a model on the ranks of an axis, and the microbatches that they work on.

    pipeline = Pipeline({0: first, 3: last}, schedule, mesh.pp, loss=loss)     # the stages of this rank
    losses = pipeline.step(inputs, targets)                                    # gradients are added to .grad
    optimizer.step()

    losses       of the microbatches, on the rank with the last stage; None on other ranks
    gradients    of the sum of the microbatches' losses. For the mean, divide in `loss` by their number. For
                 unequal ones, such as some with ignored tokens, return sums times the factor that
                 `DistributedOptimizer.loss_factor` gives on the rank with the last stage

With data parallelism: give the DistributedOptimizer backward_passes_per_step=m, and it averages every
parameter after its m-th gradient, in the cool-down. If it was made for one backward, pass its `no_sync` here.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hpcpar.autograd.fused_layers import adding_in_place
from hpcpar.autograd.scripted import refuse_scripted
from hpcpar.autograd.torch_clipping import note_split_over
from hpcpar.comm import Communicator
from hpcpar.comm.agree import require_same
from hpcpar.errors import OperationError, ScheduleError
from hpcpar.pipeline_parallel.executor import MAX_UNDELIVERED, ScheduleExecutor, agree_on_pass, forward_only
from hpcpar.pipeline_parallel.mailbox import Mailbox
from hpcpar.pipeline_parallel.microbatches import batch_length, checksum_of, microbatches_of, signature
from hpcpar.pipeline_parallel.stage import Stage, poking_between_layers
from hpcpar.pipeline_parallel.tensor_spec import OutputSpec
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.pipeline_schedules.proof import prove
from hpcpar.pipeline_schedules.timetable import Timed, Timetable, shifted

Loss = Callable[[Any, Any], Tensor]

NoSync = Callable[[], AbstractContextManager[Any]]

CHECKED = 2
"""First passes that compare the targets of the first rank, which go with its inputs, and of the last."""

MAX_SHAPES = 64
"""Passes of different shapes whose specs are remembered; the least recently used one goes."""


class Pipeline:
    """This rank's stages, run by a schedule together with those of other ranks. Making one is collective.

    stages     this rank's, by number
    schedule   rows of all ranks, equal on each
    loss       (output of the last stage, target of the microbatch) -> a tensor of one number; None: the last
               stage's output is the loss
    no_sync    context around actions whose gradients are not the last of a step: see `late_from`
    around     microbatch -> context around each of its actions
    effect     parameters note that other stages are on other ranks of `comm`, so that norms are over all
    errors     MismatchError on every rank if schedules differ, ScheduleError if the schedule is wrong,
               PeerFailedError if a rank has other stages than its row

    Shapes. Activations may have any shapes and dtypes that depend on those of the pipeline's inputs, the
    stages' modes and dtypes, torch.autocast, and what is frozen alone. They may differ from microbatch to
    microbatch and from step to step. In the first such pass a small message announces every activation, and
    the specs are remembered. In later passes each rank posts its receives early. A stage that then returns
    another shape fails, and the next such pass is announced again.

    Failures. An exception in one rank's stage becomes a PeerFailedError on every rank at the end of the pass.
    Zero the gradients, and the next pass can run. If a rank is lost or stuck, the others get a PeerLeftError
    or StallError, and the communicator is of no more use.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        comm: Communicator,
        *,
        loss: Loss | None = None,
        no_sync: NoSync = nullcontext,
        around: Callable[[int], AbstractContextManager[Any]] = lambda _: nullcontext(),
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
        self._around_microbatch = around
        self._late_from = late_from(schedule, comm.rank)
        self._specs: OrderedDict[bytes, dict[tuple[int, int], OutputSpec]] = OrderedDict()
        self._timed: list[Timed] = []
        self._unchecked = CHECKED

    @property
    def first_rank(self) -> int:
        """Rank of the first stage, which gets the inputs."""
        return self.schedule.rank_of_stage[0]

    @property
    def last_rank(self) -> int:
        """Rank of the last stage, which gets the targets and has the losses."""
        return self.schedule.rank_of_stage[self.schedule.stages - 1]

    def step(self, inputs: Any = None, targets: Any = None) -> Tensor | None:
        """Run forward and backward of all microbatches, by the schedule. Collective.

        inputs    for the first stage: a batch (a tensor, or a tuple of them, the stage's arguments), which is
                  divided along dim 0, or a list of microbatches; ignored on ranks without that stage
        targets   for the last stage, divided alike; without use on other ranks, and without a `loss`
        returns   losses [m] on the rank with the last stage, else None
        errors    PeerFailedError on every rank if a stage fails on any; MismatchError if another rank
                  evaluates, or if inputs and targets are batches of different lengths; in the first passes
                  also if targets on the rank with the first stage are others than those on the last
        """
        with torch.enable_grad():
            results = self._pass("step", inputs, targets, with_loss=True)
        return None if results is None else torch.stack([loss.reshape(()) for loss in results])

    def evaluate(self, inputs: Any = None, targets: Any = None) -> Tensor | list[Any] | None:
        """Run forward alone, on any number of microbatches. Collective.

        inputs, targets   as for `step`, but lists may have any length, equal for both
        returns           on the rank with the last stage losses [m], or without targets a list of outputs;
                          on other ranks None
        """
        with_loss = targets is not None
        with torch.no_grad():
            results = self._pass("evaluate", inputs, targets, with_loss=with_loss)
        if results is None or not with_loss:
            return results
        return torch.stack([loss.reshape(()) for loss in results])

    def timetable(self) -> Timetable:
        """Collect the times of the last pass's actions on all ranks, from 0 s on. Collective.

        Ranks of one node share a clock. A barrier aligns the nodes' clocks, to within the time that it takes.
        An action starts when all its inputs have arrived.
        """
        self.comm.barrier()
        now_s = time.perf_counter()
        everyone: list[tuple[float, list[Timed]]] = self.comm.allgather_object((now_s, self._timed))
        # The first rank of each node gives the barrier's time by the node's clock.
        origins_s: dict[int, float] = {}
        for node, (at_s, _) in zip(self.comm.nodes, everyone, strict=True):
            origins_s.setdefault(node, at_s)
        aligned = Timetable(
            tuple(
                shifted(timed, -origins_s[node])
                for node, (_, timed) in zip(self.comm.nodes, everyone, strict=True)
            )
        )
        return aligned.shifted(-aligned.origin_s)

    def _pass(self, kind: str, inputs: Any, targets: Any, *, with_loss: bool) -> list[Any] | None:
        has_first, has_last = 0 in self.stages, self.schedule.stages - 1 in self.stages
        batches: dict[str, Any] = {"inputs": inputs} if has_first else {}
        if has_last and with_loss and self._loss is not None:
            batches["targets"] = targets
        divided: dict[str, list[Any]] = {}
        length: int | None = None
        of_targets: int | None = None
        error: Exception | None = None
        try:
            if self._unchecked > 0 and (has_first or "targets" in batches):
                of_targets = checksum_of(targets)
            divided = {what: self._microbatches(kind, batch, what) for what, batch in batches.items()}
            length = _common_length(batches, divided)
        except Exception as caught:  # whatever it is, the other ranks must hear of it
            error = caught
        own_inputs = divided.get("inputs", [])
        agreed = agree_on_pass(
            self.comm,
            kind,
            next((len(each) for each in divided.values()), None),
            length,
            of_targets,
            self._description(own_inputs),
            error,
        )
        self._unchecked -= 1
        is_step = kind == "step"
        schedule = self.schedule if is_step else forward_only(self.schedule, agreed.microbatches)
        mailbox = Mailbox(
            self.comm,
            schedule,
            self._specs.pop(agreed.key, None),
            {number: stage.device for number, stage in self.stages.items()},
            max_undelivered=None if is_step else MAX_UNDELIVERED,
        )
        finish = self._finish(divided.get("targets", [])) if with_loss else None
        executor = ScheduleExecutor(self.comm, schedule, self.stages, mailbox, own_inputs, finish)
        modules = [stage.module for stage in self.stages.values()]
        with poking_between_layers(modules, self.comm.poke), adding_in_place(modules):
            executor.run(partial(self._around, schedule, is_step))
        self._remember(agreed.key, mailbox)
        self._timed, self.peak_alive = executor.timed, executor.peak_alive
        return [executor.results[number] for number in range(agreed.microbatches)] if has_last else None

    def _microbatches(self, kind: str, batch: Any, what: str) -> list[Any]:
        is_free = kind == "evaluate" and isinstance(batch, list) and batch
        return microbatches_of(batch, len(batch) if is_free else self.schedule.microbatches, what)

    def _finish(self, targets: Sequence[Any]) -> Callable[[Any, int], Tensor]:
        loss = self._loss
        if loss is None:
            return lambda output, _: output
        return lambda output, microbatch: loss(output, targets[microbatch])

    def _description(self, inputs: Sequence[Any]) -> str:
        """Describe everything on this rank that shapes and `requires_grad` of activations depend on."""
        modes = [
            (
                stage.module.training,
                stage.autocast,
                [(parameter.requires_grad, parameter.dtype) for parameter in stage.module.parameters()],
            )
            for stage in self.stages.values()
        ]
        return f"{signature(inputs)} {modes}"

    @contextmanager
    def _around(self, schedule: Schedule, is_step: bool, position: int) -> Iterator[None]:
        action = schedule.rows[self.comm.rank][position]
        is_early = is_step and action.kind != "F" and position < self._late_from
        with self._around_microbatch(action.microbatch), self._no_sync() if is_early else nullcontext():
            yield

    def _remember(self, key: bytes, mailbox: Mailbox) -> None:
        """Remember the specs of a finished pass: all ranks finish the same ones, and none that failed."""
        self._specs[key] = {place: spec for place, spec in mailbox.specs.items() if spec is not None}
        if len(self._specs) > MAX_SHAPES:
            self._specs.popitem(last=False)


def late_from(schedule: Schedule, rank: int) -> int:
    """Find the position in a rank's row from which on each parameter gets its last gradient.

        … 0B1 0W1 0B2 0W2          with a stage on the rank, its last backward
        … 1B2 0B1 1B3 0B2 0B3      with several, the first position after which none of them repeats
                          ▲
    Earlier actions run inside `no_sync`. In a split backward, W gives the gradients of deferred parameters,
    and B those of the others.
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


def _common_length(batches: dict[str, Any], divided: dict[str, list[Any]]) -> int | None:
    """Length of inputs and targets as batches; None for lists. OperationError if the two do not match."""
    counts = [len(each) for each in divided.values()]
    if len(set(counts)) > 1:
        raise OperationError(f"inputs of {counts[0]} microbatches, but targets of {counts[1]}")
    lengths = [length for batch in batches.values() if (length := batch_length(batch)) is not None]
    if len(set(lengths)) > 1:
        raise OperationError(
            f"inputs are a batch of {lengths[0]}, but targets one of {lengths[1]}: give as "
            "many of both, or lists of microbatches"
        )
    return lengths[0] if lengths else None


def _numbers(stages: Sequence[int]) -> str:
    return ", ".join(map(repr, stages)) or "none"
