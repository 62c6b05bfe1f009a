"""A mixture of experts that ranks compute together is the serial one: losses, gradients, loads, biases."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hpcpar.autograd import Recompute
from hpcpar.comm import Communicator, run_loopback
from hpcpar.context_parallel import ContextParallel, Mask
from hpcpar.errors import LayoutError
from hpcpar.expert_parallel import ExpertParallel
from hpcpar.mesh import Mesh
from hpcpar.models import Balancing, ExpertRanks, Experts, Llama, LlamaConfig, generate, parallel_layers
from hpcpar.models.balancing import LayerBalance
from hpcpar.models.expert_tokens import ExpertTokens
from hpcpar.parameter_info import info_of
from hpcpar.tensor_parallel import TensorParallel, gather_whole, whole_state_dict
from tests.grid import pairwise

TOLERANCE = 1e-11
"""In float64: sums over ranks are taken in another order."""

EXPERTS = Experts(
    *(6, 2, 12),
    first_dense=1,
    shared_ffn_size=12,
    balance_loss=0.5,
    z_loss=0.05,
    bias_rate=0.1,
)
SMALL = LlamaConfig(
    vocab_size=23,
    hidden_size=16,
    layers=3,
    heads=4,
    kv_heads=2,
    ffn_size=24,
    max_sequence=32,
    initial_std=0.3,
    experts=EXPERTS,
)
ROWS, SEQUENCE = 4, 12
DOCUMENTS = (5, 7, 1, 11, 12, 9, 3)


class Step(NamedTuple):
    """One step: this rank's part of the loss, whole gradients, balance of each layer, biases."""

    loss: Tensor
    gradients: dict[str, Tensor]
    balance: dict[int, LayerBalance]
    biases: dict[str, Tensor]


def batch() -> tuple[Tensor, Tensor]:
    drawn = torch.randint(23, (2, ROWS, SEQUENCE), generator=torch.Generator().manual_seed(5))
    return drawn[0], drawn[1]


def config_with(**changes: Any) -> LlamaConfig:
    return replace(SMALL, experts=replace(EXPERTS, **changes))


@cache
def serial_step(config: LlamaConfig) -> Step:
    model = Llama(config, seed=1).double()
    assert model.balancing is not None
    tokens, targets = batch()
    loss = model.loss(model(tokens), targets, reduction="sum") / targets.numel()
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    balance = model.balancing.finish_step()
    return Step(loss.detach(), gradients, balance, dict(model.named_buffers()))


def step_on_ranks(
    comm: Communicator,
    config: LlamaConfig,
    axes: dict[str, int],
    *,
    sequence_parallel: bool = False,
    mode: str = "none",
    mask: Mask | None = None,
) -> Step:
    assert config.experts is not None
    mesh = Mesh(comm, axes)
    tp = TensorParallel(mesh.tp, sequence_parallel=sequence_parallel)
    context = None
    if mesh.cp.size > 1 or mask is not None:
        context = ContextParallel(mesh.cp, multiple=tp.size if sequence_parallel else 1)
    split = mesh.layout.etp == mesh.layout.tp
    is_shared_out = ExpertTokens(tp, split).are_shared_out
    balancing = Balancing(
        config.experts,
        mesh.comm("dp", "cp", "tp") if is_shared_out else mesh.comm("dp", "cp"),
        mesh.comm("cp", "tp") if is_shared_out else mesh.cp,
        tokens_per_step=ROWS * SEQUENCE,
    )
    ep = ExpertParallel(mesh.comm("ep"), config.experts.count)
    ranks = ExpertRanks(ep, split, mesh.comm("edp"), mesh.dp.rank, balancing)
    layers = parallel_layers(config, tp, context=context, experts=ranks)
    model = Llama(config, layers, seed=1, recompute=Recompute(mode)).double()  # type: ignore[arg-type]
    tokens, targets = (half.chunk(mesh.dp.size)[mesh.dp.rank] for half in batch())
    total = torch.zeros((), dtype=torch.float64)
    with context.using(mask or Mask(SEQUENCE)) if context else torch.enable_grad():
        loss = model.loss(model(tokens), targets, reduction="sum") / (ROWS * SEQUENCE)
        loss.backward()  # type: ignore[no-untyped-call]
    total += loss.detach()
    mesh.comm("dp", "cp").allreduce(total)
    gradients: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        whole = gather_whole(parameter, parameter.grad)
        gradients[name] = (info_of(parameter).replicas or mesh.comm("dp", "cp")).allreduce(whole)
    return Step(total, gradients, balancing.finish_step(), dict(model.named_buffers()))


