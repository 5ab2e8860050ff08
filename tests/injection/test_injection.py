"""No mistake of this package passes for a verdict: each function that a check enters is made to raise in turn."""

from __future__ import annotations

import os
import random

import pytest

from pytest_trainloop.core import registry
from pytest_trainloop.core.paths import PACKAGE
from pytest_trainloop.core.whose import is_ours
from tests.injection.inject import GOOD, Entered, Function, InjectedError, Mistake, end_of

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="each mistake lives in a fork of this process")

HANDLED = {
    "recording/built_schedulers.py <lambda>": "called by Python for a dead object, where exceptions go no further",
}
"""Functions whose failure is handled, by file and name, each with the reason."""

SAMPLE = (("regression", "step_order"), ("classes", "data_order"))
"""The judgements that the default run samples: two cheap ones. ``-m corpus`` has all loops and all functions."""

SAMPLED = 3
"""Functions of each."""


def is_handled(function: Function) -> bool:
    return f"{function.file} {function.name}" in HANDLED


KINDS = ("InjectedError", "RuntimeError", "AttributeError")


@pytest.mark.parametrize(("loop", "check"), SAMPLE)
def test_a_sample_of_mistakes_ends_as_errors(loop, check):
    entered = Entered()
    entered.note(loop, check)
    functions = sorted(f for f in entered.by if f.file.startswith("checks/") and not is_handled(f))
    for number, function in enumerate(random.Random(check).sample(functions, SAMPLED)):
        end = end_of(function, entered.judgings(function), KINDS[number % len(KINDS)])
        assert end.end in GOOD, f"{function}: {end}"


@pytest.fixture(scope="module")
def entered():
    return Entered.in_all(registry.of)


@pytest.mark.corpus
@pytest.mark.parametrize("kind", KINDS)
def test_every_mistake_ends_as_an_error(entered, kind):
    ends = {function: end_of(function, entered.judgings(function), kind) for function in sorted(entered.by)}
    reached = {function: end for function, end in ends.items() if end.end != "not entered"}
    bad = {function: end for function, end in reached.items() if end.end not in GOOD and not is_handled(function)}
    counted = f"{len(ends)} functions entered, {len(reached)} mistakes injected, {len(bad)} hidden"
    assert not bad, "\n".join([counted, *(f"{f}: {end.end} in {end.judging}: {end.text}" for f, end in bad.items())])


INNER = """
def outer(scale):
    kept = scale + 1
    def inner(value, *, times=2):
        return kept * times * value
    def generated():
        yield kept
    return inner(3), list(generated())
"""


@pytest.mark.parametrize("name", ["outer", "inner", "generated"])
def test_a_mistake_is_put_into_a_function_however_deep_it_is(name):
    made = {}
    exec(compile(INNER, f"{PACKAGE}made_up.py", "exec"), made)
    outer = made["outer"]
    codes = {code.co_name: code for code in (outer.__code__, *outer.__code__.co_consts) if hasattr(code, "co_name")}
    assert outer(1) == (12, [2])
    mistake = Mistake(Function.of(codes[name]))
    outer.__code__ = mistake.within(outer.__code__)
    with pytest.raises(InjectedError) as caught:
        outer(1)
    assert mistake.entered == 1
    assert is_ours(caught.value)
