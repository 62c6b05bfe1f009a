"""Advice where no layout fits: the fewest nodes on which one would, and the smallest changes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpcpar.planner.memory import model_state_nbytes
from hpcpar.planner.search import PlanRequest, divisors, fits_somewhere
from hpcpar.planner.stage_memory import state_widths

MOST_NODES = 65_536
"""Where the search for nodes ends."""


@dataclass(frozen=True)
class Remedy:
    """A change with which some layout fits. `request` has it."""

    text: str
    request: PlanRequest


def fewest_nodes(request: PlanRequest, *, most: int = MOST_NODES) -> int | None:
    """Return the fewest nodes on which any layout fits; None where `most` are too few.

    Begins where the whole model state, spread over all devices, fits: fewer can never do.
    """
    device = request.cluster.device.memory_nbytes * request.cluster.devices_per_node
    # At least: the layers' matrices have no more optimizer state than the others.
    widths = min(
        (
            state_widths(request.precision, request.software, each)[0]
            for each in request.only("optimizer", "adamw")
        ),
        key=lambda widths: widths.optimizer,
    )
    if set(request.fixed.get("offload", ())) - {None}:
        widths = replace(widths, optimizer=0)
    state = sum(model_state_nbytes(request.model.parameters(), widths, stage=0, ranks=1).values())
    least = max(1, -(-state // device))
    # More nodes need not do where fewer do, as degrees must divide their devices, and dp the batch. So:
    # powers of two, times what the fixed degrees need and the batch allows, until one does; then all below.
    degrees = math.prod(
        min(values) for key, values in request.fixed.items() if key in ("tp", "pp", "cp", "dp")
    )
    needed = math.lcm(degrees, request.cluster.devices_per_node) // request.cluster.devices_per_node
    odd = [each for each in divisors(request.global_batch) if each % 2]
    likely = {
        times * each << power for times in (1, needed) for each in odd for power in range(most.bit_length())
    }
    for upper in sorted(number for number in likely if least <= number <= most):
        if fits_somewhere(_on(request, upper)):
            below = (number for number in range(least, upper) if fits_somewhere(_on(request, number)))
            return next(below, upper)
    return None


def remedies(request: PlanRequest) -> Iterator[Remedy]:
    """Yield changes of one thing, smallest first, with which some layout of the request fits.

    what was fixed, set free; optimizer state in host memory; a shorter sequence; more nodes
    """
    for key, values in request.fixed.items():
        freed = {other: kept for other, kept in request.fixed.items() if other != key}
        changed = replace(request, fixed=freed)
        if fits_somewhere(changed):
            asked = ",".join(str(each).lower() for each in values)
            yield Remedy(f"leave out --fix {key}={asked}", changed)
    if (
        "offload" not in request.fixed
        and request.cluster.host_memory_nbytes
        and request.cluster.host_bandwidth
    ):
        changed = replace(request, fixed={**request.fixed, "offload": ("cpu",)})
        if fits_somewhere(changed):
            yield Remedy("keep the optimizer's state in host memory: --fix offload=cpu", changed)
    sequence = request.sequence // 2
    while sequence >= 512:
        changed = replace(request, sequence=sequence)
        if fits_somewhere(changed):
            yield Remedy(f"train on sequences of {sequence} tokens: --sequence {sequence}", changed)
            break
        sequence //= 2
    nodes = fewest_nodes(request)
    if nodes is not None and nodes != request.cluster.nodes:
        yield Remedy(f"take {nodes} nodes: --nodes {nodes}", _on(request, nodes))


def _on(request: PlanRequest, nodes: int) -> PlanRequest:
    return replace(request, cluster=request.cluster.with_nodes(nodes))
