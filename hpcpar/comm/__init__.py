"""Communicators: collectives, messages, accounting, and what happens when ranks disagree or fail."""

from hpcpar.comm.accounting import Trace, TraceEvent, Traffic, TrafficRow
from hpcpar.comm.communicator import Communicator, run_loopback
from hpcpar.comm.compiled import Handle
from hpcpar.comm.reductions import OPS, Op

__all__ = [
    "OPS",
    "Communicator",
    "Handle",
    "Op",
    "Trace",
    "TraceEvent",
    "Traffic",
    "TrafficRow",
    "run_loopback",
]
