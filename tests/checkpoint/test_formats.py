"""Checkpoints of earlier formats, kept as they were written: three steps of AdamW in bfloat16.

format_1/   on one rank, stage 0, before ranks wrote their own pieces
format_2/   on two ranks, stage 3, before parameters could be split: flat pieces of whole tensors
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hpcpar.checkpoint import load
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, fully_shard, summon_full_parameters
from hpcpar.tensor_parallel.split import own_shard, place, split_evenly
from tests.grid import checkered


def format_path(number: int) -> Path:
    return Path(__file__).parent / f"format_{number}" / "step-00000003"


class Model(nn.Module):
    def __init__(self, tp_comm: Communicator | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 7, bias=False)
        self.head = nn.Linear(7, 5)
        self.tied = nn.Linear(5, 7, bias=False)
        if tp_comm is not None:
            split = split_evenly(7, tp_comm.size, dim=1)
            self.head.weight = nn.Parameter(split.shard(self.head.weight.detach(), tp_comm.rank))
            place(self.head.weight, split, tp_comm)
        self.tied.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("count", torch.tensor(0))


def saved_states(number: int) -> dict[str, Tensor]:
    """Read the optimizer's tensors, pieces put together again, without the code that is tested."""
    path = format_path(number)
    tensors = load_file(path / "optimizer.safetensors")
    records = json.loads((path / "pieces.json").read_text())["optimizer"] if number == 2 else {}
    for name, record in records.items():
        pieces = [load_file(path / file)[name].reshape(-1) for file, _, _ in record["pieces"]]
        tensors[name] = torch.cat(pieces).view(record["shape"])
    return tensors


@pytest.mark.parametrize(
    ("number", "stage", "tp", "precision"),
    [
        *((1, stage, 1, precision) for stage, precision in checkered(range(4), (None, "bfloat16"))),
        *((2, stage, tp, "bfloat16") for stage, tp in checkered((0, 1, 3), (1, 7))),
    ],
)
def test_an_older_checkpoint_loads_into_every_stage_and_split(
    number: int, stage: int, tp: int, precision: str | None
) -> None:
    old = saved_states(number)
    assert old["state/head.weight/exp_avg"].abs().sum() > 0

    def body(comm: Communicator) -> None:
        dp_comm = Communicator.alone() if tp > 1 else comm
        model = Model(comm if tp > 1 else None)
        if stage == 3:
            fully_shard(model, dp_comm, precision=precision)
        optimizer = DistributedOptimizer(
            torch.optim.AdamW(model.parameters()),
            model.named_parameters(),
            dp_comm,
            zero_stage=stage,
            precision=None if stage == 3 else precision,
        )
        path = format_path(number)
        loaded = load(path, model=model, optimizer=optimizer, comm=comm, restore_random=False)
        assert (loaded.step, loaded.extra, loaded.ranks) == (3, {"note": f"format {number}"}, number)
        assert model.count.item() == 3
        assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
        states = optimizer.state_dict()["state"]
        with summon_full_parameters(model):
            for index, (name, parameter) in enumerate(model.named_parameters()):
                if name == "frozen":
                    assert parameter.tolist() == [0.5, 2.0, -1.0]
                    continue
                master = own_shard(parameter, old[f"state/{name}/master_weight"])
                assert parameter.equal(master.to(parameter.dtype))
                assert states[index].get("master_weight", master).equal(master)
                assert ("master_weight" in states[index]) == (precision is not None)
                for key in ("exp_avg", "exp_avg_sq"):
                    assert states[index][key].equal(own_shard(parameter, old[f"state/{name}/{key}"]))
                assert states[index]["step"] == 3

    run_loopback(7 if tp > 1 else 2, body)


class Half(nn.Module):
    """The half of the model that a rank of a pipeline has."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.tied_names = {"tied.weight": "embed.weight"}
        if rank == 0:
            self.embed = nn.Linear(5, 7, bias=False)
            self.register_buffer("count", torch.tensor(0))
        else:
            self.head = nn.Linear(7, 5)
            self.tied = nn.Linear(5, 7, bias=False)
            self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)


@pytest.mark.parametrize("number", [1, 2])
def test_older_checkpoints_load_into_a_pipeline(number: int) -> None:
    def body(comm: Communicator) -> tuple[bool, dict[str, Tensor], dict[str, Tensor]]:
        model = Half(comm.rank)
        optimizer = torch.optim.AdamW(model.parameters())
        restored = load(format_path(number), model=model, optimizer=optimizer, comm=comm).random_restored
        moments = {n: optimizer.state[p].get("exp_avg") for n, p in model.named_parameters()}
        return restored, dict(model.named_parameters()), moments

    (restored, first, first_moments), (_, second, moments) = run_loopback(2, body)
    assert not restored
    assert first["embed.weight"].equal(second["tied.weight"])
    assert first_moments["embed.weight"].abs().sum() > 0
    assert first_moments["embed.weight"].equal(moments["tied.weight"])
    assert moments["head.bias"].shape == (5,)
    assert second["frozen"].tolist() == [0.5, 2.0, -1.0]
