"""A checkpoint of any tensor-parallel degree, with any stage of ZeRO, goes on in any other.

Every gradient is told, in numbers that sum exactly on 1, 2 and 4 ranks, so that all runs are to have the
serial one's bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hpcpar.checkpoint import load, save
from hpcpar.checkpoint.files import ShardReader
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, fully_shard, summon_full_parameters
from hpcpar.errors import CheckpointError, PeerFailedError
from hpcpar.tensor_parallel.split import (
    Heads,
    Split,
    comm_of,
    gather_whole,
    own_shard,
    padded_length,
    place,
    replicated,
    split_evenly,
    split_of,
    split_sections,
)

VOCABULARY = 5

WHOLE: dict[str, tuple[tuple[int, ...], Callable[[int], Split] | None]] = {
    "embed": ((VOCABULARY, 3), lambda n: split_evenly(VOCABULARY, n, padded=padded_length(VOCABULARY, n))),
    "heads": ((20, 3), lambda n: split_sections((Heads(12, 1), Heads(2, 2), Heads(2, 2)), n)),
    "key": ((4, 5), lambda n: split_sections((Heads(2, 2),), n)),
    "gate_up": ((14, 3), lambda n: split_sections((7, 7), n)),
    "gate_up_bias": ((14,), lambda n: split_sections((7, 7), n)),
    "down": ((3, 12), lambda n: split_evenly(12, n, dim=1)),
    "unembed": (
        (3, VOCABULARY),
        lambda n: split_evenly(VOCABULARY, n, dim=1, padded=padded_length(VOCABULARY, n)),
    ),
    "turned": ((12, 5), lambda n: split_evenly(12, n)),
    "down_bias": ((3,), lambda n: replicated(3, n)),
    "norm": ((5,), None),
    "pair": ((2, 3), lambda n: split_sections((2,), n)),
    "frozen": ((12, 2), lambda n: split_evenly(12, n)),
}
"""Shapes of the serial model, and how each is split over n ranks.

