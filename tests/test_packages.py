"""What is relied on of torch, pytest, hypothesis, pytest-xdist and pytest-benchmark, a test each: with a new version of
one of them, these say first what moved. The page docs/packages.md names the same least versions as pyproject.toml."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from random import Random

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.optim import optimizer as optimizers

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "packages.md").read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \| ([\d., ]+) \|", PAGE, re.M)


@pytest.mark.parametrize(("package", "least", "tested"), ROWS)
def test_the_page_names_the_versions_of_the_project(package, least, tested):
    needed = re.findall(rf'"{package}([<>=!~][^"]*)"', PROJECT)
    assert f">={least}" in needed
    assert all("<" not in bound for bound in needed), "the newest version is installed"
    assert re.search(rf"^## {package}$", PAGE, re.M)
    if package != "torch":
        assert _number(version(package)) >= _number(least)


def test_five_packages_have_their_section():
    assert [row[0] for row in ROWS] == re.findall(r"^## ([\w-]+)$", PAGE, re.M)
    assert len(ROWS) == 5


def _number(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text)[:2]]


def test_checks_run_without_numpy(pytester):
    """Torch does not install it: a new environment has none."""
    pytester.makeconftest("import sys; sys.modules['numpy'] = None")
    pytester.makepyfile(
        """
        import pytest, torch
        from torch import nn
        from pytest_trainloop import TrainLoop

        @pytest.mark.trainloop
        def test_loop():
            model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 2))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

            def step(batch):
                x, y = batch
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

            batches = [(torch.randn(8, 4), torch.arange(8) % 2) for _ in range(12)]
            return TrainLoop(model=model, optimizer=optimizer, step=step, batches=batches, evaluate=lambda: 0.0)
        """
    )
    result = pytester.runpytest_subprocess("--trainloop", "-p", "no:randomly")
    assert result.ret == 0, result.stdout.str()
    result.stdout.fnmatch_lines(["*need more (*pip install numpy*"])


def test_torch_calls_global_hooks_around_each_step_and_none_after_they_are_removed():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    handles = [
        optimizers.register_optimizer_step_pre_hook(lambda *_call: seen.append("before")),
        optimizers.register_optimizer_step_post_hook(lambda *_call: seen.append("after")),
        nn.modules.module.register_module_forward_hook(lambda *_call: seen.append("forward")),
    ]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert seen == ["forward", "before", "after"]


SOURCE = """
    import pytest

    @pytest.mark.parametrize("depth", [1, 2])
    def test_it(depth, request): assert request.node.get_closest_marker("own").args[0] == depth * 10
"""


def test_pytest_multiplies_a_function_last_and_shows_a_text_as_the_failure(pytester):
    class Plugin:
        @pytest.hookimpl(wrapper=True)
        def pytest_generate_tests(self, metafunc):
            done = yield
            metafunc.fixturenames.append("own")
            metafunc.parametrize("own", [pytest.param(n, id=f"own{n}", marks=pytest.mark.own(n)) for n in (10, 20)])
            return done

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_makereport(self, item, call):
            report = yield
            if report.failed:
                report.longrepr = f"text of {item.callspec.id}"
            item.user_properties.append(("key", "value"))
            return report

    pytester.makepyfile(SOURCE)
    result = pytester.runpytest_inprocess("-v", "-p", "no:randomly", plugins=[Plugin()])
    result.assert_outcomes(passed=2, failed=2)
    text = result.stdout.str()
    assert "::test_it[1-own10] PASSED" in text
    assert "text of 1-own20" in text
    assert "Traceback" not in text


def test_hypothesis_finds_the_smallest_case_from_a_seed_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = hypothesis.settings(max_examples=200, database=None, deadline=None)
    lists = st.lists(st.integers(0, 100))
    found = [
        hypothesis.find(lists, lambda rows: sum(rows) > 50, settings=settings, random=Random(seed))
        for seed in (0, 0, 1)
    ]
    assert found == [[51], [51], [51]]
    assert list(tmp_path.iterdir()) == []


def test_xdist_gives_a_scope_to_one_worker():
    scheduling = pytest.importorskip("xdist.scheduler").LoadScopeScheduling
    assert callable(scheduling._split_scope)
    assert pytest.importorskip("xdist.newhooks").pytest_xdist_make_scheduler


REPLAYED = """
    import pytest

    class Clock:
        now = 0.0
        def __call__(self): return self.now

    CLOCK = Clock()

    @pytest.mark.benchmark(timer=CLOCK)
    def test_replayed(benchmark):
        left = iter([3.0, 1.0, 2.0])
        def one_round(): CLOCK.now += next(left)
        benchmark.pedantic(one_round, rounds=3)
        benchmark.extra_info["peak"] = 7
        assert benchmark.enabled
        assert benchmark.stats.stats.data == [3.0, 1.0, 2.0]
"""


def test_pytest_benchmark_takes_times_that_were_measured_elsewhere(pytester, monkeypatch):
    pytest.importorskip("pytest_benchmark")
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    pytester.makepyfile(REPLAYED)
    result = pytester.runpytest_inprocess("-p", "no:randomly", "--benchmark-json=out.json")
    result.assert_outcomes(passed=1)
    assert '"peak": 7' in (pytester.path / "out.json").read_text(encoding="utf-8")
