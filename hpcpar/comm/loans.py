"""Communicators of the same ranks, for calls that come in another order than those on this one."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

if TYPE_CHECKING:
    from hpcpar.comm.communicator import Communicator

IN_USE = -1
"""Told by a rank, instead of a digest of the numbers of calls, of a communicator whose borrower it has."""


@dataclass(eq=False)
class Loan:
    """A communicator that is the borrower's as long as this object lives."""

    comm: Communicator


@dataclass
class Lent:
    """A communicator that is lent, or was: the borrower's loan may be gone."""

    comm: Communicator
    loan: weakref.ref[Loan] = field(init=False)


def lend(owner: Communicator, lent: list[Lent], purpose: str, label: str | None) -> Loan:
    """Lend a communicator, as `Communicator.lend`."""
    if owner.size == 1:
        return Loan(owner)
    agreed = -1
    if lent:
        calls = [
            IN_USE if each.loan() is not None else crc32(repr(each.comm.calls_of_lent).encode())
            for each in lent
        ]
        of_ranks = owner.unchecked("agreement").allgather(np.array(calls, dtype=np.int64), name="lend")
        of_ranks = of_ranks.reshape(owner.size, -1)
        gone = (of_ranks != IN_USE).all(axis=0)
        same = gone & (of_ranks == of_ranks[0]).all(axis=0)
        for each, is_left_alone in zip(lent, gone & ~same, strict=True):
            if is_left_alone:
                each.comm.abandon()
        agreed = int(same.argmax()) if same.any() else -1
    if agreed >= 0:
        chosen = lent[agreed]
    else:
        made = owner.split(0, owner.rank, f"{owner.name} {purpose}")
        assert made is not None, "every rank belongs to it"
        made.traffic.reset()
        made.traffic = owner.traffic
        chosen = Lent(made)
        lent.append(chosen)
    loan = Loan(chosen.comm.unchecked(label or owner.label))
    chosen.loan = weakref.ref(loan)
    return loan
