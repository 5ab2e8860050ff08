"""Weight decay, learning rates and schedules, and terms that are not trained as they are reported."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import fault, right
from tests.loops.nets import relu_mlp
from tests.loops.threads.shared import clusters, cross_entropy_of, fit_with, stepped, training_arguments


class MaskedHead(nn.Module):
    """Returns a loss when it is given labels, as the library's models do."""

    def __init__(self, vocab=30, width=32):
        super().__init__()
        self.embeddings = nn.Embedding(vocab, width)
        self.LayerNorm = nn.LayerNorm(width)
        self.dense = nn.Linear(width, width)
        self.layer_norm = nn.LayerNorm(width)
        self.decoder = nn.Linear(width, vocab)

    def forward(self, input_ids, labels=None):
        x = self.LayerNorm(self.embeddings(input_ids))
        logits = self.decoder(self.layer_norm(F.gelu(self.dense(x + x.mean(1, keepdim=True)))))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class TokenRows(torch.utils.data.Dataset):
    def __init__(self, rows=64):
        self.tokens = torch.randint(0, 30, (rows, 8))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index].roll(1)}


@fault(
    "decay",
    "the no_decay names of create_optimizer know 'LayerNorm.weight', and the head's norm is called layer_norm: its "
    "weight is decayed",
    thread="huggingface/transformers#16908",
    check="weight_decay_groups",
)
def masked_language_model():
    from transformers import Trainer

    from pytest_trainloop.adapters import from_trainer

    class GroupedTrainer(Trainer):
        def create_optimizer(self, model=None):
            no_decay = ["bias", "LayerNorm.weight"]
            named = list(self.model.named_parameters())
            groups = [
                {
                    "params": [p for n, p in named if not any(nd in n for nd in no_decay)],
                    "weight_decay": self.args.weight_decay,
                },
                {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
            ]
            self.optimizer = torch.optim.AdamW(groups, lr=self.args.learning_rate)
            return self.optimizer

    arguments = training_arguments(per_device_train_batch_size=8, lr_scheduler_type="constant", weight_decay=0.1)
    return from_trainer(GroupedTrainer(model=MaskedHead(), args=arguments, train_dataset=TokenRows()))


class NeuMF(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(50, 8)
        self.item = nn.Embedding(80, 8)
        self.mlp = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user, item):
        return self.mlp(torch.cat([self.user(user), self.item(item)], 1)).squeeze(1)


@right(
    "decay",
    "each layer's weight has a decay of its own, the first none, as the reference training has; biases go to plain SGD",
    thread="aiqm/torchani#279",
)
def atomic_network():
    net = nn.Sequential(
        nn.Linear(24, 32),
        nn.CELU(0.1),
        nn.Linear(32, 24),
        nn.CELU(0.1),
        nn.Linear(24, 16),
        nn.CELU(0.1),
        nn.Linear(16, 1),
    )
    weights = torch.optim.AdamW(
        [
            {"params": [net[0].weight], "weight_decay": 0},
            {"params": [net[2].weight], "weight_decay": 1e-5},
            {"params": [net[4].weight], "weight_decay": 1e-6},
            {"params": [net[6].weight], "weight_decay": 0},
        ],
        lr=1e-3,
    )
    biases = torch.optim.SGD([net[i].bias for i in (0, 2, 4, 6)], lr=1e-3)

    def train(batches):
        for aev, energy in batches:
            loss = F.mse_loss(net(aev).squeeze(1), energy)
            weights.zero_grad()
            biases.zero_grad()
            loss.backward()
            weights.step()
            biases.step()

    x = torch.rand(64, 24)
    return TrainLoop(
        model=net,
        optimizer=[weights, biases],
        batches=DataLoader(TensorDataset(x, x.sin().sum(1)), batch_size=16, shuffle=True),
        fit=train,
    )


@right(
    "decay",
    "reg_loss is reported and always 0: the regularization is the optimizer's weight_decay, which bypasses the loss",
    thread="allenai/allennlp#4436",
)
def applicator_without_terms():
    model = NeuMF()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def terms(model, batch):
        user, item, rating = batch
        return {"loss": F.binary_cross_entropy_with_logits(model(user, item), rating), "reg_loss": torch.tensor(0.0)}

    def train(batches):
        for batch in batches:
            outputs = terms(model, batch)
            optimizer.zero_grad()
            (outputs["loss"] + outputs["reg_loss"]).backward()
            optimizer.step()

    data = TensorDataset(torch.randint(0, 50, (96,)), torch.randint(0, 80, (96,)), torch.randint(0, 2, (96,)).float())
    return TrainLoop(
        model=model, optimizer=optimizer, batches=DataLoader(data, batch_size=16, shuffle=True), fit=train, parts=terms
    )


def digits(**options):
    return DataLoader(TensorDataset(*clusters(96, 16, 4, noise=0.5)), shuffle=True, **options)


@fault(
    "schedules",
    "both schedulers are built on the generator's optimizer: it decays twice, the discriminator's never",
    thread="Lornatang/SRGAN-PyTorch#53",
    check="schedule",
)
def srgan():
    generator, discriminator = relu_mlp(8, 32, 2), relu_mlp(2, 32, 1)
    g_optimizer = torch.optim.Adam(generator.parameters(), 1e-3, (0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), 1e-3, (0.5, 0.999))
    g_scheduler = lr_scheduler.StepLR(g_optimizer, step_size=4, gamma=0.5)
    d_scheduler = lr_scheduler.StepLR(g_optimizer, step_size=4, gamma=0.5)
    source = torch.Generator().manual_seed(1)
    real = TensorDataset(torch.randn(64, 2, generator=source) * 0.3 + torch.tensor([1.0, -1.0]))
    loader = DataLoader(real, batch_size=16, shuffle=True)

    def train(batches):
        for (x,) in batches:
            fake = generator(torch.randn(len(x), 8))
            d_optimizer.zero_grad()
            d_real, d_fake = discriminator(x), discriminator(fake.detach())
            d_loss = F.binary_cross_entropy_with_logits(d_real, torch.ones_like(d_real))
            d_loss = d_loss + F.binary_cross_entropy_with_logits(d_fake, torch.zeros_like(d_fake))
            d_loss.backward()
            d_optimizer.step()
            g_optimizer.zero_grad()
            score = discriminator(fake)
            g_loss = F.binary_cross_entropy_with_logits(score, torch.ones_like(score))
            g_loss.backward()
            g_optimizer.step()
            d_scheduler.step()
            g_scheduler.step()

    return TrainLoop(
        model={"generator": generator, "discriminator": discriminator},
        optimizer=[g_optimizer, d_optimizer],
        batches=loader,
        fit=train,
    )


@fault(
    "schedules",
    "the scheduler is stepped in train_one_epoch after each image batch and again after the epoch",
    thread="pytorch/vision#1261",
    check="schedule",
)
def detection_reference(epochs=3):
    model = relu_mlp(16, 32, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    scheduler = lr_scheduler.MultiStepLR(optimizer, milestones=[16, 22], gamma=0.1)
    loader = digits(batch_size=16)

    def train_one_epoch(batches):
        model.train()
        for images, targets in batches:
            loss = F.cross_entropy(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()

    def main(batches):
        for _ in range(epochs):
            train_one_epoch(batches)
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=main, epochs=26)


@fault(
    "schedules",
    "StepLR(3, 0.1) is meant in epochs and is stepped after every batch: the rate is gone within the first epoch",
    thread="ivadomed/ivadomed#55",
    check="overfit_one_batch",
)
def gesture_detector(num_epochs=10):
    model = relu_mlp(16, 48, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-3, momentum=0.9)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)
    loader = digits(batch_size=8)

    return stepped(model, optimizer, cross_entropy_of(model), scheduler=scheduler, batches=loader, epochs=num_epochs)


@fault(
    "schedules",
    "with the schedule switched off gamma is 0 and not 1: after the first four steps the rate is 0 for good",
    thread="LINCellularNeuroscience/VAME#26",
    check="schedule",
)
def rnn_vae(optimizer_scheduler=False):
    class SequenceVAE(nn.Module):
        def __init__(self, width=8, hidden=24, latent=4):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(width, hidden), nn.Linear(latent, width)
            self.mean, self.log_var = nn.Linear(hidden, latent), nn.Linear(hidden, latent)

        def forward(self, x):
            h = torch.tanh(self.encoder(x))
            mean, log_var = self.mean(h), self.log_var(h)
            z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_var)
            return self.decoder(z), mean, log_var

    model = SequenceVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, amsgrad=True)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.2 if optimizer_scheduler else 0)
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x), batch_size=16, shuffle=True)

    def loss_of(x):
        decoded, mean, log_var = model(x)
        kl = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(1).mean()
        return F.mse_loss(decoded, x, reduction="sum") / len(x) + 0.1 * kl

    return stepped(model, optimizer, loss_of, scheduler=scheduler, batches=loader)


