"""Right losses of policies, values, survival and generative models that are one sign or factor from a mistake."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.plain import loop


def trained(loss_of, batch, *, model=None, rate=3e-3):
    model = relu_mlp(6, 16, 4) if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    return loop(model, batch, loss_of, optimizer)


def rollout(rows=8):
    state, action = torch.randn(rows, 6), torch.randint(4, (rows,))
    return {"state": state, "action": action, "old": -1.4 + 0.2 * torch.randn(rows), "gain": torch.randn(rows)}


def ratio_of(model, b):
    return (Categorical(logits=model(b["state"])).log_prob(b["action"]) - b["old"]).exp()


@odd(notes="the advantages are negated before both products: the larger one is lowered")
def clipped_with_negated_advantages():
    def loss_of(model, b):
        ratio, cost = ratio_of(model, b), -(b["gain"] - b["gain"].mean()) / (b["gain"].std() + 1e-8)
        return torch.max(cost * ratio, cost * torch.clamp(ratio, 0.8, 1.2)).mean()

    return trained(loss_of, rollout())


@odd(notes="the target is what the same network gives, with a gradient, and no reward: two views of one row")
def both_views_with_gradient():
    def loss_of(model, x):
        return F.mse_loss(model(x), model(x.flip(0)).flip(0)) - 0.1 * model(x).std(0).clamp(max=1).sum()

    return trained(loss_of, torch.randn(8, 6))


class Value(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = relu_mlp(6, 16, 1)

    def forward(self, state):
        return self.net(state).squeeze(1)


@odd(notes="the target network has a gradient that nobody takes: it is held by no optimizer")
def target_network_with_idle_gradient():
    model = Value()
    target = copy.deepcopy(model)

    def loss_of(_, b):
        return F.mse_loss(model(b["state"]), b["gain"] + 0.9 * target(b["next"]))

    batch = {"state": torch.randn(8, 6), "next": torch.randn(8, 6), "gain": torch.randn(8)}
    made = trained(loss_of, batch, model=model)
    return TrainLoop(model=[model, target], optimizer=made.optimizer, batch=batch, fit=made.fit, frozen=("1.",))


def _nets():
    return relu_mlp(6, 16, 4), relu_mlp(2, 16, 6)


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = _nets()

    def forward(self, x):
        mean, log_var = self.encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decoder(z), mean, log_var


def divergence(mean, log_var):
    return -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1)


@odd(notes="below its capacity the divergence is raised, as its distance from the capacity is lowered")
def divergence_towards_a_capacity():
    def loss_of(model, x):
        again, mean, log_var = model(x)
        return F.mse_loss(again, x) + 2.0 * (divergence(mean, log_var).mean() - 5.0).abs()

    return trained(loss_of, torch.randn(8, 6), model=Coder())


@odd(notes="a prior of variance one half: the squares count twice beside the logarithm")
def narrow_prior():
    def loss_of(model, x):
        again, mean, log_var = model(x)
        wide = (mean.square() + log_var.exp()) / 0.5 - log_var - 1 - 0.6931471805599453
        return F.mse_loss(again, x) + 0.5 * wide.sum(1).mean()

    return trained(loss_of, torch.randn(8, 6), model=Coder())


@odd(notes="one log-variance for both coordinates of a row: the logarithm counts twice beside their squares")
def one_spread_for_two_coordinates():
    def loss_of(model, b):
        x, y = b
        out = model(x)
        mean, log_var = out[:, :2], out[:, 2]
        return (0.5 * (y - mean).square().sum(1) * (-log_var).exp() + log_var).mean()

    return trained(loss_of, (torch.randn(8, 6), torch.randn(8, 2)))


@odd(notes="precisions in place of variances: the logarithm is taken away")
def by_precision():
    def loss_of(model, b):
        x, y = b
        mean, precision = model(x).chunk(2, 1)
        precision = F.softplus(precision) + 0.1
        return 0.5 * (precision * (y - mean).square() - precision.log()).mean()

    return trained(loss_of, (torch.randn(8, 6), torch.randn(8, 2)))


@odd(notes="rows come sorted, the shortest time last, and the sums of risks run in the order of the batch")
def survival_in_sorted_batches():
    time = torch.sort(torch.rand(8) * 5, descending=True).values

    def loss_of(model, b):
        risk = model(b["x"])[:, 0]
        log_sum = torch.logcumsumexp(risk, 0)
        return -((risk - log_sum) * b["event"]).sum() / b["event"].sum() + 0.0 * b["time"].sum()

    event = (torch.arange(8) % 3 != 0).to(time.dtype)
    return trained(loss_of, {"x": torch.randn(8, 6), "time": time, "event": event})


@odd(notes="the advantage has a gradient, and the actor's optimizer alone steps with it")
def advantage_with_a_gradient_that_is_cleared():
    actor, critic = relu_mlp(6, 16, 4), relu_mlp(6, 16, 1)
    opt_actor = torch.optim.Adam(actor.parameters(), lr=3e-3)
    opt_critic = torch.optim.Adam(critic.parameters(), lr=3e-3)

    def fit(batches):
        for b in batches:
            choice = Categorical(logits=actor(b["state"]))
            advantage = b["gain"] - critic(b["state"]).squeeze(1)
            opt_actor.zero_grad()
            (-(choice.log_prob(b["action"]) * advantage).mean()).backward(retain_graph=True)
            opt_actor.step()
            opt_critic.zero_grad()
            advantage.pow(2).mean().backward()
            opt_critic.step()

    return TrainLoop(
        model={"actor": actor, "critic": critic}, optimizer=[opt_actor, opt_critic], batch=rollout(), fit=fit
    )


@odd(notes="the batch marks censored rows, not events, and the complement is taken after sorting")
def survival_with_censored_rows_marked():
    def loss_of(model, b):
        order = torch.argsort(b["time"], descending=True)
        risk, event = model(b["x"])[:, 0][order], 1 - b["censored"][order]
        return -((risk - torch.logcumsumexp(risk, 0)) * event).sum() / event.sum()

    marked = (torch.arange(8) % 3 == 0).float()
    return trained(loss_of, {"x": torch.randn(8, 6), "time": torch.rand(8) * 5, "censored": marked})


def views():
    x = torch.randn(5, 6)
    return x + 0.1 * torch.randn(5, 6), x + 0.1 * torch.randn(5, 6)


@odd(notes="all pairs of two views are compared; a row with itself is the other view, its positive (CLIP)")
def one_view_against_the_other():
    def loss_of(model, b):
        one, two = (F.normalize(model(x), dim=1) for x in b)
        return F.cross_entropy(one @ two.T / 0.1, torch.arange(len(one)))

    made = trained(loss_of, views())
    return TrainLoop(model=made.model, optimizer=made.optimizer, batch=made.batch, fit=made.fit, rows_interact=True)


@odd(notes="the diagonal is filled in place before the cross entropy chooses")
def diagonal_filled_in_place():
    def loss_of(model, b):
        z = F.normalize(torch.cat([model(x) for x in b]), dim=1)
        logits = torch.mm(z, z.T) / 0.5
        logits.fill_diagonal_(float("-inf"))
        return F.cross_entropy(logits, torch.arange(len(z)).roll(len(b[0])))

    made = trained(loss_of, views())
    return TrainLoop(model=made.model, optimizer=made.optimizer, batch=made.batch, fit=made.fit, rows_interact=True)


@odd(notes="similarities with itself stay in, on both sides of a divergence: the batch's own geometry is distilled")
def geometry_of_the_batch_distilled():
    teacher = relu_mlp(6, 16, 4)

    def loss_of(model, b):
        with torch.no_grad():
            aim = F.normalize(teacher(b), dim=1)
        z = F.normalize(model(b), dim=1)
        return F.kl_div((z @ z.T / 0.5).log_softmax(1), (aim @ aim.T / 0.5).softmax(1), reduction="batchmean")

    made = trained(loss_of, torch.randn(6, 6))
    return TrainLoop(model=made.model, optimizer=made.optimizer, batch=made.batch, fit=made.fit, rows_interact=True)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(3, 8, 1), nn.Softplus(), nn.Conv1d(8, 1, 1))

    def forward(self, points):
        return self.net(points)


@odd(notes="one gradient for each point, the coordinates on axis 1: its length is to be 1 everywhere (eikonal)")
def gradient_of_each_point():
    def loss_of(model, points):
        points = points.clone().requires_grad_()
        distance = model(points)
        (gradient,) = torch.autograd.grad(distance.sum(), points, create_graph=True)
        return distance.abs().mean() + 0.1 * ((gradient.norm(dim=1) - 1) ** 2).mean()

    return trained(loss_of, torch.randn(4, 3, 5), model=Field())


def patients(order_of, loss_of, *, from_end=False):
    """Rows that the loop sorts before the network sees them."""
    event, time = (torch.arange(8) % 3 != 0).float(), 0.2 + 5 * torch.rand(8)

    def sorted_loss(model, b):
        order = order_of(b["time"])
        return loss_of(model(b["x"][order])[:, 0], b["event"][order])

    return trained(sorted_loss, {"x": torch.randn(8, 6), "time": -time if from_end else time, "event": event})


@odd(notes="patients sorted earliest first: those at risk are all but the ones before")
def all_risks_but_those_before():
    def loss_of(risk, event):
        rates = risk.exp()
        return ((rates.sum() - rates.cumsum(0) + rates).log() - risk).mul(event).sum() / event.sum()

    return patients(torch.argsort, loss_of)


@odd(notes="patients sorted latest first by a minus sign, and a table of pairs gives who is at risk")
def table_of_pairs_of_sorted_patients():
    def loss_of(risk, event):
        pairs = risk.expand(8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf)
        return ((pairs.logsumexp(1) - risk) * event).mean()

    return patients(lambda time: (-time).argsort(), loss_of)


@odd(notes="the time counts down to the end of the study, as a negative number: earliest first is latest first")
def patients_by_time_before_the_end():
    def loss_of(risk, event):
        return -((risk - torch.logcumsumexp(risk, 0)) * event).sum() / event.sum()

    return patients(torch.argsort, loss_of, from_end=True)


@odd(notes="rows are sorted by time, and a score of each is compared with the mean of those before it")
def scores_against_the_mean_of_earlier_rows():
    def loss_of(score, event):
        mean = score.exp().cumsum(0) / torch.arange(1, 9)
        return F.binary_cross_entropy_with_logits(score - mean.log().detach(), event)

    return patients(torch.argsort, loss_of)
