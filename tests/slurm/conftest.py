"""One cluster for all tests here: skipped where none can be brought up, failing if one is required."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, obstacle


@pytest.fixture(scope="session")
def _cluster() -> Iterator[Cluster]:
    reason = obstacle()
    if reason and os.environ.get("HPCPAR_REQUIRE_SLURM") == "1":
        pytest.fail(f"HPCPAR_REQUIRE_SLURM=1, but no Slurm cluster can be brought up: {reason}")
    if reason:
        pytest.skip(f"no Slurm cluster can be brought up: {reason}")
    with Cluster.start(nodes=4, cpus=4, gpus=2) as cluster:
        yield cluster


@pytest.fixture
def cluster(_cluster: Cluster) -> Iterator[Cluster]:
    """Four idle nodes with four CPUs and two fake GPUs each; a test's jobs end with the test."""
    yield _cluster
    _cluster.clear()
