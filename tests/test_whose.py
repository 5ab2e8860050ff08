"""Whose mistake an exception is (``whose.py``), and that no handler of exceptions forgets to ask."""

from __future__ import annotations

import ast
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from pytest_trainloop.core.errors import CannotDecide, OwnMistake
from pytest_trainloop.core.paths import PACKAGE
from pytest_trainloop.core.whose import is_ours, mistake, of_the_project, project_may_raise, reraise_ours

OURS = """
def raises(): raise ValueError("x")
def raises_on_purpose(mark): raise mark(IndexError(5))
def reads_what_is_not_there(tensor): return tensor.nope
def misses_a_key(mapping): return mapping["nope"]
def asserts(tensor): assert tensor is None
def adds_other_sizes(tensor): return tensor + tensor.new_zeros(7)
def changes_what_it_iterates_over(known):
    for key in known: del known[key]
def calls(function): return function()
def calls_with(function, value): return function(value, value)
def passes_on(function, *args, **kwargs): return function(*args, **kwargs)
def generates(function): yield function()
def takes_the_first(values): return next(generates(values[0]))
def compares(value): return value == value
def reads(value): return value.attribute
def calls_itself_wrongly(): return raises(1)
class Half:
    def begin(self, loop): pass
def calls_a_method_wrongly(half): return half.begin()
def raises_behind_another(function):
    try: function()
    except KeyError: return None.nope
def raises_its_own_from_another(function):
    try: function()
    except KeyError as error: raise ValueError("x") from error
"""
"""Functions that stand in a file of the package, by their code's filename."""


def _user() -> None:
    raise KeyError(1)


def _one_argument(value: object) -> None:
    pass


class _Odd:
    def __eq__(self, other: object) -> bool:
        raise ValueError("no order")

    __hash__ = None

    @property
    def attribute(self) -> None:
        return self.missing


@pytest.fixture(scope="module")
def functions() -> dict:
    module = types.ModuleType("pytest_trainloop.made_up")
    exec(compile(OURS, f"{PACKAGE}made_up.py", "exec"), vars(module))
    return vars(module)


def _raised(function, *given: object) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function(*given)
    return caught.value


@pytest.mark.parametrize(
    ("name", "given", "ours"),
    [
        ("raises", (), True),
        ("raises_on_purpose", (of_the_project,), False),
        ("reads_what_is_not_there", (torch.zeros(3),), True),
        ("misses_a_key", ({},), True),
        ("asserts", (torch.zeros(3),), True),
        ("changes_what_it_iterates_over", ({1: 2, 3: 4},), True),
        ("calls_itself_wrongly", (), True),
        ("raises_behind_another", (_user,), True),
        ("raises_its_own_from_another", (_user,), True),
        ("adds_other_sizes", (torch.zeros(3),), False),
        ("calls", (_user,), False),
        ("calls", (_one_argument,), False),
        ("calls_with", (_one_argument, 1), False),
        ("calls_with", (lambda: 0, 1), False),
        ("passes_on", (torch.relu, "no tensor"), False),
        ("passes_on", (torch.zeros(3).view, 7), False),
        ("passes_on", (np.zeros(3).reshape, 7), False),
        ("passes_on", (_one_argument,), False),
        ("takes_the_first", ([_user],), False),
        ("takes_the_first", ([],), True),
        ("compares", (_Odd(),), False),
        ("reads", (_Odd(),), False),
    ],
)
def test_a_mistake_of_the_package_is_known_by_its_innermost_frame(functions, name, given, ours):
    error = _raised(functions[name], *given)
    assert is_ours(error) is ours
    if ours:
        with pytest.raises(type(error)):
            reraise_ours(error)
        with pytest.raises(type(error)), project_may_raise():
            raise error
    else:
        reraise_ours(error)
        with project_may_raise():
            raise error


def test_a_wrong_call_of_our_own_method_is_ours(functions, monkeypatch):
    error = _raised(functions["calls_a_method_wrongly"], functions["Half"]())
    assert not is_ours(error)  # nothing of this name is known in the package
    known = types.ModuleType("pytest_trainloop.made_up")
    known.Half = type("Half", (), {"__module__": "pytest_trainloop.made_up"})
    monkeypatch.setitem(__import__("sys").modules, "pytest_trainloop.made_up", known)
    assert is_ours(error)


