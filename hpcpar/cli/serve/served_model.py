"""The model that a server answers with: a run, exported once for each checkpoint, or a model directory.

A run keeps what was exported of it:

<run>/served/step-00000600-float32-1f6c…/    one for each checkpoint and type that was served
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from hpcpar.checkpoint import read_extra
from hpcpar.checkpoint.manifest import MANIFEST
from hpcpar.durable import sha256
from hpcpar.errors import ConfigError, DataError, LayoutError
from hpcpar.tensor_parallel.split import require_fitting
from hpcpar.training.model_export import export

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's attention on CPUs. With another one it starts, and fails at the first request."""

BLOCK_TOKENS = 128
"""Tokens in a block of vLLM's key-value cache on CPUs."""

ITEM_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ServedModel:
    """A model directory in Hugging Face's format.

    name     by which requests ask for it
    origin   what it was made of, for people
    config   contents of its config.json
    """

    directory: Path
    name: str
    origin: str
    config: dict[str, Any]

    @property
    def is_llama(self) -> bool:
        """True for the architecture that `hpcpar export` writes: its sizes are known here."""
        return self.config.get("architectures") == ["LlamaForCausalLM"]

    @property
    def dtype(self) -> str | None:
        """The parameters' type in the files."""
        return self.config.get("dtype") or self.config.get("torch_dtype")

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the parameters' files."""
        return sum(file.stat().st_size for file in self.directory.glob("*.safetensors"))

    def cache_nbytes(self, sequences: int, length: int, *, tp: int, dtype: str) -> int:
        """Bytes of keys and values on each of tp ranks, for that many sequences of `length` tokens.

        One block more is never used: vLLM keeps it for padding.
        """
        heads = self.config["num_attention_heads"]
        head_size = self.config.get("head_dim") or self.config["hidden_size"] // heads
        rank_heads = max(1, self.config.get("num_key_value_heads", heads) // tp)
        token: int = 2 * self.config["num_hidden_layers"] * rank_heads * head_size * ITEM_NBYTES[dtype]
        blocks = sequences * ceil(length / BLOCK_TOKENS) + 1
        return blocks * BLOCK_TOKENS * token

    def require_degrees(self, tp: int, pp: int) -> None:
        """Raise LayoutError unless each layer divides among tp ranks, and the layers among pp stages."""
        if not self.is_llama:
            return
        heads, layers = self.config["num_attention_heads"], self.config["num_hidden_layers"]
        divided = {"heads": heads, "ffn size": self.config["intermediate_size"]}
        require_fitting(divided, {"kv_heads": self.config.get("num_key_value_heads", heads)}, tp)
        if pp > layers:
            raise LayoutError(
                f"pp={pp} stages need a layer each, but {self.name} has {layers}; try --pp {layers}"
            )

    def require_cpu_attention(self) -> None:
        """Raise ConfigError for a head size that vLLM's attention on CPUs has no kernel for."""
        if not self.is_llama:
            return
        hidden, heads = self.config["hidden_size"], self.config["num_attention_heads"]
        size = self.config.get("head_dim") or hidden // heads
        if size not in CPU_HEAD_SIZES:
            raise ConfigError(
                f"the heads of {self.name} are {size} wide, and vLLM on CPUs has attention for "
                f"{', '.join(map(str, CPU_HEAD_SIZES))} alone: serve it on GPUs, or train with such heads "
                f"(model.hidden_size / model.heads, or model.head_size)"
            )

    def length(self, asked: int | None) -> int | None:
        """Return the longest sequence to serve, prompt and answer together; None: only vLLM knows."""
        longest: int | None = self.config.get("max_position_embeddings")
        if asked is not None and longest is not None and self.is_llama and asked > longest:
            raise ConfigError(
                f"--max-model-len {asked}: {self.name} knows {longest} positions, those of its training "
                f"(train.sequence, or model.max_sequence); ask for {longest} or less"
            )
        return asked or longest


def served_model(where: Path, *, dtype: str | None) -> ServedModel:
    """Return the model of a model directory, a run, or a checkpoint; export it unless that was done.

    dtype     of the parameters; None = as they are, or as trained (float64 becomes float32)
    errors    ConfigError, CheckpointError, DataError say what is not there
    """
    if not where.is_dir():
        raise ConfigError(
            f"there is no directory {where}: name a run of `hpcpar train`, or a model directory"
        )
    if (where / "config.json").is_file():
        name = where.resolve().name
        return ServedModel(where, name, f"the model directory {where}", _config(where))
    checkpoint, extra = read_extra(where / "checkpoints" if (where / "checkpoints").is_dir() else where)
    trained = extra.get("config", {}).get("train", {}).get("precision")
    dtype = dtype or ("float32" if trained == "float64" else trained)
    run = checkpoint.resolve().parent
    run = run.parent if run.name == "checkpoints" else run
    content = sha256(checkpoint / MANIFEST)[:8]
    directory = where if run == where.resolve() else run
    directory = directory / "served" / f"{checkpoint.name}-{dtype}-{content}"
    if not directory.is_dir():
        try:
            export(checkpoint, directory, dtype=dtype)
        except DataError as error:
            raise DataError(
                f"{error}. With it, `hpcpar export {where} DIRECTORY --tokenizer FILE`, and serve DIRECTORY"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"cannot write {directory}: {error}; export where you may write, `hpcpar export {where} "
                f"DIRECTORY`, and serve that directory"
            ) from error
    vocabulary = "" if extra.get("tokenizer", "bytes") != "bytes" else "; a token is a byte"
    return ServedModel(directory, run.name, f"{checkpoint}, in {dtype}{vocabulary}", _config(directory))


def last_run(runs: Path) -> Path:
    """Return the run below a directory whose checkpoint is the newest.

    errors   ConfigError where there is none
    """
    manifests: Sequence[Path] = sorted(
        runs.glob(f"**/checkpoints/step-*/{MANIFEST}"), key=lambda path: path.stat().st_mtime
    )
    if not manifests:
        raise ConfigError(
            f"there is no trained model in {runs}/: train one first (`make train`, or hpcpar train), or name "
            f"a run or a model directory: hpcpar serve RUN"
        )
    return manifests[-1].parents[2]


def _config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; export the model again") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no description of a model; export the model again")
    return config
