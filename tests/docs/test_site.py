"""README and the pages of docs/: links, anchors, nav, blocks, and the pages that are made from the code."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from difflib import unified_diff
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import click
import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
CODE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")


def of_docs(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of docs/, which find each other beside them."""
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module(name)


@pytest.fixture
def run_blocks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return of_docs("run_blocks", monkeypatch)


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return of_docs("generate", monkeypatch)


def prose(page: Path) -> str:
    return CODE.sub("", page.read_text("utf-8"))


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as Python-Markdown makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).encode("ascii", "ignore").decode()
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", words).strip().lower()))
    return found


def dangling(page: Path) -> list[str]:
    """Links of a page to no file, or to no heading."""
    wrong = []
    for link in LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_file() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            wrong.append(f"{page.relative_to(ROOT)}: {link}")
    return wrong


def test_every_link_and_anchor_points_to_something() -> None:
    assert sum(len(LINK.findall(prose(page))) for page in PAGES) > 150
    assert [link for page in PAGES for link in dangling(page)] == []


def test_a_link_to_no_file_and_one_to_no_heading_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "b.md").write_text("# Which `srun`, and *why*?\n```sh\n# no heading\n```\n")
    page = tmp_path / "a.md"
    page.write_text("[1](b.md#which-srun-and-why) [2](b.md#no-heading) [3](c.md) [4](https://example.org)")
    assert dangling(page) == ["a.md: b.md#no-heading", "a.md: c.md"]


def test_lists_and_blocks_are_written_as_the_site_reads_them() -> None:
    # On a forge a list may follow its sentence at once, and hold a block; in the site these would be prose.
    for page in PAGES:
        lines = ["", *page.read_text("utf-8").splitlines()]
        assert not [line for line in lines if re.match(r" {1,3}```", line)], page
        text = ["", *prose(page).splitlines()]
        begun = [
            line
            for before, line in pairwise(text)
            if re.match(r"- |\d+\. |\|", line) and not re.match(r"- |\d+\. |  |\||$", before)
        ]
        assert begun == [], page


def test_every_page_is_in_the_nav_once_and_the_nav_names_no_other() -> None:
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    named = re.findall(r"([\w/.-]+\.md)$", nav, re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in PAGES[1:])


def test_a_source_distribution_has_what_the_readme_links_to() -> None:
    manifest = (ROOT / "MANIFEST.in").read_text("utf-8")
    grafted = re.findall(r"^graft (\S+)$", manifest, re.MULTILINE)
    linked = {link.partition("#")[0] for link in LINK.findall(prose(ROOT / "README.md"))}
    assert {"docs/install.md", "SECURITY.md"} <= linked
    assert all(link.partition("/")[0] in grafted for link in linked if "/" in link)
    assert all(fnmatch(link, "*.md") for link in linked if "/" not in link)
    assert "include Makefile LICENSE *.md mkdocs.yml" in manifest


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 1500


def test_the_site_asks_no_other_server() -> None:
    told = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert re.search(r"^  font: false$", told, re.MULTILINE)
    assert "http" not in told.partition("markdown_extensions")[0]
    assert "polyfills: [assets/iframe-worker.js]" in told  # else the plugin adds one from a server
    assert not [
        page for page in PAGES if re.search(r"!\[[^]]*\]\(http|<script|<img", page.read_text("utf-8"))
    ]


def test_every_block_is_of_a_known_language_and_every_mark_belongs_to_a_block(run_blocks: ModuleType) -> None:
    for page in PAGES:
        text = page.read_text("utf-8")
        blocks = list(run_blocks.blocks_of(text, page.name))
        assert {block.language for block in blocks} <= {"sh", "console", "python", "text", "toml", "diff"}, (
            page
        )
        assert sum(block.why is not None for block in blocks) == text.count("<!-- not run"), page
        for block in blocks:
            if block.language == "python":
                compile(block.text, f"{page}:{block.line}", "exec")
            elif block.language in run_blocks.SHELL:
                subprocess.run(["bash", "-n", "-c", block.text], check=True, timeout=30)


def test_commands_that_a_plain_machine_lacks_are_marked(
    run_blocks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_blocks, "has_slurm", lambda: False)
    lacks = ("srun", "sbatch", "scancel", "scontrol", "module", "horovodrun", "pip", "apt-get")
    for page in run_blocks.pages():
        for block in run_blocks.blocks_of(page.read_text("utf-8"), page.name):
            if block.language in run_blocks.SHELL and not block.is_left_out:
                begins = {line.split(" ", 1)[0] for line in run_blocks.script_of(block).splitlines()}
                assert not begins & set(lacks), f"{page.name}:{block.line}"


TEXT = """
<!-- not run: why not -->

```sh
sleep 1
```
  ```python title="a.py"
  x = 1
  ```
<!-- not run (srun): no Slurm -->
```sh
srun a
test -z "$ARGS$MAKEFLAGS"    # words
python -c "raise ValueError(3)"    # ValueError: 3
```
```text
output
```
"""


