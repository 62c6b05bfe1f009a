"""Optimizer states on disk: the same course to the last bit, in less memory, and errors on all ranks."""

from __future__ import annotations

import errno
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, Precision, offload
from hpcpar.data_parallel.offload import CpuOffload, DiskOffload, Offload, make_offload
from hpcpar.errors import HpcparError, OffloadError, PeerFailedError
from tests.data_parallel.staged import error_of, fill, ranks, staged, whole
from tests.grid import checkered

STEPS = 4
STAGES = [0, 1, 2, 3]
MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 5, bias=False)
        self.scale = nn.Parameter(torch.empty(()))
        self.unused = nn.Parameter(torch.empty(2))
        fill(self, 1, 1.0, dtype=torch.float32)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = inputs + torch.tanh(layer(inputs))
        return self.head(inputs) * self.scale


def built(
    comm: Communicator, stage: int, make: str, precision: Precision | None, **options: Any
) -> tuple[Network, DistributedOptimizer]:
    model = Network()
    optimizer = staged(
        model,
        MAKE[make](model.parameters()),
        comm,
        stage,
        precision=precision,
        bucket_bytes=150,
        first_bucket_bytes=20,
        **options,
    )
    return model, optimizer


def step(comm: Communicator, model: Network, optimizer: DistributedOptimizer, number: int = 0) -> None:
    precision = optimizer.precision
    generator = torch.Generator().manual_seed(10 * number + comm.rank)
    inputs = torch.randn(4, 6, generator=generator).to(torch.float32 if precision is None else torch.bfloat16)
    functional.mse_loss(model(inputs), torch.ones_like(inputs[:, :5])).backward()
    optimizer.step()
    optimizer.zero_grad()


def course(comm: Communicator, stage: int, make: str, precision: Precision | None, **options: Any) -> Any:
    """Parameters and all states at the end."""
    model, optimizer = built(comm, stage, make, precision, **options)
    for number in range(STEPS):
        step(comm, model, optimizer, number)
    states = optimizer.state_dict()["state"]
    return whole(model), [
        sorted((k, torch.as_tensor(v)) for k, v in states.get(n, {}).items()) for n in range(9)
    ]


PRECISIONS = {
    "float32": None,
    "bfloat16": Precision("bfloat16"),
    "short moments": Precision("bfloat16", moments="bfloat16"),
}


@pytest.mark.parametrize(("stage", "make", "precision"), checkered(STAGES, MAKE, PRECISIONS))
def test_states_on_disk_make_no_difference(stage: int, make: str, precision: str, tmp_path: Path) -> None:
    size = 3
    settings = (stage, make, PRECISIONS[precision])
    expected = run_loopback(size, lambda comm: course(comm, *settings))
    found = run_loopback(size, lambda comm: course(comm, *settings, offload=tmp_path))
    for (parameters, states), (others, other_states) in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))
        for state, other in zip(states, other_states, strict=True):
            assert [key for key, _ in state] == [key for key, _ in other]
            assert all(torch.equal(a, b) for (_, a), (_, b) in zip(state, other, strict=True))
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", STAGES)
def test_between_steps_memory_holds_no_state(stage: int, tmp_path: Path) -> None:
    comm = Communicator.alone()
    model, optimizer = built(comm, stage, "adamw", PRECISIONS["bfloat16"], offload=tmp_path)
    update = optimizer.update
    assert update is not None
    counts = []
    for number in range(2):
        held = [v for state in optimizer.inner.state.values() for v in state.values() if v.dim() > 0]
        counts.append(sum(tensor.numel() for tensor in [*held, *update.masters]))
        step(comm, model, optimizer, number)
    numel = sum(parameter.numel() for parameter in Network().parameters())
    in_memory = 2 + 1  # values without moments on disk: unused ones, and one without dimensions
    assert counts == [0, 0]
    kept = [each.tensor for file in update.offload._files.values() for each in file.fields]  # type: ignore[attr-defined]
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept) == 0
    assert update.offload.nbytes() == 12 * numel - 8 * in_memory
    files = list(tmp_path.rglob("*.bin"))
    assert len(files) == len(optimizer.blocks)
    assert sum(path.stat().st_size for path in files) == update.offload.nbytes()


@pytest.mark.parametrize("stage", STAGES)
def test_the_files_go_when_the_optimizer_goes(stage: int, tmp_path: Path) -> None:
    model, optimizer = built(
        Communicator.alone(), stage, "adamw", None, offload=tmp_path / "new" / "directory"
    )
    step(Communicator.alone(), model, optimizer)
    assert len(list((tmp_path / "new" / "directory").iterdir())) == 1
    del optimizer
    gc.collect()
    assert list((tmp_path / "new" / "directory").iterdir()) == []
    assert isinstance(model, nn.Module), "the model lives on"


