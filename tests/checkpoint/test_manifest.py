from __future__ import annotations

from pathlib import Path

import pytest

from hpcpar.checkpoint.manifest import FileDigest, Manifest, shares
from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import CheckpointError, PeerFailedError


def test_every_file_is_one_ranks_to_verify_and_ranks_have_about_as_many_bytes() -> None:
    nbytes = {f"f{number}": number * 10 for number in range(1, 12)}
    for size in range(1, 15):
        found = shares(nbytes, size)
        assert len(found) == size
        assert sorted(name for share in found for name in share) == sorted(nbytes)
        loads = [sum(nbytes[name] for name in share) for share in found]
        assert max(loads) - min(loads) <= max(nbytes.values())


def test_a_damaged_file_is_found_whichever_rank_looks_at_it(tmp_path: Path) -> None:
    names = [f"{number}.bin" for number in range(5)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode() * 100)
    manifest = Manifest(step=1, files={name: FileDigest.of(tmp_path / name) for name in names})

    def check(comm: Communicator) -> None:
        with comm.together("verifying"):
            manifest.check_content(tmp_path, rank=comm.rank, size=comm.size)

    run_loopback(3, check)
    for name in names:
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(b"x" + whole[1:])
        with pytest.raises(PeerFailedError, match=rf"{name} is damaged: its SHA-256"):
            run_loopback(3, check)
        (tmp_path / name).write_bytes(whole)


def test_a_format_that_is_to_come_is_refused_with_those_that_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(Manifest(step=1, files={}, format=4).text())
    with pytest.raises(CheckpointError, match="has format 4, this version reads 1 to 3"):
        Manifest.of(tmp_path)
