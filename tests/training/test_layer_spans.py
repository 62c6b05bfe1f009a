"""Layers in a timeline."""

from __future__ import annotations

import pytest
import torch

from hpcpar.autograd import Recompute
from hpcpar.comm import Trace
from hpcpar.models import Llama, LlamaConfig
from hpcpar.training.layer_spans import layer_spans

SMALL = LlamaConfig(vocab_size=16, hidden_size=8, layers=3, heads=2, kv_heads=2, ffn_size=16, max_sequence=8)


@pytest.mark.parametrize("recompute", [None, Recompute("full")], ids=["none", "full"])
def test_layers_follow_each_other_forward_and_come_back(recompute: Recompute | None) -> None:
    torch.manual_seed(0)
    model = Llama(SMALL, recompute=recompute)
    tokens = torch.randint(0, 16, (1, 4))
    trace = Trace()
    with layer_spans(model, trace):
        model(tokens).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    spans = [(each.name, each.arguments["direction"]) for each in trace.events]
    names = [f"model.layers.{number}" for number in range(3)]
    assert spans == [(name, "forward") for name in names] + [(name, "backward") for name in names[::-1]]
    for before, after in zip(trace.events[:-1], trace.events[1:], strict=True):
        assert before.start_s <= before.stop_s <= after.stop_s
    model.zero_grad()
    with layer_spans(model, None):
        model(tokens).sum().backward()
    assert len(trace.events) == 6
    for expected, parameter in zip(gradients, model.parameters(), strict=True):
        assert torch.equal(expected, parameter.grad)
