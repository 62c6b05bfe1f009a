"""Export a checkpoint as a model directory that transformers, vLLM and others read.

<directory>/
    config.json              sizes, type of the parameters, end of text
    model.safetensors        all parameters, whole, under Hugging Face's names
    tokenizer.json, tokenizer_config.json
    generation_config.json   where to stop writing
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from hpcpar.checkpoint import load, read_extra
from hpcpar.checkpoint.files import save_tensors
from hpcpar.comm import Communicator
from hpcpar.data.tokenizer import write_tokenizer
from hpcpar.durable import whole_directory
from hpcpar.errors import CheckpointError, ConfigError, DataError
from hpcpar.models import Llama, LlamaConfig
from hpcpar.models.hugging_face_config import hugging_face_config
from hpcpar.models.hugging_face_files import file_tensors
from hpcpar.training.config import Config

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Exported:
    """An exported model.

    checkpoint   that it was exported from
    step         training steps of the checkpoint
    dtype        of the parameters
    """

    checkpoint: Path
    step: int
    sizes: LlamaConfig
    dtype: str


def export(
    run: Path, directory: Path, *, dtype: str | None = None, tokenizer: Path | None = None
) -> Exported:
    """Write the model of a run's newest checkpoint, or of a checkpoint, into a new directory.

    run         output directory of `hpcpar train`, its `checkpoints`, or one of these
    dtype       of the parameters; None = that of the training. Float32 masters are rounded where training
                kept them
    tokenizer   path of the tokenizers file; None = where the run found it, or bytes. A given file is taken as
                it is; a found one must be the file that the run was trained with

    One process holds the whole model (in float32 where training had 16 bits) once or twice. The files do not
    depend on the axes and the stage that the checkpoint was saved with.

    errors      CheckpointError, DataError; ConfigError where the directory has something in it, and for
                values beyond those of `dtype`
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} is there already; name a new directory, or remove it")
    checkpoints = run / "checkpoints"
    chosen, extra = read_extra(checkpoints if checkpoints.is_dir() else run)
    config = _config_of(chosen, extra)
    dtype = dtype or config.train.precision
    with whole_directory(directory) as staging:
        # The model learnt this end of a document, wherever its tokenizer's file is now.
        learnt = extra.get("end_of_document")
        spoken = write_tokenizer(
            tokenizer or config.data.tokenizer,
            staging,
            end_of_document=config.data.eos_token if learnt is None else learnt,
        )
        if tokenizer is None and spoken.identity != extra.get("tokenizer", spoken.identity):
            raise DataError(
                f"the tokenizer {config.data.tokenizer} is not what the model was trained with: the file "
                "has changed since; name by --tokenizer the one that was, or this one if it makes the same"
            )
        sizes = config.model_config_for(spoken.vocabulary)
        model = Llama(sizes, seed=None)
        if config.train.precision == "float64":
            model.double()
        loaded = load(chosen, model=model, comm=Communicator.alone(), restore_random=False)
        for name, parameter in model.named_parameters():
            if (parameter.isfinite() & ~parameter.to(DTYPES[dtype]).isfinite()).any():
                raise ConfigError(f"{name} has values beyond {dtype}'s; take --dtype bfloat16 or float32")
        model.to(DTYPES[dtype])
        save_tensors(file_tensors(model), staging / "model.safetensors", metadata={"format": "pt"})
        end = spoken.end_of_document
        _write(staging / "config.json", hugging_face_config(sizes, dtype=dtype, end_of_document=end))
        _write(staging / "generation_config.json", {} if end is None else {"eos_token_id": end})
    return Exported(chosen, loaded.step, sizes, dtype)


def _config_of(chosen: Path, extra: dict[str, object]) -> Config:
    try:
        return Config.model_validate(extra["config"])
    except (KeyError, ValidationError) as error:
        raise CheckpointError(
            f"{chosen} was not saved by this version's `hpcpar train`, whose configuration it should hold: "
            f"{error}"
        ) from error


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