Of some of them the last ranks of four have nothing, or nothing but padding.
"""


def whole_value(name: str, seed: int) -> Tensor:
    shape, _ = WHOLE[name]
    generator = torch.Generator().manual_seed(100 * seed + list(WHOLE).index(name))
    return torch.randint(-64, 65, shape, generator=generator, dtype=torch.float64) / 64


class Block(nn.Module):
    """Some of the parameters; its output is linear in each."""

    def __init__(self, names: list[str], tp_comm: Communicator | None, seed: int) -> None:
        super().__init__()
        for name in names:
            value, way = whole_value(name, seed), WHOLE[name][1]
            split = None if tp_comm is None or way is None else way(tp_comm.size)
            shard = value if split is None or tp_comm is None else split.shard(value, tp_comm.rank)
            if name == "turned":
                shard = shard.T.contiguous().T
            parameter = nn.Parameter(shard, requires_grad=name != "frozen")
            if split is not None and tp_comm is not None:
                place(parameter, split, tp_comm)
            self.register_parameter(name, parameter)

    def forward(self, total: Tensor, gradients: dict[str, Tensor]) -> Tensor:
        for name, parameter in self.named_parameters():
            shard = own_shard(parameter, gradients[name]).to(parameter.dtype)
            total = total + (parameter * shard).sum()
        return total


class Network(nn.Module):
    """Parameters that are split in all ways, and some that are not; serial without a communicator."""

    def __init__(self, tp_comm: Communicator | None = None, seed: int = 0) -> None:
        super().__init__()
        names = list(WHOLE)
        self.layers = nn.ModuleList(Block(names[n : n + 4], tp_comm, seed) for n in range(0, len(names), 4))
        self.tied = nn.Module()
        self.tied.weight = self.layers[0].embed
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        self.seen += 1
        total = torch.zeros((), dtype=torch.float64)
        for layer in self.layers:
            total = layer(total, gradients)
        return total


class Mode(NamedTuple):
    """How a run is spread over ranks; `plain` has an optimizer of torch itself, and no dp communicator."""

    tp: int
    dp: int = 1
    stage: int = 0
    precision: str | None = None
    plain: bool = False

    @property
    def size(self) -> int:
        return self.tp * self.dp

    def __str__(self) -> str:
        extra = [self.precision or "", "plain" if self.plain else ""]
        return " ".join([f"tp{self.tp} dp{self.dp} zero{self.stage}", *filter(None, extra)])


SERIAL = Mode(1, plain=True)

MODES = [
    SERIAL,
    Mode(2, plain=True),
    Mode(3, plain=True),
    Mode(4),
    Mode(2, 2),
    Mode(2, 2, 1),
    Mode(2, 2, 2),
    Mode(2, 2, 3),
    Mode(1, 4, 3),
    Mode(3, 1, 3),
    Mode(4, 1, 2),
    Mode(1, 2, 1),
    Mode(2, 1, 0, "float64"),
]


class Course:
    """One rank's model and optimizer, and the steps that it takes."""

    def __init__(self, comm: Communicator, mode: Mode, seed: int = 0) -> None:
        self.comm = comm
        tp_comm = comm.split(comm.rank // mode.tp, name="tp")
        self.dp_comm = comm.split(comm.rank % mode.tp, name="dp")
        assert self.dp_comm is not None
        self.model = Network(None if mode == SERIAL else tp_comm, seed)
        if mode.stage == 3:
            fully_shard(self.model, self.dp_comm, precision=mode.precision)
        parameters = list(self.model.parameters())
        groups: Any = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.125},
            {"params": [p for p in parameters if p.dim() == 1]},
        ]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=0.01)
        if not mode.plain:
            self.optimizer = DistributedOptimizer(
                self.optimizer,
                self.model.named_parameters(),
                self.dp_comm,
                zero_stage=mode.stage,
                precision=None if mode.stage == 3 else mode.precision,
                bucket_bytes=400,
                first_bucket_bytes=100,
            )

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            gradients = {name: whole_value(name, 1000 + step) for name in WHOLE}
            self.model(gradients).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, directory: Path, step: int = 2) -> Path:
        return save(directory, step=step, model=self.model, optimizer=self.optimizer, comm=self.comm)

    def load(self, path: Path) -> None:
        load(path, model=self.model, optimizer=self.optimizer, comm=self.comm, restore_random=False)

    def everything(self) -> dict[str, Tensor]:
        """Parameters and their states as wholes, by name, with whatever each rank has of padding."""
        states = self.optimizer.state_dict()["state"]
        numbers = [p for group in self.optimizer.param_groups for p in group["params"]]
        found = {"seen": self.model.seen.clone()}
        with summon_full_parameters(self.model):
            for name, parameter in self.model.named_parameters():
                number = next(number for number, other in enumerate(numbers) if other is parameter)
                values = self._agreed(parameter, {"": parameter.detach(), **states.get(number, {})})
                for key, value in values.items():
                    of_elements = value.shape == parameter.shape and value.dim() > 0
                    whole = gather_whole(parameter, value) if of_elements else value.clone()
                    found[f"{name}/{key}"] = whole
                    if of_elements:
                        found[f"{name}/{key}/padding"] = padding(parameter, value)
        return found

    def _agreed(self, parameter: Tensor, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """With empty states for who has no elements, and so perhaps no states."""
        split = split_of(parameter)
        if split is None or all(split.shard_length(rank) for rank in range(split.size)):
            return values
        of_first = self.comm.broadcast_object(values)
        empty = {
            key: value.new_zeros(parameter.shape) if value.dim() else value for key, value in of_first.items()
        }
        return values if parameter.numel() else empty | values


def padding(parameter: Tensor, value: Tensor) -> Tensor:
    """Whether what this rank has of padding is zeros."""
    split, comm = split_of(parameter), comm_of(parameter)
    if split is None or comm is None:
        return torch.tensor(True)
    held = split.held(comm.rank)
    rest = value.narrow(split.dim, held, value.shape[split.dim] - held)
    return torch.tensor(not rest.any())


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """The names of what is not the same bit for bit."""
    names = found.keys() | expected.keys()
    both = found.keys() & expected.keys()
    return sorted(name for name in names if name not in both or not found[name].equal(expected[name]))


def in_course(mode: Mode, body: Callable[[Course], Any], seed: int = 0) -> list[Any]:
    """What every rank of a run returns."""
    return run_loopback(mode.size, lambda comm: body(Course(comm, mode, seed)))


def serial(steps: int) -> dict[str, Tensor]:
    def body(course: Course) -> dict[str, Tensor]:
        course.steps(0, steps)
        return course.everything()

    return in_course(SERIAL, body)[0]


def saved_by(mode: Mode, directory: Path) -> Path:
    def body(course: Course) -> Path:
        course.steps(0, 2)
        return course.save(directory)

    return in_course(mode, body)[0]


@pytest.mark.parametrize("saver", MODES, ids=str)
def test_any_split_and_stage_goes_on_in_any_other_bit_for_bit(saver: Mode, tmp_path: Path) -> None:
    path = saved_by(saver, tmp_path)
    then, later = serial(2), serial(3)

    def resumed(course: Course) -> tuple[list[str], list[str]]:
        course.load(path)
        first = differences(course.everything(), then)
        course.steps(2, 3)
        return first, differences(course.everything(), later)

    # Half of them each, all of them in turns.
    for loader in MODES[MODES.index(saver) % 2 :: 2]:
        for rank, (loaded, stepped) in enumerate(in_course(loader, resumed, seed=1)):
            assert (loaded, stepped) == ([], []), f"rank {rank}, loaded by {loader}"


def test_what_is_loaded_elsewhere_is_saved_from_there_again(tmp_path: Path) -> None:
    path = saved_by(Mode(2, 2, 3), tmp_path / "0")
    for number, mode in enumerate((Mode(3, plain=True), Mode(1, 4, 1), Mode(4), Mode(2, 2, 2), SERIAL)):

        def through(course: Course, number: int = number, path: Path = path) -> Path:
            course.load(path)
            return course.save(tmp_path / str(number + 1))

        path = in_course(mode, through, seed=1)[0]
    assert path.parent.name == "5"
    expected = serial(2)
    for name, value in load_file(path / "model.safetensors").items():
        if name == "seen":
            continue
        *_, short = name.split(".")
        assert value.equal(expected[f"{name}/"]), short


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.tp > 1], ids=str)
def test_every_element_is_written_once_and_padding_never(mode: Mode, tmp_path: Path) -> None:
    path = saved_by(mode, tmp_path)
    written: dict[str, int] = {}
    for file in path.glob("*.safetensors"):
        if file.name.startswith("random"):
            continue
        for name, value in load_file(file).items():
            written[name] = written.get(name, 0) + value.numel()
    shapes = {f"layers.{number // 4}.{name}": math.prod(WHOLE[name][0]) for number, name in enumerate(WHOLE)}
    # Of a fused tensor each rank writes its part, the shared heads in it, too.
    del shapes["layers.0.heads"]
    for name, numel in shapes.items():
        assert written[name] == numel, name
        if "frozen" not in name:
            assert written[f"state/{name}/exp_avg"] == numel, name
            assert written[f"state/{name}/step"] == 1, name


