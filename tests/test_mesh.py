from __future__ import annotations

import itertools
import logging
import math

import pytest

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import LayoutError, MismatchError
from hpcpar.mesh import AXES, FOLDED_AXES, Coordinates, Layout, Mesh, crossing_reason, placement

LAYOUTS = [
    Layout(pp, dp, cp, tp, ep, etp)
    for pp, dp, cp, tp in itertools.product((1, 2, 3), (1, 2, 4), (1, 2), (1, 2, 3))
    for etp in {1, tp}
    for ep in (1, 2, 4)
    if (dp * cp * tp // etp) % ep == 0
]


def test_the_drawing_of_the_docstring_holds() -> None:
    layout = Layout(pp=2, dp=2, tp=2)
    assert layout.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.groups("dp", "tp") == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_ranks_count_tp_first_then_cp_dp_and_pp() -> None:
    for layout in LAYOUTS:
        for rank in range(layout.size):
            c = layout.coordinates(rank)
            assert ((c.pp * layout.dp + c.dp) * layout.cp + c.cp) * layout.tp + c.tp == rank, layout
            folded = (c.edp * layout.ep + c.ep) * layout.etp + c.etp
            assert folded == (c.dp * layout.cp + c.cp) * layout.tp + c.tp, layout


def test_the_groups_of_an_axis_part_all_ranks_and_differ_along_it_alone() -> None:
    for layout, axis in itertools.product(LAYOUTS, Coordinates._fields):
        groups = layout.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.size)), layout
        for group in groups:
            places = [layout.coordinates(rank) for rank in group]
            assert [getattr(place, axis) for place in places] == list(range(layout.degree(axis))), layout
            fixed = FOLDED_AXES if axis in ("ep", "edp", "etp") else AXES
            for other in fixed:
                assert other == axis or len({getattr(place, other) for place in places}) == 1, layout


def test_the_expert_axes_together_are_a_stages_axes_together() -> None:
    for layout in LAYOUTS:
        assert layout.groups("edp", "ep", "etp") == layout.groups("dp", "cp", "tp"), layout
        assert layout.edp * layout.ep * layout.etp == layout.dp * layout.cp * layout.tp, layout


