"""A checkpoint of any pipeline, with any stage of ZeRO and any split, goes on in any other.

Every gradient is told, in numbers that sum exactly on 1, 2 and 4 ranks, so that all runs are to have the
serial one's bits. The embedding is the head, too: where two ranks have them, each has its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hpcpar.checkpoint import Loaded, load, save
from hpcpar.checkpoint.model_state import ModelState
from hpcpar.checkpoint.ownership import PipelinePositions, RankContents
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, fully_shard, summon_full_parameters
from hpcpar.errors import PeerFailedError
from hpcpar.partition import bounds
from hpcpar.tensor_parallel.split import Split, gather_whole, own_shard, place, split_evenly

LAYERS = 4
VOCABULARY = 5
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
UP = "model.layers.2.up.weight"
TIED = {HEAD: EMBED}

SHAPES: dict[str, tuple[int, ...]] = {
    EMBED: (VOCABULARY, 3),
    HEAD: (VOCABULARY, 3),
    NORM: (3,),
    **{f"model.layers.{n}.up.weight": (4, 3) for n in range(LAYERS)},
    **{f"model.layers.{n}.down.weight": (3, 4) for n in range(LAYERS)},
    # Whoever has only the layers between has no vector, and an empty group.
    **{f"model.layers.{n}.norm.weight": (3,) for n in (0, LAYERS - 1)},
}

Layers = tuple[int, ...]
Placement = tuple[Layers, ...]
"""The layers of each pipeline rank; the embedding is before the first, the head after the last."""

WHOLE: Placement = ((0, 1, 2, 3),)
TWO: Placement = ((0, 1), (2, 3))
V: Placement = ((0, 3), (1, 2))
TURNED: Placement = ((2, 3), (0, 1))
INTERLEAVED: Placement = ((0, 2), (1, 3))
THREE: Placement = ((0,), (1, 2), (3,))
IDLE: Placement = ((0, 1, 2, 3), ())


def way(name: str, ranks: int) -> Split | None:
    """How a parameter is split, as by vocabulary- and column- and row-parallel layers."""
    if len(SHAPES[name]) == 1:
        return None
    if name in (EMBED, HEAD):
        return split_evenly(VOCABULARY, ranks, padded=-(-VOCABULARY // ranks) * ranks)
    return split_evenly(4, ranks, dim=1 if "down" in name else 0)


def whole_value(name: str, seed: int) -> Tensor:
    number = list(SHAPES).index(TIED.get(name, name))
    generator = torch.Generator().manual_seed(100 * seed + number)
    return torch.randint(-64, 65, SHAPES[name], generator=generator, dtype=torch.float64) / 64


class Stages(nn.Module):
    """What a pipeline rank has of the model, under the names of the whole one."""

    def __init__(
        self,
        layers: Layers,
        *,
        tp_comm: Communicator | None = None,
        seed: int = 0,
        tied: bool = True,
        without: Sequence[str] = (),
        apart: bool = False,
    ) -> None:
        super().__init__()
        self.tied_names = TIED if tied else {}
        self.tp_comm, self.seed = tp_comm, seed
        names = [name for name in SHAPES if self._stage_of(name) in layers and name not in without]
        for name in names:
            self._hold(name, self._made(name))
        if {EMBED, HEAD} <= set(names) and tied and not apart:
            self.lm_head.weight = self.model.embed_tokens.weight
        for number in layers:
            self.get_submodule(f"model.layers.{number}").register_buffer("calls", torch.tensor(number))
        self.register_buffer("steps_done", torch.tensor(0))

    def _stage_of(self, name: str) -> int:
        ends = {EMBED: 0, HEAD: LAYERS - 1, NORM: LAYERS - 1}
        return ends[name] if name in ends else int(name.split(".")[2])

    def _hold(self, name: str, parameter: nn.Parameter) -> None:
        *path, last = name.split(".")
        module: nn.Module = self
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, parameter)

    def _made(self, name: str) -> nn.Parameter:
        value = whole_value(name, self.seed)
        split = None if self.tp_comm is None else way(name, self.tp_comm.size)
        if split is None or self.tp_comm is None:
            return nn.Parameter(value)
        parameter = nn.Parameter(split.shard(value, self.tp_comm.rank))
        place(parameter, split, self.tp_comm)
        return parameter

    def forward(self, step: int) -> Tensor:
        self.steps_done += 1
        total = torch.zeros((), dtype=torch.float64, requires_grad=True)
        for name, parameter in self.named_parameters():
            gradient = own_shard(parameter, whole_value(name, 1000 + step)).to(parameter.dtype)
            total = total + (parameter * gradient).sum()
        return total


class Mode(NamedTuple):
    """How a run is spread over ranks; `plain` has an optimizer of torch itself, and no dp communicator."""

    placement: Placement
    tp: int = 1
    dp: int = 1
    stage: int = 0
    precision: str | None = None
    plain: bool = False

    @property
    def size(self) -> int:
        return len(self.placement) * self.tp * self.dp

    def __str__(self) -> str:
        placement = " ".join("".join(map(str, layers)) or "-" for layers in self.placement)
        extra = [self.precision or "", "plain" if self.plain else ""]
        return " ".join([f"[{placement}] tp{self.tp} dp{self.dp} zero{self.stage}", *filter(None, extra)])


SERIAL = Mode(WHOLE, plain=True)

MODES = [
    SERIAL,
    Mode(TWO, plain=True),
    Mode(V, tp=2, plain=True),
    Mode(IDLE, plain=True),
    Mode(TWO, dp=2, stage=1),
    Mode(V, dp=2, stage=2),
    Mode(TURNED, dp=2),
    Mode(INTERLEAVED, tp=2, stage=1),
    Mode(THREE, dp=2, stage=1),
    Mode(TWO, tp=2, dp=2, stage=1),
    Mode(WHOLE, tp=2, dp=2, stage=3),
    Mode(THREE, stage=2, precision="float64"),
    Mode(IDLE, dp=2, stage=1),
]


class Course:
    """One rank's model and optimizer, and the steps that it takes."""

    def __init__(self, comm: Communicator, mode: Mode, seed: int = 0, **of_model: Any) -> None:
        self.comm = comm
        stages, self.pp_rank = mode.tp * mode.dp, comm.rank // (mode.tp * mode.dp)
        tp_comm = comm.split(comm.rank // mode.tp, name="tp")
        self.dp_comm = comm.split(self.pp_rank * stages + comm.rank % mode.tp, name="dp")
        assert self.dp_comm is not None
        self.model = Stages(
            mode.placement[self.pp_rank], tp_comm=tp_comm if mode.tp > 1 else None, seed=seed, **of_model
        )
        if mode.stage == 3:
            fully_shard(self.model, self.dp_comm)
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
                precision=mode.precision,
                bucket_bytes=200,
                first_bucket_bytes=100,
            )

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.model(step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, directory: Path, comm: Communicator | None = None) -> Path:
        return save(directory, step=2, model=self.model, optimizer=self.optimizer, comm=comm or self.comm)

    def load(self, path: Path, **options: Any) -> Loaded:
        return load(path, model=self.model, optimizer=self.optimizer, comm=self.comm, **options)

    def everything(self) -> dict[str, Tensor]:
        """This rank's parameters and their states as wholes, by the names that the serial model has first."""
        states = self.optimizer.state_dict()["state"]
        numbers = [p for group in self.optimizer.param_groups for p in group["params"]]
        found = {name: value.clone() for name, value in self.model.named_buffers()}
        with summon_full_parameters(self.model):
            for name, parameter in self.model.named_parameters():
                number = next((n for n, other in enumerate(numbers) if other is parameter), -1)
                for key, value in {"": parameter.detach(), **states.get(number, {})}.items():
                    of_elements = value.dim() > 0
                    whole = gather_whole(parameter, value) if of_elements else value.clone()
                    found[f"{TIED.get(name, name)}/{key}"] = whole
        return found


