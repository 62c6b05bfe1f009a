"""`hpcpar checkpoint inspect`, `verify` and `convert`, in one process without MPI.

A checkpoint may come from a stranger: its files are checked as `load` checks them, and control characters in
its names do not reach the terminal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcpar.errors import HpcparError
from hpcpar.units import format_nbytes

if TYPE_CHECKING:
    from hpcpar.checkpoint.files import StoredTensor
    from hpcpar.checkpoint.load import Contents

NOT_SOUND = 1
"""Exit status of `verify` if a checkpoint is damaged, incomplete or not finite."""

DIRECTORY = click.Path(path_type=Path)


@click.group()
def checkpoint() -> None:
    """Describe, verify and convert checkpoints. `hpcpar export` converts one to Hugging Face's format."""


@checkpoint.command()
@click.argument("directory", type=DIRECTORY)
def inspect(directory: Path) -> None:
    """Describe DIRECTORY: a checkpoint, a directory of them, or the output directory of `hpcpar train`.

    Of several checkpoints: step, files, size, and if they are sound. Of one: ranks, tensors and what the run
    saved besides, too. Reads only headers, and files that changed after the manifest was written.
    """
    from hpcpar.checkpoint.checkpoint_directory import fault_of, named_by, not_finite

    try:
        found = named_by(directory)
        faults = [_tell(path, fault_of(path), "sound at a glance") for path in found]
        # Values that are not finite are no reason to withhold names and shapes.
        if found == [directory] and faults[0] in (None, not_finite(directory)):
            for line in _described(directory):
                click.echo(line)
    except HpcparError as error:
        raise click.ClickException(f"hpcpar checkpoint inspect: {printable(str(error))}") from error


@checkpoint.command()
@click.argument("directory", type=DIRECTORY)
def verify(directory: Path) -> int:
    """Read every byte of the checkpoints in DIRECTORY; exit with 1 if one of them is not sound.

    DIRECTORY is as for inspect. Sound is a checkpoint of which every file has the size and the SHA-256 of the
    manifest, all names, types and shapes fit each other, and every value was finite. About 1 s per GB.
    """
    from hpcpar.checkpoint.checkpoint_directory import named_by, verified_fault_of
    from hpcpar.comm import Communicator

    try:
        found = named_by(directory)
    except HpcparError as error:
        raise click.ClickException(f"hpcpar checkpoint verify: {printable(str(error))}") from error
    alone = Communicator.alone()
    faults = [_tell(path, verified_fault_of(path, alone), "sound") for path in found]
    return NOT_SOUND if any(faults) else 0


@checkpoint.command()
@click.argument("directory", type=DIRECTORY)
@click.argument("target", type=DIRECTORY)
def convert(directory: Path, target: Path) -> None:
    """Write the checkpoint DIRECTORY, or the newest sound one in it, into TARGET for other programs.

    TARGET ending in .safetensors gets the model alone; in .pt or .pth, what torch.load reads: model,
    optimizer, step, extra; without a suffix it becomes a directory of torch.distributed.checkpoint. Tensors
    that ranks had in pieces are whole in all of them. One process does it, with the memory of all tensors.
    """
    from hpcpar.checkpoint.conversion import convert as write

    try:
        path = write(directory, target)
    except (HpcparError, OSError) as error:
        raise click.ClickException(f"hpcpar checkpoint convert: {printable(str(error))}") from error
    click.echo(printable(f"{path} is in {target}"))


def _tell(path: Path, fault: str | None, sound: str) -> str | None:
    """Print one line about a checkpoint; return its fault."""
    from hpcpar.checkpoint.manifest import Manifest

    if fault is not None:
        click.echo(printable(f"{path}: NOT SOUND: {fault}"))
        return fault
    manifest = Manifest.of(path)
    nbytes = format_nbytes(sum(each.nbytes for each in manifest.files.values()))
    click.echo(printable(f"{path}: {sound}; step {manifest.step}, {len(manifest.files)} files, {nbytes}"))
    return None


def _described(path: Path) -> Iterator[str]:
    """Yield lines about one checkpoint."""
    from hpcpar.checkpoint.load import Contents

    contents = Contents.read(path)
    yield f"saved by      {_layout(contents)}"
    yield f"extra         {printable(', '.join(map(str, contents.state.extra)) or 'nothing')}"
    optimizer = contents.state.optimizer
    for number, group in enumerate(optimizer.groups if optimizer is not None else ()):
        options = ", ".join(f"{key} = {value}" for key, value in group.options.items())
        yield printable(f"group {number:<8}{len(group.parameters)} parameters; {options}")
    stored = {} if contents.optimizer is None else contents.optimizer.tensors
    for kind, tensors in (("model", contents.model), ("optimizer", stored)):
        yield f"{kind:<14}{_total(tensors)}"
        for name, tensor in sorted(tensors.items()):
            shape = " x ".join(map(str, tensor.shape)) or "one number"
            yield f"  {_dtype(tensor):<10}{shape:<18}{_parts(tensor):<22}{printable(name)}"
    for name, first in sorted(contents.state.aliases.items()):
        yield printable(f"  {name} is tied to {first}")


def _layout(contents: Contents) -> str:
    state = contents.state
    tp = max((size for _, size in state.tp or ()), default=1)
    layers = len(set(state.names or ("all",)))
    ranks = f"{contents.ranks} rank{'s'[: contents.ranks > 1]}"
    return f"{ranks}, tensor-parallel degree {tp}, {layers} different set{'s'[: layers > 1]} of layers"


def _total(tensors: Mapping[str, StoredTensor]) -> str:
    numel = {name: math.prod(tensor.shape) for name, tensor in tensors.items()}
    nbytes = sum(numel[name] * tensor.dtype.itemsize for name, tensor in tensors.items())
    types = Counter(map(_dtype, tensors.values()))
    by_type = ", ".join(f"{count} of {dtype}" for dtype, count in types.most_common())
    return f"{sum(numel.values()):,} elements, {format_nbytes(nbytes)}; tensors: {by_type or 'none'}"


def _parts(tensor: StoredTensor) -> str:
    pieces = sum(len(region.pieces) for region in tensor.regions)
    return "whole" if pieces <= 1 else f"{len(tensor.regions)} regions, {pieces} pieces"


def _dtype(tensor: StoredTensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def printable(text: str) -> str:
    """Escape control characters, so that a name cannot move the cursor or forge a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
