"""Checkpoints: everything a run needs to go on bit for bit, in files that are whole or absent.

<directory>/
    step-00000200/
        model.safetensors        parameters and buffers, by name
        optimizer.safetensors    optimizer state, by parameter name
        random.safetensors       every rank's random-number states
        state.json               step, options, scalars, the caller's own notes
        manifest.json            bytes and SHA-256 of each of the others
    step-00000400/               of a run whose parameters or optimizer states are split, in pieces or spread
                                 over a pipeline, besides
        model.rank00003.000.safetensors, optimizer.rank00003.000.safetensors, …
                                 rank 3's pieces, flat, and what only its position in the pipeline has
                                 whole, in its shape
        pieces.json              which elements of which part of which tensor they are

What was saved by one pipeline-parallel degree and schedule, one tensor-parallel degree, one stage of ZeRO,
one precision and one number of ranks is loaded into any others: names, and shapes of whole tensors, are the
same in all. A pipeline's ranks use the names of the whole model, and tell in `tied_names` what that has once
and two of them have (see `model_state`).
"""

from __future__ import annotations

from hpcpar.checkpoint.catalogue import checkpoint_path, latest
from hpcpar.checkpoint.choice import read_extra
from hpcpar.checkpoint.load import Loaded, load
from hpcpar.checkpoint.save import save

__all__ = ["Loaded", "checkpoint_path", "latest", "load", "read_extra", "save"]
