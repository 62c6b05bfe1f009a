from __future__ import annotations

import io

import torch
from rich.console import Console

from hpcpar.comm import Communicator, run_loopback
from hpcpar.training.traffic_report import TrafficLine, as_records, gather_traffic, merge, table


def test_messages_and_bytes_are_summed_and_calls_and_waits_are_the_largest() -> None:
    lines = merge(
        [
            [("dp", "allreduce", 2, 4, 100, 0.5, 0), ("dp", "barrier", 1, 1, 0, 0.1, 0)],
            [("dp", "allreduce", 3, 4, 120, 0.2, 0)],
        ],
        {("dp", "allreduce"): 210},
    )
    assert lines == [
        TrafficLine("dp", "allreduce", 3, 8, 220, 210, 0.5),
        TrafficLine("dp", "barrier", 1, 1, 0, None, 0.1),
    ]
    assert [line.deviation for line in lines] == [10, None]


def test_a_collective_without_messages_has_no_line() -> None:
    assert merge([[("tp", "allreduce", 5, 0, 0, 0.0, 0)]], {}) == []


def test_a_collective_that_was_left_to_mpi_has_a_line_without_a_number_of_messages() -> None:
    lines = merge([[("dp", "allreduce", 5, 0, 0, 0.0, 5)]], {("dp", "allreduce"): 0})
    assert lines == [TrafficLine("dp", "allreduce", 5, 0, 0, 0, 0.0, 5)]
    output = io.StringIO()
    Console(file=output, width=80).print(table(lines, size=2))
    assert "dp   allreduce      5    MPI's  0 B    0 B       0 B" in output.getvalue()


def test_every_rank_gathers_the_same_lines_without_the_gathering_itself() -> None:
    def work(comm: Communicator) -> list[TrafficLine]:
        comm.allreduce(torch.ones(12), algorithm="ring")
        return gather_traffic(comm, {(comm, "allreduce"): 2 * 2 * 48})

    of_ranks = run_loopback(3, work)
    assert of_ranks[0] == of_ranks[1] == of_ranks[2]
    (line,) = of_ranks[0]
    assert (line.communicator, line.collective, line.messages, line.deviation) == (
        "world",
        "allreduce",
        12,
        0,
    )


def test_the_table_fits_a_batch_jobs_output_file() -> None:
    output = io.StringIO()
    lines = [TrafficLine("losses", "reduce_scatter", 140_000, 2_401_000, 10**9, 10**9, 100.0)]
    Console(file=output, width=80).print(table(lines, size=4))
    text = output.getvalue()
    assert "Traffic of 4 ranks together" in text
    assert "losses reduce_scatter 140,000 2,401,000 953.7 MiB 953.7 MiB" in text
    assert "0 B 1 min 40 s" in text


def test_numbers_that_do_not_fit_keep_all_digits_and_units() -> None:
    output = io.StringIO()
    lines = [
        TrafficLine("tp-same-head", "reduce_scatter", 2_345_678, 12_345_678, 10**14, 10**14, 123.4),
        TrafficLine("dp", "allreduce", 1, 2, 3, 3, 0.118),
    ]
    Console(file=output, width=80).print(table(lines, size=1024), crop=False)
    rows = [line.split() for line in output.getvalue().splitlines()[2:]]
    assert " ".join(rows[0]) == (
        "tp-same-head reduce_scatter 2,345,678 12,345,678 93132.3 GiB 93132.3 GiB 0 B 2 min 03 s"
    )
    assert " ".join(rows[1]).endswith("0 B 118.00 ms")


def test_lines_become_plain_values() -> None:
    assert as_records([TrafficLine("dp", "allreduce", 1, 2, 3, None, 0.5)]) == [
        {
            "communicator": "dp",
            "collective": "allreduce",
            "calls": 1,
            "messages": 2,
            "nbytes_sent": 3,
            "nbytes_theory": None,
            "seconds_waited": 0.5,
            "calls_by_mpi": 0,
        }
    ]
