"""The job scripts are bash, and ask for what the trainer knows."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpcpar.training.config import parse

SCRIPTS = sorted((Path(__file__).parent.parent / "jobscripts").glob("*.sh"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_job_script_is_bash_and_its_overrides_are_keys_of_the_configuration(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)
    words = script.read_text().replace("\\\n", " ").split()
    overrides = [word.strip('"') for word in words if "=" in word and word.split("=")[0].count(".") == 1]
    config = parse("", source="nothing", overrides=overrides)
    assert f"zero-{config.optimizer.zero_stage}.sh" == script.name


def test_there_is_a_script_for_each_stage() -> None:
    assert {script.name for script in SCRIPTS} >= {f"zero-{stage}.sh" for stage in range(4)}
