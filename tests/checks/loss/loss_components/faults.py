"""Losses of several terms: what is declared and reported is not what is trained."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair

# A detector: three terms are made and logged, and one is forgotten in the sum.


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = mlp(6, 24, 24)
        self.box = nn.Linear(24, 4)
        self.objectness = nn.Linear(24, 1)
        self.classes = nn.Linear(24, 3)

    def forward(self, x):
        hidden = self.trunk(x).tanh()
        return self.box(hidden), self.objectness(hidden).squeeze(-1), self.classes(hidden)


def scenes():
    x, labels = data.labelled()
    return {"x": x, "box": x[:, :4].tanh(), "there": (x[:, 0] > 0).to(x.dtype), "label": labels}


def detection_terms(model, batch):
    box, there, scores = model(batch["x"])
    return {
        "box": F.smooth_l1_loss(box, batch["box"]),
        "obj": F.binary_cross_entropy_with_logits(there, batch["there"]),
        "cls": F.cross_entropy(scores, batch["label"]),
    }


def detector(total, parts=detection_terms):
    def make():
        model = Detector()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

        def fit(batches):
            for batch in batches:
                optimizer.zero_grad()
                loss = total(detection_terms(model, batch))
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=scenes(), fit=fit, parts=parts)

    return make


def all_of(terms):
    return terms["box"] + terms["obj"] + terms["cls"]


pair(
    "objectness_logged_and_not_added",
    "loss_components",
    "part_left_out",
    culprits=("obj",),
    where="loss.backward()",
    quick=True,
    faulty=detector(lambda terms: terms["box"] + terms["cls"]),
    fixed=detector(all_of),
)

pair(
    "sum_of_a_log_of_numbers_lacks_one",
    "loss_components",
    "part_left_out",
    culprits=("box",),
    where="loss.backward()",
    faulty=detector(
        lambda terms: terms["obj"] + terms["cls"],
        lambda model, batch: {name: term.item() for name, term in detection_terms(model, batch).items()},
    ),
    fixed=detector(all_of, lambda model, batch: {n: term.item() for n, term in detection_terms(model, batch).items()}),
)

pair(
    "a_term_added_as_a_number",
    "loss_components",
    "part_detached",
    culprits=("obj",),
    where="loss.backward()",
    quick=True,
    faulty=detector(lambda terms: terms["box"] + terms["obj"].item() + terms["cls"]),
    fixed=detector(all_of),
)


# A variational autoencoder in the half of a project that logs, and the half that trains.


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = mlp(6, 24, 8)
        self.decoder = mlp(4, 24, 6)

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        code = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        return self.decoder(code), mean, log_variance


def elbo_terms(model, batch):
    rebuilt, mean, log_variance = model(batch[0])
    kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
    return {"recon": F.mse_loss(rebuilt, batch[0]), "kl": kl}


def variational(weight, parts):
    def make():
        model = Variational()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

        def fit(batches):
            for batch in batches:
                optimizer.zero_grad()
                terms = elbo_terms(model, batch)
                loss = terms["recon"] + weight * terms["kl"]
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit, parts=parts)

    return make


def weighted(model, batch):
    terms = elbo_terms(model, batch)
    return {"recon": terms["recon"], "kl": (0.1, terms["kl"])}


pair(
    "kl_reported_whole_and_trained_at_a_tenth",
    "loss_components",
    "weight_differs",
    level="advice",
    culprits=("kl",),
    where="loss.backward()",
    mentions=("kl is trained at 0.1",),
    faulty=variational(0.1, elbo_terms),
    fixed=variational(0.1, weighted),
)

pair(
    "kl_declared_at_a_tenth_and_trained_at_a_hundredth",
    "loss_components",
    "weight_differs",
    culprits=("kl",),
    mentions=("declared at 0.1 and trained at 0.01",),
    quick=True,
    faulty=variational(0.01, weighted),
    fixed=variational(0.1, weighted),
)


# A policy whose entropy is to be kept high: the bonus has become a penalty.


def policy_terms(model, batch):
    states, actions, returns = batch
    policy = torch.distributions.Categorical(logits=model(states))
    return {"policy": -(policy.log_prob(actions) * returns).mean(), "entropy": (-0.05, policy.entropy().mean())}


def policy(sign):
    def make():
        model = mlp(4, 24, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

        def fit(batches):
            for batch in batches:
                terms = policy_terms(model, batch)
                loss = terms["policy"] + sign * 0.05 * terms["entropy"][1]
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.episode(), fit=fit, parts=policy_terms)

    return make


pair(
    "entropy_bonus_added_as_a_penalty",
    "loss_components",
    "sign_differs",
    culprits=("entropy",),
    where="loss.backward()",
    quick=True,
    faulty=policy(1.0),
    fixed=policy(-1.0),
)


# A penalty on the weights that is computed from a copy of them, as they were when the list was made.


def penalised(copied):
    def make():
        model = mlp(6, 24, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        weights = [p.detach().clone() if copied else p for n, p in model.named_parameters() if "weight" in n]

        def terms(model, batch):
            ce = F.cross_entropy(model(batch[0]), batch[1])
            return {"ce": ce, "l1": 1e-3 * sum(w.abs().sum() for w in weights)}

        def fit(batches):
            for batch in batches:
                optimizer.zero_grad()
                loss = sum(terms(model, batch).values())
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit, parts=terms)

    return make


pair(
    "penalty_on_a_copy_of_the_weights",
    "loss_components",
    "part_constant",
    level="advice",
    culprits=("l1",),
    where="loss.backward()",
    quick=True,
    faulty=penalised(copied=True),
    fixed=penalised(copied=False),
)


# A loss with weight decay of its own, which no report names; and a term that only the trainer adds.


def classifier(more, parts):
    def make():
        model = mlp(6, 24, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def fit(batches):
            for batch in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(batch[0]), batch[1]) + more(model, batch)
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit, parts=parts)

    return make


def decay(model, _batch):
    return 0.002 * sum(p.square().sum() for p in model.parameters())


def confidence(model, batch):
    return 0.1 * torch.logsumexp(model(batch[0]), dim=-1).square().mean()


def ce_alone(model, batch):
    return {"ce": F.cross_entropy(model(batch[0]), batch[1])}


pair(
    "weight_decay_in_the_loss_is_not_reported",
    "loss_components",
    "something_unreported",
    where="loss.backward()",
    mentions=("0.002 times the sum of the squares",),
    quick=True,
    faulty=classifier(decay, ce_alone),
    fixed=classifier(decay, lambda m, b: ce_alone(m, b) | {"decay": decay(m, b)}),
)

pair(
    "z_loss_is_added_and_not_reported",
    "loss_components",
    "something_unreported",
    where="loss.backward()",
    faulty=classifier(confidence, ce_alone),
    fixed=classifier(confidence, lambda m, b: ce_alone(m, b) | {"z": confidence(m, b)}),
)


# A mean teacher whose consistency term reads the student's scores twice.


def consistency(twice):
    def make():
        student, teacher = mlp(6, 24, 3), mlp(6, 24, 3)
        teacher.load_state_dict(student.state_dict())
        teacher.requires_grad_(False)
        optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)

        def terms(model, batch):
            scores = model(batch[0] + 0.05 * torch.randn_like(batch[0]))
            aim = scores.detach() if twice else teacher(batch[0])
            follow = F.mse_loss(scores.softmax(-1), aim.softmax(-1))
            return {"ce": F.cross_entropy(scores, batch[1]), "consistency": follow}

        def fit(batches):
            for batch in batches:
                optimizer.zero_grad()
                loss = sum(terms(student, batch).values())
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    for average, weight in zip(teacher.parameters(), student.parameters(), strict=True):
                        average.lerp_(weight, 0.05)

        return TrainLoop(model=student, optimizer=optimizer, batch=data.labelled(), fit=fit, parts=terms)

    return make


pair(
    "consistency_of_the_student_with_itself",
    "loss_components",
    "part_constant",
    level="advice",
    culprits=("consistency",),
    faulty=consistency(twice=True),
    fixed=consistency(twice=False),
)
