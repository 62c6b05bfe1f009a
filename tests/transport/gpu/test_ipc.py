"""Memory and events of one process opened in another: what is kept open, and for how long."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import os
import random
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hpcpar.errors import CudaError
from hpcpar.transport.gpu import ipc
from hpcpar.transport.gpu.cuda_driver import driver
from hpcpar.transport.gpu.ipc import DESCRIPTOR_NBYTES, EventExports, EventImports, Exports, Imports

PEER, THIRD = (
    b"peer".ljust(12, b".") + struct.pack("<I", 41),
    b"third".ljust(12, b".") + struct.pack("<I", 43),
)
ROOT = Path(__file__).parents[3]
ENDS_AFTER_S = 60


class Owner:
    """A driver that has memory: (base, bytes, id), and handles that say which."""

    def __init__(self, *allocations, exportable=True):
        self.allocations = list(allocations)
        self.exportable = exportable
        self.exports = []

    def _holding(self, address):
        (found,) = (one for one in self.allocations if one[0] <= address < one[0] + one[1])
        return found

    def is_exportable(self, address):
        return self.exportable

    def range_of(self, address):
        return self._holding(address)[:2]

    def buffer_id(self, address):
        return self._holding(address)[2]

    def export_memory(self, base):
        assert base == self._holding(base)[0]
        self.exports.append(self._holding(base))
        return struct.pack("<3Q", *self._holding(base)).ljust(64, b"h")

    def export_event(self, event):
        self.exports.append(event)
        return struct.pack("<Q", event).ljust(64, b"e")


class Opener:
    """A driver that opens: `log` has what was done, `open` what is open, by the address given."""

    def __init__(self):
        self.log = []
        self.open = {}
        self.fails = False

    def open_memory(self, handle):
        if self.fails:
            raise CudaError("cuIpcOpenMemHandle: CUDA_ERROR_INVALID_VALUE")
        address = 0x1_0000_0000 * (len(self.log) + 1)
        self.log.append(("open", struct.unpack_from("<3Q", handle)[2]))
        self.open[address] = self.log[-1][1]
        return address

    def close_memory(self, address):
        self.log.append(("close", self.open.pop(address)))

    def open_event(self, handle):
        self.log.append(("open", struct.unpack_from("<Q", handle)[0]))
        self.open[1000 + len(self.log)] = self.log[-1][1]
        return 1000 + len(self.log)

    destroy_event = close_memory


def described_by(process, exports, driver, *what):
    """What `exports` of another process gives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ipc, "this_process", lambda: process)
        return exports(driver).export(*what)


def memory(base, extent=256, number=1, *, offset=0, process=PEER):
    """A descriptor of the one byte at an offset of another process's allocation."""
    return described_by(process, Exports, Owner((base, extent, number)), base + offset, 1)


def opened_and_released(imports, descriptor):
    address = imports.open(descriptor)
    imports.release(descriptor)
    return address


# Exporting.


def test_a_descriptor_has_one_size_below_128_bytes():
    sizes = {
        len(memory(2**48 - 2**40, 2**40, 2**60, offset=2**40 - 1)),
        len(described_by(PEER, Exports, Owner(), 0, 0)),
        len(described_by(PEER, EventExports, Owner(), 2**48)),
    }
    assert sizes == {DESCRIPTOR_NBYTES}
    assert DESCRIPTOR_NBYTES <= 128


def test_the_handle_of_an_allocation_is_asked_for_once_for_all_that_lies_in_it():
    owner = Owner((4096, 1024, 7), (8192, 64, 8))
    exports = Exports(owner)
    found = {exports.export(4096 + offset, 24) for offset in range(0, 1000, 8)}
    exports.export(8192, 64)
    assert owner.exports == [(4096, 1024, 7), (8192, 64, 8)]
    assert len(found) == 125


def test_a_later_allocation_at_the_same_address_has_a_handle_of_its_own():
    owner = Owner((4096, 1024, 7))
    exports = Exports(owner)
    before = exports.export(4096, 24)
    owner.allocations = [(4096, 1024, 9)]
    assert exports.export(4096, 24) != before
    assert owner.exports == [(4096, 1024, 7), (4096, 1024, 9)]


