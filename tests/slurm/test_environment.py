"""Random host lists and random steps: what hpcpar reads is what Slurm says and does.

For host lists `scontrol show hostnames` is the judge. For steps every task leaves its environment in a
file, beside the name of the node that it is on: gathered over all tasks, that is the truth.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpcpar.launch.environment import RankInfo, detect
from hpcpar.launch.slurm import host_names, job_tasks
from tests.slurm.cluster import LEFTOVERS, Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]

# Ranges, several prefixes, numbers with and without zeros before them, two numbers in a name.
NODES = ("gpu001", "gpu002", "gpu010", "login7", "r1n2", "r1n10")
CPUS = 8

TASK = """#!/bin/sh
read -r host < /proc/sys/kernel/hostname
mkdir -p "$OUT/$CASE"
exec env -0 > "$OUT/$CASE/$host.$$"
"""
"""Leaves this task's environment; no two tasks of one node have the same process number."""

TASK_WITH_A_STEP = """#!/bin/sh
if [ "$SLURM_PROCID" = 0 ]; then CASE="$CASE-inner" srun $INNER "$OUT/task"; fi
exec "$OUT/task"
"""

BATCH_SCRIPT = """#!/bin/sh
CASE=batch "$OUT/task"
xargs --arg-file="$OUT/steps" --delimiter='\\n' --max-procs=6 -I STEP sh -c STEP
"""


@dataclass(frozen=True)
class Step:
    """Words for srun, and what must come of them."""

    words: str
    size: int
    pmi: str
    inner: Step | None = None

    def line(self, case: str) -> str:
        """A line of shell that runs it; once more should Slurm hang, as it does now and then under load."""
        inner = f" INNER='{self.inner.words}'" if self.inner else ""
        program = "$OUT/nest" if self.inner else "$OUT/task"
        once = f"timeout --kill-after=5 25 srun {self.words} {program}"
        afresh = f'rm -rf "$OUT/{case}" "$OUT/{case}-inner"'  # the first attempt may have come half way
        return f"export CASE={case}{inner}; {once} || {{ {afresh}; {once}; }}"


@pytest.fixture(scope="module")
def site() -> Iterator[Cluster]:
    """A cluster whose nodes have names like those of real ones."""
    with Cluster.start(NODES, cpus=CPUS, gpus=0) as cluster:
        yield cluster


# --- host lists


def random_list(dice: random.Random) -> str:
    """Like "gpu[003-007,9],login2,r[1-2]n[08-11]"."""

    def numbers() -> str:
        width = dice.choice((0, 0, 2, 3))
        ranges = []
        for _ in range(dice.randint(1, 3)):
            first = dice.randint(0, 120)
            last = first + dice.choice((0, 0, 1, 2, 7))
            low, high = str(first).zfill(width), str(last).zfill(width)
            ranges.append(low if first == last else f"{low}-{high}")
        return f"[{','.join(ranges)}]"

    def item() -> str:
        prefix = dice.choice(("n", "gpu", "node-", "rack3-", "a.b", "x0y"))
        kind = dice.randrange(5)
        if kind == 0:
            return prefix + str(dice.randint(0, 30)).zfill(dice.choice((0, 2, 3)))
        if kind == 1:
            return prefix + numbers() + "c" + numbers()
        if kind == 2:
            return dice.choice(("login", "r" + numbers() + "n" + numbers() + "-" + numbers()))
        return prefix + numbers()

    return ",".join(item() for _ in range(dice.randint(1, 4)))


def as_scontrol_expands(site: Cluster, lists: Sequence[str]) -> list[tuple[str, ...]]:
    """All lists in one call, with a host between them that is in none."""
    shown = site.run("scontrol", "show", "hostnames", ",between,".join(lists))
    assert shown.returncode == 0, shown.stderr
    groups = shown.stdout.strip().split("\nbetween\n")
    return [tuple(group.split("\n")) for group in groups]


