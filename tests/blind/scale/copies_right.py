"""Compiled models whose names, copies and steps are those of the eager ones."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


class Net(nn.Module):
    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(9, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def images(rows: int = 8, classes: int = 4):
    return torch.randn(rows, 9), torch.randint(classes, (rows,))


def epoch(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@right(
    "copies",
    "torch.compile around the model, the optimizer over the compiled one's parameters",
    thread="google-research/flood-forecasting#263",
)
def compiled_model(compile=False):
    model = Net()
    if compile:
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=lambda bs: epoch(model, optimizer, bs))


@right("copies", "compiled in place: names stay as they are", thread="meta-pytorch/tnt#441")
def in_place(compile=False):
    model = Net()
    if compile:
        model.compile(backend="aot_eager")
    for name, p in model.named_parameters():
        if name.startswith("stem."):
            p.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return TrainLoop(
        model=model, optimizer=optimizer, batch=images(), fit=lambda bs: epoch(model, optimizer, bs), frozen=("stem.",)
    )


@right("copies", "each block is compiled by itself", thread="pytorch/pytorch#141039")
def block_by_block(compile=False):
    model = Net()
    if compile:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=lambda bs: epoch(model, optimizer, bs))


def clean(name: str) -> str:
    return name.replace("_orig_mod.", "")


@right(
    "copies",
    "the prefix is taken off wherever names matter: groups, average, checkpoint",
    thread="wandb/senpai#2899",
)
def names_cleaned(compile=False):
    model = Net()
    run = torch.compile(model, backend="aot_eager") if compile else model
    decay, rest = [], []
    for name, p in run.named_parameters():
        (decay if clean(name).endswith("weight") and not clean(name).startswith("head") else rest).append(p)
    optimizer = torch.optim.SGD([{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 0.01}], lr=0.1)
    average = {clean(n): p.detach().clone() for n, p in run.named_parameters()}

    def train(batches):
        for x, y in batches:
            pull = sum((p - average[clean(n)]).square().sum() for n, p in run.named_parameters())
            optimizer.zero_grad()
            (F.cross_entropy(run(x), y) + 0.1 * pull).backward()
            optimizer.step()
            for n, p in run.named_parameters():
                average[clean(n)].mul_(0.5).add_(p.detach(), alpha=0.5)

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=images(),
        fit=train,
        save=lambda: {
            "model": {clean(k): v.clone() for k, v in run.state_dict().items()},
            "average": dict(average),
            "optimizer": copy.deepcopy(optimizer.state_dict()),
        },
        load=lambda s: (
            model.load_state_dict(s["model"]),
            average.update(s["average"]),
            optimizer.load_state_dict(s["optimizer"]),
        ),
    )


@right(
    "copies",
    "the optimizer holds the raw model's parameters, which the compiled one shares",
    thread="mlfoundations/open_clip#639",
)
def raw_and_compiled(compile=False):
    original = Net()
    optimizer = torch.optim.AdamW(original.parameters(), lr=3e-4, weight_decay=0.2)
    model = torch.compile(original, backend="aot_eager") if compile else original

    def save(path):
        torch.save({"state_dict": original.state_dict(), "optimizer": optimizer.state_dict()}, path)

    def load(path):
        checkpoint = torch.load(path)
        original.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])

    return TrainLoop(
        model=original,
        optimizer=optimizer,
        batch=images(),
        fit=lambda bs: epoch(model, optimizer, bs),
        save=save,
        load=load,
    )


@right(
    "copies",
    "the head is replaced after compiling and before the optimizer is built: the graph is made anew",
    thread="huggingface/pytorch-image-models#2003",
)
def head_replaced(compile=False):
    model = Net(classes=100)
    run = torch.compile(model, backend="aot_eager") if compile else model
    with torch.no_grad():
        run(torch.zeros(8, 9))
    model.head = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=lambda bs: epoch(run, optimizer, bs))


@right("copies", "the loss alone is compiled", thread="the-database/traiNNer-redux#289")
def compiled_loss(compile=False):
    model = Net()

    def focal(logits, y, gamma=2.0):
        log_p = logits.log_softmax(-1).gather(1, y[:, None])[:, 0]
        return -((1 - log_p.exp()) ** gamma * log_p).mean()

    criterion = torch.compile(focal, backend="aot_eager") if compile else focal
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(batches):
        for x, y in batches:
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=train)


@right(
    "copies",
    "forward and backward are in the compiled step, and the loop only steps",
    thread="pytorch/tutorials#3026",
)
def step_compiled(compile=False, accumulate=1):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def forward_backward(x, y):
        loss = F.cross_entropy(model(x), y) / accumulate
        loss.backward()
        return loss.detach()

    run = torch.compile(forward_backward, backend="aot_eager") if compile else forward_backward

    def train(batches):
        for i, (x, y) in enumerate(batches, 1):
            run(x, y)
            if i % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=train)


@right("copies", "the optimizer's step is compiled, with a rate that is a tensor", thread="meta-pytorch/torchtune#2516")
def compiled_optimizer(compile=False):
    model = nn.Linear(9, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), capturable=False, foreach=False)
    step = torch.compile(optimizer.step, backend="aot_eager") if compile else optimizer.step

    def train(batches):
        for i, (x, y) in enumerate(batches, 1):
            optimizer.param_groups[0]["lr"].fill_(0.01 / i)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            step()

    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=train)


@right("copies", "warmed up on a copy that is thrown away", thread="huggingface/optimum-intel#1189")
def warmed_up_on_copy(compile=False):
    model = nn.Sequential(nn.Linear(9, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    run = model
    if compile:
        run = torch.compile(model, backend="aot_eager")
        spare = {k: v.clone() for k, v in model.state_dict().items()}
        run(torch.randn(8, 9, generator=torch.Generator().manual_seed(0))).sum().backward()
        model.zero_grad(set_to_none=True)
        model.load_state_dict(spare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=lambda bs: epoch(run, optimizer, bs))


@right(
    "copies",
    "batches are filled up to a fixed size, and the rows that fill them are left out of the mean",
    thread="pytorch/pytorch#188150",
)
def filled_and_masked(compile=False, size=12):
    model = Net()
    forward = torch.compile(model, backend="aot_eager", dynamic=False) if compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(batches):
        for x, y in batches:
            missing = max(0, size - len(x)) if compile else 0
            x, y = F.pad(x, (0, 0, 0, missing)), F.pad(y, (0, missing), value=-100)
            optimizer.zero_grad()
            F.cross_entropy(forward(x), y, ignore_index=-100).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=train)


@right("copies", "the teacher is a deep copy of the raw model, and not compiled", thread="facebookresearch/dino#102")
def teacher_of_raw(compile=False):
    student = Net()
    teacher = copy.deepcopy(student).requires_grad_(False)
    run = torch.compile(student, backend="aot_eager") if compile else student
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)

    def train(batches):
        for x, y in batches:
            logits = run(x)
            with torch.no_grad():
                goal = teacher(x).softmax(-1)
            loss = F.cross_entropy(logits, y) + F.cross_entropy(logits, goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for s, t in zip(run.parameters(), teacher.parameters(), strict=True):
                    t.lerp_(s, 0.1)

    return TrainLoop(
        model={"student": student, "teacher": teacher},
        optimizer=optimizer,
        batch=images(),
        fit=train,
        frozen=("teacher.",),
    )


@right(
    "copies",
    "training and evaluation through one compiled model: the mode is guarded",
    thread="pytorch/pytorch#105653",
)
def evaluated_between(compile=False):
    model = nn.Sequential(nn.Linear(9, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    run = torch.compile(model, backend="aot_eager") if compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held_out = torch.randn(8, 9)

    def validate():
        run.eval()
        with torch.no_grad():
            accuracy = run(held_out).argmax(-1).bincount(minlength=4)
        run.train()
        return accuracy

    def train(batches):
        run.train()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(run(x), y).backward()
            optimizer.step()
            validate()

    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=train, evaluate=validate)
