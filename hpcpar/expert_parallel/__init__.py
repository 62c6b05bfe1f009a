"""Expert parallelism: experts divided among ranks, and tokens that go to theirs and come home."""

from __future__ import annotations

from hpcpar.expert_parallel.expert_parallel import ExpertParallel

__all__ = ["ExpertParallel"]
