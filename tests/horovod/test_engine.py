"""The engine of a process set over loopback: fusion by every threshold, order, memory, shutdown."""

from __future__ import annotations

import gc
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from hpcpar.comm import Communicator, run_loopback
from hpcpar.horovod import negotiation
from hpcpar.horovod.chrome_timeline import ChromeTimeline
from hpcpar.horovod.engine import Engine, EngineGroup, _Waited
from hpcpar.horovod.exceptions import HorovodInternalError
from hpcpar.horovod.negotiation import TensorRequest
from hpcpar.horovod.operations import Ticket
from hpcpar.launch.horovod_settings import HorovodSettings

T = TypeVar("T")

SIZES = (1, 2, 3, 4)


def engine_over(comm: Communicator, engine_group: EngineGroup | None = None, **knobs: Any) -> Engine:
    """One of its own, on communicators that nobody else uses."""
    data, control = (comm.split(0, comm.rank, name) for name in ("data", "rounds"))
    assert data is not None
    assert control is not None
    engine_group = engine_group or EngineGroup(comm.poke)
    return Engine(data.unchecked("data"), control.unchecked("rounds"), engine_group, HorovodSettings(**knobs))


def with_engines(size: int, work: Callable[[Engine], T], *, nodes: Any = None, **knobs: Any) -> list[T]:
    """Return the results of `work` on every rank."""
    return run_loopback(size, lambda comm: work(engine_over(comm, **knobs)), nodes=nodes)


def ticket(kind: str, tensor: Tensor, name: str, *, in_place: bool = False, **told: Any) -> Ticket:
    told = {"op": "sum"} | told if kind in ("allreduce", "reducescatter") else told
    dtype = str(tensor.dtype).removeprefix("torch.")
    request = TensorRequest(f"{kind}.{name}", kind, dtype, tuple(tensor.shape), **told)
    return Ticket(request, tensor, tensor if in_place else None)


def all_of(engine: Engine, tickets: Sequence[Ticket]) -> list[Any]:
    """Ask for all of them, then wait for each."""
    for one in tickets:
        engine.submit([one])
    return [engine.wait(one) for one in tickets]


def brought(rank: int, shape: Any, dtype: torch.dtype = torch.float32, salt: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def total(size: int, shape: Any, dtype: torch.dtype = torch.float32, salt: int = 0) -> Tensor:
    inputs = [brought(rank, shape, dtype, salt) for rank in range(size)]
    return torch.stack(inputs).sum(0, dtype=dtype)


SHAPES = [(), (0,), (1,), (3,), (17, 17), (0, 5), (5000,), (2, 3, 4), (40_000,), (200_000,)]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("size", "knobs"),
    [
        *((size, {}) for size in SIZES),
        (2, {"fusion_threshold_nbytes": 0}),
        (3, {"fusion_threshold_nbytes": 1}),
        (4, {"fusion_threshold_nbytes": 100}),
        (3, {"fusion_threshold_nbytes": 20_000}),
        (2, {"fusion_threshold_nbytes": 1 << 40}),
        (4, {"cycle_time_s": 0.0}),
        (3, {"cycle_time_s": 0.05}),
        (2, {"disable_group_fusion": True}),
    ],
    ids=str,
)
def test_whatever_is_fused_is_right(size, knobs):
    def work(engine: Engine) -> list[Tensor]:
        tickets = [
            ticket("allreduce", brought(engine.rank, shape, dtype, salt), f"{dtype}{salt}")
            for dtype in (torch.float32, torch.int64, torch.bfloat16)
            for salt, shape in enumerate(SHAPES)
        ]
        random.Random(engine.rank).shuffle(tickets)
        found = {one.request.name: x for one, x in zip(tickets, all_of(engine, tickets), strict=True)}
        return [found[name] for name in sorted(found)]

    results = with_engines(size, work, **knobs)
    expected = {
        f"allreduce.{dtype}{salt}": total(size, shape, dtype, salt)
        for dtype in (torch.float32, torch.int64, torch.bfloat16)
        for salt, shape in enumerate(SHAPES)
    }
    for found in results:
        for name, x in zip(sorted(expected), found, strict=True):
            assert torch.equal(x, expected[name]), name


