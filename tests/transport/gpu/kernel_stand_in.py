"""The kernels of kernels.cu compiled for the host (kernel_stand_in.cpp), as `Kernels`.

On the stand-in for the CUDA driver they run in the order of its streams, as kernels do:

    gpu_kernels.use_instead(kernel_stand_in.StandInKernels())
"""

from __future__ import annotations

import collections
import ctypes
import functools
import shutil
from pathlib import Path

import numpy as np

from hpcpar.transport.gpu import kernels as gpu_kernels
from hpcpar.transport.gpu.cuda_driver import driver
from tests.transport.gpu import cuda_stand_in

SOURCE = Path(__file__).with_suffix(".cpp")
COMPILE = (
    *("g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", "-Wall", "-Werror", "-Wno-unknown-pragmas"),
    "-ffp-contract=off",
    "-fno-strict-aliasing",  # 16 bytes of whatever type are loaded as a uint4, as CUDA does
)


def obstacle():
    """Why the kernels cannot be compiled here, or None."""
    return None if shutil.which("g++") else "needs g++ to compile the kernels for the host"


@functools.cache
def load():
    """The compiled kernels."""
    command = [*COMPILE, f"-I{gpu_kernels.SOURCE.parent}"]
    library = ctypes.CDLL(str(cuda_stand_in.compiled(command, SOURCE, gpu_kernels.SOURCE)))
    library.size_of_fold.restype = ctypes.c_size_t
    library.new_job.restype = ctypes.c_void_p
    library.size_of_convert.restype = ctypes.c_size_t
    library.new_job.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint)
    library.run_job.argtypes = (ctypes.c_void_p,)
    library.run_job.restype = None
    return library


class HostKernels:
    """`Kernels` whose addresses are those of host memory; a fold is over on return.

    most_blocks   of a launch, few enough for a block to have several tiles in a test
    """

    def __init__(self, most_blocks=3):
        self.most_blocks = most_blocks

    def fold(self, op, dtype, into, sources, count, *, factor=1.0, divisor=1, stream=0):
        into, *sources = (self._reach(address, dtype, count) for address in (into, *sources))
        found = gpu_kernels.launches(dtype, into, sources, count, factor=factor, divisor=divisor)
        self._launch(gpu_kernels.defines(op, dtype), gpu_kernels.block_count(dtype, count), found, stream)

    def convert(self, dtype, into, source_dtype, source, count, *, factor=1.0, divisor=1, stream=0):
        if not count:
            return
        into, source = self._reach(into, dtype, count), self._reach(source, source_dtype, count)
        found = [gpu_kernels.CONVERT_ARGUMENTS.pack(into, source, count, factor, divisor)]
        defined = gpu_kernels.convert_defines(source_dtype, dtype)
        self._launch(defined, gpu_kernels.convert_blocks(count), found, stream)

    def _launch(self, defined, blocks, found, stream):
        for arguments in found:
            job = load().new_job(
                " ".join(defined).encode(), arguments, len(arguments), min(blocks, self.most_blocks)
            )
            if not job:
                raise LookupError(f"no kernel for {' '.join(defined)}")
            self._run(job, stream)

    def _reach(self, address, dtype, count):
        return address

    def _run(self, job, stream):
        load().run_job(job)


class Scratch:
    """Device memory that goes back to its stream's with its last reference."""

    def __init__(self, free, nbytes):
        self._free = free
        self.ptr = free.pop() if free else driver().alloc(max(1, nbytes))

    def __del__(self):
        self._free.append(self.ptr)


class StandInKernels(HostKernels):
    """`Kernels` whose addresses are those of the stand-in's devices; a fold is done in its stream's order."""

    def __init__(self):
        super().__init__()
        self._scratch = collections.defaultdict(list)

    def memory(self, nbytes, stream):
        return Scratch(self._scratch[nbytes, stream], nbytes)

    def _reach(self, address, dtype, count):
        itemsize = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
        return cuda_stand_in.reach(address, count * itemsize)

    def _run(self, job, stream):
        if result := cuda_stand_in.load().stand_in_enqueue(stream, load().run_job, job):
            raise RuntimeError(f"stand_in_enqueue: {result}")
