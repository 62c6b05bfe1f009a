"""`hpcpar bench simulate --ranks 16384 --ranks-per-node 8`: every algorithm of a collective, priced."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcpar.algorithms.registry import ALGORITHMS
from hpcpar.algorithms.simulate import AlgorithmTime, Crossover, crossovers, estimates, fastest
from hpcpar.algorithms.topology import MessageCost, Topology
from hpcpar.cli import picture
from hpcpar.cli.bench import NOT_NEGATIVE, require_writable, to_nbytes
from hpcpar.errors import ConfigError
from hpcpar.units import GB, format_duration, format_nbytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLLECTIVES = tuple(collective for collective in ALGORITHMS if collective != "barrier")

Table = dict[int, tuple[AlgorithmTime, ...]]
"""For each size, or number of ranks, in rising order, what every algorithm takes."""


def _nbytes(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    nbytes = None if text is None else to_nbytes(context, parameter, text)
    if nbytes == 0:
        raise click.BadParameter(f"{text} is too little: need at least one byte")
    return nbytes


@click.command()
@click.option("--collective", type=click.Choice(COLLECTIVES), default="allreduce", help="To price.")
@click.option("--ranks", type=click.IntRange(min=2), default=16384, help="Of the job.")
@click.option("--ranks-per-node", type=click.IntRange(min=1), default=8, help="Neighbours share a node.")
@click.option("--min-bytes", callback=_nbytes, default="8", help="As 8, 64K or 1M.")
@click.option("--max-bytes", callback=_nbytes, default="1G", help="To this.")
@click.option("--factor", type=click.IntRange(min=2), default=4, help="Between sizes.")
@click.option("--alpha-intra", type=NOT_NEGATIVE, default=1e-6, help="Seconds per message.")
@click.option("--beta-intra", type=NOT_NEGATIVE, default=1e-11, help="Seconds per byte.")
@click.option("--alpha-inter", type=NOT_NEGATIVE, default=5e-6, help="Seconds per message.")
@click.option("--beta-inter", type=NOT_NEGATIVE, default=4e-11, help="Seconds per byte.")
@click.option("--gamma", type=NOT_NEGATIVE, default=2e-12, help="Seconds per byte summed.")
@picture.output_options("Draw time against bytes and ranks (.svg, .png, .pdf).")
@click.option(
    "--picture-bytes", callback=_nbytes, help="The size drawn against ranks; default: midway of the sizes."
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write JSON lines here.")
def simulate(
    collective: str,
    ranks: int,
    ranks_per_node: int,
    output: picture.Output | None,
    picture_bytes: int | None,
    json_file: Path | None,
    **given: Any,
) -> None:
    """Price every algorithm of a collective at any number of ranks, without running it.

    A message costs α + β·bytes, within a node or between nodes; each rank has one port, which sends and
    receives at once. `hpcpar bench fit` finds the parameters of a machine; the defaults are of eight GPUs
    on a node at 100 GB/s, and of one 200 Gbit/s port between nodes for each.
    """
    min_bytes, max_bytes = given["min_bytes"], given["max_bytes"]
    if min_bytes > max_bytes:
        raise click.BadParameter(f"--min-bytes {min_bytes} is above --max-bytes {max_bytes}")
    try:
        require_writable(json_file, picture=output)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error
    intra, inter = (
        MessageCost(given[f"alpha_{where}"], given[f"beta_{where}"]) for where in ("intra", "inter")
    )
    topology = Topology(ranks_per_node, intra, inter, given["gamma"])
    sizes = tuple(_rising(min_bytes, max_bytes, given["factor"]))
    by_size: Table = {nbytes: estimates(collective, ranks, nbytes, topology) for nbytes in sizes}
    click.echo(heading(collective, ranks, topology))
    click.echo(table(by_size))
    found = crossovers(collective, ranks, sizes, topology)
    click.echo(changes(by_size, found))
    if json_file is not None:
        write_json(json_file, collective, topology, by_size)
        click.echo(f"written: {json_file}")
    if output is not None:
        nbytes = picture_bytes or sizes[len(sizes) // 2]
        by_ranks: Table = {n: estimates(collective, n, nbytes, topology) for n in _rising(2, ranks, 2)}
        picture.write(output, lambda: figure_of(collective, by_size, by_ranks, found))


def _rising(first: int, last: int, factor: int) -> Iterator[int]:
    while first < last:
        yield first
        first *= factor
    yield last


def heading(collective: str, ranks: int, topology: Topology) -> str:
    per_node = min(ranks, topology.ranks_per_node)
    nodes = -(-ranks // per_node)
    where = f"{ranks:,} ranks on {nodes:,} nodes of {per_node}" if nodes > 1 else f"{ranks} ranks on 1 node"
    return (
        f"{collective}, {where}; within a node {_link(topology.intra)}, between nodes "
        f"{_link(topology.inter)}, summing {_rate(topology.gamma_s_per_byte)}\n"
        f"* fastest; ~ by event simulation, the others by closed form"
    )


def _link(link: MessageCost) -> str:
    return f"{format_duration(link.alpha_s)} + {_rate(link.beta_s_per_byte)}"


def _rate(seconds_per_byte: float) -> str:
    return f"{1 / seconds_per_byte / GB:,.3g} GB/s" if seconds_per_byte else "for nothing"


def table(by_size: Table) -> str:
    """Format a row for each size, and a column for each algorithm."""
    names = [one.algorithm for one in next(iter(by_size.values()))]
    rows = [["", *column] for column in zip_longest(*(name.split("_") for name in names), fillvalue="")]
    rows[0][0] = "bytes"
    for nbytes, found in by_size.items():
        best = fastest(found)
        rows.append([format_nbytes(nbytes), *(_cell(one, one is best) for one in found)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
    return "\n" + "\n".join(lines) + "\n"


def _cell(one: AlgorithmTime, is_fastest: bool) -> str:
    marks = ("*" if is_fastest else "") + ("~" if one.simulated else "")
    return f"{marks}{format_duration(one.seconds)}"


def changes(by_size: Table, found: Sequence[Crossover]) -> str:
    """List the fastest algorithms from the smallest size on."""
    smallest, first = next((nbytes, fastest(each).algorithm) for nbytes, each in by_size.items())
    lines = [f"fastest from {format_nbytes(smallest)}: {first}"]
    lines += [f"        from {format_nbytes(change.nbytes)}: {change.after}" for change in found]
    return "\n".join(lines)


def write_json(path: Path, collective: str, topology: Topology, by_size: Table) -> None:
    """Write a line with the parameters, then one for each size and algorithm."""
    header: dict[str, Any] = {"benchmark": "simulate", "collective": collective, **asdict(topology)}
    rows = [{"collective": collective, **asdict(one)} for found in by_size.values() for one in found]
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *rows)))


# --- the picture ----------------------------------------------------------------------------------


def figure_of(collective: str, by_size: Table, by_ranks: Table, found: Sequence[Crossover]) -> Figure:
    """Return a figure with two panels.

    by_size      what every algorithm takes for each size, at one number of ranks
    by_ranks     for each number of ranks, at one size
    found        crossovers: the sizes where the fastest algorithm changes, drawn as upright lines
    """
    figure = picture.new_figure(4.6)
    against_bytes, against_ranks = figure.subplots(1, 2, sharey=True)
    ranks = next(iter(by_size.values()))[0].ranks
    nbytes = next(iter(by_ranks.values()))[0].nbytes
    _panel(against_bytes, by_size, format_nbytes)
    _panel(against_ranks, by_ranks, lambda n: f"{n:,}")
    against_bytes.set(title=f"{collective} on {ranks:,} ranks", xlabel="whole array", ylabel="seconds")
    against_ranks.set(title=f"{collective} of {format_nbytes(nbytes)}", xlabel="ranks")
    for change in found:
        against_bytes.axvline(change.nbytes, color="0.5", linestyle=":", linewidth=1)
    handles, names = against_bytes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", fontsize=8, ncols=4)
    return figure


def _panel(axes: Axes, found: Table, written: Callable[[int], str]) -> None:
    """Draw a line for each algorithm, over a broad grey one for the fastest."""
    places = list(found)
    least = [min(one.seconds for one in each) for each in found.values()]
    axes.plot(places, least, color="0.85", linewidth=7, label="fastest")
    for line in zip(*found.values(), strict=True):
        dashed = "--" if line[0].algorithm.startswith(("hierarchical", "leaders")) else "-"
        axes.plot(places, [one.seconds for one in line], dashed, label=line[0].algorithm, linewidth=1.6)
    ticks = places[:: max(1, len(places) // 5)]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks)
    axes.set_xticklabels([written(place) for place in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
