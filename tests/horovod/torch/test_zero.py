"""DistributedOptimizer(zero_stage=…) against one process that sees all ranks' rows, in float64.

What ranks find is gathered first and asserted after, so that no rank fails alone while others wait.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer

import hpcpar
import hpcpar.horovod.torch as hvd
from hpcpar.comm import Communicator
from hpcpar.errors import OperationError
from hpcpar.horovod.torch import elastic
from hpcpar.horovod.torch.readiness import BucketGate
from tests.horovod.torch.training import (
    OPTIMIZERS,
    REDUCTIONS,
    ROUNDING,
    STEPS,
    Branches,
    Make,
    adamw,
    all_ranks,
    assert_as_alone,
    assert_errors,
    backward,
    batch,
    bits,
    compare,
    distance,
    error_of,
    errors_everywhere,
    here,
    loss_of,
    model_of,
    of_ranks,
    part,
    rows_of,
    train,
    train_on,
    whole,
)
from tests.horovod.torch.training import alone as alone_by
from tests.horovod.torch.training import wrapped as wrapped_by

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("small_buckets")]

every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
every_stage = pytest.mark.parametrize("stage", [1, 2])


def alone(make: Make = OPTIMIZERS["AdamW"], **options: Any) -> tuple[nn.Sequential, Optimizer]:
    return alone_by(make, **options)


def wrapped(stage: int | None, make: Make = OPTIMIZERS["AdamW"], **options: Any) -> tuple[nn.Sequential, Any]:
    return wrapped_by(make, zero_stage=stage, **options)


@every_stage
@pytest.mark.parametrize("passes", [1, 3])
def test_a_step_sends_what_theory_says_and_a_rank_holds_its_shard(stage: int, passes: int) -> None:
    model, optimizer = wrapped(stage, backward_passes_per_step=passes)
    train(model, optimizer, part, passes=passes, steps=range(1))
    comm = optimizer.sharded.dp_comm
    comm.traffic.reset()
    train(model, optimizer, part, passes=passes, steps=range(1, 3))
    sent = hvd.allgather_object(comm.traffic.nbytes_sent("gradients"))
    theory = optimizer.sharded.expected_traffic(2, backwards=passes)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    held = sum(
        value.numel() for of in optimizer.state.values() for value in of.values() if value.dim() > 0
    )  # exp_avg and exp_avg_sq
    shares = hvd.allgather_object(held / 2)
    assert sum(sent) == sum(theory.values())
    assert sum(shares) == parameters
    assert max(shares) <= parameters / hvd.size() + len(optimizer.sharded.blocks)


@pytest.mark.parametrize(
    "given",
    [{"offload": "cpu"}, {"offload": "a directory"}, {"shared_parameters": True}, {"model": "the model"}],
    ids=["offload to cpu", "offload to disk", "shared parameters", "overlapped"],
)
def test_hpcpars_own_options_change_nothing_in_the_result(given: Any, tmp_path: Path) -> None:
    make = OPTIMIZERS["AdamW"]
    model = model_of()
    if given.get("offload") == "a directory":
        given = {"offload": tmp_path}
    if "model" in given:
        given = {"model": model}
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), zero_stage=2, **given
    )
    train(model, optimizer, part)
    optimizer.wait_for_parameters()
    assert_as_alone(model, alone(make)[0])


@every_stage
def test_with_precision_masters_follow_what_is_broadcast_after_wrapping(stage: int) -> None:
    found = []
    for is_before in (True, False):
        model = model_of(seed=hvd.rank()).float()
        if is_before:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            zero_stage=stage,
            precision="bfloat16",
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        train(model, optimizer, part)
        found.append(bits(model))
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    everybodys = hvd.allgather_object(found)
    reference = model_of().float()
    train(reference, SGD(reference.parameters(), lr=0.1), whole)
    assert all(own == everybodys[0] for own in everybodys)
    # bfloat16 has 8 bits, and values are near 1.
    assert distance(model.float(), reference) < 0.02


# Horovod's habits


@every_stage
@pytest.mark.parametrize(("passes", "op"), [(1, "Sum"), (2, "Average")])
@pytest.mark.parametrize("is_explicit", [True, False], ids=["after synchronize", "at once"])
def test_gradients_are_clipped_by_the_optimizer(stage: int, passes: int, op: str, is_explicit: bool) -> None:
    def steps(model: nn.Module, optimizer: Any, ranks: list[int]) -> list[float]:
        norms = []
        is_ours = hasattr(optimizer, "clip_grad_norm_")
        for step in range(STEPS):
            optimizer.zero_grad()
            for number in range(passes):
                backward(model, of_ranks(ranks), 10 * step + number, REDUCTIONS[op])
            if not is_ours:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
                nn.utils.clip_grad_value_(model.parameters(), 0.03)
            else:
                if is_explicit:
                    optimizer.synchronize()
                norms.append(optimizer.clip_grad_norm_(0.1).item())
                optimizer.clip_grad_value_(0.03)
            with optimizer.skip_synchronize() if is_ours and is_explicit else nullcontext():
                optimizer.step()
        return norms

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        options = {"op": getattr(hvd, op), "backward_passes_per_step": passes, "zero_stage": stage}
        norms, expected, _ = compare(steps, **options)
    assert norms == pytest.approx(expected, abs=ROUNDING)
    assert min(expected) > 0.1, "nothing was clipped"
    assert [str(warning.message) for warning in told] == []


@every_stage
@pytest.mark.parametrize("synchronized", [True, False])
def test_torchs_habits_around_a_step_are_those_of_one_process(stage: int, synchronized: bool) -> None:
    """Clip by torch's functions, discard a backward, step on zeros, forget by model.zero_grad()."""

    def steps(model: nn.Module, optimizer: Any, ranks: list[int]) -> list[float]:
        norms = []
        for step in range(4):
            backward(model, of_ranks(ranks), step)
            if synchronized and hasattr(optimizer, "synchronize"):
                optimizer.synchronize()
            if step == 1:  # it is discarded
                model.zero_grad()
                continue
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            nn.utils.clip_grad_value_(model.parameters(), 0.02)
            if step == 2:
                for parameter in model.parameters():
                    parameter.grad.zero_()
            with getattr(optimizer, "skip_synchronize", nullcontext)():
                optimizer.step()
            model.zero_grad()
        return norms

    found, expected, _ = compare(steps, adamw, zero_stage=stage)
    assert found == pytest.approx(expected, abs=ROUNDING)


