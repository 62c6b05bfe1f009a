"""The notebooks of examples/course: they run as shipped, and their checks tell right from wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

COURSE = Path(__file__).parents[1] / "examples" / "course"


@dataclass(frozen=True)
class Exercise:
    """Source of the reference answer, and of wrong ones with words that the check says of each."""

    right: str
    wrong: dict[str, str]


GREEDY = """
from itertools import count
from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule

def greedy(ranks, microbatches):
    # Two stages on each rank, in a V. In each half second every rank starts the best action that it can.
    last, ended, rows = 2 * ranks - 1, {}, [[] for _ in range(ranks)]

    def can_start(action, row, now):
        if action.kind == "F" and sum(each.kind == "F" for each in row) >= sum(
            each.kind == "W" for each in row
        ) + 2 * ranks:
            return False
        stage, kind, microbatch = action
        needs = {"W": [(stage, "B")], "F": [(stage - 1, "F")] * (stage > 0)}.get(kind)
        needs = [(stage, "F"), (stage + 1, "B")][: 2 if stage < last else 1] if needs is None else needs
        return all(ended.get((*need, microbatch), now + 1) <= now for need in needs)

    for now in count():
        if all(len(row) == 6 * microbatches for row in rows):
            return Schedule(tuple(map(tuple, rows)))
        begun = []
        for rank, row in enumerate(rows):
            left = [
                Action(stage, kind, microbatch)
                for kind in "BFW"
                for microbatch in range(microbatches)
                for stage in (rank, last - rank)
            ]
            able = [each for each in left if each not in ended and can_start(each, row, now)]
            row += able[:1]
            begun += able[:1]
        ended.update({action: now + 1 for action in begun})

my_schedule = greedy(4, 8)
"""

EXERCISES = {
    "1_ring_allreduce": (
        Exercise(
            """
