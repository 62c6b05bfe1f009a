"""DistributedOptimizer before init and after a new start, in jobs of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

NOT_READY = """
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
"""


def test_wrapping_needs_init_and_known_process_sets_and_a_pickle_does_not(job: Callable[..., Any]) -> None:
    (told,) = job(1, NOT_READY)
    assert told["before"][0] == "ValueError"
    assert "hvd.init()" in told["before"][2]
    assert told["unknown"][0] == "ValueError"
    assert "add_process_set" in told["unknown"][2]
    assert told["read"] == [True, 1]


NEW_START = """
import torch
import hpcpar.horovod.torch as hvd

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


def test_an_optimizer_goes_on_after_shutdown_and_a_new_init(job: Callable[..., Any]) -> None:
    told = job(2, NEW_START)
    parameter = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    optimizer = SGD([parameter], lr=1.0, momentum=0.5)
    expected = []
    for step in range(4):
        optimizer.zero_grad()
        (parameter * (step + 1.5)).sum().backward()
        optimizer.step()
        expected.append(parameter.tolist())
    assert [of_rank["ends"] for of_rank in told] == [[expected[1], expected[3]] * 3] * 2
