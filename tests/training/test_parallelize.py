"""A training loop of one's own on `parallelize_llama`: on any mesh the numbers of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import hpcpar
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import summon_full_parameters
from hpcpar.errors import ConfigError, LayoutError, PeerFailedError
from hpcpar.mesh import Mesh
from hpcpar.models import Experts, Llama, LlamaConfig, next_token_loss
from hpcpar.tensor_parallel import gather_whole
from hpcpar.training import train_step

SMALL = LlamaConfig(
    vocab_size=13,
    hidden_size=16,
    layers=4,
    heads=4,
    kv_heads=2,
    ffn_size=24,
    max_sequence=16,
    initial_std=0.2,
)
MIXTURE = replace(SMALL, experts=Experts(count=4, per_token=2, ffn_size=8, balance_loss=0.01, z_loss=0.01))
TIED = replace(SMALL, tie_embeddings=True)
BATCH, SEQUENCE, STEPS, CLIP = 8, 16, 3, 0.5

Parameters = dict[str, Tensor]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets [B, S]; unevenly many of these are no targets."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, SMALL.vocab_size, (BATCH, SEQUENCE + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[: BATCH // 2, SEQUENCE // 4 :] = -100
    return tokens[:, :-1], targets


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def of_one_process(sizes: LlamaConfig) -> tuple[list[float], Parameters]:
    """Losses and parameters by plain torch, with the whole batch at once."""
    model = Llama(sizes, seed=0).double()
    optimizer = sgd(model)
    losses = []
    for step in range(STEPS):
        tokens, targets = batch(step)
        loss = next_token_loss(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def of_a_rank(
    sizes: LlamaConfig, degrees: dict[str, int], tables: dict[str, Any], comm: Communicator
) -> tuple[list[float], Parameters]:
    """Losses, and the parameters of this rank's layers, gathered over the ranks that share them."""
    mesh = hpcpar.Mesh(comm, degrees)
    train = {"global_batch": BATCH, "sequence": SEQUENCE, "precision": "float64", "microbatch": BATCH}
    settings = {**tables, "train": {**train, **tables.get("train", {})}}
    parallel = hpcpar.parallelize_llama(sizes, mesh, settings)
    worker = parallel.worker(sgd(parallel.model))
    losses = []
    for step in range(STEPS):
        tokens, targets = (whole.chunk(mesh.dp.size)[mesh.dp.rank] for whole in batch(step))
        result = train_step(worker, tokens, targets, clip_norm=CLIP)
        share = result.loss_share.reshape(1)
        losses.append(mesh.comm("pp", "dp", "cp").allreduce(share).item())
    with summon_full_parameters(parallel.model):
        whole = {name: gather_whole(p).clone() for name, p in parallel.model.named_parameters()}
    return losses, whole


BY_TWO = {"train": {"microbatch": 2}}


@pytest.mark.parametrize(
    ("sizes", "degrees", "tables"),
    [
        pytest.param(SMALL, {"tp": 2}, {}, id="dp 2 x tp 2"),
        pytest.param(SMALL, {"tp": 2}, {"tensor_parallel": {"sequence_parallel": True}}, id="sp"),
        pytest.param(SMALL, {"cp": 2}, {"optimizer": {"zero_stage": 2}}, id="dp 2 x cp 2, ZeRO-2"),
        pytest.param(SMALL, {"tp": 2}, {**BY_TWO, "optimizer": {"zero_stage": 3}}, id="tp 2, ZeRO-3"),
        pytest.param(SMALL, {"dp_shard": 2}, {"optimizer": {"zero_stage": 1}}, id="HSDP"),
        pytest.param(SMALL, {"pp": 2}, {**BY_TWO, "optimizer": {"zero_stage": 1}}, id="pp 2 x dp 2, ZeRO-1"),
        pytest.param(
            TIED,
            {"pp": 2, "tp": 2},
            {**BY_TWO, "pipeline": {"schedule": "interleaved"}},
            id="tied, pp 2 x tp 2",
        ),
        pytest.param(SMALL, {"pp": 2, "cp": 2}, {**BY_TWO, "pipeline": {"schedule": "zb-v"}}, id="zb-v"),
        pytest.param(TIED, {"pp": 2}, {**BY_TWO, "optimizer": {"zero_stage": 3}}, id="pp 2 x dp 2, ZeRO-3"),
        pytest.param(MIXTURE, {"ep": 2}, {}, id="dp 4 x ep 2"),
        pytest.param(MIXTURE, {"ep": 2, "tp": 2}, {"optimizer": {"zero_stage": 3}}, id="ep 2, ZeRO-3"),
    ],
)
def test_a_loop_of_ones_own_on_any_mesh_trains_as_one_process(
    sizes: LlamaConfig, degrees: dict[str, int], tables: dict[str, Any]
) -> None:
    expected_losses, expected = of_one_process(sizes)
    of_ranks = run_loopback(4, partial(of_a_rank, sizes, degrees, tables))
    seen = set()
    for losses, found in of_ranks:
        # float64: only the order of summation differs.
        assert losses == pytest.approx(expected_losses, abs=1e-10)
        assert found.keys() <= expected.keys() | {"lm_head.weight"}
        for name, parameter in found.items():
            truth = expected.get(name, expected["model.embed_tokens.weight"])  # a copy of tied embeddings
            torch.testing.assert_close(parameter, truth, rtol=0, atol=1e-10)
        seen |= found.keys()
    assert seen >= expected.keys()


@pytest.mark.parametrize(
    ("sizes", "degrees", "tables", "words"),
    [
        (
            SMALL,
            {},
            {"optimizer": {"zero": 1}},
            "there is no key optimizer.zero; did you mean optimizer.zero_stage",
        ),
        (SMALL, {}, {"mesh": {"tp": 2}}, "mesh is not read: degrees are those of the mesh"),
        (SMALL, {}, {"model": {"layers": 2}}, "model.layers is not read"),
        (SMALL, {"ep": 3}, {}, "mesh.ep = 3, but the model has no experts"),
        (SMALL, {"tp": 3}, {}, "heads=4"),
        (SMALL, {"pp": 3}, {"train": {"global_batch": 3, "microbatch": 2}}, "train.global_batch = 3 is not"),
        (
            SMALL,
            {},
            {"train": {"sequence": 32}},
            "train.sequence = 32 is longer than model.max_sequence = 16",
        ),
        (
            SMALL,
            {},
            {"pipeline": {"schedule": "2f2b"}},
            "pipeline.schedule = '2f2b' is neither a file nor a name",
        ),
        (
            SMALL,
            {"cp": 3},
            {"context_parallel": {"method": "ulysses"}},
            "model.heads = 4 do not divide among 3",
        ),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(
    sizes: LlamaConfig, degrees: dict[str, int], tables: dict[str, Any], words: str
) -> None:
    train = {"sequence": SEQUENCE, **tables.get("train", {})}

    def refusal(comm: Communicator) -> str:
        with pytest.raises((ConfigError, LayoutError, PeerFailedError)) as caught:
            hpcpar.parallelize_llama(sizes, Mesh(comm, degrees), {**tables, "train": train})
        return str(caught.value)

    for told in run_loopback(3, refusal):
        assert words in told