def ranks_that_wrote(path: Path, kind: str) -> set[int]:
    return {int(file.name.split("rank")[1][:5]) for file in path.glob(f"{kind}.rank*")}


@pytest.mark.parametrize(
    ("mode", "of_model", "of_states"),
    [
        (Mode(2, 2), {0, 1}, {0, 1}),
        (Mode(2, 2, 1), {0, 1}, {0, 1, 2, 3}),
        (Mode(2, 2, 3), {0, 1, 2, 3}, {0, 1, 2, 3}),
        (Mode(1, 4), set(), set()),
    ],
    ids=str,
)
def test_the_first_replica_alone_writes_and_what_is_sharded_each_owner(
    mode: Mode, of_model: set[int], of_states: set[int], tmp_path: Path
) -> None:
    path = saved_by(mode, tmp_path)
    assert ranks_that_wrote(path, "model") == of_model
    assert ranks_that_wrote(path, "optimizer") == of_states


def test_a_rank_of_the_same_split_reads_what_is_its_own_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = Mode(2, 2, 3)
    path = saved_by(mode, tmp_path)
    read: dict[int, int] = {}
    flat = ShardReader.flat

    def counted(self: ShardReader, file: str, name: str, start: int, stop: int) -> Tensor:
        read[id(self)] = read.get(id(self), 0) + (stop - start if "rank" in file else 0)
        return flat(self, file, name, start, stop)

    monkeypatch.setattr(ShardReader, "flat", counted)

    def owned(course: Course) -> int:
        course.load(path)
        assert isinstance(course.optimizer, DistributedOptimizer)
        sharding = course.optimizer.sharding
        assert sharding is not None
        kept = sum(piece.stop - piece.start for piece, _ in sharding.own_pieces())
        return kept + 2 * sum(piece.stop - piece.start for piece, _ in course.optimizer.own_states())

    elements = in_course(mode, owned, seed=1)
    # Less the padding of two parameters and their states; and the number of steps of each parameter.
    for found, most in zip(sorted(read.values()), sorted(elements), strict=True):
        assert most - 3 * 6 <= found <= most + len(WHOLE)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_master_weights_follow_their_parameters_split(stage: int, tmp_path: Path) -> None:
    def saved(course: Course) -> tuple[Path, dict[str, Tensor]]:
        course.steps(0, 2)
        return course.save(tmp_path), course.everything()

    path, then = in_course(Mode(2, 2, stage, "bfloat16"), saved)[0]

    def loaded(course: Course) -> dict[str, Tensor]:
        course.load(path)
        return course.everything()

    for loader in (Mode(4, 1, 1, "bfloat16"), Mode(1, 2, 3, "bfloat16"), Mode(2, 1, 0, "bfloat16")):
        for found in in_course(loader, loaded, seed=1):
            assert differences(found, then) == []
    masters = [name for name in then if name.endswith("/master_weight")]
    assert len(masters) == len(WHOLE) - 1
    for found in in_course(Mode(3, plain=True), loaded, seed=1):
        for name in masters:
            value = found[f"{name.removesuffix('master_weight')}"]
            assert value.equal(then[name].double())
            assert not value.equal(value.bfloat16())


