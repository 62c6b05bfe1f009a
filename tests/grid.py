"""Grids of cases of which a usual run takes some: HPCPAR_WHOLE_GRID=1 runs all of them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import Any

WHOLE_GRID = "HPCPAR_WHOLE_GRID" in os.environ


def checkered(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Every second point of the grid, as a chessboard's white fields: each value meets half of the others."""
    numbered = [list(enumerate(axis)) for axis in axes]
    return [
        tuple(value for _, value in point)
        for point in itertools.product(*numbered)
        if WHOLE_GRID or sum(number for number, _ in point) % 2 == 0
    ]
