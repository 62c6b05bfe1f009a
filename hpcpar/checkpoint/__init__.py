"""Checkpoints: everything that a run needs to go on bit for bit, in files that are whole or absent.

    <directory>/
        step-00000200/
            model.safetensors        parameters and buffers, by name
            optimizer.safetensors    optimizer state, by parameter name
            random.safetensors       every rank's random-number states
            state.json               step, options, scalars, the caller's `extra`
            manifest.json            size and SHA-256 of each of the others
        step-00000400/               of a run whose parameters or optimizer states are split, sharded or
                                     spread over a pipeline, besides
            model.rank00003.000.safetensors, optimizer.rank00003.000.safetensors, …
                                     rank 3's pieces, flat, and whole tensors of its pipeline position
            pieces.json              which elements of which region of which tensor they are

A checkpoint of one pipeline degree and schedule, tensor-parallel degree, ZeRO stage, precision and number of
ranks loads into any other: names, and shapes of whole tensors, are the same in all.
"""

from __future__ import annotations

from hpcpar.checkpoint.checkpoint_directory import checkpoint_path, latest, read_extra
from hpcpar.checkpoint.load import Loaded, load
from hpcpar.checkpoint.save import PendingSave, save, save_async

__all__ = ["Loaded", "PendingSave", "checkpoint_path", "latest", "load", "read_extra", "save", "save_async"]
