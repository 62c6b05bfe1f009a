"""A plain model that a plan made parallel is the serial one: outputs, gradients, and after some steps."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

from hpcpar.comm import Communicator
from hpcpar.comm import run_loopback as run
from hpcpar.errors import HpcparError, LayoutError, MismatchError, PeerFailedError
from hpcpar.mesh import Mesh
from hpcpar.tensor_parallel import (
    Column,
    ColumnParallelLinear,
    Enter,
    Gather,
    Heads,
    LocalHeads,
    Norm,
    Plan,
    Row,
    Scatter,
    Style,
    TensorParallel,
    VocabParallelEmbedding,
    Vocabulary,
    VocabularyEmbedding,
    Whole,
    causal_attention,
    gather_whole,
    parallelize,
    split_of,
    split_over,
    whole_state_dict,
)
from hpcpar.tensor_parallel.parallel_plan import matches
from hpcpar.tensor_parallel.region_styles import OnOwnPart
from tests.grid import checkered, pairwise
from tests.tensor_parallel.conftest import TOLERANCE, Trained, require_same, trained

HIDDEN, HEADS, HEAD_SIZE, FFN, VOCABULARY = 16, 12, 2, 24, 23


def drawn(model: nn.Module) -> nn.Module:
    """Draw float64 values, also for norms, from a generator of their own."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    return model


