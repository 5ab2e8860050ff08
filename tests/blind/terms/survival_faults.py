"""Survival analysis and likelihoods."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


class CohortDataset(Dataset):
    """Patients: covariates, follow-up time, event indicator."""

    def __init__(self, n=48, dim=8, seed=0, column=False):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, dim, generator=g)
        hazard = torch.exp(0.8 * self.x[:, 0] - 0.6 * self.x[:, 1])
        time = -torch.rand(n, generator=g).clamp_min(1e-3).log() / hazard
        censor = -torch.rand(n, generator=g).clamp_min(1e-3).log() / 0.4
        self.time = torch.minimum(time, censor).clamp(max=8.0) + 0.01
        self.event = (time <= censor).float()
        self.event[::5] = 1.0
        self.column = column

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        event = self.event[i : i + 1] if self.column else self.event[i]
        return self.x[i], self.time[i], event


def risk_net(dim=8, out=1):
    return nn.Sequential(nn.Linear(dim, 24), nn.ReLU(), nn.Linear(24, out))


@fault(
    "survival",
    "rows are sorted by ascending time before the cumulative log-sum-exp, so each risk set holds those "
    "who left earlier",
    thread="UK-Digital-Heart-Project/4Dsurvival#2",
    check="loss_formula",
)
def deepsurv():
    net = risk_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def negative_log_likelihood(log_h, durations, events):
        order = durations.sort()[1]
        log_h, events = log_h[order].view(-1), events[order]
        log_cumsum_h = torch.logcumsumexp(log_h, dim=0)
        return -((log_h - log_cumsum_h) * events).sum() / events.sum().clamp(min=1)

    def train(batches):
        for x, t, e in batches:
            loss = negative_log_likelihood(net(x), t, e)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(CohortDataset(), batch_size=12, shuffle=True)
    return TrainLoop(model=net, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "survival",
    "censor of shape (N, 1) multiplies the (N,) log-likelihoods, which broadcasts to (N, N)",
    thread="mahmoodlab/PathomicFusion#9",
    check="loss_formula",
)
def pathomic_cox():
    net = risk_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-4, weight_decay=4e-4)

    def cox_loss(survtime, censor, hazard_pred):
        r_mat = (survtime[None, :] >= survtime[:, None]).float()
        theta = hazard_pred.reshape(-1)
        exp_theta = torch.exp(theta)
        return -torch.mean((theta - torch.log(torch.sum(exp_theta * r_mat, dim=1))) * censor)

    def train(batches):
        net.train()
        for x, survtime, censor in batches:
            loss = cox_loss(survtime, censor, net(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(CohortDataset(seed=1, column=True), batch_size=12, shuffle=True)
    return TrainLoop(model=net, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "survival",
    "[event_sorted] indexes with integers 0 and 1 where a boolean mask is meant: only the first two rows are ever read",
    thread="Novartis/torchsurv#117",
    check="loss_formula",
)
def neg_partial_log_likelihood():
    net = risk_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def partial_likelihood_cox(log_hz_sorted, event_sorted):
        log_denominator = torch.logcumsumexp(log_hz_sorted.flip(0), dim=0).flip(0)
        return (log_hz_sorted - log_denominator)[event_sorted]

    def criterion(log_hz, event, time):
        idx = torch.argsort(time)
        pll = partial_likelihood_cox(log_hz[idx].squeeze(-1), event[idx])
        return -pll.mean()

    def train(batches):
        for x, time, event in batches:
            optimizer.zero_grad()
            loss = criterion(net(x), event.long(), time)
            loss.backward()
            optimizer.step()

    loader = DataLoader(CohortDataset(seed=2), batch_size=16, shuffle=True)
    return TrainLoop(model=net, optimizer=optimizer, batches=loader, fit=train)


def discretised(n=48, bins=6, seed=3):
    ds = CohortDataset(n, seed=seed)
    edges = torch.quantile(ds.time, torch.linspace(0, 1, bins + 1)[1:-1])
    return TensorDataset(ds.x, torch.bucketize(ds.time, edges), ds.event)


@fault(
    "survival",
    "tmp2 uses the same mask as tmp1, so a censored row is trained as if its event came in its last bin",
    thread="chl8856/DeepHit#9",
    check="loss_formula",
)
def deephit():
    bins = 6
    net = risk_net(out=bins)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def loss_log_likelihood(out, k, t):
        mask = F.one_hot(t, bins).float()
        tmp1 = k * torch.log((mask * out).sum(1) + 1e-8)
        tmp2 = (1.0 - k) * torch.log((mask * out).sum(1) + 1e-8)
        return -(tmp1 + 1.0 * tmp2).mean()

    def train(batches):
        for x, t, k in batches:
            out = net(x).softmax(dim=1)
            loss = loss_log_likelihood(out, k, t)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(discretised(), batch_size=12, shuffle=True)
    return TrainLoop(model=net, optimizer=optimizer, batches=loader, fit=train)


def noisy_regression(n=48, dim=6, seed=4):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, generator=g)
    scale = 0.2 + x[:, 1:2].abs()
    y = 2 * x[:, :1] - x[:, 2:3] + scale * torch.randn(n, 1, generator=g)
    return TensorDataset(x, y)


@dataclass
class GaussianParams:
    mu: torch.Tensor
    sigma: torch.Tensor


@fault(
    "survival",
    "sigma, a standard deviation, is given to gaussian_nll_loss where it takes the variance; sampling "
    "uses it as a standard deviation",
    thread="unit8co/darts#1162",
    check="loss_contract",
)
def gaussian_likelihood():
    class Forecaster(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = risk_net(6, 2)

        def forward(self, x):
            mu, raw = self.net(x).chunk(2, -1)
            return GaussianParams(mu, F.softplus(raw) + 1e-3)

        def sample(self, x):
            params = self(x)
            return torch.distributions.Normal(params.mu, params.sigma).sample()

    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def fit(batches):
        for x, y in batches:
            params = model(x)
            loss = F.gaussian_nll_loss(params.mu, y, params.sigma)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def validate():
        model.eval()
        with torch.no_grad():
            model.sample(torch.zeros(4, 6))
        model.train()

    loader = DataLoader(noisy_regression(), batch_size=12, shuffle=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit, evaluate=validate)


@fault(
    "survival",
    "the squared error is divided by exp(log_sigma) and not by its square, while log_sigma is added as if it were",
    thread="orybkin/sigma-vae-pytorch#11",
    check="loss_formula",
)
def heteroscedastic():
    net = risk_net(6, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def gaussian_nll(mu, log_sigma, x):
        return 0.5 * torch.pow(x - mu, 2) / log_sigma.exp() + log_sigma + 0.5 * math.log(2 * math.pi)

    def train_epoch(batches):
        total = 0.0
        for x, y in batches:
            mu, log_sigma = net(x).split(1, dim=1)
            loss = gaussian_nll(mu, log_sigma.clamp(-6, 4), y).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        return total

    loader = DataLoader(noisy_regression(seed=5), batch_size=12, shuffle=True)
    return TrainLoop(model=net, optimizer=optimizer, batches=loader, fit=train_epoch)


class MDN(nn.Module):
    def __init__(self, dim=6, components=3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(dim, 24), nn.Tanh())
        self.pi = nn.Linear(24, components)
        self.mu = nn.Linear(24, components)
        self.log_sigma = nn.Linear(24, components)

    def forward(self, x):
        h = self.body(x)
        return self.pi(h), self.mu(h), self.log_sigma(h).clamp(-5, 3)


@fault(
    "survival",
    "the mixture's weights are added to the densities where they multiply them",
    thread="JavierAntoran/Bayesian-Neural-Networks#15",
    check="loss_formula",
)
def mixture_density():
    model = MDN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def mdn_loss(pi_logits, mu, log_sigma, y):
        pi = pi_logits.softmax(-1)
        ll = -0.5 * ((y - mu) / log_sigma.exp()) ** 2 - log_sigma - 0.5 * math.log(2 * math.pi)
        max_ll = ll.max(dim=-1, keepdim=True)[0]
        normalised_like = (pi + torch.exp(ll - max_ll)).sum(-1)
        return -(torch.log(normalised_like) + max_ll.squeeze(-1)).mean()

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            mdn_loss(*model(x), y).backward()
            optimizer.step()

    loader = DataLoader(noisy_regression(seed=6), batch_size=12, shuffle=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "survival",
    "the branch of overestimates has (1 - alpha) * diff with diff < 0, so the loss falls without bound",
    thread="scikit-learn/scikit-learn#6076",
    check="loss_formula",
)
def quantile_regression():
    class QuantileLoss(nn.Module):
        def __init__(self, quantiles=(0.1, 0.5, 0.9)):
            super().__init__()
            self.quantiles = quantiles

        def forward(self, preds, target):
            losses = []
            for i, alpha in enumerate(self.quantiles):
                diff = target.squeeze(-1) - preds[:, i]
                losses.append(torch.where(diff > 0, alpha * diff, (1.0 - alpha) * diff))
            return torch.stack(losses, dim=1).sum(dim=1).mean()

    net = risk_net(6, 3)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    criterion = QuantileLoss()

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss = criterion(net(x), y)
            loss.backward()
            optimizer.step()

    loader = DataLoader(noisy_regression(seed=7), batch_size=12, shuffle=True)
    return TrainLoop(model=net, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "survival",
    "softplus gives a rate, and poisson_nll_loss takes its input for the logarithm of one by default",
    thread="pytorch/pytorch#184030",
    check="loss_contract",
)
def count_regression():
    g = torch.Generator().manual_seed(8)
    x = torch.randn(48, 6, generator=g)
    y = torch.poisson(torch.exp(0.6 * x[:, 0] + 0.4), generator=g)

    class CountNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = risk_net(6, 1)

        def forward(self, x):
            return F.softplus(self.net(x)).squeeze(1)

    model = CountNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.PoissonNLLLoss()

    def train(batches):
        for xb, yb in batches:
            loss = criterion(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)
