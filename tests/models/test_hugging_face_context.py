"""Models of transformers whose sequences ranks share are those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar.comm import Communicator, run_loopback
from hpcpar.context_parallel import ContextParallel, Mask
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.errors import LayoutError, MismatchError
from hpcpar.mesh import Mesh
from hpcpar.models.hugging_face import hugging_face_llama_plan
from hpcpar.models.hugging_face_context import share_sequences
from hpcpar.tensor_parallel import TensorParallel, gather_whole, parallelize
from tests.models.test_hugging_face import VOCABULARY, llama

pytest.importorskip("transformers")

STEPS, ROWS, LENGTH = 5, 2, 22

WINDOW = {"sliding_window": 5, "max_position_embeddings": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {"tie_word_embeddings": True}),
    "Mistral with a window": ("Mistral", WINDOW),
    "Mistral without": ("Mistral", {"sliding_window": None}),
    "Qwen2, one layer of two with a window": (
        "Qwen2",
        WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    ),
    "Qwen3": ("Qwen3", {"head_dim": 8, "attention_bias": True}),
    "Qwen3 with a window": (
        "Qwen3",
        WINDOW | {"use_sliding_window": True, "max_window_layers": 0, "head_dim": 8},
    ),
}


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))


def targets() -> Tensor:
    """Those of the first half of the sequence are left out: some ranks have fewer."""
    following = tokens().roll(-1, 1)
    following[:, : LENGTH // 2] = -100
    following[:, -1] = -100
    return following


def trained(model: nn.Module, cp: ContextParallel | None = None) -> dict[str, Tensor]:
    """Parameters after some steps of SGD on a loss in float64: transformers' own is in float32."""
    ranks = Communicator.alone() if cp is None else cp.comm
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    steps = DistributedOptimizer(sgd, model.named_parameters(), ranks)
    own = targets() if cp is None else cp.own_tokens(targets())
    for _ in range(STEPS):
        steps.zero_grad()
        logits = model(tokens()).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum")
        (loss * ranks.size / int((targets() != -100).sum())).backward()  # type: ignore[no-untyped-call]
        steps.step()
    return {name: gather_whole(parameter).detach() for name, parameter in model.named_parameters()}


