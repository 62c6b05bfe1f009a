"""Hook of mkdocs: files of the repository that a page links to become files of the site.

A page links to ../examples/train.py, as on a forge. In the site that is source/examples/train.py.txt, which
any browser shows.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)\)")


def outside(link: str, page: str) -> str | None:
    """Return the path in the repository of a link out of docs/; None for a link within it."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith("docs/") else path


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add each linked file once, as text."""
    linked = set()
    for page in files.documentation_pages():
        found = (outside(link, page.src_uri) for link in LINK.findall(page.content_string))
        linked |= {path for path in found if path is not None}
    for path in sorted(linked):
        text = (ROOT / path).read_text("utf-8")
        files.append(File.generated(config, f"source/{path}.txt", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links at these files."""
    up = posixpath.relpath(".", posixpath.dirname(page.file.src_uri) or ".")

    def within(match: re.Match[str]) -> str:
        path = outside(match[1], page.file.src_uri)
        return match[0] if path is None else f"]({up}/source/{path}.txt)"

    return LINK.sub(within, markdown)
