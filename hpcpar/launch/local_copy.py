"""A copy of the Python environment on a node's own disk: made from a stream, private, and taken away again.

    python -m hpcpar.launch.local_copy remove DIRECTORY      on each node, when the job is over

`hpcpar.launch.node_copies` has it made on every node, and the ranks started from it.
"""

from __future__ import annotations

import glob
import os
import queue
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcpar.errors import LaunchError
from hpcpar.launch.environment_trees import Tree, moved_path
from hpcpar.units import format_nbytes

NAME = "hpcpar-env-"
LEFTOVER_S = 3600.0
"""A copy that nobody uses and that is older was left by a job that was killed."""

LIBPYTHON = "libpython"
"""Directory of the copy that has the interpreter's shared library alone: not all that lies beside it."""


AFTER_RANK = "after-rank"
"""What Slurm runs after each rank, however that ended; the node's last one removes the copy.

For a job that is cancelled, or whose time is over, can start no other to do it.
"""

AFTER_RANK_TEXT = """\
#!/bin/sh
# 2(x3),1: two ranks on each of three nodes, one on the fourth.
node=0
for part in $(echo "$SLURM_STEP_TASKS_PER_NODE" | tr , ' '); do
    ranks=${part%%(*} nodes=1
    case $part in *x*) nodes=${part##*x} nodes=${nodes%)} ;; esac
    node=$((node + nodes))
    [ "$SLURM_NODEID" -lt "$node" ] && break
done
copy=${0%/*}
mkdir "$copy/ended/$SLURM_LOCALID"
[ "$(ls "$copy/ended" | wc -l)" -lt "$ranks" ] && exit 0
# Slurm ends what takes longer than 5 s, and says so: then it may go on unseen.
setsid rm -rf "$copy" &
for wait in 1 2 3 4 5 6 7 8; do
    [ -e "$copy" ] || exit 0
    sleep 0.5
done
"""


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """Where the copy lies, which is the same path on every node, and what it is a copy of."""

    directory: str
    trees: tuple[Tree, ...]

    def localized(self, path: str) -> str:
        """The copy's path for one in the environment; others as they are.

        Links are not followed: an environment's `bin/python` is one to the base, and means the environment.
        """
        for prefix in dict.fromkeys((sys.prefix, self.trees[0].source)):
            if path.startswith(prefix + os.sep):
                return os.path.join(self.directory, "env", path[len(prefix) + 1 :])
        moved = moved_path(path, self.trees)
        return path if moved is None else os.path.join(self.directory, moved)

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What has to change in the ranks' environment.

        On PATH and LD_LIBRARY_PATH the copy comes before the original, for the launcher uses these as well,
        on a machine that may have no copy.
        """
        changed = {"PATH": self._before(environ.get("PATH", ""), os.path.join(self.directory, "env", "bin"))}
        libpython = [os.path.join(self.directory, LIBPYTHON)] if any(tree.base for tree in self.trees) else []
        libraries = self._before(environ.get("LD_LIBRARY_PATH", ""), *libpython)
        if libraries:
            changed["LD_LIBRARY_PATH"] = libraries
        if environ.get("PYTHONPATH"):
            changed["PYTHONPATH"] = os.pathsep.join(
                map(self.localized, environ["PYTHONPATH"].split(os.pathsep))
            )
        if environ.get("VIRTUAL_ENV"):
            changed["VIRTUAL_ENV"] = os.path.join(self.directory, "env")
        return changed

    def _before(self, paths: str, *first: str) -> str:
        """A list of directories with the copy's in front of those that it has copies of."""
        found = list(first)
        for path in filter(None, paths.split(os.pathsep)):
            found += [self.localized(path), path]
        return os.pathsep.join(dict.fromkeys(found))


def place_for_copies(wanted: str, environ: Mapping[str, str] = os.environ) -> str:
    """Directory on the nodes' own disks: `wanted`, or $SLURM_TMPDIR, or $TMPDIR, or /tmp."""
    return os.path.abspath(wanted or environ.get("SLURM_TMPDIR") or environ.get("TMPDIR") or "/tmp")


# --- making one


def make_private(directory: str) -> None:
    """Make the copy's directory, which only this user can look into; LaunchError where that is not safe."""
    parent = os.path.dirname(directory)
    try:
        status = os.stat(parent)
    except OSError as error:
        raise _no_place(parent, error) from error
    shared = stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH)
    if status.st_uid not in (0, os.geteuid()) or (shared and not status.st_mode & stat.S_ISVTX):
        raise LaunchError(
            f"{parent} can be changed by other users, who could put their own programs in the copy's place: "
            f"name a directory of yours with --broadcast-to"
        )
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError as error:
        raise LaunchError(
            f"{directory} is there already: {parent} is shared by several nodes, or somebody has guessed the "
            f"name; name a directory on the nodes' own disks with --broadcast-to"
        ) from error
    except OSError as error:
        raise _no_place(parent, error) from error


def _no_place(parent: str, error: OSError) -> LaunchError:
    return LaunchError(
        f"no copy can be made in {parent} ({error.strerror}): name a directory that is on every node with "
        f"--broadcast-to"
    )


def require_room(directory: str, nbytes: int, files: int) -> None:
    """LaunchError unless the disk has room for so much, and a twentieth of it more."""
    room = os.statvfs(directory)
    free = room.f_bavail * room.f_frsize
    if free < nbytes * 1.05:
        raise LaunchError(
            f"the environment takes {format_nbytes(nbytes)}, but {os.path.dirname(directory)} has "
            f"{format_nbytes(free)} left: name another directory with --broadcast-to"
        )
    if room.f_files and room.f_favail < files * 1.05:
        raise LaunchError(
            f"the environment has {files:,} files, but {os.path.dirname(directory)} has room for "
            f"{room.f_favail:,} more: name another directory with --broadcast-to"
        )


