"""A rank that does all cases on the stand-in's device memory: `device_rank.py pull|staged`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import hpcpar
from hpcpar.transport.gpu import kernels as gpu_kernels
from tests.comm.device_cases import CASES
from tests.transport.gpu import cuda_stand_in, kernel_stand_in

cuda_stand_in.load()
gpu_kernels.use_instead(kernel_stand_in.StandInKernels())
world = hpcpar.init()
assert world.share_devices(sys.argv[1])
for case in CASES.values():
    case(world)
world.barrier()
print("all as it should be", flush=True)
