"""Expert parallelism: mixtures of experts, of which each rank holds some."""

from __future__ import annotations

from hpcpar.expert_parallel.expert_parallel import ExpertParallel
from hpcpar.expert_parallel.routing import Routing, route

__all__ = ["ExpertParallel", "Routing", "route"]
