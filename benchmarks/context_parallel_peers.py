"""The context-parallel peers of benchmarks/training.py: ranks that share every sequence of one model.

    class         peers                              whose keys travel how
    Hpcpar        hpcpar exchange, ring, allgather,  hpcpar's methods, over MPI; gradients averaged by
                  ulysses; exchange kept             DistributedOptimizer
    ZigzagRing    zigzag ring                        ring-flash-attention's zigzag algorithm, over gloo
    Ulysses       ulysses                            four all-to-alls of torch.distributed, over gloo
    DeepSpeed     deepspeed ulysses                  deepspeed.sequence's DistributedAttention, over gloo
    Free          no communication                   nobody: own keys stand in for those of the others

ring-flash-attention needs flash-attention, which is for GPUs alone. Its algorithm is written here anew, with
the same kernel and the same merging as hpcpar's: in each step of the ring every rank's keys and values go to
the next rank, in backward once more, and their gradients behind them, the owner's own share too, (6c - 4)u
values a layer and rank. Peers over gloo average gradients by DistributedDataParallel.

source   Zhu, github.com/zhuzilin/ring-flash-attention; Jacobs et al. 2023, arXiv 2309.14509
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed, nn
from torch.autograd import Function
from torch.nn import functional
from training_peers import Peer, Recipe, Solo, Task, deepspeed

from hpcpar.context_parallel import ContextParallel, Mask, Span
from hpcpar.context_parallel.block import AttentionBlock, KeysValues
from hpcpar.context_parallel.kernel import attend, attend_backward, merge
from hpcpar.context_parallel.travel import Travel
from hpcpar.data_parallel import DistributedOptimizer, broadcast_parameters
from hpcpar.data_parallel.buckets import BUCKET_BYTES
from hpcpar.errors import LayoutError
from hpcpar.models import Layers, Llama, parallel_layers
from hpcpar.units import MiB

HPCPAR: dict[str, dict[str, Any]] = {
    "hpcpar exchange": {},
    "hpcpar exchange kept": {"keep": True},
    "hpcpar ring": {"method": "ring"},
    "hpcpar allgather": {"method": "allgather"},
    "hpcpar ulysses": {"method": "ulysses"},
}
"""What each gives to ContextParallel beside the ranks."""


class Hpcpar(Peer):
    """A Llama whose attention is hpcpar's, over MPI."""

    context: ContextParallel

    def __init__(self, name: str, task: Task, recipe: Recipe) -> None:
        super().__init__(name, task, recipe)
        self.mask = Mask(task.sequence)
        broadcast_parameters(self.model, task.world)
        named = list(self.model.named_parameters())
        inner = recipe.make(self.model.parameters())
        self.module = self.model
        self.distributed = DistributedOptimizer(inner, named, task.world, bucket_bytes=task.bucket_bytes)
        self.optimizer = self.distributed

    def make_model(self, task: Task) -> Llama:
        self.context = self.make_context(task)
        alone = task.world.split(task.world.rank)
        return task.model(parallel_layers(task.config, alone, context=self.context))

    def make_context(self, task: Task) -> ContextParallel:
        return ContextParallel(task.world, **HPCPAR[self.name])

    def forward(self) -> Tensor:
        assert self.share is not None
        inputs, targets = self.share
        with self.context.using(self.mask):
            loss = self.model.loss(self.module(inputs), targets, reduction="sum")
        # Gradients are averaged over the ranks, whose tokens may be more or fewer.
        return loss * self.context.comm.size / targets.numel()

    def backward(self, loss: Tensor) -> None:
        with self.context.using(self.mask):
            super().backward(loss)

    def synchronize(self) -> None:
        if isinstance(self.optimizer, DistributedOptimizer):
            self.optimizer.synchronize()


class HpcparUlysses(Hpcpar):
    @classmethod
    def require(cls, task: Task) -> None:
        if task.config.heads % task.cp:
            raise LayoutError(f"heads={task.config.heads} do not divide among cp={task.cp} ranks")


class Free(Hpcpar):
    """The tasks of `hpcpar exchange` and its loss, without any message: it learns something else."""

    def __init__(self, name: str, task: Task, recipe: Recipe) -> None:
        Peer.__init__(self, name, task, recipe)
        self.mask = Mask(task.sequence)
        self.module, self.optimizer = self.model, recipe.make(self.model.parameters())

    def make_context(self, task: Task) -> ContextParallel:
        return OwnKeysAlone(task.world)


