"""Negotiation of all ranks in one process: whatever they ask for and when, their books stay alike."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpar.horovod.negotiation import (
    BATCHES_REMEMBERED,
    RECORD_NBYTES,
    Negotiation,
    ReadyRequest,
    TensorRequest,
)


def request(name: str, **told: object) -> TensorRequest:
    fixed = {"kind": "allreduce", "dtype": "float32", "shape": (4,), "op": "sum"} | told
    return TensorRequest(name, **fixed)  # type: ignore[arg-type]


class Ranks:
    """All ranks' negotiations; a round is done as the engine does it, by AND of the records."""

    def __init__(self, size: int) -> None:
        self.of = [Negotiation(size) for _ in range(size)]

    def begin(self) -> bytes:
        records = [negotiation.record() for negotiation in self.of]
        assert {len(record) for record in records} == {RECORD_NBYTES}
        common = records[0]
        for record in records:
            common = bytes(a & b for a, b in zip(common, record, strict=True))
        return common

    def end(self, common: bytes, then: random.Random | None = None) -> list[ReadyRequest]:
        """Return what is ready, which must be the same on all ranks."""
        answers = [negotiation.conclude(common) for negotiation in self.of]
        told_more = {answer is None for answer in answers}
        assert len(told_more) == 1, "all ranks must tell each other more, or none"
        if told_more == {True}:
            news = [negotiation.proposal() for negotiation in self.of]
            answers = [negotiation.conclude_proposals(news) for negotiation in self.of]
        seen = [[(one.request.name, one.error) for one in answer or []] for answer in answers]
        assert all(one == seen[0] for one in seen), "the same is ready everywhere, in the same order"
        books = [
            ({name: dict(asked) for name, asked in one.heard.items()}, one.joined, one.last_joined)
            for one in self.of
        ]
        assert all(book == books[0] for book in books), "the books are alike"
        return list(answers[0] or [])

    def round(self) -> list[ReadyRequest]:
        return self.end(self.begin())

    def end_join(self) -> int | None:
        lasts = {negotiation.end_join() for negotiation in self.of}
        assert len(lasts) == 1
        return lasts.pop()

    def names(self) -> list[str]:
        """Return the names that a round makes ready, none of them with an error."""
        found = self.round()
        assert [one.error for one in found] == [None] * len(found)
        return [one.request.name for one in found]


# Drawn in the module's docstring.
#
#   rank 0   asks a b            round 1: {a b}      nothing but b      round 2: {}    a
#   rank 1   asks b, later a     round 1: {b}                           round 2: {a c}     c waits for rank 0


def test_what_is_asked_step_after_step_is_worked_out_once():
    negotiation = Negotiation(1)

    def step(*requests: TensorRequest) -> list[ReadyRequest]:
        for one in requests:
            negotiation.ask(one)
        found = negotiation.conclude(negotiation.record())
        assert found is not None
        return found

    first = step(request("b"), request("a"))
    assert [one.request for one in first] == [request("a"), request("b")]
    assert step(request("b"), request("a")) is first
    for changed in (request("b", shape=(5,)), request("b", op="max"), request("b", postscale=2.0)):
        assert [one.request for one in step(changed, request("a"))] == [request("a"), changed]
    assert step() == []
    assert [one.request for one in step(request("a"))] == [request("a")]
    assert step(request("b"), request("a")) is first, "others came in between"


def test_what_is_remembered_is_bounded_and_what_has_a_number_is_not():
    negotiation = Negotiation(1)

    def step(one: TensorRequest) -> list[ReadyRequest] | None:
        negotiation.ask(one)
        return negotiation.conclude(negotiation.record())

    first = step(request("a"))
    for number in range(1, 3 * BATCHES_REMEMBERED):
        step(request(f"noname.{number}")._replace(serial=number))
    assert step(request("a")) is first
    for number in range(BATCHES_REMEMBERED):
        step(request(f"b{number}"))
    again = step(request("a"))
    assert again == first
    assert again is not first


