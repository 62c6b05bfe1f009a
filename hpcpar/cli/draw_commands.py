"""`hpcpar draw ring --size 4`: the steps of a collective; `pipeline`, `context`, `experts`, …"""

from __future__ import annotations

import click

from hpcpar.algorithms import draw as drawing
from hpcpar.algorithms import registry
from hpcpar.cli import Commands, LazyGroup, collective_picture, picture
from hpcpar.errors import HpcparError, OperationError, did_you_mean

COMMANDS: Commands = {
    "steps": (
        "hpcpar.cli.draw_commands",
        "steps",
        "The steps of a collective: `draw ring`, `draw allreduce --output ring.gif`.",
    ),
    "pipeline": (
        "hpcpar.cli.draw_pipeline",
        "pipeline",
        "Pipeline schedules: proved, priced and drawn: `draw pipeline 1f1b`.",
    ),
    "context": (
        "hpcpar.cli.draw_context",
        "context",
        "Context parallelism: who attends to what, and who sends what to whom.",
    ),
    "experts": (
        "hpcpar.cli.draw_experts",
        "experts",
        "Expert parallelism: loads of experts, and who sends how many rows to whom.",
    ),
    "balance": (
        "hpcpar.cli.draw_balance",
        "balance",
        "Runs of models with experts: how evenly these were loaded, step by step.",
    ),
    "mesh": ("hpcpar.cli.draw_mesh", "mesh", "A layout: which rank is where, and who communicates."),
    "tp": (
        "hpcpar.cli.draw_tp",
        "tp",
        "Tensor parallelism: how a layer's weights are split, and what f and g send.",
    ),
    "zero": (
        "hpcpar.cli.draw_zero",
        "zero",
        "Stages of ZeRO: memory of the model state on each rank, and traffic.",
    ),
    "compare": (
        "hpcpar.cli.draw_compare",
        "compare",
        "Approaches on as many ranks: memory, bytes and time, planned and measured.",
    ),
    "overlap": (
        "hpcpar.cli.draw_overlap",
        "overlap",
        "A step of a run: communication that it hid behind computing.",
    ),
    "fsdp": (
        "hpcpar.cli.draw_fsdp",
        "fsdp",
        "A step of a run: gather, use and free of ZeRO-3's units.",
    ),
    "memory": (
        "hpcpar.cli.draw_memory",
        "memory",
        "A step of a run: memory of a rank over time, measured and planned.",
    ),
    "activations": (
        "hpcpar.cli.draw_activations",
        "activations",
        "What a layer keeps for backward, measured beside the formulas.",
    ),
}


class Drawings(LazyGroup):
    """Group that passes words which name no drawing to `steps`: an algorithm, its options, or nothing."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.lazy, *context.help_option_names):
            args = ["steps", *args]
        return super().parse_args(context, args)


@click.group(cls=Drawings, lazy=COMMANDS, context_settings={"show_default": True})
def draw() -> None:
    """Draw collectives, kinds of parallelism, and the time and memory of runs."""


@click.command()
@click.argument("algorithm", required=False)
@click.option("--size", type=click.IntRange(min=1), default=4, help="Ranks.")
@click.option(
    "--collective", default=None, help="Of which collective, where several have an algorithm of this name."
)
@click.option("--root", type=click.IntRange(min=0), default=0, help="For rooted collectives.")
@click.option("--ranks-per-node", type=click.IntRange(min=1), default=1, help="For hierarchical ones.")
@picture.output_options(
    "A picture of what each rank holds after each step (.png, .svg, .pdf), or an animation (.gif)."
)
def steps(
    algorithm: str | None,
    size: int,
    collective: str | None,
    root: int,
    ranks_per_node: int,
    output: picture.Output | None,
) -> None:
    """Draw the steps of ALGORITHM (ring, binomial, rabenseifner, ...); without one, list them all.

    ALGORITHM may be a collective, too (allreduce, broadcast, ...): then its first algorithm is drawn. Below
    stands the time: α is the latency of a message, S the size of the vector, β the time to send a byte and γ
    the time to add one.
    """
    if algorithm is None:
        click.echo(listing(collective))
        return
    if collective is None and algorithm in registry.ALGORITHMS:
        collective, algorithm = algorithm, next(iter(registry.ALGORITHMS[algorithm]))
    try:
        if not root < size:
            raise OperationError(f"root {root} of {size} ranks does not exist: 0 to {size - 1} do")
        found = registry.find(collective or collective_with(algorithm), algorithm)
        nodes = tuple(rank // ranks_per_node for rank in range(size))
        drawn = drawing.draw(found, size, root=root, nodes=nodes)
        others = ", ".join(name for name in registry.ALGORITHMS[found.collective] if name != found.name)
        click.echo(f"{drawn}\n{drawing.legend(drawn)}\n")
        click.echo(f"time: {drawing.time_text(found, size)}, each rank on a node of its own")
        click.echo(f"other algorithms of {found.collective}: {others}" if others else "")
    except HpcparError as error:
        raise click.ClickException(str(error)) from error
    is_animation = output is not None and output.path.suffix == ".gif"
    shown = collective_picture.frames if is_animation else collective_picture.draw
    picture.write(output, lambda: shown(found, size, root=root, nodes=nodes))


def collective_with(algorithm: str) -> str:
    """Return the first collective, in the registry's order, that has an algorithm of this name."""
    for collective, algorithms in registry.ALGORITHMS.items():
        if algorithm in algorithms:
            return collective
    names = {name for algorithms in registry.ALGORITHMS.values() for name in algorithms}
    hint = did_you_mean(algorithm, (*sorted(names), *registry.ALGORITHMS, *COMMANDS))
    raise OperationError(f"no collective has an algorithm {algorithm!r}; {hint}there are:\n{listing(None)}")


def listing(collective: str | None) -> str:
    """List every collective's algorithms, one collective per line."""
    chosen = {
        name: algorithms
        for name, algorithms in registry.ALGORITHMS.items()
        if collective is None or name == collective
    }
    if not chosen:
        known = ", ".join(registry.ALGORITHMS)
        raise click.ClickException(f"there is no collective {collective!r}; there are {known}")
    width = max(len(name) for name in chosen)
    return "\n".join(f"{name:<{width}}  {'  '.join(algorithms)}" for name, algorithms in chosen.items())