def test_a_gradient_scaler_that_sees_no_gradients_is_refused() -> None:
    model = model_of()
    optimizer = hvd.DistributedOptimizer(
        SGD(model.parameters(), lr=0.05, fused=True), model.named_parameters(), zero_stage=2
    )
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(F.mse_loss(model(part(batch(0)[0])), part(batch(0)[1]))).backward()
    told = ""
    try:
        scaler.step(optimizer)
    except OperationError as error:
        told = str(error)
    optimizer.step()
    assert "no gradients to unscale" in told


@every_stage
def test_named_gradients_are_the_shards_of_the_average(stage: int) -> None:
    model, optimizer = wrapped(stage)
    backward(model, part, 0)
    own = [(name, of.start, values.tolist()) for name, of, values in optimizer.named_gradients()]
    optimizer.step()
    reference = model_of()
    backward(reference, whole, 0)
    gradients = {name: parameter.grad.flatten() for name, parameter in reference.named_parameters()}
    seen = dict.fromkeys(gradients, 0)
    for name, start, values in (piece for of_rank in hvd.allgather_object(own) for piece in of_rank):
        expected = gradients[name][start : start + len(values)].tolist()
        assert values == pytest.approx(expected, abs=ROUNDING)
        seen[name] += len(values)
    assert seen == {name: gradient.numel() for name, gradient in gradients.items()}