@fault(
    "schedules",
    "a new CosineAnnealingLR at the restart takes the rate that has just reached 0 for its base, and stays there",
    thread="pytorch/pytorch#78003",
    check="schedule",
)
def warm_restarts(cycle=4):
    model = relu_mlp(16, 32, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = digits(batch_size=16)

    class Run:
        iteration = 0
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, cycle, last_epoch=-1)

    run = Run()

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            run.scheduler.step()
            run.iteration += 1
            if run.iteration % cycle == 0:
                run.scheduler = lr_scheduler.CosineAnnealingLR(optimizer, cycle, last_epoch=-1)

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "schedules",
    "the encoder's group starts at rate 0 to be released later, and the schedule multiplies that 0 for ever",
    thread="open-mmlab/mmdetection#8210",
    check="schedule",
)
def gradual_release(epochs=4):
    body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
    model = nn.Sequential(OrderedDict(backbone=body, head=nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(
        [{"params": model.backbone.parameters(), "lr": 0.0}, {"params": model.head.parameters(), "lr": 3e-3}]
    )
    loader = digits(batch_size=16)
    total = len(loader) * epochs
    release = total // 8

    def backbone_factor(step):
        return 0.0 if step < release else 1.0 - (step - release) / (total - release)

    scheduler = lr_scheduler.LambdaLR(optimizer, [backbone_factor, lambda step: max(0.0, 1.0 - step / total)])

    return stepped(model, optimizer, cross_entropy_of(model), scheduler=scheduler, batches=loader, steps=total)


@right("schedules", "SAC: three optimizers at constant rates, no schedule at all", thread="hill-a/stable-baselines#976")
def sac():
    actor, critic = relu_mlp(4, 32, 2), relu_mlp(5, 32, 1)
    log_alpha = nn.Parameter(torch.zeros(1))
    actor_optimizer = torch.optim.Adam(actor.parameters(), 3e-4)
    critic_optimizer = torch.optim.Adam(critic.parameters(), 1e-3)
    alpha_optimizer = torch.optim.Adam([log_alpha], 3e-4)
    source = torch.Generator().manual_seed(5)
    states = torch.randn(96, 4, generator=source)
    actions = torch.rand(96, 1, generator=source) * 2 - 1
    buffer = TensorDataset(states, actions, -(states[:, :1] - actions).pow(2))

    def sample(state):
        mean, log_std = actor(state).chunk(2, 1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-3, 1).exp())
        raw = normal.rsample()
        action = torch.tanh(raw)
        return action, normal.log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6)

    def train(batches):
        for state, action, reward in batches:
            critic_loss = F.mse_loss(critic(torch.cat([state, action], 1)), reward)
            critic_optimizer.zero_grad()
            critic_loss.backward()
            critic_optimizer.step()
            new, log_prob = sample(state)
            actor_loss = (log_alpha.exp().detach() * log_prob - critic(torch.cat([state, new], 1))).mean()
            actor_optimizer.zero_grad()
            actor_loss.backward()
            actor_optimizer.step()
            alpha_loss = -(log_alpha * (log_prob.detach() - 1.0)).mean()
            alpha_optimizer.zero_grad()
            alpha_loss.backward()
            alpha_optimizer.step()

    class Temperature(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_alpha = log_alpha

    return TrainLoop(
        model={"actor": actor, "critic": critic, "alpha": Temperature()},
        optimizer=[actor_optimizer, critic_optimizer, alpha_optimizer],
        batches=DataLoader(buffer, batch_size=32, shuffle=True),
        fit=train,
    )


@right(
    "schedules",
    "from swa_start on SWALR takes over and the cosine is no longer stepped",
    thread="https://pytorch.org/docs/stable/optim.html#putting-it-all-together",
)
def swa(epochs=3, swa_start=20):
    model = relu_mlp(16, 32, 4)
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=swa_start)
    swa_scheduler = SWALR(optimizer, anneal_epochs=2, swa_lr=0.02)
    loader = digits(batch_size=16)
    epoch, train_epoch = [0], fit_with(optimizer, cross_entropy_of(model))

    def main(batches):
        for _ in range(epochs):
            train_epoch(batches)
            epoch[0] += 1
            if epoch[0] > swa_start:
                average.update_parameters(model)
                swa_scheduler.step()
            else:
                scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=main, epochs=30)


