"""Which part of a whole each rank holds: drawn by hand, and put together again for every kind of split."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import LayoutError, MismatchError, ShardedParameterError
from hpcpar.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from hpcpar.tensor_parallel.split import (
    Heads,
    Split,
    gather_whole,
    own_shard,
    padded_length,
    place,
    replicated,
    require_divisible,
    require_fitting,
    require_shareable,
    shard_state_dict,
    split_evenly,
    split_over,
    split_sections,
    whole_state_dict,
)

SPLITS = {
    "rows": lambda p: split_evenly(12, p),
    "columns": lambda p: split_evenly(12, p, dim=1),
    "padded": lambda p: split_evenly(7, p, padded=padded_length(7, p)),
    "less than ranks": lambda p: split_evenly(2, p, padded=padded_length(2, p)),
    "fused": lambda p: split_sections((12, 24), p),
    "heads": lambda p: split_sections((Heads(12, 2), Heads(12, 2)), p),
    "shared heads": lambda p: split_sections((Heads(1, 2), Heads(1, 3)), p),
    "replicated": lambda p: replicated(12, p),
}


def whole_of(split: Split) -> torch.Tensor:
    shape = [5, 6]
    shape[split.dim] = split.length
    return torch.arange(shape[0] * shape[1]).view(shape)


def test_sections_are_divided_each_by_itself() -> None:
    assert split_sections((4, 2), 2).parts == (((0, 2), (4, 5)), ((2, 4), (5, 6)))


def test_heads_that_are_fewer_than_ranks_are_held_by_several() -> None:
    split = split_sections((Heads(2, 3),), 4)
    assert split.parts == (((0, 3),), ((0, 3),), ((3, 6),), ((3, 6),))
    assert split.replicas == (0, 1, 0, 1)


def test_a_padded_part_ends_in_zeros() -> None:
    split = split_evenly(5, 2, padded=6)
    assert split.parts == (((0, 3),), ((3, 5),))
    assert split.shard(torch.arange(1, 6), 1).tolist() == [4, 5, 0]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", SPLITS)
def test_shards_make_the_whole_again(kind: str, size: int) -> None:
    split = SPLITS[kind](size)
    whole = whole_of(split)
    shards = [split.shard(whole, rank) for rank in range(size)]
    assert [shard.shape for shard in shards] == [split.shard_shape(whole.shape, rank) for rank in range(size)]
    assert split.whole_shape(shards[0].shape) == whole.shape
    assert torch.equal(split.whole(shards), whole)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", SPLITS)
def test_ranks_gather_the_whole_from_a_parameter_that_carries_its_split(kind: str, size: int) -> None:
    split = SPLITS[kind](size)
    whole = whole_of(split).double()

    def gathered(comm: Communicator) -> torch.Tensor:
        parameter = nn.Parameter(split.shard(whole, comm.rank))
        place(parameter, split, comm)
        assert torch.equal(own_shard(parameter, whole), parameter)
        return gather_whole(parameter)

    assert all(torch.equal(found, whole) for found in run_loopback(size, gathered))


def test_only_divided_parameters_are_split_over_ranks() -> None:
    def names(comm: Communicator) -> set[str]:
        module = nn.Linear(6, 4)
        place(module.weight, split_evenly(8, 2), comm)
        place(module.bias, replicated(4, 2), comm)
        return set(split_over(module))

    assert run_loopback(2, names) == [{"weight"}] * 2


LAYERS: dict[str, Callable[[Communicator], nn.Module]] = {
    "column": lambda comm: ColumnParallelLinear(6, (Heads(1, 4), Heads(1, 2)), comm),
    "row": lambda comm: RowParallelLinear(6, 4, comm),
    "embedding": lambda comm: VocabParallelEmbedding(7, 6, comm),
}


@pytest.mark.parametrize("how", ["memory after meta", "assigned on loading", "assigned by hand"])
@pytest.mark.parametrize("kind", LAYERS)
def test_parameters_that_take_the_place_of_others_carry_their_split(kind: str, how: str) -> None:
    def is_whole(comm: Communicator) -> bool:
        expected = LAYERS[kind](comm)
        with torch.device("meta"):
            layer = LAYERS[kind](comm)
        if how == "memory after meta":
            layer.to_empty(device="cpu").load_state_dict(shard_state_dict(expected))
        elif how == "assigned on loading":
            layer.load_state_dict(shard_state_dict(expected), assign=True)
        else:
            for name, parameter in expected.named_parameters():
                setattr(layer, name, nn.Parameter(parameter.detach()))
        found, whole = whole_state_dict(layer), whole_state_dict(expected)
        return split_over(layer).keys() == split_over(expected).keys() and all(
            torch.equal(found[name], whole[name]) for name in whole
        )

    assert run_loopback(2, is_whole) == [True] * 2


def test_what_does_not_divide_is_named_with_the_degrees_that_do() -> None:
    with pytest.raises(LayoutError, match=r"heads=6 does not divide among tp=4 ranks; tp=2 or tp=3 or tp=6"):
        require_divisible(6, 4, "heads")
    with pytest.raises(LayoutError, match=r"kv_heads=3 neither divides among tp=4 ranks nor divides them"):
        require_shareable(3, 4, "kv_heads")
    for ranks in (1, 2, 4, 8):
        require_shareable(4, ranks, "kv_heads")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "message"),
    [
        (6, 2, 3, "kv_heads=2 neither divides among tp=3 ranks nor divides them; tp=1 or tp=2 or tp=6 would"),
        (6, 2, 4, "heads=6 does not divide among tp=4 ranks; tp=1 or tp=2 or tp=6 would"),
        (8, 1, 3, "heads=8 does not divide among tp=3 ranks; tp=1 or tp=2 or tp=4 would"),
        (6, 6, 4, "heads=6 does not divide among tp=4 ranks; tp=2 or tp=3 or tp=6 would"),
    ],
)
def test_degrees_that_are_advised_fit_queries_as_well_as_keys(
    heads: int, kv_heads: int, size: int, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        require_fitting({"heads": heads}, {"kv_heads": kv_heads}, size)


def test_a_part_is_no_whole() -> None:
    with pytest.raises(MismatchError, match="which should have 12 elements"):
        split_evenly(12, 2).shard(torch.zeros(6, 3), 0)


DIVIDED = {**LAYERS, "column": lambda comm: ColumnParallelLinear(6, 12, comm)}


def test_rows_that_all_ranks_hold_are_a_state_as_any() -> None:
    def shapes(comm: Communicator) -> list[int]:
        return list(LAYERS["column"](comm).state_dict()["weight"].shape)

    assert run_loopback(2, shapes) == [[6, 6]] * 2


@pytest.mark.parametrize("kind", DIVIDED)
def test_a_state_of_shards_is_refused_and_to_be_had_by_name(kind: str) -> None:
    def found(comm: Communicator) -> tuple[str, dict[str, list[int]]]:
        model = nn.Sequential(DIVIDED[kind](comm), nn.LayerNorm(4))
        with pytest.raises(ShardedParameterError, match=r"0\.weight this is one of 2 shards") as caught:
            model.state_dict()
        shards = shard_state_dict(model)
        with pytest.raises(ShardedParameterError):
            torch.save(model.state_dict(), "never written")
        again = nn.Sequential(DIVIDED[kind](comm), nn.LayerNorm(4))
        again.load_state_dict(shards)
        assert all(torch.equal(shards[name], own) for name, own in again.named_parameters())
        return str(caught.value), {name: list(value.shape) for name, value in shards.items()}

    (first, shapes), (second, _) = run_loopback(2, found)
    assert first == second
    assert "call whole_state_dict(model) on all ranks" in first
    assert shapes["0.weight"] == {"column": [6, 6], "row": [4, 3], "embedding": [4, 6]}[kind]


def test_a_layer_on_one_rank_has_a_state_as_any() -> None:
    alone = Communicator.alone()
    assert all(
        list(layer(alone).state_dict()) == list(shard_state_dict(layer(alone))) for layer in DIVIDED.values()
    )


@pytest.mark.parametrize("options", [{}, {"assign": True}, {"strict": False}], ids=str)
@pytest.mark.parametrize("kind", DIVIDED)
def test_of_a_whole_state_each_rank_keeps_its_part(kind: str, options: dict[str, bool]) -> None:
    whole = {
        name: torch.randn(value.shape)
        for name, value in DIVIDED[kind](Communicator.alone()).state_dict().items()
    }

    def loaded(comm: Communicator) -> dict[str, Tensor]:
        layer = DIVIDED[kind](comm)
        assert not any(layer.load_state_dict(whole, **options))
        with pytest.raises(RuntimeError, match="size mismatch"):
            layer.load_state_dict({name: value[:2] for name, value in whole.items()}, strict=False)
        return whole_state_dict(layer)

    for found in run_loopback(2, loaded):
        assert all(torch.equal(found[name], value) for name, value in whole.items())
