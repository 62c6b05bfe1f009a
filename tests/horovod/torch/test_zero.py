"""DistributedOptimizer(zero_stage=…) against one process that sees all ranks' rows, in float64.

What ranks find is gathered first and asserted after, so that no rank fails alone while others wait.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
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
from hpcpar.horovod import basics
from hpcpar.horovod.torch import elastic
from hpcpar.horovod.torch.readiness import BucketGate
from tests.horovod.torch.training import (
    OPTIMIZERS,
    REDUCTIONS,
    ROUNDING,
    STEPS,
    Branches,
    Make,
    Share,
    assert_as_alone,
    assert_errors,
    backward,
    batch,
    bits,
    distance,
    error_of,
    errors_everywhere,
    model_of,
    of_ranks,
    part,
    train,
    whole,
)
from tests.horovod.torch.training import alone as alone_by
from tests.horovod.torch.training import wrapped as wrapped_by

every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
every_stage = pytest.mark.parametrize("stage", [1, 2])


@pytest.fixture(autouse=True)
def _small_buckets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that these models have several."""
    if not request.node.get_closest_marker("mpi"):
        return
    request.getfixturevalue("hvd")
    context = basics.the_context()
    monkeypatch.setattr(context, "knobs", replace(context.knobs, fusion_threshold_nbytes=300))


def alone(make: Make = OPTIMIZERS["AdamW"], **options: Any) -> tuple[nn.Sequential, Optimizer]:
    return alone_by(make, **options)


def wrapped(stage: int | None, make: Make = OPTIMIZERS["AdamW"], **options: Any) -> tuple[nn.Sequential, Any]:
    return wrapped_by(make, zero_stage=stage, **options)


# Equality with one process


@pytest.mark.mpi
@every_stage
@every_optimizer
@pytest.mark.parametrize(("passes", "op"), [(1, "Average"), (3, "Sum")])
def test_training_is_that_of_one_process_with_all_rows(stage: int, make: Make, passes: int, op: str) -> None:
    reduction = REDUCTIONS[op]
    model, optimizer = wrapped(stage, make, op=getattr(hvd, op), backward_passes_per_step=passes)
    train(model, optimizer, part, passes=passes, reduction=reduction)
    buckets = len(optimizer.sharded.blocks)
    reference, _ = alone(make, passes=passes, reduction=reduction)
    assert_as_alone(model, reference)
    assert buckets > 1


@pytest.mark.mpi
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


@pytest.mark.mpi
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


@pytest.mark.mpi
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


@pytest.mark.mpi
@every_stage
@pytest.mark.parametrize(("passes", "op"), [(1, "Sum"), (2, "Average")])
@pytest.mark.parametrize("is_explicit", [True, False], ids=["after synchronize", "at once"])
def test_gradients_are_clipped_by_the_optimizer(stage: int, passes: int, op: str, is_explicit: bool) -> None:
    reduction = REDUCTIONS[op]

    def steps(model: nn.Module, optimizer: Any, share: Share) -> list[float]:
        norms = []
        for step in range(STEPS):
            optimizer.zero_grad()
            for number in range(passes):
                backward(model, share, 10 * step + number, reduction)
            if optimizer is other:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
                nn.utils.clip_grad_value_(model.parameters(), 0.03)
                optimizer.step()
                continue
            if is_explicit:
                optimizer.synchronize()
            norms.append(optimizer.clip_grad_norm_(0.1).item())
            optimizer.clip_grad_value_(0.03)
            with optimizer.skip_synchronize() if is_explicit else nullcontext():
                optimizer.step()
        return norms

    make = OPTIMIZERS["SGD"]
    model, optimizer = wrapped(stage, make, op=getattr(hvd, op), backward_passes_per_step=passes)
    reference = model_of()
    other = make(reference.parameters())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        norms = steps(model, optimizer, part)
    expected = steps(reference, other, whole)
    assert_as_alone(model, reference)
    assert norms == pytest.approx(expected, abs=ROUNDING)
    assert min(expected) > 0.1, "nothing was clipped"
    assert [str(warning.message) for warning in told] == []