def in_course(mode: Mode, body: Callable[[Course], Any], **of_course: Any) -> list[Any]:
    """What every rank of a run returns."""
    return run_loopback(mode.size, lambda comm: body(Course(comm, mode, **of_course)))


@cache
def serial(steps: int) -> dict[str, Tensor]:
    def body(course: Course) -> dict[str, Tensor]:
        course.steps(0, steps)
        return course.everything()

    return in_course(SERIAL, body)[0]


def saved_by(mode: Mode, directory: Path, **of_course: Any) -> Path:
    def body(course: Course) -> Path:
        course.steps(0, 2)
        return course.save(directory)

    return in_course(mode, body, **of_course)[0]


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """The names of what is not the same bit for bit."""
    return [name for name in found if name not in expected or not found[name].equal(expected[name])]


def failure(mode: Mode, body: Callable[[Course], Any], missing: dict[int, list[str]] | None = None) -> str:
    """What all ranks are told, the same, when a body fails; their models are as before.

    missing   of each rank, the parameters that it lacks
    """

    def failing(comm: Communicator) -> str:
        course = Course(comm, mode, seed=1, without=(missing or {}).get(comm.rank, []))
        before = course.everything()
        with pytest.raises(PeerFailedError) as caught:
            body(course)
        assert differences(course.everything(), before) == []
        return str(caught.value)

    messages = run_loopback(mode.size, failing)
    assert len(set(messages)) == 1
    return messages[0]


