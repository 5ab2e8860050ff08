"""The user's own line with the repair in it, where one edit of the loss call is the repair. Plain data, no torch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pytest_trainloop.recording.torch_names import LOSSES

if TYPE_CHECKING:
    from collections.abc import Callable

_CALL = re.compile(rf"\b({'|'.join(sorted(LOSSES, key=len, reverse=True))})\(")
_KEYWORD = re.compile(r"(?:pass |give |another )?(\w+)=([\w.'-]+)")


def adapted(cause: str, code: str, repair: str) -> str:
    """The repair with the edited line in front; the repair alone where the line does not hold the whole call."""
    call = _CALL.search(code)
    if call is None:
        return repair
    end = _end(code, call.end())
    if end is None:
        return repair
    arguments = _arguments(code[call.end() : end])
    edited = _EDITS.get(cause, _with_keyword)(call[1], arguments, repair)
    return f"{code[: call.start()]}{edited}{code[end + 1 :]}\n{repair}" if edited else repair


def _renamed(name: str) -> Callable[[str, list[str], str], str]:
    def edited(_function: str, arguments: list[str], repair: str) -> str:
        return f"{name}({', '.join(arguments)})" if repair.startswith(f"use {name}") else ""

    return edited


def _transposed(function: str, arguments: list[str], repair: str) -> str:
    plain = "reshape" not in arguments[0] and "view" not in arguments[0] and repair.startswith("transpose(1, 2)")
    return f"{function}({', '.join([f'{arguments[0]}.transpose(1, 2)', *arguments[1:]])})" if plain else ""


def _swapped(function: str, arguments: list[str], _repair: str) -> str:
    return f"{function}({', '.join([*reversed(arguments[:2]), *arguments[2:]])})" if len(arguments) > 1 else ""


def _with_keyword(function: str, arguments: list[str], repair: str) -> str:
    """With the keyword argument that the repair begins with, in place of another value of it."""
    keyword = _KEYWORD.match(repair)
    if keyword is None or any(a.startswith("*") for a in arguments):
        return ""
    kept = [a for a in arguments if not re.match(rf"{keyword[1]}\s*=", a)]
    return f"{function}({', '.join([*kept, f'{keyword[1]}={keyword[2]}'])})"


_EDITS: dict[str, Callable[[str, list[str], str], str]] = {
    "logits_as_log_probabilities": _renamed("cross_entropy"),
    "class_axis": _transposed,
    "arguments_swapped": _swapped,
}


def _end(code: str, start: int) -> int | None:
    """The position of the parenthesis that closes the one before ``start``."""
    depth = 1
    for i in range(start, len(code)):
        depth += (code[i] in "([{") - (code[i] in ")]}")
        if depth == 0:
            return i
    return None


def _arguments(text: str) -> list[str]:
    """Arguments split at the commas outside of all brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]
