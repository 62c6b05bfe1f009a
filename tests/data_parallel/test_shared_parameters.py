"""Parameters that exist once on each node, on nodes that loopback ranks pretend to be on."""

from __future__ import annotations

import pytest
import torch

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel.shared_parameters import NodeSharedParameters
from hpcpar.errors import OperationError


@pytest.mark.parametrize("nodes", [[0], [0, 0], [0, 1], [0, 1, 0, 1], [0, 0, 1, 1, 2, 2]])
def test_every_rank_sees_all_shards_in_memory_that_its_node_has_once(nodes: list[int]) -> None:
    length = 3

    def work(comm: Communicator) -> tuple[list[float], list[float]]:
        copy = NodeSharedParameters(comm)
        flat = copy.allocate(length * comm.size, torch.float32)
        own = flat[comm.rank * length : (comm.rank + 1) * length]
        own.fill_(comm.rank + 1)
        copy.start(flat, own).wait()
        seen = flat.tolist()
        comm.barrier()
        if comm.rank == 0:
            flat[0] = -1.0  # in node 0's memory alone
        comm.barrier()
        return seen, flat.tolist()

    results = run_loopback(len(nodes), work, nodes=nodes)
    expected = [float(rank + 1) for rank in range(len(nodes)) for _ in range(length)]
    assert [seen for seen, _ in results] == [expected] * len(nodes)
    assert [after[0] for _, after in results] == [-1.0 if node == 0 else 1.0 for node in nodes]


def test_nodes_with_different_numbers_of_ranks_are_refused_on_all_of_them() -> None:
    with pytest.raises(OperationError, match="the same number of ranks on each node, but there are 2, 1"):
        run_loopback(3, NodeSharedParameters, nodes=[0, 0, 1])
