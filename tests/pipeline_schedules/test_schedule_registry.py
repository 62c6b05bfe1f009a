"""Schedules by name: what each allows, and what an unknown name or an impossible wish is told."""

from __future__ import annotations

from typing import Any

import pytest

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.pipeline_simulation import Durations
from hpcpar.pipeline_schedules.proof import peak_chunks
from hpcpar.pipeline_schedules.schedule_registry import METHODS, find, make

STAGES = {
    "naive": "1 or more",
    "gpipe": "1 or more",
    "1f1b": "1",
    "eager-1f1b": "1",
    "interleaved": "2 or more",
    "zb-h1": "1",
    "zb-h2": "1",
    "zb-v": "2",
    "dualpipe-v": "2",
    "automatic": "1",
}


def test_every_name_has_its_stages_and_a_source() -> None:
    assert {name: method.allowed_stages for name, method in METHODS.items()} == STAGES
    assert all(method.name == name and method.summary and method.source for name, method in METHODS.items())
    assert [name for name, method in METHODS.items() if method.placement == "v"] == ["zb-v", "dualpipe-v"]


@pytest.mark.parametrize("name", METHODS)
def test_a_schedule_has_its_methods_name_and_its_own_stages_if_none_are_asked_for(name: str) -> None:
    schedule = make(name, 3, 4, durations=Durations())
    assert schedule.name == name
    assert schedule.stages == 3 * find(name).stages_per_rank
    assert schedule == make(name, 3, 4, stages_per_rank=find(name).stages_per_rank, durations=Durations())


@pytest.mark.parametrize(
    ("wrong", "near"), [("1F1B", "1f1b"), ("zb_h1", "zb-h1"), ("dualpipe", "dualpipe-v"), ("zbv", "zb-v")]
)
def test_an_unknown_name_is_told_the_near_ones(wrong: str, near: str) -> None:
    with pytest.raises(
        ScheduleError, match=f"no pipeline schedule '{wrong}': did you mean .*{near}.* there are"
    ):
        make(wrong, 2, 2)


def test_a_name_near_to_none_is_told_all() -> None:
    with pytest.raises(ScheduleError, match=f"no pipeline schedule 'xyz': there are {', '.join(METHODS)}"):
        make("xyz", 2, 2)


@pytest.mark.parametrize(
    ("name", "per_rank", "told"),
    [
        (
            "1f1b",
            2,
            "1f1b with 2 stages per rank: it has 1; with 2 there are naive, gpipe, interleaved, zb-v",
        ),
        ("interleaved", 1, "interleaved with 1 stages per rank: it has 2 or more; with 1 there are naive"),
        ("zb-v", 3, "zb-v with 3 stages per rank: it has 2; with 3 there are naive, gpipe, interleaved"),
        ("gpipe", 0, "gpipe with 0 stages per rank: it has 1 or more$"),
    ],
)
def test_stages_that_a_method_cannot_have_are_refused_with_those_that_can(
    name: str, per_rank: int, told: str
) -> None:
    with pytest.raises(ScheduleError, match=told):
        make(name, 2, 2, stages_per_rank=per_rank)


@pytest.mark.parametrize(
    ("counts", "what"),
    [
        ((0, 1, 1), "ranks 0"),
        ((2.0, 4, None), "ranks 2.0"),
        ((1, 0, 1), "microbatches 0"),
        ((2, 8 / 2, None), "microbatches 4.0"),
        ((1, 1, 0), "memory_limit 0"),
        ((1, 1, "2"), "memory_limit '2'"),
    ],
)
def test_counts_below_one_and_what_is_no_integer_are_refused(counts: tuple[Any, Any, Any], what: str) -> None:
    ranks, microbatches, limit = counts
    with pytest.raises(ScheduleError, match=f"1f1b with {what}: give an integer, at least 1"):
        make("1f1b", ranks, microbatches, memory_limit=limit)


@pytest.mark.parametrize("name", METHODS)
def test_a_memory_limit_is_kept_or_refused(name: str) -> None:
    method = find(name)
    needed = max(peak_chunks(make(name, 4, 8, durations=Durations())))
    for limit in range(1, needed + 1):
        if method.limited and limit >= method.stages_per_rank:
            schedule = make(name, 4, 8, memory_limit=limit, durations=Durations())
            assert max(peak_chunks(schedule)) <= limit
        elif limit < needed:
            with pytest.raises(ScheduleError, match=f"limit is {limit}: raise"):
                make(name, 4, 8, memory_limit=limit)


def test_a_method_that_looks_at_durations_must_be_given_them() -> None:
    with pytest.raises(ScheduleError, match="automatic is made for given durations, but has none"):
        make("automatic", 2, 4)
