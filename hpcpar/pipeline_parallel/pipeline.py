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

import inspect
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    loss       (output of the last stage, target of the microbatch) -> a tensor of one number, one of torch's
               means for a schedule of one microbatch alone; None: the last stage's output is the loss. One
               with parameters of its own is to be the nn.Module itself, so that they count in norms
    no_sync    context around actions whose gradients are not the last of a step: see `late_from`
    around     microbatch -> context around each of its actions
    others     refused on every rank, as other keywords of `step` and `evaluate` are
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
        **others: Any,
    ) -> None:
        _require_kinds(schedule, comm)
        rows = " | ".join(" ".join(map(str, row)) for row in schedule.rows)
        require_same(comm, f"a pipeline by {schedule.name or 'a schedule'}: {rows}")
        prove(schedule)
        if schedule.ranks != comm.size:
            raise ScheduleError(
                f"schedule {schedule.name!r} has {schedule.ranks} ranks, but communicator {comm.name!r} "
                f"{comm.size}: make it for {comm.size}"
            )
        with comm.together("making a pipeline"):
            if others:
                raise OperationError(
                    f"a pipeline has no {', '.join(others)}: make it by Pipeline(stages, schedule, comm, "
                    "loss=...), of stages that are on their device, as by module.to(device)"
                )
            _require_stages(stages, schedule.stages_of(comm.rank), comm.rank)
            if loss is not None:
                _require_loss(loss, schedule.microbatches)
        self.schedule = schedule
        self.comm = comm
        self.stages = {number: Stage(number, stages[number]) for number in sorted(stages)}
        also = [loss] if isinstance(loss, nn.Module) and comm.rank == self.last_rank else []
        for module in [*stages.values(), *also]:
            for parameter in module.parameters():
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

    def step(self, inputs: Any = None, targets: Any = None, **others: Any) -> Tensor | None:
        """Run forward and backward of all microbatches, by the schedule. Collective.

        inputs    for the first stage: a batch (a tensor, or a tuple of them, the stage's arguments), which is
                  divided along dim 0, or a list of microbatches; ignored on ranks without that stage
        targets   for the last stage's `loss`, divided alike; without use on other ranks
        returns   losses [m] on the rank with the last stage, else None
        errors    PeerFailedError on every rank if a stage fails on any; MismatchError if another rank
                  evaluates, or if inputs and targets are batches of different lengths; in the first passes
                  also if targets on the rank with the first stage are others than those on the last
        """
        with torch.enable_grad():
            results = self._pass("step", inputs, targets, others, with_loss=True)
        return None if results is None else torch.stack([loss.reshape(()) for loss in results])

    def evaluate(self, inputs: Any = None, targets: Any = None, **others: Any) -> Tensor | list[Any] | None:
        """Run forward alone, on any number of microbatches. Collective.

        inputs, targets   as for `step`, but lists may have any length, equal for both
        returns           on the rank with the last stage losses [m], or without targets a list of outputs;
                          on other ranks None
        """
        with_loss = targets is not None
        with torch.no_grad():
            results = self._pass("evaluate", inputs, targets, others, with_loss=with_loss)
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

    def _pass(
        self, kind: str, inputs: Any, targets: Any, others: Mapping[str, Any], *, with_loss: bool
    ) -> list[Any] | None:
        has_first, has_last = 0 in self.stages, self.schedule.stages - 1 in self.stages
        batches: dict[str, Any] = {"inputs": inputs} if has_first else {}
        if has_last and with_loss and self._loss is not None:
            batches["targets"] = targets
        divided: dict[str, list[Any]] = {}
        length: int | None = None
        of_targets: int | None = None
        description, error = "", None
        try:
            if others:
                raise OperationError(
                    f"{kind} has no {', '.join(others)}: call {kind}(inputs, targets), where inputs may be a "
                    "tuple of the first stage's arguments, in their order"
                )
            if has_last and targets is not None and self._loss is None:
                raise OperationError(
                    "targets were given, but the pipeline has no loss of them: make it by Pipeline(..., "
                    "loss=lambda outputs, targets: ...), or leave them out if the last stage returns the loss"
                )
            if self._unchecked > 0 and (has_first or "targets" in batches):
                of_targets = checksum_of(targets)
            divided = {what: self._microbatches(kind, batch, what) for what, batch in batches.items()}
            length = _common_length(batches, divided)
            description = self._description(divided.get("inputs", []))
        except Exception as caught:  # whatever it is, the other ranks must hear of it
            error = caught
        agreed = agree_on_pass(
            self.comm,
            kind,
            next((len(each) for each in divided.values()), None),
            length,
            of_targets,
            description,
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
        executor = ScheduleExecutor(
            self.comm, schedule, self.stages, mailbox, divided.get("inputs", []), finish
        )
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
                [module.training for module in stage.module.modules()],
                stage.autocast,
                [(each.requires_grad, each.dtype) for each in stage.tensors()],
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


def _require_kinds(schedule: Any, comm: Any) -> None:
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            f"a pipeline by {schedule!r}, which is no Schedule: make one, such as hpcpar.pipeline_schedules."
            "schedule_registry.make('1f1b', comm.size, microbatches=8)"
        )
    if not isinstance(comm, Communicator):
        raise OperationError(
            f"a pipeline over {comm!r}, which is no Communicator: give that of its ranks, such as mesh.pp of "
            "mesh = hpcpar.Mesh(world, pp=2)"
        )


