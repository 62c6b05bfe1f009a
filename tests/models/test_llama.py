from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcpar.errors import ConfigError, MismatchError
from hpcpar.models import Layers, Llama, LlamaConfig, generate, next_token_loss
from hpcpar.models.initialise import initial_value
from hpcpar.models.layers import Linear, key_value_linear, project_each
from hpcpar.models.llama import rotary_tables, rotate
from hpcpar.tensor_parallel import RMSNorm, causal_attention

SMALL = LlamaConfig(
    vocab_size=23,
    hidden_size=24,
    layers=2,
    heads=6,
    kv_heads=2,
    ffn_size=40,
    max_sequence=16,
    initial_std=0.3,
)


def small_tokens(batch: int = 2, sequence: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, SMALL.vocab_size, (batch, sequence), generator=generator)


def serial_llama(weights: dict[str, Tensor], config: LlamaConfig, tokens: list[int]) -> Tensor:
    """The architecture written out for one sequence, one position and one head at a time."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).sum() / len(x) + config.norm_epsilon).sqrt() * weights[name]

    def turn(head: Tensor, position: int) -> Tensor:
        size, turned = len(head), head.clone()
        for i in range(size // 2):
            angle = position / config.rope_theta ** (2 * i / size)
            a, b = head[i], head[i + size // 2]
            turned[i] = a * math.cos(angle) - b * math.sin(angle)
            turned[i + size // 2] = a * math.sin(angle) + b * math.cos(angle)
        return turned

    def attend(stream: list[Tensor], prefix: str) -> list[Tensor]:
        size = config.head_width
        inputs = [norm(x, f"{prefix}.input_layernorm.weight") for x in stream]
        q, k, v = (
            [(weights[f"{prefix}.self_attn.{p}_proj.weight"] @ x).split(size) for x in inputs] for p in "qkv"
        )
        outputs = []
        for here in range(len(stream)):
            heads = []
            for head in range(config.heads):
                shared = head // (config.heads // config.key_value_heads)
                query = turn(q[here][head], here)
                scores = torch.stack(
                    [query @ turn(k[there][shared], there) / math.sqrt(size) for there in range(here + 1)]
                )
                shares = scores.exp() / scores.exp().sum()
                heads.append(sum((shares[t] * v[t][shared] for t in range(here + 1)), torch.zeros(size)))
            outputs.append(weights[f"{prefix}.self_attn.o_proj.weight"] @ torch.cat(heads))
        return outputs

    def feed_forward(x: Tensor, prefix: str) -> Tensor:
        x = norm(x, f"{prefix}.post_attention_layernorm.weight")
        gate, up = weights[f"{prefix}.mlp.gate_proj.weight"] @ x, weights[f"{prefix}.mlp.up_proj.weight"] @ x
        return weights[f"{prefix}.mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up)

    stream = [weights["model.embed_tokens.weight"][token] for token in tokens]
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}"
        stream = [x + y for x, y in zip(stream, attend(stream, prefix), strict=True)]
        stream = [x + feed_forward(x, prefix) for x in stream]
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return torch.stack([head @ norm(x, "model.norm.weight") for x in stream])


@pytest.mark.parametrize(
    "changes", [{}, {"kv_heads": 6}, {"kv_heads": 1, "tie_embeddings": True}, {"head_size": 6}]
)
def test_logits_and_gradients_equal_the_architecture_written_out(changes: dict[str, int]) -> None:
    config = LlamaConfig(**(SMALL.__dict__ | {"head_size": None} | changes))
    model = Llama(config).double()
    for parameter in model.parameters():  # norms other than one, so that a forgotten one shows
        parameter.data += 0.05 * torch.arange(parameter.numel(), dtype=torch.float64).sin().view_as(parameter)
    tokens = small_tokens()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        expected = torch.stack([serial_llama(weights, config, row.tolist()) for row in tokens])
    finally:
        torch.set_default_dtype(default)
    logits = model(tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-11, atol=1e-11)  # float64, some hundred roundings
    logits.square().mean().backward()
    expected.square().mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-9, atol=1e-11)


def test_a_token_changes_no_logits_before_it() -> None:
    model = Llama(SMALL).double()
    tokens = small_tokens(1, 10)
    changed = tokens.clone()
    changed[0, 6] = (changed[0, 6] + 1) % SMALL.vocab_size
    difference = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert difference[:6].max() == 0
    assert difference[6:].min() > 0


def test_rotary_products_depend_on_the_distance_of_positions_alone() -> None:
    query, key = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def product(position: int, other: int) -> float:
        tables = rotary_tables(torch.tensor([position, other]), 16, 10_000.0, torch.float64)
        turned = [
            rotate(x, t[0][None], t[1][None])
            for x, t in zip((query, key), zip(*tables, strict=True), strict=True)
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(3, 1) == pytest.approx(product(1003, 1001), abs=1e-11)
    assert product(3, 1) != pytest.approx(product(3, 2), abs=1e-3)


def test_rotary_tables_of_far_positions_keep_float32_accuracy() -> None:
    cosines, _ = rotary_tables(torch.tensor([1_000_003]), 8, 500_000.0, torch.bfloat16)
    exact = [math.cos(1_000_003 / 500_000.0 ** (2 * i / 8)) for i in range(4)]
    torch.testing.assert_close(cosines[0], torch.tensor(exact), rtol=1e-5, atol=1e-6)


def test_given_positions_shift_a_part_of_the_sequence() -> None:
    model = Llama(SMALL).double()
    tokens = small_tokens(1, 5)
    torch.testing.assert_close(model(tokens, torch.arange(5)), model(tokens), rtol=0, atol=0)
    moved = model(tokens, torch.arange(5) + 7)  # rotary attention sees distances only
    torch.testing.assert_close(moved, model(tokens), rtol=1e-10, atol=1e-10)
    for shape in ((1, 5), (1,)):  # of transformers, and one that would be everybody's
        with pytest.raises(MismatchError, match="of sequences of 5 tokens; give one for each token"):
            model(tokens, torch.zeros(shape))


def test_norm_in_half_precision_is_worked_out_in_float32() -> None:
    hidden = torch.full((1, 4), 3.0e4, dtype=torch.bfloat16)  # the mean square passes float16, not float32
    assert RMSNorm(4, 1e-5).bfloat16()(hidden).tolist() == [[1.0] * 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_have_the_models_dtype_and_shape(dtype: torch.dtype) -> None:
    logits = Llama(SMALL).to(dtype)(small_tokens(3, 4))
    assert (logits.shape, logits.dtype) == ((3, 4, SMALL.vocab_size), dtype)


def test_a_longer_sequence_than_the_model_is_meant_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="17 tokens is longer than max_sequence=16"):
        Llama(SMALL)(small_tokens(1, 17))


def test_building_a_model_leaves_the_process_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    Llama(SMALL, seed=3)
    assert torch.equal(before, torch.get_rng_state())


def test_a_parameter_begins_the_same_whatever_was_built_before_it() -> None:
    shallow, deep = (
        dict(
            Llama(LlamaConfig(hidden_size=32, layers=n, heads=2, initial_std=0.1), seed=7).named_parameters()
        )
        for n in (1, 3)
    )
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"):
        assert torch.equal(shallow[name], deep[name])
    residual = "model.layers.0.mlp.down_proj.weight"
    torch.testing.assert_close(shallow[residual], deep[residual] * 3**0.5)


def test_seeds_and_names_give_different_values_and_the_std_asked_for() -> None:
    config = LlamaConfig(hidden_size=128, layers=2, initial_std=0.05)
    q, k = (f"model.layers.0.self_attn.{p}_proj.weight" for p in "qk")
    assert not torch.equal(initial_value(config, q, 0), initial_value(config, q, 1))
    assert not torch.equal(initial_value(config, q, 0), initial_value(config, k, 0))
    assert float(initial_value(config, q, 0).std()) == pytest.approx(0.05, rel=0.05)  # 16,384 draws
    assert float(initial_value(config, "model.layers.1.mlp.down_proj.weight", 0).std()) == pytest.approx(
        0.025, rel=0.05
    )
    assert initial_value(config, "model.norm.weight", 0).tolist() == [1.0] * 128


def test_a_float64_model_begins_where_the_float32_one_does() -> None:
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        wide = Llama(SMALL, seed=1)
    finally:
        torch.set_default_dtype(default)
    for narrow, parameter in zip(Llama(SMALL, seed=1).parameters(), wide.parameters(), strict=True):
        assert parameter.dtype == torch.float64
        assert torch.equal(narrow.double(), parameter)


def test_tied_embeddings_are_one_parameter() -> None:
    model = Llama(LlamaConfig(hidden_size=32, heads=2, layers=1, tie_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_a_layer_that_holds_a_part_without_saying_so_is_refused() -> None:
    halves = Layers(column_linear=lambda i, o: Linear(i, o // 2))
    with pytest.raises(MismatchError, match=r"q_proj.weight has shape \(12, 24\).*must say so"):
        Llama(SMALL, halves)


def test_every_factory_of_the_layers_is_used() -> None:
    seen: dict[str, int] = {}

    def counted(kind: str, maker):  # type: ignore[no-untyped-def]
        def make(*sizes):  # type: ignore[no-untyped-def]
            seen[kind] = seen.get(kind, 0) + 1
            return maker(*sizes)

        return make

    layers = Layers(
        column_linear=counted("column", Linear),
        key_value_linear=counted("key_value", key_value_linear),
        row_linear=counted("row", Linear),
        project=counted("project", project_each),
        vocabulary_linear=counted("vocabulary", Linear),
        embedding=counted("embedding", nn.Embedding),
        norm=counted("norm", RMSNorm),
        attention=counted("attention", causal_attention),
    )
    Llama(SMALL, layers)(small_tokens())
    assert seen == {
        "column": 6,
        "key_value": 4,
        "row": 4,
        "vocabulary": 1,
        "embedding": 1,
        "norm": 5,
        "attention": 2,
        "project": 4,
    }


def test_the_loss_is_the_mean_surprise_of_the_targets_that_count() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([[0, 4, -100], [2, -100, 1]])
    surprises = [
        -math.log(math.exp(logits[b, s, targets[b, s]]) / logits[b, s].exp().sum())
        for b, s in ((0, 0), (0, 1), (1, 0), (1, 2))
    ]
    assert float(next_token_loss(logits, targets)) == pytest.approx(sum(surprises) / 4, rel=1e-12)
    assert float(next_token_loss(logits, targets, reduction="sum")) == pytest.approx(
        sum(surprises), rel=1e-12
    )
    each = next_token_loss(logits, targets, reduction="none")
    assert each.shape == (2, 3)
    assert each[0, 2] == 0
    assert next_token_loss(logits.bfloat16(), targets).dtype == torch.float32


def test_logits_and_targets_of_different_shapes_are_refused() -> None:
    with pytest.raises(MismatchError, match=r"logits \(1, 3, 5\) and targets \(1, 2\)"):
        next_token_loss(torch.zeros(1, 3, 5), torch.zeros(1, 2, dtype=torch.int64))


def test_an_untrained_model_is_as_surprised_as_a_uniform_guess() -> None:
    config = LlamaConfig.preset("tiny", layers=1, initial_std=0.02)
    tokens = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(0))
    assert next_token_loss(Llama(config)(tokens), tokens).item() == pytest.approx(math.log(256), abs=0.1)


def test_a_model_learns_a_repeated_sequence_and_generates_it() -> None:
    config = LlamaConfig(vocab_size=7, hidden_size=32, layers=1, heads=2, max_sequence=12, initial_std=0.1)
    model = Llama(config)
    sequence = torch.tensor([1, 5, 2, 6, 3] * 3)[None, :13]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        next_token_loss(model(sequence[:, :-1]), sequence[:, 1:]).backward()
        optimizer.step()
    produced = generate(model, sequence[:, :5], 15, temperature=0)
    assert produced[0].tolist() == [1, 5, 2, 6, 3] * 4  # past max_sequence, the window slides
    assert model.training


def test_drawn_text_is_repeatable_and_keeps_to_the_likeliest_k() -> None:
    model = Llama(SMALL)
    start = small_tokens(2, 3)
    once, again = (generate(model, start, 5, seed=9) for _ in range(2))
    assert torch.equal(once, again)
    assert once.shape == (2, 8)
    assert torch.equal(generate(model, start, 5, top_k=1), generate(model, start, 5, temperature=0))
    for tokens in (torch.zeros(1, 0, dtype=torch.int64), start[0]):
        with pytest.raises(ConfigError, match=r"tokens \[B, S\] with at least one to continue, not \["):
            generate(model, tokens, 1)
    for new_tokens, options in ((1, {"top_k": 0}), (1, {"temperature": float("nan")}), (-1, {})):
        wrong: Any = {"new_tokens": new_tokens, **options}
        with pytest.raises(ConfigError, match="=".join(map(str, [*wrong.items()][-1]))):
            generate(model, start, **wrong)
