"""Runs of one model in any pipeline, tensor-parallel degree, ZeRO stage and precision, for the tests beside.

Gradients are given, in numbers that sum exactly on 1, 2 and 4 ranks, so every run must have the serial one's
bits. The embedding is also the head: if two ranks have them, each has a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from hpcpar.checkpoint import Loaded, load, save
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, Precision, fully_shard, summon_full_parameters
from hpcpar.errors import PeerFailedError
from hpcpar.tensor_parallel.split import (
    Heads,
    Split,
    comm_of,
    gather_whole,
    own_shard,
    padded_length,
    place,
    replicated,
    split_evenly,
    split_of,
    split_sections,
)

LAYERS = 4
VOCABULARY = 5
EMBED, HEAD, NORM, UP = "embed.weight", "head.weight", "norm.weight", "layers.2.up"
TIED = {HEAD: EMBED}


def _vocabulary(n: int) -> Split:
    return split_evenly(VOCABULARY, n, padded=padded_length(VOCABULARY, n))


PARAMETERS: dict[str, tuple[tuple[int, ...], Callable[[int], Split] | None]] = {
    EMBED: ((VOCABULARY, 3), _vocabulary),
    HEAD: ((VOCABULARY, 3), _vocabulary),
    NORM: ((3,), None),
    **{f"layers.{n}.up": ((12, 3), lambda n: split_evenly(12, n)) for n in range(LAYERS)},
    **{f"layers.{n}.down": ((3, 12), lambda n: split_evenly(12, n, dim=1)) for n in range(LAYERS)},
    "layers.0.heads": ((20, 3), lambda n: split_sections((Heads(12, 1), Heads(2, 2), Heads(2, 2)), n)),
    "layers.0.key": ((4, 5), lambda n: split_sections((Heads(2, 2),), n)),
    "layers.0.gate_up": ((14, 3), lambda n: split_sections((7, 7), n)),
    # Only the first and the last layer have vectors: in a pipeline the ranks between have an empty group.
    "layers.0.gate_up_bias": ((14,), lambda n: split_sections((7, 7), n)),
    "layers.1.scale": ((), None),
    "layers.1.unused": ((3,), None),
    "layers.1.empty": ((0, 3), None),
    "layers.3.unembed": (
        (3, VOCABULARY),
        lambda n: split_evenly(VOCABULARY, n, dim=1, padded=padded_length(VOCABULARY, n)),
    ),
    "layers.3.turned": ((12, 5), lambda n: split_evenly(12, n)),
    "layers.3.down_bias": ((3,), lambda n: replicated(3, n)),
    "layers.3.pair": ((2, 3), lambda n: split_sections((2,), n)),
    "layers.3.frozen": ((12, 2), lambda n: split_evenly(12, n)),
}
"""Shapes of the serial model, and the split of each over n ranks; of some, the last ranks have nothing."""

WITHOUT_STATE = ("layers.1.unused", "layers.1.empty", "layers.3.frozen")
"""Never stepped on: of their states some optimizers have a step count, others nothing."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.125, momentum=0.5),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05),
}

Layers = tuple[int, ...]
Placement = tuple[Layers, ...]
"""Layers of each pipeline rank; the embedding goes with the first, the head with the last."""

WHOLE: Placement = ((0, 1, 2, 3),)
TWO: Placement = ((0, 1), (2, 3))
V: Placement = ((0, 3), (1, 2))
TURNED: Placement = ((2, 3), (0, 1))
INTERLEAVED: Placement = ((0, 2), (1, 3))
THREE: Placement = ((0,), (1, 2), (3,))
IDLE: Placement = ((0, 1, 2, 3), ())


def whole_value(name: str, seed: int) -> Tensor:
    number = list(PARAMETERS).index(TIED.get(name, name))
    generator = torch.Generator().manual_seed(100 * seed + number)
    return torch.randint(-64, 65, PARAMETERS[name][0], generator=generator, dtype=torch.float64) / 64


class Block(nn.Module):
    """Some of the parameters; its output is linear in each, with a given gradient."""

    def __init__(self, prefix: str, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.prefix = prefix
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)

    def forward(self, total: Tensor, step: int) -> Tensor:
        for name, parameter in self.named_parameters():
            if name == "unused":
                continue
            gradient = own_shard(parameter, whole_value(f"{self.prefix}.{name}", 1000 + step))
            total = total + (parameter * gradient.to(parameter.dtype)).sum()
        return total