# --- from any to any ------------------------------------------------------------------------------


@pytest.mark.parametrize("saver", MODES, ids=str)
def test_any_pipeline_goes_on_in_any_other_bit_for_bit(saver: Mode, tmp_path: Path) -> None:
    path = saved_by(saver, tmp_path)
    then, later = serial(2), serial(3)

    def resumed(course: Course) -> tuple[list[str], list[str], set[str]]:
        course.load(path, restore_random=False)
        first = course.everything()
        course.steps(2, 3)
        return differences(first, then), differences(course.everything(), later), set(first)

    # Some of them each, all of them in turns.
    for loader in MODES[MODES.index(saver) % 4 :: 4]:
        results = in_course(loader, resumed, seed=1)
        for rank, (loaded, stepped, _) in enumerate(results):
            assert (loaded, stepped) == ([], []), f"rank {rank}, loaded by {loader}"
        assert set().union(*(names for _, _, names in results)) == set(then)


@pytest.mark.parametrize("saver", [SERIAL, Mode(THREE, dp=2, stage=1)], ids=str)
def test_what_is_not_tied_stays_two(saver: Mode, tmp_path: Path) -> None:
    def saved(course: Course) -> Path:
        with torch.no_grad():
            for name, parameter in course.model.named_parameters():
                parameter.fill_(list(SHAPES).index(name))
        return course.save(tmp_path)

    path = in_course(saver, saved, tied=False)[0]

    def loaded(course: Course) -> list[str]:
        course.load(path)
        return [
            name
            for name, parameter in course.model.named_parameters()
            if not gather_whole(parameter).eq(list(SHAPES).index(name)).all()
        ]

    for loader in (SERIAL, Mode(TWO, tp=2), Mode(V, dp=2, stage=2)):
        assert in_course(loader, loaded, seed=1, tied=False) == [[]] * loader.size


@pytest.mark.parametrize("placement", [TWO, V, TURNED])
def test_master_weights_follow_their_layers(placement: Placement, tmp_path: Path) -> None:
    def saved(course: Course) -> tuple[Path, dict[str, Tensor]]:
        course.steps(0, 2)
        return course.save(tmp_path), course.everything()

    results = in_course(Mode(placement, dp=2, stage=1, precision="bfloat16"), saved)
    path = results[0][0]
    then = {name: value for _, found in results for name, value in found.items()}
    masters = {name: value for name, value in then.items() if name.endswith("/master_weight")}
    assert len(masters) == len(SHAPES) - 1

    def loaded(course: Course) -> dict[str, Tensor]:
        course.load(path)
        return course.everything()

    for loader in (Mode(WHOLE, precision="bfloat16"), Mode(THREE, tp=2, stage=2, precision="bfloat16")):
        for found in in_course(loader, loaded, seed=1):
            assert differences(found, then) == []
    for found in in_course(Mode(INTERLEAVED, plain=True), loaded, seed=1):
        for name, value in found.items():
            if name.endswith("/"):
                master = masters[f"{name}master_weight"]
                assert value.equal(master.double())
                assert not value.equal(value.bfloat16())


class FormatsModel(nn.Module):
    """The half that a rank has of the model in format_1/ and format_2/."""

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
    path = Path(__file__).parent / f"format_{number}" / "step-00000003"

    def body(comm: Communicator) -> tuple[bool, dict[str, Tensor], dict[str, Tensor]]:
        model = FormatsModel(comm.rank)
        optimizer = torch.optim.AdamW(model.parameters())
        restored = load(path, model=model, optimizer=optimizer, comm=comm).random_restored
        moments = {n: optimizer.state[p].get("exp_avg") for n, p in model.named_parameters()}
        return restored, dict(model.named_parameters()), moments

    (restored, first, first_moments), (_, second, moments) = run_loopback(2, body)
    assert not restored
    assert first["embed.weight"].equal(second["tied.weight"])
    assert first_moments["embed.weight"].abs().sum() > 0
    assert first_moments["embed.weight"].equal(moments["tied.weight"])
    assert moments["head.bias"].shape == (5,)
    assert second["frozen"].tolist() == [0.5, 2.0, -1.0]


