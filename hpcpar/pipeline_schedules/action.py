"""Action of a rank in a pipeline: a stage's forward or backward of one microbatch.

    2F0   stage 2, forward of microbatch 0
    2B0   its backward; where a 2W0 follows, the gradient of the input alone
    2W0   the gradients of the weights

source   the letters are those of Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, get_args

from hpcpar.errors import ScheduleError

Kind = Literal["F", "B", "W"]

KINDS: tuple[Kind, ...] = get_args(Kind)

_WRITTEN = re.compile(r"(\d+)([FBW])(\d+)")


class Action(NamedTuple):
    """Forward, backward, or weight gradients of one microbatch in one stage."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse "2F0"; ScheduleError for anything else."""
        found = _WRITTEN.fullmatch(text)
        if found is None:
            raise ScheduleError(
                f"{text!r} is no action: write the stage, {', '.join(KINDS[:-1])} or {KINDS[-1]}, "
                "and the microbatch, as in 2F0"
            )
        stage, kind, microbatch = found.groups()
        return cls(int(stage), kind, int(microbatch))  # type: ignore[arg-type]
