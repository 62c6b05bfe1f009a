"""Checkpoints made by a stranger: each has a manifest that fits, and is loaded or refused, nothing else."""

from __future__ import annotations

import json
import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpcpar.checkpoint import load, read_extra, save
from hpcpar.checkpoint.manifest import MANIFEST, FileDigest, Manifest, SavedState
from hpcpar.comm import Communicator
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.errors import CheckpointError

ALONE = Communicator.alone()
PIECE = "optimizer.rank00000.000.safetensors"


def made(seed: int = 0) -> tuple[nn.Module, DistributedOptimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), ALONE, zero_stage=1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, optimizer = made()
    return save(tmp_path, step=1, model=model, optimizer=optimizer, extra={"a": 1}, comm=ALONE)


def seal(path: Path, further: dict[str, Any] | None = None) -> None:
    """Write a manifest that fits the files as they are now, and names `further` ones."""
    files = {each.name: FileDigest.of(each) for each in path.iterdir() if each.name != MANIFEST}
    content = {name: digest.model_dump() for name, digest in files.items()} | (further or {})
    # Without the checks of names that the constructor makes.
    digests = {name: FileDigest(**entry) for name, entry in content.items()}
    manifest = Manifest.model_construct(step=1, files=digests, format=3)
    (path / MANIFEST).write_text(manifest.text())


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    content = json.loads(path.read_text())
    replaced = change(content)
    path.write_text(json.dumps(content if replaced is None else replaced))
    seal(path.parent)


def outcome(path: Path) -> str:
    """'loaded', or the text of the CheckpointError, which has left all as it was."""
    model, optimizer = made(1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    drawn = torch.get_rng_state()
    try:
        load(path, model=model, optimizer=optimizer, comm=ALONE)
        return "loaded"
    except CheckpointError as error:
        text = str(error)
    assert all(map(torch.equal, model.parameters(), before)), text
    assert torch.get_rng_state().equal(drawn), text
    return text


def test_a_sealed_checkpoint_without_changes_loads(saved: Path) -> None:
    seal(saved)
    assert outcome(saved) == "loaded"


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside", "a/b", "..", ""])
def test_a_manifest_names_files_of_its_directory_alone(saved: Path, name: str) -> None:
    (saved.parent / "outside").write_text("x")
    outside = FileDigest.of(Path("/etc/passwd") if name.startswith("/") else saved.parent / "outside")
    seal(saved, {name: outside.model_dump()})
    assert "is not the name of a file in the checkpoint" in outcome(saved)


@pytest.mark.parametrize("name", ["/etc/passwd", f"../step-00000001/{PIECE}", "unlisted.safetensors"])
def test_pieces_are_in_files_of_the_manifest_alone(saved: Path, name: str) -> None:
    text = (saved / "pieces.json").read_text().replace(PIECE, name)
    (saved / "pieces.json").write_text(text)
    seal(saved)
    assert outcome(saved).startswith(str(saved / "pieces.json"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [(PIECE, "link"), (PIECE, "endless"), ("state.json", "fifo"), (MANIFEST, "fifo"), (MANIFEST, "link")],
)
def test_links_devices_and_pipes_are_no_files(saved: Path, name: str, kind: str) -> None:
    path = saved / name
    path.rename(saved.parent / "elsewhere")
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(saved.parent / "elsewhere" if kind == "link" else "/dev/zero")
    assert f"{path} is not a regular file" in outcome(saved)
    with pytest.raises(CheckpointError):
        read_extra(saved)


@pytest.mark.parametrize("name", [MANIFEST, "state.json", "pieces.json"])
def test_json_of_any_depth_and_type_is_refused_and_named(saved: Path, name: str) -> None:
    for text in ("[" * 200_000, '{"a":' * 200_000, "", "null", "[]", "1e999", "1" * 5000):
        (saved / name).write_text(text)
        if name != MANIFEST:
            seal(saved)
        assert str(saved / name) in outcome(saved), text[:9]


WRONG: dict[str, list[Any]] = {
    "step": ["one", 1e308, -1, None],
    "extra": [[], None, "x"],
    "random": [[], {}, [1], [{}], [{"python": [3, None], "numpy": ["x", 0, 0.0]}]],
    "aliases": [[], {"a": 1}, {"a": "nowhere"}],
    "optimizer": [None, [], {"scalars": {}, "groups": [{}]}, {"scalars": [], "groups": []}],
    "names": [[], [1], 3],
    "tp": [[], [[0]], [["a", 1]]],
}


def test_a_state_of_another_type_is_refused(saved: Path) -> None:
    content = (saved / "state.json").read_text()
    for key, values in WRONG.items():
        for value in values:
            edit(saved / "state.json", lambda state, key=key, value=value: state.update({key: value}))
            assert outcome(saved) != "loaded", (key, value)
            (saved / "state.json").write_text(content)


@pytest.mark.parametrize(("key", "value"), [("lr", "0; import os"), ("lr", [1]), ("weight_decay", {})])
def test_an_option_that_is_no_number_is_refused(saved: Path, key: str, value: Any) -> None:
    def change(content: Any) -> None:
        content["optimizer"]["groups"][0]["options"][key] = value

    edit(saved / "state.json", change)
    assert f"was saved with {key} = " in outcome(saved)


def first_record(content: Any) -> Any:
    return next(iter(content["optimizer"].values()))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: first_record(content).update(dtype="float128"),
        lambda content: first_record(content).update(dtype="Tensor"),
        lambda content: first_record(content).update(dtype="float16"),
        lambda content: first_record(content).update(shape=[1 << 40]),
        lambda content: first_record(content).update(shape=[-3]),
        lambda content: first_record(content)["parts"].clear(),
        lambda content: first_record(content)["parts"].append(first_record(content)["parts"][0]),
        lambda content: first_record(content)["parts"][0].update(strides=[1 << 40, 1]),
        lambda content: first_record(content)["parts"][0].update(strides=[-3, 1]),
        lambda content: first_record(content)["parts"][0].update(ranges=[[[0, 1 << 40]], [[0, 3]]]),
        lambda content: first_record(content)["parts"][0].update(ranges=[[[3, 0]], [[0, 3]]]),
        lambda content: first_record(content)["parts"][0]["pieces"][0].__setitem__(2, 1 << 40),
        lambda content: first_record(content)["parts"][0]["pieces"][0].__setitem__(1, "x"),
        lambda content: content["optimizer"].update(state=first_record(content)),
        lambda content: content["optimizer"].update({"options/x/lr": first_record(content)}),
    ],
)
def test_pieces_that_do_not_fit_their_files_are_refused(saved: Path, change: Callable[[Any], Any]) -> None:
    edit(saved / "pieces.json", change)
    assert outcome(saved) != "loaded"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("model.safetensors", "F128"), ("random.safetensors", "I16"), (PIECE, "F8_E8M0"), (PIECE, "BOOL")],
)
def test_a_header_of_another_type_is_refused(saved: Path, name: str, dtype: str) -> None:
    content = (saved / name).read_bytes()
    (nbytes,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + nbytes])
    for key in header:
        header[key]["dtype"] = dtype
    text = json.dumps(header).encode()
    (saved / name).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + nbytes :])
    seal(saved)
    assert outcome(saved) != "loaded"


