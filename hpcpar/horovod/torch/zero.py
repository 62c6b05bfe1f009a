"""DistributedOptimizer with zero_stage=1 or 2: hpcpar's own sharded optimizer under Horovod's habits.

Horovod's            step, synchronize, skip_synchronize, zero_grad, backward_passes_per_step, op
   │  engine         have all ranks come to this call? (readiness.py)
hpcpar's             shards of gradients and of the optimizer's state, on a communicator of its own
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hpcpar.comm import Communicator
from hpcpar.data_parallel.buckets import BUCKET_BYTES
from hpcpar.data_parallel.distributed_optimizer import DistributedOptimizer
from hpcpar.data_parallel.elementwise import require_elementwise
from hpcpar.data_parallel.precision import Precision
from hpcpar.data_parallel.reducer import Reducer
from hpcpar.data_parallel.reduction import Averaging, Reduction
from hpcpar.data_parallel.staging import STAGING_BUCKET_BYTES
from hpcpar.data_parallel.zero2 import ShardedGradients
from hpcpar.data_parallel.zero3 import sharding_of
from hpcpar.errors import HpcparError, OperationError
from hpcpar.horovod import basics
from hpcpar.horovod.engine import Engine
from hpcpar.horovod.exceptions import HorovodInternalError
from hpcpar.horovod.torch.compression import Compression
from hpcpar.horovod.torch.gradients import ADVICE
from hpcpar.horovod.torch.mpi_ops import Adasum, Sum
from hpcpar.horovod.torch.readiness import STEP, BucketGate, ReadinessBarrier
from hpcpar.horovod.torch.wrapped import Wrapped
from hpcpar.uncompiled import uncompiled


def require_shardable(
    optimizer: Optimizer, zero_stage: int | None, settings: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Refuse what does not go together, saying what to do instead: ValueError.

    settings, options   Horovod's own, and those for hpcpar's own optimizer
    """
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if zero_stage == 3 or sharding_of(held) is not None:
        raise ValueError(
            f"zero_stage={zero_stage} of a model that {'is' if sharding_of(held) else 'has to be'} fully "
            "sharded: its forwards are collective, too, of which Horovod's join() and broadcast_parameters() "
            "know nothing. Use comm = hpcpar.init(), hpcpar.fully_shard(model, comm) and "
            "hpcpar.DistributedOptimizer(optimizer, model.named_parameters(), comm); or zero_stage=2 without "
            "fully_shard"
        )
    if not zero_stage:
        given = [name for name, value in options.items() if value not in (None, False, "error")]
        if given or zero_stage not in (None, 0):
            raise ValueError(
                f"{', '.join(given) or f'zero_stage={zero_stage!r}'}: works with zero_stage=1 or 2; give one"
            )
        return
    if zero_stage not in (1, 2) or isinstance(zero_stage, bool):
        raise ValueError(f"zero_stage={zero_stage!r}; there are 0, 1 and 2")
    for is_wrong, what, instead in (
        (settings["op"] == Adasum, "op=Adasum", "use op=Average or op=Sum"),
        (
            settings["compression"] is not Compression.none,
            "compression",
            'use precision="bfloat16": then gradients are of 16 bits, and so they travel',
        ),
        (
            settings["gradient_predivide_factor"] != 1.0,
            "gradient_predivide_factor",
            'leave it out; precision=Precision("bfloat16", reduction="float32") sums in 32 bits',
        ),
        (settings["groups"] is not None, "groups", "leave it out: buckets of shards are hpcpar's own"),
        (settings["sparse_as_dense"], "sparse_as_dense", "build the layers with sparse=False"),
    ):
        if is_wrong:
            raise ValueError(f"{what} does not work with zero_stage={zero_stage}: {instead}")
    Precision.of(options["precision"])
    require_elementwise(optimizer, said=options["elementwise"])


