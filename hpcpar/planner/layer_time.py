"""Seconds of one microbatch on one layer: forward, backward of its input, backward of its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hpcpar.planner.cluster import Cluster
from hpcpar.planner.kernel_time import (
    GroupShape,
    allreduce_s,
    attention_s,
    elementwise_s,
    half_allreduce_s,
    matrix_product_s,
)
from hpcpar.planner.model_shapes import MatrixProduct, ModelShape
from hpcpar.planner.shapes import RecomputeMode
from hpcpar.planner.software import Software
from hpcpar.planner.strategy import Strategy

PASSES = ("forward", "backward", "weight")
"""F; B, the gradient of the input, with what is recomputed for it; W, the gradient of the weights."""


RECOMPUTED = 0.37
"""Share of a gated layer's product FLOPs in every second product: keys, output, up of 13 units of H x H."""


@dataclass(frozen=True)
class LayerTime:
    """Seconds by pass and part; and a rank's bytes and collectives' seconds by axis, of all passes."""

    passes: Mapping[str, Mapping[str, float]]
    nbytes: Mapping[str, float] = field(default_factory=dict)
    seconds_of_axis: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, which: str) -> float:
        """Seconds of one pass."""
        return sum(self.passes[which].values())


def layer_time(
    model: ModelShape, cluster: Cluster, strategy: Strategy, software: Software, layer: int
) -> LayerTime:
    """Return the time of one microbatch on layer `layer`, with what the strategy recomputes."""
    plain = plain_layer_time(model, cluster, strategy, software, layer)
    return recomputing(plain, strategy.recompute.mode, software)


def plain_layer_time(
    model: ModelShape, cluster: Cluster, strategy: Strategy, software: Software, layer: int
) -> LayerTime:
    """Return the time of one microbatch on layer `layer` without recomputation."""
    device, tp = cluster.device, strategy.layout.tp
    every = (*model.attention_products, *model.feed_forward_products(layer))
    load = software.rows_over_mean(strategy.layout)
    products, of_inputs, of_weights = products_s(cluster, strategy, every, load)
    core, scores = _core(model, cluster, strategy, software)
    tokens = strategy.own_tokens
    own = tokens / (tp if strategy.sequence_parallel else 1)
    split = software.split * tokens * model.hidden_size / tp
    rows_nbytes, expert_launches = _mixture(model, strategy, software, layer)
    passes = elementwise_s(device, software.whole * own * model.hidden_size + split + rows_nbytes)
    exchanged = _exchanges(model, cluster, strategy, layer, core + scores, load)
    forward = {"matrix products": products, "attention": core + scores, "elementwise": passes}
    backward = {"matrix products": of_inputs, "attention": 2 * core + 2 * scores, "elementwise": 2 * passes}
    weight = {"matrix products": of_weights}
    forward |= exchanged.exposed
    backward |= exchanged.exposed
    again = _again(strategy)
    for axis, part in (("tp", "tensor parallel"), ("cp", "context parallel")):
        if part in backward:
            backward[part] *= 1 + again.get(axis, 0)
    fused = software.fused_attention or _softmax_is_fused(model, strategy)
    kernels = software.kernels + expert_launches + (0 if fused else software.softmax_kernels)
    launched = software.launches_s(device, kernels)
    called, called_back = (software.calls_s(device, calls) for calls in exchanged.calls)
    hides = 0.0 if device.on_host else 1.0
    forward["launches"] = max(0.0, launched + called - hides * sum(forward.values()))
    launched = launched * software.backward_kernels + called_back
    backward["launches"] = max(0.0, launched - hides * (sum(backward.values()) + of_weights))
    return LayerTime(
        {"forward": forward, "backward": backward, "weight": weight},
        {axis: (2 + again.get(axis, 0)) * nbytes for axis, nbytes in exchanged.nbytes.items()},
        {axis: (2 + again.get(axis, 0)) * seconds for axis, seconds in exchanged.seconds.items()},
    )


