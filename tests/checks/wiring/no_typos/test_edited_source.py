"""Functions that run with an edited statement, and as before afterwards."""

from __future__ import annotations

import ast
import builtins
import random

from pytest_trainloop.checks.wiring.no_typos.edited_source import PREFIX, edited
from pytest_trainloop.core.places import syntax_of
from pytest_trainloop.frontends.api import check_loop
from tests.checks.wiring.no_typos.faults import net
from tests.loops import data
from tests.loops.plain import cross_entropy, loop

NOTE = f"{PREFIX}note"


def doubled(x):
    y = 2 * x
    return y + 1


def outer(x):
    scale = 3

    def inner():
        z = scale * x
        return z  # noqa: RET504

    return inner()


def _statement(text):
    return next(n for n in ast.walk(syntax_of(__file__)) if isinstance(n, ast.Assign) and ast.unparse(n) == text)


def _edit(old, new):
    return __file__, _statement(old), ast.parse(new).body


def test_edited_statements_run_and_the_functions_are_as_before():
    code, noted = doubled.__code__, []
    with edited([_edit("y = 2 * x", f"{NOTE}(x)\ny = 5 * x"), _edit("z = scale * x", "z = -x")], {NOTE: noted.append}):
        assert (doubled(2), outer(2)) == (11, -2)
    assert (doubled(2), outer(2), noted, doubled.__code__) == (5, 6, [2], code)
    assert not hasattr(builtins, NOTE)
    assert ast.unparse(_statement("y = 2 * x")) == "y = 2 * x"


def noisy(model, batch):
    x, y = batch
    x.clamp(-0.1, 0.1)
    return cross_entropy(model, (x, y)) * (1 + random.SystemRandom().random())


def test_a_loop_whose_runs_differ_is_not_accused():
    (result,) = check_loop(lambda: loop(net(), data.labelled(), noisy), only=["no_typos"], raises=False).results
    assert (result.outcome, "under one seed" in result.reason) == ("skipped", True)
