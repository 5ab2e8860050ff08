"""Right loops whose targets are noise, constant, out of range, or written into."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd
from tests.loops.plain import loop


def on_rows(loss_of, *, inputs=6, outputs=6, **fields) -> TrainLoop:
    return loop(mlp(inputs, 32, outputs), data.labelled(), loss_of, **fields)


@odd(notes="two noisy views of a row: noise2noise has its target drawn apart")
def noise_to_noise() -> TrainLoop:
    def loss_of(model, batch):
        x, _ = batch
        return F.mse_loss(model(x + 0.3 * torch.randn_like(x)), x + 0.3 * torch.randn_like(x))

    return on_rows(loss_of)


@odd(notes="all labels are 1: a judge that does not train is to be convinced of what is made")
def convincing_a_judge_that_does_not_train() -> TrainLoop:
    judge = mlp(6, 16, 1).requires_grad_(False)

    def loss_of(model, batch):
        made = judge(model(batch[0]))
        return F.binary_cross_entropy_with_logits(made, torch.ones_like(made))

    return on_rows(loss_of)


@odd(notes="the noise that is predicted is drawn in two steps, and both reach the input")
def velocity_of_offset_noise() -> TrainLoop:
    def loss_of(model, batch):
        x, _ = batch
        noise = torch.randn_like(x) + 0.1 * torch.randn(len(x), 1)
        t = torch.rand(len(x), 1)
        given = torch.cat([(1 - t) * x + t * noise, t], 1)
        return F.mse_loss(model(given), noise - x)

    return on_rows(loss_of, inputs=7)


class StochasticEncoder(nn.Module):
    def __init__(self, features=6, latent=4):
        super().__init__()
        self.mean = mlp(features, 16, latent)
        self.decoder = mlp(latent, 16, features)

    def forward(self, x):
        mean = self.mean(x)
        z = mean + 0.1 * torch.randn_like(mean)
        return z, self.decoder(z)


def kernel(a, b):
    return torch.exp(-(a.unsqueeze(1) - b.unsqueeze(0)).pow(2).sum(-1) / a.shape[1]).mean()


@odd(notes="codes are compared with draws of the prior as a set: MMD of a Wasserstein autoencoder")
def codes_against_draws_of_the_prior() -> TrainLoop:
    def loss_of(model, batch):
        x, _ = batch
        z, out = model(x)
        prior = torch.randn_like(z)
        mmd = kernel(z, z) + kernel(prior, prior) - 2 * kernel(z, prior)
        return F.mse_loss(out, x) + mmd

    return loop(StochasticEncoder(), data.labelled(), loss_of, rows_interact=True)


@odd(notes="sorted projections of codes and of draws: a sliced Wasserstein distance pairs them by rank")
def sliced_wasserstein_to_a_prior() -> TrainLoop:
    def loss_of(model, batch):
        x, _ = batch
        z, out = model(x)
        directions = F.normalize(torch.randn(z.shape[1], 8), dim=0)
        drawn = torch.randn_like(z)
        gap = (z @ directions).sort(0).values - (drawn @ directions).sort(0).values
        return F.mse_loss(out, x) + gap.pow(2).mean()

    return loop(StochasticEncoder(), data.labelled(), loss_of, rows_interact=True)


@odd(notes="the latent code is drawn, decoded and recovered: its draw is the input")
def recovered_latent_codes() -> TrainLoop:
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder, self.encoder = mlp(4, 16, 6), mlp(6, 16, 4)

        def forward(self, x, z):
            return self.encoder(self.decoder(z)), self.decoder(self.encoder(x))

    def loss_of(model, batch):
        x, _ = batch
        z = torch.randn(len(x), 4)
        recovered, out = model(x, z)
        return F.mse_loss(recovered, z) + F.mse_loss(out, x)

    return loop(Both(), data.labelled(), loss_of)


@odd(notes="rare positives: no row of these batches lies above the threshold")
def no_positive_in_the_batch() -> TrainLoop:
    def loss_of(model, batch):
        x, y = batch
        scores = model(x)
        rare = F.binary_cross_entropy_with_logits(scores[:, 1], (y[:, 0] > 3).to(scores.dtype))
        return F.mse_loss(scores[:, :1], y) + rare

    return loop(mlp(6, 16, 2), data.table(), loss_of)


@odd(notes="a tanh critic regresses to targets that noise takes a little beyond its range")
def targets_a_little_beyond_tanh() -> TrainLoop:
    def loss_of(model, batch):
        x, y = batch
        return F.mse_loss(model(x).tanh(), 0.72 * y)

    return loop(mlp(6, 16, 1), data.table(), loss_of)


@odd(notes="a sigmoid is scaled to the range of its targets")
def sigmoid_scaled_to_its_targets() -> TrainLoop:
    def loss_of(model, batch):
        x, y = batch
        return F.mse_loss(4 * model(x).sigmoid() - 2, y)

    return loop(mlp(6, 16, 1), data.table(), loss_of)


@odd(notes="padding is marked in place, by the loss, and nothing else reads the labels")
def labels_marked_in_place() -> TrainLoop:
    def marked(scores, labels):
        labels[labels == 2] = -100
        return F.cross_entropy(scores, labels, ignore_index=-100)

    def loss_of(model, batch):
        x, y = batch
        return marked(model(x), y)

    return on_rows(loss_of, outputs=3)


@odd(notes="a helper masks inputs in place and gives labels, and the loop goes on with both")
def inputs_masked_in_place() -> TrainLoop:
    def corrupt(x):
        target = x.clone()
        x[:, ::2] = 0
        return target

    def loss_of(model, batch):
        x, _ = batch
        target = corrupt(x)
        return F.mse_loss(model(x), target)

    return on_rows(loss_of)


@odd(notes="a loss keeps each row's error in the batch, as priorities, and weighs the next pass by them")
def priorities_kept_in_the_batch() -> TrainLoop:
    def weighted(scores, batch):
        error = F.cross_entropy(scores, batch["y"], reduction="none")
        priority = batch["priority"].clone()
        loss = (error * priority / priority.sum()).sum()
        batch["priority"].copy_(error.detach() + 0.1)
        return loss

    model = mlp(6, 16, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def fit(batches):
        for batch in batches:
            for _ in range(2):
                optimizer.zero_grad()
                weighted(model(batch["x"]), batch).backward()
                optimizer.step()

    x, y = data.labelled()
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch={"x": x, "y": y, "priority": torch.ones(len(x))},
        fit=fit,
        rows_interact=True,
    )


@odd(notes="targets are given in physical units, and outputs are brought to these before they are compared")
def outputs_brought_to_physical_units() -> TrainLoop:
    def loss_of(model, batch):
        x, y = batch
        return F.mse_loss((10 * model(x) + 212) / 10, (10 * y + 212) / 10)

    return loop(mlp(6, 16, 1), data.table(), loss_of)


@odd(notes="rewards are standardised by running statistics, which begin at 0 and 1")
def rewards_by_running_statistics() -> TrainLoop:
    running = {"mean": torch.zeros(1), "std": torch.ones(1)}

    def loss_of(model, batch):
        x, y = batch
        reward = (3 + y - running["mean"]) / running["std"]
        running["mean"] = running["mean"].lerp(3 + y.mean(), 0.5)
        running["std"] = running["std"].lerp(y.std(), 0.5)
        return F.mse_loss(model(x), reward)

    return loop(mlp(6, 16, 1), data.table(), loss_of)


@odd(notes="the target stands in the input and is masked there: inpainting")
def masked_columns_are_the_target() -> TrainLoop:
    x, _ = data.table()

    def loss_of(model, batch):
        given, target = batch
        masked = torch.cat([torch.zeros_like(given[:, :2]), given[:, 2:]], 1)
        return F.mse_loss(model(masked), target)

    return loop(mlp(6, 16, 2), (x, x[:, :2].clone()), loss_of)


@odd(notes="a decoder marks in its caller's mask what it has visited, and its next call reads the mask")
def mask_of_what_was_visited() -> TrainLoop:
    def chosen_at(model, x, visited, at):
        scores = model(x).masked_fill(visited.clone(), -1e4).log_softmax(-1)
        visited[:, at] = True
        return scores[:, at]

    def loss_of(model, batch):
        visited = torch.zeros_like(batch[0], dtype=torch.bool)
        steps = [chosen_at(model, batch[0], visited, at) for at in range(4)]
        return -torch.stack(steps).mean() + (model(batch[0]) * ~visited.clone()).square().mean()

    return on_rows(loss_of)


@odd(notes="a term fills its own copy of the labels, and hands a part of the scores' mask back to its caller")
def counts_written_for_the_caller() -> TrainLoop:
    def term(model, batch, counts):
        scores = model(batch[0])
        counts[batch[1]] += 1.0
        return scores.square().mean(1)

    def loss_of(model, batch):
        counts = torch.zeros(3, dtype=batch[0].dtype)
        return (term(model, batch, counts) / counts[batch[1]].clamp_min(1)).sum()

    return on_rows(loss_of)
