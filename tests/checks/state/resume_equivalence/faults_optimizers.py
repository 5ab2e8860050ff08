"""Checkpoints that lose what the optimizer, its schedule or its scaler knew."""

from __future__ import annotations

import functools
import itertools

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import TwoTower, contrast, mlp
from tests.loops.pairs import pair


def classifier(model, optimizer, after=lambda: None):
    def fit(batches):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            after()

    return fit


# Only the weights are kept.


def with_moments(kept):
    def make():
        model = mlp(6, 16, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

        def save():
            state = {"model": model.state_dict()}
            return {**state, "optimizer": optimizer.state_dict()} if kept else state

        def load(state):
            model.load_state_dict(state["model"])
            if "optimizer" in state:
                optimizer.load_state_dict(state["optimizer"])

        fit = classifier(model, optimizer)
        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit, save=save, load=load)

    return make


pair(
    "moments_not_saved",
    "resume_equivalence",
    "optimizer_state_lost",
    quick=True,
    faulty=with_moments(kept=False),
    fixed=with_moments(kept=True),
)


# Of two optimizers the second one is forgotten.


class Gan:
    def __init__(self, both):
        self.both = both
        self.generator, self.critic = mlp(4, 12, 2), mlp(2, 12, 1)
        self.optim_g = torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        self.optim_d = torch.optim.Adam(self.critic.parameters(), lr=2e-3, betas=(0.5, 0.999))

    def fit(self, batches):
        for real in batches:
            noise = torch.randn(len(real), 4)
            fake = self.generator(noise)
            self.optim_d.zero_grad()
            (F.softplus(-self.critic(real)) + F.softplus(self.critic(fake.detach()))).mean().backward()
            self.optim_d.step()
            self.optim_g.zero_grad()
            F.softplus(-self.critic(fake)).mean().backward()
            self.optim_g.step()

    def save(self, path):
        torch.save(
            {
                "G": self.generator.state_dict(),
                "D": self.critic.state_dict(),
                "optim_G": self.optim_g.state_dict(),
                "optim_D": self.optim_d.state_dict(),
                "rng": torch.get_rng_state(),
            },
            path,
        )

    def load(self, path):
        state = torch.load(path, weights_only=True)
        self.generator.load_state_dict(state["G"])
        self.critic.load_state_dict(state["D"])
        self.optim_g.load_state_dict(state["optim_G"])
        if self.both:
            self.optim_d.load_state_dict(state["optim_D"])
        torch.set_rng_state(state["rng"])


def gan(both):
    def make():
        trainer = Gan(both)
        return TrainLoop(
            model={"G": trainer.generator, "D": trainer.critic},
            optimizer=[trainer.optim_g, trainer.optim_d],
            batch=data.ring(),
            fit=trainer.fit,
            save=trainer.save,
            load=trainer.load,
        )

    return make


pair(
    "critics_optimizer_forgotten",
    "resume_equivalence",
    "optimizer_state_lost",
    faulty=gan(both=False),
    fixed=gan(both=True),
)


# The parameters are put into the new optimizer in another order; the state is matched by order alone.


def towers(order):
    def make():
        model = TwoTower(left=8, right=8)
        run = {"optimizer": torch.optim.Adam(list(model.parameters()), lr=5e-3)}

        def fit(batches):
            for left, right in batches:
                run["optimizer"].zero_grad()
                contrast(model(left, right)).backward()
                run["optimizer"].step()

        def load(state):
            model.load_state_dict(state["model"])
            run["optimizer"] = torch.optim.Adam(order(list(model.parameters())), lr=5e-3)
            run["optimizer"].load_state_dict(state["optimizer"])

        return TrainLoop(
            model=model,
            optimizer=run["optimizer"],
            batch=data.views(left=8, right=8),
            fit=fit,
            save=lambda: {"model": model.state_dict(), "optimizer": run["optimizer"].state_dict()},
            load=load,
        )

    return make


