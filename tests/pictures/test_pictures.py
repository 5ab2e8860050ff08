"""What is drawn of tiny loops: everything that they have, nothing that they have not."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.core import registry
from pytest_trainloop.core.errors import BrokenCheck
from pytest_trainloop.core.finding import Finding, Result
from pytest_trainloop.judging.battery import Settings, Subject
from pytest_trainloop.recording.record import Optimizer, Parameter, Record
from pytest_trainloop.runs.evidence import Evidence
from pytest_trainloop.views.loop_facts.facts import Facts
from pytest_trainloop.views.loop_facts.make import card_of
from pytest_trainloop.views.loop_facts.measured import Measured
from pytest_trainloop.views.pictures import tensors
from pytest_trainloop.views.pictures.make import card_and_pictures
from pytest_trainloop.views.pictures.report_inputs import MOST_STEPS, Moment, ReportInputs
from pytest_trainloop.views.pictures.sizes import Sizes
from pytest_trainloop.views.pictures.step import one_step
from tests.helpers.record_builder import RecordBuilder

MOST = 200_000
"""Bytes of the JSON of one loop."""


def taken(make, *checks):
    """The pictures of a loop by their keys, once these checks were run."""
    subject = Subject("test", make, settings=Settings())
    results = {check: subject.run_check(check) for check in checks}
    return {picture.key: picture for picture in card_and_pictures(subject, results)[1]}


class Texts(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 8, padding_idx=0)
        self.hidden = nn.Linear(8, 24)
        self.head = nn.Linear(24, 4)

    def forward(self, ids, attention_mask):
        mask = attention_mask[..., None]
        return self.head(F.relu(self.hidden((self.table(ids) * mask).sum(1) / mask.sum(1))))


def texts(count):
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(count):
        lengths = torch.randint(2, 8, (6, 1), generator=generator)
        mask = (torch.arange(7) < lengths).long()
        ids = torch.randint(1, 16, (6, 7), generator=generator) * mask
        made.append({"ids": ids, "attention_mask": mask, "labels": torch.randint(0, 4, (6,), generator=generator)})
    return made


def text_loop():
    model = Texts()
    groups = [
        {"params": model.table.parameters(), "lr": 1e-2},
        {"params": [*model.hidden.parameters(), *model.head.parameters()]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 10, 1.0, (110 - step) / 50))

    def fit(batches):
        for batch in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(batch["ids"], batch["attention_mask"]), batch["labels"]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=texts, steps=100, fit=fit)


@pytest.fixture(scope="module")
def drawn():
    return taken(text_loop, "overfit_one_batch", "activations_alive")


def test_everything_that_a_loop_has_is_drawn(drawn):
    assert list(drawn) == [
        "one_step", "one_batch", "loss", "rates", "rates_ahead", "gradient_norm", "updates", "units", "outputs",
        "gradients", "weights", "padding", "lengths",
    ]  # fmt: skip


def test_every_picture_says_what_to_look_for_and_where_it_belongs(drawn):
    known = registry.registered()
    for picture in drawn.values():
        assert picture.title
        assert picture.look.endswith(".")
        assert picture.of
        for name in picture.checks:
            check, _, cause = name.partition(":")
            assert check in known
            assert not cause or cause in known[check].causes, name


def test_the_data_are_small_and_strictly_json(drawn):
    text = json.dumps([picture.to_json() for picture in drawn.values()], indent=2, allow_nan=False)
    assert len(text) < MOST / 4, "a model of five tensors"


def test_the_calls_of_one_step_stand_in_their_order_with_their_lines(drawn):
    calls = drawn["one_step"].calls
    assert [call.lane for call in calls] == ["zero", "forward", "backward", "clip", "step", "schedule"]
    assert calls[3].code == "nn.utils.clip_grad_norm_(model.parameters(), 0.25)"
    assert calls[3].where.startswith("tests/pictures/test_pictures.py:")


def test_the_loss_on_one_batch_has_the_single_steps_and_their_mean(drawn):
    single, mean = drawn["one_batch"].curves[:2]
    assert (single.role, mean.role) == ("faint", "own")
    assert mean.y[-1] < mean.y[0]
    assert drawn["one_batch"].marks[0].text == "half of the first loss"


def test_the_loss_stands_beside_that_of_a_guess(drawn):
    (mark,) = drawn["loss"].marks
    assert mark.at == pytest.approx(math.log(4), rel=0.1)


def test_the_rates_of_groups_that_differ_are_told_apart(drawn):
    first, second = drawn["rates"].curves
    assert (first.name, second.name) == ("group 0", "group 1")
    assert (first.y[0], second.y[0]) == (1e-3, 3e-4)
    assert (first.y[9], second.y[9]) == (1e-2, 3e-3)


def test_the_rates_go_to_the_end_of_the_plan(drawn):
    ahead = drawn["rates_ahead"]
    assert ahead.curves[0].x[-1] >= 100
    assert ahead.marks[0].text == "the plan ends: 100 calls"
    assert ahead.x.unit == "one a step"


def test_the_norm_is_drawn_before_and_behind_the_clip(drawn):
    before, read = drawn["gradient_norm"].curves
    assert (before.name, read.name) == ("before the clip", "as the step reads it")
    assert max(read.y) <= 0.2501
    assert any(b > r for b, r in zip(before.y, read.y, strict=True))
    assert drawn["gradient_norm"].marks[0].text == "clip at 0.25"


def test_the_updates_of_every_tensor_stand_in_a_map(drawn):
    updates = drawn["updates"]
    assert updates.labels == ("table.weight", "hidden.weight", "hidden.bias", "head.weight", "head.bias")
    assert [len(row) for row in updates.cells] == [len(updates.columns)] * 5
    assert all(ratio > 0 for row in updates.cells for ratio in row)


@pytest.mark.parametrize("key", ["gradients", "weights"])
def test_shares_of_sizes_add_up(drawn, key):
    picture = drawn[key]
    for column in zip(*picture.cells, strict=True):
        assert sum(column) == pytest.approx(100, abs=0.5)
    assert "0" in picture.labels, "the row of the padding token"


def test_the_outputs_stand_in_the_order_of_the_calls(drawn):
    outputs = drawn["outputs"]
    assert outputs.labels == ("table", "hidden", "head")
    assert all(sum(row) == pytest.approx(100, abs=0.5) for row in outputs.cells)


def test_padding_and_lengths_are_those_of_the_different_batches(drawn):
    padding, lengths = drawn["padding"], drawn["lengths"]
    assert len(padding.labels) == len(padding.bars[0].values) > 4
    assert all(0 < share < 100 for share in padding.bars[0].values)
    assert "attention_mask" in padding.note
    assert lengths.labels == ("2", "3", "4", "5", "6", "7")
    assert sum(lengths.bars[0].values) == 6 * len(padding.labels)


def plain(**given):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

    return TrainLoop(
        **{"model": model, "optimizer": optimizer, "batch": (torch.randn(8, 4), torch.randn(8, 1)), "fit": fit, **given}
    )


def fitted(fit, **given):
    """The plain loop, trained by this function of loop and batches."""

    def make():
        loop = plain(**given)
        loop.fit = lambda batches: fit(loop, batches)
        return loop

    return make


def test_nothing_is_drawn_that_a_loop_has_not():
    assert list(taken(plain)) == ["one_step", "loss", "gradient_norm", "updates", "outputs", "gradients", "weights"]


def test_the_card_is_the_same_with_pictures_and_without():
    with_pictures, _ = card_and_pictures(Subject("test", plain, settings=Settings()), {})
    assert str(with_pictures) == str(card_of(Subject("test", plain, settings=Settings())))


def test_a_loop_takes_one_further_run():
    counted = []

    def make():
        loop = plain()
        fit = loop.fit
        loop.fit = lambda batches: (counted.append(1), fit(batches))
        return loop

    def runs(take):
        counted.clear()
        take(Subject("test", make, settings=Settings()))
        return len(counted)

    assert runs(lambda subject: card_and_pictures(subject, {})) == runs(card_of)


def test_what_is_not_finite_leaves_a_gap():
    def fit(loop, batches):
        for n, (x, y) in enumerate(batches):
            loop.optimizer.zero_grad()
            (F.mse_loss(loop.model(x), y) * (math.nan if n == 4 else 1.0)).backward()
            loop.optimizer.step()

    drawn = taken(fitted(fit))
    assert drawn["loss"].curves[0].y[4] is None
    assert drawn["loss"].marks[-1].text.endswith("not finite from here")
    assert drawn["weights"].labels[0] == "not finite"
    json.dumps([picture.to_json() for picture in drawn.values()], allow_nan=False)


def test_a_scale_is_drawn_with_the_steps_that_were_skipped():
    def fit(loop, batches):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
        for x, y in batches:
            loop.optimizer.zero_grad()
            scaler.scale(8 * F.mse_loss(loop.model(x), y)).backward()
            scaler.step(loop.optimizer)
            scaler.update()

    scale = taken(fitted(fit))["loss_scale"]
    assert scale.y.scale == "log"
    assert [curve.role for curve in scale.curves] == ["own", "event"]
    assert scale.curves[0].y[0] == pytest.approx(2.0**126, rel=1e-3)
    assert scale.curves[1].x[0] == 1
    assert scale.curves[0].y[-1] < scale.curves[0].y[0]


def test_two_optimizers_have_their_own_curves():
    def make():
        one, other = nn.Linear(4, 4), nn.Linear(4, 1)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, other)]

        def fit(batches):
            for x in batches:
                for optimizer, sign in zip(optimizers, (1.0, -1.0), strict=True):
                    optimizer.zero_grad()
                    (sign * other(one(x)).square().mean()).backward()
                    optimizer.step()

        return TrainLoop(model={"one": one, "other": other}, optimizer=optimizers, batch=torch.randn(8, 4), fit=fit)

    drawn = taken(make)
    assert [curve.name for curve in drawn["loss"].curves] == ["loss of one", "loss of other"]
    assert [curve.name for curve in drawn["gradient_norm"].curves] == [
        "one as the step reads it",
        "other as the step reads it",
    ]


def test_a_tensor_that_never_moves_is_named():
    def make():
        loop = plain()
        loop.optimizer.param_groups[0]["params"] = [loop.model[2].weight]
        loop.optimizer.add_param_group({"params": [loop.model[0].weight], "lr": 0.0})
        return loop

    updates = taken(make)["updates"]
    assert "1 tensor never moved: 0.weight" in updates.note
    assert set(updates.cells[updates.labels.index("0.weight")]) == {0.0}


def test_a_clip_that_comes_too_late_is_drawn_as_its_limit_alone():
    def fit(loop, batches):
        for x, y in batches:
            F.mse_loss(loop.model(x), y).backward()
            loop.optimizer.step()
            nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01)

    norm = taken(fitted(fit))["gradient_norm"]
    assert [curve.name for curve in norm.curves] == ["as the step reads it"]
    assert norm.marks[0].at == 0.01
    assert min(norm.curves[0].y) > 0.01


def test_the_first_calls_stand_for_a_step_that_is_never_made():
    made = RecordBuilder([0])
    for _ in range(20):
        made.zero(0)
        made.backward()
    (first,) = one_step(Facts(Evidence(lambda: None), made.record(), Measured()), ReportInputs())
    assert first.title == "The first calls"
    assert first.of.endswith("no optimizer stepped")
    assert [(call.lane, call.block, call.times) for call in first.calls] == [("zero", 0, 6), ("backward", 0, 6)]


def test_a_tensor_that_no_optimizer_holds_does_not_move():
    def make():
        loop = plain()
        loop.optimizer.param_groups[0]["params"] = list(loop.model[0].parameters())
        return loop

    updates = taken(make, "optimizer_holds_every_param")["updates"]
    assert updates.note == "no optimizer holds 2.weight, 2.bias"
    assert set(updates.cells[updates.labels.index("2.bias")]) == {0.0}


def test_runs_that_differ_are_drawn_beside_each_other():
    calls = []

    def fit(loop, batches):
        calls.append(1)
        for n, (x, y) in enumerate(batches):
            loop.optimizer.zero_grad()
            (F.mse_loss(loop.model(x), y) * (1 + (n > 3) * len(calls))).backward()
            loop.optimizer.step()

    two = taken(fitted(fit), "determinism")["two_runs"]
    assert [curve.name for curve in two.curves] == ["first", "second"]
    assert two.curves[0].y[:4] == two.curves[1].y[:4]
    assert two.marks[0].at == 5


def test_batches_of_changing_lengths_show_their_sizes():
    def batches(count):
        return [(torch.randn(4, 3 + n % 3, 4), torch.randn(4, 1)) for n in range(count)]

    def fit(loop, batches):
        for x, y in batches:
            loop.optimizer.zero_grad()
            F.mse_loss(loop.model(x).mean(1), y).backward()
            loop.optimizer.step()

    sizes = taken(fitted(fit, batch=None, batches=batches))["shapes"]
    assert [curve.name for curve in sizes.curves] == ["batch[0] axis 1"]
    assert sizes.curves[0].y[:4] == (3, 4, 5, 3)


def test_models_of_many_tensors_stay_readable_and_small():
    names = [f"layers.{n // 2}.{('weight', 'bias')[n % 2]}" for n in range(602)]
    shapes = [(4, 4), (4,)]
    looked = ReportInputs()
    looked.measured.record = Record(
        parameters=[Parameter(n, name, "model", shapes[n % 2], "float32", "cpu", True) for n, name in enumerate(names)],
        optimizers=[Optimizer(0, "SGD", True, tuple(range(602)))],
    )
    spread = Sizes(bins=dict.fromkeys(range(-40, 10), 1.23456789), zero=1.0, not_finite=1.0)
    for step in range(1, MOST_STEPS + 1):
        ratios = dict.fromkeys(range(602), 0.00123456789)
        looked.moments.append(Moment(0, step, dict(ratios), ratios, spread, spread))
    looked.outputs = {f"{name}.{'long_' * 10}": spread for name in names}
    result = Result(
        check="update_ratio",
        outcome="failed",
        findings=(Finding(cause="update_too_small", summary="s", culprits=("layers.7.bias",)),),
    )
    facts = Facts(Evidence(lambda: None), looked.measured.record, looked.measured, {"update_ratio": result})
    kinds = tensors.updates, tensors.gradient_sizes, tensors.weight_sizes, tensors.output_sizes
    updates, *others = (picture for kind in kinds for picture in kind(facts, looked))
    assert len(updates.labels) == 41
    assert updates.labels[0] == "layers.0.weight"
    assert "layers.7.bias" in updates.labels, "the tensor that the finding names"
    assert updates.labels[-1] == "layers.300.weight"
    assert updates.note.startswith("41 of 602 tensors")
    assert others[-1].note == "40 of 602 layers"
    assert len(json.dumps([p.to_json() for p in (updates, *others)], indent=2)) < MOST / 2


def test_what_looks_on_never_fails_the_loop(monkeypatch):
    def broken(_tensor):
        raise RuntimeError("a mistake")

    monkeypatch.setattr("pytest_trainloop.views.pictures.report_inputs.sizes", broken)
    subject = Subject("test", plain, settings=Settings())
    with pytest.warns(BrokenCheck, match="not all was looked at for the pictures; RuntimeError: a mistake"):
        card, drawn = card_and_pictures(subject, {})
    assert str(card) == str(card_of(Subject("test", plain, settings=Settings())))
    assert "one_step" in {picture.key for picture in drawn}