def test_the_drawn_example():
    ranks = Ranks(2)
    ranks.of[0].ask(request("a"))
    ranks.of[0].ask(request("b"))
    ranks.of[1].ask(request("b"))
    assert ranks.names() == ["b"]
    ranks.of[1].ask(request("a"))
    ranks.of[1].ask(request("c"))
    assert ranks.names() == ["a"]
    assert [negotiation.missing("c") for negotiation in ranks.of] == [(0,), (0,)]
    assert ranks.of[0].missing("a") == ()
    ranks.of[0].ask(request("c"))
    assert ranks.names() == ["c"]
    assert ranks.names() == []


def test_equal_requests_are_ready_after_one_comparison_in_any_order():
    ranks = Ranks(3)
    for number, negotiation in enumerate(ranks.of):
        for name in random.Random(number).sample("abcdef", 6):
            negotiation.ask(request(name))
    common = ranks.begin()
    found = [negotiation.conclude(common) for negotiation in ranks.of]
    assert None not in found
    assert {tuple(one.request.name for one in ready or []) for ready in found} == {tuple("abcdef")}


def test_a_round_without_news_is_over_after_one_comparison():
    ranks = Ranks(4)
    common = ranks.begin()
    assert [negotiation.conclude(common) for negotiation in ranks.of] == [[]] * 4


def test_has_news_until_it_has_been_told():
    (negotiation,) = Ranks(1).of
    assert not negotiation.has_news
    negotiation.ask(request("a"))
    assert negotiation.has_news
    negotiation.record()
    assert not negotiation.has_news


OTHER = [
    {"kind": "allgather"},
    {"dtype": "float64"},
    {"shape": (5,)},
    {"shape": (2, 2)},
    {"shape": ()},
    {"device": "GPU"},
    {"op": "max"},
    {"root": 1},
    {"prescale": 2.0},
    {"postscale": 0.5},
    {"content": "other"},
    {"group": ("x", 1)},
]


@pytest.mark.parametrize("other", OTHER, ids=str)
def test_requests_that_do_not_fit_have_other_digests_and_are_objected_to_naming_both_sides(other):
    ranks = Ranks(3)
    for number, negotiation in enumerate(ranks.of):
        negotiation.ask(request("x", **(other if number == 1 else {})))
    (found,) = ranks.round()
    assert request("x").digest != request("x", **other).digest
    assert found.error is not None
    assert found.error.startswith("x: mismatched")
    assert "ranks 0, 2" in found.error
    assert "rank 1 " in found.error


@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
def test_first_dimensions_may_differ_where_rows_are_gathered(kind):
    few, many = request("x", kind=kind, shape=(1, 3)), request("x", kind=kind, shape=(70, 3))
    assert few.digest == many.digest
    assert request("x", kind=kind, shape=(3, 1)).digest != few.digest
    assert request("x", kind=kind, shape=(3,)).digest != request("x", kind=kind, shape=(3, 3)).digest
    assert request("x", kind=kind, shape=()).digest != request("x", kind=kind, shape=(3,)).digest


def test_texts_call_ranks_by_their_numbers_in_the_job():
    of = [Negotiation(2, (3, 7)) for _ in range(2)]
    for number, negotiation in enumerate(of):
        negotiation.ask(request("x", kind="broadcast", op="", root=number))
        negotiation.record()
    news = [negotiation.proposal() for negotiation in of]
    (found,) = of[0].conclude_proposals(news)
    for word in ("rank 3 named root 3", "rank 7 named root 7"):
        assert word in str(found.error)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3)), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_operations_without_names_look_alike_only_in_the_same_order(given_, chance):
    """Their numbers count: [2] then [3] is not [3] then [2], although the same is asked for."""
    other = list(given_)
    chance.shuffle(other)

    def digest_of(asked):
        numbered = enumerate(asked, start=1)
        return [
            request(f"allreduce.noname.{number}", shape=(length,), dtype=dtype, serial=number)
            for number, (dtype, length) in numbered
        ]

    ranks = Ranks(2)
    for negotiation, asked in zip(ranks.of, (given_, other), strict=True):
        for one in digest_of(asked):
            negotiation.ask(one)
    found = {one.request.name: one.error for one in ranks.round()}
    for number, (mine, theirs) in enumerate(zip(given_, other, strict=True), start=1):
        assert (found[f"allreduce.noname.{number}"] is None) == (mine == theirs)


