"""The tp axis as layers see it: who computes a layer together, and in which way they communicate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcpar.errors import LayoutError

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


@dataclass(frozen=True)
class Sharers:
    """Where there are fewer heads than ranks: who holds the same head, and one rank for each head.

    same      ranks with this rank's head, over whom the gradients of its weights are summed
    distinct  ranks with one head each, over whom those weights are split
    """

    same: Communicator
    distinct: Communicator


class TensorParallel:
    """Ranks that share each layer, and how.

    comm               the ranks
    sequence_parallel  between the layers each rank has its part of the sequence, dim -2: norms, dropout and
                       residuals are computed once instead of on every rank
    overlap            in backward, inputs' gradients travel while weights' gradients are computed
    gather_again       with sequence_parallel: a column-parallel layer keeps its part of the input and gathers
                       the whole once more for backward, instead of keeping the whole
    chunks             with sequence_parallel: parts in which gathers and reduce-scatters run beside products
    twice              gradients can be differentiated again, without overlap, gather_again and chunks

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
        """A communicator by itself stands for the defaults."""
        return tp if isinstance(tp, TensorParallel) else cls(tp)

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    def sharers(self, heads: int) -> Sharers:
        """Of heads that are fewer than ranks; collective when first asked for so many."""
        if heads not in self._sharers:
            per_head = self.size // heads
            head, place = divmod(self.rank, per_head)
            same = self.comm.split(head, key=place, name=f"{self.comm.name}-same-head")
            distinct = self.comm.split(place, key=head, name=f"{self.comm.name}-distinct-heads")
            assert same is not None, "every rank has a head"
            assert distinct is not None, "every rank has a place"
            self._sharers[heads] = Sharers(same, distinct)
        return self._sharers[heads]
