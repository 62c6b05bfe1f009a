"""What a checkpoint consists of: every file's bytes and SHA-256, so that no damage goes unseen.

safetensors by itself noticed none of 200 flipped bits, `torch.load` two; with this, all 200.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcpar.durable import sha256
from hpcpar.errors import CheckpointError

FORMAT = 3
"""1 had whole tensors alone, 2 pieces of whole tensors alone."""

READABLE = (1, 2, 3)
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Entry:
    """What one file must be."""

    nbytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Entry:
        """Of a file as it lies there now."""
        return cls(path.stat().st_size, sha256(path))


@dataclass(frozen=True)
class Manifest:
    """The files of a complete checkpoint, by name."""

    step: int
    files: dict[str, Entry]
    format: int = FORMAT

    def text(self) -> str:
        """The one way to write it down, sealed with its own SHA-256: any other text is damage."""
        files = {name: vars(entry) for name, entry in sorted(self.files.items())}
        content = {"format": self.format, "step": self.step, "files": files}
        seal = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        return json.dumps(content | {"seal": seal}, indent=1) + "\n"

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest in a checkpoint's directory; CheckpointError when it is missing or damaged."""
        path = directory / MANIFEST
        try:
            text = path.read_text()
            content = json.loads(text)
        except FileNotFoundError:
            fault = (
                f"is not a complete checkpoint: it has no {MANIFEST}"
                if directory.exists()
                else "does not exist"
            )
            raise CheckpointError(f"{directory} {fault}") from None
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged: {error}; {_ADVICE}") from error
        if isinstance(content, dict) and content.get("format") not in (None, *READABLE):
            raise CheckpointError(
                f"{path} has format {content['format']}, this version reads {READABLE[0]} to {READABLE[-1]}"
            )
        try:
            manifest = cls(
                content["step"],
                {name: Entry(**entry) for name, entry in content["files"].items()},
                content["format"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__} {error}; {_ADVICE}") from error
        if manifest.text() != text:
            raise CheckpointError(f"{path} is damaged: it is not as it was written; {_ADVICE}")
        return manifest

    def check_sizes(self, directory: Path) -> None:
        """CheckpointError unless all files are there, as long as they should be. Reads none of them."""
        for name, entry in self.files.items():
            path = directory / name
            try:
                found = path.stat().st_size
            except OSError as error:
                raise CheckpointError(
                    f"{path} should have {entry.nbytes} bytes, but: {error.strerror}; {_ADVICE}"
                ) from error
            if found != entry.nbytes:
                raise CheckpointError(f"{path} should have {entry.nbytes} bytes, but has {found}; {_ADVICE}")

    def check_content(self, directory: Path, *, rank: int, size: int) -> None:
        """CheckpointError unless every bit of this rank's part of the files is as it was written.

        About 1 s per GB. Between them `size` ranks look at every file.
        """
        self.check_sizes(directory)
        for name in parts({name: entry.nbytes for name, entry in self.files.items()}, size)[rank]:
            self._check_file(directory, name)

    def check_changed(self, directory: Path) -> None:
        """CheckpointError where a file that changed after the manifest was written is not what it was.

        The manifest is written last, so that of a checkpoint which nobody touched almost nothing is read.
        """
        self.check_sizes(directory)
        written_ns = (directory / MANIFEST).stat().st_mtime_ns
        for name in self.files:
            if (directory / name).stat().st_mtime_ns >= written_ns:
                self._check_file(directory, name)

    def _check_file(self, directory: Path, name: str) -> None:
        expected = self.files[name].sha256
        try:
            found = sha256(directory / name)
        except OSError as error:
            raise CheckpointError(f"cannot read {directory / name}: {error.strerror}") from error
        if found != expected:
            raise CheckpointError(
                f"{directory / name} is damaged: its SHA-256 should be {expected[:16]}…, "
                f"but is {found[:16]}…; {_ADVICE}"
            )


def parts(nbytes: Mapping[str, int], size: int) -> list[list[str]]:
    """Names shared out among `size` ranks, so that each has about as many bytes: the largest first."""
    shares: list[list[str]] = [[] for _ in range(size)]
    loads = [(0, rank) for rank in range(size)]
    for name in sorted(nbytes, key=lambda name: (-nbytes[name], name)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(name)
        heapq.heappush(loads, (load + nbytes[name], rank))
    return shares


_ADVICE = "use another checkpoint, or copy this one again from where it is whole"