def test_numbers_are_told_apart_however_they_add_up():
    chosen = [{1, 4}, {2, 3}, {5}, {1, 2, 3}, {6}, {2, 4}, {1, 5}, {3}, {1, 2}, {7}, {3, 4}]
    digests = [sum(request(f"allreduce.noname.{n}", serial=n).digest for n in numbers) for numbers in chosen]
    assert len({digest % (1 << 128) for digest in digests}) == len(chosen)


def test_unnamed_operations_of_two_kinds_with_one_number_are_an_error_everywhere():
    ranks = Ranks(3)
    for number, negotiation in enumerate(ranks.of):
        kind = "allgather" if number == 0 else "allreduce"
        negotiation.ask(request(f"{kind}.noname.1", kind=kind, serial=1))
    found = ranks.round()
    assert {one.request.name for one in found} == {"allgather.noname.1", "allreduce.noname.1"}
    for one in found:
        for word in ("allgather", "allreduce", "rank 0", "ranks 1, 2"):
            assert word in str(one.error)
    assert ranks.of[0].heard == {}


def test_operations_of_two_kinds_with_one_number_wait_until_it_is_certain():
    """Rank 2 may have asked for neither yet; it is an error, but of all three."""
    ranks = Ranks(3)
    for number, kind in enumerate(["allgather", "allreduce"]):
        ranks.of[number].ask(request(f"{kind}.noname.1", kind=kind, serial=1))
    assert ranks.round() == []
    ranks.of[2].ask(request("allreduce.noname.1", serial=1))
    assert all(one.error for one in ranks.round())


# ------------------------------------------------------------------- groups


@pytest.mark.parametrize("others", [3, 0], ids=["of three", "no group"])
def test_groups_of_one_name_that_differ_are_an_error_everywhere(others):
    ranks = Ranks(3)
    for number, negotiation in enumerate(ranks.of):
        for one in group_of("g", 2 if number == 1 else others) or [request("g")]:
            negotiation.ask(one)
    found = ranks.round()
    assert len(found) == 2 + (others or 1)
    for one in found:
        for word in ("g: mismatched groups", "rank 1", "a group of 2", "ranks 0, 2"):
            assert word in str(one.error)
    assert ranks.of[0].heard == {}


def test_groups_of_one_name_may_be_under_way_together():
    """Rank 1 has not come to the second one yet."""
    ranks = Ranks(2)
    for one in [*group_of("g", 2), *group_of("g", 3)]:
        ranks.of[0].ask(one)
    for one in group_of("g", 2):
        ranks.of[1].ask(one)
    assert ranks.names() == ["g_1of2", "g_2of2"]
    for one in group_of("g", 3):
        ranks.of[1].ask(one)
    assert ranks.names() == ["g_1of3", "g_2of3", "g_3of3"]


def group_of(name: str, count: int, **told: object) -> list[TensorRequest]:
    return [
        request(f"{name}_{number}of{count}", group=(name, count), **told) for number in range(1, count + 1)
    ]


def test_a_group_is_ready_as_a_whole():
    ranks = Ranks(2)
    for one in group_of("g", 3):
        ranks.of[0].ask(one)
    assert ranks.names() == []
    for one in group_of("g", 3):
        ranks.of[1].ask(one)
    assert ranks.names() == ["g_1of3", "g_2of3", "g_3of3"]


def test_a_group_of_which_one_member_does_not_fit_is_settled_at_once():
    ranks = Ranks(2)
    for number, negotiation in enumerate(ranks.of):
        for one in group_of("g", 2):
            fits = one.name != "g_2of2" or number == 0
            negotiation.ask(one if fits else one._replace(shape=(9,)))
    found = {one.request.name: one.error for one in ranks.round()}
    assert found.keys() == {"g_1of2", "g_2of2"}
    assert "[9]" in str(found["g_2of2"])
    assert all(negotiation.heard == {} for negotiation in ranks.of)