def test_blocks_are_read_with_their_marks_and_run_as_told(
    run_blocks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MAKELEVEL": "1", "ARGS": "--page a", "MAKEFLAGS": " -- ARGS=--page\\ a"}.items():
        monkeypatch.setenv(name, value)
    one, two, three, four = run_blocks.blocks_of(TEXT, "page")
    assert (one.line, one.text, one.why, one.is_left_out) == (4, "sleep 1\n", "why not", True)
    assert (two.language, two.title, two.text, two.why) == ("python", "a.py", "x = 1\n", None)
    assert (three.words, three.is_left_out, four.language) == (("srun",), False, "text")
    monkeypatch.setattr(run_blocks, "has_slurm", lambda: False)
    assert [run_blocks.run(block, tmp_path) for block in (one, two, three)] == [None] * 3
    monkeypatch.setattr(run_blocks, "has_slurm", lambda: True)
    assert run_blocks.script_of(three).splitlines()[:2] == ["set -eo pipefail", "srun a"]
    assert (tmp_path / "a.py").read_text() == "x = 1\n"
    with pytest.raises(ValueError, match="page:1: this block has no end"):
        list(run_blocks.blocks_of("```sh\nls", "page"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("```sh\necho before; false\necho after\n```", "exit status 1\nbefore\n"),
        ("```sh\necho fine    # ValueError: 3\n```", "this was to fail"),
        ("```python\n1 / 0\n```", "ZeroDivisionError"),
        ("```console\n$ exit 4\nan answer\n```", "exit status 4"),
    ],
)
def test_a_block_that_fails_is_told(run_blocks: ModuleType, tmp_path: Path, text: str, told: str) -> None:
    (block,) = run_blocks.blocks_of(text, "page")
    assert told in run_blocks.run(block, tmp_path)


def test_pages_that_begin_by_training_share_one_training_and_no_other_file(
    run_blocks: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run_blocks, "TRAIN", "touch trained")
    monkeypatch.setattr(
        run_blocks, "copy_of_files", lambda directory: (directory / ".home").mkdir(parents=True)
    )
    monkeypatch.setattr(run_blocks, "name_of", lambda page: page.stem)
    texts = {
        "a": "```sh\ntouch trained    # sets up, too\necho more >>trained\n```",
        "b": "```sh\ntest ! -e trained\ntest ! -e other; touch other\n```",
        "c": "```sh\ntest ! -e other\n```\n```sh\ntouch trained\ntest ! -s trained\n```",
    }
    pages = [tmp_path / f"{name}.md" for name in texts]
    for page in pages:
        page.write_text(texts[page.stem])
    assert list(run_blocks.run_pages(pages, 60)) == [True] * 5
    told = capsys.readouterr().out
    assert [line.split(":")[0] for line in told.splitlines()] == ["touch trained", "a", "b", "c", "c"]
    assert list(run_blocks.run_pages(pages, -1)) == []
    assert capsys.readouterr().out.splitlines() == [f"{name}  not run: the time is up" for name in texts]


def test_the_changes_of_a_ddp_script_on_the_page_are_those_of_the_two_programs(
    run_blocks: ModuleType,
) -> None:
    text = (DOCS / "bring-your-own.md").read_text("utf-8")
    (shown,) = (block.text for block in run_blocks.blocks_of(text, "page") if block.language == "diff")
    before, after = (
        (ROOT / "examples" / name).read_text("utf-8").split('"""\n\n', 1)[1].splitlines()
        for name in ("torch_ddp.py", "ddp_by_hpcpar.py")
    )
    changes = list(unified_diff(before, after, n=1, lineterm=""))[2:]
    assert shown.splitlines() == [line.rstrip() for line in changes]


def test_the_reference_pages_are_those_of_the_code() -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_table_of_the_benchmark_page_is_made_of_results() -> None:
    text = (DOCS / "benchmarks.md").read_text("utf-8")
    assert len(re.findall(r"^<!-- table: [\w-]+ -->\n\n\|", text, re.MULTILINE)) == text.count("\n|---") > 10


def test_an_option_without_a_description_is_named(generate: ModuleType) -> None:
    silent = click.Command("quiet", params=[click.Option(["--loud"])])
    with pytest.raises(SystemExit, match="quiet describes no --loud"):
        generate.help_of(silent, click.Context(silent, info_name="quiet"))


def test_columns_of_a_docstring_are_read_with_their_further_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = of_docs("columns", monkeypatch)
    lines = ["a, b   first", "       line", "long name  of | x"]
    assert columns.rows_of(lines) == [("a, b", "first line"), ("long name", "of | x")]
    assert columns.rows_of(["Prose with  two spaces", "and more."]) is None
    assert columns.rows_of(["*   an item", "    of a list"]) is None
    assert columns.cell("a | `b | *` *c") == r"a \| `b \| *` \*c"
