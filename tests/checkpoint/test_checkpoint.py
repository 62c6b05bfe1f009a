from __future__ import annotations

import errno
import json
import logging
import math
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpcpar.checkpoint import Loaded, checkpoint_path, latest, load, save
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, broadcast_parameters
from hpcpar.errors import CheckpointError, PeerFailedError


class Small(nn.Module):
    """Two layers, a buffer, a tied pair and a dtype that is not float32."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, hidden)
        self.middle = nn.Linear(hidden, hidden)
        self.narrow = nn.Parameter(torch.randn(3).bfloat16())
        self.head = nn.Linear(hidden, 9, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += 1
        noise = torch.rand(()) + float(np.random.rand()) + random.random()
        logits: Tensor = self.head(torch.tanh(self.middle(self.embed(tokens)))) * noise
        return logits + self.narrow.float().sum()


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9)),
    "adamw with a tensor as rate": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01)),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, centered=True),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(9)).square().mean().backward()
        optimizer.step()


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def bits(model: nn.Module) -> dict[str, list[Any]]:
    return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.fixture
def alone() -> Communicator:
    return Communicator.alone()


@pytest.fixture
def saved(tmp_path: Path, alone: Communicator) -> Path:
    seeded(0)
    model = Small()
    optimizer = OPTIMIZERS["adamw"](model)
    train(model, optimizer, 2)
    return save(tmp_path, step=2, model=model, optimizer=optimizer, extra={"note": 1}, comm=alone)


@pytest.mark.smoke
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_follows_the_uninterrupted_one_bit_for_bit(
    name: str, tmp_path: Path, alone: Communicator
) -> None:
    seeded(1)
    model = Small()
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, 3)
    save(tmp_path, step=3, model=model, optimizer=optimizer, extra={"data": [1, 2]}, comm=alone)
    train(model, optimizer, 4)

    seeded(99)
    resumed = Small()
    resumed_optimizer = OPTIMIZERS[name](resumed)
    loaded = load(tmp_path, model=resumed, optimizer=resumed_optimizer, comm=alone)
    assert loaded == Loaded(checkpoint_path(tmp_path, 3), 3, {"data": [1, 2]}, 1, True)
    train(resumed, resumed_optimizer, 4)
    assert bits(resumed) == bits(model)
    assert type(resumed_optimizer.param_groups[0].get("betas", ())) is tuple


@pytest.mark.smoke
def test_tied_parameters_are_written_once_and_stay_tied(saved: Path, alone: Communicator) -> None:
    state = json.loads((saved / "state.json").read_text())
    assert state["aliases"] == {"head.weight": "embed.weight"}
    model = Small()
    load(saved, model=model, comm=alone)
    assert model.head.weight is model.embed.weight


def test_views_into_a_larger_buffer_are_saved_by_themselves(tmp_path: Path, alone: Communicator) -> None:
    flat = torch.arange(100.0)
    model = nn.Module()
    model.a = nn.Parameter(flat[10:14].view(2, 2).T)
    model.b = nn.Parameter(flat[50:52])
    path = save(tmp_path, step=0, model=model, comm=alone)
    assert (path / "model.safetensors").stat().st_size < 300
    flat.zero_()
    load(path, model=model, comm=alone)
    assert model.a.tolist() == [[10, 12], [11, 13]]
    assert flat[10:14].tolist() == [10, 11, 12, 13]


def test_parameters_that_share_their_memory_are_saved_and_go_on_sharing(
    tmp_path: Path, alone: Communicator
) -> None:
    """Memory is shared after b.weight.data = a.weight.data, or by a buffer that shows a parameter."""

    def sharing() -> nn.ModuleDict:
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        model["b"].weight.data = model["a"].weight.data
        model["b"].register_buffer("shown", model["a"].bias.data)
        return model

    before, after = sharing(), sharing()
    save(tmp_path, step=1, model=before, comm=alone)
    load(tmp_path, model=after, comm=alone)
    for name, value in before.state_dict().items():
        assert torch.equal(value, after.state_dict()[name]), name
    assert after["b"].weight.data_ptr() == after["a"].weight.data_ptr()


@pytest.mark.parametrize("step", [-1, 1.5, "7"])
def test_a_step_that_is_no_number_of_steps_is_refused(tmp_path: Path, alone: Communicator, step: Any) -> None:
    with pytest.raises(CheckpointError, match=f"step={step!r}: give the number of optimizer steps taken"):
        save(tmp_path, step=step, model=Small(), comm=alone)
    assert list(tmp_path.iterdir()) == []


def test_a_step_may_be_an_integer_of_numpy(tmp_path: Path, alone: Communicator) -> None:
    path = save(tmp_path, step=np.int64(4), model=Small(), comm=alone)
    assert (path.name, load(path, model=Small(), comm=alone).step) == ("step-00000004", 4)


def test_optimizer_state_goes_by_name_whatever_the_order(tmp_path: Path, alone: Communicator) -> None:
    def groups(model: Small, turned: bool) -> list[dict[str, Any]]:
        weights, others = [model.embed.weight, model.middle.weight], [model.middle.bias, model.narrow]
        if turned:
            weights, others = weights[::-1], others[::-1]
        made: list[dict[str, Any]] = [{"params": weights, "lr": 0.1}, {"params": others, "weight_decay": 0.0}]
        return made[::-1] if turned else made

    seeded(2)
    model, other = Small(), Small()
    optimizer = torch.optim.AdamW(groups(model, False))
    train(model, optimizer, 2)
    save(tmp_path, step=2, model=model, optimizer=optimizer, comm=alone)
    other_optimizer = torch.optim.AdamW(groups(other, True))
    load(tmp_path, model=other, optimizer=other_optimizer, comm=alone)
    for name, parameter in model.named_parameters():
        state, found = optimizer.state[parameter], other_optimizer.state[dict(other.named_parameters())[name]]
        assert all(torch.equal(state[key], found[key]) for key in ("step", "exp_avg", "exp_avg_sq"))
    assert [group["lr"] for group in other_optimizer.param_groups] == [1e-3, 0.1]
    assert [group["weight_decay"] for group in other_optimizer.param_groups] == [0.0, 0.01]


def test_groups_of_other_parameters_are_refused(saved: Path, alone: Communicator) -> None:
    model = Small()
    weights, rest = [model.embed.weight], [model.middle.weight, model.middle.bias, model.narrow]
    with pytest.raises(
        CheckpointError, match=r"no group of the 1 parameters.*first difference is middle.bias"
    ):
        load(
            saved,
            model=model,
            optimizer=torch.optim.AdamW([{"params": weights}, {"params": rest}]),
            comm=alone,
        )
    with pytest.raises(CheckpointError, match="no group of the 3 parameters"):
        load(saved, model=model, optimizer=torch.optim.AdamW(rest), comm=alone)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam], ids=["SGD", "Adam"])
def test_states_of_another_optimizer_are_refused(kind: Any, saved: Path, alone: Communicator) -> None:
    model = Small()
    optimizer = kind(model.parameters(), lr=0.5)
    distributed = DistributedOptimizer(kind(model.parameters(), lr=0.5), model.named_parameters(), alone)
    for each in (optimizer, distributed):
        with pytest.raises(CheckpointError, match=rf"is of AdamW for group 0, and here is {kind.__name__}, "):
            load(saved, model=model, optimizer=each, comm=alone)
        assert each.param_groups[0]["lr"] == 0.5


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path, alone: Communicator) -> None:
    optimizer = OPTIMIZERS["sgd"](Small())
    with pytest.raises(CheckpointError, match="4 parameters that the model does not have"):
        save(tmp_path, step=0, model=Small(), optimizer=optimizer, comm=alone)
    assert latest(tmp_path) is None


def test_every_flipped_bit_is_found_and_its_file_named(saved: Path, alone: Communicator) -> None:
    chance = random.Random(0)
    model, before = Small(), None
    for path in sorted(saved.iterdir()):
        whole = path.read_bytes()
        for _ in range(40):
            place = chance.randrange(len(whole) * 8)
            flipped = bytearray(whole)
            flipped[place // 8] ^= 1 << place % 8
            path.write_bytes(flipped)
            before = bits(model)
            with pytest.raises(
                CheckpointError, match=r"is damaged|has format|is not a complete|has no"
            ) as caught:
                load(saved, model=model, comm=alone)
            assert path.name in str(caught.value)
        path.write_bytes(whole)
    assert bits(model) == before
    load(saved, model=model, comm=alone)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"]
)
def test_truncated_and_missing_files_are_named_with_both_sizes(
    name: str, saved: Path, alone: Communicator
) -> None:
    path = saved / name
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{name} should have {size} bytes, but has {size - 1}"):
        load(saved, model=Small(), comm=alone)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{name} should have {size} bytes, but: No such file"):
        load(saved, model=Small(), comm=alone)


def test_a_model_of_another_shape_dtype_or_make_is_named(saved: Path, alone: Communicator) -> None:
    with pytest.raises(
        CheckpointError, match=r"embed.weight there is \(9, 6\) torch.float32, in the model \(9, 8\)"
    ):
        load(saved, model=Small(8), comm=alone)
    with pytest.raises(CheckpointError, match=r"torch.bfloat16, in the model \(3,\) torch.float64"):
        load(saved, model=Small().double(), comm=alone)
    with pytest.raises(
        CheckpointError, match=r"2 tensors missing, the first is 0.weight; 6 tensors that the model"
    ):
        load(saved, model=nn.Sequential(nn.Linear(2, 2)), comm=alone)
    with pytest.raises(
        CheckpointError, match=r"the first is _orig_mod.*save and load the module that DDP or"
    ):
        load(saved, model=nn.ModuleDict({"_orig_mod": Small()}), comm=alone)


def test_an_optimizer_is_not_restored_from_a_checkpoint_without_one(
    tmp_path: Path, alone: Communicator
) -> None:
    model = Small()
    path = save(tmp_path, step=1, model=model, comm=alone)
    with pytest.raises(CheckpointError, match="saved without an optimizer"):
        load(path, model=model, optimizer=OPTIMIZERS["sgd"](model), comm=alone)


def test_nothing_to_load_is_an_error_that_says_what_was_expected(tmp_path: Path, alone: Communicator) -> None:
    with pytest.raises(
        CheckpointError, match=r"holds no checkpoint: expected a directory with a manifest.json"
    ):
        load(tmp_path, model=Small(), comm=alone)
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        load(tmp_path / "nowhere", model=Small(), comm=alone)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="safetensors is a file: expected a directory"):
        load(tmp_path / "model.safetensors", model=Small(), comm=alone)


class Counting(nn.Module):
    """Its state has what is no parameter or buffer of it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.count)

    def set_extra_state(self, state: Tensor) -> None:
        self.count = int(state)


class OfDoubleNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.ones(2, dtype=torch.complex128))


def test_what_could_be_saved_and_not_loaded_is_refused_and_named(tmp_path: Path, alone: Communicator) -> None:
    with pytest.raises(CheckpointError, match=r"0\._extra_state in the model's state .* pass it in extra="):
        save(tmp_path, step=1, model=nn.Sequential(Counting(7)), comm=alone)
    with pytest.raises(CheckpointError, match=r"safetensors has no type torch\.complex128"):
        save(tmp_path, step=1, model=OfDoubleNumbers(), comm=alone)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_has_no_memory_is_refused(tmp_path: Path, alone: Communicator) -> None:
    save(tmp_path, step=1, model=nn.Linear(2, 2), comm=alone)
    absent = nn.Linear(2, 2, device="meta")
    with pytest.raises(CheckpointError, match=r"weight is on the meta device.* by model\.to_empty"):
        load(tmp_path, model=absent, comm=alone)
    with pytest.raises(CheckpointError, match="weight is on the meta device"):
        save(tmp_path, step=2, model=absent, comm=alone)


def test_the_latest_is_that_of_the_highest_step(tmp_path: Path, alone: Communicator) -> None:
    assert latest(tmp_path / "nowhere") is None
    for step in (5, 100_000_000, 20):
        save(tmp_path, step=step, model=Small(), comm=alone)
    assert latest(tmp_path) == tmp_path / "step-100000000"


