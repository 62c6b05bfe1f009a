"""A Llama of Hugging Face's transformers in parallel is the one that it was: logits, gradients, tokens."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from hpcpar.comm import Communicator
from hpcpar.comm import run_loopback as run
from hpcpar.errors import LayoutError, MismatchError, ShardedParameterError
from hpcpar.models.hugging_face import hugging_face_llama_plan
from hpcpar.tensor_parallel import (
    Column,
    Row,
    TensorParallel,
    Whole,
    gather_whole,
    parallelize,
    vocabulary_parallel_cross_entropy,
    whole_state_dict,
)
from tests.grid import pairwise

transformers = pytest.importorskip("transformers")

VOCABULARY = 43

STEPS = 4

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 3,
    "use_cache": True,
}


def llama(*, kind: str = "Llama", wide: bool = False, **changes: Any) -> nn.Module:
    """Tiny, with values that do not depend on the process's random numbers; norms other than one.

    wide   in float64, also its norms, which transformers always works out in float32
    """
    config = getattr(transformers, f"{kind}Config")(**SMALL | changes)
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    if wide:
        model.double()
        for name, module in list(model.named_modules()):
            if type(module).__name__ == f"{kind}RMSNorm":
                norm = nn.RMSNorm(module.weight.shape[0], eps=1e-6, dtype=torch.float64)
                model.set_submodule(name, norm)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 5)
    return model


def tokens() -> Tensor:
    drawn = torch.randint(4, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(3))
    drawn[1, :3] = 3  # padding in front
    return drawn


class Trained(NamedTuple):
    """Logits, loss and gradients of the first step, and parameters after the last; all of them whole."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def trained(model: nn.Module, **inputs: Any) -> Trained:
    steps = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first = None
    for _ in range(STEPS):
        steps.zero_grad()
        output = model(tokens(), labels=tokens(), **inputs)
        output.loss.backward()
        if first is None:
            gradients = {name: gather_whole(p, p.grad) for name, p in model.named_parameters()}
            first = output.logits.detach(), output.loss.detach(), gradients
        steps.step()
    return Trained(*first, {name: gather_whole(p) for name, p in model.named_parameters()})


def compare(size: int, model: nn.Module, tolerance: float, *, sequence_parallel: bool, **inputs: Any) -> None:
    copies = [copy.deepcopy(model) for _ in range(size)]
    serial = trained(copy.deepcopy(model), **inputs)

    def on_rank(comm: Communicator) -> Trained:
        tp = TensorParallel(comm, sequence_parallel=sequence_parallel)
        plan = hugging_face_llama_plan(model.config)
        return trained(parallelize(copies[comm.rank], plan, tp), **inputs)

    for found in run(size, on_rank):
        torch.testing.assert_close(found.logits, serial.logits, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(found.loss, serial.loss, rtol=tolerance, atol=tolerance)
        for mine, truth in ((found.gradients, serial.gradients), (found.parameters, serial.parameters)):
            assert mine.keys() == truth.keys()
            for name in truth:
                torch.testing.assert_close(mine[name], truth[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 4])  # and 2 heads of keys and values
def test_in_float32_logits_and_gradients_are_the_serial_ones(size: int, sequence_parallel: bool) -> None:
    compare(size, llama(), 1e-5, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (1, {}),
        (2, {}),
        (4, {}),
        (2, {"tie_word_embeddings": True}),
        (2, {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
        (4, {"num_key_value_heads": 1, "head_dim": 8}),
        (3, {"num_attention_heads": 6, "num_key_value_heads": 3}),
    ],
    ids=str,
)
def test_in_float64_they_are_so_to_ten_digits(
    size: int, changes: dict[str, Any], sequence_parallel: bool
) -> None:
    compare(size, llama(wide=True, **changes), 1e-10, sequence_parallel=sequence_parallel)


@pytest.mark.skipif(not hasattr(transformers, "Qwen3Config"), reason="this transformers has no Qwen3")
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])  # and 2 heads of keys, which are normed
def test_norms_of_queries_and_keys_get_the_serial_gradients(size: int, sequence_parallel: bool) -> None:
    model = llama(kind="Qwen3", wide=True, head_dim=8)
    assert model.get_parameter("model.layers.0.self_attn.k_norm.weight").shape == (8,)
    compare(size, model, 1e-10, sequence_parallel=sequence_parallel)


