"""`hpcpar bench tune`: time every algorithm, including MPI's own, and write a table of the fastest by size.

On GPUs only hpcpar's algorithms compete: MPI's collectives are not given device pointers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpcpar.algorithms.registry import ALGORITHMS
from hpcpar.bench.gpus import finished
from hpcpar.bench.measure import ON_HOST, PLACES, Buffers, Case, measure, usable, wrong_elements
from hpcpar.bench.sweep import CHOSEN, Say, SweepOptions, ours
from hpcpar.comm.select import ANY, NATIVE, Rules, describe
from hpcpar.comm.tuning import Entry, add_to_file, entries_in, ranks_per_node, rules_from
from hpcpar.errors import ConfigError, OperationError
from hpcpar.units import format_duration, format_nbytes

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

WORTH = 1.05
"""Speedup that an algorithm needs over the previous size's algorithm to replace it."""


def tune(
    options: SweepOptions,
    dtypes: Sequence[str],
    comm: Communicator,
    mpi: str,
    say: Say,
    device: torch.device = ON_HOST,
) -> Entry:
    """Return the fastest algorithm by collective, element type and size on these ranks. Collective.

    dtypes   element types; the first one's rules serve all types that are not named
    mpi      vendor and version of the MPI library: part of the key
    device   where this rank's arrays are
    errors   OperationError on one rank, for a wrong result, and where arrays on GPUs would be copied to
             the host
    """
    if comm.size == 1:
        raise OperationError("one rank has nothing to choose by; start several, as hpcpar run -n 2 -- ...")
    if device.type != "cpu" and options.shared:
        raise OperationError("memory that ranks share is the host's: measure arrays on GPUs without --shared")
    if device.type != "cpu" and not comm.shares_devices:
        raise OperationError(
            "arrays on GPUs are copied to the host for every call here, so they go by the table of host "
            "memory; hpcpar doctor says what keeps them from moving as they are"
        )
    if not dtypes or not any(collective in ALGORITHMS for collective in options.collectives):
        raise OperationError(
            f"nothing to choose for {', '.join(options.collectives)} of {', '.join(dtypes) or 'no type'}: "
            "give --dtype an element type, and a --collective that is more than messages"
        )
    rules: dict[str, dict[str, Rules]] = {}
    for collective in options.collectives:
        if collective not in ALGORITHMS:
            continue  # messages between two ranks leave nothing to choose
        rules[collective] = {}
        for dtype in dtypes:
            found = _rules(collective, replace(options, dtype=dtype), comm, say, device)
            rules[collective][dtype if rules[collective] else ANY] = found
    return Entry(mpi, comm.size, ranks_per_node(comm.nodes), rules, device.type)


def _rules(
    collective: str, options: SweepOptions, comm: Communicator, say: Say, device: torch.device
) -> Rules:
    winners: dict[int, str] = {}
    before = ""
    for nbytes in options.sizes():
        case = Case.of(collective, nbytes, options.dtype, options.kind, comm.size)
        if case.nbytes in winners:  # sizes below one element for each rank
            continue
        medians_s = time_all(case, options, comm, device)
        before = winners[case.nbytes] = winner(medians_s, before)
        if comm.rank == 0:
            what = f"{collective:<15}{options.dtype:<9}{format_nbytes(case.nbytes):>10}"
            say(f"{what}  {_told(medians_s, before)}")
    if comm.rank == 0:
        say(f"{collective}, {options.dtype}: {describe(winners.items())}")
    return rules_from(list(winners.items()))


def _told(medians_s: Mapping[str, float], first: str) -> str:
    best_s = medians_s[first]
    others = sorted((seconds / best_s, name) for name, seconds in medians_s.items() if name != first)
    behind = ", ".join(f"{name} {ratio:.2f}" for ratio, name in others[:3])
    return f"{first:<20}{format_duration(best_s):>10}   then, times as long: {behind}"


def time_all(
    case: Case, options: SweepOptions, comm: Communicator, device: torch.device = ON_HOST
) -> dict[str, float]:
    """Return median seconds of every algorithm, in the collective's usual place. Collective."""
    buffers = Buffers.of(case, comm, shared=options.shared, device=device)
    left_out = (CHOSEN,) if device.type == "cpu" else (CHOSEN, NATIVE)
    candidates = [
        finished(candidate, device)
        for candidate in ours(case, comm, buffers, PLACES[case.collective][0])
        if candidate.name not in left_out
    ]
    able = usable(candidates, comm)
    for candidate in able:
        wrong = wrong_elements(candidate, case, comm, buffers)
        if wrong:
            raise OperationError(
                f"{case.collective} by {candidate.name!r} on {case.count} {case.dtype} left {wrong} elements "
                f"wrong on {comm.size} ranks; nothing was written"
            )
    buffers.clear()
    runs = {candidate.name: candidate.run for candidate in able}
    timings = measure(runs, comm, rounds=options.rounds, round_s=options.round_s)
    return {name: timing.median_s for name, timing in timings.items()}


def winner(medians_s: Mapping[str, float], before: str) -> str:
    """Return the fastest, or the previous size's algorithm where the gain is below `WORTH`."""
    best = min(medians_s, key=medians_s.__getitem__)
    if before in medians_s and medians_s[before] <= WORTH * medians_s[best]:
        return before
    return best


def require_place(path: Path, comm: Communicator) -> None:
    """Require, before measuring, that the table can be written. Collective; rank 0 looks.

    errors   ConfigError, on several ranks PeerFailedError: the file is no table, or is not writable
    """
    with comm.together("looking where to write"):
        if comm.rank == 0:
            entries_in(path)
            place = next(place for place in path.absolute().parents if place.exists())
            if not place.is_dir() or not os.access(place, os.W_OK):
                raise ConfigError(f"{path} cannot be written: {place} is no directory that is writable")


def keep(entry: Entry, path: Path, comm: Communicator) -> None:
    """Add the entry to the file, which keeps other jobs' entries. Collective; rank 0 writes.

    errors   ConfigError or OSError on one rank are PeerFailedError on all
    """
    with comm.together(f"writing {path}"):
        if comm.rank == 0:
            add_to_file(path, entry)
