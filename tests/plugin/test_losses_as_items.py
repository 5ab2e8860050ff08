"""A loss function by itself, as test items: what the marker, the options and the reports make of it."""

from __future__ import annotations

import json

import hypothesis
import pytest

from pytest_trainloop import LossContract, check_loss

LOSS = """
    import pytest, torch
    import torch.nn.functional as F
    from pytest_trainloop import LossContract

    def mean_of_all(logits, target):
        return F.cross_entropy(logits, target, reduction="none").mean()

    def contract(criterion, **more):
        return LossContract(criterion=criterion, expects="logits", num_classes=3, ignore_index=-100, **more)

    @pytest.mark.trainloop_loss{marker}
    def test_mean():
        return contract(mean_of_all)
"""

NO_CHECK = "*the {} marker: {} names '{}', which matches no check; the nearest name is *"

REFUSED = {
    "two markers": (
        "@pytest.mark.trainloop\n@pytest.mark.trainloop_loss\ndef test_focal(): ...",
        "*::test_focal is marked trainloop and trainloop_loss; one of them is needed",
    ),
    "a check of loops": (
        "@pytest.mark.trainloop_loss(only=['step_order'])\ndef test_focal(): ...",
        NO_CHECK.format("trainloop_loss", "only", "step_order"),
    ),
    "knobs": (
        "@pytest.mark.trainloop_loss(knobs={'a': 'accumulate'})\ndef test_focal(a=1): ...",
        "*the trainloop_loss marker has no keyword 'knobs'*",
    ),
    "a check of losses": (
        "@pytest.mark.trainloop(skip={'ignored_positions': 'no'})\ndef test_gpt(): ...",
        NO_CHECK.format("trainloop", "skip", "ignored_positions"),
    ),
}


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    for name in ("CI", "BUILD_NUMBER", "PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """What torch and hypothesis import when first used must not be imported first inside a session in this process."""

    def faulty(logits, target):
        return (logits.abs() * target[:, None]).sum().sqrt()

    check_loss(LossContract(criterion=faulty, expects="logits", num_classes=3, ignore_index=0), raises=False)


@pytest.fixture
def run(pytester):
    return lambda *args: pytester.runpytest("-p", "no:randomly", *args)


def write(pytester, marker="", more=""):
    pytester.makepyfile(test_criteria=LOSS.format(marker=marker) + more)


def test_each_property_is_an_item_and_no_check_of_loops_is(pytester, run):
    write(pytester)
    lines = [line for line in run("--trainloop", "--collect-only", "-q").outlines if "::" in line]
    names = "loss_is_finite loss_input_as_declared loss_gradient ignored_positions reductions_agree precisions_agree"
    expected = [*names.split(), "correct_answer_has_lowest_loss", "invalid_target_raises"]
    assert lines == [f"test_criteria.py::test_mean[{name}]" for name in expected]


def test_a_fault_fails_with_its_smallest_call_and_reaches_the_reports(pytester, run):
    write(pytester, '(only=["ignored_positions", "invalid_target_raises"])')
    result = run("--trainloop", "--trainloop-json=out.json")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "mean_of_all: ignored targets count in the mean: it divides by 2 where 1 targets are left",
            "cause      counted_in_mean: *",
            "seen at    *test_criteria.py:*def mean_of_all(logits, target):",
            "smallest   2 rows, 3 classes, target *-100*, some targets ignored, values of seed 0",
            "more       pytest --trainloop-explain ignored_positions",
            "*= trainloop =*",
            "test_criteria.py::test_mean  1 failed, 1 passed*",
            "  ignored_positions: mean_of_all: *[[]counted_in_mean[]]",
        ]
    )
    loop = json.loads((pytester.path / "out.json").read_text(encoding="utf-8"))["loops"][0]
    assert loop["nodeid"] == "test_criteria.py::test_mean"
    assert [c["outcome"] for c in loop["checks"]] == ["failed", "passed"]


def test_fixtures_and_parametrize_reach_the_function(pytester, run):
    write(
        pytester,
        '(only=["invalid_target_raises"])',
        """
    @pytest.fixture
    def smoothing(): return 0.1

    @pytest.mark.trainloop_loss(only=["invalid_target_raises"])
    @pytest.mark.parametrize("weight", [1.0, 2.0])
    def test_weighted(weight, smoothing, tmp_path):
        return contract(lambda o, t: weight * F.cross_entropy(o, t, label_smoothing=smoothing))
    """,
    )
    result = run("--trainloop", "-v")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["*::test_weighted[[]1.0-invalid_target_raises[]] PASSED*"])


def test_the_command_line_chooses_among_both_kinds(pytester, run):
    write(pytester)
    run("--trainloop", "--trainloop-only=invalid_target_raises").assert_outcomes(passed=1)
    result = run("--trainloop", "--trainloop-only=step_order", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*no check is left*"])


def test_what_is_no_contract_is_an_error_once(pytester, run):
    write(pytester, more="""
    @pytest.mark.trainloop_loss
    def test_other(): return F.cross_entropy
    """)  # fmt: skip
    result = run("--trainloop", "-k", "test_other", "-rs")
    result.assert_outcomes(failed=1, skipped=7, deselected=8)
    result.stdout.fnmatch_lines(["*test_other returned a function; it must return a LossContract*"])


@pytest.mark.parametrize("name", REFUSED)
def test_misuse_is_refused_at_collection(pytester, run, name):
    code, sentence = REFUSED[name]
    pytester.makepyfile(test_criteria=f"import pytest, unittest\n\n{code}")
    result = run("--trainloop")
    assert result.ret != 0
    result.stdout.fnmatch_lines([sentence])


def test_the_users_profile_and_seed_count(pytester, run, monkeypatch):
    monkeypatch.setattr(hypothesis.core, "global_force_seed", None)  # where the option is kept
    write(
        pytester,
        '(only=["invalid_target_raises"])',
        """
    calls = []

    @pytest.mark.trainloop_loss(only=["correct_answer_has_lowest_loss"])
    def test_counted():
        return contract(lambda o, t: calls.append(float(o.sum())) or F.cross_entropy(o, t))

    def test_after():
        print("CALLS", len(calls), hash(tuple(calls)))
    """,
    )
    pytester.makeconftest("from hypothesis import settings\nsettings.register_profile('three', max_examples=3)")

    def seen(*args):
        lines = run("--trainloop", "-s", "-k", "counted or after", *args).outlines
        return next(line for line in lines if "CALLS" in line).split("CALLS ")[1].split(".")[0].split()[:2]

    few, default = seen("--hypothesis-profile=three"), seen("--hypothesis-profile=default")
    assert int(few[0]) < int(default[0]) / 5
    assert seen() == default
    assert seen("--hypothesis-seed=7")[1] != default[1]


def test_a_loss_by_hand(pytester, run):
    write(
        pytester,
        '(only=["invalid_target_raises"])',
        """
    def test_by_hand(trainloop):
        trainloop.check("reductions_agree", lambda: contract(mean_of_all))
        with pytest.raises(AssertionError, match="counted_in_mean"):
            trainloop.check_loss(contract(mean_of_all), only=["ignored_positions"])
    """,
    )
    run("--trainloop", "-k", "by_hand").assert_outcomes(passed=1, deselected=1)


def test_the_list_and_the_pages_show_losses(run):
    listed = run("--trainloop-list").stdout.str()
    assert listed.index("check of a loss") > listed.index("step_order")
    assert listed.index("ignored_positions") > listed.index("check of a loss")
    run("--trainloop-explain=invalid_target_raises:broadcasts").stdout.fnmatch_lines(
        ["invalid_target_raises:broadcasts"]
    )


BESIDE = """
    import pytest, torch
    from torch import nn
    from pytest_trainloop import LossContract, TrainLoop

    def overlap(scores, mask):
        p = torch.sigmoid(scores)
        return 1 - (2 * (p * mask).sum() + 1) / (p.sum() + mask.sum() + 1)

    @pytest.mark.trainloop_loss(only=["loss_gradient"])
    def test_overlap():
        return LossContract(criterion=overlap, expects="logits", target="binary")

    @pytest.mark.trainloop(only=["loss_contract"])
    def test_loop():
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def fit(batches):
            for x, mask in batches:
                optimizer.zero_grad()
                overlap(torch.sigmoid(model(x)), mask).backward()
                optimizer.step()

        x = torch.randn(8, 4)
        return TrainLoop(model=model, optimizer=optimizer, batch=(x, (x[:, :2] > 0).float()), fit=fit)
"""


def test_a_contract_counts_for_the_loops_of_its_module(pytester):
    pytester.makepyfile(BESIDE)
    result = pytester.runpytest("-p", "no:randomly", "--trainloop", "-k", "test_loop")
    result.assert_outcomes(failed=1, deselected=1)
    result.stdout.fnmatch_lines(
        [
            "*overlap expects logits, and is given probabilities: the result of sigmoid*",
            "change*overlap(torch.sigmoid(*",
        ]
    )