class Stages(nn.Module):
    """A pipeline rank's part of the model, under the names of the whole one."""

    def __init__(
        self,
        layers: Layers,
        *,
        tp_comm: Communicator | None = None,
        seed: int = 0,
        tied: bool = True,
        without: Sequence[str] = (),
        apart: bool = False,
    ) -> None:
        super().__init__()
        self.tied_names = TIED if tied else {}
        self.layers = nn.ModuleDict()
        held = {name for name in PARAMETERS if _layer_of(name) in layers} - set(without)
        blocks: dict[str, dict[str, nn.Parameter]] = {f"layers.{number}": {} for number in layers}
        for name in (each for each in PARAMETERS if each in held):
            prefix, last = name.rsplit(".", 1)
            blocks.setdefault(prefix, {})[last] = _parameter(name, tp_comm, seed)
        for prefix, parameters in blocks.items():
            parent = self.layers if prefix.startswith("layers.") else self
            parent.add_module(prefix.rsplit(".", 1)[-1], Block(prefix, parameters))
        self.is_one = {EMBED, HEAD} <= held and tied and not apart
        if self.is_one:
            self.head.weight = self.embed.weight
        for number in layers:
            self.layers[str(number)].register_buffer("calls", torch.tensor(number))
        self.register_buffer("steps_done", torch.tensor(0))

    def forward(self, step: int) -> Tensor:
        self.steps_done += 1
        total = torch.zeros((), dtype=torch.float64, requires_grad=True)
        for name, block in (*self.named_children(), *self.layers.items()):
            if isinstance(block, Block) and not (name == "head" and self.is_one):
                total = block(total, step)
        return total


def _layer_of(name: str) -> int:
    ends = {EMBED: 0, HEAD: LAYERS - 1, NORM: LAYERS - 1}
    return ends[name] if name in ends else int(name.split(".")[1])


def _parameter(name: str, tp_comm: Communicator | None, seed: int) -> nn.Parameter:
    value, split_over = whole_value(name, seed), PARAMETERS[name][1]
    split = None if tp_comm is None or split_over is None else split_over(tp_comm.size)
    shard = value if split is None or tp_comm is None else split.shard(value, tp_comm.rank)
    if name.endswith("turned"):
        shard = shard.T.contiguous().T
    parameter = nn.Parameter(shard, requires_grad=not name.endswith("frozen"))
    if split is not None and tp_comm is not None:
        place(parameter, split, tp_comm)
    return parameter


class Mode(NamedTuple):
    """Distribution of a run over ranks.

    plain     the optimizer is torch's own, and there is no dp communicator
    offload   optimizer states are on disk
    shared    the ranks of a node share parameters
    """

    placement: Placement = WHOLE
    tp: int = 1
    dp: int = 1
    stage: int = 0
    precision: Precision | str | None = None
    plain: bool = False
    offload: bool = False
    shared: bool = False
    optimizer: str = "adamw"
    dtype: torch.dtype = torch.float64

    @property
    def size(self) -> int:
        return len(self.placement) * self.tp * self.dp

    def __str__(self) -> str:
        placement = " ".join("".join(map(str, layers)) or "-" for layers in self.placement)
        extra = [str(self.precision or ""), "plain" if self.plain else "", "disk" if self.offload else ""]
        return " ".join([f"[{placement}] tp{self.tp} dp{self.dp} zero{self.stage}", *filter(None, extra)])


SERIAL = Mode(plain=True)


