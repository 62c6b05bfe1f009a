"""What benchmarks/training.py trains, and its data-parallel peers: everybody's way to do so in parallel.

Every peer is one class, which imports what it needs when it is asked for and is built when it is chosen.

    class               peers               parameters, in bfloat16                       averages travel in
    Hpcpar              hpcpar 0 … 3        bfloat16, float32 masters                     bfloat16
    DeepSpeed           deepspeed 1 … 3     bfloat16, float32 masters                     bfloat16
    Fsdp2               fsdp2               float32 shards, gathered in bfloat16          bfloat16
    Ddp, ZeroRedundancy, Horovod, Solo      float32 under torch.autocast, as is usual     float32

Those that share every layer are in benchmarks/tensor_parallel_peers.py, those that share every sequence in
benchmarks/context_parallel_peers.py, and those that share experts in benchmarks/expert_parallel_peers.py.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed, nn

import hpcpar
from hpcpar.comm import Communicator
from hpcpar.data_parallel import DistributedOptimizer, broadcast_parameters
from hpcpar.data_parallel.buckets import BUCKET_BYTES
from hpcpar.models import Layers, Llama, LlamaConfig
from hpcpar.planner.experts import Experts
from hpcpar.units import MiB

HERE = Path(__file__).resolve().parent
PHASES = ("forward", "backward", "synchronize", "optimizer")
Share = tuple[Tensor, Tensor]
"""Tokens [B, S] and the tokens that came next."""


@dataclass(frozen=True)
class Recipe:
    """An optimizer in two parts, because some peers make it themselves."""

    optimizer: type[torch.optim.Optimizer]
    settings: dict[str, Any] = field(default_factory=dict)

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return self.optimizer(parameters, **self.settings)


ADAMW = Recipe(torch.optim.AdamW, {"lr": 1e-3, "fused": True})
# For the check: Adam would hide gradients of the wrong scale.
SGD = Recipe(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})


@dataclass(frozen=True)
class Task:
    """What is trained, by whom: the same for all peers.

    peers               who can take part, by name
    start_dtype         can hold the parameters' first values, so that whoever narrows them loses nothing
    shared_parameters   hpcpar's sharded stages keep one copy of the parameters on a node
    tp                  ranks that share each layer, and so the sequences
    cp                  ranks that share each sequence
    ep                  ranks that share the experts
    """

    world: Communicator
    peers: Mapping[str, type[Peer]]
    config: LlamaConfig
    dtype: torch.dtype
    start_dtype: torch.dtype
    sequence: int
    batch: int
    bucket_bytes: int | None
    shared_parameters: bool = False
    tp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def experts(self) -> Experts:
        assert self.config.experts is not None
        return self.config.experts

    @property
    def global_batch(self) -> int:
        return self.batch * (self.world.size // (self.tp * self.cp))

    @property
    def low_precision(self) -> bool:
        return self.dtype == torch.bfloat16

    @property
    def wide_dtype(self) -> torch.dtype:
        """Element type of the model before a peer narrows it."""
        return torch.float32 if self.low_precision else self.dtype

    def model(self, layers: Layers | None = None) -> Llama:
        """Make the same model for every peer; with parallel `layers`, this rank's part of it."""
        return Llama(self.config, layers, seed=0).to(self.start_dtype).to(self.wide_dtype)

    def share(self, start: int, stop: int) -> Share:
        generator = torch.Generator().manual_seed(0)
        shape = (self.global_batch, self.sequence + 1)
        part = torch.randint(self.config.vocab_size, shape, generator=generator)[start:stop]
        return part[:, :-1].contiguous(), part[:, 1:].contiguous()

    def own_share(self) -> Share:
        start = self.world.rank // (self.tp * self.cp) * self.batch
        return self.share(start, start + self.batch)


