"""`train.device=cuda`: a rank takes the GPU of its place on its node; the run is that of one rank."""

from __future__ import annotations

import pytest
import torch

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import PeerFailedError
from hpcpar.training import Run
from hpcpar.training.build import place_on_hardware
from tests.training.runs import MakeConfig

EXPERTS = ("model.experts.count=5", "model.experts.per_token=2", "model.experts.ffn_size=16")


@pytest.mark.parametrize(("visible", "expected"), [(4, [0, 1, 2]), (2, [0, 1, 0]), (1, [0, 0, 0])])
def test_each_rank_takes_the_gpu_of_its_place_on_the_node(
    config_of: MakeConfig, monkeypatch: pytest.MonkeyPatch, visible: int, expected: list[int]
) -> None:
    made_current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    config = config_of("train.device=cuda")
    found = run_loopback(3, lambda comm: place_on_hardware(config, comm))
    assert [device.index for device in found] == expected
    # What a library allocates without being told where is on the rank's own GPU, not all on the first.
    assert sorted(device.index for device in made_current) == sorted(expected)


def test_places_are_counted_on_each_node_anew(config_of: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    config = config_of("train.device=cuda")
    found = run_loopback(4, lambda comm: place_on_hardware(config, comm), nodes=[0, 0, 1, 1])
    assert [device.index for device in found] == [0, 1, 0, 1]


def test_without_a_gpu_every_rank_is_told_what_to_do(
    config_of: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = config_of("train.device=cuda")
    with pytest.raises(PeerFailedError, match=r"use train\.device=cpu"):
        run_loopback(2, lambda comm: place_on_hardware(config, comm))


def test_parameters_that_a_node_has_once_are_not_on_gpus(
    config_of: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = config_of("train.device=cuda", "optimizer.shared_parameters=true", "optimizer.zero_stage=1")
    with pytest.raises(PeerFailedError, match=r"optimizer\.shared_parameters is of host memory"):
        run_loopback(2, lambda comm: place_on_hardware(config, comm))


@pytest.mark.mpi
@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options",
    [
        ("optimizer.zero_stage=0",),
        ("optimizer.zero_stage=1",),
        ("optimizer.zero_stage=3",),
        (*EXPERTS, "optimizer.zero_stage=0"),
        (*EXPERTS, "optimizer.zero_stage=3"),
    ],
)
def test_a_run_on_gpus_is_the_run_of_one_rank(
    world: Communicator, config_of: MakeConfig, options: tuple[str, ...]
) -> None:
    words = ("train.device=cuda", *options)
    ep = world.size if EXPERTS[0] in options else 1
    config = world.broadcast_object(config_of(*words, f"mesh.ep={ep}"))
    alone = run_loopback(1, lambda comm: Run(config_of(*words, name="alone"), comm).train())[0]
    outcome = Run(config, world).train()
    differences = world.allgather_object(abs(outcome.held_out_loss - alone.held_out_loss))
    deviations = {line.deviation for line in outcome.traffic if line.communicator.startswith("dp")}
    assert max(differences) < 1e-9
    assert deviations <= {0, None}