# --- what is in the files -------------------------------------------------------------------------


def in_files(path: Path, kind: str) -> list[tuple[str, Tensor]]:
    return [item for file in sorted(path.glob(f"{kind}.*")) for item in load_file(file).items()]


@pytest.mark.parametrize("placement", [TWO, V, TURNED, THREE, IDLE])
def test_whole_tensors_are_the_same_whoever_saved_them(placement: Placement, tmp_path: Path) -> None:
    expected = saved_by(SERIAL, tmp_path / "serial")
    path = saved_by(Mode(placement, plain=True), tmp_path / "pipeline")
    for kind in ("model", "optimizer"):
        found, wanted = in_files(path, kind), dict(in_files(expected, kind))
        assert sorted(name for name, _ in found) == sorted(wanted)
        assert [name for name, value in found if not value.equal(wanted[name])] == []
    state, wanted_state = (json.loads((each / "state.json").read_text()) for each in (path, expected))
    assert state["aliases"] == wanted_state["aliases"] == TIED
    for group, wanted_group in zip(
        state["optimizer"]["groups"], wanted_state["optimizer"]["groups"], strict=True
    ):
        assert sorted(group["parameters"]) == sorted(wanted_group["parameters"])
        assert group["options"] == wanted_group["options"]


def test_of_two_by_two_ranks_the_first_of_each_position_writes_what_it_has(tmp_path: Path) -> None:
    path = saved_by(Mode(TWO, dp=2), tmp_path)
    names = {file.name: set(load_file(file)) for file in path.glob("model.*")}
    assert sorted(names) == ["model.rank00002.000.safetensors", "model.safetensors"]
    assert names["model.safetensors"] == {
        EMBED,
        "steps_done",
        "model.layers.0.norm.weight",
        *(f"model.layers.{n}.{what}" for n in (0, 1) for what in ("up.weight", "down.weight", "calls")),
    }
    assert names["model.rank00002.000.safetensors"] == {
        NORM,
        "model.layers.3.norm.weight",
        *(f"model.layers.{n}.{what}" for n in (2, 3) for what in ("up.weight", "down.weight", "calls")),
    }


def test_all_owners_of_a_position_write_their_pieces_and_of_a_tie_only_the_first_names(
    tmp_path: Path,
) -> None:
    path = saved_by(Mode(TURNED, tp=2, dp=2, stage=1), tmp_path)
    written: dict[str, list[tuple[int, int]]] = {}
    for file in path.glob("optimizer.rank*"):
        for name, value in load_file(file).items():
            written.setdefault(name, []).append((int(file.name.split("rank")[1][:5]), value.numel()))
    assert len(list(path.glob("optimizer.rank*"))) == 8
    for name, shape in SHAPES.items():
        pieces = written.get(f"state/{name}/exp_avg", [])
        assert sum(numel for _, numel in pieces) == (0 if name == HEAD else math.prod(shape)), name
    # The head, which ranks 0 to 3 have, is the embedding of ranks 4 to 7.
    assert {rank for rank, _ in written[f"state/{EMBED}/exp_avg"]} <= {4, 5, 6, 7}


def test_both_ends_of_a_tie_may_be_tensors_of_one_rank(tmp_path: Path) -> None:
    saver = Mode(V, dp=2, stage=1)
    path = saved_by(saver, tmp_path, apart=True)
    assert EMBED in dict(in_files(path, "model"))
    assert HEAD not in dict(in_files(path, "model"))

    def loaded(course: Course) -> tuple[list[str], bool]:
        course.load(path)
        values = dict(course.model.named_parameters())
        equal = EMBED not in values or values[EMBED].equal(values.get(HEAD, values[EMBED]))
        return differences(course.everything(), serial(2)), equal

    for loader, apart in ((saver, True), (saver, False), (SERIAL, False), (Mode(WHOLE, dp=2), True)):
        assert in_course(loader, loaded, seed=1, apart=apart) == [([], True)] * loader.size


