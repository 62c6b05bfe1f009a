"""Memory that the processes of a node share: its pages are there from the start, and its name soon is not."""

from __future__ import annotations

import errno
import mmap
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcpar.errors import SharedMemoryError
from hpcpar.transport import shared_memory
from hpcpar.transport.shared_memory import PREFIX, attach, create, hindrance, keeps_order, remove
from hpcpar.units import MiB


@pytest.mark.parametrize("nbytes", [1, mmap.PAGESIZE, mmap.PAGESIZE + 1])
def test_new_memory_is_whole_pages_of_zeros(nbytes, tmp_path):
    path, segment = create(nbytes, tmp_path)
    assert segment.nbytes == segment.octets.size == 8 * len(segment.words) == os.path.getsize(path)
    assert segment.nbytes % mmap.PAGESIZE == 0
    assert 0 <= segment.nbytes - nbytes < mmap.PAGESIZE
    assert not segment.octets.any()
    assert os.path.basename(path).startswith(PREFIX)


def test_each_process_reserves_the_pages_that_it_writes_to_before_anybody_touches_them(tmp_path):
    half = 16 * mmap.PAGESIZE
    path, _ = create(2 * half, tmp_path, own=(0, half))
    assert half <= os.stat(path).st_blocks * 512 < 2 * half
    attach(path, own=(half, 2 * half))
    assert os.stat(path).st_blocks * 512 >= 2 * half


@pytest.mark.skipif(hindrance() is not None, reason="a memory file system is needed")
def test_a_process_maps_only_what_it_is_about_to_use():
    before = _mapped_nbytes()
    path, segment = create(32 * MiB, own=(8 * MiB + 64, 16 * MiB))
    populated = _mapped_nbytes() - before
    remove(path)
    if not populated:
        pytest.skip("Linux 5.14 or later is needed")
    assert 8 * MiB <= populated < 9 * MiB
    assert not segment.octets.any()  # reads it all
    assert _mapped_nbytes() - before >= 32 * MiB


def _mapped_nbytes() -> int:
    status = Path("/proc/self/status").read_text("ascii")
    return 1024 * int(re.search(r"^RssShmem:\s+(\d+) kB$", status, re.MULTILINE)[1])


def test_what_is_written_through_one_mapping_is_seen_through_the_other(tmp_path):
    path, mine = create(100, tmp_path)
    its = attach(path)
    assert its.address != mine.address
    mine.words[3] = 2**63 + 5
    its.octets[0] = 7
    assert its.words[3] == 2**63 + 5
    assert its.octets[24:32].tobytes() == (2**63 + 5).to_bytes(8, sys.byteorder)
    assert mine.octets[0] == 7


def test_the_memory_outlives_its_name(tmp_path):
    path, mine = create(100, tmp_path)
    its = attach(path)
    remove(path)
    remove(path)  # a name that has gone is no mistake
    assert os.listdir(tmp_path) == []
    mine.octets[1] = 9
    assert its.octets[1] == 9


def test_another_process_sees_the_same_memory(tmp_path):
    path, mine = create(100, tmp_path)
    mine.octets[0] = 5
    code = (
        "import sys; from hpcpar.transport.shared_memory import attach;"
        "octets = attach(sys.argv[1]).octets; octets[1] = octets[0] + 1"
    )
    subprocess.run([sys.executable, "-c", code, path], check=True, timeout=60)
    assert mine.octets[:2].tolist() == [5, 6]


def test_where_there_is_no_room_the_error_says_how_much_was_asked_for_and_nothing_stays(
    tmp_path, monkeypatch
):
    def full(descriptor, offset, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SharedMemoryError, match=rf"3\.0 MiB of shared memory in {tmp_path}.*No space left"):
        create(3 * 2**20, tmp_path)
    assert os.listdir(tmp_path) == []


def test_there_may_be_no_room_for_the_part_of_another_process(tmp_path, monkeypatch):
    def full(descriptor, offset, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path, _ = create(3 * MiB, tmp_path, own=(0, MiB))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SharedMemoryError, match=rf"3\.0 MiB of shared memory in {tmp_path}.*No space left"):
        attach(path, own=(MiB, 2 * MiB))
    attach(path, own=(0, 0))  # writes to nothing


def test_a_file_system_that_is_too_small_says_so_before_the_memory_is_used(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, timeout=20, check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        path, _ = create(2**14, tmp_path)
        with pytest.raises(SharedMemoryError, match=r"128\.0 KiB .*No space left"):
            create(2**17, tmp_path)
        assert os.listdir(tmp_path) == [os.path.basename(path)]
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True, timeout=20)


def test_a_directory_that_is_not_there_is_an_error_that_names_it(tmp_path):
    with pytest.raises(SharedMemoryError, match=r"elsewhere are not to be had: No such file"):
        create(100, tmp_path / "elsewhere")


def test_a_file_that_is_not_there_is_an_error_that_thinks_of_containers(tmp_path):
    with pytest.raises(SharedMemoryError, match=r"hpcpar-gone.*No such file.*containers"):
        attach(str(tmp_path / "hpcpar-gone"))


def test_memory_can_be_shared_where_there_is_a_place_for_it(tmp_path):
    assert hindrance(tmp_path) is None


@pytest.mark.parametrize(("machine", "in_order"), [("x86_64", True), ("aarch64", False), ("ppc64le", False)])
def test_processors_that_may_reorder_stores_are_known(machine, in_order):
    assert keeps_order(machine) is in_order


def test_a_place_that_cannot_be_written_to_hinders(tmp_path, monkeypatch):
    assert hindrance(tmp_path / "elsewhere") == f"{tmp_path / 'elsewhere'} cannot be written to"
    monkeypatch.setattr(shared_memory, "DIRECTORY", tmp_path / "nowhere")
    assert hindrance() == f"{tmp_path / 'nowhere'} cannot be written to"


def test_what_a_killed_job_left_is_removed_an_hour_later(tmp_path):
    old, recent, foreign = tmp_path / "hpcpar-old", tmp_path / "hpcpar-recent", tmp_path / "other"
    for path in (old, recent, foreign):
        path.write_bytes(b"x")
    for path in (old, foreign):
        os.utime(path, (time.time() - 3601,) * 2)
    name, _ = create(4096, tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([recent, foreign, Path(name)])


def test_a_forked_process_writes_to_own_memory_of_a_rank_for_itself(tmp_path):
    path, segment = shared_memory.create(3 * mmap.PAGESIZE, tmp_path, (0, 3 * mmap.PAGESIZE))
    shared_memory.remove(path)
    octets = segment.octets
    del segment  # an array may outlive it
    octets[:] = 1
    child = os.fork()
    if child == 0:
        sees = bool((octets == 1).all())
        octets[: mmap.PAGESIZE] = 2
        grandchild = os.fork()
        if grandchild == 0:
            sees_child = bool((octets[: mmap.PAGESIZE] == 2).all())
            octets[:] = 3
            os._exit(not sees_child)
        _, status = os.waitpid(grandchild, 0)
        is_own = bool((octets[: mmap.PAGESIZE] == 2).all())
        os._exit(not (sees and is_own and status == 0))
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert (octets == 1).all()


def test_files_of_mappings_are_closed_with_them(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    path, segment = shared_memory.create(1, tmp_path, (0, 1))
    shared_memory.remove(path)
    assert len(os.listdir("/proc/self/fd")) > before
    del segment
    assert len(os.listdir("/proc/self/fd")) == before
