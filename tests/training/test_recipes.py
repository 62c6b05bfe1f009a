from __future__ import annotations

from pathlib import Path

import pytest

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import ConfigError
from hpcpar.mesh import Layout
from hpcpar.planner.cluster import Cluster
from hpcpar.planner.model_shapes import ModelShape
from hpcpar.training import Outcome, runs
from hpcpar.training.composition import require_composition
from hpcpar.training.dry_run import cluster_of, describe
from hpcpar.training.metrics import records_of
from hpcpar.training.pipelined import make_schedule, require_zero_stage, split_of_layers
from hpcpar.training.prediction import estimate_of, strategy_of
from hpcpar.training.recipes import SCALED_RANKS, listing, names, recipe

KINDS = {  # degrees above 1, and the stage of ZeRO, of the last stage
    "deepseek-v3": ({"pp", "dp", "ep"}, 1),
    "gemma2-27b": ({"dp", "tp"}, 3),
    "gemma2-2b": ({"dp"}, 3),
    "gemma2-9b": ({"dp", "tp"}, 3),
    "llama3-405b": ({"pp", "dp", "cp", "tp"}, 1),
    "olmo-7b": ({"dp"}, 3),
    "yi-34b": ({"pp", "dp", "tp"}, 1),
    "yi-lightning": ({"dp", "ep"}, 1),
}


def shape_of(name: str) -> ModelShape:
    found = recipe(name, full=True)
    config = found.stages[0]
    own = ModelShape.from_llama(config.model_config_for(config.model.vocab_size or 0), name)
    return ModelShape.named(found.shape) if found.shape else own


def degrees(name: str, *, full: bool) -> set[str]:
    """Degrees above 1 in some stage."""
    meshes = [config.mesh.model_dump() for config in recipe(name, full=full).stages]
    return {axis for mesh in meshes for axis in ("pp", "dp", "cp", "tp", "ep") if mesh[axis] > 1}


