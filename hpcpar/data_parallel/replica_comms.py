"""Ranks over which the gradient of each parameter is averaged.

Most parameters have a copy on every rank of the optimizer's communicator. Others note that fewer ranks have
one (`ParameterInfo.replicas`): the experts of a mixture are spread over ranks, each of which brings them the
tokens of all.

    rank                       0       1       2       3          dp=4, ep=2, so edp=2
    router, attention, …       x       x       x       x          summed over all four, divided by 4
    experts 0, 1               x               x                  summed over ranks 0 and 2, divided by 4
    experts 2, 3                       x               x          summed over ranks 1 and 3, divided by 4

A gradient is summed over the ranks with a copy and divided by the number of all ranks of the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from hpcpar.data_parallel.parameters import Named, agree_on_parameters
from hpcpar.parameter_info import info_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    from hpcpar.comm import Communicator
    from hpcpar.comm.loans import Loan


class ReplicaComms:
    """Communicators of the replicas of some parameters, each once.

    dp_comm      of those that note no other; comes first
    parameters   collective calls that follow need all of them, in the same order on the ranks that share them
    """

    def __init__(self, dp_comm: Communicator, parameters: Iterable[Tensor] = ()) -> None:
        self.dp_comm = dp_comm
        noted = dict.fromkeys(info_of(parameter).replicas for parameter in parameters)
        self._comm_of: dict[Hashable, Communicator] = {None: dp_comm}
        self._comm_of |= {comm: comm for comm in noted if comm is not None}
        self._loans: list[Loan] = []

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

    def size(self, replicas: Hashable) -> int:
        """Return the number of ranks with a copy."""
        return self._comm_of[replicas].size

    def share(self, replicas: Hashable) -> float:
        """Return the ranks with a copy over all ranks: an average over the former times it is a gradient."""
        return self._comm_of[replicas].size / self.dp_comm.size

    def lend(self, purpose: str) -> ReplicaComms:
        """Return communicators of the same ranks for calls in another order, on loan while the result lives.

        Collective.
        """
        lent = ReplicaComms(self.dp_comm)
        for replicas, comm in self._comm_of.items():
            loan = comm.lend(purpose)
            lent._loans.append(loan)
            lent._comm_of[replicas] = loan.comm
        lent.dp_comm = lent._comm_of[None]
        return lent

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