class Run:
    """One rank's model and optimizer, and the steps that it takes."""

    def __init__(self, comm: Communicator, mode: Mode, seed: int = 0, **of_model: Any) -> None:
        self.comm = comm
        stage_size = mode.tp * mode.dp
        pp_rank = comm.rank // stage_size
        self.tp_comm = comm.split(comm.rank // mode.tp, name="tp")
        self.dp_comm = comm.split(pp_rank * stage_size + comm.rank % mode.tp, name="dp")
        assert self.dp_comm is not None
        tp_comm = None if mode.tp == 1 and mode.plain else self.tp_comm
        self.model = Stages(mode.placement[pp_rank], tp_comm=tp_comm, seed=seed, **of_model)
        self.model.to(mode.dtype)
        if mode.stage == 3:
            fully_shard(self.model, self.dp_comm, precision=mode.precision, shared_parameters=mode.shared)
        parameters = list(self.model.parameters())
        groups: Any = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.125},
            {"params": [p for p in parameters if p.dim() < 2]},
        ]
        self.optimizer: Any = OPTIMIZERS[mode.optimizer](groups)
        self.offload = TemporaryDirectory() if mode.offload else None
        if not mode.plain:
            self.optimizer = DistributedOptimizer(
                self.optimizer,
                self.model.named_parameters(),
                self.dp_comm,
                zero_stage=mode.stage,
                precision=None if mode.stage == 3 else mode.precision,
                offload=None if self.offload is None else self.offload.name,
                shared_parameters=mode.shared and mode.stage < 3,
                bucket_bytes=400,
                first_bucket_bytes=100,
            )

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            loss = self.model(step)
            scaled = self.optimizer.scale_loss if isinstance(self.optimizer, DistributedOptimizer) else None
            (loss if scaled is None else scaled(loss)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, directory: Path, comm: Communicator | None = None) -> Path:
        return save(directory, step=2, model=self.model, optimizer=self.optimizer, comm=comm or self.comm)

    def load(self, path: Path, **options: Any) -> Loaded:
        return load(path, model=self.model, optimizer=self.optimizer, comm=self.comm, **options)

    def everything(self) -> dict[str, Tensor]:
        """Return this rank's parameters and states as wholes, by first name, and whether padding is zero."""
        states = self.optimizer.state_dict()["state"]
        numbers = [p for group in self.optimizer.param_groups for p in group["params"]]
        found = {name: value.clone() for name, value in self.model.named_buffers()}
        with summon_full_parameters(self.model):
            for name, parameter in self.model.named_parameters():
                number = next((n for n, other in enumerate(numbers) if other is parameter), -1)
                of_state = {} if name in WITHOUT_STATE else states.get(number, {})
                values = self._agreed(parameter, {"": parameter.detach(), **of_state})
                for key, value in values.items():
                    whole = gather_whole(parameter, value) if value.dim() else value.clone()
                    found[f"{TIED.get(name, name)}/{key}"] = whole
                    assert not value.dim() or padding_is_zero(parameter, value), name
        return found

    def _agreed(self, parameter: Tensor, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add empty states on ranks that have no elements, and so perhaps no states."""
        split = split_of(parameter)
        if split is None or all(split.shard_length(rank) for rank in range(split.size)):
            return values
        assert self.tp_comm is not None
        of_first = self.tp_comm.broadcast_object(values)
        empty = {
            key: value.new_zeros(parameter.shape) if value.dim() else value for key, value in of_first.items()
        }
        return values if parameter.numel() else empty | values


def padding_is_zero(parameter: Tensor, value: Tensor) -> bool:
    split, comm = split_of(parameter), comm_of(parameter)
    if split is None or comm is None:
        return True
    held = split.held(comm.rank)
    return not value.narrow(split.dim, held, value.shape[split.dim] - held).any()


def in_run(mode: Mode, body: Callable[[Run], Any], **of_run: Any) -> list[Any]:
    """Return what every rank of a run returns."""
    return run_loopback(mode.size, lambda comm: body(Run(comm, mode, **of_run)))


@cache
def serial(steps: int, optimizer: str = "adamw") -> dict[str, Tensor]:
    def body(run: Run) -> dict[str, Tensor]:
        run.steps(0, steps)
        return run.everything()

    return in_run(SERIAL._replace(optimizer=optimizer), body)[0]


def saved_by(mode: Mode, directory: Path, **of_run: Any) -> Path:
    def body(run: Run) -> Path:
        run.steps(0, 2)
        return run.save(directory)

    return in_run(mode, body, **of_run)[0]


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Return the names of what is not the same bit for bit."""
    return [name for name in found if name not in expected or not found[name].equal(expected[name])]


def failure(mode: Mode, body: Callable[[Run], Any], missing: dict[int, list[str]] | None = None) -> str:
    """Return the message that all ranks get when a body fails; their models must be as before.

    missing   parameters that a rank lacks
    """

    def failing(comm: Communicator) -> str:
        run = Run(comm, mode, seed=1, without=(missing or {}).get(comm.rank, []))
        before = run.everything()
        with pytest.raises(PeerFailedError) as caught:
            body(run)
        assert differences(run.everything(), before) == []
        return str(caught.value)

    messages = run_loopback(mode.size, failing)
    assert len(set(messages)) == 1
    return messages[0]


class Streams:
    """Two generators that a model brings along, one of them the same on all ranks."""

    def __init__(self, rank: int) -> None:
        self.generators = {
            "same": torch.Generator().manual_seed(7),
            "own/one": torch.Generator().manual_seed(8 + rank),
        }

    def state_dict(self) -> dict[str, Tensor]:
        return {name: generator.get_state() for name, generator in self.generators.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        assert state.keys() == self.generators.keys()
        for name, generator in self.generators.items():
            generator.set_state(state[name])

    def draw(self) -> list[float]:
        return [torch.rand(1, generator=generator).item() for generator in self.generators.values()]
