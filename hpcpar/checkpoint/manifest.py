"""The manifest: size and SHA-256 of each file. And the only reader of a checkpoint's JSON files.

Without digests, safetensors noticed none of 200 flipped bits and `torch.load` two; with them, all 200 are
found. A checkpoint may come from a stranger: its names and types are checked here before anyone uses them.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, model_validator
from safetensors import SafetensorError

from hpcpar.durable import sha256
from hpcpar.errors import CheckpointError, HpcparError

FORMAT = 3
"""1 had whole tensors only, 2 had pieces of whole tensors only."""

READABLE = (1, 2, 3)
MANIFEST = "manifest.json"
STATE = "state.json"
PIECES = "pieces.json"
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
RANDOM = "random.safetensors"

MAX_JSON_NBYTES = 1 << 30
"""Largest JSON file that is read: a thousand tensors in the pieces of 10,000 ranks."""

_ADVICE = "use another checkpoint, or copy this one again from where it is whole"

# --- reading what may be damaged, or made by a stranger -------------------------------------------


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn every exception that the content of a file can cause into a CheckpointError that names it."""
    try:
        yield
    except HpcparError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (
        *(ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
        SafetensorError,
    ) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{path} is damaged: {type(error).__name__} {reason}; {_ADVICE}") from error


def regular(path: Path) -> os.stat_result:
    """Return the status of a regular file; CheckpointError for anything else, OSError if it is missing.

    A link could lead out of the checkpoint, a FIFO or a device never end.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file; copy the file itself into the checkpoint")
    return status


def json_text(path: Path) -> str:
    """Return the content of a regular file of at most MAX_JSON_NBYTES; CheckpointError for anything else."""
    if (nbytes := regular(path).st_size) > MAX_JSON_NBYTES:
        raise CheckpointError(f"{path} has {nbytes} bytes; its kind has at most {MAX_JSON_NBYTES}; {_ADVICE}")
    # Should a link or a FIFO replace the file now, it is not followed, nor waited for.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), encoding="utf-8") as file:
        return file.read(MAX_JSON_NBYTES)


def _plain(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not the name of a file in the checkpoint")
    return name


FileName = Annotated[str, AfterValidator(_plain)]
"""One path component."""

AnyRecord = TypeVar("AnyRecord", bound="Record")


class Record(BaseModel):
    """Base of the JSON objects in a checkpoint; further keys are ignored."""

    model_config = ConfigDict(frozen=True)

    @classmethod
    def read(cls: type[AnyRecord], path: Path) -> AnyRecord:
        """Parse and validate a file; CheckpointError for whatever is wrong with it."""
        with reading(path):
            return cls.model_validate(json.loads(json_text(path)))


# --- state.json -----------------------------------------------------------------------------------

ITEMS = "items of a dictionary"
"""The one key of a JSON object that stands for a dictionary with other keys than texts."""


def with_text_keys(value: Any) -> Any:
    """Return a value that JSON keeps as it is: {30: 1}, as in MultiStepLR, becomes {ITEMS: [[30, 1]]}."""
    if isinstance(value, (list, tuple)):
        return [with_text_keys(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    kept = {key: with_text_keys(each) for key, each in value.items()}
    can_be_keys = all(isinstance(key, (str, int, float, type(None))) for key in kept)  # JSON refuses others
    if can_be_keys and (ITEMS in kept or not all(isinstance(key, str) for key in kept)):
        return {ITEMS: [[key, each] for key, each in kept.items()]}
    return kept


def with_own_keys(value: Any) -> Any:
    """Return what was given to `with_text_keys`, tuples as lists; errors for what that never returns."""
    if isinstance(value, list):
        return [with_own_keys(each) for each in value]
    if not isinstance(value, dict):
        return value
    if ITEMS in value:
        return {key: with_own_keys(each) for key, each in value[ITEMS]}
    return {key: with_own_keys(each) for key, each in value.items()}


class SavedGroup(Record):
    """Parameter group of the saved optimizer: names of its parameters, and options that are no tensors."""

    parameters: list[str]
    options: dict[str, Any]


class SavedScale(Record):
    """Loss scaler of the saved optimizer."""

    scale: float
    dynamic: bool
    good: int
    skipped: int


class SavedOptimizer(Record):
    """Non-tensor part of the saved optimizer.

    scalars   parameter -> key -> value, of states that are no tensors
    """

    scalars: dict[str, dict[str, Any]]
    groups: list[SavedGroup]
    loss_scale: SavedScale | None = None


class SavedState(Record):
    """Content of state.json.

    random       for each rank that saved, the random-number states that are no tensors
    aliases      further name -> first name of a tied tensor
    tp           (rank, size) in tensor parallelism of each rank that saved
    names        digest of each rank's tensor names; None: every rank had all
    not_finite   first tensor with NaN or infinite values, if there is one
    """

    step: NonNegativeInt
    random: Annotated[list[dict[str, Any]], Field(min_length=1)]
    aliases: dict[str, str]
    optimizer: SavedOptimizer | None = None
    tp: list[tuple[int, int]] | None = None
    names: list[str] | None = None
    not_finite: str | None = None
    extra: dict[Any, Any]

    @model_validator(mode="before")
    @classmethod
    def _has_own_keys(cls, value: Any) -> Any:
        return with_own_keys(value)

    @model_validator(mode="after")
    def _covers_all_ranks(self) -> SavedState:
        if any(each is not None and len(each) != len(self.random) for each in (self.tp, self.names)):
            raise ValueError("random, tp and names are of different numbers of ranks")
        return self


# --- manifest.json --------------------------------------------------------------------------------


class FileDigest(Record):
    """Expected size and SHA-256 of one file."""

    nbytes: NonNegativeInt
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileDigest:
        return cls(nbytes=path.stat().st_size, sha256=sha256(path))


class Manifest(Record):
    """The files of a complete checkpoint, by name."""

    step: NonNegativeInt
    files: dict[FileName, FileDigest]
    format: int = FORMAT

    def text(self) -> str:
        """Write the manifest down, sealed with its own SHA-256; there is one text for each manifest."""
        files = {name: digest.model_dump() for name, digest in sorted(self.files.items())}
        content = {"format": self.format, "step": self.step, "files": files}
        seal = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        return json.dumps(content | {"seal": seal}, indent=1) + "\n"

    @classmethod
    def of(cls, directory: Path) -> Manifest:
        """Read a checkpoint's manifest; CheckpointError if it is missing, damaged or of a later format."""
        path = directory / MANIFEST
        if not os.path.lexists(path):
            fault = f"is not a complete checkpoint: it has no {MANIFEST}"
            raise CheckpointError(f"{directory} {fault if directory.exists() else 'does not exist'}")
        with reading(path):
            text = json_text(path)
            content = json.loads(text)
            if isinstance(content, dict) and content.get("format") not in (None, *READABLE):
                raise CheckpointError(
                    f"{path} has format {content['format']}, this version reads {READABLE[0]} to "
                    f"{READABLE[-1]}"
                )
            manifest = cls.model_validate(content)
        if manifest.text() != text:
            raise CheckpointError(f"{path} is damaged: it is not as it was written; {_ADVICE}")
        return manifest

    def require(self, *names: str, directory: Path) -> None:
        for name in names:
            if name not in self.files:
                raise CheckpointError(f"{directory} is not a checkpoint of this program: it has no {name}")

    def check_sizes(self, directory: Path) -> None:
        """CheckpointError unless every file is there, regular and of the right size. Reads none of them."""
        for name, digest in self.files.items():
            path = directory / name
            try:
                found = regular(path).st_size
            except OSError as error:
                raise CheckpointError(
                    f"{path} should have {digest.nbytes} bytes, but: {error.strerror}; {_ADVICE}"
                ) from error
            if found != digest.nbytes:
                raise CheckpointError(f"{path} should have {digest.nbytes} bytes, but has {found}; {_ADVICE}")

    def check_content(self, directory: Path, *, rank: int, size: int) -> list[str]:
        """CheckpointError unless every bit of this rank's share of the files is as written.

        Returns the share. Together `size` ranks read every file once, at about 1 s per GB.
        """
        self.check_sizes(directory)
        share = shares({name: digest.nbytes for name, digest in self.files.items()}, size)[rank]
        for name in share:
            self._check_file(directory, name)
        return share

    def check_changed(self, directory: Path) -> None:
        """CheckpointError if a file that changed after the manifest was written has other content.

        The manifest is written last, so almost nothing of an untouched checkpoint is read.
        """
        self.check_sizes(directory)
        written_ns = (directory / MANIFEST).stat().st_mtime_ns
        for name in self.files:
            if (directory / name).stat().st_mtime_ns >= written_ns:
                self._check_file(directory, name)

    def _check_file(self, directory: Path, name: str) -> None:
        path, expected = directory / name, self.files[name].sha256
        with reading(path):
            found = sha256(path)
        if found != expected:
            raise CheckpointError(
                f"{path} is damaged: its SHA-256 should be {expected[:16]}…, but is {found[:16]}…; {_ADVICE}"
            )


def shares(nbytes: Mapping[str, int], size: int) -> list[list[str]]:
    """Divide file names among `size` ranks, largest first, so that each has about as many bytes."""
    names_of: list[list[str]] = [[] for _ in range(size)]
    loads = [(0, rank) for rank in range(size)]
    for name in sorted(nbytes, key=lambda name: (-nbytes[name], name)):
        load, rank = heapq.heappop(loads)
        names_of[rank].append(name)
        heapq.heappush(loads, (load + nbytes[name], rank))
    return names_of
