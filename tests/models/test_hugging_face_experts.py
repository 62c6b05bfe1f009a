"""Models of transformers whose experts ranks share are those of one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar.checkpoint import load, save
from hpcpar.comm import Communicator, run_loopback
from hpcpar.context_parallel import ContextParallel, Mask
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.errors import LayoutError, MismatchError, ShardedParameterError
from hpcpar.mesh import Mesh
from hpcpar.models.hugging_face_context import share_sequences
from hpcpar.models.hugging_face_experts import SharedExperts, share_experts
from hpcpar.tensor_parallel import gather_whole, whole_state_dict
from tests.models.test_hugging_face_files import KINDS, MIXTURES, SMALL

transformers = pytest.importorskip("transformers")

STEPS, ROWS, LENGTH, VOCABULARY = 4, 5, 10, SMALL["vocab_size"]

DEEPSEEK: dict[str, Any] = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "n_group": 4},
    **{"topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 8},
    "num_key_value_heads": 4,
}


def mixture(kind: str, **changes: Any) -> nn.Module:
    """Tiny, in float64, with values that do not depend on the process's random numbers."""
    sizes = SMALL | (DEEPSEEK if kind == "DeepseekV3" else KINDS[kind]) | changes
    model: Any = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 5)
    model.set_experts_implementation("eager")  # its grouped products have no float64
    found: nn.Module = model.double()
    return found


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))


