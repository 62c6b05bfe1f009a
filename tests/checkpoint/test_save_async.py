"""Checkpoints that are written while training goes on are those that are written while it waits."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hpcpar.checkpoint import files, latest, save, save_async
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, fully_shard
from hpcpar.errors import CheckpointError, OperationError, PeerFailedError

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=torch.tensor(0.1), momentum=0.9),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first = nn.Parameter(torch.randn(7, 5, generator=generator))
        self.second = nn.Parameter(torch.randn(5, 3, generator=generator).t())
        self.register_buffer("seen", torch.zeros(2))

    def forward(self) -> Tensor:
        self.seen += 1
        return (self.first @ self.second.t()).square().mean()


def made(comm: Communicator, stage: int, optimizer: str) -> tuple[nn.Module, DistributedOptimizer]:
    model = Small()
    if stage == 3:
        fully_shard(model, comm)
    inner = OPTIMIZERS[optimizer](list(model.parameters()))
    return model, DistributedOptimizer(inner, model.named_parameters(), comm, zero_stage=stage)


def step(model: nn.Module, optimizer: DistributedOptimizer) -> None:
    optimizer.zero_grad()
    model().backward()
    optimizer.step()


def digests(path: Path) -> dict[str, str]:
    """Of all files but random numbers, which ranks that are threads draw from one generator."""
    found = json.loads((path / "manifest.json").read_text())["files"]
    return {name: json.dumps(digest) for name, digest in found.items() if not name.startswith("random")}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No file is written by a pool's thread before it is set."""
    opened = threading.Event()
    write = files.write_tensors

    def later(tensors: dict[str, Tensor], path: Path) -> files.FileDigest:
        if threading.current_thread().name.startswith("hpcpar-checkpoint"):
            assert opened.wait(60)
        return write(tensors, path)

    monkeypatch.setattr(files, "write_tensors", later)
    return opened


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 0), (3, 1), (2, 2), (3, 3)])
def test_what_is_written_is_the_state_of_its_step_whatever_is_trained_meanwhile(
    tmp_path: Path, gate: threading.Event, ranks: int, stage: int, optimizer: str
) -> None:
    behind = tmp_path / "behind"

    def work(comm: Communicator) -> None:
        model, steps = made(comm, stage, optimizer)
        step(model, steps)
        extra = {"seen": [1]}
        save(tmp_path / "waited", step=1, model=model, optimizer=steps, extra=extra, comm=comm)
        pending = save_async(behind, step=1, model=model, optimizer=steps, extra=extra, comm=comm)
        extra["seen"].append(2)
        steps.param_groups[0]["weight_decay"] = 0.5
        step(model, steps)
        assert not all(comm.allgather_object(pending.is_written()))
        assert latest(behind) is None, "it has no name before it is whole"
        comm.barrier()
        gate.set()
        assert pending.finish() == pending.path == behind / "step-00000001"
        assert pending.is_written()
        with pytest.raises(OperationError, match="finished already"):
            pending.finish()

    run_loopback(ranks, work)
    (there,) = behind.iterdir()
    assert digests(there) == digests(tmp_path / "waited" / "step-00000001")


def test_another_checkpoint_leaves_alone_what_is_being_written(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def work(comm: Communicator) -> None:
        model, optimizer = made(comm, 1, "adam")
        pending = save_async(tmp_path, step=1, model=model, optimizer=optimizer, comm=comm)
        save(".", step=2, model=model, comm=comm, keep=1)
        gate.set()
        pending.finish()

    run_loopback(2, work)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_an_error_of_one_ranks_thread_is_raised_on_all_and_leaves_what_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = files.write_tensors

    def full(tensors: dict[str, Tensor], path: Path) -> files.FileDigest:
        if path.name.startswith("optimizer.rank00001"):
            raise OSError(28, "No space left on device", str(path))
        return write(tensors, path)

    def work(comm: Communicator) -> str:
        model, optimizer = made(comm, 1, "adam")
        step(model, optimizer)
        save(tmp_path, step=1, model=model, optimizer=optimizer, comm=comm)
        comm.barrier()
        if comm.rank == 0:
            monkeypatch.setattr(files, "write_tensors", full)
        comm.barrier()
        pending = save_async(tmp_path, step=2, model=model, optimizer=optimizer, comm=comm)
        with pytest.raises(PeerFailedError) as caught:
            pending.finish()
        return str(caught.value)

    for text in run_loopback(2, work):
        assert "saving the checkpoint" in text
        assert "No space left on device" in text
        assert "rank 1" in text
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_checkpoint_that_nobody_finishes_is_told_to_be_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(comm: Communicator) -> None:
        save_async(tmp_path, step=1, model=Small(), comm=comm)
        save_async(tmp_path, step=2, model=Small(), comm=comm).finish()
        gc.collect()

    run_loopback(2, work)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/step-00000001 is lost: what save_async returned for it has had no finish()"
    ]


def test_what_cannot_be_saved_is_refused_before_training_goes_on(tmp_path: Path) -> None:
    def work(comm: Communicator) -> str:
        with pytest.raises((CheckpointError, PeerFailedError)) as caught:
            save_async(tmp_path, step=1, model=Small(), extra={"when": object()}, comm=comm)
        return str(caught.value)

    assert all("extra holds what JSON cannot" in text for text in run_loopback(2, work))
    assert list(tmp_path.iterdir()) == []