class Attention(nn.Module):
    """Hand-written attention with its numbers of heads in attributes."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = HEADS, kv_heads
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_SIZE)
        self.k_proj = nn.Linear(HIDDEN, kv_heads * HEAD_SIZE)
        self.v_proj = nn.Linear(HIDDEN, kv_heads * HEAD_SIZE)
        self.q_norm = nn.LayerNorm(HEAD_SIZE)
        self.k_norm = nn.LayerNorm(HEAD_SIZE)
        self.o_proj = nn.Linear(HEADS * HEAD_SIZE, HIDDEN)

    def forward(self, scale: float, *, hidden: Tensor) -> Tensor:
        def by_head(projected: Tensor, heads: int) -> Tensor:
            return projected.view(*projected.shape[:-1], heads, HEAD_SIZE)

        queries = self.q_norm(by_head(self.q_proj(hidden), self.heads)).transpose(1, 2)
        keys = self.k_norm(by_head(self.k_proj(hidden), self.kv_heads)).transpose(1, 2)
        values = by_head(self.v_proj(hidden), self.kv_heads).transpose(1, 2)
        return self.o_proj(scale * causal_attention(queries, keys, values).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, FFN, bias=False)
        self.up = nn.Linear(HIDDEN, FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(hidden)) * self.up(hidden))


class Layer(nn.Module):
    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(HIDDEN)
        self.attention = Attention(kv_heads)
        self.second_norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.mlp = FeedForward()

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(0.5, hidden=self.first_norm(hidden))
        return hidden + self.mlp(self.second_norm(hidden))


class Decoder(nn.Module):
    """Tokens to logits; with `tie` one weight for both ends."""

    def __init__(self, kv_heads: int = HEADS, *, tie: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=20)
        self.layers = nn.ModuleList(Layer(kv_heads) for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        drawn(self)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def decoder_plan(kv_heads: int = HEADS) -> dict[str, Style | tuple[Style, ...]]:
    attention = "layers.*.attention"
    return {
        "embed": VocabularyEmbedding(whole_sequence=True),
        "layers.0": Scatter(),
        "layers.*.*_norm": Norm(),
        attention: (Enter("hidden"), LocalHeads(("heads",), share_heads=("kv_heads",))),
        f"{attention}.q_proj": Column(heads=HEADS, enter=False),
        f"{attention}.[kv]_proj": Column(heads=kv_heads, share_heads=True, enter=False),
        f"{attention}.[qk]_norm": Norm(of_heads=True),
        f"{attention}.o_proj": Row(),
        "layers.*.mlp": Enter(),
        "layers.*.mlp.gate": Column(enter=False),
        "layers.*.mlp.up": Column(enter=False),
        "layers.*.mlp.down": Row(),
        "norm": (Norm(), Gather()),
        "head": Vocabulary(whole_sequence=True),
    }


def prelu_mlp() -> nn.Module:
    """The activation has a weight, the same for all of its inputs."""
    return drawn(nn.Sequential(nn.Linear(8, 12), nn.PReLU(), nn.Linear(12, 8), nn.LayerNorm(8)))


def mlp() -> nn.Module:
    return drawn(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)))


MLP_PLAN = {"0": Column(), "2": Row()}


def numbers() -> Tensor:
    return torch.randn(2, 12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def tokens() -> Tensor:
    drawn = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(3))
    drawn[0, 4] = 20  # the embedding's padding
    return drawn


def compare(
    size: int,
    model: nn.Module,
    plan: Plan,
    x: Tensor,
    optimizer: str = "sgd",
    **way: Any,
) -> None:
    copies = [copy.deepcopy(model) for _ in range(size)]
    serial = trained(copy.deepcopy(model), x, optimizer)

    def on_rank(comm: Communicator) -> Trained:
        parallel = parallelize(copies[comm.rank], plan, TensorParallel(comm, **way))
        assert parallel is copies[comm.rank]
        return trained(parallel, x, optimizer)

    for found in run(size, on_rank):
        require_same(found, serial)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "twice": {"twice": True},
    "sequence": {"sequence_parallel": True},
    "sequence, gather again, chunks": {"sequence_parallel": True, "gather_again": True, "chunks": 2},
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


# --- the same as the serial model -----------------------------------------------------------------


@pytest.mark.parametrize(("size", "optimizer", "way"), pairwise([1, 2, 3, 4], ["sgd", "adamw"], WAYS))
def test_a_plain_mlp_trains_as_the_serial_one(size: int, optimizer: str, way: str) -> None:
    plan = {"0": (Column(), Scatter()), "2": (Row(), Gather())}
    compare(size, mlp(), plan, numbers(), optimizer, **WAYS[way])


def test_layers_that_change_the_outputs_of_parallel_ones_in_place_train_as_the_serial_ones(
    way: dict[str, Any],
) -> None:
    layers = nn.Linear(8, 12), nn.ReLU(inplace=True), nn.Linear(12, 8, bias=False), nn.ReLU(inplace=True)
    plan = {"0": (Column(), Scatter()), "2": Row(), "3": Gather()}
    compare(2, drawn(nn.Sequential(*layers)), plan, numbers(), **way)


def test_an_mlp_of_complex_numbers_trains_as_the_serial_one(way: dict[str, Any]) -> None:
    layers = nn.Linear(8, 12, dtype=torch.complex128), nn.Tanh(), nn.Linear(12, 8, dtype=torch.complex128)
    x = torch.complex(numbers(), numbers().flip(0))
    copies = [copy.deepcopy(nn.Sequential(*layers)) for _ in range(2)]
    plan = {"0": (Column(), Scatter()), "2": (Row(), Gather())}

    def trained_on(model: nn.Module) -> dict[str, Tensor]:
        steps = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(4):
            steps.zero_grad()
            (model(x) - 1j).abs().square().mean().backward()
            steps.step()
        return whole_state_dict(model)

    serial = trained_on(nn.Sequential(*layers))
    for found in run(
        2, lambda comm: trained_on(parallelize(copies[comm.rank], plan, TensorParallel(comm, **way)))
    ):
        torch.testing.assert_close(found, serial, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize(
    "plan",
    [
        {"0": Column(gather_output=True)},
        {"2": Row(input_is_parallel=False)},
        {"0": Column(gather_output=True), "2": Row(input_is_parallel=False)},
        {"0": Vocabulary()},
        {"0": Vocabulary(), "2": Vocabulary()},
    ],
    ids=str,
)
def test_a_layer_alone_can_be_divided(size: int, plan: Plan) -> None:
    compare(size, mlp(), plan, numbers())


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_an_activation_with_a_weight_of_its_own_trains_as_the_serial_one(size: int) -> None:
    # What comes after the row layer needs no style: all ranks have the same there.
    compare(size, prelu_mlp(), {**MLP_PLAN, "1": Norm(of_heads=True)}, numbers())


@pytest.mark.parametrize("styles", [Whole(), Norm()], ids=str)
def test_what_comes_after_the_row_layer_of_an_entered_module_may_be_left_as_it_is(styles: Style) -> None:
    def build() -> nn.Module:
        model = OnEight()
        model.mlp.down = nn.Sequential(model.mlp.down, nn.LayerNorm(HIDDEN))
        return drawn(model)

    columns = {"mlp.gate": Column(enter=False), "mlp.up": Column(enter=False)}
    plan = {"mlp": Enter(), **columns, "mlp.down.0": Row(), "mlp.down.1": styles}
    compare(2, build(), plan, numbers())


@pytest.mark.parametrize(
    ("shape", "way"), checkered([(1, 12), (3, 12), (4, 12), (4, 2), (2, 1), (3, 1)], WAYS)
)
def test_hand_written_attention_trains_as_the_serial_one(shape: tuple[int, int], way: str) -> None:
    size, kv_heads = shape
    compare(size, Decoder(kv_heads), decoder_plan(kv_heads), tokens(), **WAYS[way])


@pytest.mark.parametrize("size", [1, 4])
def test_tied_weights_stay_tied_and_train_as_the_serial_ones_and_so_do_copies(
    size: int, way: dict[str, Any]
) -> None:
    serial, models = trained(Decoder(tie=True), tokens()), [Decoder(tie=True) for _ in range(size)]

    def on_rank(comm: Communicator) -> list[Trained]:
        model = parallelize(models[comm.rank], decoder_plan(), TensorParallel(comm, **way))
        copied = AveragedModel(model).module
        for each in (model, copied):
            whole = whole_state_dict(each)
            assert each.head.weight is each.embed.weight
            assert whole["head.weight"] is whole["embed.weight"]
            assert split_over(each).keys() == split_over(model).keys()
        return [trained(each, tokens()) for each in (copied, model)]

    for found in run(size, on_rank):
        for each in found:
            require_same(each, serial)


class Fused(nn.Module):
    """Queries, keys and values in one weight, and the same normed twice by one module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.again = self.norm
        self.qkv = nn.Linear(8, 36)
        self.also = self.qkv
        self.out = nn.Linear(12, 8)
        drawn(self)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.qkv(self.norm(x)).chunk(3, -1)
        fourth, *_ = self.also(self.again(x)).chunk(3, -1)
        return self.out(torch.tanh(first) * second + third * fourth)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sections_are_divided_each_by_itself_and_a_module_with_two_names_stays_one(size: int) -> None:
    plan = {"qkv": Column(sections=(12, Heads(6, 2), 12)), "out": Row()}
    compare(size, Fused(), plan, numbers())
    models = [Fused() for _ in range(size)]
    for model in run(size, lambda comm: parallelize(models[comm.rank], plan, comm)):
        assert model.also is model.qkv
        assert isinstance(model.qkv, ColumnParallelLinear)


