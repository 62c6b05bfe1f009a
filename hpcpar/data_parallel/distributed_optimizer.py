"""DistributedOptimizer: any torch optimizer, stepping on gradients averaged over all replicas.

builder.py             makes its parts, one function per ZeRO stage
average_gradients.py   what is read, clipped and stepped on
state_dict.py          states, whole or by this rank's pieces
nonfinite.py           whether a step is taken, by whether all gradients are finite
compare_replicas.py    whether replicas hold the same bits
step_traffic.py        bytes sent, in theory
guards.py              what is refused, and why
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcpar.autograd.fused_layers import adding_in_place
from hpcpar.autograd.held_parameter import holder_of, own_gradient, set_holder, set_own_gradient
from hpcpar.autograd.scripted import refuse_scripted
from hpcpar.autograd.torch_clipping import install, note_split_over
from hpcpar.data_parallel import guards
from hpcpar.data_parallel.average_gradients import AverageGradients
from hpcpar.data_parallel.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES
from hpcpar.data_parallel.builder import Builder, OptimizerOptions
from hpcpar.data_parallel.combined_optimizer import has_muon
from hpcpar.data_parallel.compare_replicas import replicated, require_same
from hpcpar.data_parallel.flat_parameters import Block
from hpcpar.data_parallel.gradient_reducer import GradientReducer
from hpcpar.data_parallel.held_gradient import HeldGradient
from hpcpar.data_parallel.matrix_step import is_divided, matrices_of
from hpcpar.data_parallel.nonfinite import NonfiniteCheck, NonfiniteGradients
from hpcpar.data_parallel.parameter_allgather import wait_for_new
from hpcpar.data_parallel.parameters import Named, OwnPiece, distinct
from hpcpar.data_parallel.precision import LossScaler, Precision
from hpcpar.data_parallel.reducer import ADVICE, Reducer
from hpcpar.data_parallel.reduction import Averaging, Reduction
from hpcpar.data_parallel.replica_comms import ReplicaComms
from hpcpar.data_parallel.replicas import refuse_renormalized
from hpcpar.data_parallel.running_statistics import warn_of_local_batches
from hpcpar.data_parallel.sharded_step import ShardedStep, State
from hpcpar.data_parallel.shared_parameters import NodeSharedParameters
from hpcpar.data_parallel.staging import STAGING_BUCKET_BYTES
from hpcpar.data_parallel.state_dict import OptimizerStates
from hpcpar.data_parallel.step_traffic import step_traffic
from hpcpar.data_parallel.zero3 import FullyShardedState, sharding_of
from hpcpar.errors import DivergenceError, OffloadError, OperationError
from hpcpar.planner.traffic import StepCounts
from hpcpar.uncompiled import uncompiled

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

SplitOver = Mapping[str, Sequence["Communicator"]]


class DistributedOptimizer(Optimizer):
    """Step a torch optimizer on the average gradient of `dp_comm`'s ranks.

        optimizer = DistributedOptimizer(AdamW(model.parameters()), model.named_parameters(), mesh.dp)
        with optimizer.no_sync():               # all microbatches but the last
            loss(microbatch).backward()
        loss(last_microbatch).backward()        # averages travel while this runs
        optimizer.clip_grad_norm_(1.0)          # waits for them
        optimizer.step()
        optimizer.zero_grad()

    Memory of each rank, and traffic for k microbatches, of a model of Φ parameters on p ranks:

        zero_stage   parameters   gradients   optimizer state   traffic / ((p - 1)/p)
        0            all          all         all               2Φ
        1            all          all         its shard         2Φ
        2            all          its shard   its shard         (k + 1)Φ
        3            its shard    its shard   its shard         3kΦ, by `hpcpar.fully_shard(model, …)` before

    The optimizer is held, not copied: its groups are this one's, so learning-rate schedulers see no
    difference. From stage 1 on, and with precision or offload, it steps on flat pieces of parameters, and
    must treat each element by itself, or be torch's Muon, alone or with others in a `CombinedOptimizer`: see
    below. Only those of `named_parameters` that the optimizer holds are averaged.
    All ranks must start with the same parameters (`broadcast_parameters`).

    An average of means is the mean if every mean is over equally many samples: then divide the loss of each
    of k microbatches by k. Otherwise, as with ignored tokens, take sums, and `loss_factor`.

    Muon orthogonalizes whole matrices. In stages 1 and 2 each has one owner, to which its gradient goes and
    from which its weight comes, with the same bytes as above; a bucket of fewer matrices than ranks takes as
    long as one of them on every rank. In stage 3, and where a matrix is split over tensor-parallel ranks, its
    update (bfloat16) goes to one rank and back, one matrix under way while another is worked on.

    zero_stage         0 to 3; None: 3 for a model that is fully sharded, else 0
    precision          "bfloat16", "float16" or a `Precision`: parameters and gradients of that type, and
                       float32 master weights and optimizer state; buffers stay as they are
    offload            "cpu": master weights, state and the step are in host memory; a directory: in files
                       there. None: where the parameters are
    shared_parameters  stages 1 and 2, on CPUs: all ranks of a node share one copy of the parameters
    model              its linear layers and embeddings write gradients straight into the buckets
                       (`hpcpar.autograd.fused_layers`). None: gradients are copied there
    overlap_allgather  stages 1 and 2 with `model`: `step` returns while the new parameters are under way,
                       and the model's modules wait for theirs when they are next called. Whoever reads
                       parameters in another way (a moving average, a norm, p.data) must call
                       `wait_for_parameters` first; `model.state_dict()` and hpcpar.checkpoint do
    nonfinite          what `step` does on all ranks if an average gradient on any of them is NaN or infinite:
                       "error": DivergenceError, before anything is changed; "skip": no step, a line in
                       the log, and `last_skip` says which ranks brought it; "step": take it unseen, as
                       torch does. Scaled losses: "skip"
    skip_limit         so many skipped steps in a row are a DivergenceError; not counted are those after
                       which a dynamic loss scale was halved
    backward_passes_per_step   backwards outside `no_sync` whose sum is averaged; the last of them sends. In
                       stages 2 and 3 each of them sends
    bucket_bytes       bytes of gradients that travel together; None: 25 MiB, or 4 in stage 2, which keeps
                       memory for two buckets
    split_over         by name, communicators over whose ranks parameters of your own layers are split.
                       Tensor-parallel layers, `parallelize` and `Pipeline` note theirs. The norm is of all
                       parts, and if one rank has an overflow, all of these ranks skip the step
    elementwise        True: your word that an optimizer which hpcpar does not know treats each element
                       by itself; needed only for steps on pieces, and not for torch's own optimizers
    tied               names of parameters that ranks outside `dp_comm` have copies of, and whether this
                       rank's copy counts in the norm. Their gradients are averaged last, when `synchronize`
                       is called, so that they can be summed over the copies before
    shard_ranks        stages 1 and 2: neighbours of `dp_comm` over which gradients are reduce-scattered and
                       parameters gathered, as those of a node; shards are averaged over the other groups
                       once a step (HSDP). None: all ranks. In stage 3 give it to `fully_shard`

    Gradients travel on a communicator of their own, so ranks may run the backwards of several models in
    different orders, or not at all. Each optimizer's calls must come in the same order on all ranks, and in
    stage 3 all forwards and backwards, too.

    `.grad` behaves as in one process after a backward: reading it waits for the average, and setting it to
    None, as model.zero_grad() does, forgets it. In stage 0 it is the average itself. From stage 1 on, and
    with precision or offload, each rank has a shard: elementwise operations in place reach the shards, and
    reading values is an error. torch.nn.utils' clip_grad_norm_ and clip_grad_value_ clip by the norm and the
    values of the whole; torch.amp.GradScaler works in stage 0 only: `precision="float16"` scales by itself.

    Making one is collective. Raises OperationError for parameters without a name or with the same
    name, and for an optimizer that may need whole tensors; MismatchError (on every rank) when ranks hold
    different parameters; OffloadError, SharedMemoryError.
    source   Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, sections 5 and 7
    """

    _advice = ADVICE

    # Deliberately without super().__init__(): every attribute of an Optimizer is the inner one's.
    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[Named],
        dp_comm: Communicator | None = None,
        *,
        zero_stage: int | None = None,
        precision: Precision | str | torch.dtype | None = None,
        offload: str | Path | None = None,
        shared_parameters: bool = False,
        model: nn.Module | None = None,
        overlap_allgather: bool = False,
        nonfinite: str = "error",
        skip_limit: int = 10,
        backward_passes_per_step: int = 1,
        split_over: SplitOver | None = None,
        tied: Mapping[str, bool] | None = None,
        elementwise: bool = False,
        bucket_bytes: int | None = None,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        algorithm: str | None = None,
        shard_ranks: int | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, DistributedOptimizer):
            raise OperationError(
                f"DistributedOptimizer was given a {type(optimizer).__name__} where a torch.optim.Optimizer "
                "is needed; pass for example torch.optim.AdamW(model.parameters())"
            )
        if dp_comm is None:
            raise OperationError(
                "DistributedOptimizer was given no communicator, and there is no global one: pass "
                "hpcpar.init() or another one of the ranks whose gradients are averaged, as in "
                "DistributedOptimizer(optimizer, model.named_parameters(), hpcpar.init()). Horovod's, which "
                "takes none, is in hpcpar.horovod.torch"
            )
        self.inner = optimizer
        self.dp_comm = dp_comm
        self._named = distinct(named_parameters)
        self._sharding = sharding_of([parameter for _, parameter in self._named])
        self.zero_stage = guards.checked_stage(zero_stage, self._sharding)
        if bucket_bytes is None:
            bucket_bytes = BUCKET_BYTES if self.zero_stage < 2 else STAGING_BUCKET_BYTES
        self.precision = Precision.of(precision) if self._sharding is None else self._sharding.precision
        self.backward_passes_per_step = guards.checked_passes(backward_passes_per_step)
        self._note_split_over(split_over or {})
        self.scaler = LossScaler(None if self.precision is None else self.precision.loss_scale)
        self._options = OptimizerOptions(
            zero_stage=self.zero_stage,
            precision=self.precision,
            offload=offload,
            shared_parameters=shared_parameters,
            model=model,
            overlap_allgather=overlap_allgather,
            nonfinite=nonfinite,
            skip_limit=skip_limit,
            tied=dict(tied or {}),
            elementwise=elementwise,
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=min(first_bucket_bytes, bucket_bytes),
            algorithm=algorithm,
            shard_ranks=shard_ranks,
        )
        self._note_matrices()
        guards.refuse_contradictions(self._options, precision, self._sharding, optimizer)
        self._rivals: list[weakref.ref[DistributedOptimizer]] = []
        self._in_place = ExitStack()
        if model is not None:
            refuse_scripted(model, "leave model= out")
        if model is not None and dp_comm.size > 1:
            refuse_renormalized(model)
            warn_of_local_batches(model, dp_comm)
        install()
        wait_for_new(parameter for _, parameter in self._named)
        self._build()

    def _note_matrices(self) -> None:
        """Note which parameters Muon steps on; OperationError where one is split in an unknown way."""
        matrices = matrices_of(self.inner)
        guards.refuse_unknown_splits(pair for pair in self._named if id(pair[1]) in matrices)
        # Of every stage of a pipeline alike: one of them may have no matrix.
        splits = has_muon(self.inner) and any(is_divided(parameter) for _, parameter in self._named)
        self._options = replace(self._options, matrices=matrices, splits_matrices=splits)

    def _build(self) -> None:
        builder = Builder(
            self.inner, self._named, self.dp_comm, self._options, self._sharding, self._reduction
        )
        self._is_closed = False
        model = self._options.model
        self._in_place.enter_context(adding_in_place([] if model is None else [model]))
        self._parts = builder.build(
            passes=self.backward_passes_per_step,
            advice=self._advice,
            on_loaded=self.take_parameters,
        )
        self.reducer.compare_options(self.inner)
        self._claim()
        self._averages = AverageGradients(self._parts, self.scaler, self.zero_stage)
        self._nonfinite = NonfiniteCheck(
            self._named, self._parts, self._averages, self.scaler, self._options, self.dp_comm
        )
        self._versions = self._versions_now()

    def _reduction(self, averaging: Averaging) -> Reduction:
        """Return how buckets are reduced; a subclass may wait for something first."""
        return averaging

    def __getattr__(self, name: str) -> Any:
        # Step and state-dict hooks, defaults and whatever a particular optimizer adds live in it.
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __reduce__(self) -> Any:
        raise OperationError(
            "a DistributedOptimizer was to be copied or saved as a whole, as by copy.deepcopy(optimizer) or "
            "torch.save(optimizer); save its state_dict(), and load that into one that is made anew"
        )

    def __repr__(self) -> str:
        stage = f", ZeRO-{self.zero_stage}" if self.zero_stage else ""
        return f"DistributedOptimizer over {self.dp_comm.size} ranks{stage} of {self.inner!r}"

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Fused optimizers unscale gradients themselves, but GradScaler would tell this one, not them.

        GradScaler.step asks just before it writes to the gradients, which are to be averages by then. Where
        steps are on pieces there are none for it: OperationError.
        """
        if self.update is not None:
            raise OperationError(
                "a torch.amp.GradScaler was to step an optimizer that shows it no gradients to unscale, as "
                "with zero_stage from 1 on, precision or offload; leave it out and use precision='float16', "
                "optimizer.scale_loss(loss).backward() and optimizer.step(), which scale by themselves"
            )
        self.synchronize()
        return False

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def reducer(self) -> GradientReducer:
        """Averages gradients: buckets, flat memory, and whether they are averages already."""
        return self._parts.reducer

    @property
    def update(self) -> ShardedStep | None:
        """Steps on the blocks; None where the optimizer steps on whole parameters."""
        return self._parts.update

    @property
    def blocks(self) -> Sequence[Block]:
        """Flat parameters that a step works on; none where the optimizer steps on whole parameters."""
        return self._parts.blocks

    @property
    def replica_comms(self) -> ReplicaComms:
        """Ranks with copies of each parameter: those of `dp_comm`, and of experts others."""
        return self._parts.comms

    @property
    def sharding(self) -> FullyShardedState | None:
        """State of a fully sharded model; None in stages 0 to 2."""
        return self._sharding

    @property
    def node_shared(self) -> NodeSharedParameters | None:
        """Memory of parameters that all ranks of a node share; None: each rank has its own."""
        return self._parts.node_shared if self._sharding is None else self._sharding.node_shared

    @property
    def averages(self) -> list[Tensor]:
        """This rank's memory of averages; in stages 0 and 1 perhaps copies, of another type."""
        return self._averages.allocated

    # --- gradients --------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate only: for the backwards of all microbatches but the last.

        In stages 0 and 1 nothing is sent meanwhile. In 2 and 3 every backward sends, as no rank has memory
        for whole gradients.
        """
        return self.reducer.no_sync()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Average the sum of so many backwards from now on; they are counted from zero again."""
        self.backward_passes_per_step = guards.checked_passes(passes)
        if isinstance(self.reducer, Reducer):
            self.reducer.passes = passes
            self.reducer.recount()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale that keeps float16 gradients from underflow, for backward()."""
        return loss if self.scaler.scale == 1.0 else loss * self.scaler.scale

    @uncompiled
    def loss_factor(self, count: float | Tensor) -> float:
        """Return the factor that turns sums of losses into the mean over all ranks and microbatches.

            factor = optimizer.loss_factor((labels != -100).sum())    # in all microbatches until the step
            for inputs, targets in microbatches:
                total = cross_entropy(model(inputs), targets, ignore_index=-100, reduction="sum")
                optimizer.scale_loss(total * factor).backward()

        count    tokens, samples or weights that this rank will sum over until the step; may be 0
        returns  ranks over the count of all of them, the same on every rank; 0 where there is nothing
        errors   OperationError on every rank for a count below 0 or none that is finite on some rank
        collective
        """
        counts = self.dp_comm.allgather(torch.tensor([float(count)], dtype=torch.float64)).reshape(-1)
        if not (counts.isfinite() & (counts >= 0)).all():
            raise OperationError(
                f"loss_factor() was given counts {counts.tolist()}, by rank; give how many tokens or samples "
                "each rank sums its losses over until the step, 0 or more"
            )
        total = counts.sum().item()
        return self.dp_comm.size / total if total else 0.0

    @uncompiled
    def synchronize(self) -> None:
        """Wait until every gradient is the average over all ranks; other methods call it where needed."""
        reducer = self.reducer
        if reducer.synchronized:
            return
        self._refuse_rivals()
        guards.refuse_untold_copies(reducer, self._options.tied)
        if self.update is not None:
            frozen = self._parts.held - self._parts.number_of.keys()
            guards.refuse_thawed(pair for pair in self._named if id(pair[1]) in frozen)
        reducer.synchronize()
        self._averages.arrived()

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as model.zero_grad() does; averages still under way are awaited first.

        set_to_none=True    the next backward's gradients are copied into the buckets as they come
        set_to_none=False   the buckets are filled with zeros and the next backward adds to them; parameters
                            that had a gradient are stepped on though it brings them none, as in torch
        """
        self._averages.zero(set_to_none=set_to_none)

    @uncompiled
    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """Return what `.grad` shows once a backward has sent it: the average, or a HeldGradient.

        Waits for averages; OperationError in a backward, where there is none yet.
        """
        number = self._parts.number_of[id(parameter)]
        if self._averages.is_in_backward(number):
            return own_gradient(parameter)
        if self.reducer.round_open:
            self.synchronize()
        return self._averages.shown(parameter, number)

    @uncompiled
    def set_gradient_of(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Take what a parameter's `.grad` is set to once a backward has sent it; None: forget it.

        Waits for averages; OperationError in a backward, and where this rank has a shard and would be given a
        whole.
        """
        number = self._parts.number_of[id(parameter)]
        if self._averages.is_in_backward(number):
            set_own_gradient(parameter, gradient)
            return
        if type(gradient) is HeldGradient and gradient.parameter is parameter:
            return  # p.grad *= 0.5 sets what it has changed
        if self.reducer.round_open:
            self.synchronize()
        self._averages.replace(parameter, number, gradient)

    @torch.no_grad()
    def named_gradients(self) -> Iterator[tuple[str, slice, Tensor]]:
        """Yield (name, elements, their average gradient) of what this rank will step on; may be written to.

        Elements are counted in the order in which a parameter lies in memory, and the gradient is flat.
        A scaled loss's gradients are scaled; clipped ones are clipped. Waits for averages.
        """
        self.synchronize()
        yield from self._averages.named()

    @uncompiled
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale all gradients so that their common norm is at most `max_norm`; returns the norm before.

        The norm is that of the whole average gradient: each rank adds that of its shards. Waits for
        averages; every rank finds the same bits. As torch.nn.utils.clip_grad_norm_.
        """
        self.synchronize()
        return self._averages.clip_norm(max_norm, norm_type, error_if_nonfinite)

    @uncompiled
    def clip_grad_value_(self, clip_value: float) -> None:
        """Bring every element of the average gradient to between -clip_value and clip_value."""
        self.synchronize()
        self._averages.clip_value(clip_value)

    @uncompiled
    def gradients_are_finite(self) -> bool:
        """Return whether the average gradients hold neither NaN nor infinity on any rank; all ranks agree."""
        self.synchronize()
        return self._averages.are_finite()

    # --- steps ------------------------------------------------------------------------------------

    @property
    def last_skip(self) -> NonfiniteGradients | None:
        """Why the last `step` was skipped; None: it was taken."""
        return self._nonfinite.found

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of the inner optimizer on averaged gradients; collective.

        closure   computes the loss with its backward, perhaps several times (LBFGS); the average loss
                  over all ranks is returned to the inner optimizer, so that all take the same path

        Gradients that are not finite on some rank: as `nonfinite` says, the same on all ranks. Skipped steps
        are counted in `scaler.skipped`.
        errors    DivergenceError on every rank, with nothing changed; OffloadError on every rank when one of
                  them cannot keep its state
        """
        if self.update is not None:
            outcome = None if closure is None else self._averaged(closure)
            self.synchronize()
            self._step_on_shards(self.update)
            self.reducer.used_up = any(self.reducer.used)
        elif closure is None:
            self.synchronize()
            outcome = None if self._nonfinite.skips_step() else self.inner.step()
        else:
            outcome = self._step_by(closure)
        self.reducer.next_step()
        return outcome

    def _step_by(self, closure: Callable[[], Any]) -> Any:
        """Let the inner optimizer call the closure; end its step where it may and is to be skipped."""
        versions, skipped = self._versions_now(), []

        def averaged() -> Any:
            loss = self._averaged(closure)
            # Once parameters have changed, as by a line search, the inner optimizer must go on.
            if self._versions_now() == versions and self._nonfinite.skips_step():
                skipped.append(loss)
                raise DivergenceError("this step is skipped")
            return loss

        try:
            return self.inner.step(averaged)
        except DivergenceError:
            if not skipped:
                raise
            return skipped[0]

    def _step_on_shards(self, update: ShardedStep) -> None:
        averages, allgather = self._averages, self._parts.allgather
        guards.refuse_own_gradients(self.reducer, self.zero_stage)
        guards.refuse_replaced(update, self.reducer.names)
        if self._nonfinite.skips_step():
            return
        allgather.before_step()
        failure: OffloadError | None = None
        try:
            self._follow_parameters()
            update.run(averages.flats, self.reducer.used, averages.factor, allgather.start)
        except OffloadError as error:
            failure = error
        allgather.start_remaining()  # also after a failure: the other ranks start theirs
        if not update.offload.is_safe:
            self.dp_comm.agree(failure, "keeping the optimizer's state")
        if not self._options.overlap_allgather:
            allgather.wait()
        # Post-step hooks may look at parameters, and write to them.
        update.call_post_hooks(allgather.wait)

    def _averaged(self, closure: Callable[[], Any]) -> Any:
        """Run the closure; leave average gradients, and return the average loss in the type it gave."""
        with torch.enable_grad():
            loss = closure()
        self.synchronize()
        mean = torch.as_tensor(loss, dtype=torch.float64).detach().clone().reshape(1)
        self.dp_comm.allreduce(mean, "average")
        return mean[0].to(loss.dtype) if isinstance(loss, Tensor) else mean.item()

    @uncompiled
    def require_same_replicas(self) -> None:
        """Compare parameters and states, bit for bit, of all ranks that have copies of them. Collective.

        Parameters have copies in stages 0 to 2, states in stage 0; shards of any stage have with shard_ranks.
        cost     a pass over them, and two small messages
        errors   DivergenceError on every rank, which names the first that differ; with three copies or more
                 the rank whose own is not that of most
        """
        self.wait_for_parameters()
        held = replicated(
            self._named,
            self._sharding,
            self.own_states(),
            self.replica_comms,
            shards_states=self.zero_stage > 0,
        )
        require_same(held, self._parts.norm)

    @uncompiled
    def wait_for_parameters(self) -> None:
        """Return when the last step's parameters are here; `step` waits without `overlap_allgather`."""
        self._parts.allgather.wait()

    # --- states -----------------------------------------------------------------------------------

    @property
    def _states(self) -> OptimizerStates:
        return OptimizerStates(self.inner, self._parts, self.scaler, self.dp_comm, self.zero_stage > 0)

    def state_dict(self, root: int | None = None) -> dict[str, Any]:
        """Return the inner optimizer's, of whole parameters, in any stage. Collective from stage 1 on.

        root   the only rank that gets it, others an empty one; None: all do
        Master weights are among each parameter's state as "master_weight".
        """
        self._follow_parameters()
        return self._states.state_dict(root)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` or the plain optimizer's gave, of any stage and number of ranks.

        Every rank loads the same; collective from stage 1 on. Where there are master weights in it, the
        parameters become those.
        """
        self._states.load_state_dict(state_dict)

    @property
    def steps_on_pieces(self) -> bool:
        """True where states are of flat pieces of parameters, not of the parameters themselves."""
        return self.update is not None

    def own_states(self) -> Iterator[tuple[OwnPiece, State]]:
        """Yield what this rank steps on, and its state, flat, with master weights. Sends nothing.

        A state may be used until the next is asked for.
        """
        self._follow_parameters()
        yield from self._states.own_states()

    def load_own_states(
        self, state_of: Callable[[OwnPiece], Mapping[str, Any]], state_dict: Mapping[str, Any]
    ) -> None:
        """Take states as `own_states` gives them, of the pieces of this optimizer. Collective.

        state_of     is asked once for each piece. Where it tells master weights, the parameters become those
        state_dict   whose "param_groups" and "loss_scale" are loaded, too
        errors       of `state_of` on any rank: PeerFailedError on all
        """
        self._states.load_own_states(state_of, state_dict)

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state, which only the same rank of as many can load, in this stage.

        "pieces"         {parameter's name: {"elements": (start, stop), "state": {key: flat copy}}}; elements
                         are counted in the order in which the parameter lies in memory
        "param_groups"   as in `state_dict`
        Nothing is sent. `hpcpar.checkpoint.save` writes what any number of ranks can load, in any stage.
        """
        self._follow_parameters()
        return self._states.sharded_state_dict()

    def load_sharded_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `sharded_state_dict` gave on this rank. Collective.

        errors   OperationError where the pieces are not this rank's; of several ranks, PeerFailedError on all
        """
        self._states.load_sharded_state_dict(state_dict)

    def take_parameters(self, everything: bool = True) -> None:
        """Copy parameters that were written to, on all ranks alike, into the master weights. Collective.

        everything   no: only where a parameter is not its master weight, rounded, any more. `step` does so by
                     itself where torch counts a write: p.copy_(), load_state_dict; not p.data.copy_()
        """
        self._versions = self._versions_now()
        if self.update is not None:
            self.update.refresh_masters(everything=everything)

    def _follow_parameters(self) -> None:
        if self._versions_now() != self._versions:
            self.take_parameters(everything=False)

    def _versions_now(self) -> list[int]:
        """Return torch's count of writes to each parameter; a step writes to blocks and is not counted."""
        if self._sharding is not None:  # only `summon_full_parameters` writes to sharded ones
            return [self._sharding.writes]
        return [parameter._version for parameter in self.reducer.parameters]

    # --- life -------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, given as (name, parameter) pairs unless named at construction; collective.

        Not while averages are under way: call it between `step` and the next backward.
        """
        if self.reducer.round_open:
            raise OperationError(
                "add_param_group was called while gradients are under way; call it between step() and the "
                "next backward"
            )
        if self._sharding is not None:
            raise OperationError(
                "add_param_group was called for a fully sharded model, whose units are fixed; give the "
                "optimizer all parameters when it is made"
            )
        members = param_group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        named = [member for member in members if not isinstance(member, Tensor)]
        tensors = [member if isinstance(member, Tensor) else member[1] for member in members]
        everything = distinct([*self._named, *named])
        guards.require_names([{"params": tensors}], everything)
        before = self.state_dict() if self.update is not None else None
        # First of all: what it refuses leaves this optimizer as it was.
        self.inner.add_param_group({**param_group, "params": self._as_inner_takes(tensors, everything)})
        self._named = everything
        self.close()
        if before is not None:
            self._forget_pieces()
        self._note_matrices()
        self._build()
        if before is not None:
            self.load_state_dict({**before, "param_groups": self._states.param_groups()})

    def _forget_pieces(self) -> None:
        self.inner.state = defaultdict(dict)

    def _as_inner_takes(
        self, tensors: Sequence[Tensor], everything: Sequence[Named]
    ) -> Sequence[Tensor | Named]:
        """Name the parameters if the optimizer was made of named ones."""
        if "param_names" not in self.inner.param_groups[0]:
            return tensors
        name_of = {id(parameter): name for name, parameter in everything}
        return [(name_of[id(tensor)], tensor) for tensor in tensors]

    def close(self) -> None:
        """Take all hooks off parameters and model. Collective. A fully sharded model stays what it is."""
        self._parts.allgather.close()
        self._in_place.close()
        if self._sharding is None:
            self.reducer.close()
        self._parts.loan = None
        self._is_closed = True

    def expected_traffic(self, steps: int = 1, **passes: int) -> dict[str, int]:
        """Return the bytes that all ranks together send, by collective, in theory; as `traffic_by_comm`."""
        total: Counter[str] = Counter()
        for (_, collective), nbytes in self.traffic_by_comm(steps, **passes).items():
            total[collective] += nbytes
        return dict(total)

    def traffic_by_comm(
        self,
        steps: int = 1,
        *,
        backwards: int = 1,
        forwards: int = 0,
        norms: int | None = None,
        loads: int = 0,
    ) -> dict[tuple[Communicator, str], int]:
        """Return the bytes that all ranks of a communicator send, by it and collective, in theory.

        backwards   in each step: microbatches
        forwards    without a backward, in all: they gather parameters in stage 3
        norms       gradient norms in each step: clip_grad_norm_, gradients_are_finite, a scaled step. None: a
                    step without, which looks once itself, unless nonfinite="step"
        loads       of states, in all: they bring new parameters, too
        """
        if norms is None:
            norms = 0 if self._options.nonfinite == "step" else 1
        counts = StepCounts(steps=steps, backwards=backwards, norms=norms, loads=loads)
        return step_traffic(self._parts, self._options, counts, forwards)

    def _note_split_over(self, split_over: SplitOver) -> None:
        parameters = dict(self._named)
        for name, comms in split_over.items():
            if name not in parameters:
                raise OperationError(
                    f"split_over names {name!r}, which is none of the optimizer's {len(parameters)} "
                    f"parameters"
                )
            note_split_over(parameters[name], *comms)

    # --- two optimizers over the same parameters --------------------------------------------------

    def _claim(self) -> None:
        """Note all optimizers that average the same gradients; they may be gone when it matters."""
        for parameter in self.reducer.parameters:
            other: DistributedOptimizer | None = holder_of(parameter)
            if other is not None and other is not self and all(each() is not other for each in self._rivals):
                self._rivals.append(weakref.ref(other))
                other._rivals.append(weakref.ref(self))
            set_holder(parameter, self)

    def _refuse_rivals(self) -> None:
        if not self._rivals:
            return
        if any(each() is not None for each in self._rivals):
            gc.collect()
        self._rivals = [each for each in self._rivals if (other := each()) and not other._is_closed]
        for other in filter(None, (each() for each in self._rivals)):
            name = guards.shared_name(self.reducer, other.reducer)
            if name is not None:
                raise OperationError(
                    f"the gradients of {name} are averaged by two DistributedOptimizers that are both alive, "
                    "each of which spoils the other's; call close() of the one that is done with, or drop "
                    "it, before the next backward"
                )


def optimizers_of(parameters: Iterable[Tensor]) -> list[DistributedOptimizer]:
    """Return the optimizers that were made last for these parameters and are not closed."""
    held = (holder_of(parameter) for parameter in parameters)
    found: dict[int, DistributedOptimizer] = {id(each): each for each in held if each is not None}
    return [each for each in found.values() if not each._is_closed]