def _require_stages(stages: Any, wanted: Sequence[int], rank: int) -> None:
    asked = (
        f"the schedule's row for it has stages {_listed(wanted)}: give {{number: module}} for each of these"
    )
    if not isinstance(stages, Mapping):
        raise ScheduleError(
            f"rank {rank} was given a {type(stages).__qualname__} for stages, but {asked}, as in Pipeline("
            f"{{{', '.join(f'{number}: nn.Sequential(*layers[a:b])' for number in wanted[:1])}}}, ...)"
        )
    if set(stages) != set(wanted):
        raise ScheduleError(f"rank {rank} was given stages {_listed(stages)}, but {asked}")
    for number, stage in stages.items():
        if not isinstance(stage, nn.Module):
            raise ScheduleError(
                f"stage {number} is a {type(stage).__qualname__}: give an nn.Module, such as an nn.Sequential"
                " of several ones, or one whose forward calls a function"
            )
        refuse_scripted(stage, f"give stage {number} without it")


def _require_loss(loss: Any, microbatches: int) -> None:
    """Check that a loss takes (output, target), and is not the mean over one microbatch of several."""
    try:
        if isinstance(loss, type):
            raise TypeError("a class, of which it takes an instance")
        signature = inspect.signature(loss)
        signature.bind(None, None)
    except TypeError as error:
        raise OperationError(
            f"loss={loss!r} is not called with the output of the last stage and the target of a microbatch "
            f"({error}): give such a function, such as lambda outputs, targets: ..."
        ) from error
    except ValueError:  # a function of C, which does not tell
        return
    reduction = getattr(loss, "reduction", None)
    function = loss.func if isinstance(loss, partial) else loss
    if getattr(function, "__module__", "") == "torch.nn.functional" and "reduction" in signature.parameters:
        reduction = signature.parameters["reduction"].default
    if reduction == "mean" and microbatches > 1:
        name = getattr(function, "__name__", type(loss).__name__)
        raise OperationError(
            f"{name} is the mean over one of {microbatches} microbatches, but gradients are those of the sum "
            f"of their losses, {microbatches} times those of the whole batch's mean: pass "
            f"loss=lambda outputs, targets: {name}(outputs, targets) / {microbatches}"
        )


def _listed(stages: Iterable[object]) -> str:
    return ", ".join(map(repr, stages)) or "none"