def require_same(found: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    assert found.keys() == truth.keys()
    for name, value in truth.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "size", "method"),
    [
        *((name, 2, "exchange") for name in MODELS),
        ("Llama", 4, "ring"),
        ("Mistral with a window", 4, "exchange"),
        ("Qwen2, one layer of two with a window", 4, "ulysses"),
        ("Qwen2, one layer of two with a window", 4, "allgather"),
        ("Qwen3 with a window", 4, "ring"),
    ],
)
def test_training_is_that_of_transformers_in_one_process(name: str, size: int, method: str) -> None:
    kind, changes = MODELS[name]
    model = llama(kind=kind, wide=True, **changes)
    copies = [copy.deepcopy(model) for _ in range(size)]

    def on_rank(comm: Communicator) -> dict[str, Tensor]:
        cp = ContextParallel(comm, method)  # type: ignore[arg-type]
        with cp.using(Mask(LENGTH)):
            return trained(share_sequences(copies[comm.rank], cp), cp)

    truth = trained(model)
    for found in run_loopback(size, on_rank):
        require_same(found, truth)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_with_tensor_parallelism_by_a_plan_it_is_the_same(sequence_parallel: bool) -> None:
    model = llama(wide=True)
    copies = [copy.deepcopy(model) for _ in range(4)]

    def on_rank(comm: Communicator) -> dict[str, Tensor]:
        mesh = Mesh(comm, tp=2, cp=2)
        tp = TensorParallel(mesh.tp, sequence_parallel=sequence_parallel)
        cp = ContextParallel(mesh.cp, multiple=2)
        parallel = parallelize(copies[comm.rank], hugging_face_llama_plan(model.config), tp)
        with cp.using(Mask(LENGTH)):
            return trained(share_sequences(parallel, cp), cp)

    truth = trained(model)
    for found in run_loopback(4, on_rank):
        require_same(found, truth)


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_ranks_average_loss_and_gradient_with_labels_are_the_models_own(recomputed: bool) -> None:
    model = llama(kind="Mistral", wide=True, **WINDOW).train()
    copies = [copy.deepcopy(model) for _ in range(4)]
    labels = tokens()
    labels[:, : LENGTH // 2] = -100
    expected = model(tokens(), labels=labels).loss
    expected.backward()

    def on_rank(comm: Communicator) -> tuple[Tensor, dict[str, Tensor]]:
        cp = ContextParallel(comm)
        own = share_sequences(copies[comm.rank], cp)
        if recomputed:
            own.gradient_checkpointing_enable({"use_reentrant": False})
        with cp.using(Mask(LENGTH)):
            loss = own(tokens(), labels=labels, attention_mask=torch.ones_like(labels)).loss
            loss.backward()
        gradients = {
            name: comm.allreduce(p.grad.contiguous(), "average") for name, p in own.named_parameters()
        }
        return comm.allreduce(loss.detach().clone(), "average"), gradients

    for loss, gradients in run_loopback(4, on_rank):
        # transformers takes the loss in float32.
        torch.testing.assert_close(loss.float(), expected.detach().float(), rtol=1e-6, atol=0)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_packed_documents_are_what_they_are_by_themselves() -> None:
    model = llama(wide=True).eval()
    copies = [copy.deepcopy(model) for _ in range(2)]
    documents = (13, 9, 5, 17)  # the second row begins within the third

    def on_rank(comm: Communicator) -> tuple[Tensor, Tensor]:
        cp = ContextParallel(comm)
        own = share_sequences(copies[comm.rank], cp)
        with cp.using(Mask(ROWS * LENGTH, documents=documents)):
            output = own(tokens(), labels=tokens())
            return cp.unshard(output.logits), comm.allreduce(output.loss.detach().clone(), "average")

    parts = tokens().flatten().split(documents)
    alone = [model(part[None], labels=part[None]) for part in parts]
    items = torch.tensor([float(length - 1) for length in documents])
    expected = (torch.stack([output.loss.detach() for output in alone]) * items).sum() / items.sum()
    for logits, loss in run_loopback(2, on_rank):
        torch.testing.assert_close(logits, torch.cat([output.logits for output in alone], 1).detach())
        torch.testing.assert_close(loss.float(), expected.float(), rtol=1e-6, atol=0)


def test_what_cannot_be_shared_is_refused_with_what_to_do() -> None:
    models = [llama() for _ in range(2)]
    padded = torch.ones(ROWS, LENGTH)
    padded[0, :3] = 0
    refusals: list[tuple[type[Exception], str, Mask, dict[str, Any]]] = [
        (MismatchError, "attention_mask has padding", Mask(LENGTH), {"attention_mask": padded}),
        (MismatchError, "a cache of keys has whole sequences", Mask(LENGTH), {"use_cache": True}),
        (MismatchError, "position_ids cannot be given", Mask(LENGTH), {"position_ids": tokens()}),
        (MismatchError, "logits_to_keep cannot be given", Mask(LENGTH), {"logits_to_keep": 1}),
        (MismatchError, "give one for each token", Mask(LENGTH), {"labels": tokens()[:, 1:]}),
        (LayoutError, "is not causal, and the model is", Mask(LENGTH, causal=False), {}),
        (MismatchError, "but the mask in use 23", Mask(LENGTH + 1), {}),
        (LayoutError, "leaves rank 1 of 2 without any", Mask(1), {}),
    ]

    def on_rank(comm: Communicator) -> None:
        cp = ContextParallel(comm)
        model = share_sequences(models[comm.rank], cp)
        with pytest.raises(LayoutError, match="no mask is in use"):
            model(tokens())
        for kind, message, mask, inputs in refusals:
            with cp.using(mask), pytest.raises(kind, match=message):
                model(tokens(), **inputs)

    run_loopback(2, on_rank)


def test_models_that_it_is_not_for_are_refused() -> None:
    cp = ContextParallel(Communicator.alone())
    with pytest.raises(LayoutError, match=r"a model of the type 'Linear'.*llama, mistral, qwen2, qwen3"):
        share_sequences(nn.Linear(1, 1), cp)
    with pytest.raises(LayoutError, match=r"attention_dropout=0\.5"):
        share_sequences(llama(attention_dropout=0.5), cp)
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(LayoutError, match="rope_type='dynamic'"):
        share_sequences(llama(rope_parameters=dynamic), cp)
    shared = llama()
    other = type(shared)(shared.config)
    share_sequences(shared, cp)
    if other.config is shared.config:
        with pytest.raises(LayoutError, match="give each model a config of its own"):
            other(tokens())


@pytest.mark.mpi
def test_on_mpi_too_training_is_that_of_one_process(world: Communicator) -> None:
    model = llama(kind="Mistral", wide=True, **WINDOW)
    truth = trained(copy.deepcopy(model))
    cp = ContextParallel(world)
    with cp.using(Mask(LENGTH)):
        found = trained(share_sequences(model, cp), cp)
    near = [torch.allclose(found[name], truth[name], rtol=1e-10, atol=1e-10) for name in truth]
    assert world.allgather_object(all(near)) == [True] * world.size
