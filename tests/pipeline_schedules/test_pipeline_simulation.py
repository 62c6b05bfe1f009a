"""Times of actions: counted by hand, exact in fractions, and a published table to every printed digit."""

from __future__ import annotations

from fractions import Fraction

import pytest

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.pipeline_schedules.pipeline_simulation import (
    Durations,
    measured_durations,
    predicted,
    replayed,
    schedule_of,
    simulate,
)
from hpcpar.pipeline_schedules.schedule_registry import METHODS, make
from hpcpar.pipeline_schedules.text import parse
from hpcpar.pipeline_schedules.timetable import Timed, Timetable

SPLIT = """
0F0 0F1 0B0 0W0 0B1
1F0 1B0 1F1 1B1
"""


def spans(timetable: Timetable) -> list[str]:
    return [" ".join(f"{e.action}:{e.start_s}-{e.end_s}" for e in row) for row in timetable.rows]


def test_times_are_those_counted_by_hand() -> None:
    # F 2, B 3, W 1, a hop 1; a B without W takes 4
    assert spans(simulate(parse(SPLIT), Durations(2, 3, 1, 1))) == [
        "0F0:0-2 0F1:2-4 0B0:10-13 0W0:13-14 0B1:16-20",
        "1F0:3-5 1B0:5-9 1F1:9-11 1B1:11-15",
    ]


def test_stages_may_take_different_times() -> None:
    assert spans(simulate(parse(SPLIT), Durations((2, 1), [3, 5], (1, 0)))) == [
        "0F0:0-2 0F1:2-4 0B0:8-11 0W0:11-12 0B1:14-18",
        "1F0:2-3 1B0:3-8 1F1:8-9 1B1:9-14",
    ]


def test_a_hop_is_between_ranks_only_and_passes_while_ranks_work() -> None:
    one_rank = make("naive", 1, 2, stages_per_rank=3)
    assert simulate(one_rank, Durations(1, 1, 1, hop_s=100)).seconds == 2 * 3 * 3
    forwards = Schedule(tuple(row[:4] for row in make("gpipe", 2, 4).rows))
    # Four forwards after each other; each arrives while the next is made.
    assert simulate(forwards, Durations(5, 1, 1, hop_s=5)).seconds == 5 + 5 + 4 * 5


@pytest.mark.parametrize("name", [method.name for method in METHODS.values() if not method.timed])
def test_no_action_starts_before_its_rank_is_free_and_its_needs_have_arrived_nor_waits_longer(
    name: str,
) -> None:
    schedule = make(name, 3, 7)
    durations = Durations(Fraction(3), Fraction(4), Fraction(2), Fraction(1, 3))
    timetable = simulate(schedule, durations)
    assert tuple(tuple(each.action for each in row) for row in timetable.rows) == schedule.rows
    ends = {each.action: each.end_s for row in timetable.rows for each in row}
    home = schedule.rank_of_stage
    for rank, row in enumerate(timetable.rows):
        free = Fraction(0)
        for each in row:
            arrivals = [
                ends[need] + (0 if home[need.stage] == rank else Fraction(1, 3))
                for need in schedule.needs(each.action)
            ]
            assert each.start_s == max([free, *arrivals])
            free = each.end_s


def test_seconds_that_make_no_sense_are_refused() -> None:
    for wrong in (-1, float("nan"), float("inf"), (1, -1)):
        with pytest.raises(ScheduleError, match=r"backward_s has .*: seconds are finite and not negative"):
            Durations(1, wrong, 1)
    with pytest.raises(ScheduleError, match="forward_s has seconds for 3 stages, but the schedule has 2"):
        simulate(parse(SPLIT), Durations((1, 1, 1), 1, 1))


def test_a_schedule_that_cannot_run_has_no_price() -> None:
    right = parse(SPLIT)
    stuck = Schedule((right.rows[0], right.rows[1][::-1]))
    with pytest.raises(ScheduleError, match=r"1B1 \(rank 1, place 0\) cannot start: it needs 1F1"):
        simulate(stuck, Durations())


# Table 5 of Qi et al. 2023, arXiv 2401.10241: milliseconds measured, bubble rates as printed.
PUBLISHED = {
    # p, m, F, B, W, hop, then 1F1B, interleaved with v stages per rank, ZB-H1, ZB-H2
    "1.5 B": (8, 24, 18.522, 18.086, 9.337, 0.601, ".2431", ".1055", 3, ".1585", ".1083"),
    "6.2 B": (8, 24, 29.718, 29.444, 19.927, 0.527, ".2347", ".0808", 4, ".1323", ".0698"),
    "14.6 B": (16, 48, 11.347, 11.248, 8.132, 0.377, ".2552", ".1104", 3, ".1397", ".0672"),
    "28.3 B": (32, 96, 10.419, 10.207, 7.715, 0.408, ".2646", ".1493", 2, ".1421", ".0641"),
}


