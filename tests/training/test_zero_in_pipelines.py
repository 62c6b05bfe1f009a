"""ZeRO-2 and ZeRO-3 in pipelines: the model of one process, and the bytes of theory."""

from __future__ import annotations

import pytest

from tests.training.test_composition import require_right  # noqa: F401
from tests.training.test_composition import OfSerial, of_serial  # noqa: F401
from tests.training.layouts import drawn
from tests.training.runs import MakeConfig
from tests.training.test_composition import MODEL
from tests.training.layouts import Drawn


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("how", ["2", "3 unit", "3 step"])
def test_it(config_of: MakeConfig, of_serial: OfSerial, how: str, schedule: str, tied: str) -> None:
    stage, *reshard = how.split()
    options = (
        "mesh.pp=2",
        "mesh.dp=2",
        "train.microbatch=1",
        f"pipeline.schedule={schedule}",
        f"model.tie_embeddings={tied}",
        f"optimizer.zero_stage={stage}",
        *(f"optimizer.reshard={each}" for each in reshard),
    )
    require_right(config_of, of_serial, Drawn({}, options, 4))
