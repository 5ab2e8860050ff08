"""Schedules that drive another optimizer, that nobody calls, that are written over, and rates that nobody reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair


class Trainer:
    """A classifier's training: what ``configure`` gives is stepped, and ``after`` is called after each step."""

    def __init__(self, configure, after, *, between=lambda trainer: None, epochs=1):
        self.model = mlp(6, 32, 3)
        self.optimizer, self.scheduler = configure(self.model)
        self.after, self.between, self.epochs = after, between, epochs
        self.steps = 0
        self.loss = torch.tensor(0.0)

    def fit(self, batches):
        for _ in range(self.epochs):
            for x, y in batches:
                self.batch = x, y
                self.optimizer.zero_grad()
                self.loss = F.cross_entropy(self.model(x), y)
                self.loss.backward()
                self.optimizer.step()
                self.steps += 1
                self.after(self)
            self.between(self)


def trained(configure, after=lambda trainer: None, *, declared=False, **how):
    """A function that makes such a loop; ``declared``: it names its scheduler."""

    def make():
        trainer = Trainer(configure, after, **how)
        return TrainLoop(
            model=trainer.model,
            optimizer=trainer.optimizer,
            batch=data.labelled(),
            fit=trainer.fit,
            scheduler=trainer.scheduler if declared else None,
        )

    return make


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


def call_scheduler(trainer):
    trainer.scheduler.step()


# The optimizer is built a second time, once the model is on its device: the scheduler keeps the first one.


def rebuilt_after_the_scheduler(model):
    optimizer = sgd(model)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    return sgd(model.to("cpu"), weight_decay=1e-4), scheduler


def rebuilt_before_the_scheduler(model):
    optimizer = sgd(model.to("cpu"), weight_decay=1e-4)
    return optimizer, lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)


pair(
    "scheduler_of_the_first_optimizer",
    "schedule",
    "drives_another",
    culprits=("CosineAnnealingLR.step()",),
    where="trainer.scheduler.step()",
    change="scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)",
    mentions=("0.1",),
    faulty=trained(rebuilt_after_the_scheduler, call_scheduler),
    fixed=trained(rebuilt_before_the_scheduler, call_scheduler),
    quick=True,
)


# The trunk is unfrozen after a few steps, with a new optimizer for all weights; the scheduler goes on with the old one.