def test_200_random_host_lists_are_what_scontrol_makes_of_them(site: Cluster) -> None:
    dice = random.Random(9)
    lists = [random_list(dice) for _ in range(200)]
    assert [host_names(text) for text in lists] == as_scontrol_expands(site, lists)


def test_200_random_sets_of_hosts_come_back_from_the_lists_that_slurm_writes_for_them(site: Cluster) -> None:
    dice = random.Random(10)
    (site.state / "sets").write_text("".join(f"{','.join(random_set(dice))}\n" for _ in range(200)))
    written = site.run("xargs", "-a", str(site.state / "sets"), "-n1", "scontrol", "show", "hostlist")
    lists = written.stdout.split()
    assert len(lists) == 200
    assert any("[" in text for text in lists)
    assert [host_names(text) for text in lists] == as_scontrol_expands(site, lists)


def random_set(dice: random.Random) -> list[str]:
    width = dice.choice((0, 0, 2, 4))
    return [
        f"{dice.choice(('gpu', 'r1n', 'x-'))}{str(dice.randint(0, 40)).zfill(width)}"
        for _ in range(dice.randint(1, 30))
    ]


# --- steps


def random_step(dice: random.Random, nodes: Sequence[str], *, may_nest: bool = True) -> Step:
    """A step on some of these nodes."""
    pmi = dice.choice(("none", "none", "none", "pmi2", "pmix"))
    always = f"--overlap --overcommit --mpi={pmi}"
    kind = dice.randrange(4)
    if kind == 0 and may_nest:
        # In whatever order the nodes are named, and however often.
        placed = [dice.choice(nodes) for _ in range(dice.randint(1, 9))]
        many = len(set(placed))
        return Step(f"{always} -m arbitrary -N{many} -n{len(placed)} -w {','.join(placed)}", len(placed), pmi)
    many = dice.randint(1, len(nodes))
    size = dice.randint(many, min(10, CPUS * many))
    where = ""
    if kind == 1:
        where = f"-w {','.join(dice.sample(nodes, many))}"
    elif kind == 2 and may_nest:
        where = f"--relative={dice.randint(0, len(nodes) - many)}"
    order = dice.choice(("block", "cyclic", "plane=2", "plane=3"))
    inner = None
    if may_nest and dice.random() < 0.3:
        inner = random_step(dice, nodes, may_nest=False)
    return Step(f"{always} -m {order} -N{many} -n{size} {where}", size, pmi, inner)


def random_heterogeneous_step(dice: random.Random, *, nodes: tuple[int, int]) -> Step:
    """A step over both components of a job with so many nodes, or over one."""
    pmi = dice.choice(("none", "none", "pmi2", "pmix"))
    groups = dice.choice(((0, 1), (0, 1), (0, 1), (0,), (1,)))
    parts, size = [], 0
    for group in groups:
        many = dice.randint(1, nodes[group])
        tasks = dice.randint(many, 6)
        size += tasks
        order = dice.choice(("block", "cyclic"))
        parts.append(
            f"--het-group={group} --overlap --overcommit --mpi={pmi} -m {order} -N{many} -n{tasks} $OUT/task"
        )
    return Step(" : ".join(parts).removesuffix(" $OUT/task"), size, pmi)


def run_steps(site: Cluster, out: Path, words: Sequence[str], steps: Mapping[str, Step]) -> str:
    """One job with these steps, some at a time; returns its output. Every case's tasks are in `out/case`."""
    for name, text in (("task", TASK), ("nest", TASK_WITH_A_STEP), ("script", BATCH_SCRIPT)):
        (out / name).write_text(text)
        (out / name).chmod(0o755)
    (out / "steps").write_text("".join(f"{step.line(case)}\n" for case, step in steps.items()))
    return site.sbatch(*words, str(out / "script"), OUT=str(out), timeout_s=150).output


