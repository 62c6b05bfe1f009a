"""Models of transformers whose experts ranks share are those of one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar.checkpoint import load, save
from hpcpar.comm import Communicator, run_loopback
from hpcpar.context_parallel import ContextParallel, Mask
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.errors import LayoutError, MismatchError, ShardedParameterError
from hpcpar.expert_parallel import ExpertParallel
from hpcpar.mesh import Mesh
from hpcpar.models.hugging_face import hugging_face_llama_plan
from hpcpar.models.hugging_face_context import share_sequences
from hpcpar.models.hugging_face_experts import SharedExperts, share_experts
from hpcpar.tensor_parallel import TensorParallel, gather_whole, parallelize, whole_state_dict
from tests.models.test_hugging_face_files import KINDS, MIXTURES, SMALL

transformers = pytest.importorskip("transformers")

STEPS, ROWS, LENGTH, VOCABULARY = 4, 5, 10, SMALL["vocab_size"]

DEEPSEEK: dict[str, Any] = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "n_group": 4},
    **{"topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 8},
    "num_key_value_heads": 4,
}

QWEN2 = {"num_experts": 6, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}

SIZES = KINDS | {"DeepseekV3": DEEPSEEK, "Qwen2Moe": QWEN2}


def mixture(kind: str, **changes: Any) -> nn.Module:
    """Tiny, in float64, with values that do not depend on the process's random numbers."""
    sizes = SMALL | SIZES[kind] | changes
    model: Any = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 5)
    model.set_experts_implementation("eager")  # its grouped products have no float64
    found: nn.Module = model.double()
    return found


def small(kind: str, **sizes: Any) -> nn.Module:
    """Other mixtures of transformers, one layer with four experts."""
    shared = {
        **{"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2},
        **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
    }
    config = getattr(transformers, f"{kind}Config")(**shared | sizes)
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model


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


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "Glm4Moe"])
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


class Stepped(NamedTuple):
    """Loss, norm and whole gradients of one step, and whole parameters after it."""

    loss: Tensor
    norm: Tensor
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def stepped(model: nn.Module, dp: Communicator) -> Stepped:
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = DistributedOptimizer(sgd, model.named_parameters(), dp)
    own = tokens()[:4].tensor_split(dp.size)[dp.rank]
    loss = model(own, labels=own).loss
    loss.backward()
    optimizer.synchronize()
    norm = optimizer.clip_grad_norm_(1e9)
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = gather_whole(parameter, parameter.grad)
    optimizer.step()
    after = {name: gather_whole(each) for name, each in model.named_parameters()}
    return Stepped(dp.allreduce(loss.detach().clone(), "average"), torch.as_tensor(norm), gradients, after)


