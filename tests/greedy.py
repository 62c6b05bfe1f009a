"""Answers of transformers, with which a server's are compared; and whether vLLM for CPUs can run here."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from hpcpar.cli.serve.vllm_environment import ENVIRONMENT, has_avx2

ROOT = Path(__file__).parent.parent


def obstacle() -> str | None:
    """Say why vLLM for CPUs cannot run here; None where it can."""
    if platform.machine() in ("x86_64", "AMD64") and not has_avx2():
        return "vLLM for CPUs needs AVX2, which this processor does not have"
    if not (ROOT / ENVIRONMENT / ".installed").exists():
        return f"vLLM is not in {ENVIRONMENT}: make install-serve"
    return None


needs_vllm = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))


def greedy_answer(directory: Path, prompt: str, *, tokens: int) -> str:
    """Return transformers' answer with a model directory, the likeliest token each time."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    inputs = tokenizer(prompt, return_tensors="pt")
    written = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    text: str = tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text