def test_of_two_ends_on_one_rank_the_one_with_the_first_name_is_written() -> None:
    turned = nn.Module()
    turned.lm_head = nn.Linear(2, 2, bias=False)
    turned.embed_tokens = nn.Linear(2, 2, bias=False)
    turned.tied_names = {"lm_head.weight": "embed_tokens.weight"}
    state = ModelState(turned)
    assert [state.name_of(each) for each in state.tensors] == ["embed_tokens.weight"] * 2
    (copy,) = state.copies
    assert copy is turned.lm_head.weight


def test_a_further_name_that_a_checkpoint_does_not_know_is_found_by_its_first(tmp_path: Path) -> None:
    path = saved_by(Mode(TWO), tmp_path, tied=False, without=[HEAD])
    assert json.loads((path / "state.json").read_text())["aliases"] == {}

    def loaded(course: Course) -> list[str]:
        course.load(path)
        return differences(course.everything(), serial(2))

    for loader in (SERIAL, Mode(TWO, dp=2, stage=1), Mode(V)):
        assert in_course(loader, loaded, seed=1) == [[]] * loader.size


# --- who has what ---------------------------------------------------------------------------------


def test_ranks_with_the_same_layers_are_in_one_position() -> None:
    placement = ((0, 3), (1, 2), (0, 3), (1, 2))

    def body(comm: Communicator) -> PipelinePositions:
        names = ModelState(Stages(placement[comm.rank])).names
        return PipelinePositions.agree(RankContents(names, None), comm, "looking")

    for positions in run_loopback(4, body):
        assert positions.of_ranks == (0, 1, 0, 1)
        assert [positions.first_rank(number) for number in (0, 1)] == [0, 1]
        assert positions.aliases == TIED
        buffers = {"steps_done", *(f"model.layers.{n}.calls" for n in range(LAYERS))}
        assert set(positions.names) == {*SHAPES, *buffers}
        assert [positions.writes(position, EMBED) for position in (0, 1)] == [True, False]
        assert [positions.writes(position, "model.layers.2.up.weight") for position in (0, 1)] == [
            False,
            True,
        ]


def test_a_layer_that_no_rank_has_is_missing_and_named(tmp_path: Path) -> None:
    path = saved_by(SERIAL, tmp_path)
    message = failure(Mode(TWO), lambda course: course.load(path), {1: [UP]})
    assert f"1 tensors that the model does not have, the first is {UP}" in message
    part = saved_by(Mode(TWO), tmp_path / "part", without=[UP])
    message = failure(Mode(V, dp=2, stage=1), lambda course: course.load(part))
    assert f"1 tensors missing, the first is {UP}" in message


def test_a_shape_that_is_another_on_one_rank_changes_nothing_on_any(tmp_path: Path) -> None:
    path = saved_by(SERIAL, tmp_path)

    def body(course: Course) -> None:
        other = Stages((2, 3), seed=1)
        other.model.norm.weight = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        load(path, model=other if course.comm.rank else course.model, comm=course.comm)

    message = failure(Mode(TWO), body)
    assert "model.norm.weight there is (3,) torch.float64, in the model (4,) torch.float64" in message


def test_a_pipeline_without_one_of_its_ranks_cannot_load(tmp_path: Path) -> None:
    path = saved_by(Mode(TWO, dp=2, stage=1), tmp_path)
    halves: Placement = ((0, 1), (0, 1))
    message = failure(Mode(halves), lambda course: course.load(path))
    assert "8 tensors that the model does not have, the first is model.norm.weight" in message


@pytest.mark.parametrize("doing", ["save", "load"])
def test_a_replica_that_lacks_a_name_is_told_which(doing: str, tmp_path: Path) -> None:
    path = saved_by(SERIAL, tmp_path / "whole")

    def body(course: Course) -> None:
        course.save(tmp_path) if doing == "save" else course.load(path)

    message = failure(Mode(TWO, dp=2, plain=True), body, {3: [UP]})
    assert f"but only rank 2 has {UP}" in message
    assert [each.name for each in tmp_path.iterdir()] == ["whole"]


def test_the_shards_of_every_position_are_to_be_there(tmp_path: Path) -> None:
    def body(comm: Communicator) -> str:
        course = Course(comm, Mode(TWO, dp=2, stage=1))
        first_three = comm.split(0 if comm.rank < 3 else None, name="first three")
        if first_three is None:
            return ""
        with pytest.raises(PeerFailedError) as caught:
            course.save(tmp_path, first_three)
        return str(caught.value)

    messages = run_loopback(4, body)[:3]
    for message in messages:
        assert "sharded over the 2 ranks of 'dp'" in message
        assert "by 1 of the 3 of 'first three', which have the same layers" in message
    assert list(tmp_path.iterdir()) == []