class Peer:
    """A model in training; a subclass builds its `module` and `optimizer`.

    share   the part of the global batch that this rank works on; None: it only waits
    """

    needs_gloo: ClassVar[bool] = False
    autocast: ClassVar[bool] = True  # what bfloat16 means to this peer, unless it says otherwise

    module: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer

    def __init__(self, name: str, task: Task, recipe: Recipe) -> None:
        self.name = name
        self.share: Share | None = task.own_share()
        self.model = self.make_model(task)
        self.casts = self.autocast and task.low_precision

    @classmethod
    def require(cls, task: Task) -> None:
        """Raise where this peer cannot take part: not installed, or not able to."""

    def make_model(self, task: Task) -> Llama:
        return task.model()

    def forward(self) -> Tensor:
        assert self.share is not None
        inputs, targets = self.share
        with torch.autocast("cpu", torch.bfloat16, enabled=self.casts):
            return self.model.loss(self.module(inputs), targets)

    @torch.no_grad()
    def forward_only(self) -> tuple[float, list[float]]:
        """Return the loss without what backward needs, and when it began and ended."""
        start_s = time.perf_counter()
        loss = self.forward().item()
        return loss, [start_s, time.perf_counter()]

    def step(self, read: Callable[[], float] = time.perf_counter) -> tuple[float, list[float]]:
        """Take a step; return the loss, and what `read` gave before it and after each phase."""
        marks = [read()]
        loss = self.forward()
        marks.append(read())
        self.backward(loss)
        marks.append(read())
        self.synchronize()
        marks.append(read())
        self.update()
        marks.append(read())
        return loss.item(), marks

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Complete what is left between backward and optimizer."""

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settle(self) -> None:
        """Wait for what a step may leave under way, to go on beneath the next one's forward."""

    def parameters(self) -> dict[str, Tensor]:
        """Return whole parameters by name; collective where they are sharded."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}


class Solo(Peer):
    """Each for itself: rank 0 alone, on the whole global batch or on its own share, or all ranks at once."""

    def __init__(self, name: str, task: Task, recipe: Recipe) -> None:
        super().__init__(name, task, recipe)
        self.module, self.optimizer = self.model, recipe.make(self.model.parameters())
        if name == "no communication":
            return
        if task.world.rank != 0:
            self.share = None
        elif name == "one process":
            self.share = task.share(0, task.global_batch)


class Hpcpar(Peer):
    """DistributedOptimizer over MPI: stage 1 shards optimizer states, 2 gradients too, 3 parameters too."""

    autocast = False

    def __init__(self, name: str, task: Task, recipe: Recipe) -> None:
        super().__init__(name, task, recipe)
        self.stage = stage_of(name)
        precision = {"precision": "bfloat16"} if task.low_precision else {}
        shared = {"shared_parameters": True} if task.shared_parameters and self.stage else {}
        broadcast_parameters(self.model, task.world)
        settings: dict[str, Any] = {}
        if self.stage == 3:
            hpcpar.fully_shard(self.model, task.world, **precision, **shared)
            settings = {"zero_stage": 3}
        else:
            settings = {"zero_stage": self.stage, "model": self.model, **precision, **shared}
            settings["bucket_bytes"] = task.bucket_bytes
        self.preemption = hpcpar.Preemption(task.world, ()) if name.endswith("guarded") else None
        if name.endswith("fast"):
            settings |= {"nonfinite": "step", "overlap_allgather": self.stage in (1, 2)}
        named = list(self.model.named_parameters())
        inner = recipe.make(parameter for _, parameter in named)
        self.module = self.model
        self.distributed = DistributedOptimizer(inner, named, task.world, **settings)
        self.optimizer = self.distributed

    def synchronize(self) -> None:
        self.distributed.synchronize()

    def update(self) -> None:
        super().update()
        if self.preemption is not None:
            self.preemption.is_agreed()

    def settle(self) -> None:
        self.distributed.wait_for_parameters()
        if self.preemption is not None:
            self.preemption.settle()

    def parameters(self) -> dict[str, Tensor]:
        self.settle()
        if self.stage < 3:
            return super().parameters()
        with hpcpar.summon_full_parameters(self.model, write_back=False):
            return {name: whole.clone() for name, whole in super().parameters().items()}


class Ddp(Peer):
    """torch DistributedDataParallel over gloo."""

    needs_gloo = True

    def __init__(self, name: str, task: Task, recipe: Recipe) -> None:
        super().__init__(name, task, recipe)
        self.optimizer = self.make_optimizer(recipe)
        self.module = nn.parallel.DistributedDataParallel(
            self.model,
            bucket_cap_mb=(task.bucket_bytes or BUCKET_BYTES) / MiB,
            gradient_as_bucket_view=True,
        )

    def make_optimizer(self, recipe: Recipe) -> torch.optim.Optimizer:
        return recipe.make(self.model.parameters())


class ZeroRedundancy(Ddp):
    """torch ZeroRedundancyOptimizer, whose ranks own the states of some parameters each, around DDP."""

    @classmethod
    def require(cls, task: Task) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: F401

    def make_optimizer(self, recipe: Recipe) -> torch.optim.Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(
            self.model.parameters(),
            optimizer_class=recipe.optimizer,
            parameters_as_bucket_view=True,
            **recipe.settings,
        )


class Fsdp2(Peer):
    """torch FSDP2, fully_shard over gloo: one unit for each decoder layer, and the rest."""

    needs_gloo = True
    autocast = False

    @classmethod
    def require(cls, task: Task) -> None:
        from torch.distributed.fsdp import fully_shard  # noqa: F401

    def __init__(self, name: str, task: Task, recipe: Recipe) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        super().__init__(name, task, recipe)
        narrow = torch.bfloat16 if task.low_precision else None
        # Without its casts of what goes into a layer: they would round the rotary tables as nobody else does.
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=narrow, cast_forward_inputs=False)
        mesh = init_device_mesh("cpu", (task.world.size,))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.module, self.optimizer = self.model, recipe.make(self.model.parameters())

    def parameters(self) -> dict[str, Tensor]:
        return {name: shard.full_tensor() for name, shard in super().parameters().items()}  # type: ignore[attr-defined]


class Horovod(Peer):
    """Horovod's DistributedOptimizer."""

    @classmethod
    def require(cls, task: Task) -> None:
        hvd = horovod()
        hvd.init()
        if hvd.size() != task.world.size:
            raise RuntimeError(
                f"it sees {hvd.size()} ranks where there are {task.world.size}: built without this MPI?"
            )

    def __init__(self, name: str, task: Task, recipe: Recipe) -> None:
        super().__init__(name, task, recipe)
        hvd: Any = horovod()
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        named = list(self.model.named_parameters())
        inner = recipe.make(self.model.parameters())
        self.module = self.model
        self.averaged: Any = hvd.DistributedOptimizer(inner, named_parameters=named)
        self.optimizer = self.averaged

    def synchronize(self) -> None:
        self.averaged.synchronize()

    def update(self) -> None:
        with self.averaged.skip_synchronize():
            self.averaged.step()
        self.averaged.zero_grad()


