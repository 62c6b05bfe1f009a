"""The job scripts are bash, and ask for what the trainer knows."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpcpar.training.config import Config, parse

SCRIPTS = sorted((Path(__file__).parent.parent / "jobscripts").glob("*.sh"))


def asked(script: Path) -> Config:
    """What a script overrides, outside of its comments."""
    lines = [line for line in script.read_text().splitlines() if not line.startswith("#")]
    words = "\n".join(lines).replace("\\\n", " ").split()
    overrides = [word.strip('"') for word in words if "=" in word and word.split("=")[0].count(".") == 1]
    return parse("", source="nothing", overrides=overrides)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_job_script_is_bash_and_its_overrides_are_keys_of_the_configuration(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)
    config = asked(script)
    if config.mesh.pp > 1:
        name = "pipeline.sh"
    elif config.mesh.tp > 1:
        name = "fsdp-tp.sh"
    else:
        name = f"zero-{config.optimizer.zero_stage}.sh"
    assert script.name == name


def test_layers_are_divided_within_a_node_and_stage_3_is_between_them() -> None:
    script = SCRIPTS[0].with_name("fsdp-tp.sh")
    config = asked(script)
    assert (config.optimizer.zero_stage, config.tensor_parallel.sequence_parallel) == (3, True)
    assert f"#SBATCH --ntasks-per-node={config.mesh.tp}\n" in script.read_text()


def test_a_pipeline_is_across_nodes_and_tensor_parallelism_within_them() -> None:
    script = SCRIPTS[0].with_name("pipeline.sh")
    config = asked(script)
    assert f"#SBATCH --nodes={config.mesh.pp}\n" in script.read_text()
    assert f"#SBATCH --ntasks-per-node={config.mesh.tp}\n" in script.read_text()


def test_there_is_a_script_for_each_stage() -> None:
    assert {script.name for script in SCRIPTS} >= {f"zero-{stage}.sh" for stage in range(4)}
