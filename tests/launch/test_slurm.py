"""Slurm's host lists, counts and steps, as recorded from a real one."""

from __future__ import annotations

import pytest
from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpar.errors import ConfigError, LaunchError
from hpcpar.launch.slurm import (
    cores_per_task,
    forgotten_srun,
    host_names,
    in_step,
    job_tasks,
    pmi_of_step,
    require_cores,
    restarts,
    task,
    task_counts,
)
from tests.command import variables


def step(rank: int, local: int, node: int, **others: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "5",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        **others,
    }


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", (4,)), ("2(x2),1", (2, 2, 1)), ("1,3", (1, 3)), ("8(x3)", (8, 8, 8)), ("4,1(x2),2", (4, 1, 1, 2))],
)
def test_task_counts_repeat_as_slurm_says(text: str, counts: tuple[int, ...]) -> None:
    assert task_counts(text) == counts


@pytest.mark.parametrize("text", ["", "2(x", "a", "2(3)", "1,,2"])
def test_task_counts_that_slurm_never_writes_are_an_error(text: str) -> None:
    with pytest.raises(LaunchError, match="tasks per node"):
        task_counts(text)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ("node1",)),
        ("node[1-3]", ("node1", "node2", "node3")),
        ("gpu[001-003,7],login", ("gpu001", "gpu002", "gpu003", "gpu7", "login")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("r[2,1]n[5,1-2]", ("r2n5", "r2n1", "r2n2", "r1n5", "r1n1", "r1n2")),
        (
            "a[1-2]b[1-2]c[1-2]",
            ("a1b1c1", "a1b1c2", "a2b1c1", "a2b1c2", "a1b2c1", "a1b2c2", "a2b2c1", "a2b2c2"),
        ),
        ("n[7,7]", ("n7", "n7")),
        ("node[3,1-2]", ("node3", "node1", "node2")),
        ("b,a", ("b", "a")),
        ("node[08-11]", ("node08", "node09", "node10", "node11")),
        ("n[1-2]-ib", ("n1-ib", "n2-ib")),
        ("node1,node1", ("node1", "node1")),
        ("a.b.c[1,3].d", ("a.b.c1.d", "a.b.c3.d")),
    ],
)
def test_host_lists_keep_slurms_order_padding_and_repetitions(text: str, names: tuple[str, ...]) -> None:
    assert host_names(text) == names


@pytest.mark.parametrize("text", ["node[1-2", "node1-2]", "node[[1]]", "node[3-1]", "node[a-b]", "node[]"])
def test_a_broken_host_list_is_an_error_that_shows_it(text: str) -> None:
    with pytest.raises(LaunchError, match="host list"):
        host_names(text)


ranges = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 5)).map(
        lambda pair: f"{pair[0]}-{pair[0] + pair[1]}" if pair[1] else str(pair[0])
    ),
    min_size=1,
    max_size=3,
).map(",".join)
items = st.one_of(
    st.sampled_from(["login", "a-b", "x"]),
    ranges.map(lambda text: f"n[{text}]"),
    st.tuples(ranges, ranges).map(lambda pair: f"r[{pair[0]}]c[{pair[1]}]-ib"),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(items, min_size=1, max_size=4).map(",".join))
def test_as_sets_host_lists_are_what_clustershell_makes_of_them(text: str) -> None:
    assert set(host_names(text)) == set(NodeSet(text, resolver=RESOLVER_NOGROUP))


def test_a_block_step_knows_its_node_and_the_ranks_there() -> None:
    block = variables("SLURM_STEP_NUM_TASKS=5 SLURM_STEP_NODELIST=node[1-2] SLURM_STEP_TASKS_PER_NODE=4,1")
    found = task(step(4, 0, 1, **block))
    assert (found.rank, found.size, found.local_rank, found.local_size) == (4, 5, 0, 1)
    assert (found.node, found.nodes) == (1, ("node1", "node2"))


