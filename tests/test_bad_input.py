"""A fault that stops the loop is named by the check it belongs to."""

from __future__ import annotations

import pytest

from tests.helpers.plugin_sessions import (  # noqa: F401  some are fixtures
    all_of_torch_is_loaded,
    builds,
    failure,
    fit,
    one_file,
    the_process_is_left_as_it_was,
)

BACKWARD = """
    for batch in batches:
        optimizer.zero_grad()
        {}.backward()
        optimizer.step()
"""

NAMED = {
    "no-history": (
        fit(BACKWARD.format("mse(model, batch).detach()")),
        "gradient_reaches_every_param",
        "0.weight, 0.bias* get no gradient although the loss depends on them: the graph is cut by "
        "detach(), and torch refuses *",
    ),
    "float": (
        fit(BACKWARD.format("mse(model, batch).item()")),
        "gradient_reaches_every_param",
        "0.weight, 0.bias* get no gradient: the graph is cut by item(), and torch refuses *",
    ),
    "loss-without-history": (
        builds("return loop(fit=None, loss=lambda model, batch: mse(model, batch).detach())"),
        "gradient_reaches_every_param",
        "0.weight, 0.bias* get no gradient although the loss depends on them: the graph is cut by "
        "detach(), and torch refuses *",
    ),
    "optimizer-of-another-model": (
        builds("return loop(optimizer=torch.optim.SGD(mlp().parameters(), lr=0.1))"),
        "optimizer_holds_every_param",
        "the optimizer holds none of the 4 parameters that train: it was built on another copy of the model",
    ),
}


@pytest.mark.parametrize(("source", "check", "summary"), NAMED.values(), ids=list(NAMED))
def test_a_fault_is_named_by_the_check_it_belongs_to(run, source, check, summary):
    result = run(source, f"--trainloop-only={check}")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert result.parseoutcomes()["failed"] == 1
    result.stdout.fnmatch_lines([f"FAILED test_a.py::test_it[[]{check}[]] *"])
    said = failure(result)
    pytest.LineMatcher(said[:1]).fnmatch_lines([summary])
    assert said[-1] == f"more       pytest --trainloop-explain {check}"
    result.stdout.no_fnmatch_line("Traceback*")
