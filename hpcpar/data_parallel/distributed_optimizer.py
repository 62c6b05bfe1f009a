"""DistributedOptimizer: any torch optimizer, stepping on gradients averaged over all replicas."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcpar.autograd.fused_layers import adding_in_place
from hpcpar.autograd.held_parameter import holder_of, own_gradient, set_holder, set_own_gradient
from hpcpar.autograd.scripted import refuse_scripted
from hpcpar.autograd.split_norms import wide
from hpcpar.autograd.torch_clipping import install, note_split_over
from hpcpar.data_parallel.bucket_shards import Piece
from hpcpar.data_parallel.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES
from hpcpar.data_parallel.elementwise import require_elementwise
from hpcpar.data_parallel.flat_parameters import Block, gather_into_blocks
from hpcpar.data_parallel.held_gradient import HeldGradient
from hpcpar.data_parallel.norms import GradientNorm
from hpcpar.data_parallel.offload import make_offload
from hpcpar.data_parallel.parameter_allgather import ParameterAllGather, wait_for_new
from hpcpar.data_parallel.parameters import (
    Named,
    OwnPiece,
    agree_on_parameters,
    distinct,
    layout_of,
    view_as,
)
from hpcpar.data_parallel.precision import LossScaler, Precision
from hpcpar.data_parallel.reducer import ADVICE, Reducer, bucketed
from hpcpar.data_parallel.reduction import Averaging, Reduction
from hpcpar.data_parallel.replicas import refuse_renormalized
from hpcpar.data_parallel.running_statistics import warn_of_local_batches
from hpcpar.data_parallel.sharded_step import MASTER, ShardedStep, State, flattened, is_elementwise, part_of
from hpcpar.data_parallel.shared_parameters import NodeSharedParameters
from hpcpar.data_parallel.zero2 import STAGING_BUCKET_BYTES, ShardedGradients
from hpcpar.data_parallel.zero3 import FullyShardedState, sharding_of
from hpcpar.errors import DivergenceError, OffloadError, OperationError
from hpcpar.parameter_info import info_of
from hpcpar.planner.traffic import StepCounts, data_parallel_nbytes
from hpcpar.uncompiled import uncompiled

if TYPE_CHECKING:
    from hpcpar.comm import Communicator
    from hpcpar.comm.communicator import Loan

SplitOver = Mapping[str, Sequence["Communicator"]]


class DistributedOptimizer(Optimizer):
    """A torch optimizer whose every step is taken on the average gradient of `dp_comm`'s ranks.

        optimizer = DistributedOptimizer(AdamW(model.parameters()), model.named_parameters(), mesh.dp)
        with optimizer.no_sync():               # all microbatches but the last
            loss(microbatch).backward()
        loss(last_microbatch).backward()        # averages travel while this runs
        optimizer.clip_grad_norm_(1.0)          # waits for them
        optimizer.step()
        optimizer.zero_grad()

    What each rank keeps, and sends for k microbatches, of a model of Φ parameters on p ranks:

        zero_stage   parameters   gradients   optimizer state   traffic / ((p - 1)/p)
        0            all          all         all               2Φ
        1            all          all         its shard         2Φ
        2            all          its shard   its shard         (k + 1)Φ
        3            its shard    its shard   its shard         3kΦ, by `hpcpar.fully_shard(model, …)` before

    The optimizer is held, not copied: its groups are this one's, so learning-rate schedulers see no
    difference. From stage 1 on, and with precision or offload, it steps on flat pieces of parameters, and
    must treat each element by itself. Of `named_parameters` those that the optimizer holds are averaged; it
    may name more. All ranks must start with the same parameters (`broadcast_parameters`).

    An average of means is the mean where all are of equally many: then divide the loss of each of k
    microbatches by k. Of unequal ones, such as batches with ignored tokens, take sums, and `loss_factor`.

    zero_stage         0 to 3; None: 3 for a model that is fully sharded, else 0
    precision          "bfloat16", "float16" or a `Precision`: parameters and gradients of that type, and
                       float32 master weights and optimizer state; buffers stay as they are
    offload            "cpu": master weights and state in host memory, and the step there; a directory: in
                       files there. None: where the parameters are
    shared_parameters  stages 1 and 2, on CPUs: the parameters exist once on each node, for all of its ranks
    model              whose linear layers and embeddings make gradients where they are to lie, and add to
                       them there (`hpcpar.autograd.fused_layers`). None: gradients are copied
    overlap_allgather  stages 1 and 2 with `model`: `step` returns while the new parameters are on their way,
                       and the model's modules wait for theirs when they are next called. It demands that
                       whoever reads parameters in another way (an average of weights, a norm, p.data) calls
                       `wait_for_parameters` first; `model.state_dict()` and hpcpar.checkpoint do
    nonfinite          what `step` does on all ranks if an average gradient on any of them is NaN or infinite:
                       "error": DivergenceError, before anything is changed; "skip": no step, counted in
                       `scaler.skipped`; "step": what torch does, and nobody looks. Scaled losses: "skip"
    backward_passes_per_step   backwards outside `no_sync` whose sum is averaged, the last of which sends; in
                       stages 2 and 3 each of them sends
    bucket_bytes       of gradients that travel together; None: 25 MiB, and 4 in stage 2, which keeps memory
                       for two buckets
    split_over         by name, communicators over whose ranks parameters of layers of your own are split.
                       Those of tensor-parallel layers, of `parallelize` and of a `Pipeline` know theirs. The
                       norm is of all parts, and ranks skip a step together in which one has an overflow
    elementwise        True: the user's word that an optimizer which hpcpar does not know treats each element
                       by itself, for what steps on pieces; torch's own need none
    tied               names of parameters that ranks outside `dp_comm` have copies of, and whether this
                       rank's is the one that counts in the norm: their gradients are averaged last, once
                       `synchronize` is called, so that before it they can be summed over the copies

    Gradients travel on a communicator of their own, so that ranks may run the backwards of several models in
    different orders, or not at all; but each optimizer's calls come in the same order on all ranks, and in
    stage 3 so do all forwards and backwards.

    `.grad` is for everybody what it is in one process, once a backward has sent it: who reads it waits for
    the average, and who sets it to None, as model.zero_grad() does, forgets it. In stage 0 it is the average
    itself. From stage 1 on, and with precision or offload, each rank has a shard: what is done to it in
    place, element by element, is done to the shards, and to read its values is an error. torch.nn.utils'
    clip_grad_norm_ and clip_grad_value_ clip by the norm and the values of the whole; torch.amp.GradScaler
    works in stage 0, and is refused beyond: `precision="float16"` scales by itself.

    Making one is collective. Raises OperationError for parameters without a name or with the same
    name, for an optimizer that needs whole tensors or may; MismatchError (on every rank) when ranks hold
    different parameters; OffloadError, SharedMemoryError.
    source   Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, sections 5 and 7
    """

    _advice = ADVICE

    # Deliberately without super().__init__(): every attribute of an Optimizer is the inner one's.
    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[Named],
        dp_comm: Communicator,
        *,
        zero_stage: int | None = None,
        precision: Precision | str | torch.dtype | None = None,
        offload: str | Path | None = None,
        shared_parameters: bool = False,
        model: nn.Module | None = None,
        overlap_allgather: bool = False,
        nonfinite: str = "error",
        backward_passes_per_step: int = 1,
        split_over: SplitOver | None = None,
        tied: Mapping[str, bool] | None = None,
        elementwise: bool = False,
        bucket_bytes: int | None = None,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        algorithm: str | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, DistributedOptimizer):
            raise OperationError(
                f"DistributedOptimizer was given a {type(optimizer).__name__} where a torch.optim.Optimizer "
                "is needed; pass for example torch.optim.AdamW(model.parameters())"
            )
        self.inner = optimizer
        self.dp_comm = dp_comm
        self._algorithm = algorithm
        self._named = distinct(named_parameters)
        self._sharding = sharding_of([parameter for _, parameter in self._named])
        self.zero_stage = self._stage(zero_stage)
        if bucket_bytes is None:
            bucket_bytes = BUCKET_BYTES if self.zero_stage < 2 else STAGING_BUCKET_BYTES
        self._bucketing: dict[str, Any] = {
            "bucket_bytes": bucket_bytes,
            "first_bucket_bytes": min(first_bucket_bytes, bucket_bytes),
        }
        self.precision = Precision.of(precision) if self._sharding is None else self._sharding.precision
        self._offload = offload
        self._common = shared_parameters
        self._model = model
        self._overlap = overlap_allgather
        self._nonfinite = nonfinite
        self.backward_passes_per_step = _number_of_passes(backward_passes_per_step)
        self._note_split_over(split_over or {})
        self._tied = dict(tied or {})
        self._is_said_elementwise = elementwise
        self.scaler = LossScaler(None if self.precision is None else self.precision.loss_scale)
        self._refuse_contradictions(precision)
        self._overflow: bool | None = None
        self._total: Tensor | None = None
        self._zeroed: set[int] = set()
        self._loan: Loan | None = None
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
        if self._update is not None:
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
    def reducer(self) -> Reducer | ShardedGradients:
        """Buckets, flat gradients and whether they are averages."""
        return self._reducer

    @property
    def blocks(self) -> Sequence[Block]:
        """What a step works on; none where the optimizer steps on whole parameters."""
        return () if self._update is None else self._update.blocks

    @property
    def update(self) -> ShardedStep | None:
        """What steps on the blocks; None where the optimizer steps on whole parameters."""
        return self._update

    @property
    def sharding(self) -> FullyShardedState | None:
        """Of a fully sharded model."""
        return self._sharding

    @property
    def node_shared(self) -> NodeSharedParameters | None:
        """Where the parameters exist once on each node."""
        return self._node_shared if self._sharding is None else self._sharding.node_shared

    @property
    def averages(self) -> list[Tensor]:
        """What this rank has of averages; in stages 0 and 1 perhaps in copies, of another type."""
        if isinstance(self._reducer, ShardedGradients):
            return self._reducer.shards
        return self._averaging.averages

    # --- gradients --------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """For the backwards of all microbatches but the last: they add to the gradients.

        In stages 0 and 1 nothing is sent meanwhile. In 2 and 3 every backward sends, as no rank has room
        for whole gradients.
        """
        return self._reducer.no_sync()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Average the sum of so many backwards from now on; they are counted from zero again."""
        self.backward_passes_per_step = _number_of_passes(passes)
        if isinstance(self._reducer, Reducer):
            self._reducer.passes = passes
            self._reducer.recount()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the scale that keeps float16 gradients from underflow: call backward() on that."""
        return loss if self.scaler.scale == 1.0 else loss * self.scaler.scale

    @uncompiled
    def loss_factor(self, count: float | Tensor) -> float:
        """The factor by which sums of losses become the mean over all ranks and microbatches. Collective.

            factor = optimizer.loss_factor((labels != -100).sum())    # in all microbatches until the step
            for inputs, targets in microbatches:
                total = cross_entropy(model(inputs), targets, ignore_index=-100, reduction="sum")
                optimizer.scale_loss(total * factor).backward()

        count    of what this rank will sum over until the step: tokens, samples, or weights; 0 is one, too
        returns  ranks over the count of all of them, the same on every rank; 0 where there is nothing
        errors   OperationError on every rank for a count below 0 or none that is finite on some rank
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
        """Wait until every gradient is the average over all ranks, unless each is; nobody has to call it."""
        if self._reducer.synchronized:
            return
        self._refuse_rivals()
        self._refuse_copies()
        if self._update is not None:
            self._refuse_leftovers()
        self._reducer.synchronize()
        self._factor = 1.0 / self.scaler.scale
        self._overflow, self._total = None, None
        self._zeroed.clear()
        if self._update is not None and isinstance(self._reducer, Reducer):
            self._reducer.hide()
            self._reducer.used_up = any(self._reducer.used)

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as model.zero_grad() does; averages still under way are awaited first.

        set_to_none=True    the next backward's gradients are copied into the buckets as they come
        set_to_none=False   the buckets are filled with zeros and the next backward adds to them; parameters
                            that had a gradient are stepped on though it brings them none, as in torch
        """
        self._reducer.zero(set_to_none=set_to_none)
        self._total = None
        self._zeroed.clear()

    @uncompiled
    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """Return what `.grad` shows once a backward has sent it: the average, or a HeldGradient.

        Waits for averages; OperationError in a backward, where there is none yet.
        """
        number = self._number_of[id(parameter)]
        if self._is_in_backward(number):
            return own_gradient(parameter)
        if self._reducer.round_open:
            self.synchronize()
        if self._update is None or not self._reducer.used[number]:
            return own_gradient(parameter)
        return HeldGradient.of(parameter, self)

    @uncompiled
    def set_gradient_of(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Take what a parameter's `.grad` is set to once a backward has sent it; None: forget it.

        Waits for averages; OperationError in a backward, and where this rank has a shard and would be given a
        whole.
        """
        number = self._number_of[id(parameter)]
        if self._is_in_backward(number):
            set_own_gradient(parameter, gradient)
            return
        if type(gradient) is HeldGradient and gradient.parameter is parameter:
            return  # p.grad *= 0.5 sets what it has changed
        if self._reducer.round_open:
            self.synchronize()
        if self._update is None or not (self._reducer.used[number] or self._reducer.synchronized):
            set_own_gradient(parameter, gradient)
        elif gradient is not None:
            raise OperationError(
                f"the gradient of {self._reducer.names[number]} was to be replaced, of which this rank "
                f"has only a shard, as with zero_stage={self.zero_stage}, precision or offload; change it in "
                "place (p.grad.mul_(), p.grad.copy_()), or change those of optimizer.named_gradients()"
            )
        else:
            own = self.own_gradient_of(parameter)
            if own is not None:
                own[1].zero_()  # the next backward adds to it
            self._reducer.forget(number)
            if not any(self._reducer.used):
                self.zero_grad()

    def own_gradient_of(self, parameter: Tensor) -> tuple[OwnPiece, Tensor] | None:
        """Return this rank's piece of a parameter and its average gradient, flat; None: it has none.

        The gradient is what the step is taken on: neither a scale nor a clip waits to be applied.
        """
        assert self._update is not None, "otherwise .grad is the average itself"
        if self._factor != 1.0:
            self._has_overflow()  # what is clipped looks finite
            for flat in self._gradients():
                flat.mul_(self._factor)
            self._factor = 1.0
        found = self._piece_of.get(self._number_of[id(parameter)])
        if found is None:
            return None
        block, piece = found
        return self._own_piece(piece), self._gradients()[block][piece.offset : piece.end]

    def zero_gradient_of(self, parameter: Tensor) -> None:
        """Leave zeros of a parameter's gradient; once it is so with all, as zero_grad(set_to_none=False)."""
        own = self.own_gradient_of(parameter)
        if own is not None:
            own[1].zero_()
        self._zeroed.add(self._number_of[id(parameter)])
        if all(number in self._zeroed for number, is_used in enumerate(self._reducer.used) if is_used):
            self.zero_grad(set_to_none=False)

    def norm_of(self, parameters: Iterable[Tensor], norm_type: float) -> Tensor:
        """Return the norm of the average gradients of these parameters together. Collective."""
        given = {self._number_of[id(parameter)] for parameter in parameters}
        return self._norm.of(self._gradients(), norm_type, given) * abs(self._factor)

    def _is_in_backward(self, number: int) -> bool:
        """Whether a backward is still to bring a gradient; OperationError where one has sent it."""
        if torch._C._current_graph_task_id() == -1:
            return False
        if self._reducer.has_taken(number):
            raise OperationError(
                f"the gradient of {self._reducer.names[number]} was used in the backward that had sent "
                "it to be averaged, as in a hook; use it after the backward, or in one that sees it first: "
                "p.register_hook, or one that is registered before the optimizer is made"
            )
        return True

    @torch.no_grad()
    def named_gradients(self) -> Iterator[tuple[str, slice, Tensor]]:
        """(name, elements, their average gradient) of what this rank will step on; may be written to.

        Elements are counted in the order in which a parameter lies in memory, and the gradient is flat.
        A scaled loss's gradients are scaled; clipped ones are clipped. Waits for averages.
        """
        self.synchronize()
        self._clip_now()
        names = self._reducer.names
        if self._update is None:
            for name, parameter in zip(names, self._reducer.parameters, strict=True):
                if parameter.grad is not None:
                    yield name, slice(0, parameter.numel()), flat_view(parameter.grad)
            return
        for block, gradient in zip(self._update.blocks, self._gradients(), strict=True):
            for piece in block.shard.pieces:
                if self._reducer.used[piece.member]:
                    yield (
                        names[piece.member],
                        slice(piece.start, piece.stop),
                        gradient[piece.offset : piece.end],
                    )

    def _clip_now(self) -> None:
        """Multiply by what clipping has asked for, which else waits for the step."""
        if self._update is None:
            return
        scale = 1.0 / self.scaler.scale
        if self._factor == scale:
            return
        self._has_overflow()  # what is clipped looks finite
        for gradient in self._gradients():
            gradient.mul_(self._factor / scale)
        self._factor = scale

    @uncompiled
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale all gradients so that their common norm is at most `max_norm`; returns the norm before.

        The norm is that of the whole average gradient, of whose shards each rank adds its own; waited for if
        it is still under way; every rank finds the same bits. As torch.nn.utils.clip_grad_norm_.
        """
        self.synchronize()
        flats = self._gradients()
        self._total = total = self._norm.of(flats, norm_type) * abs(self._factor)
        if error_if_nonfinite and not total.isfinite():
            raise OperationError(
                f"the norm of the gradients is {total.item()}, on every rank; look for the first layer whose "
                "output is not finite, or lower the learning rate"
            )
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        # On a GPU, asking for the value would make the host wait; multiplying by 1 is cheaper there.
        if coefficient.device.type != "cpu" or not coefficient.item() >= 1:
            if self._update is not None:
                self._factor *= coefficient.item()
            else:
                for flat in flats:
                    flat.mul_(coefficient.to(device=flat.device, dtype=wide(flat)))
        return total

    @uncompiled
    def clip_grad_value_(self, clip_value: float) -> None:
        """Bring every element of the average gradient to between -clip_value and clip_value."""
        self.synchronize()
        self._has_overflow()  # what is clipped looks finite
        limit = clip_value / abs(self._factor) if self._factor else clip_value
        for flat in self._gradients():
            flat.clamp_(-limit, limit)

    @uncompiled
    def gradients_are_finite(self) -> bool:
        """Whether the average gradients hold neither NaN nor infinity on any rank; all ranks agree."""
        self.synchronize()
        return self._norm.is_finite(self._gradients())

    # --- steps ------------------------------------------------------------------------------------

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the inner optimizer on averaged gradients; collective.

        closure   computes the loss with its backward, perhaps several times (LBFGS); the average loss
                  over all ranks is returned to the inner optimizer, so that all take the same path

        Gradients that are not finite on some rank: as `nonfinite` says; with a scaled loss the step is
        skipped by all, and counted in `scaler.skipped`.
        errors    DivergenceError on every rank, with nothing changed; OffloadError on every rank when one of
                  them cannot keep its state
        """
        if self._update is not None:
            outcome = None if closure is None else self._averaged(closure)
            self.synchronize()
            self._step_on_shards(self._update)
            self._reducer.used_up = any(self._reducer.used)
        elif closure is None:
            self.synchronize()
            outcome = None if self._is_skipped() else self.inner.step()
        else:
            outcome = self.inner.step(lambda: self._averaged(closure))
        self._reducer.next_step()
        return outcome

    def _step_on_shards(self, update: ShardedStep) -> None:
        self._refuse_own_gradients()
        self._refuse_replaced(update)
        if self._is_scaled:
            overflow = self._has_overflow()
            self.scaler.update(overflow=overflow)
            if overflow:
                return
        elif self._is_skipped():
            return
        self._allgather.before_step()
        failure: OffloadError | None = None
        try:
            self._follow_parameters()
            update.run(self._gradients(), self._reducer.used, self._factor, self._allgather.start)
        except OffloadError as error:
            failure = error
        self._allgather.start_remaining()
        if update.may_fail:
            self.dp_comm.agree(failure, "keeping the optimizer's state")
        if not self._overlap:
            self._allgather.wait()
        # They may look at parameters, and write to them.
        update.call_post_hooks(self._allgather.wait)

    def _is_skipped(self) -> bool:
        """Whether all ranks skip a step for gradients that are not finite; DivergenceError by default."""
        if self._nonfinite == "step" or (self._total is not None and self._total.isfinite()):
            return False
        is_due = self._update is not None or any(p.grad is not None for p in self._reducer.parameters)
        if not is_due or self.gradients_are_finite():
            return False
        self.scaler.skipped += 1
        if self._nonfinite == "skip":
            return True
        mine = {name for name, _, gradient in self.named_gradients() if not gradient.isfinite().all()}
        told = set().union(*self.dp_comm.allgather_object(mine))
        name = next((name for name, _ in self._named if name in told), "a parameter of another rank")
        raise DivergenceError(
            f"the average gradient of {name} is not finite, so no rank has taken the step, and parameters "
            "are as they were. Look for the first layer or sample whose output is not finite, or lower the "
            'learning rate; nonfinite="skip" leaves such steps out on all ranks, nonfinite="step" takes '
            "them, as torch does"
        )

    @property
    def _is_scaled(self) -> bool:
        return self.scaler.dynamic or self.scaler.scale != 1.0

    def _has_overflow(self) -> bool:
        """Whether averages of a scaled loss's gradients, as they arrived, are too large for their type."""
        if self._overflow is None:
            self._overflow = self._is_scaled and not self._norm.is_finite(self._gradients())
        return self._overflow

    @uncompiled
    def wait_for_parameters(self) -> None:
        """Return when the last step's parameters are here; `step` waits without `overlap_allgather`."""
        self._allgather.wait()

    # --- states -----------------------------------------------------------------------------------

    def state_dict(self, root: int | None = None) -> dict[str, Any]:
        """The inner optimizer's, of whole parameters, whatever the stage. Collective from stage 1 on.

        root   the only rank that gets it, others an empty one; None: all do
        Master weights are among each parameter's state as "master_weight".
        """
        if self._update is None:
            return self.inner.state_dict()
        self._follow_parameters()
        whole = self._whole_states(self._update, root)
        if root is not None and self.dp_comm.rank != root:
            return {}
        with self._showing(whole):
            state = self.inner.state_dict()
        return {**state, "loss_scale": self.scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` or the plain optimizer's gave, of any stage and number of ranks.

        Every rank loads the same; collective from stage 1 on. Where there are master weights in it, the
        parameters become those.
        """
        if self._update is None:
            self._load_plain(state_dict)
            return
        states: dict[int, State] = state_dict["state"]
        held = [id(p) for group in self.inner.param_groups for p in group["params"]]
        number_in_state = {key: number for number, key in enumerate(held)}

        def state_of(piece: OwnPiece) -> State:
            whole = flattened(states.get(number_in_state[id(piece.parameter)], {}), piece.layout)
            return part_of(whole, piece.start, piece.stop, piece.parameter.numel())

        self.load_own_states(state_of, state_dict)

    @property
    def steps_on_pieces(self) -> bool:
        """Whether states are of flat pieces of parameters, not of the parameters themselves."""
        return self._update is not None

    def own_states(self) -> Iterator[tuple[OwnPiece, State]]:
        """What this rank steps on, and the state of it, flat; master weights are among them. Sends nothing.

        A state may be used until the next is asked for.
        """
        if self._update is not None:
            self._follow_parameters()
            for mine in self._update.states_by_block():
                for piece, state in mine:
                    yield self._own_piece(piece), state
            return
        for whole in self._whole_pieces():
            yield whole, flattened(self.inner.state.get(whole.parameter, {}), whole.layout)

    def load_own_states(
        self, state_of: Callable[[OwnPiece], Mapping[str, Any]], state_dict: Mapping[str, Any]
    ) -> None:
        """Take states as `own_states` gives them, of the pieces of this optimizer. Collective.

        state_of     is asked once for each piece. Where it tells master weights, the parameters become those
        state_dict   whose "param_groups" and "loss_scale" are loaded, too
        errors       of `state_of` on any rank: PeerFailedError on all
        """
        if self._update is None:
            held = [p for group in self.inner.param_groups for p in group["params"]]
            number_in_state = {id(parameter): number for number, parameter in enumerate(held)}
            with self.dp_comm.together("loading the optimizer's state"):
                states = {
                    number_in_state[id(piece.parameter)]: _in_shape(state_of(piece), piece)
                    for piece in self._whole_pieces()
                }
                self._load_plain({**state_dict, "state": {n: state for n, state in states.items() if state}})
            return
        self._allgather.before_step()
        with self.dp_comm.together("loading the optimizer's state"):
            with self._showing({}):
                self.inner.load_state_dict(_plain(state_dict, {}))
            self._load_scale(state_dict)
            self._update.load_states(lambda piece: state_of(self._own_piece(piece)))
        self._allgather.start_remaining()
        self._allgather.wait()

    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, which only the same rank of as many, in the same stage, can load.

        "pieces"         {parameter's name: {"elements": (start, stop), "state": {key: flat copy}}}; elements
                         are counted in the order in which the parameter lies in memory
        "param_groups"   as in `state_dict`
        Nothing is sent. `hpcpar.checkpoint.save` writes what any number of ranks can load, in any stage.
        """
        pieces = {
            piece.name: {
                "elements": (piece.start, piece.stop),
                "state": {
                    key: value.detach().clone() if isinstance(value, Tensor) else value
                    for key, value in state.items()
                },
            }
            for piece, state in self.own_states()
        }
        with self._showing({}):
            groups = self.inner.state_dict()["param_groups"]
        return {"pieces": pieces, "param_groups": groups, "loss_scale": self.scaler.state_dict()}

    def load_sharded_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `sharded_state_dict` gave on this rank. Collective.

        errors   OperationError where the pieces are not this rank's; of several ranks, PeerFailedError on all
        """
        saved = state_dict["pieces"]
        found = {name: tuple(piece["elements"]) for name, piece in saved.items()}
        with self.dp_comm.together("loading a sharded state"):
            mine = {piece.name: (piece.start, piece.stop) for piece in self._own_pieces()}
            if mine != found:
                name = min(name for name in mine.keys() | found.keys() if mine.get(name) != found.get(name))
                raise OperationError(
                    f"the state is of other pieces than this rank has: of {name} it has elements "
                    f"{found.get(name, 'none')}, where {mine.get(name, 'none')} are needed; load it with the "
                    "stage, number of ranks and bucket sizes that it was made with, or use hpcpar.checkpoint"
                )
        self.load_own_states(lambda piece: saved[piece.name]["state"], state_dict)

    def take_parameters(self, everything: bool = True) -> None:
        """Parameters were written to, on all ranks alike: master weights follow. Collective.

        everything   no: only where a parameter is not its master weight, rounded, any more. `step` does so by
                     itself where torch counts a write: p.copy_(), load_state_dict; not p.data.copy_()
        """
        self._versions = self._versions_now()
        if self._update is not None:
            self._update.refresh_masters(everything=everything)

    def _follow_parameters(self) -> None:
        if self._versions_now() != self._versions:
            self.take_parameters(everything=False)

    def _versions_now(self) -> list[int]:
        """How often each parameter was written to; a step is not counted, which writes to blocks."""
        if self._sharding is not None:  # absent; only `summon_full_parameters` writes to them
            return [self._sharding.writes]
        return [parameter._version for parameter in self._reducer.parameters]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, given as (name, parameter) pairs unless named at construction; collective.

        Not while averages are under way: call it between `step` and the next backward.
        """
        if self._reducer.round_open:
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
        self._named = distinct([*self._named, *named])
        _require_names([{"params": tensors}], self._named)
        before = self.state_dict() if self._update is not None else None
        self.close()
        if before is not None:
            self._forget_pieces()
        self.inner.add_param_group({**param_group, "params": self._as_inner_takes(tensors)})
        self._build()
        if before is not None:
            with self._showing({}):
                groups = self.inner.state_dict()["param_groups"]
            self.load_state_dict({**before, "param_groups": groups})

    def _as_inner_takes(self, tensors: Sequence[Tensor]) -> Sequence[Tensor | Named]:
        """With their names where the optimizer was made of named parameters, and so must stay."""
        if "param_names" not in self.inner.param_groups[0]:
            return tensors
        name_of = {id(parameter): name for name, parameter in self._named}
        return [(name_of[id(tensor)], tensor) for tensor in tensors]

    def close(self) -> None:
        """Take all hooks off parameters and model. Collective. A fully sharded model stays what it is."""
        self._allgather.close()
        self._in_place.close()
        if self._sharding is None:
            self._reducer.close()
        self._loan = None
        self._is_closed = True

    def expected_traffic(
        self, steps: int = 1, *, backwards: int = 1, forwards: int = 0, norms: int = 0, loads: int = 0
    ) -> dict[str, int]:
        """Bytes that all ranks together send by collective, by theory.

        backwards   in each step: microbatches
        forwards    without a backward, in all: they gather parameters in stage 3
        norms       gradient norms in each step (clip_grad_norm_, gradients_are_finite, a scaled step); a step
                    without looks once itself, unless nonfinite="step"
        loads       of states, in all: they bring new parameters, too
        """
        norms = norms if self._nonfinite == "step" else max(norms, 1)
        total = data_parallel_nbytes(
            self.dp_comm,
            self._reducer.buckets,
            StepCounts(steps=steps, backwards=backwards, norms=norms, loads=loads),
            stage=self.zero_stage,
            algorithm=self._algorithm,
            dtype=None if self.precision is None else self.precision.reduction,
            gathered=not self._common,
        )
        if self._sharding is None:
            return total
        return total | self._sharding.expected_traffic(steps * backwards + forwards, steps * backwards)

    # --- building ---------------------------------------------------------------------------------

    def _stage(self, asked: int | None) -> int:
        if asked is None:
            return 0 if self._sharding is None else 3
        if asked not in (0, 1, 2, 3):
            raise OperationError(f"zero_stage={asked!r}; there are 0, 1, 2 and 3")
        if (asked == 3) != (self._sharding is not None):
            raise OperationError(
                "zero_stage=3 needs a model that is sharded: call hpcpar.fully_shard(model, comm) before the "
                "optimizer is made"
                if asked == 3
                else f"zero_stage={asked}, but the model is fully sharded; leave zero_stage out, or give 3"
            )
        return asked

    def _refuse_contradictions(self, precision: Any) -> None:
        if self._sharding is not None and precision is not None and Precision.of(precision) != self.precision:
            raise OperationError(
                "precision was given to the optimizer of a fully sharded model; give it to fully_shard"
            )
        if self._common and self.zero_stage not in (1, 2):
            raise OperationError(
                f"shared_parameters=True with zero_stage={self.zero_stage}: only stages 1 and 2 keep whole "
                "parameters of which each rank updates a part; for 3 give it to fully_shard"
            )
        if self._tied and self.zero_stage > 1:
            raise OperationError(
                f"tied parameters ({', '.join(self._tied)}) with zero_stage={self.zero_stage}: gradients "
                "would be averaged, and cut, before they are summed over the copies; use zero_stage 0 or 1"
            )
        if self._nonfinite not in ("error", "skip", "step"):
            raise OperationError(f'nonfinite={self._nonfinite!r}; give "error", "skip" or "step"')
        if self._overlap and (self._model is None or self.zero_stage not in (1, 2)):
            raise OperationError(
                f"overlap_allgather=True with zero_stage={self.zero_stage} and "
                f"{'no model' if self._model is None else 'a model'}: it lets the all-gather of stages 1 and "
                "2 go on under the next forward of model=; give both, or leave it out"
            )
        if self._is_managed:
            require_elementwise(self.inner, said=self._is_said_elementwise)

    @property
    def _is_managed(self) -> bool:
        """Whether the optimizer steps on pieces, not on the parameters themselves."""
        return bool(self.zero_stage) or self.precision is not None or self._offload is not None

    def _build(self) -> None:
        _require_names(self.inner.param_groups, self._named)
        self._held = {id(parameter) for group in self.inner.param_groups for parameter in group["params"]}
        named = [(name, parameter) for name, parameter in self._named if id(parameter) in self._held]
        # Buckets leave in order, last registered first: what is averaged last keeps none waiting there.
        named.sort(key=lambda pair: pair[0] not in self._tied)
        # In a bucket of their own, so that the sums over replicas of all copies run in the same order, and
        # copies stay the same to the last bit.
        tied = [parameter for name, parameter in named if name in self._tied]
        self._factor = 1.0
        self._is_closed = False
        self._in_place.enter_context(adding_in_place([] if self._model is None else [self._model]))
        self._node_shared = NodeSharedParameters(self.dp_comm) if self._common else None
        self._update: ShardedStep | None = None
        sharding, size = self._sharding, self.dp_comm.size
        if sharding is not None:
            agree_on_parameters(named, self.dp_comm)
            sharding.require_all(named)
            sharding.on_loaded = weakref.WeakMethod(self.take_parameters)
            self._reducer: Reducer | ShardedGradients = sharding.gradients
            if sharding.gradients.used_up:
                sharding.gradients.zero()  # an optimizer before this one has stepped on them
            # As this optimizer was given them, not as they were called in the module that was sharded.
            name_of = {id(parameter): name for name, parameter in named}
            sharding.gradients.names = [name_of[id(p)] for p in sharding.gradients.parameters]
            blocks: Sequence[Block] = sharding.blocks
        elif self.zero_stage == 2:
            blocks = self._make_blocks(named)
            trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
            self._reducer = ShardedGradients(
                [name for name, _ in trainable],
                [parameter for _, parameter in trainable],
                [block.bucket for block in blocks],
                self._own_comm(),
                dtype=None if self.precision is None else self.precision.reduction,
                algorithm=self._algorithm,
            )
        else:
            blocks = self._make_blocks(named, tied) if self._is_managed else []
            own_comm = self._own_comm()
            self._averaging = Averaging(
                own_comm,
                self._algorithm,
                scattered=self.zero_stage == 1,
                dtype=None if self.precision is None else self.precision.reduction,
            )
            self._reducer = Reducer(
                named,
                own_comm,
                **self._bucketing,
                algorithm=self._algorithm,
                passes=self.backward_passes_per_step,
                groups=[tied],
                reduction=self._reduction(),
                shards=size if self.zero_stage else 1,
                advice=self._advice,
                late=self._tied,
                held=True,
            )
        self._claim()
        self._allgather: ParameterAllGather | FullyShardedState = sharding or ParameterAllGather(
            blocks if self.zero_stage else [],
            self._reducer.parameters,
            self.dp_comm,
            node_shared=self._node_shared,
            model=self._model if self._overlap else None,
        )
        self._number_of = {id(p): number for number, p in enumerate(self._reducer.parameters)}
        self._piece_of = {
            piece.member: (number, piece)
            for number, block in enumerate(blocks)
            for piece in block.shard.pieces
        }
        if self._is_managed:
            device = blocks[0].own.device if blocks else torch.device("cpu")
            with self.dp_comm.together("making room for the optimizer's state"):
                self._update = ShardedStep(
                    self.inner,
                    self._reducer.parameters,
                    blocks,
                    precision=self.precision,
                    offload=make_offload(self._offload, device),
                    layouts=None if sharding is None else sharding.layouts,
                )
        self._versions = self._versions_now()
        averaged = set(map(id, self._reducer.parameters))
        self._norm = GradientNorm(
            self._reducer.parameters,
            self._reducer.buckets,
            self.dp_comm,
            sharded=self.zero_stage > 0,
            elsewhere=[parameter for name, parameter in named if not self._tied.get(name, True)],
            others=[parameter for _, parameter in self._named if id(parameter) not in averaged],
        )

    def _note_split_over(self, split_over: SplitOver) -> None:
        parameters = dict(self._named)
        for name, comms in split_over.items():
            if name not in parameters:
                raise OperationError(
                    f"split_over names {name!r}, which is none of the optimizer's {len(parameters)} "
                    f"parameters"
                )
            note_split_over(parameters[name], *comms)

    def _own_comm(self) -> Communicator:
        """For gradients: they leave in the order of backward, which ranks need not share with other calls."""
        loan = self.dp_comm.lend("gradients")
        self._loan = loan
        return loan.comm

    def _claim(self) -> None:
        """Know of all that average gradients of the same parameters; they may be gone when it matters."""
        for parameter in self._reducer.parameters:
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
            mine = set(map(id, self._reducer.parameters))
            common = zip(other._reducer.names, other._reducer.parameters, strict=True)
            name = next((name for name, parameter in common if id(parameter) in mine), None)
            if name is not None:
                raise OperationError(
                    f"the gradients of {name} are averaged by two DistributedOptimizers that are both alive, "
                    "each of which spoils the other's; call close() of the one that is done with, or drop "
                    "it, before the next backward"
                )

    def _refuse_copies(self) -> None:
        """OperationError for tied weights whose gradients may be averaged before they are summed."""
        for name, parameter in zip(self._reducer.names, self._reducer.parameters, strict=True):
            if name not in self._tied and info_of(parameter).is_copy:
                raise OperationError(
                    f"{name} is among the TiedWeights of a pipeline, but tied= does not name it, so that its "
                    "gradient may be averaged before it is summed over the copies; pass "
                    f"tied={{{name!r}: tied.counts_here(parameter)}}"
                )

    def _make_blocks(self, named: Sequence[Named], tied: Sequence[Tensor] = ()) -> list[Block]:
        agree_on_parameters(named, self.dp_comm)
        dtype = None if self.precision is None else self.precision.parameters
        for _, parameter in self._named:
            if dtype is not None and not parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        trainable = [parameter for _, parameter in named if parameter.requires_grad]
        for name, parameter in named:
            if dtype is not None and parameter.requires_grad and not parameter.is_floating_point():
                raise OperationError(
                    f"{name} is of {str(parameter.dtype).removeprefix('torch.')}, which precision= cannot "
                    f"turn into {str(dtype).removeprefix('torch.')}; leave precision out"
                )
        together = [number for number, parameter in enumerate(trainable) if any(parameter is t for t in tied)]
        return gather_into_blocks(
            trainable,
            bucketed(
                trainable,
                dtype=dtype,
                shards=self.dp_comm.size if self.zero_stage else 1,
                groups=[together],
                **self._bucketing,
            ),
            self.dp_comm,
            dtype=dtype,
            sharded=self.zero_stage > 0,
            node_shared=self._node_shared,
        )

    def _reduction(self) -> Reduction:
        return self._averaging

    def _gradients(self) -> list[Tensor]:
        """The average gradients that this rank has, flat, by bucket."""
        if isinstance(self._reducer, ShardedGradients):
            return self._reducer.shards
        if self._update is None:
            self._reducer.adopt()  # what a user has set, or set to None, since they came
        return [self._averaging.average(bucket) for bucket in self._reducer.buckets]

    def _refuse_leftovers(self) -> None:
        """OperationError where a step on shards would leave out what a step on the whole would not."""
        if self._reducer.used_up:
            raise OperationError(
                "gradients were to be averaged that add to averages of before, and shards keep no sums "
                "from step to step; call zero_grad() after each step()"
            )
        trained = {id(parameter) for parameter in self._reducer.parameters}
        for name, parameter in self._named:
            if id(parameter) not in trained and id(parameter) in self._held and parameter.grad is not None:
                raise OperationError(
                    f"{name} was frozen when its optimizer was made distributed and now has a gradient, "
                    "which no bucket holds; set requires_grad first, then build the DistributedOptimizer"
                )

    def _refuse_own_gradients(self) -> None:
        for name, parameter in zip(self._reducer.names, self._reducer.parameters, strict=True):
            if own_gradient(parameter) is not None:
                raise OperationError(
                    f"the gradient of {name} was set after gradients had been averaged, and zero_stage="
                    f"{self.zero_stage} steps on shards of averages; change those of named_gradients()"
                )

    def _refuse_replaced(self, update: ShardedStep) -> None:
        """OperationError where a parameter is not in its block any more, which alone the step writes to."""
        for block in update.blocks:
            if block.flat is None:
                continue
            base, itemsize = block.flat.data_ptr(), block.flat.element_size()
            for member, start, stop in zip(
                block.bucket.members, block.bucket.edges[:-1], block.bucket.edges[1:], strict=True
            ):
                if stop > start and update.parameters[member].data_ptr() != base + start * itemsize:
                    raise OperationError(
                        f"the memory of {self._reducer.names[member]} was replaced after its optimizer "
                        "was made distributed, as p.data = …, vector_to_parameters, model.to() and another "
                        "optimizer's making do, so steps would not reach it; write in place (p.copy_() under "
                        "torch.no_grad()), then call optimizer.take_parameters(), or replace it before the "
                        "optimizer is made"
                    )

    def _averaged(self, closure: Callable[[], Any]) -> Any:
        """Run the closure; leave average gradients, and return the average loss in the type it gave."""
        with torch.enable_grad():
            loss = closure()
        self.synchronize()
        mean = torch.as_tensor(loss, dtype=torch.float64).detach().clone().reshape(1)
        self.dp_comm.allreduce(mean, "average")
        return mean[0].to(loss.dtype) if isinstance(loss, Tensor) else mean.item()

    def _whole_states(self, update: ShardedStep, root: int | None) -> dict[Tensor, State]:
        """By parameter, its state as a whole, in its shape; on `root`, or everywhere."""
        whole: dict[int, State] = defaultdict(dict)
        for mine in update.states_by_block():
            if self.zero_stage == 0:
                told: list[Any] | None = [mine]
            elif root is None:
                told = self.dp_comm.allgather_object(mine)
            else:
                told = self.dp_comm.gather_object(mine, root)
            for piece, state in (pair for of_rank in told or [] for pair in of_rank):
                numel = self._reducer.parameters[piece.member].numel()
                for key, value in state.items():
                    if not isinstance(value, Tensor) or value.dim() == 0:
                        whole[piece.member][key] = value
                        continue
                    held = whole[piece.member].setdefault(key, torch.zeros(numel, dtype=value.dtype))
                    held[piece.start : piece.stop] = value
        return {
            self._reducer.parameters[member]: {
                key: view_as(value, 0, value.numel(), update.layouts[member])
                if isinstance(value, Tensor) and value.dim() > 0
                else value
                for key, value in state.items()
            }
            for member, state in whole.items()
        }

    @contextmanager
    def _showing(self, states: Mapping[Tensor, State]) -> Iterator[None]:
        """Let the inner optimizer's state be that of whole parameters."""
        pieces = self.inner.state
        self.inner.state = defaultdict(dict, states)
        try:
            yield
        finally:
            self.inner.state = pieces

    def _forget_pieces(self) -> None:
        self.inner.state = defaultdict(dict)

    def _own_pieces(self) -> Iterator[OwnPiece]:
        if self._update is None:
            return self._whole_pieces()
        return (self._own_piece(piece) for block in self._update.blocks for piece in block.shard.pieces)

    def _own_piece(self, piece: Piece) -> OwnPiece:
        assert self._update is not None, "there are pieces"
        reducer, member = self._reducer, piece.member
        return OwnPiece(
            reducer.names[member],
            reducer.parameters[member],
            self._update.layouts[member],
            piece.start,
            piece.stop,
        )

    def _whole_pieces(self) -> Iterator[OwnPiece]:
        for name, parameter in zip(self._reducer.names, self._reducer.parameters, strict=True):
            yield OwnPiece(name, parameter, layout_of(parameter), 0, parameter.numel())

    def _load_scale(self, state_dict: Mapping[str, Any]) -> None:
        scale = state_dict.get("loss_scale")
        if scale is not None:
            self.scaler.load_state_dict(scale)

    @torch.no_grad()
    def _load_plain(self, state_dict: Mapping[str, Any]) -> None:
        self._load_scale(state_dict)
        masters: dict[int, Tensor] = {}
        states = {number: dict(state) for number, state in state_dict["state"].items()}
        for number, state in states.items():
            if MASTER in state:
                masters[number] = state.pop(MASTER)
        self.inner.load_state_dict(_plain(state_dict, states))
        held = [parameter for group in self.inner.param_groups for parameter in group["params"]]
        for number, master in masters.items():
            held[number].copy_(master)


def _plain(state_dict: Mapping[str, Any], states: Mapping[int, State]) -> dict[str, Any]:
    """What torch's own load_state_dict takes of it, with these states."""
    ours = ("pieces", "loss_scale")
    return {key: value for key, value in state_dict.items() if key not in ours} | {"state": states}


def _in_shape(state: Mapping[str, Any], piece: OwnPiece) -> State:
    """A whole parameter's state, with what has an element for each of the parameter's in its shape."""
    numel = piece.stop - piece.start
    return {
        key: view_as(value.clone(), 0, numel, piece.layout) if is_elementwise(value, numel) else value
        for key, value in state.items()
    }


def optimizers_of(parameters: Iterable[Tensor]) -> list[DistributedOptimizer]:
    """Those that were made last for these parameters and go on stepping on them."""
    held = (holder_of(parameter) for parameter in parameters)
    found: dict[int, DistributedOptimizer] = {id(each): each for each in held if each is not None}
    return [each for each in found.values() if not each._is_closed]


def flat_view(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _require_names(groups: Iterable[dict[str, Any]], named: Iterable[Named]) -> None:
    """Every parameter of the groups must have a name, for errors and checkpoints to call it by."""
    known = {id(parameter) for _, parameter in named}
    held = [parameter for group in groups for parameter in group["params"]]
    unnamed = [str(list(parameter.shape)) for parameter in held if id(parameter) not in known]
    if unnamed:
        shown = ", ".join(unnamed[:4]) + (", …" if len(unnamed) > 4 else "")
        raise OperationError(
            f"{len(unnamed)} of the optimizer's {len(held)} parameters have no name (shapes {shown}); pass "
            "the named_parameters() of every model whose parameters it holds, or (name, parameter) pairs"
        )


def _number_of_passes(passes: int) -> int:
    if passes < 1:
        raise OperationError(f"backward_passes_per_step={passes}; there must be at least 1")
    return passes