class Sharded(DistributedOptimizer):
    """hpcpar's sharded optimizer, whose ranks ask the engine before they send anything.

    multiple   what the average gradient is multiplied by in a step
    """

    _advice = ADVICE

    def __init__(
        self,
        optimizer: Optimizer,
        named: Iterable[tuple[str, Tensor]],
        comm: Communicator,
        barrier: ReadinessBarrier,
        engine: Engine | None,
        multiple: float,
        **options: Any,
    ) -> None:
        self._barrier, self._engine = barrier, engine
        self._multiple = multiple
        super().__init__(optimizer, named, comm, **options)

    def synchronize(self) -> None:
        gradients = self.reducer
        if gradients.synchronized:
            return
        self._refuse_thawed()
        if isinstance(gradients, ShardedGradients):
            gradients.complete_backward()  # others may wait for it in theirs
            self._barrier.hold(STEP)
            super().synchronize()
        else:
            assert isinstance(gradients, Reducer), "stages 0 and 1 have one"
            try:
                super().synchronize()
            except HorovodInternalError:
                gradients.abandon()
                raise
        self._averages.factor *= self._multiple

    def leave(self) -> None:
        """Take the hooks off, where other ranks may not come any more."""
        self.reducer.close()
        with suppress(HpcparError):  # what ended it all has been told, and parameters are restored after it
            self._parts.allgather.close()

    def states_by(self, comm: Communicator) -> dict[str, Any]:
        """`state_dict`, over another communicator of the same ranks. Collective."""
        self.dp_comm = comm
        return self.state_dict()

    def forget_states(self) -> None:
        """Leave the wrapped optimizer without any."""
        self._forget_pieces()

    def _build(self) -> None:
        super()._build()
        if isinstance(self.reducer, ShardedGradients):
            barrier = self._barrier
            self.reducer.before_backward = lambda: barrier.hold("backward()")

    def _reduction(self, averaging: Averaging) -> Reduction:
        barrier = self._barrier  # not self's: the optimizer is to go with its last reference
        return BucketGate(self._engine, averaging, lambda on_ready: barrier.call(STEP, on_ready))

    def _refuse_thawed(self) -> None:
        trained = {id(parameter) for parameter in self.reducer.parameters}
        for name, parameter in self._named:
            if id(parameter) not in trained and parameter.grad is not None:
                raise OperationError(
                    f"{name} was frozen when its optimizer was wrapped and now has a gradient, which no "
                    "shard holds; set requires_grad before DistributedOptimizer is made"
                )


