"""Rows that experts exchange in a run, counted by its communicators, compared with their formula."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcpar.expert_parallel import ExpertParallel
from hpcpar.partition import bounds
from tests.training.runs import MakeConfig, trained
from tests.training.test_expert_parallel import MODEL


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, ("mesh.ep=2",)),
        (3, ("mesh.ep=3", "train.global_batch=4", "train.microbatch=1")),
        (4, ("mesh.ep=4", "mesh.tp=2", "model.experts.capacity_factor=1.0")),
        (4, ("mesh.ep=4", "mesh.cp=2", "expert_parallel.halves=true")),
    ],
)
def test_a_run_sends_the_rows_of_its_measured_counts(
    config_of: MakeConfig, size: int, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[int, list[tuple[list[int], bool, int]]] = defaultdict(list)
    mix = ExpertParallel.mix

    def counted(ep: ExpertParallel, hidden: Tensor, *others: Any, **options: Any) -> Tensor:
        out = mix(ep, hidden, *others, **options)
        calls[ep.comm.rank].append((ep.counts, torch.is_grad_enabled(), hidden.shape[1] * hidden.itemsize))
        return out

    monkeypatch.setattr(ExpertParallel, "mix", counted)
    outcome = trained(config_of(*MODEL, *options), size)[0]
    nbytes = 0
    for of_ranks in zip(*(calls[rank] for rank in range(size)), strict=True):
        _, with_gradients, of_row = of_ranks[0]
        for rank, (counts, _, _) in enumerate(of_ranks):
            start, stop = bounds(len(counts), size)[rank]
            rows = sum(counts) - sum(counts[start:stop])  # there and home, forward and backward
            nbytes += (4 if with_gradients else 2) * rows * of_row
    sent = [line.nbytes_sent for line in outcome.traffic if line.collective == "alltoall"]
    assert sum(sent) == nbytes > 0
