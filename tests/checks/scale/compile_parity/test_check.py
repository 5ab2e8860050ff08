"""What the check says where it cannot decide, and what it leaves behind."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from pytest_trainloop.checks.scale.compile_parity import parity
from pytest_trainloop.frontends.api import check_loop
from tests.checks.scale.compile_parity.compiled_loops import BACKEND, CHECK, Classifier, compiling, plain


def result_of(make, **chosen):
    (result,) = check_loop(make, only=[CHECK], raises=False, **chosen).results
    return result


@compiling
def kept(model, compile):
    return torch.compile(model, backend=BACKEND) if compile else model


def test_without_the_knob():
    result = result_of(lambda: kept())
    assert (result.outcome, result.applies) == ("skipped", False)
    assert "compile=False" in result.reason


def test_a_knob_that_names_a_kind_is_not_varied():
    def make(compile="inductor-kind"):
        return plain(Classifier())

    result = result_of(make)
    assert result.outcome == "skipped"
    assert "no True or False" in result.reason


def test_a_knob_that_compiles_nothing():
    result = result_of(compiling(lambda model, compile: model))
    assert (result.outcome, result.needs) == ("skipped", "compile=")
    assert "torch.compile was not called" in result.reason


def test_where_torch_cannot_compile(monkeypatch):
    monkeypatch.setattr(parity, "why_no_capture", lambda: "Python 3.99+ not yet supported for torch.compile")
    result = result_of(kept)
    assert result.outcome == "skipped"
    assert result.reason == "torch.compile cannot run here: Python 3.99+ not yet supported for torch.compile"


def test_without_a_compiler_for_generated_code_the_other_stages_are_judged(monkeypatch):
    monkeypatch.setattr(parity, "why_no_generated_code", lambda device: "no C++ compiler was found")

    @compiling
    def by_inductor(model, compile):
        return torch.compile(model) if compile else model

    result = result_of(by_inductor)
    assert result.outcome == "skipped"
    assert result.reason.startswith("inductor could not be tried: no C++ compiler was found. With aot_eager")


def test_a_fault_is_found_without_a_compiler_as_well(monkeypatch):
    monkeypatch.setattr(parity, "why_no_generated_code", lambda device: "no C++ compiler was found")

    @compiling
    def twice(model, compile):
        return torch.compile(lambda x: 2 * model(x)) if compile else model

    assert [f.cause for f in result_of(twice).findings] == ["other_computation"]


def test_another_backend_for_this_check():
    @compiling
    def by_inductor(model, compile):
        return torch.compile(model) if compile else model

    assert result_of(by_inductor, options={CHECK: {"backend": "eager"}}).outcome == "passed"


def test_an_unknown_backend():
    with pytest.raises(Exception, match="the option backend is 'nvfuser'; own, eager, aot_eager, inductor are known"):
        result_of(kept, options={CHECK: {"backend": "nvfuser"}})


def test_a_loop_without_optimizer_steps():
    def make(compile=False):
        model = Classifier()
        called = torch.compile(model, backend=BACKEND) if compile else model

        def fit(batches):
            for x, y in batches:
                loss = torch.nn.functional.cross_entropy(called(x), y)
                gradients = torch.autograd.grad(loss, list(model.parameters()))
                with torch.no_grad():
                    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                        parameter -= 0.1 * gradient

        loop = plain(model)
        loop.fit, loop.optimizer = fit, None
        return loop

    result = result_of(make)
    assert result.outcome == "skipped"
    assert "no step of a torch optimizer" in result.reason


def test_a_loop_that_differs_from_itself():
    clock = iter(range(1, 10**6))

    def make(compile=False):
        model = Classifier()
        called = torch.compile(model, backend=BACKEND) if compile else model
        return plain(model, lambda x: called(x) * next(clock))

    assert result_of(make).outcome == "unreliable"


def test_what_is_left_behind():
    from torch._dynamo.utils import counters

    before = (torch.compile, torch.jit.trace, torch.get_default_dtype(), torch.get_rng_state(), dict(counters["stats"]))
    children = multiprocessing.active_children()
    assert result_of(kept).outcome == "passed"
    after = (torch.compile, torch.jit.trace, torch.get_default_dtype(), torch.get_rng_state(), dict(counters["stats"]))
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(before, after, strict=True))
    assert multiprocessing.active_children() == children
