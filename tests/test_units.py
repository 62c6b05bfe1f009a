"""Sizes and times as people write and read them."""

from __future__ import annotations

import math
import socket
import threading

import pytest

from hpcpar.units import (
    LONGEST_TIMEOUT_S,
    GiB,
    KiB,
    MiB,
    as_timeout,
    busbw_factor,
    format_duration,
    format_nbytes,
    parse_nbytes,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("8", 8),
        ("8 B", 8),
        ("64K", 64 * KiB),
        ("64k", 64 * KiB),
        ("1MiB", MiB),
        ("2 GiB", 2 * GiB),
        (" 3M ", 3 * MiB),
    ],
)
def test_a_size_is_read_with_its_unit(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "many", "K", "-8", "1.5M", "3T", "8 8"])
def test_what_is_no_size_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="is no size: write 8, 64K, 1M or 2G"):
        parse_nbytes(text)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(8, "8 B"), (1024, "1.0 KiB"), (26_214_400, "25.0 MiB"), (3 * 2**40, "3072.0 GiB")]
)
def test_a_size_is_shown_with_its_unit(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.23e-5, "12.3 µs"),
        (4.56e-3, "4.56 ms"),
        (7.8, "7.8 s"),
        (725, "12 min 05 s"),
        (10_920, "3 h 02 min"),
    ],
)
def test_a_time_is_shown_with_its_unit(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_bus_bandwidth_is_defined_for_what_moves_data() -> None:
    assert busbw_factor("allreduce", 4) == 1.5
    assert busbw_factor("allgather", 4) == 0.75
    assert busbw_factor("broadcast", 4) == 1.0
    with pytest.raises(ValueError, match="barrier"):
        busbw_factor("barrier", 4)


@pytest.mark.parametrize("seconds", [0.0, 1.5, LONGEST_TIMEOUT_S, 3e6, 1e9, 1e300, math.inf])
def test_any_time_limit_is_one_that_sockets_and_threads_take(seconds: float) -> None:
    limit = as_timeout(seconds)
    assert limit == (seconds if seconds <= LONGEST_TIMEOUT_S else None)
    with socket.socket() as connection:
        connection.settimeout(limit)
        assert connection.gettimeout() == limit
    thread = threading.Thread()
    thread.start()
    thread.join(limit)
    assert as_timeout(-1.0) == 0.0