@every_stage
@pytest.mark.parametrize("zero", ["the model's", "after the step"])
def test_gradients_last_until_somebody_forgets_them(stage: int, zero: str) -> None:
    model, optimizer = wrapped(stage)
    for step in range(STEPS):
        if zero == "the model's":
            model.zero_grad()
        backward(model, part, 10 * step)
        optimizer.step()
        assert all(parameter.grad is not None for parameter in model.parameters())
        if zero == "after the step":
            optimizer.zero_grad()
    before = bits(model)
    model.zero_grad()
    optimizer.step()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert bits(model) == before, "a step without gradients changes nothing"
    assert_as_alone(model, alone()[0])
    backward(model, part, 0)
    optimizer.step()
    backward(model, part, 1)
    assert_errors(errors_everywhere(optimizer.step), "ValueError", "call zero_grad() after each step()")


def test_a_rank_without_a_backward_may_average_something_else_before_the_step() -> None:
    def steps(model: nn.Module, optimizer: Optimizer, ranks: list[int]) -> list[bool]:
        found = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = torch.zeros((), dtype=torch.float64)
            for rank in ranks:
                if rank > 0:
                    loss = loss_of(model, step, rank) / len(ranks)
                    loss.backward()
            if len(ranks) == 1:
                found.append(hvd.allreduce(loss.detach(), op=hvd.Sum).isfinite().item())
            optimizer.step()
        return found

    found, *_ = compare(steps, zero_stage=1)
    assert found == [True] * STEPS


@every_stage
@every_optimizer
def test_groups_have_options_of_their_own_and_more_may_be_added(stage: int, make: Make) -> None:
    def loss(model: Branches, number: int, rank: int) -> Tensor:
        x, y = rows_of(number // 10, rank)
        return F.mse_loss(model(x, "ab" if number < 20 else "abc"), y)

    def train_both(model: Branches, optimizer: Optimizer, ranks: list[int]) -> list[float]:
        train_on(model, optimizer, ranks, loss, steps=range(2))
        optimizer.add_param_group({"params": list(model.c.parameters()), "lr": 0.002})
        train_on(model, optimizer, ranks, loss, steps=range(2, 4))
        return [group["lr"] for group in optimizer.param_groups]

    def groups(model: Branches) -> list[dict[str, Any]]:
        return [{"params": list(model.a.parameters()), "lr": 0.03}, {"params": list(model.b.parameters())}]

    model, reference = Branches(), Branches()
    optimizer = hvd.DistributedOptimizer(make(groups(model)), zero_stage=stage)
    rates = train_both(model, optimizer, here())
    assert rates == train_both(reference, make(groups(reference)), all_ranks())
    assert len(optimizer._parameter_names) == 6
    assert_as_alone(model, reference)


# States


@every_stage
def test_state_from_before_wrapping_is_kept_and_must_be_that_of_all_ranks(
    stage: int, needs_two: None
) -> None:
    model, base = alone(steps=range(2))
    kept = copy.deepcopy((model, base))
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters(), zero_stage=stage)
    train(model, optimizer, part, steps=range(2, 4))
    other, its_base = kept
    if hvd.rank() > 0:
        its_base = OPTIMIZERS["AdamW"](other.parameters())
    told = errors_everywhere(lambda: hvd.DistributedOptimizer(its_base, zero_stage=stage))
    hvd.broadcast_optimizer_state(its_base, root_rank=0)
    again = hvd.DistributedOptimizer(its_base, zero_stage=stage)
    train(other, again, part, steps=range(2, 4))
    assert_as_alone(model, alone()[0])
    assert_as_alone(other, alone()[0])
    assert_errors(told, "HorovodInternalError", "with the state of 0 parameters", "of 4 parameters")


@every_stage
def test_broadcast_optimizer_state_gives_all_ranks_the_roots_options(stage: int) -> None:
    model, optimizer = wrapped(stage, OPTIMIZERS["SGD"])
    train(model, optimizer, part, steps=range(2))
    for group in optimizer.param_groups:
        group["lr"] *= 1 + hvd.rank()
        group["only_here"] = hvd.rank()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    found = hvd.allgather_object([(group["lr"], group["only_here"]) for group in optimizer.param_groups])
    train(model, optimizer, part, steps=range(2, 4))
    assert found == [[(0.05, 0)]] * hvd.size()
    assert_as_alone(model, alone(OPTIMIZERS["SGD"])[0])


