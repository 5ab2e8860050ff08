"""Lines of the card, from tiny loops and from records made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pytest_trainloop
from pytest_trainloop import TrainLoop, UsageError
from pytest_trainloop.judging.battery import Settings, Subject
from pytest_trainloop.runs.evidence import Evidence
from pytest_trainloop.views.loop_facts.facts import Facts
from pytest_trainloop.views.loop_facts.make import card_of
from pytest_trainloop.views.loop_facts.measured import Measured
from pytest_trainloop.views.loop_facts.step import backwards_a_step, one_step
from tests.helpers.record_builder import RecordBuilder


def plain(optimizer, batches, model):
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def loop(work=plain, *, groups=None, model=None, **given):
    """A function that returns a small loop; ``groups(model)`` gives the groups of its optimizer."""

    def make():
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)) if model is None else model()
        optimizer = torch.optim.SGD(net.parameters() if groups is None else groups(net), lr=0.1)
        batch = torch.randn(8, 4), torch.randn(8, 1)
        return TrainLoop(
            model=net, optimizer=optimizer, batch=batch, fit=lambda batches: work(optimizer, batches, net), **given
        )

    return make


def facts(builder: RecordBuilder) -> Facts:
    return Facts(Evidence(lambda: None), builder.record(), Measured())


def test_a_plain_loop():
    card = pytest_trainloop.card(loop())
    assert card["model"].startswith("49 weights in 4 tensors, 0 frozen, 0 without gradient; float32   ")
    assert card["optimizer"].startswith("SGD, 12 steps   ")
    assert "decay 0   rate 0.1   |g| " in card["optimizer"]
    assert "2 matrices, 2 biases: 0.weight, 0.bias, 2.weight and 1 more" in card["optimizer"]
    assert "the same in 12 of 12 steps" in card["one step"]
    assert card["batch"].startswith("8 rows a step; batch[0] [8, 4] float32, batch[1] [8, 1] float32   ")
    assert card["schedule"] == "none: every rate is constant"
    assert card["clip"] == "none seen: no gradient is clipped"
    assert card["checkpoint"] == "none seen: give save= and load="
    assert not card.odd


def test_every_line_about_the_loop_ends_in_its_source_line():
    card = pytest_trainloop.card(loop())
    where = {line.label.strip(): line.where for line in card.lines}
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    for label, code in {
        "model": "net = nn.Sequential",
        "optimizer": "optimizer = torch.optim.SGD",
        "one step": "optimizer.step()",
        "loss": "F.mse_loss",
    }.items():
        file, _, line = where[label].rpartition(":")
        assert file == "tests/card/test_lines.py"
        assert code in source[int(line) - 1]


def test_the_page_is_the_same_in_two_runs_and_under_its_seed():
    assert str(pytest_trainloop.card(loop(), seed=3)) == str(pytest_trainloop.card(loop(), seed=3))


def test_nothing_of_the_process_changes():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    pytest_trainloop.card(loop())
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()


def test_what_trains_nowhere_is_marked():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x):
            return self.used(x)

    card = pytest_trainloop.card(loop(model=Spare))
    assert "2 without gradient (spare.weight, spare.bias) *" in card["model"]


def test_windows_that_differ_are_told():
    def clipped_at_first(optimizer, batches, model):
        for number, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            if number < 2:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()

    told = pytest_trainloop.card(loop(clipped_at_first))["one step"]
    assert "the same in 10 of 12 steps" in told
    assert "2 of 12: with clip(" in told


def test_a_schedule_that_is_called_once_a_pass_is_marked():
    def scheduled(optimizer, batches, model):
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(2):
            plain(optimizer, batches, model)
            schedule.step()

    told = pytest_trainloop.card(loop(scheduled))["schedule"]
    assert told.startswith("ExponentialLR, 1 call per epoch *")


def test_weights_that_move_outside_of_steps_are_marked():
    def shrinks(optimizer, batches, model):
        for batch in batches:
            plain(optimizer, [batch], model)
            with torch.no_grad():
                model[0].weight.mul_(0.99)

    told = pytest_trainloop.card(loop(shrinks))["moves"]
    assert told.startswith("outside of steps: 1 tensor, stepped weights (0.weight), 11 times *")


def test_a_loop_that_raises_says_so_first():
    def raises(optimizer, batches, model):
        plain(optimizer, [next(iter(batches))], model)
        raise RuntimeError("out of data")

    card = pytest_trainloop.card(loop(raises))
    assert card["run"].startswith("fit raised RuntimeError: out of data *")


def test_a_loop_that_cannot_be_run_has_one_line():
    model = nn.Linear(4, 1)
    card = pytest_trainloop.card(loop(model=lambda: model))
    assert [line.label for line in card.lines] == ["run"]


def test_what_is_no_function_is_refused():
    with pytest.raises(UsageError, match="card got"):
        pytest_trainloop.card(TrainLoop)


def test_checks_fill_their_lines():
    def evaluate():
        return None

    card = pytest_trainloop.card(loop(evaluate=evaluate), checks=["evaluation_is_pure", "activations_alive"])
    assert card["evaluation"] == "changes nothing"
    assert card["units"].startswith("none seen: one fixed batch")
    assert card["decided"] == "1 check passed; 1 undecided (give batches=)"


def test_lines_without_their_checks_say_so_and_are_not_seen():
    card = pytest_trainloop.card(loop(evaluate=lambda: None))
    assert [line.label for line in card.lines if not line.seen] == ["units", "evaluation", "decided"]


def test_the_card_costs_two_short_runs():
    subject = Subject("loop", loop(), settings=Settings())
    subject.evidence.run()
    steps = subject.evidence.own_steps
    card_of(subject)
    assert subject.evidence.own_steps - steps <= 13


def test_micro_batches_are_counted_and_written_once():
    made = RecordBuilder([0, 1])
    for _ in range(3):
        made.zero()
        for _ in range(4):
            made.backward()
        made.step()
    assert dict(backwards_a_step(made.record())) == {4: 3}
    (line,) = one_step(facts(made))
    assert line.text == "zero(10) 4 x [backward(20)] step(30)   the same in 3 of 3 steps"


def accumulated(optimizer, batches, model):
    for number, (x, y) in enumerate(batches, 1):
        (F.mse_loss(model(x), y) / 2).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()


def in_pieces(optimizer, batches, model):
    for x, y in batches:
        optimizer.zero_grad()
        for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
            (F.mse_loss(model(part), target) / 2).backward()
        optimizer.step()


def read_in_pairs(optimizer, batches, model):
    left = list(batches)
    while len(left) > 1:
        optimizer.zero_grad()
        for x, y in (left.pop(), left.pop()):
            (F.mse_loss(model(x), y) / 2).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("work", "rows"),
    [
        (accumulated, "2 x 8 = 16 rows a step; "),
        (read_in_pairs, "2 x 8 = 16 rows a step; "),
        (in_pieces, "8 rows a step in 2 backward passes; "),
    ],
)
def test_rows_of_a_batch_that_is_cut_up_count_once(work, rows):
    assert pytest_trainloop.card(loop(work))["batch"].startswith(rows)


def test_optimizers_that_alternate_are_one_window():
    made = RecordBuilder([0], [1])
    for _ in range(3):
        for optimizer in (0, 0, 1):
            made.zero(optimizer, line=10 + optimizer)
            made.backward(optimizer)
            made.step(optimizer, line=30 + optimizer)
    (line,) = one_step(facts(made))
    assert line.text == (
        "2 x [zero(10) backward(20) step p0(30)] zero(11) backward(20) step p1(31)   the same in 3 of 3 rounds"
    )
    assert dict(backwards_a_step(made.record())) == {1: 9}


def test_without_a_step_there_is_no_window():
    made = RecordBuilder([0])
    made.backward()
    (line,) = one_step(facts(made))
    assert line.odd
    assert line.text.startswith("none seen")


def test_a_zeroing_before_the_loop_is_in_no_window():
    def zeroed_behind(optimizer, batches, model):
        optimizer.zero_grad()
        for x, y in batches:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert "the same in 12 of 12 steps" in pytest_trainloop.card(loop(zeroed_behind))["one step"]


def test_optimizers_are_named_by_what_they_train_though_others_held_it_before():
    def make():
        nets = {"one": nn.Linear(4, 4), "other": nn.Linear(4, 1)}
        both = [p for net in nets.values() for p in net.parameters()]

        def fit(batches):
            for x, y in batches:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                F.mse_loss(nets["other"](nets["one"](x)), y).backward()
                for optimizer in optimizers:
                    optimizer.step()

        torch.optim.SGD(both, lr=0.1)
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets.values()]
        return TrainLoop(model=nets, batch=(torch.randn(8, 4), torch.randn(8, 1)), fit=fit)

    card = pytest_trainloop.card(make)
    assert "SGD of one, 12 steps" in card["optimizer"]
    assert "SGD of other, 12 steps" in card["optimizer"]
