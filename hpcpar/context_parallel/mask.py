"""Masks of attention: which keys each query sees, as integers.

Every mask here gives query i one interval of keys: from the start of its document, or of its window, up to
itself, or up to the end of either where attention is not causal.

    causal, documents of 3 and 4          causal, window 2            full, documents of 3 and 4
        keys 0 1 2 3 4 5 6                    0 1 2 3 4 5 6               0 1 2 3 4 5 6
    query 0  x                                x                           x x x
          1  x x                              x x                         x x x
          2  x x x                              x x                       x x x
          3        x                              x x                           x x x x
          4        x x                              x x                         x x x x
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hpcpar.errors import LayoutError
from hpcpar.partition import offsets


class Span(NamedTuple):
    """Consecutive numbers from `start` to before `stop`."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def within(self, other: Span) -> Span:
        """Return the common part, which may be empty."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))


@dataclass(frozen=True)
class Mask:
    """Pairs of query and key of a sequence; the same for each sequence of a batch.

    length      tokens of the whole sequence
    causal      query i sees no key after i
    window      query i sees keys at a distance below this; None: at any
    documents   tokens of each packed document, which sum to `length`: none sees another; None: there is one
    errors      LayoutError for lengths that there cannot be
    """

    length: int
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.length < 0:
            raise LayoutError(f"a sequence of length={self.length}; give 0 or more")
        if self.window is not None and self.window < 1:
            raise LayoutError(f"window={self.window}: a query sees itself, so give at least 1, or None")
        if self.documents is not None:
            if min(self.documents, default=1) < 1:
                raise LayoutError(f"documents={self.documents}: each has at least one token")
            if sum(self.documents) != self.length:
                raise LayoutError(
                    f"documents of {sum(self.documents)} tokens together in a sequence of {self.length}; "
                    "name all of them, padding as a document of its own"
                )

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Start of each document, and at last the end of the sequence."""
        return offsets(self.documents if self.documents is not None else (self.length,))

    def document(self, position: int) -> Span:
        """Return the document that has the token of this position."""
        number = bisect_right(self.starts, position) - 1
        return Span(self.starts[number], self.starts[number + 1])

    def parts(self, spans: tuple[Span, ...]) -> tuple[tuple[Span, Span], ...]:
        """Cut spans of positions at the borders of documents; return (document, part) in their order."""
        found = []
        for start, stop in spans:
            while start < stop:
                document = self.document(start)
                part = Span(start, min(stop, document.stop))
                found.append((document, part))
                start = part.stop
        return tuple(found)

    def keys(self, query: int) -> Span:
        """Return the positions of the keys that a query sees."""
        start, stop = self.document(query)
        reach = self.length if self.window is None else self.window
        return Span(max(start, query - reach + 1), query + 1 if self.causal else min(stop, query + reach))

    def area(self, spans: tuple[Span, ...]) -> int:
        """Count the pairs of the queries at these positions."""
        return sum(self._area_of_part(document, part) for document, part in self.parts(spans))

    def _area_of_part(self, document: Span, part: Span) -> int:
        reach = document.length if self.window is None else min(self.window, document.length)
        before = _sum_of_least(part.start - document.start + 1, part.stop - document.start + 1, reach)
        if self.causal:
            return before
        # Keys after a query, itself not counted again.
        after = _sum_of_least(document.stop - part.stop + 1, document.stop - part.start + 1, reach)
        return before + after - part.length


def _sum_of_least(start: int, stop: int, most: int) -> int:
    """Return the sum of min(n, most) over start <= n < stop."""
    below = max(start, min(stop, most))
    return (start + below - 1) * (below - start) // 2 + most * (stop - below)