def require_same(found: list[Step], truth: Step) -> None:
    def close(value: Tensor, expected: Tensor, name: str) -> None:
        torch.testing.assert_close(
            value, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{name}: {text}"
        )

    gradients = {name for step in found for name in step.gradients}
    assert gradients == truth.gradients.keys()
    for step in found:
        close(step.loss, truth.loss, "loss")
        for name, gradient in step.gradients.items():
            close(gradient, truth.gradients[name], name)
        assert step.biases.keys() == truth.biases.keys()
        for name, bias in step.biases.items():
            assert torch.equal(bias, truth.biases[name]), name
        for layer, balance in truth.balance.items():
            assert step.balance[layer].loads == balance.loads
            assert step.balance[layer].balance_loss == pytest.approx(balance.balance_loss, rel=1e-11)
            assert step.balance[layer].z_loss == pytest.approx(balance.z_loss, rel=1e-11)


LAYOUTS: dict[str, dict[str, int]] = {
    "tp, whole experts": {"tp": 2, "ep": 2, "etp": 1},
    "tp, copies of whole experts": {"tp": 2, "ep": 1, "etp": 1},
    "tp, split experts": {"tp": 2, "ep": 1, "etp": 2},
    "dp": {"dp": 2, "ep": 2},
    "dp, copies": {"dp": 4, "ep": 2},
    "dp, uneven": {"dp": 4, "ep": 4},
    "cp": {"cp": 2, "ep": 2},
    "cp, copies": {"cp": 2, "ep": 1},
    "dp x tp, whole experts": {"dp": 2, "tp": 2, "ep": 4, "etp": 1},
    "dp x tp, split experts": {"dp": 2, "tp": 2, "ep": 2, "etp": 2},
    "cp x tp, whole experts": {"cp": 2, "tp": 2, "ep": 2, "etp": 1},
    "cp x tp, split experts": {"cp": 2, "tp": 2, "ep": 2, "etp": 2},
    "dp x cp": {"dp": 2, "cp": 2, "ep": 4},
}
FORMS: dict[str, dict[str, Any]] = {
    "batch": {},
    "sequence, capacity": {"balance_over": "sequence", "capacity_factor": 0.9},
    "global, by position": {"balance_over": "global", "capacity_factor": 0.9, "drop": "position"},
    "deepseek": {"score": "sigmoid", "groups": 3, "groups_per_token": 2, "scale": 2.5},
}


@pytest.mark.parametrize(
    ("layout", "form", "sequence_parallel", "mode"),
    pairwise(LAYOUTS, FORMS, (False, True), ("none", "full")),
)
def test_a_step_is_that_of_the_serial_model(
    layout: str, form: str, sequence_parallel: bool, mode: str
) -> None:
    config, axes = config_with(**FORMS[form]), LAYOUTS[layout]
    sequence_parallel = sequence_parallel and "tp" in axes

    def on_rank(comm: Communicator) -> Step:
        return step_on_ranks(comm, config, axes, sequence_parallel=sequence_parallel, mode=mode)

    size = axes.get("dp", 1) * axes.get("cp", 1) * axes.get("tp", 1)
    require_same(run_loopback(size, on_rank), serial_step(config))