def test_incomplete_checkpoints_are_passed_over_aloud(
    tmp_path: Path, alone: Communicator, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [save(tmp_path, step=step, model=Small(), comm=alone) for step in (1, 2)]
    (paths[1] / "model.safetensors").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert latest(tmp_path) == paths[0]
    assert "step-00000002/model.safetensors should have" in caplog.text
    (paths[0] / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        latest(tmp_path)


def test_as_many_as_asked_for_are_kept_and_always_the_one_just_written(
    tmp_path: Path, alone: Communicator
) -> None:
    def steps() -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in tmp_path.iterdir())

    for step in (10, 20, 30, 40):
        save(tmp_path, step=step, model=Small(), comm=alone, keep=3)
    assert steps() == [20, 30, 40]
    save(tmp_path, step=5, model=Small(), comm=alone, keep=2)  # a run that began anew
    assert steps() == [5, 40]
    save(tmp_path, step=6, model=Small(), comm=alone, keep=None)
    assert steps() == [5, 6, 40]
    with pytest.raises(CheckpointError, match="keep=0 would keep no checkpoint"):
        save(tmp_path, step=7, model=Small(), comm=alone, keep=0)


def test_an_incomplete_checkpoint_is_not_kept_in_the_place_of_a_complete_one(
    tmp_path: Path, alone: Communicator
) -> None:
    for step in (10, 20, 30):
        path = save(tmp_path, step=step, model=Small(), comm=alone)
    (path / "model.safetensors").write_bytes(b"")
    for step in (21, 22):  # a run that went on from step 20
        save(tmp_path, step=step, model=Small(), comm=alone, keep=2)
        assert latest(tmp_path) == tmp_path / f"step-{step:08d}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000021", "step-00000022"]


