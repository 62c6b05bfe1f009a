"""Options that are numbers: what would leave nothing to measure, or never end, is refused at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(least: int, parse: Callable[[str], int] = int) -> Callable[[str], int]:
    """The type of an option, for argparse: numbers from `least` on."""

    def number(text: str) -> int:
        found = parse(text)
        if found < least:
            raise argparse.ArgumentTypeError(f"{text}: it takes at least {least}")
        return found

    return number
