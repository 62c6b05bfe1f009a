"""vLLM in an environment of its own: find it, say what it cannot do here, and write its command."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcpar.cli.serve.cores import binding_here
from hpcpar.cli.serve.served_model import ITEM_NBYTES, ServedModel
from hpcpar.cli.serve.server import Address
from hpcpar.data_parallel.process_memory import available_on_node
from hpcpar.errors import ConfigError
from hpcpar.units import GiB, format_nbytes

ENVIRONMENT = Path(".venv-serve")
"""Environment that `make install-serve` makes."""

SEQUENCES = 256
"""Sequences at once for which the key-value cache has room, where memory allows: vLLM's --max-num-seqs."""

CACHE_SPACE = "VLLM_CPU_KVCACHE_SPACE"
CPUINFO = Path("/proc/cpuinfo")

PROBE = """
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "vllm-cpu"):
    try:
        print(name, version(name))
        break
    except PackageNotFoundError:
        pass
"""


@dataclass(frozen=True)
class VllmEnvironment:
    """vLLM of an environment, whose interpreter is `python`; `on_cpu`: built for CPUs alone."""

    python: Path
    version: str
    on_cpu: bool


@dataclass(frozen=True)
class ServeOptions:
    """Options of `hpcpar serve` that it looks at itself; `others` go to vLLM as they are."""

    tp: int
    pp: int
    dtype: str | None
    max_model_len: int | None
    kv_cache_memory_bytes: int | None
    others: tuple[str, ...] = ()


def find_engine(python: Path | None, directory: Path) -> VllmEnvironment:
    """Return vLLM of the given interpreter; else of this one, else of the project's own environment.

    errors   ConfigError where there is none, with the command that installs it
    """
    candidates = (
        [Path(sys.executable), directory / ENVIRONMENT / "bin" / "python"] if python is None else [python]
    )
    for candidate in candidates:
        try:
            done = subprocess.run(
                [candidate, "-c", PROBE], capture_output=True, text=True, timeout=60, check=True
            )
        except (OSError, subprocess.SubprocessError):
            continue
        if done.stdout.strip():
            name, version = done.stdout.split()
            return VllmEnvironment(candidate, version, name == "vllm-cpu" or "cpu" in version)
    looked = " nor ".join(map(str, candidates))
    raise ConfigError(
        f"there is no vLLM with {looked}: for CPUs `make install-serve` installs it into {ENVIRONMENT}; for "
        f"GPUs make an environment with `pip install vllm ray`, and name its interpreter by --python"
    )


def require_capable(
    engine: VllmEnvironment, model: ServedModel, asked: ServeOptions, cpuinfo: Path = CPUINFO
) -> None:
    """Raise ConfigError or LayoutError for what cannot work, which vLLM would say late or never."""
    model.require_degrees(asked.tp, asked.pp)
    model.length(asked.max_model_len)
    if asked.dtype is None and model.dtype == "float64":
        raise ConfigError(
            f"{model.name} has parameters in float64, which vLLM has not: serve it --dtype float32"
        )
    if "--api-key" in (word.partition("=")[0] for word in asked.others):
        raise ConfigError(
            "--api-key would show the key in the output and to whoever looks at processes: set VLLM_API_KEY"
        )
    if not engine.on_cpu:
        return
    if platform.machine() in ("x86_64", "AMD64") and not has_avx2(cpuinfo):
        raise ConfigError(
            "vLLM on CPUs needs AVX2, which this processor does not have: serve on another node, or ask the "
            "model with transformers (hpcpar export)"
        )
    if "ray" in asked.others or "--distributed-executor-backend=ray" in asked.others:
        raise ConfigError(
            f"vLLM on CPUs does not work with Ray: serve within one node, with --tp alone; for GPUs name by "
            f"--python an environment with vLLM for GPUs, which {engine.python} has not"
        )
    if asked.pp > 1:
        raise ConfigError(
            f"--pp {asked.pp}: vLLM on CPUs starts a pipeline, but cannot answer with it; divide the layers "
            f"within the node, --tp {asked.pp * asked.tp}"
        )
    model.require_cpu_attention()


