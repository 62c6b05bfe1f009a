"""Seconds of kernels on one device, and of collectives over one level of links.

matrix product   FLOPs / (peak · matrix · K/(K + depth) · fill), at least its bytes over the memory
                 bandwidth. fill = tiles / (waves · units): tiles are computed `units` at a time, and
                 the last wave may be nearly empty. The best of four sizes of tile is taken
elementwise      bytes read and written / (memory bandwidth · memory)
fused attention  FLOPs / (peak · attention)
launches         number of kernels · launch_s: what the host needs to start them; a layer takes the longer
                 of this and its kernels' times, or both where the device is the host

all-reduce       2(n - 1)/n · S β + 2 log₂n · α        ring bandwidth, tree latency
reduce-scatter, all-gather, all-to-all                 half of that
over nodes       β of the slower of node and fabric; g members of a group in one node share its adapters
                 with the node's other groups, so a group has g times a device's share
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpcpar.planner.cluster import Cluster, Device, Link

TILES = ((256, 128, 1.0), (128, 128, 0.97), (128, 64, 0.85), (64, 64, 0.6))
"""Rows, columns and relative rate of the tiles that libraries choose among."""


def matrix_product_s(
    device: Device, rows: float, outputs: float, inputs: float, precision: str, *, batch: int = 1
) -> float:
    """Return the seconds of `batch` products [rows, inputs] x [inputs, outputs]."""
    if min(rows, outputs, inputs) <= 0:
        return 0.0
    shares = device.efficiency
    flops = 2.0 * batch * rows * outputs * inputs
    rate = device.peak(precision) * shares.matrix * inputs / (inputs + shares.depth)
    if device.units > 1:
        rate *= _fill(device.units, rows, outputs, batch)
    width = 4 if precision == "float32" else 2
    nbytes = width * batch * (rows * inputs + inputs * outputs + rows * outputs)
    return max(flops / rate, nbytes / (device.memory_bandwidth * shares.memory))


def _fill(units: int, rows: float, outputs: float, batch: int) -> float:
    """Return the best share of the device's units that tiles of one size keep busy with useful work."""
    best = 0.0
    for tall, wide, rate in TILES:
        tiles = batch * math.ceil(rows / tall) * math.ceil(outputs / wide)
        useful = batch * rows * outputs / (tall * wide)
        best = max(best, rate * useful / (math.ceil(tiles / units) * units))
    return best


def elementwise_s(device: Device, nbytes: float) -> float:
    """Return the seconds of kernels that read and write so many bytes."""
    return nbytes / (device.memory_bandwidth * device.efficiency.memory)


def attention_s(device: Device, flops: float, precision: str) -> float:
    """Return the seconds of a fused attention kernel."""
    return flops / (device.peak(precision) * device.efficiency.attention)


@dataclass(frozen=True)
class GroupShape:
    """Ranks of one communicator as the links see them.

    size     ranks
    inside   of them in one node
    link     the slowest link on the way
    """

    size: int
    inside: int
    link: Link
    beta_s_per_byte: float

    @classmethod
    def of(cls, cluster: Cluster, size: int, stride: int) -> GroupShape:
        """Return the group of `size` ranks, `stride` apart, of ranks that fill node after node."""
        per_node, span = cluster.devices_per_node, size * stride
        if size <= 1 or (cluster.nodes == 1 and span <= per_node) or per_node % span == 0:
            return cls(size, max(size, 1), cluster.node, cluster.node.beta_s_per_byte)
        # Groups whose span does not divide a node lie in several: the least members of one in one node.
        inside = max(1, math.gcd(span, per_node) // stride)
        fabric = cluster.fabric.beta_s_per_byte / inside
        return cls(size, inside, cluster.fabric, max(fabric, cluster.node.beta_s_per_byte))

    @property
    def nodes(self) -> int:
        """Nodes that the group spans."""
        return -(-self.size // self.inside)


def allreduce_s(group: GroupShape, nbytes: float) -> float:
    """Return the seconds of an all-reduce of `nbytes`."""
    if group.size <= 1 or not nbytes:
        return 0.0
    steps = 2 * math.log2(group.size)
    return 2 * (group.size - 1) / group.size * nbytes * group.beta_s_per_byte + steps * group.link.alpha_s


def half_allreduce_s(group: GroupShape, nbytes: float) -> float:
    """Return the seconds of a reduce-scatter, an all-gather or an all-to-all; `nbytes` of the whole array."""
    return allreduce_s(group, nbytes) / 2


def send_s(group: GroupShape, nbytes: float) -> float:
    """Return the seconds of one message."""
    return group.link.alpha_s + nbytes * group.beta_s_per_byte
