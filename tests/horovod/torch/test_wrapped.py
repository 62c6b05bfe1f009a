"""DistributedOptimizer before init and after a new start, in jobs of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

LIFE = """
import pickle
import torch
import hpcpar.horovod.torch as hvd

def wrap(**options):
    parameter = torch.nn.Parameter(torch.ones(2))
    return hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("p", parameter)], **options)

before = error_of(wrap)
hvd.init()
kept = pickle.dumps(wrap())
unknown = error_of(lambda: wrap(process_set=hvd.ProcessSet([0])))
hvd.shutdown()
read = pickle.loads(kept)
is_plain = type(read) is torch.optim.SGD
tell(before=before, unknown=unknown, read=[is_plain, len(read.param_groups[0]["params"])])

def train(steps, optimizer, parameter):
    for step in steps:
        optimizer.zero_grad()
        (parameter * (step + hvd.rank() + 1)).sum().backward()
        optimizer.step()
    return parameter.tolist()

hvd.init()
ends = []
for stage in (None, 1, 2):
    parameter = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    base = torch.optim.SGD([parameter], lr=1.0, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(base, [("p", parameter)], zero_stage=stage)
    ends.append(train(range(2), optimizer, parameter))
    hvd.shutdown()
    hvd.init()
    ends.append(train(range(2, 4), optimizer, parameter))
tell(ends=ends)
"""


def test_wrapping_needs_init_a_pickle_does_not_and_an_optimizer_goes_on_after_a_new_init(
    job: Callable[..., Any],
) -> None:
    told = job(2, LIFE)
    parameter = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    optimizer = SGD([parameter], lr=1.0, momentum=0.5)
    expected = []
    for step in range(4):
        optimizer.zero_grad()
        (parameter * (step + 1.5)).sum().backward()
        optimizer.step()
        expected.append(parameter.tolist())
    for of_rank in told:
        for what, word in {"before": "hvd.init()", "unknown": "add_process_set"}.items():
            assert of_rank[what][0] == "ValueError"
            assert word in of_rank[what][2]
        assert of_rank["read"] == [True, 1]
        assert of_rank["ends"] == [expected[1], expected[3]] * 3