def test_a_norm_of_all_heads_together_is_refused() -> None:
    models = [llama() for _ in range(2)]
    for model in models:
        model.model.layers[1].self_attn.q_norm = nn.RMSNorm(24)
    plan = hugging_face_llama_plan(models[0].config)

    def on_rank(comm: Communicator) -> None:
        with pytest.raises(
            LayoutError, match=r"layers.1.self_attn.q_norm.weight has the shape \[24\], .* \[6\]"
        ):
            parallelize(models[comm.rank], plan, comm)

    run(2, on_rank)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("how", ["eager", "padded", "recomputed"])
def test_other_attention_masks_and_recomputation_are_as_in_the_serial_model(
    how: str, sequence_parallel: bool
) -> None:
    # Eager attention has its softmax in float32.
    model = llama(wide=how != "eager", attn_implementation="eager" if how == "eager" else "sdpa")
    inputs: dict[str, Any] = {"attention_mask": (tokens() != 3).long()} if how == "padded" else {}
    if how == "recomputed":
        model.train()
        older = not hasattr(model, "activation_checkpointing_enable")
        enable = model.gradient_checkpointing_enable if older else model.activation_checkpointing_enable
        enable({"use_reentrant": False})
        inputs["use_cache"] = False
    # Fewer heads of keys and values than ranks: the one of a rank serves fewer queries.
    compare(4, model, 1e-5 if how == "eager" else 1e-10, sequence_parallel=sequence_parallel, **inputs)


@pytest.mark.parametrize("size", [2, 4])
def test_greedily_it_generates_the_same_tokens(size: int) -> None:
    model = llama(wide=True).eval()
    copies = [copy.deepcopy(model) for _ in range(size)]

    def generated(model: nn.Module) -> list[list[int]]:
        prompt = tokens()[:, :7]
        made: Tensor = model.generate(
            prompt, attention_mask=(prompt != 3).long(), max_new_tokens=9, do_sample=False
        )
        return made.tolist()

    plan = hugging_face_llama_plan(model.config)
    expected = generated(model)
    assert len({tuple(row[7:]) for row in expected}) == 2
    assert run(size, lambda comm: generated(parallelize(copies[comm.rank], plan, comm))) == [expected] * size


def test_its_whole_state_loads_into_a_serial_model() -> None:
    serial = llama(tie_word_embeddings=True)
    copies = [copy.deepcopy(serial) for _ in range(2)]
    plan = hugging_face_llama_plan(serial.config)
    for state in run(2, lambda comm: whole_state_dict(parallelize(copies[comm.rank], plan, comm))):
        fresh = llama(tie_word_embeddings=True)
        fresh.load_state_dict(state)
        assert state.keys() == serial.state_dict().keys()
        assert all(torch.equal(state[name], value) for name, value in serial.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "dtype", "sequence_parallel"),
    pairwise(["Llama", "Qwen2", "Qwen3"], [torch.float32, torch.bfloat16], [False, True]),
)
def test_a_model_in_training_is_checked_against_itself(
    kind: str, dtype: torch.dtype, sequence_parallel: bool
) -> None:
    # The gradient of Qwen2's key biases is rounding alone.
    options = {} if kind == "Qwen3" else {"attention_dropout": 0.5}
    models = [llama(kind=kind, **options).to(dtype).train() for _ in range(2)]
    plan = hugging_face_llama_plan(models[0].config, gather_logits=not sequence_parallel)
    batch = {"input_ids": tokens(), "attention_mask": (tokens() != 3).long()}
    if not sequence_parallel:
        batch["labels"] = tokens()
    # Of the gate each rank would have its part, of what it gates the whole.
    wrong = {name: style for name, style in plan.items() if ".mlp" not in name}
    wrong |= {"model.layers.*.mlp.gate_proj": Column(), "model.layers.*.mlp.up_proj": Whole()}
    wrong |= {"model.layers.*.mlp.down_proj": Row()}

    def on_rank(comm: Communicator) -> None:
        tp = TensorParallel(comm, sequence_parallel=sequence_parallel)
        with pytest.raises(LayoutError, match="the parallel model fails where the serial one does not"):
            parallelize(models[comm.rank], wrong, tp, check=batch)
        parallelize(models[comm.rank], plan, tp, check=batch)

    run(2, on_rank)


