"""Parameters that exist once on each node: all of its ranks read the same memory.

    node 0   rank 0, 1   [ shard 0 │ shard 1 │ shard 2 │ shard 3 ]     a rank updates its shard in place
                             ↕         ↕         ↕         ↕
    node 1   rank 2, 3   [ shard 0 │ shard 1 │ shard 2 │ shard 3 ]     and gets those of its counterparts

Between nodes the ranks of one place on their nodes gather each other's shards; inside a node nothing is sent.
source   Wang et al. 2023, ZeRO++, arXiv 2306.10209, section 3.2 (a secondary partition inside a node)
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcpar.errors import OperationError

if TYPE_CHECKING:
    from hpcpar.comm import Communicator
    from hpcpar.comm.progress import Handle


class NodeSharedParameters:
    """Makes memory that a node's ranks have in common, and brings other nodes' shards there. Collective.

    errors   OperationError on every rank when nodes have different numbers of ranks
    """

    def __init__(self, dp_comm: Communicator) -> None:
        ranks = Counter(dp_comm.nodes)
        if len(set(ranks.values())) > 1:
            raise OperationError(
                "shared_parameters=True needs the same number of ranks on each node, but there are "
                f"{', '.join(str(count) for count in ranks.values())}; use --ntasks-per-node, or do without"
            )
        self._counterparts: list[int] = []
        self._across: Communicator | None = None
        self._node = dp_comm
        if len(ranks) > 1:
            self._node = dp_comm.split_by_node(f"{dp_comm.name} in node")
            self._across = dp_comm.split(self._node.rank, name=f"{dp_comm.name} across nodes")
            assert self._across is not None, "every rank has a place on its node"
            self._counterparts = self._across.allgather_object(dp_comm.rank)

    @property
    def ranks(self) -> int:
        """Ranks that share one memory."""
        return self._node.size

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory of zeros that this node's ranks have in common. Collective."""
        flat: Tensor = self._node.allocate_common(numel, dtype)
        return flat

    def start(self, flat: Tensor, own: Tensor) -> PendingUpdate:
        """Start to bring this rank's new values in its shard `own` of `flat` to all ranks. Collective."""
        if self._across is None:
            return PendingUpdate(self._node.start_barrier(), None)
        gathered = own.new_empty(own.numel() * self._across.size)
        handle = self._across.start_allgather(own, out=gathered)
        return PendingUpdate(handle, (self, flat, gathered))

    def copy_remote_shards(self, flat: Tensor, gathered: Tensor) -> None:
        """Put other nodes' shards into this node's memory, and wait until its other ranks have, too."""
        assert self._across is not None, "there are other nodes"
        for counterpart, shard in zip(self._counterparts, gathered.view(self._across.size, -1), strict=True):
            if counterpart != self._counterparts[self._across.rank]:
                flat[counterpart * shard.numel() : (counterpart + 1) * shard.numel()] = shard
        self._node.barrier()

    def free(self) -> None:
        """Give its communicators back. Collective."""
        if self._across is not None:
            self._across.free()
            self._node.free()


class PendingUpdate:
    """New values on their way to all ranks."""

    def __init__(self, handle: Handle, delivery: tuple[NodeSharedParameters, Tensor, Tensor] | None) -> None:
        self._handle = handle
        self._delivery = delivery

    def wait(self) -> None:
        """Return when this rank can read what all ranks have written."""
        self._handle.wait()
        if self._delivery is not None:
            copy, flat, gathered = self._delivery
            copy.copy_remote_shards(flat, gathered)
            self._delivery = None
