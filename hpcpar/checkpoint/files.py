"""Tensors in safetensors files: whole, or as the shards that ranks owned. Written, described and read here.

    tensor      rows 0 ───────────── 5 │ rows 6 ──────────── 11       two regions, of tp ranks 0 and 1
    region 0    0 ─────────────── 12 ──────── 19                      its elements in memory order
    files       rank 0's            rank 2's                          dp ranks 0 and 1 own a piece each
    wanted                 8 ──────────── 17                          the end of one piece, part of the next

Most tensors have one region, the whole, in one piece. A rank reads only the elements that it wants.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, NonNegativeInt
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import Required, TypedDict

from hpcpar.checkpoint.local_tensor import Box, LocalTensor, Region, contiguous_layout, first_gap
from hpcpar.checkpoint.manifest import PIECES, FileDigest, FileName, Manifest, Record, reading
from hpcpar.data_parallel.parameters import Layout, in_memory_order, view_as
from hpcpar.durable import push_to_disk
from hpcpar.errors import CheckpointError

FILE_NBYTES = 1 << 30
"""Size at which a rank's file is closed; also the memory that a rank needs to write it."""

MAX_OPEN_FILES = 16

# --- stored tensors -------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class StoredPiece:
    """Elements start … stop - 1 of a region: all that `file` has under the tensor's name."""

    start: int
    stop: int
    file: str


@dataclass(frozen=True)
class StoredRegion:
    """A region of a tensor in a checkpoint.

    strides   memory order in which its elements are counted
    pieces    in order, without gaps
    """

    region: Region
    strides: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @property
    def layout(self) -> Layout:
        return self.region.shape, self.strides

    def require_complete(self, name: str) -> None:
        """CheckpointError unless the pieces have each element of the region once."""
        end = 0
        for piece in self.pieces:
            if piece.start != end or piece.stop < piece.start:
                raise CheckpointError(
                    f"of {name} there are elements {piece.start} … {piece.stop - 1} in "
                    f"{piece.file}, where those from {end} on should be"
                )
            end = piece.stop
        if end != self.region.numel:
            raise CheckpointError(f"of the {self.region.numel} elements of {name} there are only {end}")
        lengths = zip(self.region.shape, self.strides, strict=True)
        if end and end != 1 + sum((length - 1) * stride for length, stride in lengths):
            raise CheckpointError(f"{name} of shape {self.region.shape} cannot have strides {self.strides}")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint.

    name      under which its files have it
    shape     of the whole tensor
    regions   together the whole; they may overlap
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    regions: tuple[StoredRegion, ...]

    def __post_init__(self) -> None:
        whole = Region.whole(self.shape)
        found = [each.region for each in self.regions]
        if len(set(found)) < len(found) or not all(region.fits(self.shape) for region in found):
            raise CheckpointError(f"{self.name} of shape {self.shape} cannot have regions {found[:4]}")
        for each in self.regions:
            each.require_complete(self.name if each.region == whole else f"{self.name}{each.region}")
        gap = first_gap(found, self.shape)
        if gap is not None:
            dim, place = gap
            raise CheckpointError(
                f"of {self.name} of shape {self.shape} no rank had what begins at {place} along dim {dim}"
            )

    @classmethod
    def in_one_file(cls, name: str, dtype: torch.dtype, shape: tuple[int, ...], file: str) -> StoredTensor:
        _, strides = contiguous_layout(shape)
        region = StoredRegion(Region.whole(shape), strides, (StoredPiece(0, math.prod(shape), file),))
        return cls(name, dtype, shape, (region,))

    def whole(self, files: ShardReader) -> Tensor:
        """Read the whole tensor, in its shape."""
        return self._values(files, Region.whole(self.shape))

    def local(self, files: ShardReader, local: LocalTensor) -> Tensor:
        """Read a rank's part, in the shape and memory order that it has there."""
        numel = math.prod(local.layout[0])
        return view_as(self.elements(files, local, 0, numel), 0, numel, local.layout)

    def elements(self, files: ShardReader, local: LocalTensor, start: int, stop: int) -> Tensor:
        """Read elements start … stop - 1 of a rank's memory, flat; zeros for padding."""
        found = self._without_padding(files, local, *local.without_padding(start, stop))
        if not local.is_padded:
            return found
        return found.new_zeros(stop - start).masked_scatter_(local.is_kept[start:stop], found)

    def _without_padding(self, files: ShardReader, local: LocalTensor, start: int, stop: int) -> Tensor:
        # The same region in the same order needs no resharding: read just these elements.
        for saved in self.regions:
            if saved.region == local.region and _same_order(saved.layout, local.packed):
                return self._flat(files, saved, start, stop)
        return in_memory_order(self._values(files, local.region), local.packed)[start:stop]

    def _values(self, files: ShardReader, wanted: Region) -> Tensor:
        """Read a region in its shape: from the equal saved region, or from all that overlap it."""
        found = torch.empty(wanted.shape, dtype=self.dtype)
        for saved in [each for each in self.regions if each.region == wanted] or self.regions:
            for here, there in wanted.overlaps(saved.region):
                found[here] = self._box(files, saved, there)
        return found

    def _box(self, files: ShardReader, saved: StoredRegion, box: Box) -> Tensor:
        """Read a slice of a region: the elements between its first and last one, then strided."""
        low = sum(along.start * stride for along, stride in zip(box, saved.strides, strict=True))
        high = 1 + sum((along.stop - 1) * stride for along, stride in zip(box, saved.strides, strict=True))
        lengths = [along.stop - along.start for along in box]
        return self._flat(files, saved, low, high).as_strided(lengths, saved.strides)

    def _flat(self, files: ShardReader, saved: StoredRegion, start: int, stop: int) -> Tensor:
        found = torch.empty(stop - start, dtype=self.dtype)
        for piece in saved.pieces:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                part = files.flat(piece.file, self.name, low - piece.start, high - piece.start)
                found[low - start : high - start] = part
        return found


