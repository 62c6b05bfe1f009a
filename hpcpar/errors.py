"""The errors that hpcpar raises: each says what was asked, what was found and what to do.

A caller's mistake is a `ValueError`; a failure of the job (a lost peer, a stall, a broken
file) is a `RuntimeError`. `except HpcparError` catches every one of them and nothing else.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class HpcparError(Exception):
    """Base of all errors raised on purpose by hpcpar."""


class LaunchError(HpcparError, RuntimeError):
    """The launcher, its environment variables and MPI do not tell the same story."""


class LayoutError(HpcparError, ValueError):
    """Degrees of parallelism that do not fit each other or the number of ranks."""


class BufferTypeError(HpcparError, TypeError):
    """A buffer of a kind, an element type or a memory layout that cannot be communicated."""


class OperationError(HpcparError, ValueError):
    """A collective asked for with arguments that make no sense on this communicator."""


class GradientOrderError(OperationError, AssertionError):
    """A gradient that came when its bucket had left: more backwards than were announced."""


class MismatchError(HpcparError, ValueError):
    """Ranks of one communicator asked for different things in the same place."""


class StallError(HpcparError, RuntimeError):
    """A wait lasted beyond its time limit; the message says who waits for whom."""


class PeerLeftError(HpcparError, RuntimeError):
    """A rank ended while others still wait for it."""


class PeerFailedError(HpcparError, RuntimeError):
    """Another rank could not do its part of a common action; the message names it and says why."""


class ScheduleError(HpcparError, ValueError):
    """A schedule of steps that is wrong: it deadlocks, loses or doubles a contribution, or races."""


class SharedMemoryError(HpcparError, RuntimeError):
    """Memory that the ranks of a node would share is not to be had."""


class CudaError(HpcparError, RuntimeError):
    """The CUDA driver is not there, or refused a call; the message names it and says what that means."""


class OffloadError(HpcparError, RuntimeError):
    """Optimizer states that cannot be kept where they were to be."""


class ShardedParameterError(HpcparError, RuntimeError):
    """A parameter was used where only its shards are there."""


class ConfigError(HpcparError, ValueError):
    """A configuration with a key or a value that is not understood; the message names the key."""


class DataError(HpcparError, RuntimeError):
    """Training data that is missing, empty or not readable."""


class DivergenceError(HpcparError, RuntimeError):
    """Training whose numbers are no longer finite, or no longer the same on all replicas."""


class CheckpointError(HpcparError, RuntimeError):
    """A checkpoint that is missing, incomplete, damaged or of another model."""


class MissingExtraError(HpcparError, ModuleNotFoundError):
    """A package that is not installed; the message names the extra of hpcpar that installs it."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "did you mean 'ring'? ", for a sentence that goes on; "" where no name is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}? " if close else ""


EXTRA_OF = {"pydantic": "train", "safetensors": "train", "tokenizers": "train", "matplotlib": "pictures"}
"""Packages that some parts need, and the extra of hpcpar that installs them."""


@contextmanager
def naming_extras() -> Iterator[None]:
    """Let the error of a package that is not installed say which extra of hpcpar has it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_OF:
            raise
        raise MissingExtraError(
            f"this needs {package}, which is not installed: pip install 'hpcpar[{EXTRA_OF[package]}]'",
            name=error.name,
        ) from error