def test_a_parameter_of_two_positions_is_told_as_tied_to_its_own_name(tmp_path: Path) -> None:
    overlapping: Placement = ((0, 1, 2), (2, 3))
    message = failure(Mode(overlapping), lambda course: course.save(tmp_path))
    assert "ranks 0 and 1 both have model.layers.2.up.weight, but only rank 0 has" in message

    def told(course: Course) -> Path:
        course.model.tied_names = {**TIED, **{name: name for name in SHAPES if ".2." in name}}
        course.steps(0, 2)
        return course.save(tmp_path)

    path = in_course(Mode(overlapping), told)[0]
    names = [name for name, _ in in_files(path, "model")]
    assert names.count(UP) == 1

    def loaded(course: Course) -> list[str]:
        course.load(path)
        return differences(course.everything(), serial(2))

    assert in_course(SERIAL, loaded, seed=1) == [[]]


def test_ranks_that_are_tied_in_other_ways_are_told(tmp_path: Path) -> None:
    def other_ends(course: Course) -> None:
        course.model.tied_names = {HEAD: EMBED if course.comm.rank else UP}
        course.save(tmp_path)

    message = failure(Mode(TWO), other_ends)
    assert f"{HEAD} is the same as {UP} on some ranks, as {EMBED} on others" in message

    def in_a_ring(course: Course) -> None:
        course.model.tied_names = {HEAD: EMBED, EMBED: HEAD}
        course.save(tmp_path)

    assert "tied to itself by way of" in failure(Mode(TWO), in_a_ring)


# --- the optimizer's groups -----------------------------------------------------------------------


@pytest.mark.parametrize("doing", ["save", "load"])
def test_optimizers_that_do_not_make_one_are_refused(doing: str, tmp_path: Path) -> None:
    path = saved_by(SERIAL, tmp_path)

    def refused(change: Callable[[Course], None], mode: Mode) -> str:
        def body(course: Course) -> None:
            if course.comm.rank == mode.size - 1:
                change(course)
            options: dict[str, Any] = {"optimizer": course.optimizer, "comm": course.comm}
            if doing == "save":
                save(tmp_path / "new", step=0, model=course.model, **options)
            else:
                load(path, model=course.model, **options)

        return failure(mode, body)

    def with_groups(*groups: Sequence[int]) -> Callable[[Course], None]:
        def change(course: Course) -> None:
            parameters = list(course.model.parameters())
            course.optimizer = torch.optim.AdamW(
                [{"params": [parameters[n] for n in group]} for group in groups]
            )

        return change

    both = "has an optimizer with 2 groups, rank 1 has an optimizer with 1 groups; give all the same number"
    assert both in refused(with_groups(range(7)), Mode(TWO, plain=True))
    # The head, which is the embedding, comes first.
    message = refused(with_groups(range(1, 6), [0, 6]), Mode(TWO, plain=True))
    assert f"{EMBED} is in group 0 of the optimizer on some ranks, in group 1 on others" in message
    message = refused(with_groups([0, 1], [2]), Mode(TWO, dp=2, plain=True))
    assert "this rank's optimizer has other groups than that of rank 2" in message
    assert not (tmp_path / "new").exists()


def test_options_that_differ_between_positions_are_refused_and_named(tmp_path: Path) -> None:
    def body(course: Course) -> None:
        course.optimizer.param_groups[1]["lr"] = 0.5 - 0.25 * course.comm.rank
        course.save(tmp_path)

    assert "lr of group 1 = 0.5 on rank 0, 0.25 on rank 1" in failure(Mode(TWO, plain=True), body)
    assert list(tmp_path.iterdir()) == []


def test_an_optimizer_on_some_ranks_only_is_refused(tmp_path: Path) -> None:
    def body(course: Course) -> None:
        optimizer = course.optimizer if course.comm.rank else None
        save(tmp_path, step=0, model=course.model, optimizer=optimizer, comm=course.comm)

    message = failure(Mode(TWO, plain=True), body)
    assert "rank 0 has no optimizer, rank 1 has an optimizer with 2 groups" in message


