"""Bytes that training sends, by theory. Tests hold the counted bytes equal to these figures.

All figures are sums over the ranks of a communicator; S is the size of the whole array.

    collective                                 algorithm by which a communicator sends so many bytes
    data parallelism, stages of ZeRO           per optimizer step, in parameters × (N - 1) on all N ranks:
                                               stages 0 and 1: 2Φ; stage 2 (k + 1)Φ; stage 3: 3kΦ
    tensor and sequence parallelism            per layer 8bsh(t - 1)/t values on each rank
    pipeline parallelism                       bsh values per boundary between ranks and direction

sources   Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, section 7; Shoeybi et al. 2019, arXiv 1909.08053,
          section 3; Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol

from hpcpar.errors import OperationError
from hpcpar.partition import bounds
from hpcpar.planner.experts import Experts
from hpcpar.planner.shapes import ITEMSIZE, LlamaConfig, Part, Recompute, dtype_name

NORM_NBYTES = 8
"""One float64: a gradient norm."""

USAGE_DIGESTS_NBYTES = 16
"""Two digests of what wrote to parameters, beside the map of parameters with a gradient."""

NATIVE = "native"
"""MPI's own collective, whose bytes are not counted."""


class Ranks(Protocol):
    """A communicator as the formulas need it: `hpcpar.comm.Communicator`."""

    @property
    def size(self) -> int: ...

    @property
    def nodes(self) -> Sequence[int]:
        """Node of each rank."""
        ...

    def algorithm_for(
        self,
        collective: str,
        nbytes: int,
        *,
        named: str | None = None,
        dtype: str = "any",
        op: str = "sum",
        on_device: bool = False,
    ) -> str:
        """Return the algorithm that a collective of so many bytes runs by."""
        ...


Collective = Literal["allreduce", "allgather", "reduce_scatter", "broadcast"]


# --- one collective -------------------------------------------------------------------------------