def _same_order(one: Layout, other: Layout) -> bool:
    """Compare the order of elements; the stride of a dim of length 1 does not matter."""
    (shape, strides), (other_shape, other_strides) = one, other
    return shape == other_shape and all(
        length == 1 or stride == other_stride
        for length, stride, other_stride in zip(shape, strides, other_strides, strict=True)
    )


class ShardReader:
    """Read a checkpoint's safetensors files, keeping a few of them open."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: OrderedDict[str, Any] = OrderedDict()

    def flat(self, file: str, name: str, start: int, stop: int) -> Tensor:
        """Read elements start … stop - 1 of a tensor in row-major order; may be a view of the file."""
        try:
            part = self._handle(file).get_slice(name)
            shape = part.get_shape()
            if not shape:
                whole: Tensor = self._handle(file).get_tensor(name)
                return whole.reshape(1)[start:stop]
            # safetensors slices rows: read those that hold the elements, then cut the ends off.
            row = math.prod(shape[1:])
            first, last = start // row, -(-stop // row)
            rows: Tensor = part[first:last]
            return rows.reshape(-1)[start - first * row : stop - first * row]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {name} in {self.directory / file}: {error}") from error

    def all_in(self, file: str, prefix: str = "") -> dict[str, StoredTensor]:
        """Describe the tensors of one file whose names begin with `prefix`, by name. Reads its header."""
        return {
            name: StoredTensor.in_one_file(name, dtype, shape, file)
            for name, (dtype, shape) in self.forms_in(file).items()
            if name.startswith(prefix)
        }

    def forms_in(self, file: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return type and shape of each tensor of one file, at about a microsecond each."""
        forms: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        dtypes: dict[str, torch.dtype] = {}
        with reading(self.directory / file):
            handle = self._handle(file)
            for name in handle.keys():  # noqa: SIM118
                part = handle.get_slice(name)
                label = part.get_dtype()
                if label not in dtypes:  # safetensors tells torch's name only with a tensor, which is mapped
                    dtypes[label] = handle.get_tensor(name).dtype
                forms[name] = dtypes[label], tuple(part.get_shape())
        return forms

    def _handle(self, file: str) -> Any:
        handle = self._open.pop(file, None) or safe_open(self.directory / file, framework="pt")
        self._open[file] = handle
        if len(self._open) > MAX_OPEN_FILES:
            self._open.popitem(last=False)
        return handle


