"""Random programs of what users of torch do around a step: the numbers of one process, in every stage.

A program is a list of actions (train with microbatches, clip, discard a backward, average weights by hand,
write to them, make the optimizer anew, …), drawn from a seed. One process runs it with a plain optimizer
and whole batches; each rank of a world with its share of each. What both read is compared after each action.
float64, and a tolerance of 1e-9: sums are taken in another order.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as imported_before
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hpcpar.comm import Communicator
from hpcpar.data_parallel import DistributedOptimizer, Precision, fully_shard, summon_full_parameters
from tests.data_parallel.staged import ResidualLayer, fill

TOLERANCE = 1e-9

Course = list[tuple[str, list[Tensor]]]
"""After each action what a user sees."""


class Net(nn.Module):
    """An embedding that is tied to the head, layers, a frozen scale, a parameter that no forward uses."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(ResidualLayer(4, 6) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight
        fill(self.double(), seed)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def program_of(seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Draw the actions of a program with what each of them is about."""
    draw = random.Random(seed)
    actions = [
        *("train",) * 6,
        *("discard", "forget late", "not a number", "average by hand", "averaged model", "write", "norms"),
        *("remake", "free"),
    ]
    return [
        ("train", options(draw)),
        *((draw.choice(actions), options(draw)) for _ in range(7)),
        ("norms", {}),
    ]


def options(draw: random.Random) -> dict[str, Any]:
    return {
        "seed": draw.randrange(10**6),
        "samples": draw.choice([12, 24, 36]),
        "microbatches": draw.choice([1, 1, 2, 3]),
        "clip": draw.choice([None, "torch", "imported", "optimizer", "value", "optimizer value", "inf"]),
        "change": draw.choice([None, None, "scale", "mask", "decay", "without head", "look"]),
        "forget": draw.choice(["optimizer", "model", "model zeros", "optimizer zeros", "by hand"]),
    }


class World:
    """One rank's model and optimizer, or those of one process."""

    def __init__(self, comm: Communicator, kind: str | None, seed: int) -> None:
        self.comm, self.kind = comm, kind
        self.adam = bool(seed % 2)
        self.model = Net(seed)
        if kind == "3":
            fully_shard(self.model, comm)
        self.averages: dict[str, Tensor] = {}
        self.averaged: AveragedModel | None = None
        self.make()

    def make(self, state: Any = None) -> None:
        """Make the optimizer, and load a state into it."""
        decayed = [p for name, p in self.model.named_parameters() if name.startswith("layers")]
        rest = [p for name, p in self.model.named_parameters() if not name.startswith("layers")]
        groups: Any = [{"params": decayed, "weight_decay": 0.1}, {"params": rest}]
        inner: torch.optim.Optimizer = (
            torch.optim.AdamW(groups, lr=0.02, eps=1e-5)
            if self.adam
            else torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        )
        self.optimizer: Any = inner if self.kind is None else self.distributed(inner)
        if state is not None:
            self.optimizer.load_state_dict(state)

    def distributed(self, inner: torch.optim.Optimizer) -> Any:
        number, _, more = str(self.kind).partition(" ")
        return DistributedOptimizer(
            inner,
            self.model.named_parameters(),
            self.comm,
            zero_stage=int(number),
            bucket_bytes=200,
            precision=Precision("float64") if more == "managed" else None,
            model=None if number == "3" else self.model,
            overlap_allgather=more == "overlapping",
        )

    def step(self) -> None:
        self.optimizer.step()

    def whole(self) -> AbstractContextManager[None]:
        """Have whole and new parameters."""
        if self.kind is None:
            return nullcontext()
        if "overlapping" in self.kind:  # state_dict() waits, too
            (self.model.state_dict if self.optimizer is None else self.optimizer.wait_for_parameters)()
        return summon_full_parameters(self.model)

    def backward(self, samples: int, seed: int, *, microbatches: int = 1, factor: float = 1.0) -> None:
        for number in range(microbatches):
            generator = torch.Generator().manual_seed(seed + number)
            tokens = torch.randint(0, 7, (samples, 2), generator=generator)
            mine = tokens[self.comm.rank :: self.comm.size]
            logits = self.model(mine)[:, 0]
            loss = nn.functional.cross_entropy(logits, mine[:, 1]) * factor / microbatches
            is_last = number == microbatches - 1
            with nullcontext() if is_last or self.kind is None else self.optimizer.no_sync():
                loss.backward()

    def forget(self, how: str) -> None:
        if how == "by hand":
            for parameter in self.model.parameters():
                parameter.grad = None
        elif how.startswith("model"):
            self.model.zero_grad(set_to_none=not how.endswith("zeros"))
        else:
            self.optimizer.zero_grad(set_to_none=not how.endswith("zeros"))

    # --- actions ----------------------------------------------------------------------------------

    def run(self, action: str, given: dict[str, Any]) -> list[Tensor]:
        """Do it; return what it lets a user see."""
        return list(getattr(self, "do_" + action.replace(" ", "_"))(**given))

    def do_train(
        self, seed: int, samples: int, microbatches: int, clip: str | None, change: str | None, forget: str
    ) -> Iterator[Tensor]:
        self.backward(samples, seed, microbatches=microbatches, factor=5.0)
        self.change(change)
        if clip in ("torch", "imported", "inf"):
            clipped = imported_before if clip == "imported" else torch.nn.utils.clip_grad_norm_
            yield clipped(self.model.parameters(), 0.3, norm_type="inf" if clip == "inf" else 2.0)  # type: ignore[arg-type]
        elif clip == "optimizer":
            norm = torch.nn.utils.clip_grad_norm_ if self.kind is None else None
            yield self.optimizer.clip_grad_norm_(0.3) if norm is None else norm(self.model.parameters(), 0.3)
        elif clip == "optimizer value" and self.kind is not None:
            self.optimizer.clip_grad_value_(0.05)
        elif clip is not None:
            torch.nn.utils.clip_grad_value_(self.model.parameters(), 0.05)
        self.step()
        self.forget(forget)

    def change(self, how: str | None) -> None:
        """Change gradients as users do."""
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None:
                continue
            if how == "scale":
                parameter.grad.mul_(0.5)
                parameter.grad /= 1.5
            elif how == "mask":
                generator = torch.Generator().manual_seed(3)
                parameter.grad.data.mul_(
                    torch.rand(parameter.shape, generator=generator, dtype=torch.float64) < 0.5
                )
            elif how == "decay":
                parameter.grad.add_(torch.ones(parameter.shape, dtype=torch.float64), alpha=0.01)
            elif how == "without head" and name.startswith("head"):
                parameter.grad = None

    def do_discard(self, seed: int, samples: int, forget: str, **_: Any) -> Iterator[Tensor]:
        self.backward(samples, seed)
        self.forget(forget)
        yield torch.zeros(())

    def do_forget_late(self, seed: int, samples: int, forget: str, **_: Any) -> Iterator[Tensor]:
        """Add to gradients that were stepped on, as another network's loss does, and forget the sum."""
        self.backward(samples, seed)
        self.step()
        yield from self.do_discard(seed + 1, samples, forget)

    def do_not_a_number(self, seed: int, samples: int, forget: str, **_: Any) -> Iterator[Tensor]:
        self.backward(samples, seed, factor=float("nan"))
        self.forget(forget)
        if seed % 2:
            self.optimizer.zero_grad()
        yield torch.zeros(())

    def do_average_by_hand(self, **_: Any) -> Iterator[Tensor]:
        with self.whole(), torch.no_grad():
            for name, parameter in self.model.named_parameters():
                before = self.averages.get(name, torch.zeros_like(parameter))
                self.averages[name] = before * 0.9 + parameter * 0.1
        yield from (self.averages[name].clone() for name in sorted(self.averages))

    def do_averaged_model(self, **_: Any) -> Iterator[Tensor]:
        with self.whole():
            if self.averaged is None:
                self.averaged = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            self.averaged.update_parameters(self.model)
        yield from (parameter.detach().clone() for parameter in self.averaged.module.parameters())

    def do_write(self, **_: Any) -> Iterator[Tensor]:
        with self.whole(), torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.9)
        yield torch.zeros(())

    def do_norms(self, **_: Any) -> Iterator[Tensor]:
        with self.whole(), torch.no_grad():
            yield torch.nn.utils.parameters_to_vector(self.model.parameters()).norm()
            yield from (value.clone() for value in self.model.state_dict().values())

    def do_remake(self, seed: int, **_: Any) -> Iterator[Tensor]:
        """Resume from a state, or without one."""
        state = self.optimizer.state_dict() if seed % 2 else None
        if isinstance(self.optimizer, DistributedOptimizer):
            self.optimizer.close()
        self.make(state)
        yield torch.zeros(())

    def do_free(self, seed: int, samples: int, **_: Any) -> Iterator[Tensor]:
        """Free the optimizer right after a step, and look at the model."""
        self.backward(samples, seed)
        self.step()
        self.optimizer = None
        gc.collect()
        if seed % 3:
            yield self.model(torch.arange(7)).detach()
        if seed % 2:
            self.make()
            self.optimizer.zero_grad()
        with self.whole():
            yield from (value.clone() for value in self.model.state_dict().values())
        for parameter in self.model.parameters():
            parameter.grad = None
        if self.optimizer is None:
            self.make()


def course_of(world: World, seed: int) -> Course:
    return [
        (f"{number} {action}", world.run(action, given))
        for number, (action, given) in enumerate(program_of(seed))
    ]


def assert_same(found: Course, expected: Course, told: str) -> None:
    """What a rank read is what one process did, after each action."""
    for (action, there), (_, here) in zip(expected, found, strict=True):
        for one, other in zip(there, here, strict=True):
            is_near = torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)
            assert is_near, f"{told}, after {action}"
