"""Memory measured from tensors is the formula, to the byte, and what buckets are padded with."""

from __future__ import annotations

import gc
import io
import json
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from hpcpar.bench.gpus import use_gpu
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import (
    DistributedOptimizer,
    MemoryReport,
    Precision,
    memory_report,
    summon_full_parameters,
    watch_activations,
)
from hpcpar.errors import OperationError, PeerFailedError
from hpcpar.planner.memory import GRADIENTS, OPTIMIZER, PARAMETERS, STATE, shards
from tests.data_parallel.staged import staged
from tests.grid import pairwise

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[Make, int]] = {
    "sgd": (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), 1),
    "adamw": (lambda parameters: torch.optim.AdamW(parameters, fused=True), 2),
}
"""Each with the moments that it keeps for an element."""


class Network(nn.Module):
    """A head tied to the first matrix, layers in a list, a table that is no parameter, one that is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 7, bias=False)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))
        self.head = nn.Linear(7, 5, bias=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.ones(11))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden)


PHI = 5 * 7 + 4 * (7 * 7 + 7) + 7 * 5 + 3
UNUSED = 3


def trained(
    comm: Communicator,
    stage: int,
    *,
    make: Make = OPTIMIZERS["adamw"][0],
    precision: Precision | str | None = None,
    shared_parameters: bool = False,
    bucket_bytes: int = 300,
    steps: int = 2,
    **options: Any,
) -> tuple[nn.Module, DistributedOptimizer]:
    model = Network()
    optimizer = staged(
        model,
        make(model.parameters()),
        comm,
        stage,
        precision=precision,
        shared_parameters=shared_parameters,
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=100,
        **options,
    )
    for _ in range(steps):
        model(torch.ones(2, 5, dtype=next(model.parameters()).dtype)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def reported(comm: Communicator, stage: int, **options: Any) -> MemoryReport:
    return memory_report(*trained(comm, stage, **options), comm)


# --- by hand --------------------------------------------------------------------------------------


def test_seven_parameters_on_two_ranks_by_hand() -> None:
    # bucket   | 0 1 2 3 | 4 5 6 . |        parameters 16 bytes with the padding, gradients 8, and of
    #            rank 0    rank 1           master weights and two moments 4 × 12 bytes, and 3 × 12
    def work(comm: Communicator) -> MemoryReport:
        model = nn.Linear(7, 1, bias=False)
        optimizer = staged(model, torch.optim.AdamW(model.parameters()), comm, 2, precision="bfloat16")
        model(torch.ones(1, 7, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return memory_report(model, optimizer, comm)

    report = run_loopback(2, work)[1]
    assert (report.parameters, report.formula) == (7, "2Φ + 14Φ/p")
    assert [[each.state[what].nbytes for what in STATE] for each in report.of_ranks] == [
        [16, 8, 48],
        [16, 8, 36],
    ]
    assert [[each.state[what].formula_nbytes for what in STATE] for each in report.of_ranks] == [
        [14, 7, 42]
    ] * 2
    assert [[each.state[what].padding_nbytes for what in STATE] for each in report.of_ranks] == [
        [2, 1, 6],
        [2, 1, -6],
    ]
    assert report.state_nbytes == 2 * 16 + 2 * 8 + 7 * 12
    # One room, as there is one bucket, and at most one whole gradient that has not been copied into it yet.
    assert {(each.staging_nbytes, each.peak_staging_nbytes) for each in report.of_ranks} == {(16, 16 + 14)}


def test_each_part_is_divided_from_its_stage_on() -> None:
    table = [[shards(what, stage, 4) for what in STATE] for stage in range(4)]
    assert table == [[1, 1, 1], [1, 1, 4], [1, 4, 4], [4, 4, 4]]


# --- the formula ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "size", "optimizer", "precision"),
    pairwise([0, 1, 2, 3], [1, 2, 3, 4], OPTIMIZERS, [None, "bfloat16"]),
)
def test_bytes_are_the_formula_up_to_padding(
    stage: int, size: int, optimizer: str, precision: str | None
) -> None:
    make, moments = OPTIMIZERS[optimizer]
    report = run_loopback(size, lambda comm: reported(comm, stage, make=make, precision=precision, steps=1))[
        0
    ]
    kept = 2 if precision else 4
    of_element = {PARAMETERS: kept, GRADIENTS: kept, OPTIMIZER: 4 * moments + (4 if precision else 0)}
    assert report.parameters == PHI
    for what in STATE:
        parts = shards(what, stage, size)
        lines = [of_rank.state[what] for of_rank in report.of_ranks]
        assert {line.formula_nbytes for line in lines} == {Fraction(PHI * of_element[what], parts)}, what
        assert all(line.unexplained_nbytes == 0 for line in lines), what
        # A bucket is padded with fewer elements than there are ranks, and has a parameter at least.
        assert all(abs(line.padding_nbytes) <= 12 * (size - 1) * of_element[what] for line in lines), what
        pending = sum(line.pending_nbytes for line in lines)
        if what == OPTIMIZER:  # has no padding: shards are cut differently, and add up
            assert pending == UNUSED * 4 * moments * (1 if stage else size)
            assert sum(line.beyond_nbytes for line in lines) == -pending
        else:
            assert pending == 0
            assert all(line.padding_nbytes >= 0 for line in lines)
    if stage == 0 or size == 1:
        assert all(line.padding_nbytes == 0 for line in report.of_ranks[0].state.values())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_types_that_are_asked_for_are_in_the_formula(stage: int) -> None:
    precision = Precision("bfloat16", reduction="float32", moments="bfloat16")
    report = run_loopback(3, lambda comm: reported(comm, stage, precision=precision))[0]
    assert report.formula == ["12Φ", "4Φ + 8Φ/p", "2Φ + 12Φ/p", "14Φ/p"][stage]
    assert all(each.unexplained_nbytes == 0 for each in report.of_ranks)


def test_before_the_first_step_there_are_no_moments() -> None:
    report = run_loopback(2, lambda comm: reported(comm, 1, precision="bfloat16", steps=0))[0]
    assert report.formula == "4Φ + 4Φ/p"
    assert all(each.unexplained_nbytes == 0 for each in report.of_ranks)


def test_what_is_frozen_is_told_apart() -> None:
    def work(comm: Communicator, stage: int) -> MemoryReport:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(False)
        inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        optimizer = staged(model, inner, comm, stage, policy=lambda name, module: name in ("0", "1"))
        return memory_report(model, optimizer, comm)

    for stage, formula in ((0, "8Φ"), (2, "4Φ + 4Φ/p"), (3, "8Φ/p")):
        report = run_loopback(2, lambda comm, stage=stage: work(comm, stage))[0]
        assert (report.parameters, report.formula) == (20, f"{formula} + 80 B frozen")
        assert report.worst.unexplained_nbytes == 0


# --- nothing else -----------------------------------------------------------------------------------


@pytest.fixture
def newcomers() -> Iterator[None]:
    """Objects that are there already are not looked at."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def living_nbytes() -> int:
    """Of all tensors that have been made since, each storage once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and not each.is_meta]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.usefixtures("newcomers")
@pytest.mark.parametrize(
    ("stage", "precision", "place"),
    pairwise(
        [0, 1, 2, 3],
        ["bfloat16", Precision("bfloat16", reduction="float32", moments="bfloat16")],
        ["memory", "disk"],
    ),
)
def test_no_tensor_is_left_that_the_report_does_not_know(
    stage: int, precision: Precision | str | None, place: str, tmp_path: Path
) -> None:
    def work(comm: Communicator) -> tuple[int, int]:
        offload = None if place == "memory" else tmp_path
        model, optimizer = trained(comm, stage, precision=precision, offload=offload)
        report = memory_report(model, optimizer)
        known = int(report.state_nbytes) + report.worst.staging_nbytes
        return living_nbytes(), known + report.worst.buffers_nbytes + report.worst.scalars_nbytes

    ((living, known),) = run_loopback(1, work)
    assert living == known


def test_stage_1_lets_go_of_all_but_its_shard_of_gradients_in_another_type() -> None:
    precision = Precision("bfloat16", reduction="float32")
    report = run_loopback(2, lambda comm: reported(comm, 1, precision=precision))[0]
    # Of every bucket half, in float32: gradients themselves are of 2 bytes.
    assert report.worst.staging_nbytes == report.worst.state[GRADIENTS].nbytes


# --- places -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_on_disk_is_what_the_files_hold(stage: int, tmp_path: Path) -> None:
    def work(comm: Communicator) -> tuple[MemoryReport, int]:
        model, optimizer = trained(comm, stage, precision="bfloat16", offload=tmp_path)
        report = memory_report(model, optimizer, comm)
        files = sum(path.stat().st_size for path in tmp_path.rglob("*.bin"))
        comm.barrier()
        return report, files

    report, files = run_loopback(2, work)[0]
    lines = [each.state[OPTIMIZER] for each in report.of_ranks]
    assert sum(line.disk_nbytes for line in lines) == files
    assert {(line.host_nbytes, line.unexplained_nbytes) for line in lines} == {(0, 0)}
    assert all(each.state[OPTIMIZER].disk_nbytes not in (0, each.state_nbytes) for each in report.of_ranks)


def test_three_blocks_are_in_memory_while_the_state_is_on_disk(tmp_path: Path) -> None:
    def work(comm: Communicator) -> tuple[int, list[int]]:
        model, optimizer = trained(comm, 0, precision="bfloat16", offload=tmp_path, bucket_bytes=150, steps=3)
        files = [path.stat().st_size for path in sorted(tmp_path.rglob("*.bin"))]
        return memory_report(model, optimizer).worst.peak_offload_nbytes, files

    ((peak, files),) = run_loopback(1, work)
    assert len(files) > 3
    assert peak == max(sum(files[first : first + 3]) for first in range(len(files) - 2))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_ranks_have_in_common_counts_once(stage: int) -> None:
    apart, common = (
        run_loopback(
            3,
            lambda comm, shared=shared: reported(comm, stage, precision="bfloat16", shared_parameters=shared),
            shared_memory=True,
        )[0]
        for shared in (False, True)
    )
    for each in common.of_ranks:
        line = each.state[PARAMETERS]
        assert (line.host_nbytes, line.unexplained_nbytes) == (0, 0)
        assert line.common_nbytes == 2 * PHI + (line.padding_nbytes)
        assert each.gathered_nbytes == each.peak_gathered_nbytes == 0
    assert common.formula == "2Φ in common + " + ("2Φ + 12Φ/p" if stage == 1 else "14Φ/p")
    copies = 3 if stage < 3 else 1
    saved = (copies - 1) * common.worst.state[PARAMETERS].nbytes
    assert apart.state_nbytes - common.state_nbytes == saved


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_ranks_have_in_common_counts_once_on_each_node(stage: int) -> None:
    def work(comm: Communicator) -> MemoryReport:
        return reported(comm, stage, precision="bfloat16", shared_parameters=True)

    report = run_loopback(4, work, nodes=[0, 0, 1, 1], shared_memory=True)[0]
    assert all(each.unexplained_nbytes == 0 for each in report.of_ranks)
    assert {(each.ranks, each.sharers) for each in report.of_ranks} == {(4, 2)}
    own = sum(line.host_nbytes for each in report.of_ranks for line in each.state.values())
    assert report.state_nbytes - own == 2 * report.worst.state[PARAMETERS].common_nbytes


def test_units_are_counted_while_they_are_whole() -> None:
    def work(comm: Communicator) -> list[tuple[int, int, int]]:
        model, optimizer = trained(comm, 3)
        looks = [memory_report(model, optimizer).worst]
        with summon_full_parameters(model):
            looks.append(memory_report(model, optimizer).worst)
        looks.append(memory_report(model, optimizer).worst)
        assert all(each.unexplained_nbytes == 0 for each in looks)
        return [(e.gathered_nbytes, e.peak_gathered_nbytes, e.peak_gathered_units) for e in looks]

    root, layer = 4 * (5 * 7 + 7 * 5 + 3 + 1), 4 * (7 * 7 + 7)  # on two ranks the root is padded by one
    for before, inside, after in run_loopback(2, work):
        # The root, the layer at work and the next one; there may be one more while that is being freed.
        assert before[0] == 0
        assert before[2] in (3, 4)
        assert before[1] == root + (before[2] - 1) * layer
        assert inside == (root + 4 * layer, root + 4 * layer, 5)
        assert after == (0, *inside[1:])


def test_gradients_that_wait_for_a_room_are_in_the_peak() -> None:
    def work(comm: Communicator, turned: bool) -> int:
        """Turned: registered in the order of backward, so that every gradient comes before its turn."""
        names = [str(number) for number in range(6)]
        layers = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in names})
        optimizer = staged(
            layers,
            torch.optim.SGD(layers.parameters(), lr=0.1),
            comm,
            2,
            bucket_bytes=256,
            first_bucket_bytes=256,
        )
        hidden = torch.ones(1, 8)
        for name in reversed(names) if turned else names:
            hidden = layers[name](hidden)
        hidden.sum().backward()
        optimizer.step()
        report = memory_report(layers, optimizer).worst
        assert report.staging_nbytes == 2 * 256
        return report.peak_staging_nbytes - report.staging_nbytes

    assert run_loopback(2, lambda comm: work(comm, False)) == [256, 256]
    # One of them may have the second room; the others wait, and the one that has just come.
    assert run_loopback(2, lambda comm: work(comm, True)) == [5 * 256, 5 * 256]


# --- the report -------------------------------------------------------------------------------------


def test_without_a_communicator_a_rank_reports_itself_alone() -> None:
    reports = run_loopback(2, lambda comm: memory_report(*trained(comm, 2)))
    assert [[each.rank for each in report.of_ranks] for report in reports] == [[0], [1]]


def test_every_rank_has_the_same_report_and_the_worst_is_the_fullest() -> None:
    reports = run_loopback(3, lambda comm: reported(comm, 2))
    assert reports[0] == reports[1] == reports[2]
    assert reports[0].worst.peak_nbytes == max(each.peak_nbytes for each in reports[0].of_ranks)


def test_the_table_fits_a_batch_jobs_output_file_and_says_what_is_where(tmp_path: Path) -> None:
    def work(comm: Communicator) -> MemoryReport:
        model, optimizer = trained(comm, 3, precision="bfloat16", offload=tmp_path)
        with watch_activations(model) as activations:
            model(torch.ones(2, 5, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return memory_report(model, optimizer, comm, activations=activations)

    report = run_loopback(4, work)[0]
    output = io.StringIO()
    Console(file=output, width=80).print(report.table())
    text = output.getvalue()
    assert all(len(line) <= 80 for line in text.splitlines())
    for expected in (
        "ZeRO-3, 16Φ/p",
        "optimizer state        disk",
        "units in flight",
        "blocks from disk",
        "activations",
    ):
        assert expected in text
    assert "not explained" not in text


def test_a_report_becomes_plain_values() -> None:
    report = run_loopback(2, lambda comm: reported(comm, 3))[0]
    record = json.loads(json.dumps(report.as_record(every_rank=True)))
    assert record == report.as_record(every_rank=True)
    assert [each["rank"] for each in record["of_ranks"]] == [0, 1]
    assert record["worst"] in record["of_ranks"]
    assert record["unexplained_nbytes"] == 0
    assert "of_ranks" not in report.as_record()


def test_what_cannot_be_measured_is_refused_on_every_rank() -> None:
    model = Network()
    plain = torch.optim.AdamW(model.parameters())
    with pytest.raises(OperationError, match="given a AdamW where a DistributedOptimizer is needed"):
        memory_report(model, plain)  # type: ignore[arg-type]

    def work(comm: Communicator) -> str:
        whole, optimizer = trained(comm, 0)
        with pytest.raises(PeerFailedError, match="given a list where a model is needed") as caught:
            memory_report([] if comm.rank else whole, optimizer, comm)  # type: ignore[arg-type]
        return str(caught.value)

    assert len(set(run_loopback(2, work))) == 1


@pytest.mark.mpi
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "in common"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_rank_of_a_job_is_reported(world: Communicator, stage: int, shared: bool) -> None:
    report = reported(world, stage, precision="bfloat16", shared_parameters=shared)
    assert [each.rank for each in report.of_ranks] == list(range(world.size))
    assert all(each.unexplained_nbytes == 0 for each in report.of_ranks)
    assert (report.worst.state[PARAMETERS].common_nbytes > 0) == shared


@pytest.mark.mpi
@pytest.mark.gpu
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_in_host_memory_is_told_from_that_on_the_gpu(world: Communicator, stage: int) -> None:
    # Not on ranks that are threads: torch has one thread for all backwards on a GPU, and a hook of one
    # rank's that waits in it for another rank keeps that rank's own from coming.
    device = use_gpu(world)
    model = Network().to(device)
    optimizer = staged(
        model, torch.optim.AdamW(model.parameters()), world, stage, precision="bfloat16", offload="cpu"
    )
    model(torch.ones(2, 5, dtype=torch.bfloat16, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    report = memory_report(model, optimizer, world)
    for each in report.of_ranks:
        places = {
            what: [place for place, nbytes in line.by_place.items() if nbytes]
            for what, line in each.state.items()
        }
        assert places == {PARAMETERS: ["device"], GRADIENTS: ["device"], OPTIMIZER: ["host"]}
        assert each.unexplained_nbytes == 0
        assert each.process.device_nbytes
