"""Ranks over which the gradient of each parameter is averaged.

Most parameters have a copy on every rank of the optimizer's communicator. Others note that fewer ranks have
one (`ParameterInfo.replicas`): the experts of a mixture are spread over ranks, each of which brings them the
tokens of all.

    rank                       0       1       2       3          dp=4, ep=2, so edp=2
    router, attention, …       x       x       x       x          summed over all four, divided by 4
    experts 0, 1               x               x                  summed over ranks 0 and 2, divided by 4
    experts 2, 3                       x               x          summed over ranks 1 and 3, divided by 4

A gradient is summed over the ranks with a copy and divided by the number of all ranks of the optimizer.

Shards are cut over all ranks with a copy, or over `shard_ranks` neighbours, as those of a node (HSDP):

    rank                       0       1       2       3          dp=4, shard_ranks=2
    shard                      0       1       0       1          gathered and reduce-scattered over 0, 1
                                                                  and over 2, 3; averaged over 0, 2 and 1, 3

source   Zhao et al. 2023, PyTorch FSDP, arXiv 2304.11277, section 3.2.2
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from hpcpar.data_parallel.parameters import Named, agree_on_parameters
from hpcpar.errors import LayoutError, OperationError
from hpcpar.parameter_info import info_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    from hpcpar.comm import Communicator
    from hpcpar.comm.loans import Loan


class ReplicaComms:
    """Communicators of the replicas of some parameters, each once.

    dp_comm      of those that note no other; comes first
    parameters   collective calls that follow need all of them, in the same order on the ranks that share them
    shard_ranks  neighbours of `dp_comm` over which shards are cut; None: all. Collective where it is given
    errors       OperationError for shard_ranks that do not divide dp_comm; LayoutError for experts of which
                 the groups of neighbours have different numbers of copies
    """

    def __init__(
        self, dp_comm: Communicator, parameters: Iterable[Tensor] = (), shard_ranks: int | None = None
    ) -> None:
        self.dp_comm = dp_comm
        noted = dict.fromkeys(info_of(parameter).replicas for parameter in parameters)
        self._comm_of: dict[Hashable, Communicator] = {None: dp_comm}
        self._comm_of |= {comm: comm for comm in noted if comm is not None}
        self._loans: list[Loan] = []
        self._shard_comm_of = dict(self._comm_of)
        self._across_of: dict[Hashable, Communicator] = {}
        if shard_ranks is None:
            return
        require_divisor(shard_ranks, dp_comm.size)
        if shard_ranks < dp_comm.size:
            group = dp_comm.rank // shard_ranks
            for replicas, comm in self._comm_of.items():
                within = comm.split(group, comm.rank, f"{comm.name}-shards")
                assert within is not None, "every rank gives a number"
                sizes = comm.allgather_object(within.size)
                if len(set(sizes)) > 1:
                    raise LayoutError(
                        f"shard_ranks={shard_ranks}: groups of so many neighbours have {sizes} copies of the "
                        "same experts; take a number that ep divides, or leave it out for all ranks"
                    )
                self._shard_comm_of[replicas] = within
                across = comm.split(within.rank, comm.rank, f"{comm.name}-replicas")
                assert across is not None, "every rank gives a number"
                self._across_of[replicas] = across

    @classmethod
    def given(cls, comms: Communicator | ReplicaComms, parameters: Iterable[Tensor]) -> ReplicaComms:
        """Return what was made for these parameters already, or make it for a communicator."""
        return comms if isinstance(comms, ReplicaComms) else cls(comms, parameters)

    def __iter__(self) -> Iterator[Hashable]:
        """Yield what `of` takes: None, and the communicators that parameters note."""
        return iter(self._comm_of)

    @property
    def is_one(self) -> bool:
        """True where all parameters have a copy on every rank."""
        return len(self._comm_of) == 1

    def of(self, replicas: Hashable) -> Communicator:
        """Return the communicator of what notes these replicas: a bucket or a parameter's record."""
        return self._comm_of[replicas]

    def shard_comm(self, replicas: Hashable) -> Communicator:
        """Return the ranks over which shards are cut."""
        return self._shard_comm_of[replicas]

    def across(self, replicas: Hashable) -> Communicator | None:
        """Return the ranks with the same shard; None where shards are cut over all ranks with a copy."""
        return self._across_of.get(replicas)

    def shards(self, replicas: Hashable) -> int:
        """Return the number of shards."""
        return self._shard_comm_of[replicas].size

    def share(self, replicas: Hashable) -> float:
        """Return the ranks with a copy over all ranks: an average over the former times it is a gradient."""
        return self._comm_of[replicas].size / self.dp_comm.size

    def lend(self, purpose: str) -> ReplicaComms:
        """Return communicators of the same ranks for calls in another order, on loan while the result lives.

        Collective.
        """
        lent = ReplicaComms(self.dp_comm)
        for own, theirs in (
            (self._comm_of, lent._comm_of),
            (self._shard_comm_of, lent._shard_comm_of),
            (self._across_of, lent._across_of),
        ):
            for replicas, comm in own.items():
                if own is self._shard_comm_of and comm is self._comm_of[replicas]:
                    theirs[replicas] = lent._comm_of[replicas]
                    continue
                loan = comm.lend(purpose)
                lent._loans.append(loan)
                theirs[replicas] = loan.comm
        lent.dp_comm = lent._comm_of[None]
        return lent

    @property
    def is_hybrid(self) -> bool:
        """True where shards are cut over some of the ranks with a copy."""
        return bool(self._across_of)

    def divided(self, named: Iterable[Named]) -> dict[Hashable, list[Named]]:
        """Return the parameters by their replicas."""
        found: dict[Hashable, list[Named]] = {replicas: [] for replicas in self._comm_of}
        for name, parameter in named:
            found[info_of(parameter).replicas].append((name, parameter))
        return found

    def agree_on_parameters(self, named: Sequence[Named], what: str = "parameters") -> None:
        """Hold each list of parameters equal on the ranks that have copies of them; as the function."""
        for replicas, some in self.divided(named).items():
            agree_on_parameters(some, self._comm_of[replicas], what)


def require_divisor(shard_ranks: int, ranks: int) -> None:
    """OperationError unless `shard_ranks` ranks divide all of them."""
    if not isinstance(shard_ranks, int) or shard_ranks < 1 or ranks % shard_ranks:
        fitting = ", ".join(str(each) for each in range(1, ranks + 1) if not ranks % each)
        raise OperationError(
            f"shard_ranks={shard_ranks!r} does not divide the {ranks} ranks of data parallelism into groups "
            f"that have a shard of everything each; give one of {fitting}"
        )
