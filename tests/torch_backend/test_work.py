"""Buckets travel during backward without a thread, and futures complete whoever asks for them."""

from __future__ import annotations

import _thread
import time

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hpcpar.comm import Handle

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("one_thread")]

WIDTH = 64


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])


def inputs(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """All ranks' samples, and those of one."""
    torch.manual_seed(1)
    whole = torch.randn(4 * size, WIDTH)
    return whole, whole[4 * rank : 4 * rank + 4]


class Mark(torch.autograd.Function):
    """Notes when its backward runs."""

    @staticmethod
    def forward(ctx, x: Tensor, log: list[str]) -> Tensor:
        ctx.log = log
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.log.append("first layer")
        return gradient, None


@pytest.mark.parametrize(
    "options",
    [{}, {"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}],
)
def test_ddp_has_the_gradients_of_one_process(ours, options) -> None:
    whole, part = inputs(ours.rank(), ours.size())
    alone = network()
    alone(whole).square().mean().backward()
    model = DistributedDataParallel(network(), bucket_cap_mb=0.02, **options)
    for _ in range(3):  # the buckets are made anew after the first
        model.zero_grad()
        model(part).square().mean().backward()
        for found, expected in zip(model.module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-5, atol=1e-7)


def test_buckets_are_begun_before_and_waited_for_after_the_last_layer(ours, monkeypatch) -> None:
    log: list[str] = []
    wait = Handle.wait
    monkeypatch.setattr(Handle, "wait", lambda handle: (log.append("waited"), wait(handle))[1])
    start = type(ours.comm).start_allreduce
    monkeypatch.setattr(
        type(ours.comm),
        "start_allreduce",
        lambda comm, *words, **more: (log.append("begun"), start(comm, *words, **more))[1],
    )
    model = DistributedDataParallel(network(), bucket_cap_mb=0.02)
    _, part = inputs(ours.rank(), ours.size())
    for _ in range(3):
        log.clear()
        model(Mark.apply(part.clone().requires_grad_(), log)).sum().backward()
    assert log.count("begun") == 3
    assert log.index("first layer") > log.index("begun")
    assert "waited" not in log[: log.index("first layer")]


@pytest.mark.parametrize("hook", ["fp16", "power"])
def test_hooks_that_chain_futures(ours, hook) -> None:
    _, part = inputs(ours.rank(), ours.size())
    model = DistributedDataParallel(network(), bucket_cap_mb=0.02)
    if hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=WIDTH, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    whole, _ = inputs(ours.rank(), ours.size())
    alone = network()
    alone(whole).square().mean().backward()
    for _ in range(4):
        model.zero_grad()
        model(part).square().mean().backward()
    for found, expected in zip(model.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=2e-2, atol=1e-4)


def test_a_hook_waits_for_the_all_reduce_that_ddp_makes_in_cpp(ours) -> None:
    whole, part = inputs(ours.rank(), ours.size())
    model = DistributedDataParallel(network(), bucket_cap_mb=0.02)

    def hook(reducer, bucket):
        reducer._run_allreduce_hook(bucket).wait()
        done = torch.futures.Future()
        done.set_result(bucket.buffer().div_(ours.size()))
        return done

    model.register_comm_hook(model.reducer, hook)
    alone = network()
    alone(whole).square().mean().backward()
    for _ in range(3):
        model.zero_grad()
        model(part).square().mean().backward()
    for found, expected in zip(model.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-5, atol=1e-7)


def test_a_future_is_complete_for_who_waits_outside_of_backward(ours) -> None:
    tensor = torch.ones(3)
    future = distributed.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda done: 2 * done.value()[0])
    assert doubled.wait().tolist() == [2.0 * ours.size()] * 3
    assert future.done()


def test_a_future_is_had_by_a_thread_of_c_as_the_engines_for_a_gpu(ours) -> None:
    work = distributed.all_reduce(torch.ones(3), async_op=True)
    _thread.start_new_thread(work.get_future, ())  # nothing of Python calls it
    until_s = time.monotonic() + 60
    while work._future is None or not work._future.is_set:
        assert time.monotonic() < until_s
    assert work.get_future().value()[0].tolist() == [float(ours.size())] * 3


def test_a_future_that_is_waited_for_in_backward_makes_progress(ours) -> None:
    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            future = distributed.all_reduce(gradient, async_op=True).get_future()
            return future.then(lambda done: done.value()[0]).wait()

    x = torch.ones(3, requires_grad=True)
    Reduce.apply(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [float(ours.size())] * 3
