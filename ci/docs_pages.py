"""MkDocs hook: pages whose source is not in docs/, and links that hold in the repository and in the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]

# Page of the site: its source in the repository.
PAGES = {
    "index.md": "README.md",
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "measuring.md": "benches/README.md",
}
_IN_SITE = {source: page for page, source in PAGES.items()}

# Not inside of code, whose brackets are no links.
_LINK = re.compile(
    r"(?P<code>`[^`]*`)|(?P<text>!?\[(?P<label>[^]]*)\])\((?P<target>[^)#\s]+)(?P<anchor>#[^)]*)?\)"
)
_FENCE = re.compile(r"(^```.*?^```$)", re.M | re.S)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are not in docs/."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links between files of the repository into links between pages of the site."""
    src_uri = page.file.src_uri
    if src_uri.startswith("dev/"):
        # Users search for other things.
        page.meta["search"] = {"exclude": True}
    if src_uri.startswith("api/") or src_uri in ("measuring.md", "changelog.md", "contributing.md"):
        # Pages that explain come before reference and record.
        page.meta["search"] = {"boost": 0.5}
    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else in_site(part, src_uri) for part in parts)


def in_site(markdown: str, src_uri: str) -> str:
    """The text of a page with its links rewritten; a link to a file that has no page becomes its label."""
    source = PAGES.get(src_uri, f"docs/{src_uri}")

    def rewrite(found: re.Match[str]) -> str:
        if found["code"] or "://" in found["target"]:
            return found[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found["target"]))
        if not (ROOT / target).exists():
            # MkDocs says so.
            return found[0]
        page = _IN_SITE.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if page is None:
            return found["label"]
        relative = posixpath.relpath(page, posixpath.dirname(src_uri) or ".")
        return f"{found['text']}({relative}{found['anchor'] or ''})"

    return _LINK.sub(rewrite, markdown)
