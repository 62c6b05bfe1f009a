"""Style of the pictures of `hpcpar draw`: a colour for each role, on light or dark, in files of few bytes."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from PIL.Image import Image

WIDTH_INCHES, DPI = 9.0, 100
"""Pictures are 900 px wide, about as wide as a page shows them: a font has its size there."""

Colour = tuple[float, float, float]

FORWARD: Colour = (0.36, 0.60, 0.86)
BACKWARD: Colour = (0.95, 0.60, 0.25)
WEIGHTS: Colour = (0.42, 0.72, 0.38)
COMMUNICATION: Colour = (0.55, 0.40, 0.72)
IDLE: Colour = (0.90, 0.90, 0.90)

STATE_COLOURS = (FORWARD, BACKWARD, WEIGHTS)
"""Of parameters, gradients and optimizer state, as ZeRO's figure 1 has them."""

ACTIVATIONS: Colour = (0.84, 0.36, 0.40)

MEASURED: Colour = (0.45, 0.45, 0.45)
"""Of times and measured figures, where colours are those of parts."""

DARK_PAPER, DARK_INK = 0.09, 0.93
"""Greys that white and black become in a dark picture."""

FRAME_MS = 900
"""How long an animation shows a frame; the last one three times as long."""


class Output(NamedTuple):
    """File of --output, and whether it is light on dark."""

    path: Path
    dark: bool = False


def output_options(
    help_text: str = "A picture (.svg, .png, .pdf).",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options --output and --dark, together its argument `output`: Output | None."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help=help_text)
        @click.option("--dark", is_flag=True, help="The picture is light on dark.")
        @functools.wraps(command)
        def with_output(*arguments: Any, output: Path | None, dark: bool, **others: Any) -> Any:
            return command(*arguments, output=None if output is None else Output(output, dark), **others)

        return with_output

    return decorate


def write(output: Output | None, draw: Callable[[], Figure | Sequence[Figure]], *, err: bool = False) -> None:
    """Draw into the file of --output, where one is given, and say so.

    draw     returns a figure; or, for an animation, one for each frame
    err      say it on standard error, as standard output is for a program
    errors   ClickException for a directory that is not there, an unknown format, or what draw refuses
    """
    if output is None:
        return
    try:
        save(draw(), output)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"--output {output.path}: {error}") from error
    click.echo(f"\nwritten: {output.path}", err=err)


def save(drawn: Figure | Sequence[Figure], output: Output) -> None:
    """Save as PNG, SVG or PDF, by the name, or several figures as GIF; ValueError for another format."""
    from matplotlib import rc_context

    figures = drawn if isinstance(drawn, Sequence) else [drawn]
    if output.dark:
        for each in figures:
            darken(each)
    suffix = output.path.suffix
    if suffix == ".gif" and drawn is figures:
        first, *others = map(_few_colours, figures)
        durations = [FRAME_MS] * len(others) + [3 * FRAME_MS]
        first.save(output.path, save_all=True, append_images=others, duration=durations, loop=0)
    elif suffix == ".png":
        _few_colours(figures[0]).save(output.path, optimize=True)
    else:
        # Numbers as text, and with few fonts' names, else a large SVG has many times its bytes.
        with rc_context({"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans", "sans-serif"]}):
            figures[0].savefig(output.path, format=suffix[1:])  # a name without suffix is no PNG either


def _few_colours(figure: Figure) -> Image:
    """Draw with a palette of 64 colours, which takes a third of the bytes."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    return Image.open(drawn).convert("RGB").quantize(64)


def new_figure(height_inches: float) -> Figure:
    """Make a figure of a page's width."""
    # Imported here, so that nothing but a picture waits for it.
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_INCHES, height_inches), dpi=DPI, layout="constrained")


# --- light on dark --------------------------------------------------------------------------------