class ShardedOptimizer(Wrapped):
    """Horovod's interface of the optimizer in `sharded`; groups and state are the wrapped optimizer's."""

    sharded: Sharded
    """hpcpar's own optimizer, for what Horovod's has no name for."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Raise OperationError to GradScaler, which finds no gradients here, saying what to use instead."""
        return self.sharded._step_supports_amp_scaling

    # Loading puts others in their place in the wrapped optimizer.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._wrapped.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._wrapped.state

    def _distribute(self, named_parameters: Iterable[Any] | None) -> None:
        super()._distribute(named_parameters)
        self._later: dict[str, Any] | None = None
        self._make(self._communicator())

    def _communicator(self) -> Communicator:
        """Borrow a communicator of the ranks that train together, once all are here. Collective."""
        self._is_closed = False
        if self._is_alone:
            self._barrier = ReadinessBarrier(None, "")
            return Communicator.alone()
        engine = self.process_set._engine
        assert engine is not None, "this rank is included"
        name = engine.next_optimizer()
        self._barrier = ReadinessBarrier(engine, name)
        self._barrier.hold(f"DistributedOptimizer({self._told()})")
        comm: Communicator = engine.run_together(
            f"{name}.communicator", lambda: engine.steps.lend_communicator(self, f"{name}.shards")
        )
        return comm

    def _told(self) -> str:
        zero = self._settings["zero"]
        op = "Sum" if self.op == Sum else "Average"
        stated = sum(bool(self.state.get(parameter)) for parameter in self._parameter_names)
        return (
            f"op={op}, zero_stage={zero['zero_stage']}, precision={zero['precision']}, "
            f"shared_parameters={zero['shared_parameters']}, with the state of {stated} parameters"
        )

    def _make(self, comm: Communicator) -> None:
        zero = self._settings["zero"]
        most = BUCKET_BYTES if zero["zero_stage"] == 1 else STAGING_BUCKET_BYTES
        self.sharded = Sharded(
            self._wrapped,
            [(name, parameter) for parameter, name in self._parameter_names.items()],
            comm,
            self._barrier,
            None if self._is_alone else self.process_set._engine,
            float(comm.size) if self.op == Sum else 1.0,
            bucket_bytes=max(1, min(basics.the_context().knobs.fusion_threshold_nbytes, most)),
            backward_passes_per_step=self.backward_passes_per_step,
            **zero,
        )
        engine = self.process_set._engine
        if engine is not None and not self._is_alone:
            engine.users.add(self)

    # --- starts and ends --------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of an engine that ends; this rank's shard of the optimizer's state stays."""
        self._is_closed = True
        self.sharded.leave()

    def _connect(self) -> None:
        """After shutdown() and init() use the engine that there is now; load what was to be loaded."""
        if self._is_closed and basics.is_initialized():
            self._distribute_again()
        elif self._later is not None:
            later, self._later = self._later, None
            self.load_state_dict(later)

    def _distribute_again(self) -> None:
        """After a new start: bring the shards' states together over the engine that there is. Collective."""
        before = self.sharded
        before.leave()
        super()._distribute([(name, parameter) for parameter, name in self._parameter_names.items()])
        size = before.dp_comm.size
        comm = self._communicator()
        saved, self._later = self._later, None
        if saved is None:
            if comm.size != size:
                raise ValueError(
                    f"the optimizer's state is spread over {size} ranks, and now there are {comm.size}; save "
                    "its state_dict() before shutdown(), wrap a new optimizer after init() and load it there"
                )
            saved = before.states_by(comm)
        before.forget_states()
        self._make(comm)
        self.sharded.load_state_dict(saved)

    def __reduce__(self) -> Any:
        raise ValueError(
            f"an optimizer with zero_stage={self.sharded.zero_stage} cannot be copied or pickled, because "
            "each rank has a part of it; take its state_dict(), on all ranks, and load it into a new one"
        )

    # --- gradients --------------------------------------------------------------------------------

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sum the gradients of so many backwards before they are reduced, from the next step on."""
        super().set_backward_passes_per_step(passes)
        self.sharded.set_backward_passes_per_step(passes)

    @uncompiled
    def synchronize(self) -> None:
        """Bring each rank its shards of the reduced gradients, to clip or look at them before `step`.

        Then step inside `skip_synchronize`.
        """
        self._connect()
        self.sharded.synchronize()
        self._synchronized = True

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the reduced gradients like torch.nn.utils.clip_grad_norm_; waits for them. Collective."""
        self._connect()
        return self.sharded.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clip the reduced gradients like torch.nn.utils.clip_grad_value_; waits for them. Collective."""
        self._connect()
        self.sharded.clip_grad_value_(clip_value)

    def named_gradients(self) -> Iterator[tuple[str, slice, Tensor]]:
        """Iterate over this rank's shards of averages (also with op=Sum), like hpcpar's. Collective."""
        self._connect()
        return self.sharded.named_gradients()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """With precision="float16": call backward() on that."""
        return self.sharded.scale_loss(loss)

    def wait_for_parameters(self) -> None:
        """With `overlap_allgather`: return when the parameters of the last step are here."""
        self.sharded.wait_for_parameters()

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; AssertionError while they are being reduced: step, or synchronize, first."""
        self._connect()
        self._refuse_zeros(under_way=self.sharded.reducer.round_open)
        self.sharded.zero_grad(set_to_none=set_to_none)
        self._synchronized = False

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step on reduced gradients, each rank on its shards; collective.

        closure   computes the loss with its backward; the average of all ranks' losses is returned
        """
        self._connect()
        if closure is None and self._should_synchronize:
            self._warn_if_synchronized()
        # Schedulers that were made with it ask whether it has stepped.
        self._wrapped._opt_called = True  # type: ignore[attr-defined]
        outcome = self.sharded.step(closure)
        self._synchronized = False
        return outcome

    # --- states -----------------------------------------------------------------------------------

    def state_dict(self, root: int | None = None) -> dict[str, Any]:
        """Return the state of whole parameters. Collective: all ranks call it, also if one saves it.

        root   the only rank that gets it, by its place in the process set; None: all do
        """
        self._connect()
        self._barrier.hold("state_dict()")
        return self.sharded.state_dict(root)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of any stage, or of the plain optimizer, gave. Collective.

        All ranks load the same. Backwards are counted from zero again.
        """
        self._later = None
        self._connect()
        self._barrier.hold("load_state_dict()")
        self.sharded.load_state_dict(state_dict)
        gradients = self.sharded.reducer
        if isinstance(gradients, Reducer):
            gradients.recount()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, whose gradients are reduced from now on, too. Collective, between two steps."""
        self._connect()
        self._barrier.hold("add_param_group()")
        members = param_group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        number = len(self.param_groups)
        named = [(f"group.{number}.{index}", parameter) for index, parameter in enumerate(members)]
        self.sharded.add_param_group({**param_group, "params": named})
        self._parameter_names.update((parameter, name) for name, parameter in named)

    def _load_later(self, state_dict: dict[str, Any]) -> None:
        """Load at the next collective call: on ranks whose engine has failed there is none before."""
        self._later = state_dict

    def _adopt_options(self, broadcast: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
        """Take what `broadcast` makes of the groups' options. Collective."""
        self._connect()
        self._barrier.hold("broadcast_optimizer_state()")
        own = [{key: of[key] for key in of if key != "params"} for of in self.param_groups]
        for group, options in zip(self.param_groups, broadcast(own), strict=True):
            for option in group.keys() - options.keys() - {"params"}:
                del group[option]
            group.update(options)


# torch wraps a step that does not say so, to call hooks; the wrapped optimizer's own step calls them already.
ShardedOptimizer.step.hooked = True  # type: ignore[attr-defined]
