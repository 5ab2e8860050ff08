"""What is said of parameters that the model never registered. Plain data, no torch."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from pytest_trainloop.finding import Finding, code_of
from pytest_trainloop.wording import be, count, some, them, verb

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.recording.parameters import PlainObject
    from pytest_trainloop.tracing.made_at import MadeAt


def not_registered(made: MadeAt, names: Sequence[str], where: str) -> Iterator[Finding]:
    """One finding for each class of plain objects that carry them, and one for those in lists, tuples and dicts."""
    by_class: dict[type | None, list[str]] = {}
    for name in names:
        within = made.plain_object(name)
        by_class.setdefault(within and within.kind, []).append(name)
    for group in by_class.values():
        yield _finding(made, tuple(group), made.plain_object(group[0]), where)


def _finding(made: MadeAt, names: tuple[str, ...], within: PlainObject | None, where: str) -> Finding:
    from pytest_trainloop.tracing.made_at import class_line

    untrained = f"{some(names)} {verb(names, 'get')} gradients but {be(names)} in no optimizer"
    finding = Finding(
        cause="not_registered",
        summary=f"{untrained}: the model never registered {them(names)}",
        measured=f"{count(len(names), 'parameter')} in plain lists, tuples or dicts",
        shown_by="gradients arrive there, and model.parameters() does not have them",
        culprits=names,
        where=where,
        change=made.attribute(names[0]),
    )
    if within is None:
        return finding
    kind, begins = within.kind.__name__, class_line(within.kind)
    return dataclasses.replace(
        finding,
        summary=f"{untrained}: the object at {within.path} is of class {kind}, which is no nn.Module",
        measured=f"{count(len(names), 'parameter')} in {within.path}",
        change=begins or finding.change,
        repair=_repair(within, code_of(begins), names),
    )


def _repair(within: PlainObject, code: str, names: Sequence[str]) -> str:
    """The class line with ``nn.Module`` in it, and what else must become a module."""
    kind = within.kind
    lists = "[" in within.path or any("[" in name.removeprefix(within.path) for name in names)
    also = "\nand nn.ModuleList (nn.ModuleDict) in place of the list (dict) on the way to the layers" if lists else ""
    header = re.fullmatch(r"class (\w+)(?:\((.*)\))?:.*", code)
    if header is None or dataclasses.is_dataclass(kind) or issubclass(kind, (tuple, list, dict)):
        return (
            "assign its layers to attributes of the model, or keep them in an nn.ModuleDict in place of "
            f"{kind.__name__}{also}"
        )
    bases = [base for base in (header[2] or "").split(", ") if base not in ("", "object")]
    forward = "; rename __call__ to forward" if "__call__" in vars(kind) else ""
    return (
        f"class {header[1]}({', '.join(['nn.Module', *bases])}):\n"
        f"with super().__init__() as the first line of its __init__{forward}{also}"
    )
