"""The configuration that a file and a command line come to, as TOML: `hpcpar train … --show`.

    [train]
    steps = 50  # command line
    sequence = 128  # examples/tiny.toml
    global_batch = 16

A comment says where a value that is not the default comes from. Keys without a value are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcpar.comm import Communicator
from hpcpar.planner.run_file import toml_lines
from hpcpar.training.config import Config, within
from hpcpar.training.hugging_face_start import with_hugging_face


def resolved_toml(configs: Sequence[Config], source: str, overrides: Sequence[str] = ()) -> str:
    """Return the TOML of each stage, one after the other; of a run without stages it is one file.

    source      the name of the file
    overrides   as for `parse_stages`
    errors      as for `with_hugging_face`, which reads sizes from a model's directory
    """
    lines: list[str] = []
    for number, config in enumerate(configs, 1):
        if len(configs) > 1:
            lines += ["", f"# stage {number} of {len(configs)}"]
        overridden = _overridden(overrides, number)
        resolved = with_hugging_face(config, Communicator.alone())
        asked, defaults = flat(config), flat(Config())
        comments = {}
        for key, value in flat(resolved).items():
            if any(within(key, each) for each in overridden):
                comments[key] = "command line"
            elif value != asked.get(key):
                comments[key] = str(config.model.hugging_face)
            elif value != defaults.get(key):
                comments[key] = source
        for name, table in _set_only(resolved.model_dump(mode="json")).items():
            lines += toml_lines(name, table, comments)
    return "\n".join(lines[1:])


def flat(config: Config | Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a configuration, or of its record in a file, by key with its table."""
    found: dict[str, Any] = {}
    table = config.model_dump(mode="json") if isinstance(config, Config) else config
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def _overridden(overrides: Sequence[str], stage: int) -> list[str]:
    """Return the keys that the command line sets in a stage."""
    keys = [override.partition("=")[0].strip() for override in overrides]
    own = [key.removeprefix(f"stage.{stage}.") for key in keys]
    return ["train.until" if key == "until" else key for key in own]


def _set_only(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table without None, which TOML lacks, and without tables that are empty then."""
    inner = {key: _set_only(value) if isinstance(value, Mapping) else value for key, value in table.items()}
    return {key: value for key, value in inner.items() if value is not None and value != {}}
