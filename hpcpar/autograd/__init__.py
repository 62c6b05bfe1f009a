"""Collectives that know their own backward, and activations that are computed anew for it."""

from __future__ import annotations

from hpcpar.autograd.recompute import Recompute, recompute
from hpcpar.autograd.regions import (
    all_to_all,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)

__all__ = [
    "Recompute",
    "all_to_all",
    "copy_to",
    "gather_from",
    "recompute",
    "reduce_from",
    "reduce_scatter_to",
    "scatter_to",
]
