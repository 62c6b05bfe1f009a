"""Steps of optimizers that ranks without data, which have joined, take part in with zeros."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcpar.comm import Communicator
    from hpcpar.comm.loans import Loan

MOST_RETIRED = 64
"""Optimizers that are gone, and whose first step a rank that has joined can still take part in."""


class ServedSteps:
    """Work of this rank in each optimizer's step after it has joined, and the communicators of the steps.

    serve   functions by the name of the step
    """

    def __init__(self, comm: Communicator) -> None:
        self.serve: dict[str, Callable[[], None]] = {}
        self._comm = comm
        self._loans: weakref.WeakKeyDictionary[Any, list[Loan]] = weakref.WeakKeyDictionary()
        self._step_on: dict[str, str] = {}
        self._retired: deque[str] = deque()

    def __bool__(self) -> bool:
        """True while optimizers have communicators of their own."""
        return bool(self._loans)

    def lend_communicator(self, borrower: object, step: str) -> Communicator:
        """Lend a communicator for the borrower's life: a returned one, or a new one. Collective.

        step   the step that uses it. What is put into `serve` for it is served after the borrower is gone,
               too, until the communicator is lent again
        Only inside an operation that is being carried out: the ranks agree, and wait for each other.
        """
        loan = self._comm.lend("gradients", "gradients")
        self._loans.setdefault(borrower, []).append(loan)
        self.serve.pop(self._step_on.get(loan.comm.name, ""), None)
        self._step_on[loan.comm.name] = step
        return loan.comm

    def retire(self, step: str) -> None:
        """Serve a step whose optimizer is gone on this rank a while longer; forget the oldest."""
        self._retired.append(step)
        if len(self._retired) > MOST_RETIRED:
            self.serve.pop(self._retired.popleft(), None)
