"""What mkdocs does with pages that look outside of docs/: links to the repository's files, and the changelog."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Links that leave docs/ lead to the repository, where its address is known (``repo_url``), else they are paths."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")
    if page.file.src_uri == "changelog.md":
        markdown = (Path(config.config_file_path).parent / "CHANGELOG.md").read_text(encoding="utf-8")
        markdown = markdown.replace("](docs/", "](")

    def outside(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        if path.startswith("docs/"):
            return link[0]
        return f"[{link[1]}]({config.repo_url.rstrip('/')}/blob/main/{path})" if config.repo_url else f"`{path}`"

    return LINK.sub(outside, markdown)
