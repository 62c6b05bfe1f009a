"""`TensorParallel`: the ranks that share each layer, and their options of communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcpar.errors import LayoutError

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


@dataclass(frozen=True)
class Sharers:
    """Communicators of a layer with fewer heads than ranks.

    same      ranks with this rank's head; they sum the gradients of its weights
    distinct  one rank for each head; their weights make up the whole
    """

    same: Communicator
    distinct: Communicator

    def __deepcopy__(self, memo: Any) -> Sharers:
        return self


class TensorParallel:
    """Ranks that share each layer, and options of their communication.

    comm               tensor-parallel ranks
    sequence_parallel  shard the sequence (dim -2) between the layers: norms, dropout and residuals are
                       computed once instead of on every rank
    overlap            in backward, communicate input gradients while weight gradients are computed
    gather_again       with sequence_parallel: save the shard of a column-parallel layer's input, and gather
                       the whole again in backward
    chunks             with sequence_parallel: cut gathers and reduce-scatters into chunks that overlap with
                       the products
    twice              allow double backward; excludes overlap, gather_again and chunks

    source   Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti et al. 2022, arXiv 2205.05198
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        sequence_parallel: bool = False,
        overlap: bool = True,
        gather_again: bool = False,
        chunks: int = 1,
        twice: bool = False,
    ) -> None:
        if chunks < 1:
            raise LayoutError(f"chunks={chunks}; give 1 (everything at once) or more")
        if not sequence_parallel and (gather_again or chunks > 1):
            asked = "gather_again" if gather_again else f"chunks={chunks}"
            raise LayoutError(f"{asked} is about sequence parallelism; set sequence_parallel=True, too")
        if twice and (gather_again or chunks > 1):
            raise LayoutError("twice goes without gather_again and chunks; leave them out")
        self.comm = comm
        self.sequence_parallel = sequence_parallel
        self.overlap = overlap
        self.gather_again = gather_again
        self.chunks = chunks
        self.twice = twice
        self._sharers: dict[int, Sharers] = {}

    @classmethod
    def of(cls, tp: TensorParallel | Communicator) -> TensorParallel:
        """Wrap a communicator with the default options."""
        return tp if isinstance(tp, TensorParallel) else cls(tp)

    def __deepcopy__(self, memo: Any) -> TensorParallel:
        return self  # a copy of a model, as for an average of its weights, is on the same ranks

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    def sharers(self, heads: int) -> Sharers:
        """Communicators for fewer heads than ranks; the first call for a number of heads is collective."""
        if heads not in self._sharers:
            per_head = self.size // heads
            head, place = divmod(self.rank, per_head)
            same = self.comm.split(head, key=place, name=f"{self.comm.name}-same-head")
            distinct = self.comm.split(place, key=head, name=f"{self.comm.name}-distinct-heads")
            assert same is not None, "every rank has a head"
            assert distinct is not None, "every rank has a place"
            self._sharers[heads] = Sharers(same, distinct)
        return self._sharers[heads]
