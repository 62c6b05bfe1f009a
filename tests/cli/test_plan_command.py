"""`hpcpar plan`: its tables and files, and what it says of wrong requests."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hpcpar.cli import main
from hpcpar.cli.plan_command import RECIPES
from hpcpar.pipeline_parallel.balance import by_hand
from hpcpar.planner.cluster import MACHINES, Cluster
from hpcpar.planner.estimate import estimate
from hpcpar.planner.layout import Layout
from hpcpar.planner.model_shapes import ModelShape
from hpcpar.planner.strategy import Strategy
from hpcpar.training.composition import require_composition
from hpcpar.training.config import read

MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
}


class Called(NamedTuple):
    exit_code: int
    output: str


def called(*words: Any) -> Called:
    out = io.StringIO()
    with pytest.raises(SystemExit) as ended, redirect_stdout(out), redirect_stderr(out):
        main(["plan", *map(str, words)])
    return Called(int(str(ended.value.code)), out.getvalue())


def told(*words: Any) -> str:
    status, output = called(*words)
    assert status == 0, output
    return output


ON_8 = ("--machine", "a100-dgx", "--nodes", 1, "--batch", 64, "--sequence", 2048)


def test_the_table_names_the_fastest_and_what_cannot_be() -> None:
    output = told("llama3-8b", *ON_8, "--top", 3, "--tokens", "1e9")
    assert "llama3-8b, 8.03 B parameters, on a100-dgx: 1 x 8" in output
    assert "fastest: " in output
    assert "device-h" in output
    assert "layouts cannot be:" in told("llama3-70b", *ON_8[:2], "--nodes", 2)
    every = told("llama3-70b", "--machine", "a100-dgx", "--nodes", 2, "--batch", 64, "--rejected")
    assert every.count("memory over by") > 5
    assert "--rejected lists them all" not in every


def test_json_has_the_figures_of_the_table() -> None:
    found = json.loads(told("llama3-8b", *ON_8, "--json", "--rejected", "--top", 2))
    assert len(found["ranked"]) == 2
    best = found["ranked"][0]
    assert sum(best["parts_s"].values()) == pytest.approx(best["step_s"])
    assert sum(best["memory"]["purposes"].values()) == best["memory"]["nbytes"] <= best["memory"]["of"]
    assert len(found["rejected"]) == sum(found["rejected_by_kind"].values())
    assert found["layouts"] >= len(found["rejected"]) + 2


def test_a_plan_for_uneven_experts_takes_more_memory_and_time() -> None:
    words = ("qwen3-30b-a3b", "--machine", "h100-dgx", "--nodes", 4, "--fix", "ep=8", "--json", "--top", 1)
    (even,), (uneven,) = (json.loads(told(*words, *more))["ranked"] for more in ((), ("--expert-load", 1.5)))
    assert uneven["step_s"] > even["step_s"]


def test_what_is_fixed_and_compared_is_what_is_asked_for() -> None:
    output = told("llama3-8b", *ON_8, "--compare", "tp=8", "dp=8,zero=3")
    assert "A: tp=8" in output
    assert "B: dp=8, ZeRO-3" in output
    for part in (
        "matrix products",
        "tensor parallel",
        "sent on dp",
        "optimizer state",
        "sent on tp",
        "MFU",
    ):
        assert part in output
    both = json.loads(told("llama3-8b", *ON_8, "--compare", "tp=8", "dp=8,zero=3", "--json"))
    assert [one["layout"]["tp"] for one in both] == [8, 1]


def test_scaling_is_a_row_for_each_number_of_nodes(tmp_path: Path) -> None:
    picture = tmp_path / "scaling.png"
    words = ("llama3-8b", "--machine", "a100-dgx", "--batch", 512, "--sequence", 2048)
    lines = told(*words, "--at", "1,2,4", "--output", picture).splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["1", "2", "4"]
    assert "100.0%" in lines[-3]
    assert picture.stat().st_size > 1000


def test_the_chart_is_drawn(tmp_path: Path) -> None:
    told("llama3-8b", *ON_8, "--top", 3, "--output", tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_fewest_nodes_are_fewest() -> None:
    words = ("llama3-70b", "--machine", "a100-dgx", "--batch", 64, "--sequence", 2048, "--json")
    found = json.loads(told(*words, "--fewest-nodes"))
    assert found["ranked"]
    fewer = called(*words, "--nodes", found["nodes"] - 1)
    assert fewer.exit_code == 1
    assert json.loads(fewer.output)["ranked"] == []


RECIPES_NAMED = sorted(path.stem for path in RECIPES.glob("*.toml"))


@pytest.mark.parametrize("name", RECIPES_NAMED)
def test_a_recipe_is_priced_at_full_size_as_it_is_written(name: str) -> None:
    asked = called("--recipe", name, "--as-written", "--json", "--rejected")
    found = json.loads(asked.output)
    assert found["layouts"] == 1
    # Published runs may keep less than ours, and then the planner says what is lacking.
    assert asked.exit_code == 0 or "memory over by" in found["rejected"][0]["reason"]


def test_an_unknown_recipe_is_refused_with_the_list() -> None:
    assert "there are deepseek-v3, " in called("--recipe", "gpt-5").output
    assert "exclude each other" in called("llama3-8b", "--recipe", "yi-34b").output


# --- what is written ------------------------------------------------------------------------------

SOURCES = ["llama3-8b", "mixtral-8x7b", "llama3-405b", "config.json", "run.toml"]
RUN = """
[model]
preset = "llama3-8b"
layers = 6
[train]
global_batch = 32
microbatch = 2
sequence = 1024
recompute = "full"
[mesh]
tp = 2
pp = 2
dp = 2
[pipeline]
schedule = "1f1b"
[optimizer]
zero_stage = 1
"""


def source_in(directory: Path, name: str) -> str:
    texts = {"config.json": json.dumps(MIXTRAL), "run.toml": RUN}
    if name not in texts:
        return name
    (directory / name).write_text(texts[name])
    return str(directory / name)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(
    "fix", [(), ("--fix", "pp=4", "--fix", "tp=8"), ("--fix", "cp=2")], ids=["best", "3d", "cp"]
)
def test_the_trainer_takes_what_is_written(name: str, fix: tuple[str, ...], tmp_path: Path) -> None:
    model = source_in(tmp_path, name)
    nodes = 16 if "405b" in name else 4
    words: Any = (model, "--machine", "h100-dgx", "--nodes", nodes, "--batch", 64, "--sequence", 2048, *fix)
    directory = tmp_path / "run"
    found = json.loads(told(*words, "--top", 1, "--json"))["ranked"][0]
    told(*words, "--top", 1, "--write", directory)
    config = read(directory / "train.toml")
    assert config.mesh.model_dump() == {**found["layout"], "dp_shard": -1}
    assert (config.train.global_batch, config.train.sequence) == (64, 2048)
    assert config.train.microbatch == found["microbatch"]
    assert config.train.recompute == found["recompute"]
    assert config.optimizer.zero_stage == found["zero_stage"]
    assert config.tensor_parallel.sequence_parallel == found["sequence_parallel"]
    if found["layout"]["pp"] > 1:
        assert config.pipeline.schedule == found["schedule"]
        assert config.pipeline.stages_per_rank in (None, found["stages_per_rank"])
        sizes = config.model_config_for(100)
        assert isinstance(config.pipeline.balance, tuple)
        by_hand(config.pipeline.balance, sizes.layers)
        assert sum(config.pipeline.balance) == sizes.layers
        assert len(config.pipeline.balance) == found["layout"]["pp"] * found["stages_per_rank"]
    sizes = config.model_config_for(100)
    assert sizes.parameters() == ModelShape.named(model).parameters()
    layout = Layout(**found["layout"])
    require_composition(config, layout)


def test_the_job_script_is_for_the_nodes_and_is_a_script(tmp_path: Path) -> None:
    words = ("llama3-8b", "--machine", "h100-dgx", "--nodes", 4, "--batch", 64, "--sequence", 2048)
    told(*words, "--write", tmp_path / "run")
    script = tmp_path / "run" / "job.sh"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n" in text
    assert script.stat().st_mode & 0o100


def test_a_file_of_the_trainer_is_planned_as_it_is_written(tmp_path: Path) -> None:
    model = source_in(tmp_path, "run.toml")
    words = (model, "--machine", "a100-dgx", "--nodes", 1, "--json")
    (found,) = json.loads(told(*words, "--as-written"))["ranked"]
    assert found["layout"] == {"pp": 2, "dp": 2, "cp": 1, "tp": 2, "ep": 1, "etp": 1}
    assert (found["zero_stage"], found["microbatch"], found["recompute"]) == (1, 2, "full")
    assert len(json.loads(told(*words))["ranked"]) > 1


def test_a_model_that_is_not_trained_is_not_written(tmp_path: Path) -> None:
    words = ("gpt-22b", "--machine", "a100-dgx", "--nodes", 8, "--batch", 64)
    refused = called(*words, "--write", tmp_path / "run")
    assert refused.exit_code == 1
    assert "which hpcpar plans but does not train" in refused.output
    assert not (tmp_path / "run").exists()


# --- wrong requests -------------------------------------------------------------------------------


def test_where_none_fits_the_smallest_change_is_named_and_helps() -> None:
    words = ["llama3-8b", *ON_8, "--fix", "recompute=none", "--fix", "dp=8", "--fix", "zero=0"]
    refused = called(*words, "--explain")
    assert refused.exit_code == 1
    assert "the smallest change with which one fits:\n  leave out --fix" in refused.output
    assert "or leave out --fix zero_stage=0" in refused.output
    told(*words[:-2])
    larger = called("llama3-405b", *ON_8)
    assert larger.exit_code == 1
    nodes = larger.output.rpartition("--nodes ")[2].split()[0]
    told("llama3-405b", *ON_8, "--nodes", nodes)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("llama3-8b", "--machine", "h100"), "no machine is called 'h100'"),
        (("llama3-9b", "--machine", "h100-dgx"), "did you mean 'llama3-8b'"),
        (("llama3-8b",), "name a --machine"),
        ((), "name a MODEL"),
        (("llama3-8b", *ON_8, "--fix", "tp"), "give KEY=VALUE"),
        (("llama3-8b", *ON_8, "--fix", "tensor=2"), "keys are pp, dp"),
        (("llama3-8b", *ON_8, "--fix", "tp=two"), "'two' is no whole number"),
        (("llama3-8b", *ON_8, "--fix", "recompute=half"), "there are none, selective, full"),
        (("llama3-8b", *ON_8, "--fix", "schedule=2f2b"), "there are naive, gpipe"),
        (("llama3-8b", *ON_8, "--fix", "zero=4"), "there are 0, 1, 2, 3"),
        (("llama3-8b", *ON_8, "--fix", "tp=0"), "at least 1"),
        (("llama3-8b", *ON_8, "--tokens", "-3"), "not in the range"),
        (("llama3-8b", *ON_8, "--tokens", "inf"), "give a number of tokens"),
        (("llama3-8b", *ON_8, "--fix", "tp=²"), "is no whole number"),
        (("llama3-8b", *ON_8, "--fix", "tp=2", "--fix", "tp=4"), "given twice"),
        (("llama3-8b", *ON_8, "--at", "1,2", "--write", "w"), "--write has no effect beside --at"),
        (("llama3-8b", *ON_8, "--json", "--explain"), "--explain has no effect beside --json"),
        (("llama3-8b", *ON_8, "--take", "2"), "goes with --write"),
        (("llama3-8b", *ON_8, "--software", "hpcpar"), "go with --validate"),
        (("llama3-8b", *ON_8, "--fix", "ep=4"), "a dense model has no ep"),
        (("llama3-8b", *ON_8, "--fix", "tp=3"), "no layout of 8 devices has tp=3"),
        (("llama3-8b", *ON_8, "--at", "1,x"), "give numbers of nodes"),
        (("llama3-8b", *ON_8, "--compare", "tp=3", "dp=8"), "no such layout of 8 devices"),
        (("llama3-8b", *ON_8, "--precision", "int3"), "no peak FLOP/s for 'int3'"),
        (("llama3-8b", *ON_8, "--output", "plan.xyz"), "xyz is no format of pictures"),
        (("llama3-8b", *ON_8, "--fewest-nodes"), "exclude each other"),
        (("llama3-8b", *ON_8, "--expert-load", "1.5"), "for a model with experts"),
        (("mixtral-8x7b", *ON_8, "--expert-load", "0.5"), "not in the range"),
    ],
)
def test_wrong_requests_are_refused_with_what_works(words: tuple[Any, ...], said: str) -> None:
    refused = called(*words)
    assert refused.exit_code in (1, 2)
    assert said in refused.output


def test_offload_to_what_the_machine_does_not_describe_is_refused(tmp_path: Path) -> None:
    text = (MACHINES / "a100-dgx.toml").read_text()
    path = tmp_path / "bare.toml"
    path.write_text(text[: text.index("[host]")])
    refused = called("llama3-8b", "--machine", path, "--nodes", 1, "--fix", "offload=cpu")
    assert refused.exit_code == 1
    assert "add host.gb_per_s to its file" in refused.output


def test_a_model_file_without_a_needed_field_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in MIXTRAL.items() if key != "num_hidden_layers"}))
    refused = called(path, *ON_8)
    assert refused.exit_code == 1
    assert "lacks num_hidden_layers" in refused.output


# --- measured rows, and a login node --------------------------------------------------------------


def test_rows_that_the_model_made_are_met(tmp_path: Path) -> None:
    model, machine = ModelShape.named("llama3-8b"), Cluster.named("a100-dgx")
    lines = ["model,devices,global_batch,microbatch,sequence,tp,dp,pp,zero_stage,step_s,machine,software"]
    for tp in (1, 2, 4, 8):
        strategy = Strategy(Layout(dp=8 // tp, tp=tp), 64, 1, 2048, zero_stage=1)
        step_s = estimate(model, machine.with_devices(8), replace(strategy, zero_stage=1)).step_s
        lines.append(f"llama3-8b,8,64,1,2048,{tp},{8 // tp},1,1,{step_s},a100-dgx,hpcpar")
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(lines) + "\n")
    output = told("--validate", path, "--share", 0)
    assert "4 rows judged" in output
    assert "mean 0.0%" in output
    assert "regret of 1 choices mean 0.0%" in output
    assert json.loads(told("--validate", path, "--share", 0, "--json"))["rows"][0]["line"] == 2
    kept = tmp_path / "constants.json"
    told("--validate", path, "--share", 0.5, "--save-constants", kept)
    assert "fastest:" in told("llama3-8b", *ON_8, "--constants", kept)
    assert "0 others" in told("--validate", path, "--share", 0, "--constants", kept)


BLOCKED = """
import sys
for name in ("torch", "numpy", "mpi4py", "pydantic", "matplotlib"):
    sys.modules[name] = None
from hpcpar.cli import main
from hpcpar.cli.plan_command import RECIPES
main(["plan", "llama3-405b", "--machine", "h100-dgx", "--nodes", "2048", "--batch", "2048", "--explain"])
"""


def test_a_login_node_without_torch_numpy_and_mpi_plans_405b() -> None:
    found = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert "rules of thumb:" in found.stdout
    assert "2,048 x 8" in found.stdout