def broken(value: float) -> Small:
    model = Small()
    with torch.no_grad():
        model.middle.weight[1, 2] = value
    return model


def damage(path: Path) -> None:
    """Flip a bit of the model, whose file stays as long as it was."""
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)


def steps_in(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in directory.iterdir())


@pytest.mark.parametrize(("keep", "value"), [(1, math.nan), (3, math.inf), (3, -math.inf)])
def test_models_that_are_no_numbers_never_push_out_the_newest_sound_checkpoint_and_are_passed_over(
    tmp_path: Path, alone: Communicator, caplog: pytest.LogCaptureFixture, keep: int, value: float
) -> None:
    good = Small()
    for step in (1, 2):
        save(tmp_path, step=step, model=good, comm=alone, keep=keep)
    for step in (3, 4, 5, 6):
        path = save(tmp_path, step=step, model=broken(value), comm=alone, keep=keep)
    assert steps_in(tmp_path) == ([2, 6] if keep == 1 else [1, 2, 6])
    assert f"{path} has values that are no finite numbers, the first in middle.weight; load" in caplog.text
    caplog.clear()
    model = Small()
    assert load(tmp_path, model=model, comm=alone).step == 2
    assert bits(model) == bits(good)
    assert f"going on from {tmp_path}/step-00000002, which is the newest sound one, not step-00000006" in (
        caplog.text
    )
    assert latest(tmp_path) == tmp_path / "step-00000002"
    save(tmp_path, step=3, model=good, comm=alone, keep=1)
    assert steps_in(tmp_path) == [3]


def test_what_is_not_finite_is_loaded_where_it_is_named_and_does_not_replace_what_is(
    tmp_path: Path, alone: Communicator, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, step=1, model=Small(), comm=alone)
    path = save(tmp_path, step=2, model=broken(math.nan), comm=alone)
    caplog.clear()
    assert load(path, model=Small(), comm=alone).step == 2
    assert f"as it was asked for; the newest sound one is {tmp_path}/step-00000001: name that" in caplog.text
    with pytest.raises(CheckpointError, match=r"step-00000001 is sound and stays: .* the first in middle\."):
        save(tmp_path, step=1, model=broken(math.nan), comm=alone)
    assert load(tmp_path, model=Small(), comm=alone).step == 1
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints .* is sound: .*where it is named"):
        load(tmp_path, model=Small(), comm=alone)


