"""Survival analysis and likelihoods that are right although they look odd."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


def cohort(n=48, dim=8, seed=20, ties=False):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, generator=g)
    hazard = torch.exp(0.7 * x[:, 0] + 0.5 * x[:, 2])
    time = -torch.rand(n, generator=g).clamp_min(1e-3).log() / hazard
    censor = -torch.rand(n, generator=g).clamp_min(1e-3).log() / 0.3
    event = (time <= censor).float()
    time = torch.minimum(time, censor).clamp(max=6.0) + 0.02
    if ties:
        time = (time * 4).ceil() / 4
    return TensorDataset(x, time, event)


def mlp(dim, out, width=24):
    return nn.Sequential(nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, out))


def plain(model, loss_fn, loader, lr=1e-3, **fields):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    def train(batches):
        for batch in batches:
            optimizer.zero_grad()
            loss_fn(*batch).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train, **fields)


@right(
    "survival",
    "Cox by a cumulative sum over rows sorted by descending time; ties are treated in the order of the "
    "sort, censored rows only count in risk sets",
    thread="havakv/pycox#27",
)
def cox_ph_loss():
    net = mlp(8, 1)

    def loss_fn(x, durations, events, eps=1e-7):
        idx = durations.sort(descending=True)[1]
        log_h, events = net(x).view(-1)[idx], events[idx]
        gamma = log_h.max().detach()
        log_cumsum_h = log_h.sub(gamma).exp().cumsum(0).add(eps).log().add(gamma)
        return -log_h.sub(log_cumsum_h).mul(events).sum().div(events.sum().add(eps))

    return plain(net, loss_fn, DataLoader(cohort(), batch_size=12, shuffle=True))


@right(
    "survival",
    "Efron's correction for ties: the l-th of d tied events leaves l/d of their hazard out",
    thread="Novartis/torchsurv#35",
)
def cox_efron():
    net = mlp(8, 1)

    def loss_fn(x, time, event):
        log_hz = net(x).squeeze(-1)
        hz = log_hz.exp()
        total = log_hz.sum() * 0.0
        for t in time[event > 0].unique():
            dead = (time == t) & (event > 0)
            at_risk, tied = hz[time >= t].sum(), hz[dead].sum()
            d = int(dead.sum())
            fractions = torch.arange(d) / d
            total = total + log_hz[dead].sum() - torch.log(at_risk - fractions * tied).sum()
        return -total / event.sum().clamp(min=1)

    return plain(net, loss_fn, DataLoader(cohort(seed=21, ties=True), batch_size=10, shuffle=True), rows_interact=True)


def binned(bins=6, seed=22):
    x, time, event = cohort(seed=seed).tensors
    edges = torch.quantile(time, torch.linspace(0, 1, bins + 1)[1:-1])
    return TensorDataset(x, torch.bucketize(time, edges), event)


@right(
    "survival",
    "binary cross-entropy of hazards against rows that are all zero for the censored, masked behind the "
    "last interval by a cumulative sum",
    thread="havakv/pycox#129",
)
def logistic_hazard():
    net = mlp(8, 6)

    def nll_logistic_hazard(phi, idx_durations, events):
        y_bce = torch.zeros_like(phi).scatter(1, idx_durations.view(-1, 1), events.view(-1, 1))
        bce = F.binary_cross_entropy_with_logits(phi, y_bce, reduction="none")
        return bce.cumsum(1).gather(1, idx_durations.view(-1, 1)).mean()

    return plain(
        net,
        lambda x, idx, e: nll_logistic_hazard(net(x), idx, e),
        DataLoader(binned(), batch_size=12, shuffle=True),
    )


@right(
    "survival",
    "an extra logit of zero stands for surviving all bins; the censored have the log of a sum behind "
    "their bin, and a rank loss compares pairs",
    thread="havakv/pycox#143",
)
def deephit_single():
    net = mlp(8, 6)

    def nll_pmf(phi, idx, events):
        phi = F.pad(phi, (0, 1))
        log_pmf = phi.log_softmax(1)
        beyond = torch.arange(phi.shape[1])[None] > idx[:, None]
        log_surv = log_pmf.masked_fill(~beyond, -1e9).logsumexp(1)
        at = log_pmf.gather(1, idx[:, None]).squeeze(1)
        return -(events * at + (1 - events) * log_surv).mean()

    def rank_loss(phi, idx, events, sigma=0.5):
        cif = F.pad(phi, (0, 1)).softmax(1).cumsum(1)
        at_i = cif[:, idx].T
        diff = at_i.diagonal()[:, None] - at_i
        comparable = ((idx[:, None] < idx[None]) & (events[:, None] > 0)).float()
        return (comparable * torch.exp(-diff / sigma)).sum() / comparable.sum().clamp(min=1)

    def loss_fn(x, idx, events, alpha=0.8):
        phi = net(x)
        return alpha * nll_pmf(phi, idx, events) + (1 - alpha) * rank_loss(phi, idx, events)

    return plain(net, loss_fn, DataLoader(binned(seed=23), batch_size=12, shuffle=True))


@right(
    "survival",
    "a Weibull likelihood: log-hazard for events only, minus the cumulative hazard for all",
    thread="Novartis/torchsurv#36",
)
def weibull():
    net = mlp(8, 2)

    def neg_log_likelihood(params, event, time):
        log_scale, log_shape = params.clamp(-3, 3).unbind(1)
        shape = log_shape.exp()
        z = shape * (time.log() - log_scale)
        log_hazard = log_shape - log_scale + (shape - 1) * (time.log() - log_scale)
        return -(event * log_hazard - z.clamp(max=20).exp()).mean()

    return plain(
        net, lambda x, t, e: neg_log_likelihood(net(x), e, t), DataLoader(cohort(seed=24), batch_size=12, shuffle=True)
    )


def noisy(seed=25, n=48):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    y = 1.5 * x[:, :1] + (0.1 + 0.5 * x[:, 1:2].abs()) * torch.randn(n, 1, generator=g)
    return TensorDataset(x, y)


@right(
    "survival",
    "beta-NLL: each row's likelihood is weighted by its own detached variance; the loss may be negative",
    thread="unit8co/darts#972",
)
def beta_nll():
    net = mlp(6, 2)

    def loss_fn(x, y, beta=0.5):
        mean, log_var = net(x).chunk(2, 1)
        variance = log_var.clamp(-8, 6).exp()
        nll = 0.5 * ((y - mean) ** 2 / variance + variance.log())
        return (nll * variance.detach() ** beta).mean()

    return plain(net, loss_fn, DataLoader(noisy(), batch_size=12, shuffle=True))


@right(
    "survival",
    "a mixture's likelihood: logsumexp of log-weights plus log-densities summed over the dimensions",
    thread="tonyduan/mixture-density-network#1",
)
def mdn():
    class MixtureDensityNetwork(nn.Module):
        def __init__(self, dim_out=2, k=3):
            super().__init__()
            self.k, self.dim_out = k, dim_out
            self.pi_network = mlp(6, k)
            self.normal_network = mlp(6, 2 * dim_out * k)

        def forward(self, x):
            pi = torch.distributions.OneHotCategorical(logits=self.pi_network(x))
            mean, sd = self.normal_network(x).view(-1, self.k, 2 * self.dim_out).chunk(2, -1)
            return pi, torch.distributions.Normal(mean, F.elu(sd) + 1 + 1e-3)

        def loss(self, x, y):
            pi, normal = self.forward(x)
            loglik = normal.log_prob(y.unsqueeze(1).expand_as(normal.loc)).sum(dim=2)
            return -torch.logsumexp(torch.log(pi.probs) + loglik, dim=1)

    g = torch.Generator().manual_seed(26)
    x = torch.randn(40, 6, generator=g)
    y = torch.stack([x[:, 0] * x[:, 1].sign(), x[:, 2]], 1) + 0.2 * torch.randn(40, 2, generator=g)
    model = MixtureDensityNetwork()
    return plain(
        model, lambda a, b: model.loss(a, b).mean(), DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
    )


@right(
    "survival",
    "pinball: max((q - 1) * e, q * e), and quantiles that are kept in order by a cumulative softplus",
    thread="sktime/pytorch-forecasting#740",
)
def quantiles():
    taus = torch.tensor([0.1, 0.5, 0.9])

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(6, 3)

        def forward(self, x):
            base, steps = self.net(x).split([1, 2], dim=1)
            return base + F.pad(F.softplus(steps).cumsum(1), (1, 0))

    model = Head()

    def loss_fn(x, y):
        errors = y - model(x)
        return torch.max((taus - 1) * errors, taus * errors).sum(1).mean()

    return plain(model, loss_fn, DataLoader(noisy(seed=27), batch_size=12, shuffle=True))


@right(
    "survival",
    "a zero-inflated negative binomial in mean and inverse dispersion; the dispersion is one free vector "
    "per gene and constants of the data stay in",
    thread="scverse/scvi-tools#2965",
)
def zinb():
    genes = 10

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.dropout = mlp(6, genes), mlp(6, genes)
            self.px_r = nn.Parameter(torch.randn(genes) * 0.1)

    model = Decoder()
    g = torch.Generator().manual_seed(28)
    z = torch.randn(48, 6, generator=g)
    counts = torch.poisson((z @ torch.randn(6, genes, generator=g) * 0.4).exp().clamp(max=20), generator=g)
    counts = counts * (torch.rand(48, genes, generator=g) > 0.3)

    def log_zinb_positive(x, mu, theta, pi, eps=1e-8):
        softplus_pi = F.softplus(-pi)
        log_theta_eps, log_theta_mu = torch.log(theta + eps), torch.log(theta + mu + eps)
        pi_theta_log = -pi + theta * (log_theta_eps - log_theta_mu)
        case_zero = F.softplus(pi_theta_log) - softplus_pi
        case_non_zero = (
            -softplus_pi
            + pi_theta_log
            + x * (torch.log(mu + eps) - log_theta_mu)
            + torch.lgamma(x + theta)
            - torch.lgamma(theta)
            - torch.lgamma(x + 1)
        )
        return torch.where(x < eps, case_zero, case_non_zero)

    def loss_fn(z, x):
        library = x.sum(1, keepdim=True).clamp(min=1)
        mu = library * model.scale(z).softmax(-1)
        return -log_zinb_positive(x, mu, model.px_r.exp(), model.dropout(z)).sum(-1).mean()

    return plain(model, loss_fn, DataLoader(TensorDataset(z, counts), batch_size=12, shuffle=True))


@right(
    "survival",
    "PoissonNLLLoss on raw outputs: they are log-rates, which log_input=True takes; an exposure is added as an offset",
    thread="pytorch/pytorch#1779",
)
def poisson_offset():
    net = mlp(6, 1)
    criterion = nn.PoissonNLLLoss(log_input=True, full=True)
    g = torch.Generator().manual_seed(29)
    x = torch.randn(48, 6, generator=g)
    exposure = torch.rand(48, generator=g) * 3 + 0.5
    y = torch.poisson(exposure * torch.exp(0.5 * x[:, 0]), generator=g)

    def loss_fn(x, exposure, y):
        return criterion(net(x).squeeze(1) + exposure.log(), y)

    return plain(net, loss_fn, DataLoader(TensorDataset(x, exposure, y), batch_size=12, shuffle=True))


@right(
    "survival",
    "the logarithm of a scale is learned for the whole data set, and its constant term log(2 pi) / 2 is kept",
    thread="jwchoi384/Gaussian_YOLOv3#19",
)
def sigma_calibrated():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(6, 1)
            self.log_sigma = nn.Parameter(torch.zeros(()))

        def forward(self, x):
            return self.net(x), self.log_sigma.clamp(-6, 6)

    model = Model()

    def gaussian_nll(mu, log_sigma, x):
        return 0.5 * torch.pow((x - mu) / log_sigma.exp(), 2) + log_sigma + 0.5 * math.log(2 * math.pi)

    return plain(
        model,
        lambda x, y: gaussian_nll(*model(x), y).sum(1).mean(),
        DataLoader(noisy(seed=30), batch_size=12, shuffle=True),
    )
