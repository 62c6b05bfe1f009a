from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from hpcpar.errors import ConfigError
from hpcpar.mesh import Layout
from hpcpar.models import Experts, LlamaConfig
from hpcpar.tensor_parallel import TensorParallel
from hpcpar.training.composition import require_composition
from hpcpar.training.config import (
    Config,
    ExpertsSection,
    ModelSection,
    TensorParallelSection,
    known_keys,
    parse,
    read,
)
from hpcpar.training.usual_names import ELSEWHERE, OF_OTHERS


def refused(text: str = "", *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, source="run.toml", overrides=overrides)
    return str(caught.value)


def test_an_empty_file_is_the_default_run() -> None:
    assert parse("", source="run.toml") == Config()


def test_values_come_from_the_file_and_overrides_win() -> None:
    config = parse(
        "[train]\nsteps = 100\nsequence = 64\n[optimizer]\nlearning_rate = 1e-4\n",
        source="run.toml",
        overrides=["train.steps=7", "optimizer.betas=[0.8, 0.9]", "output.directory=runs/x"],
    )
    assert (config.train.steps, config.train.sequence) == (7, 64)
    assert config.optimizer.learning_rate == 1e-4
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.output.directory == Path("runs/x")


def test_one_path_may_stand_without_brackets() -> None:
    assert parse("", source="run.toml", overrides=["data.paths=books"]).data.paths == (Path("books"),)


def test_an_override_is_read_as_toml_or_else_as_the_text_that_it_is() -> None:
    config = parse(
        "",
        source="run.toml",
        overrides=["model.tie_embeddings=true", 'model.preset="5m"', "train.device=cpu"],
    )
    assert (config.model.tie_embeddings, config.model.preset) == (True, "5m")


def test_a_misspelt_key_is_named_with_its_file_and_the_nearest_key() -> None:
    assert (
        refused("[train]\nstpes = 3\n") == "run.toml: there is no key train.stpes; did you mean train.steps?"
    )


def test_a_misspelt_override_is_named_as_the_user_wrote_it() -> None:
    assert refused("", "train.stpes=3") == (
        "override 'train.stpes=3': there is no key train.stpes; did you mean train.steps?"
    )
    assert refused("[train]\nsteps = 2\n", "trian.steps=3") == (
        "override 'trian.steps=3': there is no key trian.steps; did you mean train.steps?"
    )
    assert refused("[trian]\nsteps = 2\n", "train.steps=3").startswith("run.toml: there is no key trian;")


def test_a_key_in_the_wrong_table_is_shown_its_own() -> None:
    assert "there is no key train.learning_rate; did you mean optimizer.learning_rate?" in refused(
        "[train]\nlearning_rate = 1\n"
    )


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("optimizer.lr", "optimizer.learning_rate?"),
        ("lr", "optimizer.learning_rate?"),
        (
            "train.batch_size",
            "train.global_batch (sequences of a step, over all ranks) or train.micro",
        ),
        ("train.warmup_ratio", "schedule.warmup_fraction (of train.steps)?"),
        ("train.max_steps", "train.steps (of the optimizer)?"),
        ("train.gradient_accumulation_steps", "train.microbatch (what a rank has of train.global_"),
        ("train.micro_batch_size", "train.microbatch?"),
        ("data.seq_len", "train.sequence?"),
        ("train.seq-len", "train.sequence?"),
        ("optimizer.max_grad_norm", "optimizer.clip_norm?"),
        ("zero_optimization", "optimizer.zero_stage?"),
        ("train.bf16", "train.precision?"),
        ("train.save_steps", "output.checkpoint_every (steps) or output.checkpoint_minutes?"),
        ("train.learing_rate", "optimizer.learning_rate?"),
        ("model.n_layer", "model.layers?"),
        ("model.name", "model.preset?"),
        ("mesh.tensor_parallel_size", "mesh.tp?"),
        ("data.text_column", "data.text_key?"),
        ("seed", "model.seed or train.seed?"),
        ("training", "train?"),
    ],
)
def test_a_name_that_others_use_or_that_is_misplaced_is_answered_with_ours(key: str, meant: str) -> None:
    assert f"there is no key {key}; did you mean {meant}" in refused("", f"{key}=1")


def test_every_answer_to_a_name_of_others_begins_with_a_key_that_there_is() -> None:
    there = {*known_keys(), *Config.model_fields, "the"}  # option --resume
    assert {re.split(r"[ :,]", meant)[0] for meant in ELSEWHERE} <= there
    assert len(OF_OTHERS) == sum(len(names.split()) for names in ELSEWHERE.values())


def test_a_value_in_the_place_of_a_table_is_answered_with_its_keys() -> None:
    assert refused("", "schedule=cosine") == (
        "override 'schedule=cosine': schedule = 'cosine': this is a table, of schedule.warmup_fraction, "
        "schedule.final_fraction"
    )


