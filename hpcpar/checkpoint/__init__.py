"""Checkpoints: everything a run needs to go on bit for bit, in files that are whole or absent.

<directory>/
    step-00000200/
        model.safetensors        parameters and buffers, by name
        optimizer.safetensors    optimizer state, by parameter name
        random.safetensors       every rank's random-number states
        state.json               step, options, scalars, the caller's own notes
        manifest.json            bytes and SHA-256 of each of the others
    step-00000400/ …
"""

from __future__ import annotations

from hpcpar.checkpoint.catalogue import checkpoint_path, latest
from hpcpar.checkpoint.load import Loaded, load
from hpcpar.checkpoint.save import save

__all__ = ["Loaded", "checkpoint_path", "latest", "load", "save"]
