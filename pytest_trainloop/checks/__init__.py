"""The registry of checks: a check is a function from evidence to findings, plus data about it.

Every module of this package is one check and is found by its being here. Nothing in it imports torch at module top.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pytest_trainloop.finding import Finding

    Property = Callable[[Any], Iterable[Finding]]

Family = Literal["wiring", "loss", "numerics", "batch", "learning", "state", "scale", "guard", "project"]

Judged = Literal["loop", "loss"]
"""What a check judges: a ``TrainLoop``, or a ``LossContract``."""

FAMILIES: tuple[Family, ...] = (
    "wiring",
    "loss",
    "numerics",
    "batch",
    "learning",
    "state",
    "scale",
    "guard",
    "project",
)
"""The families in causal order: a fault in an earlier one may explain failures in a later one."""


@dataclass(frozen=True, slots=True)
class Check:
    """One registered check.

    ``needs`` are fields of its subject without which it is skipped ("fit" is met by ``fit`` or ``step``);
    ``causes`` maps each slug that it
    can name to the observation that proves it; ``page`` is its rule page, the docstring of its module.
    """

    name: str
    decide: Property
    family: Family
    rank: int
    needs: frozenset[str]
    causes: Mapping[str, str]
    page: str
    module: str
    subject: Judged = "loop"

    @property
    def headline(self) -> str:
        """The first line of the rule page."""
        return self.page.strip().partition("\n")[0].rstrip(".")


_registered: dict[str, Check] = {}


def check(
    *,
    causes: Mapping[str, str],
    needs: Iterable[str] = (),
    family: Family = "project",
    rank: int = 100,
    subject: Judged = "loop",
) -> Callable[[Property], Property]:
    """Register a function from evidence to findings as a check of the function's name.

    ``causes`` maps each cause that the check may name to the observation that proves it; a finding of any other cause
    is an error.
    ``rank`` orders the checks of one family; ``subject`` is "loss" for a property of a loss function. Raises
    ``ValueError`` for a name that another module has registered, and for no causes.

    >>> @check(needs={"fit"}, causes={"too_few_steps": "fewer than two optimizer steps in the record"})
    ... def steps_at_all(evidence): ...
    """
    if not causes:
        raise ValueError("a check needs at least one cause: causes={'slug': 'the observation that proves it'}")

    def register(function: Property) -> Property:
        name = function.__name__
        earlier = _registered.get(name)
        if earlier is not None and earlier.module != function.__module__:
            raise ValueError(f"a check named {name!r} is already registered by {earlier.module}")
        module = inspect.getmodule(function)
        _registered[name] = Check(
            name=name,
            decide=function,
            family=family,
            rank=rank,
            needs=frozenset(needs),
            causes=dict(causes),
            page=inspect.cleandoc((module.__doc__ if module and family != "project" else function.__doc__) or name),
            module=function.__module__,
            subject=subject,
        )
        return function

    return register


def registered() -> dict[str, Check]:
    """Every check by name, in causal order: ours, and those that the project has registered so far."""
    for found in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{found.name}")
    return dict(sorted(_registered.items(), key=lambda kv: (*_place(kv[1]), kv[0])))


def of(subject: Judged) -> dict[str, Check]:
    """The checks that judge one kind of subject, in causal order."""
    return {name: check for name, check in registered().items() if check.subject == subject}


def _place(check: Check) -> tuple[bool, int, int]:
    return check.subject == "loss", FAMILIES.index(check.family), check.rank