def test_a_model_of_another_whole_shape_is_named_by_whole_shapes(tmp_path: Path) -> None:
    path = saved_by(Mode(2, 2, 1), tmp_path)

    def body(course: Course) -> tuple[str, bool]:
        parameter = course.model.layers[0].gate_up
        split = split_sections((6, 6), 4)
        other = nn.Parameter(torch.zeros(split.shard_shape((12, 3), course.comm.rank), dtype=torch.float64))
        place(other, split, comm_of(parameter))
        course.model.layers[0].gate_up = other
        before = [p.detach().clone() for p in course.model.parameters()]
        with pytest.raises(PeerFailedError) as caught:
            load(path, model=course.model, comm=course.comm)
        return str(caught.value), all(map(torch.equal, before, course.model.parameters()))

    for message, unchanged in in_course(Mode(4, plain=True), body, seed=1):
        assert "gate_up there is (14, 3) torch.float64, in the model (12, 3) torch.float64" in message
        assert unchanged


def test_a_parameter_that_is_not_of_its_splits_shape_is_refused(tmp_path: Path) -> None:
    def body(course: Course) -> None:
        bias = course.model.layers[1].gate_up_bias
        place(bias, split_evenly(10, 2), comm_of(bias))
        course.save(tmp_path)

    with pytest.raises(PeerFailedError, match=r"of shape \(8,\) should have \(5,\), as rank 0 of 2's shard"):
        in_course(Mode(2, plain=True), body)


def test_one_damaged_part_is_named_on_all_ranks_and_nothing_changes(tmp_path: Path) -> None:
    path = saved_by(Mode(2, 2, 1), tmp_path)
    file = path / "optimizer.rank00003.000.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)

    def body(course: Course) -> tuple[str, list[str]]:
        before = course.everything()
        with pytest.raises(PeerFailedError) as caught:
            course.load(path)
        return str(caught.value), differences(course.everything(), before)

    for message, changed in in_course(Mode(4), body, seed=1):
        assert file.name in message
        assert changed == []


