"""Files that the planner reads: models, runs, machines, constants and measured rows; and what it writes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcpar.errors import ConfigError, HpcparError
from hpcpar.models.hugging_face_config import sizes_from_hugging_face
from hpcpar.planner.cluster import MACHINES, Cluster
from hpcpar.planner.constants import constants_of, read_constants, write_constants
from hpcpar.planner.estimate import Estimate, estimate
from hpcpar.planner.hugging_face_shapes import FAMILIES
from hpcpar.planner.layout import Layout
from hpcpar.planner.model_shapes import ModelShape
from hpcpar.planner.run_file import PlannedRun, job_script, read_run, train_toml
from hpcpar.planner.shapes import LlamaConfig
from hpcpar.planner.software import SOFTWARE
from hpcpar.planner.strategy import Strategy
from hpcpar.planner.validate import read_rows
from hpcpar.training.config import parse

LLAMA = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}
GLM = {"model_type": "glm4_moe", "n_routed_experts": 8, **EXPERTS, "partial_rotary_factor": 1.0}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK = {
    **{"model_type": "deepseek_v2", "vocab_size": 102_400, "hidden_size": 2048, "num_hidden_layers": 27},
    **{"num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 10_944},
    **{"moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "q_lora_rank": None},
    **{"num_experts_per_tok": 6, "first_k_dense_replace": 1, **LATENT},
}


def _saved(directory: Path, told: object, name: str = "config.json") -> Path:
    path = directory / name
    path.write_text(told if isinstance(told, str) else json.dumps(told))
    return path


def _run(directory: Path, told: object, name: str = "config.json") -> PlannedRun:
    return read_run(str(_saved(directory, told, name)))


def _estimate(model: ModelShape, machine: Cluster | None = None, **given: Any) -> Estimate:
    cluster = (machine or Cluster.named("h100-dgx")).with_nodes(1)
    strategy = Strategy(Layout(dp=cluster.size), cluster.size, sequence=512, **given)
    return estimate(model, cluster, strategy)


# --- Hugging Face ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "billions"),
    [  # of their model cards
        ({**LLAMA, "model_type": "llama"}, 7.242),
        (
            {
                **{
                    "model_type": "gpt_neox",
                    "vocab_size": 50_432,
                    "hidden_size": 6144,
                    "num_hidden_layers": 44,
                },
                **{"num_attention_heads": 64, "intermediate_size": 24_576, "hidden_act": "gelu_fast"},
            },
            20.55,
        ),
        (
            {
                **{"model_type": "phi", "vocab_size": 51_200, "hidden_size": 2560, "num_hidden_layers": 32},
                **{"num_attention_heads": 32, "intermediate_size": 10_240},
            },
            2.780,
        ),
        (
            {
                **{
                    "model_type": "gemma2",
                    "vocab_size": 256_000,
                    "hidden_size": 2304,
                    "num_hidden_layers": 26,
                },
                **{"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 9216},
            },
            2.614,
        ),
        (
            {
                "model_type": "gemma3",
                "text_config": {
                    **{"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34},
                    "intermediate_size": 10_240,
                },
            },
            3.88,
        ),
        (
            {
                **{"model_type": "qwen2_moe", "vocab_size": 151_936, "hidden_size": 2048},
                **{"num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 5632},
                **{"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
                "shared_expert_intermediate_size": 5632,
            },
            14.32,
        ),
        (
            {
                **{"model_type": "opt", "vocab_size": 50_272, "hidden_size": 7168, "num_hidden_layers": 48},
                **{"num_attention_heads": 56, "ffn_dim": 28_672, "max_position_embeddings": 2048},
            },
            29.97,
        ),
        (
            {
                **{"model_type": "falcon", "vocab_size": 65_024, "hidden_size": 4544},
                **{"num_hidden_layers": 32, "num_attention_heads": 71},
            },
            6.92,
        ),
        (
            {
                **{"model_type": "gpt2", "vocab_size": 50_257, "n_embd": 1600, "n_layer": 48, "n_head": 25},
                "n_positions": 1024,
            },
            1.558,
        ),
        (DEEPSEEK, 15.71),
    ],
    ids=lambda given: given["model_type"] if isinstance(given, dict) else "",
)
def test_a_config_has_the_parameters_of_its_model(
    config: dict[str, Any], billions: float, tmp_path: Path
) -> None:
    model = _run(tmp_path, config).model
    assert model.parameters() / 1e9 == pytest.approx(billions, rel=2e-3)
    assert _estimate(model).step_s > 0


TRAINED: list[dict[str, Any]] = [
    {"model_type": "llama", "tie_word_embeddings": True, "initializer_range": 0.01},
    {"model_type": "mistral", "sliding_window": None, "head_dim": 96},
    {"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6},
    {"model_type": "olmoe", **EXPERTS, "moe_intermediate_size": 14_336, "norm_topk_prob": False},
    {"model_type": "olmoe", **EXPERTS, "moe_intermediate_size": 14_336, "norm_topk_prob": True},
    {"model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": [1, 0], "router_aux_loss_coef": 0.01},
    {**GLM, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "use_qk_norm": True},
]
UNTRAINED: list[dict[str, Any]] = [
    {"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    {"model_type": "llama", "attention_bias": True},
    {"model_type": "mistral", "sliding_window": 4096},
    {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 1},
    {**GLM, "partial_rotary_factor": 0.5},
    *({"model_type": kind} for kind in ("qwen2", "gemma2", "phi", "gpt_neox", "phi3", "olmo2")),
    {"model_type": "qwen2_moe", **EXPERTS},
]


@pytest.mark.parametrize("changes", TRAINED, ids=lambda changes: changes["model_type"])
def test_what_is_written_of_a_config_is_what_the_trainer_reads_of_it(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    config = {**LLAMA, **changes}
    run = _run(tmp_path, config)
    written = parse(train_toml(_estimate(run.model), run), source="written")
    wanted = sizes_from_hugging_face(config)
    found: LlamaConfig = written.model_config_for(256)
    assert replace(found, max_sequence=wanted.max_sequence) == wanted


@pytest.mark.parametrize("changes", UNTRAINED, ids=lambda changes: changes["model_type"])
def test_what_the_trainer_refuses_of_a_config_is_planned_but_not_written(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    config = {**LLAMA, **changes}
    with pytest.raises(ConfigError):
        sizes_from_hugging_face(config)
    run = _run(tmp_path, config)
    planned = _estimate(run.model)
    with pytest.raises(ConfigError, match="which hpcpar plans but does not train"):
        train_toml(planned, run)
    table = f'[model]\nhugging_face = "{tmp_path}"\n'
    with pytest.raises(ConfigError, match="which hpcpar plans but does not train"):
        train_toml(planned, _run(tmp_path, table, "run.toml"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "bert"}, "type 'bert' are not planned.*gpt_neox"),
        ({"hidden_size": "4096"}, "hidden_size = '4096' must be a whole number"),
        ({"hidden_size": 4096.0}, "must be a whole number"),
        ({"hidden_size": True}, "must be a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0 must be"),
        ({"num_attention_heads": 33}, "does not divide among heads = 33"),
        ({"num_key_value_heads": 5}, "no multiple of kv_heads = 5"),
        ({"num_hidden_layers": -3}, "num_hidden_layers = -3 must be"),
        ({"intermediate_size": [1, 2]}, "intermediate_size = .* must be"),
        ({**GLM, "first_k_dense_replace": 32}, "leaves none of layers = 32"),
        ({**GLM, "moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": [3]}, r"mlp_only_layers=\[3\]"),
        ({**DEEPSEEK, "kv_lora_rank": None}, "lacks kv_lora_rank"),
    ],
)
def test_a_wrong_config_is_refused_by_file_and_key(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"model file .*config\.json: .*{said}"):
        _run(tmp_path, {**LLAMA, **changes})


def test_what_a_config_may_leave_out_or_begin_with(tmp_path: Path) -> None:
    config = {**LLAMA, "max_position_embeddings": None, "num_key_value_heads": None, "head_dim": None}
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(config).encode())
    model = read_run(str(path)).model
    assert (model.max_sequence, model.kv_heads, model.head_size) == (4096, 32, 128)
    assert model.untrained is None
    assert {"llama", "gemma2", "deepseek_v3"} < FAMILIES.keys()


# --- TOML -----------------------------------------------------------------------------------------

OWN = "vocab_size = 1000\nhidden_size = 512\nlayers = 4\nheads = 8\ngated = false\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('model = "llama3-8b"', "model = 'llama3-8b' must be a table"),
        (OWN + "[latent]\nfoo = 1", "no field 'foo'"),
        (OWN + "[latent]\nvalue = 1", "latent lacks query_rank"),
        (OWN + "[experts]\ncount = 8\nper_token = 2\nffn_size = 64\nfirst_dense = 4", "leaves none of"),
        (OWN.replace("heads = 8", "heads = 0"), "heads = 0 must be"),
        (OWN.replace("layers = 4", 'layers = "4"'), "layers = '4' must be a whole number"),
        (OWN.replace("layers = 4", "layers = -4"), "layers = -4 must be"),
        (OWN.replace("false", '"no"'), "gated = 'no' must be"),
        (OWN + "kv_heads = 3", "no multiple of kv_heads = 3"),
        (OWN.replace("512", "500"), "500 does not divide among heads = 8"),
        ('[model]\npreset = "gpt-175b"\nlayer = 3', "did you mean 'layers'"),
        ('[model]\npreset = "llama3-8b"\nrope_theta = "x"', "rope_theta = 'x' must be a number"),
        ('[model]\npreset = "tiny-moe"\n[model.experts]\nz_loss = "x"', "z_loss = 'x' must be a number"),
        ("[model]\nhugging_face = 5", "hugging_face = 5 must be text"),
        ('train = "x"\n[model]', "train = 'x' must be a table"),
        ("stage = 3\n[model]", "stage = 3 must be tables"),
        ('[train]\nsequence = "4096"', r"train\.sequence = '4096' must be"),
        ("[train]\nglobal_batch = -4", r"train\.global_batch = -4 must be"),
        ('[mesh]\ndp = "8"', r"mesh\.dp = '8' must be"),
        ("[recipe]\nshape = 8", r"recipe\.shape = 8 must be text"),
    ],
)
def test_a_wrong_run_is_refused_by_file_and_key(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"model file .*run\.toml: .*{said}"):
        _run(tmp_path, text, "run.toml")


@pytest.mark.parametrize("name", ["config.json", "run.toml"])
def test_a_file_that_is_not_utf_8_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"is no (JSON|TOML): 'utf-8'"):
        read_run(str(tmp_path / name))


def test_changes_to_a_published_model_are_followed_by_the_sizes_that_depend_on_them(tmp_path: Path) -> None:
    gpt = _run(tmp_path, '[model]\npreset = "gpt-175b"\nhidden_size = 6144', "run.toml").model
    assert (gpt.head_size, gpt.ffn_size) == (64, 4 * 6144)
    text = '[model]\npreset = "deepseek-v3"\n[model.experts]\ncount = 64'
    model = _run(tmp_path, text, "run.toml").model
    assert model.experts is not None
    assert (model.experts.count, model.experts.ffn_size) == (64, 2048)
    # The trainer has no preset of this name, so its sizes are written.
    run = _run(tmp_path, '[model]\npreset = "llama3-405b"\nlayers = 4', "run.toml")
    assert parse(train_toml(_estimate(run.model), run), source="written").model.layers == 4


def test_a_run_without_a_model_has_the_trainers_default(tmp_path: Path) -> None:
    run = _run(tmp_path, "[train]\nglobal_batch = 16\nsequence = 256\n[mesh]\ndp = 2", "run.toml")
    assert replace(run.model, name="tiny") == ModelShape.named("tiny")
    assert (run.table, run.global_batch, run.devices) == ({}, 16, 2)


# --- what is written ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "on_gpus"), [("h100-dgx", True), ("two-cores", False), ("without units", True)]
)
def test_a_run_is_written_for_the_devices_of_its_machine(machine: str, on_gpus: bool) -> None:
    cluster = Cluster.named("h100-dgx" if "units" in machine else machine)
    if "units" in machine:
        cluster = replace(cluster, device=replace(cluster.device, units=1))
    model = ModelShape.named("tiny")
    planned = _estimate(model, cluster, precision="float32")
    text = train_toml(planned, PlannedRun(model, {"preset": "tiny"}))
    assert ('device = "cuda"' in text, "--gpus-per-node" in job_script(planned)) == (on_gpus, on_gpus)


def test_what_the_trainer_cannot_run_is_not_written() -> None:
    model = ModelShape.named("llama3-8b")
    run = PlannedRun(model, {"preset": "llama3-8b"})
    with pytest.raises(ConfigError, match="float8 is planned, but hpcpar does not train in it"):
        train_toml(_estimate(model, precision="float8"), run)
    with pytest.raises(ConfigError, match="TPU v5p chip"):
        train_toml(_estimate(model, Cluster.named("tpu-v5p")), run)


def test_the_jobs_name_is_one_word() -> None:
    script = job_script(_estimate(replace(ModelShape.named("tiny"), name="my run (v2)")))
    assert "#SBATCH --job-name=my-run-v2\n" in script


# --- machines and constants -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("devices_per_node", "0.5", "devices_per_node = 0.5 must be a whole number"),
        ("units", "2.5", r"device\.units = 2\.5 must be a whole number"),
        ("memory_gib", "inf", r"device\.memory_gib = inf must be a finite number"),
        ("memory_gib", "nan", r"device\.memory_gib = nan must be a finite number"),
        ("matrix", "0", r"efficiency\.matrix = 0 must be a finite number above 0"),
        ("matrix", "2.5", r"efficiency\.matrix = 2\.5 must be .* at most 1"),
        ("attention", "0", r"efficiency\.attention = 0 must be"),
        ("bfloat16", "0", r"peak_tflops\.bfloat16 = 0 must be"),
        ("gb_per_s", "inf", r"gb_per_s = inf must be a finite number"),
    ],
)
def test_a_wrong_machine_is_refused_by_file_and_key(key: str, value: str, said: str, tmp_path: Path) -> None:
    text = (MACHINES / "h100-dgx.toml").read_text()
    changed = re.sub(rf"^{key} = .*$", f"{key} = {value}", text, count=1, flags=re.MULTILINE)
    assert changed != text
    with pytest.raises(ConfigError, match=rf"machine file .*mine\.toml: .*{said}"):
        Cluster.read(_saved(tmp_path, changed, "mine.toml"))


def test_a_machine_needs_a_type_to_train_in(tmp_path: Path) -> None:
    text = (MACHINES / "tpu-v5p.toml").read_text()
    for types, known in (("int8 = 918", False), ("int8 = 918\nbfloat16 = 459", True)):
        path = _saved(tmp_path, text.replace("bfloat16 = 459", types), "mine.toml")
        if known:
            assert list(Cluster.read(path).device.peak_flops) == ["bfloat16"]
        else:
            with pytest.raises(ConfigError, match="of a type to train in; give one of float64"):
                Cluster.read(path)
    (tmp_path / "mine.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"machine file .* is no TOML: 'utf-8'"):
        Cluster.read(tmp_path / "mine.toml")


@pytest.mark.parametrize("value", ["0", "-0.5", "NaN", "Infinity", "true", '"x"', "[1]"])
def test_a_wrong_constant_is_refused_by_file_and_name(value: str, tmp_path: Path) -> None:
    path = _saved(tmp_path, f'{{"device.efficiency.matrix": {value}}}', "mine.json")
    with pytest.raises(ConfigError, match=r"constants .*mine\.json: device\.efficiency\.matrix = "):
        read_constants(str(path))


@pytest.mark.parametrize("name", SOFTWARE)
def test_constants_that_were_written_are_read(name: str, tmp_path: Path) -> None:
    constants = constants_of(Cluster.named("two-cores"), SOFTWARE[name])
    write_constants(tmp_path / "mine.json", constants)
    assert read_constants(str(tmp_path / "mine.json")) == pytest.approx(constants, rel=1e-4)
    (tmp_path / "mine.json").write_bytes(b"\xe9")
    with pytest.raises(ConfigError, match="is no JSON: 'utf-8'"):
        read_constants(str(tmp_path / "mine.json"))


# --- measured rows --------------------------------------------------------------------------------

HEADER = "model,devices,global_batch,microbatch,sequence,tp,dp,pp,step_ms"
ROW = "llama3-8b,8,64,1,4096,1,8,1,5000"


@pytest.mark.parametrize(
    ("columns", "row", "said"),
    [
        ("", ROW.replace("5000", "0"), "step_ms = '?0"),
        ("", ROW.replace("5000", "nan"), "step_ms = 'nan' must be a finite number above 0"),
        ("", ROW.replace("5000", "-5"), "step_ms = '-5'"),
        ("", ROW + ",7", "10 cells, but the header has 9"),
        ("", "llama3-8b,3,64,1,4096,3,1,1,5000", "heads=32 do not divide among tp=3"),
        ("", "llama3-8b,64,64,1,4096,64,1,1,5000", "heads=32 do not divide among tp=64"),
        ("", "llama3-8b,64,64,1,4096,1,1,64,5000", "pp=64 stages, but llama3-8b has 32 layers"),
        ("", ROW.replace("4096", "4096.5"), "sequence = '4096.5' must be a whole number"),
        (",ep", ROW + ",8", "llama3-8b has no experts to divide"),
        (",schedule", ROW + ",foo", "no pipeline schedule 'foo'"),
        (",sequence_parallel", ROW + ",maybe", "sequence_parallel = 'maybe' must be one of true"),
        (",precision", ROW + ",float8", "no peak FLOP/s for 'float8'"),
        (",machine", ROW + ",nope", "no machine is called 'nope'"),
        (",machine,offload", ROW + ",{bare},cpu", "add host.gb_per_s to its file"),
    ],
)
def test_a_wrong_row_is_refused_by_file_and_line(columns: str, row: str, said: str, tmp_path: Path) -> None:
    text = (MACHINES / "a100-dgx.toml").read_text()
    bare = _saved(tmp_path, text[: text.index("[host]")], "bare.toml")
    path = _saved(tmp_path, f"\n{HEADER}{columns}\n\n\n{row.format(bare=bare)}\n", "rows.csv")
    with pytest.raises(HpcparError, match=rf"rows\.csv, line 5: .*{said}"):
        read_rows(path)


def test_a_row_of_a_model_by_its_sizes_needs_heads(tmp_path: Path) -> None:
    path = _saved(
        tmp_path, f"{HEADER.replace('model', 'hidden_size,heads,layers')}\n512,0,4{ROW[9:]}\n", "rows.csv"
    )
    with pytest.raises(ConfigError, match="line 2: heads = 0 must be"):
        read_rows(path)


@pytest.mark.parametrize(
    ("header", "said"), [(f"{HEADER},step_ms", "two columns 'step_ms'"), (f"{HEADER},é", "no CSV in UTF-8")]
)
def test_a_wrong_file_of_rows_is_refused(header: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(f"{header}\n{ROW},1\n", encoding="latin-1")
    with pytest.raises(ConfigError, match=said):
        read_rows(tmp_path / "rows.csv")
