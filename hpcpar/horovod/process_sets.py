"""Process sets: subsets of the ranks that have collectives of their own."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcpar.horovod.basics import Context
    from hpcpar.horovod.engine import Engine


class ProcessSet:
    """A subset of the ranks with collectives of its own; made of ranks, or of an mpi4py communicator.

    process_set_id   0 for all ranks, 1, 2, … for others; None before it is registered and after removal
    ranks            in ascending order
    mpi_comm         the communicator that it was made of, if it was

    It becomes usable by `init(process_sets=[…])` or `add_process_set`.
    errors   ValueError for what is neither, and for ranks that are no whole numbers
    """

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        self.process_set_id: int | None = None
        self.mpi_comm: Any = None
        self.ranks: list[int] | None = None
        self._context: Context | None = None
        self._engine: Engine | None = None
        if hasattr(ranks_or_comm, "Get_rank"):
            self.mpi_comm = ranks_or_comm
            return
        ranks = whole_ranks(ranks_or_comm, "a process set")
        self.ranks = sorted(ranks)

    def size(self) -> int | None:
        """Return the number of its ranks; None before it is registered."""
        return None if self._context is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's position in it; None before it is registered.

        errors   ValueError on a rank that does not belong to it
        """
        if self._context is None or self.ranks is None:
            return None
        if not self.included():
            raise ValueError(f"rank {self._context.rank} does not belong to {self}; ask included() first")
        return self.ranks.index(self._context.rank)

    def included(self) -> bool | None:
        """Return True if this process belongs to it; None before it is registered."""
        return None if self._context is None or self.ranks is None else self._context.rank in self.ranks

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"
        )

    __repr__ = __str__

    def _attach(self, context: Context, number: int, ranks: Sequence[int], engine: Engine | None) -> None:
        self._context, self.process_set_id, self._engine = context, number, engine
        self.ranks = list(ranks)

    def _detach(self) -> None:
        self._context = self._engine = self.process_set_id = None


def whole_ranks(asked: Any, what: str) -> list[int]:
    """Return the ranks of a list, also of NumPy's numbers; ValueError for all that is none."""
    with suppress(TypeError):
        ranks = list(asked)
        if not any(isinstance(rank, bool) for rank in ranks):
            return [operator.index(rank) for rank in ranks]
    raise ValueError(
        f"{what}: found {asked!r} where a list of ranks, whole numbers, such as [0, 1], or an mpi4py "
        f"communicator belongs"
    )


def ranks_of_communicator(comm: Any, what: str) -> list[int]:
    """Return the ranks in the whole job of an mpi4py communicator's processes, without asking them.

    errors   ValueError for one that has been freed, that is of two groups, or of other jobs' processes, too
    """
    if not comm or comm.Is_inter():
        raise ValueError(
            f"{what}: found MPI.COMM_NULL, a communicator that has been freed, or one of two groups; a "
            f"process that is to be alone gives MPI.COMM_SELF"
        )
    from hpcpar.transport.mpi_library import ranks_in_world

    ranks = list(ranks_in_world(comm))
    if min(ranks) < 0:
        raise ValueError(f"{what}: {comm!r} has processes that are not of this job; give one of its ranks")
    return ranks


global_process_set = ProcessSet([])
"""All ranks."""


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set. Collective over all ranks, members or not.

    errors   ValueError unless HOROVOD_DYNAMIC_PROCESS_SETS=1 or init(process_sets="dynamic"), and for a
             set that exists already or of ranks that do not
    """
    return register(_dynamic_context(), [process_set])[0]


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a process set. Collective over all ranks; False for that of all ranks and unknown ones.

    errors   ValueError unless process sets are dynamic, see `add_process_set`
    """
    return remove(_dynamic_context(), process_set)


def _dynamic_context() -> Context:
    from hpcpar.horovod.basics import the_context

    context = the_context()
    if not context.dynamic:
        raise ValueError(
            "process sets can be added and removed only with HOROVOD_DYNAMIC_PROCESS_SETS=1 in the "
            'environment, or after hvd.init(process_sets="dynamic")'
        )
    return context


