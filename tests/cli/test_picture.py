"""The style of pictures: light on dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import rgb_to_hsv
from PIL import Image

from hpcpar.cli import picture
from hpcpar.cli.picture import (
    ACTIVATIONS,
    BACKWARD,
    COMMUNICATION,
    FORWARD,
    IDLE,
    MEASURED,
    WEIGHTS,
    mirrored,
)


def luminance(colour: Any) -> float:
    """Relative luminance of sRGB, as WCAG 2 defines it."""
    rgb = np.asarray(colour)[:3]
    linear = np.where(rgb <= 0.03928, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one: Any, other: Any) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_text_is_legible_on_dark_paper_and_on_every_role() -> None:
    ink, paper = mirrored("black"), mirrored("white")
    assert contrast(ink, paper) > 12
    for role in (FORWARD, BACKWARD, WEIGHTS, COMMUNICATION, ACTIVATIONS, IDLE):
        assert contrast(ink, mirrored(role)) > 3, role
    for rank in range(10):
        assert contrast(mirrored(picture.rank_colour(rank)), paper) > 1.5, rank


def test_a_role_keeps_its_hue_and_differs_from_the_others() -> None:
    roles = (FORWARD, BACKWARD, WEIGHTS, COMMUNICATION, ACTIVATIONS, IDLE, MEASURED)
    for role in roles[:5]:
        assert rgb_to_hsv(mirrored(role)[:3])[0] == pytest.approx(rgb_to_hsv(role)[0], abs=0.02)
    dark = [mirrored(role)[:3] for role in roles]
    assert min(np.abs(a - b).max() for i, a in enumerate(dark) for b in dark[:i]) > 0.1


def test_bars_lines_text_and_images_are_all_turned(tmp_path: Path) -> None:
    figure = picture.new_figure(2.0)
    bars, image = figure.subplots(1, 2)
    (bar,) = bars.barh([0], [1], color=FORWARD)
    (line,) = bars.plot([0, 1], [0, 1], color="black")
    shown = image.imshow(np.ones((2, 2, 3)))
    mapped = bars.imshow([[0.0]], cmap="Blues", vmin=0, vmax=1)
    picture.save(figure, picture.Output(tmp_path / "dark.png", dark=True))
    assert bar.get_facecolor() == pytest.approx(tuple(mirrored(FORWARD)))
    assert tuple(line.get_color()) == pytest.approx(tuple(mirrored("black")))
    assert np.asarray(shown.get_array()).max() < 0.3
    assert luminance(mapped.cmap(0.0)) < 0.05
    pixels = np.asarray(Image.open(tmp_path / "dark.png").convert("L"))
    assert np.median(pixels) < 40  # paper
    assert pixels.max() > 200  # text
