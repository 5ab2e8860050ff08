"""Training loops around small classifiers."""

# ruff: noqa: N801, N805
from __future__ import annotations

import logging
import math
import tempfile
from contextlib import nullcontext
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments

from pytest_trainloop import TrainLoop
from pytest_trainloop.adapters import fresh_accelerator, from_lightning, from_trainer
from tests.blind.refactors.cases import keeps

FEATURES, HIDDEN, CLASSES = 12, 24, 5

OUTPUT = str(Path(tempfile.gettempdir()) / "small_classifiers")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def samples(n, rows=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(rows, FEATURES, generator=generator),
            torch.randint(0, CLASSES, (rows,), generator=generator),
        )
        for _ in range(n)
    ]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(FEATURES, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        x = F.relu(self.norm(self.fc1(x)))
        return self.out(F.relu(self.fc2(x)))


def plain_loop(fit, model, optimizer, **fields):
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=samples,
        fit=lambda batches: fit(model, optimizer, batches),
        **fields,
    )


def simple_fit(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@keeps("trainers", "a script's loop becomes a Trainer class with a step of its own", thread="neural-bandits/calvera#36")
class trainer_class:
    def before():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

        def train(model, optimizer, batches):
            model.train()
            for data, target in batches:
                optimizer.zero_grad()
                output = model(data)
                loss = F.cross_entropy(output, target)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()

        return plain_loop(train, model, optimizer, scheduler=scheduler)

    def after():
        class Experiment:
            def __init__(self, max_norm=0.5):
                self.model = Net()
                self.criterion = nn.CrossEntropyLoss()
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
                self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
                self.max_norm = max_norm
                self.history = []

            def training_step(self, batch):
                inputs, labels = batch
                return self.criterion(self.model(inputs), labels)

            def optimize(self, loss):
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=self.max_norm)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad(set_to_none=True)

            def fit(self, batches):
                self.model.train()
                for batch in batches:
                    loss = self.training_step(batch)
                    self.optimize(loss)
                    self.history.append(loss.item())

        experiment = Experiment()
        return TrainLoop(
            model=experiment.model,
            optimizer=experiment.optimizer,
            scheduler=experiment.scheduler,
            batches=samples,
            fit=experiment.fit,
        )


@keeps(
    "trainers",
    "a hand-written loop is moved to Lightning",
    thread="Lightning-AI/pytorch-lightning#3314",
    renamed={name: f"net.{name}" for name in ("fc1", "norm", "fc2", "out")},
)
class lightning_module:
    def before():
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        return plain_loop(simple_fit, model, optimizer)

    def after():
        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = Net()

            def training_step(self, batch, batch_idx):
                x, y = batch
                loss = F.cross_entropy(self.net(x), y)
                self.log("train_loss", loss)
                return loss

            def configure_optimizers(self):
                return torch.optim.Adam(self.parameters(), lr=1e-2)

        trainer = lightning.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        return from_lightning(Module(), trainer, batch=samples(1)[0], batches=samples)


class Rows(Dataset):
    def __init__(self, rows=64):
        pairs = samples(rows // 8)
        self.x = torch.cat([x for x, _ in pairs])
        self.y = torch.cat([y for _, y in pairs])

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"inputs": self.x[i], "labels": self.y[i]}


def dict_samples(n):
    return [{"inputs": x, "labels": y} for x, y in samples(n)]


class NetWithLoss(Net):
    def forward(self, inputs, labels=None):
        logits = super().forward(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


@keeps(
    "trainers",
    "a hand-written loop with a linear schedule, clipping and two groups is moved to the Hugging Face Trainer",
    thread="huggingface/transformers#24088",
)
class hf_trainer:
    def before():
        model = NetWithLoss()
        decay = [p for name, p in model.named_parameters() if "norm" not in name and not name.endswith("bias")]
        rest = [p for name, p in model.named_parameters() if "norm" in name or name.endswith("bias")]
        optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2, eps=1e-8
        )

        def train(model, optimizer, batches):
            total = len(batches)
            base = [group["lr"] for group in optimizer.param_groups]
            for step, batch in enumerate(batches):
                for group, lr in zip(optimizer.param_groups, base, strict=True):
                    group["lr"] = lr * max(0.0, (total - step) / total)
                loss = model(**batch)["loss"]
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                model.zero_grad()

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batches=dict_samples,
            fit=lambda batches: train(model, optimizer, batches),
        )

    def after():
        model = NetWithLoss()
        arguments = TrainingArguments(
            output_dir=OUTPUT,
            learning_rate=1e-2,
            weight_decay=0.1,
            max_grad_norm=1.0,
            lr_scheduler_type="linear",
            per_device_train_batch_size=8,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
        return from_trainer(trainer, batches=dict_samples)


@keeps("trainers", "a hand-written loop is moved to Accelerate", thread="huggingface/accelerate#500")
class accelerate_loop:
    def before():
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.05)

        def train(model, optimizer, batches):
            for x, y in batches:
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()

        return plain_loop(train, model, optimizer)

    def after():
        accelerator = fresh_accelerator(cpu=True)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.05)
        model, optimizer = accelerator.prepare(model, optimizer)

        def train(batches):
            for x, y in batches:
                with accelerator.accumulate(model):
                    loss = F.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.3)
                    optimizer.step()
                    optimizer.zero_grad()

        return TrainLoop(model=model, optimizer=optimizer, batches=samples, fit=train)


