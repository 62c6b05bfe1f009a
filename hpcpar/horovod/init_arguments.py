"""The arguments of `hvd.init`, read on each rank and compared by all before anything begins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcpar.errors import OperationError
from hpcpar.horovod.process_sets import ranks_of_communicator, whole_ranks

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


@dataclass(frozen=True)
class InitArguments:
    """The arguments of `init`, read and in one form.

    ranks          of the whole job, in their order; None: all
    process_sets   to register at once
    dynamic        others may come later
    """

    ranks: tuple[int, ...] | None = None
    process_sets: tuple[Any, ...] = ()
    dynamic: bool = False

    @classmethod
    def of(cls, comm: Any, process_sets: Any) -> InitArguments:
        """Read them; ValueError for what `init` does not take."""
        dynamic = isinstance(process_sets, str) and process_sets.lower() == "dynamic"
        if dynamic or process_sets is None:
            return cls(_ranks_of(comm), (), dynamic)
        if isinstance(process_sets, str) or not isinstance(process_sets, Iterable):
            raise OperationError(
                f"init(process_sets={process_sets!r}): give a list of process sets, such as "
                f'[hvd.ProcessSet([0, 1])], or "dynamic"'
            )
        return cls(_ranks_of(comm), tuple(process_sets))

    def part_of(self, rank: int) -> tuple[int, ...] | None:
        """Return the ranks that this rank of the job starts with, itself among them; None: all."""
        return self.ranks if self.ranks is None or rank in self.ranks else (rank,)


def _ranks_of(comm: Any) -> tuple[int, ...] | None:
    """Return the ranks of the job that `init(comm=…)` starts on; None: all."""
    if comm is None:
        return None
    if hasattr(comm, "Get_rank"):
        return tuple(ranks_of_communicator(comm, "init(comm=…)"))
    ranks = whole_ranks(comm, f"init(comm={comm!r})")
    if len(set(ranks)) < len(ranks):
        raise OperationError(f"init(comm={ranks}): a rank comes twice; name each once")
    return tuple(ranks) or None


def fail_together(world: Communicator, failure: Exception | None) -> None:
    """Raise the same on all ranks where any has failed. Collective."""
    own = "" if failure is None else str(failure) or type(failure).__name__
    told = world.unchecked("horovod").allgather_object(own)
    texts = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text]
    if failure is not None and len(texts) == world.size and len(set(told)) == 1:
        raise failure
    if texts:
        raise OperationError("hvd.init() failed. " + "; ".join(texts[:4])) from failure


def agreed(world: Communicator, asked: InitArguments) -> tuple[Communicator, bool]:
    """Return the communicator of the ranks that start together, and True if any says "dynamic". Collective.

    errors   OperationError on every rank for ranks that are not there, and where ranks gave different ones
    """
    told = world.unchecked("horovod").allgather_object((asked.ranks, asked.dynamic))
    everyone = tuple(range(world.size))
    parts = [InitArguments(ranks).part_of(rank) or everyone for rank, (ranks, _) in enumerate(told)]
    away = [list(ranks) for ranks, _ in told if ranks is not None and not set(ranks) <= set(everyone)]
    if away:
        raise OperationError(f"init(comm={away[0]}): there are ranks 0 to {world.size - 1} only")
    for rank, part in enumerate(parts):
        for other in part:
            if parts[other] != part:
                raise OperationError(
                    f"hvd.init() was to start on ranks {list(part)} by rank {rank}, and on ranks "
                    f"{list(parts[other])} by rank {other}; all of a list must give the same list"
                )
    own = parts[world.rank]
    dynamic = any(told[rank][1] for rank in own)
    if own == everyone:
        return world, dynamic
    base = world.split(min(own), own.index(world.rank), "horovod")
    assert base is not None, "every rank has a color"
    return base, dynamic
