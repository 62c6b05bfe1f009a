"""Where rank 0 writes for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from hpcpar.launch.terminal import is_made_by_launcher


def own_console(**options: Any) -> Console:
    """Standard output; without colours, and what is drawn again and again, unless it ends on a terminal."""
    return Console(force_terminal=False if is_made_by_launcher() else None, **options)
