"""New parameters on their way from the rank that updated them to all others.

step        block 2 │ block 1 │ block 0            (blocks are numbered from the model's end)
             └ all-gather ─ ─ ─ ─ ─ ─ ─┐
                       └ all-gather ─ ─│─ ─ ─┐
                                 └ ─ ─ │─ ─ ─│─ ─ ─┐
forward                         embed ─┴ layers ───┴ head       each awaited just before it is needed
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hpcpar.data_parallel.flat_parameters import Block
from hpcpar.data_parallel.replica_comms import ReplicaComms
from hpcpar.data_parallel.shared_parameters import NodeSharedParameters, PendingUpdate
from hpcpar.uncompiled import uncompiled

if TYPE_CHECKING:
    from hpcpar.comm.compiled import Handle


class ParameterAllGather:
    """Makes each rank's part of the blocks everybody's.

    node_shared   the blocks exist once on each node
    blocks   none where every rank updates all parameters itself
    model    whose modules wait, each for its own parameters, when they are next called; None: nobody waits
             but `wait`
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        parameters: Sequence[Tensor],
        comms: ReplicaComms,
        *,
        node_shared: NodeSharedParameters | None,
        model: nn.Module | None,
    ) -> None:
        self._blocks = blocks
        self._comms = comms
        self._node_shared = node_shared
        self._under_way: dict[int, Handle | PendingUpdate] = {}
        """Not empty: it is in _UNDER_WAY, and outlives the optimizer that began it."""
        self._started: set[int] = set()
        self._hooks: list[Any] = []
        # Weakly, not by id: others get the ids of those that are gone.
        self._parameters = WeakIdKeyDictionary(dict.fromkeys(parameters))
        if model is not None:
            self._watch(model, parameters)

    def before_step(self) -> None:
        """All ranks have read what they need of the parameters as they are; to be called before a step."""
        self.wait()
        self._started.clear()
        if self._node_shared is not None:
            self._comms.dp_comm.barrier()

    def start(self, number: int) -> None:
        """Start the all-gather of a block whose own part is new; in the same order on all ranks."""
        if not self._blocks:
            return
        self._started.add(number)
        block = self._blocks[number]
        assert block.flat is not None, "only in stage 3 are there blocks of shards alone"
        if self._node_shared is not None:
            self._under_way[number] = self._node_shared.start(block.flat, block.own)
        else:
            comm = self._comms.shard_comm(block.bucket.replicas)
            self._under_way[number] = comm.start_allgather(
                block.own, counts=block.bucket.counts, out=block.flat
            )
        _UNDER_WAY.add(self)

    def start_remaining(self) -> None:
        """Start the all-gather of all blocks that were not started since `before_step`."""
        for number in reversed(range(len(self._blocks))):
            if number not in self._started:
                self.start(number)

    def wait(self, numbers: Sequence[int] | None = None) -> None:
        """Return when these blocks, by default all, are new on this rank."""
        for number in list(self._under_way) if numbers is None else numbers:
            handle = self._under_way.pop(number, None)
            if handle is not None:
                handle.wait()
        if not self._under_way:
            _UNDER_WAY.discard(self)

    def close(self) -> None:
        """Wait for all, and take the hooks off the model."""
        self.wait()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _watch(self, model: nn.Module, parameters: Sequence[Tensor]) -> None:
        number_of = {
            id(parameters[member]): number
            for number, block in enumerate(self._blocks)
            for member in block.bucket.members
        }
        for module in model.modules():
            held = {number_of[id(p)] for p in _read_by(module) if id(p) in number_of}
            if held:
                wait = _Wait(self, tuple(sorted(held)))
                # Before hooks that make a weight of others: torch.nn.utils.prune, weight_norm.
                self._hooks.append(module.register_forward_pre_hook(wait, prepend=True))
            hook = module.register_state_dict_pre_hook(_Wait(self, None))  # type: ignore[no-untyped-call]
            self._hooks.append(hook)


_UNDER_WAY: set[ParameterAllGather] = set()
"""The model's hooks know them weakly; each is kept here until its blocks have come."""


def wait_for_new(parameters: Iterable[Tensor]) -> None:
    """Return when parameters that are on their way are here, also those of an optimizer that is gone."""
    looked_at = list(parameters)
    for allgather in list(_UNDER_WAY):
        if any(parameter in allgather._parameters for parameter in looked_at):
            allgather.wait()


class _Wait:
    """A hook that waits for these blocks, by default for all.

    only_waits   for whoever computes several layers together and calls none of them: this must be called
    """

    only_waits = True

    def __init__(
        self, allgather: ParameterAllGather | None = None, numbers: Sequence[int] | None = None
    ) -> None:
        self._allgather = _nobody if allgather is None else weakref.ref(allgather)
        self._numbers = numbers

    def __reduce__(self) -> Any:
        """Wait, and be saved or copied as a hook that waits for nothing."""
        self()
        return _Wait, ()

    @uncompiled
    def __call__(self, *_: object) -> None:
        allgather = self._allgather()
        if allgather is not None and allgather._under_way:
            allgather.wait(self._numbers)


def _nobody() -> None:
    return None


def _read_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that a module reads when it is called, by itself or in children that nobody calls."""
    yield from module.parameters(recurse=_reads_its_childrens(module))
    for child in module.children():
        if _is_never_called(child):
            yield from _read_by(child)


def _reads_its_childrens(module: nn.Module) -> bool:
    """Return whether a module reads its children's parameters without calling them, as torch's attention."""
    is_torchs = type(module).__module__.startswith("torch.nn.")
    return is_torchs and not isinstance(module, nn.Sequential) and not _is_never_called(module)


def _is_never_called(module: nn.Module) -> bool:
    """Return whether a module only holds others, or parameters: a ModuleList, ParameterDict, plain Module."""
    return type(module).forward is nn.Module.forward
