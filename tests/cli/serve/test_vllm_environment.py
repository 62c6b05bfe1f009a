"""What is refused before vLLM's long start, and the command that starts it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hpcpar.cli.serve import vllm_environment as vllm
from hpcpar.cli.serve.served_model import ServedModel
from hpcpar.cli.serve.server import Address
from hpcpar.cli.serve.vllm_environment import ServeOptions, VllmEnvironment
from hpcpar.errors import ConfigError, LayoutError
from hpcpar.units import GiB, MiB
from tests.vllm_stand_in import stand_in

CPU = VllmEnvironment(Path("python"), "0.32.0", on_cpu=True)
GPU = VllmEnvironment(Path("python"), "0.32.0", on_cpu=False)
SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float32",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "max_position_embeddings": 128,
}


def model(tmp_path: Path, **others: Any) -> ServedModel:
    return ServedModel(tmp_path, "tiny", "a model", SIZES | others)


def asked(tp: int = 1, pp: int = 1, *others: str, **named: Any) -> ServeOptions:
    known = {"dtype": None, "max_model_len": None, "kv_cache_memory_bytes": None} | named
    return ServeOptions(tp, pp, others=others, **known)


def test_an_environment_is_looked_into_without_importing_its_packages(tmp_path: Path) -> None:
    python = stand_in(tmp_path)
    assert vllm.find_engine(python, tmp_path) == VllmEnvironment(python, "0.32.0", on_cpu=True)
    assert not vllm.find_engine(stand_in(tmp_path, "vllm 0.31.0"), tmp_path).on_cpu
    assert vllm.find_engine(stand_in(tmp_path, "vllm 0.31.0+cpu"), tmp_path).on_cpu


def test_the_projects_own_environment_is_found(tmp_path: Path) -> None:
    python = tmp_path / ".venv-serve" / "bin" / "python"
    python.parent.mkdir(parents=True)
    stand_in(tmp_path).rename(python)
    assert vllm.find_engine(None, tmp_path).python == python


def test_without_vllm_the_command_that_installs_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=f"no vLLM with {sys.executable} nor .*: for CPUs `make install-serve`"
    ):
        vllm.find_engine(None, tmp_path)
    with pytest.raises(ConfigError, match="no vLLM with nowhere/python: "):
        vllm.find_engine(Path("nowhere/python"), tmp_path)
    with pytest.raises(ConfigError, match="no vLLM with "):
        vllm.find_engine(stand_in(tmp_path, ""), tmp_path)


def test_degrees_that_do_not_divide_the_model_are_refused_with_those_that_do(tmp_path: Path) -> None:
    for engine in (CPU, GPU):
        with pytest.raises(
            LayoutError, match="heads=8 does not divide among tp=3 ranks; tp=1 or tp=2 or tp=4 "
        ):
            vllm.require_capable(engine, model(tmp_path), asked(tp=3))
    with pytest.raises(LayoutError, match=r"ffn size=700 does not divide among tp=8 ranks; .*tp=4 would fit"):
        vllm.require_capable(GPU, model(tmp_path, intermediate_size=700), asked(tp=8))
    with pytest.raises(LayoutError, match="kv_heads=3 neither divides among tp=2 ranks nor divides them"):
        vllm.require_capable(GPU, model(tmp_path, num_key_value_heads=3), asked(tp=2))
    vllm.require_capable(GPU, model(tmp_path), asked(tp=8))  # four ranks share a head of keys and values
    with pytest.raises(LayoutError, match="pp=5 stages need a layer each, but tiny has 4; try --pp 4"):
        vllm.require_capable(GPU, model(tmp_path), asked(pp=5))


def test_what_vllm_cannot_on_cpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--pp 2: .* divide the layers within the node, --tp 4"):
        vllm.require_capable(CPU, model(tmp_path), asked(2, 2))
    for words in (("--distributed-executor-backend", "ray"), ("--distributed-executor-backend=ray",)):
        with pytest.raises(ConfigError, match="does not work with Ray: serve within one node"):
            vllm.require_capable(CPU, model(tmp_path), asked(1, 1, *words))
        vllm.require_capable(GPU, model(tmp_path), asked(1, 2, *words))
    with pytest.raises(
        ConfigError, match=r"heads of tiny are 16 wide, .* 32, 64, .* alone: serve it on GPUs"
    ):
        vllm.require_capable(CPU, model(tmp_path, head_dim=16), asked())
    vllm.require_capable(GPU, model(tmp_path, head_dim=16), asked())


def test_a_processor_without_avx2_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.platform, "machine", lambda: "x86_64")
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu sse2 avx\n")
    with pytest.raises(ConfigError, match="needs AVX2, which this processor does not have"):
        vllm.require_capable(CPU, model(tmp_path), asked(), cpuinfo)
    vllm.require_capable(GPU, model(tmp_path), asked(), cpuinfo)
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu sse2 avx avx2\n")
    vllm.require_capable(CPU, model(tmp_path), asked(), cpuinfo)


def test_sequences_longer_than_those_of_the_training_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max-model-len 129: tiny knows 128 positions"):
        vllm.require_capable(GPU, model(tmp_path), asked(max_model_len=129))
    vllm.require_capable(GPU, model(tmp_path), asked(max_model_len=64))


def test_a_job_scripts_words_with_vllm_for_cpus_are_told_of_vllm_for_gpus(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an environment with vLLM for GPUs, which python has not"):
        vllm.require_capable(CPU, model(tmp_path), asked(2, 2, "--distributed-executor-backend", "ray"))


def test_a_key_is_not_shown_and_float64_is_named(tmp_path: Path) -> None:
    for words in (("--api-key", "secret"), ("--api-key=secret",)):
        with pytest.raises(ConfigError, match="set VLLM_API_KEY"):
            vllm.require_capable(GPU, model(tmp_path), asked(1, 1, *words))
    with pytest.raises(ConfigError, match="tiny has parameters in float64, which vLLM has not"):
        vllm.require_capable(GPU, model(tmp_path, dtype="float64"), asked())
    vllm.require_capable(GPU, model(tmp_path, dtype="float64"), asked(dtype="float32"))


def test_models_of_other_kinds_are_left_to_vllm(tmp_path: Path) -> None:
    other = ServedModel(tmp_path, "other", "a model", {"architectures": ["GPT2LMHeadModel"]})
    vllm.require_capable(CPU, other, asked(tp=3, max_model_len=5))
    assert vllm.cpu_cache_nbytes(other, asked(tp=2), 8 * GiB) == 2 * GiB
    assert vllm.cpu_cache_nbytes(other, asked(kv_cache_memory_bytes=5), 8 * GiB) == 5


BLOCK = 128 * 2 * 4 * 2 * 32 * 4
"""Bytes of 128 tokens: keys and values, 4 layers, 2 heads of 32 values of 4 bytes."""


def test_the_cache_is_for_256_sequences_or_half_of_the_memory_and_one_sequence_must_fit(
    tmp_path: Path,
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(MiB))
    tiny = model(tmp_path)
    assert vllm.cpu_cache_nbytes(tiny, asked(), None) == 257 * BLOCK
    assert vllm.cpu_cache_nbytes(tiny, asked(), 8 * GiB) == 257 * BLOCK
    assert vllm.cpu_cache_nbytes(tiny, asked(dtype="bfloat16"), 8 * GiB) == 257 * BLOCK // 2
    assert vllm.cpu_cache_nbytes(tiny, asked(tp=2), 8 * GiB) == 257 * BLOCK // 2
    # Four ranks have two heads: two hold the same one.
    assert vllm.cpu_cache_nbytes(tiny, asked(tp=4), 8 * GiB) == 257 * BLOCK // 2
    assert vllm.cpu_cache_nbytes(tiny, asked(), 9 * MiB) == 4 * MiB
    assert vllm.cpu_cache_nbytes(tiny, asked(), MiB + 2 * BLOCK) == 2 * BLOCK
    assert vllm.cpu_cache_nbytes(tiny, asked(kv_cache_memory_bytes=7 * BLOCK), 8 * GiB) == 7 * BLOCK
    with pytest.raises(
        ConfigError, match=r"too little memory: the parameters take 1\.0 MiB, the key-value cache"
    ):
        vllm.cpu_cache_nbytes(tiny, asked(), MiB + 2 * BLOCK - 1)
    with pytest.raises(
        ConfigError, match=r"cache 7\.0 GiB for sequences of 128 tokens, and 4\.0 GiB are free"
    ):
        vllm.cpu_cache_nbytes(tiny, asked(kv_cache_memory_bytes=7 * GiB), 4 * GiB)
    with pytest.raises(ConfigError, match=f"a sequence of 128 tokens needs {2 * BLOCK} on each of 1 ranks"):
        vllm.cpu_cache_nbytes(tiny, asked(kv_cache_memory_bytes=BLOCK), 8 * GiB)


def test_vllms_own_variable_for_the_cache_is_understood() -> None:
    assert vllm.kv_cache_space({}) is None
    assert vllm.kv_cache_space({"VLLM_CPU_KVCACHE_SPACE": "2"}) == 2 * GiB
    with pytest.raises(ConfigError, match="VLLM_CPU_KVCACHE_SPACE='much' is no number of GiB"):
        vllm.kv_cache_space({"VLLM_CPU_KVCACHE_SPACE": "much"})


def test_the_command_is_vllm_serves_with_the_type_of_the_training(tmp_path: Path) -> None:
    address = Address("0.0.0.0", 8001, "tiny")
    others = ("--distributed-executor-backend", "ray")
    words = vllm.command(GPU, model(tmp_path), address, asked(4, 2, *others, max_model_len=64))
    assert words == [
        *("python", "-m", "vllm.entrypoints.cli.main", "serve", str(tmp_path)),
        *(
            "--served-model-name",
            "tiny",
            "--host",
            "0.0.0.0",
            "--port",
            "8001",
            "--tensor-parallel-size",
            "4",
        ),
        *("--pipeline-parallel-size", "2", "--max-model-len", "64", "--dtype", "float32", *others),
    ]
    words = vllm.command(CPU, model(tmp_path), address, asked(kv_cache_memory_bytes=3 * BLOCK))
    assert words[1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path)]
    assert words[-5:] == ["--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(3 * BLOCK)]


def test_what_is_set_stays_and_an_environment_of_its_own_has_no_pythonpath() -> None:
    environ = {"PYTHONPATH": "/ours", "VLLM_CPU_OMP_THREADS_BIND": "3", "VLLM_CPU_KVCACHE_SPACE": "1"}
    assert vllm.variables(CPU, asked(), environ) == {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "3",
    }
    ours = VllmEnvironment(Path(sys.executable), "0.32.0", on_cpu=False)
    assert vllm.variables(ours, asked(), {"PYTHONPATH": "/ours"})["PYTHONPATH"] == "/ours"
    assert set(vllm.variables(CPU, asked(), {})["VLLM_CPU_OMP_THREADS_BIND"]) <= set("0123456789,-")
