"""Optimizer steps: what was consumed, at which rate, how far it moved, and which of nested steps consumes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pytest_trainloop.recording.events import Backward, Forward, GradWrite, LossCall, Step
from pytest_trainloop.recording.watch import Watch
from tests.helpers.watched_runs import batches, code, names, net, net_and_sgd, values


def train(model, optimizer, count=2):
    for x, y in batches(count):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("declared", [True, False])
def test_what_the_step_consumed_left_and_moved(declared):
    model, twin = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ((x, y),) = batches(1)
    wanted = torch.autograd.grad(F.mse_loss(twin(x), y), list(twin.parameters()))
    with Watch({"": model} if declared else {}, [optimizer] if declared else []) as watch:
        train(model, optimizer, 1)
    (step,) = watch.record.of(Step)
    (held,) = watch.record.optimizers
    assert (held.kind, held.declared, held.parameters, held.steps) == ("SGD", declared, (0, 1, 2, 3), 1)
    assert code([step]) == ["optimizer.step()"]
    assert step.consumes
    assert not step.nested
    for i, (g, p) in enumerate(zip(wanted, twin.parameters(), strict=True)):
        assert torch.equal(values(step.reads[0].grads[i]), g.flatten())
        assert step.left[i].same(step.reads[0].grads[i])
        assert step.updates[i] == pytest.approx((0.1 * g.abs().max() / p.detach().abs().max()).item(), rel=1e-4)
    assert [(m.by, m.parameters) for m in watch.record.moves] == [(0, (0, 1, 2, 3))]
    assert watch.record.changed() == {0, 1, 2, 3}
    assert watch.record.moved_outside_steps() == set()


def test_a_parameter_without_gradient_is_read_as_none_and_does_not_move():
    model, optimizer = net_and_sgd()
    with Watch({"": model}, [optimizer]) as watch:
        model[0](torch.ones(1, 3)).sum().backward()
        optimizer.step()
    (step,) = watch.record.of(Step)
    assert [step.reads[0].grads[i] is None for i in range(4)] == [False, False, True, True]
    assert set(step.updates) == {0, 1}
    assert watch.record.changed() == {0, 1}


def test_values_changed_by_other_hands_are_told_from_steps():
    model, optimizer = net_and_sgd()
    with Watch({"": model}, [optimizer]) as watch:
        train(model, optimizer, 1)
        with torch.no_grad():
            model[2].weight.clamp_(-0.01, 0.01)
        train(model, optimizer, 1)
    assert [(m.by, m.parameters) for m in watch.record.moves] == [(0, (0, 1, 2, 3)), (None, (2,)), (0, (0, 1, 2, 3))]
    assert watch.record.moved_outside_steps() == {2}


def test_the_rate_of_every_group_at_every_step():
    model = net()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    with Watch({"": model}, [optimizer]) as watch:
        train(model, optimizer, 1)
        optimizer.param_groups[0]["lr"] = 0.05
        train(model, optimizer, 1)
    assert [s.lrs for s in watch.record.of(Step)] == [(0.1, 0.01), (0.05, 0.01)]


def test_a_rate_kept_in_a_tensor_is_read_as_it_was_at_the_step():
    model = net()
    rate = torch.tensor(0.5)
    groups = [{"params": model[0].parameters(), "lr": 0.25}, {"params": model[2].parameters(), "lr": rate}]
    optimizer = torch.optim.Adam(groups, foreach=False, capturable=False)
    with Watch({"": model}, [optimizer]) as watch:
        train(model, optimizer, 1)
        rate.mul_(0.5)
        train(model, optimizer, 1)
    assert [s.lrs for s in watch.record.of(Step)] == [(0.25, 0.5), (0.25, 0.25)]


def test_a_group_added_midway():
    model = net()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with Watch({"": model}, [optimizer]) as watch:
        train(model, optimizer, 1)
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.01})
        train(model, optimizer, 1)
    first, second = watch.record.of(Step)
    assert (first.lrs, second.lrs) == ((0.1,), (0.1, 0.01))
    assert (set(first.reads[0].grads), set(second.reads[0].grads)) == ({0, 1}, {0, 1, 2, 3})
    assert watch.record.optimizers[0].parameters == (0, 1, 2, 3)


def test_several_optimizers_are_kept_apart():
    model = net()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.Adam(model[2].parameters(), lr=0.01)
    with Watch({"": model}, [first]) as watch:
        for x, y in batches(3):
            F.mse_loss(model(x), y).backward()
            first.step()
            second.step()
            second.step()
            model.zero_grad()
    assert [(o.kind, o.declared, o.parameters, o.steps) for o in watch.record.optimizers] == [
        ("SGD", True, (0, 1), 3),
        ("Adam", False, (2, 3), 6),
    ]
    assert (watch.record.rounds, watch.record.steps) == (6, 9)
    assert [s.optimizer for s in watch.record.of(Step)] == [0, 1, 1] * 3
    assert watch.record.held == {0: (0,), 1: (0,), 2: (1,), 3: (1,)}


def test_lbfgs_reads_at_the_end_of_each_closure():
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, tolerance_grad=0, tolerance_change=0)
    ((x, y),) = batches(1)
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        return loss

    with Watch({"": model}, [optimizer]) as watch:
        returned = optimizer.step(closure)
    (step,) = watch.record.of(Step)
    backwards = watch.record.of(Backward)
    assert returned.item() == losses[0]
    assert len(step.reads) == len(backwards) == len(losses) == 3
    assert len(watch.record.of(GradWrite)) == 3  # the zeroing, not the step's own writes
    for read, backward in zip(step.reads, backwards, strict=True):
        assert read.grads[0].same(backward.arrivals[0][0].incoming)
    assert step.at < backwards[0].at < step.until
    assert set(step.updates) == {0, 1, 2, 3}


@pytest.mark.parametrize("by_name", [True, False])
def test_a_closure_given_to_adam_runs_once_under_its_own_name(by_name):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ((x, y),) = batches(1)
    called = []

    def closure():
        called.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    with Watch({"": model}, [optimizer]) as watch:
        loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    (step,) = watch.record.of(Step)
    assert called == [True]
    assert loss.item() == watch.record.of(LossCall)[0].value
    assert len(step.reads) == 1
    assert step.reads[0].grads[0].same(watch.record.of(Backward)[0].arrivals[0][0].incoming)


def test_steps_fused_into_backward():
    model = net()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step_now(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_now)
    with Watch({"": model}) as watch:
        for x, y in batches(2):
            F.mse_loss(model(x), y).backward()
    steps = watch.record.of(Step)
    assert len(steps) == 8
    assert all(s.in_backward and not s.nested for s in steps)
    assert [(o.kind, o.steps, len(o.parameters)) for o in watch.record.optimizers] == [("SGD", 2, 1)] * 4
    for backward in watch.record.of(Backward):
        inside = [s for s in steps if backward.at < s.at < backward.until]
        assert {i for s in inside for i in s.updates} == {0, 1, 2, 3}


class Sign(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad.sign(), alpha=-group["lr"])


class Wrapper:
    """Not an Optimizer, but it has one and hands everything on."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()


