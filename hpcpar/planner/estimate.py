"""`estimate`: memory, traffic and time of one training step of a model on a machine with a strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpcpar.planner.cluster import Cluster
from hpcpar.planner.model_shapes import ModelShape
from hpcpar.planner.software import HPCPAR, Software
from hpcpar.planner.stage_memory import StageMemory, memory_of_stages
from hpcpar.planner.step_time import AxisTraffic, StepTime, step_time
from hpcpar.planner.strategy import Strategy

TIGHT = 0.92
"""Share of the device's memory above which a layout is tight: allocators need room."""


@dataclass(frozen=True)
class Estimate:
    """Prediction for one optimizer step.

    stages    memory of a rank of each pipeline rank (stage), in order
    time      the step by part
    traffic   of one rank, by axis
    """

    model: ModelShape
    cluster: Cluster
    strategy: Strategy
    software: Software
    stages: tuple[StageMemory, ...]
    time: StepTime
    traffic: tuple[AxisTraffic, ...]

    # --- memory -------------------------------------------------------------------------------------

    @property
    def worst(self) -> StageMemory:
        """The pipeline rank that needs most memory."""
        return max(self.stages, key=lambda stage: stage.nbytes)

    @property
    def peak_nbytes(self) -> int:
        """Bytes of device memory on the rank that needs most."""
        return self.worst.nbytes

    @property
    def over_nbytes(self) -> int:
        """Bytes by which the worst rank exceeds its device; 0 or less: it fits."""
        return self.peak_nbytes - self.cluster.device.memory_nbytes

    @property
    def fits(self) -> bool:
        """True where every rank's memory fits its device, and the offloaded state its host."""
        return self.over_nbytes <= 0 and self.host_over_nbytes <= 0

    @property
    def host_over_nbytes(self) -> int:
        """Bytes by which a node's ranks exceed its host memory; 0 or less: they fit."""
        on_host = max(stage.host_nbytes for stage in self.stages)
        return on_host * self.cluster.devices_per_node - self.cluster.host_memory_nbytes

    @property
    def tight(self) -> bool:
        """True where it fits but leaves less than 8 % of the device: measured runs slow down or end there."""
        return self.fits and self.peak_nbytes > TIGHT * self.cluster.device.memory_nbytes

    # --- speed --------------------------------------------------------------------------------------

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step."""
        return self.time.total_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole machine."""
        return self.strategy.tokens / self.step_s

    @property
    def tokens_per_device_s(self) -> float:
        """Tokens per second of one device."""
        return self.tokens_per_s / self.strategy.layout.size

    @property
    def flops_per_device(self) -> float:
        """Model FLOP/s of one device: those of `ModelShape.flops_per_token`, recomputation not counted."""
        per_token = self.model.flops_per_token(self.strategy.sequence, causal=self.software.causal_mfu)
        return per_token * self.tokens_per_device_s

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: `flops_per_device` over the peak."""
        return self.flops_per_device / self.cluster.device.peak(self.strategy.precision)

    @property
    def mfu_convention(self) -> str:
        """Words for what the MFU counts: scores, recomputation, and of which peak it is a share."""
        scores = "half of the scores (causal)" if self.software.causal_mfu else "all scores"
        return f"matrix products, {scores}, no recomputation; peak of {self.strategy.precision}"

    # --- budgets ------------------------------------------------------------------------------------

    def seconds_for(self, tokens: float) -> float:
        """Return the seconds of training on so many tokens."""
        return tokens / self.tokens_per_s

    def device_hours(self, tokens: float) -> float:
        """Return the device-hours of training on so many tokens."""
        return self.seconds_for(tokens) * self.strategy.layout.size / 3600

    def energy_kwh(self, tokens: float) -> float:
        """Return the energy of training on so many tokens, at the devices' full power."""
        return self.device_hours(tokens) * self.cluster.device.watts / 1000

    def parts(self) -> Mapping[str, float]:
        """Return the seconds of the step by part; they sum to `step_s`."""
        return self.time.parts


def estimate(
    model: ModelShape, cluster: Cluster, strategy: Strategy, software: Software = HPCPAR
) -> Estimate:
    """Predict memory, traffic and time of one optimizer step.

    errors   LayoutError for a layout that the model cannot have (`require_possible`); ConfigError for a
             precision that the device has no peak for
    """
    stages = tuple(memory_of_stages(model, strategy, software))
    time, traffic = step_time(model, cluster, strategy, software)
    return Estimate(model, cluster, strategy, software, stages, time, traffic)
