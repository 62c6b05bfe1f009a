"""The page of the documentation on what can be combined, from the rules that refuse the rest.

python docs/composition.py > docs/composition.md
"""
# ruff: noqa: E501

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Iterator, Mapping

from hpcpar.context_parallel import METHODS
from hpcpar.errors import HpcparError
from hpcpar.planner.layout import Layout
from hpcpar.training.composition import refusal
from hpcpar.training.config import Config, parse

Options = tuple[str, ...]

EXPERTS: Options = ("model.experts.count=4", "model.experts.per_token=2", "model.experts.ffn_size=8")

_ZERO: dict[str, Options] = {
    f"ZeRO-{stage}{kind}": (f"optimizer.zero_stage={stage}", "train.microbatch=1", *options)
    for kind, options in (
        ("", ("mesh.dp=2",)),
        (" HSDP", ("mesh.dp=4", "mesh.dp_shard=2")),
        (" shared", ("mesh.dp=2", "optimizer.shared_parameters=true")),
    )
    for stage in (1, 2, 3)
} | {
    "ZeRO-3 kept": (
        *("optimizer.zero_stage=3", "optimizer.reshard=step"),
        *("train.microbatch=1", "mesh.dp=2"),
    )
}

FEATURES: dict[str, dict[str, Options]] = {
    "data parallel": {"dp": ("mesh.dp=2",)},
    "zero": _ZERO,
    "tensor parallel": {
        "tp": ("mesh.tp=2",),
        "tp + sp": ("mesh.tp=2", "tensor_parallel.sequence_parallel=true"),
    },
    "context parallel": {
        f"cp {method}": ("mesh.cp=2", f"context_parallel.method={method}")
        + (("context_parallel.inner=1",) if "+" in method else ())
        for method in METHODS
    },
    "experts": {
        "experts": EXPERTS,
        "ep": ("mesh.ep=2", *EXPERTS),
        "etp": ("mesh.tp=2", "mesh.etp=2", *EXPERTS),
    },
    "pipeline": {
        f"pp {schedule}": ("mesh.pp=2", f"pipeline.schedule={schedule}", "train.microbatch=1")
        for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
    },
    "recomputation": {f"recompute {kind}": (f"train.recompute={kind}",) for kind in ("selective", "full")},
    "precision": {name: (f"train.precision={name}",) for name in ("bfloat16", "float16")},
    "accumulation": {"accumulation": ("train.microbatch=1",)},
    "embeddings": {"tied embeddings": ("model.tie_embeddings=true",)},
    "optimizer state": {"offload": ("optimizer.offload=cpu",)},
    "optimizer": {name: (f"optimizer.name={name}",) for name in ("sgd", "adamw", "muon")},
}
"""By dimension, of which a run takes one or none: the features, and their options on 2 ranks of each axis."""

TEXT = """\
# What can be combined

This page is made from the rules in `hpcpar/training/composition.py`: `python docs/composition.py > docs/composition.md`.
A run is held to them on every rank before anything starts.

**+** works together: `tests/training/test_composition.py` draws layouts until every such pair is in one, and
compares losses, norms, parameters and bytes with one process. **·** are two values of one thing. A number is the
reason of a refusal, below.

Each axis has 2 ranks here, or 4 with sets of shards (HSDP); sizes that do not divide among the ranks are refused, too, with the nearest that do.

{table}

## Refused

{reasons}

Three that are refused though every two of them work:

{triples}
"""


def reason_against(*features: Mapping[str, str]) -> str | None:
    """Return why options cannot be together; "" where they set a key to two values, None where they can."""
    told: dict[str, str] = {}
    for key, value in itertools.chain.from_iterable(each.items() for each in features):
        if told.setdefault(key, value) != value:
            return ""
    size = ("train.sequence=16", "train.global_batch=8", "train.microbatch=2")
    try:
        config = parse("", source="", overrides=(*size, *(f"{key}={value}" for key, value in told.items())))
        return refusal(config, smallest_layout(config))
    except HpcparError as error:
        return str(error)


def smallest_layout(config: Config) -> Layout:
    """Return the layout of a configuration on as few ranks as can be; ep adds to dp what it needs."""
    degrees = config.mesh.model_dump()
    if degrees["dp"] == -1:
        others = degrees["cp"] * degrees["tp"] // degrees["etp"]
        degrees["dp"] = -(-degrees["ep"] // others)
    return Layout.fit(degrees["pp"] * degrees["dp"] * degrees["cp"] * degrees["tp"], **degrees)


def page() -> str:
    """Return the page."""
    named = {
        name: (dimension, dict(each.split("=", 1) for each in options))
        for dimension, features in FEATURES.items()
        for name, options in features.items()
    }
    reasons: dict[str, int] = {}
    numbers = {name: str(number) for number, name in enumerate(named, 1)}
    rows = ["| | | " + " | ".join(numbers.values()) + " |", "|---|---|" + "---|" * len(named)]
    for name, (dimension, options) in named.items():
        cells = []
        for other, (its_dimension, its_options) in named.items():
            reason = reason_against(options, its_options)
            if other == name or dimension == its_dimension or reason == "":
                cells.append("·")
            elif reason is None:
                cells.append("+")
            else:
                cells.append(f"[{reasons.setdefault(reason, len(reasons) + 1)}]")
        rows.append(f"| {numbers[name]} | {name} | " + " | ".join(cells) + " |")
    return TEXT.format(
        table="\n".join(rows),
        reasons="\n".join(f"{number}. {reason}" for reason, number in reasons.items()),
        triples="\n".join(triples(named, reasons)),
    )


def triples(named: Mapping[str, tuple[str, Mapping[str, str]]], known: Collection[str]) -> Iterator[str]:
    """List the reasons that no pair is refused for, each with the first three that it is about."""
    seen = set(known) | {""}
    for three in itertools.combinations(named, 3):
        reason = reason_against(*(named[name][1] for name in three))
        if reason is not None and reason not in seen:
            seen.add(reason)
            yield f"* {', '.join(three)}: {reason}"


if __name__ == "__main__":
    sys.stdout.write(page())