def test_an_unknown_table_is_answered_with_those_that_there_are() -> None:
    assert "there is no key nonsense; there are model, data, train" in refused("[nonsense]\nx = 1\n")


def test_a_key_like_no_other_is_answered_with_those_of_its_table() -> None:
    assert refused("[schedule]\nqqq = 1\n").endswith(
        "there are schedule.warmup_fraction, schedule.final_fraction"
    )


def test_a_value_of_the_wrong_kind_names_key_value_and_what_is_wanted() -> None:
    message = refused("[train]\nsteps = 'many'\n")
    assert message.startswith("run.toml: train.steps = 'many': input should be a valid integer")


def test_a_value_out_of_range_is_refused() -> None:
    assert "train.steps = 0: input should be greater than 0" in refused("", "train.steps=0")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.seed=18446744073709551616", "train.seed = 18446744073709551616: input should be less than"),
        ("model.rope_theta=inf", "model.rope_theta = inf: input should be a finite number"),
        ("optimizer.learning_rate=inf", "optimizer.learning_rate = inf: input should be a finite number"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas.1 = 1.0: input should be less than 1"),
        (
            "optimizer.betas=[-0.1, 0.9]",
            "optimizer.betas.0 = -0.1: input should be greater than or equal",
        ),
        ("optimizer.weight_decay=inf", "optimizer.weight_decay = inf: input should be a finite number"),
        (
            "optimizer.bucket_mib=1e-9",
            "optimizer.bucket_mib = 1e-09: input should be greater than",
        ),
        ("train.recompute_layers=true", "recompute_layers = True: this key is not one"),
        ("optimizer.zero_stage=true", "optimizer.zero_stage = True: this key is not one"),
        ("data.eos_token=0", "data.eos_token = 0: give the token's text, in quotes, or false"),
        ("data.eos_token=", "data.eos_token = '': give the token's text, in quotes, or false"),
        (
            "optimizer.first_bucket_mib=1e-9",
            "optimizer.first_bucket_mib = 1e-09: input should be greater",
        ),
        ("optimizer.algorithm=rign", "optimizer.algorithm = 'rign': for allreduce there are ring, "),
        ("optimizer.moments=float16", "optimizer.moments = 'float16': input should be 'bfloat16'"),
        ("data.paths=", "data.paths.0 = '': the name of a file or directory is empty; give one, or leave"),
        ("data.tokenizer=", "data.tokenizer = '': the name of a file or directory is empty"),
        ("data.cache=' '", "data.cache = ' ': the name of a file or directory is empty"),
        ("output.directory=", "output.directory = '': the name of a file or directory is empty"),
        ("optimizer.offload=", "optimizer.offload = '': the name of a file or directory is empty"),
        ("optimizer.shared_parameters=true", "each rank updates all parameters; set optimizer.zero_stage=1"),
    ],
)
def test_a_value_that_nothing_could_be_built_with_is_refused(override: str, words: str) -> None:
    assert words in refused("", override)


def test_the_names_of_algorithms_are_those_of_the_stages_collective() -> None:
    for stage, words in ((0, "allreduce"), (1, "reduce_scatter"), (2, "reduce_scatter")):
        assert f"for {words} there are" in refused(
            "", "optimizer.algorithm=x", f"optimizer.zero_stage={stage}"
        )
    for name in ("ring", "native"):
        told = parse("", source="x", overrides=[f"optimizer.algorithm={name}", "optimizer.zero_stage=3"])
        assert told.optimizer.algorithm == name


def test_every_mistake_is_told_at_once() -> None:
    assert len(refused("[train]\nstpes = 3\n", "optimizer.learning_rate=-1").splitlines()) == 2


@pytest.mark.parametrize("override", ["train.steps", "=3", "train.=3", ".steps=3"])
def test_an_override_that_is_not_key_value_is_refused(override: str) -> None:
    assert "is not key=value" in refused("", override)


def test_an_override_below_a_value_is_refused() -> None:
    assert "steps is a value, not a table" in refused("[train]\nsteps = 3\n", "train.steps.x=1")


def test_a_file_that_is_not_toml_is_refused_with_the_line() -> None:
    assert "run.toml is not a TOML file" in refused("steps 3\n")


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        read(tmp_path / "none.toml")


def test_a_run_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nsteps = 5\n")
    assert read(tmp_path / "run.toml", ["train.seed=3"]).train.model_dump(include={"steps", "seed"}) == {
        "steps": 5,
        "seed": 3,
    }


def test_every_field_of_a_model_can_be_set() -> None:
    assert {field.name for field in dataclasses.fields(LlamaConfig)} == set(ModelSection.model_fields) - {
        "hugging_face",
        "preset",
        "seed",
    }