def test_memory_that_is_not_exportable_is_an_error_that_says_what_to_leave_out_each_time():
    owner = Owner((4096, 8 << 20, 7), exportable=False)
    exports = Exports(owner)
    for _ in range(2):
        with pytest.raises(
            CudaError, match=r"^4\.0 MiB at 0x1000 .*expandable_segments:True and backend:cuda"
        ):
            exports.export(4096, 4 << 20)
    assert owner.exports == []


@pytest.mark.parametrize(("address", "nbytes"), [(4096, 1025), (5119, 2)])
def test_bytes_beyond_the_end_of_their_allocation_are_refused(address, nbytes):
    exports = Exports(Owner((4096, 1024, 7)))
    exports.export(address, nbytes - 1)
    with pytest.raises(CudaError, match=rf"^{nbytes} bytes at .* only {nbytes - 1} from that address on"):
        exports.export(address, nbytes)


def test_no_bytes_are_neither_asked_for_nor_opened():
    opener = Opener()
    imports = Imports(opener)
    described = described_by(PEER, Exports, Owner(), 0, 0)
    assert opened_and_released(imports, described) == 0
    assert (opener.log, len(imports)) == ([], 0)


def test_an_exporter_asks_again_for_what_it_had_to_forget(monkeypatch):
    monkeypatch.setattr(ipc, "MOST_REMEMBERED", 2)
    owner = Owner(*((4096 * n, 64, n) for n in range(1, 4)))
    exports = Exports(owner)
    first = [exports.export(4096 * n, 64) for n in (1, 2, 3)]
    assert [exports.export(4096 * n, 64) for n in (3, 2, 1)] == first[::-1]
    assert [number for _, _, number in owner.exports] == [1, 2, 3, 1]


# Opening.


def test_an_allocation_is_opened_once_for_all_that_lies_in_it():
    opener = Opener()
    imports = Imports(opener)
    addresses = [opened_and_released(imports, memory(4096, 1024, 7, offset=at)) for at in (0, 8, 1000, 8)]
    assert [address - addresses[0] for address in addresses] == [0, 8, 1000, 8]
    assert opener.log == [("open", 7)]


def test_what_this_process_exported_is_what_it_was_without_the_driver():
    owner, opener = Owner((4096, 1024, 7)), Opener()
    imports, events = Imports(opener), EventImports(opener)
    assert opened_and_released(imports, Exports(owner).export(4136, 24)) == 4136
    assert opened_and_released(events, EventExports(owner).export(77)) == 77
    assert opener.log == []


def test_the_same_address_in_two_processes_is_two_allocations():
    opener = Opener()
    imports = Imports(opener)
    addresses = {opened_and_released(imports, memory(4096, process=process)) for process in (PEER, THIRD)}
    assert len(addresses) == len(opener.open) == 2


#                4096    5120    6144
#   open already   [ id 1  ]
#   new          where it says: does it lie on the same place?
@pytest.mark.parametrize(
    ("base", "extent", "same_process", "closes"),
    [
        (4096, 1024, True, True),
        (4096, 8, True, True),
        (4000, 97, True, True),
        (5119, 1, True, True),
        (1024, 8192, True, True),
        (4000, 96, True, False),
        (5120, 1024, True, False),
        (4096, 1024, False, False),
    ],
)
def test_a_new_allocation_closes_first_what_was_in_its_place(base, extent, same_process, closes):
    opener = Opener()
    imports = Imports(opener)
    opened_and_released(imports, memory(4096, 1024, 1))
    opened_and_released(imports, memory(base, extent, 2, process=PEER if same_process else THIRD))
    assert opener.log == [("open", 1), *([("close", 1)] if closes else []), ("open", 2)]


def test_what_was_in_the_place_of_a_new_allocation_and_is_in_use_goes_with_its_last_release():
    opener = Opener()
    imports = Imports(opener)
    old, new = memory(4096, number=1), memory(4096, number=2)
    imports.open(old)
    imports.open(old)
    imports.open(new)
    imports.open(memory(8192, number=3))
    imports.release(old)
    assert opener.log == [("open", 1), ("open", 2), ("open", 3)]
    imports.release(old)
    assert opener.log[3:] == [("close", 1)]
    imports.release(new)
    assert sorted(opener.open.values()) == [2, 3]


