"""What ranks that share the layers of a Llama must send, by theory: the counted bytes are held to it.

b sequences of s tokens, h hidden, L layers, t ranks; unit = bsh values, ar = all-reduce, rs = reduce-scatter,
ag = all-gather. Queries, keys and values are one gather and one sum, and so are gate and up.

                      tensor parallel              with sequence parallelism
                      forward       backward       forward            backward
    embedding         ar unit                      rs unit            ag unit
    each layer        2 ar unit     2 ar unit      2 (ag + rs unit)   2 (ag + rs unit)   again: + 2 ag unit
    norms, 2L + 1                                                     ar h each
    output projection               ar unit        ag unit            rs unit            again: + ag unit
    loss              ar bs, ar 2bs                ar bs, ar 2bs

An ar sends 2(t - 1) times its values over all ranks, rs and ag (t - 1) times: a layer 8bsh(t - 1)/t values on
each rank either way, and with `gather_again` 10. Beyond it:

    full recomputation   a layer's forward once more, all of it: what backward needs last, the inputs of the
                         second row-parallel product, is noted after that product has been summed
    shared heads         keys and values with fewer heads than ranks: ar of both weights' gradients in each
                         backward, over the ranks with the same head
    whole logits         are asked for by nobody who trains or evaluates

source   Shoeybi et al. 2019, arXiv 1909.08053, section 3; Korthikanti et al. 2022, arXiv 2205.05198,
         section 4.2.2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from hpcpar.autograd import Recompute
from hpcpar.data_parallel.traffic import allgather_nbytes, allreduce_nbytes, reduce_scatter_nbytes
from hpcpar.models.llama import Part
from hpcpar.models.llama_config import LlamaConfig
from hpcpar.partition import bounds
from hpcpar.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

Collective = Literal["allreduce", "allgather", "reduce_scatter"]

Values = Literal["of the model", "largest logits", "of the loss"]


class Exchange(NamedTuple):
    """One collective.

    values   of the whole array
    kind     which: the model's type and sums, or, of the loss, at least float32 and once a maximum
    """

    collective: Collective
    values: int
    kind: Values = "of the model"


class Pass(NamedTuple):
    """A forward, or a forward and its backward, of so many sequences of so many tokens."""

    sequences: int
    tokens: int


def layer_forward(config: LlamaConfig, tp: TensorParallel, size: Pass) -> Iterator[Exchange]:
    """Attention, and feed-forward."""
    for _ in range(2):
        yield from column_forward(config, tp, size)
        yield from row_forward(config, tp, size)


def layer_backward(config: LlamaConfig, tp: TensorParallel, size: Pass) -> Iterator[Exchange]:
    """The same backwards, without what is recomputed, and with the norms before both."""
    for _ in range(2):
        if tp.sequence_parallel:
            yield from _in_chunks("allgather", config, tp, size)
        yield from column_backward(config, tp, size)
        yield from norm_backward(config, tp)


def column_forward(config: LlamaConfig, tp: TensorParallel, size: Pass) -> Iterator[Exchange]:
    """Of column-parallel layers that share an input."""
    if tp.sequence_parallel:
        yield from _in_chunks("allgather", config, tp, size)


def column_backward(config: LlamaConfig, tp: TensorParallel, size: Pass) -> Iterator[Exchange]:
    """The input's gradient, and the input itself if it was not kept."""
    if not tp.sequence_parallel:
        yield Exchange("allreduce", _unit(config, size))
        return
    if tp.gather_again:
        yield Exchange("allgather", _unit(config, size))
    yield from _in_chunks("reduce_scatter", config, tp, size)


def row_forward(config: LlamaConfig, tp: TensorParallel, size: Pass) -> Iterator[Exchange]:
    """The sum of a row-parallel layer."""
    if tp.sequence_parallel:
        yield from _in_chunks("reduce_scatter", config, tp, size)
    else:
        yield Exchange("allreduce", _unit(config, size))


def norm_backward(config: LlamaConfig, tp: TensorParallel) -> Iterator[Exchange]:
    """A norm's weight, whose gradient each rank has of its own tokens."""
    if tp.sequence_parallel:
        yield Exchange("allreduce", config.hidden_size)


