"""Recommenders and metric learning."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import fault


@fault(
    "recommenders",
    "linear.weight is replaced by a new Parameter in every forward pass, and the optimizer steps the one "
    "of the beginning",
    thread="jonasgrebe/pt-femb-face-embeddings#3",
    check="optimizer_holds_every_param",
)
def margin_header():
    class CosFaceHeader(nn.Module):
        def __init__(self, in_features=8, out_features=6, s=12.0, m=0.2):
            super().__init__()
            self.linear = nn.Linear(in_features, out_features, bias=False)
            self.s, self.m = s, m

        def forward(self, x, label):
            self.linear.weight = nn.Parameter(F.normalize(self.linear.weight.detach()))
            logits = self.linear(F.normalize(x))
            return self.s * (logits - self.m * F.one_hot(label, logits.shape[1]))

    backbone = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 8))
    header = CosFaceHeader()
    optimizer = torch.optim.AdamW([{"params": backbone.parameters()}, {"params": header.parameters()}], lr=2e-3)
    g = torch.Generator().manual_seed(4)
    y = torch.randint(6, (48,), generator=g)
    x = torch.randn(6, 10, generator=g)[y] + 0.4 * torch.randn(48, 10, generator=g)

    def train(batches):
        for xb, yb in batches:
            loss = F.cross_entropy(header(backbone(xb), yb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model={"backbone": backbone, "header": header},
        optimizer=optimizer,
        batches=DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True),
        fit=train,
    )


def paired(n=48, seed=5):
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 6, generator=g)
    a, b = torch.randn(6, 10, generator=g), torch.randn(6, 9, generator=g)
    return TensorDataset(z @ a + 0.1 * torch.randn(n, 10, generator=g), z @ b + 0.1 * torch.randn(n, 9, generator=g))


@fault(
    "recommenders",
    "the masked diagonal becomes +inf as a distance and max always picks it as the negative: the triplet term is 0",
    thread="jinnnju/PaAno#1",
    check="every_term_trains",
)
def anomaly_triplets():
    encoder = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 8))
    decoder = nn.Linear(8, 10)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=1e-3)

    def compute_loss(anchor, positive):
        za, zp = F.normalize(encoder(anchor), dim=1), F.normalize(encoder(positive), dim=1)
        sim = za @ zp.T
        pos_dists = 1 - sim.diagonal()
        sim_f = sim.clone()
        sim_f.diagonal().fill_(-float("inf"))
        hard_neg_dists, _ = torch.max(1 - sim_f, dim=1)
        triplet_loss = F.relu(pos_dists - hard_neg_dists + 0.5).mean()
        pretext = F.mse_loss(decoder(za), anchor)
        return triplet_loss + pretext

    def train(batches):
        for (anchor,) in batches:
            positive = anchor + 0.1 * torch.randn_like(anchor)
            loss = compute_loss(anchor, positive)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(TensorDataset(paired(seed=6).tensors[0]), batch_size=8, shuffle=True)
    return TrainLoop(model={"encoder": encoder, "decoder": decoder}, optimizer=optimizer, batches=loader, fit=train)