def _again(strategy: Strategy) -> dict[str, float]:
    """Return what each axis fetches a second time in backward, over what it sends in a forward."""
    again = {}
    if strategy.gather_again:
        again["tp"] = 0.5  # beside two gathers and two sums: two gathers more
    if not strategy.cp_keep and not strategy.cp_method.startswith("ulysses"):
        again["cp"] = 1.0  # keys and values, beside their gradients
    return again


def recomputing(plain: LayerTime, mode: RecomputeMode, software: Software) -> LayerTime:
    """Add to a layer's backward what this mode recomputes."""
    if mode == "none":
        return plain
    forward, backward = plain.passes["forward"], dict(plain.passes["backward"])
    if mode == "full":
        again, whole = forward, 1.5  # three times the forward's traffic in place of twice
    elif software.selective == "product":
        again = {
            "matrix products": RECOMPUTED * forward["matrix products"],
            "elementwise": forward["elementwise"],
        }
        whole = 1.0
    else:
        again, whole = {"attention": forward["attention"]}, 1.0
    for part, seconds in again.items():
        backward[part] = backward.get(part, 0.0) + seconds
    return LayerTime(
        {**plain.passes, "backward": backward},
        {axis: whole * nbytes for axis, nbytes in plain.nbytes.items()},
        {axis: whole * seconds for axis, seconds in plain.seconds_of_axis.items()},
    )


def products_s(
    cluster: Cluster, strategy: Strategy, every: Iterable[MatrixProduct], load: float = 1.0
) -> tuple[float, float, float]:
    """Return the seconds of products with these matrices on one rank: forward, and both gradients.

    load   rows of its experts, over the mean of the ranks
    T rows, N outputs, K inputs:   [T, K] x [K, N]   [T, N] x [N, K]   [N, T] x [T, K]
    """
    device, precision = cluster.device, strategy.precision
    forward = of_inputs = of_weights = 0.0
    for each in every:
        rows, outputs, inputs, batch = _own_sizes(strategy, each, load)
        forward += matrix_product_s(device, rows, outputs, inputs, precision, batch=batch)
        of_inputs += matrix_product_s(device, rows, inputs, outputs, precision, batch=batch)
        of_weights += matrix_product_s(device, outputs, inputs, rows, precision, batch=batch)
    return forward, of_inputs, of_weights


