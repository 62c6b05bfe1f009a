from __future__ import annotations

from hpcpar.training import parse_stages
from hpcpar.training.resolved_config import flat, resolved_toml

FILE = """
[model.experts]
count = 4
per_token = 2
ffn_size = 64
[train]
steps = 40
sequence = 128
global_batch = 16
[optimizer]
betas = [0.8, 0.9]
[data]
paths = ["a \\"quoted\\" name", "é"]
"""


def resolved(text: str, *overrides: str) -> str:
    return resolved_toml(parse_stages(text, source="run.toml", overrides=overrides), "run.toml", overrides)


def test_what_is_shown_is_a_file_of_the_same_configuration() -> None:
    overrides = ("train.steps=7", "output.directory=runs/x")
    told = resolved(FILE, *overrides)
    assert parse_stages(told, source="shown") == parse_stages(FILE, source="run.toml", overrides=overrides)


def test_values_that_are_not_defaults_say_where_they_come_from() -> None:
    lines = resolved(FILE, "train.steps=7", "mesh={ tp = 2, dp = 1 }").splitlines()
    for line in (
        "steps = 7  # command line",
        "sequence = 128  # run.toml",
        "global_batch = 16",
        "tp = 2  # command line",
        "betas = [0.8, 0.9]  # run.toml",
        "count = 4  # run.toml",
    ):
        assert line in lines
    assert not [line for line in lines if "None" in line]


def test_an_override_of_one_stage_is_of_the_command_line_there_alone() -> None:
    text = FILE + "[[stage]]\nuntil = 10\n[[stage]]\ntrain.microbatch = 4\n"
    first, second = resolved(text, "stage.1.until=20").split("# stage 2 of 2")
    assert "until = 20  # command line" in first
    assert "microbatch = 8\n" in first
    assert "microbatch = 4  # run.toml" in second
    assert "command line" not in second


def test_a_configuration_is_flattened_to_its_keys() -> None:
    assert flat({"a": {"b": {"c": 1}, "d": None}}) == {"a.b.c": 1, "a.d": None}
