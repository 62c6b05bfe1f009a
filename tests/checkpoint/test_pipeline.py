"""Checkpoints of pipelines: who has which layers, who writes what, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hpcpar.checkpoint import load, save
from hpcpar.checkpoint.model_state import ModelState
from hpcpar.checkpoint.ownership import PipelinePositions, RankContents
from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import PeerFailedError
from hpcpar.tensor_parallel.split import gather_whole
from tests.checkpoint.runs import (
    EMBED,
    HEAD,
    IDLE,
    LAYERS,
    NORM,
    PARAMETERS,
    SERIAL,
    THREE,
    TIED,
    TURNED,
    TWO,
    UP,
    WITHOUT_STATE,
    Mode,
    Placement,
    Run,
    Stages,
    Streams,
    V,
    differences,
    failure,
    in_run,
    saved_by,
    serial,
)


@pytest.mark.parametrize("saver", [SERIAL, Mode(THREE, dp=2, stage=1)], ids=str)
def test_what_is_not_tied_stays_two(saver: Mode, tmp_path: Path) -> None:
    def saved(run: Run) -> Path:
        with torch.no_grad():
            for name, parameter in run.model.named_parameters():
                parameter.fill_(list(PARAMETERS).index(name))
        return run.save(tmp_path)

    path = in_run(saver, saved, tied=False)[0]

    def loaded(run: Run) -> list[str]:
        run.load(path)
        return [
            name
            for name, parameter in run.model.named_parameters()
            if not gather_whole(parameter).eq(list(PARAMETERS).index(name)).all()
        ]

    for loader in (SERIAL, Mode(TWO, tp=2), Mode(V, dp=2, stage=2)):
        assert in_run(loader, loaded, seed=1, tied=False) == [[]] * loader.size


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
    for file, layers, ends in (
        ("model.safetensors", (0, 1), {EMBED, "steps_done"}),
        ("model.rank00002.000.safetensors", (2, 3), {NORM}),
    ):
        of_layers = {name for name in PARAMETERS for number in layers if name.startswith(f"layers.{number}.")}
        assert names[file] == of_layers | ends | {f"layers.{number}.calls" for number in layers}


def test_all_owners_of_a_position_write_their_pieces_and_of_a_tie_only_the_first_names(
    tmp_path: Path,
) -> None:
    path = saved_by(Mode(TURNED, tp=2, dp=2, stage=1), tmp_path)
    written: dict[str, list[tuple[int, int]]] = {}
    for file in path.glob("optimizer.rank*"):
        for name, value in load_file(file).items():
            written.setdefault(name, []).append((int(file.name.split("rank")[1][:5]), value.numel()))
    assert len(list(path.glob("optimizer.rank*"))) == 8
    for name, (shape, _) in PARAMETERS.items():
        pieces = written.get(f"state/{name}/exp_avg", [])
        assert sum(numel for _, numel in pieces) == (
            0 if name in (HEAD, *WITHOUT_STATE) else math.prod(shape)
        ), name
    # The head, which ranks 0 to 3 have, is the embedding of ranks 4 to 7.
    assert {rank for rank, _ in written[f"state/{EMBED}/exp_avg"]} <= {4, 5, 6, 7}


def test_both_ends_of_a_tie_may_be_tensors_of_one_rank(tmp_path: Path) -> None:
    saver = Mode(V, dp=2, stage=1)
    path = saved_by(saver, tmp_path, apart=True)
    assert EMBED in dict(in_files(path, "model"))
    assert HEAD not in dict(in_files(path, "model"))

    def loaded(run: Run) -> tuple[list[str], bool]:
        run.load(path)
        values = dict(run.model.named_parameters())
        equal = EMBED not in values or values[EMBED].equal(values.get(HEAD, values[EMBED]))
        return differences(run.everything(), serial(2)), equal

    for loader, apart in ((saver, True), (saver, False), (SERIAL, False), (Mode(dp=2), True)):
        assert in_run(loader, loaded, seed=1, apart=apart) == [([], True)] * loader.size


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

    def loaded(run: Run) -> list[str]:
        run.load(path)
        return differences(run.everything(), serial(2))

    for loader in (SERIAL, Mode(TWO, dp=2, stage=1), Mode(V)):
        assert in_run(loader, loaded, seed=1) == [[]] * loader.size


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
        buffers = {"steps_done", *(f"layers.{n}.calls" for n in range(LAYERS))}
        assert set(positions.names) == {*PARAMETERS, *buffers}
        assert [positions.writes(position, EMBED) for position in (0, 1)] == [True, False]
        assert [positions.writes(position, UP) for position in (0, 1)] == [False, True]


def test_a_layer_that_no_rank_has_is_missing_and_named(tmp_path: Path) -> None:
    path = saved_by(SERIAL, tmp_path)
    message = failure(Mode(TWO), lambda run: run.load(path), {1: [UP]})
    assert f"1 tensors that the model does not have, the first is {UP}" in message
    part = saved_by(Mode(TWO), tmp_path / "part", without=[UP])
    message = failure(Mode(V, dp=2, stage=1), lambda run: run.load(part))
    assert f"1 tensors missing, the first is {UP}" in message


def test_a_shape_that_is_another_on_one_rank_changes_nothing_on_any(tmp_path: Path) -> None:
    path = saved_by(SERIAL, tmp_path)

    def body(run: Run) -> None:
        other = Stages((2, 3), seed=1)
        other.norm.weight = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        load(path, model=other if run.comm.rank else run.model, comm=run.comm)

    message = failure(Mode(TWO), body)
    assert "norm.weight there is (3,) torch.float64, in the model (4,) torch.float64" in message


def test_a_pipeline_without_one_of_its_ranks_cannot_load(tmp_path: Path) -> None:
    path = saved_by(Mode(TWO, dp=2, stage=1), tmp_path)
    halves: Placement = ((0, 1), (0, 1))
    message = failure(Mode(halves), lambda run: run.load(path))
    assert "12 tensors that the model does not have, the first is layers.2.up" in message


@pytest.mark.parametrize("doing", ["save", "load"])
def test_a_replica_that_lacks_a_name_is_told_which(doing: str, tmp_path: Path) -> None:
    path = saved_by(SERIAL, tmp_path / "whole")

    def body(run: Run) -> None:
        run.save(tmp_path) if doing == "save" else run.load(path)

    message = failure(Mode(TWO, dp=2, plain=True), body, {3: [UP]})
    assert f"but only rank 2 has {UP}" in message
    assert [each.name for each in tmp_path.iterdir()] == ["whole"]


def test_the_shards_of_every_position_are_to_be_there(tmp_path: Path) -> None:
    def body(comm: Communicator) -> str:
        run = Run(comm, Mode(TWO, dp=2, stage=1))
        first_three = comm.split(0 if comm.rank < 3 else None, name="first three")
        if first_three is None:
            return ""
        with pytest.raises(PeerFailedError) as caught:
            run.save(tmp_path, first_three)
        return str(caught.value)

    messages = run_loopback(4, body)[:3]
    for message in messages:
        assert "sharded over the 2 ranks of 'dp'" in message
        assert "by 1 of the 3 of 'first three', which have the same layers" in message
    assert list(tmp_path.iterdir()) == []


def test_a_parameter_of_two_positions_is_told_as_tied_to_its_own_name(tmp_path: Path) -> None:
    overlapping: Placement = ((0, 1, 2), (2, 3))
    message = failure(Mode(overlapping), lambda run: run.save(tmp_path))
    assert "ranks 0 and 1 both have layers.2.up, but only rank 0 has" in message

    def told(run: Run) -> Path:
        run.model.tied_names = {**TIED, **{name: name for name in PARAMETERS if ".2." in name}}
        run.steps(0, 2)
        return run.save(tmp_path)

    path = in_run(Mode(overlapping), told)[0]
    names = [name for name, _ in in_files(path, "model")]
    assert names.count(UP) == 1

    def loaded(run: Run) -> list[str]:
        run.load(path)
        return differences(run.everything(), serial(2))

    assert in_run(SERIAL, loaded, seed=1) == [[]]


def test_ranks_that_are_tied_in_other_ways_are_told(tmp_path: Path) -> None:
    def other_ends(run: Run) -> None:
        run.model.tied_names = {HEAD: EMBED if run.comm.rank else UP}
        run.save(tmp_path)

    message = failure(Mode(TWO), other_ends)
    assert f"{HEAD} is the same as {UP} on some ranks, as {EMBED} on others" in message

    def in_a_ring(run: Run) -> None:
        run.model.tied_names = {HEAD: EMBED, EMBED: HEAD}
        run.save(tmp_path)

    assert "tied to itself by way of" in failure(Mode(TWO), in_a_ring)


# --- the optimizer's groups -----------------------------------------------------------------------


@pytest.mark.parametrize("doing", ["save", "load"])
def test_optimizers_that_do_not_make_one_are_refused(doing: str, tmp_path: Path) -> None:
    path = saved_by(SERIAL, tmp_path)

    def refused(change: Callable[[Run], None], mode: Mode) -> str:
        def body(run: Run) -> None:
            if run.comm.rank == mode.size - 1:
                change(run)
            options: dict[str, Any] = {"optimizer": run.optimizer, "comm": run.comm}
            if doing == "save":
                save(tmp_path / "new", step=0, model=run.model, **options)
            else:
                load(path, model=run.model, **options)

        return failure(mode, body)

    def with_groups(*groups: Sequence[int]) -> Callable[[Run], None]:
        def change(run: Run) -> None:
            parameters = list(run.model.parameters())
            run.optimizer = torch.optim.AdamW(
                [{"params": [parameters[n] for n in group]} for group in groups]
            )

        return change

    both = (
        "has an optimizer with 2 groups, rank 1 has an optimizer with 1 groups; give all one, with the same"
    )
    assert both in refused(with_groups(range(7)), Mode(TWO, plain=True))
    # The last but one is the head, which is the embedding.
    message = refused(with_groups(range(9), [9, 10]), Mode(TWO, plain=True))
    assert f"{EMBED} is in group 0 of the optimizer on some ranks, in group 1 on others" in message
    message = refused(with_groups([0, 1], [2]), Mode(TWO, dp=2, plain=True))
    assert "this rank's optimizer has other groups than that of rank 2" in message
    assert not (tmp_path / "new").exists()


def test_options_that_differ_between_positions_are_refused_and_named(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        run.optimizer.param_groups[1]["lr"] = 0.5 - 0.25 * run.comm.rank
        run.save(tmp_path)

    assert "lr of group 1 = 0.5 on rank 0, 0.25 on rank 1" in failure(Mode(TWO, plain=True), body)
    assert list(tmp_path.iterdir()) == []


def test_an_optimizer_on_some_ranks_only_is_refused(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        optimizer = run.optimizer if run.comm.rank else None
        save(tmp_path, step=0, model=run.model, optimizer=optimizer, comm=run.comm)

    message = failure(Mode(TWO, plain=True), body)
    assert "rank 0 has no optimizer, rank 1 has an optimizer with 2 groups" in message


def test_every_rank_gets_the_options_of_its_groups_also_of_empty_ones(tmp_path: Path) -> None:
    def saved(run: Run) -> Path:
        for number, group in enumerate(run.optimizer.param_groups):
            group["lr"] = 0.25 * (number + 1)
        return run.save(tmp_path)

    path = in_run(Mode(TWO, plain=True), saved)[0]

    def loaded(run: Run) -> list[float]:
        if run.comm.size == 1:
            run.optimizer.add_param_group({"params": [], "lr": 7.0})
        run.load(path)
        return [group["lr"] for group in run.optimizer.param_groups]

    assert in_run(Mode(V, plain=True), loaded) == [[0.25, 0.5]] * 2
    assert in_run(SERIAL, loaded) == [[0.25, 0.5, 7.0]]


def test_names_that_torch_keeps_in_groups_are_each_ranks_own(tmp_path: Path) -> None:
    def named(run: Run) -> list[str]:
        run.optimizer = torch.optim.AdamW(run.model.named_parameters())
        return run.optimizer.param_groups[0]["param_names"]

    def saved(run: Run) -> Path:
        named(run)
        return run.save(tmp_path)

    path = in_run(Mode(TWO, plain=True), saved)[0]

    def kept(run: Run) -> bool:
        before = list(named(run))
        run.load(path)
        return run.optimizer.param_groups[0]["param_names"] == before

    assert in_run(Mode(V, plain=True), kept) == [True, True]


# --- random numbers -------------------------------------------------------------------------------


def give_streams(run: Run, seed: int) -> list[Streams]:
    """Attach two objects, which several modules share each."""
    both = [Streams(seed + run.comm.rank), Streams(100 + seed + run.comm.rank)]
    for number, layer in enumerate(run.model.layers.values()):
        layer.random_streams = both[number % 2]
    return both


@pytest.mark.parametrize(
    ("saver", "loader", "is_restored"),
    [
        (Mode(TWO, dp=2), Mode(TWO, dp=2, stage=1), True),
        (Mode(TWO, dp=2), Mode(((0, 1), (0, 1), (2, 3), (2, 3))), True),
        *((Mode(TWO, dp=2), loader, False) for loader in (Mode(TURNED, dp=2), Mode(V, dp=2))),
        *((Mode(TWO, dp=2), loader, False) for loader in (Mode(TWO, tp=2), Mode(TWO), SERIAL)),
        (Mode(tp=2, dp=2), Mode(tp=2, dp=2, stage=1), True),
        *((Mode(tp=2, dp=2), loader, False) for loader in (Mode(tp=4), Mode(tp=2), SERIAL)),
    ],
    ids=str,
)
def test_random_streams_go_on_in_the_same_place_and_are_left_alone_in_another(
    saver: Mode, loader: Mode, is_restored: bool, tmp_path: Path
) -> None:
    def saved(run: Run) -> tuple[Path, list[list[float]]]:
        streams = give_streams(run, 0)
        for number, each in enumerate(streams):
            for _ in range(3 + number):
                each.draw()
        return run.save(tmp_path), [each.draw() for each in streams]

    results = in_run(saver, saved)

    def loaded(run: Run) -> tuple[bool, list[list[float]]]:
        streams = give_streams(run, 50)
        found = run.load(results[0][0])
        return found.random_restored, [each.draw() for each in streams]

    for rank, found in enumerate(in_run(loader, loaded)):
        fresh = [Streams(50 + rank).draw(), Streams(150 + rank).draw()]
        assert found == (is_restored, results[rank][1] if is_restored else fresh)


def test_streams_that_a_checkpoint_does_not_know_stay_as_they_are(tmp_path: Path) -> None:
    path = saved_by(Mode(tp=2), tmp_path)

    def loaded(run: Run) -> tuple[bool, list[list[float]]]:
        streams = give_streams(run, 0)
        return run.load(path).random_restored, [each.draw() for each in streams]

    for rank, found in enumerate(in_run(Mode(tp=2), loaded)):
        assert found == (True, [Streams(rank).draw(), Streams(100 + rank).draw()])


def test_a_processs_own_random_numbers_stay_where_other_layers_come(tmp_path: Path) -> None:
    path = saved_by(Mode(TWO), tmp_path)
    for mode, are_restored in (
        (Mode(TWO, dp=2), [True, False]),
        (Mode(THREE), [False] * 3),
        (SERIAL, [False]),
    ):
        found = in_run(mode, lambda run: run.load(path).random_restored)
        assert found[: len(are_restored)] == are_restored, mode
