"""`hpcpar bench collectives · compare · tune · fit · simulate`: measure, choose, model, scale up."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcpar.cli import Commands, LazyGroup, picture
from hpcpar.errors import ConfigError, HpcparError
from hpcpar.units import format_nbytes, parse_nbytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hpcpar.bench.measure import ResultRow
    from hpcpar.bench.sweep import SweepOptions
    from hpcpar.comm import Communicator

COMMANDS: Commands = {
    "collectives": ("bench", "hpcpar's algorithms beside MPI's own and gloo."),
    "compare": ("bench_compare", "Data, tensor, pipeline parallel …: memory, bytes, time."),
    "tune": ("bench", "Time all algorithms here, and write the table to choose by."),
    "fit": ("bench", "Latency, bandwidth and summing speed from measured lines."),
    "simulate": ("bench_simulate", "Price every algorithm at any number of ranks."),
}

CANNOT_WORK = 2
"""Exit status of a request that cannot work."""

COLLECTIVES = (
    *("allreduce", "reduce_scatter", "allgather", "broadcast", "reduce", "alltoall"),
    *("send", "send_window"),
)
"""Keys of `hpcpar.bench.measure.PLACES`, repeated so that the help text does not load torch."""


class _Finite(click.FloatRange):
    """Range of numbers without nan and inf, which click accepts."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        number = super().convert(value, parameter, context)
        if not math.isfinite(number):
            self.fail(f"{number} is no finite number.", parameter, context)
        return number


NOT_NEGATIVE = _Finite(min=0)


@click.group(cls=LazyGroup, lazy=COMMANDS, context_settings={"show_default": True})
def bench() -> None:
    """Measure collectives, choose algorithms by measurement, fit the cost model, simulate."""


