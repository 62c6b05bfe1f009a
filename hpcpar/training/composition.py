"""Rules of composition: which features of a run cannot be together, why, and the nearest that can.

`require_composition(config, layout)` is called on every rank before anything starts. docs/composition.md and
the pairwise tests are made from these rules.
"""

from __future__ import annotations

from collections.abc import Callable

from hpcpar.errors import ConfigError
from hpcpar.planner.layout import Layout
from hpcpar.planner.rules import SPLIT_BACKWARD
from hpcpar.training.config import Config

Rule = Callable[[Config, Layout], str | None]
"""(configuration, degrees of its mesh) -> reason of a refusal, with what works instead; None: it works."""


def require_composition(config: Config, layout: Layout) -> None:
    """Raise ConfigError for a configuration that cannot run with these degrees."""
    reason = refusal(config, layout)
    if reason is not None:
        raise ConfigError(reason)


def refusal(config: Config, layout: Layout) -> str | None:
    """Return the first rule's reason against a configuration; None if it can run."""
    return next((reason for rule in RULES if (reason := rule(config, layout)) is not None), None)


# --- rules --------------------------------------------------------------------------------------------


def _recompute_layers(config: Config, layout: Layout) -> str | None:
    if config.train.recompute_layers is None or config.train.recompute != "none":
        return None
    return (
        f"train.recompute_layers = {config.train.recompute_layers}, but train.recompute = 'none'; set "
        "train.recompute=selective or full, too, or leave it out"
    )


def _equal_parts_of_sequences(config: Config, layout: Layout) -> str | None:
    sequence, tp = config.train.sequence, layout.tp
    if not config.tensor_parallel.sequence_parallel or not sequence % tp:
        return None
    below = sequence // tp * tp
    near = f"{below} or {below + tp}" if below else f"{tp}"
    return (
        f"train.sequence = {sequence} does not divide among mesh.tp = {tp} ranks, which are to have "
        f"equal parts of it; make it {near}, or set tensor_parallel.sequence_parallel=false"
    )


def _an_expert_on_each_rank(config: Config, layout: Layout) -> str | None:
    experts, ep = config.model_config_for(1).experts, layout.ep
    if ep == 1 or (experts is not None and ep <= experts.count):
        return None
    if experts is None:
        return (
            f"mesh.ep = {ep}, but the model has no experts to divide; take a preset with experts, set "
            "model.experts.count, per_token and ffn_size, or leave mesh.ep out"
        )
    return (
        f"mesh.ep = {ep} ranks are to divide model.experts.count = {experts.count} experts, and each is "
        f"to have one; take at most mesh.ep = {experts.count}, or more experts"
    )


def _sets_of_shards(config: Config, layout: Layout) -> str | None:
    if layout.dp_shard is None:
        return None
    if config.optimizer.zero_stage == 0:
        return (
            f"mesh.dp_shard = {layout.dp_shard} with optimizer.zero_stage = 0: nothing is sharded; set "
            "optimizer.zero_stage=1, 2 or 3, or leave mesh.dp_shard out"
        )
    if config.optimizer.shared_parameters:
        return (
            f"mesh.dp_shard = {layout.dp_shard} with optimizer.shared_parameters: a node has its parameters "
            "once as it is; leave one of them out"
        )
    return None


def _shared_experts(config: Config, layout: Layout) -> str | None:
    if not config.optimizer.shared_parameters or config.model_config_for(1).experts is None:
        return None
    if layout.ep == 1 and layout.etp == layout.tp:
        return None
    return (
        f"optimizer.shared_parameters with mesh.ep = {layout.ep}: ranks of a node hold different experts and "
        "cannot share their memory; leave it out, or take mesh.ep=1"
    )


def _stages_to_balance(config: Config, layout: Layout) -> str | None:
    if layout.pp > 1 or config.pipeline.balance == "flops":
        return None
    return (
        f"pipeline.balance = {config.pipeline.balance!r}, but with mesh.pp = 1 there are no stages to "
        "balance; leave it out, or raise mesh.pp"
    )


def _zero_in_a_pipeline(config: Config, layout: Layout) -> str | None:
    if layout.pp == 1 or config.pipeline.schedule not in SPLIT_BACKWARD:
        return None
    return split_backward(config)


def split_backward(config: Config) -> str | None:
    """Return why stages 2 and 3 of ZeRO refuse a schedule that splits the backward; None for the others."""
    if config.optimizer.zero_stage < 2:
        return None
    return (
        f"optimizer.zero_stage = {config.optimizer.zero_stage} with pipeline.schedule = "
        f"{config.pipeline.schedule!r}: every backward sends its gradients, and this schedule "
        "has two for each microbatch; use zero_stage=1, whose traffic does not grow with them, or a "
        "schedule that does not split the backward, such as 1f1b"
    )


def _whole_microbatches(config: Config, layout: Layout) -> str | None:
    batch, microbatch, dp = config.train.global_batch, config.train.microbatch, layout.dp
    if layout.pp == 1 or not batch % (dp * microbatch):
        return None
    whole = max(1, batch // (dp * microbatch)) * dp * microbatch
    return (
        f"train.global_batch = {batch} is not divided by mesh.dp x train.microbatch = {dp} x "
        f"{microbatch}, and a pipeline needs microbatches of one size; make it {whole} or "
        f"{whole + dp * microbatch}, or change train.microbatch"
    )


RULES: tuple[Rule, ...] = (
    _recompute_layers,
    _equal_parts_of_sequences,
    _an_expert_on_each_rank,
    _sets_of_shards,
    _shared_experts,
    _stages_to_balance,
    _zero_in_a_pipeline,
    _whole_microbatches,
)


def require_heads_to_exchange(config: Config, tp: int, cp: int, exchanging: int) -> None:
    """Raise ConfigError unless each tp rank's heads divide among the ranks that exchange them (Ulysses).

    Not a rule of `RULES`: without context_parallel.inner the number depends on the nodes.
    """
    heads = config.model_config_for(1).heads
    own, rest = divmod(heads, tp)
    if rest or not own % exchanging:  # heads that do not divide among tp ranks are refused where these are
        return
    method, unit = config.context_parallel.method, tp * exchanging
    if "+" in method:
        change = "context_parallel.inner"
        fitting = [degree for degree in range(1, cp) if not own % degree and not cp % degree]
    else:
        change, fitting = "mesh.cp", [degree for degree in range(1, own + 1) if not own % degree]
    each = f", of which each of mesh.tp = {tp} ranks has {own}," if tp > 1 else ""
    below = heads // unit * unit
    raise ConfigError(
        f"model.heads = {heads}{each} do not divide among {exchanging} ranks that exchange heads "
        f"(context_parallel.method = {method!r}); make it {f'{below} or ' if below else ''}{below + unit}, "
        f"set {change} to {' or '.join(map(str, fitting))}, or take the method 'exchange'"
    )