class RecordingProbe:
    def __init__(self):
        self.features = []

    def __call__(self, module, inputs, output):
        self.features.append(output.detach())

    def clear(self):
        self.features.clear()


class PerceptualLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.net.requires_grad_(False).eval()
        self.probe = RecordingProbe()
        for layer in (self.net[1], self.net[3]):
            layer.register_forward_hook(self.probe)

    def features(self, images):
        self.probe.clear()
        self.net(images)
        return list(self.probe.features)

    def forward(self, fake, real):
        pairs = zip(self.features(fake), self.features(real), strict=True)
        return sum(F.mse_loss(a, b) for a, b in pairs)


@fault(
    "terms",
    "the probe detaches the features it records, so that the perceptual term (weight 1) has no gradient",
    thread="myscience/open-genie#6",
    check="loss_components",
)
def video_tokenizer(perceptual_weight=1.0):
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.SiLU(),
        nn.ConvTranspose2d(8, 8, 2, stride=2),
        nn.SiLU(),
        nn.Conv2d(8, 1, 1),
    )
    perceptual = PerceptualLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def compute_loss(model, images):
        recon = model(images)
        return {"rec": F.mse_loss(recon, images), "perceptual": (perceptual_weight, perceptual(recon, images))}

    def loss_of(images):
        losses = compute_loss(model, images)
        return losses["rec"] + losses["perceptual"][0] * losses["perceptual"][1]

    return stepped(
        model, optimizer, loss_of, batches=lambda n: [torch.rand(6, 1, 8, 8) for _ in range(n)], parts=compute_loss
    )