@every_stage
@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps], ids=["copy.deepcopy", "pickle"])
def test_it_cannot_be_copied_and_says_what_to_do(stage: int, copied: Callable[[Any], Any]) -> None:
    _, optimizer = wrapped(stage)
    assert_errors(errors_everywhere(lambda: copied(optimizer)), "ValueError", f"zero_stage={stage}", "load")


# What does not go together


CONTRADICTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "Adasum": ({"op": hvd.Adasum}, ("op=Adasum", "op=Average or op=Sum")),
    "compression": ({"compression": hvd.Compression.fp16}, ("compression", "precision=")),
    "predivide": ({"gradient_predivide_factor": 2.0}, ("gradient_predivide_factor", "leave it out")),
    "groups": ({"groups": 2}, ("groups", "leave it out")),
    "sparse_as_dense": ({"sparse_as_dense": True}, ("sparse_as_dense", "sparse=False")),
    "stage 3": ({"stage": 3}, ("zero_stage=3", "hpcpar.fully_shard", "zero_stage=2")),
    "stage 4": ({"stage": 4}, ("zero_stage=4", "1 and 2")),
    "a stage as truth": ({"stage": True}, ("zero_stage=True",)),
    "passes": ({"backward_passes_per_step": 0}, ("backward_passes_per_step=0",)),
    "a type": ({"precision": "int8"}, ("int8",)),
    "precision alone": ({"stage": None, "precision": "bfloat16"}, ("precision", "zero_stage=1 or 2")),
    "offload alone": ({"stage": 0, "offload": "cpu"}, ("offload", "zero_stage=1 or 2")),
    "memory alone": ({"stage": None, "shared_parameters": True}, ("shared_parameters", "zero_stage=1")),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_what_does_not_go_together_is_an_error_that_says_what_does(case: str) -> None:
    options, words = CONTRADICTIONS[case]
    told = errors_everywhere(lambda: wrapped(**{"stage": 1, **options}))
    assert_errors(told, "ValueError", *words)


def test_optimizers_that_need_whole_tensors_are_refused() -> None:
    told = errors_everywhere(lambda: wrapped(1, LBFGS))
    assert_errors(told, "ValueError", "LBFGS", "zero_stage=0")


@pytest.mark.parametrize("stage", [None, 1, 2, 3])
def test_a_fully_sharded_model_is_for_hpcpars_own_optimizer(stage: int | None) -> None:
    model = hpcpar.fully_shard(model_of(), Communicator.alone())
    told = errors_everywhere(
        lambda: hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), zero_stage=stage)
    )
    assert_errors(told, "ValueError", "is fully sharded", "hpcpar.DistributedOptimizer")


def test_a_parameter_that_thaws_is_an_error(needs_two: None) -> None:
    for stage in (1, 2):
        model = model_of()
        model[0].requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), zero_stage=stage)
        backward(model, part, 0)
        optimizer.step()
        model[0].requires_grad_(True)
        optimizer.zero_grad()
        backward(model, part, 1)
        assert_errors(errors_everywhere(optimizer.step), "ValueError", "frozen", "requires_grad")


@every_stage
@pytest.mark.parametrize("after", [0, 2])
def test_a_rank_that_has_joined_is_an_error_for_the_others_and_training_goes_on(
    stage: int, after: int, needs_two: None
) -> None:
    model, optimizer = wrapped(stage)
    train(model, optimizer, part, steps=range(after))
    error = None
    optimizer.zero_grad()
    if hvd.rank() > 0:
        error = error_of(lambda: (backward(model, part, 99), optimizer.step()))
    hvd.join()
    optimizer.zero_grad()
    train(model, optimizer, part, steps=range(after, STEPS))
    told = hvd.allgather_object((type(error).__name__, str(error)))
    assert [kind for kind, _ in told] == ["NoneType"] + ["HorovodInternalError"] * (hvd.size() - 1)
    assert all("rank 0 had joined" in text for _, text in told[1:])
    assert_as_alone(model, alone()[0])


