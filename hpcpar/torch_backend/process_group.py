"""`ProcessGroup`: what torch.distributed calls, over a communicator.

torch hands over lists of tensors and an options object, and takes a `Work`. A call that need not be
asynchronous is over on return. Results are those of gloo and NCCL: AVG divides by the number of ranks,
PREMUL_SUM multiplies first, a sum of bool is a logical or. Element types that cannot be added up (float8)
are moved as bytes. Tensors on a GPU go by the communicator's way for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.constants import default_pg_timeout

from hpcpar.comm import Communicator, Handle
from hpcpar.errors import OperationError
from hpcpar.torch_backend.monitored import monitored_barrier
from hpcpar.torch_backend.registration import NAME
from hpcpar.torch_backend.tensors import (
    copy_to,
    joined,
    listed,
    movable,
    name_of,
    op_of,
    reduction,
    root_of,
    uneven,
    width_of,
)
from hpcpar.torch_backend.work import AnySource, Finish, Work, seconds_of

_ByTorch: Any = distributed.ProcessGroup
"""Its declared signatures are those of C++, which Python calls otherwise."""


class ProcessGroup(_ByTorch):  # type: ignore[misc]
    """A process group over a communicator.

    comm        its communicator
    owns_comm   `shutdown` frees it
    timeout_s   how long a call may take; None: as long as the communicator's job lets it
    """

    supports_coalescing = supports_shrinking = supports_splitting = supports_time_estimate = False
    """What torch asks of a group's backend, which is the group itself."""

    def __init__(self, comm: Communicator, timeout_s: float | None = None) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm = comm
        self.owns_comm = False
        self.timeout_s = timeout_s
        self._name, self._desc = comm.name, "undefined"
        self._coalesced: list[Work] | None = None

    # Who it is ---------------------------------------------------------------------------------------------

    def rank(self) -> int:
        return self.comm.rank

    def size(self) -> int:
        return self.comm.size

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    name = getBackendName

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    _set_group_name = setGroupName

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    group_name = pg_name = property(getGroupName)

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = desc

    _set_group_desc = setGroupDesc

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in ("cpu", *(["cuda"] if torch.cuda.is_available() else []))]

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        return self

    def _set_sequence_number_for_group(self) -> None:
        """Sequence numbers are the communicator's own."""

    def _get_sequence_number_for_group(self) -> int:
        return self.comm.calls

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        self.comm.poke()

    # Ending ------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Free the communicator. Collective."""
        if self.owns_comm:
            self.owns_comm = False
            self.comm.free()

    def abort(self) -> None:
        """Give up what is under way: other ranks will never come to it. Not collective."""
        self.owns_comm = False
        self.comm.abandon()

    # Reductions --------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Work:
        tensors, op = listed(tensors), op_of(opts, op)
        if tensors[0].layout != torch.strided:
            for tensor in tensors:
                self._allreduce_sparse(tensor, op)
            return Work(tensors)
        runs_at_once = self._coalesced is None and self.timeout_s is None
        if len(tensors) == 1 and getattr(opts, "asyncOp", True) is False and runs_at_once:
            name, factor = reduction(op, tensors[0])
            self.comm.allreduce(tensors[0].detach(), name, prescale_factor=factor)
            return Work(tensors)
        return self._started(tensors, [self._start_allreduce(tensor, op) for tensor in tensors], opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return self.allreduce(tensors, opts)

    def _start_allreduce(self, tensor: Tensor, op: Any) -> Handle:
        name, factor = reduction(op, tensor)
        self.comm.poke()  # what DDP began before moves on with each bucket
        return self.comm.start_allreduce(tensor.detach(), name, prescale_factor=factor)

    def _allreduce_sparse(self, tensor: Tensor, op: Any) -> None:
        """Gather all ranks' elements, of which each rank has another number."""
        if tensor.layout != torch.sparse_coo or reduction(op, tensor) != ("sum", 1.0):
            raise OperationError(
                f"all_reduce of a {tensor.layout} tensor by {name_of(op)} was asked for: sparse ones are to "
                f"be torch.sparse_coo, and by SUM alone"
            )
        mine = tensor.detach().coalesce()
        counts = self.comm.allgather(torch.tensor([mine._nnz()])).tolist()
        indices, values = mine.indices().t().contiguous(), mine.values().contiguous()
        gathered = []
        for part in (indices, values):
            row = math.prod(part.shape[1:])
            rows = self.comm.allgather(part, counts=[count * row for count in counts])
            gathered.append(torch.as_tensor(rows).to(part.device).view(-1, *part.shape[1:]))
        total = torch.sparse_coo_tensor(gathered[0].t(), gathered[1], tensor.shape).coalesce()
        with torch.no_grad():
            tensor.copy_(total)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Work:
        tensors, op = listed(tensors), op_of(getattr(opts, "reduceOp", op), None)
        root, handles = root_of(opts), []
        for tensor in tensors:
            name, factor = reduction(op, tensor)
            own = source = tensor.detach()
            if factor != 1.0:  # a number of Python's would make float32 of integers
                source = (own * torch.tensor(factor, dtype=torch.float64)).to(own.dtype)
            out = own if self.comm.rank == root and source is not own else None
            handles.append(self.comm.start_reduce(source, name, root, out=out))
        return self._started(tensors, handles, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        handles = []
        for output, input in zip(outputs, inputs, strict=True):
            self._require_length("reduce_scatter", input, output.numel() * self.comm.size)
            handles.append(self._start_reduce_scatter(input.detach(), output, opts))
        return self._started(outputs, handles, opts)

    def _start_reduce_scatter(
        self, whole: Tensor, output: Tensor, opts: Any, counts: list[int] | None = None
    ) -> Handle:
        name, factor = reduction(op_of(opts, None), output)
        return self.comm.start_reduce_scatter(
            whole, name, counts=counts, out=output.detach(), prescale_factor=factor
        )

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        outputs = listed(outputs)
        inputs = inputs if isinstance(inputs[0], (list, tuple)) else [inputs]
        handles = [
            self._start_reduce_scatter(joined(pieces), output, opts, uneven(pieces))
            for output, pieces in zip(outputs, inputs, strict=True)
        ]
        return self._started(outputs, handles, opts)

    # Gathers -----------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        tensors = listed(tensors)
        handles = [self.comm.start_broadcast(movable(tensor), root_of(opts)) for tensor in tensors]
        return self._started(tensors, handles, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        handles = []
        for output, input in zip(outputs, inputs, strict=True):
            self._require_length("all_gather", output, input.numel() * self.comm.size)
            handles.append(self.comm.start_allgather(movable(input), out=movable(output)))
        return self._started(outputs, handles, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        inputs = listed(inputs)
        outputs = outputs if isinstance(outputs[0], (list, tuple)) else [outputs]
        handles, copies = [], []
        for pieces, shard in zip(outputs, inputs, strict=True):
            self._require_length("all_gather", shard, pieces[self.comm.rank].numel())
            handle, copy = self._gathered(self.comm.start_allgather, pieces, shard)
            handles.append(handle)
            copies.append(copy)
        return self._started(outputs, handles, opts, lambda: [copy() for copy in copies])

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        by_input = [[pieces[at] for pieces in outputs] for at in range(len(inputs))]
        return self.allgather(by_input, inputs, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        shard, root = listed(inputs)[0], root_of(opts)
        if self.comm.rank != root:
            return self._started([], [self.comm.start_gather(movable(shard), root)], opts)
        pieces = outputs[0] if isinstance(outputs[0], (list, tuple)) else outputs
        for piece in pieces:
            self._require_length("gather", piece, shard.numel())

        def start(shard: Tensor, **options: Any) -> Handle:
            return self.comm.start_gather(shard, root, **options)

        handle, copy = self._gathered(start, pieces, shard)
        return self._started([pieces], [handle], opts, copy)

    def _gathered(
        self, start: Callable[..., Handle], pieces: Sequence[Tensor], shard: Tensor
    ) -> tuple[Handle, Finish]:
        """Gather into one tensor, and copy it to the pieces at the end."""
        whole = shard.new_empty(sum(piece.numel() for piece in pieces))
        counts = uneven(pieces)
        if counts is not None:
            counts = [count * width_of(shard) for count in counts]
        return start(movable(shard), counts=counts, out=movable(whole)), lambda: copy_to(pieces, whole)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        output, root = listed(outputs)[0], root_of(opts)
        whole = None
        if self.comm.rank == root:
            pieces = inputs[0] if isinstance(inputs[0], (list, tuple)) else inputs
            for piece in pieces:
                self._require_length("scatter", piece, output.numel())
            whole = movable(joined(pieces))
        handle = self.comm.start_scatter(whole, root, out=movable(output))
        return self._started([output], [handle], opts)

    # All-to-all --------------------------------------------------------------------------------------------

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Work:
        received, sent = self._counts(output, output_splits), self._counts(input, input_splits)
        if not output_splits and not input_splits:
            received = sent = None
        handle = self.comm.start_alltoall(
            movable(input), out=movable(output), send_counts=sent, receive_counts=received
        )
        return self._started([output], [handle], opts)

    def _counts(self, tensor: Tensor, splits: Sequence[int] | None) -> list[int] | None:
        """Elements for each rank, as they travel, of splits that count rows."""
        size, rows = self.comm.size, tensor.shape[0] if tensor.dim() else 1
        if not splits and rows % size:
            raise OperationError(f"all_to_all of {rows} rows among {size} ranks: give split sizes")
        splits = splits or [rows // size] * size
        if len(splits) != size or sum(splits) != rows:
            raise OperationError(
                f"split sizes {list(splits)} were given for {rows} rows and {size} ranks: one for each rank, "
                f"{rows} in all"
            )
        row = math.prod(tensor.shape[1:]) * width_of(tensor)
        return [split * row for split in splits]

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        sent, received = joined(inputs), outputs[0].new_empty(sum(output.numel() for output in outputs))
        width = width_of(sent)
        handle = self.comm.start_alltoall(
            movable(sent),
            out=movable(received),
            send_counts=[each.numel() * width for each in inputs],
            receive_counts=[each.numel() * width for each in outputs],
        )
        return self._started(outputs, [handle], opts, lambda: copy_to(outputs, received))

    # Messages and barriers ---------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Work:
        return self._started(tensors, [self.comm.start_send(movable(t), rank, tag) for t in tensors])

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Work:
        handles = [self.comm.start_recv(movable(t), rank, tag) for t in tensors]
        return self._started(tensors, handles, source=rank)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        tensor = movable(tensors[0])

        def receive(source: int) -> Handle:
            return self.comm.start_recv(tensor, source, tag)

        return AnySource(self.comm, tensors, receive, tag, self.timeout_s)

    def barrier(self, opts: Any = None) -> Work:
        """Wait for all ranks, as long as the options say."""
        work = Work(
            [], [self.comm.start_barrier()], timeout_s=seconds_of(opts and opts.timeout) or self.timeout_s
        )
        return self._handed_over(work, opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; StallError names the first that does not come, or all of them."""
        limit_s = self.timeout_s if timeout is None else timeout.total_seconds()
        limit_s = default_pg_timeout.total_seconds() if limit_s is None else limit_s
        monitored_barrier(self.comm, limit_s, name_all=wait_all_ranks)

    # Works -------------------------------------------------------------------------------------------------

    def _start_coalescing(self, device: Any) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> Work:
        works, self._coalesced = self._coalesced or [], None

        def finish() -> None:
            for work in works:
                work.wait()

        return Work([tensor for work in works for tensor in work.result()], finish=finish)

    def _started(
        self, result: list[Any], handles: list[Handle], opts: Any = None, finish: Any = None, source: int = -1
    ) -> Work:
        return self._handed_over(Work(result, handles, finish, source, self.timeout_s), opts)

    def _handed_over(self, work: Work, opts: Any) -> Work:
        """The work, which is over already if the options say so."""
        if self._coalesced is not None:
            self._coalesced.append(work)
        elif getattr(opts, "asyncOp", True) is False:
            work.wait()
        return work

    def _require_length(self, what: str, tensor: Tensor, count: int) -> None:
        if tensor.numel() != count:
            raise OperationError(
                f"{what} among {self.comm.size} ranks got a tensor of {tensor.numel()} elements where "
                f"{count} are needed: the whole has as many as all ranks' parts together"
            )

    # The same by the names of torch until 2.12.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
