"""Copies, files, printing, numpy, and what torch refuses."""

from __future__ import annotations

import copy
import io
import pickle
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from tests.helpers.calls.kinds import data, grads, kind, net

if TYPE_CHECKING:
    pass


@kind
def copies() -> Any:
    model, (x, _) = net(), data()
    model(x).sum().backward()
    twin = copy.deepcopy(model)
    tensor = torch.randn(2, requires_grad=True)
    more = copy.deepcopy(tensor), copy.copy(tensor), tensor.clone(), tensor.detach().clone()
    return twin, grads(twin), more, copy.deepcopy(x.to_sparse())


@kind
def files() -> Any:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    model(data()[0]).sum().backward()
    optimizer.step()
    stream = io.BytesIO()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "x": torch.eye(3).to_sparse()}, stream
    )
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    other = net()
    keys = other.load_state_dict(loaded["model"])
    return loaded, other, keys, pickle.loads(pickle.dumps(model)), pickle.loads(pickle.dumps(torch.randn(2)))


@kind
def printing() -> Any:
    model, x = net(), torch.randn(2, 2, requires_grad=True)
    shown = [x, x * 2, x.to_sparse(), x.detach().half(), torch.empty(0), model, torch.randn(2, dtype=torch.cfloat)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return [repr(s) for s in shown], f"{x.sum():.3f}", str(optimizer), x.shape, repr(x.dtype)


@kind
def numpy_arrays() -> Any:
    x = torch.randn(3, 2)
    array = x.numpy()
    array[0] = 7
    back = torch.from_numpy(array)
    back[1] = 3
    return (
        x,
        array,
        back,
        torch.tensor(array),
        torch.as_tensor(array).data_ptr() == x.data_ptr(),
        x.__array__(),
        x.T.numpy(),
    )


@kind
def loaders() -> Any:
    x, y = data()
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True, generator=generator)
    collated = default_collate([{"a": torch.ones(2), "b": 1, "c": "text"}, {"a": torch.zeros(2), "b": 2, "c": "more"}])
    return list(loader), collated, len(loader), nn.utils.rnn.pad_sequence([x[0], x[1, :2]])


@kind
def states() -> Any:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    state = model.state_dict()
    model.load_state_dict({name: value * 2 for name, value in state.items()}, strict=True)
    other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    other.load_state_dict(state, assign=True)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.lerp_(theirs, 0.5)
    model.double().half().float().requires_grad_(False)
    return (
        model,
        other,
        list(state),
        [v.data_ptr() == p.data_ptr() for v, p in zip(state.values(), other.parameters(), strict=False)],
    )


@kind
def refused_calls() -> Any:
    """What torch refuses, and a script catches."""
    caught: list[Any] = []
    x = torch.randn(2, 3, requires_grad=True)
    for call in (
        lambda: x @ x,
        lambda: x.view(5),
        lambda: x[7],
        lambda: x.add_(1),
        lambda: x.backward(),
        lambda: torch.cat([x, torch.ones(2, 2)]),
        lambda: F.cross_entropy(x, torch.tensor([0, 9])),
        lambda: x.numpy(),
        lambda: torch.ones(2).sum(nothing=1),
        lambda: nn.Linear(2, 2)(x),
        lambda: torch.ones(2, device="meta").item(),
        lambda: torch.optim.SGD([], lr=0.1),
        lambda: nn.Linear(2, 2).load_state_dict({}),
    ):
        try:
            call()
        except Exception as error:
            caught.append(error)
    return caught


@kind
def twice_backward() -> Any:
    x = torch.randn(2, requires_grad=True)
    y = x.exp().sum()
    y.backward(retain_graph=True)
    y.backward(inputs=[x])
    try:
        y.backward()
    except RuntimeError as error:
        return x.grad, error
    return None


@kind
def from_iterators() -> Any:
    model, (x, y) = net(), data()
    loss = F.cross_entropy(model(x), y)
    torch.autograd.backward(iter([loss, model(x).sum()]))
    norm = nn.utils.clip_grad_norm_((p for p in model.parameters()), 0.5)
    optimizer = torch.optim.SGD(iter(model.parameters()), lr=0.1)
    optimizer.step()
    return norm, model, grads(model)
