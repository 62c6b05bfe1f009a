"""Cores of a server's ranks, on nodes drawn by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcpar.cli.serve.cores import physical_cores, thread_binding
from hpcpar.errors import LayoutError


def test_ranks_have_equal_parts_in_order() -> None:
    assert thread_binding(1, (0, 1, 2, 3)) == "0-3"
    assert thread_binding(2, (0, 1, 2, 3)) == "0-1|2-3"
    assert thread_binding(3, (0, 2, 4, 6)) == "0,2|4|6"


def test_no_more_threads_than_the_control_group_grants() -> None:
    assert thread_binding(2, tuple(range(64)), 4.0) == "0-1|32-33"
    assert thread_binding(2, tuple(range(8)), 1.5) == "0|4"
    assert thread_binding(2, (0, 1), 64.0) == "0|1"


def test_fewer_cores_than_ranks_are_refused_with_a_degree_that_fits() -> None:
    with pytest.raises(
        LayoutError, match=r"tp=3 ranks need a core each.* 2 \(0,4\); serve with --tp 2 or less"
    ):
        thread_binding(3, (0, 4))


def node(system: Path, number: int, cores: str, siblings: dict[int, str]) -> None:
    (system / "node" / f"node{number}").mkdir(parents=True)
    (system / "node" / f"node{number}" / "cpulist").write_text(f"{cores}\n")
    for core, together in siblings.items():
        topology = system / "cpu" / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{together}\n")


def test_a_thread_for_each_core_and_cores_of_a_numa_node_together(tmp_path: Path) -> None:
    # Two nodes, numbered in turn, with two hardware threads for each core.
    node(tmp_path, 0, "0,2,4,6", {0: "0,4", 2: "2,6", 4: "0,4", 6: "2,6"})
    node(tmp_path, 1, "1,3,5,7", {1: "1,5", 3: "3,7", 5: "1,5", 7: "3,7"})
    assert physical_cores(range(8), tmp_path) == [0, 2, 1, 3]
    # A job that has hardware threads of one node only.
    assert physical_cores((5, 7, 3), tmp_path) == [5, 7]
    assert physical_cores((3, 1), tmp_path / "none") == [1, 3]
