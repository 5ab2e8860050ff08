"""Right loops whose parts do not add up at first sight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from pytest_trainloop import TrainLoop
from tests.checks.loss.loss_components.faults import Variational, elbo_terms
from tests.loops import data
from tests.loops.nets import CharLSTM, mlp, relu_mlp
from tests.loops.odd import odd


def two_terms(model, batch):
    """A classifier's loss, and a penalty on the size of its scores."""
    scores = model(batch[0])
    return {"ce": F.cross_entropy(scores, batch[1]), "size": 0.1 * scores.square().mean()}


def summed(terms):
    return sum(v[0] * v[1] if isinstance(v, tuple) else v for v in terms.values())


def loop(model, fit_of, parts=two_terms, batch=None, optimizer=None, **fields):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    batch = data.labelled() if batch is None else batch
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit_of(model, optimizer), parts=parts, **fields)


def plain(loss_of):
    """The plain loop over ``loss_of(model, batch, number)``."""

    def fit_of(model, optimizer):
        def fit(batches):
            for number, batch in enumerate(batches):
                optimizer.zero_grad()
                loss_of(model, batch, number).backward()
                optimizer.step()

        return fit

    return fit_of


@odd(notes="the sum is divided by the number of micro-batches")
def parts_of_an_accumulated_loss(accumulate=1):
    def fit_of(model, optimizer):
        def fit(batches):
            for number, batch in enumerate(batches, start=1):
                (summed(two_terms(model, batch)) / accumulate).backward()
                if number % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()

        return fit

    return loop(mlp(6, 24, 3), fit_of)


@odd(notes="the loss is multiplied by the scale of a scaler")
def parts_under_a_scaler():
    def fit_of(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

        def fit(batches):
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(summed(two_terms(model, batch))).backward()
                scaler.step(optimizer)
                scaler.update()

        return fit

    return loop(mlp(6, 24, 3), fit_of)


@odd(notes="the loss is computed under autocast, its parts are not")
def parts_of_an_autocast_loss():
    def loss_of(model, batch, _number):
        with torch.autocast("cpu", torch.bfloat16):
            return summed(two_terms(model, batch))

    return loop(mlp(6, 24, 3), plain(loss_of))


@odd(notes="the weight of the KL term rises from 0, and is declared as 1")
def parts_with_an_annealed_weight():
    def loss_of(model, batch, number):
        terms = elbo_terms(model, batch)
        return terms["recon"] + min(1.0, number / 100) * terms["kl"]

    model = Variational()
    return loop(model, plain(loss_of), elbo_terms, optimizer=torch.optim.Adam(model.parameters(), lr=3e-3))


@odd(notes="a penalty is taken at every eighth step only, at eight times its weight")
def parts_with_a_lazy_penalty():
    def loss_of(model, batch, number):
        terms = two_terms(model, batch)
        return terms["ce"] + (8 * terms["size"] if number % 8 == 7 else 0.0)

    return loop(mlp(6, 24, 3), plain(loss_of))


class Weighted(nn.Module):
    """Two heads, whose losses are weighed by learned variances."""

    def __init__(self):
        super().__init__()
        self.trunk = mlp(6, 24, 16)
        self.classes, self.value = nn.Linear(16, 3), nn.Linear(16, 1)
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        hidden = self.trunk(x).tanh()
        return self.classes(hidden), self.value(hidden)


def task_losses(model, batch):
    scores, value = model(batch[0])
    return F.cross_entropy(scores, batch[1]), F.mse_loss(value.squeeze(-1), batch[0][:, 0])


def uncertainty_loss(model, batch, _number):
    first, second = task_losses(model, batch)
    return (torch.stack([first, second]) * (-model.log_variance).exp() + model.log_variance).sum()


@odd(notes="uncertainty weighting: the weights of the terms are parameters, and the terms are declared raw")
def parts_with_learned_weights():
    return loop(
        Weighted(), plain(uncertainty_loss), lambda m, b: dict(zip(("ce", "mse"), task_losses(m, b), strict=True))
    )


@odd(notes="uncertainty weighting, with weights and the logarithms declared")
def parts_with_declared_learned_weights():
    def parts(model, batch):
        first, second = task_losses(model, batch)
        precision = (-model.log_variance).exp()
        return {"ce": (precision[0], first), "mse": (precision[1], second), "rest": model.log_variance.sum()}

    return loop(Weighted(), plain(uncertainty_loss), parts)


@odd(notes="weights are chosen so that both gradients on the last layer have one size (as in VQGAN)")
def parts_with_balanced_gradients():
    def loss_of(model, batch, _number):
        terms = two_terms(model, batch)
        last = model[-1].weight
        first, second = (torch.autograd.grad(t, last, retain_graph=True)[0].norm() for t in terms.values())
        return terms["ce"] + 0.1 * (first / (second + 1e-4)).detach() * terms["size"]

    return loop(mlp(6, 24, 3), plain(loss_of))


@odd(notes="each term has a backward pass of its own")
def parts_with_a_backward_pass_each():
    def fit_of(model, optimizer):
        def fit(batches):
            for batch in batches:
                optimizer.zero_grad()
                terms = two_terms(model, batch)
                terms["ce"].backward(retain_graph=True)
                terms["size"].backward()
                optimizer.step()

        return fit

    return loop(mlp(6, 24, 3), fit_of)


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = relu_mlp(4, 24, 2)

    def forward(self, rows):
        return self.net(torch.randn(rows, 4))


def adversarial(parts):
    generator, critic = Noise(), relu_mlp(2, 24, 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)

    def fit(batches):
        for real in batches:
            of_critic.zero_grad()
            fake = generator(len(real)).detach()
            (F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()).backward()
            of_critic.step()
            of_generator.zero_grad()
            made = generator(len(real))
            (F.softplus(-critic(made)).mean() + 0.1 * made.square().mean()).backward()
            of_generator.step()

    return TrainLoop(
        model={"generator": generator, "critic": critic},
        optimizer=[of_generator, of_critic],
        batch=data.ring(),
        fit=fit,
        parts=parts,
    )


def generator_terms(models, real):
    made = models["generator"](len(real))
    return {"adversarial": F.softplus(-models["critic"](made)).mean(), "size": (0.1, made.square().mean())}


@odd(notes="a GAN whose parts are those of the generator's loss alone")
def parts_of_one_of_two_losses():
    return adversarial(generator_terms)


@odd(notes="a GAN whose parts are those of both losses, which are backpropagated apart")
def parts_of_both_losses():
    def parts(models, real):
        fake = models["generator"](len(real)).detach()
        critic = models["critic"]
        return generator_terms(models, real) | {
            "real": F.softplus(-critic(real)).mean(),
            "fake": F.softplus(critic(fake)).mean(),
        }

    return adversarial(parts)


@odd(notes="parts are asked for in evaluation mode, and the model has dropout and a batch norm")
def parts_in_evaluation_mode():
    def parts(model, batch):
        model.eval()
        return {name: term.item() for name, term in two_terms(model, batch).items()}

    model = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Dropout(0.2), nn.Linear(24, 3))
    return loop(model, plain(lambda m, b, _n: summed(two_terms(m.train(), b))), parts)


