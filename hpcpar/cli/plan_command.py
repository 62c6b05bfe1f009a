"""`hpcpar plan MODEL --machine NAME --nodes N`: which layouts fit, which is fastest, why others cannot be."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

import hpcpar
from hpcpar.cli import picture
from hpcpar.errors import ConfigError, HpcparError
from hpcpar.planner.cluster import Cluster, machine_names
from hpcpar.planner.constants import read_constants, with_constants, write_constants
from hpcpar.planner.estimate import Estimate
from hpcpar.planner.explain import records, walk
from hpcpar.planner.remedies import fewest_nodes, remedies
from hpcpar.planner.run_file import PlannedRun, read_run
from hpcpar.planner.search import FIXABLE, PlanRequest, SearchResult, search
from hpcpar.planner.software import HPCPAR

RECIPES = Path(hpcpar.__file__).parent / "training" / "recipes"
"""The files of `hpcpar.training.recipes`, which itself needs torch."""

TOKENS_PER_STEP = 4 * 2**20
"""Tokens of a step where neither the command line nor a file says."""

LONGEST_SEQUENCE = 8192
"""Longest sequence that is taken where neither the command line nor a file says."""

NOTHING_FITS = 1
"""Exit status where no layout fits."""

ALIASES = {"zero": "zero_stage"}
WORDS = ("schedule", "recompute", "cp_method", "optimizer", "offload", "reshard")
NUMBER = click.IntRange(min=1)
FILE = click.Path(path_type=Path, dir_okay=False)


@dataclass(frozen=True)
class PlanOptions:
    """Options of the command, as click gives them."""

    machine: str | None
    nodes: int | None
    fewest: bool
    batch: int | None
    sequence: int | None
    precision: str | None
    expert_load: float | None
    tokens: float | None
    fix: tuple[str, ...]
    as_written: bool
    top: int
    rejected: bool
    explain: bool
    compare: tuple[str, str] | None
    at: str | None
    take: int
    directory: Path | None
    output: picture.Output | None
    as_json: bool
    validate: Path | None
    share: float
    software: str | None
    recipe: str | None
    constants: str | None
    save_constants: Path | None


@click.command(context_settings={"show_default": True})
@click.argument("model", required=False)
@click.option("--recipe", help="One of `hpcpar train --recipe`, in the place of MODEL.")
@click.option("--machine", help=f"{', '.join(machine_names())}, or a .toml file.")
@click.option("--nodes", type=NUMBER, help="Nodes to use [default: all of the machine].")
@click.option("--fewest-nodes", "fewest", is_flag=True, help="Find the fewest nodes on which a layout fits.")
@click.option("--batch", type=NUMBER, help="Sequences of an optimizer step [default: about 4 Mi tokens].")
@click.option("--sequence", type=NUMBER, help="Tokens of a sequence [default: the model's, at most 8192].")
@click.option("--precision", help="Type of parameters [default: bfloat16, or the machine's first].")
@click.option(
    "--expert-load",
    type=click.FloatRange(min=1),
    help="Rows of the rank whose experts have most, over the mean, as a run's summary says [default: 1].",
)
@click.option("--tokens", type=click.FloatRange(min=1), help="Budget, as in 15e12: device-hours and energy.")
@click.option("--fix", multiple=True, metavar="KEY=VALUE", help=f"tp=8, zero=0,1 … of {', '.join(FIXABLE)}.")
@click.option("--as-written", is_flag=True, help="Fix what MODEL, a file of the trainer, says.")
@click.option("--top", type=NUMBER, default=10, help="Layouts to show.")
@click.option("--rejected", is_flag=True, help="List every layout that cannot be, with its reason.")
@click.option("--explain", is_flag=True, help="Follow the rules of thumb; say where the search departs.")
@click.option("--compare", nargs=2, metavar="A B", help="Two layouts by part: tp=8,pp=4 dp=32,zero=3.")
@click.option("--at", metavar="N,N,…", help="The fastest layout on each of these numbers of nodes.")
@click.option("--take", type=NUMBER, default=1, help="Which of the table --write takes.")
@click.option("--write", "directory", type=click.Path(path_type=Path), help="Write train.toml, job.sh there.")
@picture.output_options("Draw the table, or the scaling, as .png, .svg or .pdf.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--constants", help="Fitted constants: a set that comes with hpcpar, or a .json file.")
@click.option("--validate", type=FILE, help="Compare with measured rows (CSV) instead: error and regret.")
@click.option("--share", type=float, default=0.2, help="With --validate: rows to fit constants on.")
@click.option("--save-constants", type=FILE, help="With --validate: write those fitted, for --constants.")
@click.option("--software", help="With --validate: the program that was measured.")
def plan(model: str | None, **given: Any) -> int:
    """Rank the layouts of MODEL on a machine: memory, time of a step by part, tokens/s, MFU.

    MODEL is a preset (llama3-70b), a Hugging Face config.json, or a TOML file of the trainer or of
    a model. Runs on a login node: nothing is allocated, no MPI is started.
    """
    options = PlanOptions(**given)
    _require_used(options)
    try:
        if options.output is not None:
            from hpcpar.cli.bench import require_writable

            require_writable(picture=options.output)
        if options.validate is not None:
            return _validate(options)
        if options.recipe is not None:
            if model is not None:
                raise click.UsageError("MODEL and --recipe exclude each other; leave one out")
            model = str(recipe_file(options.recipe))
        if model is None:
            raise click.UsageError(
                "name a MODEL, as in: hpcpar plan llama3-70b --machine h100-dgx --nodes 32"
            )
        return _plan(read_run(model), options)
    except HpcparError as error:
        raise click.ClickException(str(error)) from error


UNUSED = {
    "validate": ("output", "directory", "explain", "compare", "at", "fewest", "expert_load"),
    "at": ("directory", "explain", "compare", "fewest"),
    "compare": ("output", "directory", "explain", "rejected"),
    "as_json": ("explain",),
}
"""Options that have no effect beside another."""

FLAGS = {
    **{"directory": "--write", "fewest": "--fewest-nodes", "as_json": "--json"},
    "expert_load": "--expert-load",
}
"""Of options whose names differ."""


def _require_used(options: PlanOptions) -> None:
    """Raise UsageError for an option without effect."""
    for given, others in UNUSED.items():
        for other in others:
            if getattr(options, given) and getattr(options, other):
                one, two = (FLAGS.get(name, f"--{name}") for name in (given, other))
                raise click.UsageError(f"{two} has no effect beside {one}; leave one out")
    if options.validate is None and (options.software or options.save_constants):
        raise click.UsageError("--software and --save-constants go with --validate; leave them out")
    if options.tokens is not None and not math.isfinite(options.tokens):
        raise click.UsageError(f"--tokens {options.tokens}: give a number of tokens, as in 15e12")
    if options.take > 1 and options.directory is None:
        raise click.UsageError(f"--take {options.take} goes with --write, which says where to; leave it out")


def _plan(run: PlannedRun, options: PlanOptions) -> int:
    from hpcpar.cli import plan_tables as tables

    request = request_of(run, options)
    if options.fewest:
        nodes = fewest_nodes(request)
        if nodes is None:
            raise ConfigError(
                f"{run.model.name} fits no number of nodes of {request.cluster.name}, as asked for"
            )
        request = replace(request, cluster=request.cluster.with_nodes(nodes))
    if options.at is not None:
        return _scale(request, options)
    if options.compare is not None:
        return _compare(request, options)
    found = search(request, top=max(options.top, options.take))
    if options.as_json:
        click.echo(json.dumps(_as_json(found, options), indent=1))
    else:
        tables.show_plan(found, tokens=options.tokens, top=options.top)
        tables.show_rejected(found, every=options.rejected)
        if options.explain:
            tables.show_walk(walk(request, found))
        if not found.ranked:
            tables.show_remedies(found, list(remedies(request)))
    if not found.ranked:
        return NOTHING_FITS
    if options.output is not None:
        from hpcpar.cli.plan_picture import draw_plan

        picture.save(draw_plan(found), options.output)
    if options.directory is not None:
        _write(found, run, options)
    return 0


def request_of(run: PlannedRun, options: PlanOptions) -> PlanRequest:
    """Return what the command line asks for, filled up from the file and by defaults."""
    machine = options.machine or run.machine
    if machine is None:
        raise click.UsageError(f"name a --machine: {', '.join(machine_names())}, or a .toml file of your own")
    if options.fewest and options.nodes is not None:
        raise click.UsageError("--nodes and --fewest-nodes exclude each other; leave one out")
    cluster, software = Cluster.named(machine), HPCPAR
    if options.constants is not None:
        cluster, software = with_constants(cluster, software, read_constants(options.constants))
    if options.expert_load is not None:
        if run.model.experts is None or not math.isfinite(options.expert_load):
            raise click.UsageError(
                f"--expert-load {options.expert_load}: give a finite number, for a model with experts"
            )
        software = replace(software, expert_load=options.expert_load)
    if options.nodes is not None:
        cluster = cluster.with_nodes(options.nodes)
    elif run.devices is not None:
        cluster = cluster.with_devices(run.devices)
    sequence = options.sequence or run.sequence or min(run.model.max_sequence, LONGEST_SEQUENCE)
    batch = options.batch or run.global_batch or max(1, TOKENS_PER_STEP // sequence)
    peaks = list(cluster.device.peak_flops)
    usual = "bfloat16" if "bfloat16" in peaks and not cluster.device.on_host else peaks[0]
    fixed = {**(run.fixed if options.as_written else {}), **fixed_by(options.fix)}
    precision = options.precision or run.precision or usual
    return PlanRequest(run.model, cluster, batch, sequence, precision, fixed, software)


def recipe_file(name: str) -> Path:
    """Return the file of a recipe; ConfigError with the list of them."""
    known = {path.stem: path for path in RECIPES.glob("*.toml")}
    if name not in known:
        raise ConfigError(f"no recipe is called {name!r}; there are {', '.join(sorted(known))}")
    return known[name]


def fixed_by(words: tuple[str, ...]) -> dict[str, tuple[Any, ...]]:
    """Return the values that "tp=4,8" and such allow, by key.

    errors   ConfigError for what is not KEY=VALUE, another key, or a value of another kind
    """
    fixed: dict[str, tuple[Any, ...]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = ALIASES.get(key.strip(), key.strip())
        if not equals or not text or key not in FIXABLE:
            raise ConfigError(
                f"--fix {word}: give KEY=VALUE, as in tp=8 or zero=0,1; keys are {', '.join(FIXABLE)}"
            )
        if key in fixed:
            raise ConfigError(f"--fix {word}: {key} is given twice; put its values in one, as in tp=4,8")
        fixed[key] = tuple(_value(key, one.strip(), word) for one in text.split(","))
    return fixed


def _value(key: str, text: str, word: str) -> Any:
    if key in WORDS:
        return None if key == "offload" and text == "none" else text
    if key == "sequence_parallel":
        if text not in ("true", "false"):
            raise ConfigError(f"--fix {word}: give true or false")
        return text == "true"
    if not text.isdecimal():
        raise ConfigError(f"--fix {word}: {text!r} is no whole number")
    return int(text)


def _as_json(found: SearchResult, options: PlanOptions) -> dict[str, Any]:
    request = found.request
    told = {
        "model": request.model.name,
        "parameters": request.model.parameters(),
        "machine": request.cluster.name,
        "nodes": request.cluster.nodes,
        "devices": request.cluster.size,
        "global_batch": request.global_batch,
        "sequence": request.sequence,
        "precision": request.precision,
        "layouts": found.layouts,
        "priced": found.priced,
        "ranked": [records(one, tokens=options.tokens) for one in found.ranked],
        "rejected_by_kind": {kind: len(ones) for kind, ones in found.rejected_by_kind().items()},
    }
    if options.rejected:
        told["rejected"] = [
            {"layout": str(one.layout), "kind": one.kind, "reason": one.reason} for one in found.rejected
        ]
    if not found.ranked:
        told["remedies"] = [one.text for one in remedies(request)]
    return told


def _compare(request: PlanRequest, options: PlanOptions) -> int:
    from hpcpar.cli import plan_tables as tables

    assert options.compare is not None
    both = [_best_of(request, words) for words in options.compare]
    if options.as_json:
        click.echo(json.dumps([records(one, tokens=options.tokens) for one in both], indent=1))
    else:
        tables.show_comparison(*both)
    return 0


def _best_of(request: PlanRequest, words: str) -> Estimate:
    """Return the best strategy of a layout written as "tp=8,pp=4"."""
    fixed = {**request.fixed, **fixed_by(tuple(words.split(",")))}
    found = search(replace(request, fixed=fixed), top=1)
    if found.ranked:
        return found.best
    reason = (
        found.rejected[0].reason if found.rejected else f"no such layout of {request.cluster.size} devices"
    )
    raise ConfigError(f"--compare {words}: {reason}")


def _scale(request: PlanRequest, options: PlanOptions) -> int:
    from hpcpar.cli import plan_tables as tables

    assert options.at is not None
    words = [word.strip() for word in options.at.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"--at {options.at}: give numbers of nodes, as in 16,32,64")
    plans = [search(replace(request, cluster=request.cluster.with_nodes(int(word))), top=1) for word in words]
    if options.as_json:
        click.echo(json.dumps([_as_json(one, options) for one in plans], indent=1))
    else:
        tables.show_scaling(plans, tokens=options.tokens)
    if options.output is not None:
        from hpcpar.cli.plan_picture import draw_scaling

        picture.save(draw_scaling(plans), options.output)
    return 0 if all(one.ranked for one in plans) else NOTHING_FITS


def _write(found: SearchResult, run: PlannedRun, options: PlanOptions) -> None:
    from hpcpar.planner.run_file import write_run

    assert options.directory is not None
    if options.take > len(found.ranked):
        raise ConfigError(f"--take {options.take}, but {len(found.ranked)} layouts fit; take one of these")
    for path in write_run(found.ranked[options.take - 1], run, options.directory, tokens=options.tokens):
        click.echo(f"written: {path}", err=options.as_json)


def _validate(options: PlanOptions) -> int:
    from hpcpar.cli import plan_tables as tables
    from hpcpar.planner.validate import read_rows, validate

    assert options.validate is not None
    rows = read_rows(options.validate, machine=options.machine, software=options.software)
    constants = None if options.constants is None else read_constants(options.constants)
    found = validate(rows, share=options.share, constants=constants)
    tables.show_validation(found, as_json=options.as_json)
    if options.save_constants is not None:
        write_constants(options.save_constants, found.constants)
        click.echo(f"written: {options.save_constants}", err=options.as_json)
    return 0
