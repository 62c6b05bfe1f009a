from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.models import Llama, LlamaConfig, next_token_loss
from hpcpar.partition import bounds
from hpcpar.training.build import plain_optimizer
from hpcpar.training.config import OptimizerSection
from hpcpar.training.sequences import Sequences
from hpcpar.training.training_step import WholeModel, held_out_loss, train_step

CONFIG = LlamaConfig(vocab_size=11, hidden_size=8, layers=1, heads=2, kv_heads=1, ffn_size=16, max_sequence=6)
SEQUENCE = 6


def model() -> Llama:
    return Llama(CONFIG, seed=1).double()


def distributed(section: OptimizerSection, mine: Llama, comm: Communicator) -> DistributedOptimizer:
    return DistributedOptimizer(plain_optimizer(section, mine), mine.named_parameters(), comm, model=mine)


def global_batch(step: int, sequences: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 11, (sequences, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def serial(section: OptimizerSection, steps: int, sequences: int) -> tuple[list[Tensor], list[float]]:
    """The truth: one process, whole batches, a plain torch optimizer."""
    alone = model()
    optimizer = plain_optimizer(section, alone)
    losses = []
    for step in range(steps):
        tokens, targets = global_batch(step, sequences)
        optimizer.zero_grad()
        loss = next_token_loss(alone(tokens), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), section.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return [parameter.detach().clone() for parameter in alone.parameters()], losses


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_uneven_parts_and_microbatches_train_as_one_process_with_the_whole_batch(
    name: str, size: int
) -> None:
    section = OptimizerSection(name=name, learning_rate=0.05, clip_norm=0.5)
    steps, sequences = 4, 7

    def work(comm: Communicator) -> tuple[list[Tensor], list[float]]:
        mine = model()
        optimizer = distributed(section, mine, comm)
        worker = WholeModel(mine, optimizer, microbatches=3, sequences=Sequences(sequences * SEQUENCE))
        start, stop = bounds(sequences, comm.size)[comm.rank]
        losses = []
        for step in range(steps):
            tokens, targets = global_batch(step, sequences)
            result = train_step(
                worker,
                tokens[start:stop],
                targets[start:stop],
                clip_norm=section.clip_norm,
            )
            losses.append(float(comm.allreduce(result.loss_share.reshape(1))[0]))
        return [parameter.detach() for parameter in mine.parameters()], losses

    expected, expected_losses = serial(section, steps, sequences)
    for parameters, losses in run_loopback(size, work):
        # float64: only the order of summation differs.
        assert losses == pytest.approx(expected_losses, abs=1e-12)
        for found, wanted in zip(parameters, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_no_clipping_leaves_the_gradient_and_tells_its_norm() -> None:
    mine = model()
    optimizer = distributed(OptimizerSection(name="sgd"), mine, Communicator.alone())
    tokens, targets = global_batch(0, 2)
    worker = WholeModel(mine, optimizer, microbatches=3, sequences=Sequences(12))
    result = train_step(worker, tokens, targets, clip_norm=math.inf)
    gradients = [parameter.grad.flatten() for parameter in mine.parameters() if parameter.grad is not None]
    assert float(result.gradient_norm) == pytest.approx(float(torch.cat(gradients).norm()), rel=1e-12)


def test_held_out_loss_is_the_mean_over_all_ranks_tokens_even_if_one_has_none() -> None:
    whole = global_batch(0, 5)
    expected = next_token_loss(model()(whole[0]), whole[1]).item()

    def work(comm: Communicator) -> tuple[float, bool]:
        mine = model()
        rows = [slice(0, 3), slice(3, 5), slice(5, 5)][comm.rank]
        batches = [(whole[0][rows], whole[1][rows])] if comm.rank < 2 else []
        optimizer = distributed(OptimizerSection(), mine, comm)
        worker = WholeModel(
            mine, optimizer, microbatches=1, sequences=Sequences(1)
        )  # of which it takes no notice
        return held_out_loss(worker, batches, comm), mine.training

    for loss, training in run_loopback(3, work):
        assert loss == pytest.approx(expected, abs=1e-12)
        assert training
