"""`hpcpar draw context`."""

from __future__ import annotations

import pytest

from hpcpar.cli.draw_context import figure_of, planned
from tests.command import Output

COMMAND = ("draw", "context")

ON_TWO = """\
exchange: 8 tokens, causal on 2 ranks

   query    keys of rank
rank 0 0    0 · · · · · · ·
rank 0 1    0 0 · · · · · ·
rank 1 2    0 0 1 · · · · ·
rank 1 3    0 0 1 1 · · · ·
rank 1 4    0 0 1 1 1 · · ·
rank 1 5    0 0 1 1 1 1 · ·
rank 0 6    0 0 1 1 1 1 0 ·
rank 0 7    0 0 1 1 1 1 0 0

        tokens  pairs  to 0  to 1  forward  backward  sent  ring
rank 0       4     18          16        4        12    16    24
rank 1       4     18    20              8        12    20    24

rank 0 holds 0 to 1, 6 to 7
rank 1 holds 2 to 5

all ranks send 36 values, 0.75 of the ring's 48; the busiest computes 1.00 of the mean
"""

ONE_VALUE = ("--heads", "1", "--head-size", "1")


def test_two_ranks_drawn_by_hand(output: Output) -> None:
    assert output("--ranks", "2", "--length", "8", *ONE_VALUE) == ON_TWO


def test_no_document_sees_another_and_their_sum_is_the_length(output: Output) -> None:
    title, _, _, *rows = output("--documents", "3,2", "--ranks", "1", *ONE_VALUE).splitlines()
    assert title == "exchange: 5 tokens, causal, 2 documents on 1 rank"
    assert [row.split("    ")[1] for row in rows[:5]] == [
        "0 · · · ·",
        "0 0 · · ·",
        "0 0 0 · ·",
        "· · · 0 ·",
        "· · · 0 0",
    ]
    assert rows[-1] == "one rank sends nothing"


def test_a_window_and_later_keys(output: Output) -> None:
    told = output("--window", "2", "--full", "--ranks", "1", "--length", "4", *ONE_VALUE)
    assert "4 tokens, full, window of 2 on 1 rank" in told
    assert "1    0 0 0 ·" in told


def test_a_rank_may_have_no_token(output: Output) -> None:
    assert "holds no token" in output("--ranks", "4", "--length", "3")


def test_heads_are_shared_within_two_ranks_and_keys_travel_between_them(output: Output) -> None:
    told = output("--method", "ulysses+ring", "--inner", "2", "--length", "40", "--kv-heads", "2")
    assert "each cell 2 x 2 tokens" in told
    assert "rank 0-1  0    0 " in told
    assert "rank 2-3 10    0 0 0 0 0 2 " in told
    # 10 tokens of 64 in 4 heads of queries and outputs, and 1 of keys and of values; rings of 20 tokens.
    assert "12,800   7,680       0    8,960    11,520  20,480  23,040" in told


@pytest.mark.parametrize(("method", "inner"), [("exchange", None), ("ulysses", None), ("ulysses+ring", 2)])
def test_the_picture_has_the_mask_and_what_is_sent(method: str, inner: int | None) -> None:
    mask = {"length": None, "window": None, "documents": (7, 5), "full": False}
    heads = {"heads": 4, "kv_heads": None, "head_size": 1}
    found = planned(method, 4, inner, False, **mask, **heads)
    pixels, *sends = figure_of(found).axes
    coloured = (pixels.images[0].get_array() < 1).any(axis=-1)
    assert coloured.tolist() == [
        [key <= query and (key < 7) == (query < 7) for key in range(12)] for query in range(12)
    ]
    for axes, traffic in zip(sends, (found.traffic, found.ring), strict=True):
        sums = [
            a + b
            for rows in zip(traffic.forward, traffic.backward, strict=True)
            for a, b in zip(*rows, strict=True)
        ]
        assert [text.get_text() for text in axes.texts] == [str(values) for values in sums if values]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--documents", "3,2", "--length", "6"), "documents of 5 tokens together in a sequence of 6"),
        (("--method", "ulysses", "--heads", "6"), "degrees that fit: 1, 2, 3, 6"),
        (("--method", "ulysses+ring"), "ulysses+ring has two levels: say by --inner"),
        (("--method", "ulysses+ring", "--inner", "3"), "--inner=3 ranks that exchange heads do not divide"),
        (("--inner", "2"), "--inner=2 is for methods with two levels; exchange has one"),
        (("--kv-heads", "3"), "--heads=8 is not a multiple of --kv-heads=3"),
        (("--output", "no/such/directory/x.png"), "no/such/directory/x.png"),
        (("--output", "x.xyz"), "Format 'xyz' is not supported"),
    ],
)
def test_what_cannot_be_drawn_is_named(arguments: tuple[str, ...], words: str, output: Output) -> None:
    assert words in output(*arguments, status=1)


def test_documents_that_are_no_numbers_are_a_usage_error(output: Output) -> None:
    assert "give the tokens of each document, as in 5,3,8" in output("--documents", "5,x", status=2)