def test_a_style_that_is_optional_may_match_no_module() -> None:
    compare(2, mlp(), {**MLP_PLAN, "norm": OptionalNorm()}, numbers())


def test_an_input_that_is_entered_once_has_its_gradient_summed_once() -> None:
    def sums(comm: Communicator, plan: Plan) -> int:
        model = parallelize(models.pop(), plan, comm)
        before = comm.traffic.row("allreduce").calls
        model(numbers().requires_grad_()).sum().backward()
        return comm.traffic.row("allreduce").calls - before

    entered = {"mlp": Enter(), "mlp.gate": Column(enter=False), "mlp.up": Column(enter=False)}
    apart = {"mlp.gate": Column(), "mlp.up": Column()}
    # One is that of the outputs, the others are of the input's gradient.
    for plan, expected in ((entered, 2), (apart, 3)):
        models = [drawn(OnEight()) for _ in range(2)]
        assert run(2, lambda comm, plan=plan: sums(comm, {**plan, "mlp.down": Row()})) == [expected] * 2


class OnEight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(8, HIDDEN)
        self.mlp = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.widen(x))


@pytest.mark.mpi
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_on_mpi_too_it_is_the_same(world: Communicator, sequence_parallel: bool) -> None:
    kv_heads = 1
    serial = trained(Decoder(kv_heads), tokens())
    tp = TensorParallel(world, sequence_parallel=sequence_parallel)
    found = trained(parallelize(Decoder(kv_heads), decoder_plan(kv_heads), tp), tokens())
    failure = None
    try:
        require_same(found, serial)
    except AssertionError as error:
        failure = str(error)
    assert world.allgather_object(failure) == [None] * world.size


