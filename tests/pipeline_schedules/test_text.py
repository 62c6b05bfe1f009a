"""Schedules as text, and torch's own reader and writer as the measure."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as peer

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.pipeline_schedules.text import TextFormat, format, parse, read, write

HOUSE = """
# 1F1B, its last stage split
0F0 0F1 0B0 0F2 0B1 0B2

-   1F0 1B0 1W0 1F1 1F2 1B1 1W1 1B2 1W2   # rank 1
"""

TORCH = "0F0,0F1,,0B0,0F2,0B1,0B2\r\n,1F0,1I0,1W0,1F1,(1F2;1I1)OVERLAP_F_B,1W1,1I2,1W2\r\n"

ROWS = tuple(
    tuple(map(Action.parse, row.split()))
    for row in ("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1W0 1F1 1F2 1B1 1W1 1B2 1W2")
)

MEMORY = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")

PEERS = (
    ("ScheduleLoopedBFS", 2),
    ("ScheduleInterleaved1F1B", 1),
    ("ScheduleInterleaved1F1B", 3),
    ("ScheduleInterleavedZeroBubble", 2),
    ("ScheduleZBVZeroBubble", 2),
    ("ScheduleDualPipeV", 2),
)


def stages_of_torch(ranks: int, each: int) -> list[Any]:
    """Stand in for the stages of one rank in torch's schedules, without a process group."""
    return [
        SimpleNamespace(num_stages=ranks * each, group_size=ranks, group_rank=0, submod=None)
        for _ in range(each)
    ]


def made_by_torch(name: str, ranks: int, each: int, microbatches: int) -> Any:
    return getattr(peer, name)(stages_of_torch(ranks, each), microbatches)


def done_by_torch(order: dict[int, list[Any]]) -> tuple[tuple[Action, ...], ...]:
    """Convert the actions of torch's runtime to ours; I and B are both B here."""
    letters = {
        peer.FORWARD: "F",
        peer.BACKWARD_INPUT: "B",
        peer.FULL_BACKWARD: "B",
        peer.BACKWARD_WEIGHT: "W",
    }
    return tuple(
        tuple(
            Action(part.stage_index, letters[part.computation_type], part.microbatch_index)
            for action in order[rank]
            if action is not None
            for part in action.sub_actions or (action,)
            if part.computation_type in letters
        )
        for rank in sorted(order)
    )


def gpipe(ranks: int, each: int, microbatches: int, split: int) -> Schedule:
    """All forwards, then all backwards; those of the first `split` microbatches in two parts."""
    return Schedule(
        tuple(
            (
                *(Action(s, "F", m) for s in range(rank, ranks * each, ranks) for m in range(microbatches)),
                *(
                    Action(s, kind, m)
                    for s in reversed(range(rank, ranks * each, ranks))
                    for m in range(microbatches)
                    for kind in ("BW" if m < split else "B")
                ),
            )
            for rank in range(ranks)
        )
    )


@pytest.mark.parametrize("text", [HOUSE, TORCH])
def test_both_forms_say_the_same_schedule(text: str) -> None:
    assert parse(text).rows == ROWS


def test_the_plain_format_is_a_line_for_each_rank_under_its_name() -> None:
    assert format(Schedule(ROWS, "mine")) == (
        "# mine\n0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1W0 1F1 1F2 1B1 1W1 1B2 1W2\n"
    )


def test_the_form_of_torch_has_i_where_a_w_follows_and_b_for_the_whole() -> None:
    assert format(Schedule(ROWS, "mine"), "torch") == (
        "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1I0,1W0,1F1,1F2,1I1,1W1,1I2,1W2\n"
    )


@pytest.mark.parametrize("form", ["plain", "torch"])
def test_what_was_written_is_read_again(form: TextFormat) -> None:
    for ranks, each, microbatches, split in product((1, 2, 5), (1, 3), (0, 1, 11), (0, 2, 11)):
        schedule = gpipe(ranks, each, microbatches, split)
        assert parse(format(schedule, form)) == schedule


