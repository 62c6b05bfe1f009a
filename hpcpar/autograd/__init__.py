"""Collectives that know their own backward, activations computed anew for it, weights' gradients after it."""

from __future__ import annotations

from hpcpar.autograd.recompute import recompute
from hpcpar.autograd.regions import (
    all_to_all,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)
from hpcpar.autograd.weight_grad_mode import DeferredGradients
from hpcpar.planner.shapes import Recompute

__all__ = [
    "DeferredGradients",
    "Recompute",
    "all_to_all",
    "copy_to",
    "gather_from",
    "recompute",
    "reduce_from",
    "reduce_scatter_to",
    "scatter_to",
]
