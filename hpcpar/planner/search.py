"""Search of all legal layouts for the fastest that fits: `search(PlanRequest(...))`.

    every layout of the ranks ──rules──▶ refused, with the reason
            │ least memory that any of its strategies needs
            ├──more than the device──▶ refused: memory over by x GiB in stage s
            ▼
    microbatch x recomputation, then schedule x stages per rank, then stage of ZeRO
            in the order of a lower bound on the step's time; ends when the bound exceeds the K-th best

The bound of a strategy is what its kernels and in-layer communication take on an average rank, and the
bubble of its schedule where that has a closed form. It is never above the estimate, so nothing that is left
out can be among the K best: a test compares the result with all strategies, one by one.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from hpcpar.errors import ConfigError, LayoutError
from hpcpar.pipeline_schedules.schedule_registry import METHODS
from hpcpar.planner.cluster import Cluster
from hpcpar.planner.estimate import Estimate
from hpcpar.planner.layout import Layout
from hpcpar.planner.memory import MOMENTS, OPTIMIZER
from hpcpar.planner.model_shapes import ModelShape
from hpcpar.planner.rules import layout_refusal, sequence_parallel_fits, zero_refusal
from hpcpar.planner.shapes import RECOMPUTE_MODES, Recompute
from hpcpar.planner.software import HPCPAR, Software
from hpcpar.planner.stage_memory import OwnParameters, StageMemory, memory_of_stages, state_nbytes
from hpcpar.planner.step_bounds import StepBounds
from hpcpar.planner.step_time import PassesTime, step_time
from hpcpar.planner.strategy import CONTEXT_METHODS, ContextMethod, Strategy, ZeroStage
from hpcpar.units import GiB

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")
"""Schedules that are searched. GPipe and naive take as long as 1F1B at least, and keep more."""

MOST_SEQUENCES = 64
"""Largest microbatch that is searched; a larger one is taken where it is fixed."""

STAGES_PER_RANK = (2, 4, 8)
"""Stages per rank of an interleaved schedule that are searched, where none are fixed."""

DEGREE_KEYS = ("pp", "dp", "cp", "tp", "ep", "etp")
OPTION_KEYS = (
    *("microbatch", "zero_stage", "schedule", "stages_per_rank", "recompute", "sequence_parallel"),
    *("cp_method", "optimizer", "offload", "dp_shard", "reshard"),
)
COUNTS = (*DEGREE_KEYS, "microbatch", "stages_per_rank", "dp_shard")
CHOICES: Mapping[str, tuple[Any, ...]] = {
    "zero_stage": (0, 1, 2, 3),
    "schedule": tuple(METHODS),
    "recompute": RECOMPUTE_MODES,
    "sequence_parallel": (False, True),
    "cp_method": CONTEXT_METHODS,
    "optimizer": tuple(MOMENTS),
    "reshard": ("unit", "step"),
}
"""Values of the keys that have a few."""

FIXABLE = (*DEGREE_KEYS, *OPTION_KEYS)
"""What a request may fix. Searched otherwise, but for cp_method, optimizer, offload, dp_shard and reshard."""


@dataclass(frozen=True)
class PlanRequest:
    """Model, machine and batch whose layouts are to be ranked.

    cluster        its nodes are all used
    global_batch   sequences of an optimizer step, of `sequence` tokens each
    fixed          the values allowed, by key of FIXABLE: {"tp": (4, 8)}
    """

    model: ModelShape
    cluster: Cluster
    global_batch: int
    sequence: int
    precision: str = "bfloat16"
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    software: Software = HPCPAR

    def __post_init__(self) -> None:
        for key, values in self.fixed.items():
            if key not in FIXABLE:
                raise ConfigError(f"{key!r} cannot be fixed; there are {', '.join(FIXABLE)}")
            self._check(key, values)
        self.cluster.device.peak(self.precision)

    def _check(self, key: str, values: tuple[Any, ...]) -> None:
        """Raise ConfigError for values that no strategy can have."""
        for value in values:
            if key in CHOICES and value not in CHOICES[key]:
                known = ", ".join(map(str, CHOICES[key]))
                raise ConfigError(f"{key}={value} cannot be fixed; there are {known}")
            if key in COUNTS and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{key}={value} cannot be fixed; give a whole number of at least 1")
            if key == "offload" and value is not None:
                rate, what = self.cluster.host_bandwidth, "host.gb_per_s"
                if value != "cpu":
                    rate, what = self.cluster.disk_bandwidth, "host.disk_gb_per_s"
                if not rate:
                    raise ConfigError(
                        f"offload={value}, but machine {self.cluster.name} does not say how fast that is; "
                        f"add {what} to its file"
                    )

    def allows(self, key: str, value: Any) -> bool:
        """True where `key` is not fixed, or may have this value."""
        return key not in self.fixed or value in self.fixed[key]

    def only(self, key: str, default: Any) -> tuple[Any, ...]:
        """Return the values fixed, or the default alone."""
        return tuple(self.fixed.get(key, (default,)))


@dataclass(frozen=True, slots=True)
class Rejected:
    """A layout that cannot be, with the reason.

    over_nbytes   memory that is lacking; 0 for another reason
    """

    layout: Layout
    kind: str
    reason: str
    over_nbytes: int = 0


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    ranked     the best strategy of each of the K fastest layouts, fastest first
    rejected   layouts of which no strategy can be or fits
    layouts    number of all layouts, ranked, slower or rejected
    priced     number of strategies whose step was priced
    """

    request: PlanRequest
    ranked: tuple[Estimate, ...]
    rejected: tuple[Rejected, ...]
    layouts: int
    priced: int

    @property
    def best(self) -> Estimate:
        """The fastest; LayoutError where none fits."""
        if not self.ranked:
            raise LayoutError("no layout fits")
        return self.ranked[0]

    def rejected_by_kind(self) -> dict[str, list[Rejected]]:
        """Return the rejected layouts by kind of reason, most frequent first."""
        kinds: dict[str, list[Rejected]] = {}
        for one in self.rejected:
            kinds.setdefault(one.kind, []).append(one)
        return dict(sorted(kinds.items(), key=lambda item: -len(item[1])))


