"""Models of transformers, read into ours and written again: the same sizes, tensors, logits; on any ranks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import CheckpointError, ConfigError, PeerFailedError
from hpcpar.models import Layers, Llama, LlamaConfig, Part, parallel_layers
from hpcpar.models.hugging_face_config import hugging_face_config, sizes_from_hugging_face
from hpcpar.models.hugging_face_files import file_tensors, read_parameters, read_sizes, stored_values
from hpcpar.models.llama import EMBEDDING, HEAD
from hpcpar.planner.experts import Experts
from hpcpar.tensor_parallel import own_shard

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 43,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

KINDS: dict[str, dict[str, Any]] = {
    "Llama": {"head_dim": 8},
    "Mistral": {"sliding_window": None},
    "Qwen3": {"head_dim": 8},
    "Mixtral": {"num_local_experts": 5},
    "Qwen3Moe": {
        **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "head_dim": 8},
        "mlp_only_layers": [0],
    },
    "Olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "Glm4Moe": {
        **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "head_dim": 8},
        **{"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 1.5},
        **{"partial_rotary_factor": 1.0, "use_qk_norm": True, "num_nextn_predict_layers": 0},
    },
}
MIXTURES = [kind for kind in KINDS if kind not in ("Llama", "Mistral", "Qwen3")]


def theirs(kind: str, directory: Path, **changes: Any) -> Any:
    """Make a model of transformers whose norms and biases are not the usual ones and zeros, and save it."""
    config = getattr(transformers, f"{kind}Config")(**SMALL | KINDS[kind] | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for value in (*model.parameters(), *(b for n, b in model.named_buffers() if "bias" in n)):
            value.copy_(torch.randn(value.shape, generator=generator) / 5)
    model.save_pretrained(directory)
    return model


def ours(directory: Path) -> Llama:
    model = Llama(read_sizes(directory), seed=None)
    read_parameters(model, directory, Communicator.alone())
    return model.eval()


def tokens() -> Tensor:
    return torch.randint(43, (2, 12), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_transformers_computes_the_same_logits_here(kind: str, tmp_path: Path) -> None:
    truth = theirs(kind, tmp_path)
    with torch.no_grad():
        expected, found = truth(tokens()).logits, ours(tmp_path)(tokens())
    # In float32 the order of operations in attention and rotation differs.
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert expected.std() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_read_is_written_bit_for_bit(kind: str, tmp_path: Path) -> None:
    theirs(kind, tmp_path / "theirs")
    model = ours(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    save_file(file_tensors(model), tmp_path / "ours" / "model.safetensors", metadata={"format": "pt"})
    told = hugging_face_config(model.config, dtype="float32", end_of_document=None)
    (tmp_path / "ours" / "config.json").write_text(json.dumps(told))
    assert read_sizes(tmp_path / "ours") == model.config

    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("theirs", "ours"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    again, said = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert {name: list(found) for name, found in said.items() if found} == {}
    assert type(again).__name__ == ("LlamaForCausalLM" if kind == "Mistral" else f"{kind}ForCausalLM")
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(tokens()).logits, model(tokens()), atol=1e-5, rtol=1e-5)


class OwnExperts:
    """The experts of one rank, as ExpertParallel says them; nothing is computed."""

    def __init__(self, own: range, count: int) -> None:
        self.own, self.count, self.comm = own, count, Communicator.alone()


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_rank_reads_what_it_holds(kind: str, tmp_path: Path) -> None:
    theirs(kind, tmp_path)
    whole = dict(ours(tmp_path).named_parameters())
    sizes = read_sizes(tmp_path)
    assert sizes.experts is not None
    half = sizes.experts.count // 2

    def on_rank(comm: Communicator) -> set[str]:
        tp = comm if sizes.qk_norm != "all" else Communicator.alone()
        own = (range(half), range(half, sizes.experts.count))[comm.rank]
        layers = replace(parallel_layers(sizes, tp), experts=OwnExperts(own, sizes.experts.count))
        model = Llama(sizes, layers, seed=None, part=Part.of(1 + comm.rank, 5, 3))
        read_parameters(model, tmp_path, comm)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, own_shard(parameter, whole[name])), name
        for name, bias in model.named_buffers():
            assert bias.any(), name
        return {name for name, _ in model.named_parameters()}

    first, second = run_loopback(2, on_rank)
    of_both = [name for name in whole if name.startswith(("model.layers.1", "model.layers.2"))]
    assert set(of_both) <= first | second
    assert "model.layers.1.mlp.experts.0.up_proj.weight" in first - second
    assert any(name.startswith("model.layers.0.") for name in first)
    assert not any(name.startswith("model.layers.0.") for name in second)


def test_tied_embeddings_are_read_into_the_head_of_a_last_stage(tmp_path: Path) -> None:
    model = theirs("Llama", tmp_path, tie_word_embeddings=True)
    last = Llama(read_sizes(tmp_path), seed=None, part=Part.of(3, 5, 3))
    read_parameters(last, tmp_path, Communicator.alone())
    assert torch.equal(last.lm_head.weight, model.model.embed_tokens.weight)


def test_a_tied_head_may_be_in_the_files_too_if_it_is_the_embedding(tmp_path: Path) -> None:
    model = theirs("Qwen3", tmp_path, tie_word_embeddings=True)
    stored = load_file(tmp_path / "model.safetensors")
    save_file(stored | {HEAD: stored[EMBEDDING].clone()}, tmp_path / "model.safetensors")
    sizes, alone = read_sizes(tmp_path), Communicator.alone()
    read = Llama(sizes, seed=None)
    read_parameters(read, tmp_path, alone)
    assert torch.equal(read.lm_head.weight, model.model.embed_tokens.weight)
    assert torch.equal(stored_values(sizes, tmp_path, alone)(EMBEDDING), stored[EMBEDDING])

    save_file(stored | {HEAD: stored[EMBEDDING] + 1}, tmp_path / "model.safetensors")
    assert "with different values, and by its config.json they are one" in str(refused(tmp_path, sizes))
    with pytest.raises(CheckpointError, match="with different values"):
        stored_values(sizes, tmp_path, alone)


def test_a_model_in_several_files_is_read(tmp_path: Path) -> None:
    model = theirs("Mixtral", tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    found, expected = ours(tmp_path / "many"), ours(tmp_path / "one")
    for name, value in expected.named_parameters():
        assert torch.equal(found.get_parameter(name), value), name
    # Saved in one file after that, the index stays, and names files that are gone.
    theirs("Llama", tmp_path / "many")
    read = ours(tmp_path / "many")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "many").eval()
    torch.testing.assert_close(read(tokens()), model(tokens()).logits)


CONFIGS = [
    LlamaConfig(),
    LlamaConfig(qk_norm="head", tie_embeddings=True),
    LlamaConfig(experts=Experts(8, 2, 40, balance_loss=0.02), rope_theta=1e6, ffn_size=40),
    LlamaConfig(experts=Experts(8, 3, 40, renormalise=False, first_dense=2), qk_norm="head"),
    LlamaConfig(experts=Experts(8, 3, 40, renormalise=False), qk_norm="all", ffn_size=40),
    *(
        LlamaConfig(
            experts=Experts(
                *(8, 3, 40, 80),
                **{"first_dense": 1, "score": "sigmoid", "groups": 4, "groups_per_token": 2, "scale": 2.5},
                bias_rate=0.001,
            ),
            qk_norm=norm,
        )
        for norm in ("none", "head")
    ),
]


@pytest.mark.parametrize("sizes", CONFIGS, ids=lambda sizes: f"{sizes.qk_norm}, {sizes.experts}")
def test_sizes_survive_the_way_through_a_config(sizes: LlamaConfig) -> None:
    told = json.loads(json.dumps(hugging_face_config(sizes, dtype="float32", end_of_document=0)))
    assert sizes_from_hugging_face(told) == sizes


SIGMOID = {"score": "sigmoid", "shared_ffn_size": 64}


@pytest.mark.parametrize(
    ("norm", "changes", "reason"),
    [
        (
            "all",
            SIGMOID,
            r"no model with experts.score='sigmoid' and qk_norm='all'; there are qk_norm='none'",
        ),
        (
            "none",
            {"score": "sigmoid"},
            r"experts.shared_ffn_size=0, where it has a multiple of .*ffn_size=32",
        ),
        ("none", {"renormalise": False}, r"MixtralForCausalLM, but here is experts.renormalise=False"),
        ("none", {"first_dense": 1}, r"experts.first_dense=1, where it has 0"),
        ("head", {"shared_ffn_size": 32}, r"Qwen3MoeForCausalLM, but here is experts.shared_ffn_size=32"),
        ("head", {"scale": 2.0, "bias_rate": 0.1}, r"experts.scale=2.0, .*experts.bias_rate=0.1"),
        ("none", {"groups": 4, "groups_per_token": 2}, r"experts.groups_per_token=2, where it has 4"),
    ],
)
def test_a_mixture_that_transformers_lacks_is_refused(norm: Any, changes: Any, reason: str) -> None:
    sizes = LlamaConfig(experts=Experts(8, 2, 32, **changes), qk_norm=norm)
    with pytest.raises(ConfigError, match=reason):
        hugging_face_config(sizes, dtype="float32", end_of_document=None)


def test_what_a_config_lacks_is_named() -> None:
    told = hugging_face_config(LlamaConfig(), dtype="float32", end_of_document=None)
    del told["num_hidden_layers"]
    with pytest.raises(ConfigError, match="config of a model of the type 'llama' lacks num_hidden_layers"):
        sizes_from_hugging_face(told)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "deepseek_v3"}, "multi-head latent attention"),
        ({"model_type": "gpt2"}, "a model of the type 'gpt2'; hpcpar computes llama, mistral"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary embeddings of the type 'yarn'"),
        (
            {"rope_scaling": {"type": "linear"}, "rope_parameters": {"rope_type": "default"}},
            "rotary embeddings of the type 'linear'",
        ),
        ({"sliding_window": 64, "attention_bias": True}, "a window of 64 tokens, biases of the attention's"),
        ({"model_type": "mistral", "use_sliding_window": False}, "a window of 4096 tokens"),
        ({"hidden_act": "gelu"}, "the activation 'gelu'"),
        ({"model_type": "glm4_moe"}, "rotary embeddings of 0.5 of each head"),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [2]}
            | {"moe_intermediate_size": 8},
            r"mlp_only_layers=\[2\], .* first layers alone lack experts",
        ),
    ],
)
def test_what_our_attention_does_not_do_is_refused(changes: dict[str, Any], reason: str) -> None:
    told = hugging_face_config(LlamaConfig(), dtype="float32", end_of_document=None)
    with pytest.raises(ConfigError, match=reason):
        sizes_from_hugging_face(told | changes)


def refused(directory: Path, sizes: LlamaConfig, layers: Layers | None = None) -> Exception:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        read_parameters(Llama(sizes, layers, seed=0), directory, Communicator.alone())
    return caught.value


def test_files_that_do_not_fit_the_model_are_named(tmp_path: Path) -> None:
    theirs("Glm4Moe", tmp_path)
    sizes = read_sizes(tmp_path)
    assert sizes.experts is not None
    other = replace(sizes, experts=replace(sizes.experts, scale=1.0))
    assert "the model has experts.scale=1.0, and" in str(refused(tmp_path, other))
    unbiased = replace(sizes, experts=replace(sizes.experts, bias_rate=0.0, z_loss=0.1))
    assert "has biases that select experts" in str(refused(tmp_path, unbiased))

    stored = load_file(tmp_path / "model.safetensors")
    lacking = dict(stored)
    lacking["surplus"] = lacking.pop("model.norm.weight")
    save_file(lacking, tmp_path / "model.safetensors")
    assert "lacks model.norm.weight" in str(refused(tmp_path, sizes))
    save_file(stored | {"surplus": torch.ones(1)}, tmp_path / "model.safetensors")
    assert "also has surplus" in str(refused(tmp_path, sizes))
    ahead = {"model.layers.3.eh_proj.weight": torch.ones(1)}
    save_file(stored | {"model.norm.weight": torch.ones(25)} | ahead, tmp_path / "model.safetensors")
    assert "has the shape [25], and by config.json it has [24]" in str(refused(tmp_path, sizes))
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    assert "cannot read the files of" in str(refused(tmp_path, sizes))
    (tmp_path / "model.safetensors").unlink()
    for index in ("{}", "[]", '{"weight_map": null}', '{"weight_map": {"lm_head.weight": 1}}'):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        assert "index.json has no weight_map" in str(refused(tmp_path, sizes))
    index = json.dumps({"weight_map": dict.fromkeys(stored, "elsewhere.safetensors")})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    save_file({"lm_head.weight": stored["lm_head.weight"]}, tmp_path / "elsewhere.safetensors")
    assert "cannot read model." in str(refused(tmp_path, sizes))


BIASES = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        (BIASES, torch.ones(1), f"{BIASES} in .* has the shape [1], and by config.json it has [8]"),
        ("model.norm.weight", torch.ones(24, dtype=torch.int8), "model.norm.weight in .* is of torch.int8"),
        ("model.norm.weight", torch.ones(24).to(torch.float8_e4m3fn), "is of torch.float8_e4m3fn: quantized"),
    ],
    ids=str,
)
def test_tensors_of_another_form_are_named(name: str, value: Tensor, reason: str, tmp_path: Path) -> None:
    theirs("Glm4Moe", tmp_path)
    save_file(load_file(tmp_path / "model.safetensors") | {name: value}, tmp_path / "model.safetensors")
    pattern = re.escape(reason).replace(re.escape(".*"), ".*")
    assert re.search(pattern, str(refused(tmp_path, read_sizes(tmp_path))))
    with pytest.raises(CheckpointError, match=pattern):
        stored_values(read_sizes(tmp_path), tmp_path, Communicator.alone())(name)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads = 0 must be a whole number of at least 1"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_local_experts": [5]}, r"num_local_experts = \[5\] must be a whole number"),
        ({"rms_norm_eps": "small"}, "norm_epsilon = 'small' must be a finite number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1; give true or false"),
        ({"rope_parameters": [1]}, r"rope_parameters = \[1\] must be an object"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta = 'x' must be a finite number"),
        (
            {"model_type": "qwen3_moe", "moe_intermediate_size": 8, "mlp_only_layers": 3},
            "mlp_only_layers=3, .* first layers alone lack experts",
        ),
        ({"model_type": []}, r"a model of the type \[\]"),
        (
            {"num_experts_per_tok": 1},
            "one expert of each token, whose renormalised weight is always 1.* share_experts",
        ),
    ],
    ids=str,
)
def test_values_of_a_config_that_do_not_fit_are_named(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    theirs("Mixtral", tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(told | changes))
    with pytest.raises(ConfigError, match=f"{re.escape(str(tmp_path))}/config.json: .*{reason}"):
        read_sizes(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"a config of list: \[1\]; it must be an object"):
        read_sizes(tmp_path)


def test_a_file_that_one_rank_cannot_read_stops_all(tmp_path: Path) -> None:
    theirs("Llama", tmp_path / "0")
    (tmp_path / "1").mkdir()

    def on_rank(comm: Communicator) -> str:
        model: nn.Module = Llama(read_sizes(tmp_path / "0"), seed=None)
        with pytest.raises(PeerFailedError) as caught:
            read_parameters(model, tmp_path / str(comm.rank), comm)
        return str(caught.value)

    for told in run_loopback(2, on_rank):
        assert "failed on 1 of 2 ranks" in told
        assert "config.json" in told
