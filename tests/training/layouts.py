"""Layouts drawn so that every pair of features that can be together is in one of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from docs.composition import FEATURES, Options, smallest_layout
from hpcpar.errors import HpcparError
from hpcpar.training import parse
from hpcpar.training.composition import refusal

Choice = Mapping[str, str]
"""By dimension, the name of a feature; "" = none of them."""

Pair = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Drawn:
    """A layout: its features, its options and the ranks that it takes."""

    choice: Choice
    options: Options
    ranks: int

    def __str__(self) -> str:
        return f"{self.ranks} ranks: {', '.join(filter(None, self.choice.values())) or 'nothing'}"


def options_of(choice: Choice) -> Options | None:
    """Return the options of all features together; None where two want different values of a key."""
    values: dict[str, str] = {}
    for dimension, feature in choice.items():
        for option in FEATURES[dimension].get(feature, ()):
            key, _, value = option.partition("=")
            if values.setdefault(key, value) != value:
                return None
    return tuple(f"{key}={value}" for key, value in values.items())


def drawn(choice: Choice, model: Options, ranks: int) -> Drawn | None:
    """Return the layout of a choice; None if it is refused, or takes more ranks."""
    options = options_of(choice)
    if options is None:
        return None
    try:
        config = parse("", source="a layout", overrides=(*model, *options))
        layout = smallest_layout(config)
        if layout.size > ranks or refusal(config, layout) is not None:
            return None
    except HpcparError:
        return None
    return Drawn(choice, options, layout.size)


def pairs_of(choice: Choice) -> set[Pair]:
    return set(map(frozenset, itertools.combinations(choice.items(), 2)))


def pairwise(model: Options, *, ranks: int, seed: int, leave_out: tuple[str, ...] = ()) -> Iterator[Drawn]:
    """Draw layouts until each pair of features is in one of them, unless it is refused by itself.

    leave_out   dimensions of which no feature is taken
    """
    rng = random.Random(seed)
    values = {name: ["", *those] for name, those in FEATURES.items() if name not in leave_out}
    missing = {
        frozenset([(a, one), (b, other)])
        for a, b in itertools.combinations(values, 2)
        for one, other in itertools.product(values[a], values[b])
    }
    for pair in sorted(missing, key=sorted):
        if drawn(dict(sorted(pair)), model, ranks) is None:
            missing.discard(pair)
    while missing:
        pair = rng.choice(sorted(missing, key=sorted))
        best = None
        for _ in range(5):
            candidate = _completed(dict(sorted(pair)), values, missing, model, ranks, rng)
            gain = len(pairs_of(candidate.choice) & missing)
            if best is None or gain > best[0]:
                best = gain, candidate
        assert best is not None
        missing -= pairs_of(best[1].choice)
        yield best[1]


def _completed(
    choice: dict[str, str],
    values: Mapping[str, list[str]],
    missing: set[Pair],
    model: Options,
    ranks: int,
    rng: random.Random,
) -> Drawn:
    """Add a feature of each other dimension, or none: what has most missing pairs of those that can be."""
    found = drawn(choice, model, ranks)
    assert found is not None, "the pair alone can be"
    others = [name for name in values if name not in choice]
    for name in rng.sample(others, len(others)):
        ranked = sorted(
            values[name],
            key=lambda value: -sum(frozenset([item, (name, value)]) in missing for item in choice.items()),
        )
        for value in ranked:
            more = drawn({**choice, name: value}, model, ranks)
            if more is not None:
                choice[name], found = value, more
                break
    return found