@pytest.mark.parametrize("which", ["hierarchical_allreduce", "hierarchical_allgather"])
def test_ranks_on_several_nodes_may_reduce_and_gather_by_node(which):
    def work(engine: Engine) -> list[Any]:
        return all_of(
            engine,
            [
                ticket("allreduce", brought(engine.rank, (1000,)), "small"),
                ticket("allreduce", brought(engine.rank, (200_000,)), "large"),
                ticket("allgather", torch.full((3,), engine.rank), "even"),
            ],
        )

    for small, large, gathered in with_engines(4, work, nodes=[0, 0, 1, 1], **{which: True}):
        assert torch.equal(small, total(4, (1000,)))
        assert torch.equal(large, total(4, (200_000,)))
        assert gathered.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_nothing_is_kept_of_thousands_of_unnamed_operations():
    def work(engine: Engine) -> list[dict[str, int]]:
        seen = []
        for count in (1000, 2000):
            for _ in range(count):
                name, serial = engine.unnamed("allreduce")
                own = torch.ones(2)
                engine.submit(
                    [
                        one := Ticket(
                            TensorRequest(name, "allreduce", "float32", (2,), op="sum", serial=serial), own
                        )
                    ]
                )
                assert engine.wait(one)[0] == engine.size
            seen.append(sizes_of(engine))
        return seen

    before = len(gc.get_objects())
    for early, late in with_engines(2, work):
        assert late == early, "what the engine holds does not grow"
    gc.collect()
    assert len(gc.get_objects()) - before < 2000


def sizes_of(owner: object, name: str = "engine", seen: set[int] | None = None) -> dict[str, int]:
    """Count the entries of all containers that an engine holds, also by objects of this package."""
    seen = set() if seen is None else seen
    found: dict[str, int] = {}
    for key, value in getattr(owner, "__dict__", {}).items():
        if id(value) in seen or isinstance(value, (str, bytes, tuple, torch.Tensor)):
            continue
        seen.add(id(value))
        if type(value).__module__.startswith("hpcpar.horovod"):
            found |= sizes_of(value, f"{name}.{key}", seen)
        elif hasattr(value, "__len__"):
            found[f"{name}.{key}"] = len(value)
    return found


def test_names_that_never_come_again_leave_nothing_but_limited_caches():
    def work(engine: Engine) -> dict[str, int]:
        for step in range(700):
            tickets = [ticket("allreduce", torch.ones(1 + step % 30), f"{step}.{k}") for k in range(3)]
            all_of(engine, tickets)
        return sizes_of(engine)

    for held in with_engines(2, work):
        assert all(count <= 512 for count in held.values()), held


def test_engines_of_a_group_move_on_together():
    """Rank 0 waits for the first engine's operation first, rank 1 for the second's."""

    def work(comm: Communicator) -> list[float]:
        engine_group = EngineGroup(comm.poke)
        engines = [engine_over(comm, engine_group) for _ in range(2)]
        found = []
        for step in range(20):
            tickets = [ticket("allreduce", torch.full((2,), float(k)), f"{step}") for k in range(2)]
            for engine, one in zip(engines, tickets, strict=True):
                engine.submit([one])
            order = (0, 1) if comm.rank == 0 else (1, 0)
            for k in order:
                engines[k].wait(tickets[k])
            found += [one.result[0].item() for one in tickets]
        return found

    assert run_loopback(2, work) == [[0.0, 2.0] * 20] * 2


def test_threads_may_wait_in_several_engines_at_once():
    """Each rank waits in two engines at once; every one needs a rank whose first thread waits in the next."""

    def work(comm: Communicator) -> list[float]:
        pairs = [comm.split(0 if comm.rank != out else 1, comm.rank, f"without {out}") for out in range(3)]
        engine_group = EngineGroup(comm.poke)
        own = [(comm.rank + 1) % 3, (comm.rank + 2) % 3]
        engines = {out: engine_over(pairs[out], engine_group, stall_shutdown_s=5.0) for out in sorted(own)}
        results: dict[int, float] = {}

        def ask(out: int) -> None:
            (result,) = all_of(engines[out], [ticket("allreduce", torch.ones(2), "x")])
            results[out] = result[0].item()

        first = threading.Thread(target=ask, args=(own[0],))
        first.start()
        time.sleep(0.3)  # it is waiting
        ask(own[1])
        first.join()
        return [results[out] for out in own]

    assert run_loopback(3, work) == [[2.0, 2.0]] * 3


def test_a_crew_that_fails_fails_all_that_is_under_way_and_takes_nothing_more():
    def work(comm: Communicator) -> list[str]:
        engine_group = EngineGroup(comm.poke)
        engine = engine_over(comm, engine_group, cycle_time_s=10.0)
        one = ticket("allreduce", torch.ones(2), "pending")
        engine.submit([one])
        engine_group.fail(HorovodInternalError("the end has come"))
        told = []
        for call in (
            lambda: engine.wait(one),
            lambda: engine.submit([ticket("allreduce", torch.ones(2), "x")]),
        ):
            with pytest.raises(HorovodInternalError) as raised:
                call()
            told.append(str(raised.value))
        return told

    assert run_loopback(1, work) == [["the end has come"] * 2]


