"""Batches with several segments along one axis: graphs, packed documents, episodes; and nets that take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

SIZES = (3, 5, 4, 2)
"""Nodes of the graphs, and tokens of the documents plus one."""


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def rings(sizes=SIZES, *, offset=True):
    """The edges of one ring a graph, in both directions: (2, edges)."""
    found, first = [], 0
    for size in sizes:
        nodes = torch.arange(size)
        ring = torch.stack([nodes, nodes.roll(-1)])
        found.append(torch.cat([ring, ring.flip(0)], 1) + (first if offset else 0))
        first += size
    return torch.cat(found, 1)


def graph_of(sizes=SIZES):
    """The number of the graph of each node."""
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))


def borders(sizes=SIZES):
    return torch.tensor([0, *sizes]).cumsum(0)


@dataclass
class Graphs:
    """Several graphs as one, by the names of PyTorch Geometric."""

    x: torch.Tensor
    edge_index: torch.Tensor
    batch: torch.Tensor
    ptr: torch.Tensor
    y: torch.Tensor


def graphs(sizes=SIZES, *, features=6, edges=None, classes=3):
    x = torch.randn(sum(sizes), features, generator=generator(1))
    y = torch.arange(len(sizes)) % classes
    x = x + y[graph_of(sizes)][:, None]
    return Graphs(x, rings(sizes) if edges is None else edges, graph_of(sizes), borders(sizes), y)


def summed(values, index, count):
    """The sum of the entries of each segment."""
    return values.new_zeros(count, *values.shape[1:]).index_add(0, index, values)


def averaged(values, index, count):
    return summed(values, index, count) / summed(torch.ones_like(values), index, count)


def softmax_within(scores, index, count):
    """The softmax of the scores of each segment."""
    largest = scores.new_full((count, *scores.shape[1:]), -torch.inf)
    largest = largest.scatter_reduce(0, index[:, None].expand_as(scores), scores.detach(), "amax")
    weights = (scores - largest[index]).exp()
    return weights / summed(weights, index, count)[index]


class Convolution(nn.Module):
    """The mean of the messages of a node's neighbours, beside what it holds itself."""

    def __init__(self, width_in, width):
        super().__init__()
        self.own, self.message = nn.Linear(width_in, width), nn.Linear(width_in, width)

    def forward(self, x, edge_index):
        source, target = edge_index
        return self.own(x) + averaged(self.message(x)[source], target, len(x)).nan_to_num()


class GraphNet(nn.Module):
    """Two rounds of messages; ``norm(m, hidden, batch, count)`` after the first and ``pool`` of the same at the end."""

    def __init__(self, pool, norm=None, *, width=8, classes=3, **layers):
        super().__init__()
        self.first, self.second = Convolution(6, width), Convolution(width, width)
        self.head, self.layers = nn.Linear(width, classes), nn.ModuleDict(layers)
        self.pool, self.norm = pool, norm

    def forward(self, x, edge_index, batch, count):
        hidden = torch.tanh(self.first(x, edge_index))
        if self.norm is not None:
            hidden = self.norm(self.layers, hidden, batch, count)
        hidden = torch.tanh(self.second(hidden, edge_index))
        return self.head(self.pool(self.layers, hidden, batch, count))


def mean_pool(_layers, hidden, batch, count):
    return averaged(hidden, batch, count)


def classify_graphs(model, data):
    return F.cross_entropy(model(data.x, data.edge_index, data.batch, len(data.y)), data.y)


def packed_documents(sizes=(4, 6, 3, 7), *, vocab=24, labels="border", **more: Any):
    """Documents behind each other in one row: ids that count up within each, by the names of Hugging Face.

    ``labels``: what the first token of each document has there: "border" for -100, "token" for itself.
    """
    starts = torch.randint(vocab, (len(sizes),), generator=generator(3))
    ids = torch.cat([(start + torch.arange(size)) % vocab for start, size in zip(starts, sizes, strict=True)])
    positions = torch.cat([torch.arange(size) for size in sizes])
    targets = ids.where(positions > 0, -100) if labels == "border" else ids.clone()
    return {"input_ids": ids[None], "position_ids": positions[None], "labels": targets[None], **more}


class PackedDecoder(nn.Module):
    """One layer of causal attention; ``mask(positions)`` says which positions may see which, before causality."""

    def __init__(self, mask, vocab=24, width=16, context=32):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.qkv, self.out, self.head = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, vocab)
        self.mask = mask

    def forward(self, input_ids, position_ids):
        hidden = self.tokens(input_ids) + self.positions(position_ids)
        query, key, value = self.qkv(hidden).chunk(3, -1)
        length = input_ids.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
        allowed = self.mask(position_ids)
        seen = seen if allowed is None else seen & allowed
        scores = (query @ key.transpose(1, 2)) / query.shape[-1] ** 0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return self.head(hidden + self.out(weights @ value))


def within_documents(positions):
    document = (positions == 0).cumsum(1)
    return document[:, :, None] == document[:, None, :]


def everything_before(_positions):
    return None


def next_token(model, batch):
    logits = model(batch["input_ids"], batch["position_ids"])[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def rollout(steps=12, envs=3, *, ends=((3, 0), (7, 1), (5, 2), (9, 0)), features=4, actions=3, **more: Any):
    """Steps of several environments, time first; ``dones`` is 1 at the last step of an episode."""
    g = generator(5)
    dones = torch.zeros(steps, envs)
    for step, env in ends:
        dones[step, env] = 1.0
    return {
        "obs": torch.randn(steps, envs, features, generator=g),
        "actions": torch.randint(actions, (steps, envs), generator=g),
        "rewards": torch.randn(steps, envs, generator=g),
        "dones": dones,
        "last_obs": torch.randn(envs, features, generator=g),
        "logp": torch.full((steps, envs), -1.1) + 0.1 * torch.randn(steps, envs, generator=g),
        **more,
    }


class Policy(nn.Module):
    """Scores of the actions, and no value."""

    def __init__(self, features=4, actions=3, width=16):
        super().__init__()
        self.body, self.policy = nn.Linear(features, width), nn.Linear(width, actions)

    def forward(self, obs):
        return self.policy(torch.tanh(self.body(obs)))


class ActorCritic(nn.Module):
    def __init__(self, features=4, actions=3, width=16):
        super().__init__()
        self.body, self.policy = nn.Linear(features, width), nn.Linear(width, actions)
        self.value = nn.Linear(width, 1)

    def forward(self, obs):
        hidden = torch.tanh(self.body(obs))
        return self.policy(hidden), self.value(hidden).squeeze(-1)


def action_logp(logits, actions):
    return logits.log_softmax(-1).gather(-1, actions[..., None]).squeeze(-1)


def advantages_of(rewards, values, last, keep_value, keep_sum, gamma=0.97, lam=0.9):
    """Generalised advantages; ``keep_value`` and ``keep_sum`` are 0 where the next value and the next advantage do not
    belong to the same episode."""
    found, after, running = torch.zeros_like(rewards), last, torch.zeros_like(last)
    for step in reversed(range(len(rewards))):
        delta = rewards[step] + gamma * after * keep_value[step] - values[step]
        running = delta + gamma * lam * keep_sum[step] * running
        found[step], after = running, values[step]
    return found
