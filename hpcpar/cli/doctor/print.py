"""Tables and lines that `hpcpar doctor` and `hpcpar run --check-build` print."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from hpcpar.cli.doctor.facts import Build, JobFacts, RankFacts, by_node, find_build
from hpcpar.launch.crosscheck import library_name
from hpcpar.launch.rank_map import Finding
from hpcpar.units import format_duration, format_nbytes

if TYPE_CHECKING:
    from rich.console import Console

NODES_SHOWN = 8
"""Largest number of nodes whose import times are listed one by one."""


def print_report(console: Console, job: JobFacts, findings: Sequence[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("", "", title="hpcpar doctor", show_header=False, title_justify="left")
    for name, line in _facts_lines(job):
        table.add_row(name, Text(line, overflow="fold") if name == "loaded" else line)
    console.print(table)
    table = Table("all-reduce", "time", "busbw", "repeats", "sum", title_justify="left")
    for measurement in job.measurements:
        table.add_row(
            format_nbytes(measurement.nbytes),
            format_duration(measurement.seconds),
            f"{measurement.busbw_gb_per_s(job.size):.2f} GB/s" if job.size > 1 else "-",
            str(measurement.repeats),
            "right" if measurement.right else "WRONG",
        )
    console.print(table)
    print_findings(console, findings)


def _facts_lines(job: JobFacts) -> Iterator[tuple[str, str]]:
    library, torch = library_name(job.mpi["library"]), job.ranks[0].torch
    nodes = len(by_node(job.ranks))
    yield "MPI library", f"{library} (MPI standard {job.mpi['standard']})"
    yield "thread level", job.mpi["thread_level"]
    yield "launcher", job.info.launcher
    if job.connected_by:
        yield "connected by", job.connected_by
    yield "CUDA-aware", str(job.awareness)
    for path in job.libraries:
        yield "loaded", path
    yield "ranks", f"{job.size} on {nodes} node{'s' if nodes > 1 else ''}"
    for line in job.rank_map.lines():
        node, _, facts = line.partition("  ")
        yield node, facts
    yield from _start_lines(job.ranks)
    if job.size > 1:
        yield "all-reduce by", job.choices
    yield "torch", f"{torch.version or 'none'}, {torch.threads} threads, {torch.gpus} GPUs"
    for title, things in Build(torch.version, library).sections().items():
        yield f"Horovod's {title}", _there_and_not(things)
    yield "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def _there_and_not(things: Sequence[tuple[str, bool]]) -> str:
    """ "MPI (not Gloo)" """
    there, missing = (
        ", ".join(name for name, found in things if found is wanted) for wanted in (True, False)
    )
    return f"{there or 'none'} (not {missing})" if missing else there


def _start_lines(ranks: Sequence[RankFacts]) -> Iterator[tuple[str, str]]:
    """Yield the rows of the start times: the slowest rank in detail, the slowest of every node in short."""
    slowest = max(ranks, key=lambda facts: facts.start.imported.wall_s)
    start, where = slowest.start, f"rank {slowest.rank} on {slowest.host}" if len(ranks) > 1 else "here"
    if not start.imports:
        return
    parts = ", ".join(f"{name} {format_duration(span.wall_s)}" for name, span in start.imports.items())
    whole, waited = map(format_duration, start.imported)
    yield "import time", f"{whole} {where} ({parts}), of it {waited} waiting for files"
    nodes = by_node(ranks).values()
    if len(nodes) > 1:
        of_nodes = sorted(max(facts.start.imported.wall_s for facts in node) for node in nodes)
        few = len(of_nodes) <= NODES_SHOWN
        shown = map(format_duration, of_nodes if few else (of_nodes[0], of_nodes[-1]))
        yield "on the nodes", f"{(', ' if few else ' to ').join(shown)} on the slowest rank of each"
    init, python = (
        format_duration(max(getattr(facts.start, name) for facts in ranks)) for name in ("init_s", "python_s")
    )
    yield "init time", f"{init} for MPI_Init and hpcpar.init(), {python} for Python before the imports"


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    for finding in findings:
        mark, style = ("wrong", "red") if finding.wrong else ("note ", "yellow")
        console.print(f"[{style}]{mark}[/]", end=" ")
        console.print(finding.found, markup=False, soft_wrap=True)
        console.print(f"      -> {finding.do}", markup=False, soft_wrap=True)
    if not findings:
        console.print("[green]nothing to mend[/]")


def print_build(build: Build | None = None) -> None:
    """Print what Horovod's `--check-build` prints."""
    import hpcpar

    click.echo(f"hpcpar {hpcpar.__version__} in Horovod's place:")
    for title, things in (build or find_build()).sections().items():
        click.echo(f"\nAvailable {title}:")
        for name, there in things:
            click.echo(f"    [{'X' if there else ' '}] {name}")


def report_console() -> Console:
    from hpcpar.cli.console import own_console

    # Under mpiexec standard output is no terminal, and rich would fold at 80 columns.
    console = own_console(highlight=False)
    return console if console.is_terminal else own_console(width=120, highlight=False)