# --- what becomes of a model ----------------------------------------------------------------------


def test_a_mesh_gives_its_tp_axis() -> None:
    models = [mlp() for _ in range(4)]

    def shapes(comm: Communicator) -> tuple[list[int], bool]:
        with Mesh(comm, tp=2) as mesh:
            model = parallelize(models[comm.rank], MLP_PLAN, mesh)
            return list(model[0].weight.shape), model[0].tp.comm is mesh.tp

    assert run(4, shapes) == [([6, 8], True)] * 4


def test_shards_have_memory_of_their_own_and_keep_dtype_and_what_is_frozen() -> None:
    def build() -> nn.Module:
        model = mlp().bfloat16().eval()
        model[0].weight.requires_grad_(False)
        return model

    wholes, models = [build() for _ in range(2)], [build() for _ in range(2)]

    def on_rank(comm: Communicator) -> tuple[nn.Module, dict[str, Any]]:
        model = parallelize(models[comm.rank], MLP_PLAN, comm)
        return model, split_over(model)

    for rank, (model, over) in enumerate(run(2, on_rank)):
        whole = dict(wholes[rank].named_parameters())
        assert over.keys() == {"0.weight", "0.bias", "2.weight"}
        assert not model[0].training
        for name, parameter in model.named_parameters():
            assert parameter.dtype == torch.bfloat16
            assert parameter.requires_grad == whole[name].requires_grad == (name != "0.weight")
            assert parameter.untyped_storage().nbytes() == parameter.nbytes
            split = split_of(parameter)
            assert split is not None
            assert torch.equal(parameter, split.shard(whole[name], rank))


def test_hooks_of_forward_go_along_and_their_handles_still_remove_them() -> None:
    seen: list[list[int]] = []
    model = mlp()
    handles = [
        model[0].register_forward_hook(lambda module, inputs, output: seen.append(list(output.shape))),
        model[2].register_forward_pre_hook(lambda module, inputs: seen.append(list(inputs[0].shape))),
    ]
    run(1, lambda comm: parallelize(model, MLP_PLAN, comm)(numbers()))
    assert isinstance(model[0], ColumnParallelLinear)
    assert seen == [[2, 12, 12]] * 2
    for handle in handles:
        handle.remove()
    model(numbers())
    assert len(seen) == 2


def test_hooks_of_backward_go_along() -> None:
    model = mlp()
    model[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] / 2,))
    model[0].register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 3,))
    compare(2, model, MLP_PLAN, numbers())