def test_a_cyclic_step_is_read_by_local_id_and_node_id_not_by_rank() -> None:
    # -N2 -n5 -m cyclic: tasks 0,2,3,4 on node1, task 1 on node2
    cyclic = variables(
        "SLURM_STEP_NUM_TASKS=5 SLURM_STEP_NODELIST=node[1-2] SLURM_STEP_TASKS_PER_NODE=4,1 "
        "SLURM_GTIDS=0,2,3,4"
    )
    found = task(step(3, 2, 0, **cyclic))
    assert (found.local_rank, found.local_size, found.node) == (2, 4, 0)


def test_a_heterogeneous_step_over_two_nodes_is_one_world() -> None:
    # one task on node1, three on node2, as Slurm 22.05 tells each of them
    het = variables(
        "SLURM_HET_SIZE=2 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NODELIST=node[1-2] SLURM_STEP_TASKS_PER_NODE=1,3 "
        "SLURM_NTASKS_PER_NODE=3"
    )
    found = task(step(3, 2, 1, SLURM_GTIDS="1,2,3", **het))
    assert (found.rank, found.size, found.local_rank, found.local_size, found.node) == (3, 4, 2, 3, 1)


def test_heterogeneous_components_on_one_node_leave_local_ranks_to_mpi() -> None:
    het = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "a,a", "SLURM_STEP_TASKS_PER_NODE": "1,2"}
    found = task(step(2, 1, 1, **het))
    assert (found.local_rank, found.local_size, found.node, found.nodes) == (None, None, 0, ("a",))


def test_counts_that_do_not_fit_the_step_give_way_to_the_list_of_this_nodes_tasks() -> None:
    broken = {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_GTIDS": "3,4,5"}
    assert task(step(4, 1, 1, **broken)).local_size == 3


def test_the_wire_is_told_by_what_the_plugin_sets() -> None:
    assert pmi_of_step({"PMIX_NAMESPACE": "slurm.pmix.3.0"}) == "pmix"
    assert pmi_of_step({"PMIX_NAMESPACE": "prterun-7"}) == "none"
    assert pmi_of_step({"PMI_FD": "11", "PMI_RANK": "0"}) == "pmi2"
    assert pmi_of_step({"PALS_APINFO": "/x"}) == "cray"
    assert pmi_of_step({}) == "none"


# As Slurm 22.05 tells the tasks of step 1 that a task of step 0, or of another job, has started with srun.
@pytest.mark.parametrize(
    "inherited",
    [
        {"PMI_FD": "10", "PMI_RANK": "0", "PMI_SIZE": "1", "PMI_JOBID": "5.0"},
        {"PMI_FD": "10", "PMI_RANK": "0", "PMI_SIZE": "1", "PMI_JOBID": "4.1"},
        {"PMIX_NAMESPACE": "slurm.pmix.5.0", "PMIX_RANK": "0"},
        {"PMIX_NAMESPACE": "slurm.pmix.4.1", "PMIX_RANK": "0"},
    ],
)
def test_a_step_inside_a_step_does_not_believe_the_outer_ones_plugin(inherited: dict[str, str]) -> None:
    inner = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "1", **inherited}
    assert pmi_of_step(inner) == "none"
    assert pmi_of_step({**inner, "PMIX_NAMESPACE": "slurm.pmix.5.1"}) == "pmix"
    assert pmi_of_step({**inner, "PMIX_NAMESPACE": "", "PMI_FD": "9", "PMI_JOBID": "5.1"}) == "pmi2"


def test_a_heterogeneous_step_goes_by_the_id_of_its_first_component() -> None:
    second = {"SLURM_JOB_ID": "6", "SLURM_STEP_ID": "0", "SLURM_JOB_ID_HET_GROUP_0": "5"}
    assert pmi_of_step({**second, "PMI_FD": "10", "PMI_JOBID": "5.0"}) == "pmi2"
    assert pmi_of_step({**second, "PMIX_NAMESPACE": "slurm.pmix.5.0"}) == "pmix"


