"""Messages between stages: which are posted when, under which tag, and what is held until when."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcpar.comm import Communicator
from hpcpar.comm import run_loopback as run
from hpcpar.errors import MismatchError, OperationError
from hpcpar.pipeline_parallel.executor import forward_only
from hpcpar.pipeline_parallel.mailbox import ANNOUNCEMENT_NBYTES, Mailbox, _tag
from hpcpar.pipeline_parallel.tensor_spec import OutputSpec, TensorSpec, spec_of
from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.pipeline_schedules.proof import in_order
from hpcpar.transport.interface import COLLECTIVE_TAGS
from tests.pipeline_parallel.test_pipeline import LOOP, ONE_F_ONE_B, OUT_OF_ORDER, V, by_rows

CPU = torch.device("cpu")


def value(boundary: int, microbatch: int, direction: str = "F") -> Tensor:
    """A message that says which it is; longer for later microbatches."""
    number = boundary * 100 + microbatch + (0.5 if direction == "B" else 0.0)
    return torch.full((2 + microbatch,), number, dtype=torch.float64, requires_grad=True)


def specs(schedule: Schedule) -> dict[tuple[int, int], OutputSpec]:
    return {
        (b, m): spec_of((value(b, m),))
        for b in range(schedule.stages - 1)
        for m in range(schedule.microbatches)
    }


def mailbox(comm: Communicator, schedule: Schedule, known: Any, **options: Any) -> Mailbox:
    return Mailbox(comm, schedule, known, dict.fromkeys(range(schedule.stages), CPU), **options)


def walk(
    comm: Communicator, schedule: Schedule, box: Mailbox, wrong: list[str], after: Callable[[int], None]
) -> None:
    """All messages of a row, each checked for what it says."""

    def check(action: Action, found: Any, expected: Tensor) -> None:
        if found.tolist() != expected.tolist():
            wrong.append(f"{action}: {found.tolist()}")

    for position, action in enumerate(schedule.rows[comm.rank]):
        stage, kind, microbatch = action
        box.prepare(position)
        if kind == "F":
            if stage > 0:
                spec, (arrived,) = box.activation(stage, microbatch)
                assert spec == spec_of((value(stage - 1, microbatch),))
                check(action, arrived, value(stage - 1, microbatch))
            if stage < schedule.stages - 1:
                made = (value(stage, microbatch),)
                box.require_fit(stage, microbatch, spec_of(made))
                box.send_activation(stage, microbatch, spec_of(made), made)
        elif kind == "B":
            if stage < schedule.stages - 1:
                (arrived,) = box.gradients(stage, microbatch)
                check(action, arrived, value(stage, microbatch, "B"))
            if stage > 0:
                box.send_gradients(stage, microbatch, (value(stage - 1, microbatch, "B").detach(),))
        box.advance()
        after(position)
    box.finish()


@pytest.mark.parametrize("known", [False, True], ids=["announced", "known"])
@pytest.mark.parametrize(
    "schedule",
    [
        ONE_F_ONE_B,
        V,
        OUT_OF_ORDER,
        LOOP,
        by_rows("0F0 2F0 4F0 4B0 2B0 0B0", "1F0 3F0 3B0 1B0"),
        # Over boundaries 0 and 2 rank 0 sends in another order than rank 1 receives.
        by_rows("0F0 0F1 2F0 2F1 2B0 0B0 2B1 0B1", "1F0 3F0 3B0 1F1 3F1 1B0 3B1 1B1"),
    ],
    ids=["1f1b", "v", "mixed order", "loop", "five stages", "crossing"],
)
def test_every_message_arrives_where_it_belongs_and_nothing_is_left(schedule, known):
    def on_rank(comm: Communicator) -> tuple[list[str], int, bool]:
        wrong: list[str] = []
        for _ in range(2):
            box = mailbox(comm, schedule, specs(schedule) if known else None)
            walk(comm, schedule, box, wrong, lambda _: None)
        comm.barrier()
        return wrong, comm.traffic.nbytes_sent("send"), not comm._runtime.progress.under_way

    results = run(2, on_rank)
    assert [wrong for wrong, _, _ in results] == [[], []]
    assert all(nothing_left for _, _, nothing_left in results)
    home = schedule.rank_of_stage
    crossing = [key for key in specs(schedule) if home[key[0]] != home[key[0] + 1]]
    payload = sum(2 * 8 * (2 + microbatch) for _, microbatch in crossing)
    announced = 0 if known else len(crossing) * ANNOUNCEMENT_NBYTES
    assert sum(nbytes for _, nbytes, _ in results) == 2 * (payload + announced)


def test_one_receive_is_posted_ahead_in_each_direction():
    """Rank 0 of 1F1B has posted: after 0F0 the gradient 0; after 0B0 gradient 1; never more."""
    ahead: dict[int, list[int]] = {0: [], 1: []}

    def on_rank(comm: Communicator) -> None:
        box = mailbox(comm, ONE_F_ONE_B, specs(ONE_F_ONE_B))
        original, posted = comm.start_recv, [0]

        def counting(*arguments: Any) -> Any:
            posted[0] += 1
            return original(*arguments)

        comm.start_recv = counting  # type: ignore[method-assign]
        row = ONE_F_ONE_B.rows[comm.rank]
        receives = [a.kind == ("B" if comm.rank == 0 else "F") for a in row]
        walk(
            comm,
            ONE_F_ONE_B,
            box,
            [],
            lambda position: ahead[comm.rank].append(posted[0] - sum(receives[: position + 1])),
        )

    run(2, on_rank)
    # Rank 1's row: the next forward is posted all through this backward.
    assert ahead == {0: [1, 1, 1, 1, 1, 0], 1: [1, 1, 1, 1, 0, 0]}


def test_sends_are_held_until_delivered_and_then_let_go_if_nobody_has_changed_them():
    def on_rank(comm: Communicator) -> list[int]:
        schedule = by_rows("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
        box = mailbox(comm, schedule, specs(schedule))
        held = []
        if comm.rank == 0:
            for microbatch in (0, 1):
                made = (value(0, microbatch),)
                box.send_activation(0, microbatch, spec_of(made), made)
            box.advance()
            held.append(sum(map(len, box._outgoing.values())))
            with torch.no_grad():
                made[0][0] += 1
        comm.barrier()
        if comm.rank == 1:
            for microbatch in (0, 1):
                box.prepare(microbatch)
                box.activation(1, microbatch)
        comm.barrier()
        if comm.rank == 0:
            box.advance()
            held.append(sum(map(len, box._outgoing.values())))
            with pytest.raises(OperationError, match="stage 0 returned a tensor that it changed in place"):
                box.finish()
        return held

    assert run(2, on_rank)[0] == [2, 0]


def test_at_the_end_what_is_not_delivered_is_waited_for():
    def on_rank(comm: Communicator) -> bool:
        schedule = by_rows("0F0 0B0", "1F0 1B0")
        box = mailbox(comm, schedule, specs(schedule))
        if comm.rank == 0:
            made = (value(0, 0),)
            box.send_activation(0, 0, spec_of(made), made)
        else:
            time.sleep(0.05)
            box.activation(1, 0)
        box.finish()
        return not comm._runtime.progress.under_way

    assert run(2, on_rank) == [True, True]


def test_tags_stay_within_what_mpi_guarantees_for_thousands_of_stages():
    kinds = ("announcement", "F", "B")
    tags = [_tag(boundary, what) for boundary in range(8000) for what in kinds]
    assert len(set(tags)) == len(tags)
    assert 0 <= min(tags) < max(tags) <= 32767 - COLLECTIVE_TAGS


def test_another_form_than_promised_is_refused_before_it_is_sent():
    box = mailbox(Communicator.alone(), by_rows("0F0 1F0 1B0 0B0"), {(0, 0): spec_of((value(0, 0),))})
    box.require_fit(0, 0, spec_of((value(0, 0),)))
    with pytest.raises(
        MismatchError, match=r"stage 0 returned \(float64\[3\] with gradient\) for microbatch 0"
    ):
        box.require_fit(0, 0, spec_of((value(0, 1),)))


@pytest.mark.parametrize("known", [False, True], ids=["announced", "known"])
def test_a_stage_that_failed_sends_nothing_and_keeps_its_promise(known):
    def on_rank(comm: Communicator) -> tuple[list[Any], bool]:
        schedule = by_rows("0F0 0B0", "1F0 1B0")
        box = mailbox(comm, schedule, specs(schedule) if known else None)
        found: list[Any] = []
        if comm.rank == 0:
            box.send_nothing(Action(0, "F", 0))
            found.append([each.tolist() for each in box.gradients(0, 0)])
        else:
            spec, tensors = box.activation(1, 0)
            found += [spec is None, [each.tolist() for each in tensors]]
            box.send_nothing(Action(1, "B", 0))
        box.finish()
        comm.barrier()
        return found, not comm._runtime.progress.under_way

    zeros = [[0.0, 0.0]] if known else []
    assert run(2, on_rank) == [([zeros], True), ([not known, zeros], True)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("placement", ["line", "loop", "v"])
def test_forward_only_rows_have_every_forward_once_and_need_earlier_slots_only(placement, ranks):
    per_rank = 1 if placement == "line" else 2
    stages = [
        [rank] if per_rank == 1 else [rank, rank + ranks if placement == "loop" else 2 * ranks - 1 - rank]
        for rank in range(ranks)
    ]
    schedule = by_rows(*(" ".join(f"{stage}F0" for stage in own) for own in stages))
    for count in (1, 2, 7):
        evaluation = forward_only(schedule, count)
        assert sorted(evaluation.actions()) == [
            Action(stage, "F", m) for stage in range(schedule.stages) for m in range(count)
        ]
        assert evaluation.rank_of_stage == schedule.rank_of_stage
        for row in evaluation.rows:
            slots = [action.stage + per_rank * action.microbatch for action in row]
            assert slots == sorted(slots)


def test_forward_only_rows_of_ranks_with_other_numbers_of_stages_do_not_wait_for_each_other():
    evaluation = forward_only(by_rows("0F0 2F0 3F0 4F0 6F0", "1F0 5F0"), 3)
    assert len(in_order(evaluation)) == 7 * 3


def test_a_rank_that_evaluates_is_at_most_two_messages_ahead():
    evaluation = forward_only(by_rows("0F0", "1F0"), 5)

    def on_rank(comm: Communicator) -> list[int]:
        box = mailbox(comm, evaluation, None, max_undelivered=2)
        most: list[int] = []

        def count(_: int) -> None:
            most.append(max(map(len, box._outgoing.values()), default=0))

        walk(comm, evaluation, box, [], count)
        return most

    assert max(run(2, on_rank)[0]) <= 2


def test_a_form_is_read_as_people_write_shapes():
    spec = OutputSpec((TensorSpec((4, 8), torch.bfloat16, True), None, TensorSpec((), torch.int64, False)))
    assert str(spec) == "(bfloat16[4, 8] with gradient, None, int64[])"
    assert len(spec.present) == 2
    assert spec.differentiable == (spec.present[0],)