@pytest.mark.mpi
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("etp", [1, -1])
def test_a_step_over_mpi_is_that_of_the_serial_model(
    world: Communicator, etp: int, sequence_parallel: bool
) -> None:
    if world.size not in (1, 2, 4):
        pytest.skip(f"heads and widths do not divide among {world.size} ranks")
    size, config = world.size, config_with(**FORMS["sequence, capacity"])
    axes = {"tp": size, "ep": size, "etp": 1} if etp == 1 else {"tp": size, "ep": 1, "etp": size}
    found = step_on_ranks(world, config, axes, sequence_parallel=sequence_parallel)
    gathered = world.allgather_object(found.gradients)
    whole = {name: gradient for of_rank in gathered for name, gradient in of_rank.items()}
    require_same([found._replace(gradients=whole)], serial_step(config))


@pytest.mark.parametrize(
    "layout", [name for name, axes in LAYOUTS.items() if "cp" in axes and "dp" not in axes]
)
def test_packed_documents_are_sequences_of_their_own(layout: str) -> None:
    """As if each document were a row by itself: so is a batch of one process, document by document."""
    config, axes = config_with(**FORMS["sequence, capacity"]), LAYOUTS[layout]
    model = Llama(config, seed=1).double()
    assert model.balancing is not None
    model.balancing.tokens_per_step = ROWS * SEQUENCE
    texts = zip(*(half.flatten().split(DOCUMENTS) for half in batch()), strict=True)
    loss = torch.zeros((), dtype=torch.float64)
    for tokens, targets in texts:
        part = model.loss(model(tokens[None]), targets[None], reduction="sum") / (ROWS * SEQUENCE)
        part.backward()  # type: ignore[no-untyped-call]
        loss += part.detach()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    truth = Step(loss, gradients, model.balancing.finish_step(), dict(model.named_buffers()))
    mask = Mask(ROWS * SEQUENCE, documents=DOCUMENTS)

    def on_rank(comm: Communicator) -> Step:
        return step_on_ranks(comm, config, axes, mask=mask)

    require_same(run_loopback(axes["cp"] * axes.get("tp", 1), on_rank), truth)


@pytest.mark.parametrize("layout", ["dp", "tp, whole experts", "cp", "dp x cp"])
def test_in_float32_experts_have_the_bits_of_the_serial_model(layout: str) -> None:
    """Logits of the block, and gradients of experts, where no other layer's sums are divided."""
    sizes, axes = Experts(6, 2, 24), LAYOUTS[layout]
    config = replace(SMALL, experts=sizes)
    generator = torch.Generator().manual_seed(9)
    hidden, slopes = torch.randn(2, ROWS, SEQUENCE, 16, generator=generator)

    def block(comm: Communicator) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        mesh = Mesh(comm, axes)
        context = ContextParallel(mesh.cp) if mesh.cp.size > 1 else None
        ep = ExpertParallel(mesh.comm("ep"), sizes.count)
        ranks = ExpertRanks(ep, replicas=mesh.comm("edp"), replica=mesh.dp.rank)
        layers = parallel_layers(config, mesh.tp, context=context, experts=ranks)
        mixture = Llama(config, layers, seed=1).model.layers[0].mlp
        x, slope = (half.chunk(mesh.dp.size)[mesh.dp.rank] for half in (hidden, slopes))
        with context.using(Mask(SEQUENCE)) if context else torch.enable_grad():
            if context is not None:
                x, slope = context.shard(x), context.shard(slope)
            x = x.clone().requires_grad_()
            output = mixture(x)
            (output * slope).sum().backward()
            assert x.grad is not None
            both = (output.detach(), x.grad)
            if context is not None:
                both = (context.unshard(both[0]), context.unshard(both[1]))
        gradients = {n: p.grad for n, p in mixture.experts.named_parameters() if p.grad is not None}
        edp = mesh.comm("edp")
        return *both, gradients if edp.size == 1 else {}

    (expected,) = run_loopback(1, lambda comm: block_alone(comm, config, hidden, slopes))
    size = axes.get("dp", 1) * axes.get("cp", 1) * axes.get("tp", 1)
    dp = axes.get("dp", 1)
    for rank, (output, gradient, of_experts) in enumerate(run_loopback(size, block)):
        place = rank // (size // dp)
        assert torch.equal(output, expected[0].chunk(dp)[place])
        assert torch.equal(gradient, expected[1].chunk(dp)[place])
        for name, value in of_experts.items():
            assert torch.equal(value, expected[2][name]), name


