"""Measured tables on disk: one TOML file, one entry for each MPI, number of ranks, ranks per node and device.

    [[tuned]]
    mpi = "MPICH 5.0.2"
    ranks = 2
    ranks_per_node = 2

    [tuned.allreduce]
    any = [
        { up_to = 4096, use = "native" },
        { use = "ring" },
    ]

`hpcpar bench tune` writes it, `hpcpar.init()` reads it, and people may edit it: bytes are of the
whole array, the last line of a list has no limit, and an element type beside `any` has its own list.
An entry with `device = "cuda"` is of arrays on GPUs; one without, of host memory.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcpar.algorithms.registry import ALGORITHMS
from hpcpar.comm.select import ANY, Rules, Table, built_in, built_in_on_device, named_algorithm
from hpcpar.durable import write_whole
from hpcpar.errors import ConfigError, OperationError
from hpcpar.launch.settings import read_tuning
from hpcpar.transport.buffers import DTYPES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from hpcpar.comm.communicator import Communicator

KEYS = ("mpi", "ranks", "ranks_per_node")
DEVICES = ("cpu", "cuda")
"""Where arrays lie, as torch calls it; the first where nothing is said."""
INFINITE = float("inf")


@dataclass(frozen=True)
class Entry:
    """Measured rules for one kind of job.

    mpi              vendor and version, as `transport.mpi.library_facts()` has them
    ranks_per_node   of the node with the most
    rules            collective -> element type, or "any" -> rules
    device           where the arrays were: one of DEVICES
    """

    mpi: str
    ranks: int
    ranks_per_node: int
    rules: Mapping[str, Mapping[str, Rules]]
    device: str = DEVICES[0]

    @property
    def key(self) -> tuple[str, int, int, str]:
        return self.mpi, self.ranks, self.ranks_per_node, self.device


@dataclass(frozen=True)
class Tuning:
    """The entries of a file that are of the MPI in use; each communicator looks for its own.

    source   the file
    """

    entries: tuple[Entry, ...] = ()
    source: str = ""

    def table(self, nodes: Sequence[int], *, shared_memory: bool = False) -> Table:
        """For a communicator whose ranks are on these nodes: what was measured on as many, else built in."""
        return self._measured(nodes, "cpu", built_in(nodes, shared_memory=shared_memory))

    def table_on_device(self, nodes: Sequence[int], *, all_pull: bool) -> Table:
        """Table for arrays on GPUs; `all_pull`: every rank can read every other one's memory."""
        return self._measured(nodes, "cuda", built_in_on_device(nodes, all_pull=all_pull))

    def _measured(self, nodes: Sequence[int], device: str, otherwise: Table) -> Table:
        """The table of an entry; collectives and element types that it leaves out go by the other one."""
        wanted = len(nodes), ranks_per_node(nodes), device
        for entry in self.entries:
            if (entry.ranks, entry.ranks_per_node, entry.device) == wanted:
                measured = {
                    collective: {**otherwise.rules[collective], **by_dtype}
                    for collective, by_dtype in entry.rules.items()
                }
                return Table(self.source, {**otherwise.rules, **measured})
        return otherwise


def read_together(comm: Communicator, asked: str | None, own_file: Path | None, mpi: str) -> Tuning:
    """Give all ranks what rank 0 finds, whatever their nodes' disks hold: they choose alike. Collective.

    asked      HPCPAR_TUNING
    own_file   what is read, if it is there, when nothing is asked for
    mpi        vendor and version of the MPI library
    errors     ConfigError, or on several ranks PeerFailedError, when the file is not to be read or understood
    """
    found: tuple[str, str] = ("", "")
    with comm.together("reading the tuning file"):
        if comm.rank == 0:
            found = read_tuning(asked, own_file)
    text, source = comm.broadcast_object(found)
    return tuning_for(mpi, text, source)


def ranks_per_node(nodes: Sequence[int]) -> int:
    """Ranks on the fullest node; `nodes` has the node of each rank."""
    return max(Counter(nodes).values())


def tuning_for(mpi: str, text: str, source: str) -> Tuning:
    """The part of a file's text that was measured with this MPI.

    errors   ConfigError that names the file and the place in it
    """
    return Tuning(tuple(entry for entry in parse(text, source) if entry.mpi == mpi), source)


