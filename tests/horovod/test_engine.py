"""The engine of a process set over loopback: fusion by every threshold, order, memory, shutdown."""

from __future__ import annotations

import gc
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from hpcpar.comm import Communicator, run_loopback
from hpcpar.horovod import negotiation
from hpcpar.horovod.chrome_timeline import ChromeTimeline
from hpcpar.horovod.engine import BUFFER_NBYTES, Engine, EngineGroup
from hpcpar.horovod.exceptions import HorovodInternalError
from hpcpar.horovod.negotiation import TensorRequest
from hpcpar.horovod.operations import Ticket
from hpcpar.launch.horovod_settings import HorovodSettings

T = TypeVar("T")

SIZES = (1, 2, 3, 4)
TYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)


def engine_over(comm: Communicator, engine_group: EngineGroup | None = None, **knobs: Any) -> Engine:
    """One of its own, on communicators that nobody else uses."""
    data, control = (comm.split(0, comm.rank, name) for name in ("data", "rounds"))
    assert data is not None
    assert control is not None
    engine_group = engine_group or EngineGroup(comm.poke)
    return Engine(data.unchecked("data"), control.unchecked("rounds"), engine_group, HorovodSettings(**knobs))


def with_engines(size: int, work: Callable[[Engine], T], *, nodes: Any = None, **knobs: Any) -> list[T]:
    """What `work` returns on every rank."""
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


@pytest.mark.parametrize("dtype", TYPES)
def test_every_operation_of_every_type_is_right_fused_and_alone(dtype):
    size, shapes = 3, [(7,), (2, 3), (), (0,), (700_000 // dtype.itemsize,)]
    cases = list(product(("sum", "average", "min", "max", "product"), enumerate(shapes)))

    def work(engine: Engine) -> list[Tensor]:
        return all_of(
            engine,
            [
                ticket("allreduce", brought(engine.rank, shape, dtype, k), f"{op} {k}", op=op)
                for op, (k, shape) in cases
            ],
        )

    combine = {"min": torch.amin, "max": torch.amax, "product": torch.prod}
    for found in with_engines(size, work):
        for x, (op, (k, shape)) in zip(found, cases, strict=True):
            inputs = torch.stack([brought(rank, shape, dtype, k) for rank in range(size)])
            expected = combine[op](inputs, 0).to(dtype) if op in combine else inputs.sum(0, dtype=dtype)
            if op == "average" and dtype.is_floating_point:
                expected = expected / size
            elif op == "average":
                expected = torch.div(expected, size, rounding_mode="trunc")
            assert x.dtype == dtype
            assert torch.equal(x, expected), (op, shape)


@pytest.mark.smoke
def test_an_average_over_three_ranks_divides_exactly():
    """A product by the reciprocal differs for a third of these."""
    values = torch.arange(1.0, 401.0)
    assert (values * 3 * torch.tensor(1 / 3) != values).any() or (values / 3 != values * (1 / 3)).any()

    def work(engine: Engine) -> list[Tensor]:
        own = values * (engine.rank + 1)
        return all_of(engine, [ticket("allreduce", x, str(len(x)), op="average") for x in (own, own[:7])])

    for whole, part in with_engines(3, work):
        assert torch.equal(whole, values * 6 / 3)
        assert torch.equal(part, (values * 6 / 3)[:7])


@pytest.mark.parametrize("numel", [6, 200_000])
def test_integers_are_scaled_and_truncated_before_and_after(numel):
    size = 3
    of_ranks = [torch.arange(numel) % 7 * (-1) ** rank + rank for rank in range(size)]

    def work(engine: Engine) -> list[Tensor]:
        own = of_ranks[engine.rank]
        tickets = [
            ticket("allreduce", own, "before", prescale=0.5),
            ticket("allreduce", own, "after", postscale=0.5),
            ticket("allreduce", own, "both", op="average", prescale=1.7, postscale=0.3),
            ticket("allreduce", own.clone(), "in place", prescale=0.5, in_place=True),
        ]
        found = all_of(engine, tickets)
        assert torch.equal(own, (torch.arange(numel) % 7 * (-1) ** engine.rank + engine.rank))
        return found

    def scaled(x: Tensor, factor: float) -> Tensor:
        return (x.double() * factor).trunc().long()

    before = sum(scaled(x, 0.5) for x in of_ranks)
    both = torch.div(scaled(sum(scaled(x, 1.7) for x in of_ranks), 0.3), size, rounding_mode="trunc")
    for found in with_engines(size, work):
        assert torch.equal(found[0], before)
        assert torch.equal(found[1], scaled(sum(of_ranks), 0.5))
        assert torch.equal(found[2], both)
        assert torch.equal(found[3], before)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 64, 32, 64)], ids=["fused", "alone"])
