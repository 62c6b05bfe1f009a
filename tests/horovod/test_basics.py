"""init, shutdown, who a process is, and what is built in; also in jobs of their own, with fresh processes."""

from __future__ import annotations

import inspect
import json
import multiprocessing

import pytest
import torch

from hpcpar import uncompiled
from hpcpar.comm import Communicator, run_loopback
from hpcpar.horovod import basics
from hpcpar.horovod.basics import Context
from hpcpar.horovod.process_sets import ProcessSet, global_process_set
from hpcpar.launch.horovod_settings import HorovodSettings


@pytest.mark.mpi
def test_rank_and_size_are_those_of_mpi(hvd):
    from mpi4py import MPI

    assert (hvd.rank(), hvd.size()) == (MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size())
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    assert (hvd.local_rank(), hvd.local_size()) == (node.Get_rank(), node.Get_size())
    node.Free()


@pytest.mark.mpi
def test_nodes_are_counted_by_local_rank(hvd):
    places = hvd.allgather_object((hvd.local_rank(), hvd.cross_rank(), hvd.cross_size()))
    for local_rank, cross_rank, cross_size in places:
        with_it = [cross for local, cross, _ in places if local == local_rank]
        assert len(with_it) == cross_size
        assert sorted(with_it) == list(range(cross_size))
        assert cross_rank in with_it


# Five ranks on nodes of two, one and two:
#
#   rank          0  1  2  3  4
#   node          a  a  b  c  c
#   local rank    0  1  0  0  1
#   cross rank    0  0  1  2  1      among the nodes that have a process of this local rank
#   cross size    3  2  3  3  2
#
def test_places_on_uneven_nodes_are_those_drawn():
    assert places([0, 0, 1, 2, 2]) == [
        (0, 2, 0, 3, False),
        (1, 2, 0, 2, False),
        (0, 1, 1, 3, False),
        (0, 2, 2, 3, False),
        (1, 2, 1, 2, False),
    ]


def test_places_on_even_nodes_with_ranks_in_turn():
    assert places([0, 1, 0, 1]) == [
        (0, 2, 0, 2, True),
        (0, 2, 1, 2, True),
        (1, 2, 0, 2, True),
        (1, 2, 1, 2, True),
    ]


def places(nodes: list[int]) -> list[tuple[int, int, int, int, bool]]:
    kept = dict(vars(global_process_set))

    def work(comm: Communicator) -> tuple[int, int, int, int, bool]:
        one = Context(comm, HorovodSettings(), dynamic=False)
        return one.local_rank, one.local_size, one.cross_rank, one.cross_size, one.is_homogeneous

    try:
        return run_loopback(len(nodes), work, nodes=nodes)
    finally:
        vars(global_process_set).update(kept)


@pytest.mark.mpi
def test_nodes_are_homogeneous_when_all_have_as_many_ranks(hvd):
    from hpcpar.horovod.torch import mpi_ops

    sizes = hvd.allgather_object(hvd.local_size())
    assert mpi_ops.is_homogeneous() is (len(set(sizes)) == 1)


@pytest.mark.mpi
def test_a_second_init_that_asks_for_what_there_is_does_nothing(hvd):
    from mpi4py import MPI

    before = basics.the_context()
    hvd.init()
    for comm in (list(range(hvd.size())), [], MPI.COMM_WORLD):
        hvd.init(comm=comm, process_sets=[])
    by_comm = hvd.global_process_set.mpi_comm
    vars(hvd.global_process_set).update(mpi_comm=None)
    assert by_comm is MPI.COMM_WORLD
    assert basics.the_context() is before
    assert hvd.is_initialized() is True
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


WRONG = {
    "a number": {"comm": 3},
    "a word": {"comm": "01"},
    "truths": {"comm": [True]},
    "fractions": {"comm": torch.tensor([0.0])},
    "twice": {"comm": [0, 0]},
    "sets: a number": {"process_sets": 3},
    "sets: a word": {"process_sets": "static"},
    "sets: one": {"process_sets": ProcessSet([0])},
    "sets: ranks": {"process_sets": [0]},
}


