"""The knobs of a loop: which keyword defaults of the project's function the plugin may vary. Standard library only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pytest_trainloop.errors import UsageError

KNOBS = ("accumulate", "precision", "device", "checkpoint", "compile", "ranks")


def read_knobs(
    function: Callable[..., Any], mapping: Mapping[str, str] | None = None, project: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The parameter of ``function`` behind each knob that it offers.

    A keyword default with a knob's own name is that knob; ``mapping`` names further ones, ``{"use_checkpoint":
    "checkpoint"}``. ``project`` does so for all functions that have such a parameter. Raises ``UsageError`` for an
    unknown knob and for a name in ``mapping`` that is no keyword default.
    """
    defaults = _keyword_defaults(function)
    mapped: dict[str, str] = {}
    shared = {name: knob for name, knob in _checked(project).items() if name in defaults or knob not in KNOBS}
    for name, knob in (shared | dict(_checked(mapping))).items():
        if knob not in KNOBS:
            raise UsageError(f"knobs maps {name!r} to {knob!r}, which is no knob; {nearest(knob, KNOBS)}")
        if name not in defaults:
            hint = nearest(name, defaults) if defaults else "it has no keyword defaults"
            raise UsageError(f"knobs names {name!r}, which is no keyword default of {_name(function)}; {hint}")
        if knob in mapped:
            raise UsageError(f"knobs maps both {mapped[knob]!r} and {name!r} to {knob!r}; one parameter is needed")
        mapped[knob] = name
    taken = set(mapped.values())
    own = {knob: knob for knob in KNOBS if knob in defaults and knob not in taken}
    return {knob: (own | mapped)[knob] for knob in KNOBS if knob in own or knob in mapped}


def nearest(given: str, known: Iterable[str]) -> str:
    """The end of a message about a name that nothing has: the nearest name there is."""
    import difflib  # not free at start-up

    match = difflib.get_close_matches(given, list(known), n=1, cutoff=0.0)
    return f"the nearest name is {match[0]!r}" if match else "there are no names to choose from"


def _checked(mapping: Mapping[str, str] | None) -> Mapping[str, str]:
    if mapping is None:
        return {}
    if not isinstance(mapping, Mapping):
        raise UsageError(
            f"knobs is {mapping!r}; a dict from parameter to knob is needed, as in {{'use_checkpoint': 'checkpoint'}}"
        )
    for name, knob in mapping.items():
        if not isinstance(name, str) or not isinstance(knob, str):
            raise UsageError(f"knobs holds {name!r}: {knob!r}; both must be strings: your parameter, then the knob")
    return mapping


def _keyword_defaults(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        return []
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in by_keyword and p.default is not inspect.Parameter.empty]


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", None) or repr(function)
