"""`hpcpar doctor`: report the job's facts, check an all-reduce, and say what to mend.

Works alone and under mpiexec or srun (`hpcpar run -n 4 -m hpcpar doctor`); rank 0 prints. The report includes
what Horovod's `--check-build` shows, which `hpcpar run --check-build` prints alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import click

from hpcpar.cli.doctor.facts import gather
from hpcpar.cli.doctor.findings import judge
from hpcpar.cli.doctor.print import print_findings, print_report, report_console
from hpcpar.cli.start_times import MODULES, StartTimes, process_age_s, time_import
from hpcpar.errors import HpcparError
from hpcpar.launch.environment import detect
from hpcpar.launch.rank_map import Finding


@click.command()
def doctor() -> int:
    """Look at MPI, launcher, cores, GPUs and torch, sum something over all ranks, say what to mend.

    Exits with status 1 if something is wrong.
    """
    start = StartTimes(process_age_s(), {name: time_import(module) for name, module in MODULES.items()})
    import hpcpar

    try:
        start_s = time.perf_counter()
        with without_log_lines():
            world = hpcpar.init()
        start = replace(start, init_s=time.perf_counter() - start_s)
    except HpcparError as error:
        if _is_not_rank_0():
            return 1
        refusal = Finding(str(error), "nothing else can be looked at before this works", wrong=True)
        print_findings(report_console(), [refusal])
        return 1
    job = gather(world, start)
    findings = judge(job)
    if world.rank == 0:
        print_report(report_console(), job, findings)
    return int(any(finding.wrong for finding in findings))


def _is_not_rank_0() -> bool:
    try:
        return detect().rank != 0
    except HpcparError:
        return False


@contextmanager
def without_log_lines() -> Iterator[None]:
    """Suppress the log lines of `init` about launcher and rank map, which are findings here."""

    def refuse(record: logging.LogRecord) -> bool:
        return False

    log = logging.getLogger("hpcpar")
    log.addFilter(refuse)
    try:
        yield
    finally:
        log.removeFilter(refuse)
