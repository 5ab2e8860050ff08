"""How sure labels make ``loss_contract`` of a shift."""

import pytest
import torch
import torch.nn.functional as F

from pytest_trainloop.frontends.api import check_loop
from tests.checks.loss.loss_contract.faults_label_shifts import given, moved_on_again, tuned


def findings(make):
    report = check_loop(make, only=["loss_contract"], raises=False)
    return [(f.cause, f.level) for r in report.results for f in r.findings]


def test_few_labels_are_advice_and_more_of_them_a_fault():
    assert findings(tuned(moved_on_again, prompt=10)) == []  # three kinds of labels
    assert findings(tuned(moved_on_again, prompt=8, rows=2)) == [("shifted_twice", "advice")]
    assert findings(tuned(moved_on_again, prompt=10, one_batch=False)) == [("shifted_twice", "fault")]


def test_few_labels_that_are_right_are_silent():
    assert findings(tuned(given, prompt=9)) == []
    assert findings(tuned(given, prompt=10)) == []


def of_log_softmax(model, ids, labels):
    return F.nll_loss(model(ids).log_softmax(-1).flatten(0, 1), labels.flatten(), ignore_index=-100)


def along_axis_one(model, ids, labels):
    return F.cross_entropy(model(ids).transpose(1, 2), labels, label_smoothing=0.1)


def masked_by_hand(model, ids, labels):
    kept = (labels != -100).to(torch.get_default_dtype())
    each = F.cross_entropy(model(ids).transpose(1, 2), labels.clamp_min(0), reduction="none")
    return (each * kept).sum() / kept.sum()


def picked_after_the_head(model, ids, labels):
    kept = labels != -100
    return F.cross_entropy(model(ids)[kept], labels[kept])


def picked_before_the_head(model, ids, labels):
    x = model.token(ids) + model.position(torch.arange(ids.shape[1]))
    for block in model.blocks:
        x = block(x)
    kept = labels != -100
    return F.cross_entropy(model.head(model.norm(x)[kept]), labels[kept])


def written_out(model, ids, labels):
    kept = labels != -100
    logs = model(ids).log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    return -(logs * kept).sum() / kept.sum()


FORMS = (of_log_softmax, along_axis_one, masked_by_hand, picked_after_the_head, picked_before_the_head, written_out)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("twice", "causes"), [(True, [("shifted_twice", "fault")]), (False, [])])
def test_each_way_to_write_the_loss(form, twice, causes):
    def loss_of(model, batch):
        ids, labels = batch
        return form(model, ids, F.pad(labels, (0, 1), value=-100)[:, 1:] if twice else labels)

    assert findings(tuned(loss_of)) == causes
