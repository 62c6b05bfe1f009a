"""Measure the memory that a rank's tensors take, beside the formula of ZeRO (`planner.memory`).

Every storage is counted once, however many tensors view it; a freed one has no bytes. The formula comes from
the buckets' integers and the types that are kept. The difference must be the padding of buckets to equal
shards and the rounding of the shards, which are computed too: nothing may be left unexplained.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hpcpar.autograd.held_parameter import own_gradient
from hpcpar.data_parallel.buckets import Bucket
from hpcpar.data_parallel.distributed_optimizer import DistributedOptimizer
from hpcpar.data_parallel.process_memory import process_memory
from hpcpar.data_parallel.rank_memory import MemoryReport, RankMemory, StateLine
from hpcpar.data_parallel.saved_activations import Activations, storage_id, storage_nbytes
from hpcpar.data_parallel.sharded_step import ShardedStep, State
from hpcpar.data_parallel.unit_plan import tensors_in
from hpcpar.errors import OperationError
from hpcpar.planner.memory import GRADIENTS, OPTIMIZER, PARAMETERS, SHARDED_FROM, shards
from hpcpar.units import format_nbytes

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

COUNTERS = ("step", "eta", "mu")
"""Scalars that torch's optimizers keep for a whole parameter."""


def memory_report(
    model: nn.Module,
    optimizer: DistributedOptimizer,
    comm: Communicator | None = None,
    *,
    activations: Activations | None = None,
) -> MemoryReport:
    """Measure the memory of the model and its optimizer on this rank, or, with `comm`, on all of its ranks.

        with hpcpar.watch_activations(model) as activations:
            loss(model(tokens)).backward()
        optimizer.step()
        print(hpcpar.memory_report(model, optimizer, comm, activations=activations).as_record())

    comm          collective on it then, and the same report on all of its ranks
    activations   as measured in a microbatch

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


class _Ledger:
    """Count every storage once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def places(self, tensors: Iterable[Tensor | None]) -> tuple[int, int]:
        """Return the bytes on a device and on the host, of storages not counted before."""
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
    ledger = _Ledger()
    state, gathered, scalars = _state(model, optimizer, ledger)
    buffers = ledger.nbytes(model.buffers())
    staging = _staging(model, optimizer, ledger)
    sharding, sync, update = optimizer.sharding, optimizer.reducer, optimizer.update
    if sharding is not None:
        scalars += ledger.nbytes(
            each for unit in sharding.units for held in unit.groups for each in held.placeholders
        )
    devices = {parameter.device for parameter in _trained(optimizer)}
    return RankMemory(
        rank=optimizer.dp_comm.rank if rank is None else rank,
        ranks=optimizer.replica_comms.shards(None),
        sharers=1 if optimizer.node_shared is None else optimizer.node_shared.ranks,
        state=state,
        staging_nbytes=staging,
        peak_staging_nbytes=max(staging, sync.staging_nbytes + sync.peak_waiting_nbytes),
        gathered_nbytes=gathered,
        peak_gathered_nbytes=0 if sharding is None else sharding.unshard_stats.peak_nbytes,
        peak_gathered_units=0 if sharding is None else sharding.unshard_stats.peak_units,
        peak_offload_nbytes=0 if update is None else update.offload.peak_nbytes,
        peak_activations_nbytes=None if activations is None else activations.peak_nbytes,
        buffers_nbytes=buffers,
        scalars_nbytes=scalars,
        process=process_memory(next(iter(devices), None)),
    )


def model_state(model: nn.Module, optimizer: DistributedOptimizer) -> dict[str, StateLine]:
    """Measure the model state on this rank by part, and nothing else: it takes no system calls."""
    return _state(model, optimizer, _Ledger())[0]


def _state(
    model: nn.Module, optimizer: DistributedOptimizer, ledger: _Ledger
) -> tuple[dict[str, StateLine], int, int]:
    """Return the model state by part, the bytes of unsharded units, and those of counters."""
    parameters, gradients = StateLine(), StateLine()
    gathered = _add_parameters(parameters, model, optimizer, ledger)
    _add_gradients(gradients, optimizer, ledger)
    state, scalars = _optimizer_state(optimizer, ledger)
    return {PARAMETERS: parameters, GRADIENTS: gradients, OPTIMIZER: state}, gathered, scalars


