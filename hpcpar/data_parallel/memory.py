"""What a rank keeps in memory, measured from the tensors themselves, beside what ZeRO says it must.

    stage   parameters   gradients   optimizer state     mixed-precision Adam, p ranks, Φ parameters
    0       all          all         all                 2Φ + 2Φ + 12Φ = 16Φ bytes
    1       all          all         its shard           4Φ + 12Φ/p
    2       all          its shard   its shard           2Φ + 14Φ/p
    3       its shard    its shard   its shard           16Φ/p

Measured are storages, each once, however many tensors look into it; one that was given back has no bytes. The
formula is taken from the buckets' integers and from the types that are kept. What lies between the two is the
padding of buckets to equal shards, and the shards' rounding: that is worked out, too, and what is left must
be nothing.
source   Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, section 5, figure 1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from rich.table import Table
from torch import Tensor, nn

from hpcpar.autograd.held_parameter import own_gradient
from hpcpar.data_parallel.activations import Activations, storage_id, storage_nbytes
from hpcpar.data_parallel.buckets import Bucket
from hpcpar.data_parallel.distributed_optimizer import DistributedOptimizer
from hpcpar.data_parallel.process_memory import ProcessMemory, process_memory
from hpcpar.data_parallel.sharded_step import ShardedStep, State
from hpcpar.data_parallel.zero2 import ShardedGradients
from hpcpar.errors import OperationError
from hpcpar.units import format_nbytes

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

PARAMETERS, GRADIENTS, OPTIMIZER = STATE = ("parameters", "gradients", "optimizer state")
"""The three parts of the model state."""

SHARDED_FROM = {PARAMETERS: 3, GRADIENTS: 2, OPTIMIZER: 1}
"""The stage from which on a rank has its shard of it only."""

COUNTERS = ("step", "eta", "mu")
"""What torch's optimizers keep for a whole parameter, whatever its shape."""


def shares(what: str, stage: int, ranks: int) -> int:
    """Into how many shares a part of the model state is divided."""
    return ranks if stage >= SHARDED_FROM[what] else 1


