"""The knobs of a loop: which keyword defaults of the project's function the plugin may vary. Standard library only."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pytest_trainloop.core import places
from pytest_trainloop.core.errors import UsageError

KNOBS = ("accumulate", "precision", "device", "checkpoint", "compile", "ranks")

DEVICES = "auto, cpu, cuda, or one of several as cuda:1,"

_SWITCHES = ("no", "yes", "on", "off", "true", "false", "none", "0", "1", "")

DEFAULTS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "accumulate": ("a whole number from 1 on, as in {}=1,", lambda value: _whole(value) and value >= 1),
    "precision": ('"fp32", "bf16" or "fp16"', lambda value: value in ("fp32", "bf16", "fp16")),
    "device": ('the name of a device, as in {}="cpu",', lambda value: not isinstance(value, (bool, int, float, type))),
    "checkpoint": (
        "True or False",
        lambda value: str(value).lower() not in _SWITCHES or isinstance(value, (bool, int)),
    ),
    "compile": ("True or False", lambda value: str(value).lower() not in _SWITCHES or isinstance(value, (bool, int))),
    "ranks": (
        "a whole number from 1 on, as in {}=1,",
        lambda value: not isinstance(value, (str, float, bool)) and not (_whole(value) and value < 1),
    ),
}
"""What the default of each knob must be, since the plugin sets values of that kind. None is one for all: not set. Other
words for ``checkpoint`` and ``compile`` name a folder or a kind, and are not varied."""

_SLIP = 7
"""Letters of the shortest knob that a parameter with one letter wrong is taken for."""


def is_device(name: object) -> bool:
    """Whether loops can be asked to run on a device of this name."""
    return isinstance(name, str) and re.fullmatch(r"auto|cpu|cuda(:\d+)?", name) is not None


def read_knobs(
    function: Callable[..., Any], mapping: Mapping[str, str] | None = None, project: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The parameter of ``function`` behind each knob that it offers.

    A keyword default with a knob's own name is that knob; ``mapping`` names further ones, ``{"use_checkpoint":
    "checkpoint"}``. ``project`` does so for all functions that have such a parameter. Raises ``UsageError`` for an
    unknown knob, for a name in ``mapping`` that is no keyword default, for a default of another kind than the knob's
    values, and for a parameter that is a knob but for one letter.
    """
    defaults = list(_keyword_defaults(function))
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
    found = {knob: (own | mapped)[knob] for knob in KNOBS if knob in own or knob in mapped}
    _require_kinds(function, found)
    _require_no_slip(function, found)
    return found


def require_defaults(function: Callable[..., Any], caller: str) -> None:
    """Raise ``UsageError`` where a function that is called with knobs only has a parameter without a default."""
    for name, parameter in _parameters(function).items():
        if parameter.default is inspect.Parameter.empty and parameter.kind not in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        ):
            raise UsageError(
                f"{_name(function)} takes {name!r}, which has no default, and {caller} calls it with knobs only; give "
                f"it a default{_as_in(name)}",
                place=places.of_function(function),
            )


def without_default(function: Callable[..., Any], name: str) -> UsageError:
    """The refusal of a parameter that has a knob's name and no default."""
    return UsageError(
        f"{_name(function)} takes {name!r} without a default, and no fixture has that name; a knob needs a default"
        f"{_as_in(name)}",
        place=places.of_function(function),
    )


def _as_in(name: str) -> str:
    examples = {"accumulate": "1", "precision": '"fp32"', "device": '"cpu"', "ranks": "1"}
    return f", as in {name}={examples.get(name, 'False')}" if name in KNOBS else ""


def _require_kinds(function: Callable[..., Any], knobs: Mapping[str, str]) -> None:
    defaults = _keyword_defaults(function)
    for knob, name in knobs.items():
        needed, fits = DEFAULTS[knob]
        if name not in defaults or defaults[name] is None or fits(defaults[name]):
            continue
        what = name if name == knob else f"{name} (the knob {knob})"
        raise UsageError(
            f"the default of {what} in {_name(function)} is {defaults[name]!r}; {needed.format(name)} is needed",
            place=places.of_function(function),
        )


def _require_no_slip(function: Callable[..., Any], knobs: Mapping[str, str]) -> None:
    """Refuse ``acumulate=1``: a longer knob's name with one letter left out, added, changed or swapped with the next.
    An ending (``compiled``, ``checkpoints``) makes another word of it."""
    for name in _keyword_defaults(function):
        for knob in KNOBS:
            other = name in knobs.values() or knob in knobs or name.startswith(knob) or knob.startswith(name)
            if not other and len(knob) >= _SLIP and _one_letter_off(name, knob):
                raise UsageError(
                    f"{_name(function)} has a parameter {name!r}, one letter from the knob {knob!r}; write {knob}=, or "
                    f"map it: knobs={{{name!r}: {knob!r}}}",
                    place=places.of_function(function),
                )


def _one_letter_off(given: str, name: str) -> bool:
    """Whether one letter left out, added or changed, or two neighbours swapped, make one word of the other."""
    if abs(len(given) - len(name)) > 1 or given == name:
        return False
    start = next((i for i, (a, b) in enumerate(zip(given, name, strict=False)) if a != b), min(len(given), len(name)))
    a, b = given[start:], name[start:]
    return a[1:] == b or a == b[1:] or a[1:] == b[1:] or (a[:2] == b[:2][::-1] and a[2:] == b[2:])


def near(given: str, known: Iterable[str]) -> str:
    """The most similar known name, if one is near enough; else empty."""
    import difflib

    return next(iter(difflib.get_close_matches(given, list(known), n=1)), "")


OF_THE_MARKER = ("only", "skip", "xfail", "knobs")
"""Keywords of the marker, besides the names of checks with their options."""


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


def _keyword_defaults(function: Callable[..., Any]) -> dict[str, Any]:
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    empty = inspect.Parameter.empty
    return {
        name: p.default for name, p in _parameters(function).items() if p.kind in by_keyword and p.default is not empty
    }


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C, without a signature
        return {}


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", None) or repr(function)