def test_the_least_recently_used_goes_when_there_are_too_many():
    opener = Opener()
    imports = Imports(opener, limit=3)
    for number in (1, 2, 3, 1, 4, 2):
        opened_and_released(imports, memory(4096 * number, number=number))
    assert opener.log == [
        *(("open", 1), ("open", 2), ("open", 3)),
        *(("close", 2), ("open", 4)),
        *(("close", 3), ("open", 2)),
    ]


def test_what_is_in_use_stays_however_much_it_is_and_goes_afterwards():
    opener = Opener()
    imports = Imports(opener, limit=2)
    used = [memory(4096 * number, number=number) for number in range(1, 6)]
    for descriptor in used:
        imports.open(descriptor)
    assert sorted(opener.open.values()) == [1, 2, 3, 4, 5]
    for descriptor in used:
        imports.release(descriptor)
    assert sorted(opener.open.values()) == [4, 5]


@pytest.mark.parametrize("seed", range(5))
def test_whatever_the_order_nothing_in_use_is_closed_and_nothing_idle_exceeds_the_limit(seed):
    draw = random.Random(seed)
    opener = Opener()
    limit = draw.randint(1, 4)
    imports = Imports(opener, limit)
    number = {place: place for place in range(6)}  # of the allocation that its owner has there now
    in_use = []
    for _ in range(300):
        chance = draw.random()
        place = draw.randrange(6)
        if chance < 0.1:
            number[place] += 6
        elif chance < 0.6 or not in_use:
            descriptor = memory(4096 * (place + 1), number=number[place], offset=place)
            in_use.append((imports.open(descriptor), number[place], descriptor))
        else:
            imports.release(in_use.pop(draw.randrange(len(in_use)))[2])
        used = {allocation for _, allocation, _ in in_use}
        assert all(opener.open[address & ~0xFF] == allocation for address, allocation, _ in in_use)
        assert used <= set(opener.open.values())
        assert len(opener.open) == len(imports) <= max(limit, len(used))
    imports.close()
    assert opener.open == {}


def test_closing_closes_all_and_later_releases_are_passed_over():
    opener = Opener()
    imports = Imports(opener)
    descriptors = [memory(4096 * number, number=number) for number in (1, 2)]
    for descriptor in descriptors:
        imports.open(descriptor)
    imports.close()
    imports.close()
    imports.release(descriptors[0])
    assert sorted(opener.log) == [("close", 1), ("close", 2), ("open", 1), ("open", 2)]
    imports.open(descriptors[0])
    assert opener.log[-1] == ("open", 1)


def test_a_release_too_many_is_an_error():
    imports = Imports(Opener())
    descriptor = memory(4096)
    opened_and_released(imports, descriptor)
    with pytest.raises(CudaError, match="released more often than opened"):
        imports.release(descriptor)


def test_what_cannot_be_opened_is_an_error_that_names_both_processes_and_can_be_tried_again():
    opener = Opener()
    imports = Imports(opener)
    opener.fails = True
    with pytest.raises(
        CudaError,
        match=rf"^device memory of process 41 cannot be opened in process {os.getpid()}: .*INVALID_VALUE",
    ):
        imports.open(memory(4096))
    opener.fails = False
    imports.open(memory(4096))
    assert opener.log == [("open", 1)]


def test_threads_that_open_the_same_at_once_open_it_once():
    class Slow(Opener):
        def open_memory(self, handle):
            time.sleep(0.02)
            return super().open_memory(handle)

    opener = Slow()
    imports = Imports(opener)
    found = []
    descriptor = memory(4096)  # while `memory` pretends to be another process, nobody else may look
    threads = [
        threading.Thread(target=lambda: found.append(imports.open(descriptor)), daemon=True) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ENDS_AFTER_S)
    assert (len(found), len(set(found)), opener.log) == (8, 1, [("open", 1)])


# Events.