class DeepSpeed(Peer):
    """DeepSpeed over gloo: stage 1 shards optimizer states, 2 gradients too, 3 parameters too."""

    needs_gloo = True
    autocast = False

    @classmethod
    def require(cls, task: Task) -> None:
        deepspeed()
        if task.dtype == torch.float64:
            raise RuntimeError("its optimizers hold float32 copies of the parameters, so no float64")

    def __init__(self, name: str, task: Task, recipe: Recipe) -> None:
        super().__init__(name, task, recipe)
        inner = recipe.make(self.model.parameters())
        self.engine, self.optimizer = deepspeed_engine(self.model, inner, task, stage_of(name))
        self.module = self.engine

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def update(self) -> None:
        self.engine.step()

    def parameters(self) -> dict[str, Tensor]:
        with deepspeed().zero.GatheredParameters(list(self.model.parameters())):
            return {name: whole.clone() for name, whole in super().parameters().items()}


DATA_PARALLEL: dict[str, type[Peer]] = {
    **{f"hpcpar {stage}": Hpcpar for stage in range(4)},
    **{f"hpcpar {stage} {how}": Hpcpar for how in ("fast", "guarded") for stage in range(4)},
    "ddp": Ddp,
    "zero redundancy": ZeroRedundancy,
    "fsdp2": Fsdp2,
    "horovod": Horovod,
    **{f"deepspeed {stage}": DeepSpeed for stage in range(1, 4)},
    "one process": Solo,
    "one rank alone": Solo,
    "no communication": Solo,
}
"""All of them, in the order in which they are reported."""