def test_experts_are_shared_by_neighbours() -> None:
    split = Layout(dp=2, cp=2, tp=2, ep=2, etp=2)
    assert split.groups("ep") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert split.groups("edp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert split.groups("etp") == split.groups("tp")
    whole = Layout(dp=2, cp=2, tp=2, ep=4)
    assert whole.groups("ep") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert whole.groups("edp") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_no_axis_gives_single_ranks_and_all_axes_one_group() -> None:
    layout = Layout(pp=2, dp=2, tp=2)
    assert layout.groups() == tuple((rank,) for rank in range(8))
    assert layout.groups(*AXES) == (tuple(range(8)),)


@pytest.mark.parametrize("world_size", [1, 2, 6, 8, 24])
def test_dp_is_what_remains(world_size: int) -> None:
    assert Layout.fit(world_size) == Layout(dp=world_size)
    if world_size % 2 == 0:
        assert Layout.fit(world_size, tp=2) == Layout(dp=world_size // 2, tp=2)


@pytest.mark.parametrize("unknown", [None, -1])
def test_one_degree_is_derived_from_the_others(unknown: int | None) -> None:
    assert Layout.fit(24, tp=2, pp=unknown, dp=3) == Layout(pp=4, dp=3, tp=2)
    assert Layout.fit(8, tp=unknown) == Layout(tp=8)
    assert Layout.fit(8, dp=4, cp=2, ep=unknown) == Layout(dp=4, cp=2, ep=8)
    assert Layout.fit(8, tp=2, ep=unknown) == Layout(dp=4, tp=2, ep=8)
    assert Layout.fit(8, tp=2, ep=unknown, etp=unknown) == Layout(dp=4, tp=2, ep=4, etp=2)


def test_layouts_are_written_with_the_degrees_above_one() -> None:
    assert str(Layout(pp=2, tp=3)) == "pp=2 x tp=3"
    assert str(Layout(dp=4, ep=2)) == "dp=4, ep=2"
    assert str(Layout(dp=2, tp=2, ep=2, etp=2)) == "dp=2 x tp=2, ep=2, etp=2"
    assert str(Layout()) == "dp=1"


@pytest.mark.parametrize(
    ("world_size", "degrees", "message"),
    [
        (8, {"pp": 2, "dp": 2, "tp": 3}, "pp=2 x dp=2 x tp=3 = 12 ranks, but the job has 8; try tp=2"),
        (8, {"pp": 3, "dp": 1, "tp": 3}, "pp=3 x tp=3 = 9 ranks, but the job has 8; start 9 ranks"),
        (8, {"dp": 4}, "dp=4 = 4 ranks, but the job has 8; try dp=8"),
        (8, {"tp": 3}, "tp=3 does not divide the job's 8 ranks, so dp cannot be derived; try tp=2 or tp=4"),
        (
            7,
            {"tp": 2, "pp": 3},
            "pp=3 x tp=2 does not divide the job's 7 ranks, so dp cannot be derived; start a mul",
        ),
        (8, {"tp": None, "pp": -1}, "pp and tp are both to be derived: give all but one of them a degree"),
        (8, {"tp": 0}, "tp=0: a degree is a whole number of at least 1"),
        (8, {"tp": 2.0}, "tp=2.0: a degree is a whole number"),
        (8, {"tp": True}, "tp=True: a degree is a whole number"),
        (
            8,
            {"pt": 2},
            "there is no axis 'pt': the axes are pp, dp, cp, tp, ep, etp, dp_shard; did you mean ",
        ),
        (8, {"data": 2}, "there is no axis 'data': the axes are pp, dp, cp, tp, ep, etp, dp_shard"),
        (
            8,
            {"dp": 8, "ep": 3},
            "ep=3 is folded out of dp x cp = 8 ranks and must divide them; try ep=2 or ep=4",
        ),
        (
            8,
            {"tp": 2, "ep": 3},
            "ep=3 is folded out of dp x cp x tp = 8 ranks and must divide them; try ep=2",
        ),
        (8, {"tp": 4, "etp": 2}, "etp=2: experts are whole (etp=1) or split as the other layers are (etp=4"),
    ],
)
def test_degrees_that_do_not_fit_say_what_would(world_size: int, degrees: dict, message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.fit(world_size, **degrees)
    assert message in str(caught.value)


def test_a_suggested_degree_fits() -> None:
    for world_size, pp, dp, tp in itertools.product((4, 6, 8, 12), (1, 2, 3), (1, 2, 5), (1, 2, 3)):
        if pp * dp * tp == world_size:
            continue
        with pytest.raises(LayoutError) as caught:
            Layout.fit(world_size, pp=pp, dp=dp, tp=tp)
        advice = str(caught.value).rsplit("; ", 1)[1]
        if advice.startswith("try "):
            axis, degree = advice.removeprefix("try ").split("=")
            assert (
                Layout.fit(world_size, **{"pp": pp, "dp": dp, "tp": tp, axis: int(degree)}).size == world_size
            )


def test_overlapping_views_of_the_same_ranks_are_refused() -> None:
    with pytest.raises(LayoutError, match="axes dp, ep overlap"):
        Layout(dp=4, ep=2).groups("dp", "ep")


def test_a_rank_outside_the_layout_is_refused() -> None:
    with pytest.raises(LayoutError, match="rank 4 is not in the layout dp=2 x tp=2, which has ranks 0 to 3"):
        Layout(dp=2, tp=2).coordinates(4)


def crossing_groups(nodes: list[int], layout: Layout, axis: str) -> int:
    order = placement(nodes, layout)
    placed = [nodes[rank] for rank in order]
    return sum(len({placed[rank] for rank in group}) > 1 for group in layout.groups(axis))


def test_ranks_that_lie_well_keep_their_order() -> None:
    assert placement([0, 0, 0, 0, 1, 1, 1, 1], Layout(dp=4, tp=2)) == tuple(range(8))
    assert placement([0] * 6, Layout(pp=3, tp=2)) == tuple(range(6))


def test_ranks_dealt_round_the_nodes_are_gathered_by_node() -> None:
    assert placement([0, 1, 0, 1, 0, 1, 0, 1], Layout(dp=4, tp=2)) == (0, 2, 4, 6, 1, 3, 5, 7)


def test_uneven_nodes_give_whole_tp_groups_first() -> None:
    nodes = [0, 0, 0, 1, 1, 2, 2, 2]
    assert placement(nodes, Layout(dp=4, tp=2)) == (0, 1, 2, 7, 3, 4, 5, 6)
    assert crossing_groups(nodes, Layout(dp=4, tp=2), "tp") == 1


@pytest.mark.parametrize(
    "layout", [Layout(dp=4, tp=2), Layout(pp=2, cp=2, tp=2), Layout(pp=2, dp=2, cp=2)], ids=str
)
def test_placement_is_a_permutation_with_the_fewest_crossings(layout: Layout) -> None:
    for nodes in itertools.product((0, 1, 2), repeat=8):
        order = placement(nodes, layout)
        assert sorted(order) == list(range(8))
        within = sum(nodes.count(node) // layout.tp for node in set(nodes))
        assert (
            crossing_groups(list(nodes), layout, "tp")
            == math.prod([layout.pp, layout.dp, layout.cp]) - within
        )


def test_crossing_gives_the_reason() -> None:
    assert crossing_reason([0, 0, 1, 1], Layout(dp=2, tp=2)) is None
    assert crossing_reason([0, 0, 1, 1], Layout(dp=4)) is None
    too_wide = crossing_reason([0, 0, 1, 1], Layout(tp=4))
    assert too_wide is not None
    assert "tp=4 crosses nodes in 1 of 1 groups" in too_wide
    assert "(mesh ranks 0, 1 on node 0 and 2, 3 on node 1): the largest node holds 2 of the job's" in too_wide
    assert "use tp=2, or start at least 4 ranks on every node" in too_wide
    uneven = crossing_reason([0, 0, 0, 1], Layout(dp=2, tp=2))
    assert uneven is not None
    assert "in 1 of 2 groups (mesh ranks 2 on node 0 and 3 on node 1): the nodes hold 3, 1 ranks" in uneven
    assert "not all multiples of 2" in uneven


def test_cp_wider_than_a_node_is_no_reason_to_warn() -> None:
    assert crossing_reason([0, 0, 1, 1], Layout(cp=4)) is None
    assert crossing_reason([0, 0, 0, 1], Layout(dp=2, cp=2)) is not None


def sums_by_axis(comm: Communicator) -> dict[str, list[int]]:
    """The mesh ranks that each axis' communicator joins, in its order."""
    with Mesh(comm, pp=2, tp=2, dp=2, ep=2) as mesh:
        assert mesh.size == 8
        assert mesh.coordinate("tp") == mesh.tp.rank
        found = {axis: mesh.comm(axis).allgather_object(mesh.rank) for axis in Coordinates._fields}
        found["dp-tp"] = mesh.comm("tp", "dp").allgather_object(mesh.rank)
        assert mesh.comm("dp", "tp") is mesh.comm("tp", "dp")
        assert mesh.comm("dp", "tp").name == "dp-tp"
        assert mesh.tp.name == "tp"
        found["rank"] = [mesh.rank]
        return found


def test_communicators_join_the_ranks_of_the_layouts_groups() -> None:
    layout = Layout(pp=2, dp=2, tp=2, ep=2)
    for found in run_loopback(8, sums_by_axis):
        rank = found["rank"][0]
        for axis in Coordinates._fields:
            assert tuple(found[axis]) == next(group for group in layout.groups(axis) if rank in group)
        assert tuple(found["dp-tp"]) == next(group for group in layout.groups("dp", "tp") if rank in group)


def test_the_mesh_orders_its_ranks_by_node() -> None:
    def nodes_of_my_tp(comm: Communicator) -> set[int]:
        with Mesh(comm, tp=2) as mesh:
            return set(mesh.tp.allgather_object(comm.nodes[comm.rank]))

    found = run_loopback(4, nodes_of_my_tp, nodes=(0, 1, 0, 1))
    assert [len(nodes) for nodes in found] == [1, 1, 1, 1]


def test_one_warning_is_logged_when_tp_crosses_nodes(caplog: pytest.LogCaptureFixture) -> None:
    def make(comm: Communicator) -> None:
        Mesh(comm, tp=4).free()

    with caplog.at_level(logging.WARNING, logger="hpcpar.mesh"):
        run_loopback(4, make, nodes=(0, 0, 1, 1))
    assert len(caplog.records) == 1
    assert "mesh of tp=4: tp=4 crosses nodes" in caplog.text


def test_a_mesh_that_the_job_does_not_fit_is_refused_on_every_rank() -> None:
    def refused(comm: Communicator) -> str:
        with pytest.raises(LayoutError) as caught:
            Mesh(comm, {"pp": 2, "dp": 1, "tp": 3})
        return str(caught.value)

    assert set(run_loopback(4, refused)) == {"pp=2 x tp=3 = 6 ranks, but the job has 4; try tp=2"}


def test_ranks_that_ask_for_different_meshes_are_told_on_every_rank() -> None:
    def refused(comm: Communicator) -> str:
        with pytest.raises(MismatchError) as caught:
            Mesh(comm, tp=2 if comm.rank == 1 else 1)
        return str(caught.value)

    for message in run_loopback(3, refused):
        assert "for a mesh of {'tp': 2}" in message or "for {'tp': 2}" in message


def test_one_process_is_a_mesh_too() -> None:
    mesh = Mesh(Communicator.alone(), Layout())
    assert (mesh.rank, mesh.size, mesh.dp.size, mesh.tp.size) == (0, 1, 1, 1)
    assert mesh.label == "[0/1]"
    assert repr(mesh) == "<Mesh dp=1: rank 0 of 1>"


def test_the_label_says_who_speaks() -> None:
    def label(comm: Communicator) -> str:
        with Mesh(comm, pp=2, tp=2) as mesh:
            return mesh.label

    assert run_loopback(4, label) == ["[0/4 pp0 tp0]", "[1/4 pp0 tp1]", "[2/4 pp1 tp0]", "[3/4 pp1 tp1]"]


@pytest.mark.mpi
def test_the_mesh_stands_on_mpi(world: Communicator) -> None:
    with Mesh(world, tp=world.size) as mesh:
        by_tp = mesh.tp.allgather_object(mesh.rank)
        by_dp = mesh.dp.allgather_object(mesh.rank)
    assert by_tp == list(range(world.size))
    assert by_dp == [mesh.rank]
