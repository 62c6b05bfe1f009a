"""All that a run decides beside model and machine: layout, batch, sharding, schedule, recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hpcpar.errors import ConfigError, LayoutError
from hpcpar.pipeline_schedules.schedule_registry import METHODS, find
from hpcpar.planner.layout import Layout
from hpcpar.planner.memory import MOMENTS
from hpcpar.planner.shapes import Recompute

NO_RECOMPUTE = Recompute()

ContextMethod = Literal["exchange", "ring", "allgather", "ulysses", "ulysses+exchange", "ulysses+ring"]
"""How the ranks of cp exchange keys, values or heads; as `hpcpar.ContextParallel`."""

CONTEXT_METHODS: tuple[ContextMethod, ...] = get_args(ContextMethod)

ZeroStage = Literal[0, 1, 2, 3]

Optimizer = Literal["adamw", "muon", "sgd"]


@dataclass(frozen=True)
class Strategy:
    """A run's parallelism and batch.

    layout             degrees of pp, dp, cp, tp and ep, etp
    global_batch       sequences of an optimizer step, over all ranks
    microbatch         sequences that a rank computes at once
    sequence           tokens of a sequence
    zero_stage         0 replicas; shards 1 optimizer state, 2 gradients too, 3 parameters too
    reshard            of stage 3: gathered parameters are freed after their layer's forward and backward
                       ("unit"), or kept until the optimizer steps ("step")
    schedule           of the pipeline, by name
    stages_per_rank    None = the schedule's default
    recompute          activations that backward recomputes
    precision          type of parameters and activations; 16-bit and 8-bit types have float32 masters
    sequence_parallel  between the parallel layers each tp rank has its part of the sequence
    gather_again       with that: parallel layers' inputs are gathered again in backward, not kept
    cp_method          exchange of the cp axis
    cp_inner           neighbours of cp that exchange heads in "ulysses+…"; None: all of them
    cp_keep            other ranks' keys are kept for backward
    packs              each row has documents, and places of its own
    memory_limit       of an automatic schedule: chunks that a rank may keep; None: pp
    optimizer          "adamw"; "muon" on the layers' matrices and AdamW on the rest; or "sgd", with momentum
    offload            of the optimizer state: "cpu", a directory, or None
    layers_of_stages   how many each stage of the pipeline has; None = as even as can be
    errors             LayoutError and ConfigError for batches and stages that do not divide
    """

    layout: Layout
    global_batch: int
    microbatch: int = 1
    sequence: int = 4096
    zero_stage: ZeroStage = 0
    schedule: str = "1f1b"
    stages_per_rank: int | None = None
    recompute: Recompute = NO_RECOMPUTE
    precision: str = "bfloat16"
    sequence_parallel: bool = False
    cp_method: ContextMethod = "exchange"
    optimizer: Optimizer = "adamw"
    offload: str | None = None
    reshard: Literal["unit", "step"] = "unit"
    layers_of_stages: tuple[int, ...] | None = None
    gather_again: bool = False
    cp_inner: int | None = None
    cp_keep: bool = False
    packs: bool = False
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        for name in ("global_batch", "microbatch", "sequence"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")
        if self.zero_stage not in (0, 1, 2, 3):
            raise ConfigError(f"zero_stage={self.zero_stage!r}; there are 0, 1, 2, 3")
        if self.optimizer not in MOMENTS:
            raise ConfigError(f"optimizer={self.optimizer!r}; there are {', '.join(MOMENTS)}")
        if self.cp_method not in CONTEXT_METHODS:
            raise ConfigError(f"cp_method={self.cp_method!r}; there are {', '.join(CONTEXT_METHODS)}")
        once = self.layout.dp * self.microbatch
        if self.global_batch % once:
            raise LayoutError(
                f"global_batch={self.global_batch} does not divide by dp={self.layout.dp} x "
                f"microbatch={self.microbatch} = {once}; take global_batch="
                f"{-(-self.global_batch // once) * once}, or another microbatch"
            )
        own = self.layout.cp * (self.layout.tp if self.sequence_parallel else 1)
        if self.sequence % own:
            raise LayoutError(
                f"sequence={self.sequence} does not divide among {own} ranks of cp and tp; take "
                f"{-(-self.sequence // own) * own}"
            )
        if self.layout.shard_ranks is not None and self.zero_stage == 0:
            raise ConfigError(
                f"dp_shard={self.layout.dp_shard} with zero_stage=0 shards nothing; set zero_stage"
            )
        if self.layout.pp > 1:
            find(self.schedule).place(self.layout.pp, self.stages_per_rank)

    @property
    def itemsize(self) -> int:
        """Bytes of an activation."""
        return {"float32": 4, "float64": 8}.get(self.precision, 2)

    @property
    def microbatches(self) -> int:
        """Microbatches of one rank in an optimizer step."""
        return self.global_batch // (self.layout.dp * self.microbatch)

    @property
    def shard_ranks(self) -> int:
        """Ranks that one set of shards spreads over: dp_shard · cp, or dp · cp; 1 without ZeRO."""
        if self.zero_stage == 0:
            return 1
        return self.layout.shard_ranks or self.layout.dp * self.layout.cp

    @property
    def expert_shards(self) -> int:
        """Ranks of such a set with copies of the same experts, which are sharded over these."""
        layout = self.layout
        return max(1, self.shard_ranks * layout.tp // (layout.ep * layout.etp)) if self.zero_stage else 1

    @property
    def keeps_gathered(self) -> bool:
        """True where each rank has the parameters that it uses whole during a step, gathered once."""
        return self.zero_stage == 3 and self.reshard == "step"

    @property
    def chunks_per_rank(self) -> int:
        """Stages of the pipeline on one rank."""
        if self.layout.pp == 1:
            return 1
        return self.stages_per_rank or METHODS[self.schedule].stages_per_rank

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.layout.pp * self.chunks_per_rank

    @property
    def tokens(self) -> int:
        """Tokens of an optimizer step."""
        return self.global_batch * self.sequence

    @property
    def own_tokens(self) -> int:
        """Tokens of a microbatch on one rank: b·S / cp."""
        return self.microbatch * self.sequence // self.layout.cp

    def __str__(self) -> str:
        """Format "tp=8 x pp=4, ZeRO-1, microbatch 2, recompute full"."""
        parts = [str(self.layout)]
        if self.zero_stage:
            kept = " kept through the step" if self.keeps_gathered else ""
            parts.append(f"ZeRO-{self.zero_stage}{kept}")
        parts.append(f"microbatch {self.microbatch}")
        if self.layout.pp > 1:
            parts.append(self.schedule + (f" of {self.chunks_per_rank}" if self.chunks_per_rank > 1 else ""))
        if self.sequence_parallel and self.layout.tp > 1:
            parts.append("sequence parallel")
        if self.recompute.mode != "none":
            parts.append(f"recompute {self.recompute.mode}")
        if self.optimizer != "adamw":
            parts.append(self.optimizer)
        if self.offload:
            parts.append(f"offload to {self.offload}")
        return ", ".join(parts)
