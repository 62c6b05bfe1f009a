"""Approaches compared on one model: exact bytes and memory, and what grows with the batch."""

from __future__ import annotations

import pytest

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import ConfigError, LayoutError
from hpcpar.planner.memory import STATE
from hpcpar.training.comparison import MODEL, Measured, compare

pytestmark = pytest.mark.timeout(300)  # of which most is for machines that do other work, too

SMALL = (
    *("model.hidden_size=16", "model.layers=2", "model.heads=4", "model.kv_heads=2", "model.ffn_size=32"),
    *("train.sequence=16", "train.global_batch=8", "train.microbatch=2"),
)
NAMES = ("data parallel", "ZeRO-2", "tensor parallel", "pipeline")


@pytest.fixture(scope="module")
def found() -> list[Measured]:
    def work(comm: Communicator) -> list[Measured]:
        return compare(MODEL, "test", SMALL, comm, steps=2, only=NAMES)

    return run_loopback(2, work, timeout_s=250)[0]


def test_bytes_and_memory_are_those_of_the_planner(found: list[Measured]) -> None:
    assert [each.name for each in found] == list(NAMES)
    for each in found:
        assert each.beyond == 0
        figures = {line.what: line for line in each.prediction.lines}
        assert all(
            figures[what].predicted == pytest.approx(figures[what].measured, rel=5e-3) for what in STATE
        )
        assert figures["activations"].error == pytest.approx(0, abs=0.02)
        assert figures["bytes sent"].predicted == figures["bytes sent"].measured == 2 * each.nbytes_sent


def test_what_grows_with_the_batch_is_told_apart_from_what_does_not(found: list[Measured]) -> None:
    grows = {each.name: each.twice[0] for each in found if each.twice is not None}
    # A step of ZeRO-2 with k microbatches sends (k + 1)Φ: twice 2 microbatches are 5 Φ in place of 3.
    expected = {"data parallel": 1, "ZeRO-2": 5 / 3, "tensor parallel": 2, "pipeline": 2}
    assert grows == pytest.approx(expected, rel=0.01)


def test_an_approach_that_the_ranks_cannot_take_is_left_out_with_its_reason() -> None:
    said: list[str] = []

    def work(comm: Communicator) -> list[Measured]:
        say = said.append if comm.rank == 0 else lambda text: None
        return compare(MODEL, "test", SMALL, comm, steps=1, only=names, say=say)

    names = ["tensor parallel", "pipeline", "data parallel"]
    found = run_loopback(5, work, timeout_s=250)[0]
    assert [each.name for each in found] == ["data parallel"]
    assert "cannot be: heads=4 does not divide among tp=5 ranks" in "".join(said)
    assert "cannot be: 5 stages for 4 items" in "".join(said)
    names.pop()
    with pytest.raises(LayoutError, match="5 stages for 4 items"):
        run_loopback(5, work, timeout_s=250)


def test_an_unknown_approach_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match="no approach 'data' on 1 ranks; there are 'data parallel', 'ZeRO-1'"
    ):
        compare(MODEL, "test", SMALL, Communicator.alone(), steps=1, only=["data"])
