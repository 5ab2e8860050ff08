"""One gradient consumed twice: two steps of one optimizer, or one step of each of two."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data, random_data
from tests.loops.nets import GPT, ConvNet, lm_loss
from tests.loops.pairs import pair
from tests.loops.unusual.gans import ConvDiscriminator, ConvGenerator, dcgan, init_dcgan, train_dcgan

# A helper steps, and so does the loop that calls it.


def optimize(loss, optimizer):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train_stepping_again(model, optimizer, batches):
    for images, labels in batches:
        loss = F.cross_entropy(model(images), labels)
        optimize(loss, optimizer)
        optimizer.step()


def train(model, optimizer, batches):
    for images, labels in batches:
        loss = F.cross_entropy(model(images), labels)
        optimize(loss, optimizer)


def cnn(train):
    def make():
        model = ConvNet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.images(),
            fit=lambda batches: train(model, optimizer, batches),
        )

    return make


pair(
    "helper_and_loop_step",
    "step_order",
    "stepped_twice",
    faulty=cnn(train_stepping_again),
    fixed=cnn(train),
)


# A trainer with callbacks; one of them steps the optimizer a second time.


class Callback:
    def on_batch_end(self, trainer, loss):
        pass


class History(Callback):
    def __init__(self):
        self.losses = []

    def on_batch_end(self, trainer, loss):
        self.losses.append(loss.item())


class Stepper(Callback):
    def on_batch_end(self, trainer, loss):
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)


class Trainer:
    def __init__(self, model, callbacks):
        self.model, self.callbacks = model, callbacks
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def fit(self, batches):
        for batch in batches:
            loss = lm_loss(self.model, batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            for callback in self.callbacks:
                callback.on_batch_end(self, loss)


def gpt(*callbacks):
    def make():
        trainer = Trainer(GPT(), [callback() for callback in callbacks])
        return TrainLoop(model=trainer.model, optimizer=trainer.optimizer, batch=data.tokens(), fit=trainer.fit)

    return make


pair(
    "callback_steps_too",
    "step_order",
    "stepped_twice",
    where="trainer.optimizer.step()",
    faulty=gpt(History, Stepper),
    fixed=gpt(History),
)


# An optimizer for the whole network and one for its head, both stepped.


class ImageTrainer:
    def __init__(self, trunk_parameters):
        self.model = ConvNet()
        self.trunk_optimizer = torch.optim.SGD(trunk_parameters(self.model), lr=0.03, momentum=0.9)
        self.head_optimizer = torch.optim.Adam(self.model.head.parameters(), lr=3e-3)

    def fit(self, batches):
        for images, labels in batches:
            self.trunk_optimizer.zero_grad()
            self.head_optimizer.zero_grad()
            F.cross_entropy(self.model(images), labels).backward()
            self.trunk_optimizer.step()
            self.head_optimizer.step()


def image_trainer(trunk_parameters):
    def make():
        trainer = ImageTrainer(trunk_parameters)
        return TrainLoop(
            model=trainer.model,
            optimizer=[trainer.trunk_optimizer, trainer.head_optimizer],
            batch=data.images(),
            fit=trainer.fit,
        )

    return make


pair(
    "head_in_both_optimizers",
    "step_order",
    "two_optimizers",
    culprits=("head.weight", "head.bias"),
    change="self.trunk_optimizer = torch.optim.SGD(",
    faulty=image_trainer(lambda model: model.parameters()),
    fixed=image_trainer(lambda model: model.features.parameters()),
)


# Policy and value on a shared trunk, one joint loss: the trunk is in both optimizers.


class PolicyValue(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.policy = nn.Linear(32, 3)
        self.value = nn.Linear(32, 1)

    def forward(self, states):
        hidden = self.trunk(states)
        return self.policy(hidden), self.value(hidden).squeeze(-1)


def train_policy_value(model, optimizers, batches):
    for states, moves, outcomes in batches:
        logits, values = model(states)
        loss = F.cross_entropy(logits, moves) + F.mse_loss(values, outcomes)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


def policy_value(*, trunk_twice):
    def make():
        model = PolicyValue()
        policy = [*model.trunk.parameters(), *model.policy.parameters()]
        value = [*model.trunk.parameters()] if trunk_twice else []
        value += model.value.parameters()
        optimizers = [torch.optim.Adam(policy, lr=1e-2), torch.optim.Adam(value, lr=1e-2)]
        return TrainLoop(
            model=model,
            optimizer=optimizers,
            batch=data.episode(),
            fit=lambda batches: train_policy_value(model, optimizers, batches),
        )

    return make


pair(
    "shared_trunk_in_both_optimizers",
    "step_order",
    "two_optimizers",
    culprits=("trunk.0.weight", "trunk.0.bias"),
    faulty=policy_value(trunk_twice=True),
    fixed=policy_value(trunk_twice=False),
)


# The generator's optimizer is given the discriminator: both are zeroed in every iteration.


def gan_with_one_network_held() -> TrainLoop:
    generator, discriminator = ConvGenerator().apply(init_dcgan), ConvDiscriminator().apply(init_dcgan)
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    opt_g = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    return TrainLoop(
        model={"generator": generator, "discriminator": discriminator},
        optimizer=[opt_d, opt_g],
        batch=random_data.images()[0],
        fit=lambda batches: train_dcgan(generator, discriminator, opt_g, opt_d, batches),
    )


for check, cause, culprit in (
    ("step_order", "two_optimizers", "discriminator.main.0.weight"),
    ("optimizer_holds_every_param", "not_in_optimizer", "generator.main.0.weight"),
):
    pair(
        f"{cause}_in_a_gan",
        check,
        cause,
        culprits=(culprit,),
        where="opt_g.step()",
        change="opt_g = torch.optim.Adam(discriminator",
        faulty=gan_with_one_network_held,
        fixed=dcgan,
    )