def to_nbytes(context: click.Context, parameter: click.Parameter, text: str) -> int:
    """ "64K" -> 65,536"""
    try:
        return parse_nbytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _names(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
    return tuple(name for name in text.replace(" ", "").split(",") if name)


def _measuring(command: Any) -> Any:
    kinds, again = click.Choice([*COLLECTIVES, "all"]), "May be given several times."
    for option in (
        click.option("--shared", is_flag=True, help="Arrays in memory that a node's ranks can see."),
        click.option("--round-seconds", "round_s", type=NOT_NEGATIVE, default=0.02, help="Of one candidate."),
        click.option("--rounds", type=click.IntRange(min=1), default=5, help="Turns of each candidate."),
        click.option("--factor", type=click.IntRange(min=2), default=4, help="Between sizes."),
        click.option("--max-bytes", "max_nbytes", callback=to_nbytes, default="64M", help="To this."),
        click.option("--min-bytes", "min_nbytes", callback=to_nbytes, default="4", help="8, 64K, 1M."),
        click.option(
            "--collective", "collectives", type=kinds, multiple=True, default=["allreduce"], help=again
        ),
    ):
        command = option(command)
    return command


@click.command()
@_measuring
@click.option("--dtype", default="float32", help="Of the elements, as bfloat16 or int64.")
@click.option("--kind", type=click.Choice(["torch", "numpy"]), default="torch", help="Of the arrays.")
@click.option(
    "--candidates",
    callback=_names,
    default="",
    show_default=False,
    help="Only these, as chosen,ring,native,mpi; else all.",
)
@click.option("--each-call", is_flag=True, help="Look at the clock after every call; show the longest.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write JSON lines too.")
@picture.output_options("Plot bus bandwidth against size (.svg, .png, .pdf).")
def collectives(
    dtype: str,
    kind: str,
    candidates: tuple[str, ...],
    each_call: bool,
    json_file: Path | None,
    output: picture.Output | None,
    **measuring: Any,
) -> int:
    """Measure collectives by size: hpcpar's algorithms, MPI's own and gloo, in turn.

    Start it on several ranks: `hpcpar run -n 4 -- -m hpcpar bench collectives`.
    """
    import hpcpar
    from hpcpar.bench import sweep as table
    from hpcpar.transport.mpi_library import library_facts

    world = hpcpar.init()
    from hpcpar.bench import peers  # uses mpi4py by itself, and must find MPI started

    try:
        _require_writable(world, json_file, picture=output)
        options = _options(**measuring, dtype=dtype, kind=kind, candidates=candidates, singly=each_call)
        with peers.connected(world, candidates) as (others, said):
            facts = table.header(options, world, library_facts()["vendor"], said)
            for name, value in facts.items():
                _say(world, f"# {name}: {value}")
            rows = table.run(options, world, others, click.echo)
    except HpcparError as error:
        return _refuse(world, "collectives", error)
    if world.rank == 0:
        if json_file is not None:
            table.write_json(json_file, facts, rows)
        picture.write(output, lambda: figure_of(rows, facts))
    return 0


@click.command()
@_measuring
@click.option(
    "--dtype",
    "dtypes",
    callback=_names,
    default="float32",
    help="Several by commas; the first stands for all others.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    help="Where the arrays are; each kind has a table.",
)
@click.option(
    "--file",
    type=click.Path(path_type=Path),
    help="The table [default: HPCPAR_TUNING's, else the user's own].",
)
def tune(dtypes: tuple[str, ...], device: str, file: Path | None, **measuring: Any) -> int:
    """Time all algorithms on these ranks, MPI's own among them, and write down the fastest by size.

    From then on jobs with the same MPI, ranks and ranks per node choose by it: HPCPAR_TUNING names
    the file, or it is the user's own, ~/.config/hpcpar/tuning.toml.
    """
    import hpcpar
    from hpcpar.bench import tune as tuning
    from hpcpar.bench.gpus import use_gpu
    from hpcpar.bench.measure import ON_HOST
    from hpcpar.launch.settings import tuning_file
    from hpcpar.transport.mpi_library import library_facts

    try:
        path = file or tuning_file()
    except HpcparError as error:
        raise click.ClickException(str(error)) from error
    os.environ["HPCPAR_TUNING"] = (
        "none"  # a table that is still to be written, or to be replaced, is not read
    )
    world = hpcpar.init()
    try:
        options = _options(**measuring)
        tuning.require_place(path, world)
        place = use_gpu(world) if device == "cuda" else ON_HOST
        entry = tuning.tune(options, dtypes, world, library_facts()["vendor"], click.echo, place)
        tuning.keep(entry, path, world)
    except HpcparError as error:
        return _refuse(world, "tune", error)
    _say(world, f"written to {path}")
    return 0


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--min-bytes", callback=to_nbytes, default="0", help="Lines from here on.")
@click.option("--max-bytes", callback=to_nbytes, default="1G", help="Lines up to this size.")
@click.option(
    "--machine",
    help="Measure this node's speed, too, and describe the machine in a .toml file for hpcpar plan; "
    "'own': in ~/.config/hpcpar/machine.toml, by which hpcpar train predicts.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="With --machine.")
def fit(files: tuple[Path, ...], min_bytes: int, max_bytes: int, machine: str | None, device: str) -> None:
    """Fit α, β and γ to the lines that `bench collectives --json` wrote, and show the model's error."""
    from hpcpar.bench import device_speed
    from hpcpar.bench import fit as fitting
    from hpcpar.launch.settings import machine_file

    sizes = {"min_nbytes": min_bytes, "max_nbytes": max_bytes}
    try:
        path = None if machine is None else machine_file() if machine == "own" else Path(machine)
        if path is not None and path.suffix != ".toml":
            raise ConfigError(f"--machine {machine}: name a .toml file, or 'own'")
        for line in fitting.report(files, **sizes):
            click.echo(line)
        if path is not None:
            text = fitting.describe_machine(files, name=path.stem, device=device, **sizes)
            device_speed.write_machine(path, text)
            click.echo(f"written: {path}")
    except HpcparError as error:
        raise click.ClickException(str(error)) from error


def _options(collectives: tuple[str, ...], **others: Any) -> SweepOptions:
    from hpcpar.bench.sweep import SweepOptions

    return SweepOptions(collectives=COLLECTIVES if "all" in collectives else collectives, **others)


def require_writable(*paths: Path | None, picture: picture.Output | None = None) -> None:
    """Raise ConfigError for files that could not be written later; create nothing.

    picture   must also have the suffix of a format that matplotlib can draw
    """
    for path in filter(None, (*paths, picture and picture.path)):
        # os.path answers False, and does not raise, in a directory without search permission.
        place = path if os.path.exists(path) else path.parent
        if os.path.isdir(path) or not os.access(place, os.W_OK):
            why = "it is a directory" if os.path.isdir(path) else f"{place} is not writable"
            why = why if os.path.exists(place) else f"there is no directory {place}"
            raise ConfigError(f"{path} cannot be written: {why}; name another file")
    if picture is not None:
        from matplotlib.backend_bases import FigureCanvasBase

        suffix = picture.path.suffix
        if suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
            raise ConfigError(
                f"{picture.path} cannot be drawn: {suffix or 'no suffix'} is no format of pictures; name it "
                ".png, .svg or .pdf"
            )


def _require_writable(
    world: Communicator, *paths: Path | None, picture: picture.Output | None = None
) -> None:
    """Check on rank 0, which writes; fail on all ranks. Collective."""
    with world.together("looking where to write"):
        if world.rank == 0:
            require_writable(*paths, picture=picture)


def _say(world: Communicator, line: str) -> None:
    if world.rank == 0:
        click.echo(line)


def _refuse(world: Communicator, command: str, error: HpcparError) -> int:
    """Print the error, which all ranks have met, on rank 0; return the exit status."""
    if world.rank == 0:
        click.echo(f"hpcpar bench {command}: {error}", err=True)
    return CANNOT_WORK


# --- the picture ----------------------------------------------------------------------------------


OUTSTANDING = {"chosen": picture.ACTIVATIONS, "mpi": "black", "gloo": picture.FORWARD}
"""Candidates with a colour and a thick line; all others are thin."""

PANEL_INCHES = 3.6


def figure_of(rows: Sequence[ResultRow], facts: Mapping[str, Any]) -> Figure:
    """Return a figure with a panel for each collective.

    The dashed line is a copy within memory on all ranks at once, in bytes copied per second on each rank:
    a byte that is sent is copied at least once.
    """
    from hpcpar.bench.measure import COPY

    shown = [name for name in dict.fromkeys(row.collective for row in rows) if name != COPY]
    across = 1 if len(shown) < 3 else 2
    down = max(1, -(-len(shown) // across))
    figure = picture.new_figure(PANEL_INCHES * down)
    for at, collective in enumerate(shown, 1):
        _panel(figure.add_subplot(down, across, at), collective, rows)
    figure.suptitle(f"{facts.get('ranks')} ranks on {facts.get('nodes')} node(s), {facts.get('mpi')}")
    return figure


def _panel(axes: Axes, collective: str, rows: Sequence[ResultRow]) -> None:
    from hpcpar.bench.measure import COPY, MEMORY_COPY

    for name, points in lines(rows, collective).items():
        outstanding = OUTSTANDING.get(name)
        axes.plot(
            *zip(*points, strict=True),
            label=name,
            color=outstanding,
            linewidth=2.2 if outstanding else 0.8,
            zorder=3 if outstanding else 2,
            marker="o" if outstanding else None,
            markersize=3,
        )
    ceiling = lines(rows, COPY).get(MEMORY_COPY)
    if ceiling:
        axes.plot(
            *zip(*ceiling, strict=True),
            label="memory copy",
            linestyle="--",
            color=picture.MEASURED,
            linewidth=1.5,
        )
    sizes = sorted({row.nbytes for row in rows if row.collective == collective})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    shown = sizes[:: -(-len(sizes) // 6)]  # at most six labels fit
    axes.set_xticks(shown, [format_nbytes(nbytes) for nbytes in shown], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("whole array")
    axes.set_ylabel("busbw (GB/s)")
    axes.set_title(collective)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2, loc="lower right")


def lines(rows: Sequence[ResultRow], collective: str) -> dict[str, list[tuple[int, float]]]:
    """Return (bytes, busbw) of each candidate in rising order, from the better of its two places."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.collective == collective and row.busbw_gb_per_s > 0:
            by_size = found.setdefault(row.algorithm, {})
            by_size[row.nbytes] = max(by_size.get(row.nbytes, 0.0), row.busbw_gb_per_s)
    return {name: sorted(by_size.items()) for name, by_size in found.items()}