def build(name: str, task: Task, recipe: Recipe) -> Peer:
    return task.peers[name](name, task, recipe)


def stage_of(name: str) -> int:
    return int(name.split()[1])


def absent(names: Iterable[str], task: Task) -> dict[str, str]:
    """Return which peers cannot take part, and why; the same on all ranks."""
    reasons = {}
    for name in names:
        try:
            task.peers[name].require(task)
        except Exception as error:  # whatever somebody else's import may raise
            reasons[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    everyone: list[dict[str, str]] = task.world.allgather_object(reasons)
    return {name: why for found in reversed(everyone) for name, why in found.items()}


def horovod() -> ModuleType:
    with without_this_folder():
        return importlib.import_module("horovod.torch")


@contextmanager
def without_this_folder() -> Iterator[None]:
    """Hide this folder from an import: horovod.py beside this file would hide Horovod itself."""
    before = list(sys.path)
    sys.path[:] = [path for path in before if Path(path or ".").resolve() != HERE]
    try:
        yield
    finally:
        sys.path[:] = before


def deepspeed() -> ModuleType:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    module = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # It calls collectives by names that torch is giving up, in every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    return module


def deepspeed_engine(
    model: nn.Module, optimizer: torch.optim.Optimizer, task: Task, stage: int
) -> tuple[Any, torch.optim.Optimizer]:
    """Return DeepSpeed's engine around a model, and its optimizer."""
    bucket_elements = (task.bucket_bytes or BUCKET_BYTES) // (2 if task.low_precision else 4)
    settings = {
        "train_micro_batch_size_per_gpu": task.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket_elements,
            "allgather_bucket_size": bucket_elements,
        },
        "bf16": {"enabled": task.low_precision},
    }
    world = task.world
    # It asks for this variable where its own launcher did not start the ranks.
    os.environ.setdefault("LOCAL_RANK", str(world.nodes[: world.rank].count(world.nodes[world.rank])))
    engine, itself, _, _ = deepspeed().initialize(
        model=model, optimizer=optimizer, config=settings, dist_init_required=False
    )
    return engine, itself


def join_gloo(world: Communicator, cleanup: ExitStack) -> None:
    """Join torch.distributed over gloo; its meeting point travels over our communicator."""
    if len(set(world.nodes)) == 1:
        # On one node a file will do, which only this user can reach; a TCP store listens to anybody.
        folder = cleanup.enter_context(tempfile.TemporaryDirectory()) if world.rank == 0 else None
        path = f"{world.broadcast_object(folder)}/store"
        store: Any = distributed.FileStore(path, world.size)  # type: ignore[attr-defined]
    else:
        store = tcp_store(world)
    distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    # Last first. A store that outlives its file ends the process: what holds it is to go on all ranks before.
    cleanup.callback(world.barrier)
    cleanup.callback(gc.collect)
    cleanup.callback(distributed.destroy_process_group)


def tcp_store(world: Communicator) -> Any:
    make = distributed.TCPStore  # type: ignore[attr-defined]
    mine = None
    if world.rank == 0:
        mine = make(socket.gethostname(), 0, is_master=True, wait_for_workers=False)
    host, port = world.broadcast_object((mine.host, mine.port) if mine else None)
    return mine or make(host, port, is_master=False)