def unfreezing(new_schedule):
    def make():
        model = mlp(6, 32, 3)
        trunk, head = model[0], model[-1]
        trunk.requires_grad_(False)
        state = {"optimizer": torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)}
        state["scheduler"] = lr_scheduler.ExponentialLR(state["optimizer"], 0.99)

        def unfreeze():
            trunk.requires_grad_(True)
            state["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            if new_schedule:
                state["scheduler"] = lr_scheduler.ExponentialLR(state["optimizer"], 0.99)

        def fit(batches):
            for number, (x, y) in enumerate(batches):
                if number == 3:
                    unfreeze()
                state["optimizer"].zero_grad()
                F.cross_entropy(model(x), y).backward()
                state["optimizer"].step()
                state["scheduler"].step()

        return TrainLoop(model=model, batch=data.labelled(), fit=fit)

    return make


pair(
    "unfrozen_with_a_new_optimizer_and_the_old_schedule",
    "schedule",
    "drives_another",
    culprits=("ExponentialLR.step()",),
    where='state["scheduler"].step()',
    mentions=("0.05",),
    faulty=unfreezing(new_schedule=False),
    fixed=unfreezing(new_schedule=True),
)


# Two nets, and the second schedule is given the first one's optimizer: a copied line.


def adversaries(second):
    def make():
        generator, critic = mlp(4, 32, 6), mlp(6, 32, 1)
        g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
        c_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
        of = {"generator": g_optimizer, "critic": c_optimizer}
        g_scheduler = lr_scheduler.StepLR(g_optimizer, step_size=20, gamma=0.9)
        c_scheduler = lr_scheduler.StepLR(of[second], step_size=20, gamma=0.9)

        def fit(batches):
            for x, _ in batches:
                fake = generator(torch.randn(len(x), 4))
                c_optimizer.zero_grad()
                (F.softplus(-critic(x)) + F.softplus(critic(fake.detach()))).mean().backward()
                c_optimizer.step()
                g_optimizer.zero_grad()
                F.softplus(-critic(fake)).mean().backward()
                g_optimizer.step()
                g_scheduler.step()
                c_scheduler.step()

        return TrainLoop(
            model={"generator": generator, "critic": critic},
            optimizer=[g_optimizer, c_optimizer],
            batch=data.table(),
            fit=fit,
        )

    return make


pair(
    "both_schedules_on_the_generator",
    "schedule",
    "two_on_one",
    culprits=("StepLR.step()",),
    where="c_scheduler.step()",
    change="c_scheduler = lr_scheduler.StepLR",
    faulty=adversaries("generator"),
    fixed=adversaries("critic"),
    quick=True,
)


# A schedule that is built and never called, in a loop that makes all its epochs by itself.


def stepped_decay(model):
    optimizer = sgd(model)
    return optimizer, lr_scheduler.MultiStepLR(optimizer, [80, 120], gamma=0.1)


pair(
    "scheduler_that_nobody_calls",
    "schedule",
    "never_called",
    culprits=("MultiStepLR.step()",),
    where="self.optimizer.step()",
    faulty=trained(stepped_decay, epochs=2),
    fixed=trained(stepped_decay, epochs=2, between=call_scheduler),
    quick=True,
)


# The trainer calls the scheduler, and so does the callback that logs its rate.


class LogsTheRate:
    def __init__(self, steps_it):
        self.steps_it, self.seen = steps_it, []

    def after_step(self, scheduler):
        if self.steps_it:
            scheduler.step()
        self.seen.append(scheduler.get_last_lr()[0])


def with_callback(steps_it):
    def make():
        callback = LogsTheRate(steps_it)

        def after(trainer):
            trainer.scheduler.step()
            callback.after_step(trainer.scheduler)

        return trained(rebuilt_before_the_scheduler, after)()

    return make


pair(
    "trainer_and_callback_call_the_scheduler",
    "schedule",
    "called_twice",
    culprits=("CosineAnnealingLR.step()",),
    where="scheduler.step()",
    faulty=with_callback(True),
    fixed=with_callback(False),
    quick=True,
)


# The rate from the config is written into the groups at every batch, after the schedule came in.


def decayed(model):
    optimizer = sgd(model)
    return optimizer, lr_scheduler.ExponentialLR(optimizer, 0.99)


def call_and_write_back(trainer):
    trainer.scheduler.step()
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.1


pair(
    "rate_of_the_config_written_back",
    "schedule",
    "schedule_overwritten",
    culprits=("ExponentialLR.step()",),
    where='group["lr"] = 0.1',
    change='group["lr"] = 0.1',
    mentions=("0.099",),
    faulty=trained(decayed, call_and_write_back),
    fixed=trained(decayed, call_scheduler),
    quick=True,
)


# The optimizer is built inside the loop over the batches.


def built_for_each_batch(each):
    def make():
        model = mlp(6, 32, 3)

        def fit(batches):
            optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
            for x, y in batches:
                if each:
                    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        return TrainLoop(model=model, batch=data.labelled(), fit=fit)

    return make


pair(
    "adam_built_for_each_batch",
    "schedule",
    "optimizer_rebuilt",
    culprits=("Adam",),
    where="optimizer.step()",
    faulty=built_for_each_batch(each=True),
    fixed=built_for_each_batch(each=False),
    quick=True,
)


# So is the scheduler: it always makes its first step.


def scheduler_for_each_batch(each):
    def make():
        model = mlp(6, 32, 3)
        optimizer = sgd(model)

        def fit(batches):
            scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if each:
                    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
                scheduler.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "scheduler_built_for_each_batch",
    "schedule",
    "scheduler_rebuilt",
    culprits=("LambdaLR.step()",),
    where="scheduler = lr_scheduler.LambdaLR",
    faulty=scheduler_for_each_batch(each=True),
    fixed=scheduler_for_each_batch(each=False),
    quick=True,
)


# The rate is written to a key that no step reads; to the defaults, which new groups are made of; to an attribute.


def write_key(trainer):
    for group in trainer.optimizer.param_groups:
        group["learning_rate"] = 0.1 * 0.98**trainer.steps


def write_defaults(trainer):
    trainer.optimizer.defaults["lr"] = 0.1 * 0.98**trainer.steps


def write_rate(trainer):
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.1 * 0.98**trainer.steps


def by_hand(model):
    return sgd(model), None


pair(
    "rate_in_another_key",
    "schedule",
    "lr_nobody_reads",
    culprits=('group["learning_rate"]',),
    where='group["learning_rate"] =',
    mentions=('group["lr"] stays at 0.1',),
    faulty=trained(by_hand, write_key),
    fixed=trained(by_hand, write_rate),
    quick=True,
)

pair(
    "rate_in_the_defaults",
    "schedule",
    "lr_nobody_reads",
    culprits=('optimizer.defaults["lr"]',),
    faulty=trained(by_hand, write_defaults),
    fixed=trained(by_hand, write_rate),
)


# A plateau that waits for the loss to rise.


def plateau(**options):
    def configure(model):
        optimizer = sgd(model)
        return optimizer, lr_scheduler.ReduceLROnPlateau(optimizer, patience=10, **options)

    return configure


def give_loss(trainer):
    trainer.scheduler.step(trainer.loss.item())


