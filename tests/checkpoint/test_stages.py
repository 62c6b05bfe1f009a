"""A checkpoint of any stage of ZeRO, precision and number of ranks goes on in any other.

float64 follows one process to 1e-10: sums over other numbers of ranks are taken in another order. The same
stage on as many ranks goes on bit for bit.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar import partition
from hpcpar.checkpoint import files, load, save
from hpcpar.checkpoint.files import ShardReader
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, Precision, fully_shard, summon_full_parameters
from hpcpar.errors import CheckpointError, OperationError, PeerFailedError

SAMPLES = 12
TOLERANCE = 1e-10

OPTIMIZERS: dict[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 9)
        self.outer = nn.Linear(9, 7, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.outer(torch.tanh(self.inner(inputs)))


class Network(nn.Module):
    """Tied, frozen, unused and empty parameters, one that lies in memory in another order, one without
    dimensions, and a buffer.
    """

    def __init__(self, seed: int = 0, width: int = 5) -> None:
        super().__init__()
        self.embed = nn.Linear(width, 7, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(7, 5)
        self.unembed = nn.Linear(7, 5, bias=False)
        self.unembed.weight = self.head.weight
        self.turned = nn.Parameter(torch.empty(5, 3).T)
        self.unused = nn.Parameter(torch.empty(3))
        self.frozen = nn.Parameter(torch.empty(5), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.log_scale = nn.Parameter(torch.empty(()))
        self.register_buffer("seen", torch.tensor(0))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += 1
        hidden = self.embed(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        scaled = self.head(hidden) * self.frozen * self.log_scale.exp()
        return scaled + self.unembed(hidden) + self.turned.sum(0)


class Mode(NamedTuple):
    """How a run keeps its states."""

    stage: int
    dtype: torch.dtype = torch.float64
    precision: Precision | str | None = None
    on_disk: bool = False


MODES = {
    "0": Mode(0),
    "0 on pieces": Mode(0, precision="float64"),
    "1": Mode(1),
    "1 on disk": Mode(1, on_disk=True),
    "2": Mode(2),
    "3": Mode(3),
    "3 on disk": Mode(3, on_disk=True),
}

FLOAT32 = {name: mode._replace(dtype=torch.float32) for name, mode in MODES.items() if mode.precision is None}
MIXED = {
    f"{stage} {name}": Mode(stage, torch.float32, precision)
    for stage in range(4)
    for name, precision in (
        ("bfloat16", Precision("bfloat16", moments="bfloat16")),
        ("float16", Precision("float16")),
    )
}


class Course:
    """One rank's model and optimizer, and the steps that it takes."""

    def __init__(
        self, comm: Communicator, mode: Mode, name: str, directory: Path, *, seed: int = 0, width: int = 5
    ) -> None:
        self.comm = comm
        self.model = Network(seed, width).to(mode.dtype)
        if mode.stage == 3:
            fully_shard(self.model, comm, precision=mode.precision)
        offload = directory / f"offload-{comm.rank}" if mode.on_disk else None
        groups: Any = [
            {"params": [p for p in self.model.parameters() if p.dim() > 1], "weight_decay": 0.02},
            {"params": [p for p in self.model.parameters() if p.dim() < 2]},
        ]
        self.optimizer = DistributedOptimizer(
            OPTIMIZERS[name](groups),
            self.model.named_parameters(),
            comm,
            zero_stage=mode.stage,
            precision=None if mode.stage == 3 else mode.precision,
            offload=offload,
            model=self.model,
            bucket_bytes=400,
            first_bucket_bytes=100,
        )

    def steps(self, first: int, last: int) -> None:
        start, stop = partition.bounds(SAMPLES, self.comm.size)[self.comm.rank]
        for step in range(first, last):
            inputs, targets = (tensor[start:stop].to(self.model.embed.weight.dtype) for tensor in batch(step))
            # A part's share of the loss of all: parts are not equally large.
            share = (stop - start) * self.comm.size / SAMPLES
            loss = functional.mse_loss(self.model(inputs), targets) * share
            self.optimizer.scale_loss(loss).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, directory: Path, step: int) -> Path:
        return save(
            directory, step=step, model=self.model, optimizer=self.optimizer, comm=self.comm, keep=None
        )

    def load(self, path: Path) -> None:
        load(path, model=self.model, optimizer=self.optimizer, comm=self.comm, restore_random=False)

    def tensors(self) -> dict[str, Tensor]:
        """The model, whole."""
        with summon_full_parameters(self.model):
            return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def everything(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The model, and the optimizer's state: whole, whatever the stage."""
        return self.tensors(), self.optimizer.state_dict()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)