def trained(model: nn.Module, ranks: Communicator) -> dict[str, Tensor]:
    """Whole parameters after some steps of SGD; ranks have different numbers of sequences."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    steps = DistributedOptimizer(sgd, model.named_parameters(), ranks)
    own = tokens().tensor_split(ranks.size)[ranks.rank]
    for _ in range(STEPS):
        steps.zero_grad()
        logits = model(own).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten(), reduction="sum")
        (loss * ranks.size / (ROWS * (LENGTH - 1))).backward()
        steps.step()
    return {name: gather_whole(parameter).detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "size", "ep", "settings"),
    [
        *((kind, 2, 2, {}) for kind in (*MIXTURES, "DeepseekV3")),
        ("Mixtral", 3, 3, {"halves": True}),
        ("Qwen3Moe", 4, 4, {}),
        ("Olmoe", 4, 2, {}),
        ("Mixtral", 4, 2, {"halves": True}),
    ],
)
def test_training_is_that_of_transformers_in_one_process(
    kind: str, size: int, ep: int, settings: dict[str, Any]
) -> None:
    model = mixture(kind)
    copies = [copy.deepcopy(model) for _ in range(size)]

    def on_rank(comm: Communicator) -> dict[str, Tensor]:
        mesh = Mesh(comm, ep=ep)
        shared = share_experts(copies[comm.rank], mesh.ep, replicas=mesh.edp, **settings)
        return trained(shared, mesh.dp)

    truth = trained(model, Communicator.alone())
    for found in run_loopback(size, on_rank):
        assert found.keys() == truth.keys()
        for name, value in truth.items():
            # transformers scores experts and normalises in float32.
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_recomputation_and_losses_of_the_router_are_the_models_own() -> None:
    model = mixture("Qwen3Moe", output_router_logits=True, router_aux_loss_coef=0.5).train()
    copies = [copy.deepcopy(model) for _ in range(2)]
    expected = model(tokens(), labels=tokens())
    expected.loss.backward()

    def on_rank(comm: Communicator) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        own = share_experts(copies[comm.rank], comm)
        own.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        said = own(tokens(), labels=tokens())  # the same tokens on both ranks
        said.loss.backward()
        gradients = {}
        for name, parameter in own.named_parameters():
            assert parameter.grad is not None, name
            # Experts have had the tokens of both.
            gradients[name] = gather_whole(parameter, parameter.grad) / (2 if ".experts." in name else 1)
        return said.loss.detach(), said.aux_loss.detach(), gradients

    for loss, aux_loss, gradients in run_loopback(2, on_rank):
        torch.testing.assert_close(aux_loss, expected.aux_loss.detach())
        torch.testing.assert_close(loss, expected.loss.detach(), rtol=1e-6, atol=0)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7, msg=name)


def test_each_rank_holds_its_experts_and_all_of_them_are_saved(tmp_path: Path) -> None:
    model = mixture("Mixtral")
    copies = [copy.deepcopy(model) for _ in range(2)]

    def on_rank(comm: Communicator) -> list[int]:
        own: Any = share_experts(copies[comm.rank], comm)
        with pytest.raises(ShardedParameterError, match="call whole_state_dict"):
            own.save_pretrained(tmp_path / "refused")
        whole = whole_state_dict(own)
        if comm.rank == 0:
            own.save_pretrained(tmp_path / "saved", state_dict=whole)
        return [len(module.gate_up_proj) for module in own.modules() if isinstance(module, SharedExperts)]

    assert run_loopback(2, on_rank) == [[3] * 3, [2] * 3]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_a_checkpoint_is_loaded_at_any_ep(tmp_path: Path) -> None:
    model = mixture("Mixtral")

    def on_rank(comm: Communicator, ep: int, *, saves: bool) -> dict[str, Tensor]:
        mesh = Mesh(comm, ep=ep)
        own = copy.deepcopy(model)
        if not saves:
            with torch.no_grad():
                for parameter in own.parameters():
                    parameter.zero_()
        shared = share_experts(own, mesh.ep, replicas=mesh.edp)
        sgd = torch.optim.SGD(shared.parameters(), lr=0.05, momentum=0.9)
        optimizer = DistributedOptimizer(sgd, shared.named_parameters(), mesh.dp)
        if saves:
            save(tmp_path, step=1, model=shared, optimizer=optimizer, comm=comm)
        else:
            load(tmp_path, model=shared, optimizer=optimizer, comm=comm)
        return {name: gather_whole(parameter).detach() for name, parameter in shared.named_parameters()}

    run_loopback(4, lambda comm: on_rank(comm, 2, saves=True))
    for size, ep in ((4, 4), (3, 3), (2, 1)):
        for found in run_loopback(size, lambda comm: on_rank(comm, ep, saves=False)):  # noqa: B023
            for name, value in model.named_parameters():
                assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "Olmoe"])
def test_ranks_that_share_sequences_share_experts_too(kind: str) -> None:
    model = mixture(kind)
    expected = model(tokens(), labels=tokens())
    expected.loss.backward()
    copies = [copy.deepcopy(model) for _ in range(4)]

    def on_rank(comm: Communicator) -> tuple[Tensor, dict[str, Tensor]]:
        mesh = Mesh(comm, cp=2, ep=4)
        cp = ContextParallel(mesh.cp)
        own = share_sequences(share_experts(copies[comm.rank], mesh.ep, replicas=mesh.edp), cp)
        with cp.using(Mask(LENGTH)):
            with pytest.raises(MismatchError, match="output_router_logits adds the balance loss"):
                own(tokens(), output_router_logits=True)
            loss = own(tokens(), labels=tokens()).loss  # the same sequences on both ranks of dp
            loss.backward()
        average = comm.allreduce(loss.detach().clone(), "average")
        gradients = {}
        for name, parameter in own.named_parameters():
            assert parameter.grad is not None, name
            if ".experts." in name:
                gradients[name] = gather_whole(parameter, parameter.grad) / comm.size
            else:
                gradients[name] = comm.allreduce(parameter.grad.contiguous(), "average")
        return average, gradients

    for loss, gradients in run_loopback(4, on_rank):
        torch.testing.assert_close(loss.float(), expected.loss.detach().float(), rtol=1e-6, atol=0)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.mpi
def test_training_over_mpi_is_that_of_transformers_in_one_process(world: Communicator) -> None:
    model = mixture("Olmoe")
    truth = trained(copy.deepcopy(model), Communicator.alone())
    found = trained(share_experts(model, world), world)
    for name, value in truth.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_models_without_such_experts_are_refused() -> None:
    alone = Communicator.alone()
    with pytest.raises(LayoutError, match="a Linear has no module of experts"):
        share_experts(nn.Linear(2, 2), alone)
    shared = share_experts(mixture("Mixtral"), alone)
    with pytest.raises(LayoutError, match="shared already"):
        share_experts(shared, alone)
    other = transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **{"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
            **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2},
            **{"num_experts_per_tok": 1},
        )
    )
    with pytest.raises(LayoutError, match="GptOssExperts with gate_up_proj, gate_up_proj_bias"):
        share_experts(other, alone)