@ranks(4)
def test_a_rank_that_owns_padding_alone_has_an_empty_file(comm: Communicator, tmp_path: Path) -> None:
    # Five elements on four ranks: two each, and nothing for the last.
    value = nn.Parameter(torch.zeros(5))
    optimizer = DistributedOptimizer(
        MAKE["sgd"]([value]), [("value", value)], comm, zero_stage=1, offload=tmp_path
    )
    for _ in range(2):
        value.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert value.tolist() == [pytest.approx(-0.1 - 0.19)] * 5


def full_on_rank_1(monkeypatch: pytest.MonkeyPatch, room: list[int]) -> None:
    """Let rank 1, a thread, have no room for files larger than room[0] bytes."""
    reserve = offload._reserve

    def limited(path: Path, nbytes: int) -> None:
        if threading.current_thread().name == "rank 1" and nbytes > room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(path, nbytes)

    monkeypatch.setattr(offload, "_reserve", limited)


@pytest.mark.parametrize("stage", STAGES)
def test_a_disk_that_is_full_on_one_rank_is_an_error_on_all(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There is room for masters, and none for the moments that the first step makes.
    room = [0]

    def body(comm: Communicator) -> HpcparError | None:
        model, optimizer = built(comm, stage, "adamw", None, offload=tmp_path)
        if comm.rank == 0:
            room[0] = 1
        comm.barrier()
        return error_of(lambda: step(comm, model, optimizer))

    room[0] = 10**9
    full_on_rank_1(monkeypatch, room)
    errors = run_loopback(3, body)
    for rank, error in enumerate(errors):
        assert isinstance(error, PeerFailedError)
        assert "keeping the optimizer's state: failed on 1 of 3 ranks" in str(error)
        assert "rank 1: OffloadError" in str(error)
        assert "No space left on device" in str(error)
        assert "give offload= a directory with more room, or use more ranks" in str(error)
        assert isinstance(error.__cause__, OffloadError) == (rank == 1)


def test_no_room_for_the_masters_of_one_rank_is_an_error_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_on_rank_1(monkeypatch, [10])
    errors = run_loopback(3, lambda comm: error_of(lambda: built(comm, 1, "adamw", None, offload=tmp_path)))
    assert all(isinstance(error, PeerFailedError) for error in errors)
    assert all("making room for the optimizer's state: failed on 1 of 3" in str(error) for error in errors)


@pytest.mark.parametrize("stage", STAGES)
def test_a_directory_that_one_rank_cannot_write_to_is_an_error_on_all(stage: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")

    def body(comm: Communicator) -> HpcparError | None:
        place = tmp_path / ("file" if comm.rank == 2 else "fine")
        return error_of(lambda: built(comm, stage, "adamw", None, offload=place / "states"))

    for error in run_loopback(3, body):
        assert isinstance(error, PeerFailedError)
        assert "rank 2: OffloadError" in str(error)
        assert "cannot be written to: Not a directory" in str(error)


def test_alone_the_error_is_the_disks_own(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(OffloadError, match="cannot be written to: File exists"):
        built(Communicator.alone(), 1, "adamw", None, offload=tmp_path / "file")


def test_a_file_that_was_cut_short_is_an_error(tmp_path: Path) -> None:
    model, optimizer = built(Communicator.alone(), 1, "adamw", None, offload=tmp_path)
    step(Communicator.alone(), model, optimizer)
    for path in tmp_path.rglob("*.bin"):
        os.truncate(path, 5)
    with pytest.raises(OffloadError, match=r"block-\d+\.bin is shorter than the \d+ B that were written"):
        step(Communicator.alone(), model, optimizer)


def test_while_a_block_is_stepped_on_the_one_before_is_written_and_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The step on a block, the writing of the one before and the reading of the next wait for each other.
    order = list(reversed(range(8)))
    together = {number: threading.Barrier(1 + (number < 7) + (number > 0)) for number in order}

    def beside(function: Callable[..., Any], step: int) -> Callable[..., Any]:
        """For a block's reading or writing: beside which step, counted from its own."""

        def call(path: Path, *arguments: Any) -> Any:
            number = int(path.stem.removeprefix("block-")) + step
            if number in together:
                together[number].wait(20)
            return function(path, *arguments)

        return call

    places = DiskOffload(tmp_path)
    contents: list[list[tuple[Tensor, dict[str, Any]]]] = []
    for number in range(8):
        master = torch.full((3,), float(number))
        contents.append([(master[:2], {}), (master[2:], {})])
        contents[-1][0][1]["moment"] = torch.full((2,), 10.0 + number)
        places.adopt(number, contents[-1], master)
    monkeypatch.setattr(offload, "_read", beside(offload._read, +1))
    monkeypatch.setattr(offload, "_write", beside(offload._write, -1))
    for turn, number in enumerate(order):
        places.fetch(number, following=order[turn + 1 :])
        together[number].wait(20)
        (first, state), (last, _) = contents[number]
        assert (first.tolist(), last.tolist()) == ([number] * 2, [number])
        assert state["moment"].tolist() == [10.0 + number] * 2
        first.add_(100)
        places.offload(number)
    places.wait()
    monkeypatch.undo()
    for number in order:
        places.fetch(number)
        (first, state), _ = contents[number]
        assert first.tolist() == [100.0 + number] * 2
        places.offload(number, changed=False)


def test_what_offload_asks_for() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for place, device in ((None, cpu), (None, gpu), ("cpu", cpu)):
        assert type(make_offload(place, device)) is Offload
    assert type(make_offload("cpu", gpu)) is CpuOffload


# --- more state than memory -----------------------------------------------------------------------------

LARGE = """
import json, os, resource, sys
import torch
from torch import nn
import hpcpar
from hpcpar.data_parallel import DistributedOptimizer, fully_shard

cases = json.loads(sys.argv[2])
comm = hpcpar.init() if sys.argv[1] == "mpi" else hpcpar.Communicator.alone()
WIDTH, LAYERS = 512, 24

def data_nbytes():
    return 1024 * int(next(line.split()[1] for line in open("/proc/self/status") if "VmData" in line))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, inputs):
        for layer in self.layers:
            inputs = inputs + layer(inputs) / LAYERS
        return inputs

# Threads and buffers that any work makes are there before the limit is drawn.
warm = nn.Linear(WIDTH, WIDTH)
optimizer = torch.optim.AdamW(warm.parameters(), fused=True)
warm(torch.ones(8, WIDTH)).sum().backward()
optimizer.step()
if comm.size > 1:
    comm.allreduce(torch.ones(WIDTH * WIDTH))
# All but the last case are a copy's of this process: what one leaves in memory is in no other's way.
for case in cases[:-1]:
    if os.fork() == 0:
        break
    os.wait()
else:
    case = cases[-1]
stage, offload, ranks_share = case
count = WIDTH * WIDTH * LAYERS
limit = data_nbytes() + int(ranks_share * 16 * count)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    with torch.device("meta" if stage == 3 else "cpu"):
        model = Model()
    if stage == 3:
        fully_shard(model, comm)
    optimizer = DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), model.named_parameters(), comm,
        zero_stage=stage, offload=offload, bucket_bytes=2**20,
    )
    losses = []
    for step in range(3):
        loss = model(torch.ones(8, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
except (MemoryError, RuntimeError) as error:
    print(f"stage {stage} is too large", flush=True)
    sys.exit(3)
assert losses[-1] < losses[0], losses
print(f"stage {stage} has trained", flush=True)
"""


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "large.py"
    script.write_text(LARGE)
    # Let malloc give back what is freed: it keeps small blocks, and all are small here.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    return script


on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits as Linux has them")


@on_linux
def test_a_model_whose_states_exceed_memory_trains_from_disk(large: Path, tmp_path: Path) -> None:
    # 96 MiB of states, of which 0.9 may be in memory. Parameters and gradients are half of it; there are
    # three blocks of 3 MiB beside them, and the stacks of two threads.
    cases = [(1, None, 0.9), (2, str(tmp_path / "states"), 0.9)]
    command = [sys.executable, str(large), "alone", json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    told = "stage 1 is too large\nstage 2 has trained\n"
    assert (done.returncode, done.stdout) == (0, told), done.stderr


@on_linux
def test_a_model_too_large_for_any_rank_trains_in_shards(large: Path, run_ranks: Callable[..., Any]) -> None:
    # A quarter of 16 Φ, a few gathered layers, and what communication needs. Without shards even 0.9 is too
    # little, as the test above shows.
    sharded = run_ranks(4, str(large), "mpi", json.dumps([(3, None, 0.75)]))
    assert (sharded.returncode, sharded.stdout.count("has trained")) == (0, 4), sharded.stderr
