"""`hpcpar draw activations --tp 4`: what a layer keeps for backward, measured beside the paper's formulas."""

from __future__ import annotations

import click

from hpcpar.cli import picture
from hpcpar.errors import HpcparError

NUMBER = click.IntRange(min=1)


@click.command()
@click.option("--tp", type=NUMBER, default=4, help="Ranks that share a layer.")
@click.option("--sequence", type=NUMBER, default=512, help="Tokens of a sequence.")
@click.option("--batch", type=NUMBER, default=2, help="Sequences of a microbatch.")
@click.option("--hidden", type=NUMBER, default=512, help="Hidden size.")
@click.option("--heads", type=NUMBER, default=8, help="Attention heads.")
@picture.output_options()
def activations(
    tp: int, sequence: int, batch: int, hidden: int, heads: int, output: picture.Output | None
) -> None:
    """Show what a transformer layer keeps from forward to backward, on each rank.

    Without parallelism, with tensor parallelism (TP), with sequence parallelism beside it (SP), and with the
    attention core or the whole layer computed anew in backward. All ranks are threads of this process.
    """
    # torch is imported by this command alone.
    from hpcpar.bench import layer_activations as measuring
    from hpcpar.cli import activation_picture
    from hpcpar.planner.activations import LayerShape

    shape = LayerShape(sequence, batch, hidden, heads)
    try:
        found = measuring.measure(shape, tp)
    except HpcparError as error:
        raise click.ClickException(str(error)) from error
    click.echo(measuring.title(shape, tp) + "\n")
    click.echo(measuring.table(found))
    picture.write(output, lambda: activation_picture.draw(found, shape, tp))