pair(
    "moments_of_the_other_tower",
    "resume_equivalence",
    "optimizer_state_swapped",
    quick=True,
    faulty=towers(lambda parameters: [*parameters[len(parameters) // 2 :], *parameters[: len(parameters) // 2]]),
    fixed=towers(lambda parameters: parameters),
)


# A warm-up begins anew.


def warm_up(kept):
    def make():
        model = mlp(6, 16, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))

        def save():
            return {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }

        def load(state):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            if kept:
                scheduler.load_state_dict(state["scheduler"])

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            batch=data.labelled(),
            fit=classifier(model, optimizer, scheduler.step),
            save=save,
            load=load,
        )

    return make


pair(
    "warm_up_begins_anew",
    "resume_equivalence",
    "scheduler_restarts",
    quick=True,
    faulty=warm_up(kept=False),
    fixed=warm_up(kept=True),
)


# A schedule that reads its initial rate where the checkpoint has put the decayed one.


def decay(schedule_first):
    def make():
        model = mlp(6, 16, 3)
        run = {"optimizer": torch.optim.AdamW(model.parameters(), lr=4e-3)}

        def schedule():
            initial = run["optimizer"].param_groups[0]["lr"]
            factor = functools.partial(lambda step, lr: (1e-3 + (lr - 1e-3) * 0.9**step) / 4e-3, lr=initial)
            return torch.optim.lr_scheduler.LambdaLR(run["optimizer"], factor)

        run["scheduler"] = schedule()

        def load(state):
            model.load_state_dict(state["model"])
            if not schedule_first:
                run["optimizer"].load_state_dict(state["optimizer"])
                run["scheduler"] = schedule()
            run["optimizer"].load_state_dict(state["optimizer"])
            run["scheduler"].load_state_dict(state["scheduler"])

        return TrainLoop(
            model=model,
            optimizer=run["optimizer"],
            batch=data.labelled(),
            fit=lambda batches: classifier(model, run["optimizer"], run["scheduler"].step)(batches),
            save=lambda: {"model": model.state_dict(), **{name: part.state_dict() for name, part in run.items()}},
            load=load,
        )

    return make


pair(
    "decayed_rate_for_the_initial_one",
    "resume_equivalence",
    "lr_lost",
    mentions=("decayed",),
    faulty=decay(schedule_first=False),
    fixed=decay(schedule_first=True),
)


# A schedule that is flat for a long while: no step of the test shows that its count is lost.


def milestones(kept):
    def make():
        model = mlp(6, 16, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[300, 800])

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad(set_to_none=True)
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                schedule.step()

        def save(checkpoint_dir):
            torch.save(model.state_dict(), checkpoint_dir / "model.pt")
            torch.save(optimizer.state_dict(), checkpoint_dir / "optimizer.pt")
            torch.save(schedule.state_dict(), checkpoint_dir / "schedule.pt")

        def load(checkpoint_dir):
            model.load_state_dict(torch.load(checkpoint_dir / "model.pt"))
            optimizer.load_state_dict(torch.load(checkpoint_dir / "optimizer.pt"))
            if kept:
                schedule.load_state_dict(torch.load(checkpoint_dir / "schedule.pt"))

        return TrainLoop(
            model=model, optimizer=optimizer, scheduler=schedule, batch=data.table(), fit=fit, save=save, load=load
        )

    return make


pair(
    "milestones_counted_from_zero",
    "resume_equivalence",
    "scheduler_restarts",
    faulty=milestones(kept=False),
    fixed=milestones(kept=True),
)


# A rate that the loop lowers by hand, and a new optimizer that begins with the first one.


class Decaying:
    def __init__(self, keeps_rate):
        self.keeps_rate = keeps_rate
        self.model = mlp(6, 16, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2)

    def fit(self, batches):
        for x, y in batches:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.7

    def save(self):
        state = {"weights": self.model.state_dict()}
        if self.keeps_rate:
            state["lr"] = self.optimizer.param_groups[0]["lr"]
        return state

    def load(self, state):
        self.model.load_state_dict(state["weights"])
        for group in self.optimizer.param_groups:
            group["lr"] = state.get("lr", group["lr"])


def decaying(keeps_rate):
    def make():
        trainer = Decaying(keeps_rate)
        return TrainLoop(
            model=trainer.model,
            optimizer=trainer.optimizer,
            batch=data.labelled(),
            fit=trainer.fit,
            save=trainer.save,
            load=trainer.load,
        )

    return make


pair(
    "rate_lowered_by_hand_lost",
    "resume_equivalence",
    "lr_lost",
    quick=True,
    faulty=decaying(keeps_rate=False),
    fixed=decaying(keeps_rate=True),
)


# The scaler is built anew: its scale falls back to 65536.


def scaled(kept):
    def make():
        model = mlp(6, 16, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = F.mse_loss(model(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()

        def save():
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}

        def load(state):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            if kept:
                scaler.load_state_dict(state["scaler"])

        return TrainLoop(
            model=model, optimizer=optimizer, scaler=scaler, batch=data.table(), fit=fit, save=save, load=load
        )

    return make


pair(
    "scaler_begins_anew",
    "resume_equivalence",
    "scaler_lost",
    quick=True,
    faulty=scaled(kept=False),
    fixed=scaled(kept=True),
)


# Two groups, decayed and not, filled by walking a set of names: in the fixed order and in the other one.


def grouped(reverse):
    def make():
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        weights = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() == 1]
        run = {}

        def build(backwards):
            chosen = list(reversed(weights[:2])) + weights[2:] if backwards else weights
            groups = [{"params": chosen, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
            run["optimizer"] = torch.optim.AdamW(groups, lr=5e-3)

        build(backwards=False)
        counter = itertools.count()

        def fit(batches):
            for x, y in batches:
                run["optimizer"].zero_grad()
                F.cross_entropy(model(x), y).backward()
                run["optimizer"].step()
                next(counter)

        def load(state):
            model.load_state_dict(state["model"])
            build(backwards=reverse)
            run["optimizer"].load_state_dict(state["optimizer"])

        return TrainLoop(
            model=model,
            optimizer=run["optimizer"],
            batch=data.labelled(),
            fit=fit,
            save=lambda: {"model": model.state_dict(), "optimizer": run["optimizer"].state_dict()},
            load=load,
        )

    return make


pair(
    "groups_walked_in_another_order",
    "resume_equivalence",
    "optimizer_state_swapped",
    faulty=grouped(reverse=True),
    fixed=grouped(reverse=False),
)