pair(
    "plateau_that_maximizes_the_loss",
    "schedule",
    "plateau_mode",
    culprits=("mode",),
    where="trainer.scheduler.step(trainer.loss.item())",
    change="lr_scheduler.ReduceLROnPlateau(optimizer, patience=10, **options)",
    faulty=trained(plateau(mode="max"), give_loss),
    fixed=trained(plateau(mode="min"), give_loss),
    quick=True,
)


# The loss of the first step, kept in an attribute that nobody renews.


def give_first_loss(trainer):
    trainer.first = getattr(trainer, "first", trainer.loss.item())
    trainer.scheduler.step(trainer.first)


pair(
    "plateau_with_the_first_loss",
    "schedule",
    "plateau_metric_stands_still",
    culprits=("ReduceLROnPlateau.step()",),
    where="trainer.scheduler.step(trainer.first)",
    faulty=trained(plateau(), give_first_loss),
    fixed=trained(plateau(), give_loss),
    quick=True,
)


# A call that was a plateau's, kept when the scheduler was changed.


def in_steps(model):
    optimizer = sgd(model)
    return optimizer, lr_scheduler.StepLR(optimizer, 100, 0.5)


pair(
    "loss_given_as_the_epoch",
    "schedule",
    "metric_as_epoch",
    culprits=("StepLR.step()",),
    where="trainer.scheduler.step(trainer.loss.item())",
    faulty=trained(in_steps, give_loss),
    fixed=trained(in_steps, call_scheduler),
    quick=True,
)


# A lower bound from a config with a larger rate.


def annealed(eta_min):
    def configure(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        return optimizer, lr_scheduler.CosineAnnealingLR(optimizer, T_max=500, eta_min=eta_min)

    return configure


pair(
    "cosine_that_rises",
    "schedule",
    "bound_above_lr",
    culprits=("eta_min",),
    where="trainer.scheduler.step()",
    change="eta_min=eta_min",
    mentions=("0.005", "0.002"),
    faulty=trained(annealed(5e-3), call_scheduler),
    fixed=trained(annealed(5e-5), call_scheduler),
    quick=True,
)


# Rates written by hand into the first group only: the second keeps its placeholder of 0, or the rate it was built with.


def two_groups(rate):
    def configure(model):
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 1e-2}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=rate), None

    return configure


def write_first_group(trainer):
    trainer.optimizer.param_groups[0]["lr"] = 3e-3 * 0.99**trainer.steps


def write_all_groups(trainer):
    for group in trainer.optimizer.param_groups:
        group["lr"] = 3e-3 * 0.99**trainer.steps


def write_zipped(trainer):
    for group, lr in zip(trainer.optimizer.param_groups, [3e-3 * 0.99**trainer.steps]):  # noqa: B905
        group["lr"] = lr


pair(
    "zip_ends_with_the_shorter_list_of_rates",
    "schedule",
    "one_group_scheduled",
    culprits=("0.bias",),
    faulty=trained(two_groups(3e-3), write_zipped),
    fixed=trained(two_groups(3e-3), write_all_groups),
)
pair(
    "second_group_keeps_its_placeholder",
    "schedule",
    "group_at_zero",
    culprits=("0.bias",),
    level="advice",
    where='trainer.optimizer.param_groups[0]["lr"]',
    faulty=trained(two_groups(0.0), write_first_group),
    fixed=trained(two_groups(3e-3), write_all_groups),
    quick=True,
)

pair(
    "second_group_keeps_its_rate",
    "schedule",
    "one_group_scheduled",
    culprits=("0.bias",),
    where='trainer.optimizer.param_groups[0]["lr"]',
    mentions=("0.003",),
    faulty=trained(two_groups(3e-3), write_first_group),
    fixed=trained(two_groups(3e-3), write_all_groups),
    quick=True,
)


# The head learns ten times faster than the trunk, until the warm-up writes one rate into all groups.


def fast_head(model):
    groups = [{"params": model[0].parameters(), "lr": 3e-3}, {"params": model[-1].parameters(), "lr": 3e-2}]
    return torch.optim.AdamW(groups), None


def warm_up_of_all(trainer):
    for group in trainer.optimizer.param_groups:
        group["lr"] = 3e-3 * min(1.0, (trainer.steps + 5) / 10)


def warm_up_of_each(trainer):
    for group in trainer.optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = group["initial_lr"] * min(1.0, (trainer.steps + 5) / 10)


pair(
    "warm_up_writes_one_rate_into_all_groups",
    "schedule",
    "group_lrs_made_equal",
    level="advice",
    culprits=("2.weight",),
    where='group["lr"] = 3e-3 * min(',
    mentions=("0.003 and 0.03",),
    faulty=trained(fast_head, warm_up_of_all),
    fixed=trained(fast_head, warm_up_of_each),
    quick=True,
)


