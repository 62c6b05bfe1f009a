"""An exported model is, to transformers, the model that was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from hpcpar.checkpoint import load
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data import ByteTokenizer
from hpcpar.errors import CheckpointError, ConfigError, DataError
from hpcpar.models import Llama
from hpcpar.training import Config, Run
from hpcpar.training.model_export import export
from tests.training.runs import MakeConfig

TEXT = "The cät\tsat\n\n on 12 €; \x00 and \x7f were bytes."


def trained(config: Config, size: int = 1) -> Path:
    run_loopback(size, lambda comm: Run(config, comm).train())
    return config.output.directory


def trained_model(run: Path, config: Config, dtype: torch.dtype, vocabulary: int = 256) -> Llama:
    """Read the model from the checkpoint by our own code, without the export."""
    model = Llama(config.model_config_for(vocabulary), seed=None).to(dtype)
    load(run / "checkpoints", model=model, comm=Communicator.alone(), restore_random=False)
    return model.eval()


def tokens(vocabulary: int = 256) -> Tensor:
    return torch.randint(vocabulary, (2, 16), generator=torch.Generator().manual_seed(5))


def as_transformers_reads(directory: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    model, told = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert {name: list(found) for name, found in told.items() if found} == {}
    return model.eval()


SIZES = {
    "plain": [],
    "tied": ["model.tie_embeddings=true"],
    "of other sizes": [
        "model.rope_theta=500000.0",
        "model.norm_epsilon=1e-2",
        "model.head_size=12",
        "model.max_sequence=40",
        "model.dropout=0.1",
    ],
    "Mixtral": ["model.preset=tiny-moe", "model.experts.capacity_factor=1.0"],
    "Qwen3Moe": [
        "model.preset=tiny-moe",
        "model.qk_norm=head",
        "model.layers=2",
        "model.experts.first_dense=1",
    ],
    "Olmoe": ["model.preset=tiny-moe", "model.qk_norm=all", "model.experts.renormalise=false"],
    "Glm4Moe": [
        "model.preset=tiny-moe",
        "model.experts.score=sigmoid",
        "model.experts.shared_ffn_size=256",
        "model.experts.bias_rate=0.1",
        "model.experts.groups=4",
        "model.experts.groups_per_token=2",
        "model.layers=2",
        "model.experts.first_dense=1",
    ],
}


@pytest.mark.parametrize("name", SIZES)
def test_transformers_computes_the_same_logits(name: str, config_of: MakeConfig, tmp_path: Path) -> None:
    config = config_of("train.precision=float32", "train.steps=3", *SIZES[name])
    run = trained(config)
    written = export(run, tmp_path / "exported")
    assert (written.step, written.dtype, written.sizes) == (3, "float32", config.model_config_for(256))

    model = as_transformers_reads(tmp_path / "exported")
    assert type(model).__name__ == f"{name if config.model.preset == 'tiny-moe' else 'Llama'}ForCausalLM"
    assert model.config.max_position_embeddings == written.sizes.max_sequence
    with torch.no_grad():
        found, expected = model(tokens()).logits, trained_model(run, config, torch.float32)(tokens())
    # In float32 the order of operations in attention and rotation differs.
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert expected.std() > 0.1


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, ["optimizer.zero_stage=3"]),
        (2, ["mesh.tp=2", "optimizer.zero_stage=1"]),
        (2, ["mesh.pp=2", "train.global_batch=4", "model.layers=2"]),
    ],
    ids=["ZeRO-3", "tensor parallel", "a pipeline"],
)
def test_a_model_that_was_spread_over_ranks_is_exported_whole(
    ranks: int, overrides: list[str], config_of: MakeConfig, tmp_path: Path
) -> None:
    config = config_of(*overrides, "train.steps=2")
    run = trained(config, ranks)
    export(run, tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert sorted(exported) == sorted(config.model_config_for(256).shapes())
    expected = trained_model(run, config, torch.float64)
    for name, value in exported.items():
        assert torch.equal(value, expected.get_parameter(name)), name


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [(2, ["mesh.ep=2"]), (4, ["mesh.ep=4", "mesh.tp=2"]), (3, ["mesh.ep=3", "optimizer.zero_stage=3"])],
    ids=["ep", "ep over tp", "uneven ep and ZeRO-3"],
)
def test_experts_that_ranks_divided_are_exported_whole(
    ranks: int, overrides: list[str], config_of: MakeConfig, tmp_path: Path
) -> None:
    mixture = [
        *("model.preset=tiny-moe", "model.experts.score=sigmoid", "model.experts.shared_ffn_size=128"),
        "model.experts.bias_rate=0.1",
    ]
    config = config_of(*mixture, *overrides, "train.steps=2", "train.global_batch=12", "model.heads=2")
    run = trained(config, ranks)
    export(run, tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    expected = trained_model(run, config, torch.float64)
    biases = dict(expected.named_buffers())
    assert sorted(exported) == sorted([*config.model_config_for(256).shapes(), *biases])
    for name, value in exported.items():
        found = biases[name] if name in biases else expected.get_parameter(name)
        assert torch.equal(value, found), name
        assert found.any(), name


def test_of_sixteen_bits_the_master_weights_are_what_is_rounded(
    config_of: MakeConfig, tmp_path: Path
) -> None:
    config = config_of("train.precision=bfloat16", "train.steps=2")
    run = trained(config)
    assert export(run, tmp_path / "same").dtype == "bfloat16"
    assert export(run, tmp_path / "masters", dtype="float32").dtype == "float32"
    name = "model.layers.0.mlp.up_proj.weight"
    same = load_file(tmp_path / "same" / "model.safetensors")[name]
    masters = load_file(tmp_path / "masters" / "model.safetensors")[name]
    assert (same.dtype, masters.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(masters.bfloat16(), same)
    assert not torch.equal(masters, same.float())
    assert json.loads((tmp_path / "same" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_bytes_are_a_tokenizer_for_transformers_too(config_of: MakeConfig, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    export(trained(config_of("train.steps=1")), tmp_path / "exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert tokenizer(TEXT)["input_ids"] == ByteTokenizer().encode(TEXT).tolist()
    assert tokenizer.decode(ByteTokenizer().encode(TEXT).tolist()) == TEXT
    assert (len(tokenizer), tokenizer.eos_token_id) == (256, 0)
    every_byte = list(range(1, 256))
    assert tokenizer.decode(every_byte) == ByteTokenizer().decode(every_byte)


def test_a_tokenizers_file_goes_along_and_ends_the_text(config_of: MakeConfig, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    compiled = Tokenizer(models.WordLevel({"the": 0, "cat": 1, "?": 2, "</s>": 3}, unk_token="?"))
    compiled.pre_tokenizer = pre_tokenizers.Whitespace()
    compiled.save(str(tmp_path / "words.json"))
    run = trained(config_of("train.steps=1", f"data.tokenizer={tmp_path / 'words.json'}"))
    export(run, tmp_path / "exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert tokenizer("the cat")["input_ids"] == [0, 1]
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", 3)
    said = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert (said["vocab_size"], said["eos_token_id"]) == (4, 3)

    (tmp_path / "words.json").rename(tmp_path / "moved.json")
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        export(run, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    export(run, tmp_path / "again", tokenizer=tmp_path / "moved.json")
    assert (tmp_path / "again" / "tokenizer.json").read_text() == (tmp_path / "moved.json").read_text()


@pytest.mark.parametrize("told", ["by the configuration", "by a file beside it"])
def test_an_end_of_no_usual_name_is_exported_wherever_the_tokenizer_is_then(
    config_of: MakeConfig, tmp_path: Path, told: str
) -> None:
    (tmp_path / "words").mkdir()
    file = tmp_path / "words" / "tokenizer.json"
    compiled = Tokenizer(models.WordLevel({"the": 0, "cat": 1, "?": 2, "<fin>": 3}, unk_token="?"))
    compiled.pre_tokenizer = pre_tokenizers.Whitespace()
    compiled.save(str(file))
    options = [f"data.tokenizer={file}", "train.steps=1"]
    if told == "by the configuration":
        options.append("data.eos_token=<fin>")
    else:
        file.with_name("tokenizer_config.json").write_text('{"eos_token": "<fin>"}')
    run = trained(config_of(*options))
    export(run, tmp_path / "exported")
    (tmp_path / "moved.json").write_text(file.read_text())
    export(run, tmp_path / "again", tokenizer=tmp_path / "moved.json")
    for directory in (tmp_path / "exported", tmp_path / "again"):
        assert json.loads((directory / "config.json").read_text())["eos_token_id"] == 3
        assert json.loads((directory / "generation_config.json").read_text()) == {"eos_token_id": 3}
        assert json.loads((directory / "tokenizer_config.json").read_text())["eos_token"] == "<fin>"


def test_a_tokenizer_that_has_changed_since_is_taken_only_if_it_is_named(
    config_of: MakeConfig, tmp_path: Path
) -> None:
    file = tmp_path / "words.json"
    for vocabulary in ({"the": 0, "cat": 1, "?": 2}, {"cat": 0, "the": 1, "?": 2}):
        compiled = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
        compiled.pre_tokenizer = pre_tokenizers.Whitespace()
        compiled.save(str(file))
        if vocabulary["the"] == 0:
            run = trained(config_of("train.steps=1", f"data.tokenizer={file}", "data.eos_token=false"))
            export(run, tmp_path / "at once")
    with pytest.raises(DataError, match=r"words\.json is not what the model was trained with"):
        export(run, tmp_path / "later")
    assert not (tmp_path / "later").exists()
    export(run, tmp_path / "later", tokenizer=file)


def test_what_cannot_be_exported_is_named_and_leaves_nothing(config_of: MakeConfig, tmp_path: Path) -> None:
    run = trained(config_of("train.steps=1", "optimizer.name=sgd", "optimizer.weight_decay=1e9"))
    with pytest.raises(ConfigError, match="values beyond float16's; take --dtype bfloat16"):
        export(run, tmp_path / "new", dtype="float16")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("not to be lost")
    with pytest.raises(ConfigError, match="mine is there already"):
        export(run, tmp_path / "mine")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        export(tmp_path / "mine", tmp_path / "new")
    checkpoint = next((run / "checkpoints").iterdir())
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(CheckpointError, match="is damaged"):
        export(checkpoint, tmp_path / "new")
    assert not (tmp_path / "new").exists()