def test_the_ranks_of_one_axis_cannot_save_for_the_others(tmp_path: Path) -> None:
    def body(course: Course) -> str:
        with pytest.raises((CheckpointError, PeerFailedError)) as caught:
            save(tmp_path, step=0, model=course.model, optimizer=course.optimizer, comm=course.dp_comm)
        return str(caught.value)

    for message in in_course(Mode(2, 2, 1), body):
        assert "sharded over the 2 ranks of 'dp' and split over the 2 ranks of 'tp'" in message
        assert "saved by the 2 of 'dp'; pass the communicator of all 4" in message
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_cannot_be_split_is_refused_and_named(tmp_path: Path) -> None:
    class Factored(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["row_sums"] = torch.zeros(2)

    def body(course: Course) -> None:
        course.optimizer = Factored(course.model.parameters(), lr=0.1)
        course.optimizer.step()
        course.save(tmp_path)

    with pytest.raises(
        PeerFailedError, match=r"row_sums of layers\.0\.embed, which is split, has shape \(2,\)"
    ):
        in_course(Mode(2, plain=True), body)


class Streams:
    """Two generators, one of them the same on all ranks."""

    def __init__(self, rank: int) -> None:
        self.generators = {
            "same": torch.Generator().manual_seed(7),
            "own/one": torch.Generator().manual_seed(8 + rank),
        }

    def state_dict(self) -> dict[str, Tensor]:
        return {name: generator.get_state() for name, generator in self.generators.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        assert state.keys() == self.generators.keys()
        for name, generator in self.generators.items():
            generator.set_state(state[name])

    def draw(self) -> list[float]:
        return [torch.rand(1, generator=generator).item() for generator in self.generators.values()]


def give_streams(model: nn.Module, rank: int) -> list[Streams]:
    """One that two modules share, and one of its own."""
    shared, own = Streams(rank), Streams(100 + rank)
    for layer, streams in zip(model.layers, (shared, own, shared), strict=True):
        layer.random_streams = streams
    return [shared, own]


@pytest.mark.parametrize(
    ("loader", "are_restored"),
    [(Mode(2, 2, 1), True), (Mode(4), False), (Mode(2, 1), False), (SERIAL, False)],
)
def test_random_streams_go_on_in_the_same_place_and_are_left_alone_in_another(
    loader: Mode, are_restored: bool, tmp_path: Path
) -> None:
    def saved(course: Course) -> tuple[Path, list[list[float]]]:
        streams = give_streams(course.model, course.comm.rank)
        for number, each in enumerate(streams):
            for _ in range(3 + number):
                each.draw()
        return course.save(tmp_path), [each.draw() for each in streams]

    results = in_course(Mode(2, 2), saved)
    path = results[0][0]

    def loaded(course: Course) -> tuple[bool, list[list[float]], list[list[float]]]:
        streams = give_streams(course.model, 50 + course.comm.rank)
        found = load(path, model=course.model, comm=course.comm)
        fresh = [Streams(50 + course.comm.rank).draw(), Streams(150 + course.comm.rank).draw()]
        return found.random_restored, [each.draw() for each in streams], fresh

    for rank, (restored, drawn, fresh) in enumerate(in_course(loader, loaded)):
        assert restored == are_restored
        assert drawn == (results[rank][1] if are_restored else fresh)


def test_streams_that_a_checkpoint_does_not_know_stay_as_they_are(tmp_path: Path) -> None:
    path = saved_by(Mode(2), tmp_path)

    def loaded(course: Course) -> tuple[bool, list[list[float]], list[list[float]]]:
        streams = give_streams(course.model, course.comm.rank)
        restored = load(path, model=course.model, comm=course.comm).random_restored
        fresh = [Streams(course.comm.rank).draw(), Streams(100 + course.comm.rank).draw()]
        return restored, [each.draw() for each in streams], fresh

    for restored, drawn, fresh in in_course(Mode(2), loaded):
        assert restored
        assert drawn == fresh


def test_the_description_of_parts_can_be_read_by_people(tmp_path: Path) -> None:
    path = saved_by(Mode(2), tmp_path)
    record = json.loads((path / "pieces.json").read_text())["model"]["layers.0.gate_up"]
    assert (record["dtype"], record["shape"]) == ("float64", [14, 3])
    assert [part["ranges"] for part in record["parts"]] == [
        [[[0, 4], [7, 11]], [[0, 3]]],
        [[[4, 7], [11, 14]], [[0, 3]]],
    ]
    files = [f"model.rank0000{rank}.000.safetensors" for rank in range(2)]
    assert [part["pieces"] for part in record["parts"]] == [[[files[0], 0, 24]], [[files[1], 0, 18]]]


@pytest.mark.mpi
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_splits_and_stages_over_mpi_go_on_in_each_other(
    world: Communicator, stage: int, tmp_path: Path
) -> None:
    directory = Path(world.broadcast_object(str(tmp_path)))
    then, later = serial(2), serial(3)
    halves = 2 if world.size % 2 == 0 else 1
    saver = Course(world, Mode(halves, world.size // halves, stage))
    saver.steps(0, 2)
    path = saver.save(directory)
    wrong = []
    for mode in (
        Mode(halves, world.size // halves, (stage + 1) % 4),
        Mode(world.size, 1, stage),
        Mode(1, world.size, stage),
    ):
        course = Course(world, mode, seed=1)
        course.load(path)
        wrong += differences(course.everything(), then)
        course.steps(2, 3)
        wrong += differences(course.everything(), later)
    again = Course(world, Mode(1, world.size)).save(directory / "again")
    assert again.name == path.name
    assert world.allgather_object(wrong) == [[]] * world.size