def test_an_event_is_exported_once_until_it_is_forgotten():
    owner, opener = Owner(), Opener()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ipc, "this_process", lambda: PEER)
        exports = EventExports(owner)
        first, again = exports.export(5), exports.export(5)
        exports.forget(5)
        later = exports.export(5)
    assert first == again != later
    assert owner.exports == [5, 5]
    imports = EventImports(opener)
    assert opened_and_released(imports, first) == opened_and_released(imports, again)
    assert opened_and_released(imports, later) != imports.open(first)
    imports.close()
    assert sorted(opener.log) == [("close", 5), ("close", 5), ("open", 5), ("open", 5)]


# A forked child.

FORKING = """
import os, sys
from hpcpar.errors import CudaError
from hpcpar.transport.gpu.ipc import EventExports, Exports, Imports, this_process
from tests.transport.gpu.test_ipc import Opener, Owner, memory

owner, opener = Owner((4096, 64, 7)), Opener()
exports, events, imports = Exports(owner), EventExports(owner), Imports(opener)
events.export(5)
own, foreign, process = exports.export(4096, 64), memory(8192), this_process()
imports.open(foreign)
imports._lock.acquire()  # as another thread would at that moment
child = os.fork()
if not child:
    refused = 0
    refusing = (exports.export, 4096, 64), (events.export, 5), (imports.open, foreign), (imports.open, own)
    for call, *arguments in refusing:
        try:
            call(*arguments)
        except CudaError as error:
            refused += f"process {os.getpid()} was forked from {os.getppid()}" in str(error)
    imports.release(foreign)
    imports.close()
    fresh = Opener()
    Imports(fresh).open(own)  # the parent's is another process's now, and what is made here works
    done = (refused, opener.log, len(imports), fresh.log, this_process() != process)
    os._exit(0 if done == (4, [("open", 1)], 0, [("open", 7)], True) else print(done, flush=True) or 1)
imports._lock.release()
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
imports.release(foreign)
imports.close()
sys.exit(status if opener.log == [("open", 1), ("close", 1)] else 2)
"""