def masked_terms(model, batch):
    ids, targets, mask = batch
    scores = model(ids)
    losses = F.cross_entropy(scores.transpose(1, 2), targets, reduction="none")
    return {"ce": (losses * mask).sum() / mask.sum(), "z": 1e-2 * torch.logsumexp(scores, -1).square().mean()}


@odd(notes="fit splits each batch in two, and its mean over valid tokens is that of each half")
def parts_of_halves_of_a_batch():
    def fit_of(model, optimizer):
        def fit(batches):
            for batch in batches:
                optimizer.zero_grad()
                for half in zip(*(t.chunk(2) for t in batch), strict=True):
                    (summed(masked_terms(model, half)) / 2).backward()
                optimizer.step()

        return fit

    ids, targets = data.tokens()
    mask = (torch.arange(12) < torch.tensor([[12], [5], [9], [3]])).to(torch.get_default_dtype())
    model = CharLSTM()
    return loop(
        model,
        fit_of,
        masked_terms,
        batch=(ids, targets, mask),
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
    )


@odd(notes="each call moves the state of the model: a spectral norm, and a counter that its temperature depends on")
def parts_of_a_model_with_state():
    class Cooling(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 24)), nn.Tanh(), nn.Linear(24, 3))
            self.calls = 0
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x):
            self.calls += 1
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
            return self.net(x - self.mean) * (1 + 0.01 * self.calls)

    return loop(Cooling(), plain(lambda m, b, _n: summed(two_terms(m, b))))


@odd(notes="the KL term has free bits, and is a constant until it exceeds them")
def parts_with_free_bits():
    def terms(model, batch):
        given = elbo_terms(model, batch)
        return {"recon": given["recon"], "kl": given["kl"].clamp(min=50.0)}

    model = Variational()
    return loop(
        model,
        plain(lambda m, b, _n: summed(terms(m, b))),
        terms,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
    )


