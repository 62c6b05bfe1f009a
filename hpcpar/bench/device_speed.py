"""Speed of one rank's cores or GPU, and a machine's description from it: `hpcpar bench fit … --machine FILE`.

matrix products      of depth 1024 and 64: peak, and the depth at which half of it is reached
elementwise          a sum of two large arrays: bytes read and written per second
attention            torch's scaled_dot_product_attention, causal
training steps       of two small models: the share of all these rates that real layers reach, by the planner;
                     on CPUs also a step of few tokens: what a launch takes in the interpreter and in torch,
                     and the depth of real products
launch               on GPUs: a sum of two numbers

On CPUs as many processes as ranks share a node measure at once, as they will compute at once; of more ranks
than cores as many as have cores.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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
from hpcpar.planner.software import HPCPAR
from hpcpar.planner.strategy import Strategy
from hpcpar.units import GB, GiB, MiB

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROWS, DEEP, SHALLOW = 512, 1024, 64
TOKENS, HEADS, HEAD_SIZE = 512, 4, 64
TRAINED = (("tiny", 8, 128), ("5m", 8, 128), ("tiny", 1, 4))
"""Model, sequences and tokens of each, in the steps that are measured; the last one is mostly launches."""
DEPTHS = range(0, 68, 4)
"""Depths to choose among."""
ELEMENTWISE_NBYTES = 32 * MiB
SECONDS, STEP_SECONDS = 0.3, 1.0
"""Of each measurement; and of each training step's."""


@dataclass(frozen=True)
class DeviceSpeed:
    """Speed of one rank's device.

    peak_flops         FLOP/s of deep matrix products, by element type
    depth              K at which a float32 product reaches half of that
    attention          FLOP/s of causal attention over peak, half of the scores counted
    memory_bandwidth   bytes/s of elementwise kernels
    launch_s           of one kernel, in the interpreter and in torch
    reached            share of these rates in training steps
    ranks_per_core     that take turns on it
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
    ranks_per_core: float = 1.0


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

    measured = kernels / share + launches · launch_s, as the planner counts both. The last step tells
    launch_s; with the best depth the others agree on the share.
    """
    on_host = device == "cpu"
    precision = "float32" if on_host else "bfloat16"
    steps = [(LlamaConfig.preset(preset), batch) for preset, *batch in (TRAINED if on_host else TRAINED[:2])]
    measured = [
        _seconds(_training_step(config, getattr(torch, precision), device, batch), device, STEP_SECONDS)
        for config, batch in steps
    ]

    def predicted(speed: DeviceSpeed) -> list[float]:
        return [_predicted_s(config, precision, speed, batch) for config, batch in steps]

    if not on_host:
        ratios = [kernels_s / step_s for kernels_s, step_s in zip(predicted(speed), measured, strict=True)]
        return replace(speed, reached=min(1.0, statistics.geometric_mean(ratios)))
    bare = predicted(replace(speed, launch_s=0.0))
    launches = [
        all_s - own_s for all_s, own_s in zip(predicted(replace(speed, launch_s=1.0)), bare, strict=True)
    ]
    launch_s = max(0.0, (measured[-1] - bare[-1]) / launches[-1])

    def slowdowns(depth: int) -> list[float]:
        kernels = predicted(replace(speed, depth=float(depth), launch_s=0.0))
        rows = list(zip(measured, launches, kernels, strict=True))[:-1]
        return [max(1.0, (step_s - number * launch_s) / own_s) for step_s, number, own_s in rows]

    depth = min(DEPTHS, key=lambda depth: abs(math.log(slowdowns(depth)[0] / slowdowns(depth)[1])))
    slowdown = statistics.geometric_mean(slowdowns(depth))
    return replace(speed, depth=float(depth), reached=1 / slowdown, launch_s=launch_s)


def _predicted_s(config: LlamaConfig, precision: str, speed: DeviceSpeed, batch: Sequence[int]) -> float:
    """Return the planner's seconds of the training step that is measured, on this device alone."""
    sequences, sequence = batch
    link = {"alpha_intra": 1e-6, "beta_intra": 1e-9}
    table = tomllib.loads(machine_toml("alone", speed, link, nodes=1, ranks_per_node=1))
    cluster = Cluster.from_table(table, where="measured", name="alone")
    strategy = Strategy(Layout(), sequences, sequences, sequence, precision=precision)
    plain = replace(HPCPAR, step_kernels=0.0)  # it has none of the trainer's own work
    return estimate(ModelShape.from_llama(config), cluster, strategy, plain).step_s


def _training_step(
    config: LlamaConfig, dtype: torch.dtype, device: str, batch: Sequence[int]
) -> Callable[[], object]:
    """Return a step of a model on random tokens."""
    model = Llama(config, seed=0).to(device=device, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(config.vocab_size, tuple(batch), device=device)

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
        reached=statistics.median(one.reached for one in speeds),
        launch_s=statistics.median(one.launch_s for one in speeds) / share,
        ranks_per_core=1 / share,
    )


def _product_rate(dtype: torch.dtype, depth: int, device: str) -> float:
    left = torch.ones(ROWS, depth, dtype=dtype, device=device)
    right = torch.ones(depth, ROWS, dtype=dtype, device=device)
    return 2 * ROWS * ROWS * depth / _seconds(lambda: left @ right, device)


def _seconds(call: Callable[[], object], device: str, for_s: float | None = None) -> float:
    """Return the median seconds of a call, to its end on the device.

    for_s   to measure for; None: SECONDS
    """

    def timed() -> float:
        start_s = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - start_s

    timed()
    found: list[float] = []
    end_s = time.perf_counter() + (SECONDS if for_s is None else for_s)
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
ranks_per_core = {speed.ranks_per_core:g}

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
