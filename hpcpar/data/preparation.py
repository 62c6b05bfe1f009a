"""Preparation of training data: from paths to opened shards, on all ranks of a job or on none."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hpcpar.data.corpus import Corpus, Paths, require_existing, standard_library
from hpcpar.data.token_files import Shards, building, cache_key
from hpcpar.data.tokenizer import Tokenizer, tokenizer_of
from hpcpar.errors import DataError
from hpcpar.units import MiB

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

logger = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
"""Interval of the builders' reports to the other ranks, which keeps every wait below its time limit."""


@dataclass(frozen=True)
class Prepared:
    """Data ready to train on; `built` is False if it was found in the cache."""

    shards: Shards
    tokenizer: Tokenizer
    built: bool


def prepare(
    comm: Communicator,
    paths: Paths | None = None,
    *,
    cache_directory: str | Path,
    tokenizer: Tokenizer | str | Path | None = None,
    held_out_fraction: float = 0.05,
    end_of_document: str | Literal[False] | None = None,
    text_key: str = "text",
    limit_nbytes: int = 8 * MiB,
    on_progress: Callable[[int], None] | None = None,
) -> Prepared:
    """Tokenize text into shards under `cache_directory`, or find them there. Collective.

    paths             files and directories; None: up to `limit_nbytes` of Python's standard library
    tokenizer         one, or the path of a Hugging Face tokenizers file, or None for bytes
    end_of_document   of a tokenizers file, as for `FileTokenizer`
    text_key          field of JSONL's and Parquet's records that is their text
    on_progress       called on rank 0 with its tokens so far, every few seconds

    The first rank of each node lists the files and builds, so the cache may be on a node's own disk or on a
    shared one; the others only check that the paths exist. Then all ranks compare a digest of their tokens.

    errors   DataError if a path is missing, nothing in it can be read, or nodes hold different text; of
             several ranks, PeerFailedError on every one, naming rank and path
    """
    builder = comm.nodes.index(comm.nodes[comm.rank])
    directory: Path | None = None
    steps: Iterator[int] = iter(())
    with comm.together("looking for the training data"):
        chosen = tokenizer_of(tokenizer, end_of_document=end_of_document)
        if comm.rank == builder:
            if paths is None:
                corpus = standard_library(limit_nbytes=limit_nbytes)
            else:
                corpus = Corpus.of(paths, text_key=text_key)
            _warn_of_left_out(corpus, comm)
            directory = Path(cache_directory) / f"tokens-{cache_key(corpus, chosen, held_out_fraction)}"
            if not _is_cached(directory):
                steps = building(corpus, chosen, directory, held_out_fraction=held_out_fraction)
        elif paths is not None:
            require_existing(paths)
    built = _build_together(comm, steps, on_progress)
    directory = comm.allgather_object(directory)[builder]
    assert directory is not None
    with comm.together("opening the training data"):
        shards = Shards.open(directory)
    _require_same_text(comm, shards)
    if built and shards.skipped and comm.rank == 0:
        first = shards.skipped[0]
        logger.warning(
            "%d files, or parts, could not be read and were left out, the first is %s (%s); all are in %s",
            len(shards.skipped), first.name, first.reason, shards.directory / "index.json",
        )  # fmt: skip
    return Prepared(shards, chosen, built)


def _warn_of_left_out(corpus: Corpus, comm: Communicator) -> None:
    if corpus.left_out and comm.rank == 0:
        more = f"; and {len(corpus.left_out) - 5} more kinds" if len(corpus.left_out) > 5 else ""
        logger.warning(
            "left out of the text: %s%s; a file that is named itself is taken whatever it is called",
            "; ".join(corpus.left_out[:5]), more,
        )  # fmt: skip


def _is_cached(directory: Path) -> bool:
    try:
        Shards.open(directory)
    except DataError as error:
        if directory.exists():
            logger.warning("building the training data again: %s", error)
        return False
    return True


def _build_together(
    comm: Communicator, steps: Iterator[int], on_progress: Callable[[int], None] | None
) -> bool:
    """Run the builders for `HEARTBEAT_S` at a time until all have finished; return True if any worked."""
    worked, finished = False, False
    while not finished:
        mine_finished = True
        with comm.together("building the training data"):
            until = time.monotonic() + HEARTBEAT_S
            for tokens in steps:
                worked = True
                if time.monotonic() > until:
                    mine_finished = False
                    if on_progress is not None and comm.rank == 0:
                        on_progress(tokens)
                    break
        finished = all(comm.allgather_object(mine_finished))
    return any(comm.allgather_object(worked))


def _require_same_text(comm: Communicator, shards: Shards) -> None:
    digests = comm.allgather_object(shards.digest)
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise DataError(
            f"ranks {', '.join(map(str, different))} of {comm.name!r} hold other training data than rank 0; "
            f"the text must be the same on every node (rank {comm.rank} reads {shards.directory})"
        )