# --- pieces.json ----------------------------------------------------------------------------------


class RegionRecord(TypedDict):
    ranges: list[list[tuple[NonNegativeInt, NonNegativeInt]]]
    strides: tuple[NonNegativeInt, ...]
    pieces: list[tuple[FileName, NonNegativeInt, NonNegativeInt]]


class TensorRecord(TypedDict, total=False):
    """A stored tensor in JSON; in format 2 it had the strides and pieces of its one region itself."""

    dtype: Required[str]
    shape: Required[tuple[NonNegativeInt, ...]]
    parts: list[RegionRecord]
    strides: tuple[NonNegativeInt, ...]
    pieces: list[tuple[FileName, NonNegativeInt, NonNegativeInt]]


class PiecesRecord(Record):
    """Content of pieces.json: which elements of which region of which tensor the ranks' files have."""

    model: dict[str, TensorRecord] = Field(default_factory=dict)
    optimizer: dict[str, TensorRecord] = Field(default_factory=dict)


def as_record(stored: StoredTensor) -> TensorRecord:
    parts: list[RegionRecord] = []
    for each in stored.regions:
        pieces = [(piece.file, piece.start, piece.stop) for piece in each.pieces]
        ranges = list(map(list, each.region.ranges))
        parts.append({"ranges": ranges, "strides": each.strides, "pieces": pieces})
    return {"dtype": _name(stored.dtype), "shape": stored.shape, "parts": parts}