@keeps(
    "trainers",
    "each batch is taken as two halves of equal size, whose losses are halved",
    thread="nyu-mll/jiant#980",
)
class micro_batches:
    def before():
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return plain_loop(simple_fit, model, optimizer)

    def after():
        def train(model, optimizer, batches, accumulation_steps=2):
            for x, y in batches:
                optimizer.zero_grad()
                for xs, ys in zip(x.chunk(accumulation_steps), y.chunk(accumulation_steps), strict=True):
                    loss = F.cross_entropy(model(xs), ys) / accumulation_steps
                    loss.backward()
                optimizer.step()

        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return plain_loop(train, model, optimizer)


@keeps(
    "trainers",
    "a warm-up and a cosine, chained, become one function of the step",
    thread="hpcaitech/ColossalAI#31",
)
class warmup_cosine:
    def _fit(scheduler):
        def train(model, optimizer, batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                scheduler.step()

        return train

    def before():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, end_factor=1.0, total_iters=3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[3])
        return plain_loop(warmup_cosine._fit(scheduler), model, optimizer, scheduler=scheduler)

    def after():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def factor(step, warmup=3, length=9):
            if step < warmup:
                return 0.25 + 0.75 * step / warmup
            return 0.5 * (1 + math.cos(math.pi * (step - warmup) / length))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return plain_loop(warmup_cosine._fit(scheduler), model, optimizer, scheduler=scheduler)


@keeps(
    "trainers",
    "gradients are set to None behind the step in place of zeroed before the backward pass",
    thread="MIC-DKFZ/nnUNet#1630",
)
class clearing:
    def before():
        def train(model, optimizer, batches):
            for x, y in batches:
                optimizer.zero_grad(set_to_none=False)
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        model = Net()
        return plain_loop(train, model, torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-4))

    def after():
        def train(model, optimizer, batches):
            for x, y in batches:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                for p in model.parameters():
                    p.grad = None

        model = Net()
        return plain_loop(train, model, torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-4))


@keeps("trainers", "clipping by hand in place of torch's function", thread="Lightning-AI/pytorch-lightning#10248")
class clip_by_hand:
    def _loop(clip):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

        def train(model, optimizer, batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                clip(list(model.parameters()), 0.4)
                optimizer.step()

        return plain_loop(train, model, optimizer)

    def before():
        return clip_by_hand._loop(nn.utils.clip_grad_norm_)

    def after():
        @torch.no_grad()
        def clip(parameters, max_norm):
            total = torch.cat([p.grad.flatten() for p in parameters]).norm()
            scale = max_norm / (total + 1e-6)
            if scale < 1:
                for p in parameters:
                    p.grad.mul_(scale)

        return clip_by_hand._loop(clip)


@keeps(
    "trainers",
    "mixed precision can now be asked for, and is off",
    thread="pytorch.org/tutorials/recipes/recipes/amp_recipe.html",
)
class precision_switch:
    def before():
        model = Net()
        return plain_loop(simple_fit, model, torch.optim.Adam(model.parameters(), lr=1e-2))

    def after():
        use_amp = False
        scaler = torch.amp.GradScaler("cpu", enabled=use_amp)
        context = torch.autocast("cpu", dtype=torch.bfloat16) if use_amp else nullcontext()

        def train(model, optimizer, batches):
            for x, y in batches:
                optimizer.zero_grad()
                with context, torch.autocast("cpu", enabled=use_amp):
                    loss = F.cross_entropy(model(x), y)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()

        model = Net()
        return plain_loop(train, model, torch.optim.Adam(model.parameters(), lr=1e-2))


@keeps("trainers", "the step takes a closure that computes the loss", thread="Lightning-AI/pytorch-lightning#3372")
class closure:
    def before():
        model = Net()
        return plain_loop(simple_fit, model, torch.optim.Adagrad(model.parameters(), lr=0.05))

    def after():
        def train(model, optimizer, batches):
            for x, y in batches:

                def evaluate(x=x, y=y):
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
                    return loss

                optimizer.step(evaluate)

        model = Net()
        return plain_loop(train, model, torch.optim.Adagrad(model.parameters(), lr=0.05))


@keeps(
    "trainers",
    "the model is put into a wrapper as for distributed training, and the batches come from a loader",
    thread="pytorch/pytorch#31232",
    renamed={name: f"module.{name}" for name in ("fc1", "norm", "fc2", "out")},
)
class wrapper:
    def before():
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batches=[(batch["inputs"], batch["labels"]) for batch in dict_samples(8)],
            fit=lambda batches: simple_fit(model, optimizer, batches),
        )

    def after():
        class Wrapped(nn.Module):
            def __init__(self, module):
                super().__init__()
                self.module = module

            def forward(self, *inputs, **kwargs):
                return self.module(*inputs, **kwargs)

        model = Wrapped(Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)

        def collate(rows):
            return torch.stack([r["inputs"] for r in rows]), torch.stack([r["labels"] for r in rows])

        loader = DataLoader(Rows(), batch_size=8, shuffle=False, collate_fn=collate)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batches=loader,
            fit=lambda batches: simple_fit(model, optimizer, batches),
        )