@dataclass(frozen=True, slots=True)
class StateLine:
    """One part of the model state on one rank, in bytes.

    device, host   in the memory of an accelerator; in that of the machine
    disk           in files
    common         the same memory for all ranks of the node: once for all of them
    formula        what theory says
    padding        what equal shards of whole elements make of it: padding, less what a short shard has not
    pending        in the formula, but not made yet: state of parameters that never had a gradient
    """

    device_nbytes: int
    host_nbytes: int
    disk_nbytes: int
    common_nbytes: int
    formula_nbytes: Fraction
    padding_nbytes: Fraction
    pending_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """Wherever they are, common ones as a whole."""
        return self.device_nbytes + self.host_nbytes + self.disk_nbytes + self.common_nbytes

    @property
    def beyond_nbytes(self) -> Fraction:
        """Measured beyond the formula."""
        return self.nbytes - self.formula_nbytes

    @property
    def unexplained_nbytes(self) -> Fraction:
        """Of that, what is neither padding nor pending: 0, if all is as it should be."""
        return self.beyond_nbytes - self.padding_nbytes + self.pending_nbytes

    @property
    def by_place(self) -> dict[str, int]:
        return {
            "device": self.device_nbytes,
            "host": self.host_nbytes,
            "disk": self.disk_nbytes,
            "common": self.common_nbytes,
        }


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's memory, in bytes. What has a peak is shown now and at most so far.

    rank          in the communicator that the report was made on
    ranks         among which the model state is sharded
    sharers       ranks of the node that have memory in common
    state         by part, see STATE
    staging       gradients on their way: rooms of buckets, copies in another type, those that wait for a room
    gathered      units of a fully sharded model that are whole; at most so many `peak_gathered_units`
    offload       blocks of optimizer state that are in memory while they are worked on
    activations   what autograd keeps for backward at most; None: nobody watched
    buffers       of the model, such as rotary tables
    scalars       counters of steps, and the placeholders of parameters that are not gathered
    process       what the system says of all of this, libraries and all
    """

    rank: int
    ranks: int
    sharers: int
    state: dict[str, StateLine]
    staging_nbytes: int
    peak_staging_nbytes: int
    gathered_nbytes: int
    peak_gathered_nbytes: int
    peak_gathered_units: int
    peak_offload_nbytes: int
    peak_activations_nbytes: int | None
    buffers_nbytes: int
    scalars_nbytes: int
    process: ProcessMemory

    @property
    def state_nbytes(self) -> Fraction:
        """Model state in memory, of what is common this rank's share: ranks can be added up."""
        return sum(
            (line.device_nbytes + line.host_nbytes + self._share(line) for line in self.state.values()),
            Fraction(0),
        )

    @property
    def peak_nbytes(self) -> Fraction:
        """Model state, and all else at its most: an upper bound, as not all is at its most at once."""
        beside = self.peak_staging_nbytes + self.peak_gathered_nbytes + self.peak_offload_nbytes
        return (
            self.state_nbytes
            + beside
            + (self.peak_activations_nbytes or 0)
            + self.buffers_nbytes
            + self.scalars_nbytes
        )

    @property
    def unexplained_nbytes(self) -> Fraction:
        """Of the model state, what neither the formula nor padding tells of."""
        return sum((line.unexplained_nbytes for line in self.state.values()), Fraction(0))

    def _share(self, line: StateLine) -> Fraction:
        return Fraction(line.common_nbytes, self.sharers)

    def as_record(self) -> dict[str, Any]:
        """Plain values, for a JSON file."""
        record: dict[str, Any] = _plain(dataclasses.asdict(self))
        for what, line in self.state.items():
            record["state"][what] |= {
                "nbytes": line.nbytes,
                "unexplained_nbytes": float(line.unexplained_nbytes),
            }
        return record | {"state_nbytes": float(self.state_nbytes), "peak_nbytes": float(self.peak_nbytes)}


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The memory of one rank or of all, beside the formula.

    stage        of ZeRO
    parameters   Φ: that are trained, of what a rank has of the model, its part where layers are split
    formula      for people: "2Φ + 14Φ/p"
    of_ranks     by rank; only the own one where the report was made on no communicator
    """

    stage: int
    parameters: int
    formula: str
    of_ranks: tuple[RankMemory, ...]

    @property
    def worst(self) -> RankMemory:
        """The rank that needs most."""
        return max(self.of_ranks, key=lambda of_rank: of_rank.peak_nbytes)

    @property
    def state_nbytes(self) -> Fraction:
        """Model state in memory on all ranks of the report together; what is common counts once."""
        return sum((of_rank.state_nbytes for of_rank in self.of_ranks), Fraction(0))

    def as_record(self, *, every_rank: bool = False) -> dict[str, Any]:
        """Plain values, for a JSON file: of the worst rank, or of every one."""
        shown = {"of_ranks": [each.as_record() for each in self.of_ranks]} if every_rank else {}
        return {
            "stage": self.stage,
            "parameters": self.parameters,
            "formula": self.formula,
            "reported_ranks": len(self.of_ranks),
            "state_nbytes": float(self.state_nbytes),
            "unexplained_nbytes": float(max(abs(each.unexplained_nbytes) for each in self.of_ranks)),
            "worst": self.worst.as_record(),
        } | shown

    def table(self) -> Table:
        """For people: the worst rank beside the formula."""
        worst = self.worst
        among = f"the fullest of {len(self.of_ranks)}" if len(self.of_ranks) > 1 else "this rank"
        shown = Table(
            title=f"Memory of rank {worst.rank}, {among}: ZeRO-{self.stage}, "
            f"{self.formula}, Φ = {self.parameters:,}, p = {worst.ranks}",
            box=None,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for heading in ("", "where"):
            shown.add_column(heading, no_wrap=True)
        for heading in ("now", "at most", "formula", "beyond it", "padding"):
            shown.add_column(heading, justify="right", no_wrap=True)
        for cells in _rows(worst):
            shown.add_row(*cells)
        return shown


def memory_report(
    model: nn.Module,
    optimizer: DistributedOptimizer,
    comm: Communicator | None = None,
    *,
    activations: Activations | None = None,
) -> MemoryReport:
    """Measure what the model and its optimizer take on this rank, or, with `comm`, on all of its ranks.

        with hpcpar.watch_activations(model) as activations:
            loss(model(tokens)).backward()
        optimizer.step()
        print(hpcpar.memory_report(model, optimizer, comm, activations=activations).as_record())

    comm          collective on it then, and the same report on all of its ranks
    activations   what was seen of a microbatch

    Before the first step there are no moments yet, and none in the formula. A model in one process: a
    `DistributedOptimizer` on a communicator of one rank.
    errors   OperationError (with `comm` as PeerFailedError on every rank) for what is no model, or no
             DistributedOptimizer
    """
    if comm is None:
        of_ranks = [_measured(model, optimizer, activations, None)]
    else:
        with comm.together("measuring memory"):
            mine = _measured(model, optimizer, activations, comm.rank)
        of_ranks = comm.allgather_object(mine)
    count = sum(parameter.numel() for parameter in _trained(optimizer))
    return MemoryReport(optimizer.zero_stage, count, _formula(of_ranks[0], optimizer), tuple(of_ranks))


# --- measuring ------------------------------------------------------------------------------------


@dataclass
class _Line:
    """A part of the model state while it is being added up."""

    device_nbytes: int = 0
    host_nbytes: int = 0
    disk_nbytes: int = 0
    common_nbytes: int = 0
    formula_nbytes: Fraction = field(default_factory=Fraction)
    padding_nbytes: Fraction = field(default_factory=Fraction)
    pending_nbytes: int = 0

    def hold(self, on_device: int, on_host: int, *, common: bool = False) -> None:
        self.device_nbytes += on_device
        if common:
            self.common_nbytes += on_host
        else:
            self.host_nbytes += on_host

    def done(self) -> StateLine:
        return StateLine(**vars(self))


class _Ledger:
    """Bytes of storages that have not been counted before."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def places(self, tensors: Iterable[Tensor | None]) -> tuple[int, int]:
        """(on a device, on the host)."""
        on_device = on_host = 0
        for tensor in tensors:
            if tensor is None or storage_id(tensor) in self._seen:
                continue
            self._seen.add(storage_id(tensor))
            nbytes = storage_nbytes(tensor)
            if tensor.device.type == "cpu":
                on_host += nbytes
            else:
                on_device += nbytes
        return on_device, on_host

    def nbytes(self, tensors: Iterable[Tensor | None]) -> int:
        return sum(self.places(tensors))