def from_record(name: str, record: TensorRecord) -> StoredTensor:
    shape = record["shape"]
    if "parts" in record:
        parts = record["parts"]
    else:
        whole = [[(0, length)] for length in shape]
        parts = [{"ranges": whole, "strides": record["strides"], "pieces": record["pieces"]}]
    dtype = getattr(torch, record["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{name} has the type {record['dtype']}, which is none of torch's")
    regions = (
        StoredRegion(
            Region.of(each["ranges"]),
            each["strides"],
            tuple(StoredPiece(start, stop, file) for file, start, stop in each["pieces"]),
        )
        for each in parts
    )
    return StoredTensor(name, dtype, shape, tuple(regions))


class Pieces:
    """Tensors that ranks wrote in pieces, by name; `optimizer` has states.

    errors   CheckpointError for tensors that are incomplete, or in files that the manifest does not list
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory = directory
        path = directory / PIECES
        record = PiecesRecord.read(path) if PIECES in manifest.files else PiecesRecord()
        with reading(path):
            self.model = {name: from_record(name, each) for name, each in record.model.items()}
            self.optimizer = {name: from_record(name, each) for name, each in record.optimizer.items()}
        self._in_file: dict[str, dict[str, tuple[torch.dtype, int]]] = defaultdict(dict)
        for stored in (*self.model.values(), *self.optimizer.values()):
            for piece in (piece for region in stored.regions for piece in region.pieces):
                self._in_file[piece.file][stored.name] = stored.dtype, piece.stop - piece.start
        unlisted = sorted(self._in_file.keys() - manifest.files.keys())
        if unlisted:
            raise CheckpointError(f"{path} names {unlisted[0]}, which is not in the manifest")

    def check_files(self, files: Iterable[str]) -> None:
        """CheckpointError unless these files have what pieces.json says, so that no read can fail later."""
        reader = ShardReader(self._directory)
        for file in files:
            found = reader.forms_in(file) if file.endswith(".safetensors") else {}
            for name, (dtype, numel) in self._in_file.get(file, {}).items():
                there = found.get(name)
                if there is None or (there[0], math.prod(there[1])) != (dtype, numel):
                    raise CheckpointError(
                        f"{self._directory / PIECES} tells of {numel} elements of {name}, {_name(dtype)}, in "
                        f"{file}, which {'are not there' if there is None else 'has others'}"
                    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def pieces_text(model: Iterable[WrittenShard], optimizer: Iterable[WrittenShard]) -> str | None:
    """Describe the shards of all ranks as pieces.json; None if there are none."""
    kinds = {"model": joined(model), "optimizer": joined(optimizer)}
    records = {kind: {name: as_record(each) for name, each in found.items()} for kind, found in kinds.items()}
    return json.dumps(records) + "\n" if any(kinds.values()) else None


# --- writing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WrittenShard:
    """One piece that a rank wrote of a tensor of this whole shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    part: StoredRegion


@dataclass
class WrittenFiles:
    """Files that a rank wrote.

    digests      of files, by name
    shards       pieces in rank files
    not_finite   first tensor with NaN or infinite values
    """

    digests: dict[str, FileDigest] = field(default_factory=dict)
    shards: list[WrittenShard] = field(default_factory=list)
    not_finite: str | None = None


class ShardWriter:
    """Write a rank's shards into <stem>.rank<rank>.<number>.safetensors, and whole tensors where they belong.

    common            True on the rank that writes whole tensors into <stem>.safetensors
    may_be_infinite   names of tensors in which infinity is legitimate, such as attention masks
    pool              of one thread, that writes copies of what is added; None: it is written by the caller
    """

    def __init__(
        self,
        directory: Path,
        stem: str,
        rank: int,
        *,
        common: bool,
        may_be_infinite: Container[str] = (),
        pool: Executor | None = None,
    ) -> None:
        self._written = WrittenFiles()
        self._may_be_infinite = may_be_infinite
        self._directory, self._stem, self._rank = directory, stem, rank
        self._common: dict[str, Tensor] | None = {} if common else None
        self._waiting: dict[str, Tensor] = {}
        self._waiting_nbytes = 0
        self._files = 0
        self._pool = pool
        self._writes: list[Future[None]] = []

    def add(self, name: str, values: Tensor, local: LocalTensor, start: int) -> None:
        """Add elements of a rank's memory, flat, from offset `start` on; padding is left out."""
        first, end = local.without_padding(start, start + values.numel())
        if local.is_padded:
            values = values[local.is_kept[start : start + values.numel()].to(values.device)]
        self._waiting[name] = self._taken(values)
        self._waiting_nbytes += values.nbytes
        _, strides = local.packed
        part = StoredRegion(local.region, strides, (StoredPiece(first, end, self._file),))
        self._written.shards.append(WrittenShard(name, values.dtype, local.shape, part))
        if self._waiting_nbytes >= FILE_NBYTES:
            self._write_waiting()

    def add_whole(self, name: str, value: Tensor) -> None:
        """Add a replicated tensor, which keeps its shape in the file."""
        if self._common is not None:
            self._common[name] = self._taken(value)
        else:
            self.add_once(name, value)

    def add_once(self, name: str, value: Tensor) -> None:
        """Add a whole tensor that this rank alone has, to its own file."""
        self.add(name, value, LocalTensor.whole(contiguous_layout(value.shape)), 0)

    def flush(self) -> None:
        """Write all that was added, or have the pool do so; nothing more may be."""
        if self._waiting:
            self._write_waiting()
        if self._common is not None:
            self._write(f"{self._stem}.safetensors", self._common)
            self._common = None

    def is_finished(self) -> bool:
        """True if `finish` would not wait."""
        return all(write.done() for write in self._writes)

    def finish(self) -> WrittenFiles:
        """Write all that was added; return what was written, once it is."""
        self.flush()
        for write in self._writes:
            write.result()
        return self._written

    def _taken(self, tensor: Tensor) -> Tensor:
        value = on_cpu(tensor)
        is_shared = value.data_ptr() == tensor.data_ptr()
        return value.clone() if is_shared and self._pool is not None else value

    def _write_waiting(self) -> None:
        self._write(self._file, self._waiting)
        self._waiting, self._waiting_nbytes = {}, 0
        self._files += 1

    def _write(self, file: str, tensors: dict[str, Tensor]) -> None:
        if self._pool is None:
            self._write_now(file, tensors)
        else:
            self._writes.append(self._pool.submit(self._write_now, file, tensors))

    def _write_now(self, file: str, tensors: dict[str, Tensor]) -> None:
        written = self._written
        written.digests[file] = write_tensors(tensors, self._directory / file)
        written.not_finite = written.not_finite or first_not_finite(tensors, self._may_be_infinite)

    @property
    def _file(self) -> str:
        return f"{self._stem}.rank{self._rank:05d}.{self._files:03d}.safetensors"


def on_cpu(tensor: Tensor) -> Tensor:
    """Return a contiguous CPU tensor with a storage of its own, as safetensors requires."""
    value = tensor.detach().cpu().contiguous()
    shares = value.untyped_storage().nbytes() != value.nbytes
    return value.clone() if shares else value


def first_not_finite(tensors: Mapping[str, Tensor], may_be_infinite: Container[str] = ()) -> str | None:
    """Return the name of the first tensor with a NaN, or an infinity where none may be."""
    for name, value in tensors.items():
        if not (value.is_floating_point() or value.is_complex()) or not value.numel():
            continue
        real = torch.view_as_real(value) if value.is_complex() else value
        if real.element_size() == 1:
            real = real.float()
        # The extremes need no memory of the tensor's size, and are NaN if one value is.
        lowest, highest = torch.stack(torch.aminmax(real)).double().tolist()
        if math.isnan(lowest) or (name not in may_be_infinite and math.isinf(highest - lowest)):
            return name
    return None


def write_tensors(tensors: dict[str, Tensor], path: Path) -> FileDigest:
    """Write one file, push it to the disk, and return its digest."""
    save_tensors(tensors, path)
    push_to_disk(path)
    return FileDigest.of(path)


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write one safetensors file, with the permissions that this process gives other files."""
    path.touch()
    mode = path.stat().st_mode  # safetensors makes files that nobody else may read
    try:
        save_file(_unshared(tensors), path, metadata=metadata)
    except SafetensorError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error
    except KeyError as error:
        raise CheckpointError(f"cannot write {path}: safetensors has no type {error.args[0]}") from error
    path.chmod(mode)


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Clone tensors that share the memory of an earlier one, which safetensors refuses."""
    taken: set[int] = set()
    unshared = {}
    for name, value in tensors.items():
        address = value.untyped_storage().data_ptr()
        unshared[name] = value.clone() if value.numel() and address in taken else value
        taken.add(address)
    return unshared


def joined(shards: Iterable[WrittenShard]) -> dict[str, StoredTensor]:
    """Join the shards of all ranks to tensors; CheckpointError unless each element is there once."""
    of_name: dict[str, list[WrittenShard]] = defaultdict(list)
    for shard in shards:
        of_name[shard.name].append(shard)
    return {name: _joined(name, found) for name, found in of_name.items()}


def _joined(name: str, shards: Sequence[WrittenShard]) -> StoredTensor:
    of_region: dict[Region, list[StoredRegion]] = defaultdict(list)
    for shard in shards:
        of_region[shard.part.region].append(shard.part)
    forms = {(shard.dtype, shard.shape) for shard in shards}
    orders = {(shard.part.region, shard.part.strides) for shard in shards}
    if len(forms) > 1 or len(orders) > len(of_region):
        found = {f"{each.dtype} {each.shape} {each.part.region} {each.part.strides}" for each in shards}
        raise CheckpointError(f"ranks have {name} in several forms: {sorted(found)}")
    regions = [
        StoredRegion(
            region, found[0].strides, tuple(sorted(piece for each in found for piece in each.pieces))
        )
        for region, found in of_region.items()
    ]
    return StoredTensor(name, shards[0].dtype, shards[0].shape, tuple(regions))
