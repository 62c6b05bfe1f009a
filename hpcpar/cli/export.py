"""`hpcpar export runs/tiny models/tiny`: a trained model for programs that know Hugging Face's format."""

from __future__ import annotations

from pathlib import Path

import click

from hpcpar.errors import HpcparError


@click.command()
@click.argument("run", type=click.Path(exists=True, path_type=Path))
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float64", "bfloat16", "float16"]),
    help="Of the parameters [default: as trained].",
)
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, path_type=Path),
    help="Its file [default: where training found it, or bytes].",
)
def export(run: Path, directory: Path, dtype: str | None, tokenizer: Path | None) -> None:
    """Write the model of RUN into DIRECTORY, as transformers and vLLM read it.

    RUN is the output directory of `hpcpar train` (its newest checkpoint is taken), or a checkpoint. One
    process does it: no mpiexec or srun.
    """
    from hpcpar.training.model_export import export as write

    try:
        written = write(run, directory, dtype=dtype, tokenizer=tokenizer)
    except HpcparError as error:
        raise click.ClickException(f"hpcpar export: {error}") from error
    except OSError as error:
        raise click.ClickException(f"hpcpar export: cannot write {directory}: {error}") from error
    click.echo(
        f"{written.sizes.parameters():,} parameters in {written.dtype}, of step {written.step} "
        f"({written.checkpoint}), are in {directory}"
    )