@pytest.mark.mpi
@every_stage
@pytest.mark.parametrize("synchronized", [True, False])
def test_torchs_habits_around_a_step_are_those_of_one_process(stage: int, synchronized: bool) -> None:
    """Clip by torch's functions, discard a backward, step on zeros, forget by model.zero_grad()."""

    def course(model: nn.Module, optimizer: Any, rows: Any) -> list[float]:
        norms = []
        for step in range(4):
            backward(model, rows, step)
            if synchronized and hasattr(optimizer, "synchronize"):
                optimizer.synchronize()
            if step == 1:  # it is discarded
                model.zero_grad()
                continue
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            nn.utils.clip_grad_value_(model.parameters(), 0.02)
            if step == 2:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.zero_()
            with getattr(optimizer, "skip_synchronize", nullcontext)():
                optimizer.step()
            model.zero_grad()
        return norms

    model, optimizer = wrapped(stage)
    found = course(model, optimizer, part)
    reference = model_of()
    expected = course(reference, OPTIMIZERS["AdamW"](reference.parameters()), whole)
    assert found == pytest.approx(expected, abs=ROUNDING)
    assert_as_alone(model, reference)


@pytest.mark.mpi
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


@pytest.mark.mpi
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


@pytest.mark.mpi
@every_stage
@pytest.mark.parametrize("passes", [1, 2])
def test_the_number_of_passes_can_change_and_a_step_may_come_early(stage: int, passes: int) -> None:
    model, optimizer = wrapped(stage, backward_passes_per_step=3)
    reference, other = alone(passes=passes, steps=range(2))
    train(model, optimizer, part, passes=passes, steps=range(2))
    for now, steps in ((3, range(2, 4)), (1, range(4, 6)), (2, range(6, 8))):
        optimizer.set_backward_passes_per_step(now)
        train(model, optimizer, part, steps=steps, passes=now)
        train(reference, other, whole, steps=steps, passes=now)
    assert_as_alone(model, reference)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"backward_passes_per_step={wrong}"):
            optimizer.set_backward_passes_per_step(wrong)


@pytest.mark.mpi
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


@pytest.mark.mpi
def test_a_rank_without_a_backward_may_average_something_else_before_the_step() -> None:
    model, optimizer = wrapped(1, OPTIMIZERS["SGD"])
    reference = model_of()
    other = OPTIMIZERS["SGD"](reference.parameters())
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        other.zero_grad()
        for rank in range(1, hvd.size()):
            (
                F.mse_loss(reference(of_ranks([rank])(batch(step)[0])), of_ranks([rank])(batch(step)[1]))
            ).backward()
        loss = backward(model, part, step) if hvd.rank() > 0 else torch.zeros((), dtype=torch.float64)
        found.append(hvd.allreduce(loss.detach(), op=hvd.Sum).isfinite().item())
        optimizer.step()
        for parameter in reference.parameters():
            if parameter.grad is not None:
                parameter.grad /= hvd.size()
        other.step()
    assert_as_alone(model, reference)
    assert found == [True] * STEPS


@pytest.mark.mpi
@pytest.mark.parametrize(("stage", "as_number"), [(1, False), (2, True)])
def test_a_step_with_a_closure_is_that_of_one_process_and_returns_its_loss(
    stage: int, as_number: bool
) -> None:
    def steps(model: nn.Module, optimizer: Optimizer, share: Share) -> list[float]:
        losses = []
        for step in range(3):

            def closure(step: int = step) -> Any:
                optimizer.zero_grad()
                loss = backward(model, share, 10 * step)
                return loss.item() if as_number else loss

            loss = optimizer.step(closure)
            losses.append(loss.item() if isinstance(loss, Tensor) else loss)
            train(model, optimizer, share, steps=range(step + 5, step + 6))
        return losses

    model, optimizer = wrapped(stage)
    reference = model_of()
    losses = steps(model, optimizer, part)
    expected = steps(reference, OPTIMIZERS["AdamW"](reference.parameters()), whole)
    assert_as_alone(model, reference)
    assert losses == pytest.approx(expected, abs=ROUNDING)


