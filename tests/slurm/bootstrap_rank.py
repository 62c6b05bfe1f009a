"""A rank without torch: joins the world, sums, looks where everybody is, and says so in one line of JSON."""

import json
import os
import socket
import subprocess
import sys

import numpy as np

import hpcpar
from hpcpar.comm.world import bootstrap

ALONE = "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"

world = hpcpar.init()
total = np.full(4, float(world.rank + 1))
world.allreduce(total)
places = world.allgather_object((os.environ["SLURMD_NODENAME"], int(os.environ["SLURM_LOCALID"])))
here = [rank for rank, node in enumerate(world.nodes) if node == world.nodes[world.rank]]
found = bootstrap()
assert found is not None
child = ""
if found.kind == "server" and world.rank == 1:
    child = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, check=True
    ).stdout.strip()
report = {
    "rank": world.rank,
    "procid": int(os.environ["SLURM_PROCID"]),
    "size": world.size,
    "sum": total.tolist(),
    "local_rank": here.index(world.rank),
    "localid": int(os.environ["SLURM_LOCALID"]),
    "same_node": [rank for rank, (name, _) in enumerate(places) if name == places[world.rank][0]] == here,
    "host": socket.gethostname(),
    "bootstrap": found.kind,
    "why": found.why,
    "torch": "torch" in sys.modules,
    "left": [name for name in os.environ if name.startswith(("PMI_", "PMIX_"))]
    if found.kind == "server"
    else [],
    "child": child,
}
sys.stdout.write(json.dumps(report) + "\n")  # in one piece: the lines of several ranks do not mix
sys.stdout.flush()