def collective_nbytes(
    comm: Ranks,
    collective: Collective,
    nbytes: int,
    *,
    algorithm: str | None = None,
    dtype: str = "any",
    op: str = "sum",
    on_device: bool = False,
) -> int:
    """Count the bytes that all ranks of `comm` send in one collective of S = `nbytes` of the whole array.

    all-reduce       2(p-1)S                ring, direct, trees, hierarchical; anything on two ranks
                     m·log₂m·S + 2(p-m)S    recursive doubling, m the largest power of two up to p
                     p(p-1)S                one-shot: every rank sends its whole vector to every other
                     2(m-1)S + 2(p-m)S      Rabenseifner
                     2(p-N)S + …            leaders: as recursive doubling among N nodes
    reduce-scatter   (p-1)S                 every algorithm of ours; to equal shards
                     (p-1)S + (p-m)S/p      recursive halving: the folded ranks
    all-gather       (p-1)S
    broadcast        (p-1)S
    native           0: MPI's own messages are not counted

    nbytes      as they travel: half of a float32 array's where it is compressed
    algorithm   None = the communicator's choice for this many bytes
    dtype       element type that travels, where tables or MPI make a difference
    on_device   the array is on a GPU, for which other algorithms may be chosen
    """
    size = comm.size
    name = comm.algorithm_for(collective, nbytes, named=algorithm, dtype=dtype, op=op, on_device=on_device)
    if name == NATIVE:
        return 0
    folded = size - _power_of_two_up_to(size)
    if collective != "allreduce":
        return (size - 1) * nbytes + (folded * nbytes // size if name == "recursive_halving" else 0)
    match name:
        case "ring" | "direct" | "binomial" | "double_binary":
            return 2 * (size - 1) * nbytes
        case "hierarchical" | "hierarchical_halving" | "hierarchical_pipelined":
            return 2 * (size - 1) * nbytes
        case "recursive_doubling":
            return _doubling_vectors(size) * nbytes
        case "one_shot":
            return size * (size - 1) * nbytes
        case "rabenseifner":
            return (2 * (size - folded - 1) + 2 * folded) * nbytes
        case "leaders":
            nodes = len(set(comm.nodes))
            return (2 * (size - nodes) + _doubling_vectors(nodes)) * nbytes
    raise OperationError(f"no theory of the bytes of an allreduce by {name!r}")


def allreduce_nbytes(comm: Ranks, nbytes: int, **options: Any) -> int:
    """Count the bytes of an all-reduce; options as of `collective_nbytes`."""
    return collective_nbytes(comm, "allreduce", nbytes, **options)


def _power_of_two_up_to(size: int) -> int:
    return 1 << (size.bit_length() - 1)


def _doubling_vectors(size: int) -> int:
    """Count the vectors that all ranks send in a recursive doubling, folded ranks included."""
    members = _power_of_two_up_to(size)
    return members * (members.bit_length() - 1) + 2 * (size - members)


# --- data parallelism and ZeRO --------------------------------------------------------------------


class FlatBuffer(Protocol):
    """A bucket as the formulas need it: `hpcpar.data_parallel.buckets.Bucket`.

    kind   the element type, or a tuple that begins with it and may hold a device
    """

    @property
    def members(self) -> Sequence[int]: ...

    @property
    def kind(self) -> Hashable: ...

    @property
    def numel(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Number of times that a run reduces and gathers.

    steps       of the optimizer
    backwards   in each step: microbatches
    norms       gradient norms in each step, of one number each; stage 0 sends none
    loads       of checkpoints, in all: in stages 1 and 2 parameters are all-gathered then
    """

    steps: int = 1
    backwards: int = 1
    norms: int = 0
    loads: int = 0


def data_parallel_nbytes(
    comm: Ranks,
    buckets: Iterable[FlatBuffer],
    counts: StepCounts,
    *,
    stage: int,
    algorithm: str | None = None,
    dtype: object | None = None,
    gathered: bool = True,
    maps: bool = True,
) -> dict[str, int]:
    """Count the bytes of gradients and parameters, by collective.

        stage   gradients                         parameters
        0       all-reduced in each step
        1       reduce-scattered in each step     all-gathered in each step
        2       reduce-scattered in each backward all-gathered in each step
        3       reduce-scattered in each backward by `hpcpar.fully_shard`, not counted here

    In every stage a map of the parameters with a gradient is all-reduced once a step.

    dtype       in which gradients are reduced; None = their own
    gathered    parameters travel; False where the ranks of a node share them
    maps        False where maps are all-reduced over other ranks, too
    """
    held = list(buckets)
    if not any(bucket.members for bucket in held):
        return {}
    reduced = maps_nbytes(comm, held, algorithm if stage == 0 else None) if maps else 0
    total: Counter[str] = Counter()
    for bucket in held:
        own_dtype, on_device = dtype_of(bucket), is_on_gpu(bucket)
        travels_as = own_dtype if dtype is None else dtype_name(dtype)
        nbytes = bucket.nbytes if dtype is None else bucket.numel * ITEMSIZE[travels_as]
        sent = collective_nbytes(
            comm,
            "reduce_scatter" if stage else "allreduce",
            nbytes,
            algorithm=algorithm,
            dtype=travels_as,
            op="average",
            on_device=on_device,
        )
        if stage == 0:
            reduced += sent
            continue
        total["reduce_scatter"] += counts.steps * (1 if stage == 1 else counts.backwards) * sent
        if stage < 3 and gathered:
            shards = collective_nbytes(comm, "allgather", bucket.nbytes, dtype=own_dtype, on_device=on_device)
            total["allgather"] += (counts.steps + counts.loads) * shards
    if stage:
        reduced += counts.norms * allreduce_nbytes(comm, NORM_NBYTES, dtype="float64")
    return {"allreduce": counts.steps * reduced, **total}


def maps_nbytes(comm: Ranks, buckets: Iterable[FlatBuffer], algorithm: str | None = None) -> int:
    """Count the bytes of one all-reduce of the map of parameters with a gradient."""
    parameters = sum(len(bucket.members) for bucket in buckets)
    if not parameters:
        return 0
    map_nbytes = usage_map_nbytes(parameters)
    return allreduce_nbytes(comm, map_nbytes, algorithm=algorithm, dtype="uint8", op="or")


def replicas_nbytes(
    across: Ranks, buckets: Iterable[FlatBuffer], lengths: Iterable[int], dtype: object | None = None
) -> int:
    """Count the bytes that all r ranks with the same shard send to average it once (HSDP): 2(r-1)Φ/n values.

    lengths   elements of the shard of each bucket, of n
    dtype     in which gradients are reduced; None = their own
    """
    total = 0
    for bucket, length in zip(buckets, lengths, strict=True):
        travels_as = dtype_of(bucket) if dtype is None else dtype_name(dtype)
        nbytes = length * ITEMSIZE[travels_as]
        on_device = is_on_gpu(bucket)
        total += allreduce_nbytes(across, nbytes, dtype=travels_as, op="average", on_device=on_device)
    return total


def expected_nbytes(
    comm: Ranks,
    buckets: Iterable[FlatBuffer],
    *,
    synchronizations: int = 1,
    algorithm: str | None = None,
) -> int:
    """Count the bytes that all ranks of `comm` send to average these gradients so many times.

    Each synchronization all-reduces every bucket and the map of parameters with a gradient. Accumulated
    microbatches send nothing, so synchronizations are optimizer steps.
    """
    counts = StepCounts(steps=synchronizations)
    return data_parallel_nbytes(comm, buckets, counts, stage=0, algorithm=algorithm).get("allreduce", 0)


def broadcast_nbytes(comm: Ranks, buckets: Iterable[FlatBuffer]) -> int:
    """Count the bytes that all ranks of `comm` send to copy these buckets from one rank to all."""
    return sum(
        collective_nbytes(comm, "broadcast", each.nbytes, dtype=dtype_of(each), on_device=is_on_gpu(each))
        for each in buckets
    )


def usage_map_nbytes(parameters: int) -> int:
    """Count the bytes of a map with one bit per parameter, and of the digests beside it."""
    return math.ceil(parameters / 8) + USAGE_DIGESTS_NBYTES


def dtype_of(bucket: FlatBuffer) -> str:
    """Return the name of a bucket's element type."""
    return dtype_name(bucket.kind[0] if isinstance(bucket.kind, tuple) else bucket.kind)


def is_on_gpu(bucket: FlatBuffer) -> bool:
    """Return True where the bucket's kind names a CUDA device."""
    kind = bucket.kind
    return isinstance(kind, tuple) and any(getattr(part, "type", None) == "cuda" for part in kind)


# --- tensor and sequence parallelism --------------------------------------------------------------

Values = Literal["of the model", "largest logits", "of the loss", "expert numbers"]


class CollectiveCall(NamedTuple):
    """One collective.

    values   of the whole array
    kind     the model's type and a sum; or, of the loss and of experts' weights, at least float32, and once a
             maximum; or int64
    """

    collective: Collective
    values: int
    kind: Values = "of the model"


class RegionEdge(NamedTuple):
    """Collectives at an edge of what ranks compute differently.

    part   "attention", "feed-forward", "experts", "shared expert" or "norms"
    name   Megatron's: f and g; with sequence parallelism g and ḡ; empty for experts and norms
    """

    part: str
    name: str
    forward: list[CollectiveCall]
    backward: list[CollectiveCall]


class Microbatch(NamedTuple):
    """Size of a forward, or of a forward and its backward."""

    sequences: int
    tokens: int


class TensorParallelOptions(Protocol):
    """The tp axis as the formulas need it: `hpcpar.tensor_parallel.TensorParallel`."""

    @property
    def size(self) -> int: ...

    sequence_parallel: bool
    gather_again: bool
    chunks: int


class TensorParallelCalls:
    """Collectives of the t ranks that share a Llama's layers, for one microbatch.

    b sequences of s tokens, h hidden, L layers; unit = bsh values, ar = all-reduce, rs = reduce-scatter,
    ag = all-gather. Queries, keys and values are one gather and one sum, and so are gate and up.

                        tensor parallel              with sequence parallelism
                        forward       backward       forward            backward
      embedding         ar unit                      rs unit            ag unit
      each layer        2 ar unit     2 ar unit      2 (ag + rs unit)   2 (ag + rs unit)   again: + 2 ag unit
      norms, 2L + 1                                                     ar h each
      a mixture instead of a feed-forward; E experts, k of a token
        experts whole   ag unit       ag unit, ar Eh                      ar Eh
        experts split   ar unit       ar unit, ar bsk  ag unit, 2 ag bsk, ag unit, rs unit,
                                                       rs unit            rs bsk, ar Eh
        shared expert   as a feed-forward
      output projection               ar unit        ag unit            rs unit            again: + ag unit
      loss              ar bs, ar 2bs                ar bs, ar 2bs

    An ar sends 2(t - 1) times its values over all ranks, rs and ag (t - 1) times: a layer 8bsh(t - 1)/t
    values on each rank either way, and 10 with `gather_again`. In addition:

        full recomputation   a layer's forward once more, without dropout not the last one of a mixture
        norms of heads       with qk_norm="head": ar of both weights' gradients in each backward
        shared heads         with fewer key-value heads than ranks: ar of both weights' gradients in each
                             backward, over the ranks with the same head
    """

    def __init__(
        self,
        config: LlamaConfig,
        tp: TensorParallelOptions,
        microbatch: Microbatch,
        *,
        split_experts: bool = False,
    ) -> None:
        self._config = config
        self._tp = tp
        sequences, tokens = microbatch
        self._tokens = sequences * tokens
        unit = self._tokens * config.hidden_size
        # Each chunk of a unit is an equal range of every rank's part of the sequence.
        own = tokens // tp.size
        chunks = [
            sequences * tp.size * (stop - start) * config.hidden_size
            for start, stop in bounds(own, min(tp.chunks, own) or 1)
        ]
        if tp.sequence_parallel:
            gathers = [CollectiveCall("allgather", values) for values in chunks]
            scatters = [CollectiveCall("reduce_scatter", values) for values in chunks]
            again = [CollectiveCall("allgather", unit)] if tp.gather_again else []
            self._embedding = CollectiveCall("reduce_scatter", unit)
            self._of_embedding = [CollectiveCall("allgather", unit)]
            self._column, self._row, self._of_row = gathers, scatters, gathers
            self._norm = [CollectiveCall("allreduce", config.hidden_size)]
            self._of_column = [*again, *scatters]
        else:
            self._embedding = CollectiveCall("allreduce", unit)
            self._of_embedding = []
            self._column, self._row, self._of_row = [], [self._embedding], []
            self._of_column, self._norm = [self._embedding], []
        if config.experts is not None:
            self._mixture, self._of_mixture = self._around_experts(config.experts, unit, split=split_experts)

    def _around_experts(
        self, experts: Experts, unit: int, *, split: bool
    ) -> tuple[list[CollectiveCall], list[CollectiveCall]]:
        """List the collectives of a mixture's forward and backward, without those of a shared expert."""
        gather, scatter = CollectiveCall("allgather", unit), CollectiveCall("reduce_scatter", unit)
        whole, choices = CollectiveCall("allreduce", unit), self._tokens * experts.per_token
        router = CollectiveCall("allreduce", experts.count * self._config.hidden_size)
        if self._tp.sequence_parallel and split:
            numbers = CollectiveCall("allgather", choices, "expert numbers")
            weights = CollectiveCall("allgather", choices, "of the loss")
            of_weights = CollectiveCall("reduce_scatter", choices, "of the loss")
            return [gather, numbers, weights, scatter], [gather, scatter, of_weights, router]
        if self._tp.sequence_parallel:
            return [], [router]
        if split:
            return [whole], [whole, CollectiveCall("allreduce", choices, "of the loss")]
        return [gather], [gather, router]

    def forward(self, part: Part) -> Iterator[CollectiveCall]:
        """Yield the collectives from tokens to the loss, as far as a part goes."""
        if part.embeds:
            yield self._embedding
        for number in part.layers:
            yield from self.layer_forward(number)
        if part.heads:
            yield from self._column
            yield CollectiveCall("allreduce", self._tokens, "largest logits")
            yield CollectiveCall("allreduce", 2 * self._tokens, "of the loss")

    def backward(self, part: Part, recompute: Recompute) -> Iterator[CollectiveCall]:
        """Yield the collectives from the loss to the embedding, without those of shared heads."""
        if part.heads:
            yield from self._of_column + self._norm
        for number in part.layers:
            if recompute.of_layer(number, self._config.layers) == "full":
                yield from self.layer_again(number)
            yield from self.layer_backward(number)
        if part.embeds:
            yield from self._of_embedding

    def regions(self, number: int) -> list[RegionEdge]:
        """List the edges of a layer's parts, in the order of forward, and last the gradients of its norms."""
        experts = self._config.experts_of(number)
        of_heads = [CollectiveCall("allreduce", width) for width in self._config.query_key_norms]
        norms = RegionEdge("norms", "", [], 2 * self._norm + of_heads)
        if experts is None:
            return [*self._dense("attention"), *self._dense("feed-forward"), norms]
        shared = self._dense("shared expert") if experts.shared_ffn_size else []
        mixture = RegionEdge("experts", "", self._mixture, self._of_mixture)
        return [*self._dense("attention"), mixture, *shared, norms]

    def _dense(self, part: str) -> list[RegionEdge]:
        """List the edges of column layers and the row layer after them."""
        enter, leave = ("g", "ḡ") if self._tp.sequence_parallel else ("f", "g")
        return [
            RegionEdge(part, enter, self._column, self._of_column),
            RegionEdge(part, leave, self._row, self._of_row),
        ]

    def layer_forward(self, number: int) -> list[CollectiveCall]:
        """List the collectives of attention and of feed-forward or mixture."""
        return [call for region in self.regions(number) for call in region.forward]

    def layer_again(self, number: int) -> list[CollectiveCall]:
        """List the collectives of a recomputed layer: up to the last value that backward needs.

        A mixture ends with a collective whose result backward does not need; but dropout comes after it.
        """
        calls, experts = self.layer_forward(number), self._config.experts_of(number)
        if experts is not None and self._mixture and not self._config.dropout:
            calls.remove(self._mixture[-1])
        return calls

    def layer_backward(self, number: int) -> list[CollectiveCall]:
        """List the collectives of feed-forward or mixture, of attention, and of their norms."""
        return [call for region in reversed(self.regions(number)) for call in region.backward]

    def shared_heads_backward(self, part: Part) -> list[CollectiveCall]:
        """List the all-reduces of key and value weights over the ranks with the same head."""
        if self._config.key_value_heads >= self._tp.size:
            return []
        values = self._config.head_width * self._config.hidden_size
        return 2 * len(part.layers) * [CollectiveCall("allreduce", values)]


def tensor_parallel_calls(
    config: LlamaConfig,
    tp: TensorParallelOptions,
    *,
    trained: Iterable[Microbatch] = (),
    evaluated: Iterable[Microbatch] = (),
    recompute: Recompute | None = None,
    parts: Sequence[Part] | None = None,
    split_experts: bool = False,
) -> tuple[Counter[CollectiveCall], Counter[CollectiveCall]]:
    """Count the collectives on the tp axis, and those among its ranks that share a key-value head.

    trained     a forward and a backward of each; evaluated: a forward of each
    recompute   as the model was built with
    parts       that these ranks hold; None = the whole model
    split_experts   over these ranks (etp = tp); else each expert is whole
    """
    on_axis: Counter[CollectiveCall] = Counter()
    on_sharers: Counter[CollectiveCall] = Counter()
    if tp.size == 1:
        return on_axis, on_sharers
    again = recompute or Recompute()
    forwards = Counter(evaluated)
    backwards = Counter(trained)
    for part in [Part.whole(config.layers)] if parts is None else parts:
        for size in forwards.keys() | backwards.keys():
            of_pass = TensorParallelCalls(config, tp, size, split_experts=split_experts)
            forward, backward = Counter(of_pass.forward(part)), Counter(of_pass.backward(part, again))
            _add(on_axis, forward, forwards[size] + backwards[size])
            _add(on_axis, backward, backwards[size])
            _add(on_sharers, Counter(of_pass.shared_heads_backward(part)), backwards[size])
    return on_axis, on_sharers


def _add(total: Counter[CollectiveCall], calls: Counter[CollectiveCall], times: int) -> None:
    if times:
        for call, count in calls.items():
            total[call] += times * count


def call_dtype(call: CollectiveCall, dtype: object) -> str:
    """Return the type in which a call's values travel; `dtype` is that of the model."""
    name = dtype_name(dtype)
    if call.kind == "expert numbers":
        return "int64"
    if call.kind != "of the model" and ITEMSIZE[name] < ITEMSIZE["float32"]:
        return "float32"
    return name


def call_nbytes(call: CollectiveCall, dtype: object) -> int:
    """Return the bytes of a call's whole array; `dtype` is that of the model."""
    return call.values * ITEMSIZE.get(call_dtype(call, dtype), 8)


def calls_nbytes(
    comm: Ranks, calls: Counter[CollectiveCall], dtype: object, *, on_device: bool = False
) -> Counter[str]:
    """Count the bytes that all ranks of `comm` send for these calls, by collective.

    dtype       of parameters and activations
    on_device   activations are on GPUs
    """
    total: Counter[str] = Counter()
    for call, times in calls.items():
        name, nbytes = call_dtype(call, dtype), call_nbytes(call, dtype)
        op = "max" if call.kind == "largest logits" else "sum"
        sent = collective_nbytes(comm, call.collective, nbytes, dtype=name, op=op, on_device=on_device)
        total[call.collective] += times * sent
    return total


# --- pipeline parallelism -------------------------------------------------------------------------


def rank_boundaries(rank_of_stage: Sequence[int]) -> int:
    """Count the neighbouring stages on different ranks: rank_boundaries((0, 1, 1, 0)) == 2."""
    return sum(one != other for one, other in pairwise(rank_of_stage))


def pipeline_nbytes(
    rank_of_stage: Sequence[int], *, token_nbytes: int, trained_tokens: int, evaluated_tokens: int = 0
) -> int:
    """Count the bytes of activations and their gradients between the ranks of a pipeline.

    token_nbytes     of one token's activation between two stages: h values
    trained_tokens   that go forward and back; with sequence parallelism those on one tp rank
    """
    return rank_boundaries(rank_of_stage) * token_nbytes * (2 * trained_tokens + evaluated_tokens)