def register(context: Context, asked: Sequence[ProcessSet | Sequence[int] | Any]) -> list[ProcessSet]:
    """Make process sets usable. Collective over all ranks, which must ask for the same, in the same order.

    A set by an mpi4py communicator is the one that each rank is in: ranks may name different ones.
    errors   ValueError on every rank, and no set is made: for ranks that are not there or come twice, for a
             set that exists already, and where ranks ask for different ones
    """
    counts = context.engine.allgather_object(len(asked))
    if len(set(counts)) > 1:
        raise ValueError(
            f"ranks asked for different numbers of process sets in the same place: {counts}; all ranks must "
            f"add the same ones in the same order"
        )
    known = set(context.process_sets)
    try:
        return [_register(context, one) for one in asked]
    except ValueError:
        for made in [one for number, one in context.process_sets.items() if number not in known]:
            remove(context, made)
        raise


def _register(context: Context, asked: ProcessSet | Sequence[int] | Any) -> ProcessSet:
    chosen, complaint = None, ""
    try:
        chosen = asked if isinstance(asked, ProcessSet) else ProcessSet(asked)
        if chosen.mpi_comm is not None:
            chosen.ranks = _ranks_by_comm(context, chosen.mpi_comm)
        complaint = _complaint(context, chosen.ranks or [])
    except ValueError as error:
        complaint = str(error)
    own = () if chosen is None else tuple(chosen.ranks or ())
    told = context.engine.allgather_object(
        (complaint, chosen is not None and chosen.mpi_comm is not None, own)
    )
    wrong = [f"rank {rank}: {text}" for rank, (text, _, _) in enumerate(told) if text]
    if wrong:
        raise ValueError("; ".join(dict.fromkeys(text.partition(": ")[2] for text in wrong)))
    named = sorted({ranks for _, _, ranks in told})
    if len(named) > 1 and not all(is_by_comm for _, is_by_comm, _ in told):
        raise ValueError(
            f"ranks asked for different process sets in the same place: {[list(ranks) for ranks in named]}; "
            f"all ranks must add the same ones in the same order"
        )
    assert chosen is not None, "no rank complained"
    for ranks in named:
        number = context.next_process_set_id()
        engine = context.make_engine(ranks, f"process set {number}")
        one_of_them = chosen if ranks == own else ProcessSet(ranks)
        one_of_them._attach(context, number, ranks, engine)
        context.process_sets[number] = one_of_them
    return chosen


def _ranks_by_comm(context: Context, comm: Any) -> list[int]:
    ranks = ranks_of_communicator(comm, "a process set")
    places = {rank: place for place, rank in enumerate(context.base.world_ranks)}
    away = [rank for rank in ranks if rank not in places]
    if away:
        raise ValueError(
            f"a process set: ranks {away} of the job are in the communicator, but not among Horovod's; give "
            f"one of some of these"
        )
    return sorted(places[rank] for rank in ranks)


def _complaint(context: Context, ranks: Sequence[int]) -> str:
    missing = [rank for rank in ranks if not 0 <= rank < context.size]
    if missing or not ranks or len(set(ranks)) != len(ranks):
        return (
            f"a process set of ranks {list(ranks)} was asked for, but there are ranks 0 to "
            f"{context.size - 1}; name one or more of them, each once"
        )
    if any(known.ranks == list(ranks) for known in context.process_sets.values()):
        return f"a process set of ranks {list(ranks)} exists already; use that one, or remove it first"
    return ""


def remove(context: Context, process_set: ProcessSet) -> bool:
    """Make a process set unusable. Collective over all ranks.

    returns   False for the set of all ranks, and for one that is not registered
    """
    number = process_set.process_set_id
    if number in (None, 0) or context.process_sets.get(number or 0) is not process_set:
        return False
    assert number is not None
    engine = process_set._engine
    is_idle = all(context.engine.allgather_object(engine is None or not engine.is_busy))
    if engine is not None:
        context.engine_group.engines.remove(engine)
        if is_idle:
            engine.free()
        else:
            engine.close(f"{process_set} was removed while this was under way")
    del context.process_sets[number]
    process_set._detach()
    return True
