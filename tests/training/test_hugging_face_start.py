"""A run that starts from a model of transformers, in any layout, is that model; and what it exports again."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data.tokenizer import write_tokenizer
from hpcpar.data_parallel import initial_values
from hpcpar.errors import CheckpointError, ConfigError, DataError, PeerFailedError
from hpcpar.planner.model_shapes import shape_from_table
from hpcpar.training import Config, Run, runs
from hpcpar.training.dry_run import describe
from hpcpar.training.model_export import export
from tests.training.runs import MakeConfig, course

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    **{"vocab_size": 260, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8},
    **{"initializer_range": 0.2, "rms_norm_eps": 1e-3},
    **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    "Mixtral": {"num_local_experts": 4},
    "Glm4Moe": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_group": 2},
        **{
            "topk_group": 1,
            "n_shared_experts": 1,
            "partial_rotary_factor": 1.0,
            "num_nextn_predict_layers": 0,
        },
    },
}
# Text in float32, as the files are: what is exported is what was read.
PLAIN = ("train.precision=float32", "train.global_batch=8", "train.microbatch=2", "train.steps=2")
LAYOUTS: dict[str, tuple[str, int, list[str]]] = {
    "tp 2 x pp 2 x ZeRO-1": (
        *("Llama", 8),
        ["mesh.tp=2", "mesh.pp=2", "optimizer.zero_stage=1", "tensor_parallel.sequence_parallel=true"],
    ),
    "tied over stages": ("Qwen3", 4, ["mesh.tp=2", "mesh.pp=2", "optimizer.zero_stage=1"]),
    "ZeRO-3": ("Qwen3", 4, ["optimizer.zero_stage=3"]),
    "ZeRO-3 and tp": ("Llama", 4, ["optimizer.zero_stage=3", "mesh.tp=2"]),
    "ep": ("Qwen3Moe", 4, ["mesh.ep=4", "optimizer.zero_stage=1"]),
    "ep and pp": ("Mixtral", 4, ["mesh.ep=2", "mesh.pp=2"]),
    "biases": ("Glm4Moe", 2, ["mesh.ep=2"]),
    "biases and ZeRO-3": ("Glm4Moe", 2, ["mesh.ep=2", "optimizer.zero_stage=3"]),
}


def theirs(kind: str, directory: Path) -> Any:
    """Make and save a model of transformers, with a tokenizer of bytes."""
    config = getattr(transformers, f"{kind}Config")(**SMALL | KINDS[kind])
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for value in (*model.parameters(), *(b for n, b in model.named_buffers() if "bias" in n)):
            value.copy_(torch.randn(value.shape, generator=generator) / 5)
    model.save_pretrained(directory)
    write_tokenizer(None, directory)
    return model


def start_from(
    directory: Path, config_of: MakeConfig, *overrides: str, name: str = "run", **model: Any
) -> Config:
    """A run of the test's text, whose [model] has the directory and what is given here."""
    config = config_of(*PLAIN, *overrides, name=name)
    section = type(config.model).model_validate({"hugging_face": directory} | model)
    return config.model_copy(update={"model": section})


def logits(directory: Path) -> Tensor:
    model, told = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert {name: list(found) for name, found in told.items() if found} == {}
    with torch.no_grad():
        found: Tensor = model.eval()(torch.arange(40).view(2, 20)).logits
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_read_in_any_layout_is_exported_bit_for_bit(
    name: str, config_of: MakeConfig, tmp_path: Path
) -> None:
    kind, ranks, overrides = LAYOUTS[name]
    theirs(kind, tmp_path / "theirs")
    config = start_from(tmp_path / "theirs", config_of, *overrides)
    run_loopback(ranks, lambda comm: Run(config, comm).save(0))
    written = export(config.output.directory, tmp_path / "ours")
    assert (written.step, written.dtype) == (0, "float32")
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert [key for key, value in before.items() if not torch.equal(after[key], value)] == []
    torch.testing.assert_close(logits(tmp_path / "ours"), logits(tmp_path / "theirs"), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["tp 2 x pp 2 x ZeRO-1", "ep", "biases and ZeRO-3"])
