"""What is hidden behind computation: the formula, its bound, and ways of which both are known."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpcpar.bench import overlap
from hpcpar.bench.collectives import read_json, write_json
from hpcpar.bench.measure import Buffers, Case, Place, Timing
from hpcpar.bench.overlap import (
    OURS,
    THREAD,
    Attendant,
    Node,
    Options,
    Pending,
    Products,
    Row,
    explain,
    header,
    hidden_by_round,
    most_hidden,
    overlapped,
    processor_s,
    run,
    show,
    titles,
)
from hpcpar.comm import Communicator, run_loopback

QUICK = Options(nbytes=4096, computes=(1,), pokes=(0, 2), rounds=2, round_s=0.0, may_thread=True)


def test_what_is_hidden_is_what_both_together_save_of_the_communication() -> None:
    compute, alone = Timing((4.0, 4.0, 4.0), 1), Timing((2.0, 2.0, 2.0), 1)
    both = Timing((4.0, 6.0, 7.0), 1)
    assert hidden_by_round(compute, alone, both) == [1.0, 0.0, -0.5]


@pytest.mark.parametrize(
    ("cpu_s", "node", "helper", "bound"),
    [
        (0.0, Node(2, 2, 1), False, 1.0),  # who only waits
        (2.0, Node(2, 2, 1), False, 0.0),  # who never waits
        (0.5, Node(2, 2, 1), False, 0.75),
        (0.5, Node(2, 2, 1), True, 0.75),  # a helper has no core of its own
        (0.5, Node(2, 4, 1), False, 0.75),  # idle cores are of no use to who pokes
        (0.5, Node(2, 4, 1), True, 1.0),  # but to a helper they are
        (2.0, Node(3, 4, 1), True, 0.75),  # (3·4 + 3·2)/4 = 4.5 s on four cores
        (2.0, Node(1, 2, 2), True, 0.5),  # two threads fill both cores: (2·4 + 2)/2 = 5 s
        (0.5, Node(4, 2, 1), False, 0.5),  # two ranks on each core: (2·4 + 4·0.5)/2 = 5 s
    ],
)
def test_the_bound_leaves_room_for_the_processors_work(
    cpu_s: float, node: Node, helper: bool, bound: float
) -> None:
    assert most_hidden(4.0, 2.0, cpu_s, node, helper=helper) == pytest.approx(bound)


def test_a_short_computation_hides_no_more_than_it_lasts() -> None:
    assert most_hidden(0.5, 2.0, 0.0, Node(2, 2, 1), helper=False) == pytest.approx(0.25)


class Waiting:
    """A communication that takes a while, of which `busy` keeps the processor in the final wait."""

    def __init__(self, takes_s: float, busy: bool) -> None:
        self.ready_s = time.perf_counter() + takes_s
        self.takes_s = takes_s
        self.busy = busy

    def test(self) -> bool:
        if self.busy:
            self.wait()
        return time.perf_counter() >= self.ready_s

    def wait(self) -> None:
        if self.busy and self.takes_s:
            stop_s = time.process_time() + self.takes_s
            while time.process_time() < stop_s:
                pass
            self.takes_s = 0.0
        while not self.busy and (left_s := self.ready_s - time.perf_counter()) > 0:
            time.sleep(left_s)


class Known:
    """A peer of which is known what can be hidden: all, or nothing."""

    def __init__(self, takes_s: float) -> None:
        self.takes_s = takes_s

    def starters(
        self, case: Case, comm: Communicator, buffers: Buffers, place: Place
    ) -> list[tuple[str, Callable[[], Pending], object, bool]]:
        return [
            ("idle", lambda: Waiting(self.takes_s, busy=False), None, False),
            ("busy", lambda: Waiting(self.takes_s, busy=True), None, False),
        ]


class Sleeping(Products):
    """A computation without work: what processor time there is, the communication has taken."""

    def run(self, count: int) -> None:
        time.sleep(1e-4 * count)


def test_waiting_is_no_work_and_the_bound_is_that_of_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overlap, "Products", Sleeping)
    options = replace(QUICK, computes=(2,), pokes=(2,), candidates=("idle", "busy"))
    comm = Communicator.alone()
    idle, busy = rows = run(options, comm, [Known(0.008)])
    # A busy machine makes everything take longer, but never 8 ms of work free of charge.
    assert idle.cpu_s < 0.004
    assert busy.cpu_s == pytest.approx(0.008, rel=0.2)
    assert idle.company_cpu_s < 0.004 < busy.company_cpu_s
    node = Node.of(comm, QUICK.threads)
    for row in rows:
        assert row.bound == most_hidden(row.compute_s, row.communication_s, row.cpu_s, node, helper=False)
    assert (idle.compute, idle.pokes, idle.wrong) == (2, 2, 0)
    assert idle.communication_s >= 0.008


@pytest.mark.parametrize("collective", overlap.COLLECTIVES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_collective_is_right_when_computation_goes_on_beside_it(collective: str, size: int) -> None:
    options = replace(QUICK, collective=collective)
    rows = run_loopback(size, lambda comm: run(options, comm))[0]
    assert [(row.algorithm, row.pokes) for row in rows] == [(OURS, 0), (OURS, 2), (THREAD, 0)]
    assert all(row.wrong == 0 for row in rows)
    assert all(row.both_s > 0 and row.products >= 1 for row in rows)
    assert all(thread.name != "hpcpar attendant" for thread in threading.enumerate())


def test_a_way_that_leaves_wrong_numbers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    right = overlap.ours

    def forgetful(*arguments: object, **named: object) -> list[overlap.Way]:
        way = right(*arguments, **named)[0]  # type: ignore[arg-type]
        return [replace(way, result=way.result.clone())]

    monkeypatch.setattr(overlap, "ours", forgetful)
    rows = run_loopback(2, lambda comm: run(replace(QUICK, pokes=(0,)), comm))[0]
    assert [row.wrong for row in rows] == [2 * 1024]


def test_only_the_ways_asked_for_are_measured_and_no_thread_where_mpi_allows_none() -> None:
    names = [
        {row.algorithm for row in run(options, Communicator.alone())}
        for options in (replace(QUICK, candidates=(OURS,)), replace(QUICK, may_thread=False))
    ]
    assert names == [{OURS}, {OURS}]


def test_pokes_stand_between_equal_slices_of_the_computation() -> None:
    order: list[object] = []

    class Recorded(Products):
        def run(self, count: int) -> None:
            order.append(count)

    class Done:
        def test(self) -> bool:
            return True

        def wait(self) -> None:
            order.append("wait")

    way = overlap.Way("recorded", Done, lambda _: order.append("poke"), None)
    overlapped(way, Recorded(), 5, 2)()
    assert order == [2, "poke", 2, "poke", 1, "wait"]
    order.clear()
    overlapped(way, Recorded(), 5, 0, nap_s=1e-5)()
    assert order == [5, "wait"]


def test_an_attendant_moves_data_while_its_rank_does_not_look() -> None:
    def attended(comm: Communicator) -> tuple[bool, float]:
        attendant = Attendant(comm)
        buffer = torch.full((1000,), float(comm.rank + 1))
        pending = attendant.start(lambda: comm.start_allreduce(buffer))
        deadline_s = time.perf_counter() + 30
        while buffer[-1] != 3 and time.perf_counter() < deadline_s:
            time.sleep(0.001)
        seen = bool(buffer[-1] == 3)
        comm_works = [pending.test(), pending.wait() is buffer, comm.allreduce(torch.ones(1)).item() == 2]
        attendant.close()
        return seen and all(comm_works), buffer.sum().item()

    assert run_loopback(2, attended) == [(True, 3000.0)] * 2


def test_processor_time_is_that_of_work_not_of_sleep() -> None:
    assert processor_s(lambda: time.sleep(0.02), 2, Communicator.alone()) < 0.01
    assert processor_s(lambda: sum(range(200_000)), 2, Communicator.alone()) > 0.0005


def line(**others: object) -> Row:
    row = Row(
        *("allreduce", OURS, 2, 8 << 20, "float32", "torch", 2.0, 16, 40, 9),
        *(2e-3, 1e-3, 2.25e-3, 0.75, 0.7, 0.8, 0.2e-3, 0.3e-3, 0.1e-3, 0.8, 0),
    )
    return replace(row, **others)  # type: ignore[arg-type]


def test_a_line_stands_under_its_titles() -> None:
    heads = titles(Case("allreduce", 2 << 20, "float32", "torch", 2))
    assert heads[1] == "# allreduce of 8.0 MiB float32, in place, 2 ranks"
    shown = show(line())
    assert shown.split() == [
        *(OURS, "2", "16", "2000", "1000", "2250", "75", "70..80", "80", "200", "300", "100", "0"),
    ]
    assert len(shown) == len(heads[2])
    for title, cell in (("hidden", "75"), ("bound", "80"), ("company", "300")):
        assert heads[2].index(title) + len(title) == shown.index(f" {cell} ") + 1 + len(cell)


def test_what_was_hidden_at_best_is_told_beside_what_can_be() -> None:
    rows = [line(hidden=0.1, pokes=0), line(), line(algorithm="mpi", hidden=-0.2, bound=0.25)]
    first, own, mpi = explain(rows, Node(2, 2, 1))
    assert first.startswith("2 ranks with 1 threads each on 2 cores")
    assert own.startswith("hpcpar: 75% hidden at best (16 pokes, compute 2 times), bound 80%: of its 1.00 ms")
    assert mpi.startswith("mpi: -20% hidden at best")


def test_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    facts = run_loopback(2, lambda comm: header(QUICK, comm, "MPICH 5.0.2", {}))[0]
    write_json(path, facts, [line()])
    told, lines = read_json(path)
    assert (told["benchmark"], told["ranks"], told["threads"]) == ("overlap", 2, 1)
    assert [Row(**one) for one in lines] == [line()]


@pytest.mark.mpi
def test_mpis_own_and_gloo_are_right_beside_a_computation(world: Communicator) -> None:
    from hpcpar.bench import peers

    wanted = (OURS, THREAD, "mpi", "gloo")
    found, wrong = {}, []
    with peers.connected(world, wanted) as (others, said):
        # Two will do: more ranks than cores make MPI's own waits long, and all are tried above without MPI.
        for collective in ("allreduce", "reduce_scatter"):
            options = replace(QUICK, collective=collective, candidates=wanted, pokes=(1,), rounds=1)
            rows = run(options, world, overlap.starting(others))
            found[collective] = {row.algorithm for row in rows}
            wrong += [row for row in rows if row.wrong]
    everyone = world.allgather_object((found, wrong))
    assert all(answer == everyone[0] for answer in everyone)
    assert wrong == []
    for names in found.values():
        assert names >= {OURS, THREAD, "mpi"}
        assert "gloo" in names or said["gloo"].startswith("left out")
