"""Which operation keeps a gradient from parameters, on tiny loops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.wiring.gradient_reaches_every_param.check import gradient_reaches_every_param
from pytest_trainloop.checks.wiring.gradient_reaches_every_param.cuts import stopped_on
from pytest_trainloop.frontends.api import check_loop
from pytest_trainloop.recording.events import Place
from pytest_trainloop.runs.evidence import Evidence
from tests.helpers.tiny_loops import BODY, HEAD, evidence

LEFT_OUT, MOVED = "in a run w", "likely: moving the result of "


def written_without_grad(h):
    out = torch.zeros_like(h)
    with torch.no_grad():
        out[:] = h
    return out


def inside_inference_mode(h):
    with torch.inference_mode():
        h = torch.tanh(h)
    return h.clone()


def copied_into_data(h):
    out = torch.zeros(h.shape)
    out.data.copy_(h)
    return out


def logged(h):
    print(h.mean().item(), h.detach().norm())
    return h.detach()


class Forgetful(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return None


class Squared(Forgetful):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("between", "cause", "line", "shown"),
    [
        (lambda h: h.data, "graph_cut", "h.data", LEFT_OUT),
        (lambda h: torch.tensor(h), "graph_cut", "torch.tensor(h)", LEFT_OUT),
        (written_without_grad, "no_grad_forward", "with torch.no_grad():", LEFT_OUT),
        (inside_inference_mode, "no_grad_forward", "h = torch.tanh(h)", LEFT_OUT),
        (logged, "graph_cut", "return h.detach()", LEFT_OUT),
        (lambda h: h.clone().detach_(), "graph_cut", "detach_", MOVED),
        (copied_into_data, "graph_cut", "out.data.copy_(h)", MOVED),
        (lambda h: F.one_hot(h.argmax(1), 4).to(h.dtype), "graph_cut", "h.argmax(1)", MOVED),
        (lambda h: Forgetful.apply(h), "graph_cut", "Forgetful.apply(h)", "a gradient arrives at the output of"),
    ],
)
def test_no_gradient(between, cause, line, shown):
    (finding,) = gradient_reaches_every_param(evidence(between))
    assert (finding.cause, finding.level, finding.culprits[0]) == (cause, "fault", "body.weight")
    assert line in finding.where
    assert finding.shown_by.startswith(shown)


@pytest.mark.parametrize(
    ("between", "bias", "cause", "op"),
    [
        (F.hardtanh, 9.0, "gradient_vanished", "hardtanh"),
        (F.relu6, 20.0, "gradient_vanished", "relu6"),
        (lambda h: F.layer_norm(h[:, :1], (1,)).expand(-1, 4), 0.0, "dead_activation", "layer_norm"),
    ],
)
def test_zero_gradients(between, bias, cause, op):
    (finding,) = gradient_reaches_every_param(evidence(between, bias=bias))
    assert (finding.cause, finding.level, finding.culprits) == (cause, "fault", tuple(BODY))
    assert f"in which {op} gives back" in finding.shown_by


@pytest.mark.parametrize(
    "between", [torch.tanh, F.relu, lambda h: h * 0, lambda h: Squared.apply(h)], ids=["tanh", "relu", "0", "squared"]
)
def test_where_nothing_is_cut_nothing_is_found(between):
    assert list(gradient_reaches_every_param(evidence(between))) == []


def test_of_operations_one_behind_the_other_the_one_nearest_to_the_loss_is_named():
    made = evidence(lambda h: h.detach(), after=lambda loss: loss.detach().requires_grad_())
    head, body = gradient_reaches_every_param(made)
    assert "loss.detach()" in head.where
    assert "loss.detach()" in body.where
    assert "and at 1 more line on other paths" in body.summary
    assert (head.culprits, body.culprits) == (tuple(HEAD), tuple(BODY))


class Product(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.full((3,), a)), nn.Parameter(torch.full((3,), b))


@pytest.mark.parametrize(("a", "b", "stuck"), [(0.0, 0.0, [("a", "b")]), (0.0, 1.0, []), (1.0, 0.0, [])])
def test_two_factors_at_zero_are_stuck_and_one_is_not(a, b, stuck):
    def make():
        model = Product(a, b)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {"batch": torch.ones(2, 3), "loss": lambda model, x: (model.a * model.b * x - x).square().mean()}
        return TrainLoop(model=model, optimizer=optimizer, **given)

    assert [f.culprits for f in gradient_reaches_every_param(Evidence(make))] == stuck


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4)
        self.head = nn.Linear(4, 3)


def distil(model, x, y):
    student, teacher = model.student(x), model.teacher(x)
    return F.mse_loss(student.detach(), teacher) + F.cross_entropy(model.head(teacher), y)


def both_normalised(model, x, y):
    student, teacher = F.normalize(model.student(x).detach(), dim=1), F.normalize(model.teacher(x), dim=1)
    return -(student * teacher).sum(1).mean() + F.cross_entropy(model.head(teacher), y)


def only_compared(model, x, y):
    return F.mse_loss(model.student(x).detach(), model.teacher(x)) + F.cross_entropy(model.head(x[:, :4]), y)


def weighs_a_gate(model, x, y):
    return F.cross_entropy(model.head(model.student(x).detach() * model.teacher(x)), y)


@pytest.mark.parametrize(
    ("loss", "moved"), [(distil, True), (both_normalised, True), (only_compared, False), (weighs_a_gate, False)]
)
def test_a_stop_is_moved_where_all_then_train_and_left_out_where_the_other_side_needs_the_gradient(loss, moved):
    def make():
        model = Towers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.randn(8, 6), torch.randint(0, 3, (8,))
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, loss=lambda model, b: loss(model, *b))

    found = next(f for f in gradient_reaches_every_param(Evidence(make)) if f.cause == "graph_cut")
    assert found.culprits == ("student.weight", "student.bias")
    assert ("learning was not tried" in found.tried) == moved
    assert found.do_not.startswith("just delete the detach()") == moved


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
    assert stopped_on("mse_loss", at, "detach()", at).split("\n")[0] == written


def test_only_what_waits_for_the_refused_backward_pass_is_named():
    from tests.loops.corpus import PAIRS

    make = PAIRS["toggled_gan_generator_loss_on_detached"].faulty
    (result,) = check_loop(make, only=["gradient_reaches_every_param"], raises=False).results
    (fault,) = result.faults
    assert {name.partition(".")[0] for name in fault.culprits} == {"generator"}
    assert "detached = fake.detach()" in fault.do_not