def test_training_goes_on_as_on_one_rank_and_is_resumed_without_the_directory(
    name: str, config_of: MakeConfig, tmp_path: Path
) -> None:
    kind, ranks, overrides = LAYOUTS[name]
    theirs(kind, tmp_path / "theirs")
    # Loads of experts are counted over microbatches of all ranks, which are others alone: no losses of them.
    model: dict[str, Any] = {} if kind == "Llama" else {"experts": {"balance_loss": 0.0}}
    together, alone = (
        start_from(*(tmp_path / "theirs", config_of, *layout, "train.precision=float64"), name=of, **model)
        for of, layout in (("together", overrides), ("alone", []))
    )
    run_loopback(ranks, lambda comm: Run(together, comm).train())
    run_loopback(1, lambda comm: Run(alone, comm).train())
    assert course(together) == pytest.approx(course(alone), abs=1e-9)
    for file in (tmp_path / "theirs").glob("*.safetensors"):
        file.unlink()
    outcomes = run_loopback(ranks, lambda comm: Run(together, comm, resume=True).train())
    assert outcomes[0].first_step == 2


def test_with_zero_3_a_rank_copies_the_tensors_that_its_shards_lie_in(
    config_of: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs("Llama", tmp_path / "theirs")
    config = start_from(tmp_path / "theirs", config_of, "optimizer.zero_stage=3")
    copied: dict[int, int] = {}
    view_as = initial_values.view_as

    def counting(flat: Tensor, start: int, stop: int, layout: Any) -> Tensor:
        copied[threading.get_ident()] = copied.get(threading.get_ident(), 0) + stop - start
        return view_as(flat, start, stop, layout)

    monkeypatch.setattr(initial_values, "view_as", counting)
    sizes = run_loopback(4, lambda comm: Run(config, comm).model.config)
    whole = sizes[0].parameters()
    assert len(copied) == 4
    assert max(copied.values()) < 0.7 * whole  # the embedding is a third of this model
    assert sum(copied.values()) >= whole


def test_its_tokenizer_and_sizes_are_taken_and_told(config_of: MakeConfig, tmp_path: Path) -> None:
    theirs("Qwen3Moe", tmp_path / "theirs")
    config = start_from(tmp_path / "theirs", config_of)
    run = next(runs((config,), Communicator.alone()))
    assert run.config.data.tokenizer == tmp_path / "theirs" / "tokenizer.json"
    assert run.model.config.qk_norm == "head"
    assert run.model.config.experts is not None
    assert run.model.config.experts.count == 4
    assert run.model.config.max_sequence == 64
    assert shape_from_table({"hugging_face": str(tmp_path / "theirs")}, where="here").layers == 3
    fixed = config.model_copy(update={"mesh": type(config.mesh)(dp=1)})
    assert "1 rank" in describe((fixed,), "h100-dgx")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layers": 2}, r"model.layers = 2, but .* has 3; leave it out"),
        ({"experts": {"count": 4}}, "is a model without experts"),
        ({"max_sequence": 8}, r"model.max_sequence = 8; set model.max_sequence=16"),
    ],
)
def test_a_key_that_contradicts_the_directory_is_refused(
    changes: dict[str, Any], reason: str, config_of: MakeConfig, tmp_path: Path
) -> None:
    theirs("Llama", tmp_path / "theirs")
    config = start_from(tmp_path / "theirs", config_of, **changes)
    with pytest.raises(ConfigError, match=reason):
        Run(config, Communicator.alone())


def test_what_the_directory_lacks_is_named(config_of: MakeConfig, tmp_path: Path) -> None:
    theirs("Llama", tmp_path / "theirs")
    config = start_from(tmp_path / "theirs", config_of, "optimizer.zero_stage=3")
    told = json.loads((tmp_path / "theirs" / "config.json").read_text())

    def refused(kind: type[Exception], reason: str) -> None:
        with pytest.raises(PeerFailedError, match=f"(?s)reading .*{kind.__name__}: .*{reason}"):
            run_loopback(2, lambda comm: Run(config, comm))

    (tmp_path / "theirs" / "tokenizer.json").unlink()
    refused(DataError, r"has no tokenizer\.json")
    write_tokenizer(None, tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(told | {"num_hidden_layers": 4}))
    refused(CheckpointError, r"lacks model\.layers\.3\.input_layernorm\.weight")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(told | {"model_type": "qwen2"}))
    refused(ConfigError, "qwen2.*biases")
    (tmp_path / "theirs" / "config.json").unlink()
    refused(CheckpointError, r"cannot read .*config\.json")