def test_save_pretrained_wants_the_whole_state(tmp_path: Path) -> None:
    models = [llama() for _ in range(2)]
    expected = copy.deepcopy(models[0].state_dict())
    plan = hugging_face_llama_plan(models[0].config)

    def on_rank(comm: Communicator) -> None:
        model = parallelize(models[comm.rank], plan, comm)
        with pytest.raises(ShardedParameterError, match="save_pretrained takes it as state_dict="):
            model.save_pretrained(tmp_path / f"refused-{comm.rank}")
        state = whole_state_dict(model)
        if comm.rank == 0:
            model.save_pretrained(tmp_path / "whole", state_dict=state)

    run(2, on_rank)
    loaded = type(models[0]).from_pretrained(tmp_path / "whole").state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())


def test_parts_of_logits_give_the_same_loss() -> None:
    model = llama(wide=True)
    copies = [copy.deepcopy(model) for _ in range(2)]
    plan = hugging_face_llama_plan(model.config, gather_logits=False)

    def loss(comm: Communicator) -> Tensor:
        logits = parallelize(copies[comm.rank], plan, comm)(tokens()).logits
        assert logits.shape == (2, 12, 22)  # half of 43, and padding
        return vocabulary_parallel_cross_entropy(logits[:, :-1], tokens()[:, 1:], VOCABULARY, comm).detach()

    for mine in run(2, loss):
        expected = model(tokens(), labels=tokens()).loss
        # transformers takes the loss in float32.
        torch.testing.assert_close(mine.float(), expected.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_attention_heads": 4, "num_key_value_heads": 4},
            "model.layers.0.self_attn: num_attention_heads=4 does not divide among tp=3 ranks; tp=1 or tp=2",
        ),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 2},
            "num_key_value_heads=2 neither divides among tp=3 ranks nor divides them; tp=1 or tp=2 or tp=6",
        ),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 40},
            "model.layers.0.mlp.gate_proj: out_features=40 does not divide among tp=3 ranks; tp=1 or tp=2",
        ),
    ],
)
def test_what_does_not_divide_is_named_with_degrees_that_fit(changes: dict[str, Any], message: str) -> None:
    models = [llama(**changes) for _ in range(3)]
    plan = hugging_face_llama_plan(models[0].config)

    def on_rank(comm: Communicator) -> None:
        with pytest.raises(LayoutError, match=re.escape(message)):
            parallelize(models[comm.rank], plan, comm)

    run(3, on_rank)


def test_with_sequence_parallelism_a_token_alone_is_refused() -> None:
    models = [llama() for _ in range(2)]
    plan = hugging_face_llama_plan(models[0].config)

    def on_rank(comm: Communicator) -> None:
        model = parallelize(models[comm.rank], plan, TensorParallel(comm, sequence_parallel=True))
        with pytest.raises(MismatchError, match="a sequence: 1 elements do not divide"):
            model(tokens()[:, :1])

    run(2, on_rank)


@pytest.mark.mpi
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_on_mpi_too_it_is_the_same(world: Communicator, sequence_parallel: bool) -> None:
    changes = {"num_attention_heads": 12, "num_key_value_heads": 1, "head_dim": 4}
    model = llama(wide=True, **changes)
    plan = hugging_face_llama_plan(model.config)
    serial = trained(copy.deepcopy(model))
    tp = TensorParallel(world, sequence_parallel=sequence_parallel)
    found = trained(parallelize(model, plan, tp))
    near = [
        torch.allclose(mine[name], truth[name], rtol=1e-10, atol=1e-10)
        for mine, truth in ((found.gradients, serial.gradients), (found.parameters, serial.parameters))
        for name in truth
    ]
    near.append(torch.allclose(found.logits, serial.logits, rtol=1e-10, atol=1e-10))
    assert world.allgather_object(all(near)) == [True] * world.size
