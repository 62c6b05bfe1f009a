"""Cores, GPUs and threads of a rank."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hpcpar.errors import ConfigError
from hpcpar.launch.binding import (
    affinity,
    format_cores,
    gpu_for,
    gpu_sharing_warning,
    node_cores,
    oversubscribed,
    quota_cores,
    thread_count,
)


def test_ranks_take_visible_devices_in_turn_if_there_are_any() -> None:
    assert [gpu_for(local_rank, 4, 4) for local_rank in range(4)] == [0, 1, 2, 3]
    assert [gpu_for(local_rank, 2, 4) for local_rank in range(4)] == [0, 1, 0, 1]
    assert gpu_for(3, 1, 4) == 0
    assert gpu_for(0, 0, 1) is None
    with pytest.raises(ConfigError, match="local rank 4 of 4"):
        gpu_for(4, 2, 4)


def test_sharing_a_device_is_said_and_only_then() -> None:
    assert "4 ranks of this node share 2 GPUs" in str(gpu_sharing_warning(2, 4))
    assert gpu_sharing_warning(4, 4) is None
    assert gpu_sharing_warning(0, 4) is None
    assert gpu_sharing_warning(1, 4) is None, "each rank may see a device of its own"
    assert "share 1 GPU:" in str(gpu_sharing_warning(1, 2, ["GPU-a", "GPU-a"]))
    assert gpu_sharing_warning(1, 2, ["GPU-a", "GPU-b"]) is None


def test_more_ranks_than_cores_in_the_union_of_their_masks_are_too_many() -> None:
    assert not oversubscribed(4, [{0}, {1}, {2}, {3}], quota=math.inf)
    assert oversubscribed(4, [{0, 1}] * 4, quota=math.inf)
    assert not oversubscribed(2, [{0, 1}] * 2, quota=math.inf)
    assert oversubscribed(len(affinity()) + 1)


def test_a_quota_below_the_mask_counts() -> None:
    assert node_cores([range(64)], quota=1.5) == 2
    assert oversubscribed(4, [set(range(64))] * 4, quota=2.0)


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", math.inf), ("150000 100000", 1.5), ("", math.inf)]
)
def test_the_control_groups_quota_is_read(tmp_path: Path, text: str, cores: float) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(text)
    assert quota_cores(str(file)) == cores
    assert quota_cores(str(tmp_path / "none")) == math.inf


def test_threads_share_the_nodes_cores_equally_and_are_at_least_one() -> None:
    masks = [set(range(8))] * 4
    assert thread_count(4, masks, environ={}, quota=math.inf) == 2
    assert thread_count(16, [set(range(8))] * 16, environ={}, quota=math.inf) == 1


def test_the_users_thread_count_wins_and_must_be_a_number() -> None:
    assert thread_count(4, [{0, 1}], environ={"OMP_NUM_THREADS": "7,2"}) == 7
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS"):
        thread_count(4, [{0, 1}], environ={"OMP_NUM_THREADS": "many"})


def test_core_numbers_are_written_as_ranges() -> None:
    assert format_cores((5, 0, 1, 2)) == "0-2,5"
    assert format_cores(()) == ""