def block_alone(
    _: Communicator, config: LlamaConfig, hidden: Tensor, slopes: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    mixture = Llama(config, seed=1).model.layers[0].mlp
    x = hidden.clone().requires_grad_()
    output = mixture(x)
    (output * slopes).sum().backward()
    assert x.grad is not None
    return (
        output.detach(),
        x.grad,
        {n: p.grad for n, p in mixture.experts.named_parameters() if p.grad is not None},
    )


@pytest.mark.parametrize(
    ("axes", "sequence_parallel"),
    [
        ({"tp": 2, "ep": 2, "etp": 1}, False),
        ({"tp": 2, "ep": 2, "etp": 1}, True),
        ({"tp": 2, "ep": 1, "etp": 2}, True),
    ],
)
def test_ranks_of_tp_generate_the_text_of_one_process(axes: dict[str, int], sequence_parallel: bool) -> None:
    config = config_with(capacity_factor=0.5)
    prompt = batch()[0][:, :5]
    expected = generate(Llama(config, seed=1).double(), prompt, 4, temperature=0)

    def on_rank(comm: Communicator) -> Tensor:
        mesh = Mesh(comm, axes)
        ep = ExpertParallel(mesh.comm("ep"), EXPERTS.count)
        ranks = ExpertRanks(ep, axes["etp"] == 2, replicas=mesh.comm("edp"))
        tp = TensorParallel(mesh.tp, sequence_parallel=sequence_parallel)
        model = Llama(config, parallel_layers(config, tp, experts=ranks), seed=1).double()
        return generate(model, prompt, 4, temperature=0)

    for text in run_loopback(2, on_rank):
        assert torch.equal(text, expected)


def test_ranks_that_do_not_say_who_has_copies_are_refused() -> None:
    def on_rank(comm: Communicator) -> list[str]:
        told = []
        for ranks, tp in [
            (ExpertRanks(ExpertParallel(comm, EXPERTS.count)), Communicator.alone()),
            (ExpertRanks(), comm),
        ]:
            with pytest.raises(LayoutError) as caught:
                parallel_layers(SMALL, tp, experts=ranks)
            told.append(str(caught.value))
        return told

    for first, second in run_loopback(2, on_rank):
        assert "here where experts are divided; give them, as replicas=mesh.edp" in first
        assert "here where each of tp=2 ranks has whole ones; give them" in second


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (replace(SMALL, experts=Experts(6, 2, 13)), "experts.ffn_size"),
        (config_with(shared_ffn_size=13), "experts.shared_ffn_size"),
        (replace(SMALL, ffn_size=25), "ffn_size"),
    ],
)
def test_widths_that_do_not_divide_are_named(config: LlamaConfig, words: str) -> None:
    def on_rank(comm: Communicator) -> str:
        with pytest.raises(LayoutError) as caught:
            parallel_layers(config, comm)
        return str(caught.value)

    assert all(words in told for told in run_loopback(2, on_rank))


