"""The rank map: a line for each node, equal nodes folded, and warnings that say what to type."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcpar.launch.rank_map import NodeRanks, RankBinding, RankMap, allowed_cores, visible_gpus


def node(
    number: int,
    masks: Sequence[Sequence[int]],
    *,
    first: int | None = None,
    cores: int = 64,
    granted: int | None = None,
    gpus: Sequence[Sequence[str]] = (),
    node_gpus: tuple[str, ...] = (),
    omp: str = "",
) -> NodeRanks:
    """A node with a rank on each mask; ranks are numbered block by block unless `first` says otherwise."""
    start = number * len(masks) if first is None else first
    places = (
        RankBinding(
            start + i,
            tuple(mask),
            tuple(range(cores)),
            granted,
            tuple(gpus[i]) if gpus else (),
            node_gpus,
            omp,
        )
        for i, mask in enumerate(masks)
    )
    return NodeRanks(number, f"gpu{number + 1:03}", tuple(places))


QUARTERS = [range(16 * i, 16 * i + 16) for i in range(4)]


def test_a_line_tells_ranks_cores_gpus_and_threads_of_a_node() -> None:
    place = node(0, QUARTERS, gpus=[["0"], ["1"], ["2"], ["3"]], omp="16")
    assert RankMap((place,)).lines() == [
        "node 0  gpu001: ranks 0-3, cores 0-63 (16 each), GPUs 0-3 (one each), OMP_NUM_THREADS=16"
    ]


@pytest.mark.parametrize(
    ("masks", "told"),
    [
        ([[5]], "rank 0, core 5"),
        ([range(8)], "rank 0, cores 0-7"),
        ([range(8)] * 2, "ranks 0-1, cores 0-7 (shared)"),
        ([range(8), range(8, 12)], "ranks 0-1, cores 0-11 (4 to 8 each)"),
        ([range(8), range(4, 12)], "ranks 0-1, cores 0-11 (overlapping)"),
    ],
)
def test_cores_are_told_by_how_they_are_shared(masks: Sequence[Sequence[int]], told: str) -> None:
    assert RankMap((node(0, masks),)).lines() == [f"node 0  gpu001: {told}"]


@pytest.mark.parametrize(
    ("gpus", "node_gpus", "told"),
    [
        ([["0", "1"]] * 2, (), "GPUs 0-1 (one each)"),
        ([["0", "1", "2", "3"]] * 2, (), "GPUs 0-1 of 4 (one each)"),
        ([["0"]] * 2, (), "GPU 0 (shared by up to 2 ranks)"),
        ([["0"]] * 2, ("2", "3"), "GPUs 2-3 (one each)"),
        ([["GPU-a"], ["GPU-b"]], (), "GPUs GPU-a,GPU-b (one each)"),
        ([["0"], []], (), "GPU 0 (one each)"),
    ],
)
def test_gpus_are_told_by_what_each_rank_takes(
    gpus: Sequence[Sequence[str]], node_gpus: tuple[str, ...], told: str
) -> None:
    place = node(0, [[0], [1]], gpus=gpus, node_gpus=node_gpus)
    assert RankMap((place,)).lines()[0].endswith(f"cores 0-1 (1 each), {told}")


def test_gpus_of_tasks_that_slurm_tells_of_their_own_alone_are_not_shared() -> None:
    tasks = (RankBinding(i, (i,), gpus=("0",), node_gpus=(gpu,)) for i, gpu in enumerate("23"))
    assert NodeRanks(0, "gpu001", tuple(tasks)).facts() == "cores 0-1 (1 each), GPUs 2-3 (one each)"


def test_a_thousand_equal_nodes_take_two_lines() -> None:
    nodes = tuple(node(i, QUARTERS) for i in range(1000))
    assert RankMap(nodes).lines() == [
        "node 0  gpu001: ranks 0-3, cores 0-63 (16 each)",
        "nodes 1-999  gpu002 to gpu1000: as node 0, ranks 4-3999",
    ]


def test_two_nodes_get_a_line_each_and_different_ones_always_do() -> None:
    same = RankMap((node(0, QUARTERS), node(1, QUARTERS))).lines()
    assert [line.partition(":")[0] for line in same] == ["node 0  gpu001", "node 1  gpu002"]
    mixed = (node(0, [[0]], first=0), *(node(i, QUARTERS, first=4 * i - 3) for i in range(1, 128)))
    assert RankMap(mixed).lines() == [
        "node 0  gpu001: rank 0, core 0",
        "node 1  gpu002: ranks 1-4, cores 0-63 (16 each)",
        "nodes 2-127  gpu003 to gpu128: as node 1, ranks 5-508",
    ]
    assert len(RankMap(tuple(node(i, [[i]]) for i in range(50))).lines()) == 50


def test_every_rank_stands_in_exactly_one_line() -> None:
    nodes = tuple(node(i, QUARTERS[: 1 + (i // 3) % 2], first=100 * i) for i in range(20))
    told: list[int] = []
    for line in RankMap(nodes).lines():
        numbers = (
            line.partition("rank")[2].removeprefix("s").strip().partition(", cores")[0].partition(", core")[0]
        )
        for part in numbers.split(","):
            first, _, last = part.partition("-")
            told += range(int(first), int(last or first) + 1)
    assert told == [place.rank for one in nodes for place in one.ranks]


@pytest.mark.parametrize(
    ("launcher", "option"),
    [
        ("slurm", "srun --cpus-per-task=2 --cpu-bind=cores"),
        ("openmpi", "--map-by slot:PE=2 --bind-to core`, or `--bind-to none"),
        ("hydra", "mpiexec -bind-to core:2"),
        ("pals", "2 cores for each rank"),
    ],
)
def test_ranks_that_share_a_core_beside_free_ones_are_named_with_the_option_that_mends_it(
    launcher: str, option: str
) -> None:
    (flaw,) = RankMap((node(0, [[0, 1], [1, 2]], cores=4),), launcher).flaws(sets_threads=True)
    assert flaw.found.startswith("ranks 0 and 1 share core 1 of gpu001, although core 3 is free")
    assert option in flaw.do
    assert str(flaw) == f"{flaw.found}; {flaw.do}"


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(node(0, [[0], [1]], cores=4), id="cores of their own"),
        pytest.param(node(0, [range(4)] * 4, cores=4), id="not bound"),
        pytest.param(node(0, [[0, 1], [0, 1], [2, 3], [2, 3]], cores=4), id="no core is free"),
        pytest.param(node(0, [[0, 1]] * 2, cores=64, granted=2), id="the others are another job's"),
        pytest.param(node(0, [[3]], cores=64), id="alone"),
    ],
)
def test_nothing_is_said_where_no_rank_could_have_more(place: NodeRanks) -> None:
    assert RankMap((place,)).flaws(sets_threads=True) == []


def test_one_warning_counts_the_pairs_and_the_other_nodes() -> None:
    nodes = tuple(node(i, [[0], [0], [0]], cores=6) for i in range(3))
    (flaw,) = RankMap(nodes, "slurm").flaws(sets_threads=True)
    assert flaw.found.startswith(
        "ranks 0 and 1 share core 0 of gpu001, as 2 more pairs of ranks share one "
        "(and likewise on 2 other nodes), although cores 1-5 are free"
    )
    assert "--cpus-per-task=2" in flaw.do


def test_threads_beyond_the_cores_are_said_only_where_nobody_has_chosen_them() -> None:
    crowded = node(0, [range(8)] * 4, cores=8)
    (flaw,) = RankMap((crowded,)).flaws()
    assert flaw.found == "OMP_NUM_THREADS is not set: the 4 ranks of gpu001 may start 32 threads on 8 cores"
    assert "export OMP_NUM_THREADS=2" in flaw.do
    assert RankMap((crowded,)).flaws(sets_threads=True) == []
    assert RankMap((node(0, [range(8)] * 4, cores=8, omp="2"),)).flaws() == []
    assert RankMap((node(0, [[0, 1], [2, 3]], cores=4),)).flaws() == [], "each takes its own cores"
    assert RankMap((node(0, [[0]] * 3, cores=1),)).flaws() == [], "one thread each is too much already"


def test_visible_devices_come_from_the_environment_else_from_the_devices_files(tmp_path: Path) -> None:
    files = str(tmp_path / "nvidia")
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, files) == ("0", "2", "10")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1, 3"}, files) == ("1", "3")
    assert visible_gpus({"ROCR_VISIBLE_DEVICES": "0"}, files) == ("0",)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2,-1,3"}, files) == ("2",)
    for nothing in ("", "NoDevFiles", "-1", "-1,0,1"):
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": nothing}, files) == ()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity masks")
def test_looking_for_cores_leaves_the_mask_as_it_was_and_sees_beyond_it() -> None:
    before = os.sched_getaffinity(0)
    try:
        one = (min(before),)
        os.sched_setaffinity(0, one)
        assert set(allowed_cores(one)) >= before
        assert os.sched_getaffinity(0) == set(one)
    finally:
        os.sched_setaffinity(0, before)


def test_a_ranks_place_is_read_from_its_environment() -> None:
    told = {
        "SLURM_CPUS_ON_NODE": "4",
        "CUDA_VISIBLE_DEVICES": "1",
        "SLURM_STEP_GPUS": "0,1",
        "OMP_NUM_THREADS": " 2",
    }
    place = RankBinding.here(7, told)
    assert (place.rank, place.granted, place.gpus, place.node_gpus) == (7, 4, ("1",), ("0", "1"))
    assert place.omp_threads == "2"
    assert set(place.cores) <= set(place.allowed)