class Unpacker:
    """`tar`, fed with pieces of a packed environment while the next ones arrive.

    errors   of feeding come at `close`, so that a node that fails goes on taking part in what all do
    """

    def __init__(self, directory: str) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (`close` closes it)
        try:
            self._tar = subprocess.Popen(
                ["tar", "-x", "-o", "-p", "-f", "-", "-C", directory],
                stdin=subprocess.PIPE,
                stdout=self._said,
                stderr=self._said,
            )
        except OSError as error:
            raise LaunchError(
                f"unpacking the environment takes `tar`, which cannot be run: {error}"
            ) from error
        self._pieces: queue.Queue[memoryview | None] = queue.Queue(maxsize=4)
        self._feeder = threading.Thread(target=self._feed, daemon=True)
        self._feeder.start()

    def feed(self, piece: memoryview) -> None:
        """Take a piece, which must not change any more."""
        self._pieces.put(piece)

    def _feed(self) -> None:
        assert self._tar.stdin is not None
        broken = False
        while (piece := self._pieces.get()) is not None:
            try:
                if not broken:
                    self._tar.stdin.write(piece)
            except OSError:  # tar has ended, and says why
                broken = True
        try:
            self._tar.stdin.close()
        except OSError:
            broken = True

    def close(self) -> None:
        """Wait until everything is unpacked; LaunchError with tar's words where it was not."""
        self._pieces.put(None)
        self._feeder.join()
        status = self._tar.wait()
        self._said.seek(0)
        words = self._said.read().decode("utf-8", "replace").strip()
        self._said.close()
        if status:
            raise LaunchError(f"tar could not unpack the environment: {words[-500:] or f'status {status}'}")


def settle(copy: LocalCopy) -> None:
    """Put the copy's own paths where the environment's stand: `pyvenv.cfg`, scripts, `.pth` files."""
    env = os.path.join(copy.directory, "env")
    base = os.path.join(copy.directory, "base")
    if os.path.isdir(base):
        configuration = Path(env, "pyvenv.cfg")
        text = re.sub(r"(?m)^home\s*=.*$", lambda _: f"home = {base}/bin", configuration.read_text("utf-8"))
        _rewrite(configuration, text.encode())
        os.mkdir(os.path.join(copy.directory, LIBPYTHON), 0o700)
        for library in glob.glob(os.path.join(base, "lib*", "libpython*.so*")):
            os.symlink(library, os.path.join(copy.directory, LIBPYTHON, os.path.basename(library)))
    os.mkdir(os.path.join(copy.directory, "ended"), 0o700)
    after_rank = Path(copy.directory, AFTER_RANK)
    after_rank.write_text(AFTER_RANK_TEXT, "ascii")
    after_rank.chmod(0o700)
    old = sorted({sys.prefix, copy.trees[0].source}, key=len, reverse=True)
    for pattern in ("bin/*", "lib*/python3*/site-packages/*.pth"):
        for name in glob.glob(os.path.join(env, pattern)):
            _replace(Path(name), [prefix.encode() for prefix in old], env.encode())


def _replace(path: Path, old: Sequence[bytes], new: bytes) -> None:
    """In a text file; programs are left alone."""
    if path.is_symlink() or not path.is_file():
        return
    content = path.read_bytes()
    if b"\0" in content[:4096]:
        return
    changed = content
    for prefix in old:
        changed = re.sub(re.escape(prefix) + rb"(?![\w.-])", lambda _: new, changed)
    if changed != content:
        _rewrite(path, changed)


def _rewrite(path: Path, content: bytes) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    path.write_bytes(content)
    path.chmod(mode)


# --- taking it away


def remove(directory: str) -> None:
    """Remove a copy of this user's, if it is still there; LaunchError for anything else."""
    if not os.path.basename(directory).startswith(NAME):
        raise LaunchError(f"{directory} is no copy of an environment: its name does not begin with {NAME}")
    try:
        status = os.lstat(directory)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # where none could be made, none is left
        return
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise LaunchError(f"{directory} is not a directory of this user's: it is left alone")
    shutil.rmtree(directory)


def remove_leftovers(parent: str) -> list[str]:
    """Remove copies that killed jobs of this user have left in a directory; their names."""
    removed = []
    for directory in sorted(glob.glob(os.path.join(glob.escape(parent), f"{NAME}{os.geteuid()}-*"))):
        try:
            status = os.lstat(directory)
            old = time.time() - status.st_mtime > LEFTOVER_S
            if (
                old
                and stat.S_ISDIR(status.st_mode)
                and status.st_uid == os.geteuid()
                and not _is_used(directory)
            ):
                shutil.rmtree(directory)
                removed.append(directory)
        except OSError:
            continue  # another job of ours is removing it
    return removed


def _is_used(directory: str) -> bool:
    """Whether a process was started from the copy."""
    needle = os.fsencode(directory)
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            if needle in Path(path).read_bytes():
                return True
        except OSError:
            continue
    return False


def main(words: Sequence[str]) -> None:
    match words:
        case ["remove", directory]:
            remove(directory)
        case _:
            raise LaunchError(f"{' '.join(words)!r} is not understood: remove DIRECTORY")


if __name__ == "__main__":
    main(sys.argv[1:])