def leftward_allgather(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    for k in range(size - 1):
        yield Step((Send(left, ((rank + k) % size,)),), (Receive(right, ((rank + k + 1) % size,)),))
""",
            {
                "leftward_allgather = my_allgather": "On 3 ranks, rank 0 sends to 1; its left is 2.",
                """
def leftward_allgather(rank, size):
    for _ in range(size - 1):
        yield Step((Send((rank - 1) % size, (rank,)),), (Receive((rank + 1) % size, ((rank + 1) % size,)),))
""": "rank 0, at the end: chunk 2 of data was never received",
            },
        ),
        Exercise(
            """
def doubling_allreduce(rank, size):
    for k in range(size.bit_length() - 1):
        other = rank ^ 1 << k
        yield Step((Send(other, (0,)),), (Receive(other, (0,), combine=True),), own_turn=int(other < rank))
""",
            {
                """
def doubling_allreduce(rank, size):
    for k in range(size.bit_length() - 1):
        yield Step((Send(rank ^ 1 << k, (0,)),), (Receive(rank ^ 1 << k, (0,), combine=True),))
""": "chunk 0 was combined in another order than on rank 0",
                "doubling_allreduce = my_allreduce": "names chunk 1 of data, which has 1 chunks",
                "doubling_allreduce = find('allreduce', 'binomial').steps": "On 2 ranks yours takes 2 steps",
            },
        ),
        Exercise(
            "crossing_nbytes = (2 * 63 - 6) * 5e-6 / ((6 - 2 * 63 / 64) * 1e-10)",
            {
                "crossing_nbytes = 1e7": "the ring is faster already, so your number is too large",
                "crossing_nbytes = 1e5": "doubling is still faster, so your number is too small",
            },
        ),
    ),
    "2_zero": (
        Exercise(
            """
def float32_state_nbytes(parameters, stage, ranks):
    parts = zip((4, 4, 8), (3, 2, 1))
    return sum(parameters * width // (ranks if stage >= sharded else 1) for width, sharded in parts)
""",
            {
                """
def float32_state_nbytes(parameters, stage, ranks):
    return parameters * (16, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks)[stage]
""": "Stage 1 with Φ = 16,384 on 4 ranks: yours is 114,688 bytes, but rank 0 holds 163,840: param",
            },
        ),
        Exercise(
            "fewest_ranks = {0: None, 1: 13, 2: 5, 3: 4}",
            {
                "fewest_ranks = {0: 4, 1: 13, 2: 5, 3: 4}": "Stage 0 on 4 ranks: 193.7 GiB on each, of 60.",
                "fewest_ranks = {0: None, 1: 14, 2: 5, 3: 4}": "Stage 1 fits on 13 ranks, too",
                "fewest_ranks = {0: None, 1: 13, 2: None, 3: 4}": "Stage 2 does fit",
                "fewest_ranks = {0: None, 1: 13}": "Stage 2 is missing",
            },
        ),
        Exercise(
            """
def sent_nbytes(stage, microbatches, layers, nbytes, ranks):
    times = (2, microbatches + 1, (3 - 1 / layers) * microbatches)[stage - 1]
    return times * nbytes * (ranks - 1) / ranks
""",
            {
                """
def sent_nbytes(stage, microbatches, layers, nbytes, ranks):
    return (2, microbatches + 1, 3 * microbatches)[stage - 1] * nbytes * (ranks - 1) / ranks
""": "Stage 3, microbatches=1, 2 ranks: yours is 49,152 bytes, but rank 0 sent 45,056",
            },
        ),
    ),
    "3_schedule_golf": (
        Exercise(
            "by_hand = '0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3\\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3'",
            {
                "by_hand = make('gpipe', 2, 4)": "Rank 0 keeps 4 chunks, but may keep 2",
                "by_hand = make('naive', 2, 4)": "A step takes 24 s; 15 s can be reached",
                "by_hand = make('1f1b', 2, 3)": "It is for 2 ranks and 3 microbatches; asked for are 2 and 4",
                "by_hand = '0F0 0X1'": "expected an action such as 2F0",
                "by_hand = '0F0 0B0 0F1 0B1 0F2 0F3 0B3\\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3'": "0B2 is missing",
            },
        ),
        Exercise(
            "with_weights = '''"
            "0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3\n"
            "1F0 1F1 1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3\n"
            "2F0 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2W2 2W3'''",
            {
                "with_weights = make('1f1b', 3, 4)": "A step takes 18 s; 14 s can be reached",
                "with_weights = make('zb-h2', 3, 4)": "Rank 0 keeps 4 chunks, but may keep 3",
            },
        ),
        Exercise(
            GREEDY,
            {
                "my_schedule = make('zb-h1', 4, 8)": "A step takes 27 s; 26 s can be reached",
                "my_schedule = make('zb-h2', 4, 8)": "Rank 0 keeps 7 chunks, but may keep 4",
            },
        ),
    ),
    "4_ring_attention": (
        Exercise(
            """
def my_shares(ranks, length):
    n = length // (2 * ranks)
    return [[(r * n, (r + 1) * n), (length - (r + 1) * n, length - r * n)] for r in range(ranks)]
""",
            {
                """
def my_shares(ranks, length):
    return [list(share) for share in in_order(ranks, length).shares]
""": "On 2 ranks they compute (528, 1552) pairs: rank 1 has 149% of the mean",
                """
def my_shares(ranks, length):
    return [[(0, length // 2), (length // 2, length)]] * ranks
""": "are not the sequence 0:64",
                "my_shares = lambda ranks, length: [[(0, length)]]": "2 ranks need 2 shares, but yours are 1",
            },
        ),
        Exercise(
            """
def my_moves(ranks, count):
    return [
        Move(step, sender, sender + 1, sender - step, (Span(0, count),))
        for step in range(ranks - 1)
        for sender in range(step, ranks - 1)
    ]
""",
            {
                """
def my_moves(ranks, count):
    return list(ring_moves(in_order(ranks, ranks * count)))
""": "does not go from a rank to the next one",
                """
def my_moves(ranks, count):
    return [Move(0, sender, sender + 1, sender, (Span(0, count),)) for sender in range(ranks - 1)]
""": "rank 2 needs keys (Span(start=0, stop=16),) of rank 0, and gets ()",
                """
def my_moves(ranks, count):
    return [Move(0, 0, r, 0, (Span(0, count),)) for r in range(1, ranks)]
""": "rank 2 needs keys (Span(start=0, stop=16),) of rank 1, and gets ()",
            },
        ),
        Exercise(
            """
def sent_nbytes(ranks, tokens, heads, head_size):
    return 6 * (ranks - 1) * tokens * heads * head_size * 4
""",
            {
                """
def sent_nbytes(ranks, tokens, heads, head_size):
    return 4 * (ranks - 1) * tokens * heads * head_size * 4
""": "yours is 8,192 bytes, but rank 0 sent 12,288. Forward alone sends 4,096",
            },
        ),
    ),
    "5_plan_a_model": (
        Exercise(
            "my_strategy = Strategy(Layout(dp=16, tp=2), 512, 2, 8192, zero_stage=1, sequence_parallel=True)",
            {
                "my_strategy = Strategy(Layout(dp=32), 512, 1, 8192, zero_stage=1)": "GiB on its fullest",
                "my_strategy = Strategy(Layout(dp=4, tp=8), 512, 1, 8192)": "It fits, but takes",
                "my_strategy = Strategy(Layout(dp=32), 512, 1, 8192, zero_stage=3)": "stage 3 is not allowed",
                "my_strategy = Strategy(Layout(tp=8), 512, 1, 8192)": "8 ranks, the machine 32 devices",
                "my_strategy = Strategy(Layout(tp=8), 512)": "has 2,097,152 tokens, not 512 x 8,192",
            },
        ),
        Exercise(
            "fewest = 12",
            {
                "fewest = 11": "No layout fits 11 nodes. All devices together have 6,961 GiB, the model",
                "fewest = 13": "13 nodes will do, but so will 12",
            },
        ),
        Exercise(
            "nodes_for_60_days = 64",
            {
                "nodes_for_60_days = 48": "48 is no power of two",
                "nodes_for_60_days = 32": "32 nodes take 66 days",
                "nodes_for_60_days = 128": "64 nodes will do: 33 days",
            },
        ),
    ),
}


def cells(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((COURSE / f"{name}.ipynb").read_text("utf-8"))["cells"]
    return found


def tagged(name: str, *tags: str) -> Iterator[str]:
    """Yield the sources of the cells with all these tags."""
    for cell in cells(name):
        if set(tags) <= set(cell["metadata"].get("tags", ())):
            yield "".join(cell["source"])


@cache
def executed(name: str) -> tuple[dict[str, Any], str]:
    """Run a notebook's cells as shipped, in their order; return the variables and what was printed."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with redirect_stdout(StringIO()) as printed:
        for cell in cells(name):
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"{name}:{cell['id']}", "exec"), names)
    return names, printed.getvalue()


@pytest.mark.parametrize("name", EXERCISES)
def test_a_notebook_runs_as_shipped_and_its_checks_know_right_from_wrong(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names, printed = executed(name)
    exercises = EXERCISES[name]
    assert re.findall(r"^Exercise .*", printed, re.MULTILINE) == [
        f"Exercise {number}: not answered yet." for number in range(1, len(exercises) + 1)
    ]
    for number, exercise in enumerate(exercises, 1):
        (check,) = tagged(name, "check", f"exercise-{number}")
        for answer, words in {**exercise.wrong, exercise.right: f"Exercise {number}: right."}.items():
            exec(answer, names)
            exec(check, names)
            told = capsys.readouterr().out
            assert words in told, answer
            assert ("not yet" in told) == (answer in exercise.wrong), answer


def test_all_stages_of_zero_have_equal_losses() -> None:
    losses = re.findall(r"^stage \d: (0\.\d{6} .*)", executed("2_zero")[1], re.MULTILINE)
    assert len(losses) == 4
    assert len(set(losses)) == 1


@pytest.mark.parametrize("name", EXERCISES)
def test_a_notebook_is_nbformat_4_without_outputs(name: str) -> None:
    book = json.loads((COURSE / f"{name}.ipynb").read_text("utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert set(book) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    for cell in book["cells"]:
        is_code = cell["cell_type"] == "code"
        more = {"outputs", "execution_count"} if is_code else set()
        assert set(cell) == {"cell_type", "id", "metadata", "source", *more}
        assert not is_code or (cell["outputs"], cell["execution_count"]) == ([], None)
    for number in range(1, len(EXERCISES[name]) + 1):
        assert len(list(tagged(name, "answer", f"exercise-{number}"))) == 1


def test_every_notebook_is_tested() -> None:
    assert sorted(EXERCISES) == sorted(path.stem for path in COURSE.glob("*.ipynb"))
