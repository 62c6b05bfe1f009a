"""Pipeline parallelism: the layers of a model divided over the ranks of an axis."""

from __future__ import annotations

from hpcpar.pipeline_parallel.balance import balanced, by_hand
from hpcpar.pipeline_parallel.pipeline import Pipeline
from hpcpar.pipeline_parallel.tied import TiedWeights

__all__ = ["Pipeline", "TiedWeights", "balanced", "by_hand"]