def test_the_state_of_an_optimizer_counts_and_the_infinity_of_a_mask_does_not(
    tmp_path: Path, alone: Communicator
) -> None:
    model = Small()
    optimizer = OPTIMIZERS["adamw"](model)
    train(model, optimizer, 1)
    model.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
    save(tmp_path, step=1, model=model, optimizer=optimizer, comm=alone)
    assert latest(tmp_path) == tmp_path / "step-00000001"
    optimizer.state[model.narrow]["exp_avg"][0] = math.nan
    path = save(tmp_path, step=2, model=model, optimizer=optimizer, comm=alone)
    assert json.loads((path / "state.json").read_text())["not_finite"] == "state/narrow/exp_avg"
    model.mask[0, 0] = math.nan
    path = save(tmp_path, step=3, model=model, comm=alone)
    assert json.loads((path / "state.json").read_text())["not_finite"] == "mask"
    assert latest(tmp_path) == tmp_path / "step-00000001"


@pytest.mark.parametrize("size", [1, 3])
def test_a_damaged_newest_checkpoint_is_passed_over_by_all_ranks_and_goes_before_the_sound_one(
    tmp_path: Path, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    def work(comm: Communicator) -> tuple[list[int], list[dict[str, Any]]]:
        with lock:
            good, other = Small(), Small()
        broadcast_parameters(good, comm)
        for step in (10, 20):
            save(tmp_path, step=step, model=good, comm=comm)
        if comm.rank == 0:
            damage(tmp_path / "step-00000020")
        comm.barrier()
        found = [load(tmp_path, model=other, comm=comm).step]
        save(tmp_path, step=15, model=good, comm=comm, keep=2)
        found.append(load(tmp_path, model=other, comm=comm).step)
        return found, [bits(good), bits(other)]

    lock = threading.Lock()
    for found, (good, other) in run_loopback(size, work):
        assert found == [10, 15]
        assert good == other
    assert steps_in(tmp_path) == [10, 15]
    assert caplog.text.count("going on from") == 1
    assert "passed over a checkpoint: " in caplog.text
    assert "step-00000020/model.safetensors is damaged: its SHA-256 should be" in caplog.text


@pytest.mark.parametrize("size", [1, 2])
def test_a_damaged_checkpoint_that_is_named_itself_is_refused_with_the_name_of_the_sound_one(
    tmp_path: Path, size: int
) -> None:
    alone = Communicator.alone()
    for step in (1, 2, 3):
        path = save(tmp_path, step=step, model=Small(), comm=alone)
    damage(path)
    (tmp_path / "step-00000002" / "manifest.json").unlink()

    def work(comm: Communicator) -> list[str]:
        said = []
        for step in (3, 2, 4):
            with pytest.raises((CheckpointError, PeerFailedError)) as caught:
                load(tmp_path / f"step-{step:08d}", model=nn.Linear(1, 1), comm=comm)
            said.append(str(caught.value))
        return said

    for said in run_loopback(size, work):
        for message, words in zip(said, ("is damaged", "has no manifest", "does not exist"), strict=True):
            assert words in message
            assert f"the newest sound one is {tmp_path}/step-00000001: name that, or {tmp_path}" in message


def test_a_checkpoint_of_the_same_step_is_replaced_and_remains_of_killed_writers_go(
    tmp_path: Path, alone: Communicator
) -> None:
    (tmp_path / ".writing-step-00000001-x").mkdir()
    for note in ("first", "second"):
        save(tmp_path, step=1, model=Small(), extra={"note": note}, comm=alone)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert load(tmp_path, model=Small(), comm=alone).extra == {"note": "second"}


def test_a_checkpoint_that_was_put_elsewhere_and_linked_stays_there(
    tmp_path: Path, alone: Communicator
) -> None:
    archived = save(tmp_path / "archive", step=1, model=Small(), comm=alone)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-00000001").symlink_to(archived)
    for step in (2, 3):
        save(tmp_path / "run", step=step, model=Small(), comm=alone, keep=1)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000003"]
    assert load(archived, model=Small(), comm=alone).step == 1


def test_what_cannot_be_removed_is_told_and_the_new_checkpoint_is_there(
    tmp_path: Path, alone: Communicator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, step=1, model=Small(), comm=alone)

    def in_use(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path / ".nfs0001"))

    monkeypatch.setattr(shutil, "rmtree", in_use)
    assert save(tmp_path, step=2, model=Small(), comm=alone, keep=1) == latest(tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot remove {tmp_path}/.writing-removed-step-00000001, which is needed no more: "
        f"[Errno 39] Directory not empty: '{tmp_path}/.writing-removed-step-00000001/.nfs0001'"
    ]


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    "value", [object(), {(1, 2): 3}, {1: 2, (1, 2): 3}, CYCLE], ids=["object", "tuple", "both", "cycle"]
)
def test_extra_that_json_cannot_hold_is_refused_before_anything_is_written(
    value: Any, tmp_path: Path, alone: Communicator
) -> None:
    with pytest.raises(CheckpointError, match="extra holds what JSON cannot"):
        save(tmp_path, step=1, model=Small(), extra={"when": value}, comm=alone)
    assert list(tmp_path.iterdir()) == []


