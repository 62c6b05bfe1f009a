"""Bytes on the tp axis: counted, by theory, and in closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcpar.autograd import Recompute
from hpcpar.comm import Communicator, run_loopback
from hpcpar.models import Llama, LlamaConfig, parallel_layers
from hpcpar.planner.shapes import Part
from hpcpar.planner.traffic import (
    CollectiveCall,
    Microbatch,
    TensorParallelCalls,
    calls_nbytes,
    tensor_parallel_calls,
)
from hpcpar.tensor_parallel import TensorParallel
from tests.grid import checkered

B, S, H = 2, 64, 64
UNIT = B * S * H

SMALL = {2: 2, 4: 8}
"""Vectors that so many ranks send in an all-reduce of few bytes, by recursive doubling."""


def sizes(layers: int, **changes: Any) -> LlamaConfig:
    return LlamaConfig(
        10, H, layers, heads=4, kv_heads=changes.pop("kv_heads", 4), ffn_size=8, max_sequence=S, **changes
    )


def units(calls: list[CollectiveCall]) -> float:
    """An all-reduce sends its values twice."""
    return sum(e.values * (2 if e.collective == "allreduce" else 1) for e in calls) / UNIT


def sharers(tp: TensorParallel, config: LlamaConfig) -> Communicator | None:
    """Ranks with the same key-value head, where there are fewer heads than ranks."""
    fewer = config.key_value_heads < tp.size
    return tp.sharers(config.key_value_heads).same if fewer else None


def counted(size: int, config: LlamaConfig, recompute: Recompute | None = None, **options: Any) -> int:
    """Bytes that all ranks send on tp for one forward and backward; they are checked to be the theory's."""

    def work(comm: Communicator) -> tuple[int, int]:
        tp = TensorParallel(comm, **options)
        model = Llama(config, parallel_layers(config, tp), recompute=recompute).double()
        before = sum(traffic.nbytes_sent() for traffic in comm.traffics().values())
        tokens = torch.arange(B * S).view(B, S) % 10
        model.loss(model(tokens), tokens).backward()
        sent = sum(traffic.nbytes_sent() for traffic in comm.traffics().values()) - before
        theory = 0
        on_axis, on_sharers = tensor_parallel_calls(
            config, tp, trained=[Microbatch(B, S)], recompute=recompute
        )
        for axis, calls in ((comm, on_axis), (sharers(tp, config), on_sharers)):
            if axis is not None and axis.rank == 0:
                theory += calls_nbytes(axis, calls, torch.float64).total()
        return sent, theory

    found = run_loopback(size, work)
    sent = sum(sent for sent, _ in found)
    assert sent == sum(theory for _, theory in found)
    return sent


OPTIONS: dict[str, tuple[dict[str, bool], Recompute, int]] = {
    "tensor parallel": ({}, Recompute(), 8),
    "its input's gradient after that of its weights": ({"overlap": False}, Recompute(), 8),
    "full recomputation": ({}, Recompute("full"), 12),
    "selective recomputation": ({}, Recompute("selective"), 8),
    "sequence parallel": ({"sequence_parallel": True}, Recompute(), 8),
    "gathered again": ({"sequence_parallel": True, "gather_again": True}, Recompute(), 10),
    "sequence parallel, full recomputation": ({"sequence_parallel": True}, Recompute("full"), 12),
    "gathered again, full": ({"sequence_parallel": True, "gather_again": True}, Recompute("full"), 14),
}
"""Units of bsh(t - 1)/t values that a rank sends for a layer."""


@pytest.mark.parametrize(("name", "size"), checkered(OPTIONS, [2, 4]))
def test_a_layer_sends_eight_units_and_ten_if_its_inputs_are_gathered_again(size: int, name: str) -> None:
    options, recompute, expected = OPTIONS[name]
    of_layer = counted(size, sizes(2), recompute, **options) - counted(size, sizes(1), recompute, **options)
    # Of the gradients of its two norms, which are small, the units say nothing.
    norms = 2 * H * SMALL[size] if options.get("sequence_parallel") else 0
    assert of_layer == (expected * UNIT * (size - 1) + norms) * 8


def test_the_loss_moves_three_values_a_token_whatever_the_vocabulary() -> None:
    def work(comm: Communicator) -> list[CollectiveCall]:
        of_pass = TensorParallelCalls(sizes(1), TensorParallel(comm), Microbatch(B, S))
        return [each for each in of_pass.forward(Part.whole(1)) if each.kind != "of the model"]

    assert sum(e.values for e in run_loopback(2, work)[0]) == 3 * B * S


@pytest.mark.parametrize(
    ("options", "expected"), [({}, 8), ({"sequence_parallel": True}, 8 + 4 * H / UNIT)]
)  # two norms' gradients are all-reduced
def test_a_layers_exchanges_are_the_units_of_the_paper(options: dict[str, bool], expected: float) -> None:
    def work(comm: Communicator) -> float:
        of_pass = TensorParallelCalls(sizes(1), TensorParallel(comm, **options), Microbatch(B, S))
        return units([*of_pass.layer_forward(0), *of_pass.layer_backward(0)])

    assert set(run_loopback(2, work)) == {expected}


def test_chunks_are_more_exchanges_of_the_same_values() -> None:
    def work(comm: Communicator) -> tuple[int, float, int, float]:
        found = []
        for chunks in (1, 3):
            tp = TensorParallel(comm, sequence_parallel=True, chunks=chunks)
            of_pass, whole = TensorParallelCalls(sizes(1), tp, Microbatch(B, S)), Part.whole(1)
            both = [*of_pass.forward(whole), *of_pass.backward(whole, Recompute())]
            found += [len(both), units(both)]
        return tuple(found)  # type: ignore[return-value]

    for once, values, in_three, same in run_loopback(2, work):
        assert same == values
        assert in_three == once + 2 * 10  # of two for each block in each direction, and of the projection's


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True, "chunks": 3}])
@pytest.mark.parametrize(("size", "kv_heads"), [(2, 1), (4, 1), (4, 2)])
def test_gradients_of_shared_heads_are_summed_over_those_who_share_them(
    size: int, kv_heads: int, options: dict[str, Any]
) -> None:
    config = sizes(2, kv_heads=kv_heads)
    shared = counted(size, config, **options)
    # Two weights of two layers, of 16 rows for each head, among those who have the head.
    of_heads = 2 * 2 * kv_heads * SMALL[size // kv_heads] * 16 * H
    assert shared == counted(size, sizes(2), **options) + of_heads * 8


def test_one_rank_sends_nothing() -> None:
    assert counted(1, sizes(1)) == 0
    assert counted(1, sizes(1), sequence_parallel=True) == 0


def test_layers_beyond_those_that_are_recomputed_send_as_ever() -> None:
    none, some, all_ = (counted(2, sizes(3), Recompute("full", layers)) for layers in (0, 1, 3))
    assert (all_ - none) == 3 * (some - none) > 0


def test_an_empty_microbatch_sends_the_gradients_that_do_not_depend_on_it() -> None:
    def work(comm: Communicator) -> int:
        tp = TensorParallel(comm, sequence_parallel=True)
        on_axis, _ = tensor_parallel_calls(sizes(1), tp, trained=[Microbatch(0, S)])
        return calls_nbytes(comm, on_axis, torch.float32).total()

    assert run_loopback(2, work) == [3 * 2 * H * 4] * 2