def test_every_recipe_is_here_and_listed_with_a_line() -> None:
    assert names() == list(KINDS)
    assert [line.split()[0] for line in listing().splitlines()] == list(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_both_forms_have_the_axes_of_the_original(name: str) -> None:
    axes, stage = KINDS[name]
    assert degrees(name, full=True) == axes
    assert degrees(name, full=False) >= axes
    for full in (True, False):
        assert {config.optimizer.zero_stage for config in recipe(name, full=full).stages} == {stage}


@pytest.mark.parametrize("name", KINDS)
def test_a_scaled_form_is_for_eight_ranks(name: str) -> None:
    for config in recipe(name).stages:
        assert Layout.fit(SCALED_RANKS, **config.mesh.model_dump()).size == SCALED_RANKS
        assert config.train.device == "cpu"
        assert config.model_config_for(256).parameters() < 3e6


@pytest.mark.parametrize("name", [name for name in KINDS if recipe(name).parameters])
def test_a_full_form_has_the_published_parameters(name: str) -> None:
    assert shape_of(name).parameters() == pytest.approx(recipe(name).parameters, rel=3e-3)


@pytest.mark.parametrize("name", KINDS)
def test_a_full_form_fits_its_machine_in_every_stage(name: str) -> None:
    found = recipe(name, full=True)
    for config in found.stages:
        own = ModelShape.from_llama(config.model_config_for(config.model.vocab_size or 0), name)
        assert estimate_of(config, own, Cluster.named(found.machine)).fits


@pytest.mark.parametrize("name", KINDS)
def test_the_trainer_has_nothing_against_a_full_form(name: str) -> None:
    for config in recipe(name, full=True).stages:
        layout, sizes = (
            strategy_of(config).layout,
            config.model_config_for(config.model.vocab_size or 0),
        )
        require_composition(config, layout)
        if layout.pp > 1:
            costs = [float(flops) for flops in sizes.flops_per_item(config.train.sequence)]
            schedule = make_schedule(config, layout.pp, strategy_of(config).microbatches, costs)
            require_zero_stage(config, schedule)
            assert len(split_of_layers(config, sizes.layers, costs, schedule)) == schedule.stages


def test_llama_3_has_the_ranks_and_batches_of_its_table_4() -> None:
    strategies = [strategy_of(config) for config in recipe("llama3-405b", full=True).stages]
    assert [each.layout.size for each in strategies] == [8192, 16_384, 16_384]
    assert [each.global_batch // each.layout.dp for each in strategies] == [32, 16, 16]
    assert {each.tokens for each in strategies} == {2**24}
    assert [each.sequence for each in strategies] == [8192, 8192, 131_072]


def test_state_and_gradients_of_olmo_are_the_formula() -> None:
    """ZeRO-3 over N ranks: 16 Φ/N bytes, and 3kΦ values of 2 bytes sent in a step of k microbatches."""
    config, shape = recipe("olmo-7b", full=True).stages[0], shape_of("olmo-7b")
    found = estimate_of(config, shape, Cluster.named("lumi-g"))
    state = sum(found.worst.purposes[part] for part in ("parameters", "gradients", "optimizer state"))
    assert state == pytest.approx(16 * shape.parameters() / 1024, rel=1e-6)
    (dp,) = found.traffic
    assert dp.nbytes == pytest.approx(3 * 2 * shape.parameters() * 1023 / 1024, rel=1e-6)


def test_what_is_described_names_source_notes_memory_and_axes() -> None:
    found = recipe("deepseek-v3", full=True)
    text = describe(found.stages, found.machine, found)
    assert "published model, 2,048 ranks on 256 nodes: pp=16 x dp=128, ep=64, ZeRO-1" in text
    assert "model as trained here, 2,048 ranks" in text
    assert "latent attention" in text
    assert text.count("TFLOP/s a device, MFU ") == 2
    for word in ("arXiv 2412.19437", "optimizer state", "activations", "ep ", "pp ", "dp "):
        assert word in text
    scaled = recipe("deepseek-v3")
    text = describe(scaled.stages, None, scaled)
    assert "8 ranks: pp=2 x dp=2 x tp=2, ep=4" in text
    assert "predicted" not in text


def test_a_run_whose_ranks_are_not_said_has_no_account() -> None:
    (config,) = recipe("olmo-7b", overrides=["mesh.dp=-1"]).stages
    with pytest.raises(ConfigError, match=r"give each degree, as in mesh.dp=8"):
        describe((config,), None)


def test_a_recipe_of_ones_own_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    about = '[recipe]\nsummary = "mine"\nsource = "here"\nmachine = "h800"\n'
    path.write_text(about + "[mesh]\ndp = 64\n[scaled.mesh]\ndp = 8\n")
    assert recipe(str(path)).stages[0].mesh.dp == 8
    assert recipe(str(path), full=True).stages[0].mesh.dp == 64
    path.write_text("[mesh]\ndp = 64\n")
    with pytest.raises(ConfigError, match=r"mine\.toml is no recipe: it needs the tables"):
        recipe(str(path))


def test_an_unknown_recipe_is_refused_with_the_list_and_overrides_are_those_of_files() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'yi-34b'\? there are deepseek-v3, "):
        recipe("yi34b")
    with pytest.raises(ConfigError, match=r"there is no key train\.step; did you mean train\.steps"):
        recipe("yi-34b", overrides=["train.step=3"])
    assert recipe("yi-34b", overrides=["train.steps=3"]).stages[0].train.steps == 3


def test_the_ends_of_a_pipeline_of_two_send_one_message_for_each_microbatch() -> None:
    config = recipe("yi-34b").stages[0]
    shape = ModelShape.from_llama(config.model_config_for(256), "yi-34b")
    found = {axis.axis: axis.nbytes for axis in estimate_of(config, shape, cluster_of(None)).traffic}
    # 4 microbatches of 2 sequences of 64 tokens, of which each tp rank has half, of 128 values of 4 bytes.
    assert found["pp"] == 4 * 2 * 64 / 2 * 128 * 4


def test_two_cores_hold_every_scaled_form() -> None:
    cluster = cluster_of(None)
    for name in names():
        for config in recipe(name).stages:
            shape = ModelShape.from_llama(config.model_config_for(256), name)
            assert estimate_of(config, shape, cluster).fits


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_a_scaled_form_learns_real_text(name: str, tmp_path: Path) -> None:
    overrides = ["train.steps=9", "train.threads=1", "data.max_mib=0.5", "schedule.warmup_fraction=0"]
    if name == "llama3-405b":
        overrides += ["stage.1.until=3", "stage.2.until=6"]
    places = [f"output.directory={tmp_path / 'run'}", f"data.cache={tmp_path / 'cache'}"]
    configs = recipe(name, overrides=[*overrides, *places]).stages

    def of_rank(comm: Communicator) -> list[Outcome]:
        outcomes = []
        stages = runs(configs, comm)
        while (run := next(stages, None)) is not None:
            outcome = run.train()
            del run
            assert isinstance(outcome, Outcome)
            outcomes.append(outcome)
        return outcomes

    outcomes = run_loopback(SCALED_RANKS, of_rank)[0]
    losses = [each["loss"] for each in records_of(tmp_path / "run" / "metrics.jsonl") if "loss" in each]
    assert losses[-1] < losses[0] - 0.8
    off = [line for line in outcomes[-1].traffic if line.deviation]
    assert not off
