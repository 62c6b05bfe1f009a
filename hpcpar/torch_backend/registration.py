"""Tell torch of the backend when it is imported; nothing here starts MPI, or imports much.

torch calls `register` in every process that imports it, so all that costs time is imported when a process
group is made.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

NAME = "hpcpar"


def register() -> None:
    """Make `init_process_group("hpcpar")` known, and `env://` work where nobody named a master's address.

    Called by torch (entry points of the group torch.backends); a second call does nothing.
    """
    from torch import distributed

    if not distributed.is_available() or NAME in distributed.Backend.backend_list:
        return
    distributed.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    handlers = getattr(sys.modules.get("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    if "env" in handlers:
        handlers["env"] = partial(_rendezvous, handlers["env"])


def _create(options: Any, backend_options: Any) -> Any:
    from hpcpar.torch_backend.creation import create

    return create(options, backend_options)


def _rendezvous(by_torch: Any, url: str, *arguments: Any, **options: Any) -> Iterator[Any]:
    from hpcpar.torch_backend.rendezvous import rendezvous

    return rendezvous(by_torch, url, *arguments, **options)
