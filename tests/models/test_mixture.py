"""The mixture of experts of one process: Hugging Face's blocks, losses, capacity and recomputation."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hpcpar.autograd import DeferredGradients, Recompute
from hpcpar.comm import Communicator
from hpcpar.errors import OperationError
from hpcpar.expert_parallel import ExpertParallel
from hpcpar.expert_parallel.expert_loads import Balance
from hpcpar.expert_parallel.losses import balance_loss, counts_of, z_loss
from hpcpar.expert_parallel.routing import route
from hpcpar.models import Balancing, Experts, Layers, Llama, LlamaConfig, LlamaStages, generate
from hpcpar.models.llama_stages import measured_costs
from hpcpar.models.mixture import FeedForward, MixtureOfExperts

SMALL = LlamaConfig(
    vocab_size=23,
    hidden_size=16,
    layers=3,
    heads=4,
    kv_heads=2,
    ffn_size=24,
    max_sequence=32,
    initial_std=0.3,
    experts=Experts(6, 2, 8, first_dense=1, shared_ffn_size=12),
)
DEEPSEEK: dict[str, Any] = {
    "score": "sigmoid",
    "groups": 3,
    "groups_per_token": 2,
    "scale": 2.5,
    "bias_rate": 0.1,
}
LOSSES: dict[str, Any] = {"balance_loss": 0.5, "z_loss": 0.05}


def with_experts(**changes: Any) -> LlamaConfig:
    assert SMALL.experts is not None
    return replace(SMALL, experts=replace(SMALL.experts, **changes))


def batch(rows: int = 4, sequence: int = 12) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(23, (2, rows, sequence), generator=torch.Generator().manual_seed(5))
    return drawn[0], drawn[1]


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def require_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-11) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def a_block(sizes: Experts, hidden: int = 16) -> MixtureOfExperts:
    block = MixtureOfExperts(hidden, sizes, Layers(), number=0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, 0.4, generator=generator)
        if block.gate.e_score_correction_bias is not None:
            block.gate.e_score_correction_bias.normal_(0, 0.2, generator=generator)
    return block


# --- the definition, and Hugging Face's blocks ----------------------------------------------------


def written_out(block: MixtureOfExperts, hidden: Tensor, *, training: bool = False) -> Tensor:
    """Each token through each of its experts, one at a time."""
    sizes, outputs = block.sizes, []
    for token in hidden.flatten(0, 1):
        routing = route((block.gate.weight @ token)[None], sizes, block.gate.e_score_correction_bias)
        output = torch.zeros_like(token)
        for expert, weight in zip(routing.experts[0].tolist(), routing.weights[0], strict=True):
            output = output + weight * block.experts.get_submodule(str(expert))(token)
        outputs.append(output if block.shared_experts is None else output + block.shared_experts(token))
    return torch.stack(outputs).view_as(hidden)


@pytest.mark.parametrize("changes", [{}, {"shared_ffn_size": 0}, DEEPSEEK, {"per_token": 6}])
def test_the_block_and_its_gradients_equal_the_definition(changes: dict[str, Any]) -> None:
    block = a_block(replace(SMALL.experts, **changes)).double()
    hidden = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found: list[dict[str, Tensor]] = []
    for function in (block, partial(written_out, block)):
        block.zero_grad()
        x = hidden.clone().requires_grad_()
        output = function(x)
        (output * output.detach().cos()).sum().backward()
        assert x.grad is not None
        found.append({"output": output.detach(), "hidden": x.grad, **gradients_of(block)})
    require_close(*found)


def copied(block: MixtureOfExperts, theirs: nn.Module) -> None:
    """Copy the block's parameters to Hugging Face's stacked ones."""
    experts = list(block.experts)
    theirs.gate.weight.copy_(block.gate.weight)
    gate_up = [torch.cat((e.gate_proj.weight, e.up_proj.weight)) for e in experts]
    theirs.experts.gate_up_proj.copy_(torch.stack(gate_up))
    theirs.experts.down_proj.copy_(torch.stack([e.down_proj.weight for e in experts]))
    if block.shared_experts is not None:
        theirs.shared_experts.load_state_dict(block.shared_experts.state_dict())
    if block.gate.e_score_correction_bias is not None:
        theirs.gate.e_score_correction_bias.copy_(block.gate.e_score_correction_bias)


def stacked_gradients(block: MixtureOfExperts) -> dict[str, Tensor]:
    experts = list(block.experts)
    gate_up = [torch.cat((e.gate_proj.weight.grad, e.up_proj.weight.grad)) for e in experts]
    found = {
        "gate.weight": block.gate.weight.grad,
        "experts.gate_up_proj": torch.stack(gate_up),
        "experts.down_proj": torch.stack([e.down_proj.weight.grad for e in experts]),
    }
    shared = {n: g for n, g in gradients_of(block).items() if n.startswith("shared_experts.")}
    return found | shared


@pytest.mark.parametrize(
    ("kind", "block_name", "changes"),
    [
        ("Mixtral", "MixtralSparseMoeBlock", {"shared_ffn_size": 0}),
        ("Qwen3Moe", "Qwen3MoeSparseMoeBlock", {"shared_ffn_size": 0, "renormalise": False}),
        ("Olmoe", "OlmoeSparseMoeBlock", {"shared_ffn_size": 0, "renormalise": False}),
        ("DeepseekV3", "DeepseekV3MoE", DEEPSEEK),
    ],
)
def test_the_block_is_that_of_hugging_face(kind: str, block_name: str, changes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    names = {"Qwen3Moe": "qwen3_moe", "DeepseekV3": "deepseek_v3"}
    name = names.get(kind, kind.lower())
    modeling = __import__(f"transformers.models.{name}.modeling_{name}", fromlist=[""])
    sizes = replace(SMALL.experts, **changes)
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=16,
        intermediate_size=8,
        moe_intermediate_size=8 if kind != "DeepseekV3" else 12,  # which is the shared expert's, too
        num_experts=6,
        num_local_experts=6,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=1,
        norm_topk_prob=sizes.renormalise,
        n_group=sizes.groups,
        topk_group=sizes.groups_per_token,
        routed_scaling_factor=sizes.scale,
    )
    if kind == "DeepseekV3":
        sizes = replace(sizes, ffn_size=12)
    config._experts_implementation = "eager"
    theirs, ours = getattr(modeling, block_name)(config), a_block(sizes)
    with torch.no_grad():
        copied(ours, theirs)
    hidden = torch.randn(3, 11, 16, generator=torch.Generator().manual_seed(7))
    results = []
    for block in (ours, theirs):
        x = hidden.clone().requires_grad_()
        output = block(x)
        (output * hidden.cos()).sum().backward()
        gradients = stacked_gradients(block) if isinstance(block, MixtureOfExperts) else gradients_of(block)
        assert x.grad is not None
        results.append({"output": output.detach(), "hidden": x.grad} | gradients)
    require_close(*results, tolerance=2e-5)  # float32


# --- types ----------------------------------------------------------------------------------------


def test_routing_is_in_float32_whatever_the_model_is_in() -> None:
    block = a_block(Experts(6, 2, 8)).bfloat16()
    hidden = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    routing, logits = block.gate(hidden.flatten(0, 1))
    expected = functional.linear(hidden.flatten(0, 1).float(), block.gate.weight.float())
    assert logits.dtype == routing.weights.dtype == torch.float32
    assert torch.equal(logits, expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(block.gate(hidden.flatten(0, 1).float())[1], expected)
    output = block(hidden)
    assert output.dtype == torch.bfloat16
    reference = written_out(block.float(), hidden.float())
    torch.testing.assert_close(output.float(), reference, rtol=0.05, atol=0.05)  # bfloat16's 8 bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_biases_stay_in_float32(dtype: torch.dtype) -> None:
    block = a_block(replace(SMALL.experts, **DEEPSEEK))
    before = block.gate.e_score_correction_bias
    assert before is not None
    before = before.clone()
    block.to(dtype)
    after = block.gate.e_score_correction_bias
    assert after is not None
    assert after.dtype == torch.float32
    assert torch.equal(after, before)
    assert "gate.e_score_correction_bias" in block.state_dict()
    assert "gate.e_score_correction_bias" not in a_block(Experts(6, 2, 8)).state_dict()


# --- losses ---------------------------------------------------------------------------------------


def explicit_losses(model: Llama, sizes: Experts, rows: int) -> list[Tensor]:
    """Work out each layer's losses from the logits of its router, in the last forward."""
    losses = []
    for logits in model.caught:  # type: ignore[union-attr]
        routing = route(logits, sizes)
        tokens, sequence_of = len(logits), None
        if sizes.balance_over == "sequence":
            sequence_of = torch.arange(rows).repeat_interleave(tokens // rows)
        counts = counts_of(routing.experts, sizes.count, sequence_of, rows if sequence_of is not None else 1)
        balance = balance_loss(routing, sizes, counts, tokens, sequence_of)
        losses.append(sizes.balance_loss * balance + sizes.z_loss * z_loss(logits, tokens))
    return losses


def catching(model: Llama) -> Llama:
    model.caught = []  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.gate.register_forward_hook(lambda m, i, output: model.caught.append(output[1]))  # type: ignore[operator]
    return model


@pytest.mark.parametrize("over", ["batch", "sequence", "global"])
def test_attached_losses_give_the_gradient_of_the_sum_of_all_losses(over: str) -> None:
    config = with_experts(**LOSSES, balance_over=over)
    assert config.experts is not None
    silent = catching(Llama(with_experts()).double())
    tokens, targets = batch()
    loss = silent.loss(silent(tokens), targets)
    extra = explicit_losses(silent, config.experts, len(tokens))
    (loss + sum(extra)).backward()
    model = Llama(config).double()
    model.loss(model(tokens), targets).backward()
    require_close(gradients_of(model), gradients_of(silent))
    assert model.balancing is not None
    found = model.balancing.finish_step()
    assert list(found) == [1, 2]
    for layer, expected in zip(found.values(), extra, strict=True):
        assert layer.balance_loss + layer.z_loss == pytest.approx(float(expected.detach()), rel=1e-12)


@pytest.mark.parametrize("over", ["sequence", "batch"])
def test_losses_count_by_the_share_of_a_microbatch_whatever_the_loss_is_scaled_by(over: str) -> None:
    """Four equal rows: as one microbatch or in two, each microbatch of the same two rows."""
    config = with_experts(**LOSSES, balance_over=over)
    tokens, targets = (torch.cat((half[:2], half[:2])) for half in batch())
    whole = Llama(config).double()
    whole.loss(whole(tokens), targets).backward()
    parts = Llama(config).double()
    assert parts.balancing is not None
    parts.balancing.tokens_per_step = tokens.numel()
    parts.balancing.gradient_scale = 64.0
    for start, stop in ((0, 2), (2, 4)):
        part = parts.loss(parts(tokens[start:stop]), targets[start:stop], reduction="sum")
        (64 * part / targets.numel()).backward()
    scaled = {name: gradient / 64 for name, gradient in gradients_of(parts).items()}
    require_close(scaled, gradients_of(whole))


def test_losses_of_sequences_do_not_depend_on_the_microbatches() -> None:
    config = with_experts(**LOSSES, balance_over="sequence", capacity_factor=1.0)
    tokens, targets = batch()
    found = []
    for cuts in ([(0, 4)], [(0, 1), (1, 4)], [(0, 4), (4, 4)]):
        model = Llama(config).double()
        assert model.balancing is not None
        model.balancing.tokens_per_step = tokens.numel()
        for start, stop in cuts:
            part = model.loss(model(tokens[start:stop]), targets[start:stop], reduction="sum")
            (part / targets.numel()).backward()
        found.append(gradients_of(model))
    for other in found[1:]:
        require_close(other, found[0])


def test_the_global_loss_takes_the_counts_of_the_step_so_far() -> None:
    config = with_experts(balance_loss=0.5, balance_over="global")
    assert config.experts is not None
    tokens, _ = batch()
    model = catching(Llama(config).double())
    assert model.balancing is not None
    model.balancing.tokens_per_step = tokens.numel()
    for half in tokens.split(2):
        model(half)
    logits = [model.caught[layer] for layer in (0, 2)]  # type: ignore[index]
    routings = [route(half, config.experts) for half in logits]
    counts = [counts_of(routing.experts, 6) for routing in routings]
    expected = balance_loss(routings[0], config.experts, counts[0], tokens.numel())
    expected += balance_loss(routings[1], config.experts, counts[0] + counts[1], tokens.numel())
    found = model.balancing.finish_step()[1]
    assert found.balance_loss == pytest.approx(0.5 * float(expected.detach()), rel=1e-12)
    model(tokens[:2])  # a new step begins from nothing
    again = model.balancing.finish_step()[1]
    first = balance_loss(routings[0], config.experts, counts[0], tokens.numel())
    assert again.balance_loss == pytest.approx(0.5 * float(first.detach()), rel=1e-12)


# --- biases and counts ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_recomputation_changes_no_gradient_and_counts_no_token_twice(mode: Any) -> None:
    config = with_experts(**LOSSES, **DEEPSEEK, balance_over="global", capacity_factor=0.8)
    tokens, targets = batch()
    found = []
    for again in ("none", mode):
        model = Llama(config, recompute=Recompute(again)).double()
        assert model.balancing is not None
        for half in range(0, 4, 2):
            model.loss(model(tokens[half : half + 2]), targets[half : half + 2]).backward()
        found.append((gradients_of(model), model.balancing.finish_step()))
        bias = dict(model.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"]
        assert set(bias.tolist()) <= {torch.tensor(x).item() for x in (-0.1, 0.0, 0.1)}
        assert bias.any()
    for name, gradient in found[0][0].items():
        assert torch.equal(found[1][0][name], gradient), name
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_by_torch_which_would_count_twice_is_refused(reentrant: bool) -> None:
    block = a_block(Experts(4, 2, 8))
    hidden = torch.randn(1, 5, 16, requires_grad=True)
    output = checkpoint(block, hidden, use_reentrant=reentrant)
    with pytest.raises(
        OperationError, match=r"torch's own checkpoint would count .* hpcpar\.autograd\.recompute"
    ):
        output.sum().backward()


def test_counts_and_biases_of_a_step_are_those_of_its_tokens() -> None:
    config = with_experts(**DEEPSEEK)
    assert config.experts is not None
    model = catching(Llama(config).double())
    tokens, targets = batch()
    model.loss(model(tokens), targets).backward()
    counts = [counts_of(route(logits, config.experts).experts, 6)[0] for logits in model.caught]  # type: ignore[union-attr]
    assert model.balancing is not None
    found = model.balancing.finish_step()
    for layer, count in zip((1, 2), counts, strict=True):
        mean = float(count.double().mean())
        assert found[layer].loads.max_over_mean == pytest.approx(float(count.max()) / mean)
        bias = dict(model.named_buffers())[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
        torch.testing.assert_close(bias, 0.1 * torch.sign(mean - count.double()).float())
    # Nothing is left to count in the next step.
    assert model.balancing.finish_step()[1].loads.idle == 6


def test_evaluation_counts_and_balances_nothing() -> None:
    model = Llama(with_experts(**LOSSES, **DEEPSEEK)).double()
    tokens, _ = batch()
    model.eval()
    model(tokens)
    model.train()
    with torch.no_grad():
        model(tokens)
    assert model.balancing is not None
    assert model.balancing.finish_step()[1].loads.idle == 6


# --- capacity -------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop", ["score", "position"])
def test_a_dropped_token_goes_without_the_expert(drop: str) -> None:
    sizes = Experts(4, 2, 8, capacity_factor=0.5, drop=drop)  # type: ignore[arg-type]
    block = a_block(sizes).double()
    hidden = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    routing, _ = block.gate(hidden.flatten(0, 1))
    output = block(hidden)
    expected = torch.zeros_like(hidden)
    for row in range(2):
        for expert in range(4):
            slots = [(t, s) for t in range(8) for s in range(2) if routing.experts[8 * row + t, s] == expert]
            if drop == "score":
                slots.sort(key=lambda slot: -float(routing.weights[8 * row + slot[0], slot[1]].detach()))
            for t, s in slots[:2]:  # ⌈8 · 2 / 4 · 0.5⌉
                module = block.experts.get_submodule(str(expert))
                expected[row, t] += routing.weights[8 * row + t, s] * module(hidden[row, t])
    torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-11)
    assert block._balancing.finish_step()[0].loads.dropped > 0


def test_in_evaluation_no_token_is_dropped() -> None:
    block = a_block(Experts(4, 2, 8, capacity_factor=0.5)).double()
    hidden = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    block.eval()
    torch.testing.assert_close(block(hidden), written_out(block, hidden), rtol=1e-11, atol=1e-11)


def test_text_is_generated_alike_alone_and_beside_others() -> None:
    model = Llama(with_experts(capacity_factor=0.5, **DEEPSEEK)).double()
    tokens, _ = batch(3, 5)
    together = generate(model, tokens, 4, temperature=0)
    alone = [generate(model, row[None], 4, temperature=0) for row in tokens]
    assert torch.equal(together, torch.cat(alone))


# --- stages, deferred gradients -------------------------------------------------------------------


def test_stages_have_the_models_parameters_and_compute_the_same() -> None:
    config = with_experts(**LOSSES, **DEEPSEEK)
    whole = Llama(config).double()
    stages = LlamaStages(config, Layers(), ((0, 2), (2, 3), (3, 5)), (0, 1, 2)).double()
    assert list(stages.state_dict()) == list(whole.state_dict())
    tokens, targets = batch()
    hidden = tokens
    for stage in stages.stages.values():
        hidden = stage(hidden)
    stages.loss(hidden, targets).backward()
    whole.loss(whole(tokens), targets).backward()
    require_close(gradients_of(stages), gradients_of(whole), tolerance=0)
    assert stages.balancing is not None
    assert whole.balancing is not None
    assert stages.balancing.finish_step() == whole.balancing.finish_step()


def test_measuring_costs_counts_no_tokens_and_tells_kinds_of_layers_apart() -> None:
    config = with_experts(**LOSSES)
    layers = Layers(balancing=Balancing(config.experts))  # type: ignore[arg-type]
    costs = measured_costs(config, layers, microbatch=2, sequence=8, repeats=1)
    assert len(costs) == 5
    assert costs[2] == costs[3] != costs[1]
    assert layers.balancing is not None
    assert layers.balancing.finish_step() == {}


def test_measured_layers_have_even_loads() -> None:
    experts = ExpertParallel(Communicator.alone(), 6)
    measured_costs(SMALL, Layers(experts=experts), microbatch=4, sequence=32, repeats=1)
    assert Balance.of(experts.counts).max_over_mean < 1.6


def test_gradients_of_weights_may_be_deferred() -> None:
    config = with_experts(**LOSSES, **DEEPSEEK)
    tokens, targets = batch()
    found = []
    for deferred in (None, DeferredGradients()):
        model = Llama(config).double()
        if deferred is None:
            model.loss(model(tokens), targets).backward()
        else:
            with deferred.recording():
                loss = model.loss(model(tokens), targets)
            loss.backward()
            assert all(p.grad is None for p in model.parameters())
            deferred.compute()
        found.append(gradients_of(model))
    require_close(found[1], found[0])


def test_an_expert_without_tokens_has_a_gradient_of_zeros() -> None:
    block = a_block(Experts(4, 2, 8))
    with torch.no_grad():
        block.gate.weight.zero_()  # all to the first two
    block(torch.randn(1, 5, 16)).sum().backward()
    for number, expert in enumerate(block.experts):
        for parameter in expert.parameters():
            assert parameter.grad is not None
            assert bool(parameter.grad.any()) == (number < 2)


def test_an_empty_batch_has_gradients_of_zeros() -> None:
    model = Llama(with_experts(**LOSSES, balance_over="sequence", capacity_factor=1.0)).double()
    tokens = torch.zeros(0, 6, dtype=torch.int64)
    model.loss(model(tokens), tokens, reduction="sum").backward()
    gradients = gradients_of(model)
    assert len(gradients) == len(list(model.parameters()))
    assert not any(gradient.any() for gradient in gradients.values())


def test_a_model_is_copied_and_saved_with_its_experts(tmp_path: Path) -> None:
    model = Llama(with_experts(**LOSSES, **DEEPSEEK)).double()
    tokens, targets = batch()
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        model.zero_grad()
        for each in (model, other):
            each.loss(each(tokens), targets).backward()
        require_close(gradients_of(other), gradients_of(model), tolerance=0)
        assert other.balancing is not model.balancing
        biases = dict(other.named_buffers())
        other.balancing.finish_step()
        assert all(bias.any() for bias in biases.values())
        assert not any(bias.any() for _, bias in model.named_buffers())


def test_a_compiled_model_computes_the_same_and_counts_its_tokens() -> None:
    config = with_experts(**LOSSES, **DEEPSEEK, capacity_factor=1.0)
    tokens, targets = batch()
    found = []
    for compiled in (False, True):
        model = Llama(config).double()
        logits = (torch.compile(model, backend="eager") if compiled else model)(tokens)
        model.loss(logits, targets).backward()
        assert model.balancing is not None
        found.append((gradients_of(model), model.balancing.finish_step()))
    require_close(found[1][0], found[0][0], tolerance=0)
    assert found[1][1] == found[0][1]


def test_a_feed_forward_is_swiglu() -> None:
    module = FeedForward(8, 12)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=generator)
    x = torch.randn(3, 8, generator=generator)
    gate, up, down = (module.get_parameter(f"{name}_proj.weight") for name in ("gate", "up", "down"))
    expected = (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(module(x), expected)
