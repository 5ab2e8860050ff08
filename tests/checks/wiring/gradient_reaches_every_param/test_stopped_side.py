"""A stop-gradient on the wrong side of a comparison is moved; one of two towers that both train is left out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.api import check_loop
from pytest_trainloop.checks.wiring.gradient_reaches_every_param.findings import of_other_side
from pytest_trainloop.checks.wiring.gradient_reaches_every_param.stopped_side import OtherSide
from pytest_trainloop.loop import TrainLoop
from pytest_trainloop.recording.events import Place

CHECK = "gradient_reaches_every_param"


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4)
        self.head = nn.Linear(4, 3)


def finding_of(loss, held=lambda model: model.parameters()):
    def make():
        model = Towers()
        optimizer = torch.optim.SGD(held(model), lr=0.1)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                loss(model, x, y).backward()
                optimizer.step()

        batch = torch.randn(8, 6), torch.randint(0, 3, (8,))
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    report = check_loop(make, only=[CHECK], raises=False)
    return next(f for r in report.results for f in r.findings if f.cause == "graph_cut")


def distil(model, x, y):
    student, teacher = model.student(x), model.teacher(x)
    return F.mse_loss(student.detach(), teacher) + F.cross_entropy(model.head(teacher), y)


def both_normalised(model, x, y):
    student, teacher = F.normalize(model.student(x).detach(), dim=1), F.normalize(model.teacher(x), dim=1)
    return -(student * teacher).sum(1).mean() + F.cross_entropy(model.head(teacher), y)


def only_compared(model, x, y):
    return F.mse_loss(model.student(x).detach(), model.teacher(x)) + F.cross_entropy(model.head(x[:, :4]), y)


def weighs_a_gate(model, x, y):
    hidden = model.teacher(x)
    return F.cross_entropy(model.head(model.student(x).detach() * hidden), y)


@pytest.mark.parametrize("loss", [distil, both_normalised])
def test_the_stop_is_moved_where_all_then_train(loss):
    found = finding_of(loss)
    assert found.culprits == ("student.weight", "student.bias")
    assert "learning was not tried" in found.tried
    assert found.do_not.startswith("just delete the detach()")


@pytest.mark.parametrize("loss", [only_compared, weighs_a_gate])
def test_the_stop_is_left_out_where_the_other_side_needs_the_gradient(loss):
    found = finding_of(loss)
    assert found.tried == "without the detach() the gradient arrives"
    assert found.do_not == ""


@pytest.mark.parametrize(
    ("code", "written"),
    [
        ("F.mse_loss(net(x).detach(), t)", "F.mse_loss(net(x), t.detach())"),
        ("loss = d(a, h[0].detach()) + d(b.detach(), c, 2)", "loss = d(a.detach(), h[0]) + d(b, c.detach(), 2)"),
        ("d(a, b.detach().float())", "detach the other side of mse_loss (train.py:3), and leave this detach() out"),
    ],
)
def test_the_line_is_written_with_the_sides_changed(code, written):
    at = Place("train.py", 3, code)
    assert of_other_side("detach()", at, OtherSide("mse_loss", at)).split("\n")[0] == written


def test_on_another_line_it_is_said_in_words():
    repair = of_other_side("detach()", Place("train.py", 3, "p = p.detach()"), OtherSide("mse_loss", Place("l.py", 5)))
    assert repair == "detach the other side of mse_loss (l.py:5), and leave this detach() out"