def _own_sizes(strategy: Strategy, each: MatrixProduct, load: float) -> tuple[float, float, float, int]:
    """Return rows, outputs, inputs and number of a rank's products with one matrix."""
    layout, tokens = strategy.layout, float(strategy.own_tokens)
    inputs, outputs, batch = float(each.inputs), float(each.outputs), 1
    tp = layout.tp
    if each.copies > 1:
        tp = layout.etp
        if layout.etp == 1:
            tokens /= layout.tp
        batch = max(1, each.copies // layout.ep)
        tokens = load * tokens * each.rows / batch
    if each.split == "column":
        outputs /= tp
    elif each.split == "row":
        inputs /= tp
    return tokens, outputs, inputs, batch


def _core(model: ModelShape, cluster: Cluster, strategy: Strategy, software: Software) -> tuple[float, float]:
    """Return the seconds of scores and values, and of softmax on scores in memory."""
    device, tp = cluster.device, strategy.layout.tp
    precision = "bfloat16" if strategy.precision == "float8" else strategy.precision
    flops = 2.0 * strategy.own_tokens * strategy.sequence * model.core_width / tp
    if software.fused_attention:
        return attention_s(device, flops / 2, precision), 0.0
    batch = max(1, strategy.microbatch * model.heads // tp)
    rows = strategy.sequence // strategy.layout.cp
    products = matrix_product_s(device, rows, strategy.sequence, model.head_size, precision, batch=batch)
    products += matrix_product_s(device, rows, model.head_size, strategy.sequence, precision, batch=batch)
    count = batch * rows * strategy.sequence
    nbytes = software.scores * (1 if _softmax_is_fused(model, strategy) else software.unfused_softmax)
    return products, elementwise_s(device, nbytes * count)


def _mixture(model: ModelShape, strategy: Strategy, software: Software, layer: int) -> tuple[float, float]:
    """Return the bytes of rows that a mixture's forward moves on one rank, and its launches."""
    experts, layout = model.experts_of(layer), strategy.layout
    if experts is None:
        return 0.0, 0.0
    rows = strategy.own_tokens * experts.per_token / (layout.tp if layout.etp == 1 else 1)
    rows *= software.rows_over_mean(layout)
    nbytes = software.rows_moved * strategy.itemsize * rows * model.hidden_size
    own = max(1, experts.count // layout.ep)
    return nbytes, software.routing_kernels + software.expert_kernels * own


def _softmax_is_fused(model: ModelShape, strategy: Strategy) -> bool:
    """Return True where Megatron's fused softmax takes the rank's (batch, head) pairs: a multiple of four."""
    return strategy.microbatch * model.heads // strategy.layout.tp % 4 == 0


@dataclass(frozen=True)
class _Exchanges:
    """Communication of one forward: exposed seconds by part; bytes and seconds by axis.

    calls   of collectives and messages in forward, and in backward
    """

    calls: tuple[int, int]
    exposed: Mapping[str, float]
    nbytes: Mapping[str, float]
    seconds: Mapping[str, float]


def _exchanges(
    model: ModelShape, cluster: Cluster, strategy: Strategy, layer: int, core_s: float, load: float
) -> _Exchanges:
    layout, calls, backward_calls = strategy.layout, 0, 0
    width = strategy.itemsize
    unit = float(width * strategy.own_tokens * model.hidden_size)
    exposed, nbytes, seconds = {}, {}, {}
    if layout.tp > 1:
        group = GroupShape.of(cluster, layout.tp, 1)
        calls += 4 if strategy.sequence_parallel and cluster.device.on_host else 2
        seconds["tp"] = exposed["tensor parallel"] = 2 * allreduce_s(group, unit)
        nbytes["tp"] = 4 * (layout.tp - 1) / layout.tp * unit
    if layout.cp > 1:
        group = GroupShape.of(cluster, layout.cp, layout.tp)
        if strategy.cp_method.startswith("ulysses"):
            calls += 4
            heads = (2 * model.heads + 2 * model.kv_heads) * model.head_size / layout.tp
            nbytes["cp"] = width * strategy.own_tokens * heads * (layout.cp - 1) / layout.cp
            seconds["cp"] = nbytes["cp"] * group.beta_s_per_byte + 4 * group.link.alpha_s
            exposed["context parallel"] = seconds["cp"]
        else:
            calls += layout.cp - 1
            backward_calls += 0 if strategy.cp_keep else layout.cp - 1  # keys once more, beside gradients
            keys = 2 * max(1, model.kv_heads / layout.tp) * model.head_size * strategy.own_tokens
            whole = width * keys * (layout.cp - 1)
            # Some rank needs all keys; on average a causal mask needs three quarters of those of others.
            nbytes["cp"] = whole * (0.75 if strategy.cp_method == "exchange" else 1)
            seconds["cp"] = whole * group.beta_s_per_byte + (layout.cp - 1) * group.link.alpha_s
            hides = strategy.cp_method != "allgather" and not cluster.device.on_host
            hidden = core_s if hides else 0.0
            exposed["context parallel"] = max(0.0, seconds["cp"] - hidden)
    experts = model.experts_of(layer)
    if experts is not None and layout.ep > 1:
        group = GroupShape.of(cluster, layout.ep, layout.etp)
        calls += 7  # counts; rows and outputs, whose collectives are compiled anew each time
        tokens = strategy.own_tokens / (layout.tp if layout.etp == 1 else 1)
        sent = width * tokens * experts.per_token * model.hidden_size * 2
        nbytes["ep"] = sent * (layout.ep - 1) / layout.ep
        seconds["ep"] = exposed["expert parallel"] = 2 * half_allreduce_s(group, load * sent / 2)
    return _Exchanges((calls, calls + backward_calls), exposed, nbytes, seconds)