class OwnKeysAlone(ContextParallel):
    """Context parallelism whose ranks take their own keys for the others'."""

    def _travel(self, plan: Any, dtype: torch.dtype) -> Any:
        return lambda: NoTravel(plan, self.comm.rank)


class NoTravel(Travel):
    def __init__(self, plan: Any, rank: int) -> None:
        self.plan, self.rank = plan, rank

    def tokens(self, owner: int) -> tuple[Span, ...]:
        return (Span(0, self.plan.counts[owner]),)

    def keys(self, own: tuple[Tensor, Tensor]) -> Iterator[tuple[int, KeysValues]]:
        yield self.rank, own
        batch, heads, own_count, size = own[0].shape
        for owner, count in enumerate(self.plan.counts):
            if owner != self.rank:
                yield owner, own if count == own_count else own[0].new_zeros(2, batch, heads, count, size)

    def send_home(self, owner: int, gradients: Tensor) -> None:
        pass

    def add_at_home(self, gradients: tuple[Tensor, Tensor]) -> None:
        pass


class OverGloo(Peer):
    """Equal parts of each sequence on all ranks; torch averages gradients over them."""

    needs_gloo = True
    chunks: ClassVar[int] = 1

    def __init__(self, name: str, task: Task, recipe: Recipe) -> None:
        super().__init__(name, task, recipe)
        assert self.share is not None
        self.places = self.own_places(task.sequence, task.cp, task.world.rank)
        self.share = self.share[0][:, self.places], self.share[1][:, self.places]
        self.optimizer = recipe.make(self.model.parameters())
        averaged = nn.parallel.DistributedDataParallel(
            self.model,
            bucket_cap_mb=(task.bucket_bytes or BUCKET_BYTES) / MiB,
            gradient_as_bucket_view=True,
        )
        self.module = lambda tokens: averaged(tokens, self.places)

    @classmethod
    def require(cls, task: Task) -> None:
        if task.sequence % (cls.chunks * task.cp):
            raise LayoutError(f"--sequence {task.sequence} is no multiple of {cls.chunks * task.cp}")

    @classmethod
    def own_places(cls, sequence: int, size: int, rank: int) -> Tensor:
        """Return the places of a rank's tokens: consecutive."""
        return torch.arange(sequence).chunk(size)[rank]

    def make_model(self, task: Task) -> Llama:
        return task.model(Layers(attention=self.attention))

    def attention(self, queries: Tensor, keys: Tensor, values: Tensor, dropout: Any = None) -> Tensor:
        raise AssertionError("a subclass has it")


class ZigzagRing(OverGloo):
    """Chunks r and 2c - 1 - r on rank r; keys and values go around the ring."""

    chunks = 2

    @classmethod
    def own_places(cls, sequence: int, size: int, rank: int) -> Tensor:
        chunks = torch.arange(sequence).chunk(2 * size)
        return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))

    def attention(self, queries: Tensor, keys: Tensor, values: Tensor, dropout: Any = None) -> Tensor:
        return Zigzag.apply(queries, keys, values)  # type: ignore[no-any-return, no-untyped-call]


