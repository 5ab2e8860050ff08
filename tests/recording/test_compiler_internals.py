"""What torch's compiler does not promise to keep: it fails here first when a new version renames it."""

from __future__ import annotations

import torch
from torch import nn
from torch._dynamo.utils import CompilationMetrics

from pytest_trainloop.recording.compiler_internals import (
    CompilationLog,
    compiled_alone,
    compiling_as_eager,
    fake_results,
    graph_breaks,
    recompile_limit,
    schema_of,
    why_no_capture,
    why_no_generated_code,
)


def test_a_break_has_its_line_and_torchs_words():
    def read(x):
        scale = float(x.sum())
        return x * scale

    with compiling_as_eager():
        torch.compile(read, backend="eager")(torch.ones(2))
        (found,) = graph_breaks()
    assert found.stack[-1][0] == __file__
    assert " " in found.reason


def test_a_compilation_names_the_guard_that_failed():
    state = nn.Linear(2, 2)
    state.calls = 0

    def counted(x):
        state.calls += 1
        return state(x) * state.calls

    with compiling_as_eager():
        log = CompilationLog()
        called = torch.compile(counted, backend="eager")
        called(torch.ones(2))
        first = log.new()
        called(torch.ones(2))
        (again,) = log.new()
        assert log.new() == []
    assert [(one.function, one.again) for one in first] == [("counted", "")]
    assert again.function == "counted"
    if hasattr(CompilationMetrics, "recompile_reason"):  # torch 2.6 keeps none
        assert "calls" in again.again
        assert again.at[0] == __file__


def test_counters_and_settings_are_put_back():
    from torch._dynamo.utils import counters
    from torch._inductor import config

    before = config.fallback_random, {name: dict(found) for name, found in counters.items() if found}
    with compiling_as_eager():
        assert config.fallback_random
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert before == (config.fallback_random, {name: dict(found) for name, found in counters.items() if found})


def test_one_module_is_compiled_alone_and_as_before_afterwards():
    class Half(nn.Module):
        def forward(self, x):
            return x / 2

    module = Half()
    with compiling_as_eager(), compiled_alone(module, "eager"):
        log = CompilationLog()
        module(torch.ones(2))
        assert [one.function for one in log.new()] == ["forward"]
    assert "forward" not in vars(module)


def test_what_can_compile_here():
    assert why_no_capture() == ""
    assert isinstance(why_no_generated_code("cpu"), str)
    assert recompile_limit() > 0


def test_an_operator_as_the_compiler_sees_it():
    (fake,) = [fake_results(torch.ops.aten.t.default, (torch.ones(2, 3),), {})]
    assert tuple(fake.shape) == (3, 2)
    assert schema_of(torch.ops.aten.t.default).startswith("aten::t(")
