"""Start from a Hugging Face model: sizes from its config.json, tokenizer and parameters from its files.

    [model]
    hugging_face = "models/Qwen3-8B"

Each rank reads the tensors that it has a part of, one at a time: with ZeRO-3 no rank ever holds the model.
Settings of training (dropout, balance losses, capacity, the longest sequence) may be set beside it.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from hpcpar.checkpoint.checkpoint_directory import by_step
from hpcpar.comm import Communicator
from hpcpar.errors import ConfigError, DataError
from hpcpar.models import LlamaConfig
from hpcpar.models.hugging_face_files import OF_TRAINING, read_sizes
from hpcpar.training.config import Config, ModelSection


def with_hugging_face(config: Config, comm: Communicator) -> Config:
    """Return the configuration with the sizes and the tokenizer of `model.hugging_face`. Collective.

    Without that key, or once more: the same configuration.

    errors   PeerFailedError where there is no config.json or tokenizer, or a model that ours does not express
             (on one rank: CheckpointError, DataError, ConfigError); ConfigError for a key that contradicts it
    """
    directory = config.model.hugging_face
    if directory is None:
        return config
    sizes: LlamaConfig | None = None
    with comm.together(f"reading {directory}"):
        if comm.rank == 0:
            sizes = read_sizes(directory)
            if config.data.tokenizer is None and not (directory / "tokenizer.json").is_file():
                raise DataError(
                    f"{directory} has no tokenizer.json; save it by a fast tokenizer's save_pretrained, or "
                    "name a tokenizers file by data.tokenizer"
                )
    found: LlamaConfig = comm.broadcast_object(sizes)
    tokenizer = config.data.tokenizer or directory / "tokenizer.json"
    return config.model_copy(
        update={
            "model": _with_sizes(config.model, found, directory),
            "data": config.data.model_copy(update={"tokenizer": tokenizer}),
        }
    )


def without_reading(config: Config, comm: Communicator, *, resume: bool) -> Config:
    """Return the configuration without the directory where a checkpoint replaces its values. Collective."""
    is_there = False
    if resume and config.model.hugging_face is not None:
        if comm.rank == 0:
            is_there = bool(by_step(config.output.directory / "checkpoints"))
        is_there = comm.broadcast_object(is_there)
    if not is_there:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"hugging_face": None})})


def _with_sizes(section: ModelSection, sizes: LlamaConfig, directory: Path) -> ModelSection:
    """Return the section with all sizes set; ConfigError where one is set that contradicts them."""
    told = {field.name: getattr(sizes, field.name) for field in fields(sizes)}
    experts = told.pop("experts")
    own = {name: getattr(section, name) for name in told if getattr(section, name) is not None}
    own_experts = section.experts.model_dump(exclude_none=True)
    if own_experts and experts is None:
        raise ConfigError(f"model.experts is set, but {directory} is a model without experts; leave it out")
    of_experts = {} if experts is None else asdict(experts)
    _require_of_training(own, told, directory, "model")
    _require_of_training(own_experts, of_experts, directory, "model.experts")
    return section.model_copy(
        update=told | own | {"experts": section.experts.model_copy(update=of_experts | own_experts)}
    )


def _require_of_training(own: dict[str, Any], told: dict[str, Any], directory: Path, table: str) -> None:
    """ConfigError for a size that is set and differs from the directory's."""
    for name, value in own.items():
        if name not in OF_TRAINING and value != told[name]:
            raise ConfigError(
                f"{table}.{name} = {value!r}, but {directory} has {told[name]!r}; leave it out: sizes come "
                "from its config.json"
            )
