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


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return few points of the grid in which every two values of different axes meet at least once."""
    values = [list(axis) for axis in axes]
    grid = list(itertools.product(*(range(len(axis)) for axis in values)))
    if WHOLE_GRID:
        chosen = grid
    else:
        chosen = []
        missing = {pair for point in grid for pair in itertools.combinations(enumerate(point), 2)}
        while missing:
            best = max(grid, key=lambda point: len(missing & {*itertools.combinations(enumerate(point), 2)}))
            missing -= {*itertools.combinations(enumerate(best), 2)}
            chosen.append(best)
    return [tuple(axis[index] for axis, index in zip(values, point, strict=True)) for point in chosen]
