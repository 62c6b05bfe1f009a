from __future__ import annotations

from math import prod

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hpcpar.errors import ConfigError
from hpcpar.models import PRESETS, Llama, LlamaConfig


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama2-7b", 6_738_415_616),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, published: int) -> None:
    assert LlamaConfig.preset(name).parameters() == published


@pytest.mark.parametrize("name", PRESETS)
def test_the_closed_form_equals_the_sum_over_the_table_of_shapes(name: str) -> None:
    config = LlamaConfig.preset(name)
    assert config.parameters() == sum(prod(shape) for shape in config.shapes().values())


@pytest.mark.parametrize(("name", "millions"), [("tiny", 0.8), ("5m", 5), ("50m", 50), ("125m", 125)])
def test_presets_are_as_large_as_their_names_say(name: str, millions: float) -> None:
    assert LlamaConfig.preset(name).parameters() == pytest.approx(millions * 1e6, rel=0.1)


@pytest.mark.parametrize("name", PRESETS)
def test_a_model_on_the_meta_device_has_the_parameters_of_the_table(name: str) -> None:
    config = LlamaConfig.preset(name)
    with torch.device("meta"):
        model = Llama(config)
    assert {key: tuple(value.shape) for key, value in model.named_parameters()} == config.shapes()


def test_defaults_are_derived_from_the_other_sizes() -> None:
    config = LlamaConfig(hidden_size=96, heads=6)
    assert (config.kv_heads, config.head_size, config.ffn_size) == (6, 16, 256)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 100, "heads": 3}, "hidden_size=100 does not divide among heads=3"),
        ({"heads": 4, "kv_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
        ({"head_size": 5}, "head_size=5 is odd"),
        ({"layers": 0}, "layers=0 must be greater than 0"),
        ({"ffn_size": -1}, "ffn_size=-1 must be greater than 0"),
        ({"initial_std": -0.1}, "initial_std=-0.1 must be 0 or greater"),
    ],
)
def test_sizes_that_do_not_fit_are_named(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LlamaConfig(**changes)


def test_an_unknown_preset_or_field_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'llama38b'; did you mean 'llama3-8b'"):
        LlamaConfig.preset("llama38b")
    with pytest.raises(ConfigError, match=r"no field 'hiden_size'; did you mean 'hidden_size'"):
        LlamaConfig.preset("tiny", hiden_size=3)


@pytest.mark.parametrize("tied", [False, True])
def test_flops_of_a_forward_pass_are_those_that_torch_counts(tied: bool) -> None:
    config = LlamaConfig.preset("tiny", tie_embeddings=tied)
    batch, sequence = 2, 48
    model = Llama(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(batch, sequence, dtype=torch.int64))
    # Fused attention is counted here by its formula, because torch's CPU kernel is not in its table.
    attention = 4 * config.layers * sequence * config.heads * config.head_width * batch * sequence
    counted = counter.get_total_flops()
    ours = config.flops_per_token(sequence, backward=False) * batch * sequence
    assert counted in (ours, ours - attention)


def test_flops_follow_the_formula_of_megatron_for_a_layer_of_its_shape() -> None:
    hidden, layers, vocabulary, sequence = 192, 5, 1000, 64
    # Three gated projections of 8/3 H have the weights of two of 4 H.
    config = LlamaConfig(vocabulary, hidden, layers, heads=6, ffn_size=hidden * 8 // 3, max_sequence=sequence)
    megatron = 72 * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocabulary / (12 * hidden * layers))
    assert config.flops_per_token(sequence) == pytest.approx(megatron, rel=1e-12)


def test_a_preset_made_wider_derives_its_other_sizes_anew() -> None:
    config = LlamaConfig.preset("tiny", hidden_size=192)
    assert (config.head_size, config.ffn_size) == (48, 512)
    assert LlamaConfig.preset("tiny", hidden_size=192, ffn_size=100).ffn_size == 100
    assert LlamaConfig.preset("tiny", layers=2).ffn_size == LlamaConfig.preset("tiny").ffn_size
