"""What ``overfit_one_batch`` says of made-up runs: losses, learning rates and update sizes, nothing trained."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from pytest_trainloop.checks.learning.one_batch import REFERENCE_RATES, Curve, OneBatch, OneBatchRuns
from pytest_trainloop.checks.learning.overfit_one_batch.check import overfit_one_batch
from pytest_trainloop.checks.learning.update_sizes import Ratio
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.runs.run import RunPlan
from tests.helpers.record_builder import RecordBuilder
from tests.helpers.records import FakeEvidence

STILL, FIRST_STEPS = 16, 300


def seen(*, clipped_to=None, **optimizer):
    build = RecordBuilder([0])
    for _ in range(3):
        build.zero()
        build.backward()
        if clipped_to is not None:
            clip = build.clip(limit=clipped_to)
            clip.after = {i: replace(sample, peak=clipped_to) for i, sample in clip.before.items()}
        build.step()
    made = build.record()
    made.parameters[0].shape = (100, 10)
    made.optimizers = [replace(made.optimizers[0], **optimizer)]
    return made


def curve(start, end, *, steps=FIRST_STEPS, rates=(1e-3,), falls=False, **more):
    """A loss that goes to its end in the first half of the steps, or all the way; the last rate lasts."""
    way = steps if falls else steps // 2
    losses = tuple(end if i >= way else start + (end - start) * i / way for i in range(steps))
    return Curve(losses, (*rates, *[rates[-1]] * (steps - len(rates))), seen(), end - start, end - start, **more)


def batch(own, *, record=None, reference=0.1, ratio=1e-4, descent=0.9, undone=False, rows=4, **others):
    """All runs on one batch that the check may ask for; one that is missing here fails the test."""
    made = OneBatch(record or seen(), RunPlan(), pytest.fail, lambda *at: None, FIRST_STEPS, rows=rows, reached=True)
    made.ratios.seen = [Ratio(0, 0, 0, ratio)]
    made.ratios.descents = [descent]
    made.ratios._returns = [undone] * 3
    references = dict.fromkeys(REFERENCE_RATES, curve(1.0, reference, steps=150))
    made._made.update({"own": own, "still": curve(1.0, 1.0, steps=STILL), "quick": curve(1.0, reference), **references})
    made._made.update({name.replace("_", " "): run for name, run in others.items()})
    return made


def found(made, root_causes=(), **options):
    evidence = FakeEvidence(made.seen, shared={OneBatchRuns: SimpleNamespace(of=lambda steps: made)})
    evidence.root_causes = lambda check: root_causes
    return [(f.cause, f.level, f.culprits, f) for f in overfit_one_batch(evidence, **options)]


def only(made, **given):
    (finding,) = found(made, **given)
    return finding[:3]


def test_a_loss_that_is_halved_is_learned():
    assert found(batch(curve(1.0, 0.4))) == []


def test_a_loss_that_goes_on_falling_is_learned_where_plain_adam_learns_it():
    assert found(batch(curve(1.0, 0.7, falls=True))) == []


def test_an_earlier_finding_says_why():
    behind = Finding(cause="graph_cut", check="gradient_reaches_every_param", summary="", culprits=("body",))
    assert only(batch(curve(1.0, 1.0)), root_causes=[behind]) == ("not_learning", "fault", ("body",))


def test_an_earlier_finding_says_nothing_of_a_loss_that_falls():
    behind = Finding(cause="graph_cut", check="gradient_reaches_every_param", summary="", culprits=("body",))
    assert found(batch(curve(1.0, 0.8)), root_causes=[behind]) == []


def test_weights_that_are_put_back_after_every_step():
    assert only(batch(curve(1.0, 1.0), undone=True)) == ("update_undone", "fault", ("weights",))


def test_where_plain_adam_learns_nothing_either_it_cannot_decide():
    with pytest.raises(CannotDecide, match="plain Adam takes no more than"):
        found(batch(curve(1.0, 1.0), reference=0.99))


@pytest.mark.parametrize(("one_row", "expected"), [(0.2, ["input_unused"]), (0.6, ["learns_slowly"])])
def test_rows_that_do_not_matter_where_labels_do(one_row, expected):
    same = curve(1.0, 0.6, steps=150)
    made = batch(curve(1.0, 0.9), reference=0.6)
    made._rows = dict.fromkeys(("rolled", "alike"), SimpleNamespace(made=True, came=False, contexts=lambda watch: ()))
    wide = replace(same, record=replace(same.record, double=True))
    rate = REFERENCE_RATES[0]
    made._made |= {("straight", rate): wide, ("rolled", rate): wide, ("alike", rate): same}
    made._made["one row", rate] = curve(1.0, one_row, steps=150)
    assert [cause for cause, *_ in found(made)] == expected


def test_a_clip_that_leaves_nothing_of_the_gradient():
    made = batch(curve(1.0, 1.0), record=seen(clipped_to=1e-4), rates_times_10=curve(1.0, 0.2))
    made._made["rates times 100"] = made._made["rates times 1000"] = curve(1.0, 0.2)
    assert only(made) == ("gradients_clipped_away", "fault", ("clip_grad_norm_",))


def test_weight_decay_without_which_the_batch_is_learned():
    made = batch(curve(1.0, 0.9), record=seen(weight_decays=(5.0,)), no_decay=curve(1.0, 0.2))
    assert only(made) == ("weight_decay_dominates", "fault", ("weight_decay",))


@pytest.mark.parametrize(("steps_at_the_peak", "level"), [(2, "fault"), (20, "advice")])
def test_learning_rates_that_decay_to_nothing(steps_at_the_peak, level):
    rates = (*[1e-3] * steps_at_the_peak, 1e-9)
    made = batch(curve(1.0, 0.9, rates=rates), rates_held=curve(1.0, 0.2))
    assert only(made) == ("lr_decays_too_early", level, ("lr",))


def test_the_step_from_which_a_rate_is_gone_comes_after_its_peak():
    rates = (0.0, 2.5e-4, 5e-4, 7.5e-4, 1e-3, 5e-4, 1e-4, 2e-6, 0.0)
    ((*_, finding),) = found(batch(curve(1.0, 0.9, rates=rates), rates_held=curve(1.0, 0.2)))
    assert finding.summary.startswith("lr is below a hundredth of its peak from step 8 on")
    assert "lr 1.0e-03 at its peak in step 5, 2.0e-06 in step 8, 0.0e+00 at the end" in finding.measured
    assert "add up to 3.1 at the peak" in finding.measured


def test_a_rate_that_comes_back_is_gone_after_its_last_return():
    rates = (1e-3, 0.0, 1e-3, 1e-4, 0.0)
    ((*_, finding),) = found(batch(curve(1.0, 0.9, rates=rates), rates_held=curve(1.0, 0.2)))
    assert "from step 5 on" in finding.summary


def test_steps_that_lead_up_the_gradient():
    assert only(batch(curve(1.0, 1.5), descent=-0.8)) == ("not_learning", "fault", ("optimizer",))


def test_a_learning_rate_of_zero():
    assert only(batch(curve(1.0, 1.0, rates=(0.0,)), ratio=0.0)) == ("not_learning", "fault", ("lr",))


def test_a_large_eps_under_which_nothing_moves():
    made = batch(curve(1.0, 1.0), record=seen(eps=(1e8,)), ratio=1e-9, usual_eps=curve(1.0, 0.2))
    assert only(made) == ("not_learning", "fault", ("eps",))


def test_a_higher_learning_rate_learns_the_batch():
    made = batch(curve(1.0, 1.0), ratio=1e-9)
    made._made |= {f"rates times {factor:g}": curve(1.0, 0.2) for factor in (1e6, 1e7, 1e8)}
    cause, level, culprits = only(made)
    assert (cause, level, culprits) == ("not_learning", "fault", ("lr",))


def test_a_lower_learning_rate_learns_the_batch():
    made = batch(curve(1.0, 5.0), ratio=3.0)
    made._made |= {f"rates times {factor:g}": curve(1.0, 0.2) for factor in (0.1, 0.01, 1e-3)}
    assert only(made) == ("not_learning", "fault", ("lr",))


def test_without_a_cause_slow_learning_is_advice():
    assert only(batch(curve(1.0, 0.9))) == ("learns_slowly", "advice", ("lr",))


def test_declared_steps_make_it_a_fault():
    ((cause, level, _culprits, finding),) = found(batch(curve(1.0, 0.9)), steps=300)
    assert (cause, level) == ("learns_slowly", "fault")
    assert "steps=300 declares that it is learned by then" in finding.summary


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        (curve(1.0, 1.0, steps=12), "12 steps are too few to tell"),
        (curve(1.0, 1.0, rates=tuple(1e-5 * i for i in range(300))), "the rate still rises"),
    ],
)
def test_a_run_that_says_too_little(own, reason):
    with pytest.raises(CannotDecide, match=reason):
        found(batch(own))
