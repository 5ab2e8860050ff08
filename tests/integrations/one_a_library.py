"""Which of many loops of libraries are judged by default."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable


def one_a_library(names: Iterable[str], always: str = "dropout") -> pytest.MarkDecorator:
    """Run a test with every name; all but the first of each library, and those that contain ``always``, are a part of
    the marker ``corpus`` as well: one ``train()`` of a library costs a quarter of a second."""
    seen: set[str] = set()
    params = []
    for name in names:
        library = name.partition("-")[0]
        by_default = always in name or library not in seen
        seen.add(library)
        params.append(pytest.param(name, marks=[] if by_default else [pytest.mark.corpus]))
    return pytest.mark.parametrize("name", params)
