"""Collection: one item for each check of a marked function, and a clean error for what cannot be one."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.declare.knobs import read_knobs
from pytest_trainloop.declare.selection import Plan, Selection, choose, marker_selection, validate
from pytest_trainloop.frontends.plugin.nodeids import CARD, ON_CUDA, STEP_TIME
from pytest_trainloop.frontends.plugin.settings import is_strict, read_selections, read_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.registry import Judged

RETURNED = {"trainloop": "a TrainLoop", "trainloop_loss": "a LossContract"}
"""Our markers on functions, and what such a function returns."""

HIDDEN = "trainloop_check"
"""The argument that multiplies a function by its checks, and the marker that says which one an item is."""


REFUSED = "trainloop-refused"
"""The key in the user properties of an item in the place of what was refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedFunction:
    """The plan and the knobs of one marked function."""

    plan: Plan
    knobs: dict[str, str]
    judges: Judged = "loop"


_MARKED = pytest.StashKey[dict[str, MarkedFunction]]()


def marked_function(item: pytest.Item) -> tuple[str, MarkedFunction] | None:
    """The check that an item runs, and its marked function; None for an ordinary test."""
    mark = item.get_closest_marker(HIDDEN)
    if mark is None or not isinstance(item, pytest.Function) or item.parent is None:
        return None
    marked = item.config.stash.get(_MARKED, {}).get(f"{item.parent.nodeid}::{item.originalname}")
    return (str(mark.args[0]), marked) if marked is not None and mark.args else None


class Refused(Exception):
    """A marked function (or class) that would pass unchecked; the message says why, in one sentence."""


class RefusedItem(pytest.Item):
    """An item in the place of what was refused: it fails with the sentence, so that all other tests run."""

    def __init__(self, *, sentence: str, line: int, first: str = "", **given: Any) -> None:
        super().__init__(**given)
        self._sentence = sentence
        self._line = line
        self._first = first
        self.user_properties.append((REFUSED, sentence))

    def runtest(self) -> None:
        if self._first:
            pytest.skip(f"{self._sentence} (see {self._first})")
        raise Refused(self._sentence)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        return str(excinfo.value) if isinstance(excinfo.value, Refused) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int, str]:
        return self.path, self._line, self.name


_REFUSED = pytest.StashKey[dict[str, str]]()


def refused_item(collector: pytest.Collector, name: str, obj: object, sentence: str) -> RefusedItem:
    """The item in the place of what was refused; of several with one sentence the first fails, and the others name
    it."""
    code = getattr(inspect.unwrap(obj), "__code__", None) if callable(obj) else None
    line = code.co_firstlineno - 1 if code is not None else 0
    first = collector.config.stash.setdefault(_REFUSED, {}).setdefault(sentence, f"{collector.nodeid}::{name}")
    again = "" if first == f"{collector.nodeid}::{name}" else first
    return RefusedItem.from_parent(collector, name=name, sentence=sentence, line=line, first=again)


def refuse_test_case(collector: pytest.Collector, case: type) -> None:
    """A TestCase's methods get no fixtures and their return values are dropped: they would pass unchecked."""
    methods = {name: value for base in reversed(case.__mro__) for name, value in vars(base).items()}
    for marker in RETURNED:
        method = next((n for n, value in methods.items() if inspect.isfunction(value) and _marked(value, marker)), None)
        around = collector.get_closest_marker(marker) and any(name.startswith("test") for name in methods)
        if method is not None or around or any(_marked(base, marker) for base in case.__mro__):
            place = f"{case.__name__}.{method}" if method else case.__name__
            raise Refused(
                f"{collector.nodeid}: the {marker} marker is on {place} of a unittest.TestCase; "
                "it needs a function, or a method of a plain class"
            )


def refuse_misuse(metafunc: pytest.Metafunc) -> None:
    """Stop at what would pass unchecked, and at parametrize on a knob."""
    where, function, marker = metafunc.definition.nodeid, metafunc.function, _marker(metafunc)
    for name, returned in RETURNED.items():
        for node, _ in metafunc.definition.iter_markers_with_node(name):
            if node is not metafunc.definition:
                raise Refused(
                    f"{node.nodeid or 'the session'}: the {name} marker is on a {type(node).__name__.lower()}; "
                    f"put it on each function that returns {returned}"
                )
    if all(metafunc.definition.get_closest_marker(name) for name in RETURNED):
        raise Refused(f"{where} is marked {' and '.join(RETURNED)}; one of them is needed")
    kind = _unfit(function)
    if kind:
        raise Refused(
            f"{where} is marked {marker} and is {kind}; a plain function is needed that returns {RETURNED[marker]}"
        )
    try:
        knobs = _knobs(metafunc)
    except UsageError as error:
        raise Refused(f"{where}: {error}") from None
    for name in _parametrized(metafunc):
        knob = next((knob for knob, parameter in knobs.items() if parameter == name), None)
        if knob is not None:
            raise Refused(
                f"{where}: parametrize gives values to {name!r}, the loop's knob {knob!r}, which the checks vary; "
                f"take {name!r} out of parametrize, or drop its default to have a plain parameter"
            )


