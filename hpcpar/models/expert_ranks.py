"""Ranks that divide a model's experts, and the layers that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional

from hpcpar.context_parallel import ContextParallel
from hpcpar.errors import LayoutError
from hpcpar.expert_parallel import ExpertParallel
from hpcpar.models.balancing import Balancing
from hpcpar.models.expert_tokens import ExpertTokens
from hpcpar.models.layers import Linear
from hpcpar.planner.shapes import LlamaConfig
from hpcpar.tensor_parallel import ColumnParallelLinear, RowParallelLinear, TensorParallel
from hpcpar.tensor_parallel.split import require_divisible

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


@dataclass(frozen=True, eq=False)
class ExpertRanks:
    """Ranks that divide a model's experts among themselves.

    parallel    divides the experts: ExpertParallel(mesh.ep, count); None: each has all of them
    split       each expert is split over the ranks of tp, as the other layers are (etp = tp); False: each is
                whole on a rank (etp = 1), and `parallel` may spread them over tp as well
    replicas    ranks with copies of this rank's experts (mesh.edp); None: the optimizer's, as where ep = 1
    replica     this rank's place among those with other sequences (its dp coordinate), by which tokens are
                ordered
    balancing   of the model; None: a new one, for ranks without others that have other sequences (dp = 1)
    """

    parallel: ExpertParallel | None = None
    split: bool = False
    replicas: Communicator | None = None
    replica: int = 0
    balancing: Balancing | None = None


def expert_layers(
    config: LlamaConfig, tp: TensorParallel, context: ContextParallel | None, experts: ExpertRanks
) -> dict[str, Any]:
    """Return the fields of `Layers` that are about experts."""
    split = experts.split and tp.size > 1
    tokens = ExpertTokens(tp, split, context, experts.replica)
    column = partial(ColumnParallelLinear, tp=tp, bias=False, enter=False, draw=False)
    return {
        "experts": experts.parallel,
        "expert_replicas": experts.replicas,
        "expert_column_linear": column if split else Linear,
        "expert_row_linear": partial(_PartialRowLinear, tp=tp) if split else Linear,
        "expert_tokens": tokens,
        "balancing": experts.balancing or _balancing_within(config, tokens),
    }


def _balancing_within(config: LlamaConfig, tokens: ExpertTokens) -> Balancing | None:
    """Return what balances experts over the ranks that share sequences."""
    if config.experts is None:
        return None
    comms = [tokens.tp.comm] if tokens.tp is not None and tokens.are_shared_out else []
    if tokens.context is not None and tokens.context.comm.size > 1:
        comms.append(tokens.context.comm)
    if len(comms) > 1:
        raise LayoutError(
            "tp and cp both divide the tokens of a sequence, and loads are counted over both; give "
            "ExpertRanks(balancing=Balancing(experts, mesh.comm('dp', 'cp', 'tp'), mesh.comm('cp', 'tp')))"
        )
    return Balancing(config.experts, *comms, *comms)


class _PartialRowLinear(RowParallelLinear):
    """A row-parallel layer whose caller sums the outputs over ranks."""

    def __init__(self, in_features: int, out_features: int, tp: TensorParallel) -> None:
        super().__init__(in_features, out_features, tp, bias=False, draw=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


def require_feed_forward(config: LlamaConfig, tp: int, ranks: ExpertRanks) -> None:
    """Raise LayoutError where the feed-forwards do not divide among `tp` ranks."""
    experts = config.experts
    if experts is None or experts.first_dense:
        require_divisible(config.ffn_width, tp, "ffn_size")
    if experts is None:
        return
    if experts.shared_ffn_size:
        require_divisible(experts.shared_ffn_size, tp, "experts.shared_ffn_size")
    if ranks.split:
        require_divisible(experts.ffn_size, tp, "experts.ffn_size")
    is_divided = ranks.parallel is not None and ranks.parallel.comm.size > 1
    if ranks.replicas is None and (is_divided or (tp > 1 and not ranks.split)):
        raise LayoutError(
            "ExpertRanks without replicas: the ranks with copies of an expert are not those of the optimizer "
            f"here where {'experts are divided' if is_divided else f'each of tp={tp} ranks has whole ones'}; "
            "give them, as replicas=mesh.edp"
        )
