"""Copies step as the real ones do, unseen; what cannot be copied is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pytest_trainloop.instruments.optimizers.replay import ENTRYWISE, first_entries, kind_of, snapshot, stepped
from pytest_trainloop.recording.watch import Watch
from pytest_trainloop.runs.hooks import around_steps


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))


def train(model, optimizer, steps=4):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ENTRYWISE)
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}])
def test_copied_entries_move_as_they_do_among_all(kind, options):
    model = net()
    optimizer = kind(model.parameters(), lr=1e-2, foreach=False, **options)
    seen = []

    def use(_optimizer, snap):
        copies = stepped(snap, wide=False)
        seen.append([torch.equal(copies[i], p.detach().reshape(-1)[:50]) for i, p in enumerate(watch.table.tensors)])

    watch = Watch({"": model}, [optimizer])
    with watch, around_steps(watch, lambda o: snapshot(o, watch, first_entries(50), lambda p: True), use):
        train(model, optimizer)
    assert seen == [[True] * 4] * 4


def test_nothing_of_the_users_changes():
    def trained(look):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False)
        watch = Watch({"": model}, [optimizer])
        take = (lambda o: snapshot(o, watch, first_entries(50), lambda p: True)) if look else (lambda o: None)
        with watch, around_steps(watch, take, lambda _o, snap: stepped(snap, wide=True, steps=2)):
            train(model, optimizer)
        state = [v for s in optimizer.state.values() for v in s.values()]
        return [*model.parameters(), *(p.grad for p in model.parameters()), *state, torch.rand(3)]

    assert all(torch.equal(a, b) for a, b in zip(trained(look=True), trained(look=False), strict=True))


def test_steps_of_copies_are_seen_by_nobody():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []
    handle = register_optimizer_step_pre_hook(lambda *args: calls.append(args[0]))
    watch = Watch({"": model}, [optimizer])
    try:
        take = lambda o: snapshot(o, watch, first_entries(9), lambda p: True)  # noqa: E731
        with watch, around_steps(watch, take, lambda _o, snap: stepped(snap, wide=True)):
            train(model, optimizer, steps=3)
    finally:
        handle.remove()
    assert calls == [optimizer] * 3
    assert watch.record.steps == 3
    assert len(watch.record.optimizers) == 1


def test_a_closure_is_looked_at_after_it_has_made_the_gradients():
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x, grads = torch.randn(8, 6), []

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    watch = Watch({"": model}, [optimizer])
    take = lambda o: snapshot(o, watch, first_entries(9), lambda p: True)  # noqa: E731
    with watch, around_steps(watch, take, lambda _o, snap: grads.extend(m.grad for m in snap.members)):
        optimizer.step(closure)
    assert len(grads) == 4
    assert all(bool(g.any()) for g in grads)


class Built(torch.optim.AdamW):
    def __init__(self, params, config):
        super().__init__(params, **config)


class Changed(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure=None):
        return super().step(closure)


def test_only_torchs_own_steps_are_copied():
    params = list(net().parameters())
    assert kind_of(torch.optim.AdamW(params)) is torch.optim.AdamW
    assert kind_of(Built(params, {"lr": 1e-3})) is torch.optim.AdamW
    assert kind_of(Changed(params)) is None
    assert kind_of(torch.optim.LBFGS(params)) is None
    assert kind_of(torch.optim.Adafactor(params)) is None
    assert kind_of(object()) is None


def test_an_optimizer_with_hooks_of_its_own_is_not_copied():
    optimizer = torch.optim.AdamW(net().parameters())
    optimizer.register_step_pre_hook(lambda *args: None)
    assert kind_of(optimizer) is None