def _measured(
    model: nn.Module, optimizer: DistributedOptimizer, activations: Activations | None, rank: int | None
) -> RankMemory:
    if not isinstance(model, nn.Module):
        raise OperationError(
            f"memory_report was given a {type(model).__name__} where a model is needed; call it as "
            "memory_report(model, optimizer)"
        )
    if not isinstance(optimizer, DistributedOptimizer):
        raise OperationError(
            f"memory_report was given a {type(optimizer).__name__} where a DistributedOptimizer is needed; "
            "in one process, make one on a communicator of one rank"
        )
    ledger, scalars = _Ledger(), 0
    parameters, gradients = _Line(), _Line()
    gathered = _add_parameters(parameters, model, optimizer, ledger)
    buffers = ledger.nbytes(model.buffers())
    _add_gradients(gradients, optimizer, ledger)
    staging = _staging(model, optimizer, ledger)
    state, scalars = _optimizer_state(optimizer, ledger)
    sharding, sync, update = optimizer.sharding, optimizer.reducer, optimizer.update
    if sharding is not None:
        scalars += ledger.nbytes(
            each for unit in sharding.units for held in unit.held for each in held.placeholders
        )
    waited = sync.peak_waiting_nbytes if isinstance(sync, ShardedGradients) else 0
    rooms = sync.staging_nbytes if isinstance(sync, ShardedGradients) else 0
    devices = {parameter.device for parameter in _trained(optimizer)}
    return RankMemory(
        rank=optimizer.dp_comm.rank if rank is None else rank,
        ranks=optimizer.dp_comm.size,
        sharers=1 if optimizer.node_shared is None else optimizer.node_shared.ranks,
        state={PARAMETERS: parameters.done(), GRADIENTS: gradients.done(), OPTIMIZER: state.done()},
        staging_nbytes=staging,
        peak_staging_nbytes=max(staging, rooms + waited),
        gathered_nbytes=gathered,
        peak_gathered_nbytes=0 if sharding is None else sharding.unshard_stats.peak_nbytes,
        peak_gathered_units=0 if sharding is None else sharding.unshard_stats.peak_units,
        peak_offload_nbytes=0 if update is None else update.offload.peak_nbytes,
        peak_activations_nbytes=None if activations is None else activations.peak_nbytes,
        buffers_nbytes=buffers,
        scalars_nbytes=scalars,
        process=process_memory(next(iter(devices), None)),
    )


def _trained(optimizer: DistributedOptimizer) -> list[Tensor]:
    """The parameters whose gradients are averaged; of a sharded model perhaps without values."""
    return optimizer.reducer.parameters