def search(request: PlanRequest, *, top: int = 10) -> SearchResult:
    """Find the `top` fastest layouts that fit, each with its best strategy; and why others cannot be."""
    rejected: list[Rejected] = []
    legal: list[Layout] = []
    number = 0
    bounds = StepBounds(request.model, request.cluster, request.software)
    for layout in layouts_of(request):
        number += 1
        refused = _refused(request, layout) or _lacks_memory(request, layout)
        if refused is None:
            legal.append(layout)
        else:
            rejected.append(refused)
    ranked, priced = _fastest(request, legal, bounds, top)
    return SearchResult(request, tuple(ranked), tuple(rejected), number, priced)


def fits_somewhere(request: PlanRequest) -> bool:
    """True where any strategy of any layout fits; nothing is timed."""
    return any(
        _refused(request, layout) is None and _lacks_memory(request, layout) is None
        for layout in layouts_of(request)
    )


# --- layouts --------------------------------------------------------------------------------------


def layouts_of(request: PlanRequest) -> Iterator[Layout]:
    """Yield every layout of all devices that the fixed degrees allow. Dense models have no ep."""
    size, experts = request.cluster.size, request.model.experts
    for tp in filter(lambda d: request.allows("tp", d), divisors(size)):
        for cp in filter(lambda d: request.allows("cp", d), divisors(size // tp)):
            for pp in filter(lambda d: request.allows("pp", d), divisors(size // (tp * cp))):
                dp = size // (tp * cp * pp)
                if not request.allows("dp", dp):
                    continue
                for etp in {1, tp} if experts is not None or "etp" in request.fixed else {1}:
                    if not request.allows("etp", etp):
                        continue
                    for ep in divisors(dp * cp * tp // etp) if experts is not None else (1,):
                        if not request.allows("ep", ep):
                            continue
                        for shard in request.only("dp_shard", None):
                            if dp % (shard or dp) == 0:
                                yield Layout(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, etp=etp, dp_shard=shard)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def _refused(request: PlanRequest, layout: Layout) -> Rejected | None:
    refusal = layout_refusal(
        request.model,
        request.cluster,
        layout,
        global_batch=request.global_batch,
        sequence=request.sequence,
        across_nodes="tp" in request.fixed,
    )
    if refusal is not None:
        return Rejected(layout, refusal.kind, refusal.reason)
    if not microbatches_of(request, layout):
        asked = ", ".join(map(str, request.fixed.get("microbatch", ())))
        return Rejected(
            layout,
            "batch",
            f"microbatch={asked} does not divide the {request.global_batch // layout.dp} sequences of each "
            f"of dp={layout.dp} ranks",
        )
    if not _sequence_parallel(request, layout):
        return Rejected(
            layout,
            "sequence",
            f"sequence={request.sequence} does not divide among the {layout.cp * layout.tp} ranks of cp and "
            "tp",
        )
    if not any(True for _ in _pipelines(request, layout)):
        return Rejected(layout, "schedule", "no schedule that is allowed has a layer for each of its stages")
    if not _context_methods(request, layout):
        return Rejected(
            layout,
            "heads",
            f"cp_method=ulysses: {request.model.heads // layout.tp} heads of each of tp={layout.tp} ranks do "
            f"not divide among cp={layout.cp} ranks",
        )
    return None


# --- strategies of a layout -----------------------------------------------------------------------


def strategies(request: PlanRequest, layout: Layout) -> Iterator[Strategy]:
    """Yield every strategy of a legal layout that is searched."""
    for some in _of_layout(request, layout):
        for one in _with_schedules(request, some):
            yield from _with_zero(request, one)


def _of_layout(request: PlanRequest, layout: Layout) -> Iterator[Strategy]:
    """Yield strategies of which schedule, ZeRO and options are still open."""
    for microbatch in microbatches_of(request, layout):
        for recompute in recomputations(request):
            yield from _with_any(request, layout, microbatch, recompute)


def microbatches_of(request: PlanRequest, layout: Layout) -> list[int]:
    """Return the microbatches that divide the sequences of a dp rank."""
    own = request.global_batch // layout.dp
    if "microbatch" in request.fixed:
        return [size for size in request.fixed["microbatch"] if own % size == 0]
    return [size for size in divisors(own) if size <= MOST_SEQUENCES]


def recomputations(request: PlanRequest) -> list[Recompute]:
    """Return what may be recomputed, least first."""
    return [Recompute(mode) for mode in RECOMPUTE_MODES if request.allows("recompute", mode)]


def _pipelines(request: PlanRequest, layout: Layout) -> Iterator[tuple[str, int | None]]:
    """Yield the schedules, with stages per rank where the schedule leaves them open."""
    if layout.pp == 1:
        yield "1f1b", None
        return
    most = request.model.layers // layout.pp
    for schedule in request.fixed.get("schedule", SCHEDULES):
        method = METHODS[schedule]
        searched = STAGES_PER_RANK if schedule == "interleaved" else (method.stages_per_rank,)
        for stages in request.fixed.get("stages_per_rank", searched):
            if method.allows(stages) and stages <= most:
                yield schedule, stages if method.most_stages is None else None


def _sequence_parallel(request: PlanRequest, layout: Layout) -> tuple[bool, ...]:
    """Return True where the sequence can be divided over tp: it needs less, and no longer, but on CPUs.

    There each of its calls takes time of the rank's, so that both are searched. Empty: it is asked for, and
    the sequence does not divide.
    """
    if layout.tp == 1:
        return (False,)
    searched = request.fixed.get(
        "sequence_parallel", (True, False) if request.cluster.device.on_host else (True,)
    )
    if not sequence_parallel_fits(layout, request.sequence):
        return () if searched == (True,) and "sequence_parallel" in request.fixed else (False,)
    return tuple(searched)


def _context_methods(request: PlanRequest, layout: Layout) -> tuple[ContextMethod, ...]:
    """Return the ways in which ranks may share a sequence; Ulysses divides heads among them."""
    if layout.cp == 1:
        return ("exchange",)
    divides = request.model.heads // layout.tp % layout.cp == 0
    return tuple(each for each in request.only("cp_method", "exchange") if each != "ulysses" or divides)


def _with_any(
    request: PlanRequest, layout: Layout, microbatch: int, recompute: Recompute
) -> Iterator[Strategy]:
    methods, halves = _context_methods(request, layout), _sequence_parallel(request, layout)
    for method, divided in itertools.product(methods, halves):
        yield Strategy(
            layout,
            request.global_batch,
            microbatch,
            request.sequence,
            zero_stage=0 if layout.shard_ranks is None else 1,
            recompute=recompute,
            precision=request.precision,
            sequence_parallel=divided,
            cp_method=method,
        )


def _with_schedules(request: PlanRequest, some: Strategy) -> Iterator[Strategy]:
    for schedule, per_rank in _pipelines(request, some.layout):
        yield replace(some, schedule=schedule, stages_per_rank=per_rank)


def _with_zero(request: PlanRequest, some: Strategy) -> Iterator[Strategy]:
    for stage in _zero_stages(request, some):
        yield from _with_options(request, some, stage)


def _zero_stages(request: PlanRequest, some: Strategy) -> list[ZeroStage]:
    """Return the stages of ZeRO that can be with this layout and schedule."""
    layout = some.layout
    found: list[ZeroStage] = []
    for stage in get_args(ZeroStage):
        if not request.allows("zero_stage", stage) or zero_refusal(layout, stage, some.schedule):
            continue
        if stage == 0 and layout.shard_ranks is not None:
            continue
        if stage and layout.dp * layout.cp == layout.edp == 1 and "zero_stage" not in request.fixed:
            continue
        found.append(stage)
    return found


def _with_options(request: PlanRequest, some: Strategy, stage: ZeroStage) -> Iterator[Strategy]:
    for optimizer, place, reshard in itertools.product(
        request.only("optimizer", "adamw"),
        request.only("offload", None),
        request.only("reshard", "unit") if stage == 3 else ("unit",),
    ):
        yield replace(some, zero_stage=stage, optimizer=optimizer, offload=place, reshard=reshard)


# --- memory ---------------------------------------------------------------------------------------


def _lacks_memory(request: PlanRequest, layout: Layout) -> Rejected | None:
    """Return the least memory that is lacking, if even the strategy that needs least does not fit.

    Memory grows with the microbatch, so the smallest is looked at; of the others all, most saving first.
    """
    microbatch, least = min(microbatches_of(request, layout)), None
    for recompute in reversed(recomputations(request)):
        for strategy in (
            sharded
            for some in _with_any(request, layout, microbatch, recompute)
            for one in _with_schedules(request, some)
            for sharded in _most_sharded([*_with_zero(request, one)])
        ):
            if least is not None and _state_exceeds(request, strategy):
                continue
            stages = [*memory_of_stages(request.model, strategy, request.software, each_kind=True)]
            over = max(over_nbytes(request, stage) for stage in stages)
            if over <= 0:
                return None
            if least is None or over < least[0]:
                least = over, strategy, max(stages, key=lambda stage: stage.nbytes)
    if least is None:
        stage = ", ".join(map(str, request.fixed.get("zero_stage", ())))
        reason = zero_refusal(layout, 3, "1f1b") or "there is nothing to shard over"
        return Rejected(layout, "ZeRO", f"zero_stage={stage} cannot be with {layout}: {reason}")
    over, strategy, worst = least
    return Rejected(layout, "memory", _memory_reason(request.cluster, strategy, worst, over), over)


def _most_sharded(of_stages: list[Strategy]) -> list[Strategy]:
    """Return the strategies that may need least: those of ZeRO-3, and of the highest stage below it."""
    below = max((one.zero_stage for one in of_stages if one.zero_stage < 3), default=0)
    return [one for one in of_stages if one.zero_stage in (below, 3)]


def _state_exceeds(request: PlanRequest, strategy: Strategy) -> bool:
    """True where the model state of an average rank, all of it sharded, is already more than a device has."""
    layout, model = strategy.layout, request.model
    experts = sum(count * model.layer_parameters(layer)[1] for layer, count in model.layer_kinds)
    dense = (model.parameters() - experts) // (layout.tp * layout.pp)
    experts //= layout.ep * layout.etp * layout.pp
    # At least: the layers' matrices have no more optimizer state than the others.
    state = state_nbytes(OwnParameters(dense, experts, 0), strategy, request.software)
    if strategy.offload is not None:
        del state[OPTIMIZER]
    return sum(state.values()) > request.cluster.device.memory_nbytes


def over_nbytes(request: PlanRequest, stage: StageMemory) -> int:
    """Return the bytes by which a rank of a stage, or its host, exceeds what there is; 0 or less: it fits."""
    cluster = request.cluster
    device = stage.nbytes - cluster.device.memory_nbytes
    on_host = stage.host_nbytes * cluster.devices_per_node
    return max(device, on_host - cluster.host_memory_nbytes) if on_host else device


def _fits(request: PlanRequest, strategy: Strategy) -> bool:
    stages = memory_of_stages(request.model, strategy, request.software, each_kind=True)
    return all(over_nbytes(request, stage) <= 0 for stage in stages)


def _memory_reason(cluster: Cluster, strategy: Strategy, worst: StageMemory, over: int) -> str:
    largest, nbytes = max(worst.purposes.items(), key=lambda item: item[1])
    where = f" in stage {worst.rank}" if strategy.layout.pp > 1 else ""
    held = f"{worst.nbytes / GiB:.1f} GiB, of which {nbytes / GiB:.1f} for {largest}"
    memory = "memory"
    if over > worst.nbytes - cluster.device.memory_nbytes:
        memory = "memory of a node's host"
        held = f"{worst.host_nbytes / GiB:.1f} GiB of each of {cluster.devices_per_node} ranks"
    how = [f"microbatch {strategy.microbatch}", f"ZeRO-{strategy.zero_stage}"]
    if strategy.recompute.mode != "none":
        how.append(f"recompute {strategy.recompute.mode}")
    return f"{memory} over by {over / GiB:.1f} GiB{where} even with {', '.join(how)}: {held}"


# --- time -----------------------------------------------------------------------------------------


class _Memory:
    """Memory of strategies. One that needs more than another that does not fit is not looked at.

    Memory grows with the microbatch, and with a lower stage of ZeRO, but from 3 to 2.
    """

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self._lacking: dict[tuple[Any, ...], float] = {}  # the smallest microbatch known not to fit

    def fitting(self, some: Strategy) -> Iterator[Strategy]:
        """Yield the strategies that differ from `some` in ZeRO's stage and fit."""
        request, microbatch = self.request, some.microbatch
        key = (
            *(some.layout, some.schedule, some.stages_per_rank),
            *(some.recompute.mode, some.cp_method, some.sequence_parallel),
        )
        smallest = min(microbatches_of(request, some.layout))
        for stage in reversed(_zero_stages(request, some)):
            # Most that do not fit do not with the smallest microbatch either: one look for all of them.
            is_new = (*key, stage) not in self._lacking
            for size in sorted({smallest, microbatch} if is_new else {microbatch}):
                if microbatch >= self._lacking.get((*key, stage), math.inf):
                    continue
                any_fits = False
                for strategy in _with_options(request, replace(some, microbatch=size), stage):
                    fits = _fits(request, strategy)
                    any_fits = any_fits or fits
                    if fits and size == microbatch:
                        yield strategy
                self._note(key, stage, math.inf if any_fits else size)

    def _note(self, key: tuple[Any, ...], stage: int, lacking: float) -> None:
        for lower in range(stage + 1) if stage < 3 else (3,):
            if lacking < math.inf or lower == stage:
                which = (*key, lower)
                self._lacking[which] = min(self._lacking.get(which, math.inf), lacking)


_Known = tuple[PassesTime, list[Strategy]]
"""Of a strategy whose ZeRO is open: forwards and backwards; those that fit."""

_Entry = tuple[float, int, "Layout | Strategy", "_Known | bool"]
"""Bound, number, what it bounds; of a strategy whether its schedule is chosen, or what is known of it."""


def _fastest(
    request: PlanRequest, legal: list[Layout], bounds: StepBounds, top: int
) -> tuple[list[Estimate], int]:
    """Price strategies in the order of their bounds until no other can be among the `top` best layouts."""
    count = itertools.count()
    heap: list[_Entry] = [
        (min(map(bounds.no_bubble, _of_layout(request, layout))), next(count), layout, False)
        for layout in legal
    ]
    heapq.heapify(heap)
    best: dict[Layout, Estimate] = {}
    seconds: dict[Layout, float] = {}
    limit = float("inf")
    priced, memory = 0, _Memory(request)
    while heap:
        bound, _, some, known = heapq.heappop(heap)
        if bound > limit:
            break
        if isinstance(some, Layout):
            for one in _of_layout(request, some):
                heapq.heappush(heap, (bounds.no_bubble(one), next(count), one, False))
            continue
        if bound >= seconds.get(some.layout, float("inf")):
            continue
        if known is False:
            for one in _with_schedules(request, some):
                heapq.heappush(heap, (bounds.with_bubble(one), next(count), one, True))
            continue
        if known is True:
            fitting = list(memory.fitting(some))
            if fitting:
                passes = bounds.passes(some)
                heapq.heappush(heap, (passes.seconds, next(count), some, (passes, fitting)))
            continue
        passes, fitting = known
        for strategy in fitting:
            found = _priced(request, strategy, passes)
            priced += 1
            if strategy.layout not in best or _order(found) < _order(best[strategy.layout]):
                best[strategy.layout], seconds[strategy.layout] = found, found.step_s
        if len(seconds) >= top:
            limit = heapq.nsmallest(top, seconds.values())[-1]
    return sorted(best.values(), key=_order)[:top], priced


def _order(one: Estimate) -> tuple[float, int, int]:
    """Order by time; of equal times (to 1e-6) the simpler first: fewer axes, less ZeRO."""
    layout = one.strategy.layout
    axes = sum(layout.degree(axis) > 1 for axis in DEGREE_KEYS)
    return float(f"{one.step_s:.6e}"), axes, one.strategy.zero_stage


def _priced(
    request: PlanRequest,
    strategy: Strategy,
    passes: PassesTime,
) -> Estimate:
    """Return the estimate of a strategy whose forwards and backwards are known."""
    model, cluster, software = request.model, request.cluster, request.software
    stages = tuple(memory_of_stages(model, strategy, software))
    time, traffic = step_time(model, cluster, strategy, software, passes)
    return Estimate(model, cluster, strategy, software, stages, time, traffic)
