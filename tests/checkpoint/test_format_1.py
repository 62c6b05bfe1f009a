"""A checkpoint that was written before ranks wrote their own pieces: format_1/, kept as it was written.

Three steps of AdamW in bfloat16 on one rank, stage 0.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hpcpar.checkpoint import load
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, fully_shard, summon_full_parameters

OLD = Path(__file__).parent / "format_1"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 7, bias=False)
        self.head = nn.Linear(7, 5)
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(inputs) + self.tied(inputs)))


@pytest.mark.parametrize("precision", [None, "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_older_checkpoint_loads_into_every_stage(stage: int, precision: str | None) -> None:
    old = load_file(OLD / "step-00000003" / "optimizer.safetensors")

    def body(comm: Communicator) -> None:
        model = Model()
        if stage == 3:
            fully_shard(model, comm, precision=precision)
        optimizer = DistributedOptimizer(
            torch.optim.AdamW(model.parameters()),
            model.named_parameters(),
            comm,
            zero_stage=stage,
            precision=None if stage == 3 else precision,
        )
        loaded = load(OLD, model=model, optimizer=optimizer, comm=comm, restore_random=False)
        state = optimizer.state_dict()
        with summon_full_parameters(model):
            names = [name for name, _ in model.named_parameters()]
            values = {name: value.detach().clone() for name, value in model.named_parameters()}
        assert (loaded.step, loaded.extra, loaded.ranks) == (3, {"note": "format 1"}, 1)
        assert model.count.item() == 3
        assert values["frozen"].tolist() == [0.5, 2.0, -1.0]
        assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
        for number, name in enumerate(names):
            if name == "frozen":
                continue
            master = old[f"state/{name}/master_weight"]
            assert values[name].equal(master.to(values[name].dtype))
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert state["state"][number][key].equal(old[f"state/{name}/{key}"])
            if precision:
                assert state["state"][number]["master_weight"].equal(master)

    run_loopback(2, body)
