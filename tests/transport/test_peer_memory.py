"""Another process's memory, read without its help."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest

from hpcpar.errors import PeerFailedError
from hpcpar.transport import peer_memory
from hpcpar.transport.peer_memory import can_read, reading, stretch_of

SAMPLE = bytes(range(200, 216))

CHILD = f"""
import sys
import numpy as np
from hpcpar.transport import peer_memory

peer_memory.allow()
octets = np.frombuffer(bytearray({SAMPLE!r}), dtype=np.uint8)
print(octets.ctypes.data, flush=True)
sys.stdin.readline()
octets[0] = 1
print("changed", flush=True)
sys.stdin.readline()
"""


def address_of(octets):
    return octets.ctypes.data


def octets(data):
    return np.frombuffer(bytearray(data), dtype=np.uint8)


@pytest.fixture
def child():
    """(process, address of SAMPLE in it)."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", CHILD], **pipes) as process:
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def ended_process():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(60)
    return process.pid


def test_a_process_reads_its_own_memory():
    sample = octets(SAMPLE)
    assert can_read(os.getpid(), address_of(sample), SAMPLE)


def test_a_process_reads_a_childs_memory_as_it_is_now(child):
    process, address = child
    assert can_read(process.pid, address, SAMPLE)
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "changed\n"
    found = octets(bytes(4))
    for call in reading(process.pid, [(address, 4)], [found]):
        call()
    assert found.tolist() == [1, *SAMPLE[1:4]]


def test_other_bytes_than_expected_are_not_taken_for_the_peers():
    sample = octets(SAMPLE)
    assert not can_read(os.getpid(), address_of(sample), SAMPLE[::-1])


def test_a_process_that_does_not_exist_cannot_be_read():
    assert not can_read(ended_process(), address_of(octets(SAMPLE)), SAMPLE)


def test_memory_that_is_not_there_cannot_be_read():
    assert not can_read(os.getpid(), 16, SAMPLE)


def test_a_system_without_the_call_cannot_read(monkeypatch):
    monkeypatch.setattr(peer_memory, "_read", None)
    sample = octets(SAMPLE)
    peer_memory.allow()
    assert not can_read(os.getpid(), address_of(sample), SAMPLE)


@pytest.mark.parametrize(("at_once_nbytes", "calls"), [(2**30, 3), (5, 5), (1, 16)])
def test_targets_are_filled_one_after_the_other_in_pieces_of_what_the_kernel_takes(
    at_once_nbytes, calls, monkeypatch
):
    monkeypatch.setattr(peer_memory, "MOST_AT_ONCE_NBYTES", at_once_nbytes)
    source = octets(SAMPLE)
    targets = [octets(bytes(n)) for n in (3, 0, 11, 2)]
    made = reading(os.getpid(), [(address_of(source), 16)], targets)
    assert all(not target.any() for target in targets)
    for call in made:
        call()
    assert b"".join(target.tobytes() for target in targets) == SAMPLE
    assert len(made) == calls


@pytest.mark.parametrize("at_once_nbytes", [2**30, 3])
@pytest.mark.parametrize("lengths", [(16,), (5, 11), (1, 14, 1), (3, 0, 11, 2)])
def test_stretches_and_targets_may_be_cut_differently(lengths, at_once_nbytes, monkeypatch):
    monkeypatch.setattr(peer_memory, "MOST_AT_ONCE_NBYTES", at_once_nbytes)
    sources = np.split(octets(SAMPLE), np.cumsum(lengths)[:-1])
    sources = [octets(source.tobytes()) for source in sources]
    targets = [octets(bytes(n)) for n in (4, 9, 3)]
    for call in reading(os.getpid(), [stretch_of(source) for source in sources], targets):
        call()
    assert b"".join(target.tobytes() for target in targets) == SAMPLE


def test_nothing_beside_the_target_is_written():
    source, around = octets(SAMPLE), octets(bytes(8))
    for call in reading(os.getpid(), [(address_of(source), 3)], [around[2:5]]):
        call()
    assert around.tolist() == [0, 0, *SAMPLE[:3], 0, 0, 0]


def test_a_peer_that_has_ended_is_an_error_that_names_its_process():
    pid = ended_process()
    (call,) = reading(pid, [(address_of(octets(SAMPLE)), 7)], [octets(bytes(7))])
    with pytest.raises(PeerFailedError, match=rf"^7 bytes could not be read from process {pid} of this node"):
        call()


def test_memory_that_has_gone_is_an_error_that_says_what_was_wrong():
    (call,) = reading(os.getpid(), [(16, 7)], [octets(bytes(7))])
    with pytest.raises(PeerFailedError, match="Bad address"):
        call()


def test_memory_that_is_only_partly_there_is_an_error_that_says_how_much_was():
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    with mmap.mmap(-1, 2 * mmap.PAGESIZE) as mapping:
        whole = np.frombuffer(mapping, dtype=np.uint8)
        second = address_of(whole) + mmap.PAGESIZE
        del whole
        page = ctypes.c_void_p(second), ctypes.c_size_t(mmap.PAGESIZE)
        assert protect(*page, 0) == 0
        (call,) = reading(os.getpid(), [(second - 10, 30)], [octets(bytes(30))])
        with pytest.raises(PeerFailedError, match="only 10 were there"):
            call()
        assert protect(*page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
