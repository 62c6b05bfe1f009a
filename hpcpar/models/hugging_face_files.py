"""Hugging Face: parameters of a model directory, read into our models.

    model = Llama(read_sizes("models/Mixtral-8x7B"), layers, seed=None)
    read_parameters(model, "models/Mixtral-8x7B", world)        # each rank what it holds; then the optimizer

A rank opens the files of those parameters alone that it has: its stage's layers, its own experts. Names are
ours but for Mixtral's experts:

    …layers.N.mlp.gate                              …layers.N.block_sparse_moe.gate
    …layers.N.mlp.experts.E.{gate,up,down}_proj     …layers.N.block_sparse_moe.experts.E.{w1,w3,w2}

The library `transformers` is not needed here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hpcpar.errors import CheckpointError, ConfigError
from hpcpar.models.hugging_face_config import model_type, sizes_from_hugging_face
from hpcpar.models.llama import EMBEDDING, HEAD, Llama
from hpcpar.planner.shapes import LlamaConfig
from hpcpar.tensor_parallel import own_shard

if TYPE_CHECKING:
    from hpcpar.comm import Communicator
    from hpcpar.models.llama_stages import LlamaStages

OF_TRAINING = frozenset(
    {
        *("max_sequence", "initial_std", "dropout"),
        *("capacity_factor", "drop", "balance_loss", "balance_over", "z_loss", "bias_rate"),
    }
)
"""Fields of the sizes that may differ from the files': without dropping, they change no logits."""

BIAS = "e_score_correction_bias"
"""Name of the buffer [E] of a router that selects experts by scores and biases."""

WHOLE = "model.safetensors"

MAX_OPEN_FILES = 16

MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def read_sizes(directory: Path | str) -> LlamaConfig:
    """Return the sizes of the model in a directory; as `sizes_from_hugging_face`.

    errors   CheckpointError where there is no config.json; ConfigError for one of a model that is not ours
    """
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; name the directory of a model") from error
    try:
        return sizes_from_hugging_face(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


@torch.no_grad()
def read_parameters(model: Llama | LlamaStages, directory: Path | str, comm: Communicator) -> None:
    """Fill the parameters and biases of a model, or of a rank's part of it, from a directory. Collective.

    comm     the ranks that hold the model; each reads what it has, once
    errors   ConfigError where the model computes something else than the directory's; CheckpointError where
             files lack a parameter, have one too many or one of another shape, or cannot be read; on all
             ranks
    """
    value_of = stored_values(model.config, directory, comm)
    with comm.together(f"reading {directory}"):
        for name, target in _targets(model, file_names(model.config)):
            value = value_of(name)
            if target is not None:
                target.copy_(own_shard(target, value))
            elif value.any():
                raise ConfigError(
                    f"{directory} has biases that select experts, and the model, of bias_rate=0, has "
                    "none; make it with the sizes of read_sizes"
                )


def stored_values(sizes: LlamaConfig, directory: Path | str, comm: Communicator) -> Callable[[str], Tensor]:
    """Return a function from a parameter's or bias's name to its whole value, read when called. Collective.

    For `fully_shard`, which asks for one value at a time. A name that the model does not have is a KeyError.
    errors   as `read_parameters`; of the function, CheckpointError
    """
    directory = Path(directory)
    with comm.together(f"reading {directory}"):
        _require_same_model(sizes, read_sizes(directory), directory)
        try:
            names, file_of = _located(sizes, directory)
        except (OSError, SafetensorError, json.JSONDecodeError, KeyError) as error:
            raise CheckpointError(f"cannot read the files of {directory}: {error}") from error
    shapes = sizes.shapes()
    opened: Callable[[Path], Any] = lru_cache(MAX_OPEN_FILES)(partial(safe_open, framework="pt"))

    def value_of(name: str) -> Tensor:
        stored_as = names[name]
        file = directory / file_of[stored_as]
        try:
            value: Tensor = opened(file).get_tensor(stored_as)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {stored_as} of {directory}: {error}") from error
        # A name that is no parameter's is that of a bias of experts.
        shape = shapes[name] if sizes.experts is None else shapes.get(name, (sizes.experts.count,))
        _require_form(stored_as, value, shape, file)
        return value

    return value_of


def file_names(sizes: LlamaConfig) -> dict[str, str]:
    """Return, by our name of each parameter and each bias of experts, its name in the files."""
    names = list(sizes.shapes())
    kind = model_type(sizes)
    if kind == "glm4_moe":
        mixtures = [layer for layer in range(sizes.layers) if sizes.experts_of(layer) is not None]
        names += [f"model.layers.{layer}.mlp.gate.{BIAS}" for layer in mixtures]
    return {name: _mixtral_name(name) if kind == "mixtral" else name for name in names}


def file_tensors(model: Llama) -> dict[str, Tensor]:
    """Return the tensors that the files of a whole model have, by their names there."""
    names, experts = file_names(model.config), model.config.experts
    found = {}
    for name, value in _targets(model, names):
        if value is None:
            assert experts is not None, "only a mixture has biases"
            value = torch.zeros(experts.count)
        found[names[name]] = value.detach().contiguous()
    return found


def _mixtral_name(name: str) -> str:
    found = re.fullmatch(r"(.*)\.mlp\.experts\.(\d+)\.(\w+)\.weight", name)
    if found:
        return f"{found[1]}.block_sparse_moe.experts.{found[2]}.{MIXTRAL[found[3]]}.weight"
    return name.replace(".mlp.gate.", ".block_sparse_moe.gate.")


def _require_same_model(ours: Any, theirs: Any, directory: Path | str, prefix: str = "") -> None:
    """ConfigError unless two sizes compute the same; their fields one by one."""
    for field in fields(ours):
        mine, found = getattr(ours, field.name), getattr(theirs, field.name)
        if is_dataclass(mine) and is_dataclass(found):
            _require_same_model(mine, found, directory, f"{field.name}.")
        elif field.name not in OF_TRAINING and mine != found:
            raise ConfigError(
                f"the model has {prefix}{field.name}={mine!r}, and {directory} has {found!r}; make it with "
                "the sizes of read_sizes"
            )


def _located(sizes: LlamaConfig, directory: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the name in the files of each tensor, by our name, and the file of each, by its name there.

    errors   CheckpointError for files that have more or less than these tensors. A head that is tied may be
             there too, as Qwen3's small models have it, if it is the embedding
    """
    names, file_of = file_names(sizes), _files(directory)
    head_file = file_of.pop(HEAD, None) if sizes.tie_embeddings else None
    _require_complete(set(names.values()), set(file_of), sizes.layers, directory)
    if head_file is not None:
        both = []
        for name, file in ((HEAD, head_file), (EMBEDDING, file_of[EMBEDDING])):
            with safe_open(directory / file, framework="pt") as stored:
                both.append(stored.get_tensor(name))
        if not torch.equal(*both):
            raise CheckpointError(
                f"{directory} has {HEAD} and {EMBEDDING} with different values, and by its config.json they "
                "are one (tie_word_embeddings); set that to false"
            )
    return names, file_of


def _require_form(name: str, value: Tensor, shape: tuple[int, ...], file: Path) -> None:
    """CheckpointError for a tensor of another shape, and for one that is quantized."""
    if tuple(value.shape) != shape:
        raise CheckpointError(
            f"{name} in {file} has the shape {list(value.shape)}, and by config.json it has {list(shape)}"
        )
    if not value.is_floating_point() or value.element_size() < 2:
        raise CheckpointError(
            f"{name} in {file} is of {value.dtype}: quantized, with scales elsewhere, and hpcpar reads "
            "values of float32, bfloat16 or float16; take the files before quantization, or dequantize the "
            "model and save it by save_pretrained"
        )


def _targets(model: Llama | LlamaStages, names: Iterable[str]) -> Iterator[tuple[str, Tensor | None]]:
    """Yield what this rank has: parameters, and biases, which may be None."""
    own, modules = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_modules())
    for name in names:
        module, _, attribute = name.rpartition(".")
        if name in own:
            yield name, own[name]
        elif attribute == BIAS and module in modules:
            yield name, getattr(modules[module], BIAS)
    if model.config.tie_embeddings and "lm_head.weight" in own and EMBEDDING not in own:
        yield EMBEDDING, own["lm_head.weight"]  # a last stage's copy


def _files(directory: Path) -> dict[str, str]:
    """Return the file of each tensor, by the tensor's name: as transformers, the one file before an index."""
    index = directory / "model.safetensors.index.json"
    if index.is_file() and not (directory / WHOLE).is_file():
        told = json.loads(index.read_text(encoding="utf-8"))
        found = told.get("weight_map") if isinstance(told, dict) else None
        if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
            raise CheckpointError(
                f"{index} has no weight_map, an object of tensors' names and their files' names; save the "
                "model by save_pretrained of transformers 4 or later"
            )
        return found
    with safe_open(directory / WHOLE, framework="pt") as stored:
        return dict.fromkeys(stored.keys(), WHOLE)


def _require_complete(wanted: set[str], found: set[str], layers: int, directory: Path) -> None:
    missing = sorted(wanted - found)
    surplus = sorted(name for name in found - wanted if not _is_not_needed(name, layers))
    for what, names in (("lacks", missing), ("also has", surplus)):
        if names:
            rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(
                f"{directory} {what} {', '.join(names[:3])}{rest}, which is not what its config.json says; "
                "save it by save_pretrained of transformers 4 or later"
            )


def _is_not_needed(name: str, layers: int) -> bool:
    """True for what older files have as well, and for layers behind the last (multi-token prediction)."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return name.endswith(".rotary_emb.inv_freq") or (layer is not None and int(layer[1]) >= layers)