@pytest.mark.mpi
@pytest.mark.parametrize("arguments", WRONG.values(), ids=WRONG)
def test_what_init_does_not_take_is_a_value_error(hvd, error_of, arguments):
    error = error_of(lambda: hvd.init(**arguments))
    after = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    assert isinstance(error, ValueError)
    assert any(word in str(error) for word in ("init(comm=", "init(process_sets=", "process set"))
    assert after == hvd.size()


@pytest.mark.mpi
def test_a_communicator_that_has_been_freed_is_refused(hvd, error_of):
    from mpi4py import MPI

    freed = MPI.COMM_WORLD.Dup()
    freed.Free()
    errors = [error_of(lambda: hvd.init(comm=freed)), error_of(lambda: hvd.add_process_set(freed))]
    assert all(isinstance(error, ValueError) and "has been freed" in str(error) for error in errors)


@pytest.mark.mpi
@pytest.mark.usefixtures("needs_two")
def test_a_second_init_on_other_ranks_is_refused_and_all_goes_on(hvd, error_of):
    errors = [error_of(lambda comm=comm: hvd.init(comm=comm)) for comm in ([0], [hvd.size()])]
    after = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    assert all(isinstance(error, ValueError) for error in errors)
    assert "init(comm=[0])" in str(errors[0])
    assert "call hvd.shutdown() first" in str(errors[0])
    assert after == hvd.size()


@pytest.mark.mpi
@pytest.mark.usefixtures("needs_two")
def test_a_second_init_adds_the_process_sets_that_are_not_there(hvd, error_of):
    """A library may have called it first, without them."""
    one, two, twin = hvd.ProcessSet([0]), hvd.ProcessSet([1]), hvd.ProcessSet([0])
    hvd.init(process_sets=[one])
    hvd.init(process_sets=[one, two])
    numbers = [one.process_set_id, two.process_set_id]
    found = [hvd.allreduce(torch.ones(1), process_set=each).item() for each in (one, two) if each.included()]
    three = hvd.ProcessSet([0, 1]) if hvd.size() > 2 else hvd.ProcessSet([hvd.size()])
    error = error_of(lambda: hvd.init(process_sets=[three, twin]))
    counts = error_of(lambda: hvd.init(process_sets=[[hvd.size() - 1]] * (hvd.rank() + 1)))
    left = [three.process_set_id, twin.process_set_id, len(basics.the_context().process_sets)]
    for each in (one, two):
        hvd.remove_process_set(each)
    assert None not in numbers
    assert found == [1.0] * (hvd.rank() < 2)
    assert type(error) is type(counts) is ValueError
    assert "process set" in str(error)
    assert "different numbers of process sets" in str(counts)
    assert left == [None, None, 3]


@pytest.mark.mpi
def test_what_is_built_is_answered_in_the_promised_types(hvd):
    queries = ["mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built", "ddl_built", "ccl_built"]
    queries += ["cuda_built", "rocm_built", "mpi_threads_supported"]
    answers = {name: getattr(hvd, name)() for name in queries}
    assert {type(answer) for answer in answers.values()} == {bool}
    assert answers["mpi_enabled"] is answers["mpi_built"] is True
    assert not answers["gloo_built"]
    assert not answers["ddl_built"]
    assert type(hvd.nccl_built()) is int


@pytest.mark.mpi
def test_a_timeline_cannot_be_started_unless_it_was_announced(hvd, tmp_path, error_of):
    started = error_of(lambda: hvd.start_timeline(str(tmp_path / "trace.json")))
    stopped = error_of(hvd.stop_timeline)
    for error in (started, stopped):
        assert type(error) is ValueError
        assert "HOROVOD_TIMELINE=DYNAMIC" in str(error)