def test_a_json_file_beyond_the_limit_is_refused_unread(saved: Path) -> None:
    for name in (MANIFEST, "state.json"):
        content = (saved / name).read_bytes()
        os.truncate(saved / name, 1 << 42)  # sparse
        with pytest.raises(CheckpointError, match="bytes; its kind has at most"):
            Manifest.of(saved) if name == MANIFEST else SavedState.read(saved / name)
        (saved / name).write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "random.safetensors"])
def test_a_header_of_many_empty_tensors_is_refused_in_seconds(saved: Path, name: str) -> None:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    text = json.dumps({f"state/{n}/x": empty for n in range(100_000)}).encode()
    (saved / name).write_bytes(struct.pack("<Q", len(text)) + text)
    seal(saved)
    began = time.process_time()
    assert outcome(saved) != "loaded"
    assert time.process_time() - began < 10  # 3 s on an idle core


def test_a_part_that_is_there_many_times_is_refused_in_seconds(saved: Path) -> None:
    def change(content: Any) -> None:
        first_record(content)["parts"] *= 50_000

    edit(saved / "pieces.json", change)
    began = time.process_time()
    assert "cannot have regions" in outcome(saved)
    assert time.process_time() - began < 5


def mutated(value: Any, chance: random.Random) -> Any:
    """Replace one value somewhere in a JSON value."""
    if isinstance(value, (dict, list)) and value and chance.random() < 0.9:
        key = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value[key] = mutated(value[key], chance)
        return value
    return chance.choice([None, True, -1, 0, 1 << 70, 0.5, float("nan"), "x", "", [], {}, [[]], {"a": []}])


@pytest.mark.parametrize("name", ["state.json", "pieces.json"])
def test_random_changes_are_loaded_or_refused_and_nothing_else(saved: Path, name: str) -> None:
    chance = random.Random(0)
    content, refused = (saved / name).read_text(), 0
    for _ in range(130):
        edit(saved / name, lambda value: mutated(value, chance))
        refused += outcome(saved) != "loaded"
        (saved / name).write_text(content)
    assert refused > 40


@pytest.mark.parametrize("name", ["model.safetensors", "random.safetensors", PIECE])
def test_random_bytes_in_headers_are_loaded_or_refused_and_nothing_else(saved: Path, name: str) -> None:
    chance = random.Random(1)
    content, refused = (saved / name).read_bytes(), 0
    for _ in range(80):
        changed = bytearray(content)
        changed[chance.randrange(200)] = chance.randrange(256)
        (saved / name).write_bytes(changed)
        seal(saved)
        refused += outcome(saved) != "loaded"
    assert refused > 20