def test_dictionaries_keep_their_keys_so_that_schedulers_go_on(tmp_path: Path, alone: Communicator) -> None:
    def made(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = OPTIMIZERS["sgd"](model)
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 4], gamma=0.5)

    model = Small()
    optimizer, schedule = made(model)
    train(model, optimizer, 1)
    schedule.step()
    odd = {"items of a dictionary": [[1, 2]], "of all kinds": {1: "a", "1": "b", None: 0.5, 2.5: {}}}
    extra = {"schedule": schedule.state_dict(), "odd": odd}
    save(tmp_path, step=1, model=model, optimizer=optimizer, extra=extra, comm=alone)

    again, resumed = made(model)
    found = load(tmp_path, model=model, optimizer=again, comm=alone).extra
    resumed.load_state_dict(found["schedule"])
    for each in (optimizer, again):
        each.step()
    for each in (schedule, resumed):
        each.step(), each.step(), each.step()
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.1 / 8
    assert found["odd"] == odd


def test_no_file_of_a_checkpoint_is_a_pickle(saved: Path) -> None:
    assert {path.suffix for path in saved.iterdir()} == {".safetensors", ".json"}


def test_all_ranks_load_what_rank_0_wrote(tmp_path: Path) -> None:
    lock = threading.Lock()  # ranks are threads here, and the random numbers are the process's

    def write_and_read(comm: Communicator) -> tuple[Loaded, dict[str, list[Any]]]:
        with lock:
            torch.manual_seed(comm.rank)
            model = Small()
        save(tmp_path, step=7, model=model, comm=comm)
        return load(tmp_path, model=model, comm=comm), bits(model)

    results = run_loopback(3, write_and_read)
    torch.manual_seed(0)
    assert [model for _, model in results] == [bits(Small())] * 3
    assert {loaded.ranks for loaded, _ in results} == {3}


def test_a_distributed_optimizer_goes_on_where_it_left_off(tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: DistributedOptimizer, comm: Communicator) -> None:
        optimizer.zero_grad()
        (model(torch.ones(2, 3)) * (comm.rank + 1)).square().mean().backward()
        optimizer.step()

    def make(comm: Communicator) -> tuple[nn.Module, DistributedOptimizer]:
        model = nn.Linear(3, 2)
        broadcast_parameters(model, comm)
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, DistributedOptimizer(inner, model.named_parameters(), comm)

    def interrupt_and_resume(comm: Communicator) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        model, optimizer = make(comm)
        for _ in range(2):
            step(model, optimizer, comm)
        save(tmp_path, step=2, model=model, optimizer=optimizer, comm=comm)
        resumed, resumed_optimizer = make(comm)
        step(resumed, resumed_optimizer, comm)
        load(tmp_path, model=resumed, optimizer=resumed_optimizer, comm=comm)
        for _ in range(3):
            step(model, optimizer, comm)
            step(resumed, resumed_optimizer, comm)
        return bits(model), bits(resumed)

    for uninterrupted, resumed in run_loopback(2, interrupt_and_resume):
        assert resumed == uninterrupted


