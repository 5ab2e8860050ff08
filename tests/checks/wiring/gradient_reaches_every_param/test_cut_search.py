"""Where a gradient is lost: each kind of operation, on tiny loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.wiring.gradient_reaches_every_param.cut_search import CutSearch
from pytest_trainloop.runs.evidence import Evidence
from tests.helpers.tiny_loops import BODY, HEAD, evidence

CUTS = {"detach", "grad_off", "value", "custom"}
ZEROS = {"zero_slope", "constant"}


def detach(h):
    return h.detach()


def detach_in_place(h):
    return h.clone().detach_()


def data(h):
    return h.data


def no_grad(h):
    with torch.no_grad():
        return torch.tanh(h)


@torch.no_grad()
def no_grad_decorator(h):
    return torch.tanh(h)


def grad_mode(h):
    torch.set_grad_enabled(False)
    h = torch.tanh(h)
    torch.set_grad_enabled(True)
    return h


def inference_mode(h):
    with torch.inference_mode():
        h = torch.tanh(h)
    return h.clone()


def written_without_grad(h):
    out = torch.zeros_like(h)
    with torch.no_grad():
        out[:] = h
    return out


def rebuilt(h):
    return torch.tensor(h)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("between", "kind", "op", "line"),
    [
        (detach, "detach", "detach", "return h.detach()"),
        (data, "detach", "data", "return h.data"),
        (no_grad, "grad_off", "grad_off", "with torch.no_grad():"),
        (no_grad_decorator, "grad_off", "grad_off", ""),
        (grad_mode, "grad_off", "grad_off", "torch.set_grad_enabled(False)"),
        (inference_mode, "grad_off", "grad_off", "h = torch.tanh(h)"),
        (written_without_grad, "grad_off", "grad_off", "with torch.no_grad():"),
        (rebuilt, "value", "tensor", "return torch.tensor(h)"),
    ],
)
def test_an_operation_that_is_left_out_lets_the_gradient_through(between, kind, op, line):
    cut, touched = evidence(between).shared(CutSearch).find(BODY, CUTS)
    assert (cut.candidate.kind, cut.candidate.op) == (kind, op)
    assert line in cut.candidate.place.code
    assert cut.gradient > 0
    assert cut.reached == set(BODY)
    assert touched == {*BODY, *HEAD}


def numpy(h):
    return torch.from_numpy(np.tanh(h.detach().numpy()))


def tolist(h):
    return torch.tensor(h.tolist())


def item(h):
    return torch.stack([torch.tensor([v.item() for v in row]) for row in h])


def to_float(h):
    return torch.tensor([[float(v) for v in row] for row in h])


def copied_into_data(h):
    out = torch.zeros(h.shape)
    out.data.copy_(h)
    return out


def one_hot(h):
    return F.one_hot(h.argmax(1), 4).to(h.dtype)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("between", "kind", "op"),
    [
        (detach_in_place, "detach", "detach_"),
        (numpy, "detach", "detach"),
        (tolist, "value", "tolist"),
        (item, "value", "item"),
        (to_float, "value", "__float__"),
        (copied_into_data, "value", "copy_"),
        (one_hot, "value", "argmax"),
    ],
)
def test_an_operation_that_cannot_be_left_out_is_shown_by_moving_what_it_gave(between, kind, op):
    cut, _ = evidence(between).shared(CutSearch).find(BODY, CUTS)
    assert (cut.candidate.kind, cut.candidate.op) == (kind, op)
    assert cut.gradient is None
    assert cut.change > 1e-6
    assert cut.candidate.place.file.endswith("test_cut_search.py")


class Forgetful(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return None


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


def test_a_function_of_ones_own_that_gives_no_gradient_on():
    cut, _ = evidence(lambda h: Forgetful.apply(h)).shared(CutSearch).find(BODY, CUTS)
    assert (cut.candidate.kind, cut.candidate.op, cut.gradient) == ("custom", "Forgetful", None)
    assert "Forgetful.apply(h)" in cut.candidate.place.code


@pytest.mark.parametrize("between", [torch.tanh, lambda h: Squared.apply(h)], ids=["tanh", "squared"])
def test_where_nothing_is_cut_nothing_is_found(between):
    assert evidence(between).shared(CutSearch).find(BODY, CUTS) == (None, {*BODY, *HEAD})


def test_operations_that_cut_one_behind_the_other_are_left_out_together():
    made = evidence(detach, after=lambda loss: loss.detach().requires_grad_())
    cut, _ = made.shared(CutSearch).find(BODY, CUTS)
    assert "loss.detach()" in cut.candidate.place.code  # the one nearest to the loss
    assert cut.gradient > 0
    assert cut.reached == set(BODY)


def logged(h):
    print(h.mean().item(), h.detach().norm())
    return h.detach()


def test_what_only_feeds_a_log_is_not_the_cut():
    cut, _ = evidence(logged).shared(CutSearch).find(BODY, CUTS)
    assert "return h.detach()" in cut.candidate.place.code
    assert cut.gradient > 0


def test_a_loss_cut_from_everything():
    cut, _ = evidence(after=lambda loss: loss.detach().requires_grad_()).shared(CutSearch).find([*BODY, *HEAD], CUTS)
    assert cut.candidate.op == "detach"
    assert cut.reached == {*BODY, *HEAD}


def test_only_the_parameters_behind_the_cut_are_reached_without_it():
    cut, _ = evidence(detach).shared(CutSearch).find([*BODY, *HEAD], CUTS)
    assert cut.reached >= set(BODY)
    assert cut.candidate.op == "detach"


def test_only_the_kinds_asked_for_are_candidates():
    assert evidence(detach).shared(CutSearch).find(BODY, ZEROS)[0] is None
    assert evidence(torch.round).shared(CutSearch).find(BODY, CUTS)[0] is None


def one_entry(h):
    return F.softmax(h[:, :1], dim=1).expand(-1, 4)


def one_entry_normalised(h):
    return F.layer_norm(h[:, :1], (1,)).expand(-1, 4)


def clamped(h):
    return h.clamp(min=9.0)


@pytest.mark.parametrize(
    ("between", "bias", "kind", "op"),
    [
        (torch.round, 0.0, "zero_slope", "round"),
        (torch.sign, 0.0, "zero_slope", "sign"),
        (torch.floor, 0.0, "zero_slope", "floor"),
        (clamped, 0.0, "zero_slope", "clamp"),
        (F.hardtanh, 9.0, "zero_slope", "hardtanh"),
        (F.relu6, 20.0, "zero_slope", "relu6"),
        (F.relu, -50.0, "constant", "relu"),
        (one_entry, 0.0, "constant", "softmax"),
        (one_entry_normalised, 0.0, "constant", "layer_norm"),
    ],
)
def test_what_makes_every_gradient_zero(between, bias, kind, op):
    cut, _ = evidence(between, bias=bias).shared(CutSearch).find(BODY, ZEROS)
    assert (cut.candidate.kind, cut.candidate.op) == (kind, op)
    assert cut.gradient > 0
    assert cut.reached == set(BODY)
    assert cut.candidate.place.file.endswith(("test_cut_search.py", "tiny_loops.py"))


@pytest.mark.parametrize("between", [torch.tanh, F.relu, lambda h: h * 0], ids=["tanh", "relu", "times-zero"])
def test_a_zero_that_no_known_operation_makes_is_not_explained(between):
    assert evidence(between).shared(CutSearch).find(BODY, ZEROS)[0] is None


class Product(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.full((3,), a)), nn.Parameter(torch.full((3,), b))


@pytest.mark.parametrize(("a", "b", "stuck"), [(0.0, 0.0, {"a", "b"}), (0.0, 1.0, {"a"}), (1.0, 0.0, {"b"})])
def test_what_starts_at_zero_and_gets_a_gradient_away_from_there(a, b, stuck):
    def make():
        model = Product(a, b)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {"batch": torch.ones(2, 3), "loss": lambda model, x: (model.a * model.b * x - x).square().mean()}
        return TrainLoop(model=model, optimizer=optimizer, **given)

    made = Evidence(make)
    assert all(made.run().reached(p.index) for p in made.run().parameters) == (a != b)
    assert set(CutSearch(made).saddles(["a", "b"])) == stuck


def test_only_what_waits_for_the_refused_backward_pass_is_named():
    from pytest_trainloop.api import check_loop
    from tests.loops.corpus import PAIRS

    make = PAIRS["toggled_gan_generator_loss_on_detached"].faulty
    (result,) = check_loop(make, only=["gradient_reaches_every_param"], raises=False).results
    (fault,) = result.faults
    assert {name.partition(".")[0] for name in fault.culprits} == {"generator"}
    assert "detached = fake.detach()" in fault.do_not