def serial(name: str, steps: int) -> dict[str, Tensor]:
    def body(comm: Communicator) -> dict[str, Tensor]:
        course = Course(comm, MODES["0"], name, Path())
        course.steps(0, steps)
        return course.tensors()

    return run_loopback(1, body)[0]


def saved_by(size: int, mode: Mode, name: str, directory: Path, steps: int = 2) -> Path:
    def body(comm: Communicator) -> Path:
        course = Course(comm, mode, name, directory)
        course.steps(0, steps)
        return course.save(directory, steps)

    return run_loopback(size, body)[0]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize(
    ("saver", "name"),
    [(saver, "adamw") for saver in MODES]
    + [(saver, name) for saver in ("0", "1", "3") for name in ("sgd", "adagrad")],
)
def test_any_stage_and_number_of_ranks_goes_on_in_any_other(saver: str, name: str, tmp_path: Path) -> None:
    expected = serial(name, 4)
    number = list(MODES).index(saver) + list(OPTIMIZERS).index(name)
    path = saved_by(1 + number % 4, MODES[saver], name, tmp_path)
    for shift, (loader, mode) in enumerate(MODES.items()):

        def resumed(comm: Communicator, mode: Mode = mode) -> dict[str, Tensor]:
            course = Course(comm, mode, name, tmp_path, seed=1)
            course.load(path)
            course.steps(2, 4)
            return course.tensors()

        for tensors in run_loopback(1 + (number + shift) % 4, resumed):
            assert tensors.pop("seen") == 4
            for key, value in tensors.items():
                same_course = torch.allclose(value, expected[key], rtol=TOLERANCE, atol=TOLERANCE)
                assert same_course, f"{key}, loaded by {loader}"


@pytest.mark.parametrize("mode", [*FLOAT32, *MIXED])
def test_the_same_stage_on_as_many_ranks_goes_on_bit_for_bit(mode: str, tmp_path: Path) -> None:
    chosen = (FLOAT32 | MIXED)[mode]

    def body(comm: Communicator) -> bool:
        course = Course(comm, chosen, "adamw", tmp_path)
        course.steps(0, 2)
        path = course.save(tmp_path, 2)
        resumed = Course(comm, chosen, "adamw", tmp_path / "resumed", seed=1)
        resumed.load(path)
        course.steps(2, 4)
        resumed.steps(2, 4)
        return same(course.everything(), resumed.everything())

    assert all(run_loopback(3, body))


@pytest.mark.parametrize(
    ("stage", "loader"), [(0, "3 bfloat16"), (0, "1 bfloat16"), (3, "0 bfloat16"), (3, "2 bfloat16")]
)
def test_master_weights_come_from_the_float32_values_and_give_them_back(
    stage: int, loader: str, tmp_path: Path
) -> None:
    plain = Mode(stage, torch.float32)
    first = saved_by(2, plain, "adamw", tmp_path / "first")

    def through(comm: Communicator) -> tuple[dict[str, Tensor], ...]:
        before = Course(comm, plain, "adamw", tmp_path)
        before.load(first)
        mixed = Course(comm, MIXED[loader], "adamw", tmp_path, seed=1)
        mixed.load(first)
        second = mixed.save(tmp_path / "second", 2)
        after = Course(comm, plain, "adamw", tmp_path, seed=1)
        after.load(second)
        return before.tensors(), mixed.tensors(), after.tensors()

    for before, mixed, after in run_loopback(3, through):
        for name, value in before.items():
            assert same(mixed[name], value.bfloat16() if value.is_floating_point() else value)
            # What is frozen has no master weights.
            assert same(after[name], mixed[name].float() if name == "frozen" else value)


def test_a_dynamic_loss_scale_goes_on_and_a_fixed_one_is_not_taken_for_it(tmp_path: Path) -> None:
    def body(comm: Communicator) -> tuple[float, ...]:
        saver = Course(comm, MIXED["1 float16"], "sgd", tmp_path)
        saver.optimizer.scaler.update(overflow=True)
        dynamic = saver.save(tmp_path / "dynamic", 0)
        fixed = Course(comm, MIXED["1 bfloat16"], "sgd", tmp_path).save(tmp_path / "fixed", 0)
        found = []
        for mode, path in (("2 float16", dynamic), ("2 float16", fixed), ("2 bfloat16", dynamic)):
            course = Course(comm, MIXED[mode], "sgd", tmp_path)
            course.load(path)
            found.append(course.optimizer.scaler.scale)
        return *found, course.optimizer.scaler.skipped

    assert run_loopback(2, body) == [(2.0**15, 2.0**16, 1.0, 1)] * 2