@pytest.mark.mpi
@every_stage
def test_step_hooks_run_once_a_step(stage: int) -> None:
    model = model_of()
    base = SGD(model.parameters(), lr=0.1)
    calls: list[str] = []
    base.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters(), zero_stage=stage)
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, optimizer, part, steps=range(2))
    assert calls == ["before", "after"] * 2


@pytest.mark.mpi
@every_stage
@every_optimizer
def test_groups_have_options_of_their_own_and_more_may_be_added(stage: int, make: Make) -> None:
    def steps(model: Branches, optimizer: Optimizer, ranks: range) -> None:
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": list(model.c.parameters()), "lr": 0.002})
            optimizer.zero_grad()
            for rank in ranks:
                x, y = (of_ranks([rank])(rows) for rows in batch(step))
                (F.mse_loss(model(x, "ab" if step < 2 else "abc"), y) / len(ranks)).backward()
            optimizer.step()

    def groups(model: Branches) -> list[dict[str, Any]]:
        return [{"params": list(model.a.parameters()), "lr": 0.03}, {"params": list(model.b.parameters())}]

    model, reference = Branches(), Branches()
    optimizer = hvd.DistributedOptimizer(make(groups(model)), zero_stage=stage)
    steps(model, optimizer, range(hvd.rank(), hvd.rank() + 1))
    plain = make(groups(reference))
    steps(reference, plain, range(hvd.size()))
    rates = [group["lr"] for group in optimizer.param_groups]
    assert len(optimizer._parameter_names) == 6
    assert rates == [group["lr"] for group in plain.param_groups]
    assert_as_alone(model, reference)


# States


@pytest.mark.mpi
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


@pytest.mark.mpi
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


@pytest.mark.mpi
@every_stage
@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps], ids=["copy.deepcopy", "pickle"])
def test_it_cannot_be_copied_and_says_what_to_do(stage: int, copied: Callable[[Any], Any]) -> None:
    _, optimizer = wrapped(stage)
    assert_errors(errors_everywhere(lambda: copied(optimizer)), "ValueError", f"zero_stage={stage}", "load")


# Process sets


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


@pytest.mark.mpi
@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_what_does_not_go_together_is_an_error_that_says_what_does(case: str) -> None:
    options, words = CONTRADICTIONS[case]
    told = errors_everywhere(lambda: wrapped(**{"stage": 1, **options}))
    assert_errors(told, "ValueError", *words)


@pytest.mark.mpi
def test_optimizers_that_need_whole_tensors_are_refused() -> None:
    told = errors_everywhere(lambda: wrapped(1, LBFGS))
    assert_errors(told, "ValueError", "LBFGS", "zero_stage=0")


@pytest.mark.mpi
@pytest.mark.parametrize("stage", [None, 1, 2, 3])
def test_a_fully_sharded_model_is_for_hpcpars_own_optimizer(stage: int | None) -> None:
    model = hpcpar.fully_shard(model_of(), Communicator.alone())
    told = errors_everywhere(
        lambda: hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), zero_stage=stage)
    )
    assert_errors(told, "ValueError", "is fully sharded", "hpcpar.DistributedOptimizer")


@pytest.mark.mpi
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


@pytest.mark.mpi
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


@pytest.mark.mpi
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


@pytest.mark.mpi
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


@pytest.mark.mpi
def test_the_next_optimizer_does_not_meet_what_one_rank_had_begun_for_the_last(
    needs_two: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = hvd.global_process_set._engine
    model, optimizer = wrapped(1)
    train(model, optimizer, part, steps=range(1))
    lent = optimizer.sharded._parts.loan.comm
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


@pytest.mark.mpi
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
