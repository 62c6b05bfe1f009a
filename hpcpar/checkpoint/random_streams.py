"""Named random-number generators that a model brings along, such as those of dropout in split layers.

They are what modules have as `random_streams`, one object often shared by many: anything with a
`state_dict` of byte tensors by stream, and a `load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

PREFIX = "streams/"


def capture(model: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    """Where all of them stand: "streams/<number of the object>/<stream>"."""
    return {
        f"{PREFIX}{number}/{stream}": state.cpu().numpy()
        for number, streams in enumerate(_streams_in(model))
        for stream, state in streams.state_dict().items()
    }


def are_in(saved: Mapping[str, Tensor]) -> bool:
    """Whether a rank's saved states have any."""
    return any(name.startswith(PREFIX) for name in saved)


def restore(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Set those of the model to where `capture` found them; what was not there then stays as it is."""
    for number, streams in enumerate(_streams_in(model)):
        prefix = f"{PREFIX}{number}/"
        names = [name for name in saved if name.startswith(prefix)]
        if names:
            streams.load_state_dict({name.removeprefix(prefix): saved[name] for name in names})


def _streams_in(model: nn.Module) -> list[Any]:
    """Each object once, in the order of modules, which is the same on all ranks."""
    found = (getattr(module, "random_streams", None) for module in model.modules())
    return list({id(streams): streams for streams in found if streams is not None}.values())
