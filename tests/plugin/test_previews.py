"""A cause that is a preview is reported with --trainloop-preview only; the closing section counts what is off."""

from __future__ import annotations

import pytest

from pytest_trainloop.core import registry
from pytest_trainloop.core.registry import Cause
from pytest_trainloop.judging import explain
from tests.helpers.plugin_sessions import all_of_torch_is_loaded  # noqa: F401  a fixture

CONFTEST = """
    from pytest_trainloop import Finding
    from pytest_trainloop.core.registry import Cause, check

    @check(
        needs={"fit"},
        causes={
            "new": Cause(proof="seen", repair="mend it", status="preview", source="https://example.org/1"),
            "known": Cause(proof="seen"),
        },
    )
    def of_the_team(evidence):
        yield Finding(cause="new", summary="something new")
"""

LOOP = """
    import pytest
    import torch
    from pytest_trainloop import TrainLoop

    @pytest.mark.trainloop(only=["of_the_team"])
    def test_loop():
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for x in batches:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=torch.randn(4, 3), fit=fit)
"""


@pytest.fixture
def session(pytester):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(LOOP)
    yield lambda *options: pytester.runpytest("--trainloop", "-p", "no:randomly", *options)
    registry._registered.pop("of_the_team", None)


def test_off_by_default_and_counted(session):
    result = session()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*preview  1 cause not reported: --trainloop-preview reports them too"])


def test_on_by_option(session):
    result = session("--trainloop-preview")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*something new*"])
    result.stdout.no_fnmatch_line("*preview  *")


def test_on_by_the_ini_file(session, pytester):
    pytester.makeini("[pytest]\ntrainloop_preview = true")
    session().assert_outcomes(failed=1)


def test_the_page_says_so(monkeypatch):
    known = registry.registered()["step_order"]
    cause = Cause(proof="seen", status="preview", source="https://example.org/1")
    monkeypatch.setitem(known.causes, "new", cause)
    page = explain.page("step_order:new")
    assert "Described in: https://example.org/1" in page
    assert "A preview: reported with --trainloop-preview only" in page