@pytest.mark.parametrize(
    ("dtype", "numel"),
    [(torch.uint8, 3), (torch.uint8, 600_000), (torch.int8, 600_000), (torch.int16, 3)],
    ids=str,
)
def test_averages_of_narrow_integers_stay_in_their_range(dtype, numel):
    most = torch.iinfo(dtype).max

    def work(engine: Engine) -> list[Tensor]:
        whole = torch.full((numel,), most - engine.rank, dtype=dtype)
        tickets = [
            ticket("allreduce", whole, "alone", op="average"),
            ticket("allreduce", whole.clone(), "in place", op="average", in_place=True),
            ticket("allreduce", whole[:3].clone(), "small", op="average"),
            ticket("reducescatter", whole, "rows", op="average"),
        ]
        at_once = all_of(engine, tickets[:1])
        return at_once + all_of(engine, tickets[1:])

    for found in with_engines(3, work):
        assert all(tensor.dtype is dtype for tensor in found)
        assert all((tensor == most - 1).all() for tensor in found)


@pytest.mark.parametrize("numel", [3, 300_000], ids=["small", "large"])
@pytest.mark.parametrize("others", [0, 1], ids=["alone", "with another"])
def test_an_output_that_cannot_be_written_ends_the_engine_with_the_real_reason(numel, others):
    def work(engine: Engine) -> list[str]:
        tickets = [ticket("allreduce", torch.ones(1).expand(numel), "expanded", in_place=True)]
        tickets += [ticket("allreduce", torch.ones(4), f"other {number}") for number in range(others)]
        for one in tickets:
            engine.submit([one])
        told = []
        for call in (lambda: engine.wait(tickets[0]), lambda: all_of(engine, [brought_later()])):
            with pytest.raises(HorovodInternalError) as raised:
                call()
            told.append(str(raised.value))
        assert isinstance(tickets[0].error.__cause__, RuntimeError)
        assert not engine.is_busy
        return told

    def brought_later() -> Ticket:
        return ticket("allreduce", torch.ones(2), "unrelated")

    for told in with_engines(2, work):
        assert all("RuntimeError" in text and "memory location" in text for text in told), told


def test_a_stall_ends_after_the_shutdown_time_on_every_rank_and_names_who_is_missing():
    def work(engine: Engine) -> str:
        mine = ticket("allreduce", torch.ones(2), "everyone's" if engine.rank != 1 else "another")
        engine.submit([mine])
        while not (late := engine.not_asking_for(mine.request.name)):
            engine.poll(mine)
        assert late == ((0, 2) if engine.rank == 1 else (1,))
        assert _Waited(engine, mine).waiting_for()  # some rank, whichever round is under way
        with pytest.raises(HorovodInternalError) as raised:
            engine.wait(mine)
        return str(raised.value)

    told = with_engines(3, work, stall_check_s=0.1, stall_shutdown_s=0.5)
    for rank, text in enumerate(told):
        assert "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS" in text
        missing = {0: "everyone's waits for rank 1", 1: "another waits for ranks 0, 2"}
        assert any(words in text for words in missing.values()), (rank, text)


def test_a_timeline_records_what_runs_without_it(tmp_path):
    """The functions called are the same, but for the timeline's own."""

    def called(path: Any) -> set[str]:
        names: set[str] = set()

        def note(frame: Any, event: str, _: Any) -> None:
            file = frame.f_code.co_filename
            if event == "call" and "hpcpar/horovod" in file and "timeline" not in file:
                names.add(f"{file}:{frame.f_code.co_qualname}")

        def work(engine: Engine) -> None:
            if path is not None:
                engine.observer.timeline = ChromeTimeline(path, mark_cycles=True)
            negotiation._digest.cache_clear()
            sys.setprofile(note)
            try:
                for step in range(2):
                    engine.wait(submitted(engine, [ticket("allreduce", torch.ones(4), f"one {step}")])[0])
                    several = [ticket("allreduce", torch.ones(4), f"{k} {step}") for k in range(3)]
                    large = ticket("allreduce", torch.ones(1 << 18), f"large {step}")
                    rows = ticket("allgather", torch.ones(2, 2), f"rows {step}")
                    all_of(engine, [*several, large, rows])
            finally:
                sys.setprofile(None)
            if path is not None:
                engine.observer.timeline.close()

        with_engines(1, work)
        return names

    assert called(tmp_path / "trace.json") == called(None)
    events = json.loads((tmp_path / "trace.json").read_text())
    assert {"QUEUE", "MEMCPY_IN_FUSION_BUFFER", "MPI_ALLREDUCE"} <= {event["name"] for event in events}


def submitted(engine: Engine, tickets: Sequence[Ticket]) -> Sequence[Ticket]:
    engine.submit(tickets)
    return tickets
