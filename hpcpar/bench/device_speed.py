"""Speed of one rank's cores or GPU, and a machine's description from it: `hpcpar bench fit … --machine FILE`.

matrix products      of depth 1024 and 64: peak, and the depth at which half of it is reached
elementwise          a sum of two large arrays: bytes read and written per second
attention            torch's scaled_dot_product_attention, causal
training steps       of two small models: the share of all these rates that real layers reach, by the planner,
                     and on CPUs what a launch takes in the interpreter and in torch
launch               on GPUs: a sum of two numbers

On CPUs as many processes as ranks share a node measure at once, as they will compute at once; of more ranks
than cores as many as have cores.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from hpcpar.data_parallel.process_memory import available_on_node
from hpcpar.errors import OperationError
from hpcpar.models import Llama, LlamaConfig
from hpcpar.planner.cluster import Cluster
from hpcpar.planner.estimate import estimate
from hpcpar.planner.layout import Layout
from hpcpar.planner.model_shapes import ModelShape
from hpcpar.planner.strategy import Strategy
from hpcpar.units import GB, GiB, MiB

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROWS, DEEP, SHALLOW = 512, 1024, 64
TOKENS, HEADS, HEAD_SIZE = 512, 4, 64
MODELS, SEQUENCES, SEQUENCE = ("tiny", "5m"), 8, 128
ELEMENTWISE_NBYTES = 32 * MiB
SECONDS = 0.3
"""Of each measurement."""


@dataclass(frozen=True)
class DeviceSpeed:
    """Speed of one rank's device.

    peak_flops         FLOP/s of deep matrix products, by element type
    depth              K at which a float32 product reaches half of that
    attention          FLOP/s of causal attention over peak, half of the scores counted
    memory_bandwidth   bytes/s of elementwise kernels
    launch_s           of one kernel, in the interpreter and in torch
    reached            share of these rates in training steps
    """

    name: str
    memory_nbytes: int
    peak_flops: Mapping[str, float]
    depth: float
    attention: float
    memory_bandwidth: float
    launch_s: float
    units: int = 1
    reached: float = 1.0


def measure(threads: int, device: str = "cpu") -> DeviceSpeed:
    """Measure this process's device."""
    torch.set_num_threads(threads)
    peaks = {
        name: _product_rate(getattr(torch, name), DEEP, device) for name in ("float32", "float64", "bfloat16")
    }
    ratio = peaks["float32"] / _product_rate(torch.float32, SHALLOW, device)
    # rate(K) = R K / (K + d), from two depths.
    depth = max(0.0, (ratio - 1) / (1 / SHALLOW - ratio / DEEP))
    peaks["float32"] *= 1 + depth / DEEP
    heads = torch.randn(1, HEADS, TOKENS, HEAD_SIZE, device=device)
    attend = _seconds(lambda: scaled_dot_product_attention(heads, heads, heads, is_causal=True), device)
    first, second = torch.ones(2, ELEMENTWISE_NBYTES // 4, device=device)
    out = torch.empty_like(first)
    added = _seconds(lambda: torch.add(first, second, out=out), device)
    one = torch.ones(1, device=device)
    total = torch.cuda.get_device_properties(device).total_memory if device != "cpu" else 0
    speed = DeviceSpeed(
        name=torch.cuda.get_device_name(device) if device != "cpu" else f"CPU, {threads} threads",
        memory_nbytes=total,
        peak_flops=peaks,
        depth=depth,
        attention=2 * TOKENS * TOKENS * HEADS * HEAD_SIZE / attend / peaks["float32"],
        memory_bandwidth=3 * ELEMENTWISE_NBYTES / added,
        launch_s=_seconds(lambda: torch.add(one, one, out=one), device),
        units=torch.cuda.get_device_properties(device).multi_processor_count if device != "cpu" else 1,
    )
    return _in_training(speed, device)


def _in_training(speed: DeviceSpeed, device: str) -> DeviceSpeed:
    """Return the speed with the share of its rates, and on CPUs the launch, that training steps show.

    Of two models: measured = kernels / share + launches · launch_s, as the planner counts both.
    """
    precision = "float32" if device == "cpu" else "bfloat16"
    bare = replace(speed, launch_s=0.0) if device == "cpu" else speed
    measured, kernels, launches = [], [], []
    for preset in MODELS:
        config = LlamaConfig.preset(preset)
        measured.append(_seconds(_training_step(config, getattr(torch, precision), device), device))
        kernels.append(_predicted_s(config, precision, bare))
        launches.append(_predicted_s(config, precision, replace(speed, launch_s=1.0)) - kernels[-1])
    if device == "cpu":
        # Cramer's rule for 1 / share and launch_s.
        whole = kernels[0] * launches[1] - kernels[1] * launches[0]
        slowdown = (measured[0] * launches[1] - measured[1] * launches[0]) / whole
        launch_s = (kernels[0] * measured[1] - kernels[1] * measured[0]) / whole
        if slowdown < 1:  # all of the rates is reached, and what is left is the launches'
            slowdown = 1.0
            launch_s = statistics.mean(
                (all_s - own_s) / number
                for all_s, own_s, number in zip(measured, kernels, launches, strict=True)
            )
        if launch_s > 0:
            return replace(speed, reached=1 / slowdown, launch_s=launch_s)
    ratios = [predicted / seconds for predicted, seconds in zip(kernels, measured, strict=True)]
    return replace(speed, reached=min(1.0, statistics.geometric_mean(ratios)))


def _predicted_s(config: LlamaConfig, precision: str, speed: DeviceSpeed) -> float:
    """Return the planner's seconds of the training step that is measured, on this device alone."""
    link = {"alpha_intra": 1e-6, "beta_intra": 1e-9}
    table = tomllib.loads(machine_toml("alone", speed, link, nodes=1, ranks_per_node=1))
    cluster = Cluster.from_table(table, where="measured", name="alone")
    strategy = Strategy(Layout(), SEQUENCES, SEQUENCES, SEQUENCE, precision=precision)
    return estimate(ModelShape.from_llama(config), cluster, strategy).step_s


def _training_step(config: LlamaConfig, dtype: torch.dtype, device: str) -> Callable[[], object]:
    """Return a step of a model on random tokens."""
    model = Llama(config, seed=0).to(device=device, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(config.vocab_size, (SEQUENCES, SEQUENCE), device=device)

    def step() -> None:
        model.loss(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_together(ranks: int, threads: int) -> DeviceSpeed:
    """Measure as many CPU ranks as share a node at once; return the median one, with its share of memory.

    Of more ranks than cores as many as have cores, whose time they all then share.
    """
    at_once = min(ranks, max(1, len(os.sched_getaffinity(0)) // threads))
    with ProcessPoolExecutor(at_once, mp_context=get_context("spawn")) as pool:
        speeds = list(pool.map(measure, [threads] * at_once))
    middle = sorted(speeds, key=lambda one: one.peak_flops["float32"])[len(speeds) // 2]
    memory = available_on_node()
    if memory is None:
        raise OperationError(
            "the node does not tell its memory (/proc/meminfo); write the machine's file by hand"
        )
    share = at_once / ranks
    return replace(
        middle,
        memory_nbytes=memory // ranks,
        peak_flops={name: share * rate for name, rate in middle.peak_flops.items()},
        memory_bandwidth=share * middle.memory_bandwidth,
        launch_s=middle.launch_s / share,
    )


def _product_rate(dtype: torch.dtype, depth: int, device: str) -> float:
    left = torch.ones(ROWS, depth, dtype=dtype, device=device)
    right = torch.ones(depth, ROWS, dtype=dtype, device=device)
    return 2 * ROWS * ROWS * depth / _seconds(lambda: left @ right, device)


def _seconds(call: Callable[[], object], device: str) -> float:
    """Return the median seconds of a call, to its end on the device."""

    def timed() -> float:
        start_s = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - start_s

    timed()
    found: list[float] = []
    end_s = time.perf_counter() + SECONDS
    while len(found) < 5 or time.perf_counter() < end_s:
        found.append(timed())
    return statistics.median(found)


def machine_toml(
    name: str, speed: DeviceSpeed, parameters: Mapping[str, float], *, nodes: int, ranks_per_node: int
) -> str:
    """Return a machine's file for `hpcpar plan` and `hpcpar train`.

    parameters   alpha and beta within nodes and between them, as `bench fit` finds them; where one of the two
                 levels was not measured, the other's stand for it
    """
    peaks = "\n".join(f"{dtype} = {rate / 1e12:.5g}" for dtype, rate in speed.peak_flops.items())
    links = "\n".join(
        f'[links.{level}]\nname = "{"shared memory" if level == "node" else "network"}"\n'
        f"alpha_us = {alpha_s * 1e6:.4g}\ngb_per_s = {1 / beta / GB:.4g}\n"
        for level, (alpha_s, beta) in _links(parameters).items()
    )
    return f"""name = "{name}"
source = "measured by hpcpar bench fit"
devices_per_node = {ranks_per_node}
nodes = {nodes}

[device]
name = "{speed.name}"
memory_gib = {max(speed.memory_nbytes, MiB) / GiB:.4g}
memory_gb_per_s = {speed.memory_bandwidth / GB:.4g}
units = {speed.units}
launch_us = {speed.launch_s * 1e6:.4g}
on_host = {"false" if speed.units > 1 else "true"}

[device.peak_tflops]
{peaks}

[device.efficiency]
matrix = {speed.reached:.3g}
attention = {min(1.0, speed.attention) * speed.reached:.3g}
memory = {speed.reached:.3g}
depth = {speed.depth:.4g}

{links}"""


def _links(parameters: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return alpha and beta by level of links.

    errors   OperationError where neither level's bandwidth was measured
    """
    levels = {"node": "intra", "fabric": "inter"}
    pairs = {
        level: (parameters.get(f"alpha_{short}", 0.0), parameters.get(f"beta_{short}", 0.0))
        for level, short in levels.items()
    }
    known = [pair for pair in pairs.values() if pair[1]]
    if not known:
        raise OperationError(
            "the lines do not tell the bandwidth; measure larger arrays: hpcpar bench collectives "
            "--collective all --max-bytes 64M --json FILE"
        )
    return {level: pair if pair[1] else known[0] for level, pair in pairs.items()}


def write_machine(path: Path, text: str) -> None:
    """Write the file, and the directories to it; OperationError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OperationError(f"{path} cannot be written: {error.strerror}; name another file") from error
