"""Machines as the planner sees them: devices, the links between them, hosts and disks; read from TOML.

    a100-dgx.toml
    devices_per_node = 8            nodes = 64
    [device]                        name, memory_gib, memory_gb_per_s, watts, units, launch_us, on_host,
                                    ranks_per_core
    [device.peak_tflops]            float32, bfloat16, … of the matrix units
    [device.efficiency]             matrix, memory, attention: achievable shares of the peaks
    [links.node]                    devices of a node: alpha_us, gb_per_s of one device
    [links.fabric]                  devices of different nodes: alpha_us, gb_per_s of one device
    [host]                          memory_gib, gb_per_s of a device with its host, disk_gb_per_s of a node

GB = 1e9 bytes, GiB = 2**30 bytes. Bandwidths are of one direction.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpcpar.errors import ConfigError, did_you_mean
from hpcpar.planner.read_input import finite_number, read_table, whole_number
from hpcpar.planner.shapes import ITEMSIZE
from hpcpar.units import GB, GiB

MACHINES = Path(__file__).with_name("machines")
"""Directory of the machine files that come with hpcpar."""

PLANNED_TYPES = (*ITEMSIZE, "float8")
"""Types of parameters that can be planned; a machine's peaks of others (int8, float4) are for inference."""


@dataclass(frozen=True)
class Efficiency:
    """Achievable shares of a device's peaks, for large operands. Fitted to measurements.

    matrix      of the peak FLOP/s, by a matrix product whose tiles fill the device
    attention   of the peak FLOP/s, by a fused attention kernel
    memory      of the memory bandwidth, by elementwise kernels
    depth       K at which a matrix product reaches half of its rate: K / (K + depth)
    """

    matrix: float = 0.8
    attention: float = 0.5
    memory: float = 0.8
    depth: float = 100.0


@dataclass(frozen=True)
class Device:
    """A GPU, a TPU chip or a CPU rank.

    peak_flops         FLOP/s of the matrix units by element type
    memory_bandwidth   bytes/s
    units              multiprocessors: a matrix product's tiles are computed so many at a time; 1 = no waves
    launch_s           from the launch of one kernel to the next, at least
    ranks_per_core     CPU ranks that take turns on a core, of whose rates each has its share
    on_host            it is the host's own core, which launches, computes and sends one after the other
    watts              of the device with its share of the node
    """

    name: str
    memory_nbytes: int
    peak_flops: Mapping[str, float]
    memory_bandwidth: float
    efficiency: Efficiency = field(default_factory=Efficiency)
    units: int = 1
    launch_s: float = 0.0
    on_host: bool = False
    ranks_per_core: float = 1.0
    watts: float = 0.0

    def peak(self, precision: str) -> float:
        """Return the peak FLOP/s of an element type; ConfigError if the file has none."""
        if precision not in self.peak_flops:
            raise ConfigError(
                f"device {self.name}: no peak FLOP/s for {precision!r}; it has {', '.join(self.peak_flops)}. "
                f"Add device.peak_tflops.{precision} to the machine's file, or choose one of these"
            )
        return self.peak_flops[precision]


@dataclass(frozen=True)
class Link:
    """One level of the network, as one device sees it: n bytes take alpha_s + n·beta_s_per_byte.

    The bandwidth is that of one device while all devices of its node send.
    """

    name: str
    alpha_s: float
    beta_s_per_byte: float

    @property
    def bandwidth(self) -> float:
        """Bytes/s of one device."""
        return 1 / self.beta_s_per_byte


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices, joined by `fabric`; the devices of a node are joined by `node`.

    host_memory_nbytes   of a node
    host_bandwidth       bytes/s between one device and its host
    disk_bandwidth       bytes/s of one node
    """

    name: str
    device: Device
    devices_per_node: int
    nodes: int
    node: Link
    fabric: Link
    host_memory_nbytes: int = 0
    host_bandwidth: float = 0.0
    disk_bandwidth: float = 0.0
    source: str = ""

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.nodes * self.devices_per_node

    def with_nodes(self, nodes: int) -> Cluster:
        """Return the same machine with another number of nodes."""
        if nodes < 1:
            raise ConfigError(f"nodes={nodes}: a cluster has at least 1")
        return replace(self, nodes=nodes)

    def with_devices(self, devices: int) -> Cluster:
        """Return the same machine with so many devices: part of one node, or whole nodes.

        errors   ConfigError for a number that fills its last node in part
        """
        if devices < 1:
            raise ConfigError(f"devices={devices}: a cluster has at least 1")
        if devices <= self.devices_per_node:
            return replace(self, nodes=1, devices_per_node=devices)
        if devices % self.devices_per_node:
            raise ConfigError(
                f"{devices} devices do not fill nodes of {self.devices_per_node}; take "
                f"{devices - devices % self.devices_per_node} or a multiple"
            )
        return replace(self, nodes=devices // self.devices_per_node)

    @classmethod
    def named(cls, name: str) -> Cluster:
        """Read a machine that comes with hpcpar, or a file of one's own (a path that ends in .toml).

        errors   ConfigError with the list of machines; for a file that lacks a key, its name
        """
        if name.endswith(".toml"):
            return cls.read(Path(name))
        known = machine_names()
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(
                f"no machine is called {name!r}; {hint}there are {', '.join(known)}, or the path of a .toml "
                "file"
            )
        return cls.read(MACHINES / f"{name}.toml")

    @classmethod
    def read(cls, path: Path) -> Cluster:
        """Read a machine's file; ConfigError where it is no such file, or lacks a key."""
        return cls.from_table(read_table(path, "machine file"), where=str(path), name=path.stem)

    @classmethod
    def from_table(cls, table: Mapping[str, Any], *, where: str, name: str) -> Cluster:
        """Build a cluster from the contents of a file. `where` is named in errors."""
        read = _Reader(where)
        read.only(table, "", _KEYS)
        device, links, host = (read.table(table, key) for key in ("device", "links", "host"))
        read.only(device, "device.", _DEVICE_KEYS)
        read.only(links, "links.", ("node", "fabric"))
        read.only(host, "host.", ("memory_gib", "gb_per_s", "disk_gb_per_s"))
        return cls(
            name=str(table.get("name", name)),
            device=_device(read, device),
            devices_per_node=read.whole(table, "devices_per_node", ""),
            nodes=read.whole(table, "nodes", ""),
            node=_link(read, read.table(links, "node", "links."), "node"),
            fabric=_link(read, read.table(links, "fabric", "links."), "fabric"),
            host_memory_nbytes=int(GiB * read.number(host, "memory_gib", "host.", default=0)),
            host_bandwidth=GB * read.number(host, "gb_per_s", "host.", default=0),
            disk_bandwidth=GB * read.number(host, "disk_gb_per_s", "host.", default=0),
            source=str(table.get("source", "")),
        )


