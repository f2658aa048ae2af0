"""Hooks of mkdocs.yml: pages are the files that GitHub shows, and their links out of docs/ work on the site too.

A file outside docs/ that a page links to is copied to repository/ on the site; Markdown becomes a page of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)\s#]+)")
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")


def address(path: Path) -> str:
    """Where a file of the repository is on the site."""
    inside = path.is_relative_to(DOCS)
    return str(path.relative_to(DOCS)) if inside else f"repository/{path.relative_to(ROOT)}"


def linked(page: Path) -> Iterator[Path]:
    """The files that a page links to."""
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve()
        if path.is_file():
            yield path


def on_files(files: Any, *, config: Any) -> Any:
    """Add the files outside docs/ that pages link to."""
    pages = [Path(file.abs_src_path) for file in files.documentation_pages()]
    found = [ROOT / name for name in PAGES]
    for page in (*pages, *found):
        found += [path for path in linked(page) if not path.is_relative_to(DOCS)]
    for path in sorted(set(found)):
        inclusion = InclusionLevel.INCLUDED if path.name in PAGES else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, address(path), abs_src_path=str(path), inclusion=inclusion))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Point relative links to where the files are on the site."""
    source = Path(page.file.abs_src_path)

    def moved(found: re.Match[str]) -> str:
        path = (source.parent / found[1]).resolve()
        if not path.is_file():
            return found[0]
        return os.path.relpath(address(path), os.path.dirname(page.file.src_uri) or ".")

    return LINK.sub(moved, markdown)