def test_more_ranks_than_before_are_told_which_of_them_found_no_random_state(tmp_path: Path) -> None:
    run_loopback(2, lambda comm: save(tmp_path, step=1, model=Small(), comm=comm))
    loaded = run_loopback(3, lambda comm: load(tmp_path, model=Small(), comm=comm))
    assert [entry.random_restored for entry in loaded] == [True, True, False]


def test_what_goes_wrong_on_one_rank_is_raised_on_all_and_changes_no_model(tmp_path: Path) -> None:
    save(tmp_path / "good", step=1, model=Small(), comm=Communicator.alone())

    def attempt(comm: Communicator) -> tuple[str, bool]:
        model = Small(8 if comm.rank == 1 else 6)
        before = bits(model)
        with pytest.raises(PeerFailedError) as caught:
            load(tmp_path / "good", model=model, comm=comm)
        return str(caught.value), bits(model) == before

    for message, unchanged in run_loopback(3, attempt):
        assert "rank 1: CheckpointError" in message
        assert "embed.weight" in message
        assert unchanged


def test_ranks_that_do_not_save_or_load_the_same_are_refused(tmp_path: Path) -> None:
    def work(comm: Communicator) -> list[str]:
        model = Small()
        optimizer = OPTIMIZERS["momentum"](model)
        path = save(tmp_path / f"of rank {comm.rank}", step=1, model=model, optimizer=optimizer, comm=comm)
        on_one = optimizer if comm.rank == 1 else None
        told = [str(path)]
        for step, wrong in ((2, on_one), (2 + comm.rank, optimizer)):
            with pytest.raises((CheckpointError, PeerFailedError)) as caught:
                save(tmp_path / "of rank 0", step=step, model=model, optimizer=wrong, comm=comm)
            told.append(str(caught.value))
        with pytest.raises(PeerFailedError) as caught:
            load(path, model=model, optimizer=on_one, comm=comm)
        return [*told, str(caught.value)]

    for path, saving, steps, loading in run_loopback(2, work):
        assert path == str(tmp_path / "of rank 0" / "step-00000001")
        assert "rank 0 has no optimizer, rank 1 has an optimizer with 1 groups" in saving
        assert "rank 0 has step 2, rank 1 has step 3" in steps
        assert "rank 0 has no optimizer, rank 1 has an optimizer with 1 groups" in loading
    assert [each.name for each in (tmp_path / "of rank 0").iterdir()] == ["step-00000001"]


def test_two_tensors_are_not_loaded_into_one(tmp_path: Path, alone: Communicator) -> None:
    model = Small()
    model.head.weight = nn.Parameter(model.embed.weight.detach() + 1)
    path = save(tmp_path, step=1, model=model, comm=alone)
    with pytest.raises(
        CheckpointError, match=r"head\.weight and embed\.weight are two tensors there, and one in"
    ):
        load(path, model=Small(), comm=alone)


def test_a_directory_that_cannot_be_written_fails_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    def attempt(comm: Communicator) -> str:
        with pytest.raises(PeerFailedError) as caught:
            save(tmp_path / "file", step=1, model=Small(), comm=comm)
        return str(caught.value)

    for message in run_loopback(2, attempt):
        assert "saving the checkpoint" in message
        assert "rank 0:" in message


@pytest.mark.mpi
def test_ranks_over_mpi_resume_with_their_own_random_numbers(tmp_path: Path, world: Communicator) -> None:
    directory = Path(world.broadcast_object(str(tmp_path)))
    seeded(world.rank)
    model = Small()
    save(directory, step=1, model=model, comm=world)
    expected = (torch.rand(2).tolist(), np.random.rand(), random.random())
    seeded(100)
    load(directory, model=model, comm=world)
    found = (torch.rand(2).tolist(), np.random.rand(), random.random())
    same = world.allgather_object(found == expected)
    first_draws = world.allgather_object(found[1])
    assert all(same)
    assert len(set(first_draws)) == world.size
