"""Threads, by the calls of `horovod.runner.util.threads`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: Iterable[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a thread that calls `target(*args)`, and return it.

    daemon   the program's end does not wait for it
    silent   an exception in it ends it without a word
    """
    arguments = tuple(args)

    def quietly() -> None:
        try:
            target(*arguments)
        except Exception:  # what `silent` asks for
            return

    thread = threading.Thread(
        target=quietly if silent else target, args=() if silent else arguments, name=name, daemon=daemon
    )
    thread.start()
    return thread