def told(case: Path) -> list[tuple[str, dict[str, str]]]:
    """(host, environment) of every task of a case; only what launchers set, for it is shown in failures."""
    found = []
    for file in case.glob("*"):
        variables = dict(item.split("=", 1) for item in file.read_text().split("\0") if item)
        launcher = {name: value for name, value in variables.items() if LEFTOVERS.match(name)}
        found.append((file.name.split(".")[0], launcher))
    return found


def truth(
    tasks: Sequence[tuple[str, dict[str, str]]], size: int, pmi: str, nodes: Sequence[str]
) -> list[RankInfo]:
    """Return what the tasks of a step should find out, in their order."""
    ranks = defaultdict(list)
    for host, environ in tasks:
        ranks[host].append(int(environ["SLURM_PROCID"]))
    return [
        RankInfo(
            rank=int(environ["SLURM_PROCID"]),
            size=size,
            local_rank=sorted(ranks[host]).index(int(environ["SLURM_PROCID"])),
            local_size=len(ranks[host]),
            node=nodes.index(host),
            nodes=tuple(nodes),
            launcher="slurm",
            pmi=pmi,
        )
        for host, environ in tasks
    ]


def test_200_random_steps_are_read_as_slurm_has_placed_their_tasks(site: Cluster, tmp_path: Path) -> None:
    dice = random.Random(11)
    some = ("gpu002", "login7", "r1n10")
    jobs = {
        # Here the job's SLURM_NTASKS_PER_NODE is wrong for nearly all steps.
        "whole": (["-N6", f"--ntasks-per-node={CPUS}"], [random_step(dice, NODES) for _ in range(90)]),
        "uneven": ([f"-w{','.join(some)}", "-N3", "-n11"], [random_step(dice, some) for _ in range(50)]),
        "heterogeneous": (
            ["-N2", "-n4", ":", "-N3", "-n6"],
            [random_heterogeneous_step(dice, nodes=(2, 3)) for _ in range(40)],
        ),
    }
    tried: list[tuple[str, Step, list[tuple[str, dict[str, str]]]]] = []
    for job, (words, drawn) in jobs.items():
        steps = {f"{job}-{i}": step for i, step in enumerate(drawn)}
        (tmp_path / job).mkdir()
        output = run_steps(site, tmp_path / job, words, steps)
        for case, step in steps.items():
            for name, one in ((case, step), (f"{case}-inner", step.inner)):
                if one is not None:
                    tasks = told(tmp_path / job / name)
                    ranks = sorted(int(environ["SLURM_PROCID"]) for _, environ in tasks)
                    assert ranks == list(range(one.size)), f"{one} did not run as it should:\n{output}"
                    tried.append((name, one, tasks))
    assert len(tried) >= 200, Counter(name.split("-")[0] for name, _, _ in tried)

    lists = [tasks[0][1]["SLURM_STEP_NODELIST"] for _, _, tasks in tried]
    for (name, step, tasks), nodes in zip(tried, as_scontrol_expands(site, lists), strict=True):
        assert set(nodes) == {host for host, _ in tasks}
        found = [detect(environ) for _, environ in tasks]
        assert found == truth(tasks, step.size, step.pmi, nodes), f"{name}: {step}"


@pytest.mark.parametrize(
    ("words", "tasks"),
    [
        (["-N3", "-n7"], 7),
        (["-N2", "--ntasks-per-node=3"], 6),
        (["-n5"], 5),
        (["-N2", "-n2", ":", "-N1", "-n3"], 5),
    ],
    ids=lambda value: "".join(value) if isinstance(value, list) else "",
)
def test_a_batch_scripts_own_shell_is_no_rank_but_knows_the_jobs_tasks(
    site: Cluster, tmp_path: Path, words: list[str], tasks: int
) -> None:
    run_steps(site, tmp_path, words, {})
    [(_, environ)] = told(tmp_path / "batch")
    info = detect(environ)
    assert (info.rank, info.size, info.launcher) == (0, 1, "single")
    assert f"has {tasks} tasks" in str(info.hint)
    assert job_tasks(environ) == tasks