def digits(rate: float) -> str:
    return f"{rate:.4f}".removeprefix("0")


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_bubble_rates_come_out_to_every_digit(model: str) -> None:
    ranks, microbatches, *milliseconds, one_f_one_b, _, _, h1, h2 = PUBLISHED[model]
    for name, printed in (("1f1b", one_f_one_b), ("zb-h1", h1), ("zb-h2", h2)):
        timetable = simulate(make(name, ranks, microbatches), Durations(*milliseconds))
        assert digits(timetable.bubble_rate) == printed, name


class AsTheAuthorsPriced(Schedule):
    """Interleaved, without some of its needs: those between the last rank and the first.

    The authors' program lets only the first microbatch of each round wait where the loop closes; the others
    start as if they had arrived.
    """

    def needs(self, action: Action) -> tuple[Action, ...]:
        ends = {0, self.ranks - 1}
        return tuple(
            need
            for need in super().needs(action)
            if action.microbatch % self.ranks == 0
            or {need.stage % self.ranks, action.stage % self.ranks} != ends
        )


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_rates_of_interleaved_come_out_too_if_most_waits_for_the_loop_are_left_out(
    model: str,
) -> None:
    ranks, microbatches, forward, backward, weight, hop, _, printed, per_rank, _, _ = PUBLISHED[model]
    durations = Durations(forward / per_rank, backward / per_rank, weight / per_rank, hop)
    schedule = make("interleaved", ranks, microbatches, stages_per_rank=per_rank)
    published = simulate(AsTheAuthorsPriced(schedule.rows), durations)
    assert digits(published.bubble_rate) == printed
    # With all that each action needs, the hops once around the ranks are waited for too.
    assert simulate(schedule, durations).cost_s == pytest.approx(published.cost_s + ranks * hop, rel=1e-9)


def test_32_ranks_with_96_microbatches_are_busy_all_the_time_under_zb_h2() -> None:
    timetable = simulate(make("zb-h2", 32, 96), Durations())
    assert [len(row) for row in timetable.rows] == [3 * 96] * 32
    assert timetable.cost_s == 3 * 96


# --- from a measured run


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_a_priced_schedule_is_found_again_with_its_durations(name: str) -> None:
    schedule = make(name, 2, 4)
    stages = range(schedule.stages)
    # A whole backward is divided evenly.
    given = Durations([2.0 + s for s in stages], [3.0 + s for s in stages], [3.0 + s for s in stages])
    timetable = simulate(schedule, given)
    assert schedule_of(timetable) == schedule
    assert measured_durations(timetable) == given
    assert predicted(timetable) == timetable


def test_one_slow_action_is_idle_time_and_no_one_elses_work() -> None:
    timetable = simulate(make("1f1b", 2, 5), Durations(1.0, 1.0, 1.0))
    (*early, (action, start_s, end_s)), other = timetable.rows
    late = Timetable(((*early, Timed(action, start_s, end_s + 10)), other))
    assert predicted(late) == timetable
    assert late.bubble_rate > timetable.bubble_rate


def test_replaying_leaves_the_idle_time_that_late_actions_make_and_no_other() -> None:
    first, last = simulate(make("1f1b", 2, 5), Durations(1.0, 1.0, 1.0)).rows
    # Rank 1 takes 3 s longer for its first action, and then does nothing for 7 s.
    slow = [Timed(each.action, each.start_s + 3, each.end_s + 3) for each in last]
    slow[0] = Timed(last[0].action, last[0].start_s, last[0].end_s + 3)
    lazy = [slow[0], *(Timed(each.action, each.start_s + 7, each.end_s + 7) for each in slow[1:])]
    found = replayed(Timetable((first, tuple(lazy))))
    assert found.rows[1] == tuple(slow)
    assert found.span_s(0) == simulate(make("1f1b", 2, 5), Durations(1.0, 1.0, 1.0)).span_s(0) + 3


def test_a_pass_without_backward_has_no_durations() -> None:
    forward = Timetable(tuple(row[:1] for row in simulate(make("gpipe", 2, 2), Durations()).rows))
    with pytest.raises(ScheduleError, match="no B of stage 0; give that of a whole training step"):
        measured_durations(forward)