def has_avx2(cpuinfo: Path = CPUINFO) -> bool:
    """Return whether the processor has AVX2; True where the system does not tell."""
    try:
        flags = [line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")]
    except OSError:
        return True
    return not flags or "avx2" in flags[0].split()


def command(engine: VllmEnvironment, model: ServedModel, address: Address, asked: ServeOptions) -> list[str]:
    """Return the words that start vLLM's server.

    errors   ConfigError for a key-value cache that memory has no room for
    """
    # `vllm serve` looks for a distribution named vllm; that for CPUs is vllm-cpu.
    start = ["openai.api_server", "--model"] if engine.on_cpu else ["cli.main", "serve"]
    words = [str(engine.python), "-m", f"vllm.entrypoints.{start[0]}", start[1], str(model.directory)]
    words += ["--served-model-name", address.model, "--host", address.host, "--port", str(address.port)]
    words += ["--tensor-parallel-size", str(asked.tp)]
    if asked.pp > 1:
        words += ["--pipeline-parallel-size", str(asked.pp)]
    if asked.max_model_len is not None:
        words += ["--max-model-len", str(asked.max_model_len)]
    dtype = asked.dtype or model.dtype  # by itself vLLM serves float32 in 16 bits
    if dtype is not None:
        words += ["--dtype", dtype]
    cache = asked.kv_cache_memory_bytes
    if engine.on_cpu:
        words.append("--enforce-eager")  # compiling takes minutes, and a C++ compiler
        cache = cpu_cache_nbytes(model, asked, available_on_node())
    if cache is not None:
        words += ["--kv-cache-memory-bytes", str(cache)]
    return [*words, *asked.others]


def cpu_cache_nbytes(model: ServedModel, asked: ServeOptions, available: int | None) -> int | None:
    """Return the bytes of the key-value cache on each rank; by itself vLLM takes 0.9 of all memory, or fails.

    The cache is for SEQUENCES sequences of full length, in at most half of the memory that is free.

    available   bytes of memory that the node has free; None: nobody knows
    errors      ConfigError where one sequence does not fit
    """
    given, room = asked.kv_cache_memory_bytes, None
    if available is not None:
        room = (available - model.weight_nbytes) // asked.tp
    length, dtype = model.length(asked.max_model_len), asked.dtype or model.dtype
    if not model.is_llama or length is None or dtype not in ITEM_NBYTES:
        return given if given is not None or room is None else max(0, room // 2)
    least = model.cache_nbytes(1, length, tp=asked.tp, dtype=dtype)
    wanted = model.cache_nbytes(SEQUENCES, length, tp=asked.tp, dtype=dtype) if given is None else given
    if wanted < least:
        raise ConfigError(
            f"--kv-cache-memory-bytes {wanted}: a sequence of {length} tokens needs {least} on each of "
            f"{asked.tp} ranks; give that or more, or serve shorter ones with --max-model-len"
        )
    if room is None:
        return wanted
    if room < least or (given is not None and room < given):
        raise ConfigError(
            f"too little memory: the parameters take {format_nbytes(model.weight_nbytes)}, the key-value "
            f"cache {format_nbytes(asked.tp * (given or least))} for sequences of {length} tokens, and "
            f"{format_nbytes(available or 0)} are free; serve shorter sequences (--max-model-len), in 16 "
            f"bits (--dtype bfloat16), with a smaller cache, or on a node with more memory"
        )
    return wanted if given is not None else max(least, min(wanted, room // 2))


def variables(engine: VllmEnvironment, asked: ServeOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment: its model is on disk, and nobody is told of it; cores for each rank.

    What is set already stays. An environment of its own has its own packages: no PYTHONPATH.
    """
    ours = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if engine.on_cpu and "VLLM_CPU_OMP_THREADS_BIND" not in environ:
        ours["VLLM_CPU_OMP_THREADS_BIND"] = binding_here(asked.tp)
    kept = {name: value for name, value in environ.items() if name != CACHE_SPACE}  # an option by now
    if engine.python != Path(sys.executable):
        kept.pop("PYTHONPATH", None)
    return ours | kept


def kv_cache_space(environ: Mapping[str, str]) -> int | None:
    """Return the bytes of the key-value cache that vLLM's older variable asks for, in GiB."""
    text = environ.get(CACHE_SPACE, "").strip()
    if not text:
        return None
    if not text.isdigit():
        raise ConfigError(f"{CACHE_SPACE}={text!r} is no number of GiB; set one, or unset it")
    return int(text) * GiB


def shown_variables(engine: VllmEnvironment, environ: Mapping[str, str]) -> Sequence[str]:
    """Return the assignments that make the command the same by hand."""
    names = ["HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS"]
    names += ["VLLM_CPU_OMP_THREADS_BIND"] if engine.on_cpu else []
    return [f"{name}={environ[name]}" for name in names]
