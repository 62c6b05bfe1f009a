"""Units of memory and of bandwidth. GB = 1e9 bytes, GiB = 2**30 bytes."""

from __future__ import annotations

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB
GB = 1_000_000_000


def format_nbytes(nbytes: float) -> str:
    """Bytes for people: format_nbytes(26_214_400) == '25.0 MiB'."""
    if nbytes < KiB:
        return f"{nbytes:.0f} B"
    for unit, name in ((KiB, "KiB"), (MiB, "MiB"), (GiB, "GiB")):
        if nbytes < 1024 * unit or unit == GiB:
            return f"{nbytes / unit:.1f} {name}"
    raise AssertionError("unreachable: GiB is the last unit")


def parse_nbytes(text: str) -> int:
    """Bytes from people: parse_nbytes("64K") == 65_536; ValueError for what is no size."""
    units = {"K": KiB, "M": MiB, "G": GiB}
    digits = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = units.get(digits[-1:], 1)
    number = digits[:-1] if unit > 1 else digits
    if not number.strip().isdigit():
        raise ValueError(f"{text!r} is no size: write 8, 64K, 1M or 2G")
    return int(number) * unit


def format_duration(seconds: float) -> str:
    """Seconds for people: 12.3 µs, 4.56 ms, 7.8 s, 12 min 05 s, 3 h 02 min."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.2f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


LONGEST_TIMEOUT_S = 2_147_483.0
"""The longest limit of a socket: poll(2) counts milliseconds in 31 bits, which is 24 days."""


def as_timeout(seconds: float) -> float | None:
    """Return a time limit as sockets, threads and processes take it: None, no limit, beyond their range.

    as_timeout(60.0) == 60.0; as_timeout(math.inf) is None; as_timeout(1e9) is None; as_timeout(-1.0) == 0.0
    """
    return max(0.0, seconds) if seconds <= LONGEST_TIMEOUT_S else None


def busbw_factor(collective: str, size: int) -> float:
    """Return the factor from algbw (bytes of the whole array over seconds) to busbw.

    size    ranks of the communicator at hand, not of the world
    source  nccl-tests, doc/PERFORMANCE.md
    """
    match collective:
        case "allreduce":
            return 2 * (size - 1) / size
        case "reduce_scatter" | "allgather" | "alltoall":
            return (size - 1) / size
        case "broadcast" | "reduce" | "send" | "gather" | "scatter":
            return 1.0
    raise ValueError(f"no bus bandwidth is defined for {collective!r}")