def test_a_member_of_a_group_against_one_alone_is_an_error_that_waits_for_nobody():
    ranks = Ranks(2)
    for one in group_of("g", 2):
        ranks.of[0].ask(one)
    ranks.of[1].ask(request("g_1of2"))
    (found,) = [one for one in ranks.round() if one.request.name == "g_1of2"]
    assert "group" in str(found.error)


# ------------------------------------------------------------------- join


def test_who_has_joined_is_not_waited_for():
    ranks = Ranks(3)
    ranks.of[2].join()
    for negotiation in ranks.of[:2]:
        negotiation.ask(request("a"))
    assert ranks.names() == ["a"]
    assert ranks.end_join() is None
    assert ranks.of[0].missing("a") == ()
    ranks.of[0].join()
    ranks.of[1].ask(request("b"))
    assert ranks.names() == ["b"]
    ranks.of[1].join()
    assert ranks.names() == []
    assert ranks.end_join() == 1
    for negotiation in ranks.of:
        negotiation.ask(request("c"))
    assert ranks.names() == ["c"]
    assert ranks.end_join() is None


def test_who_joins_completes_what_waited_for_him_alone():
    ranks = Ranks(2)
    ranks.of[0].ask(request("a"))
    assert ranks.names() == []
    ranks.of[1].join()
    assert ranks.names() == ["a"]


def test_joining_during_a_round_is_for_the_next_round():
    ranks = Ranks(2)
    for negotiation in ranks.of:
        negotiation.ask(request("a"))
    common = ranks.begin()
    ranks.of[1].join()
    assert [one.request.name for one in ranks.end(common)] == ["a"]
    assert ranks.of[0].joined == set()
    ranks.names()
    assert ranks.of[0].joined == {1}


def test_what_is_asked_and_then_joined_during_a_round_counts():
    """Rank 1 asks for b and joins while the round in which rank 0 tells of b is under way."""
    ranks = Ranks(2)
    ranks.of[0].ask(request("b"))
    common = ranks.begin()
    ranks.of[1].ask(request("b"))
    ranks.of[1].join()
    assert ranks.end(common) == []
    (found,) = ranks.round()
    assert found.error is None
    assert ranks.of[0].joined == {1}
    assert ranks.of[0].heard == {}


JOINED = [("allgather", ""), ("broadcast", ""), ("alltoall", ""), ("reducescatter", "sum")]
JOINED += [("allreduce", op) for op in ("min", "max", "product", "adasum")]


@pytest.mark.parametrize(("kind", "op"), JOINED)
def test_what_zeros_cannot_stand_for_is_an_error_that_names_who_has_joined(kind, op):
    ranks = Ranks(3)
    ranks.of[1].join()
    for number in (0, 2):
        ranks.of[number].ask(request("x", kind=kind, op=op))
    (found,) = ranks.round()
    assert "rank 1 had joined" in str(found.error)
    assert kind in str(found.error)


@pytest.mark.parametrize("kind", ["barrier", "schedule"])
def test_barriers_do_not_wait_for_who_has_joined(kind):
    ranks = Ranks(2)
    ranks.of[1].join()
    ranks.of[0].ask(TensorRequest("x", kind))
    assert ranks.names() == ["x"]


# ------------------------------------------------------------------- properties


@settings(deadline=None, max_examples=150)
@given(data=st.data(), size=st.integers(1, 5))
def test_whatever_the_order_everything_is_ready_once_and_in_the_same_order(data, size):
    """Ranks ask in orders of their own, a few at a time, also during a round; for groups at once."""
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    calls = [[request(f"op{number}")] for number in range(data.draw(st.integers(0, 12)))]
    calls += [group_of(f"g{number}", number + 1) for number in range(data.draw(st.integers(0, 3)))]
    left = [chance.sample(calls, len(calls)) for _ in range(size)]
    ranks = Ranks(size)

    def ask_some(limit: int) -> None:
        for negotiation, mine in zip(ranks.of, left, strict=True):
            for _ in range(min(chance.randrange(limit + 1), len(mine))):
                for one in mine.pop():
                    negotiation.ask(one)

    order: list[str] = []
    for _ in range(300):
        ask_some(3)
        common = ranks.begin()
        ask_some(2)
        found = ranks.end(common)
        order += [one.request.name for one in found]
        together = Counter(one.request.group for one in found if one.request.group)
        assert all(group[1] == count for group, count in together.items()), "a group is ready as a whole"
        if len(order) == sum(map(len, calls)) and not any(left):
            break
    assert Counter(order) == Counter(one.name for call in calls for one in call)
    assert all(negotiation.heard == {} for negotiation in ranks.of)


