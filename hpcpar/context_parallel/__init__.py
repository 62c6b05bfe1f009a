"""Context parallelism: attention over sequences of which each rank holds a part."""

from __future__ import annotations

from hpcpar.context_parallel.context_parallel import METHODS, ContextParallel, Method
from hpcpar.context_parallel.mask import Mask, Span

__all__ = ["METHODS", "ContextParallel", "Mask", "Method", "Span"]
