"""A checkpoint of any pipeline, tensor-parallel degree, ZeRO stage and ranks goes on in any other."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from hpcpar.comm import Communicator
from hpcpar.partition import bounds
from tests.checkpoint.runs import (
    IDLE,
    INTERLEAVED,
    LAYERS,
    PARAMETERS,
    SERIAL,
    THREE,
    TURNED,
    TWO,
    WHOLE,
    WITHOUT_STATE,
    Mode,
    Placement,
    Run,
    V,
    differences,
    in_run,
    saved_by,
    serial,
)

MODES = [
    SERIAL,
    Mode(tp=2, plain=True),
    Mode(tp=3, plain=True),
    Mode(tp=4),
    Mode(tp=2, dp=2),
    Mode(tp=2, dp=2, stage=2),
    Mode(tp=2, dp=2, stage=3),
    Mode(dp=4, stage=3),
    Mode(tp=3, stage=3),
    Mode(tp=4, stage=2),
    Mode(dp=2, stage=1),
    Mode(dp=2, stage=1, offload=True),
    Mode(dp=4, stage=3, offload=True),
    Mode(dp=4, precision="float64"),
    Mode(tp=2, precision="float64"),
    Mode(TWO, plain=True),
    Mode(IDLE, dp=2, stage=1),
    Mode(V, tp=2, plain=True),
    Mode(V, dp=2, stage=2),
    Mode(TURNED, dp=2),
    Mode(INTERLEAVED, tp=2, stage=1),
    Mode(THREE, dp=2, stage=1),
    Mode(TWO, tp=2, dp=2, stage=1),
    Mode(THREE, stage=2, precision="float64"),
]


@pytest.mark.parametrize("number", range(len(MODES)), ids=[str(mode) for mode in MODES])
def test_any_run_goes_on_in_any_other_bit_for_bit(number: int, tmp_path: Path) -> None:
    path = saved_by(MODES[number], tmp_path)
    then, later = serial(2), serial(3)

    def resumed(run: Run) -> tuple[list[str], list[str], set[str]]:
        run.load(path, restore_random=False)
        first = run.everything()
        run.steps(2, 3)
        return differences(first, then), differences(run.everything(), later), set(first)

    # Each loads an eighth of them, and all of them in turns.
    for loader in MODES[(number + number // 8) % 8 :: 8]:
        results = in_run(loader, resumed, seed=1)
        for rank, (loaded, stepped, _) in enumerate(results):
            assert (loaded, stepped) == ([], []), f"rank {rank}, loaded by {loader}"
        assert set().union(*(names for _, _, names in results)) == set(then)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_any_optimizer_goes_on_in_any_stage_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    modes = [Mode(dp=2, stage=stage, optimizer=optimizer) for stage in range(4)]

    def resumed(run: Run) -> list[str]:
        run.load(path, restore_random=False)
        run.steps(2, 3)
        return differences(run.everything(), serial(3, optimizer))

    for number, mode in enumerate(modes):
        path = saved_by(mode, tmp_path / str(number))
        assert in_run(modes[number - 1], resumed, seed=1) == [[], []]


def test_a_loaded_run_is_saved_again(tmp_path: Path) -> None:
    path = saved_by(Mode(tp=2, dp=2, stage=3), tmp_path / "0")
    chain = (Mode(tp=3, plain=True), Mode(V, dp=2, stage=1), Mode(tp=4), Mode(TWO, tp=2, stage=2), SERIAL)
    for number, mode in enumerate(chain):

        def through(run: Run, number: int = number, path: Path = path) -> Path:
            run.load(path)
            return run.save(tmp_path / str(number + 1))

        path = in_run(mode, through, seed=1)[0]
    found, expected = load_file(path / "model.safetensors"), serial(2)
    assert all(found[name].equal(expected[f"{name}/"]) for name in found if name in PARAMETERS)


@pytest.mark.parametrize(
    "saver",
    [Mode(tp=2, dp=2), Mode(TWO, dp=2, stage=1), Mode(V, tp=2, stage=2), Mode(tp=2, dp=2, stage=3)],
    ids=str,
)
def test_master_weights_follow_their_parameters(saver: Mode, tmp_path: Path) -> None:
    def saved(run: Run) -> tuple[Path, dict[str, Tensor]]:
        run.steps(0, 2)
        return run.save(tmp_path), run.everything()

    results = in_run(saver._replace(precision="bfloat16"), saved)
    path, then = results[0][0], {name: value for _, found in results for name, value in found.items()}
    masters = {name: value for name, value in then.items() if name.endswith("/master_weight")}
    assert len(masters) == len(PARAMETERS) - 1 - len(WITHOUT_STATE)  # one is tied

    def loaded(run: Run) -> dict[str, Tensor]:
        run.load(path)
        return run.everything()

    for loader in (Mode(tp=4, stage=1), Mode(dp=2, stage=3), Mode(THREE, tp=2, stage=2)):
        for found in in_run(loader._replace(precision="bfloat16"), loaded, seed=1):
            assert differences(found, then) == []
    for found in in_run(Mode(INTERLEAVED, tp=3, plain=True), loaded, seed=1):
        for name in (name for name in found if f"{name}master_weight" in masters):
            assert found[name].equal(masters[f"{name}master_weight"].double())
            assert not found[name].equal(found[name].bfloat16())


@pytest.mark.mpi
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_splits_stages_and_pipelines_over_mpi_go_on_in_each_other(
    world: Communicator, stage: int, tmp_path: Path
) -> None:
    directory = Path(world.broadcast_object(str(tmp_path)))
    halves = 2 if world.size % 2 == 0 else 1
    even: Placement = tuple(tuple(range(*edges)) for edges in bounds(LAYERS, world.size))
    dealt: Placement = tuple(tuple(range(rank, LAYERS, world.size)) for rank in range(world.size))
    saver = Run(world, Mode(WHOLE, halves, world.size // halves, stage) if stage else Mode(even, plain=True))
    saver.steps(0, 2)
    path = saver.save(directory)
    wrong = []
    for mode in (
        Mode(WHOLE, halves, world.size // halves, (stage + 1) % 4),
        Mode(tp=world.size, stage=stage),
        Mode(dp=world.size, stage=stage),
        Mode(dealt, plain=True),
        Mode(even[::-1], plain=True),
    ):
        run = Run(world, mode, seed=1)
        run.load(path, restore_random=False)
        wrong += differences(run.everything(), serial(2))
        run.steps(2, 3)
        wrong += differences(run.everything(), serial(3))
    assert world.allgather_object(wrong) == [[]] * world.size