@pytest.mark.parametrize("suffix", [".csv", ".txt"])
def test_a_file_is_written_in_the_form_of_its_suffix_and_read_under_its_name(
    suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"mine{suffix}"
    write(Schedule(ROWS), path)
    assert ("," in path.read_text()) == (suffix == ".csv")
    assert read(path) == Schedule(ROWS)
    assert read(path).name == "mine"


def test_a_csv_of_one_column_is_still_of_torch(tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    path.write_text("0SEND_F0\n")
    assert read(path).rows == ((),)
    path.write_text('\ufeff"0F0"\n', encoding="utf-8")  # as a spreadsheet saves it
    assert read(path).rows == ((Action(0, "F", 0),),)


def test_what_torch_adds_is_skipped_also_of_versions_that_are_not_installed() -> None:
    lowered = "0UNSHARD,0F0,0SEND_F0,0WAIT_SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\n"
    peers = "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0\n"
    assert parse(lowered + peers).rows == (
        (Action(0, "F", 0), Action(0, "B", 0)),
        (Action(1, "F", 0), Action(1, "B", 0)),
    )


@pytest.mark.parametrize(("name", "each"), PEERS)
def test_what_torch_dumps_is_what_it_does(name: str, each: int, tmp_path: Path) -> None:
    for ranks, microbatches in ((2, 4), (4, 8)):
        made = made_by_torch(name, ranks, each, microbatches)
        expected = done_by_torch(made.pipeline_order)
        made._dump_csv(tmp_path / "order.csv", format="compute_only")
        assert read(tmp_path / "order.csv").rows == expected
        made._dump_csv(tmp_path / "lowered.csv", format="compute_comms")
        assert "SEND_F" in (tmp_path / "lowered.csv").read_text()
        assert (
            read(tmp_path / "lowered.csv").rows == done_by_torch(made.pipeline_order_with_comms) == expected
        )


@pytest.mark.parametrize(("name", "each"), PEERS)
def test_what_torch_dumped_and_we_wrote_again_is_the_same_for_torch(
    name: str, each: int, tmp_path: Path
) -> None:
    made = made_by_torch(name, 4, each, 8)
    made._dump_csv(tmp_path / "order.csv", format="compute_only")
    write(read(tmp_path / "order.csv"), tmp_path / "ours.csv")
    runtime = peer._PipelineScheduleRuntime(stages_of_torch(4, each), 8)
    runtime._load_csv(tmp_path / "ours.csv")
    parts = {
        rank: [p for a in row if a is not None for p in a.sub_actions or (a,)]
        for rank, row in made.pipeline_order.items()
    }
    assert runtime.pipeline_order == parts


@pytest.mark.parametrize(
    ("ranks", "each", "microbatches", "split"), [(1, 1, 3, 1), (3, 2, 5, 0), (4, 1, 4, 4)]
)
def test_torch_validates_lowers_and_simulates_what_we_write(
    ranks: int, each: int, microbatches: int, split: int, tmp_path: Path
) -> None:
    schedule = gpipe(ranks, each, microbatches, split)
    write(schedule, tmp_path / "ours.csv")
    runtime = peer._PipelineScheduleRuntime(stages_of_torch(ranks, each), microbatches)
    runtime._load_csv(tmp_path / "ours.csv")
    assert runtime.stage_index_to_group_rank == schedule.rank_of_stage
    assert done_by_torch(runtime.pipeline_order) == schedule.rows
    without_memory = {
        rank: [a for a in row if a.computation_type.name not in MEMORY]
        for rank, row in runtime.pipeline_order_with_comms.items()
    }
    simulated = peer._simulate_comms_compute(  # raises where it deadlocks
        without_memory, lambda stage: schedule.rank_of_stage[stage], schedule.stages
    )
    messages = 2 * 2 * microbatches * (schedule.stages - 1) * (ranks > 1)  # both ends, both ways
    done = [action for row in simulated.values() for action in row if action is not None]
    newer = sum("WAIT_SEND" in action.computation_type.name for action in done)
    assert len(done) - newer == messages + len([*schedule.actions()])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0 0X0", "text:1:5: expected an action such as 2F0, 2B0 or 2W0"),
        ("0F0 0X0", "found '0X0'"),
        ("# first\n\n  0F0 F0", "text:3:7: "),
        (
            "0F0\n0B0 # late\n",
            "text:2:1: expected all actions of stage 0 in the line of rank 0, where 1:1 has 0F0",
        ),
        ("0F0 0B0\n1F0 1F1 1F0", "text:2:9: expected 1F0 once, found it again after 2:1"),
        ("0F0 0I0 0W0", "text:1:5: expected an action such as 2F0, 2B0 or 2W0"),
        ("0F0 0I0 0W0", "I belongs to torch's form"),
        ("0F0,0I0", "text:1:5: expected 0W0 in the line of 0I0, found none"),
        ("0F0,0B0,,0W0", "text:1:10: expected 0I0 in the line of 0W0, found none"),
        ("0F0,0B0,0I0,0W0", "text:1:9: expected 0I0 once, found it again after 1:5"),
        ("0F0, 0f1", "text:1:6: expected an action of torch's schedules"),
        ("0F0,(0F1;0X0)OVERLAP_F_B", "text:1:10: expected an action of torch's schedules"),
        ("0F0,(0F1;0B0)", "found '(0F1;0B0)'"),
        ("0F0,0F1junk", "found '0F1junk'"),
        ("", "text: expected a line of actions for each rank, found none"),
        ("# nothing\n", "text: expected a line of actions for each rank, found none"),
    ],
)
def test_an_error_names_line_column_and_what_was_expected(text: str, words: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse(text)
    assert words in str(caught.value)


def test_an_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("0F0 ?")
    with pytest.raises(ScheduleError, match=r"mine\.txt:1:5: .* found '\?'"):
        read(path)
    path.write_bytes(b"0F0 \xff")
    with pytest.raises(ScheduleError, match=r"mine\.txt is no text: byte 4"):
        read(path)