@every_stage
@pytest.mark.parametrize("call", ["state_dict", "load_state_dict"])
def test_a_call_that_one_rank_makes_alone_is_an_error_on_all_and_not_a_wait(
    stage: int, call: str, needs_two: None
) -> None:
    model, optimizer = wrapped(stage)
    saved = optimizer.state_dict()
    train(model, optimizer, part, steps=range(2))
    optimizer.zero_grad()
    if hvd.rank() == 0:
        error = error_of(
            optimizer.state_dict if call == "state_dict" else lambda: optimizer.load_state_dict(saved)
        )
    else:
        error = error_of(lambda: (backward(model, part, 20), optimizer.step()))
    optimizer.zero_grad()
    train(model, optimizer, part, steps=range(2, 4))
    told = hvd.allgather_object((type(error).__name__, str(error)))
    assert {kind for kind, _ in told} == {"HorovodInternalError"}
    assert all(f"rank 0 brought a call of {call}()" in text for _, text in told)
    assert_as_alone(model, alone()[0])


def test_an_optimizer_that_is_gone_leaves_no_hooks_and_no_part_in_the_next_ones_steps() -> None:
    model, optimizer = wrapped(2)
    train(model, optimizer, part, steps=range(1))
    comms = len(hvd.global_process_set._engine.steps._loans)
    for stage in (1, 2, 1):
        del optimizer
        model.load_state_dict(model_of().state_dict())
        optimizer: Any = hvd.DistributedOptimizer(OPTIMIZERS["AdamW"](model.parameters()), zero_stage=stage)
        train(model, optimizer, part)
    made = len(hvd.global_process_set._engine.steps._loans) - comms
    assert_as_alone(model, alone()[0])
    assert made <= 1, "communicators are used again"


def test_the_next_optimizer_does_not_meet_what_one_rank_had_begun_for_the_last(
    needs_two: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = hvd.global_process_set._engine
    model, optimizer = wrapped(1)
    train(model, optimizer, part, steps=range(1))
    lent = optimizer.sharded._parts.loan.dp_comm
    if hvd.rank() > 0:
        monkeypatch.setattr(BucketGate, "_open", lambda self: None)  # only rank 0's buckets leave
    backward(model, part, 99)
    if hvd.rank() == 0:
        optimizer.sharded.reducer._reduction.await_open()
    calls = hvd.allgather_object(lent.calls)
    del optimizer
    monkeypatch.undo()
    again, its_optimizer = wrapped(1)
    train(again, its_optimizer, part)
    assert calls[0] > calls[1], "rank 0 has begun what the others have not"
    assert_as_alone(again, alone()[0])
    under_way = engine._comm._runtime.progress.under_way
    assert [call for call in under_way if call.comm == lent.name] == []


# New starts


@pytest.mark.parametrize(
    ("stage", "fault"), [(1, "after the step"), (2, "in a collective"), (1, "before the step")]
)
def test_elastic_training_goes_on_from_the_last_commit(stage: int, fault: str) -> None:
    model, optimizer = wrapped(stage, precision="float32", offload="cpu")
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0)
    faults = iter([True])

    @elastic.run
    def run(state: Any) -> None:
        while state.step < 6:
            if state.step == 3 and next(faults, False):
                optimizer.zero_grad()
                backward(model, part, 999)
                if fault == "in a collective":
                    hvd.allreduce(torch.ones(2 + hvd.rank()), name="differs")
                if fault != "before the step":
                    optimizer.step()
                raise hvd.HorovodInternalError("made up")
            train(model, optimizer, part, steps=range(state.step, state.step + 1))
            state.step += 1
            if state.step % 2 == 0:
                state.commit()

    run(state)
    reference = model_of().float()
    train(reference, OPTIMIZERS["AdamW"](reference.parameters()), whole, steps=range(6))
    # float32, and Adam divides by the root of small sums.
    assert_as_alone(model, reference, 1e-4)
