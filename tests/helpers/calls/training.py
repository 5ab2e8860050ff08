"""Layers, optimizers, and what stands around a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.calls.kinds import data, grads, kind, net

if TYPE_CHECKING:
    from collections.abc import Callable


@kind
def attention() -> Any:
    q, k, v = (torch.randn(2, 2, 5, 4, requires_grad=True) for _ in range(3))
    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    other = layer(q[0], k[0], v[0], need_weights=True)
    (out.sum() + other[0].sum()).backward()
    encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).eval()
    with torch.no_grad():
        fast = encoder(q[0])
    return out, other, q.grad, k.grad, v.grad, fast


@kind
def recurrent() -> Any:
    x = torch.randn(3, 5, 4, requires_grad=True)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True)
    lstm, gru = nn.LSTM(4, 3, batch_first=True), nn.GRU(4, 3, 2, batch_first=True, bidirectional=True)
    out, state = lstm(packed)
    unpacked = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
    (unpacked[0].sum() + gru(x)[0].sum()).backward()
    return unpacked, state, x.grad, grads(lstm), grads(gru)


@kind
def images() -> Any:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    out = model(x)
    out.sum().backward()
    return out, grads(model), model, F.interpolate(x, scale_factor=2), F.pad(x, (1, 1)), F.max_pool2d(x, 2)


@kind
def spectral_and_weight_norms() -> Any:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    other = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))
    out = other(layer(torch.randn(2, 4)))
    out.sum().backward()
    return out, grads(layer), grads(other), layer.weight, other.state_dict()


@kind
def lazy_modules() -> Any:
    model = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2))
    out = model(torch.randn(3, 4))
    out.sum().backward()
    return out, grads(model), repr(model)


def _steps(make: Callable[[Any], Any], **_options: Any) -> Any:
    model, (x, y) = net(), data()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    losses = []
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        losses.append(F.cross_entropy(model(x), y))
        losses[-1].backward()
        optimizer.step()
        scheduler.step()
    return losses, model, optimizer.state_dict(), scheduler.state_dict(), grads(model)


@kind
def optimizers_one_by_one() -> Any:
    return [
        _steps(lambda p, cls=cls: cls(p, lr=0.01, foreach=False))
        for cls in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad)
    ]


@kind
def optimizers_foreach() -> Any:
    return [_steps(lambda p, cls=cls: cls(p, lr=0.01, foreach=True)) for cls in (torch.optim.SGD, torch.optim.AdamW)]


@kind
def optimizers_fused() -> Any:
    return [_steps(lambda p, cls=cls: cls(p, lr=0.01, fused=True)) for cls in (torch.optim.SGD, torch.optim.AdamW)]


@kind
def closures() -> Any:
    model, (x, y) = net(), data()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return [optimizer.step(closure) for _ in range(2)], model


@kind
def gradient_hooks() -> Any:
    model, (x, y) = net(), data()
    seen: list[Any] = []
    model[0].weight.register_hook(lambda g: g * 2)
    model[0].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    model[2].register_forward_hook(lambda m, a, out: out + 1)
    model[2].register_full_backward_hook(lambda m, given, out: seen.append(given[0].clone()))
    hidden = model[0](x)
    hidden.retain_grad()
    F.cross_entropy(model[2](hidden.relu()), y).backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        model(x).sum().backward()
    return seen, hidden.grad, grads(model)


@kind
def clipping() -> Any:
    model, (x, y) = net(), data()
    results: list[Any] = []
    for clip in (
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        lambda: nn.utils.clip_grad_norm_(list(model.parameters()), 0.1, norm_type=float("inf"), foreach=True),
        lambda: nn.utils.clip_grad_value_(model.parameters(), 0.01),
        lambda: nn.utils.get_total_norm([p.grad for p in model.parameters()]),
    ):
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        results += [clip(), grads(model)]
        results[-1] = [g.clone() for g in results[-1]]
    return results


@kind
def scalers() -> Any:
    results: list[Any] = []
    for enabled in (False, True):
        torch.manual_seed(2)
        model, (x, y) = net(), data()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", enabled=enabled)
        for factor in (1.0, 1e38):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) * factor
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            results.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            results.append(scaler.step(optimizer))
            scaler.update()
        results += [model, scaler.state_dict(), scaler.get_scale()]
    return results


@kind
def autocast() -> Any:
    model, (x, y) = net(), data()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
        loss = F.cross_entropy(out, y)
        with torch.autocast("cpu", enabled=False):
            inner = model(x)
    loss.backward()
    return out, loss, inner, grads(model)


@kind
def modes_of_autograd() -> Any:
    model, (x, _) = net(), data()
    with torch.no_grad():
        first = model(x)
    with torch.inference_mode():
        second = model(x)
        third = second * 2
    with torch.set_grad_enabled(False), torch.enable_grad():
        last = model(x)
    return first, second, third, last, torch.is_grad_enabled(), model.eval().training
