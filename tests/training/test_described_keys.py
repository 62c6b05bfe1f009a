from __future__ import annotations

import io

import pytest
from rich.console import Console

from hpcpar.errors import ConfigError
from hpcpar.training.config import known_keys, parse
from hpcpar.training.described_keys import described_keys, keys_table, meanings


def printed(table: str = "") -> str:
    file = io.StringIO()
    Console(file=file, width=200).print(keys_table(table))
    return file.getvalue()


def test_every_key_is_described_once_and_has_a_meaning() -> None:
    found = described_keys()
    assert sorted(each.key for each in found) == sorted(known_keys())
    assert [each.key for each in found if not each.meaning] == []


def test_every_default_that_is_printed_is_accepted_and_changes_nothing() -> None:
    defaults = [
        f"{each.key}={each.default}"
        for each in described_keys()
        if each.default not in ("not set", "the preset's")
    ]
    assert len(defaults) > 40
    assert parse("", source="run.toml", overrides=defaults) == parse("", source="run.toml")


def test_types_are_written_as_values_are() -> None:
    kinds = {each.key: each.kind for each in described_keys()}
    assert kinds["train.steps"] == "int > 0"
    assert kinds["optimizer.name"] == '"adamw" | "muon" | "sgd"'
    assert kinds["optimizer.betas"] == "[float, float]"
    assert kinds["data.eos_token"] == "text | false"
    assert kinds["data.paths"] == "[path, …]"
    assert kinds["train.seed"] == "int"


def test_a_meaning_goes_on_over_indented_lines_and_may_be_of_two_names() -> None:
    class Section:
        """A table.

        low, high   bounds
                    of something
        size        one

        errors are not described
        """

    assert meanings(Section) == {"low": "bounds of something", "high": "bounds of something", "size": "one"}


def test_the_keys_of_one_table_are_printed_alone_and_a_table_that_is_not_there_is_refused() -> None:
    assert "[train]" not in printed("model")
    assert {"[model]", "[model.experts]"} <= set(printed("model").split())
    with pytest.raises(ConfigError, match=r"no table 'trian'; did you mean train\?"):
        keys_table("trian")