@pytest.mark.parametrize("size", [1, 2])
def test_under_autocast_layers_compute_in_its_type(size: int, way: dict[str, Any]) -> None:
    model = mlp().float()
    copies = [copy.deepcopy(model) for _ in range(size)]
    plan = {"0": (Column(), Scatter()), "2": (Row(), Gather())}

    def gradients(model: nn.Module) -> tuple[torch.dtype, dict[str, Tensor]]:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(numbers().float())
        output.float().square().mean().backward()
        return output.dtype, {name: gather_whole(p, p.grad) for name, p in model.named_parameters()}

    dtype, expected = gradients(model)
    for found in run(
        size, lambda comm: gradients(parallelize(copies[comm.rank], plan, TensorParallel(comm, **way)))
    ):
        assert found[0] is dtype is torch.bfloat16
        # bfloat16 has 8 bits, of which sums over ranks round once more.
        torch.testing.assert_close(found[1], expected, rtol=0.03, atol=0.01)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_torchs_encoder_layers_are_evaluated_as_the_serial_ones(context: Callable[[], Any]) -> None:
    """Torch's kernel for a whole layer would compute with this rank's part of the weights alone."""

    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 4, FFN, batch_first=True)
        return drawn(nn.TransformerEncoder(layer, 2))

    def evaluated(model: nn.Module) -> Tensor:
        padding = torch.arange(12) >= torch.tensor([[12], [9]])
        with context():
            output: Tensor = model.eval()(numbers(), src_key_padding_mask=padding)
        return output[~padding]

    serial, copies = evaluated(build()), [build() for _ in range(2)]
    plan = {"layers.*.linear1": Column(), "layers.*.linear2": Row()}
    for found in run(2, lambda comm: evaluated(parallelize(copies[comm.rank], plan, comm))):
        torch.testing.assert_close(found, serial, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_forward_under_inference_mode_may_come_first(way: dict[str, Any]) -> None:
    plan = {"0": (Column(), Scatter()), "2": (Row(), Gather())}
    model = mlp()
    copies = [copy.deepcopy(model) for _ in range(2)]
    serial = trained(model, numbers())

    def on_rank(comm: Communicator) -> Trained:
        parallel = parallelize(copies[comm.rank], plan, TensorParallel(comm, **way))
        with torch.inference_mode():
            parallel(numbers())
        return trained(parallel, numbers())

    for found in run(2, on_rank):
        require_same(found, serial)


def test_the_whole_state_is_that_of_the_serial_model() -> None:
    serial, models = Decoder(), [Decoder() for _ in range(4)]
    for model in (serial, *models):
        model.layers[0].register_buffer("scale", torch.arange(3.0))
    tp = partial(TensorParallel, sequence_parallel=True)
    expected = serial.state_dict()
    for state in run(4, lambda c: whole_state_dict(parallelize(models[c.rank], decoder_plan(), tp(c)))):
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        Decoder().load_state_dict({name: value for name, value in state.items() if "scale" not in name})


def test_without_sequence_parallelism_its_styles_leave_modules_as_they_are() -> None:
    models = [Decoder() for _ in range(2)]
    for model in run(2, lambda comm: parallelize(models[comm.rank], decoder_plan(), comm)):
        assert type(model.norm) is nn.LayerNorm
        assert not model.norm._forward_hooks
        assert not model.layers[0]._forward_pre_hooks
        assert isinstance(model.layers[0].attention.q_norm, OnOwnPart)
        assert isinstance(model.embed, VocabParallelEmbedding)


def test_a_norm_on_its_own_part_is_converted_loaded_and_switched_as_any_module() -> None:
    def on_rank(comm: Communicator) -> tuple[nn.Module, Tensor]:
        norm = OnOwnPart(nn.Sequential(nn.LayerNorm(4), nn.Dropout(0.5)), TensorParallel(comm))
        norm.half().eval()
        return norm, norm(torch.ones(2, 4, dtype=torch.float16))

    ((norm, output),) = run(1, on_rank)
    assert [name for name, _ in norm.named_parameters()] == ["0.weight", "0.bias"]
    assert output.tolist() == [[0.0] * 4] * 2
    assert "LayerNorm" in repr(norm)
    norm.load_state_dict({"0.weight": torch.ones(4), "0.bias": torch.ones(4)})
    assert norm(torch.ones(2, 4, dtype=torch.float16)).tolist() == [[1.0] * 4] * 2


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layers.*.mlp", "layers.3.mlp", True),
        ("layers.*.mlp", "layers.3.more.mlp", False),
        ("layers.*", "layers.3.mlp", False),
        ("*.mlp", "mlp", False),
        ("layers.[01].*_proj", "layers.1.q_proj", True),
        ("layers.[01].*_proj", "layers.2.q_proj", False),
        ("Layers.*", "layers.1", False),
        ("head", "head", True),
    ],
)
def test_a_star_stands_for_one_part_of_a_name(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


# --- bad input ------------------------------------------------------------------------------------


def pruned(model: nn.Module) -> nn.Module:
    prune.l1_unstructured(model[0], "weight", amount=2)
    return model


def hooked(model: nn.Module) -> nn.Module:
    model[2].weight.register_hook(lambda gradient: gradient / 2)
    return model


def told_afterwards(model: nn.Module) -> nn.Module:
    model[2].bias.register_post_accumulate_grad_hook(lambda bias: None)
    return model


def replaced(model: nn.Module) -> nn.Module:
    plain = model[0].forward
    model[0].forward = lambda x: 2 * plain(x)
    return model


def adapted(model: nn.Module) -> nn.Module:
    model[0].adapter = nn.Linear(8, 12)
    model[0].register_buffer("mask", torch.ones(12))
    return model


def decoder_with(**changes: Style | tuple[Style, ...]) -> dict[str, Style | tuple[Style, ...]]:
    return {**decoder_plan(), **{name.replace("__", "."): style for name, style in changes.items()}}


class OptionalNorm(Norm):
    optional = True


def decoder_without(pattern: str) -> dict[str, Style | tuple[Style, ...]]:
    return {name: styles for name, styles in decoder_plan().items() if name != pattern}


def scaled_decoder() -> nn.Module:
    model = Decoder()
    model.layers[1].mlp.scale = nn.Parameter(torch.ones(()))
    return model


BAD: dict[str, tuple[Callable[[], nn.Module], Mapping[str, Any], str]] = {
    "empty": (mlp, {}, "the plan is empty"),
    "no module": (
        Decoder,
        {"layer.*.attention.q": Column()},
        "'layer.*.attention.q' matches no module; the model has layers.*.attention, layers.*.attention.q_",
    ),
    "no module at all": (lambda: nn.Linear(2, 2), {"": Column()}, "the model has no modules within it"),
    "not optional": (
        mlp,
        {**MLP_PLAN, "norm": (OptionalNorm(), Scatter())},
        "the plan's 'norm' matches no module",
    ),
    "two patterns": (mlp, {"0": Column(), "[01]": Row()}, "0 is matched by the plan's '0' and by '[01]'"),
    "no style": (mlp, {"0": Row}, "give a style, such as Column() or Row()"),
    "no linear": (mlp, {"1": Column()}, "1 is a torch.nn.modules.activation.GELU, and Column is for"),
    "no embedding": (mlp, {"0": VocabularyEmbedding()}, "VocabularyEmbedding is for torch.nn.Embedding"),
    "max norm": (
        lambda: nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)),
        {"0": VocabularyEmbedding()},
        "0 has max_norm=1.0",
    ),
    "pruned": (lambda: pruned(mlp()), MLP_PLAN, "0 has the parameters bias, weight_orig, where"),
    "a hook on a weight": (lambda: hooked(mlp()), MLP_PLAN, "2.weight has a hook on its gradient"),
    "a hook after a gradient": (
        lambda: told_afterwards(mlp()),
        MLP_PLAN,
        "2.bias has a hook on its gradient",
    ),
    "another forward": (lambda: replaced(mlp()), MLP_PLAN, "0 has a forward of its own, which the parallel"),
    "more in a layer": (lambda: adapted(mlp()), MLP_PLAN, "0 holds adapter, mask, which the parallel layer"),
    "outputs": (
        lambda: nn.Sequential(nn.Linear(2, 9)),
        {"0": Column()},
        "0: out_features=9 does not divide among tp=2 ranks; tp=1 or tp=3 would fit",
    ),
    "inputs": (
        lambda: nn.Sequential(nn.Linear(9, 2)),
        {"0": Row()},
        "0: in_features=9 does not divide among tp=2 ranks; tp=1 or tp=3 would fit",
    ),
    "heads": (
        lambda: nn.Sequential(nn.Linear(2, 6)),
        {"0": Column(heads=3)},
        "0: heads=3 does not divide among tp=2 ranks; tp=1 or tp=3 would fit",
    ),
    "shared heads": (
        lambda: nn.Sequential(nn.Linear(2, 6)),
        {"0": Column(heads=3, share_heads=True)},
        "0: heads=3 neither divides among tp=2 ranks nor divides them; tp=1 or tp=3 would fit",
    ),
    "heads of nothing": (mlp, {"0": Column(heads=5)}, "makes 10 outputs, but the layer has 12"),
    "sections": (mlp, {"0": Column(sections=(2, 4))}, "makes 6 outputs, but the layer has 12"),
    "local heads": (
        Decoder,
        decoder_with(layers__1=LocalHeads(("heads",))),
        "with heads=None; LocalHeads is for attributes that are numbers",
    ),
    "argument": (
        Decoder,
        decoder_with(layers__0=Scatter("x")),
        "does not have the argument 'x'; it has hidden",
    ),
    "not entered": (mlp, {"0": Column(enter=False), "2": Row()}, "the plan has no Enter for a module"),
    "entered for nothing": (
        Decoder,
        decoder_with(**{"layers__*__mlp__gate": Column(), "layers__*__mlp__up": Column()}),
        "layers.0.mlp has the style Enter, but no layer in it has enter=False",
    ),
    "tied, one whole": (
        lambda: Decoder(tie=True),
        {"embed": VocabularyEmbedding()},
        "embed.weight and head.weight are the same parameter",
    ),
    "tied, two ways": (
        lambda: Decoder(tie=True),
        {"embed": VocabularyEmbedding(), "head": Row(input_is_parallel=False)},
        "embed.weight and head.weight are the same parameter",
    ),
    "nothing said of a norm of keys": (
        Decoder,
        decoder_without("layers.*.attention.[qk]_norm"),
        "the plan says nothing of layers.0.attention.q_norm.weight, which is in layers.0.attention, where "
        "ranks work on different parts: each rank would have a part of its gradient only; give its module",
    ),
    "nothing said of a parameter": (
        scaled_decoder,
        decoder_plan(),
        "layers.1.mlp.scale, which is in layers.1.mlp, where ranks work on different parts: each rank would "
        "have a part of its gradient only; move it to a module of its own with a style: Norm(",
    ),
    "nothing said of heads": (
        Decoder,
        {"layers.1.attention": LocalHeads(("heads", "kv_heads"))},
        "the plan says nothing of layers.1.attention.q_proj.weight",
    ),
    "nothing said of an activation": (
        prelu_mlp,
        MLP_PLAN,
        "the plan says nothing of 1.weight, which is between a column and a row layer: each rank would have "
        "a part of its gradient only; give its module a style: Norm(of_heads=True) adds the parts up",
    ),
    "a norm around what is divided": (
        Decoder,
        decoder_with(layers__1=Norm()),
        "layers.1 has the style Norm, but the plan divides layers.1.attention.q_proj.weight in it",
    ),
    "meta": (lambda: mlp().to("meta"), MLP_PLAN, "0.weight is on the meta device"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_plan_that_does_not_fit_is_refused_and_the_model_stays_as_it_was(case: str) -> None:
    build, plan, message = BAD[case]
    models = [build() for _ in range(2)]
    before = [{name: id(module) for name, module in model.named_modules()} for model in models]

    def on_rank(comm: Communicator) -> str:
        with pytest.raises(LayoutError, match=re.escape(message)) as raised:
            parallelize(models[comm.rank], plan, comm)
        return str(raised.value)

    assert len(set(run(2, on_rank))) == 1
    assert [{name: id(module) for name, module in model.named_modules()} for model in models] == before


def refused(models: list[nn.Module], plans: list[Plan], **ways: list[Any]) -> list[HpcparError]:
    """Return the error of each rank."""

    def on_rank(comm: Communicator) -> HpcparError:
        tp = TensorParallel(comm, **{name: given[comm.rank] for name, given in ways.items()})
        with pytest.raises(HpcparError) as raised:
            parallelize(models[comm.rank], plans[comm.rank], tp)
        return raised.value

    return run(len(models), on_rank)


def test_ranks_with_other_values_are_told_which_parameter() -> None:
    models = [mlp() for _ in range(3)]
    with torch.no_grad():
        models[2][2].bias[3] += 1e-9
    for error in refused(models, [MLP_PLAN] * 3):
        assert isinstance(error, MismatchError)
        assert re.match(r"2.bias: rank 0 of .* checksum \w{8}, rank 2 has \[8\] torch.float64", str(error))
        assert "broadcast_parameters" in str(error)


def test_ranks_with_other_shapes_plans_or_ways_are_told_so() -> None:
    wider = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8))
    for error in refused([mlp(), drawn(wider)], [MLP_PLAN] * 2):
        assert "0.weight: rank 0" in str(error)
        assert "[24, 8]" in str(error)
    for error in refused([mlp(), mlp()], [MLP_PLAN, {"0": Column(), "2": Row(input_is_parallel=False)}]):
        assert "the style of 2: rank 0" in str(error)
    for error in refused([mlp(), mlp()], [MLP_PLAN, {"0": Column()}]):
        assert "the style of 2: rank 0" in str(error)
        assert "rank 1 has none such" in str(error)
    for error in refused([mlp(), mlp()], [MLP_PLAN] * 2, overlap=[True, False]):
        assert "TensorParallel: rank 0" in str(error)


