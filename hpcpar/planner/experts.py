"""Sizes and routing of a mixture of experts. Pure integers.

Shape letters: T tokens, H hidden, E experts, k experts of a token, m ffn size of an expert, S sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from fractions import Fraction
from typing import Any, Literal, get_args

from hpcpar.errors import ConfigError, did_you_mean

Score = Literal["softmax", "sigmoid"]
"""How logits become scores: over all experts together, or each by itself."""

Drop = Literal["score", "position"]
"""Tokens that an expert keeps beyond its capacity: those with the highest weights, or the first ones."""

BalanceOver = Literal["batch", "sequence", "global"]
"""Tokens over which an expert's load is counted for the balance loss."""

CHOICES: dict[str, tuple[str, ...]] = {
    "score": get_args(Score),
    "drop": get_args(Drop),
    "balance_over": get_args(BalanceOver),
}


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of a layer's feed-forward: each token visits k of E.

    count             experts, E
    per_token         experts that each token visits, k
    ffn_size          m, the inner width of each expert's gated feed-forward
    shared_ffn_size   inner width of the shared expert, which every token visits; 0: there is none
    first_dense       layers, from the first on, with an ordinary feed-forward of the model's ffn_size
    score             "softmax" over all experts, or the "sigmoid" of each logit
    renormalise       divide the k scores of a token by their sum
    scale             factor on the weights after that
    groups            neighbouring experts form so many groups
    groups_per_token  groups that a token chooses among: those with the highest sums of two best scores
    capacity_factor   in training, an expert takes at most ⌈S·k/E · capacity_factor⌉ tokens of each sequence,
                      and the others go without it; None: it takes all of them (dropless)
    drop              which tokens then go without it: those with the lowest weights ("score"), or the last
                      ones of the sequence ("position")
    balance_loss      coefficient of the loss E/(k·T²) Σ_e count_e Σ_t p_te, which is 1 at perfect balance
    balance_over      tokens whose counts it takes: of the "batch", a microbatch of all data-parallel ranks;
                      of each "sequence"; or "global", of all microbatches of the step so far
    z_loss            coefficient of the mean squared logarithm of Σ_e exp(logit), which keeps logits small
    bias_rate         step of the biases that select experts, towards equal loads, once an optimizer step;
                      0: there are no biases
    source   Shazeer et al. 2017, arXiv 1701.06538; Fedus et al. 2021, arXiv 2101.03961 (balance loss,
             capacity); Zoph et al. 2022, arXiv 2202.08906 (z-loss); Wang et al. 2024, arXiv 2408.15664
             (biases); DeepSeek-V3, arXiv 2412.19437 (groups)
    errors   ConfigError for values that do not fit each other
    """

    count: int
    per_token: int
    ffn_size: int
    shared_ffn_size: int = 0
    first_dense: int = 0
    score: Score = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    capacity_factor: float | None = None
    drop: Drop = "score"
    balance_loss: float = 0.0
    balance_over: BalanceOver = "batch"
    z_loss: float = 0.0
    bias_rate: float = 0.0

    def __post_init__(self) -> None:
        self._check_numbers()
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"experts.{name}={getattr(self, name)!r}; there are {', '.join(known)}")
        self._check_choice()

    def _check_numbers(self) -> None:
        for name in ("count", "per_token", "ffn_size", "groups", "groups_per_token"):
            _require_whole(name, getattr(self, name), 1)
        for name in ("shared_ffn_size", "first_dense"):
            _require_whole(name, getattr(self, name), 0)
        for name in ("balance_loss", "z_loss", "bias_rate"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"experts.{name}={getattr(self, name)!r}; give 0, for none, or more")
        if not 0 < self.scale < float("inf"):
            raise ConfigError(f"experts.scale={self.scale!r}; give a factor above 0")
        factor = self.capacity_factor
        if factor is not None and not 0 < factor < float("inf"):
            effect = "is no number of tokens" if factor > 0 else "would drop every token"
            raise ConfigError(
                f"experts.capacity_factor={factor!r} {effect}; give a factor above 0 (1 is room for equal "
                "loads), or leave it out to drop none"
            )

    def _check_choice(self) -> None:
        if self.per_token > self.count:
            raise ConfigError(
                f"experts.per_token={self.per_token}, but there are experts.count={self.count}; choose "
                f"{self.count} or fewer"
            )
        if self.per_token == 1 and self.renormalise:
            raise ConfigError(
                "experts.per_token=1 with experts.renormalise=True: a token's one weight would be 1, "
                "whatever its score, and teach the router nothing; set renormalise=False"
            )
        if self.count % self.groups:
            near = [groups for groups in range(1, self.count // 2 + 1) if not self.count % groups]
            raise ConfigError(
                f"experts.count={self.count} does not divide into experts.groups={self.groups}; choose "
                f"{' or '.join(map(str, near))}"
            )
        if self.groups > 1 and self.per_group < 2:
            raise ConfigError(
                f"experts.groups={self.groups} of {self.per_group} expert: a group's score is the sum of its "
                f"two best; choose at most {self.count // 2} groups, or 1 for none"
            )
        if self.groups_per_token > self.groups:
            raise ConfigError(
                f"experts.groups_per_token={self.groups_per_token}, but there are "
                f"experts.groups={self.groups}; choose {self.groups} or fewer"
            )
        reachable = self.groups_per_token * self.per_group
        if self.per_token > reachable:
            needed = -(-self.per_token // self.per_group)
            raise ConfigError(
                f"experts.per_token={self.per_token}, but the experts.groups_per_token="
                f"{self.groups_per_token} groups that a token chooses have {reachable} experts; set "
                f"groups_per_token={needed} or more, or per_token={reachable} or fewer"
            )

    @property
    def per_group(self) -> int:
        """Experts in each group."""
        return self.count // self.groups

    def capacity(self, sequence: int) -> int | None:
        """Return the most tokens that an expert takes of a sequence of so many; None: all."""
        if self.capacity_factor is None:
            return None
        # The factor as the decimal that was written: 1.1 · 10 is 11, and not a little more.
        factor = Fraction(repr(self.capacity_factor))
        return math.ceil(Fraction(sequence * self.per_token, self.count) * factor)

    def parameters(self, hidden: int, *, active: bool = False) -> int:
        """Count a layer's parameters: E·H + 3·H·(E·m + shared width); `active`: that a token meets, k for E.

        The router counts in full, since each token is multiplied by all of it.
        """
        experts = self.per_token if active else self.count
        return self.count * hidden + 3 * hidden * (experts * self.ffn_size + self.shared_ffn_size)

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter of one layer's mixture, by its name in the layer's `mlp`."""
        table: dict[str, tuple[int, ...]] = {"gate.weight": (self.count, hidden)}
        for expert in range(self.count):
            table |= feed_forward_shapes(hidden, self.ffn_size, f"experts.{expert}.")
        if self.shared_ffn_size:
            table |= feed_forward_shapes(hidden, self.shared_ffn_size, "shared_experts.")
        return table

    @classmethod
    def of(cls, given: Mapping[str, Any], before: Experts | None = None) -> Experts:
        """Return `before` with the given fields changed, or a mixture of these fields.

        errors   ConfigError for a field that there is none of, or that is missing
        """
        known = [field.name for field in fields(cls)]
        for key in given:
            if key not in known:
                hint = did_you_mean(key, known)
                raise ConfigError(f"experts have no field {key!r}; {hint}there are {', '.join(known)}")
        if before is not None:
            return replace(before, **given)
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in given]
        if missing:
            raise ConfigError(
                f"experts need {', '.join(missing)}, too: the model has no mixture whose sizes to change; "
                "set them, or take a preset with experts"
            )
        return cls(**given)


def feed_forward_shapes(hidden: int, ffn_size: int, prefix: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a gated feed-forward's three matrices."""
    return {
        f"{prefix}gate_proj.weight": (ffn_size, hidden),
        f"{prefix}up_proj.weight": (ffn_size, hidden),
        f"{prefix}down_proj.weight": (hidden, ffn_size),
    }


def _require_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"experts.{name}={value!r}; give a whole number of at least {least}")