@keeps(
    "trainers",
    "two terms of the loss are backpropagated one behind the other, and the gradient adds them",
    thread="allenai/allennlp#4706",
)
class separate_terms:
    class Net(Net):
        def forward(self, x):
            hidden = F.relu(self.norm(self.fc1(x)))
            return self.out(F.relu(self.fc2(hidden))), hidden

    def before():
        def train(model, optimizer, batches):
            for x, y in batches:
                logits, hidden = model(x)
                loss = F.cross_entropy(logits, y) + 0.1 * hidden.square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        model = separate_terms.Net()
        return plain_loop(train, model, torch.optim.Adam(model.parameters(), lr=5e-3))

    def after():
        def train(model, optimizer, batches):
            for x, y in batches:
                logits, hidden = model(x)
                terms = [F.cross_entropy(logits, y), 0.1 * hidden.square().mean()]
                optimizer.zero_grad()
                for i, term in enumerate(terms):
                    term.backward(retain_graph=i + 1 < len(terms))
                optimizer.step()

        model = separate_terms.Net()
        return plain_loop(train, model, torch.optim.Adam(model.parameters(), lr=5e-3))


@keeps(
    "trainers",
    "the optimizer is split into one for the trunk and one for the head, with the same options",
    thread="kozistr/pytorch_optimizer#283",
)
class split_optimizer:
    def before():
        model = Net()
        return plain_loop(simple_fit, model, torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.02))

    def after():
        model = Net()
        trunk = [p for name, p in model.named_parameters() if not name.startswith("out")]
        optimizers = [
            torch.optim.AdamW(parameters, lr=5e-3, weight_decay=0.02) for parameters in (trunk, model.out.parameters())
        ]

        def train(model, optimizers, batches):
            for x, y in batches:
                loss = F.cross_entropy(model(x), y)
                model.zero_grad()
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()

        return plain_loop(train, model, optimizers)


@keeps(
    "trainers",
    "a gradient scaler multiplies the loss, and takes the factor out before the clipping",
    thread="pytorch.org/tutorials/recipes/recipes/amp_recipe.html",
)
class loss_scaling:
    def before():
        def train(model, optimizer, batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()

        model = Net()
        return plain_loop(train, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def after():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

        def train(model, optimizer, batches):
            for x, y in batches:
                optimizer.zero_grad()
                scaler.scale(F.cross_entropy(model(x), y)).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()

        return plain_loop(train, model, optimizer, scaler=scaler)


@keeps(
    "trainers",
    "gradients are asked for by name and given to the optimizer",
    thread="NVIDIA/apex#926",
)
class gradients_by_name:
    def before():
        model = Net()
        return plain_loop(simple_fit, model, torch.optim.NAdam(model.parameters(), lr=5e-3))

    def after():
        def train(model, optimizer, batches):
            names, parameters = zip(*model.named_parameters(), strict=True)
            for x, y in batches:
                loss = nn.functional.nll_loss(model(x).log_softmax(dim=-1), y)
                gradients = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
                for name, p in model.named_parameters():
                    p.grad = gradients[name]
                optimizer.step()

        model = Net()
        return plain_loop(train, model, torch.optim.NAdam(model.parameters(), lr=5e-3))
