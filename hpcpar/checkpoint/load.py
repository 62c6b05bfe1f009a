"""Reading a checkpoint: every rank verifies every bit, and nothing is changed until all have."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcpar.checkpoint import random_state
from hpcpar.checkpoint.catalogue import latest
from hpcpar.checkpoint.manifest import MANIFEST, Manifest
from hpcpar.checkpoint.model_state import check_fits, fill
from hpcpar.checkpoint.optimizer_state import restored_state
from hpcpar.checkpoint.save import MODEL, OPTIMIZER, RANDOM, STATE
from hpcpar.errors import CheckpointError

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint says beside the tensors.

    path              the checkpoint that was read
    step, extra       as they were saved
    ranks             ranks of the job that saved it
    random_restored   whether this rank's random-number states are those that were saved for it
    """

    path: Path
    step: int
    extra: dict[str, Any]
    ranks: int
    random_restored: bool


def load(
    path: str | Path,
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    comm: Communicator,
    restore_random: bool = True,
) -> Loaded:
    """Bring model, optimizer and random numbers to where a checkpoint left them. Collective.

    path            a checkpoint, or a directory of them, of which the latest complete one is taken:
                    rank 0's choice, for all. Every rank must see it
    restore_random  with another number of ranks than saved it, only ranks that there were then
                    find their states; the others keep theirs

    Nothing of model, optimizer or random numbers is touched unless every rank found every file whole
    and of this model.

    errors  CheckpointError that names the file, what was expected and what was found; of several
            ranks, PeerFailedError on every one, with that text
    """
    with comm.together(f"looking for a checkpoint in {path}"):
        own_choice = _choose(Path(path)) if comm.rank == 0 else None
    chosen = Path(comm.broadcast_object(None if own_choice is None else str(own_choice)))
    with comm.together(f"loading the checkpoint {chosen}"):
        content = _Content.read(chosen)
        check_fits(model, content.model, content.aliases, str(chosen / MODEL))
        optimizer_content = None if optimizer is None else content.optimizer_for(optimizer, model)
    fill(model, content.model, content.aliases)
    if optimizer is not None and optimizer_content is not None:
        optimizer.load_state_dict(optimizer_content)
    restored = restore_random and comm.rank < content.ranks
    if restored:
        random_state.restore(content.random_of(comm.rank), content.state["random"][comm.rank])
    return Loaded(chosen, content.state["step"], content.state["extra"], content.ranks, restored)


def _choose(path: Path) -> Path:
    if (path / MANIFEST).exists():
        return path
    found = latest(path)
    if found is None:
        raise CheckpointError(
            f"{path} {'holds no checkpoint' if path.is_dir() else 'does not exist'}: expected a "
            f"directory with a {MANIFEST}, or one with step-… directories in it"
        )
    return found


@dataclass(frozen=True)
class _Content:
    """A checkpoint's files, verified and read."""

    path: Path
    state: dict[str, Any]
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor] | None
    random: dict[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> _Content:
        manifest = Manifest.read(path)
        manifest.check_content(path)
        for name in (STATE, MODEL, RANDOM):
            if name not in manifest.files:
                raise CheckpointError(f"{path} is not a checkpoint of this program: it has no {name}")
        return cls(
            path=path,
            state=json.loads((path / STATE).read_text()),
            model=_tensors(path / MODEL),
            optimizer=_tensors(path / OPTIMIZER) if OPTIMIZER in manifest.files else None,
            random=_tensors(path / RANDOM),
        )

    @property
    def aliases(self) -> dict[str, str]:
        aliases: dict[str, str] = self.state["aliases"]
        return aliases

    @property
    def ranks(self) -> int:
        return len(self.state["random"])

    def optimizer_for(self, optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
        if self.optimizer is None:
            raise CheckpointError(
                f"{self.path} was saved without an optimizer, but there is one to restore; "
                f"load with optimizer=None to begin with a fresh one"
            )
        where = str(self.path / OPTIMIZER)
        return restored_state(optimizer, model, self.optimizer, self.state["optimizer"], where)

    def random_of(self, rank: int) -> dict[str, Tensor]:
        prefix = f"{rank}/"
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in self.random.items()
            if name.startswith(prefix)
        }


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
