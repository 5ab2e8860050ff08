"""Paths as a reader types them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def module_path(declared: Any, prefix: str) -> str:
    """The path of one of the declared modules: ``model``, ``model[0]``, ``generator`` for an entry of a dict."""
    if not prefix:
        return "model"
    if isinstance(declared, Mapping):
        return prefix if prefix.isidentifier() else f"model[{prefix!r}]"
    return f"model[{prefix}]"


def joined(path: str, name: str) -> str:
    """The path of an attribute."""
    return f"{path}.{name}" if name.isidentifier() or "." not in name else f"{path}[{name!r}]"


def entry(path: str, key: Any, shown: str) -> str:
    """The path of an entry: by its key, or by what the key is called where it is an object."""
    return f"{path}[{shown or repr(key)}]"