def parse(text: str, source: str) -> list[Entry]:
    """All entries of a file's text; ConfigError names the file and the place in it."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{source} is no TOML: {error}; mend it, or remove it and measure anew, by `hpcpar bench tune`"
        ) from error
    others = [key for key in content if key != "tuned"]
    if others:
        raise ConfigError(
            f"{source} is no table of algorithms: it has {', '.join(others)} beside [[tuned]]; name another "
            "file, or take that out"
        )
    items = content.get("tuned", [])
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ConfigError(f"{source}: `tuned` must be a list of tables; write [[tuned]], not [tuned]")
    return [_entry(item, f"{source}: [[tuned]] number {at}") for at, item in enumerate(items, 1)]


def _entry(item: dict[str, Any], place: str) -> Entry:
    for key, kind in zip(KEYS, (str, int, int), strict=True):
        if not isinstance(item.get(key), kind):
            raise ConfigError(f"{place} needs {key} = a {kind.__name__}, but has {item.get(key)!r}")
    device = item.get("device", DEVICES[0])
    if device not in DEVICES:
        raise ConfigError(f"{place} has device = {device!r}; there are {' and '.join(map(repr, DEVICES))}")
    rules = {}
    for collective, by_dtype in item.items():
        if not isinstance(by_dtype, dict):
            continue  # KEYS, and what people note beside them
        if collective not in ALGORITHMS:
            raise ConfigError(
                f"{place} has rules for {collective!r}; the collectives are {', '.join(ALGORITHMS)}"
            )
        unknown = [dtype for dtype in by_dtype if dtype not in (ANY, *DTYPES)]
        if unknown:
            raise ConfigError(
                f"{place} has rules for {collective} of {', '.join(unknown)}; the element types are "
                f"{', '.join(DTYPES)}, and {ANY} for all others"
            )
        rules[collective] = {
            dtype: _rules(collective, lines, f"{place}, {collective}.{dtype}")
            for dtype, lines in by_dtype.items()
        }
    return Entry(item["mpi"], item["ranks"], item["ranks_per_node"], rules, device)


def _rules(collective: str, lines: Any, place: str) -> Rules:
    """[{up_to = 4096, use = "native"}, {use = "ring"}] -> ((4096, "native"), (inf, "ring"))"""
    if not isinstance(lines, list) or not lines or not all(isinstance(line, dict) for line in lines):
        raise ConfigError(f'{place} must be a list of {{ up_to = bytes, use = "algorithm" }}, not {lines!r}')
    limits = [line.get("up_to", INFINITE) for line in lines]
    if (
        not all(isinstance(limit, (int, float)) and limit >= 0 for limit in limits)
        or limits != sorted(set(limits))
        or limits[-1] != INFINITE
    ):
        raise ConfigError(
            f"{place}: `up_to` must rise from line to line, from 0 on, and the last line have none"
        )
    for line in lines:
        try:
            named_algorithm(collective, str(line.get("use")))
        except OperationError as error:
            raise ConfigError(f"{place}: {error}") from error
    return tuple((float(limit), str(line["use"])) for limit, line in zip(limits, lines, strict=True))


def format_entries(entries: Iterable[Entry]) -> str:
    """The text of a file; `parse` reads it back."""
    lines = ["# Algorithms by measurement (hpcpar bench tune). Bytes are of the whole array."]
    for entry in entries:
        lines += ["", "[[tuned]]", f'mpi = "{entry.mpi}"', f"ranks = {entry.ranks}"]
        lines += [f"ranks_per_node = {entry.ranks_per_node}"]
        lines += [] if entry.device == DEVICES[0] else [f'device = "{entry.device}"']
        for collective, by_dtype in entry.rules.items():
            lines += ["", f"[tuned.{collective}]"]
            for dtype, rules in by_dtype.items():
                lines += [f"{dtype} = [", *(f"    {_line(*rule)}," for rule in rules), "]"]
    return "\n".join(lines) + "\n"


def _line(limit: float, name: str) -> str:
    return f'{{ use = "{name}" }}' if limit == INFINITE else f'{{ up_to = {limit:.0f}, use = "{name}" }}'


def merge(entries: Iterable[Entry], new: Entry) -> list[Entry]:
    """The entries with `new`, which takes the place of its own collectives in an entry of the same key."""
    merged = {entry.key: entry for entry in entries}
    old = merged.get(new.key)
    merged[new.key] = replace(new, rules={**(old.rules if old else {}), **new.rules})
    return list(merged.values())


def entries_in(path: Path) -> list[Entry]:
    """Entries of a file, if it is there.

    errors   ConfigError when it cannot be read or understood
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a table ({error}): name another file") from error
    return parse(text, str(path))


def add_to_file(path: Path, new: Entry) -> None:
    """Bring a measured entry into the file, which is there whole or not at all. Comments in it are lost.

    errors   ConfigError when there is a file that cannot be understood: it is left as it is
    """
    old = entries_in(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, format_entries(merge(old, new)))


def rules_from(winners: Sequence[tuple[int, str]]) -> Rules:
    """Measured (bytes, best algorithm) in rising order, as rules.

    Between two measured sizes with different winners the limit is their geometric mean.
    """
    rules: list[tuple[float, str]] = []
    for (nbytes, name), (larger, following) in pairwise(winners):
        if name != following:
            rules.append((float(round((nbytes * larger) ** 0.5)), name))
    return (*rules, (INFINITE, winners[-1][1]))
