"""Runs whose shards spread over some of the dp ranks, mesh.dp_shard (HSDP): what is refused."""

from __future__ import annotations

import pytest

from hpcpar.errors import HpcparError
from tests.training.runs import MakeConfig, refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("mesh.dp_shard=2", "optimizer.zero_stage=0"), "nothing is sharded"),
        (("mesh.dp_shard=3", "optimizer.zero_stage=1"), "try dp_shard=2 or dp_shard=4"),
        (("mesh.dp_shard=2", "optimizer.zero_stage=1", "optimizer.shared_parameters=true"), "leave one of"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(
    config_of: MakeConfig, options: tuple[str, ...], words: str
) -> None:
    assert words in refused(config_of(*options), 4, HpcparError)
