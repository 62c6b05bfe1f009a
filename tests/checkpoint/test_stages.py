"""Checkpoints of each stage of ZeRO in each precision: what goes on bit for bit, and what is refused."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcpar.checkpoint import files, load, save
from hpcpar.comm import Communicator
from hpcpar.data_parallel import DistributedOptimizer, Precision
from hpcpar.errors import CheckpointError, OperationError, PeerFailedError
from tests.checkpoint.runs import (
    SERIAL,
    Mode,
    Run,
    differences,
    failure,
    in_run,
    saved_by,
    serial,
)

FLOAT32 = [Mode(dp=2, stage=stage, dtype=torch.float32) for stage in range(4)]
BFLOAT16 = [mode._replace(precision=Precision("bfloat16", moments="bfloat16")) for mode in FLOAT32]
FLOAT16 = [mode._replace(precision=Precision("float16")) for mode in FLOAT32]
ON_DISK = [FLOAT32[stage]._replace(offload=True) for stage in (1, 3)]
ON_PIECES = Mode(dp=2, precision="float64")


@pytest.mark.parametrize("mode", [*FLOAT32, *ON_DISK, *BFLOAT16, *FLOAT16], ids=str)
def test_the_same_stage_on_as_many_ranks_goes_on_bit_for_bit(mode: Mode, tmp_path: Path) -> None:
    def body(run: Run) -> list[str]:
        run.steps(0, 2)
        path = run.save(tmp_path)
        resumed = Run(run.comm, mode, seed=1)
        resumed.load(path)
        run.steps(2, 4)
        resumed.steps(2, 4)
        found, expected = resumed.everything(), run.everything()
        assert found.keys() == expected.keys()
        return differences(found, expected)

    assert in_run(mode, body) == [[], []]


@pytest.mark.parametrize(("stage", "other"), [(0, 3), (0, 1), (3, 0), (3, 2)])
def test_master_weights_come_from_the_float32_values_and_give_them_back(
    stage: int, other: int, tmp_path: Path
) -> None:
    first = saved_by(FLOAT32[stage], tmp_path / "first")

    def parameters(run: Run) -> dict[str, Tensor]:
        return {name: value for name, value in run.everything().items() if name.endswith("/")}

    def through(before: Run) -> None:
        before.load(first)
        mixed, after = (Run(before.comm, mode, seed=1) for mode in (BFLOAT16[other], FLOAT32[stage]))
        mixed.load(first)
        after.load(mixed.save(tmp_path / "second"))
        rounded, back = parameters(mixed), parameters(after)
        for name, value in parameters(before).items():
            assert rounded[name].equal(value.bfloat16())
            # What is frozen has no master weights.
            assert back[name].equal(rounded[name].float() if "frozen" in name else value), name

    in_run(FLOAT32[stage], through)


def test_a_dynamic_loss_scale_goes_on_and_a_fixed_one_is_not_taken_for_it(tmp_path: Path) -> None:
    def body(saver: Run) -> tuple[float, ...]:
        saver.optimizer.scaler.update(overflow=True)
        dynamic = saver.save(tmp_path / "dynamic")
        fixed = Run(saver.comm, BFLOAT16[1]).save(tmp_path / "fixed")
        found = []
        for mode, path in ((FLOAT16[2], dynamic), (FLOAT16[2], fixed), (BFLOAT16[2], dynamic)):
            run = Run(saver.comm, mode)
            run.load(path)
            found.append(run.optimizer.scaler.scale)
        return *found, run.optimizer.scaler.skipped

    assert in_run(FLOAT16[1], body) == [(2.0**15, 2.0**16, 1.0, 1)] * 2


def test_a_model_alone_is_loaded_into_shards_and_master_weights_follow(tmp_path: Path) -> None:
    path, expected = saved_by(FLOAT32[0], tmp_path), serial(2)

    def body(run: Run) -> None:
        load(path, model=run.model, comm=run.comm, restore_random=False)
        found = run.everything()
        masters = {name: value for name, value in found.items() if name.endswith("/master_weight")}
        assert masters
        for name, value in masters.items():
            parameter = found[name.removesuffix("master_weight")]
            assert parameter.equal(expected[name.removesuffix("master_weight")].bfloat16())
            assert value.equal(parameter.float())

    in_run(BFLOAT16[3], body, seed=1)


@pytest.mark.parametrize("mode", [ON_PIECES, ON_DISK[0], BFLOAT16[1], BFLOAT16[2]], ids=str)
def test_a_model_is_loaded_without_its_optimizer_and_the_next_step_does_not_undo_it(
    tmp_path: Path, mode: Mode
) -> None:
    def body(run: Run) -> list[str]:
        path = run.save(tmp_path)
        saved = {name: value.detach().clone() for name, value in run.model.named_parameters()}
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.zero_()
        run.optimizer.take_parameters()
        load(path, model=run.model, comm=run.comm, restore_random=False)
        for group in run.optimizer.param_groups:
            group["lr"] = 0.0
        run.steps(0, 1)
        run.optimizer.wait_for_parameters()
        return differences(dict(run.model.named_parameters()), saved)

    assert in_run(mode, body) == [[], []]


@pytest.mark.parametrize("mode", [ON_PIECES, Mode(dp=2, stage=1), Mode(dp=2, stage=2)], ids=str)
def test_an_optimizer_that_was_made_distributed_is_refused_by_itself(tmp_path: Path, mode: Mode) -> None:
    def body(run: Run) -> None:
        for act, options in ((save, {"step": 1}), (load, {})):
            with pytest.raises(PeerFailedError, match=r"has been made a DistributedOptimizer.* give that"):
                act(tmp_path, model=run.model, optimizer=run.optimizer.inner, comm=run.comm, **options)

    in_run(mode, body)


def test_large_shards_are_cut_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FILE_NBYTES", 500)
    path = saved_by(Mode(dp=2, stage=2), tmp_path)
    assert len(list(path.glob("optimizer.rank00001.*.safetensors"))) > 3

    def body(run: Run) -> list[str]:
        run.load(path)
        run.steps(2, 3)
        return differences(run.everything(), serial(3))

    assert in_run(Mode(dp=4, stage=1), body, seed=1) == [[]] * 4


@pytest.mark.parametrize(("kind", "damage"), [("model", "a missing file"), ("optimizer", "a flipped bit")])
def test_one_damaged_shard_is_named_on_all_ranks_and_nothing_changes(
    kind: str, damage: str, tmp_path: Path
) -> None:
    path = saved_by(Mode(dp=4, stage=3), tmp_path)
    file = path / f"{kind}.rank00001.000.safetensors"
    if damage == "a missing file":
        file.unlink()
    else:
        content = bytearray(file.read_bytes())
        content[-3] ^= 4
        file.write_bytes(content)
    assert file.name in failure(Mode(dp=2, stage=3), lambda run: run.load(path))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_full_disk_on_one_rank_fails_on_all_and_leaves_the_last_checkpoint(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = Mode(dp=4, stage=stage)
    whole = saved_by(mode, tmp_path)
    before = {file.name: file.read_bytes() for file in whole.iterdir()}
    write = files.save_file

    def full(tensors: dict[str, Tensor], path: Path, **others: Any) -> None:
        if "rank00002" in path.name:
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(tensors, path, **others)

    monkeypatch.setattr(files, "save_file", full)

    def body(run: Run) -> str:
        run.steps(0, 2)
        with pytest.raises(PeerFailedError) as caught:
            run.save(tmp_path)
        run.steps(2, 3)
        return str(caught.value)

    for message in in_run(mode, body):
        assert "rank 2: OSError: [Errno 28] No space left on device" in message
    assert [path.name for path in tmp_path.iterdir()] == [whole.name]
    assert {file.name: file.read_bytes() for file in whole.iterdir()} == before


@pytest.mark.parametrize("stage", [1, 3])
def test_other_float_types_are_refused_where_no_precision_is_meant(stage: int, tmp_path: Path) -> None:
    path = saved_by(Mode(dp=2, stage=3), tmp_path)
    message = failure(FLOAT32[stage], lambda run: run.load(path))
    assert "torch.float64, in the model" in message
    assert "torch.float32; build the model in that type" in message


@pytest.mark.parametrize("mode", [ON_PIECES, *FLOAT32, *ON_DISK], ids=str)
def test_a_ranks_own_part_of_the_state_goes_out_and_in_again(mode: Mode) -> None:
    def body(run: Run) -> set[str]:
        run.steps(0, 2)
        state = run.optimizer.sharded_state_dict()
        other = Run(run.comm, mode)
        other.steps(0, 1)
        other.optimizer.load_sharded_state_dict(state)
        found, expected = (each.optimizer.state_dict() for each in (other, run))
        assert found["param_groups"] == expected["param_groups"]
        assert found["state"].keys() == expected["state"].keys()
        for number, of_one in expected["state"].items():
            assert differences(found["state"][number], of_one) == []
        return set(state["pieces"])

    names = set().union(*in_run(mode, body))
    assert {"layers.3.turned", "layers.1.unused", "embed.weight"} <= names


def test_a_state_of_other_pieces_is_refused_and_named() -> None:
    states = in_run(Mode(dp=2, stage=1), lambda run: run.optimizer.sharded_state_dict())
    alone = Run(Communicator.alone(), Mode(stage=1))
    with pytest.raises(OperationError, match=r"of \S+ it has elements .*, where \(0, \d+\) are needed"):
        alone.optimizer.load_sharded_state_dict(states[0])


def test_whoever_may_read_one_file_may_read_all(tmp_path: Path) -> None:
    path = saved_by(Mode(dp=2, stage=3), tmp_path)
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1


def test_a_checkpoint_of_other_ranks_pieces_is_whole_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_states = DistributedOptimizer.own_states

    def half(self: DistributedOptimizer) -> Any:
        found = list(own_states(self))
        return found if self.dp_comm.rank == 0 else found[1:]

    monkeypatch.setattr(DistributedOptimizer, "own_states", half)
    with pytest.raises((CheckpointError, PeerFailedError), match=r"of .* there (is|are) "):
        saved_by(Mode(dp=2, stage=1), tmp_path)


@pytest.mark.mpi
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_in_common_memory_are_saved_and_loaded(
    world: Communicator, stage: int, tmp_path: Path
) -> None:
    directory = Path(world.broadcast_object(str(tmp_path)))
    path = saved_by(SERIAL, directory) if world.rank == 0 else None
    path = Path(world.broadcast_object(str(path)))
    mode = Mode(dp=world.size, stage=stage, shared=True)
    run = Run(world, mode, seed=1)
    run.load(path)
    again, plain = Run(world, Mode(dp=world.size), seed=2), run.save(directory / "again")
    again.load(plain)
    assert world.allgather_object(differences(again.everything(), serial(2))) == [[]] * world.size
