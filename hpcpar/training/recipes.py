"""Recipes: how well-known models were trained, at full size and scaled to 8 ranks on two cores.

    hpcpar train --recipe                            lists them
    hpcpar train --recipe yi-34b --full --dry-run    memory and bytes of the published run
    hpcpar run -n 8 -- -m hpcpar train --recipe yi-34b

A recipe is a file of the package, an ordinary configuration of the full-size run with two tables more:

    [recipe]          summary, source, machine, notes; perhaps shape, parameters
    [scaled.train]    changes that make it the form for 8 ranks: [scaled.TABLE], [[scaled.stage]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcpar.errors import ConfigError, did_you_mean
from hpcpar.training.config import Config, read_table, read_text
from hpcpar.training.staged import merged, stages_of

DIRECTORY = Path(__file__).parent / "recipes"

SCALED_RANKS = 8
"""Ranks of every scaled form."""


@dataclass(frozen=True)
class Recipe:
    """A published way of training.

    summary      the model, and how it is divided
    source       where sizes and layout are published
    machine      of the full-size run: a name of `hpcpar.planner.cluster`
    stages       of the run asked for: one, or several one after the other
    notes        in what the model or the run differ from the published ones
    shape        the planner's name of the published model, where ours has other layers
    parameters   published; None = they are not
    is_full      the published run; else the form for 8 ranks
    """

    name: str
    summary: str
    source: str
    machine: str
    stages: tuple[Config, ...]
    notes: tuple[str, ...] = ()
    shape: str | None = None
    parameters: float | None = None
    is_full: bool = False


def names() -> list[str]:
    """Return the recipes' names."""
    return sorted(path.stem for path in DIRECTORY.glob("*.toml"))


def recipe(name: str, *, full: bool = False, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe: one of the package by its name, or a file of one's own by its path (….toml).

    full        the published run; else the form for 8 ranks
    overrides   as for a file: train.steps=5
    errors      ConfigError with the list of recipes for an unknown name; for a file that is no recipe
    """
    path = Path(name) if name.endswith(".toml") else DIRECTORY / f"{name}.toml"
    if not name.endswith(".toml") and name not in names():
        hint = did_you_mean(name, names())
        raise ConfigError(f"no recipe is called {name!r}; {hint}there are {', '.join(names())}")
    source = f"recipe {name}"
    table = read_table(read_text(path), source)
    about: dict[str, Any] = table.pop("recipe", {})
    scaled = table.pop("scaled", None)
    wanted = {"summary", "source", "machine"}
    known = wanted | {"notes", "shape", "parameters"}
    if scaled is None or not wanted <= about.keys() <= known:
        raise ConfigError(
            f"{path} is no recipe: it needs the tables [scaled.…] and [recipe] with "
            f"{', '.join(sorted(wanted))}, and may have {', '.join(sorted(known - wanted))}; train a plain "
            "configuration without --recipe"
        )
    stages = stages_of(table if full else merged(table, scaled), source=source, overrides=overrides)
    notes = tuple(about.pop("notes", ()))
    return Recipe(name, stages=stages, notes=notes, is_full=full, **about)


def listing() -> str:
    """Return the recipes, a line each."""
    width = max(map(len, names()))
    return "\n".join(f"{name:{width}}  {recipe(name).summary}" for name in names())