@odd(notes="a penalty on the slope of the model with respect to its input")
def parts_with_a_gradient_penalty():
    def terms(model, batch):
        x = batch[0].detach().clone().requires_grad_()
        scores = model(x)
        (slope,) = torch.autograd.grad(scores.logsumexp(-1).sum(), x, create_graph=True)
        return {"ce": F.cross_entropy(scores, batch[1]), "slope": (0.1, slope.square().sum(-1).mean())}

    return loop(mlp(6, 24, 3), plain(lambda m, b, _n: summed(terms(m, b))), terms)


@odd(notes="the worse of two groups is trained, and both are reported")
def parts_of_which_the_largest_is_trained():
    def terms(model, batch):
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return {"even": losses[::2].mean(), "odd": losses[1::2].mean()}

    return loop(
        mlp(6, 24, 3),
        plain(lambda m, b, _n: torch.stack(list(terms(m, b).values())).max()),
        terms,
        batches=lambda n: [data.labelled(seed=s) for s in range(n)],
    )


@odd(notes="the value of the loss is 0, and its gradient that of its parts")
def parts_of_a_loss_without_value():
    def loss_of(model, batch, _number):
        loss = summed(two_terms(model, batch))
        return loss - loss.detach()

    return loop(mlp(6, 24, 3), plain(loss_of))


@odd(notes="the model is checkpointed re-entrantly, which autograd.grad refuses")
def parts_of_a_checkpointed_model():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 24), mlp(24, 24, 3)

        def forward(self, x):
            return checkpoint(self.second, self.first(x).tanh(), use_reentrant=True)

    return loop(Checkpointed(), plain(lambda m, b, _n: summed(two_terms(m, b))))


@odd(notes="a closure is called several times a step (L-BFGS)")
def parts_of_a_closure():
    model = mlp(6, 8, 3)

    def fit_of(model, optimizer):
        def fit(batches):
            for batch in batches:

                def closure(batch=batch):
                    optimizer.zero_grad()
                    loss = summed(two_terms(model, batch))
                    loss.backward()
                    return loss

                optimizer.step(closure)

        return fit

    return loop(model, fit_of, optimizer=torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4))


@odd(notes="gradients are taken by autograd.grad and assigned, and nothing is ever called backward")
def parts_of_assigned_gradients():
    def fit_of(model, optimizer):
        weights = list(model.parameters())

        def fit(batches):
            for batch in batches:
                loss = summed(two_terms(model, batch))
                for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                    weight.grad = gradient
                optimizer.step()

        return fit

    return loop(mlp(6, 24, 3), fit_of)


@odd(notes="two passes of one model must agree, which differ by their dropout alone (R-Drop)")
def parts_of_two_passes_under_dropout():
    def terms(model, batch):
        first, second = model(batch[0]), model(batch[0])
        return {"ce": F.cross_entropy(first, batch[1]), "agree": F.mse_loss(first.softmax(-1), second.softmax(-1))}

    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Dropout(0.2), nn.Linear(24, 3))
    return loop(model, plain(lambda m, b, _n: summed(terms(m, b))), terms)


@odd(notes="a term is declared at weight 0, and trained at 0")
def parts_of_which_one_is_only_watched():
    def parts(model, batch):
        terms = two_terms(model, batch)
        return {"ce": terms["ce"], "size": (0.0, terms["size"])}

    return loop(mlp(6, 24, 3), plain(lambda m, b, _n: two_terms(m, b)["ce"]), parts)


class SetCriterion(nn.Module):
    """The losses of a detector by name, and a table of what each counts; the table is read where they are summed."""

    def __init__(self):
        super().__init__()
        self.weight_dict = {"loss_ce": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}

    def forward(self, outputs, targets):
        boxes = outputs[:, 3:]
        wanted = F.one_hot(targets, 3).to(boxes.dtype)
        return {
            "loss_ce": F.cross_entropy(outputs[:, :3], targets),
            "loss_bbox": F.l1_loss(boxes, wanted),
            "loss_giou": (boxes - wanted).square().mean(),
        }


@odd(notes="the criterion's losses are logged without their weights, which a table holds: 5 and 2 for two of them")
def losses_logged_beside_a_table_of_weights():
    criterion = SetCriterion()

    def loss_of(model, batch, _number):
        losses = criterion(model(batch[0]), batch[1])
        return sum(losses[name] * criterion.weight_dict[name] for name in losses)

    return loop(mlp(6, 24, 6), plain(loss_of), lambda model, batch: criterion(model(batch[0]), batch[1]))