class Epoch:
    """Ranks with so many steps each: a rank asks for one, waits for it, and joins when it has done all."""

    def __init__(self, ranks: Ranks, chance: random.Random) -> None:
        self.ranks, self.chance = ranks, chance
        self.steps = [chance.randrange(4) for _ in ranks.of]
        self.asked = [0 for _ in ranks.of]
        self.waiting: list[str | None] = [None for _ in ranks.of]
        self.joined: set[int] = set()
        self.done: list[tuple[str, list[int]]] = []

    def act(self) -> None:
        """Some of the ranks that do not wait go on."""
        for rank, negotiation in enumerate(self.ranks.of):
            if self.waiting[rank] is not None or rank in self.joined or self.chance.random() < 0.4:
                continue
            if self.asked[rank] < self.steps[rank]:
                name = self.waiting[rank] = f"step{self.asked[rank]}"
                self.asked[rank] += 1
                negotiation.ask(request(name))
            else:
                self.joined.add(rank)
                negotiation.join()

    def round(self) -> int | None:
        """One round, during which ranks act as well; who joined last, once all have."""
        self.act()
        common = self.ranks.begin()
        self.act()
        for one in self.ranks.end(common):
            assert one.error is None
            name = one.request.name
            self.done.append((name, [r for r, waited in enumerate(self.waiting) if waited == name]))
            self.waiting = [None if waited == name else waited for waited in self.waiting]
        return self.ranks.end_join()


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 5), epochs=st.integers(1, 3))
def test_joins_at_any_time_leave_the_books_alike_and_every_step_counted_once(seed, size, epochs):
    """Each step is done by exactly the ranks that have it, and the last to join had the most."""
    chance = random.Random(seed)
    ranks = Ranks(size)
    for _ in range(epochs):
        epoch = Epoch(ranks, chance)
        last = next(last for last in (epoch.round() for _ in range(400)) if last is not None)
        steps = epoch.steps
        assert steps[last] == max(steps)
        assert epoch.done == [
            (f"step{step}", [r for r in range(size) if steps[r] > step]) for step in range(max(steps))
        ]


@settings(deadline=None, max_examples=100)
@given(data=st.data(), size=st.integers(2, 5))
def test_a_mismatch_is_the_same_error_everywhere_and_spares_the_others(data, size):
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    names = [f"op{number}" for number in range(6)]
    wrong = {chance.choice(names): chance.randrange(size) for _ in range(2)}
    ranks = Ranks(size)
    left = [chance.sample(names, len(names)) for _ in range(size)]
    found: dict[str, str | None] = {}
    for _ in range(100):
        for rank, (negotiation, mine) in enumerate(zip(ranks.of, left, strict=True)):
            for _ in range(min(chance.randrange(3), len(mine))):
                name = mine.pop()
                negotiation.ask(request(name, shape=(9,) if wrong.get(name) == rank else (4,)))
        for one in ranks.round():
            assert one.request.name not in found
            found[one.request.name] = one.error
    assert found.keys() == set(names)
    for name, error in found.items():
        assert (error is not None) == (name in wrong)
        if error is not None:
            assert f"rank {wrong[name]} sent a tensor of shape [9]" in error
            assert "[4]" in error


def test_the_book_stays_small_however_many_names_there_are():
    ranks = Ranks(2)
    for number in range(2000):
        for negotiation in ranks.of:
            negotiation.ask(request(f"a{number}"))
            negotiation.ask(request(f"b{number}"))
        assert ranks.names() == [f"a{number}", f"b{number}"]
    for negotiation in ranks.of:
        kept = {name: value for name, value in vars(negotiation).items() if hasattr(value, "__len__")}
        assert all(len(value) <= 512 for value in kept.values()), kept.keys()
