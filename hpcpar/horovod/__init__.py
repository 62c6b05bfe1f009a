"""Horovod's API on hpcpar's collectives: `import hpcpar.horovod.torch as hvd`, and nothing else changes.

`python -m hpcpar.horovod script.py` runs a script that still says `import horovod.torch`.
"""

from __future__ import annotations

from typing import Any


def run(*arguments: Any, **options: Any) -> Any:
    """Call a function on several ranks that are started for it; see `hpcpar.horovod.runner.run`."""
    from hpcpar.horovod.runner import run as start

    return start(*arguments, **options)
