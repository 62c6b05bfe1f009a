"""Which rank has which layers: ranks that have the same names are in one position of the pipeline.

    rank                 0           1           2           3
    layers               0 1 6 7     2 3 4 5     0 1 6 7     2 3 4 5      pp=2 x dp=2, a V
    position             0           1           0           1

Nobody tells the pipeline's degree or its schedule, and they do not matter: positions together are the whole
model. One position alone is a model of which every rank has all, or its part of each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hpcpar.checkpoint.model_state import Names
from hpcpar.errors import CheckpointError

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

Groups = Sequence[Sequence[str]]
"""The names in each of an optimizer's groups."""


@dataclass(frozen=True)
class Member:
    """What a rank has: names, and those in its optimizer's groups; None without an optimizer."""

    names: Names
    groups: Groups | None

    @property
    def optimizer(self) -> str:
        return "no optimizer" if self.groups is None else f"an optimizer with {len(self.groups)} groups"


@dataclass(frozen=True)
class Positions:
    """Who is in which, and what they have together.

    of_ranks   the position of each rank; they are counted in the order of their first ranks
    digests    of each rank, of its names
    members    of each position the first rank's
    """

    of_ranks: tuple[int, ...]
    digests: tuple[str, ...]
    members: tuple[Member, ...]

    @classmethod
    def agree(cls, own: Member, comm: Communicator, doing: str) -> Positions:
        """Those of all ranks. Collective.

        errors   CheckpointError where their names or groups do not make one model and one optimizer; of
                 several ranks, PeerFailedError on every one, with that text
        """
        # Of thousands of ranks a digest each is little, and lists of names are many.
        digests = comm.allgather_object(own.names.digest)
        order = list(dict.fromkeys(digests))
        of_ranks = tuple(order.index(digest) for digest in digests)
        members = [own]
        if len(order) > 1:
            is_first = digests.index(own.names.digest) == comm.rank
            told = comm.allgather_object(own if is_first else None)
            members = [member for member in told if member is not None]
        positions = cls(of_ranks, tuple(digests), tuple(members))
        with comm.together(doing):
            positions.check()
            positions.require_groups_of(own)
        return positions

    def check(self) -> None:
        """CheckpointError unless they make one model and one optimizer."""
        self._require_apart()
        self._require_same_ties()
        self._require_one_optimizer()

    def require_groups_of(self, own: Member) -> None:
        """CheckpointError unless a rank's optimizer has the groups of its position."""
        position = self.of_ranks[self.digests.index(own.names.digest)]
        if _as_sets(own.groups) != _as_sets(self.members[position].groups):
            raise CheckpointError(
                f"this rank's optimizer has other groups than that of rank {self.first_rank(position)}, "
                "which has the same parameters; make them alike on both"
            )

    def first_rank(self, position: int) -> int:
        return self.of_ranks.index(position)

    @property
    def first_ranks(self) -> list[int]:
        """Of each position."""
        return [self.first_rank(position) for position in range(len(self.members))]

    def writes(self, position: int, name: str) -> bool:
        """Whether a tensor of a first name is for this position to write.

        It is for the first that has it under this name, else for the first that has its equal.
        """
        return position == next(number for having in self._having for number in having.get(name, ()))

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Further name -> first name, of all tensors that some rank has."""
        held = frozenset().union(*(member.names.all for member in self.members))
        return {
            name: first
            for member in self.members
            for name, first in member.names.aliases.items()
            if name in held or first in held
        }

    @cached_property
    def names(self) -> list[str]:
        """All that the whole model has."""
        names = [n for each in self.members for n in (*each.names.parameters, *each.names.buffers)]
        return list(dict.fromkeys([*names, *self.aliases, *self.aliases.values()]))

    @cached_property
    def groups(self) -> list[list[str]] | None:
        """The whole optimizer's groups, of first names."""
        if self.members[0].groups is None:
            return None
        return [
            list(dict.fromkeys(name for part in parts for name in part))
            for parts in zip(*(member.groups or () for member in self.members), strict=True)
        ]

    @cached_property
    def _having(self) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """Of each first name the positions that have it so, and those that have it by whatever name."""
        by_itself: dict[str, list[int]] = {}
        by_any: dict[str, list[int]] = {}
        for number, member in enumerate(self.members):
            for name in member.names.all:
                by_itself.setdefault(name, []).append(number)
                by_any.setdefault(member.names.first(name), []).append(number)
        return by_itself, by_any

    def _require_apart(self) -> None:
        """Replicas have all the same names; positions share buffers, and of parameters tied ones alone."""
        tied = {name for each in self.members for tie in each.names.tied.items() for name in tie}
        holder: dict[str, int] = {}
        for position, member in enumerate(self.members):
            for name in member.names.parameters:
                if holder.setdefault(name, position) != position and member.names.first(name) not in tied:
                    raise CheckpointError(self._not_apart(holder[name], position, name))

    def _not_apart(self, one: int, other: int, name: str) -> str:
        here, there = self.first_rank(one), self.first_rank(other)
        mine, theirs = self.members[one].names.all, self.members[other].names.all
        only = f"{here} has {min(mine - theirs)}" if mine - theirs else f"{there} has {min(theirs - mine)}"
        return (
            f"ranks {here} and {there} both have {name}, but only rank {only}; ranks of one position in a "
            "pipeline need all the same names, and those of different ones share no parameters but what the "
            "model's tied_names tells"
        )

    def _require_same_ties(self) -> None:
        firsts: dict[str, str] = {}
        for member in self.members:
            for name in member.names.all | member.names.tied.keys():
                first = member.names.first(name)
                if firsts.setdefault(name, first) != first:
                    raise CheckpointError(
                        f"{name} is the same as {firsts[name]} on some ranks, as {first} on others; give the "
                        "model on every rank the same tied_names"
                    )

    def _require_one_optimizer(self) -> None:
        found = {member.optimizer: self.first_rank(number) for number, member in enumerate(self.members)}
        if len(found) > 1:
            each = ", ".join(f"rank {rank} has {optimizer}" for optimizer, rank in found.items())
            raise CheckpointError(
                f"{each}; give all the same number of groups, empty ones too, in the same order"
            )
        group_of: dict[str, int] = {}
        for number, names in enumerate(self.groups or ()):
            for name in names:
                if group_of.setdefault(name, number) != number:
                    raise CheckpointError(
                        f"{name} is in group {group_of[name]} of the optimizer on some ranks, in group "
                        f"{number} on others; give each rank's optimizer the same groups in the same order"
                    )


def _as_sets(groups: Groups | None) -> list[set[str]] | None:
    return None if groups is None else [set(names) for names in groups]