def test_every_rank_gets_the_options_of_its_groups_also_of_empty_ones(tmp_path: Path) -> None:
    def saved(course: Course) -> Path:
        for number, group in enumerate(course.optimizer.param_groups):
            group["lr"] = 0.25 * (number + 1)
        return course.save(tmp_path)

    path = in_course(Mode(TWO, plain=True), saved)[0]

    def loaded(course: Course) -> list[float]:
        if course.comm.size == 1:
            course.optimizer.add_param_group({"params": [], "lr": 7.0})
        course.load(path)
        return [group["lr"] for group in course.optimizer.param_groups]

    assert in_course(Mode(V, plain=True), loaded) == [[0.25, 0.5]] * 2
    assert in_course(SERIAL, loaded) == [[0.25, 0.5, 7.0]]


def test_names_that_torch_keeps_in_groups_are_each_ranks_own(tmp_path: Path) -> None:
    def named(course: Course) -> list[str]:
        course.optimizer = torch.optim.AdamW(course.model.named_parameters())
        return course.optimizer.param_groups[0]["param_names"]

    def saved(course: Course) -> Path:
        named(course)
        return course.save(tmp_path)

    path = in_course(Mode(TWO, plain=True), saved)[0]

    def kept(course: Course) -> bool:
        before = list(named(course))
        course.load(path)
        return course.optimizer.param_groups[0]["param_names"] == before

    assert in_course(Mode(V, plain=True), kept) == [True, True]


# --- random numbers -------------------------------------------------------------------------------


class Streams:
    """A generator that a model brings along."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def state_dict(self) -> dict[str, Tensor]:
        return {"own": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.generator.set_state(state["own"])

    def draw(self) -> float:
        return torch.rand(1, generator=self.generator).item()


@pytest.mark.parametrize(
    ("loader", "are_restored"),
    [
        (Mode(TWO, dp=2, stage=1), [True] * 4),
        (Mode(TURNED, dp=2), [False] * 4),
        (Mode(V, dp=2), [False] * 4),
        (Mode(((0, 1), (0, 1), (2, 3), (2, 3))), [True] * 4),
        (Mode(TWO, tp=2), [False] * 4),
        (Mode(TWO), [False] * 2),
        (SERIAL, [False]),
    ],
    ids=str,
)
def test_random_streams_go_on_where_the_same_layers_are(
    loader: Mode, are_restored: list[bool], tmp_path: Path
) -> None:
    def saved(course: Course) -> tuple[Path, float]:
        course.model.random_streams = Streams(course.comm.rank)
        course.model.random_streams.draw()
        return course.save(tmp_path), course.model.random_streams.draw()

    results = in_course(Mode(TWO, dp=2), saved)

    def loaded(course: Course) -> tuple[bool, float]:
        course.model.random_streams = Streams(50 + course.comm.rank)
        found = course.load(results[0][0])
        return found.random_restored, course.model.random_streams.draw()

    for rank, found in enumerate(in_course(loader, loaded)):
        drawn = results[rank][1] if are_restored[rank] else Streams(50 + rank).draw()
        assert found == (are_restored[rank], drawn)


def test_a_processs_own_random_numbers_stay_where_other_layers_come(tmp_path: Path) -> None:
    path = saved_by(Mode(TWO), tmp_path)
    for mode, are_restored in (
        (Mode(TWO, dp=2), [True, False]),
        (Mode(THREE), [False] * 3),
        (SERIAL, [False]),
    ):
        found = in_course(mode, lambda course: course.load(path).random_restored)
        assert found[: len(are_restored)] == are_restored, mode


@pytest.mark.mpi
def test_pipelines_over_mpi_go_on_in_each_other(world: Communicator, tmp_path: Path) -> None:
    directory = Path(world.broadcast_object(str(tmp_path)))
    even: Placement = tuple(tuple(range(*edges)) for edges in bounds(LAYERS, world.size))
    dealt: Placement = tuple(tuple(range(rank, LAYERS, world.size)) for rank in range(world.size))
    saver = Course(world, Mode(even, plain=True))
    saver.steps(0, 2)
    path = saver.save(directory)
    wrong = []
    for mode in (Mode(dealt, plain=True), Mode(WHOLE, dp=world.size, stage=1), Mode(even[::-1], plain=True)):
        course = Course(world, mode, seed=1)
        course.load(path)
        wrong += differences(course.everything(), serial(2))
        course.steps(2, 3)
        wrong += differences(course.everything(), serial(3))
    assert world.allgather_object(wrong) == [[]] * world.size