def test_any_order_of_memory_is_taken(shape):
    def forms(values: Tensor) -> list[Tensor]:
        wide = torch.zeros(*shape[:-1], 2 * shape[-1])
        wide[..., ::2] = values
        return [
            values.to(memory_format=torch.channels_last),
            values.transpose(1, 3).contiguous().transpose(1, 3),
            wide[..., ::2],
        ]

    def work(engine: Engine) -> list[Tensor]:
        values = brought(engine.rank, shape)
        news = all_of(engine, [ticket("allreduce", x, f"new {k}") for k, x in enumerate(forms(values))])
        in_place = forms(values)
        tickets = [ticket("allreduce", x, str(k), in_place=True) for k, x in enumerate(in_place)]
        assert all(a is b for a, b in zip(all_of(engine, tickets), in_place, strict=True))
        return news + in_place

    for found in with_engines(2, work):
        for k, x in enumerate(found):
            assert torch.equal(x, total(2, shape)), k


def test_a_tensor_larger_than_the_buffer_and_more_tensors_than_it_holds_are_reduced():
    large = BUFFER_NBYTES // 4 + 1000
    many, count = 40, 100_000

    def work(engine: Engine) -> list[float]:
        own = torch.ones(large)
        rest = [ticket("allreduce", torch.full((count,), float(k)), str(k)) for k in range(many)]
        found = all_of(engine, [ticket("allreduce", own, "large"), *rest])
        assert all(x.min() == x.max() for x in found)
        return [x[0].item() for x in found]

    for found in with_engines(2, work):
        assert found == [2.0, *(2.0 * k for k in range(many))]


@pytest.mark.parametrize("size", SIZES)
def test_other_kinds_are_right_among_fused_ones(size):
    def work(engine: Engine) -> list[Any]:
        rank = engine.rank
        exchange = ticket("alltoall", torch.arange(size) + 10 * rank, "x")
        exchange.splits = [1] * size
        tickets = [
            ticket("allreduce", torch.ones(3), "a"),
            ticket("allgather", torch.full((rank,), rank), "g"),
            ticket("broadcast", torch.full((4,), rank), "b", root=size - 1),
            ticket("broadcast", torch.full((300_000,), rank), "large", root=0),
            ticket("reducescatter", torch.arange(size + 1), "r"),
            exchange,
            ticket("allreduce", torch.ones(3, dtype=torch.int32), "c"),
        ]
        random.Random(rank).shuffle(tickets)
        found = dict(zip([one.request.name for one in tickets], all_of(engine, tickets), strict=True))
        return [found[name] for name in sorted(found)]

    for rank, (a, c, gathered, exchanged, b, large, part) in enumerate(with_engines(size, work)):
        names = ["allreduce.a", "allreduce.c", "allgather.g", "alltoall.x", "broadcast.b", "broadcast.large"]
        found = dict(
            zip(sorted([*names, "reducescatter.r"]), (a, c, gathered, exchanged, b, large, part), strict=True)
        )
        assert found["allreduce.a"].tolist() == [size] * 3
        assert found["allreduce.c"].tolist() == [size] * 3
        assert found["allgather.g"].tolist() == [r for r in range(size) for _ in range(r)]
        assert found["alltoall.x"][0].tolist() == [10 * r + rank for r in range(size)]
        assert found["broadcast.b"].tolist() == [size - 1] * 4
        assert found["broadcast.large"].sum() == 0
        rows = [[0, 1], *[[r + 1] for r in range(1, size)]]
        assert found["reducescatter.r"].tolist() == [size * row for row in rows[rank]]


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


def test_nothing_is_kept_of_ten_thousand_unnamed_operations():
    def work(engine: Engine) -> list[dict[str, int]]:
        seen = []
        for count in (1000, 9000):
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
    assert len(gc.get_objects()) - before < 5000


def sizes_of(owner: object, name: str = "engine", seen: set[int] | None = None) -> dict[str, int]:
    """Of everything that an engine holds, directly or by an object of this package: how many entries."""
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