def test_a_rank_that_fails_alone_takes_the_others_with_it() -> None:
    first, second = refused([mlp(), mlp()], [MLP_PLAN, {"3": Column()}])
    assert isinstance(first, PeerFailedError)
    assert "rank 1: LayoutError: the plan's '3' matches no module" in str(first)
    assert isinstance(second, LayoutError)


def test_layers_of_one_model_are_on_one_communicator() -> None:
    models = [mlp() for _ in range(2)]

    def on_rank(comm: Communicator) -> list[str]:
        with Mesh(comm, tp=2) as mesh:
            parallelize(models[comm.rank], {"0": Column(gather_output=True)}, mesh)
            told = []
            for tp, expected in ((comm, MismatchError), (mesh.tp, LayoutError)):
                with pytest.raises(expected) as raised:
                    parallelize(models[comm.rank], MLP_PLAN, tp)
                told.append(str(raised.value))
            parallelize(models[comm.rank], {"2": Row(input_is_parallel=False)}, mesh)
            return told

    for other, again in run(2, on_rank):
        assert "0.weight is divided over the communicator 'tp'" in other
        assert "use one communicator" in other
        assert "0 is a hpcpar.tensor_parallel.linear.ColumnParallelLinear" in again


def test_under_sequence_parallelism_no_parameter_may_be_forgotten() -> None:
    plan = {name: style for name, style in decoder_plan().items() if name != "norm"}
    for error in refused([Decoder() for _ in range(2)], [plan] * 2, sequence_parallel=[True] * 2):
        assert isinstance(error, LayoutError)
        assert "says nothing of norm.weight" in str(error)
        assert "Norm(), or Whole()" in str(error)
    models = [Decoder() for _ in range(2)]
    whole = {**plan, "layers.1": Gather(), "norm": Whole()}
    found = run(
        2,
        lambda comm: trained(
            parallelize(models[comm.rank], whole, TensorParallel(comm, sequence_parallel=True)), tokens()
        ),
    )
    serial = trained(Decoder(), tokens())
    for mine in found:
        require_same(mine, serial)


def test_a_sequence_that_does_not_divide_is_refused_where_it_is_scattered() -> None:
    models = [Decoder() for _ in range(2)]

    def on_rank(comm: Communicator) -> None:
        tp = TensorParallel(comm, sequence_parallel=True)
        model = parallelize(models[comm.rank], decoder_plan(), tp)
        with pytest.raises(MismatchError, match=r"a sequence: 9 elements do not divide .* 8 or 10 would"):
            model(tokens()[:, :9])
        with pytest.raises(MismatchError, match="called without its 'hidden'"):
            model.layers[0].attention(0.5)

    run(2, on_rank)


@pytest.mark.parametrize("plan", [{"0": Column(), "2": Row(input_is_parallel=False)}, {"2": Row()}])
def test_a_row_layer_says_when_its_input_is_not_what_it_takes(plan: Plan) -> None:
    models = [mlp() for _ in range(2)]

    def on_rank(comm: Communicator) -> None:
        with pytest.raises(MismatchError, match="each of 2 ranks has 6 of this layer's 12 inputs"):
            parallelize(models[comm.rank], plan, comm)(numbers())

    run(2, on_rank)
