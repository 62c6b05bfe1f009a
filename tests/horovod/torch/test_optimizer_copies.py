"""Copies of DistributedOptimizer, and training in process sets.

What ranks find is gathered first and asserted after, so that no rank fails alone while others wait.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import hpcpar.horovod.torch as hvd
from tests.grid import pairwise
from tests.horovod.torch.training import (
    OPTIMIZERS,
    REDUCTIONS,
    ROUNDING,
    Make,
    alone,
    assert_as_alone,
    bits,
    distance,
    model_of,
    of_ranks,
    part,
    train,
    whole,
    wrapped,
)

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("by_stage")]


# Copies


def through_pickle(things: Any) -> Any:
    return pickle.loads(pickle.dumps(things))


@pytest.mark.parametrize(
    ("make", "copied", "after"), pairwise(OPTIMIZERS.values(), [copy.deepcopy, through_pickle], [0, 2])
)
def test_a_copy_trains_on_by_itself_as_the_original_does(
    make: Make, copied: Callable[[Any], Any], after: int
) -> None:
    model, optimizer = wrapped(make, op=hvd.Sum, backward_passes_per_step=2)
    train(model, optimizer, part, passes=2, reduction="sum", steps=range(after))
    twin, twin_optimizer = copied((model, optimizer))
    train(twin, twin_optimizer, part, passes=2, reduction="sum", steps=range(after, 4))
    untouched = bits(model)
    train(model, optimizer, part, passes=2, reduction="sum", steps=range(after, 4))
    reference, _ = alone(make, passes=2, reduction="sum", steps=range(4))
    assert_as_alone(twin, reference)
    assert_as_alone(model, reference)
    assert untouched != bits(model)
    assert type(twin_optimizer).__name__ == type(optimizer).__name__
    assert twin_optimizer.param_groups[0]["params"][0] is next(twin.parameters())


def test_a_copy_on_one_rank_alone_disturbs_nobody() -> None:
    model, optimizer = wrapped()
    train(model, optimizer, part, steps=range(2))
    kept = (copy.deepcopy(optimizer), pickle.dumps(optimizer)) if hvd.rank() == 0 else None
    if kept:
        pickle.loads(kept[1])
    second, its_optimizer = wrapped()
    train(second, its_optimizer, part)
    train(model, optimizer, part, steps=range(2, 4))
    assert_as_alone(second, alone()[0])
    assert_as_alone(model, alone()[0])


def test_an_optimizer_of_a_process_set_says_that_it_cannot_be_copied(half: Any) -> None:
    _, optimizer = wrapped(process_set=half)
    if half is hvd.global_process_set:
        assert copy.deepcopy(optimizer) is not optimizer
    else:
        with pytest.raises(ValueError, match="process set cannot be copied or pickled"):
            copy.deepcopy(optimizer)


@pytest.mark.parametrize(
    ("make", "stages"), pairwise(OPTIMIZERS.values(), [(None, None), (1, 2), (2, 1), (None, 1)])
)
def test_state_dicts_go_to_and_fro_between_stages_and_the_plain_optimizer(
    make: Make, stages: tuple[int | None, int | None], small_buckets: None
) -> None:
    model, optimizer = wrapped(make, zero_stage=stages[0])
    train(model, optimizer, part, steps=range(2))
    saved = model.state_dict(), optimizer.state_dict()
    plain = model_of(1)
    other = make(plain.parameters())
    plain.load_state_dict(saved[0])
    other.load_state_dict(copy.deepcopy(saved[1]))
    train(plain, other, whole, steps=range(2, 4))
    again, its_optimizer = wrapped(make, seed=2, zero_stage=stages[1])
    train(again, its_optimizer, part, steps=range(1))
    again.load_state_dict(saved[0])
    its_optimizer.load_state_dict(copy.deepcopy(saved[1]))
    train(again, its_optimizer, part, steps=range(2, 4))
    reference, truth = alone(make)
    assert saved[1]["param_groups"] == truth.state_dict()["param_groups"]
    assert_as_alone(plain, reference)
    assert_as_alone(again, reference)


# Process sets


@pytest.mark.parametrize(("stage", "op"), [(None, "Average"), (1, "Sum"), (2, "Average")])
def test_ranks_outside_of_the_process_set_train_by_themselves(
    stage: int | None, op: str, halves: list[Any]
) -> None:
    chosen = halves[0]
    model, optimizer = wrapped(process_set=chosen, op=getattr(hvd, op), zero_stage=stage)
    own = chosen.ranks if chosen.included() else [hvd.rank()]
    train(model, optimizer, part, reduction=REDUCTIONS[op])
    reference = model_of()
    plain = OPTIMIZERS["SGD"](reference.parameters())
    train(reference, plain, of_ranks(own), reduction=REDUCTIONS[op])
    told = hvd.allgather_object((bits(model), distance(model, reference)))
    assert max(far for _, far in told) <= ROUNDING
    assert len({told[rank][0] for rank in chosen.ranks}) == 1
    assert len({own for own, _ in told}) == 1 + hvd.size() - len(chosen.ranks)


@pytest.mark.parametrize(
    ("stage", "options"), [(None, {"gradient_predivide_factor": 2.0}), (1, {}), (2, {})], ids=str
)
def test_process_sets_train_side_by_side_with_different_numbers_of_steps(
    stage: int | None, options: dict[str, Any], half: Any
) -> None:
    steps = range(2 + 3 * (min(half.ranks) % 2))
    options = {"backward_passes_per_step": 2, "zero_stage": stage, **options}
    model, optimizer = wrapped(OPTIMIZERS["AdamW"], process_set=half, **options)
    train(model, optimizer, part, passes=2, steps=steps)
    reference = model_of()
    plain = OPTIMIZERS["AdamW"](reference.parameters())
    train(reference, plain, of_ranks(half.ranks), passes=2, steps=steps)
    told = hvd.allgather_object(bits(model))
    assert distance(model, reference) <= ROUNDING
    assert len({told[rank] for rank in half.ranks}) == 1


# One rank


def test_one_rank_alone_needs_no_hooks() -> None:
    model, _optimizer = wrapped(backward_passes_per_step=1)
    hooks = [len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters()]
    assert hooks == [0 if hvd.size() == 1 else 1] * 4
