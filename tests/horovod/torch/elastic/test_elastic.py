from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import hpcpar.horovod.torch as hvd
from hpcpar.errors import ConfigError, LaunchError
from hpcpar.horovod.exceptions import HostsUpdatedInterrupt
from hpcpar.horovod.torch import elastic
from hpcpar.horovod.torch.elastic import sampler as sampling
from hpcpar.horovod.torch.elastic import state as states


@pytest.fixture(autouse=True)
def _initialized() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def adam_of(model: nn.Module) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.05), named_parameters=model.named_parameters()
    )
    return optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
    """On the same data on every rank, with losses that differ by a factor whose average is 1.

    So training does not depend on the number of ranks, as long as gradients are averaged.
    """
    optimizer.zero_grad()
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(batch))
    factor = 2 * (hvd.rank() + 1) / (hvd.size() + 1)
    (model(inputs).square().mean() * factor).backward()
    optimizer.step()


def weights(model: nn.Module) -> list[Any]:
    return [tensor.tolist() for tensor in model.state_dict().values()]


# Integers first: who has what


@pytest.mark.parametrize(("count", "size"), [*itertools.product([0, 1, 5, 12], [1, 2, 3, 5])])
def test_shares_are_of_one_length_and_hold_every_position(count: int, size: int) -> None:
    shares = [sampling.positions(count, rank, size).tolist() for rank in range(size)]
    assert {len(share) for share in shares} == {-(-count // size)}
    assert {position for share in shares for position in share} == set(range(count))


def test_positions_go_by_turns_and_round_at_the_end() -> None:
    assert [sampling.positions(5, rank, 2).tolist() for rank in range(2)] == [[0, 2, 4], [1, 3, 0]]


def test_the_rest_is_what_no_rank_has_done() -> None:
    indices = torch.tensor([10, 11, 12, 13, 14, 15, 16])
    assert sampling.rest(indices, [2, 1]).tolist() == [13, 14, 15, 16]
    assert sampling.rest(indices, [1, 3]).tolist() == [12, 14, 16]
    assert sampling.rest(indices, [4, 4]).tolist() == []
    assert sampling.rest(indices, [0]).tolist() == indices.tolist()


def test_every_epoch_has_an_order_of_its_own() -> None:
    orders = [sampling.order(20, seed).tolist() for seed in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[1]) == sampling.order(20, None).tolist() == list(range(20))


@pytest.mark.mpi
def test_a_sampler_loads_horovods_own_state() -> None:
    sampler = elastic.ElasticSampler(range(6 * hvd.size()), shuffle=False)
    sampler.load_state_dict({"epoch": 3, "processed_num": 2 * hvd.size()})
    shares = hvd.allgather_object(list(sampler))
    assert sampler.epoch == 3
    assert sampler.processed_num == 2 * hvd.size()
    assert sorted(itertools.chain(*shares)) == list(range(2 * hvd.size(), 6 * hvd.size()))


def test_a_sampler_counts_its_own_share() -> None:
    sampler = elastic.ElasticSampler(range(10), shuffle=False)
    size = hvd.size()
    first = list(sampler)
    sampler.record_batch(0, 4)
    sampler.record_batch(7, 4)
    sampler.record_batch(2, 4)
    counted = sampler.processed_num
    again = list(sampler)
    sampler.set_epoch(1)
    assert first == again
    assert (counted, len(sampler), sampler.processed_num) == (10 // size, 10 // size, 0)


def test_a_checkpoint_of_one_rank_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(rank: int, size: int) -> elastic.ElasticSampler:
        monkeypatch.setattr(sampling, "rank", lambda: rank)
        monkeypatch.setattr(sampling, "size", lambda: size)
        return elastic.ElasticSampler(range(24), seed=4)

    before = [on(rank, 2) for rank in range(2)]
    done = [index for sampler in before for index in list(sampler)[:4]]
    for sampler in before:
        sampler.set_epoch(0)
        sampler.record_batch(0, 4)
    after = [on(rank, 3) for rank in range(3)]
    for rank, sampler in enumerate(after):
        monkeypatch.setattr(sampling, "rank", lambda rank=rank: rank)
        sampler.load_state_dict(copy.deepcopy(before[0].state_dict()))
    left = [index for sampler in after for index in sampler]
    assert sorted({*left}) == sorted({*range(24)} - {*done})
    assert [len(sampler) for sampler in after] == [6, 6, 6]  # 16 are left: two come twice
    assert {sampler.processed_num for sampler in after} == {8}


# Ranks that have done different amounts


@pytest.mark.mpi
def test_after_a_sync_the_rest_is_shared_out_without_overlap() -> None:
    size = hvd.size()
    count = 24 * size
    sampler = elastic.ElasticSampler(range(count), seed=1)
    state = elastic.TorchState(sampler=sampler)
    done, lengths = [], []
    for round_number in range(3):
        mine = list(sampler)[: 2 + hvd.rank() + round_number]
        sampler.record_batch(0, len(mine))
        done += mine
        state.sync()
        lengths.append(len(sampler))
    everybodys = sorted(itertools.chain(*hvd.allgather_object(done)))
    left = set(itertools.chain(*hvd.allgather_object(list(sampler))))
    numbers = hvd.allgather_object((sampler.processed_num, lengths))
    assert everybodys == sorted(set(everybodys))
    assert left == set(range(count)) - set(everybodys)
    assert numbers == [(len(everybodys), lengths)] * size
    assert lengths[0] > lengths[1] > lengths[2] == -(-len(left) // size)


@pytest.mark.mpi
def test_a_rank_that_committed_in_the_next_epoch_counts_like_the_root() -> None:
    sampler = elastic.ElasticSampler(range(8 * hvd.size()))
    state = elastic.TorchState(sampler=sampler, epoch=0)
    sampler.record_batch(0, 2)
    if hvd.rank() == hvd.size() - 1 > 0:
        sampler.set_epoch(1)
    state.sync()
    assert (sampler.epoch, sampler.processed_num, len(sampler)) == (0, 2 * hvd.size(), 6)


@pytest.mark.mpi
def test_a_loader_reads_what_is_left() -> None:
    sampler = elastic.ElasticSampler(range(10 * hvd.size()), shuffle=False)
    loader = DataLoader(range(10 * hvd.size()), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    state = elastic.TorchState(sampler=sampler)
    first = next(iter(loader)).tolist()
    sampler.record_batch(0, 2)
    state.sync()
    second = [index for batch in loader for index in batch.tolist()]
    assert first == [hvd.rank(), hvd.rank() + hvd.size()]
    assert second == list(range(hvd.rank() + 2 * hvd.size(), 10 * hvd.size(), hvd.size()))


# The state


@pytest.mark.mpi
def test_sync_gives_every_rank_the_roots_values() -> None:
    model = model_of(hvd.rank())
    optimizer = adam_of(model)
    step(model, optimizer, 0)
    state = elastic.TorchState(model, optimizer, batch=20 + hvd.rank(), notes=["a"] * hvd.rank())
    state.sync()
    found = hvd.allgather_object((weights(model), optimizer.state_dict()["state"][0]["exp_avg"].tolist()))
    assert found == found[:1] * hvd.size()
    assert (state.batch, state.notes) == (20, [])
    assert (state.model, state.optimizer) == (model, optimizer)


@pytest.mark.mpi
def test_schedulers_and_scalers_go_on_with_their_own_optimizers_on_every_rank() -> None:
    optimizer = adam_of(model_of(0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0 + hvd.rank())
    state = elastic.TorchState(optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    state.sync()
    optimizer.step()
    state.scheduler.step()
    state.commit()
    state.scheduler.step()
    state.restore()
    told = hvd.allgather_object(
        (optimizer.param_groups[0]["lr"], scheduler.last_epoch, scheduler.get_last_lr(), scaler.get_scale())
    )
    assert state.scheduler is scheduler
    assert told == [(0.025, 1, [0.025], 4.0)] * hvd.size()


def test_restore_goes_back_to_the_last_commit_as_often_as_wanted() -> None:
    model = model_of(0)
    optimizer = adam_of(model)
    state = elastic.TorchState(model=model, optimizer=optimizer, batch=0, seen=[])
    for batch in range(2):
        step(model, optimizer, batch)
        state.batch = batch + 1
        state.seen.append(batch)
    state.commit()
    expected = weights(model), copy.deepcopy(optimizer.state_dict())
    ends = []
    for _ in range(2):
        step(model, optimizer, 2)
        state.seen.append(2)
        state.batch = 9
        ends.append(weights(model))
        state.restore()
        assert (state.batch, state.seen) == (2, [0, 1])
    assert ends[0] == ends[1]
    assert weights(model) == expected[0]
    assert str(optimizer.state_dict()) == str(expected[1])


def test_restore_before_any_commit_goes_back_to_the_beginning() -> None:
    state = elastic.TorchState(epoch=3, options={"lr": 1})
    state.epoch = 4
    state.options["lr"] = 2
    state.restore()
    assert (state.epoch, state.options) == (3, {"lr": 1})


def test_another_model_can_take_the_place() -> None:
    first, second = model_of(0), model_of(1)
    state = elastic.TorchState(model=first)
    state.model = second
    expected = weights(second)
    with torch.no_grad():
        second[0].weight.zero_()
    state.restore()
    assert state.model is second
    assert weights(second) == expected


def test_a_state_may_lack_model_and_optimizer() -> None:
    state = elastic.TorchState(batch=1)
    state.commit()
    assert (state.model, state.optimizer, state.batch) == (None, None, 1)


@pytest.mark.parametrize("name", ["commit", "_saved", "commit_count"])
def test_names_that_the_state_uses_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"TorchState uses {name} itself"):
        elastic.TorchState(**{name: 1})


def test_handlers_of_ones_own_can_be_registered() -> None:
    class Counter:
        number = 0

    class CounterHandler(states.StateHandler):
        def save(self) -> None:
            self.saved = self.value.number

        def restore(self) -> None:
            self.value.number = self.saved

    registry = states.get_handler_registry()
    try:
        states.set_handler_registry([(Counter, CounterHandler), *registry])
        counter = Counter()
        state = elastic.TorchState(counter=counter)
        counter.number = 5
        state.restore()
    finally:
        states.set_handler_registry(registry)
    assert state.counter is counter
    assert counter.number == 0


@pytest.mark.mpi
@pytest.mark.parametrize(("told", "skip_sync"), [([1], True), ([2], False), ([1, 2], False), ([3, 1], False)])
def test_changed_hosts_interrupt_every_rank_at_the_next_commit(told: list[int], skip_sync: bool) -> None:
    state = elastic.TorchState(batch=0)
    state.commit()
    if hvd.rank() == hvd.size() - 1:
        for result in told:
            state.on_hosts_updated(0.0, result)
    caught: HostsUpdatedInterrupt | None = None
    try:
        state.commit()
    except HostsUpdatedInterrupt as interrupt:
        caught = interrupt
    state.commit()
    assert caught is not None
    assert caught.skip_sync is skip_sync


# run


def failing(at: dict[int, Exception], batches: int = 6) -> Callable[..., Any]:
    """A training that commits every second batch and fails in the calls named by `at`."""
    calls = itertools.count()

    @elastic.run
    def train(state: Any, factor: int) -> list[Any]:
        for batch in range(state.batch, batches):
            state.batch = batch
            step(state.model, state.optimizer, state.batch)
            if (error := at.get(next(calls))) is not None:
                raise error
            if state.batch % 2:
                state.batch = batch + 1
                state.commit()
        return [factor, state.batch]

    return train


def trained(at: dict[int, Exception]) -> tuple[Any, list[Any], Any]:
    model = model_of(hvd.rank())
    state = elastic.TorchState(model=model, optimizer=adam_of(model), batch=0)
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(state.batch)])
    return failing(at)(state, factor=3), resets, weights(model)


@pytest.mark.mpi
def test_training_goes_on_from_the_last_commit_as_if_nothing_had_happened() -> None:
    smooth, no_resets, expected = trained({})
    broken, resets, found = trained({0: hvd.HorovodInternalError("a"), 4: hvd.HorovodInternalError("b")})
    assert smooth == broken == [3, 6]
    everybodys = hvd.allgather_object(found)
    assert (no_resets, resets) == ([], [0, 2])
    assert everybodys == [expected] * hvd.size()


@pytest.mark.mpi
@pytest.mark.parametrize("skip_sync", [False, True])
def test_an_interrupt_goes_on_without_going_back(skip_sync: bool) -> None:
    model = model_of(0)
    state = elastic.TorchState(model=model, optimizer=adam_of(model), batch=0)
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(state.batch)])

    @elastic.run
    def train(state: Any) -> int:
        while state.batch < 4:
            step(model, state.optimizer, state.batch)
            state.batch += 1
            if state.batch == 3 and not resets:
                raise HostsUpdatedInterrupt(skip_sync)
        return int(state.batch)

    last_batch, found = train(state), weights(model)
    everybodys = hvd.allgather_object(found)
    alone = model_of(0)
    optimizer = adam_of(alone)
    for batch in range(4):
        step(alone, optimizer, batch)
    assert (last_batch, resets) == (4, [3])
    assert everybodys == [weights(alone)] * hvd.size()


@pytest.mark.mpi
def test_a_failure_of_a_collective_on_all_ranks_is_overcome() -> None:
    state = elastic.TorchState(batch=0)
    sizes = iter([2 + hvd.rank(), 2])

    @elastic.run
    def train(state: Any) -> list[float]:
        found: list[float] = hvd.allreduce(torch.ones(next(sizes)), name="sum", op=hvd.Sum).tolist()
        return found

    found = train(state)
    assert found == [float(hvd.size())] * 2


@pytest.mark.mpi
def test_a_failure_that_comes_again_without_a_commit_is_raised_everywhere() -> None:
    attempts = []

    @elastic.run
    def train(state: Any) -> None:
        attempts.append(state.batch)
        raise hvd.HorovodInternalError("always the same")

    with pytest.raises(hvd.HorovodInternalError, match="always the same"):
        train(elastic.TorchState(batch=0))
    assert len(attempts) == elastic.RESTARTS_WITHOUT_COMMIT
    assert hvd.is_initialized()


@pytest.mark.mpi
def test_commits_give_new_chances() -> None:
    attempts: list[int] = []

    @elastic.run
    def train(state: Any) -> int:
        attempts.append(state.batch)
        while state.batch < 5:
            state.batch += 1
            state.commit()
            raise hvd.HorovodInternalError("after every batch")
        return int(state.batch)

    assert train(elastic.TorchState(batch=0)) == 5
    assert attempts == [0, 1, 2, 3, 4, 5]


@pytest.mark.mpi
def test_other_exceptions_pass() -> None:
    @elastic.run
    def train(state: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train(elastic.TorchState(batch=0))


@pytest.mark.mpi
def test_a_state_of_ones_own_and_a_reset_of_ones_own_will_do() -> None:
    class Counter(elastic.State):
        value = saved = hvd.rank()

        def save(self) -> None:
            self.saved = self.value

        def restore(self) -> None:
            self.value = self.saved

        def sync(self) -> None:
            self.value = self._bcast_object(self.value)

        def reset(self) -> None:
            resets.append(hvd.size())

    resets: list[int] = []
    state = Counter()
    objects = elastic.ObjectState(hvd.broadcast_object, hvd.rank, seen=[hvd.rank()])
    objects.sync()

    def restart() -> None:
        hvd.shutdown()
        hvd.init(process_sets="dynamic")

    def train(state: Counter) -> int:
        objects.seen.append(state.value)
        if not resets:
            state.value = 7
            state.commit()
            state.value = 8
            raise hvd.HorovodInternalError("once")
        objects.restore()
        return state.value

    assert elastic.run_fn(train, restart)(state) == 7
    assert (resets, objects.seen) == ([hvd.size()], [0])
    with pytest.raises(ValueError, match="ObjectState uses commit itself"):
        elastic.ObjectState(commit=1)


@pytest.mark.mpi
def test_samples_are_read_once_also_after_an_interrupt() -> None:
    size = hvd.size()
    sampler = elastic.ElasticSampler(range(12 * size), seed=2)
    state = elastic.TorchState(sampler=sampler, interrupted=False)
    read = []

    @elastic.run
    def train(state: Any) -> None:
        for index in sampler:
            read.append(index)
            sampler.record_batch(0, 1)
            if len(read) == 5 and not state.interrupted:
                state.interrupted = True
                raise HostsUpdatedInterrupt(skip_sync=True)

    train(state)
    assert sorted(itertools.chain(*hvd.allgather_object(read))) == list(range(12 * size))


def test_ranks_that_cannot_start_again_are_told_what_mpi_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    @elastic.run
    def train(state: Any) -> None:
        def refuse() -> None:
            raise ConfigError("rank 1 is gone")

        monkeypatch.setattr(elastic.mpi_ops, "init", refuse)
        raise hvd.HorovodInternalError("a peer left")

    with pytest.raises(LaunchError, match="rank 1 is gone") as caught:
        train(elastic.TorchState(batch=0))
    assert "a peer left" in str(caught.value)
    assert "Under MPI a job keeps its ranks" in str(caught.value)


def test_the_decorated_function_keeps_its_name() -> None:
    @elastic.run
    def train(state: Any) -> None:
        """Train."""

    assert (train.__name__, train.__doc__) == ("train", "Train.")
