"""A checkpoint that was written before parameters could be split: format_2/, kept as it was written.

Three steps of AdamW in bfloat16 on two ranks, stage 3: flat pieces of whole tensors.
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

OLD = Path(__file__).parent / "format_2" / "step-00000003"


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


def wholes(kind: str) -> dict[str, Tensor]:
    """The tensors of pieces, put together again."""
    records = json.loads((OLD / "pieces.json").read_text())[kind]
    return {
        name: torch.cat([load_file(OLD / file)[name].reshape(-1) for file, _, _ in record["pieces"]]).view(
            record["shape"]
        )
        for name, record in records.items()
    }


@pytest.mark.parametrize("tp", [1, 7])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_older_checkpoint_in_pieces_loads_into_every_stage_and_split(stage: int, tp: int) -> None:
    states = wholes("optimizer")
    assert states["state/head.weight/exp_avg"].abs().sum() > 0

    def body(comm: Communicator) -> None:
        tp_comm = comm if tp > 1 else None
        dp_comm = Communicator.alone() if tp > 1 else comm
        model = Model(tp_comm)
        if stage == 3:
            fully_shard(model, dp_comm, precision="bfloat16")
        optimizer = DistributedOptimizer(
            torch.optim.AdamW(model.parameters()),
            model.named_parameters(),
            dp_comm,
            zero_stage=stage,
            precision=None if stage == 3 else "bfloat16",
        )
        loaded = load(OLD, model=model, optimizer=optimizer, comm=comm, restore_random=False)
        assert (loaded.step, loaded.extra, loaded.ranks) == (3, {"note": "format 2"}, 2)
        assert model.count.item() == 3
        found = optimizer.state_dict()["state"]
        with summon_full_parameters(model):
            for number, (name, parameter) in enumerate(model.named_parameters()):
                if name == "frozen":
                    assert parameter.tolist() == [0.5, 2.0, -1.0]
                    continue
                for key in ("exp_avg", "exp_avg_sq", "master_weight"):
                    assert found[number][key].equal(own_shard(parameter, states[f"state/{name}/{key}"]))
                assert found[number]["step"] == 3
                assert parameter.equal(found[number]["master_weight"].bfloat16())

    run_loopback(7 if tp > 1 else 2, body)