def require_stepped_alike(found: Stepped, truth: Stepped) -> None:
    torch.testing.assert_close(found.loss.double(), truth.loss.double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found.norm, truth.norm, rtol=1e-5, atol=0, check_dtype=False)
    for mine, serial in ((found.gradients, truth.gradients), (found.parameters, truth.parameters)):
        assert mine.keys() == serial.keys()
        for name, value in serial.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("kind", "changes", "size", "degrees"),
    [
        ("Mixtral", {}, 2, {"tp": 2, "ep": 2}),
        ("Mixtral", {}, 4, {"tp": 2, "ep": 4}),
        ("Mixtral", {}, 4, {"tp": 2, "ep": 2}),
        ("Mixtral", {}, 2, {"tp": 2, "ep": 1}),
        ("Qwen2Moe", {"decoder_sparse_step": 2}, 2, {"tp": 2, "ep": 2}),
        ("Qwen3Moe", {}, 4, {"tp": 2, "ep": 4}),
        ("Glm4Moe", {"partial_rotary_factor": 0.5, "attention_bias": True}, 2, {"tp": 2, "ep": 2}),
        ("Olmoe", {}, 2, {"tp": 1, "ep": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["afterwards", "by the plan", "sequence parallel"])
def test_ranks_with_the_same_tokens_share_experts(
    kind: str, changes: dict[str, Any], size: int, degrees: dict[str, int], way: str
) -> None:
    model = mixture(kind, **changes)
    copies = [copy.deepcopy(model) for _ in range(size)]
    truth = stepped(model, Communicator.alone())

    def on_rank(comm: Communicator) -> Stepped:
        mesh, own = Mesh(comm, **degrees), copies[comm.rank]
        config: Any = own.config
        plan = hugging_face_llama_plan(config, mesh=mesh if way == "by the plan" else None)
        parallelize(own, plan, TensorParallel(mesh.tp, sequence_parallel=way == "sequence parallel"))
        if way != "by the plan":
            share_experts(own, mesh.ep, replicas=mesh.edp, tp=mesh.tp)
        return stepped(own, mesh.replicas)

    for found in run_loopback(size, on_rank):
        require_stepped_alike(found, truth)


@pytest.mark.parametrize("kind", ["Qwen2Moe", "Glm4Moe"])
def test_sequences_of_all_mixtures_are_shared(kind: str) -> None:
    model = mixture(kind)
    copies = [copy.deepcopy(model) for _ in range(4)]
    expected = model(tokens(), labels=tokens())

    def on_rank(comm: Communicator) -> tuple[Tensor, Tensor]:
        mesh, own = Mesh(comm, cp=2, tp=2, ep=4), copies[comm.rank]
        config: Any = own.config
        parallelize(own, hugging_face_llama_plan(config, mesh=mesh), mesh)
        cp = ContextParallel(mesh.cp)
        share_sequences(own, cp)
        with cp.using(Mask(LENGTH)), torch.no_grad():
            said = own(tokens(), labels=tokens())
            return cp.unshard(said.logits), mesh.cp.allreduce(said.loss.clone(), "average")

    for logits, loss in run_loopback(4, on_rank):
        torch.testing.assert_close(logits, expected.logits.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(loss.double(), expected.loss.detach().double(), rtol=1e-5, atol=0)


def test_ranks_that_would_train_copies_apart_or_twice_are_refused() -> None:
    model = mixture("Mixtral")
    copies = [copy.deepcopy(model) for _ in range(4)]

    def on_rank(comm: Communicator) -> None:
        mesh, own = Mesh(comm, tp=2, ep=2), copies[comm.rank]
        with pytest.raises(LayoutError, match="over 2 of the job's 4 ranks, without replicas"):
            share_experts(own, mesh.ep)
        config: Any = own.config
        parallelize(own, hugging_face_llama_plan(config), mesh)
        with pytest.raises(LayoutError, match=r"embed_tokens.weight is split over .* give share_experts tp="):
            share_experts(own, mesh.ep, replicas=mesh.edp)

    run_loopback(4, on_rank)


def test_a_gate_of_the_models_own_is_kept() -> None:
    model = small("Mixtral", num_local_experts=4)
    (layer,) = model.model.layers  # type: ignore[union-attr]
    whole: Any = layer.mlp.experts

    class Limited(type(whole)):  # type: ignore[misc]
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return self.act_fn(gate.clamp(max=self.limit)) * up

    whole.__class__, whole.limit = Limited, 0.1
    rows = torch.randn(3, 32)
    shared = SharedExperts(whole, ExpertParallel(Communicator.alone(), 4), None)
    torch.testing.assert_close(shared._apply_gate(shared, rows), whole._apply_gate(rows), rtol=0, atol=0)


@pytest.mark.mpi
def test_a_plan_shares_experts_over_mpi(world: Communicator) -> None:
    if world.size == 3:
        pytest.skip("four sequences do not divide evenly among three ranks")
    model = mixture("Mixtral")
    truth = stepped(copy.deepcopy(model), Communicator.alone())
    mesh = Mesh(world, tp=1 if world.size % 2 else 2, ep=world.size)
    config: Any = model.config
    parallelize(model, hugging_face_llama_plan(config, mesh=mesh), mesh)
    require_stepped_alike(stepped(model, mesh.replicas), truth)


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
    other = small("GptOss", num_local_experts=2, num_experts_per_tok=1, head_dim=8)
    with pytest.raises(LayoutError, match="GptOssExperts with gate_up_proj, gate_up_proj_bias"):
        share_experts(other, alone)
