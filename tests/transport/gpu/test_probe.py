"""The trial of device pointers as a job of two ranks: right answers, crashes, and a GPU if there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcpar.launch import cuda_aware
from hpcpar.launch.cuda_aware import PROBE, remove_segments
from tests.transport.gpu import cuda_stand_in

REPOSITORY = Path(__file__).parents[3]

OVER_HOST_MEMORY = """
import ctypes, sys
from hpcpar.transport.gpu import probe

class Cuda:
    kept = []
    def alloc(self, nbytes):
        self.kept.append(ctypes.create_string_buffer(nbytes))
        return ctypes.addressof(self.kept[-1])
    alloc_pinned = alloc
    def stream(self): return 0
    def synchronize(self, stream): pass
    def copy(self, target, source, nbytes, stream): ctypes.memmove(target, source, nbytes)
    def device_count(self): return 1
    def use(self, ordinal): pass

probe.driver = Cuda
{change}
probe.main(sys.argv[1:])
"""

WRONG_ON_ONE_RANK = """
read = probe.Memory.read
def spoilt(self, nbytes):
    found = read(self, nbytes)
    if probe.MPI.COMM_WORLD.Get_rank() == 1 and nbytes > 1000:
        found[nbytes // 3] ^= 1
    return found
probe.Memory.read = spoilt
"""

ASK_THE_DEVICE = """
from hpcpar import cuda_wheels
from hpcpar.launch import cuda_aware
from hpcpar.launch.bootstrap.pmi_selection import loaded_libraries
from hpcpar.transport import mpi_library as mpi
mpi.start()
found = cuda_aware.find_awareness(mpi.library_version(), memory_kinds=mpi.memory_kinds())
print("JOINED" if cuda_wheels.are_joined(loaded_libraries()) else "APART")
print(found)
"""


def report_of(tmp_path: Path, program: list[str], **variables: str) -> list[str]:
    file = tmp_path / "report"
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    ended = cuda_aware.run_job(2, [sys.executable, *program, str(file)], environ, 60.0)
    assert file.exists(), ended
    lines = file.read_text().splitlines()
    remove_segments(lines)
    return [line for line in lines if not line.startswith("segment ")]


def test_messages_come_out_right_where_mpi_can_read_the_memory(tmp_path: Path) -> None:
    assert report_of(tmp_path, ["-c", OVER_HOST_MEMORY.format(change="")]) == ["start", "yes"]


def test_a_wrong_byte_on_one_rank_is_a_no(tmp_path: Path) -> None:
    assert report_of(tmp_path, ["-c", OVER_HOST_MEMORY.format(change=WRONG_ON_ONE_RANK)]) == ["start", "no"]


def test_an_mpi_that_touches_device_memory_dies_behind_its_start(tmp_path: Path) -> None:
    """The stand-in's device pages fault on host access, and this MPI knows nothing of CUDA."""
    if reason := cuda_stand_in.obstacle():
        pytest.skip(reason)
    (tmp_path / "libcuda.so.1").symlink_to(cuda_stand_in.build())
    path = f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    assert report_of(tmp_path, ["-m", PROBE], LD_LIBRARY_PATH=path, HPCPAR_CUDA_AWARE="0") == ["start"]


def test_without_a_device_nothing_is_tried(tmp_path: Path) -> None:
    (line,) = report_of(tmp_path, ["-m", PROBE], CUDA_VISIBLE_DEVICES="-1", STAND_IN_DEVICES="0")
    assert line.startswith("cannot ")


@pytest.mark.gpu
def test_on_a_gpu_there_is_an_answer_and_the_two_wheels_move_device_memory(tmp_path: Path) -> None:
    from hpcpar.transport.gpu import cuda_driver

    if not cuda_driver.is_available():
        pytest.skip("no CUDA device")
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(tmp_path)}
    asked = subprocess.run(
        [sys.executable, "-c", ASK_THE_DEVICE],
        env=cuda_aware.own_environ(environ),
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    joined, found = asked.stdout.splitlines()[:2]
    assert "not known" not in found, asked
    if joined == "JOINED":
        assert found.startswith("yes"), asked