def darken(figure: Figure) -> None:
    """Mirror the lightness of a figure's colours: its roles keep their hues, white paper becomes dark."""
    figure.draw_without_rendering()  # now it has its ticks
    for artist in set(figure.findobj()):
        _darken_artist(artist)


def _darken_artist(artist: Artist) -> None:
    from matplotlib import collections, colors, image, lines, patches, text

    if isinstance(artist, (patches.Patch, collections.Collection)):
        face, edge = (mirrored(each) for each in (artist.get_facecolor(), artist.get_edgecolor()))
        artist.set_facecolor(face)
        artist.set_edgecolor(edge)
    elif isinstance(artist, (text.Text, lines.Line2D)):
        artist.set_color(mirrored(artist.get_color(), dimmed=0.0))
    elif isinstance(artist, image.AxesImage):
        values = artist.get_array()
        if values is not None and values.ndim == 3:
            artist.set_data(mirrored(values))
        else:
            shades = artist.get_cmap()(range(256))
            artist.set_cmap(colors.ListedColormap(mirrored(shades)))


def mirrored(colours: Any, *, dimmed: float = 0.3) -> Any:
    """Return RGBA of equal hue and mirrored lightness.

    colours   one, several or an image's, in any form that matplotlib takes
    dimmed    how much of their light the most colourful ones lose, so that light text on them is read
    """
    import numpy as np
    from matplotlib.colors import to_rgba_array

    given = np.asarray(colours)
    rgba = given if given.ndim > 2 else to_rgba_array(colours)
    light, low = rgba[..., :3].max(-1, keepdims=True), rgba[..., :3].min(-1, keepdims=True)
    rgb = rgba[..., :3] + 1 - light - low
    rgb = (DARK_PAPER + (DARK_INK - DARK_PAPER) * rgb) * (1 - dimmed * (light - low))
    found = np.concatenate([rgb, rgba[..., 3:]], axis=-1)
    return found[0] if given.ndim < 2 and len(found) == 1 else found


# --- parts of pictures ----------------------------------------------------------------------------


def patches(colours: Mapping[str, Any]) -> list[Patch]:
    """Return a legend's entries: a patch of each colour with its name."""
    from matplotlib.patches import Patch

    return [Patch(color=colour, label=name) for name, colour in colours.items()]


def legend(figure: Figure, handles: Sequence[Artist], *, columns: int | None = None, title: str = "") -> None:
    """Explain colours below the figure, in a line unless `columns` says otherwise."""
    figure.legend(
        handles=handles,
        title=title or None,
        title_fontsize=8,
        fontsize=8,
        ncols=columns or len(handles),
        loc="outside lower center",
    )


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


def draw_spans(
    axes: Axes, row: int, when: Iterable[tuple[float, float]], colour: Colour, *, height: float = 0.8
) -> None:
    """Draw bars of a row from seconds to seconds, along an axis of milliseconds."""
    places = [(start_s * 1e3, (stop_s - start_s) * 1e3) for start_s, stop_s in when if stop_s > start_s]
    if places:
        axes.broken_barh(
            places, (row - height / 2, height), facecolor=colour, edgecolor="white", linewidth=0.3
        )


LABELLED_RANKS = 8
"""With more ranks a number does not fit into its cell."""


def draw_sent(
    axes: Axes, sent: Sequence[Sequence[int]], *, darkest: float, written: Callable[[int], str]
) -> None:
    """Draw what each rank (row) sends to each (column): the more, the fuller its colour, with its number."""
    axes.imshow(sent, cmap="Blues", vmin=0, vmax=darkest)
    axes.set_xlabel("to rank")
    if len(sent) > LABELLED_RANKS:
        return
    for rank, of_rank in enumerate(sent):
        for to, amount in enumerate(of_rank):
            if amount:
                axes.text(to, rank, written(amount), ha="center", va="center", fontsize=7)
    axes.set_xticks(range(len(sent)))
    axes.set_yticks(range(len(sent)))
