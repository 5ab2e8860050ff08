"""What mkdocs does with pages that look outside of docs/: links to the repository's files, and the changelog."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#|/)([^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Links that leave docs/ lead to the repository, where its address is known (``repo_url``), else they are paths."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")
    changelog = page.file.src_uri == "changelog.md"
    if changelog:
        markdown = (Path(config.config_file_path).parent / "CHANGELOG.md").read_text(encoding="utf-8")

    def resolved(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("" if changelog else folder, link[2]))
        if path.startswith("docs/"):
            return f"[{link[1]}]({posixpath.relpath(path, folder)})"
        return f"[{link[1]}]({config.repo_url.rstrip('/')}/blob/main/{path})" if config.repo_url else f"`{path}`"

    return LINK.sub(resolved, markdown)