def test_a_forked_child_uses_and_closes_nothing_of_its_parents():
    ended = subprocess.run(
        [sys.executable, "-c", FORKING], cwd=ROOT, timeout=ENDS_AFTER_S, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


# Over the stand-in, with another process.

PEER_PROCESS = """
import ctypes, sys
from hpcpar.transport.gpu.ipc import EventExports, Exports, Imports
from tests.transport.gpu.cuda_stand_in import alloc_pooled, load

load()
from hpcpar.transport.gpu.cuda_driver import driver

cuda = driver()
cuda.use(0)
stream, event = cuda.stream(), cuda.event(interprocess=True)
exports, imports = Exports(cuda), Imports(cuda)
event_exports = EventExports(cuda)

def fill(address, data):
    pinned = cuda.alloc_pinned(len(data))
    ctypes.memmove(pinned, data, len(data))
    cuda.copy(address, pinned, len(data), stream)

def allocated(*datas):
    "One allocation that holds them one after the other; what each is opened by."
    base = cuda.alloc(sum(map(len, datas)))
    starts = [base + sum(map(len, datas[:n])) for n in range(len(datas))]
    for start, data in zip(starts, datas):
        fill(start, data)
    cuda.synchronize(stream)
    return base, [exports.export(start, len(data)) for start, data in zip(starts, datas)]

def failing(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

for line in sys.stdin:
    print(repr(eval(line)), flush=True)
"""


class Peer:
    """Another process, which evaluates what it is told."""

    def __init__(self, **settings):
        self._process = subprocess.Popen(
            [sys.executable, "-c", PEER_PROCESS],
            cwd=ROOT,
            env={**os.environ, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self._end = threading.Timer(ENDS_AFTER_S, self._process.kill)
        self._end.daemon = True
        self._end.start()

    def __call__(self, expression, *values):
        """`{}` in the expression are the values."""
        print(expression.format(*map(repr, values)), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the other process ended before {expression} was done"
        return ast.literal_eval(answer)

    def end(self):
        self._end.cancel()
        with self._process:
            self._process.kill()


@pytest.fixture
def start_peer(stand_in):
    with contextlib.ExitStack() as started:

        def start(**settings):
            peer = Peer(**settings)
            started.callback(peer.end)
            return peer

        yield start


@pytest.fixture
def cuda(stand_in):
    return driver()


@pytest.fixture
def imports(cuda):
    made = Imports(cuda)
    yield made
    made.close()


def read(cuda, address, nbytes, stream=0):
    host = ctypes.create_string_buffer(nbytes)
    cuda.copy(ctypes.addressof(host), address, nbytes, stream)
    cuda.synchronize(stream)
    return host.raw


def write(cuda, address, octets):
    host = ctypes.create_string_buffer(octets, len(octets))
    cuda.copy(address, ctypes.addressof(host), len(octets), 0)
    cuda.synchronize(0)


def counting(stand_in):
    """How often memory was opened and closed in this process since."""
    names = ("cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle")
    before = [stand_in.calls(name) for name in names]
    return lambda: tuple(stand_in.calls(name) - n for name, n in zip(names, before, strict=True))


def test_another_processs_memory_is_read_and_written_through_one_mapping(stand_in, cuda, imports, start_peer):
    peer, count = start_peer(), counting(stand_in)
    base, described = peer("allocated({}, {}, {})", b"first", b"second", b"third" * 1000)
    addresses = [imports.open(one) for one in described]
    assert [read(cuda, at, 6) for at in addresses] == [b"firsts", b"second", b"thirdt"]
    write(cuda, addresses[1] + 1, bytes(2))
    cuda.synchronize(0)
    for one in described:
        imports.release(one)
    assert imports.open(described[1]) == addresses[1]
    assert count() == (1, 0)
    imports.close()
    assert count() == (1, 1)
    assert peer("imports.open(exports.export({}, 11))", base) == base
    again = imports.open(described[0])
    assert read(cuda, again, 11) == b"firsts\0\0ond"


def test_an_allocation_in_the_place_of_a_freed_one_is_read_as_it_is(stand_in, cuda, imports, start_peer):
    peer, count = start_peer(), counting(stand_in)
    bases = []
    for data in (b"one" * 5000, b"two" * 5000, b"six" * 5000):
        base, (described,) = peer("allocated({})", data)
        assert read(cuda, imports.open(described), len(data)) == data
        imports.release(described)
        bases.append(base)
        peer("cuda.free({})", base)
    assert len(set(bases)) == 1, "the place was not given again, so nothing was tested"
    assert count() == (3, 2)
    assert len(imports) == 1


def test_a_driver_that_refuses_an_allocation_as_the_one_before_is_in_use_takes_it_afterwards(
    cuda, imports, start_peer
):
    peer = start_peer()
    base, (old,) = peer("allocated({})", b"old")
    imports.open(old)
    peer("cuda.free({})", base)
    _, (new,) = peer("allocated({})", b"new")
    with pytest.raises(CudaError, match=r"ALREADY_MAPPED.*have freed nothing that is in use here$"):
        imports.open(new)
    imports.release(old)
    assert read(cuda, imports.open(new), 3) == b"new"


def test_the_memory_of_a_process_that_has_ended_is_an_error_that_names_it(imports, start_peer):
    peer = start_peer()
    _, (described,) = peer("allocated({})", b"gone")
    peer.end()
    with pytest.raises(CudaError, match=rf"^device memory of process {peer.pid} cannot be opened"):
        imports.open(described)
    assert len(imports) == 0


def test_an_opened_event_holds_a_stream_up_until_the_other_process_has_come_so_far(cuda, imports, start_peer):
    peer = start_peer(STAND_IN_JITTER_US="20000")
    events, stream = EventImports(cuda), cuda.stream()
    base, (described,) = peer("allocated({})", bytes(1000))
    address = imports.open(described)
    for value in range(1, 11):
        data = bytes([value]) * 1000
        peer("fill({}, {})", base, data)
        peer("cuda.record(event, stream)")
        event = events.open(peer("event_exports.export(event)"))
        cuda.wait(stream, event)
        assert read(cuda, address, 1000, stream) == data
    assert len(events) == 1
    events.close()
    cuda.destroy_stream(stream)