def one_item_per_check(metafunc: pytest.Metafunc) -> None:
    """Multiply the function by the checks of its plan."""
    try:
        plan = _plan(metafunc)
        knobs = _knobs(metafunc)
    except UsageError as error:
        raise Refused(str(error)) from None
    marked = metafunc.config.stash.setdefault(_MARKED, {})
    marked[metafunc.definition.nodeid] = MarkedFunction(plan=plan, knobs=knobs, judges=_judges(metafunc))
    cuda = read_settings(metafunc.config).device.startswith("cuda") and _judges(metafunc) == "loop"
    items = []
    if metafunc.config.getoption("trainloop"):
        items = [_parameter(check, plan, cuda=cuda) for check in plan.checks] or [_no_check_left()]
    carded = metafunc.config.getoption("trainloop_card") or metafunc.config.getoption("trainloop_report")
    if carded and plan.checks and _judges(metafunc) == "loop":
        items.append(_parameter(CARD, plan, cuda=cuda))
    if metafunc.config.getoption("trainloop_benchmark") and _judges(metafunc) == "loop":
        items.append(_parameter(STEP_TIME, plan, cuda=cuda))
    if items:
        metafunc.fixturenames.append(HIDDEN)
        metafunc.parametrize(HIDDEN, items)


def _plan(metafunc: pytest.Metafunc) -> Plan:
    from pytest_trainloop.core import registry

    known = {name: tuple(check.causes) for name, check in registry.registered().items()}
    own = {name: known[name] for name in registry.of(_judges(metafunc))}
    marker = _marker(metafunc)
    marked = [
        marker_selection(f"{metafunc.definition.nodeid}: the {marker} marker", mark.args, mark.kwargs, own)
        for mark in metafunc.definition.iter_markers(marker)
    ]
    for selection in marked:
        validate(selection, own)
    return choose(known, *marked, *read_selections(metafunc.config), strict=is_strict(metafunc.config), among=own)


def _marker(metafunc: pytest.Metafunc) -> str:
    return next((name for name in RETURNED if metafunc.definition.get_closest_marker(name)), "trainloop")


def _judges(metafunc: pytest.Metafunc) -> Judged:
    return "loss" if _marker(metafunc) == "trainloop_loss" else "loop"


def _parameter(check: str, plan: Plan, *, cuda: bool) -> Any:
    marks = [pytest.mark.trainloop_check(check)]
    if cuda:
        marks.append(pytest.mark.trainloop_cuda)
    if check in plan.skip:
        marks.append(pytest.mark.skip(reason=plan.skip[check]))
    return pytest.param(check, id=check + ON_CUDA if cuda else check, marks=marks)


def _no_check_left() -> Any:
    reason = "no check is left: the marker, the ini file and --trainloop-only choose different ones"
    return pytest.param("none", id="none", marks=[pytest.mark.trainloop_check("none"), pytest.mark.skip(reason=reason)])


def _knobs(metafunc: pytest.Metafunc) -> dict[str, str]:
    if _judges(metafunc) == "loss":
        return _no_knobs(metafunc)
    mapping: dict[str, str] = {}
    for mark in metafunc.definition.iter_markers("trainloop"):
        given = mark.kwargs.get("knobs")
        if given is not None and not isinstance(given, dict):
            return read_knobs(metafunc.function, given)  # says what is wrong with it
        mapping.update(given or {})
    ini: Selection = read_selections(metafunc.config)[0]
    return read_knobs(metafunc.function, mapping, project=ini.knobs)


def _no_knobs(metafunc: pytest.Metafunc) -> dict[str, str]:
    if any("knobs" in mark.kwargs for mark in metafunc.definition.iter_markers("trainloop_loss")):
        raise UsageError("the trainloop_loss marker has no keyword 'knobs': a loss function has none that are varied")
    return {}


def _parametrized(metafunc: pytest.Metafunc) -> Iterator[str]:
    for mark in metafunc.definition.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
        yield from (name.strip() for name in names.split(",")) if isinstance(names, str) else names


def _unfit(function: Any) -> str:
    if inspect.iscoroutinefunction(function):
        return "a coroutine function"
    if inspect.isasyncgenfunction(function):
        return "an async generator"
    if inspect.isfunction(function) and getattr(function, "is_hypothesis_test", False) is True:
        return "wrapped in hypothesis.given"
    return ""


def _marked(thing: Any, marker: str) -> bool:
    marks = vars(thing).get("pytestmark", [])
    marks = marks if isinstance(marks, list) else [marks]
    return any(getattr(mark, "name", None) == marker for mark in marks)