@pytest.mark.parametrize(
    ("axes", "sequence_parallel"),
    [({"tp": 2, "etp": 2}, True), ({"tp": 2, "etp": 2}, False), ({"cp": 2}, False)],
)
def test_without_a_balancing_loads_are_counted_over_ranks_that_share_sequences(
    axes: dict[str, int], sequence_parallel: bool
) -> None:
    truth = serial_step(SMALL)

    def on_rank(comm: Communicator) -> dict[int, LayerBalance]:
        mesh = Mesh(comm, axes)
        tp = TensorParallel(mesh.tp, sequence_parallel=sequence_parallel)
        context = ContextParallel(mesh.cp) if mesh.cp.size > 1 else None
        model = Llama(SMALL, parallel_layers(SMALL, tp, context=context), seed=1).double()
        with context.using(Mask(SEQUENCE)) if context else torch.enable_grad():
            model(batch()[0])
        assert model.balancing is not None
        return model.balancing.finish_step()

    for found in run_loopback(2, on_rank):
        for layer, balance in truth.balance.items():
            assert found[layer].loads == balance.loads
            assert found[layer].balance_loss == pytest.approx(balance.balance_loss, rel=1e-11)


def test_over_tp_and_cp_a_balancing_is_to_be_given() -> None:
    def on_rank(comm: Communicator) -> str:
        mesh = Mesh(comm, {"cp": 2, "tp": 2, "etp": 2})
        with pytest.raises(LayoutError) as caught:
            parallel_layers(
                SMALL, TensorParallel(mesh.tp, sequence_parallel=True), context=ContextParallel(mesh.cp)
            )
        return str(caught.value)

    assert all("give ExpertRanks(balancing=" in told for told in run_loopback(4, on_rank))


def test_an_unused_ffn_size_need_not_divide() -> None:
    config = replace(SMALL, ffn_size=25, experts=Experts(6, 2, 12))
    run_loopback(2, lambda comm: parallel_layers(config, comm))


@pytest.mark.parametrize(
    ("size", "degrees"),
    [(2, {"ep": 2}), (3, {"ep": 3}), (4, {"ep": 2, "tp": 2}), (4, {"ep": 2, "tp": 2, "etp": 2})],
    ids=str,
)
def test_the_whole_state_is_the_serial_one_on_every_rank(size: int, degrees: dict[str, int]) -> None:
    config = config_with(count=7)
    serial = Llama(config, seed=1).to(torch.bfloat16)

    def on_rank(comm: Communicator) -> dict[str, Tensor]:
        mesh = Mesh(comm, **degrees)
        split = degrees.get("etp", 1) > 1
        ranks = ExpertRanks(
            ExpertParallel(mesh.ep, 7),
            split=split,
            replicas=mesh.edp,
            balancing=Balancing(config.experts, mesh.replicas),
        )
        model = Llama(config, parallel_layers(config, mesh.tp, experts=ranks), seed=1)
        return whole_state_dict(model.to(torch.bfloat16))

    for found in run_loopback(size, on_rank):
        assert list(found) == list(serial.state_dict())
        for name, value in serial.state_dict().items():
            assert torch.equal(found[name], value), name


def test_ranks_that_divide_another_number_of_experts_are_refused() -> None:
    ranks = ExpertRanks(ExpertParallel(Communicator.alone(), 16))
    with pytest.raises(LayoutError, match=r"divides count=16 experts, .* has experts.count=6; make it as"):
        Llama(SMALL, parallel_layers(SMALL, Communicator.alone(), experts=ranks), seed=1)


@pytest.mark.mpi
def test_the_whole_state_is_gathered_over_mpi(world: Communicator) -> None:
    mesh = Mesh(world, ep=world.size)
    ranks = ExpertRanks(ExpertParallel(mesh.ep, 6), replicas=mesh.edp)
    found = whole_state_dict(Llama(SMALL, parallel_layers(SMALL, mesh.tp, experts=ranks), seed=1))
    serial = Llama(SMALL, seed=1).state_dict()
    assert list(found) == list(serial)
    assert all(torch.equal(found[name], value) for name, value in serial.items())
