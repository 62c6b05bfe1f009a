"""Per-rank memory by purpose, beside the formula of ZeRO: records and their table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rich.table import Table

from hpcpar.data_parallel.process_memory import ProcessMemory
from hpcpar.units import format_nbytes


@dataclass(slots=True)
class StateLine:
    """One part of the model state on one rank, in bytes.

    device, host   in the memory of an accelerator; in that of the machine
    disk           in files
    common         shared by all ranks of the node: once for all of them
    formula        by `planner.memory`, for the types that are kept
    padding        added by equal shards of whole elements, less what a short last shard lacks
    pending        in the formula, but not allocated yet: state of parameters that never had a gradient
    """

    device_nbytes: int = 0
    host_nbytes: int = 0
    disk_nbytes: int = 0
    common_nbytes: int = 0
    formula_nbytes: Fraction = Fraction(0)
    padding_nbytes: Fraction = Fraction(0)
    pending_nbytes: int = 0

    def hold(self, on_device: int, on_host: int, *, common: bool = False) -> None:
        """Add bytes that are held, on the host perhaps in common with the node's other ranks."""
        self.device_nbytes += on_device
        if common:
            self.common_nbytes += on_host
        else:
            self.host_nbytes += on_host

    @property
    def nbytes(self) -> int:
        """Bytes in all places; common ones in full."""
        return self.device_nbytes + self.host_nbytes + self.disk_nbytes + self.common_nbytes

    @property
    def beyond_nbytes(self) -> Fraction:
        """Measured bytes beyond the formula."""
        return self.nbytes - self.formula_nbytes

    @property
    def unexplained_nbytes(self) -> Fraction:
        """Bytes beyond the formula that are neither padding nor pending; 0 if all is accounted for."""
        return self.beyond_nbytes - self.padding_nbytes + self.pending_nbytes

    @property
    def by_place(self) -> dict[str, int]:
        return {
            "device": self.device_nbytes,
            "host": self.host_nbytes,
            "disk": self.disk_nbytes,
            "common": self.common_nbytes,
        }


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one rank, in bytes. A figure with a peak is that of now, and the peak so far.

    rank          in the communicator that the report was made on
    ranks         among which the model state is sharded
    sharers       ranks of the node that share memory
    state         by part, see planner.memory.STATE
    staging       gradients under way: buckets' buffers, copies in another type, those that wait for a buffer
    gathered      unsharded units of a fully sharded model; at most `peak_gathered_units` at a time
    offload       blocks of optimizer state that are in memory while they are worked on
    activations   peak of what autograd saved for backward; None = not measured
    buffers       of the model, such as rotary tables
    scalars       counters of steps, and the placeholders of parameters that are not gathered
    process       as the operating system counts it, libraries included
    """

    rank: int
    ranks: int
    sharers: int
    state: dict[str, StateLine]
    staging_nbytes: int
    peak_staging_nbytes: int
    gathered_nbytes: int
    peak_gathered_nbytes: int
    peak_gathered_units: int
    peak_offload_nbytes: int
    peak_activations_nbytes: int | None
    buffers_nbytes: int
    scalars_nbytes: int
    process: ProcessMemory

    @property
    def state_nbytes(self) -> Fraction:
        """Model state in memory, with this rank's share of common memory, so that ranks add up."""
        return sum(
            (line.device_nbytes + line.host_nbytes + self._share(line) for line in self.state.values()),
            Fraction(0),
        )

    @property
    def peak_nbytes(self) -> Fraction:
        """Model state and all peaks: an upper bound, as the peaks need not coincide."""
        beside = self.peak_staging_nbytes + self.peak_gathered_nbytes + self.peak_offload_nbytes
        return (
            self.state_nbytes
            + beside
            + (self.peak_activations_nbytes or 0)
            + self.buffers_nbytes
            + self.scalars_nbytes
        )

    @property
    def unexplained_nbytes(self) -> Fraction:
        """Bytes of model state that neither the formula nor padding explains."""
        return sum((line.unexplained_nbytes for line in self.state.values()), Fraction(0))

    def _share(self, line: StateLine) -> Fraction:
        return Fraction(line.common_nbytes, self.sharers)

    def as_record(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        record: dict[str, Any] = _plain(dataclasses.asdict(self))
        for what, line in self.state.items():
            record["state"][what] |= {
                "nbytes": line.nbytes,
                "unexplained_nbytes": float(line.unexplained_nbytes),
            }
        return record | {"state_nbytes": float(self.state_nbytes), "peak_nbytes": float(self.peak_nbytes)}


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory of one rank or of all, beside the formula.

    stage        of ZeRO
    parameters   Φ: trained parameters of a rank's part of the model
    formula      as text: "2Φ + 14Φ/p"
    of_ranks     by rank; this rank alone where the report was made without a communicator
    """

    stage: int
    parameters: int
    formula: str
    of_ranks: tuple[RankMemory, ...]

    @property
    def worst(self) -> RankMemory:
        """The rank with the largest peak."""
        return max(self.of_ranks, key=lambda of_rank: of_rank.peak_nbytes)

    @property
    def state_nbytes(self) -> Fraction:
        """Model state in memory on all ranks of the report; common memory counts once."""
        return sum((of_rank.state_nbytes for of_rank in self.of_ranks), Fraction(0))

    def as_record(self, *, every_rank: bool = False) -> dict[str, Any]:
        """Return plain values for a JSON file: of the worst rank, or of every one."""
        shown = {"of_ranks": [each.as_record() for each in self.of_ranks]} if every_rank else {}
        return {
            "stage": self.stage,
            "parameters": self.parameters,
            "formula": self.formula,
            "reported_ranks": len(self.of_ranks),
            "state_nbytes": float(self.state_nbytes),
            "unexplained_nbytes": float(max(abs(each.unexplained_nbytes) for each in self.of_ranks)),
            "worst": self.worst.as_record(),
        } | shown

    def table(self) -> Table:
        """Return a table of the worst rank beside the formula."""
        worst = self.worst
        among = f"the fullest of {len(self.of_ranks)}" if len(self.of_ranks) > 1 else "this rank"
        shown = Table(
            title=f"Memory of rank {worst.rank}, {among}: ZeRO-{self.stage}, "
            f"{self.formula}, Φ = {self.parameters:,}, p = {worst.ranks}",
            box=None,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for heading in ("", "where"):
            shown.add_column(heading, no_wrap=True)
        for heading in ("now", "at most", "formula", "beyond it", "padding"):
            shown.add_column(heading, justify="right", no_wrap=True)
        for cells in _rows(worst):
            shown.add_row(*cells)
        return shown


def _rows(memory: RankMemory) -> Iterator[tuple[str, ...]]:
    for what, line in memory.state.items():
        places = {place: nbytes for place, nbytes in line.by_place.items() if nbytes} or {"host": 0}
        theory = (
            format_nbytes(float(line.formula_nbytes)),
            _signed(line.beyond_nbytes),
            _signed(line.padding_nbytes),
        )
        for number, (place, nbytes) in enumerate(places.items()):
            yield (
                what if not number else "",
                place,
                format_nbytes(nbytes),
                "",
                *(theory if not number else "   "),
            )
        if line.pending_nbytes:
            yield "  not made yet", "", "", "", "", _signed(Fraction(-line.pending_nbytes)), ""
        if line.unexplained_nbytes:
            yield "  not explained", "", "", "", "", _signed(line.unexplained_nbytes), ""
    units = f"units in flight ({memory.peak_gathered_units})" if memory.peak_gathered_units else ""
    for what, now, peak in (
        ("gradients on their way", memory.staging_nbytes, memory.peak_staging_nbytes),
        (units, memory.gathered_nbytes, memory.peak_gathered_nbytes),
        ("blocks from disk", None, memory.peak_offload_nbytes),
        ("activations", None, memory.peak_activations_nbytes),
        ("buffers of the model", memory.buffers_nbytes, None),
        ("counters, placeholders", memory.scalars_nbytes, None),
        ("process: resident", memory.process.resident_nbytes, memory.process.peak_resident_nbytes),
        ("process: its share", memory.process.proportional_nbytes, None),
        ("process: on the GPU", memory.process.device_nbytes, memory.process.peak_device_nbytes),
    ):
        if now or peak:
            yield what, "", _shown(now), _shown(peak), "", "", ""


def _shown(nbytes: int | None) -> str:
    return "" if nbytes is None else format_nbytes(nbytes)


def _signed(nbytes: Fraction) -> str:
    if not nbytes:
        return "0 B"
    sign, size = "-" if nbytes < 0 else "", abs(float(nbytes))
    return f"{sign}{size:.2g} B" if size < 10 and nbytes.denominator > 1 else f"{sign}{format_nbytes(size)}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return float(value) if isinstance(value, Fraction) else value