def test_a_sharded_checkpoint_loads_into_a_plain_model_and_optimizer(tmp_path: Path) -> None:
    path = saved_by(3, MODES["3"], "adamw", tmp_path)
    model = Network(1).double()
    optimizer = OPTIMIZERS["adamw"](
        [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() < 2]},
        ]
    )
    loaded = load(path, model=model, optimizer=optimizer, comm=Communicator.alone())
    expected = serial("adamw", 2)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=TOLERANCE, atol=TOLERANCE)
    assert loaded.ranks == 3
    assert optimizer.param_groups[0]["weight_decay"] == 0.02
    assert optimizer.state[model.turned]["exp_avg"].shape == (3, 5)
    assert optimizer.state[model.turned]["step"] == 2


def test_a_model_alone_is_loaded_into_shards_and_master_weights_follow(tmp_path: Path) -> None:
    path = saved_by(2, MODES["0"]._replace(dtype=torch.float32), "sgd", tmp_path)

    def body(comm: Communicator) -> tuple[bool, bool]:
        expected = Network().float()
        load(path, model=expected, comm=comm, restore_random=False)
        course = Course(comm, MIXED["3 bfloat16"], "sgd", tmp_path, seed=1)
        load(path, model=course.model, comm=comm, restore_random=False)
        tensors = course.tensors()
        state = course.optimizer.state_dict()["state"]
        masters = [entry["master_weight"] for entry in state.values() if "master_weight" in entry]
        return (
            all(same(tensors[n], v.to(tensors[n].dtype)) for n, v in expected.state_dict().items()),
            bool(masters) and all(same(m, m.bfloat16().float()) for m in masters),
        )

    assert run_loopback(3, body) == [(True, True)] * 3