def test_what_a_rank_of_mpiexec_hands_on_to_a_step_is_no_wire_of_the_step() -> None:
    hydra = {"PMI_FD": "5", "PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1", "SLURM_STEP_ID": "1"}
    assert pmi_of_step(hydra) == "none"
    assert pmi_of_step({**hydra, "PMI_JOBID": "5.1", "SLURM_JOB_ID": "5"}) == "pmi2"


def test_only_srun_makes_a_step() -> None:
    assert in_step(step(0, 0, 0, SLURM_STEP_NUM_TASKS="1"))
    assert not in_step({"SLURM_JOB_ID": "5", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"})


@pytest.mark.parametrize(
    ("environ", "tasks"),
    [
        ({"SLURM_NTASKS": "4"}, 4),
        ({"SLURM_NTASKS": "1", "SLURM_NTASKS_HET_GROUP_0": "1", "SLURM_NTASKS_HET_GROUP_1": "3"}, 4),
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "3"}, 6),
        ({}, 1),
    ],
)
def test_the_tasks_of_a_job_are_counted_from_what_its_script_is_told(
    environ: dict[str, str], tasks: int
) -> None:
    assert job_tasks(environ) == tasks


def test_a_process_outside_slurm_or_started_by_srun_gets_no_hint() -> None:
    assert forgotten_srun({"SLURM_NTASKS": "4"}) is None
    assert forgotten_srun(step(0, 0, 0, SLURM_STEP_NUM_TASKS="4", SLURM_NTASKS="4")) is None


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 0),
        ({"SLURM_RESTART_COUNT": "0"}, 0),
        ({"SLURM_RESTART_COUNT": ""}, 0),
        ({"SLURM_RESTART_COUNT": "3"}, 3),
    ],
)
def test_restarts_are_counted_by_slurm_and_none_where_it_says_nothing(
    environ: dict[str, str], count: int
) -> None:
    assert restarts(environ) == count


def test_a_count_of_restarts_that_is_no_number_is_named() -> None:
    with pytest.raises(LaunchError, match="SLURM_RESTART_COUNT='two'"):
        restarts({"SLURM_RESTART_COUNT": "two"})


def test_a_component_on_a_later_host_than_the_next_one_s_has_its_own_tasks() -> None:
    # srun -w node4 -n1 : -w node2 -n2: the first component's only task is on node4.
    step = variables(
        "SLURM_STEP_NUM_TASKS=3 SLURM_STEP_NODELIST=node[2,4] SLURM_STEP_TASKS_PER_NODE=2,1 SLURM_HET_SIZE=2"
    )
    ranks = [
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": "node4"},
        {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURMD_NODENAME": "node2"},
        {"SLURM_PROCID": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURMD_NODENAME": "node2"},
    ]
    tasks = [task(step | rank) for rank in ranks]
    assert [(each.local_rank, each.local_size) for each in tasks] == [(0, 1), (0, 2), (1, 2)]
    assert [each.nodes and each.node is not None and each.nodes[each.node] for each in tasks] == [
        "node4",
        "node2",
        "node2",
    ]


def test_an_mpiexec_is_not_asked_for_more_ranks_than_the_job_has_cores() -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_CPUS_PER_NODE": "2(x2),1"}
    require_cores(5, job)
    with pytest.raises(ConfigError, match=r"6 ranks were asked for, but Slurm job 7 has 5 cores.*-H node1:6"):
        require_cores(6, job)
    require_cores(6, job | {"SLURM_OVERCOMMIT": "1"})
    require_cores(6, {"SLURM_JOB_ID": "7"})


def test_a_step_has_the_jobs_cores_for_each_task_unless_so_many_do_not_fit() -> None:
    job = {"SLURM_CPUS_PER_TASK": "4", "SLURM_JOB_CPUS_PER_NODE": "8,6"}
    assert cores_per_task(3, job) == {"SRUN_CPUS_PER_TASK": "4"}
    assert cores_per_task(4, job) == {}
    assert cores_per_task(3, job | {"SRUN_CPUS_PER_TASK": "2"}) == {}
    assert cores_per_task(3, {"SLURM_JOB_CPUS_PER_NODE": "8,6"}) == {}