def _add_parameters(line: _Line, model: nn.Module, optimizer: DistributedOptimizer, ledger: _Ledger) -> int:
    """Returns the bytes of units that are gathered."""
    sharding, common, ranks = optimizer.sharding, optimizer.node_shared is not None, optimizer.dp_comm.size
    if sharding is not None:
        held = [each for unit in sharding.units for each in unit.held]
        line.hold(*ledger.places(each.flat if common else each.block.own for each in held), common=common)
        for each in held:
            _add_bucket(line, each.block.bucket, each.flat.element_size(), 1 if common else ranks)
        return ledger.nbytes(each.flat for each in held)
    blocks = optimizer.blocks
    line.hold(*ledger.places(block.flat for block in blocks), common=common)
    for block in blocks:
        _add_bucket(line, block.bucket, block.own.element_size(), 1)
    in_blocks = {id(parameter) for parameter in _trained(optimizer)} if blocks else set()
    others = {id(p): p for p in (*_trained(optimizer), *model.parameters()) if id(p) not in in_blocks}
    line.hold(*ledger.places(others.values()))
    line.formula_nbytes += sum(parameter.nbytes for parameter in others.values())
    return 0


def _add_gradients(line: _Line, optimizer: DistributedOptimizer, ledger: _Ledger) -> None:
    sync = optimizer.reducer
    held = sync.shards if isinstance(sync, ShardedGradients) else sync.flats
    parts = shares(GRADIENTS, optimizer.zero_stage, optimizer.dp_comm.size)
    line.hold(*ledger.places(held))
    for bucket, flat in zip(sync.buckets, held, strict=True):
        _add_bucket(line, bucket, flat.element_size(), parts)


def _add_bucket(line: _Line, bucket: Bucket, itemsize: int, parts: int) -> None:
    """The formula knows of its elements; its padding comes on top."""
    line.formula_nbytes += Fraction(bucket.edges[-1] * itemsize, parts)
    line.padding_nbytes += Fraction(bucket.padding * itemsize, parts)


def _staging(model: nn.Module, optimizer: DistributedOptimizer, ledger: _Ledger) -> int:
    sync = optimizer.reducer
    rooms = [buffer.memory for buffer in sync.staging] if isinstance(sync, ShardedGradients) else []
    loose = [own_gradient(parameter) for parameter in (*_trained(optimizer), *model.parameters())]
    return ledger.nbytes([*rooms, *optimizer.averages, *loose])