def test_every_field_of_experts_can_be_set() -> None:
    assert [field.name for field in dataclasses.fields(Experts)] == list(ExpertsSection.model_fields)


def test_experts_change_those_of_the_preset_or_come_to_a_dense_one() -> None:
    config = parse("[model]\npreset = 'tiny-moe'\n[model.experts]\ncount = 4\n", source="run.toml")
    experts = config.model_config_for(256).experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.balance_loss) == (4, 2, 0.01)
    assert parse("", source="run.toml").model_config_for(256).experts is None
    sizes = ["model.experts.count=4", "model.experts.per_token=2", "model.experts.ffn_size=64"]
    added = parse("", source="run.toml", overrides=sizes).model_config_for(256).experts
    assert added == Experts(4, 2, 64)
    with pytest.raises(ConfigError, match="experts need per_token, ffn_size, too"):
        parse("", source="run.toml", overrides=sizes[:1]).model_config_for(256)


def test_a_key_of_experts_that_there_is_not_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"no key model\.experts\.num_experts; did you mean model\.experts\.count"
    ):
        parse("", source="run.toml", overrides=["model.experts.num_experts=4"])


def test_the_model_takes_its_vocabulary_and_length_from_the_data() -> None:
    config = parse("[model]\nlayers = 2\n[train]\nsequence = 77\n", source="run.toml")
    model = config.model_config_for(300)
    assert (model.vocab_size, model.max_sequence, model.layers) == (300, 77, 2)


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused() -> None:
    config = parse("[model]\nvocab_size = 100\n", source="run.toml")
    with pytest.raises(ConfigError, match=r"model\.vocab_size = 100, but the tokenizer makes 256"):
        config.model_config_for(256)


def test_a_sequence_longer_than_the_model_is_refused() -> None:
    config = parse("[model]\nmax_sequence = 64\n[train]\nsequence = 65\n", source="run.toml")
    with pytest.raises(ConfigError, match=r"train\.sequence = 65 is longer than model\.max_sequence = 64"):
        config.model_config_for(256)


def test_what_is_about_sequence_parallelism_is_refused_without_it() -> None:
    assert refused("", "tensor_parallel.gather_again=true") == (
        "override 'tensor_parallel.gather_again=true': tensor_parallel.gather_again = True: this is about "
        "sequence parallelism; set tensor_parallel.sequence_parallel=true, too"
    )
    assert "tensor_parallel.chunks = 2: this is about" in refused("[tensor_parallel]\nchunks = 2\n")
    text = "[tensor_parallel]\nchunks = 2\ngather_again = true\nsequence_parallel = true\n"
    assert parse(text, source="run.toml").tensor_parallel.chunks == 2


def test_the_keys_of_tensor_parallelism_are_the_options_of_its_axis() -> None:
    options = set(inspect.signature(TensorParallel).parameters) - {"comm", "twice"}
    assert set(TensorParallelSection.model_fields) == options


def test_more_layers_to_recompute_than_there_are_is_refused() -> None:
    config = parse("[model]\nlayers = 2\n[train]\nrecompute_layers = 3\n", source="run.toml")
    with pytest.raises(ConfigError, match=r"train\.recompute_layers = 3, but the model has 2 layers"):
        config.model_config_for(256)


def test_layers_to_recompute_are_refused_where_nothing_is_recomputed() -> None:
    require_composition(parse("[train]\nrecompute_layers = 1\nrecompute = 'full'\n", source="x"), Layout())
    with pytest.raises(ConfigError, match=r"train\.recompute_layers = 1, but train\.recompute = 'none'; set"):
        require_composition(parse("[train]\nrecompute_layers = 1\n", source="x"), Layout())


def test_a_sequence_must_divide_where_ranks_share_it_only() -> None:
    require_composition(parse("[train]\nsequence = 30\n", source="x"), Layout(tp=4))
    config = parse("[train]\nsequence = 3\n[tensor_parallel]\nsequence_parallel = true\n", source="x")
    require_composition(config, Layout(tp=3))
    with pytest.raises(ConfigError, match=r"train\.sequence = 3 .* mesh\.tp = 4 ranks.*; make it 4, or set"):
        require_composition(config, Layout(tp=4))


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'tiny'"):
        parse("[model]\npreset = 'tiyn'\n", source="run.toml").model_config_for(256)


def test_keys_are_listed_with_their_tables() -> None:
    assert {"train.steps", "data.paths", "output.directory", "mesh.dp"} <= set(known_keys())


@pytest.mark.parametrize("path", sorted(Path("examples").glob("*.toml")), ids=str)
def test_every_example_is_a_valid_run(path: Path) -> None:
    assert read(path).model_config_for(256).parameters() > 0