def test_a_signal_between_parts_of_the_package_goes_through():
    with pytest.raises(CannotDecide):
        reraise_ours(CannotDecide("no rows"))


def test_a_signal_is_no_mistake():
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.single_run import SingleRun

    error = _raised(SingleRun(Record()).rerun)
    assert isinstance(error, CannotDecide)
    assert not is_ours(error)


def test_a_mistake_is_told_by_the_last_line_of_the_package(functions):
    told = mistake(_raised(functions["calls"], _user))
    assert (str(told), told.place) == ("KeyError: 1", "pytest_trainloop/made_up.py:10")
    assert "in _user" in told.traceback
    assert mistake(told) is told
    assert isinstance(told, OwnMistake)


# Every handler asks whose it is.

ASK = {"reraise_ours", "is_ours", "note_mistake", "project_may_raise", "goes_on", "passed_over"}

DO_NOT_ASK = {
    "frontends/api.py _once": "gives the verdict on a mistake itself",
    "judging/battery.py run_check": "gives the verdict on a mistake itself",
    "judging/battery.py _verdict": "gives the verdict on a mistake itself",
    "checks/loss/loss_components/states.py call": "keeps it; it is raised behind the run",
    "checks/state/evaluation_is_pure/interposed.py _ours": "keeps it; it is raised behind the run",
    "views/htmlreport/shown.py drawing": "asks for a report in place of the picture",
    "views/outputs/written.py write": "asks for a report in place of the file",
    "views/pictures/report_inputs.py _safely": "asks for a report where the pictures are shown",
    "views/pictures/make.py pictures_of": "asks for a report where the pictures are shown",
    "frontends/plugin/__init__.py pytest_pycollect_makeitem": "raises all but one class of the plugin's own",
    "frontends/plugin/cards.py take": "asks for a report in place of the card",
    "runs/ranks/child.py _run": "sends it to the process that asked",
    "runs/ranks/child.py main": "says that the value cannot be sent, for the process that asked",
    "runs/reachable_state/leaves.py _equal": "compares two objects of the project's, nothing else",
    "runs/batch_stream.py _empty": "asks for a length of the project's, nothing else",
    "runs/guard.py call": "returns it to who asked for the run",
    "frontends/script_runner/session.py _end_here": "prints it, and ends the process, whose main thread waits for ever",
    "frontends/script_runner/session.py _run": "keeps it; it is judged behind the script",
    "frontends/script_runner/stack.py _attribute": "reads an attribute of the project's, nothing else",
}
"""Handlers of any exception that do not ask whose it is, by file and function, each with the reason."""


def _broad(node: ast.expr | None) -> bool:
    named = node.elts if isinstance(node, ast.Tuple) else [node]
    return node is None or any(isinstance(n, ast.Name) and n.id in ("Exception", "BaseException") for n in named)


def _asks(nodes: list[ast.stmt]) -> bool:
    """Whether the handler asks, or raises whatever it caught."""
    called = {getattr(n.func, "id", getattr(n.func, "attr", "")) for s in nodes for n in ast.walk(s)
              if isinstance(n, ast.Call)}  # fmt: skip
    last = nodes[-1]
    return bool(called & ASK) or (isinstance(last, ast.Raise) and last.exc is None)


def _silent(file: Path) -> list[str]:
    found = []

    def look(node: ast.AST, function: str) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        where = f"{file.relative_to(PACKAGE).as_posix()} {function}"
        if isinstance(node, ast.ExceptHandler) and _broad(node.type) and not _asks(node.body):
            found.append(where)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "suppress" and any(map(_broad, node.args)):
            found.append(where)
        for child in ast.iter_child_nodes(node):
            look(child, function)

    text = file.read_text()
    if "except" in text or "suppress" in text:
        look(ast.parse(text), "")
    return found


def test_every_handler_of_any_exception_asks_whose_it_is():
    found = [where for file in sorted(Path(PACKAGE).rglob("*.py")) for where in _silent(file)]
    assert sorted(set(found) - set(DO_NOT_ASK)) == []
    assert sorted(set(DO_NOT_ASK) - set(found)) == []  # nothing is listed that is not there


def test_no_assertion_stands_in_for_an_error_with_a_sentence():
    texts = {file: file.read_text() for file in sorted(Path(PACKAGE).rglob("*.py"))}
    found = [f"{file}:{n.lineno}" for file, text in texts.items() if " assert " in text
             for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Assert)]  # fmt: skip
    assert found == []