@pytest.mark.parametrize("wrap", [lambda o: o, Wrapper, lambda o: Wrapper(Wrapper(o))], ids=["bare", "once", "twice"])
def test_a_custom_optimizer_and_wrappers_around_it_are_one_optimizer(wrap):
    model = net()
    optimizer = wrap(Sign(model.parameters(), 0.01))
    with Watch({"": model}, [optimizer]) as watch:
        train(model, optimizer)
    assert [(o.kind, o.declared, o.steps) for o in watch.record.optimizers] == [("Sign", True, 2)]
    assert [s.lrs for s in watch.record.of(Step)] == [(0.01,)] * 2
    assert all(s.consumes and set(s.updates) == {0, 1, 2, 3} for s in watch.record.of(Step))


def test_a_subclass_that_calls_the_step_above_it_steps_once():
    class Logged(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model = net()
    torch.optim.SGD(model.parameters(), lr=0.1)  # torch puts its hooks around a class's step when one is made
    optimizer = Logged(model.parameters(), lr=0.1)
    with Watch({"": model}, [optimizer]) as watch:
        train(model, optimizer)
    assert watch.record.steps == watch.record.optimizers[0].steps == 2
    assert [s.nested for s in watch.record.of(Step)] == [True, False] * 2


class Shrinks(torch.optim.Optimizer):
    """A proximal step: it changes weights and needs no gradient."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.mul_(0.9)


def test_a_step_consumes_if_it_computes_with_gradients_or_finds_none():
    model = net()
    plain, proximal = torch.optim.SGD(model.parameters(), lr=0.1), Shrinks(model.parameters())
    with Watch({"": model}, [plain, proximal]) as watch:
        plain.step()
        model(torch.ones(1, 3)).sum().backward()
        proximal.step()
        plain.step()
    assert [s.consumes for s in watch.record.of(Step)] == [True, False, True]
    assert [bool(s.updates) for s in watch.record.of(Step)] == [False, True, True]


def test_an_optimizer_that_is_none_of_torchs_moves_by_hand():
    class TrainloopFixture:
        def __init__(self, parameters):
            self.parameters = list(parameters)

        def zero_grad(self):
            for p in self.parameters:
                p.grad = None

        def step(self):
            with torch.no_grad():
                for p in self.parameters:
                    p -= 0.1 * p.grad

    model = net()
    optimizer = TrainloopFixture(model.parameters())
    with Watch({"": model}, [optimizer]) as watch:
        train(model, optimizer)
    assert watch.record.of(Step) == []
    assert [(o.kind, o.steps, o.parameters) for o in watch.record.optimizers] == [("TrainloopFixture", 0, ())]
    assert watch.record.moved_outside_steps() == {0, 1, 2, 3}


class Fails(torch.optim.SGD):
    """Its second step raises, as on a corrupt batch."""

    failing = True

    def step(self, closure=None):
        if self.failing:
            self.failing = False
            raise RuntimeError("corrupt state")
        return super().step(closure)


def test_after_a_step_that_raised_and_was_caught_everything_is_seen_again():
    model = net()
    torch.optim.SGD(model.parameters(), lr=0.1)  # or its step would have no hooks of its own
    optimizer = Fails(model.parameters(), lr=0.1)
    with Watch({"": model}, [optimizer]) as watch:
        F.mse_loss(model(torch.ones(1, 3)), torch.ones(1, 2)).backward()
        with pytest.raises(RuntimeError, match="corrupt state"):
            optimizer.step()
        train(model, optimizer, 1)
    assert [type(e) for e in watch.record.events] == [
        *(Forward, LossCall, Backward, Step),
        *(GradWrite, Forward, LossCall, Backward, Step, Step),
    ]
    broken, outer, inner = watch.record.of(Step)
    assert (broken.until, watch.record.steps) == (0, 1)
    assert (outer.nested, inner.nested) == (True, False)
    assert [m.by for m in watch.record.moves] == [0]


def test_a_parameter_that_changes_dtype_between_steps():
    model, optimizer = net_and_sgd()
    with Watch({"": model}, [optimizer]) as watch:
        train(model, optimizer, 1)
        optimizer.zero_grad()
        model.double()
        for x, y in batches(1):
            F.mse_loss(model(x.double()), y.double()).backward()
        optimizer.step()
    first, second = watch.record.of(Step)
    assert 0 < first.updates[0] < 1
    assert 0 < second.updates[0] < 1
    assert [m.by for m in watch.record.moves] == [0, None, 0]


def test_a_parameter_held_by_an_optimizer_only_is_named_after_its_place():
    model, loose = net(), torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [loose]}], lr=0.1)
    with Watch({"": model}, [optimizer]) as watch:
        (model(torch.ones(1, 3)).sum() + loose.sum()).backward()
        optimizer.step()
    assert names(watch.record)[4:] == ["SGD.param_groups[1][0]"]
    assert watch.record.parameters[4].role == "foreign"
    assert values(watch.record.of(Backward)[0].arrivals[4][0].incoming).tolist() == [1.0, 1.0]


def test_before_step_is_called_ahead_of_each_step_and_may_end_the_run():
    class Enough(BaseException):
        pass

    def stop(watch):
        if watch.record.steps == 2:
            raise Enough

    model, optimizer = net_and_sgd()
    watch = Watch({"": model}, [optimizer], before_step=stop)
    with pytest.raises(Enough), watch:
        train(model, optimizer, 5)
    assert watch.record.steps == len(watch.record.of(Step)) == 2
    assert len(watch.record.of(Backward)) == 3


def test_gradients_are_read_after_the_optimizers_own_hooks():
    model, twin = net(), net()
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)

    def hand_on(*_):
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = 2 * p.grad

    optimizer.register_step_pre_hook(hand_on)
    ((x, y),) = batches(1)
    wanted = torch.autograd.grad(F.mse_loss(twin(x), y), list(twin.parameters()))
    with Watch({"": model}, [optimizer]) as watch:
        for _ in range(2):
            model.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    for step in watch.record.of(Step):
        for i, g in zip(watch.record.optimizers[0].parameters, wanted, strict=True):
            assert torch.equal(values(step.reads[0].grads[i]), 2 * g.flatten())
    assert [w.how for w in watch.record.of(GradWrite) if w.assigns] == ["assigned", "assigned"]
    assert list(optimizer._optimizer_step_pre_hooks.values()) == [hand_on]


def test_nothing_of_ours_is_left_on_an_optimizer_whose_step_raises():
    model, optimizer = net_and_sgd()

    def refuse(*_):
        raise RuntimeError("not now")

    optimizer.register_step_pre_hook(refuse)
    with Watch({"": model}, [optimizer]) as watch, pytest.raises(RuntimeError, match="not now"):
        train(model, optimizer, 1)
    assert watch.record.steps == 0
    assert list(optimizer._optimizer_step_pre_hooks.values()) == [refuse]