def _optimizer_state(optimizer: DistributedOptimizer, ledger: _Ledger) -> tuple[_Line, int]:
    """The line, and the bytes of counters beside it."""
    update, line = optimizer.update, _Line()
    groups = {
        id(parameter): number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    trained = _trained(optimizer)
    if update is None:
        found = [(p, p.numel(), dict(optimizer.state.get(p, {}))) for p in trained]
    else:
        found = [(trained[piece.member], piece.numel, state) for piece, state in update.pieces_with_states()]
        line.hold(*ledger.places(master for _, master in update.masters_apart()))
        line.disk_nbytes += update.offload.nbytes()
    values = [[value for key, value in state.items() if key not in COUNTERS] for _, _, state in found]
    line.hold(*ledger.places(tensor for each in values for tensor in _tensors(each)))
    scalars = ledger.nbytes(tensor for _, _, state in found for tensor in _tensors(state))
    per_element = _per_element([(groups[id(p)], state) for p, _, state in found], len(optimizer.param_groups))
    for parameter, numel, state in found:
        if not any(isinstance(value, Tensor) for value in state.values()):
            line.pending_nbytes += numel * per_element[groups[id(parameter)]]
    if update is None:
        line.formula_nbytes += sum(p.numel() * per_element[groups[id(p)]] for p in trained)
    else:
        _add_state_formula(line, optimizer, update, [per_element[groups[id(p)]] for p in trained])
    return line, scalars


def _add_state_formula(
    line: _Line, optimizer: DistributedOptimizer, update: ShardedStep, per_element: Sequence[int]
) -> None:
    """Of masters and moments, of which a shard has none for its padding.

    per_element   of each parameter, bytes of moments
    """
    parts = shares(OPTIMIZER, optimizer.zero_stage, optimizer.dp_comm.size)
    master_nbytes = {id(block): master.element_size() for block, master in update.masters_apart()}
    for block in update.blocks:
        apart = master_nbytes.get(id(block), 0)
        edges = block.bucket.edges
        whole = sum(
            (stop - start) * (apart + per_element[member])
            for member, start, stop in zip(block.bucket.members, edges[:-1], edges[1:], strict=True)
        )
        own = sum(piece.numel * (apart + per_element[piece.member]) for piece in block.shard.pieces)
        line.formula_nbytes += Fraction(whole, parts)
        line.padding_nbytes += own - Fraction(whole, parts)


def _per_element(states: Sequence[tuple[int, State]], groups: int) -> list[int]:
    """For each of the optimizer's groups, the bytes of state for an element of its parameters.

    states   (the group, the state) of all that this rank steps on; a group of which it has nothing is taken
             to be as the others
    """
    kinds: list[dict[str, int]] = [{} for _ in range(groups)]
    for group, state in states:
        for key, value in state.items():
            if isinstance(value, Tensor) and key not in COUNTERS:
                kinds[group][key] = value.element_size()
    everything = {key: nbytes for kind in kinds for key, nbytes in kind.items()}
    return [sum((kind or everything).values()) for kind in kinds]


def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors in an optimizer's state, however deep."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


# --- showing --------------------------------------------------------------------------------------


def _formula(of_rank: RankMemory, optimizer: DistributedOptimizer) -> str:
    """As "2Φ + 14Φ/p", with the bytes that are really kept of a parameter, and what is not trained apart."""
    trained = _trained(optimizer)
    count = sum(parameter.numel() for parameter in trained)
    whole = divided = common = frozen = Fraction(0)
    for what, line in of_rank.state.items():
        is_divided = optimizer.zero_stage >= SHARDED_FROM[what] and not line.common_nbytes
        nbytes = line.formula_nbytes * (of_rank.ranks if is_divided else 1)
        if what == PARAMETERS:
            frozen = nbytes - sum(parameter.nbytes for parameter in trained)
            nbytes -= frozen
        if line.common_nbytes:
            common += nbytes
        elif is_divided:
            divided += nbytes
        else:
            whole += nbytes
    terms = [f"{float(common / count):.4g}Φ in common"] if common else []
    terms += [f"{float(whole / count):.4g}Φ"] if whole else []
    terms += [f"{float(divided / count):.4g}Φ/p"] if divided else []
    terms += [f"{format_nbytes(float(frozen))} frozen"] if frozen else []
    return " + ".join(terms) or "0"


def _rows(memory: RankMemory) -> Iterator[tuple[str, ...]]:
    """what, where, now, at most, formula, beyond it, padding"""
    for what, line in memory.state.items():
        places = {place: nbytes for place, nbytes in line.by_place.items() if nbytes} or {"host": 0}
        theory = (
            format_nbytes(float(line.formula_nbytes)),
            _signed(line.beyond_nbytes),
            _signed(line.padding_nbytes),
        )
        for number, (place, nbytes) in enumerate(places.items()):
            yield (
                what if not number else "",
                place,
                format_nbytes(nbytes),
                "",
                *(theory if not number else "   "),
            )
        if line.pending_nbytes:
            yield "  not made yet", "", "", "", "", _signed(Fraction(-line.pending_nbytes)), ""
        if line.unexplained_nbytes:
            yield "  not explained", "", "", "", "", _signed(line.unexplained_nbytes), ""
    units = f"units in flight ({memory.peak_gathered_units})" if memory.peak_gathered_units else ""
    for what, now, peak in (
        ("gradients on their way", memory.staging_nbytes, memory.peak_staging_nbytes),
        (units, memory.gathered_nbytes, memory.peak_gathered_nbytes),
        ("blocks from disk", None, memory.peak_offload_nbytes),
        ("activations", None, memory.peak_activations_nbytes),
        ("buffers of the model", memory.buffers_nbytes, None),
        ("counters, placeholders", memory.scalars_nbytes, None),
        ("process: resident", memory.process.resident_nbytes, memory.process.peak_resident_nbytes),
        ("process: its share", memory.process.proportional_nbytes, None),
        ("process: on the GPU", memory.process.device_nbytes, memory.process.peak_device_nbytes),
    ):
        if now or peak:
            yield what, "", _shown(now), _shown(peak), "", "", ""


def _shown(nbytes: int | None) -> str:
    return "" if nbytes is None else format_nbytes(nbytes)


def _signed(nbytes: Fraction) -> str:
    if not nbytes:
        return "0 B"
    sign, size = "-" if nbytes < 0 else "", abs(float(nbytes))
    return f"{sign}{size:.2g} B" if size < 10 and nbytes.denominator > 1 else f"{sign}{format_nbytes(size)}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return float(value) if isinstance(value, Fraction) else value