def forward(config: LlamaConfig, tp: TensorParallel, size: Pass, part: Part) -> Iterator[Exchange]:
    """From tokens to the loss, as far as a part goes."""
    if part.embeds:
        yield Exchange("reduce_scatter" if tp.sequence_parallel else "allreduce", _unit(config, size))
    for _ in part.layers:
        yield from layer_forward(config, tp, size)
    if not part.heads:
        return
    yield from column_forward(config, tp, size)
    tokens = size.sequences * size.tokens
    yield Exchange("allreduce", tokens, "largest logits")
    yield Exchange("allreduce", 2 * tokens, "of the loss")


def backward(
    config: LlamaConfig, tp: TensorParallel, size: Pass, again: Recompute, part: Part
) -> Iterator[Exchange]:
    """From the loss to the embedding, with what is recomputed; without weights of shared heads."""
    if part.heads:
        yield from column_backward(config, tp, size)
        yield from norm_backward(config, tp)
    for number in part.layers:
        if again.of_layer(number, config.layers) == "full":
            yield from layer_forward(config, tp, size)
        yield from layer_backward(config, tp, size)
    if part.embeds and tp.sequence_parallel:
        yield Exchange("allgather", _unit(config, size))


def shared_heads_backward(config: LlamaConfig, tp: TensorParallel, part: Part) -> Iterator[Exchange]:
    """Weights of keys and values, over the ranks with the same head."""
    if config.key_value_heads < tp.size:
        for _ in range(2 * len(part.layers)):
            yield Exchange("allreduce", config.head_width * config.hidden_size)


def expected_tensor_traffic(
    config: LlamaConfig,
    tp: TensorParallel,
    dtype: torch.dtype,
    *,
    trained: Iterable[Pass] = (),
    evaluated: Iterable[Pass] = (),
    recompute: Recompute | None = None,
    parts: Sequence[Part] | None = None,
    on_device: bool = False,
) -> Counter[tuple[Communicator, str]]:
    """(communicator, collective) -> bytes that its ranks together send.

    dtype       of parameters and activations
    trained     a forward and a backward of each; evaluated: a forward of each
    recompute   as the model was built with
    parts       that these ranks have of it; None: they have all of it
    on_device   whether activations are on GPUs
    """
    total: Counter[tuple[Communicator, str]] = Counter()
    if tp.size == 1:
        return total
    again = recompute or Recompute()
    held = [Part.whole(config.layers)] if parts is None else parts
    with_backward, forward_only = Counter(trained), Counter(evaluated)
    for part in held:
        for size, times in with_backward.items():
            exchanges = [*forward(config, tp, size, part), *backward(config, tp, size, again, part)]
            _add(total, tp.comm, exchanges, dtype, times, on_device)
            if config.key_value_heads < tp.size:
                same = tp.sharers(config.key_value_heads).same
                _add(total, same, shared_heads_backward(config, tp, part), dtype, times, on_device)
        for size, times in forward_only.items():
            _add(total, tp.comm, forward(config, tp, size, part), dtype, times, on_device)
    return total


def _add(
    total: Counter[tuple[Communicator, str]],
    comm: Communicator,
    exchanges: Iterable[Exchange],
    dtype: torch.dtype,
    times: int,
    on_device: bool,
) -> None:
    for exchange, count in Counter(exchanges).items():
        total[comm, exchange.collective] += times * count * _nbytes(comm, exchange, dtype, on_device)


def _nbytes(comm: Communicator, exchange: Exchange, dtype: torch.dtype, on_device: bool) -> int:
    """Bytes that all ranks of `comm` send."""
    if exchange.kind != "of the model":
        dtype = torch.promote_types(dtype, torch.float32)
    nbytes, name = exchange.values * dtype.itemsize, str(dtype).removeprefix("torch.")
    if exchange.collective == "allgather":
        return allgather_nbytes(comm, nbytes, dtype=name, on_device=on_device)
    if exchange.collective == "reduce_scatter":
        return reduce_scatter_nbytes(comm, nbytes, dtype=name, on_device=on_device)
    op = "max" if exchange.kind == "largest logits" else "sum"
    return allreduce_nbytes(comm, nbytes, dtype=name, op=op, on_device=on_device)


def _unit(config: LlamaConfig, size: Pass) -> int:
    """bsh"""
    return size.sequences * size.tokens * config.hidden_size


def _in_chunks(
    collective: Collective, config: LlamaConfig, tp: TensorParallel, size: Pass
) -> Iterator[Exchange]:
    """A unit in pieces, of which each takes as much of every rank's part of the sequence."""
    own = size.tokens // tp.size
    for start, stop in bounds(own, min(tp.chunks, own) or 1):
        yield Exchange(collective, size.sequences * tp.size * (stop - start) * config.hidden_size)
