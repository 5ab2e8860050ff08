"""What each backward brings to each parameter, by whatever door autograd is entered."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import backward as imported_backward
from torch.autograd import grad as imported_grad
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from pytest_trainloop.recording.events import Backward, Forward, GradWrite, Step
from pytest_trainloop.recording.watch import Watch
from tests.helpers.watched_runs import arrived, batches, code, names, net, net_and_sgd, values


def expected(model, x, y) -> list[torch.Tensor]:
    twin = copy.deepcopy(model)
    return list(torch.autograd.grad(F.mse_loss(twin(x), y), list(twin.parameters())))


def incoming(backward: Backward, index: int) -> torch.Tensor:
    (arrival,) = backward.arrivals[index]
    return values(arrival.incoming)


def test_incoming_and_residual_are_kept_apart():
    model = net()
    (x1, y1), (x2, y2) = batches(2)
    first_grads, second_grads = expected(model, x1, y1), expected(model, x2, y2)
    with Watch({"": model}) as watch:
        F.mse_loss(model(x1), y1).backward()
        F.mse_loss(model(x2), y2).backward()
    first, second = watch.record.of(Backward)
    assert code([first, second])[0] == "F.mse_loss(model(x1), y1).backward()"
    assert first.at < first.until < second.at
    for index in range(4):
        assert torch.equal(incoming(first, index), first_grads[index].flatten())
        assert torch.equal(incoming(second, index), second_grads[index].flatten())
        assert first.arrivals[index][0].residual is None
        assert torch.equal(values(second.arrivals[index][0].residual), first_grads[index].flatten())
        assert first.arrivals[index][0].incoming.peak == pytest.approx(first_grads[index].abs().max().item())
    assert torch.equal(model[0].weight.grad, first_grads[0] + second_grads[0])


def test_a_pass_that_brings_zeros_only_reached_nothing():
    model = net()
    with Watch({"": model}) as watch:
        (0 * model(torch.ones(2, 3))).sum().backward()
    (backward,) = watch.record.of(Backward)
    assert len(backward.arrivals) == 4
    assert not backward.reached


@pytest.mark.parametrize("door", [torch.autograd.grad, imported_grad], ids=["attribute", "imported"])
def test_gradients_taken_by_autograd_grad_are_seen_and_accumulate_nowhere(door):
    model = net()
    ((x, y),) = batches(1)
    wanted = expected(model, x, y)
    with Watch({"": model}) as watch:
        taken = door(F.mse_loss(model(x), y), list(model.parameters()))
    (event,) = watch.record.of(Backward)
    assert event.kind == "grad"
    assert all(torch.equal(incoming(event, i), wanted[i].flatten()) for i in range(4))
    assert all(torch.equal(t, w) for t, w in zip(taken, wanted, strict=True))
    assert model[0].weight.grad is None


@pytest.mark.skipif("overridable_args" not in imported_backward.__code__.co_varnames, reason="modes do not see it")
def test_backward_imported_by_name_is_seen_with_its_root_and_line():
    model = net()
    with Watch({"": model}) as watch:
        imported_backward(model(torch.ones(1, 3)).sum())
    (event,) = watch.record.of(Backward)
    assert (event.kind, len(event.roots), len(event.arrivals)) == ("backward", 1, 4)
    assert code([event]) == ["imported_backward(model(torch.ones(1, 3)).sum())"]


def test_a_backward_inside_a_backward_belongs_to_the_outer_one():
    model = net()

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            with torch.enable_grad():
                (model[2].weight.sum() * 1.0).backward()
            return g

    with Watch({"": model}) as watch:
        Twice.apply(model[0](torch.ones(1, 3))).sum().backward()
    (event,) = watch.record.of(Backward)
    assert arrived(watch.record, event) == {"0.weight", "0.bias", "2.weight"}


def test_gradient_penalty_through_create_graph():
    model = net()
    x = torch.ones(2, 3, requires_grad=True)
    with Watch({"": model}) as watch:
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
    assert [e.kind for e in watch.record.of(Backward)] == ["grad", "backward"]
    assert arrived(watch.record, watch.record.of(Backward)[1]) == {"0.weight", "0.bias", "2.weight"}


def test_gradients_written_by_hand_are_assigned_and_consumed():
    model, optimizer = net_and_sgd()
    ((x, y),) = batches(1)
    with Watch({"": model}, [optimizer]) as watch:
        grads = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
        for p, g in zip(model.parameters(), grads, strict=True):
            p.grad = g.sign()
        optimizer.step()
    (write,) = watch.record.of(GradWrite)
    assert (write.how, write.parameters) == ("assigned", [0, 1, 2, 3])
    assert code([write]) == ["p.grad = g.sign()"]
    (step,) = watch.record.of(Step)
    assert torch.equal(values(step.reads[0].grads[0]), grads[0].sign().flatten())


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_under_checkpointing(reentrant):
    model = net()
    ((x, y),) = batches(1)
    wanted = expected(model, x, y)
    with Watch({"": model}) as watch:
        hidden = model[0](x)
        out = checkpoint(nn.Sequential(model[1], model[2]), hidden, use_reentrant=reentrant)
        F.mse_loss(out, y).backward()
    (event,) = watch.record.of(Backward)
    assert all(torch.equal(incoming(event, i), wanted[i].flatten()) for i in range(4))
    again = [f for f in watch.record.of(Forward) if f.in_backward]
    assert len(again) == 1
    assert again[0].grad_enabled
    assert len(watch.record.root_forwards()) == 2
    head = watch.record.parameters[2]
    assert head.calls_in_checkpoint == (1 if reentrant else 0)
    assert head.calls_without_grad == 0
    if reentrant:
        assert head.checkpoint is not None
        assert "checkpoint(nn.Sequential" in head.checkpoint.code


def test_a_tied_weight_is_one_parameter_with_one_arrival():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(6, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.embedding(tokens))

    model = Tied()
    with Watch({"": model}) as watch:
        F.cross_entropy(model(torch.tensor([1, 2])), torch.tensor([2, 3])).backward()
    assert names(watch.record) == ["embedding.weight"]
    (event,) = watch.record.of(Backward)
    assert torch.equal(incoming(event, 0), model.head.weight.grad.flatten())


def test_a_compiled_model_is_watched_as_its_eager_self(recwarn):
    model = net()
    compiled = torch.compile(model, backend="eager")
    ((x, y),) = batches(1)
    wanted = expected(model, x, y)
    with Watch({"": model}) as watch:
        F.mse_loss(compiled(x), y).backward()
    (event,) = watch.record.of(Backward)
    assert all(torch.equal(incoming(event, i), wanted[i].flatten()) for i in range(4))
    assert names(watch.record) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [p.calls_with_grad for p in watch.record.parameters] == [1] * 4
    assert not [w for w in recwarn if "global hooks" in str(w.message)]


def test_a_compiled_loss_function_is_run_eagerly_and_seen():
    model = net()

    @torch.compile(backend="eager", fullgraph=True)
    def loss_of(x, y):
        return F.mse_loss(model(x), y)

    with Watch({"": model}) as watch:
        loss_of(*batches(1)[0]).backward()
    assert code(watch.record.of(Forward)) == ["return F.mse_loss(model(x), y)"]
    assert len(watch.record.of(Backward)[0].arrivals) == 4


def test_gradients_per_example_by_vmap_leave_no_stray_parameters():
    model, optimizer = net_and_sgd()

    def loss(params, x, y):
        return F.mse_loss(functional_call(model, params, (x[None],)), y[None])

    with Watch({"": model}, [optimizer]) as watch:
        for x, y in batches(3):
            params = {k: p.detach() for k, p in model.named_parameters()}
            per_example = vmap(grad(loss), (None, 0, 0))(params, x, y)
            for name, p in model.named_parameters():
                p.grad = per_example[name].mean(0)
            optimizer.step()
    assert names(watch.record) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert len(watch.record.of(Step)) == 3
    assert all(set(s.updates) == {0, 1, 2, 3} for s in watch.record.of(Step))


def test_fast_weights_of_an_inner_loop_are_no_parameters():
    model, optimizer = net_and_sgd()
    with Watch({"": model}, [optimizer]) as watch:
        for x, y in batches(3):
            optimizer.zero_grad()
            params = dict(model.named_parameters())
            inner = torch.autograd.grad(F.mse_loss(model(x), y), list(params.values()), create_graph=True)
            fast = {k: p - 0.1 * g for (k, p), g in zip(params.items(), inner, strict=True)}
            F.mse_loss(functional_call(model, fast, (x,)), y).backward()
            optimizer.step()
    assert names(watch.record) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    outer = [b for b in watch.record.of(Backward) if b.kind == "backward"]
    assert [len(b.arrivals) for b in outer] == [4, 4, 4]


def test_batched_gradients_have_no_readable_samples():
    w = nn.Linear(2, 2, bias=False)
    with Watch({"": w}) as watch:
        out = w(torch.ones(2))
        torch.autograd.grad(out, w.weight, torch.eye(2), is_grads_batched=True)
    (event,) = watch.record.of(Backward)
    assert not event.arrivals[0][0].incoming.finite
    assert not event.arrivals[0][0].incoming.zero


def test_hooks_of_the_user_still_run_and_what_they_make_is_what_arrives():
    model = net()
    model[2].bias.register_hook(lambda g: 2 * g)
    with Watch({"": model}) as watch:
        model(torch.ones(1, 3)).sum().backward()
    assert model[2].bias.grad.tolist() == [2.0, 2.0]
    assert incoming(watch.record.of(Backward)[0], 3).tolist() == [2.0, 2.0]


def test_steps_between_a_forward_and_its_backward_are_counted():
    layer = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with Watch({"": layer}, [optimizer]) as watch:
        late = layer(torch.ones(1, 3)).sum()  # its backward needs the input only, so torch lets it pass
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
        late.backward()
        layer(torch.ones(1, 3)).sum().backward()
    first, second = watch.record.of(Backward)
    assert first.arrivals[0][0].steps_since_forward == 1
    assert second.arrivals[0][0].steps_since_forward == 0