def stepping(comm: Communicator, mode: Mode, directory: Path) -> tuple[nn.Module, DistributedOptimizer]:
    """A model of which the values are the numbers of its elements, and what moves none of them."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter))
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        model.named_parameters(),
        comm,
        zero_stage=mode.stage,
        precision=mode.precision,
        offload=directory / f"offload-{comm.rank}" if mode.on_disk else None,
        model=model,
        overlap_allgather=mode.stage in (1, 2),
    )
    return model, optimizer


@pytest.mark.parametrize(
    "mode", [MODES["0 on pieces"], MODES["1 on disk"], MIXED["1 bfloat16"], MIXED["2 bfloat16"]]
)
def test_a_model_is_loaded_without_its_optimizer_and_the_next_step_does_not_undo_it(
    tmp_path: Path, mode: Mode
) -> None:
    def body(comm: Communicator) -> tuple[list[Tensor], list[Tensor]]:
        model, optimizer = stepping(comm, mode, tmp_path)
        save(tmp_path / "saved", step=1, model=model, optimizer=optimizer, comm=comm)
        saved = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer.take_parameters()
        load(tmp_path / "saved", model=model, comm=comm, restore_random=False)
        inputs = torch.ones(1, 3, dtype=next(model.parameters()).dtype)
        optimizer.scale_loss(model(inputs).sum()).backward()
        optimizer.step()
        optimizer.wait_for_parameters()
        return saved, list(model.parameters())

    for saved, found in run_loopback(2, body):
        assert all(same(one, other) for one, other in zip(saved, found, strict=True))


@pytest.mark.parametrize("mode", [MODES["0 on pieces"], MODES["1"], MODES["2"]])
def test_an_optimizer_that_was_made_distributed_is_refused_by_itself(tmp_path: Path, mode: Mode) -> None:
    def body(comm: Communicator) -> None:
        model, optimizer = stepping(comm, mode, tmp_path)
        for act in (save, load):
            step = {"step": 1} if act is save else {}
            with pytest.raises(PeerFailedError, match=r"has been made a DistributedOptimizer.* give that"):
                act(tmp_path, model=model, optimizer=optimizer.inner, comm=comm, **step)

    run_loopback(2, body)


def test_each_rank_writes_its_pieces_once_and_reads_only_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved_by(4, MODES["3"], "adamw", tmp_path)
    files = {file.name: file.stat().st_size for file in path.iterdir()}
    trained = sum(p.numel() for p in Network().parameters() if p.requires_grad)
    for rank in range(4):
        share = files[f"model.rank{rank:05d}.000.safetensors"]
        states = files[f"optimizer.rank{rank:05d}.000.safetensors"]
        # A quarter each of 8 bytes, and twice that of moments; and the names of the pieces.
        assert share < 8 * trained / 4 + 2000
        assert states < 2 * 8 * trained / 4 + 5000
    assert files["model.safetensors"] < 1000
    read: dict[int, int] = {}
    flat = ShardReader.flat

    def counted(self: ShardReader, file: str, name: str, start: int, stop: int) -> Tensor:
        read[id(self)] = read.get(id(self), 0) + (stop - start if "rank" in file else 0)
        return flat(self, file, name, start, stop)

    monkeypatch.setattr(ShardReader, "flat", counted)
    held = run_loopback(3, lambda comm: _loaded_elements(comm, path, tmp_path))
    # Values and two moments of each element, of what is frozen the value, and a parameter's steps.
    for found, elements in zip(sorted(read.values()), sorted(held), strict=True):
        assert elements <= found <= elements + 20


def _loaded_elements(comm: Communicator, path: Path, directory: Path) -> int:
    course = Course(comm, MODES["3"], "adamw", directory)
    course.load(path)
    stepped = [piece for piece, state in course.optimizer.own_states() if "exp_avg" in state]
    pieces = sum(piece.stop - piece.start for piece in stepped)
    sharding = course.model.__dict__["_hpcpar_sharding"]
    kept = sum(piece.stop - piece.start for piece, _ in sharding.own_pieces())
    return kept + 2 * pieces


def test_large_shards_are_cut_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FILE_NBYTES", 500)
    path = saved_by(2, MODES["2"], "adamw", tmp_path)
    assert len(list(path.glob("optimizer.rank00001.*.safetensors"))) > 3

    def body(comm: Communicator) -> dict[str, Tensor]:
        course = Course(comm, MODES["1"], "adamw", tmp_path, seed=1)
        course.load(path)
        course.steps(2, 3)
        return course.tensors()

    expected = serial("adamw", 3)
    for name, value in run_loopback(3, body)[0].items():
        torch.testing.assert_close(value, expected[name], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("kind", "damage"), [("model", "a missing file"), ("optimizer", "a flipped bit")])
def test_one_damaged_shard_is_named_on_all_ranks_and_nothing_changes(
    kind: str, damage: str, tmp_path: Path
) -> None:
    path = saved_by(3, MODES["3"], "adamw", tmp_path)
    file = path / f"{kind}.rank00001.000.safetensors"
    if damage == "a missing file":
        file.unlink()
    else:
        content = bytearray(file.read_bytes())
        content[-3] ^= 4
        file.write_bytes(content)

    def body(comm: Communicator) -> tuple[str, bool]:
        course = Course(comm, MODES["3"], "adamw", tmp_path, seed=1)
        before = course.everything()
        with pytest.raises(PeerFailedError) as caught:
            course.load(path)
        return str(caught.value), same(before, course.everything())

    for message, unchanged in run_loopback(2, body):
        assert file.name in message
        assert unchanged


@pytest.mark.parametrize("mode", ["1", "3"])
def test_a_full_disk_on_one_rank_fails_on_all_and_leaves_the_last_checkpoint(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = saved_by(3, MODES[mode], "sgd", tmp_path)
    before = {file.name: file.read_bytes() for file in whole.iterdir()}
    write = files.save_file

    def full(tensors: dict[str, Tensor], path: Path, **others: Any) -> None:
        if "rank00002" in path.name:
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(tensors, path, **others)

    monkeypatch.setattr(files, "save_file", full)

    def body(comm: Communicator) -> str:
        course = Course(comm, MODES[mode], "sgd", tmp_path)
        course.steps(0, 2)
        with pytest.raises(PeerFailedError) as caught:
            course.save(tmp_path, 2)
        course.steps(2, 3)
        return str(caught.value)

    for message in run_loopback(3, body):
        assert "rank 2: OSError: [Errno 28] No space left on device" in message
    assert [path.name for path in tmp_path.iterdir()] == [whole.name]
    assert {file.name: file.read_bytes() for file in whole.iterdir()} == before


@pytest.mark.parametrize("mode", ["0", "1", "3"])
def test_a_sharded_model_of_another_shape_is_named(mode: str, tmp_path: Path) -> None:
    path = saved_by(2, MODES["3"], "sgd", tmp_path)

    def body(comm: Communicator) -> str:
        course = Course(comm, MODES[mode], "sgd", tmp_path, width=4)
        with pytest.raises(PeerFailedError) as caught:
            course.load(path)
        return str(caught.value)

    for message in run_loopback(2, body):
        assert "embed.weight there is (7, 5) torch.float64, in the model (7, 4) torch.float64" in message


def test_other_float_types_are_refused_where_no_precision_is_meant(tmp_path: Path) -> None:
    path = saved_by(2, MODES["1"], "sgd", tmp_path)

    def body(comm: Communicator) -> str:
        course = Course(comm, FLOAT32["2"], "sgd", tmp_path)
        with pytest.raises(PeerFailedError) as caught:
            course.load(path)
        return str(caught.value)

    for message in run_loopback(2, body):
        assert "turned there is (3, 5) torch.float64, in the model (3, 5) torch.float32" in message


def test_pieces_are_saved_by_the_ranks_that_they_are_spread_over(tmp_path: Path) -> None:
    def body(comm: Communicator) -> str:
        part = comm.split(comm.rank % 2, name="half")
        assert part is not None
        course = Course(part, MODES["1"], "sgd", tmp_path)
        with pytest.raises(PeerFailedError) as caught:
            save(tmp_path, step=0, model=course.model, optimizer=course.optimizer, comm=comm)
        return str(caught.value)

    assert "sharded over the 2 ranks of 'half'" in run_loopback(4, body)[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", MODES)
def test_a_ranks_own_part_of_the_state_goes_out_and_in_again(mode: str, tmp_path: Path) -> None:
    def body(comm: Communicator) -> tuple[bool, set[str]]:
        course = Course(comm, MODES[mode], "adamw", tmp_path / "course")
        course.steps(0, 2)
        state = course.optimizer.sharded_state_dict()
        expected = course.optimizer.state_dict()
        other = Course(comm, MODES[mode], "adamw", tmp_path / "other", seed=1)
        other.optimizer.load_sharded_state_dict(state)
        return same(expected, other.optimizer.state_dict()), set(state["pieces"])

    results = run_loopback(3, body)
    assert all(equal for equal, _ in results)
    assert {"turned", "unused", "head.weight"} <= set().union(*(names for _, names in results))


def test_a_state_of_other_pieces_is_refused_and_named(tmp_path: Path) -> None:
    states = run_loopback(
        2, lambda comm: Course(comm, MODES["1"], "sgd", tmp_path).optimizer.sharded_state_dict()
    )
    alone = Course(Communicator.alone(), MODES["1"], "sgd", tmp_path)
    with pytest.raises(OperationError, match=r"of \S+ it has elements .*, where \(0, \d+\) are needed"):
        alone.optimizer.load_sharded_state_dict(states[0])


def test_whoever_may_read_one_file_may_read_all(tmp_path: Path) -> None:
    path = saved_by(2, MODES["3"], "sgd", tmp_path)
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1


def test_the_description_of_pieces_can_be_read_by_people(tmp_path: Path) -> None:
    path = saved_by(2, MODES["1"], "sgd", tmp_path)
    record = json.loads((path / "pieces.json").read_text())["optimizer"]["state/turned/momentum_buffer"]
    assert (record["dtype"], record["shape"]) == ("float64", [3, 5])
    (part,) = record["parts"]
    assert (part["ranges"], part["strides"]) == ([[[0, 3]], [[0, 5]]], [1, 3])
    assert [stop for _, _, stop in part["pieces"]][-1] == 15


def test_a_checkpoint_of_other_ranks_pieces_is_whole_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_states = DistributedOptimizer.own_states

    def half(self: DistributedOptimizer) -> Any:
        found = list(own_states(self))
        return found if self.dp_comm.rank == 0 else found[1:]

    monkeypatch.setattr(DistributedOptimizer, "own_states", half)
    with pytest.raises((CheckpointError, PeerFailedError), match=r"of .* there (is|are) "):
        saved_by(2, MODES["1"], "sgd", tmp_path)


@pytest.mark.mpi
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_in_common_memory_are_saved_and_loaded(
    world: Communicator, stage: int, tmp_path: Path
) -> None:
    directory = Path(world.broadcast_object(str(tmp_path)))
    path = saved_by(1, MODES["0"], "adamw", tmp_path) if world.rank == 0 else None
    path = Path(world.broadcast_object(str(path)))
    model = Network(1).double()
    if stage == 3:
        fully_shard(model, world, shared_parameters=True)
    groups: Any = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() < 2]},
    ]
    optimizer = DistributedOptimizer(
        OPTIMIZERS["adamw"](groups),
        model.named_parameters(),
        world,
        zero_stage=stage,
        shared_parameters=stage < 3,
    )
    load(path, model=model, optimizer=optimizer, comm=world)
    again = save(directory / "again", step=2, model=model, optimizer=optimizer, comm=world)
    plain = Network(2).double()
    load(again, model=plain, comm=world)
    expected = serial("adamw", 2)
    equal = all(
        torch.equal(value, expected[name]) for name, value in plain.state_dict().items() if name != "seen"
    )
    assert all(world.allgather_object(equal))
