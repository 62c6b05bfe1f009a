"""Checkpoints of split parameters: who writes and reads what, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hpcpar.checkpoint import load, save
from hpcpar.checkpoint.files import ShardReader
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.errors import CheckpointError, PeerFailedError
from hpcpar.tensor_parallel.split import comm_of, place, split_evenly, split_sections
from tests.checkpoint.runs import (
    HEAD,
    PARAMETERS,
    WITHOUT_STATE,
    Mode,
    Run,
    in_run,
    saved_by,
)


@pytest.mark.parametrize("mode", [Mode(tp=3), Mode(tp=2, dp=2, stage=1), Mode(tp=4, stage=3)], ids=str)
def test_every_element_is_written_once_and_padding_never(mode: Mode, tmp_path: Path) -> None:
    path = saved_by(mode, tmp_path)
    written: dict[str, int] = {}
    for file in path.glob("*.safetensors"):
        if file.name.startswith("random"):
            continue
        for name, value in load_file(file).items():
            written[name] = written.get(name, 0) + value.numel()
    shapes = {name: math.prod(shape) for name, (shape, _) in PARAMETERS.items() if name != HEAD}
    # Of a fused tensor each rank writes its part, the shared heads in it, too.
    del shapes["layers.0.heads"]
    for name, numel in shapes.items():
        assert written[name] == numel, name
        if name not in WITHOUT_STATE:
            assert written[f"state/{name}/exp_avg"] == numel, name
            assert written[f"state/{name}/step"] == 1, name


def ranks_that_wrote(path: Path, kind: str) -> set[int]:
    return {int(file.name.split("rank")[1][:5]) for file in path.glob(f"{kind}.rank*")}


@pytest.mark.parametrize(
    ("mode", "of_model", "of_states"),
    [
        (Mode(tp=2, dp=2), {0, 1}, {0, 1}),
        (Mode(tp=2, dp=2, stage=1), {0, 1}, {0, 1, 2, 3}),
        (Mode(tp=2, dp=2, stage=3), {0, 1, 2, 3}, {0, 1, 2, 3}),
        (Mode(dp=4), set(), set()),
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
    mode = Mode(tp=2, dp=2, stage=3)
    path = saved_by(mode, tmp_path)
    read: dict[int, int] = {}
    flat = ShardReader.flat

    def counted(self: ShardReader, file: str, name: str, start: int, stop: int) -> Tensor:
        read[id(self)] = read.get(id(self), 0) + (stop - start if "rank" in file else 0)
        return flat(self, file, name, start, stop)

    monkeypatch.setattr(ShardReader, "flat", counted)

    def owned(run: Run) -> int:
        run.load(path)
        assert isinstance(run.optimizer, DistributedOptimizer)
        sharding = run.optimizer.sharding
        assert sharding is not None
        kept = sum(piece.stop - piece.start for piece, _ in sharding.own_pieces())
        return kept + 2 * sum(piece.stop - piece.start for piece, _ in run.optimizer.own_states())

    elements = in_run(mode, owned, seed=1)
    # Less the padding of two parameters and their states; and the number of steps of each parameter.
    for found, most in zip(sorted(read.values()), sorted(elements), strict=True):
        assert most - 3 * 6 <= found <= most + len(PARAMETERS)


def test_a_model_of_another_whole_shape_is_named_by_whole_shapes(tmp_path: Path) -> None:
    path = saved_by(Mode(tp=2, dp=2, stage=1), tmp_path)

    def body(run: Run) -> tuple[str, bool]:
        parameter = run.model.layers["0"].gate_up
        split = split_sections((6, 6), 4)
        other = nn.Parameter(torch.zeros(split.shard_shape((12, 3), run.comm.rank), dtype=torch.float64))
        place(other, split, comm_of(parameter))
        run.model.layers["0"].gate_up = other
        before = [p.detach().clone() for p in run.model.parameters()]
        with pytest.raises(PeerFailedError) as caught:
            load(path, model=run.model, comm=run.comm)
        return str(caught.value), all(map(torch.equal, before, run.model.parameters()))

    for message, unchanged in in_run(Mode(tp=4, plain=True), body, seed=1):
        assert "gate_up there is (14, 3) torch.float64, in the model (12, 3) torch.float64" in message
        assert unchanged


def test_a_parameter_that_is_not_of_its_splits_shape_is_refused(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        bias = run.model.layers["0"].gate_up_bias
        place(bias, split_evenly(10, 2), comm_of(bias))
        run.save(tmp_path)

    with pytest.raises(PeerFailedError, match=r"of shape \(8,\) should have \(5,\), as rank 0 of 2's shard"):
        in_run(Mode(tp=2, plain=True), body)


def test_the_ranks_of_one_axis_cannot_save_for_the_others(tmp_path: Path) -> None:
    def body(run: Run) -> str:
        with pytest.raises((CheckpointError, PeerFailedError)) as caught:
            save(tmp_path, step=0, model=run.model, optimizer=run.optimizer, comm=run.dp_comm)
        return str(caught.value)

    for message in in_run(Mode(tp=2, dp=2, stage=1), body):
        assert "sharded over the 2 ranks of 'dp' and split over the 2 ranks of 'tp'" in message
        assert "saved by the 2 of 'dp'; pass the communicator of all 4" in message
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_cannot_be_split_is_refused_and_named(tmp_path: Path) -> None:
    class Factored(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["row_sums"] = torch.zeros(2)

    def body(run: Run) -> None:
        run.optimizer = Factored(run.model.parameters(), lr=0.1)
        run.optimizer.step()
        run.save(tmp_path)

    with pytest.raises(PeerFailedError, match=r"row_sums of layers\.0\.up, which is split, has shape \(2,\)"):
        in_run(Mode(tp=2, plain=True), body)


def test_the_description_of_parts_can_be_read_by_people(tmp_path: Path) -> None:
    path = saved_by(Mode(tp=2), tmp_path)
    record = json.loads((path / "pieces.json").read_text())["model"]["layers.0.gate_up"]
    assert (record["dtype"], record["shape"]) == ("float64", [14, 3])
    assert [part["ranges"] for part in record["parts"]] == [
        [[[0, 4], [7, 11]], [[0, 3]]],
        [[[4, 7], [11, 14]], [[0, 3]]],
    ]
    files = [f"model.rank0000{rank}.000.safetensors" for rank in range(2)]
    assert [part["pieces"] for part in record["parts"]] == [[[files[0], 0, 24]], [[files[1], 0, 18]]]
