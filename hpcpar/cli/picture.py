"""Style of the pictures of `hpcpar draw`: a colour for each role, and files of few bytes."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Colour = tuple[float, float, float]

FORWARD: Colour = (0.36, 0.60, 0.86)
BACKWARD: Colour = (0.95, 0.60, 0.25)
WEIGHTS: Colour = (0.42, 0.72, 0.38)
COMMUNICATION: Colour = (0.55, 0.40, 0.72)
IDLE: Colour = (0.90, 0.90, 0.90)

STATE_COLOURS = (FORWARD, BACKWARD, WEIGHTS)
"""Of parameters, gradients and optimizer state, as ZeRO's figure 1 has them."""

ACTIVATIONS: Colour = (0.84, 0.36, 0.40)


def write(output: Path | None, draw: Callable[[Path], None], *, err: bool = False) -> None:
    """Draw into the file of --output, where one is given, and say so.

    err      say it on standard error, as standard output is for a program
    errors   ClickException for a directory that is not there, or a format that is not known
    """
    if output is None:
        return
    try:
        draw(output)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"--output {output}: {error}") from error
    click.echo(f"\nwritten: {output}", err=err)


def save(figure: Figure, path: Path) -> None:
    """Save as PNG, SVG or PDF, by the file's name; ValueError for another format."""
    from matplotlib import rc_context

    if path.suffix == ".png":
        save_few_colours(figure, path)
        return
    # Numbers as text, and with few fonts' names, else a large SVG has many times its bytes.
    with rc_context({"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans", "sans-serif"]}):
        figure.savefig(path, format=path.suffix[1:])  # a name without suffix is no PNG either


def save_few_colours(figure: Figure, path: Path) -> None:
    """Save as PNG with a palette of 64 colours, in a third of the bytes."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)


def shade(colour: Colour, place: int, stages: int) -> Colour:
    """Lighten a colour: the later of so many stages, the nearer to white."""
    white = 0.65 * place / max(1, stages - 1)
    red, green, blue = (part + (1 - part) * white for part in colour)
    return red, green, blue


def rank_colour(rank: int) -> Colour:
    """Return a rank's colour; after ten ranks they begin again."""
    from matplotlib import colormaps

    red, green, blue = colormaps["tab10"](rank % 10)[:3]
    return red, green, blue


def tidy_rows(axes: Axes, names: list[str]) -> None:
    """Name the rows of a chart of bars, the first one on top, and leave out ticks and frame."""
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
