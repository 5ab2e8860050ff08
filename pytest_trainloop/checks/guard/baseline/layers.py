"""Numbers and switches that layers of torch's own were built with: ``p`` of a dropout, ``eps`` of a norm."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_trainloop.baselines.trajectory import Course
    from pytest_trainloop.checks.guard.baseline.names import Names

_OPTION = re.compile(r"(\w+)=(\([^()]*\)|[^,()]+)")


def other_options(
    old: Course, new: Course, names: Names, path: str, before: str = ""
) -> tuple[tuple[str, str, str], ...]:
    """By name what a layer was built with in the baseline, and is now; ``before`` is its path there (default: that of
    its tensors). Empty where one of the two has no such layer."""
    then = before or next((a for a, b in names.modules.items() if b == path), path)
    if then not in old.layers or path not in new.layers:
        return ()
    was, is_ = (dict(_OPTION.findall(text)) for text in (old.layers[then], new.layers[path]))
    return tuple((name, was[name], value) for name, value in is_.items() if name in was and was[name] != value)


def said(options: tuple[tuple[str, str, str], ...], path: str) -> str:
    """``p of drop is 0.2; in the baseline 0.1``."""
    return ", ".join(f"{name} of {path} is {now}; in the baseline {was}" for name, was, now in options)