# A warm-up that divides whole numbers, of six steps.


def warmed_up(factor):
    def configure(model):
        optimizer = sgd(model)
        return optimizer, lr_scheduler.LambdaLR(optimizer, lambda step: min(1, factor(step)))

    return configure


pair(
    "short_warm_up_in_whole_numbers",
    "schedule",
    "zero_for_steps",
    culprits=("lr",),
    level="advice",
    change="return optimizer, lr_scheduler.LambdaLR",
    faulty=trained(warmed_up(lambda step: step // 6), call_scheduler),
    fixed=trained(warmed_up(lambda step: (step + 1) / 6), call_scheduler),
    quick=True,
)


# The head joins the optimizer after the scheduler was built.


def head_joins(late):
    def configure(model):
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
        head = {"params": list(model[-1].parameters())}
        if not late:
            optimizer.add_param_group(head)
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
        if late:
            optimizer.add_param_group(head)
        return optimizer, scheduler

    return configure


pair(
    "head_added_after_the_scheduler",
    "schedule",
    "group_without_schedule",
    culprits=("2.weight",),
    change="scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)",
    faulty=trained(head_joins(late=True), call_scheduler),
    fixed=trained(head_joins(late=False), call_scheduler),
    quick=True,
)


# A copied line: the critic's schedule is not called, and the generator's twice.


def copied_call(second):
    def make():
        generator, critic = mlp(4, 32, 6), mlp(6, 32, 1)
        g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
        c_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
        g_scheduler = lr_scheduler.ExponentialLR(g_optimizer, 0.99)
        c_scheduler = lr_scheduler.ExponentialLR(c_optimizer, 0.99)
        last = {"generator": g_scheduler, "critic": c_scheduler}[second]

        def fit(batches):
            for x, _ in batches:
                fake = generator(torch.randn(len(x), 4))
                c_optimizer.zero_grad()
                (F.softplus(-critic(x)) + F.softplus(critic(fake.detach()))).mean().backward()
                c_optimizer.step()
                g_optimizer.zero_grad()
                F.softplus(-critic(fake)).mean().backward()
                g_optimizer.step()
                g_scheduler.step()
                last.step()

        return TrainLoop(
            model={"generator": generator, "critic": critic},
            optimizer=[g_optimizer, c_optimizer],
            scheduler=[g_scheduler, c_scheduler],
            batch=data.table(),
            fit=fit,
        )

    return make


pair(
    "schedule_of_the_generator_called_for_the_critic",
    "schedule",
    "never_called",
    culprits=("ExponentialLR.step()",),
    where="last.step()",
    faulty=copied_call("generator"),
    fixed=copied_call("critic"),
)


# A schedule for the whole training, built in the function of one epoch.


def one_cycle_in_the_epoch(each):
    def make():
        model = mlp(6, 32, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

        def fit(batches):
            batches = list(batches)
            for epoch in range(3):
                if each or epoch == 0:
                    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=3 * len(batches))
                for x, y in batches:
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    scheduler.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "one_cycle_built_in_each_epoch",
    "schedule",
    "scheduler_rebuilt",
    culprits=("OneCycleLR.step()",),
    faulty=one_cycle_in_the_epoch(each=True),
    fixed=one_cycle_in_the_epoch(each=False),
)


# A line lowers the rate, and the lambda puts it back before the next step.


def write_and_call(trainer):
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.05 * 0.98**trainer.steps
    trainer.scheduler.step()


def constant_lambda(model):
    optimizer = sgd(model)
    return optimizer, lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))


pair(
    "decay_by_hand_before_the_lambda",
    "schedule",
    "written_lr_lost",
    culprits=("LambdaLR.step()",),
    where='group["lr"] =',
    change='group["lr"] =',
    faulty=trained(constant_lambda, write_and_call),
    fixed=trained(constant_lambda, call_scheduler),
    quick=True,
)


# One lambda for each group, made in a comprehension: all of them see the last decay.


def decays(bound):
    def configure(model):
        optimizer = torch.optim.SGD(
            [{"params": model[0].parameters()}, {"params": model[-1].parameters()}], lr=0.1, momentum=0.9
        )
        if bound:
            factors = [lambda step, decay=decay: decay**step for decay in (0.99, 0.999)]
        else:
            factors = [lambda step: decay**step for decay in (0.99, 0.999)]  # noqa: B023
        return optimizer, lr_scheduler.LambdaLR(optimizer, factors)

    return configure


pair(
    "lambdas_that_see_the_last_decay",
    "schedule",
    "lambdas_share_a_variable",
    culprits=("decay",),
    change="factors = [lambda step: decay**step for decay in (0.99, 0.999)]",
    faulty=trained(decays(bound=False), call_scheduler),
    fixed=trained(decays(bound=True), call_scheduler),
    quick=True,
)