def machine_names() -> list[str]:
    """List the machines that come with hpcpar."""
    return sorted(path.stem for path in MACHINES.glob("*.toml"))


_KEYS = ("name", "source", "devices_per_node", "nodes", "device", "links", "host")
_DEVICE_KEYS = (
    *("name", "memory_gib", "memory_gb_per_s", "watts", "units", "launch_us", "on_host"),
    "ranks_per_core",
    *("peak_tflops", "efficiency"),
)


class _Reader:
    """Values of a machine's file; ConfigError that names file and key."""

    def __init__(self, where: str) -> None:
        self._where = where

    def only(self, table: Mapping[str, Any], prefix: str, known: tuple[str, ...]) -> None:
        for key in table:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {prefix}{near[0]}? " if near else ""
                raise ConfigError(
                    f"machine file {self._where}: there is no key {prefix}{key}; {hint}there are "
                    + ", ".join(prefix + one for one in known)
                )

    def table(self, table: Mapping[str, Any], key: str, prefix: str = "") -> Mapping[str, Any]:
        found = table.get(key, {})
        if not isinstance(found, Mapping):
            raise ConfigError(f"machine file {self._where}: {prefix}{key} = {found!r} must be a table")
        return found

    def switch(self, table: Mapping[str, Any], key: str, prefix: str) -> bool:
        found = table.get(key, False)
        if not isinstance(found, bool):
            raise ConfigError(f"machine file {self._where}: {prefix}{key} = {found!r} must be true or false")
        return found

    def number(
        self,
        table: Mapping[str, Any],
        key: str,
        prefix: str,
        *,
        default: float | None = None,
        at_most: float = math.inf,
    ) -> float:
        """Return a finite number above 0; or 0, where that is the default."""
        found = self._value(table, key, prefix, default)
        return finite_number(found, self._name(prefix, key), or_zero=default == 0, at_most=at_most)

    def whole(self, table: Mapping[str, Any], key: str, prefix: str, *, default: int | None = None) -> int:
        return whole_number(self._value(table, key, prefix, default), self._name(prefix, key))

    def _value(self, table: Mapping[str, Any], key: str, prefix: str, default: object) -> object:
        found = table.get(key, default)
        if found is None:
            raise ConfigError(f"machine file {self._where} lacks {prefix}{key}; give it a number")
        return found

    def _name(self, prefix: str, key: str) -> str:
        return f"machine file {self._where}: {prefix}{key}"


def _device(read: _Reader, table: Mapping[str, Any]) -> Device:
    peaks = read.table(table, "peak_tflops", "device.")
    known_peaks = [each for each in peaks if each in PLANNED_TYPES]
    if not known_peaks:
        raise ConfigError(
            f"machine file {read._where} lacks device.peak_tflops of a type to train in; give one of "
            + ", ".join(PLANNED_TYPES)
        )
    shares = read.table(table, "efficiency", "device.")
    known = tuple(Efficiency.__dataclass_fields__)
    read.only(shares, "device.efficiency.", known)
    return Device(
        name=str(table.get("name", "device")),
        memory_nbytes=int(GiB * read.number(table, "memory_gib", "device.")),
        peak_flops={each: 1e12 * read.number(peaks, each, "device.peak_tflops.") for each in known_peaks},
        memory_bandwidth=GB * read.number(table, "memory_gb_per_s", "device."),
        efficiency=Efficiency(
            **{
                key: read.number(shares, key, "device.efficiency.", default=0)
                if key == "depth"
                else read.number(shares, key, "device.efficiency.", at_most=1)
                for key in shares
            }
        ),
        units=read.whole(table, "units", "device.", default=1),
        launch_s=1e-6 * read.number(table, "launch_us", "device.", default=0),
        on_host=read.switch(table, "on_host", "device."),
        ranks_per_core=max(1.0, read.number(table, "ranks_per_core", "device.", default=1)),
        watts=read.number(table, "watts", "device.", default=0),
    )


def _link(read: _Reader, table: Mapping[str, Any], name: str) -> Link:
    read.only(table, f"links.{name}.", ("name", "alpha_us", "gb_per_s"))
    return Link(
        name=str(table.get("name", name)),
        alpha_s=1e-6 * read.number(table, "alpha_us", f"links.{name}.", default=0),
        beta_s_per_byte=1 / (GB * read.number(table, "gb_per_s", f"links.{name}.")),
    )