def _trained(optimizer: DistributedOptimizer) -> list[Tensor]:
    """Return the parameters whose gradients are averaged; those of a sharded model may have no values."""
    return optimizer.reducer.parameters


def _add_parameters(
    line: StateLine, model: nn.Module, optimizer: DistributedOptimizer, ledger: _Ledger
) -> int:
    """Add the parameters; return the bytes of unsharded units."""
    sharding, common, comms = optimizer.sharding, optimizer.node_shared is not None, optimizer.replica_comms
    if sharding is not None:
        held = [each for unit in sharding.units for each in unit.groups]
        line.hold(*ledger.places(each.flat if common else each.block.own for each in held), common=common)
        for each in held:
            bucket = each.block.bucket
            ranks = 1 if common else comms.shards(bucket.replicas)
            _add_bucket(line, bucket, each.flat.element_size(), ranks)
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


def _add_gradients(line: StateLine, optimizer: DistributedOptimizer, ledger: _Ledger) -> None:
    reducer = optimizer.reducer
    line.hold(*ledger.places(reducer.flats))
    for bucket, flat in zip(reducer.buckets, reducer.flats, strict=True):
        ranks = optimizer.replica_comms.shards(bucket.replicas)
        parts = shards(GRADIENTS, optimizer.zero_stage, ranks)
        of_formula = Fraction(bucket.edges[-1] * flat.element_size(), parts)
        line.formula_nbytes += of_formula
        # Shards of whole matrices are longer or shorter than the formula's.
        line.padding_nbytes += flat.nbytes - of_formula


def _add_bucket(line: StateLine, bucket: Bucket, itemsize: int, parts: int) -> None:
    line.formula_nbytes += Fraction(bucket.edges[-1] * itemsize, parts)
    line.padding_nbytes += Fraction(bucket.padding * itemsize, parts)


def _staging(model: nn.Module, optimizer: DistributedOptimizer, ledger: _Ledger) -> int:
    buffers = [buffer.memory for buffer in optimizer.reducer.staging]
    loose = [own_gradient(parameter) for parameter in (*_trained(optimizer), *model.parameters())]
    return ledger.nbytes([*buffers, *optimizer.averages, *loose])


def _optimizer_state(optimizer: DistributedOptimizer, ledger: _Ledger) -> tuple[StateLine, int]:
    """Return the optimizer state, and the bytes of counters beside it."""
    update, line = optimizer.update, StateLine()
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
    line.hold(*ledger.places(tensor for each in values for tensor in tensors_in(each)))
    scalars = ledger.nbytes(tensor for _, _, state in found for tensor in tensors_in(state))
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
    line: StateLine, optimizer: DistributedOptimizer, update: ShardedStep, per_element: Sequence[int]
) -> None:
    """Add masters and moments to the formula; a shard has none for its padding.

    per_element   bytes of moments per element, for each parameter
    """
    master_nbytes = {id(block): master.element_size() for block, master in update.masters_apart()}
    for block in update.blocks:
        apart = master_nbytes.get(id(block), 0)
        ranks = optimizer.replica_comms.shards(block.bucket.replicas)
        parts = shards(OPTIMIZER, optimizer.zero_stage, ranks)
        whole = sum(
            (stop - start) * (apart + per_element[member])
            for member, (start, stop) in block.bucket.ranges.items()
        )
        own = sum(piece.numel * (apart + per_element[piece.member]) for piece in block.shard.pieces)
        line.formula_nbytes += Fraction(whole, parts)
        line.padding_nbytes += own - Fraction(whole, parts)


def _per_element(states: Sequence[tuple[int, State]], groups: int) -> list[int]:
    """Return the bytes of state per element, for each of the optimizer's groups.

    states   (group, state) of all that this rank steps on; a group of which it has nothing is taken to be
             as the others
    """
    kinds: list[dict[str, int]] = [{} for _ in range(groups)]
    for group, state in states:
        for key, value in state.items():
            if isinstance(value, Tensor) and key not in COUNTERS:
                kinds[group][key] = value.element_size()
    everything = {key: nbytes for kind in kinds for key, nbytes in kind.items()}
    return [sum((kind or everything).values()) for kind in kinds]


def _formula(of_rank: RankMemory, optimizer: DistributedOptimizer) -> str:
    """Return the formula as text, "2Φ + 14Φ/p", with the widths in use, and frozen parameters apart."""
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