class Zigzag(Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        held = torch.stack((keys, values))
        for step in range(distributed.get_world_size()):
            coming = pass_on(held) if step + 1 < distributed.get_world_size() else None
            rows, columns, block = part(step, queries)
            found, lse_found = attend(queries[:, :, rows], held[..., columns, :], block)
            if step == 0:
                out, lse = found, lse_found
            else:
                merge(out[:, :, rows], lse[:, :, rows], found, lse_found)
            held = arrived(coming) if coming is not None else held
        ctx.save_for_backward(queries, keys, values, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        queries, keys, values, out, lse = ctx.saved_tensors
        held = torch.stack((keys, values))
        of_queries, of_held = torch.zeros_like(queries), torch.zeros_like(held)
        gradients_coming = None
        for step in range(distributed.get_world_size()):
            coming = pass_on(held) if step + 1 < distributed.get_world_size() else None
            rows, columns, block = part(step, queries)
            merged = out[:, :, rows], lse[:, :, rows]
            found = attend_backward(
                gradient[:, :, rows], queries[:, :, rows], held[..., columns, :], merged, block
            )
            of_queries[:, :, rows] += found.queries
            if gradients_coming is not None:
                of_held = arrived(gradients_coming)
            of_held[0][:, :, columns] += found.keys
            of_held[1][:, :, columns] += found.values
            gradients_coming = pass_on(of_held)
            held = arrived(coming) if coming is not None else held
        of_held = arrived(gradients_coming)
        return of_queries, *of_held


def part(step: int, queries: Tensor) -> tuple[slice, slice, AttentionBlock]:
    """Return which queries attend to which of the keys that are here in this step of the ring."""
    half, block = queries.shape[2] // 2, AttentionBlock(queries.shape[-1] ** -0.5, causal=step == 0)
    if step == 0:
        return slice(None), slice(None), block
    if step <= distributed.get_rank():  # from a rank before this one: its later chunk is later than all here
        return slice(None), slice(half), block
    return slice(half, None), slice(None), block


Coming = tuple[Tensor, list[Any], Tensor]


def pass_on(tensor: Tensor) -> Coming:
    """Start to send a tensor to the next rank, and to receive the previous one's."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    received = torch.empty_like(tensor)
    messages = [
        distributed.P2POp(distributed.isend, tensor, (rank + 1) % size),
        distributed.P2POp(distributed.irecv, received, (rank - 1) % size),
    ]
    return received, distributed.batch_isend_irecv(messages), tensor


def arrived(coming: Any) -> Tensor:
    received, messages, _ = coming
    for message in messages:
        message.wait()
    return received  # type: ignore[no-any-return]


class Ulysses(OverGloo):
    """Heads for tokens, by an all-to-all for each of queries, keys, values and output."""

    @classmethod
    def require(cls, task: Task) -> None:
        super().require(task)
        if task.config.key_value_heads % task.cp:
            raise LayoutError(f"kv_heads={task.config.key_value_heads} do not divide among {task.cp} ranks")

    def attention(self, queries: Tensor, keys: Tensor, values: Tensor, dropout: Any = None) -> Tensor:
        parts = [AllToAll.apply(tensor, 1, 2) for tensor in (queries, keys, values)]  # type: ignore[no-untyped-call]
        return AllToAll.apply(causal(*parts), 2, 1)  # type: ignore[no-any-return, no-untyped-call]


class AllToAll(Function):
    """Divide [B, A, N, D] along a dim among the ranks, and join what comes along another."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, divided: int, joined: int) -> Tensor:
        ctx.dims = divided, joined
        sent = torch.stack(tensor.chunk(distributed.get_world_size(), divided))
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent)
        return torch.cat(tuple(received), joined)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        divided, joined = ctx.dims
        return AllToAll.apply(gradient, joined, divided), None, None  # type: ignore[no-untyped-call]


class DeepSpeed(Ulysses):
    """DeepSpeed's DistributedAttention around torch's attention."""

    @classmethod
    def require(cls, task: Task) -> None:
        super().require(task)
        deepspeed()

    def make_model(self, task: Task) -> Llama:
        deepspeed().init_distributed(dist_backend="gloo", dist_init_required=False)
        layer = importlib.import_module("deepspeed.sequence.layer")
        self.exchanging = layer.DistributedAttention(
            by_tokens, distributed.group.WORLD, scatter_idx=2, gather_idx=1
        )
        return super().make_model(task)

    def attention(self, queries: Tensor, keys: Tensor, values: Tensor, dropout: Any = None) -> Tensor:
        parts = (tensor.transpose(1, 2) for tensor in (queries, keys, values))
        out: Tensor = self.exchanging(*parts, 0)
        return out.transpose(1, 2)


def causal(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)


def by_tokens(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of [B, S, A, D]."""
    return causal(*(tensor.transpose(1, 2) for tensor in (queries, keys, values))).transpose(1, 2)


CONTEXT_PARALLEL: dict[str, type[Peer]] = {
    **dict.fromkeys(HPCPAR, Hpcpar),
    "hpcpar ulysses": HpcparUlysses,
    "zigzag ring": ZigzagRing,
    "ulysses": Ulysses,
    "deepspeed ulysses": DeepSpeed,
    "one process": Solo,
    "no communication": Free,
}
"""All of them, in the order in which they are reported."""