SIGNATURES = {
    "init": "comm=None process_sets=None",
    "start_timeline": "file_path mark_cycles=False",
    "allreduce": "tensor average=None name=None compression op=None "
    "prescale_factor=1.0 postscale_factor=1.0 process_set",
    "allreduce_": "tensor average=None name=None op=None "
    "prescale_factor=1.0 postscale_factor=1.0 process_set",
    "allgather": "tensor name=None process_set",
    "broadcast": "tensor root_rank name=None process_set",
    "broadcast_": "tensor root_rank name=None process_set",
    "alltoall": "tensor splits=None name=None process_set",
    "reducescatter": "tensor name=None compression op=0 process_set prescale_factor=1.0 postscale_factor=1.0",
    "reducescatter_async": "tensor name=None op=0 process_set prescale_factor=1.0 postscale_factor=1.0",
    "sparse_allreduce_async": "tensor name op process_set",
    "join": "device=-1",
    "barrier": "process_set",
    "poll": "handle",
    "synchronize": "handle",
}
SIGNATURES |= dict.fromkeys(("allreduce_async", "allreduce_async_"), SIGNATURES["allreduce_"])
SIGNATURES |= dict.fromkeys(("broadcast_async", "broadcast_async_"), SIGNATURES["broadcast"])
SIGNATURES |= {"allgather_async": SIGNATURES["allgather"], "alltoall_async": SIGNATURES["alltoall"]}
SIGNATURES |= {
    f"grouped_{name}": SIGNATURES[name].replace("tensor ", "tensors ", 1)
    for name in (
        "allreduce",
        "allreduce_",
        "allreduce_async",
        "allreduce_async_",
        "allgather",
        "allgather_async",
        "reducescatter",
        "reducescatter_async",
    )
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_arguments_are_named_and_ordered_as_in_horovod(name):
    import hpcpar.horovod.torch as hvd

    function = getattr(hvd, name)
    parameters = inspect.signature(function).parameters
    assert (function.__name__, len(function.__doc__) > 20) == (name, True)
    for (known, parameter), promised in zip(parameters.items(), SIGNATURES[name].split(), strict=True):
        argument, is_optional, default = promised.partition("=")
        assert known == argument
        if is_optional:
            assert str(parameter.default) == default
        elif argument == "process_set":
            assert parameter.default is hvd.global_process_set


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_may_ask_for_the_rank_and_takes_part_in_nothing(hvd, error_of):
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()

    def work() -> None:
        errors = [error_of(lambda: hvd.allreduce(torch.ones(1))), error_of(hvd.join)]
        told.put((hvd.rank(), [str(error) for error in errors]))

    child = context.Process(target=work)
    child.start()
    rank, messages = told.get()
    child.join()
    assert rank == hvd.rank()
    assert all("forked from a rank and is none itself" in message for message in messages)
    assert hvd.allreduce(torch.ones(1)).item() == 1


def test_torchs_compiler_leaves_alone_what_talks_to_other_ranks():
    import hpcpar.horovod.torch as hvd
    from hpcpar.horovod.torch import optimizer, zero

    names = SIGNATURES.keys() - {"init", "start_timeline"}
    names |= {"broadcast_parameters", "broadcast_optimizer_state", "broadcast_object", "allgather_object"}
    calls = [getattr(hvd, name) for name in names]
    for kind in (optimizer._AveragingOptimizer, zero.ShardedOptimizer):
        calls += [kind.step, kind.synchronize, kind.zero_grad]
    calls += [optimizer._AdasumOptimizer.step, hvd.SyncBatchNorm._forward_together]
    traced = [call.__qualname__ for call in calls if call.__code__.co_filename != uncompiled.__file__]
    assert traced == []


def test_operations_and_errors_are_horovods():
    import hpcpar.horovod.torch as hvd

    ops = (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product)
    assert ops == (0, 1, 2, 3, 4, 5)
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert {*dir(hvd)} >= {*hvd.__all__}


# ---------------------------------------------------------------- jobs of their own

LIFE = """
import torch
import hpcpar.horovod.torch as hvd
from hpcpar.horovod.torch import mpi_ops

queries = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "mpi_threads_supported")
before = {name: error_of(getattr(hvd, name)) for name in queries}
before["is_homogeneous"] = error_of(mpi_ops.is_homogeneous)
collectives = {
    "allreduce": lambda: hvd.allreduce(torch.ones(2)),
    "broadcast_": lambda: hvd.broadcast_(torch.ones(2), 0),
    "grouped_allgather": lambda: hvd.grouped_allgather([torch.ones(2)]),
    "barrier": hvd.barrier,
    "join": hvd.join,
}
early = {name: error_of(call) for name, call in collectives.items()}
tell(
    before=before,
    early=early,
    was_initialized=hvd.is_initialized(),
    built=[hvd.mpi_built(), hvd.mpi_enabled(), hvd.gloo_built(), hvd.nccl_built(), hvd.cuda_built()],
    unready=[hvd.ProcessSet([0]).size(), hvd.global_process_set.size()],
)
hvd.shutdown()  # before init: nothing

sums = []
for life in range(4):
    hvd.init()
    sums.append(hvd.allreduce(torch.tensor([hvd.rank() + life]), op=hvd.Sum).item())
    part = error_of(lambda: hvd.add_process_set([0]))
    pending = hvd.allreduce_async(torch.ones(3), name=f"pending.{hvd.rank()}")
    hvd.shutdown()
    failed = error_of(lambda: hvd.synchronize(pending))
    late = error_of(lambda: hvd.allreduce(torch.ones(1)))
    rank = error_of(hvd.rank)
    hvd.shutdown()
tell(sums=sums, failed=failed, late=late, rank=rank, part=part, is_initialized=hvd.is_initialized())
hvd.init(process_sets="dynamic")
added = hvd.add_process_set([0])
tell(added=added.ranks, after=hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
"""


def test_a_life_with_many_inits_and_shutdowns(job):
    size = 2
    for of_rank in job(size, LIFE):
        for name, (kind, _, text) in of_rank["before"].items():
            assert kind == "ValueError", name
            assert "init" in text
        for name, (kind, kinds, text) in of_rank["early"].items():
            assert kind == "HorovodInternalError", name
            assert "RuntimeError" in kinds
            assert "init" in text
        assert of_rank["was_initialized"] is False
        assert of_rank["built"] == [True, True, False, 0, torch.version.cuda is not None]
        assert of_rank["unready"] == [None, None]
        assert of_rank["sums"] == [sum(range(size)) + life * size for life in range(4)]
        assert of_rank["failed"][0] == "HorovodInternalError"
        assert "shut down" in of_rank["failed"][2]
        assert of_rank["late"][0] == "HorovodInternalError"
        assert of_rank["rank"][0] == "ValueError"
        assert of_rank["part"][0] == "ValueError"
        assert "HOROVOD_DYNAMIC_PROCESS_SETS" in of_rank["part"][2]
        assert of_rank["is_initialized"] is False
        assert (of_rank["added"], of_rank["after"]) == ([0], size)


CHOICES = """
from mpi4py import MPI
import torch
import hpcpar.horovod.torch as hvd

me = detect().rank
own = torch.tensor([me])
choices = {
    "a list": [2, 0],
    "all in a list": [0, 1, 2],
    "an empty list": [],
    "the world": MPI.COMM_WORLD,
    "a part": MPI.COMM_WORLD.Split(me % 2, -me),
    "itself": MPI.COMM_SELF,
}
for name, comm in choices.items():
    hvd.init(comm=comm)
    if name == "a part":
        comm.Free()
    place = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
    found = [hvd.allgather(own).tolist(), hvd.broadcast(own, 0).tolist(), hvd.global_process_set.ranks]
    tell(**{name: [place, *found, hvd.join()]})
    by_comm = hvd.global_process_set.mpi_comm
    tell(**{f"{name}, comm": by_comm is (comm if hasattr(comm, "Get_rank") else None)})
    if name == "the world":
        tell(again=error_of(lambda: hvd.init(comm=[1, 0, 2])))
    hvd.shutdown()
tell(after=hvd.global_process_set.mpi_comm)
tell(wrong=error_of(lambda: hvd.init(comm=[0, 7])), is_initialized=hvd.is_initialized())

ends = hvd.ProcessSet([2, 0])
split = hvd.ProcessSet(MPI.COMM_WORLD.Split(min(me, 1), 0))
hvd.init(comm=MPI.COMM_WORLD, process_sets=[ends, [0, 1], split])
members = [one for one in (ends, split) if one.included()]
tell(
    ids=[ends.process_set_id, split.process_set_id],
    ranks=[ends.ranks, split.ranks],
    found=[hvd.allreduce(own, op=hvd.Sum, process_set=one).item() for one in members],
    total=hvd.allreduce(own, op=hvd.Sum).item(),
    added=error_of(lambda: hvd.add_process_set([1])),
    removed=error_of(lambda: hvd.remove_process_set(ends)),
)
hvd.shutdown()
tell(detached=[ends.process_set_id, ends.size()])
tell(twice=error_of(lambda: hvd.init(process_sets=[[0], [0]])))
tell(whole=error_of(lambda: hvd.init(process_sets=[[0, 1, 2]])))
hvd.init(process_sets=[[1]])
tell(sum=hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
"""

PARTS = {
    "a list": [[2, 0], [1], [2, 0]],
    "all in a list": [[0, 1, 2]] * 3,
    "an empty list": [[0, 1, 2]] * 3,
    "the world": [[0, 1, 2]] * 3,
    "a part": [[2, 0], [1], [2, 0]],
    "itself": [[0], [1], [2]],
}


def test_init_takes_ranks_communicators_and_process_sets(job):
    """The ranks of a list are a job, in that order, and every other process is alone."""
    told = job(3, CHOICES)
    for name, parts in PARTS.items():
        for rank, of_rank in enumerate(told):
            place, gathered, cast, ranks, joined = of_rank[name]
            part = parts[rank]
            own, size = part.index(rank), len(part)
            assert place == [own, size, own, size, 0, 1], name
            assert (gathered, cast, ranks) == (part, part[:1], list(range(size))), name
            assert 0 <= joined < size
            assert of_rank[f"{name}, comm"]
    for of_rank in told:
        assert of_rank["after"] is None
        assert of_rank["again"][0] == "OperationError"
        assert "7" in of_rank["wrong"][2]
        assert of_rank["is_initialized"] is False
    assert [of_rank["ranks"] for of_rank in told] == [[[0, 2], [0]], [[0, 2], [1, 2]], [[0, 2], [1, 2]]]
    assert [of_rank["found"] for of_rank in told] == [[2, 0], [3], [2, 3]]
    assert len({of_rank["ids"][0] for of_rank in told}) == 1
    for of_rank in told:
        assert (of_rank["total"], of_rank["sum"], of_rank["detached"]) == (3, 3, [None, None])
        for what, word in {
            "added": "DYNAMIC",
            "removed": "DYNAMIC",
            "twice": "exists",
            "whole": "exists",
        }.items():
            assert of_rank[what][0] == "ValueError"
            assert word in of_rank[what][2]


STARTS = """
from mpi4py import MPI
import numpy
import torch
import hpcpar.horovod.torch as hvd

me = detect().rank
calls = {
    "a number": lambda: hvd.init(comm=3),
    "no communicator on one rank": lambda: hvd.init(comm=MPI.COMM_NULL if me else MPI.COMM_SELF),
    "beyond on one rank": lambda: hvd.init(comm=[0, 1, 2, 7] if me == 1 else None),
    "other lists": lambda: hvd.init(comm=[0, 1] if me else None),
    "sets: not there": lambda: hvd.init(process_sets=[[0], [5]]),
    "sets: more on one rank": lambda: hvd.init(process_sets=[[0]] + [[1]] * (me == 1)),
    "sets: a number on one rank": lambda: hvd.init(process_sets=3 if me else [[0]]),
    "sets: not of who is alone": lambda: hvd.init(comm=[0, 1], process_sets=[[1]]),
}
errors, left = {}, {}
for name, call in calls.items():
    errors[name] = error_of(call)
    one = hvd.global_process_set
    announced = "HOROVOD_RANK" in os.environ
    left[name] = [hvd.is_initialized(), one.process_set_id, one.size(), one.mpi_comm, announced]
tell(errors=errors, left=left)
corrected = hvd.ProcessSet(numpy.array([0, 2]))
hvd.init(comm=numpy.arange(3), process_sets=[corrected])
tell(members=corrected.ranks, sum=hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
early = error_of(lambda: hvd.add_process_set([1]))
hvd.init(process_sets="Dynamic")
tell(early=early, late=hvd.add_process_set([1]).ranks)
hvd.shutdown()
hvd.init(process_sets="DYNAMIC" if me else None)
tell(one_said_so=hvd.add_process_set([1]).ranks)
"""


def test_an_init_that_cannot_be_fails_on_every_rank_and_leaves_nothing_behind(job):
    told = job(3, STARTS)
    for name in told[0]["errors"]:
        errors = [of_rank["errors"][name] for of_rank in told]
        assert all(error is not None and "ValueError" in error[1] for error in errors), name
        assert len({error[2] for error in errors}) == 1, name
        assert [of_rank["left"][name] for of_rank in told] == [[False, None, None, None, False]] * 3, name
    first = told[0]["errors"]
    assert "init(comm=3): found 3 where a list of ranks" in first["a number"][2]
    assert "MPI.COMM_SELF" in first["no communicator on one rank"][2]
    assert "[0, 1, 2, 7]): there are ranks 0 to 2 only" in first["beyond on one rank"][2]
    assert "ranks [0, 1, 2] by rank 0, and on ranks [0, 1] by rank 1" in first["other lists"][2]
    assert "process_sets=3" in first["sets: a number on one rank"][2]
    for of_rank in told:
        assert (of_rank["members"], of_rank["sum"]) == ([0, 2], 3)
        assert "HOROVOD_DYNAMIC_PROCESS_SETS" in of_rank["early"][2]
        assert of_rank["late"] == of_rank["one_said_so"] == [1]


TRACE = """
import torch
import hpcpar.horovod.torch as hvd

def work():
    hvd.allreduce(torch.ones(3), name="during")
    hvd.grouped_allreduce([torch.ones(3)] * 2, name="group")
    hvd.allgather(torch.ones(3), name="rows")
    hvd.broadcast(torch.ones(3), 0, name="cast")
    hvd.barrier()

hvd.init()
hvd.allreduce(torch.ones(3), name="before")
hvd.start_timeline(sys.argv[1] + "/dynamic", mark_cycles=True)
work()
hvd.stop_timeline()
hvd.allreduce(torch.ones(3), name="after")
hvd.shutdown()
os.environ["HOROVOD_TIMELINE"] = sys.argv[1] + "/whole"
hvd.init()
work()
hvd.shutdown()
tell(end=True)
"""


def test_a_timeline_shows_what_is_done_while_it_is_written(job, tmp_path):
    job(2, TRACE, HOROVOD_TIMELINE="DYNAMIC")
    for which in ("dynamic", "whole"):
        text = (tmp_path / which).read_text()
        json.loads(text)
        for name in ("allreduce.during", "allreduce.group_1of2", "allgather.rows", "broadcast.cast"):
            assert name in text
        for word in ("NEGOTIATE_ALLREDUCE", '"ALLREDUCE"', "NEGOTIATE_ALLGATHER", '"BROADCAST"'):
            assert word in text
        assert "allreduce.before" not in text
        assert "allreduce.after" not in text
        assert ("CYCLE_START" in text) == (which == "dynamic")


ENDS = """
import torch
import hpcpar.horovod.torch as hvd

tell(wrong=error_of(lambda: hvd.init()))
os.environ["HOROVOD_CYCLE_TIME"] = "0.5"
os.environ["HOROVOD_TIMELINE"] = "/nowhere/timeline.json"
tell(unwritable=error_of(lambda: hvd.init()))
del os.environ["HOROVOD_TIMELINE"]
hvd.init()
hvd.barrier()
if hvd.rank() == 0:
    hvd.shutdown()
    # The other one is told now, and not by this one's end.
    other, end_s = Path(sys.argv[1]) / "1.json", time.monotonic() + 20
    while "error" not in json.loads(other.read_text()) and time.monotonic() < end_s:
        time.sleep(0.02)
    tell(waited_for="error" in json.loads(other.read_text()))
else:
    handle = hvd.allreduce_async(torch.ones(1))
    tell(error=error_of(lambda: hvd.synchronize(handle)))
tell(end=True)
"""


def test_settings_are_checked_and_who_waits_for_a_rank_that_has_shut_down_is_told_at_once(job):
    told = job(
        2, ENDS, fails=True, HOROVOD_CYCLE_TIME="soon", HOROVOD_AUTOTUNE="1", HOROVOD_NUM_NCCL_STREAMS="2"
    )
    for of_rank in told:
        assert "HOROVOD_CYCLE_TIME" in of_rank["wrong"][2]
        assert "soon" in of_rank["wrong"][2]
        assert "the timeline cannot be written to /nowhere/timeline.json" in of_rank["unwritable"][2]
        for ignored in ("HOROVOD_AUTOTUNE", "HOROVOD_NUM_NCCL_STREAMS"):
            assert of_rank["printed"].count(ignored) == 1, "reported once"
    kind, _, text = told[1]["error"]
    assert kind == "HorovodInternalError"
    assert "rank 0" in text
    assert told[0]["waited_for"]
