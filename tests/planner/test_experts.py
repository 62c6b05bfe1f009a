from __future__ import annotations

import math
from typing import Any

import pytest

from hpcpar.errors import ConfigError
from hpcpar.models import Experts, LlamaConfig

SMALL: dict[str, Any] = {"count": 12, "per_token": 3, "ffn_size": 8}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"count": 0}, "experts.count=0; give a whole number of at least 1"),
        ({"per_token": 0}, "experts.per_token=0; give a whole number of at least 1"),
        ({"per_token": 1.5}, "experts.per_token=1.5; give a whole number"),
        ({"ffn_size": -8}, "experts.ffn_size=-8; give a whole number of at least 1"),
        ({"shared_ffn_size": -1}, "experts.shared_ffn_size=-1; give a whole number of at least 0"),
        ({"first_dense": -1}, "experts.first_dense=-1; give a whole number of at least 0"),
        ({"per_token": 13}, "experts.per_token=13, but there are experts.count=12; choose 12 or fewer"),
        ({"per_token": 1}, "per_token=1 with experts.renormalise=True: .* set renormalise=False"),
        ({"score": "relu"}, "experts.score='relu'; there are softmax, sigmoid"),
        ({"drop": "random"}, "experts.drop='random'; there are score, position"),
        ({"balance_over": "step"}, "experts.balance_over='step'; there are batch, sequence, global"),
        ({"scale": 0.0}, "experts.scale=0.0; give a factor above 0"),
        (
            {"groups": 5},
            "experts.count=12 does not divide into experts.groups=5; choose 1 or 2 or 3 or 4 or 6",
        ),
        ({"groups": 12}, "experts.groups=12 of 1 expert: .* choose at most 6 groups"),
        ({"groups": 4, "groups_per_token": 5}, "groups_per_token=5, but there are experts.groups=4"),
        (
            {"groups": 6, "groups_per_token": 1},
            "groups that a token chooses have 2 experts; set groups_per_token=2",
        ),
        ({"capacity_factor": 0.0}, "experts.capacity_factor=0.0 would drop every token"),
        ({"capacity_factor": math.nan}, "experts.capacity_factor=nan would drop"),
        ({"balance_loss": -0.1}, "experts.balance_loss=-0.1; give 0, for none, or more"),
        ({"z_loss": math.inf}, "experts.z_loss=inf; give 0"),
        ({"bias_rate": -1e-3}, "experts.bias_rate=-0.001; give 0"),
    ],
)
def test_sizes_that_do_not_fit_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Experts(**SMALL | changes)


def test_a_model_of_dense_layers_alone_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="first_dense=2 leaves none of layers=2 with experts; choose 1 or fewer"
    ):
        LlamaConfig(layers=2, experts=Experts(4, 2, 8, first_dense=2))


def test_a_preset_takes_changes_of_its_experts() -> None:
    before = LlamaConfig.preset("tiny-moe").experts
    after = LlamaConfig.preset("tiny-moe", experts={"count": 4}).experts
    assert before is not None
    assert after == Experts(4, before.per_token, before.ffn_size, balance_loss=before.balance_loss)


def test_experts_are_given_to_a_dense_preset_whole() -> None:
    given = {"count": 4, "per_token": 2, "ffn_size": 64}
    assert LlamaConfig.preset("tiny", experts=given).experts == Experts(4, 2, 64)
    with pytest.raises(ConfigError, match="experts need per_token, ffn_size, too"):
        LlamaConfig.preset("tiny", experts={"count": 4})
    with pytest.raises(ConfigError, match=r"no field 'per_tokn'; did you mean 'per_token'"):
        LlamaConfig.preset("tiny-moe", experts={"per_tokn": 4})


@pytest.mark.parametrize(
    ("name", "published", "active_billions"),
    [
        ("mixtral-8x7b", 46_702_792_704, 12.9),
        ("qwen3-30b-a3b", 30_532_122_624, 3.35),
        ("olmoe-1b-7b", 6_919_161_856, 1.28),
    ],
)
def test_presets_have_the_published_number_of_parameters(
    name: str, published: int, active_billions: float
) -> None:
    config = LlamaConfig.preset(name)
    assert config.parameters() == published
    assert config.parameters(active=True) / 1e9 == pytest.approx(active_billions, rel=5e-3)


def test_deepseek_v3_with_its_own_attention_has_the_published_parameters() -> None:
    config = LlamaConfig.preset("deepseek-v3-mixture")
    hidden, experts = config.hidden_size, config.experts
    assert experts is not None
    queries = hidden * 1536 + 1536 + 1536 * 128 * 192
    keys_and_values = hidden * 576 + 512 + 512 * 128 * 256
    attention = queries + keys_and_values + 128 * 128 * hidden
    rest = 61 * (attention + 2 * hidden) + hidden + 2 * config.vocab_size * hidden
    rest += 3 * 3 * hidden * config.ffn_width  # of the first three layers
    biases = 58 * 256
    assert rest + biases + 58 * experts.parameters(hidden) == 671_026_419_200
    active = rest + 58 * experts.parameters(hidden, active=True)
    assert active / 1e9 == pytest.approx(37.6, rel=5e-3)


def test_capacity_is_rounded_up() -> None:
    assert Experts(**SMALL).capacity(10) is None
    assert Experts(**SMALL, capacity_factor=1.0).capacity(16) == 4
    assert Experts(**SMALL, capacity_factor=1.0).capacity(17) == 5
    assert (
        Experts(10, 1, 8, renormalise=False, capacity_factor=1.1).capacity(100) == 11
    )  # 1.1 · 10 > 11 in binary


def test_flops_of_a_layer_are_those_of_the_experts_that_a_token_visits() -> None:
    config = LlamaConfig.preset("tiny-moe", layers=3, experts={"first_dense": 1, "shared_ffn_size": 64})
    costs = config.flops_per_item(32)
    hidden = config.hidden_size
    attention = 2 * 2 * hidden * config.head_width * (config.heads + config.key_value_heads)
    attention += 4 * 32 * config.heads * config.head_width
    mixture = 2 * (8 * hidden + 3 * hidden * (2 * 128 + 64))
    dense = 2 * 3 * hidden * config.ffn_width
    assert costs == [
        0,
        3 * (attention + dense),
        3 * (attention + mixture),
        3 * (attention + mixture),
        6 * config.vocab_size * hidden,
    ]
    assert sum(costs) == config.flops_per_token(32)
